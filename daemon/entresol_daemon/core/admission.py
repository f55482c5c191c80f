"""Which offered blocks are written to flash, within a write budget. Pure; time is passed in.

Flash endures a number of writes: facts on real chat traffic are hundreds of terabytes a day, three
quarters of them never read. So everything is admitted while the budget holds; beyond it only what
is offered for the second time, remembered in a bounded ghost list of keys. Never by chance per
block: that tears prefixes apart.

Invariants: over any time t, at most `rate * t + 2 * burst` bytes are admitted and not given up
(policy "all" excepted), give or take one block; the ghost list never holds more than its limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol

BURST_S = 3_600  # the budget is meant per day; an hour of it may be used at once, or owed
SECONDS_PER_DAY = 86_400
GHOST_FACTOR = 4  # ghost keys per block that the cache can hold
GHOST_KEYS_MAX = 524_288  # about 140 bytes of memory each, and only once over the budget
_NS_PER_S = 1_000_000_000


class AdmissionSettings(Protocol):
    """The part of the configuration that is read here (config.AdmissionConfig)."""

    @property
    def policy(self) -> str: ...
    @property
    def drive_writes_per_day(self) -> float: ...


class GhostList:
    """The keys most recently noted, at most `keys_max`; the least recent is forgotten."""

    def __init__(self, keys_max: int) -> None:
        assert keys_max >= 1, "a ghost list holds at least one key"
        self._keys_max = keys_max
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, key: Hashable) -> bool:
        """Remember `key` as the most recent; True if it was remembered already.

        Only its 64-bit hash is kept: two keys that share one are admitted a little early.
        """
        short = hash(key)
        known = short in self._keys
        self._keys[short] = None
        if known:
            self._keys.move_to_end(short)
        elif len(self._keys) > self._keys_max:
            self._keys.popitem(last=False)
        return known


class WriteBudget:
    """A token bucket of bytes that may go into debt.

    Holds between `-burst_bytes` and `burst_bytes`; starts full. Times are monotonic nanoseconds; an
    earlier time than before counts as no time. Exact: the level is kept in byte-nanoseconds.
    """

    def __init__(self, rate_bytes_per_s: int, burst_bytes: int) -> None:
        assert rate_bytes_per_s > 0, "a budget of nothing would never admit anything"
        assert burst_bytes > 0, "a budget of nothing would never admit anything"
        self._rate = rate_bytes_per_s
        self._level_max = burst_bytes * _NS_PER_S
        self._level = self._level_max
        self._at_ns: int | None = None

    def room(self, now_ns: int) -> int:
        """Bytes left before the budget is used up; negative when in debt."""
        if self._at_ns is None:
            self._at_ns = now_ns
        elif now_ns > self._at_ns:
            self._level = min(self._level_max, self._level + self._rate * (now_ns - self._at_ns))
            self._at_ns = now_ns
        return self._level // _NS_PER_S

    @property
    def burst_bytes(self) -> int:
        """The most that can be saved up, and owed."""
        return self._level_max // _NS_PER_S

    def spend(self, length_bytes: int) -> None:
        """These bytes were or will be written."""
        self._level -= length_bytes * _NS_PER_S

    def refund(self, length_bytes: int) -> None:
        """These were spent, and will not be written."""
        self._level = min(self._level_max, self._level + length_bytes * _NS_PER_S)


class Admission:
    """Decides block by block, in the order of the prefix.

    `policy`: "all" admits everything; "second_touch" what was offered before; "auto" everything
    while the budget has room, then as "second_touch". Debt deeper than the burst refuses everything
    (not under "all"). `budget` None means unlimited.
    """

    def __init__(
        self, policy: str, *, budget: WriteBudget | None, ghost_keys_max: int = GHOST_KEYS_MAX
    ) -> None:
        assert policy in ("auto", "all", "second_touch"), policy
        self.policy = policy
        self._budget = budget
        self.ghost = GhostList(min(ghost_keys_max, GHOST_KEYS_MAX))

    @classmethod
    def from_config(
        cls,
        settings: AdmissionSettings,
        capacity_bytes: int,
        *,
        cache_blocks: int = GHOST_KEYS_MAX // GHOST_FACTOR,
    ) -> Admission:
        """As configured, for a flash of `capacity_bytes` that holds about `cache_blocks` blocks."""
        rate = int(settings.drive_writes_per_day * capacity_bytes / SECONDS_PER_DAY)
        budget = WriteBudget(rate, rate * BURST_S) if rate else None
        return cls(settings.policy, budget=budget, ghost_keys_max=GHOST_FACTOR * cache_blocks)

    def admit(self, key: Hashable, length_bytes: int, now_ns: int) -> bool:
        """Whether to write this block; its bytes are taken from the budget at once if so.

        A refused key is remembered, and admitted when it is offered again (within the budget's
        debt). It stays remembered then, so that a put that fails afterwards can be tried again.
        """
        room = 1 if self._budget is None else self._budget.room(now_ns)
        if self.policy == "all" or (self.policy == "auto" and room > 0):
            admitted = True
        else:
            known = self.ghost.note(key)
            admitted = known and (self._budget is None or room > -self._budget.burst_bytes)
        if admitted:
            self.charge(length_bytes)
        return admitted

    def budget_level(self, now_ns: int) -> tuple[int, int] | None:
        """Bytes left (negative: owed) and the most that can be saved up; None: unlimited."""
        if self._budget is None:
            return None
        return self._budget.room(now_ns), self._budget.burst_bytes

    def charge(self, length_bytes: int) -> None:
        """Take bytes from the budget that are written without being asked for: reinsertions."""
        if self._budget is not None:
            self._budget.spend(length_bytes)

    def give_up(self, length_bytes: int) -> None:
        """A block that was admitted is not written after all."""
        if self._budget is not None:
            self._budget.refund(length_bytes)
