"""Coroutines that begin at once: as a task would run them, but for when."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from entresol_proto.eager import Eager, task_of

R = TypeVar("R")


def begun(work: Coroutine[Any, Any, R]) -> Eager[R]:
    made = Eager(work)
    made.begin()
    return made


async def test_it_runs_until_it_has_to_wait_and_a_task_takes_it_from_there() -> None:
    steps: list[int] = []
    gate = asyncio.get_running_loop().create_future()

    async def work() -> str:
        steps.append(1)
        assert await gate == "open"
        steps.append(2)
        await asyncio.sleep(0)
        steps.append(3)
        return "done"

    eager = begun(work())
    assert steps == [1]
    task = asyncio.create_task(eager)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert steps == [1]
    gate.set_result("open")
    assert await task == "done"
    assert steps == [1, 2, 3]


async def test_what_it_waited_for_may_have_come_before_the_task() -> None:
    gate = asyncio.get_running_loop().create_future()

    async def work() -> int:
        return int(await gate)

    eager = begun(work())
    gate.set_result(7)
    await asyncio.sleep(0)
    assert await eager == 7


async def test_what_ends_at_once_tells_its_result_or_error_to_who_awaits_it() -> None:
    async def returns() -> int:
        return 7

    async def raises() -> None:
        raise KeyError("at once")

    assert await begun(returns()) == 7
    failed = begun(raises())
    with pytest.raises(KeyError, match="at once"):
        await asyncio.create_task(failed)


async def test_what_was_not_begun_is_begun_by_its_task() -> None:
    steps: list[int] = []

    async def work() -> int:
        steps.append(1)
        await asyncio.sleep(0)
        return 7

    eager = Eager(work())
    task = asyncio.create_task(eager)
    assert steps == []
    assert await task == 7


async def test_the_task_may_be_there_before_it_is_begun() -> None:
    gate = asyncio.get_running_loop().create_future()

    async def work() -> int:
        return int(await gate)

    eager = Eager(work())
    task = asyncio.create_task(eager)
    eager.begin()
    await asyncio.sleep(0)
    gate.set_result(7)
    assert await task == 7


async def test_an_error_later_on_is_the_tasks() -> None:
    async def raises() -> None:
        await asyncio.sleep(0)
        raise KeyError("later")

    with pytest.raises(KeyError, match="later"):
        await begun(raises())


async def test_a_cancelled_task_cancels_it_where_it_waits() -> None:
    gate = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    async def work() -> str:
        try:
            await gate
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise
        return "never"

    task = asyncio.create_task(begun(work()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled", "cleaned up"]


async def test_a_task_that_is_cancelled_before_its_first_step_cancels_what_was_begun() -> None:
    gate = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    async def work() -> None:
        try:
            await gate
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    eager = Eager(work())
    task = asyncio.create_task(eager)
    eager.begin()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled", "cleaned up"]
    assert not gate._asyncio_future_blocking


@pytest.mark.parametrize("eager", [True, False])
async def test_such_a_task_cancels_what_it_waits_for_and_waits_until_that_has_ended(
    eager: bool,
) -> None:
    """As one does that has made its first step."""
    seen: list[str] = []

    async def inner() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError as error:
            seen.append(f"inner: {error}")
            await asyncio.sleep(0.01)
            seen.append("inner has ended")
            raise

    child = asyncio.create_task(inner())
    await asyncio.sleep(0)

    async def work() -> None:
        try:
            await child
        finally:
            seen.append("work")

    if eager:
        made = Eager(work())
        task = asyncio.create_task(made)
        made.begin()
    else:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
    task.cancel("why")
    with pytest.raises(asyncio.CancelledError, match="why"):
        await task
    assert seen == ["inner: why", "inner has ended", "work"]
    assert child.cancelled()


async def test_such_a_task_that_waits_for_what_is_shielded_leaves_that_alone() -> None:
    gate = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await asyncio.shield(gate)

    made = Eager(work())
    task = asyncio.create_task(made)
    made.begin()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not gate.done()


async def test_such_a_task_that_waits_for_what_is_done_is_cancelled_all_the_same() -> None:
    gate = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await gate

    made = Eager(work())
    task = asyncio.create_task(made)
    made.begin()
    gate.set_result(7)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_task_that_is_cancelled_before_it_hears_of_the_end_is_cancelled() -> None:
    ended: list[bool] = []

    async def work() -> int:
        ended.append(True)
        return 7

    eager = Eager(work())
    task = asyncio.create_task(eager)
    eager.begin()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_task_that_is_cancelled_before_anything_was_begun_begins_nothing() -> None:
    async def work() -> None:
        raise AssertionError("begun")

    task = asyncio.create_task(Eager(work()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_is_begun_for_a_task_finds_itself_in_it() -> None:
    """As `asyncio.timeout` must."""
    gate = asyncio.get_running_loop().create_future()
    found: list[object] = []

    async def work() -> str:
        found.append(asyncio.current_task())
        try:
            async with asyncio.timeout(0.01):
                await gate
        except TimeoutError:
            found.append(asyncio.current_task())
            return "late"
        return "in time"

    def make() -> None:
        task = task_of(work(), name="begun", now=True)
        assert found == [task]
        assert task.get_name() == "begun"
        assert asyncio.current_task() is None
        made.set_result(task)

    loop = asyncio.get_running_loop()
    made: asyncio.Future[asyncio.Task[str]] = loop.create_future()
    loop.call_soon(make)
    task = await made
    assert await task == "late"
    assert found == [task, task]


@pytest.mark.parametrize("now", [False, True])
async def test_in_a_task_or_when_not_asked_to_nothing_is_begun_early(now: bool) -> None:
    steps: list[object] = []

    async def work() -> int:
        steps.append(asyncio.current_task())
        return 7

    task = task_of(work(), name="later", now=now)  # this is in a task
    assert steps == []
    assert await task == 7
    assert steps == [task]
    made: asyncio.Future[asyncio.Task[int]] = asyncio.get_running_loop().create_future()

    def make() -> None:
        made.set_result(task_of(work(), name="later", now=False))
        assert len(steps) == 1

    asyncio.get_running_loop().call_soon(make)
    assert await (await made) == 7


async def test_one_that_goes_on_after_a_cancellation_has_its_result() -> None:
    gate = asyncio.get_running_loop().create_future()

    async def stubborn() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await gate
        await asyncio.sleep(0)
        return 7

    task = asyncio.create_task(begun(stubborn()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == 7


async def test_one_that_nobody_awaits_is_closed_with_what_it_holds() -> None:
    closed: list[bool] = []

    class Held:
        pass

    async def work(held: Held) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed.append(True)

    held = Held()
    kept = weakref.ref(held)
    eager = begun(work(held))
    del held, eager
    gc.collect()
    assert closed == [True]
    assert kept() is None


async def test_an_error_is_kept_by_nobody_once_it_was_told() -> None:
    class Held:
        pass

    async def raises(held: Held) -> None:
        raise KeyError

    held = Held()
    kept = weakref.ref(held)
    gc.collect()
    gc.disable()
    try:
        eager = begun(raises(held))
        del held
        with pytest.raises(KeyError) as caught:
            await eager
        del caught, eager
        assert kept() is None
    finally:
        gc.enable()
