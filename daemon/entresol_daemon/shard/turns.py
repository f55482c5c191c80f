"""Turns at what tenants share: the event loop, flash reads, sealing and opening, pulls from hosts.

The order is `core.fairness`'s; here are the futures of those who wait and the resources' bounds.
When nobody else wants a resource, a turn costs a few additions and no switch of tasks.

Invariant: every turn taken is given back exactly once, by whoever took it; a task that is cancelled
while it waits neither holds a turn nor loses one that others could use.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import operator
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from entresol_daemon.compute import Compute
from entresol_daemon.core.accounts import Account
from entresol_daemon.core.fairness import GETS, FairQueue, Gate, Pace, Spacing, Unit
from entresol_proto import limits
from entresol_proto.status import QuotaError, Status

T = TypeVar("T")
R = TypeVar("R")

WAIT_NS_TARGET = 1_000_000  # what is in service at flash or in pulls is about so long
FLASH_BYTES_MIN, FLASH_BYTES_MAX = 1 * limits.MIB, 128 * limits.MIB  # handed to the device
FLASH_ITEM_BYTES = 16 * limits.KIB  # what a read costs beside its length: a thread and its hop
PULL_BYTES_MIN, PULL_BYTES_MAX = 4 * limits.MIB, 128 * limits.MIB  # read from hosts, and sealed
HOPS = 4  # turns of the loop between the end of a read and the begin of the next
HOPS_REMEMBERED, HOP_NS_MAX = 16, 1_000_000
COUNT_MIN = 2  # units in service at least, whatever their length
PORTIONS = 4  # what is in service is about so many units
ALONE = 4  # units may be so much longer while one tenant is alone: each costs the loop the same
SEALS_ALONE = 2  # likewise what a thread seals, which delays nobody's first byte
PORTION_BYTES_MIN, PORTION_BYTES_MAX = 256 * limits.KIB, 16 * limits.MIB  # of one unit
COMPUTE_ITEM_BYTES = 32 * limits.KIB  # what a block costs beside its length: 12 us, raw or not
# Sealed or opened by one thread without a break: two blocks of 1 MiB, say.
COMPUTE_TURN_BYTES = 2 * (limits.MIB + COMPUTE_ITEM_BYTES)
CREDIT_BYTES = 8 * limits.MIB  # who used less of flash, pulls or threads goes first so far
LOOP_CREDIT_COST = 4_000  # likewise on the loop
LOOP_TURN_COST = 50  # about as many microseconds of work without a break
LOOP_ROUND_COST = 500  # begun between two looks at the sockets while one tenant is alone
CONTENDED_S = 0.1  # so long after two tenants took turns only LOOP_TURN_COST is begun

SESSIONS_AT_ONCE = 64  # of one tenant opened at full speed, while others use the loop
SESSION_SPACING_NS = 5_000_000  # between those that follow
SESSION_WAIT_NS_MAX = 2_000_000_000  # who would wait longer is refused
HANDSHAKES_AT_ONCE = 64  # of one address at full speed, while tenants use the loop
HANDSHAKE_SPACING_NS = 10_000_000
HANDSHAKE_WAIT_NS_MAX = 4_000_000_000

# About how many microseconds of the event loop a piece of work takes on one core of today.
REQUEST_COST = 100
FRAME_COST = 40  # sent
SESSION_COST = 200  # admitted and entered
HANDSHAKE_COST = 1_500  # of TLS, both certificates verified
KEY_COST_SHIFT = 2  # a key looked up: a quarter
QUOTE_KEY_COST_SHIFT = 1  # a key looked up and quoted: a half
BLOCK_COST = 20  # a block looked at for a get, and granted; granted when it was read: as much again
WINDOW_COST = 50  # of a get, beside its blocks
CARRY_COST_SHIFT = 10  # a KiB sealed, copied and sent with its grant: one
WINDOW_BLOCKS_IN_TURN = 8  # while others wait for the loop
ITEM_COST = 25  # an item of a RESERVE decided
COMMIT_COST = 3  # an item of a COMMIT checked
APPEND_COST = 50  # a block entered into index, books and event log
TOUCH_KEY_COST_SHIFT = 1  # a key looked up and its block made recent: a half
REMOVAL_COST = 25  # a block forgotten
DROP_COST = 12  # a block dropped with its namespace
WHY_COST = 10  # a key explained
WHY_ELSEWHERE_COST = 3  # and looked for in one namespace more
NAMESPACE_COST = 40  # what one stands for, read from its record
MESSAGE_COST = 20  # read, and answered at once or not at all
DECODE_ITEM_COST = 8  # an item of a RESERVE read, beside its bytes
EVENT_COST = 10  # an event written to one watcher


class Turns:
    """Turns at one resource. Costs are bytes. `pace` says how many may be in service at a time."""

    def __init__(
        self,
        *,
        count_min: int,
        credit: int = 0,
        pace: Pace | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        alone: Callable[[], bool] | None = None,
    ) -> None:
        """`alone`: whether only one tenant asks for turns lately."""
        self._pace = pace
        self._alone = alone
        self._now_ns = now_ns
        self._told_ns = 0  # when those whose turn has come were told last
        self._hop_ns = 0  # about how long the loop takes from there to them
        self._gate: Gate[asyncio.Future[None]] = Gate(
            cost_max=1 if pace is None else pace.cost, count_min=count_min, credit=credit
        )

    @property
    def portion_bytes(self) -> int:
        """How long a unit should be: short where the resource is slow."""
        return min(max(self._gate.cost_max // PORTIONS, PORTION_BYTES_MIN), PORTION_BYTES_MAX)

    @property
    def waiting(self) -> int:
        """Units of work that wait for their turn."""
        return len(self._gate.queue)

    @property
    def in_service(self) -> int:
        """Turns taken and not given back."""
        return self._gate.in_service

    @property
    def at_once(self) -> int:
        """Turns there are at least, whatever their cost."""
        return self._gate.count_min

    async def take(self, account: Account, cost: int, rank: int = GETS) -> int:
        """Return when it is this tenant's turn, and what time it is; then `give` is owed.

        Raises: QuotaError (BUSY).
        """
        gate = self._gate
        if self._pace is not None and not gate.in_service:
            self._pace.busy(self._now_ns())
        self._make_room()
        if gate.enter(account.name, account.weight, cost):
            return self._now_ns()
        turn = asyncio.get_running_loop().create_future()
        unit = gate.queue.push(account.name, account.weight, cost, turn, rank)
        self._begin_next()
        if turn.done():
            return self._now_ns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(cost)
            else:
                unit.drop()
            raise
        now_ns = self._now_ns()
        hop_ns = min(now_ns - self._told_ns, HOP_NS_MAX)  # not a loop that hung
        self._hop_ns += (hop_ns - self._hop_ns) // HOPS_REMEMBERED
        return now_ns

    def enter_all(self, account: Account, costs: Sequence[int]) -> bool:
        """Take several turns, if all of them are to be had now; each is to be given back. None is
        taken otherwise, and none where what is in service has a pace."""
        gate = self._gate
        if self._pace is not None or gate.in_service + len(costs) > gate.count_min:
            return False
        return all(gate.enter(account.name, account.weight, cost) for cost in costs)

    def give(self, cost: int, began_ns: int = 0) -> None:
        """The work of a turn has ended. `began_ns`: what `take` returned, where the work was done
        whole, and how long it took says something of the resource."""
        if self._pace is not None:
            self._told_ns = now_ns = self._now_ns()
            lag_ns, waiting = HOPS * self._hop_ns, len(self._gate.queue) > 0
            took_ns = now_ns - began_ns if began_ns else 0
            self._pace.done(cost, now_ns, lag_ns=lag_ns, waiting=waiting, took_ns=took_ns)
            self._gate.cost_max = self._pace.cost
        self._make_room()
        self._gate.done(cost)
        self._begin_next()

    def occupy(self, cost: int) -> None:
        """Somebody without a turn uses so much of the resource from now on; below 0: no longer."""
        self._gate.occupy(cost)
        if cost < 0:
            self._begin_next()

    def _make_room(self) -> None:
        if self._alone is not None and self._pace is not None:
            self._gate.alone_max = self._pace.alone_cost if self._alone() else 0

    def _begin_next(self) -> None:
        """Begin what there is room for."""
        while started := self._gate.starting():
            for unit in started:
                if unit.item.done():  # cancelled; its task is about to say so
                    self._gate.done(unit.cost)
                else:
                    unit.item.set_result(None)


class HeldTurn:
    """One turn that was taken, to be given back once: when its work has ended, or before, when the
    work has come to wait for something that nobody else waits for."""

    __slots__ = ("_cost", "_held", "_turns")

    def __init__(self, turns: Turns, cost: int) -> None:
        self._turns = turns
        self._cost = cost
        self._held = True

    def give(self) -> None:
        """Give it back, if it was not yet."""
        if self._held:
            self._held = False
            self._turns.give(self._cost)


class LoopTurns:
    """Turns on the event loop. Costs are microseconds, roughly; there is nothing to give back.

    Between two looks at the sockets so much is begun, and one unit more: whoever asks for little is
    not behind what others have queued. An answer takes several looks, so these come often while
    more than one tenant is busy.
    """

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(LOOP_CREDIT_COST)
        self._begun = 0
        self._scheduled = False
        self._last: Hashable = None  # whose turn was the last one
        self._contended_until = 0.0
        self._used_until = 0.0  # by any tenant
        self._greetings = Spacing(spacing_ns=SESSION_SPACING_NS, burst=SESSIONS_AT_ONCE)
        self._handshakes = Spacing(spacing_ns=HANDSHAKE_SPACING_NS, burst=HANDSHAKES_AT_ONCE)
        self.greeting = 0  # hosts whose HELLO waits

    @property
    def waiting(self) -> int:
        """Stretches of work that wait for their turn."""
        return len(self._queue)

    @property
    def tenants_waiting(self) -> int:
        """Tenants of whom something waits."""
        return self._queue.flows_waiting

    @property
    def stretch(self) -> int:
        """How much work may be done without a break: long while one tenant is alone."""
        return LOOP_TURN_COST if self.contended else LOOP_ROUND_COST

    @property
    def contended(self) -> bool:
        """Whether more than one tenant took turns lately."""
        return asyncio.get_running_loop().time() < self._contended_until

    async def greet(self, flow: Hashable, weight: int, now_ns: int) -> None:
        """A turn to open a session. Opening is long for a turn and cannot be cut: who opens many
        while others use the loop waits between them. Raises: QuotaError (BUSY)."""
        wait_ns: int | None = 0
        if self.contended:
            wait_ns = self._greetings.note(flow, now_ns, SESSION_WAIT_NS_MAX)
        self.greeting += 1
        try:
            await self._wait_between(wait_ns, "sessions of this tenant are being opened")
            self._note(flow)
            await self._take(flow, weight, SESSION_COST)
        finally:
            self.greeting -= 1

    async def shake_hands(self, origin: str, now_ns: int) -> None:
        """A turn for a TLS handshake, which is longer still. Nobody knows yet whose it will be, so
        it is the address's, which waits between many of them while any tenant uses the loop.
        Raises: QuotaError (BUSY)."""
        wait_ns: int | None = 0
        if asyncio.get_running_loop().time() < self._used_until:
            wait_ns = self._handshakes.note(origin, now_ns, HANDSHAKE_WAIT_NS_MAX)
        await self._wait_between(wait_ns, f"connections from {origin}")
        await self._take(("origin", origin), 1, HANDSHAKE_COST)

    async def _wait_between(self, wait_ns: int | None, what: str) -> None:
        if wait_ns is None:
            raise QuotaError(
                f"too many {what}",
                hint="keep sessions open, or open them later",
                status=Status.BUSY,
            )
        if wait_ns:
            await asyncio.sleep(wait_ns / 1e9)

    def extend(self, account: Account, wanted: int) -> int:
        """How much of the work wanted may be done in the turn begun just now: LOOP_TURN_COST, which
        is paid, and as much more as a tenant alone may, which is counted here."""
        most = min(wanted, self.stretch)
        self.count(account, most - LOOP_TURN_COST)
        return most

    def count(self, account: Account, cost: int) -> None:
        """The turn begun just now takes so much longer, if it does."""
        if cost > 0:
            self._queue.add(account.name, account.weight, cost)
            self._begin(cost)

    def enter(self, account: Account, cost: int) -> bool:
        """Begin at once if the loop is free and nobody waits; True if so."""
        self._note(account.name)
        return self._enter(account.name, account.weight, cost)

    async def take(self, account: Account, cost: int, rank: int = GETS) -> None:
        """Return when it is this tenant's turn. Raises: QuotaError (BUSY)."""
        self._note(account.name)
        await self._take(account.name, account.weight, cost, rank)

    def ask(self, account: Account, cost: int, rank: int = GETS) -> Unit[asyncio.Future[None]]:
        """Ask for a turn that `enter` did not give; `until` waits for it. Raises: QuotaError."""
        return self._ask(account.name, account.weight, cost, rank)

    async def until(self, asked: Unit[asyncio.Future[None]]) -> None:
        """Return when the turn asked for has come; who is cancelled does not want it any more."""
        try:
            await asked.item
        except asyncio.CancelledError:
            asked.drop()
            raise

    async def _take(self, flow: Hashable, weight: int, cost: int, rank: int = GETS) -> None:
        if not self._enter(flow, weight, cost):
            await self.until(self._ask(flow, weight, cost, rank))

    def _ask(self, flow: Hashable, weight: int, cost: int, rank: int) -> Unit[asyncio.Future[None]]:
        turn = asyncio.get_running_loop().create_future()
        unit = self._queue.push(flow, weight, cost, turn, rank)
        self._schedule()
        return unit

    def _note(self, flow: Hashable) -> None:
        """A tenant uses the loop."""
        now = asyncio.get_running_loop().time()
        self._used_until = now + CONTENDED_S
        if flow != self._last:
            if self._last is not None:
                self._contended_until = now + CONTENDED_S
            self._last = flow

    def _enter(self, flow: Hashable, weight: int, cost: int) -> bool:
        if len(self._queue) or self._begun >= self.stretch:
            return False
        self._queue.charge(flow, weight, cost)
        self._begin(cost)
        return True

    def _begin(self, cost: int) -> None:
        self._begun += cost
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        """Once per turn of the loop while there is work: begin what comes next."""
        self._scheduled = False
        self._begun = 0
        most = self.stretch
        while len(self._queue) and self._begun < most:
            unit = self._queue.pop()
            if not unit.dropped and not unit.item.done():
                unit.item.set_result(None)
                self._begin(unit.cost)


