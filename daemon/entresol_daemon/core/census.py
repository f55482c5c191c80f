"""Which key version each stored block is sealed under: counted, so that old versions can go. Pure.

The index does not know: the version is in the sealed header on flash. It is noted when a block is
stored or read; blocks found at start are not counted until somebody looks. Two bytes per block.

Invariant: a version of a stream counts as unused only when every block of that stream was looked at
and none of them had it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

NO_BLOCK = 0
NOT_COUNTED = 0xFFFE  # found at start, and nobody has looked at it since
HOST_SEALED = 0xFFFF  # under a key of the tenant's own; its version is no business of ours
_CODES = 0xFFFD


def code_of(version: int) -> int:
    """A version in two bytes. Versions 65,533 apart share one, so an old one may count as used for
    too long, never for too short."""
    return (version - 1) % _CODES + 1


class VersionCensus:
    """By slot of the index. The caller tells of every block that is found, noted or goes."""

    def __init__(self, slots_max: int) -> None:
        self._codes: npt.NDArray[np.uint16] = np.zeros(slots_max, np.uint16)
        self._counts: dict[bytes, Counter[int]] = {}  # by stream, then code

    def found(self, slots: npt.NDArray[np.int64], blocks: Mapping[bytes, int]) -> None:
        """At start: these slots hold blocks, so many of each stream."""
        self._codes[slots] = NOT_COUNTED
        for stream, count in blocks.items():
            self._count(stream, NOT_COUNTED, count)

    def note(self, slot: int, stream: bytes, code: int) -> None:
        """The block in this slot has this code."""
        before = int(self._codes[slot])
        if before == code:
            return
        if before != NO_BLOCK:
            self._count(stream, before, -1)
        self._codes[slot] = code
        self._count(stream, code, 1)

    def gone(self, slot: int, stream: bytes) -> None:
        """The block left the index: the slot is another's from now on."""
        before = int(self._codes[slot])
        if before != NO_BLOCK:
            self._codes[slot] = NO_BLOCK
            self._count(stream, before, -1)

    def code(self, slot: int) -> int:
        """What is known of a slot."""
        return int(self._codes[slot])

    def codes(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        """What is known of many slots."""
        known: npt.NDArray[np.uint16] = self._codes[slots]
        return known

    def blocks(self, stream: bytes, code: int) -> int:
        """Blocks of a stream with this code."""
        counts = self._counts.get(stream)
        return counts[code] if counts is not None else 0

    def total(self, stream: bytes) -> int:
        """Blocks of a stream."""
        counts = self._counts.get(stream)
        return counts.total() if counts is not None else 0

    def _count(self, stream: bytes, code: int, change: int) -> None:
        counts = self._counts.get(stream)
        if counts is None:
            counts = self._counts[stream] = Counter()
        counts[code] += change
        assert counts[code] >= 0, "a block was counted out twice"
        if not counts[code]:
            del counts[code]
            if not counts:
                del self._counts[stream]
