"""Calls that several threads of a pool are in at a time: each piece of work is done once, the loop
hears once, and when it has heard nobody is in one any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from entresol_client.results import RequestFailedError
from entresol_client.workers import HAND_OVER_NS, InlineWorkers, ThreadWorkers
from entresol_proto import jobs
from entresol_proto.limits import MIB
from entresol_proto.status import Status
from entresol_proto.threads import Pool

THREADS = 3


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(THREADS, "test-shared")
    yield made
    made.close()


class Work:
    """So many pieces; which thread did which, and how many were in it at once."""

    def __init__(self, pieces: int, *, in_turn: int = 1 << 30, piece_s: float = 0.0) -> None:
        self.left = deque(range(pieces))
        self.done: list[tuple[int, int]] = []
        self.inside = self.most = self.calls = 0
        self.gate = threading.Event()
        self.gate.set()
        self.came = threading.Semaphore(0)
        self.over = False  # its caller was told so
        self.late = 0  # what was done after that
        self._in_turn, self._piece_s = in_turn, piece_s
        self._lock = threading.Lock()

    def __call__(self) -> bool:
        with self._lock:
            self.calls += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.late += self.over
        self.came.release()
        try:
            assert self.gate.wait(30)
            for _ in range(self._in_turn):
                try:
                    piece = self.left.popleft()
                except IndexError:
                    return False
                self.done.append((piece, threading.get_ident()))
                self.late += self.over
                time.sleep(self._piece_s)
            return bool(self.left)
        finally:
            with self._lock:
                self.inside -= 1

    def wait_for(self, calls: int) -> None:
        for _ in range(calls):
            assert self.came.acquire(timeout=30)


async def begun(work: Work, calls: int) -> None:
    await asyncio.to_thread(work.wait_for, calls)


def occupied(pool: Pool, count: int) -> tuple[threading.Event, threading.Semaphore]:
    """So many threads that wait for the event; there is a permit for each that does."""
    gate, there = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        there.release()
        gate.wait(30)

    for _ in range(count):
        pool.post(wait)
    return gate, there


async def test_threads_share_the_work_and_the_loop_hears_once(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.run(int)
    written, write = [], os.eventfd_write
    monkeypatch.setattr(os, "eventfd_write", lambda fd, n: (written.append(fd), write(fd, n)))
    work = Work(60, piece_s=0.001)
    work.gate.clear()
    job = pool.submit_shared(work, threads=THREADS)
    await begun(work, THREADS)
    work.gate.set()
    assert await job.outcome() is None
    assert sorted(piece for piece, _ in work.done) == list(range(60))
    assert len({thread for _, thread in work.done}) == work.most == THREADS
    assert work.inside == 0
    assert len(written) == 1


@pytest.mark.parametrize("wanted", [1, 2, THREADS, 50])
async def test_no_more_threads_than_asked_for_or_there_are(pool: Pool, wanted: int) -> None:
    work = Work(200, piece_s=0.0002)
    await pool.submit_shared(work, threads=wanted).outcome()
    assert Counter(piece for piece, _ in work.done) == dict.fromkeys(range(200), 1)
    assert work.most <= min(wanted, THREADS)
    assert work.calls <= min(wanted, THREADS)


async def test_one_that_comes_again_lets_others_have_a_turn() -> None:
    order: list[str] = []
    work = Work(4, in_turn=1)

    def one() -> bool:
        order.append("shared")
        return work()

    with contextlib.closing(Pool(1, "test-turns")) as pool:
        gate, there = occupied(pool, 1)
        await asyncio.to_thread(there.acquire, timeout=30)
        job = pool.submit_shared(one, threads=1)
        other = pool.submit(order.append, "other")
        gate.set()
        await job.outcome()
        await other.outcome()
    assert order == ["shared", "other", "shared", "shared", "shared"]
    assert [piece for piece, _ in work.done] == [0, 1, 2, 3]


async def test_cancelled_before_any_thread_came_it_never_runs(pool: Pool) -> None:
    gate, there = occupied(pool, THREADS)
    for _ in range(THREADS):
        await asyncio.to_thread(there.acquire, timeout=30)
    work = Work(5)
    job = pool.submit_shared(work, threads=2)
    waiting = asyncio.ensure_future(job.outcome(job.stop))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not job.begun
    gate.set()
    await pool.run(int)
    assert (work.calls, len(work.left)) == (0, 5)


async def test_a_cancelled_caller_waits_for_those_inside_and_none_comes_again(pool: Pool) -> None:
    work = Work(1000, in_turn=1)
    work.gate.clear()
    job = pool.submit_shared(work, threads=2)
    waiting = asyncio.ensure_future(job.outcome(job.stop))
    await begun(work, 2)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0.01)
        assert not waiting.done(), "it left its threads behind"
    work.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.inside == 0
    done = len(work.done)
    await pool.run(int)
    await asyncio.sleep(0.02)
    assert len(work.done) == done <= 2


async def test_the_first_error_counts_and_no_call_begins_after_it(pool: Pool) -> None:
    both, calls = threading.Barrier(2), []

    def fail() -> bool:
        calls.append(threading.get_ident())
        both.wait(30)
        raise ValueError(len(calls))

    job = pool.submit_shared(fail, threads=2)
    with pytest.raises(ValueError, match="2"):
        await job.outcome(job.stop)
    await pool.run(int)
    assert len(calls) == 2


async def test_what_a_future_does_not_take_is_an_error_all_the_same(pool: Pool) -> None:
    def fail() -> bool:
        raise StopIteration

    job, other = pool.submit_shared(fail, threads=1), pool.submit(int)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(job.outcome(job.stop), 10)
    assert await asyncio.wait_for(other.outcome(), 10) == 0


async def test_where_memory_is_short_fewer_threads_come(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was handed over is done: it must not be told that it was not."""

    class Short:
        def __init__(self) -> None:
            self.puts = 0

        def put(self, job: object) -> None:
            self.puts += 1
            if self.puts > 1:
                raise MemoryError
            queued.put(job)

        def __getattr__(self, name: str) -> object:
            return getattr(queued, name)

    queued: Any = pool._queue
    short = Short()
    work = Work(20)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_queue", short)
        job = pool.submit_shared(work, threads=THREADS)
    await job.outcome(job.stop)
    assert (short.puts, work.calls, len(work.done)) == (2, 1, 20)


