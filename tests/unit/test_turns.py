"""Turns and waiting for room: given back exactly once, cancelled cleanly, nobody woken in vain."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from entresol_daemon.compute import InlineCompute
from entresol_daemon.core.accounts import Account
from entresol_daemon.core.fairness import Pace
from entresol_daemon.shard import turns
from entresol_daemon.shard.parts import RETRIES_IN_VAIN_MAX, Room, Signal
from entresol_daemon.shard.turns import (
    LoopTurns,
    SharedTurns,
    Turns,
    compute_in_turns,
    portions,
)
from entresol_proto.ids import TenantName
from entresol_proto.status import QuotaError, Status

T = TypeVar("T")
R = TypeVar("R")


def account(name: str, weight: int = 1) -> Account:
    return Account(TenantName(name), name.encode().ljust(16), weight=weight)


A, B = account("a"), account("b")
SECOND_NS = 1_000_000_000


async def until_quiet() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_turn_waits_for_one_that_is_given_back() -> None:
    queue = Turns(count_min=1)
    await queue.take(A, 10)
    second = asyncio.create_task(queue.take(B, 10))
    await until_quiet()
    assert (queue.waiting, queue.in_service, second.done()) == (1, 1, False)
    queue.give(10)
    await second
    queue.give(10)
    assert (queue.waiting, queue.in_service) == (0, 0)


async def test_who_is_cancelled_while_waiting_takes_nobodys_turn() -> None:
    queue = Turns(count_min=1)
    await queue.take(A, 10)
    quitter, patient = (asyncio.create_task(queue.take(who, 10)) for who in (B, B))
    await until_quiet()
    quitter.cancel()
    await until_quiet()
    queue.give(10)
    await patient
    queue.give(10)
    assert (queue.waiting, queue.in_service) == (0, 0)


async def test_a_turn_that_came_in_the_moment_of_cancelling_is_given_back() -> None:
    queue = Turns(count_min=1)
    await queue.take(A, 10)
    quitter, patient = (asyncio.create_task(queue.take(who, 10)) for who in (A, B))
    await until_quiet()
    queue.give(10)
    quitter.cancel()
    await asyncio.gather(quitter, return_exceptions=True)
    await patient
    queue.give(10)
    assert (queue.waiting, queue.in_service) == (0, 0)


async def test_work_of_others_goes_between_the_portions_of_one() -> None:
    queue, compute = Turns(count_min=1), InlineCompute()
    order: list[str] = []

    def work(item: str) -> str:
        order.append(item)
        return item.upper()

    def size(_: str) -> int:
        return turns.COMPUTE_TURN_BYTES

    many = asyncio.create_task(compute_in_turns(queue, compute, A, work, ["a"] * 6, size))
    await asyncio.sleep(0)
    few = asyncio.create_task(compute_in_turns(queue, compute, B, work, ["b"] * 2, size))
    assert await few == ["B", "B"]
    assert await many == ["A"] * 6
    assert order.index("b") <= 2
    assert order[:5].count("b") == 2
    assert queue.in_service == 0


async def test_tiny_blocks_are_not_sealed_before_all_others() -> None:
    """By their length alone thousands of them were done while one block of another waited."""
    queue, compute, begun = Turns(count_min=1), InlineCompute(), []
    sizes = {"a": 16, "b": 65_536}

    async def some(who: Account, name: str, count: int) -> None:
        await compute_in_turns(queue, compute, who, begun.append, [name] * count, sizes.__getitem__)

    tiny = [asyncio.create_task(some(A, "a", 4)) for _ in range(100)]
    await asyncio.sleep(0)
    for _ in range(4):  # not once only: what is saved up would do for that
        await some(B, "b", 1)
    ratio = (65_536 + turns.COMPUTE_ITEM_BYTES) / turns.COMPUTE_ITEM_BYTES
    assert begun.count("a") <= 4 * (ratio + 4) + 4
    for task in tiny:
        task.cancel()
    await asyncio.gather(*tiny, return_exceptions=True)
    assert queue.in_service == 0


async def test_reads_leave_room_for_what_is_written() -> None:
    pace = Pace(target_ns=SECOND_NS, cost_min=100, cost_max=100)
    queue = Turns(count_min=1, pace=pace)
    queue.occupy(1_000)
    assert await asyncio.wait_for(queue.take(A, 60), 1)
    second = asyncio.create_task(queue.take(A, 20))
    await until_quiet()
    assert not second.done(), "half of the room is the write's"
    queue.occupy(-1_000)
    await until_quiet()
    assert second.done()
    queue.give(60)
    queue.give(20)


async def test_a_tenant_alone_has_more_in_service() -> None:
    alone = True
    pace = Pace(target_ns=SECOND_NS, cost_min=100, cost_max=1_000)
    queue = Turns(count_min=1, pace=pace, alone=lambda: alone)
    for _ in range(3):
        assert await asyncio.wait_for(queue.take(A, 100), 1)
    fourth = asyncio.create_task(queue.take(A, 100))
    await until_quiet()
    assert not fourth.done()
    alone = False
    queue.give(100)
    queue.give(100)
    await until_quiet()
    assert not fourth.done(), "the room is the usual one"
    queue.give(100)
    await until_quiet()
    assert fourth.done()
    queue.give(100)


async def test_a_failure_gives_every_turn_back() -> None:
    queue, compute = Turns(count_min=2), InlineCompute()

    def work(item: int) -> int:
        return 1 // item

    with pytest.raises(ZeroDivisionError):
        await compute_in_turns(queue, compute, A, work, [1, 0, 1], lambda _: 1 << 22)
    assert (queue.waiting, queue.in_service) == (0, 0)
    assert await compute_in_turns(queue, compute, A, work, [], lambda _: 1) == []


async def test_several_turns_are_taken_at_once_or_none_is() -> None:
    queue = Turns(count_min=3)
    assert not queue.enter_all(A, [10] * 4)
    assert queue.enter_all(A, [10, 20])
    assert not queue.enter_all(B, [10, 10])
    assert (queue.waiting, queue.in_service) == (0, 2)
    assert queue.enter_all(B, [10])
    waiting = asyncio.create_task(queue.take(A, 10))
    await until_quiet()
    for cost in (10, 20, 10):
        queue.give(cost)
    await waiting
    queue.give(10)
    assert queue.in_service == 0


async def test_threads_that_nobody_waits_for_are_all_taken_by_one_wait() -> None:
    """No task for each portion: every step of one waits for a turn of a busy loop."""
    queue, tasks = Turns(count_min=4), len(asyncio.all_tasks())
    seen: list[int] = []

    class Watched(InlineCompute):
        async def map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
            seen.append(queue.in_service)
            return await super().map(fn, items)

    def work(item: int) -> int:
        seen.append(len(asyncio.all_tasks()) - tasks)
        return -item

    found = await compute_in_turns(queue, Watched(), A, work, [1, 2, 3, 4], lambda _: 1 << 20)
    assert found == [-1, -2, -3, -4]
    assert seen == [4, 0, 0, 0, 0]
    assert queue.in_service == 0


async def test_a_turn_on_the_loop_that_was_asked_for_and_given_up_costs_nothing() -> None:
    loop_turns = LoopTurns()
    while loop_turns.enter(A, 1_000):
        pass
    for _ in range(20):  # each for a round of its own
        loop_turns.ask(B, 1_000)
    asked = loop_turns.ask(B, 1_000)
    waits = asyncio.create_task(loop_turns.until(asked))
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    assert (asked.cost, asked.dropped) == (0, True)
    await until_quiet()
    await until_quiet()
    assert loop_turns.waiting == 0


async def test_who_used_less_begins_at_once_although_others_wait() -> None:
    pace = Pace(target_ns=SECOND_NS, cost_min=100, cost_max=100)
    queue = Turns(count_min=1, credit=1_000, pace=pace)
    for _ in range(50):
        await queue.take(A, 100)
        queue.give(100)
    await queue.take(A, 100)
    crowd = [asyncio.create_task(queue.take(A, 100)) for _ in range(3)]
    await until_quiet()
    assert (queue.waiting, queue.in_service) == (3, 1)
    quick = queue.take(B, 100)
    with pytest.raises(StopIteration):
        quick.send(None)  # it ends without having waited
    assert (queue.waiting, queue.in_service) == (3, 2)
    for _ in range(5):
        queue.give(100)
        await until_quiet()
    await asyncio.gather(*crowd)
    assert (queue.waiting, queue.in_service) == (0, 0)


def test_portions_keep_order_and_bounds() -> None:
    assert portions([4, 4, 4, 20, 1], lambda n: n, 8) == [[4, 4], [4], [20], [1]]


async def test_little_is_begun_between_two_looks_at_the_sockets() -> None:
    loop_turns = LoopTurns()
    assert loop_turns.enter(A, turns.LOOP_TURN_COST)
    assert not loop_turns.enter(B, turns.LOOP_TURN_COST)
    waits = [
        asyncio.create_task(loop_turns.take(who, turns.LOOP_TURN_COST)) for who in (A, A, A, B)
    ]
    rounds = []
    for _ in range(8):
        await asyncio.sleep(0)
        rounds.append(sum(wait.done() for wait in waits))
    assert rounds[-1] == 4
    assert max(b - a for a, b in itertools.pairwise(rounds)) == 1
    assert waits[3].done()


async def test_one_that_is_alone_goes_on_for_longer() -> None:
    loop_turns = LoopTurns()
    begun = 0
    while loop_turns.enter(A, turns.LOOP_TURN_COST):
        begun += turns.LOOP_TURN_COST
    assert begun == turns.LOOP_ROUND_COST


async def test_a_turn_is_extended_while_its_tenant_is_alone() -> None:
    loop_turns = LoopTurns()
    assert loop_turns.enter(A, turns.LOOP_TURN_COST)
    assert loop_turns.extend(A, 20) == 20
    assert loop_turns.enter(A, turns.LOOP_TURN_COST), "a short one is paid already"
    await until_quiet()
    assert loop_turns.enter(A, turns.LOOP_TURN_COST)
    assert loop_turns.extend(A, 1_000_000) == turns.LOOP_ROUND_COST
    assert not loop_turns.enter(A, 1), "the rest of the round is used up"


async def test_a_turn_is_not_extended_while_others_take_turns() -> None:
    loop_turns = LoopTurns()
    assert loop_turns.enter(B, turns.LOOP_TURN_COST)
    for who in (A, B):
        await loop_turns.take(who, turns.LOOP_TURN_COST)
        assert loop_turns.extend(who, 1_000_000) == turns.LOOP_TURN_COST
    assert loop_turns.contended
    assert loop_turns.extend(B, 20) == 20


async def test_what_a_turn_took_longer_is_paid_with_the_next() -> None:
    loop_turns, order = LoopTurns(), []
    assert loop_turns.enter(B, 1)
    assert loop_turns.enter(A, turns.LOOP_TURN_COST)
    loop_turns.count(A, 0)
    loop_turns.count(A, turns.LOOP_CREDIT_COST + 20 * turns.LOOP_TURN_COST)

    async def one(who: Account) -> None:
        await loop_turns.take(who, turns.LOOP_TURN_COST)
        order.append(who.name)

    await asyncio.gather(*(one(who) for who in [A] * 10 + [B] * 10))
    assert order == ["a"] + ["b"] * 10 + ["a"] * 9, "the first one found the loop idle"


@pytest.fixture
def slow_greetings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions at once, then one a second; who takes turns once contends for long."""
    monkeypatch.setattr(turns, "SESSIONS_AT_ONCE", 2)
    monkeypatch.setattr(turns, "SESSION_SPACING_NS", SECOND_NS)
    monkeypatch.setattr(turns, "SESSION_WAIT_NS_MAX", 2 * SECOND_NS)
    monkeypatch.setattr(turns, "CONTENDED_S", 60.0)


