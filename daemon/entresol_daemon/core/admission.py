"""Which offered blocks are written to flash, within a write budget. Pure; time is passed in.

Flash endures a number of writes: facts on real chat traffic are hundreds of terabytes a day, three
quarters of them never read. So everything is admitted while the budget holds; beyond it only what
is offered for the second time, remembered in a bounded ghost list of keys. Never by chance per
block: that tears prefixes apart.

Tenants share the budget as they share memory (core/accounts): what each has drawn of it comes back
by weight to those that have drawn (generalized processor sharing: Parekh and Gallager, 1993), and
none of several draws more than so many times what is left (dynamic thresholds). So who asks for no
more than its share of the rate is refused nothing because of others, and may have what they leave.

Invariants: over any time t, at most `rate * t + 2 * burst` bytes are admitted and not given up
(policy "all" excepted), give or take one block; the ghost list never holds more than its limit, and
an owner with no more than its equal share of it loses nothing because of others.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

BURST_S = 3_600  # the budget is meant per day; an hour of it may be used at once, or owed
SECONDS_PER_DAY = 86_400
GHOST_FACTOR = 4  # ghost keys per block that the cache can hold
GHOST_KEYS_MAX = 524_288  # about 140 bytes of memory each, and only once over the budget
FORGOTTEN_SHIFT = 6  # of several owners: so much of one's keys is forgotten together
OWED_OF_FREE = 8  # one of several tenants leaves 1/9 of the budget and its debt, two 1/17
STALE_ENDS_MAX = 64  # beyond as many as owners that have drawn; then they are swept out
ONE_OWNER = b""  # where nobody tells owners apart
_NS_PER_S = 1_000_000_000


class AdmissionSettings(Protocol):
    """The part of the configuration that is read here (config.AdmissionConfig)."""

    @property
    def policy(self) -> str: ...
    @property
    def drive_writes_per_day(self) -> float: ...


class GhostList:
    """The keys most recently noted, by owner, at most `keys_max`; the least recent of the owner
    with most is forgotten."""

    def __init__(self, keys_max: int) -> None:
        assert keys_max >= 1, "a ghost list holds at least one key"
        self._keys_max = keys_max
        self._count = 0
        self._owners: dict[Hashable, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return self._count

    def note(self, key: Hashable, owner: Hashable = ONE_OWNER) -> bool:
        """Remember `key` as its owner's most recent; True if it was remembered already.

        Only its 64-bit hash is kept: two keys that share one are admitted a little early.
        """
        keys = self._owners.get(owner)
        if keys is None:
            keys = self._owners[owner] = OrderedDict()
        short = hash(key)
        known = short in keys
        keys[short] = None
        if known:
            keys.move_to_end(short)
            return True
        self._count += 1
        if self._count > self._keys_max:
            self._let_some_go()
        return False

    def forget(self, owner: Hashable) -> None:
        """Drop all keys of an owner."""
        self._count -= len(self._owners.pop(owner, ()))

    def _let_some_go(self) -> None:
        """One, or of several owners some: finding the one with most takes a while."""
        most = max(self._owners, key=lambda owner: len(self._owners[owner]))
        keys = self._owners[most]
        some = max(1, len(keys) >> FORGOTTEN_SHIFT) if len(self._owners) > 1 else 1
        for _ in range(some):
            keys.popitem(last=False)
        self._count -= some
        if not keys:
            del self._owners[most]


@dataclass(slots=True)
class _Draw:
    """What an owner has drawn: (`end` less the budget's virtual time) times its weight."""

    weight: int
    end: int
    listed: int  # its end when it was listed last; the list knows it under this one


class WriteBudget:
    """A token bucket of bytes that may go into debt, and what each owner has drawn from it.

    Holds between `-burst_bytes` and `burst_bytes`; starts full. Times are monotonic nanoseconds; an
    earlier time than before counts as no time. Exact: the level is kept in byte-nanoseconds, and so
    is what owners have drawn, rounded up by less than their weight. Together that is what is
    missing from a full budget, but for what forgotten owners drew. Who drew nothing is not kept.
    """

    def __init__(self, rate_bytes_per_s: int, burst_bytes: int) -> None:
        assert rate_bytes_per_s > 0, "a budget of nothing would never admit anything"
        assert burst_bytes > 0, "a budget of nothing would never admit anything"
        self._rate = rate_bytes_per_s
        self._level_max = burst_bytes * _NS_PER_S
        self._level = self._level_max
        self._at_ns: int | None = None
        self._draws: dict[Hashable, _Draw] = {}
        self._weights = 0  # of those
        self._virtual = 0  # byte-nanoseconds that came back to each unit of weight
        self._left_over = 0  # of what came back: less than moves it on
        self._ends: list[tuple[int, int, Hashable]] = []  # a heap of when draws end, or earlier
        self._sequence = 0

    def __len__(self) -> int:
        """Owners that have drawn."""
        return len(self._draws)

    def room(self, now_ns: int) -> int:
        """Bytes left before the budget is used up; negative when in debt."""
        if self._at_ns is None:
            self._at_ns = now_ns
        elif now_ns > self._at_ns:
            back = self._rate * (now_ns - self._at_ns)
            self._level = min(self._level_max, self._level + back)
            self._give_back(back)
            self._at_ns = now_ns
        return self._level // _NS_PER_S

    @property
    def burst_bytes(self) -> int:
        """The most that can be saved up, and owed."""
        return self._level_max // _NS_PER_S

    def drawn(self, owner: Hashable) -> int:
        """Bytes of an owner that have not come back yet, rounded up."""
        return -(-self._drawn(owner) // _NS_PER_S)

    def spend(self, length_bytes: int, owner: Hashable = ONE_OWNER, weight: int = 1) -> None:
        """These bytes were or will be written."""
        spent = length_bytes * _NS_PER_S
        self._level -= spent
        self._draw(owner, weight, self._drawn(owner) + spent)

    def refund(self, length_bytes: int, owner: Hashable = ONE_OWNER) -> None:
        """These were spent, and will not be written. What came back to the owner already is given
        to the others."""
        back, drawn = length_bytes * _NS_PER_S, self._drawn(owner)
        self._level = min(self._level_max, self._level + back)
        if back < drawn:
            self._draw(owner, self._draws[owner].weight, drawn - back)
        else:
            self._drop(owner)
            self._give_back(back - drawn)

    def forget(self, owner: Hashable) -> None:
        """An owner is gone. What it has drawn stays spent."""
        self._drop(owner)
        self._sweep()

    def _drawn(self, owner: Hashable) -> int:
        draw = self._draws.get(owner)
        return 0 if draw is None else (draw.end - self._virtual) * draw.weight

    def _draw(self, owner: Hashable, weight: int, amount: int) -> None:
        """So much is drawn by this owner from now on, of this weight."""
        assert weight >= 1, "a weight starts at 1"
        end = self._virtual - (-amount // weight)
        draw = self._draws.get(owner)
        if draw is None:
            draw = self._draws[owner] = _Draw(0, end, end + 1)
        self._weights += weight - draw.weight
        draw.weight, draw.end = weight, end
        if end < draw.listed:
            self._sequence += 1
            draw.listed = end
            heapq.heappush(self._ends, (end, self._sequence, owner))
            if len(self._ends) > 2 * len(self._draws) + STALE_ENDS_MAX:
                self._sweep()

    def _drop(self, owner: Hashable) -> None:
        draw = self._draws.pop(owner, None)
        if draw is not None:
            self._weights -= draw.weight

    def _give_back(self, amount: int) -> None:
        """Give byte-nanoseconds to all that have drawn, by weight; what an owner needs no more goes
        to the others."""
        self._left_over += amount
        while self._draws:
            listed, sequence, owner = self._ends[0]
            draw = self._draws.get(owner)
            if draw is None or draw.listed != listed:
                heapq.heappop(self._ends)
            elif draw.end > listed:
                draw.listed = draw.end
                heapq.heapreplace(self._ends, (draw.end, sequence, owner))
            elif (needed := (listed - self._virtual) * self._weights) <= self._left_over:
                self._left_over -= needed
                self._virtual = listed
                self._drop(owner)
            else:
                moved, self._left_over = divmod(self._left_over, self._weights)
                self._virtual += moved
                return
        self._left_over = 0
        self._ends.clear()

    def _sweep(self) -> None:
        """Only what is drawn is listed, and once."""
        for draw in self._draws.values():
            draw.listed = draw.end
        self._ends = [(draw.end, at, owner) for at, (owner, draw) in enumerate(self._draws.items())]
        self._sequence = len(self._ends)
        heapq.heapify(self._ends)


class Admission:
    """Decides block by block, in the order of the prefix.

    `policy`: "all" admits everything; "second_touch" what was offered before; "auto" everything
    while the budget has room, or its owner has drawn less than is left of it and its debt; then as
    "second_touch". Of several owners one that has drawn OWED_OF_FREE times as much as is left is
    refused everything, as all are where debt is deeper than the burst (not under "all"). `budget`
    None means unlimited.
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

    def admit(
        self,
        key: Hashable,
        length_bytes: int,
        now_ns: int,
        *,
        owner: Hashable = ONE_OWNER,
        weight: int = 1,
        alone: bool = True,
    ) -> bool:
        """Whether to write this block; its bytes are taken from the budget at once if so.

        A refused key is remembered, and admitted when its owner offers it again (within the
        budget's debt). It stays remembered then, so that a put that fails afterwards can be tried
        again. `alone`: there is no other owner.
        """
        first, again = self._allows(now_ns, owner, alone=alone)
        if self.policy == "all" or (self.policy == "auto" and first):
            admitted = True
        else:
            known = self.ghost.note(key, owner)
            admitted = known and again
        if admitted:
            self.charge(length_bytes, owner=owner, weight=weight)
        return admitted

    def _allows(self, now_ns: int, owner: Hashable, *, alone: bool) -> tuple[bool, bool]:
        """Whether the budget allows a block of this owner, and one that was offered before."""
        if self._budget is None:
            return True, True
        room, burst = self._budget.room(now_ns), self._budget.burst_bytes
        left = room + burst
        if alone:
            return room > 0, left > 0
        drawn = self._budget.drawn(owner)
        return drawn < left, drawn < OWED_OF_FREE * left

    def budget_level(self, now_ns: int) -> tuple[int, int] | None:
        """Bytes left (negative: owed) and the most that can be saved up; None: unlimited."""
        if self._budget is None:
            return None
        return self._budget.room(now_ns), self._budget.burst_bytes

    def charge(self, length_bytes: int, *, owner: Hashable = ONE_OWNER, weight: int = 1) -> None:
        """Take bytes from the budget that are written without being asked for: reinsertions of
        blocks of this owner."""
        if self._budget is not None and length_bytes:
            self._budget.spend(length_bytes, owner, weight)

    def give_up(self, length_bytes: int, *, owner: Hashable = ONE_OWNER) -> None:
        """A block of this owner that was admitted is not written after all."""
        if self._budget is not None:
            self._budget.refund(length_bytes, owner)

    def forget(self, owner: Hashable) -> None:
        """An owner is gone."""
        self.ghost.forget(owner)
        if self._budget is not None:
            self._budget.forget(owner)
