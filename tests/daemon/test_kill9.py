"""kill -9 of the real daemon: the judge of line R6 finds what it must, and a few lives of it.

The volume is in the line itself: `python -m tests.proof run --line R6`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entresol_proto.status import Status
from tests.daemon.daemon_lab import seed_of
from tests.daemon.oracle_lab import MISS, WRONG, Journal, Judge
from tests.proof.line import Size, Slice
from tests.proof.lines import kill9

OK, LOST, BUSY = int(Status.OK), int(Status.DISCONNECTED), int(Status.BUSY)
NOT_THERE = int(Status.MISS)


@pytest.mark.daemon
@pytest.mark.timeout(600)
@pytest.mark.parametrize("evicting", [False, True], ids=["roomy", "evicting"])
def test_a_few_lives(tmp_path: Path, evicting: bool) -> None:
    seed = seed_of("kill9") // kill9.SLICE_UNITS * kill9.SLICE_UNITS * kill9.EVICTING_EVERY
    seed += kill9.SLICE_UNITS * evicting
    tally = kill9.run(Slice(seed, 3, Size.COMMIT, tmp_path))
    print(f"kill9: seed {seed}, figures {tally.figures}")
    assert tally.clean, tally.findings
    assert tally.figures["durable_acks"] > 0
    assert tally.figures["answers_judged"] > 0


def put(ack: str, version: int, status: int | None) -> list[list[Any]]:
    lines: list[list[Any]] = [[0, "put", "dev", ack, {"7": version}]]
    if status is not None:
        lines.append([0, "put_answered", "dev", ack, {"7": version}, {"7": status}])
    return lines


def saw(version: int, status: int = OK, when: str = "restart") -> list[list[Any]]:
    return [[0, "saw", when, "dev", {"7": version}, {"7": status}]]


def forget(complete: bool | None) -> list[list[Any]]:
    lines: list[list[Any]] = [[0, "forget", "dev", [7]]]
    if complete is not None:
        lines.append([0, "forgotten", "dev", [7], complete])
    return lines


STORED = put("durable", 1, OK)
GONE = saw(MISS, NOT_THERE)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (STORED + saw(1), ""),
        (STORED + GONE, "durable block is lost"),
        (STORED + saw(MISS, NOT_THERE, "load"), "durable block is lost"),
        (STORED + saw(MISS, BUSY, "load"), ""),
        (STORED + saw(MISS, BUSY), "busy with nothing wrong"),
        (STORED + saw(WRONG), "wrong bytes"),
        (STORED + saw(2), "version 2 came back"),
        (put("accepted", 1, OK) + GONE, ""),
        (put("durable", 1, None) + GONE, ""),
        (put("durable", 1, None) + saw(1), ""),
        (put("durable", 1, None) + saw(1) + GONE, "durable block is lost"),
        (put("durable", 1, LOST) + saw(1), ""),
        (put("durable", 1, BUSY) + saw(1), "version 1 came back"),
        (put("accepted", 1, OK) + put("durable", 2, int(Status.EXISTS)) + GONE, "is lost"),
        (STORED + forget(True) + GONE, ""),
        (STORED + forget(True) + saw(1), "version 1 came back"),
        (STORED + forget(False) + saw(1), ""),
        (STORED + forget(None) + GONE, ""),
        (STORED + forget(None) + GONE + saw(1), "version 1 came back"),
        ([[0, "add", "a"], [0, "added", "a", True], [0, "tenants", {}]], "a is gone"),
        ([[0, "add", "a"], [0, "tenants", {}]], ""),
        ([[0, "erase", "a"], [0, "erased", "a", True], [0, "tenants", {"a": 1}]], "a is back"),
        ([[0, "erase", "dev"], [0, "tenants", {}], *saw(1)], "version 1 came back"),
        (
            [[0, "rotate", "a"], [0, "rotated", "a", 3], [0, "tenants", {"a": 2}]],
            "key version 3 of a was lost",
        ),
    ],
)  # fmt: skip
def test_the_judge(lines: list[list[Any]], found: str) -> None:
    judge = Judge()
    judge.feed(lines)
    assert bool(judge.findings) == bool(found), judge.findings
    assert all(found in text for text in judge.findings)
    assert bool(judge.wrong or judge.lost or judge.findings) == bool(found)


def test_a_journal_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, judge = Journal(path), Judge(evicts=True)
    for _, *words in STORED:
        journal.note(*words)
    judge.read(path)
    assert judge.durable == 1
    journal.note("saw", "restart", "dev", {7: MISS}, {7: NOT_THERE})
    with open(path, "a") as file:
        file.write('[1, "saw", "rest')  # the writer was killed in the middle
    judge.read(path)
    judge.read(path)
    assert (judge.checked, judge.findings) == (1, [])  # it may have been evicted
    journal.close()
