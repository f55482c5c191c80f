"""Which key version each stored block is sealed under: counted, so that old versions can go. Pure.

The index does not know: the version is in the sealed header on flash. It is noted when a block is
stored or read; after a restart the rest are not counted until somebody looks. Two bytes per block.

Invariant: a version of a stream counts as unused only when every block of that stream was looked at
and none of them had it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

NOT_COUNTED = 0
HOST_SEALED = 0xFFFF  # under a key of the tenant's own; its version is no business of ours
_CODES = 0xFFFE


def code_of(version: int) -> int:
    """A version in two bytes. Versions 65,534 apart share one, so an old one may count as used for
    too long, never for too short."""
    return (version - 1) % _CODES + 1


class VersionCensus:
    """By slot of the index. The caller tells of every block that is noted or goes."""

    def __init__(self, slots_max: int) -> None:
        self._codes: npt.NDArray[np.uint16] = np.zeros(slots_max, np.uint16)
        self._counts: Counter[tuple[bytes, int]] = Counter()

    def note(self, slot: int, stream: bytes, code: int) -> None:
        """The block in this slot has this code."""
        before = int(self._codes[slot])
        if before == code:
            return
        if before != NOT_COUNTED:
            self._count(stream, before, -1)
        self._codes[slot] = code
        self._count(stream, code, 1)

    def gone(self, slot: int, stream: bytes) -> None:
        """The block left the index: the slot is another's from now on."""
        before = int(self._codes[slot])
        if before != NOT_COUNTED:
            self._codes[slot] = NOT_COUNTED
            self._count(stream, before, -1)

    def code(self, slot: int) -> int:
        """What is known of a slot."""
        return int(self._codes[slot])

    def codes(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        """What is known of many slots."""
        found: npt.NDArray[np.uint16] = self._codes[slots]
        return found

    def blocks(self, stream: bytes, code: int) -> int:
        """Blocks of a stream known to have this code."""
        return self._counts[stream, code]

    def counted(self, stream: bytes) -> int:
        """Blocks of a stream that were looked at."""
        return sum(count for (whose, _), count in self._counts.items() if whose == stream)

    def _count(self, stream: bytes, code: int, change: int) -> None:
        place = (stream, code)
        self._counts[place] += change
        assert self._counts[place] >= 0, "a block was counted out twice"
        if not self._counts[place]:
            del self._counts[place]
