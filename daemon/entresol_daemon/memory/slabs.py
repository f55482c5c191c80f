"""Slabs: the memory that hosts may read, and who owns it.

A slab is one memfd that belongs to one owner (a tenant) as long as anything lives in it. Only that
tenant's sessions are ever shown its descriptor or remote key. When an empty slab is wanted for
another owner it is closed and a new one is made: a mapping somebody kept shows old ciphertext of
its own tenant and nothing else.

Which slab has room is looked up by how long its longest free range may be, and not by asking one
slab after the other: a machine has hundreds, most of them full.

Invariants: bytes of all slabs together stay within the budget; two owners never share a slab; each
slab is once in its owner's `_rooms`, at `longest_bytes_max` of its ranges.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from entresol_daemon.memory.ranges import RangeAllocator, align_up
from entresol_proto import limits


class SlabBuffer(Protocol):
    """What a slab is made of: a memfd in production, plain memory in simulation."""

    @property
    def view(self) -> memoryview: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Slab:
    """One owner's piece of readable memory. `idle_bytes` and `leaving` are for whoever decides what
    goes: how much of it nobody needs just now, and that nothing new may come until it is empty."""

    number: int
    owner: bytes
    buffer: SlabBuffer
    ranges: RangeAllocator
    idle_bytes: int = 0
    leaving: bool = False
    closed: bool = False
    room: int = 0  # as `SlabPool._rooms` has it

    @property
    def used_bytes(self) -> int:
        """Bytes of its extents."""
        return self.ranges.size_bytes - self.ranges.free_bytes


@dataclass(slots=True, eq=False)
class Extent:
    """A 4 KiB-aligned piece of a slab that holds one record.

    `view` is writable and valid until `SlabPool.free`. Owned by whoever allocated it.
    """

    slab: Slab
    offset_bytes: int
    length_bytes: int
    view: memoryview = field(repr=False)
    freed: bool = False


class SlabPool:
    """Allocates extents per owner inside one budget.

    `make_buffer(length_bytes)` returns fresh, readable memory; it may raise OSError when the
    machine has none, which reads as "no room".
    """

    def __init__(
        self, budget_bytes: int, slab_bytes: int, make_buffer: Callable[[int], SlabBuffer]
    ) -> None:
        self.budget_bytes = budget_bytes
        self.slab_bytes = slab_bytes
        self.mapped_bytes = 0
        self.allocated_bytes = 0
        self._make_buffer = make_buffer
        self._numbers = itertools.count(1)
        self._owned: dict[bytes, list[Slab]] = {}
        self._rooms: dict[bytes, list[tuple[int, int]]] = {}  # longest range and number, sorted
        self._slabs: dict[int, Slab] = {}  # by number
        self._empty: dict[Slab, None] = {}  # the first that became so first
        self._owned_bytes: dict[bytes, int] = {}  # of owners that have any
        self._used_bytes: Counter[bytes] = Counter()
        self.on_close: Callable[[Slab], None] | None = None  # told before a slab's memory goes away

    def owned_bytes(self, owner: bytes) -> int:
        """Bytes of slabs this owner holds, used or not."""
        return self._owned_bytes.get(owner, 0)

    def used_bytes(self, owner: bytes) -> int:
        """Bytes of extents this owner holds."""
        return self._used_bytes[owner]

    def slabs(self, owner: bytes) -> Sequence[Slab]:
        """The slabs this owner holds, used or not."""
        return self._owned.get(owner, ())

    def may_fit(self, length_bytes: int) -> bool:
        """Whether an empty pool has room for an extent of this length."""
        return self._slab_for(length_bytes) <= self.budget_bytes

    def allocate(self, owner: bytes, length_bytes: int) -> Extent | None:
        """An extent of at least `length_bytes`, or None when the budget has no room for it now."""
        length = align_up(length_bytes)
        rooms = self._rooms.get(owner, [])
        place = bisect_left(rooms, (length, 0))  # what fits most closely
        while place < len(rooms):
            slab = self._slabs[rooms[place][1]]
            found = self.allocate_in(slab, length)
            if found is not None:
                return found
            place += 1  # it has less than it might have had, and went before; or is to become empty
        fresh = self._new_slab(owner, self._slab_for(length))
        return None if fresh is None else self.allocate_in(fresh, length)

    def allocate_in(self, slab: Slab, length_bytes: int) -> Extent | None:
        """An extent of one slab, or None when it has no room or is to become empty."""
        assert not slab.closed, slab.number
        if slab.leaving:
            return None
        length = align_up(length_bytes)
        offset = slab.ranges.allocate(length)
        if offset is None:
            self._note_room(slab)
            return None
        self._empty.pop(slab, None)
        self.allocated_bytes += length
        self._used_bytes[slab.owner] += length
        return Extent(slab, offset, length, slab.buffer.view[offset : offset + length])

    def free(self, extent: Extent) -> None:
        """Give an extent back, once. Its view must not be used afterwards."""
        assert not extent.freed, "extent is freed twice"
        extent.freed = True
        extent.view.release()
        slab = extent.slab
        slab.ranges.free(extent.offset_bytes, extent.length_bytes)
        self.allocated_bytes -= extent.length_bytes
        self._used_bytes[slab.owner] -= extent.length_bytes
        self._note_room(slab)
        if slab.ranges.is_empty:
            slab.leaving = False
            if slab.ranges.size_bytes > self.slab_bytes:
                self._close(slab)  # made for one large block; not worth keeping
            elif not slab.closed:
                self._empty[slab] = None

    def reuse(self, extent: Extent) -> Extent:
        """The same place, for what comes next: the old extent is freed, and its view with it. What
        raises leaves it as it is."""
        assert not extent.freed, "extent is freed already"
        slab, begin, length = extent.slab, extent.offset_bytes, extent.length_bytes
        fresh = Extent(slab, begin, length, slab.buffer.view[begin : begin + length])
        extent.freed = True
        extent.view.release()
        return fresh

    def shrink(self, extent: Extent, length_bytes: int) -> None:
        """Keep only the first `length_bytes` (rounded up) of an extent."""
        keep = align_up(length_bytes)
        assert not extent.freed, "extent is freed already"
        assert 0 < keep <= extent.length_bytes, (keep, extent.length_bytes)
        rest = extent.length_bytes - keep
        if rest == 0:
            return
        extent.view.release()
        extent.view = extent.slab.buffer.view[extent.offset_bytes : extent.offset_bytes + keep]
        extent.slab.ranges.free(extent.offset_bytes + keep, rest)
        self._note_room(extent.slab)
        extent.length_bytes = keep
        self.allocated_bytes -= rest
        self._used_bytes[extent.slab.owner] -= rest

    def release_owner(self, owner: bytes) -> None:
        """Close the empty slabs of an owner (tenant erased, or idle)."""
        for slab in list(self._owned.get(owner, ())):
            if slab.ranges.is_empty:
                self._close(slab)

    def close(self) -> None:
        """Close every slab; all extents must have been freed or be abandoned with the process."""
        for slabs in list(self._owned.values()):
            for slab in list(slabs):
                self._close(slab)

    def _slab_for(self, length: int) -> int:
        return self.slab_bytes if length <= self.slab_bytes else align_up(length, limits.MIB)

    def _new_slab(self, owner: bytes, size_bytes: int) -> Slab | None:
        if size_bytes > self.budget_bytes:
            return None
        while self.mapped_bytes + size_bytes > self.budget_bytes:
            if not self._empty:
                return None
            self._close(next(iter(self._empty)))
        try:
            buffer = self._make_buffer(size_bytes)
        except OSError:
            return None
        slab = Slab(next(self._numbers), owner, buffer, RangeAllocator(size_bytes))
        self._owned.setdefault(owner, []).append(slab)
        self._empty[slab] = None
        self._slabs[slab.number] = slab
        slab.room = size_bytes
        insort(self._rooms.setdefault(owner, []), (size_bytes, slab.number))
        self._owned_bytes[owner] = self._owned_bytes.get(owner, 0) + size_bytes
        self.mapped_bytes += size_bytes
        return slab

    def _note_room(self, slab: Slab) -> None:
        """The longest free range of a slab may have changed."""
        room = slab.ranges.longest_bytes_max
        if room != slab.room and not slab.closed:
            self._leave_room(slab)
            slab.room = room
            insort(self._rooms[slab.owner], (room, slab.number))

    def _leave_room(self, slab: Slab) -> None:
        rooms = self._rooms[slab.owner]
        del rooms[bisect_left(rooms, (slab.room, slab.number))]

    def _close(self, slab: Slab) -> None:
        if self.on_close is not None:
            self.on_close(slab)
        slabs = self._owned[slab.owner]
        slabs.remove(slab)
        self._empty.pop(slab, None)
        self._leave_room(slab)
        del self._slabs[slab.number]
        self._owned_bytes[slab.owner] -= slab.ranges.size_bytes
        if not slabs:
            del self._owned[slab.owner], self._owned_bytes[slab.owner], self._rooms[slab.owner]
            del self._used_bytes[slab.owner]
        slab.closed = True
        self.mapped_bytes -= slab.ranges.size_bytes
        slab.buffer.close()