class Stretches:
    """A request's work on the loop, cut into turns of its tenant. Its first turn has begun."""

    def __init__(self, turns: LoopTurns, account: Account) -> None:
        self._turns = turns
        self._account = account
        self._left = turns.extend(account, LOOP_ROUND_COST)

    async def spend(self, cost: int) -> None:
        """So much was done. Whoever awaits this looks again at what others may have changed.

        Raises: QuotaError (BUSY)."""
        self._left -= cost
        if self._left <= 0:
            await self._turns.take(self._account, LOOP_TURN_COST - min(0, self._left))
            self._left = self._turns.extend(self._account, LOOP_ROUND_COST)


@dataclass(slots=True)
class SharedTurns:
    """Every resource that tenants of a shard share."""

    loop: LoopTurns
    flash: Turns
    compute: Turns
    pulls: Turns

    @property
    def read_bytes(self) -> int:
        """How long a unit of reads from flash should be."""
        return self.flash.portion_bytes * (1 if self.loop.contended else ALONE)

    @property
    def seal_bytes(self) -> int:
        """How much one thread should seal without a break."""
        return COMPUTE_TURN_BYTES * (1 if self.loop.contended else SEALS_ALONE)

    @classmethod
    def of(cls, threads: int, now_ns: Callable[[], int]) -> SharedTurns:
        """With the bounds above, for so many compute threads."""

        def paced(least: int, most: int, alone: Callable[[], bool] | None = None) -> Turns:
            pace = Pace(target_ns=WAIT_NS_TARGET, cost_min=least, cost_max=most)
            return Turns(
                count_min=COUNT_MIN, credit=CREDIT_BYTES, pace=pace, now_ns=now_ns, alone=alone
            )

        loop = LoopTurns()
        return cls(
            loop=loop,
            flash=paced(FLASH_BYTES_MIN, FLASH_BYTES_MAX, lambda: not loop.contended),
            # One more than threads, so that none of them waits for the loop.
            compute=Turns(count_min=threads + 1, credit=CREDIT_BYTES, now_ns=now_ns),
            pulls=paced(PULL_BYTES_MIN, PULL_BYTES_MAX),
        )


