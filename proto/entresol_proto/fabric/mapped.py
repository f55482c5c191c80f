"""How much memory of its peers a process maps, over all sessions.

What peers share is theirs, but the page tables of a mapping are the process's: a page of them for
each 2 MiB, however many mappings show the same memory. So what is mapped has a budget, of which no
owner of several may have more than what is free (dynamic thresholds, as for all that a tenant can
hold on to): whatever one has mapped, there is as much again for the next.

Invariant: at most `bytes_max` is charged, and what was charged comes back once, when the memory is
unmapped. For use from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable

from entresol_proto import limits

PAGE_TABLE_BYTES = 2 * limits.MIB  # of memory that one page of tables describes: the least charged


class Charge:
    """Mapped memory of one owner."""

    __slots__ = ("_budget", "_length_bytes", "_owner")

    def __init__(self, budget: MappedBudget, owner: Hashable, length_bytes: int) -> None:
        self._budget = budget
        self._owner = owner
        self._length_bytes = length_bytes

    def end(self) -> None:
        """It is unmapped, or was not mapped after all. Idempotent."""
        with self._budget.lock:
            length_bytes, self._length_bytes = self._length_bytes, 0
            self._budget.refund(self._owner, length_bytes)


class MappedBudget:
    """Of all sessions of a server."""

    def __init__(self, bytes_max: int) -> None:
        self.lock = threading.Lock()  # over what follows
        self._bytes_max = bytes_max
        self._used_bytes = 0
        self._held: Counter[Hashable] = Counter()  # bytes by owner

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, owner: Hashable, length_bytes: int) -> Charge | None:
        """Charge a mapping, if it fits. An owner that has nothing yet may have all that is left:
        something larger than the threshold must still get through."""
        more = -(-length_bytes // PAGE_TABLE_BYTES) * PAGE_TABLE_BYTES
        with self.lock:
            free_bytes = self._bytes_max - self._used_bytes - more
            held_bytes = self._held[owner]
            if free_bytes < 0 or (held_bytes and held_bytes + more > free_bytes):
                return None
            self._used_bytes += more
            self._held[owner] += more
        return Charge(self, owner, more)

    def refund(self, owner: Hashable, length_bytes: int) -> None:
        """Of a `Charge`, with the lock held."""
        self._used_bytes -= length_bytes
        self._held[owner] -= length_bytes
        assert min(self._used_bytes, self._held[owner]) >= 0, "unmapped twice"
        if not self._held[owner]:
            del self._held[owner]
