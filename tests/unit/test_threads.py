"""Pools: threads that are all there, jobs that never run half, results that wake a loop once."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
import uvloop

from entresol_proto import jobs
from entresol_proto.status import EntresolError, Status
from entresol_proto.threads import Job, Pool, all_outcomes

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="a priority for each thread")


def names(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(3, "test-pool")
    yield made
    made.close()
    assert not names("test-pool")


async def test_a_look_that_fails_keeps_nobody_from_what_has_ended(pool: Pool) -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        if len(looks) == 1:
            raise MemoryError
        if len(looks) == 2:
            raise ZeroDivisionError
        for one in ended:
            one.end()
        ended.clear()

    ended = [pool.expect(look)]
    waiting = asyncio.ensure_future(ended[0].outcome())
    other = Pool(1, "test-other")
    try:
        for _ in range(3):
            assert await asyncio.wait_for(other.run(int), 10) == 0
        await asyncio.wait_for(waiting, 10)
        assert len(looks) >= 3, "without memory it is called again"
    finally:
        other.close()


async def begun_on(pool: Pool, count: int) -> tuple[threading.Event, list[Job[bool]]]:
    """So many threads that wait until they are let go."""
    gate, there = threading.Event(), threading.Semaphore(0)

    def wait() -> bool:
        there.release()
        return gate.wait(30)

    jobs = [pool.submit(wait) for _ in range(count)]
    for _ in range(count):
        await asyncio.to_thread(there.acquire, timeout=30)
    return gate, jobs


async def test_calls_return_and_raise(pool: Pool) -> None:
    assert len(names("test-pool")) == 3
    assert await pool.run(divmod, 17, 5) == (3, 2)
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 1, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await pool.run(next, iter(()))
    assert len(names("test-pool")) == 3


async def test_a_call_that_ended_as_its_caller_was_cancelled_disturbs_no_other(pool: Pool) -> None:
    """Both are known to the loop before the caller's turn."""
    for end in (int, lambda: 1 // 0):
        job = pool.submit(end)
        task = asyncio.ensure_future(job.outcome())
        await asyncio.sleep(0)
        while not job._home._ended:  # the loop does not look meanwhile
            assert not task.done()
        task.cancel()
        job._home._come()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.wait_for(pool.run(abs, -3), 10) == 3


async def test_a_loop_that_was_woken_sleeps_again(pool: Pool) -> None:
    await pool.run(int)
    home = jobs.home_here()
    assert home is not None
    with pytest.raises(BlockingIOError):  # what wakes it was read, or it would never sleep
        os.eventfd_read(home._fd)


async def test_a_pool_that_is_closed_elsewhere_leaves_nothing_on_the_loop() -> None:
    made = Pool(1, "test-elsewhere")
    await made.run(int)
    home = jobs.home_here()
    assert home is not None
    await asyncio.to_thread(made.close)
    async with asyncio.timeout(10):
        while jobs.home_here() is not None:
            await asyncio.sleep(0.001)
    assert home._fd == -1


def test_a_pool_that_outlives_its_loop_leaves_no_descriptor() -> None:
    made = Pool(1, "test-outlives")

    async def use() -> jobs.Home | None:
        await made.run(int)
        return jobs.home_here()

    loop = asyncio.new_event_loop()
    home = loop.run_until_complete(use())
    loop.close()
    assert home is not None
    assert home._fd >= 0
    made.close()
    assert home._fd == -1


async def test_work_needs_no_new_thread(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would queue this work, raise, and do it later."""
    gate, jobs = await begun_on(pool, 3)

    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        more = [pool.submit(abs, -n) for n in range(10)]
        gate.set()
        assert await all_outcomes(jobs) == [True] * 3
        assert await all_outcomes(more) == list(range(10))


async def test_thousands_of_results_come_back_each_to_its_own(pool: Pool) -> None:
    async def one(number: int) -> bool:
        return await pool.run(str, number) == str(number)

    assert all(await asyncio.gather(*(one(n) for n in range(5_000))))


async def test_many_results_wake_the_loop_once(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    await pool.run(int)
    written, write = [], os.eventfd_write
    monkeypatch.setattr(os, "eventfd_write", lambda fd, n: (written.append(fd), write(fd, n)))
    jobs = [pool.submit(int) for _ in range(300)]
    while not all(job.begun for job in jobs):  # the loop does not look meanwhile
        pass
    await all_outcomes(jobs)
    assert 1 <= len(written) <= 3


async def test_a_job_that_no_thread_began_is_cancelled_and_never_runs(pool: Pool) -> None:
    gate, jobs = await begun_on(pool, 3)
    ran: list[int] = []
    late = pool.submit(ran.append, 1)
    waiting = asyncio.ensure_future(late.outcome())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not late.begun
    gate.set()
    await all_outcomes(jobs)
    await pool.run(int)
    assert ran == []


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_who_is_cut_short_leaves_no_buffer_in_a_cycle(pool: Pool, how: str) -> None:
    class Buffer:
        """What a caller holds."""

    gate, jobs = await begun_on(pool, 3)
    held: weakref.ref[Buffer]

    async def caller() -> None:
        nonlocal held
        buffer = Buffer()
        held = weakref.ref(buffer)
        await all_outcomes([*jobs, pool.submit(int, "not a number" if how == "failed" else "1")])

    waiting = asyncio.ensure_future(caller())
    await asyncio.sleep(0)
    if how == "cancelled":
        waiting.cancel()
    gate.set()
    gc.disable()
    try:
        with pytest.raises((asyncio.CancelledError, ValueError)):
            await waiting
        del waiting
        await asyncio.sleep(0)
        assert held() is None
    finally:
        gc.enable()


async def test_a_cancelled_caller_waits_for_its_thread(pool: Pool) -> None:
    gate, (job, *others) = await begun_on(pool, 3)
    told: list[str] = []
    waiting = asyncio.ensure_future(job.outcome(on_cancel=lambda: told.append("be quick")))
    for _ in range(3):
        await asyncio.sleep(0.005)
        waiting.cancel()
        await asyncio.sleep(0.005)
        assert not waiting.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert job.begun
    assert told == ["be quick"]
    await all_outcomes(others)


async def test_a_failure_after_the_cancellation_is_no_noise(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    go, there = threading.Event(), threading.Event()

    def fail() -> None:
        there.set()
        go.wait(30)
        raise ValueError("too late to matter")

    waiting = asyncio.ensure_future(pool.run(fail))
    await asyncio.to_thread(there.wait, 30)
    waiting.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gc.collect()
    assert not caplog.records


async def test_all_are_waited_for_before_the_first_error_is_raised(pool: Pool) -> None:
    gate, waits = await begun_on(pool, 1)
    jobs: list[Job[object]] = [pool.submit(divmod, 1, 0), pool.submit(int, "x"), *waits]  # type: ignore[list-item]
    every = asyncio.ensure_future(all_outcomes(jobs))
    await asyncio.sleep(0.02)
    assert not every.done()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        await every


async def test_who_cancels_all_waits_for_those_that_had_begun(pool: Pool) -> None:
    gate, jobs = await begun_on(pool, 3)
    ran: list[int] = []
    jobs += [pool.submit(ran.append, 1) for _ in range(3)]  # type: ignore[arg-type]
    every = asyncio.ensure_future(all_outcomes(jobs))
    await asyncio.sleep(0)
    every.cancel()
    await asyncio.sleep(0.01)
    assert not every.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await every
    await pool.run(int)
    assert [job.begun for job in jobs] == [True] * 3 + [False] * 3
    assert ran == []


async def test_what_was_given_is_let_go_when_it_ended(pool: Pool) -> None:
    memory = bytearray(100)
    view = memoryview(memory)
    await pool.run(len, view)
    view.release()
    memory.extend(b"x")  # BufferError while somebody holds a view


async def test_the_last_pool_that_closes_leaves_nothing_on_its_loop() -> None:
    before = set(os.listdir("/proc/self/fd"))
    first, second = Pool(1, "test-a"), Pool(1, "test-b")
    assert await first.run(abs, -1) == await second.run(abs, -1) == 1
    first.close()
    assert await second.run(abs, -2) == 2
    gate, (job,) = await begun_on(second, 1)
    second.close(wait=False)
    gate.set()
    assert await job.outcome()
    await asyncio.to_thread(second.close)
    await asyncio.sleep(0)
    assert set(os.listdir("/proc/self/fd")) - before == set()
    assert asyncio.get_running_loop() not in jobs._homes


def test_a_call_that_nobody_waits_for_needs_no_loop(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    before, there = set(os.listdir("/proc/self/fd")), threading.Event()
    pool.post(divmod, 1, 0)
    pool.post(there.set)
    assert there.wait(30)
    pool.close()
    assert "posted_call" in caplog.text
    assert set(os.listdir("/proc/self/fd")) - before == set()
    with pytest.raises(RuntimeError, match="closed"):
        pool.post(there.set)


async def test_a_loop_that_leaves_keeps_nothing_and_may_come_again(pool: Pool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    assert await pool.run(abs, -1) == 1
    pool.leave()
    assert set(os.listdir("/proc/self/fd")) - before == set()
    gate, (job,) = await begun_on(pool, 1)
    pool.leave()  # with a job under way, which is heard of
    gate.set()
    assert await job.outcome()
    assert set(os.listdir("/proc/self/fd")) - before == set()
    pool.leave()
    assert await pool.run(abs, -2) == 2


async def test_close_ends_after_what_is_queued_or_gives_it_up() -> None:
    done: list[int] = []
    pool = Pool(1, "test-pool")
    jobs = [pool.submit(done.append, n) for n in range(20)]
    pool.close()
    await all_outcomes(jobs)
    assert done == list(range(20))
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(done.append, 99)
    pool.close()
    pool = Pool(1, "test-pool")
    gate, (first,) = await begun_on(pool, 1)
    later = pool.submit(done.append, 99)
    pool.close(wait=False, drop=True)
    gate.set()
    assert await first.outcome()
    with pytest.raises(asyncio.CancelledError):
        await later.outcome()
    pool.close()
    assert 99 not in done


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_pool_serves_several_loops_and_keeps_nothing_of_theirs(pool: Pool, run: object) -> None:
    def once() -> None:
        assert run(pool.run(abs, -1)) == 1  # type: ignore[operator]

    once()
    gc.collect()
    before, homes = len(os.listdir("/proc/self/fd")), len(jobs._homes)
    each = [threading.Thread(target=once) for _ in range(20)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(jobs._homes) <= homes


def test_what_ends_after_its_loop_is_heard_by_nobody(pool: Pool) -> None:
    go, there = threading.Event(), threading.Event()

    def wait() -> None:
        there.set()
        go.wait(30)

    async def leave() -> None:
        pool.submit(wait)
        await asyncio.to_thread(there.wait, 30)

    asyncio.run(leave())
    gc.collect()
    read, write = os.pipe()  # would get the number of a descriptor that was closed too early
    go.set()
    pool.close()
    os.close(write)
    assert os.read(read, 8) == b""
    os.close(read)


def test_a_pool_that_nobody_closed_lets_its_process_end() -> None:
    code = "from entresol_proto.threads import Pool\nPool(2, 'left')\nprint('end')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "end\n"


def niceness() -> int:
    """Of the thread that asks."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux_only
async def test_threads_of_a_pool_give_way_and_nobody_else_does(pool: Pool) -> None:
    before = niceness()
    gate = threading.Barrier(3)

    def each() -> int:
        gate.wait(30)  # so that every thread does one
        return niceness()

    nice = Pool(3, "test-nice", nice=5)
    assert await all_outcomes([nice.submit(each) for _ in range(3)]) == [min(before + 5, 19)] * 3
    assert await all_outcomes([pool.submit(each) for _ in range(3)]) == [before] * 3
    assert niceness() == before
    nice.close()


@linux_only
async def test_a_sandbox_that_forbids_priorities_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_call: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = niceness()
    monkeypatch.setattr(os, "setpriority", refused)
    pool = Pool(2, "test-nice", nice=5)
    assert await all_outcomes([pool.submit(niceness) for _ in range(4)]) == [before] * 4
    pool.close()


def test_threads_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started = []

    def only_two(self: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", only_two)
    with pytest.raises(EntresolError, match="cannot start 4 threads: can't start new thread") as e:
        Pool(4, "test-few")
    assert e.value.status is Status.BUSY
    assert e.value.hint
    assert not names("test-few")


def test_a_real_limit() -> None:
    code = (
        "import resource, sys\n"
        "from entresol_proto.threads import Pool\n"
        "from entresol_proto.status import EntresolError\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (20 << 20),) * 2)\n"
        "try:\n"
        "    Pool(64, 'many')\n"
        "except EntresolError as error:\n"
        "    print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "refused\n", done.stderr