def portions(items: Sequence[T], size_of: Callable[[T], int], bytes_max: int) -> list[list[T]]:
    """Runs of at most `bytes_max`; a longer item makes its own run."""
    found: list[list[T]] = []
    size = 0
    for item in items:
        length = size_of(item)
        if not found or size + length > bytes_max:
            found.append([])
            size = 0
        found[-1].append(item)
        size += length
    return found


async def compute_in_turns(
    turns: Turns,
    compute: Compute,
    account: Account,
    fn: Callable[[T], R],
    items: Sequence[T],
    size_of: Callable[[T], int],
    rank: int = GETS,
    turn_bytes: int = COMPUTE_TURN_BYTES,
) -> list[R]:
    """`[fn(item) for item in items]` in compute threads, a tenant's turn at a time.

    When this returns or raises, no thread touches the items any more. Raises: what `fn` raises,
    ComputeError, QuotaError (BUSY).
    """

    async def one(portion: list[T], cost: int) -> list[R]:
        await turns.take(account, cost, rank)
        try:
            return await compute.run(_each, fn, portion)
        finally:
            turns.give(cost)

    # In one part for each thread, where that is shorter: each costs a hand-over and a wake.
    weighed = [(size_of(item) + COMPUTE_ITEM_BYTES, item) for item in items]
    parts_bytes = -(-sum([weight for weight, _ in weighed]) // max(1, turns.at_once - 1))
    portioned = portions(weighed, _weight, min(turn_bytes, parts_bytes))
    runs = [[item for _, item in run] for run in portioned]
    costs = [sum([weight for weight, _ in run]) for run in portioned]
    if len(runs) == 1:
        return await one(runs[0], costs[0])
    if turns.enter_all(account, costs):  # nobody waits: no tasks, and this one wakes once
        try:
            results = await compute.map(functools.partial(_each, fn), runs)
        finally:
            for cost in costs:
                turns.give(cost)
        return list(itertools.chain.from_iterable(results))
    tasks = [asyncio.ensure_future(one(*each)) for each in zip(runs, costs, strict=True)]
    try:
        if tasks:
            await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    failed = [error for task in tasks if (error := task.exception()) is not None]
    if failed:
        raise failed[0]
    return [result for task in tasks for result in task.result()]


_weight: Callable[[tuple[int, object]], int] = operator.itemgetter(0)


def _each(fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return [fn(item) for item in items]
