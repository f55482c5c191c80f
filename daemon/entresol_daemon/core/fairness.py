"""Whose turn it is: start-time fair queueing by cost, across tenants, for one resource. Pure.

Every unit of contended work (a flash read, a block to seal, a pull from a host, a stretch of the
event loop) is pushed with its cost under its tenant's name. The queue pops the unit with the least
virtual start time: a tenant's next unit starts where its last one ended, cost over weight later,
and at most `credit` before the present: who asked for less than its share lately goes before those
who ask for more, up to that. Source: Goyal, Vin and Cheng, "Start-time fair queueing" (1996); with
several units in service at once, Jin, Chase and Kaur, "Interposed proportional sharing" (2004); the
credit is the warp of Duda and Cheriton, "Borrowed-virtual-time scheduling" (1999), bounded.

Invariants: while two tenants both wait, the costs they are served, each over its weight, differ by
at most one unit of each (plus what is in service) and the credit; nothing waits while there is room
(work conserving); within a tenant a lower rank goes first, and equals in the order they came.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from entresol_proto.status import QuotaError, Status

T = TypeVar("T")

# Ranks, within one tenant: what was read from flash for gets, and waits to be granted; gets; puts.
BEGUN, GETS, PUTS = 0, 1, 2
RANKS = 3
WAITING_MAX = 262_144  # units that wait in one queue, over all tenants
FLOWS_REMEMBERED_MAX = 1_024  # then tenants whose last unit is past are forgotten
CREDIT_ROOM = 4  # times as much may be in service for who was served less lately
MEASURED_TARGETS = 4  # a pace is measured over so many times its target
UNIT_TIMES = 3  # what is in service lasts so many times as long as a unit took at least,
TARGETS_MAX = 4  # up to so many times the target
ALONE_TIMES = 3  # and so many times as long while one tenant is alone, up to the same
LEAST_NS = 1_000_000_000  # a unit's least time is of the last one to two of these
_SCALE = 1 << 20  # virtual time is whole: cost * _SCALE // weight


@dataclass(slots=True, eq=False)
class Unit(Generic[T]):
    """One piece of work that waits. Nobody is charged for one that was dropped."""

    cost: int
    item: T
    dropped: bool = False

    def drop(self) -> None:
        """Nobody waits for it any more."""
        self.cost, self.dropped = 0, True


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One tenant's units. `finish` is the virtual time at which its last one ended."""

    weight: int = 1
    finish: int = 0
    waiting: int = 0
    owed: int = 0  # cost of what was done beyond the units popped, to be counted with the next
    lines: tuple[deque[Unit[T]], ...] = field(
        default_factory=lambda: tuple(deque() for _ in range(RANKS))
    )

    def pop(self) -> Unit[T]:
        self.waiting -= 1
        return next(line for line in self.lines if line).popleft()