@pytest.mark.parametrize("drop", [False, True])
async def test_a_pool_that_closes_ends_what_is_shared(drop: bool) -> None:
    pool = Pool(2, "test-closing")
    work = Work(50, in_turn=1)
    work.gate.clear()
    job = pool.submit_shared(work, threads=2)
    await begun(work, 2)
    closing = asyncio.create_task(asyncio.to_thread(pool.close, drop=drop))
    while not pool._closed:
        await asyncio.sleep(0.001)
    work.gate.set()
    await job.outcome(job.stop)  # neither hangs nor raises
    await closing
    assert work.inside == 0
    assert len(work.done) == 50 or (drop and len(work.done) <= 4)


async def test_a_pool_that_closes_before_a_thread_came_cancels_it() -> None:
    pool = Pool(1, "test-closing")
    gate, there = occupied(pool, 1)
    await asyncio.to_thread(there.acquire, timeout=30)
    job = pool.submit_shared(Work(5), threads=1)
    pool.close(wait=False, drop=True)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await job.outcome(job.stop)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit_shared(Work(1), threads=1)


async def test_a_caller_who_is_cancelled_when_its_pool_gave_the_call_up_goes() -> None:
    pool = Pool(1, "test-closing")
    gate, there = occupied(pool, 1)
    await asyncio.to_thread(there.acquire, timeout=30)
    job = pool.submit_shared(Work(5), threads=1)
    waiting = asyncio.ensure_future(job.outcome(job.stop))
    await asyncio.sleep(0)
    gate.set()
    pool.close(drop=True)  # it is given up, and the loop has not heard of that
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 10)


async def test_what_it_was_given_is_let_go_though_it_is_queued_still(pool: Pool) -> None:
    gate, there = occupied(pool, THREADS - 1)
    for _ in range(THREADS - 1):
        await asyncio.to_thread(there.acquire, timeout=30)
    work = Work(5)
    gone = weakref.ref(work)
    await pool.submit_shared(work, threads=THREADS).outcome()
    assert len(work.done) == 5
    del work
    for _ in range(1000):  # the thread that was in it may not have left its last frame
        if gone() is None:
            break
        await asyncio.sleep(0.001)
    assert gone() is None, "entries of busy threads kept it"
    gate.set()


async def test_a_loop_keeps_nothing_of_a_pool_that_is_gone() -> None:
    pool = Pool(2, "test-gone")
    for _ in range(20):
        await pool.submit_shared(Work(3), threads=2).outcome()
    cancelled = pool.submit_shared(Work(3), threads=2)
    cancelled.cancel()
    pool.close()
    await asyncio.sleep(0.01)
    assert asyncio.get_running_loop() not in jobs._homes


