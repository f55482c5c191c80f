"""Whether a stored block was ever given to anybody, so that an eviction knows what it throws away.

Of blocks that were found at start this is not known until they are served: the index does not say.
One byte per block. Pure.

Invariant: a block counts as unused only if it was stored in this life of the daemon and no host was
granted it, nor had it staged, since.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Use(enum.IntEnum):
    """What is known of a block."""

    UNKNOWN = 0  # found at start, not served since
    UNUSED = 1
    SERVED = 2

    @property
    def label(self) -> str:
        """In metrics."""
        return self.name.lower()


_USES = tuple(Use)


class Usefulness:
    """By slot of the index. The caller tells of every block that is stored, served or goes."""

    def __init__(self, slots_max: int) -> None:
        self._uses: npt.NDArray[np.uint8] = np.zeros(slots_max, np.uint8)

    def stored(self, slot: int) -> None:
        """A new block is in this slot."""
        self._uses[slot] = Use.UNUSED

    def served(self, slots: Sequence[int]) -> None:
        """The blocks in these slots were granted."""
        if slots:
            self._uses[slots] = Use.SERVED

    def gone(self, slot: int) -> Use:
        """The block left the index; returns what is known of it."""
        found: Use = _USES[self._uses[slot]]
        self._uses[slot] = Use.UNKNOWN
        return found
