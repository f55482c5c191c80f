"""Which records live: the vectorised answer is the one that the definition gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_daemon.flash import resolve as resolving
from entresol_daemon.flash.resolve import resolve
from entresol_daemon.flash.segment import ROW, RecordKind
from entresol_daemon.flash.tombstones import (
    TOMBSTONE_BYTES,
    Tombstone,
    TombstoneKind,
    decode_tombstones,
    encode_tombstones,
    joined,
    listed,
)

MULTIPLIERS = np.array([3, 5, 7, 9], np.uint64)
CROWDED = np.array([1, 1, 1, 1], np.uint64)  # different names, the same mix
SPACES = [n.to_bytes(8, "little") + m.to_bytes(8, "little") for n, m in ((1, 2), (2, 1), (5, 5))]
KEYS = [n.to_bytes(8, "little") + m.to_bytes(8, "little") for n, m in ((1, 2), (2, 1), (9, 4))]

names = st.tuples(st.sampled_from(SPACES), st.sampled_from(KEYS))
records = st.lists(st.tuples(names, st.integers(0, 3)), max_size=12)
removals = st.lists(
    st.tuples(st.sampled_from(TombstoneKind), names, st.integers(0, 5)), max_size=12
)


def by_definition(
    rows: list[tuple[bytes, bytes, int, int]], tombstones: list[Tombstone]
) -> tuple[set[int], set[int], list[int]]:
    """Lsns that live, segments with dead copies that no tombstone names, and lsns of such copies
    that have a newer one."""
    alive: set[int] = set()
    shadowed: set[int] = set()
    older: list[int] = []
    for space, key, lsn, segment in rows:
        newest = max(other[2] for other in rows if other[:2] == (space, key))
        own = [
            t
            for t in tombstones
            if t.lsn > lsn
            and t.namespace_id == space
            and (t.kind is TombstoneKind.NAMESPACE or t.wire_key == key)
        ]
        if newest == lsn and not own:
            alive.add(lsn)
        elif not any(
            t.kind is TombstoneKind.NAMESPACE or t.cover == sequence_of(segment) for t in own
        ):
            shadowed.add(segment)
            if newest != lsn:
                older.append(lsn)
    return alive, shadowed, older


def sequence_of(segment: int) -> int:
    return segment + 1


@pytest.mark.parametrize("multipliers", [MULTIPLIERS, CROWDED])
@settings(max_examples=400)
@given(records, removals, st.randoms(use_true_random=False))
def test_it_is_what_the_definition_says(
    multipliers: np.ndarray,
    made: list[tuple[tuple[bytes, bytes], int]],
    told: list[tuple[TombstoneKind, tuple[bytes, bytes], int]],
    rng: object,
) -> None:
    lsns = list(range(1, len(made) + len(told) + 1))
    rng.shuffle(lsns)  # type: ignore[attr-defined]
    rows = [(*name, lsn, segment) for (name, segment), lsn in zip(made, lsns, strict=False)]
    tombstones = [
        Tombstone(kind, *name, lsn, cover)
        for (kind, name, cover), lsn in zip(told, lsns[len(made) :], strict=True)
    ]
    table = np.zeros(len(rows), ROW)
    for n, (space, key, lsn, _) in enumerate(rows):
        table[n]["ns0"], table[n]["ns1"] = np.frombuffer(space, "<u8")
        table[n]["key0"], table[n]["key1"] = np.frombuffer(key, "<u8")
        table[n]["lsn"], table[n]["kind"] = lsn, RecordKind.BLOCK
    segments = np.array([segment for *_, segment in rows], np.uint32)
    sequences = np.array([sequence_of(segment) for *_, segment in rows], np.uint64)
    if not rows:
        return
    found = resolve(
        table, segments, sequences, decode_tombstones(encode_tombstones(tombstones)), multipliers
    )
    alive, shadowed, older = by_definition(rows, tombstones)
    assert table["lsn"][found.alive].tolist() == sorted(alive)
    assert set(found.shadowed) == shadowed
    assert [rows[row][2] for row in found.older] == older


def test_many_removals_of_a_block_with_many_copies_come_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolving, "PAIRS_AT_ONCE", 7)
    table = np.zeros(20, ROW)
    table["lsn"] = np.arange(1, 21)
    tombstones = [
        Tombstone(TombstoneKind.BLOCK, bytes(16), bytes(16), 2 * n + 1, 1) for n in range(10)
    ]
    rows = decode_tombstones(encode_tombstones(tombstones))
    ones = np.ones(20, np.uint64)
    found = resolve(table, ones.astype(np.uint32), ones, rows, MULTIPLIERS)
    assert table["lsn"][found.alive].tolist() == [20]
    assert found.duplicates == 19


def test_a_block_put_and_removed_again_and_again_takes_no_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each removal was compared with each copy: 30,000 of both kept an opening for 100 s."""
    count, compared, pairs = 3000, 0, resolving._Names.pairs

    def counted(self: Any, asked: Any) -> Any:
        nonlocal compared
        for one, row in pairs(self, asked):
            compared += len(row)
            yield one, row

    monkeypatch.setattr(resolving._Names, "pairs", counted)
    table = np.zeros(count, ROW)
    table["lsn"] = np.arange(count) * 2 + 1
    segment = (np.arange(count) // 100).astype(np.uint32)
    sequence = segment.astype(np.uint64) + 1
    tombstones = [
        Tombstone(TombstoneKind.BLOCK, bytes(16), bytes(16), 2 * n + 2, int(sequence[n]))
        for n in range(count)
    ]
    rows = decode_tombstones(encode_tombstones(tombstones))
    found = resolve(table, segment, sequence, rows, MULTIPLIERS)
    assert [*found.alive, *found.shadowed, *found.older] == []
    assert compared <= 2 * count


def test_removals_take_their_bytes_and_no_more() -> None:
    """There may be as many as blocks were ever removed: an object each would be a kilobyte."""
    one = Tombstone(TombstoneKind.NAMESPACE, b"n" * 16, b"k" * 16, 2**64 - 1, 2**63)
    raw = bytearray(encode_tombstones([one] * 1000))
    part = decode_tombstones(raw)
    raw[:] = bytes(len(raw))
    whole = joined([part, part])
    assert whole.nbytes == 2000 * TOMBSTONE_BYTES
    assert listed(whole) == [one] * 2000
    assert listed(joined([])) == []