async def test_workers_tell_when_no_thread_came_in_time() -> None:
    workers = ThreadWorkers(1)
    gate, there = occupied(workers._pool, 1)
    await asyncio.to_thread(there.acquire, timeout=30)
    work = Work(2)
    try:
        with pytest.raises(RequestFailedError) as found:
            await workers.share(work, threads=1, until_ns=time.monotonic_ns() + 20_000_000)
        assert found.value.status is Status.DEADLINE
    finally:
        gate.set()
        workers.close()
    assert work.calls == 0
    with pytest.raises(RequestFailedError) as closed:
        await workers.share(work, threads=1)
    assert closed.value.status is Status.DISCONNECTED


async def test_at_the_deadline_a_call_between_two_turns_does_not_wait_for_the_next() -> None:
    workers = ThreadWorkers(1)
    work, busy = Work(50, in_turn=1), threading.Event()
    try:
        work.gate.clear()
        until_ns = time.monotonic_ns() + 100_000_000
        sharing = asyncio.ensure_future(workers.share(work, threads=1, until_ns=until_ns))
        await begun(work, 1)
        workers._pool.post(busy.wait, 30)  # before the call's next turn
        work.gate.set()
        assert await asyncio.wait_for(sharing, 10) is True, "it tells that it was the deadline"
        assert work.calls == 1
    finally:
        busy.set()
        workers.close()


@pytest.mark.parametrize("make", [ThreadWorkers, InlineWorkers])
async def test_workers_share(make: Callable[[int], ThreadWorkers | InlineWorkers]) -> None:
    workers = make(2)
    work = Work(10, in_turn=3)
    assert await workers.share(work, threads=2) is False
    workers.close()
    assert sorted(piece for piece, _ in work.done) == list(range(10))


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_ends_a_call_nobody_is_in_it_afterwards(seed: int) -> None:
    """Cancellations, deadlines, errors and a closing pool, all at once."""
    rng = random.Random(seed)
    workers = ThreadWorkers(rng.randint(1, 4))
    loop = asyncio.get_running_loop()

    async def one(work: Work) -> None:
        until_ns = time.monotonic_ns() + rng.choice((10**5, 10**6, 10**7, 10**10))
        try:
            await workers.share(work, threads=rng.randint(1, 4), until_ns=until_ns)
        except RequestFailedError:
            pass
        finally:
            assert work.inside == 0
            work.left.clear()
            work.over = True

    works = [Work(n % 20, in_turn=1 + n % 3, piece_s=n % 2 / 10_000) for n in range(100)]
    tasks = [asyncio.ensure_future(one(work)) for work in works]
    for task in tasks:
        if rng.random() < 0.2:
            loop.call_later(rng.random() * 0.02, task.cancel)
    if rng.random() < 0.5:
        loop.call_later(rng.random() * 0.02, workers.close)
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert {type(each) for each in ended} <= {type(None), asyncio.CancelledError}
    workers.close()
    await asyncio.sleep(0.005)
    assert not any(work.inside or work.late for work in works)
    assert loop not in jobs._homes


def test_how_long_an_opening_takes_is_learned_and_one_that_was_interrupted_changes_little() -> None:
    workers = ThreadWorkers(1)
    assert not workers.is_short(MIB), "nothing was opened yet"
    workers.took(MIB, HAND_OVER_NS // 2)
    assert workers.is_short(2 * MIB)
    assert not workers.is_short(2 * MIB + 1)
    workers.took(MIB, 1_000 * HAND_OVER_NS)
    assert workers.is_short(MIB)
    for _ in range(20):
        workers.took(MIB, 10 * HAND_OVER_NS)
    assert not workers.is_short(MIB), "it takes that long"
    for _ in range(60):
        workers.took(MIB // 2, HAND_OVER_NS // 4)
    assert workers.is_short(MIB)
    workers.close()
    inline = InlineWorkers(1)
    inline.took(MIB, 1)
    assert not inline.is_short(1)


async def test_without_threads_nothing_begins_once_it_is_closed() -> None:
    inline, ran = InlineWorkers(1), []

    def share() -> bool:
        ran.append(1)
        inline.close()
        return True

    assert not await inline.share(share, threads=1)
    assert len(ran) == 1
    for call in (inline.run(ran.append, 2), inline.run_later(ran.append, 3)):
        with pytest.raises(RequestFailedError) as caught:
            await call
        assert caught.value.status is Status.DISCONNECTED
    assert len(ran) == 1
