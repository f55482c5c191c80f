"""Why blocks went away: a bounded memory for EXPLAIN. Pure.

Invariants: at most `entries_max` rows; the oldest of the owner with most rows are forgotten first,
after which a key reads as never stored, which is what the documentation says. So an owner that has
no more than its equal share forgets nothing because of others, and hears nothing of them by it.
All memory is taken at the start, but for a little per owner: what fills up in weeks would look like
a leak, and be one to whoever has planned for the first day.

A key stands under 64 bits of a hash that nobody else can compute: two keys of one value, of which
the older would be forgotten, do not come up by themselves and cannot be made. Rows are found by
open addressing, linear probing, with deletion by moving later ones up (Knuth, The Art of Computer
Programming 3, 6.4, algorithm R).
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from entresol_proto.wire.data import Reason

FORGOTTEN_SHIFT = 6  # so much of an owner's rows is forgotten together: finding it takes a while
_NONE = -1


class _Owner:
    """The rows of one owner, the oldest first: a list through `_after` and `_before`."""

    __slots__ = ("count", "first", "last", "name", "number")

    def __init__(self, name: bytes, number: int) -> None:
        self.name, self.number = name, number
        self.first = self.last = _NONE
        self.count = 0


class History:
    """(namespace id, wire key) -> (reason, Unix ns) of recent removals and refusals."""

    def __init__(self, entries_max: int, secret: bytes = bytes(16)) -> None:
        """`secret`: of the hash; one that nobody knows where keys are others' choice."""
        rows = entries_max + 1  # one is added before one is forgotten
        places = 1 << (rows + rows // 2).bit_length()  # two thirds are taken at most
        self._entries_max = entries_max
        self._secret = secret
        self._places = array("i", [_NONE]) * places  # row, by hash
        self._hash = array("Q", [0]) * rows
        self._unix_ns = array("q", [0]) * rows
        self._reason = array("B", [0]) * rows
        self._owner = array("q", [0]) * rows
        self._before = array("i", [_NONE]) * rows
        self._after = array("i", range(1, rows + 1))  # of free rows: the next free one
        self._free = 0
        self._count = 0
        self._mask = places - 1
        self._owners: dict[bytes, _Owner] = {}
        self._numbered: dict[int, _Owner] = {}
        self._number = 0

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        """Taken at the start."""
        rows = (self._hash, self._unix_ns, self._reason, self._owner, self._before, self._after)
        return sum(each.itemsize * len(each) for each in (self._places, *rows))

    def record(
        self, namespace_id: bytes, key: bytes, reason: Reason, unix_ns: int, owner: bytes
    ) -> None:
        """Remember the newest reason for a key of this owner."""
        mark = self._mark(namespace_id, key)
        at = self._place(mark)
        if self._places[at] != _NONE:
            self._drop(mark)
            at = self._place(mark)
        self._add(at, mark, reason, unix_ns, owner)
        if self._count > self._entries_max:
            most = max(self._owners.values(), key=lambda each: each.count)
            for _ in range(max(1, most.count >> FORGOTTEN_SHIFT)):
                self._drop(self._hash[most.first])

    def forget(self, namespace_id: bytes, key: bytes) -> tuple[Reason, int]:
        """The block is stored again; returns what `why` said until now."""
        mark = self._mark(namespace_id, key)
        row = self._places[self._place(mark)]
        if row == _NONE:
            return Reason.NEVER_STORED, 0
        before = Reason(self._reason[row]), self._unix_ns[row]
        self._drop(mark)
        return before

    def why(self, namespace_id: bytes, key: bytes) -> tuple[Reason, int]:
        """The newest reason, or NEVER_STORED at time 0."""
        row = self._places[self._place(self._mark(namespace_id, key))]
        if row == _NONE:
            return Reason.NEVER_STORED, 0
        return Reason(self._reason[row]), self._unix_ns[row]

    def _mark(self, namespace_id: bytes, key: bytes) -> int:
        found = blake2b(namespace_id + key, digest_size=8, key=self._secret).digest()
        return int.from_bytes(found, "little")

    def _place(self, mark: int) -> int:
        """Where its row's number is, or belongs."""
        places, hashes, mask = self._places, self._hash, self._mask
        at = mark & mask
        while (row := places[at]) != _NONE and hashes[row] != mark:
            at = (at + 1) & mask
        return at

    def _add(self, at: int, mark: int, reason: Reason, unix_ns: int, name: bytes) -> None:
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner(name, self._number)
            self._numbered[self._number] = owner
            self._number += 1
        row = self._free
        self._free = self._after[row]
        self._places[at] = row
        self._hash[row], self._reason[row], self._unix_ns[row] = mark, reason, unix_ns
        self._owner[row] = owner.number
        self._before[row], self._after[row] = owner.last, _NONE
        if owner.last == _NONE:
            owner.first = row
        else:
            self._after[owner.last] = row
        owner.last = row
        owner.count += 1
        self._count += 1

    def _drop(self, mark: int) -> None:
        """Forget a row, if there is one."""
        at = self._place(mark)
        row = self._places[at]
        if row == _NONE:
            return
        owner = self._numbered[self._owner[row]]
        before, after = self._before[row], self._after[row]
        if before == _NONE:
            owner.first = after
        else:
            self._after[before] = after
        if after == _NONE:
            owner.last = before
        else:
            self._before[after] = before
        owner.count -= 1
        if not owner.count:
            del self._owners[owner.name], self._numbered[owner.number]
        self._count -= 1
        self._after[row], self._free = self._free, row
        self._close_gap(at)

    def _close_gap(self, gap: int) -> None:
        """Move up what was probed past a place that is empty now."""
        places, mask = self._places, self._mask
        places[gap] = _NONE
        at = (gap + 1) & mask
        while (row := places[at]) != _NONE:
            home = self._hash[row] & mask
            if (at - home) & mask >= (at - gap) & mask:  # its home is not between gap and here
                places[gap], places[at] = row, _NONE
                gap = at
            at = (at + 1) & mask
