"""Crash states, in small: a sample of what line R3 of the proof suite enumerates in full.

See `tests/crashlab.py` and `tests/keycrashlab.py` for how, `tests/proof/lines/crash_states.py` for
how many.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.keycrashlab import FileOp, FileWreck
from tests.proof.lines import crash_states

EVERY = {"keys": 25, "twice": 3, "format": 1}


@pytest.mark.parametrize("kind", sorted(set(crash_states.KINDS)))
def test_a_sample_of_crash_states_recovers(kind: str, tmp_path: Path) -> None:
    verdict = crash_states.one_life(kind, 3, tmp_path, every=EVERY.get(kind, 12))
    print(f"kind={kind} images={verdict.images} blocks={verdict.blocks} wrong=0 lost=0")
    assert verdict.bad == 0, verdict.notes
    assert verdict.images == verdict.survived > 20


def test_an_enumeration_notices_a_lost_flush() -> None:
    crash_states.canary()


def test_the_file_model_loses_what_was_not_synced() -> None:
    """Names until their folder is synced, bytes until they are, and forgets nothing by unlink."""
    wreck = FileWreck()
    wreck.take(FileOp("create", path="a.tmp", inode=0))
    wreck.take(FileOp("write", inode=0, data=b"old"))
    rng = random.Random(1)
    assert {frozenset(s.named.items()) for s in wreck.states(rng, 0)} == {
        frozenset(), frozenset({("a.tmp", b"old")})
    }  # fmt: skip
    wreck.take(FileOp("fsync", inode=0))
    wreck.take(FileOp("rename", path="a.tmp", other="a"))
    wreck.take(FileOp("syncdir", path="."))
    assert [s.named for s in wreck.states(rng, 5)] == [{"a": b"old"}]
    wreck.take(FileOp("unlink", path="a"))
    wreck.take(FileOp("syncdir", path="."))
    (state,) = wreck.states(rng, 5)
    assert state.named == {}
    assert state.medium == [b"old"]