@pytest.mark.usefixtures("slow_greetings")
async def test_a_tenant_alone_opens_sessions_as_fast_as_it_can() -> None:
    loop_turns = LoopTurns()
    async with asyncio.timeout(30):
        await asyncio.gather(*(loop_turns.greet(A.name, 1, 0) for _ in range(100)))
    assert loop_turns.greeting == 0


@pytest.mark.usefixtures("slow_greetings")
async def test_sessions_are_spaced_and_refused_while_others_use_the_loop() -> None:
    """Two at once, two wait one second and two; the next is refused; other tenants do not wait."""
    loop_turns = LoopTurns()
    for who in (A, B):
        await loop_turns.take(who, turns.LOOP_TURN_COST)
    many = [asyncio.create_task(loop_turns.greet(A.name, 1, 0)) for _ in range(4)]
    await until_quiet()
    assert [task.done() for task in many] == [True, True, False, False]
    assert loop_turns.greeting == 2
    with pytest.raises(QuotaError) as caught:
        await loop_turns.greet(A.name, 1, 0)
    assert caught.value.status is Status.BUSY
    assert caught.value.hint
    await loop_turns.greet(B.name, 1, 0)
    assert loop_turns.greeting == 2
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    assert loop_turns.greeting == 0


@pytest.mark.usefixtures("slow_greetings")
async def test_a_spaced_session_is_opened_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SESSION_SPACING_NS", 20_000_000)
    loop_turns, loop = LoopTurns(), asyncio.get_running_loop()
    for who in (A, B):
        await loop_turns.take(who, turns.LOOP_TURN_COST)
    begun = loop.time()
    await asyncio.gather(*(loop_turns.greet(A.name, 1, 0) for _ in range(4)))
    assert loop.time() - begun >= 0.035
    assert loop_turns.greeting == 0


