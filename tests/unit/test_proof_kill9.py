"""R6: an eviction is no excuse for a lost block before the flash was full."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entresol_proto.status import Status
from tests.daemon.oracle_lab import Judge
from tests.proof.line import Tally
from tests.proof.lines import kill9

SAID = "ts=1 event=evicted segment=3 blocks=7 reason=over_share\n"
PUT = ["put", "dev", "durable", {"5": 1, "0": 2}]  # of 200 KiB and of 16 bytes
ANSWER = ["put_answered", "dev", "durable", {"5": 1, "0": 2}]


def journal(folder: Path, *lines: list[Any]) -> Path:
    path = folder / "journal.jsonl"
    path.write_text("".join(json.dumps([1, *line]) + "\n" for line in lines) + '[2, "pu')
    return path


def test_what_was_written_is_known_from_outside(tmp_path: Path) -> None:
    one, other = 51 * 4_096, 4_096
    assert kill9.written_bytes(journal(tmp_path, PUT)) == one + other
    stored = {"5": int(Status.OK), "0": int(Status.EXISTS)}
    assert kill9.written_bytes(journal(tmp_path, PUT, [*ANSWER, stored])) == one


@pytest.mark.parametrize("full", [False, True])
def test_an_eviction_is_excused_only_where_the_flash_was_full(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge()
    lab: Any = SimpleNamespace(
        judge=judge, new_log=lambda: SAID, journal=journal(tmp_path, PUT), restarts_ms=[1.0]
    )
    monkeypatch.setattr(kill9, "ROOMY_BYTES", kill9.LEFT_PER_LIFE_BYTES + (1000 if full else 1e9))
    tally = Tally()
    kill9._look_at_log(lab, tally, 7)
    assert judge.evicts is full
    texts = [] if full else ["event=evicted segment=3 blocks=7 after"]
    assert [finding.text[:38] for finding in tally.findings] == texts
