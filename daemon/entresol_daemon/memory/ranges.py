"""First-fit allocation of 4 KiB-aligned ranges inside one slab. Pure bookkeeping.

Invariants: free ranges are sorted, disjoint and never adjacent; every byte of the slab is either in
exactly one free range or in exactly one allocated range. No free range is longer than the bound
kept, so that who asks again and again in vain does not make us look at every one of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from entresol_proto import limits


def align_up(length_bytes: int, to_bytes: int = limits.ALIGN_BYTES) -> int:
    """The next multiple of `to_bytes`."""
    return -(-length_bytes // to_bytes) * to_bytes


class RangeAllocator:
    """Hands out ranges of `size_bytes`; lengths are rounded up to 4 KiB by the caller."""

    __slots__ = ("_free", "_sizes", "free_bytes", "longest_bytes_max", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        assert size_bytes > 0, size_bytes
        assert size_bytes % limits.ALIGN_BYTES == 0, size_bytes
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self._free: list[int] = [0]  # starts, sorted
        self._sizes: dict[int, int] = {0: size_bytes}
        self.longest_bytes_max = size_bytes  # no free range is longer

    @property
    def is_empty(self) -> bool:
        """True when nothing is allocated."""
        return self.free_bytes == self.size_bytes

    def allocate(self, length_bytes: int) -> int | None:
        """Offset of a new range, or None when no free range is long enough."""
        assert length_bytes > 0, length_bytes
        assert length_bytes % limits.ALIGN_BYTES == 0, length_bytes
        if length_bytes > self.longest_bytes_max:
            return None
        for place, start in enumerate(self._free):
            size = self._sizes[start]
            if size < length_bytes:
                continue
            del self._sizes[start]
            if size == length_bytes:
                del self._free[place]
            else:
                self._free[place] = start + length_bytes
                self._sizes[start + length_bytes] = size - length_bytes
            self.free_bytes -= length_bytes
            return start
        self.longest_bytes_max = length_bytes - limits.ALIGN_BYTES
        return None

    def free(self, offset_bytes: int, length_bytes: int) -> None:
        """Give a range back. A double free breaks the invariant and is asserted."""
        place = bisect_left(self._free, offset_bytes)
        start, size = offset_bytes, length_bytes
        end = offset_bytes + length_bytes
        assert 0 <= offset_bytes < end, (offset_bytes, length_bytes)
        assert end <= self.size_bytes, (offset_bytes, length_bytes)
        if place < len(self._free):
            after = self._free[place]
            assert end <= after, "range is freed twice"
            if after == end:
                size += self._sizes.pop(after)
                del self._free[place]
        if place > 0:
            before = self._free[place - 1]
            before_end = before + self._sizes[before]
            assert before_end <= start, "range is freed twice"
            if before_end == start:
                start, size = before, size + self._sizes[before]
        if start not in self._sizes:
            insort(self._free, start)
        self._sizes[start] = size
        self.longest_bytes_max = max(self.longest_bytes_max, size)
        self.free_bytes += length_bytes

    def free_ranges(self) -> Iterator[tuple[int, int]]:
        """Offset and length of each, in order."""
        return ((start, self._sizes[start]) for start in self._free)


def cheapest_run(pieces: Sequence[tuple[int, int, int]], length_bytes: int) -> range:
    """Which neighbours among `pieces` make a run of at least `length_bytes` for the least cost; an
    empty range if none do. A piece is its offset, length and cost; in order, none overlaps another.
    """
    found, least = range(0), -1
    first = run = cost = 0
    end = -1
    for place, (offset, size, price) in enumerate(pieces):
        if offset != end:
            first, run, cost = place, 0, 0
        end = offset + size
        run += size
        cost += price
        while run - pieces[first][1] >= length_bytes:
            run -= pieces[first][1]
            cost -= pieces[first][2]
            first += 1
        if run >= length_bytes and (least < 0 or cost < least):
            found, least = range(first, place + 1), cost
    return found
