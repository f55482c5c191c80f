"""The compute pool: results, bounds, and no thread in a buffer after its caller is gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from entresol_daemon.compute import Compute, ComputeError, InlineCompute, ThreadCompute
from entresol_proto.status import Status


@pytest.fixture(params=["threads", "inline"])
def compute(request: pytest.FixtureRequest) -> Compute:
    return ThreadCompute(2) if request.param == "threads" else InlineCompute()


async def test_run_returns_and_raises(compute: Compute) -> None:
    assert await compute.run(divmod, 17, 5) == (3, 2)
    with pytest.raises(ZeroDivisionError):
        await compute.run(divmod, 1, 0)
    await compute.close()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
async def test_map_keeps_the_order(compute: Compute, count: int) -> None:
    assert await compute.map(str, list(range(count))) == [str(i) for i in range(count)]
    await compute.close()


async def test_map_raises_a_failure_after_all_have_ended() -> None:
    compute = ThreadCompute(2)
    done: list[int] = []

    def work(item: int) -> int:
        if item == 0:
            raise ValueError("item 0")
        done.append(item)
        return item

    with pytest.raises(ValueError, match="item 0"):
        await compute.map(work, [0, 1, 2, 3])
    assert sorted(done) == [1, 2, 3]
    assert compute.pending == 0
    await compute.close()


async def test_map_has_a_thread_for_each() -> None:
    compute, all_there = ThreadCompute(4), threading.Barrier(4)
    assert sorted(await compute.map(lambda _: all_there.wait(20), range(4))) == [0, 1, 2, 3]
    await compute.close()


async def test_map_takes_all_or_none() -> None:
    compute, began = ThreadCompute(1, pending_max=2), []
    with pytest.raises(ComputeError) as refused:
        await compute.map(began.append, [1, 2, 3])
    assert refused.value.status is Status.BUSY
    assert await compute.map(str, [4, 5]) == ["4", "5"]
    assert began == []
    await compute.close()


async def test_a_cancelled_map_waits_for_its_threads() -> None:
    compute = ThreadCompute(2)
    started, go = threading.Semaphore(0), threading.Event()
    ended: list[int] = []

    def work(item: int) -> None:
        started.release()
        go.wait(20)
        ended.append(item)

    task = asyncio.ensure_future(compute.map(work, range(4)))
    for _ in range(2):
        assert await asyncio.to_thread(started.acquire, timeout=20)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done(), "two threads are at it"
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(ended) == 2, "those that nobody had begun never run"
    assert compute.pending == 0
    await compute.close()


async def test_a_cancelled_caller_waits_for_its_thread() -> None:
    compute = ThreadCompute(1)
    started, go = threading.Event(), threading.Event()
    buffer = bytearray(4)

    def write() -> None:
        started.set()
        go.wait(20)
        buffer[:] = b"done"

    task = asyncio.ensure_future(compute.run(write))
    assert await asyncio.to_thread(started.wait, 20)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()  # a second owner of the buffer must not come yet
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert buffer == b"done"
    assert compute.pending == 0
    await compute.close()


async def test_a_cancelled_job_that_no_thread_began_never_runs() -> None:
    compute = ThreadCompute(1)
    started, go = threading.Event(), threading.Event()
    ran: list[int] = []

    def block() -> None:
        started.set()
        go.wait(20)

    first = asyncio.ensure_future(compute.run(block))
    second = asyncio.ensure_future(compute.run(ran.append, 1))
    assert await asyncio.to_thread(started.wait, 20)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go.set()
    await first
    await compute.close()
    assert ran == []


async def test_a_failure_after_the_cancellation_is_not_lost_noise() -> None:
    compute = ThreadCompute(1)
    started, go = threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        go.wait(20)
        raise ValueError("too late to matter")

    task = asyncio.ensure_future(compute.run(fail))
    assert await asyncio.to_thread(started.wait, 20)
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await compute.close()


async def test_pending_jobs_are_bounded_at_the_limit_and_not_before() -> None:
    compute = ThreadCompute(1, pending_max=3)
    go = threading.Event()
    jobs = [asyncio.ensure_future(compute.run(go.wait, 20)) for _ in range(3)]
    await asyncio.sleep(0)
    assert compute.pending == 3
    with pytest.raises(ComputeError) as caught:
        await compute.run(int)
    assert caught.value.status is Status.BUSY
    go.set()
    assert await asyncio.gather(*jobs) == [True] * 3
    assert await compute.run(int) == 0
    await compute.close()


async def test_close_waits_for_what_runs_then_refuses_and_ends_the_threads() -> None:
    compute = ThreadCompute(2)
    done: list[int] = []
    jobs = [asyncio.ensure_future(compute.run(done.append, i)) for i in range(20)]
    await asyncio.sleep(0)
    await compute.close()
    await asyncio.gather(*jobs)
    assert sorted(done) == list(range(20))
    with pytest.raises(ComputeError) as caught:
        await compute.run(int)
    assert caught.value.status is Status.DRAINING
    await compute.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("entresol-compute")]


async def test_inline_runs_nothing_after_close() -> None:
    compute = InlineCompute()
    await compute.close()
    with pytest.raises(ComputeError):
        await compute.run(int)


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_impossible_thread_counts_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        ThreadCompute(threads)
