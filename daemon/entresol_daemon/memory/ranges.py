"""First-fit allocation of 4 KiB-aligned ranges inside one slab. Pure bookkeeping.

Invariant: free ranges are sorted, disjoint and never adjacent; every byte of the slab is either in
exactly one free range or in exactly one allocated range.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from entresol_proto import limits


def align_up(length_bytes: int, to_bytes: int = limits.ALIGN_BYTES) -> int:
    """The next multiple of `to_bytes`."""
    return -(-length_bytes // to_bytes) * to_bytes


class RangeAllocator:
    """Hands out ranges of `size_bytes`; lengths are rounded up to 4 KiB by the caller."""

    __slots__ = ("_free", "_sizes", "free_bytes", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        assert size_bytes > 0, size_bytes
        assert size_bytes % limits.ALIGN_BYTES == 0, size_bytes
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self._free: list[int] = [0]  # starts, sorted
        self._sizes: dict[int, int] = {0: size_bytes}

    @property
    def is_empty(self) -> bool:
        """True when nothing is allocated."""
        return self.free_bytes == self.size_bytes

    def allocate(self, length_bytes: int) -> int | None:
        """Offset of a new range, or None when no free range is long enough."""
        assert length_bytes > 0, length_bytes
        assert length_bytes % limits.ALIGN_BYTES == 0, length_bytes
        if length_bytes > self.free_bytes:
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
                self._sizes[before] += size
                self.free_bytes += length_bytes
                return
        insort(self._free, start)
        self._sizes[start] = size
        self.free_bytes += length_bytes