class FairQueue(Generic[T]):
    """Units of work of all tenants. Costs and weights are whole and at least 1.

    `credit`: the cost, for each unit of weight, by which a tenant that was served less than others
    may go before them.
    """

    def __init__(self, credit: int = 0) -> None:
        self._credit = credit * _SCALE
        self._flows: dict[Hashable, _Flow[T]] = {}
        self._heap: list[tuple[int, int, Hashable]] = []  # one entry per flow that waits
        self._now = 0  # virtual: the start of the unit popped last
        self._sequence = 0
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def flows_waiting(self) -> int:
        """Tenants that wait."""
        return len(self._heap)

    def push(self, flow: Hashable, weight: int, cost: int, item: T, rank: int = GETS) -> Unit[T]:
        """Enter one unit. Raises: QuotaError (BUSY) when WAITING_MAX units wait."""
        if self._waiting >= WAITING_MAX:
            raise QuotaError(f"{WAITING_MAX} units of work wait", status=Status.BUSY)
        mine = self._flow(flow, weight, cost)
        unit = Unit(cost, item)
        mine.lines[rank].append(unit)
        mine.waiting += 1
        self._waiting += 1
        if mine.waiting == 1:
            self._enter(flow, self._start(mine))
        return unit

    def pop(self) -> Unit[T]:
        """The unit whose turn it is. The queue must not be empty."""
        start, _, flow = heapq.heappop(self._heap)
        mine = self._flows[flow]
        unit = mine.pop()
        self._waiting -= 1
        self._now = max(self._now, start)
        mine.finish = start + (unit.cost + mine.owed) * _SCALE // mine.weight
        mine.owed = 0
        if mine.waiting:
            self._enter(flow, mine.finish)
        return unit

    def charge(self, flow: Hashable, weight: int, cost: int) -> None:
        """Count a unit that is served without having waited. Nobody may wait."""
        assert not self._waiting, "it would overtake those who wait"
        mine = self._flow(flow, weight, cost)
        start = self._start(mine)
        self._now = max(self._now, start)
        mine.finish = start + cost * _SCALE // weight

    @property
    def next_has_credit(self) -> bool:
        """Whether whoever comes next was served less than the others. Somebody must wait."""
        return self._heap[0][0] < self._now

    def has_credit(self, flow: Hashable) -> bool:
        """Whether a tenant that does not wait was served less than the others."""
        mine = self._flows.get(flow)
        return self._credit > 0 and (mine is None or mine.finish < self._now)

    def add(self, flow: Hashable, weight: int, cost: int) -> None:
        """Count more for a unit popped or charged before: its turn turned out to be longer."""
        mine = self._flow(flow, weight, cost)
        if mine.waiting:
            mine.owed += cost
        else:
            mine.finish = self._start(mine) + cost * _SCALE // weight

    def _start(self, mine: _Flow[T]) -> int:
        """The virtual time at which a tenant that does not wait yet begins."""
        return max(self._now - self._credit, mine.finish)

    def _flow(self, flow: Hashable, weight: int, cost: int) -> _Flow[T]:
        assert weight >= 1, "a weight starts at 1"
        assert cost >= 1, "nothing is free"
        mine = self._flows.get(flow)
        if mine is None:
            if len(self._flows) >= FLOWS_REMEMBERED_MAX:
                self._forget_past()
            mine = self._flows[flow] = _Flow()
        mine.weight = weight
        return mine

    def _enter(self, flow: Hashable, start: int) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (start, self._sequence, flow))

    def _forget_past(self) -> None:
        """Tenants whose last unit is past start afresh; when nobody waits, all of them do."""
        if not self._waiting:
            last = max((m.finish for m in self._flows.values()), default=self._now)
            self._now = max(self._now, last + self._credit)
        since = self._now - self._credit  # who ended later would gain by being forgotten
        past = [f for f, m in self._flows.items() if not m.waiting and m.finish <= since]
        for flow in past:
            del self._flows[flow]