async def test_a_session_cancelled_while_it_waits_for_the_loop_is_not_counted() -> None:
    loop_turns = LoopTurns()
    assert loop_turns.enter(A, turns.LOOP_ROUND_COST)
    quitter = asyncio.create_task(loop_turns.greet(B.name, 1, 0))
    await asyncio.sleep(0)
    patient = asyncio.create_task(loop_turns.greet(A.name, 1, 0))
    quitter.cancel()
    await asyncio.gather(quitter, patient, return_exceptions=True)
    assert (loop_turns.greeting, patient.exception()) == (0, None)


async def looker(signal: Signal, who: Account, looks: list[str], tries: int) -> bool:
    """Looks in vain so many times, then finds room."""
    again = False
    for _ in range(tries):
        if not await signal.wait(who, SECOND_NS, Room.GET, again=again):
            return False
        looks.append(who.name)
        again = True
    return True


async def test_a_crowd_in_vain_is_not_woken_as_a_whole() -> None:
    signal, looks = Signal(LoopTurns()), []
    crowd = [asyncio.create_task(looker(signal, A, looks, 1_000)) for _ in range(100)]
    other = asyncio.create_task(looker(signal, B, looks, 1))
    await until_quiet()
    signal.notify()
    assert await other, "whoever finds room finds it at once"
    for _ in range(300):
        await asyncio.sleep(0)
    assert looks.count("a") <= RETRIES_IN_VAIN_MAX + 1
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert not signal._tenants


