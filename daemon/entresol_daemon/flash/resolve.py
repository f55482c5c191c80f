"""Which of the records found on flash are alive: newest copies that no tombstone covers. Pure.

Invariant: the answer depends only on lsn order, never on the order in which segments were read.
Vectorised where there may be millions; only duplicates and tombstones go through Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entresol_daemon.flash.index import U32, U64, Slots
from entresol_daemon.flash.segment import Rows, Tombstone, TombstoneKind

Name = tuple[int, int, int, int]  # namespace id and key as four integers


@dataclass(frozen=True, slots=True)
class Resolved:
    """`alive`: row numbers in lsn order. `shadowed`: segments with dead copies that no tombstone
    names by their sequence."""

    alive: npt.NDArray[np.int64]
    duplicates: int
    shadowed: list[int]


def _split(raw: bytes) -> tuple[int, int]:
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


class _Names:
    """Rows by name: sorted by a 64-bit mix of namespace and key, compared exactly."""

    def __init__(self, rows: Rows, multipliers: npt.NDArray[np.uint64]) -> None:
        self.columns: list[U64] = [
            np.ascontiguousarray(rows[name]) for name in ("ns0", "ns1", "key0", "key1")
        ]
        self._multipliers = multipliers
        mixed = self.mix(self.columns)
        self.order = np.argsort(mixed, kind="stable")
        self.mixed = mixed[self.order]

    def mix(self, columns: list[U64]) -> U64:
        total: U64 = columns[0] * self._multipliers[0]
        for column, multiplier in zip(columns[1:], self._multipliers[1:], strict=True):
            total = total + column * multiplier
        return total

    def name(self, row: int) -> Name:
        a, b, c, d = (int(column[row]) for column in self.columns)
        return a, b, c, d

    def crowded(self) -> npt.NDArray[np.int64]:
        """Rows whose mix occurs more than once."""
        same = self.mixed[1:] == self.mixed[:-1]
        several = np.zeros(len(self.mixed), bool)
        several[1:] |= same
        several[:-1] |= same
        return self.order[several]

    def find(self, names: list[Name]) -> list[list[int]]:
        """For each name, the rows that carry it."""
        if not names:
            return []
        asked = np.array(names, np.uint64)
        mixed = self.mix([asked[:, n] for n in range(4)])
        low = np.searchsorted(self.mixed, mixed, "left").tolist()
        high = np.searchsorted(self.mixed, mixed, "right").tolist()
        found: list[list[int]] = []
        for name, start, end in zip(names, low, high, strict=True):
            found.append([r for r in self.order[start:end].tolist() if self.name(r) == name])
        return found


def resolve(
    rows: Rows,
    segment: U32,
    sequence: U64,
    tombstones: Iterable[Tombstone],
    multipliers: npt.NDArray[np.uint64],
) -> Resolved:
    """Decide for block rows (with their segment numbers and sequences) which are alive.

    `multipliers`: four odd random 64-bit numbers.
    """
    count = len(rows)
    lsn = np.ascontiguousarray(rows["lsn"])
    alive = np.ones(count, bool)
    covered = np.zeros(count, bool)  # dead, and a tombstone that must stay says so
    names = _Names(rows, multipliers)

    newest: dict[Name, int] = {}
    for row in names.crowded().tolist():
        other = newest.setdefault(names.name(row), row)
        if other != row:
            older = row if lsn[row] < lsn[other] else other
            newest[names.name(row)] = other if older == row else row
            alive[older] = False
    duplicates = int(count - np.count_nonzero(alive))

    by_name: dict[Name, list[Tombstone]] = {}
    dropped: dict[tuple[int, int], int] = {}
    for tombstone in tombstones:
        space = _split(tombstone.namespace_id)
        if tombstone.kind is TombstoneKind.NAMESPACE:
            dropped[space] = max(dropped.get(space, 0), tombstone.lsn)
        else:
            by_name.setdefault(space + _split(tombstone.wire_key), []).append(tombstone)
    for found, entries in zip(names.find(list(by_name)), by_name.values(), strict=True):
        for row in found:
            later = [t for t in entries if t.lsn > lsn[row]]
            if later:
                alive[row] = False
                covered[row] |= any(t.cover == sequence[row] for t in later)
    for (n0, n1), until in dropped.items():
        gone = (names.columns[0] == n0) & (names.columns[1] == n1) & (lsn < until)
        alive[gone] = False
        covered[gone] = True

    survivors = np.flatnonzero(alive)
    shadowed = np.unique(segment[~alive & ~covered]).tolist()
    return Resolved(survivors[np.argsort(lsn[survivors], kind="stable")], duplicates, shadowed)


def distinct(pairs: U64) -> tuple[list[int], Slots]:
    """Row numbers of the distinct pairs and, for every row, which of them it is."""
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    ordered = pairs[order]
    new = np.ones(len(pairs), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    inverse = np.empty(len(pairs), np.int64)
    inverse[order] = np.cumsum(new) - 1
    return order[new].tolist(), inverse