class Gate(Generic[T]):
    """A fair queue before a resource, and how much of it is in service.

    The next unit may start when its cost fits into `cost_max` beside what is in service, or when
    fewer than `count_min` units are: so many at a time keep the resource busy whatever their size.
    For a tenant that was served less than the others lately (`credit`) there is CREDIT_ROOM times
    as much room: what it asks for is short, and need not wait here for what others have in service.
    While one tenant is alone `alone_max` may be in service, if that is more.
    Every unit started must be ended with `done`, once.
    """

    def __init__(self, *, cost_max: int, count_min: int, credit: int = 0) -> None:
        assert count_min >= 1, "nothing would ever start"
        self.cost_max = cost_max
        self.alone_max = 0  # where no tenant is alone
        self.count_min = count_min
        self.in_service = 0
        self.cost_in_service = 0
        self._occupied = 0  # by what goes through no gate
        self.queue: FairQueue[T] = FairQueue(credit)

    def enter(self, flow: Hashable, weight: int, cost: int) -> bool:
        """Start a unit at once if there is room and nobody waits; True if it was."""
        if len(self.queue) or not self._room(cost, self.queue.has_credit(flow)):
            return False
        self.queue.charge(flow, weight, cost)
        self._begin(cost)
        return True

    def starting(self) -> list[Unit[T]]:
        """The units whose turn has come; they are in service from here on."""
        found: list[Unit[T]] = []
        while len(self.queue) and self._room(1, self.queue.next_has_credit):
            unit = self.queue.pop()
            if not unit.dropped:
                self._begin(unit.cost)
                found.append(unit)
        return found

    def done(self, cost: int) -> None:
        """A unit in service has ended."""
        self.in_service -= 1
        self.cost_in_service -= cost
        assert min(self.in_service, self.cost_in_service) >= 0, "a turn was given back twice"

    def occupy(self, cost: int) -> None:
        """Others use so much from now on (below 0: no longer), at most half of the room."""
        self._occupied += cost
        assert self._occupied >= 0, "room was given back twice"

    def _room(self, cost: int, has_credit: bool) -> bool:
        usual = max(self.cost_max, self.alone_max)
        most = max(usual, self.cost_max * CREDIT_ROOM) if has_credit else usual
        used = self.cost_in_service + min(self._occupied, usual // 2)
        return self.in_service < self.count_min or used + cost <= most

    def _begin(self, cost: int) -> None:
        self.in_service += 1
        self.cost_in_service += cost


class Spacing:
    """At most so many events of one tenant at a time, then one each `spacing_ns` (a leaky bucket:
    ITU-T I.371, the generic cell rate algorithm). Remembers only tenants that are ahead of it."""

    def __init__(self, *, spacing_ns: int, burst: int) -> None:
        assert spacing_ns > 0, "a spacing"
        assert burst > 0, "at least one at a time"
        self._spacing_ns = spacing_ns
        self._ahead_ns = burst * spacing_ns
        self._due_ns: dict[Hashable, int] = {}  # when a tenant's bucket is full again

    def note(self, flow: Hashable, now_ns: int, wait_ns_max: int) -> int | None:
        """How long one event has to wait to keep to the rate; None when that is too long, and then
        it does not count."""
        if len(self._due_ns) >= FLOWS_REMEMBERED_MAX:
            self._due_ns = {f: due for f, due in self._due_ns.items() if due > now_ns}
            if len(self._due_ns) >= FLOWS_REMEMBERED_MAX:
                self._due_ns.clear()  # so many tenants at once are no one tenant's flood
        due_ns = max(self._due_ns.get(flow, now_ns), now_ns) + self._spacing_ns
        wait_ns = max(0, due_ns - self._ahead_ns - now_ns)
        if wait_ns > wait_ns_max:
            return None
        self._due_ns[flow] = due_ns
        return wait_ns


class Pace:
    """How much to have in service, so that what comes next waits about `target_ns` for it.

    What a busy resource gets done in `target_ns`: as it is faster or slower, more or less. With too
    little in service a resource is seen slower than it is; that corrects itself, because it still
    gets more done in `target_ns` than was in service, as long as its latency is below that. So the
    target is longer where units take long, even the quickest of them: with less than the product of
    rate and latency in service a resource idles (Little's law; the least latency of a while as in
    Cardwell et al., "BBR", 2016). What passes between a unit's end and the next one's begin is
    added to the target; and while nothing waits, a resource that gets little done may just have
    little to do.
    """

    def __init__(self, *, target_ns: int, cost_min: int, cost_max: int) -> None:
        assert 0 < cost_min <= cost_max, "an amount to have in service"
        self._target_ns = target_ns
        self._cost_min = cost_min
        self._cost_max = cost_max
        self.cost = cost_min
        self._since_ns = 0  # of the stretch being measured; it is busy all the time
        self._done = 0
        self._spare = False  # whether there was room for more during it
        self._least_ns = self._least_before_ns = 0  # a unit took at least, 0 for not known
        self._least_since_ns = 0

    @property
    def alone_cost(self) -> int:
        """How much to have in service while nobody else could have to wait for it: what is begun
        then need not be begun in time by a loop that has much else to do."""
        target_ns, most_ns = self._target(), TARGETS_MAX * self._target_ns
        return min(self.cost * min(ALONE_TIMES * target_ns, most_ns) // target_ns, self._cost_max)

    def busy(self, now_ns: int) -> None:
        """Something is in service again, after nothing was."""
        self._since_ns = now_ns
        self._done = 0
        self._spare = False

    def done(
        self, cost: int, now_ns: int, *, lag_ns: int = 0, waiting: bool = True, took_ns: int = 0
    ) -> None:
        """A unit ended after `took_ns` (0: not known), and was seen to end `lag_ns` after it did;
        `waiting`: others wait."""
        if took_ns:
            self._note_time(took_ns, now_ns)
        target_ns = self._target()
        self._done += cost
        self._spare |= not waiting
        least = self._cost_min
        self.cost = min(max(self.cost, least), self._cost_max)
        elapsed_ns = now_ns - self._since_ns
        if elapsed_ns < MEASURED_TARGETS * target_ns:
            return
        seen = self._done * (target_ns + lag_ns) // elapsed_ns
        if seen < self.cost:
            smoothed = self.cost if self._spare else (self.cost + seen) // 2
        else:
            smoothed = seen
        self.cost = min(max(smoothed, least), self._cost_max)
        self.busy(now_ns)

    def _note_time(self, took_ns: int, now_ns: int) -> None:
        if now_ns - self._least_since_ns >= LEAST_NS:
            self._least_before_ns, self._least_ns = self._least_ns, 0
            self._least_since_ns = now_ns
        self._least_ns = min(self._least_ns or took_ns, took_ns)

    def _target(self) -> int:
        known = [ns for ns in (self._least_ns, self._least_before_ns) if ns]
        wanted = UNIT_TIMES * min(known, default=0)
        return min(max(self._target_ns, wanted), TARGETS_MAX * self._target_ns)