async def test_as_long_as_they_find_room_all_look() -> None:
    signal, looks = Signal(LoopTurns()), []
    crowd = [asyncio.create_task(looker(signal, A, looks, 1)) for _ in range(50)]
    await until_quiet()
    signal.notify()
    assert all(await asyncio.gather(*crowd))
    assert looks == ["a"] * 50


async def test_who_waits_for_a_session_hears_of_that_session() -> None:
    signal = Signal(LoopTurns())
    mine = asyncio.create_task(signal.wait(A, SECOND_NS, Room.GET, session=7))
    await until_quiet()
    signal.notify()
    signal.notify(8)
    await until_quiet()
    assert not mine.done()
    signal.notify(7)
    assert await mine
    assert not signal._sessions


async def test_waiting_ends_at_its_deadline() -> None:
    signal = Signal(LoopTurns())
    assert not await signal.wait(A, 0, Room.GET)
    assert not await signal.wait(A, 10_000_000, Room.GET)
    assert not signal._tenants


@pytest.fixture
def slow_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of an address at once, then one a second."""
    monkeypatch.setattr(turns, "HANDSHAKES_AT_ONCE", 2)
    monkeypatch.setattr(turns, "HANDSHAKE_SPACING_NS", SECOND_NS)
    monkeypatch.setattr(turns, "HANDSHAKE_WAIT_NS_MAX", 2 * SECOND_NS)
    monkeypatch.setattr(turns, "CONTENDED_S", 60.0)


@pytest.mark.usefixtures("slow_handshakes")
async def test_hands_are_shaken_at_full_speed_while_no_tenant_is_there() -> None:
    loop_turns = LoopTurns()
    async with asyncio.timeout(30):
        await asyncio.gather(*(loop_turns.shake_hands("10.0.0.1", 0) for _ in range(50)))


@pytest.mark.usefixtures("slow_handshakes")
async def test_handshakes_of_one_address_are_spaced_and_refused_while_a_tenant_works() -> None:
    loop_turns = LoopTurns()
    await loop_turns.take(A, turns.LOOP_TURN_COST)
    many = [asyncio.create_task(loop_turns.shake_hands("10.0.0.1", 0)) for _ in range(4)]
    await until_quiet()
    assert [task.done() for task in many] == [True, True, False, False]
    with pytest.raises(QuotaError) as caught:
        await loop_turns.shake_hands("10.0.0.1", 0)
    assert caught.value.status is Status.BUSY
    async with asyncio.timeout(30):
        await loop_turns.shake_hands("10.0.0.2", 0)
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)


async def test_a_handshake_is_no_tenant_that_others_must_be_kept_from() -> None:
    loop_turns = LoopTurns()
    await loop_turns.take(A, turns.LOOP_TURN_COST)
    await loop_turns.shake_hands("10.0.0.1", 0)
    await loop_turns.take(A, turns.LOOP_TURN_COST)
    assert not loop_turns.contended
    await loop_turns.take(B, turns.LOOP_TURN_COST)
    assert loop_turns.contended


async def test_units_are_longer_while_one_tenant_is_alone() -> None:
    shared = SharedTurns.of(2, lambda: 0)
    await shared.loop.take(A, turns.LOOP_TURN_COST)
    alone, seals_alone = shared.read_bytes, shared.seal_bytes
    await shared.loop.take(B, turns.LOOP_TURN_COST)
    assert shared.read_bytes == shared.flash.portion_bytes
    assert alone == turns.ALONE * shared.read_bytes
    assert shared.seal_bytes == turns.COMPUTE_TURN_BYTES
    assert seals_alone == turns.SEALS_ALONE * turns.COMPUTE_TURN_BYTES
    async with asyncio.timeout(30):
        while shared.loop.contended:
            await asyncio.sleep(0.01)
    assert shared.read_bytes == alone
