"""Which of the records found on flash are alive: newest copies that no tombstone covers. Pure.

Invariant: the answer depends only on lsn order, never on the order in which segments were read.
Vectorised where there may be millions, of blocks and of tombstones; only older copies of the same
block, and the namespaces that were dropped, go through Python one by one. Of a block that was put
and removed thousands of times only the last removal is compared with its copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entresol_daemon.flash.index import U32, U64, Slots
from entresol_daemon.flash.segment import Rows
from entresol_daemon.flash.tombstones import TombstoneKind, Tombstones

Name = tuple[int, int, int, int]  # namespace id and key as four integers
NAME = ("ns0", "ns1", "key0", "key1")
PAIRS_AT_ONCE = 1 << 18  # of a tombstone and a row that may be the one it removes


@dataclass(frozen=True, slots=True)
class Resolved:
    """`alive`: row numbers in lsn order. `older`: rows of which there is a newer copy. `shadowed`:
    segments with dead copies; neither counts what a tombstone names by its sequence."""

    alive: npt.NDArray[np.int64]
    duplicates: int
    older: list[int]
    shadowed: list[int]


class _Names:
    """Rows by name: sorted by a 64-bit mix of its columns, compared exactly."""

    def __init__(self, columns: list[U64], multipliers: npt.NDArray[np.uint64]) -> None:
        self.columns = columns
        self._multipliers = multipliers
        mixed = self.mix(self.columns)
        self.order = np.argsort(mixed, kind="stable")
        self.mixed = mixed[self.order]

    def mix(self, columns: list[U64]) -> U64:
        return _mix(columns, self._multipliers)

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

    def pairs(self, asked: list[U64]) -> Iterator[tuple[Slots, Slots]]:
        """Which of these names, each told once, is the name of which row: numbers of both, a
        bounded part of all such pairs at a time."""
        mixed = self.mix(asked)
        sorting = np.argsort(mixed)  # neighbours are looked for one after the other: quicker
        mixed = mixed[sorting]
        low = np.searchsorted(self.mixed, mixed, "left")
        counts = np.searchsorted(self.mixed, mixed, "right") - low
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        for first in range(0, total, PAIRS_AT_ONCE):
            number = np.arange(first, min(total, first + PAIRS_AT_ONCE))
            place = np.searchsorted(ends, number, "right")
            row = self.order[low[place] + number - (ends[place] - counts[place])]
            one = sorting[place]
            same = np.ones(len(row), bool)
            for column, name in zip(self.columns, asked, strict=True):
                same &= column[row] == name[one]
            yield one[same], row[same]


def _mix(columns: list[U64], multipliers: npt.NDArray[np.uint64]) -> U64:
    total: U64 = columns[0] * multipliers[0]
    for column, multiplier in zip(columns[1:], multipliers[1 : len(columns)], strict=True):
        total = total + column * multiplier
    return total


def resolve(
    rows: Rows,
    segment: U32,
    sequence: U64,
    tombstones: Tombstones,
    multipliers: npt.NDArray[np.uint64],
) -> Resolved:
    """Decide for block rows (with their segment numbers and sequences) which are alive.

    `multipliers`: four odd random 64-bit numbers.
    """
    count = len(rows)
    lsn = np.ascontiguousarray(rows["lsn"])
    alive = np.ones(count, bool)
    covered = np.zeros(count, bool)  # dead, and a tombstone that must stay says so
    names = _Names(_columns(rows), multipliers)

    newest: dict[Name, int] = {}
    for row in names.crowded().tolist():
        name = names.name(row)
        other = newest.setdefault(name, row)
        if other != row:
            # A copy may have the number of what it was made of.
            is_older = (lsn[row], sequence[row]) < (lsn[other], sequence[other])
            older = row if is_older else other
            newest[name] = other if older == row else row
            alive[older] = False
    outdone = np.flatnonzero(~alive)

    of_blocks = tombstones[tombstones["kind"] == TombstoneKind.BLOCK]
    until, asked = np.ascontiguousarray(of_blocks["lsn"]), _columns(of_blocks)
    last = _last(asked, until)
    for one, row in names.pairs([column[last] for column in asked]):
        alive[row[until[last[one]] > lsn[row]]] = False
    dead = np.flatnonzero(~alive)
    asked.append(np.ascontiguousarray(of_blocks["cover"]))
    last = _last(asked, until)
    columns = [column[dead] for column in (*names.columns, sequence)]
    placed = _Names(columns, np.append(multipliers, multipliers[0]))
    for one, row in placed.pairs([column[last] for column in asked]):
        covered[dead[row[until[last[one]] > lsn[dead[row]]]]] = True
    for gone in _dropped(names.columns[:2], lsn, tombstones, multipliers):
        alive[gone] = False
        covered[gone] = True

    survivors = np.flatnonzero(alive)
    survivors = survivors[np.argsort(lsn[survivors], kind="stable")]
    older = outdone[~covered[outdone]].tolist()
    shadowed = np.unique(segment[~alive & ~covered]).tolist()
    return Resolved(survivors, len(outdone), older, shadowed)


def _columns(rows: Rows | Tombstones) -> list[U64]:
    return [np.ascontiguousarray(rows[name]) for name in NAME]


def _last(columns: list[U64], lsn: U64) -> Slots:
    """Of the rows that are alike in these columns the one with the highest lsn."""
    order = np.lexsort((lsn, *columns))
    if not len(order):
        return order
    ends = np.zeros(len(order), bool)
    ends[-1] = True
    for column in columns:
        ends[:-1] |= column[order[1:]] != column[order[:-1]]
    return order[ends]


def _dropped(
    spaces: list[U64], lsn: U64, tombstones: Tombstones, multipliers: npt.NDArray[np.uint64]
) -> Iterator[Slots]:
    """Rows that went with their namespace, namespace by namespace."""
    whole = tombstones[tombstones["kind"] == TombstoneKind.NAMESPACE]
    if not len(whole):
        return
    pairs = np.empty((len(whole), 2), np.uint64)
    pairs[:, 0], pairs[:, 1] = whole["ns0"], whole["ns1"]
    firsts, which = distinct(pairs)
    until = np.zeros(len(firsts), np.uint64)
    np.maximum.at(until, which, whole["lsn"])
    mixed = _mix(spaces, multipliers)
    order = np.argsort(mixed, kind="stable")
    mixed = mixed[order]
    asked = pairs[firsts]
    keys = _mix([np.ascontiguousarray(asked[:, n]) for n in (0, 1)], multipliers)
    starts, ends = np.searchsorted(mixed, keys, "left"), np.searchsorted(mixed, keys, "right")
    for n in np.flatnonzero(ends > starts).tolist():
        rows = order[starts[n] : ends[n]]
        same = (spaces[0][rows] == asked[n, 0]) & (spaces[1][rows] == asked[n, 1])
        yield rows[same & (lsn[rows] < until[n])]


def distinct(pairs: U64) -> tuple[list[int], Slots]:
    """Row numbers of the distinct pairs and, for every row, which of them it is."""
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    ordered = pairs[order]
    new = np.ones(len(pairs), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    inverse = np.empty(len(pairs), np.int64)
    inverse[order] = np.cumsum(new) - 1
    return order[new].tolist(), inverse
