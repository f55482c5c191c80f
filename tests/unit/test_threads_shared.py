"""Calls that several threads of a pool are in at a time: each piece of work is done once, the loop
hears once, and when it has heard nobody is in one any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator

import pytest

from entresol_client.results import RequestFailedError
from entresol_client.workers import InlineWorkers, ThreadWorkers
from entresol_proto import threads
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
        self._in_turn, self._piece_s = in_turn, piece_s
        self._lock = threading.Lock()

    def __call__(self) -> bool:
        with self._lock:
            self.calls += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.came.release()
        try:
            assert self.gate.wait(30)
            for _ in range(self._in_turn):
                try:
                    piece = self.left.popleft()
                except IndexError:
                    return False
                self.done.append((piece, threading.get_ident()))
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
    monkeypatch.setattr(
        threads.os, "eventfd_write", lambda fd, n: (written.append(fd), write(fd, n))
    )
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


async def test_what_it_was_given_is_let_go_though_it_is_queued_still(pool: Pool) -> None:
    gate, there = occupied(pool, THREADS - 1)
    for _ in range(THREADS - 1):
        await asyncio.to_thread(there.acquire, timeout=30)
    work = Work(5)
    gone = weakref.ref(work)
    await pool.submit_shared(work, threads=THREADS).outcome()
    assert len(work.done) == 5
    del work
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
    assert asyncio.get_running_loop() not in threads._homes


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


@pytest.mark.parametrize("make", [ThreadWorkers, InlineWorkers])
async def test_workers_share(make: Callable[[int], ThreadWorkers | InlineWorkers]) -> None:
    workers = make(2)
    work = Work(10, in_turn=3)
    await workers.share(work, threads=2)
    workers.close()
    assert sorted(piece for piece, _ in work.done) == list(range(10))


async def test_thousands_of_shared_calls_all_end(pool: Pool) -> None:
    """Comings and goings that no other test arranges: every piece once, no call left inside."""
    works = [Work(number % 7, in_turn=1 + number % 3) for number in range(2000)]
    jobs = [pool.submit_shared(work, threads=1 + n % 4) for n, work in enumerate(works)]
    waiting = [asyncio.ensure_future(job.outcome(job.stop)) for job in jobs]
    await asyncio.sleep(0)
    for number, task in enumerate(waiting):
        if number % 5 == 0:
            task.cancel()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    for number, (work, outcome) in enumerate(zip(works, ended, strict=True)):
        assert work.inside == 0
        pieces = sorted(piece for piece, _ in work.done)
        if outcome is None:
            assert pieces == list(range(number % 7))
        else:
            assert isinstance(outcome, asyncio.CancelledError)
            assert len(set(pieces)) == len(pieces)
