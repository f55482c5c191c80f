"""A writer that ends by what no failed write explains: nothing waits, nothing durable is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from entresol_daemon.flash.barriers import Barriers
from entresol_daemon.flash.counted import CountedDevice
from entresol_daemon.flash.engine import RemoveReason
from entresol_daemon.flash.group import Pending
from entresol_daemon.flash.sim import SimDevice
from entresol_daemon.flash.space import Segment
from entresol_daemon.flash.writer import Writer
from entresol_proto.status import DeviceError, Status
from tests import simloop
from tests.flashlab import NAMESPACES, device_bytes, get, key_of, open_engine, put, stock_faults

NS = NAMESPACES[0]


class BugError(RuntimeError):
    """What nobody expected."""


def bug(*_: object, **__: object) -> Any:
    raise BugError("nobody expected this")


@pytest.mark.parametrize("where", ["_take", "_succeed", "_fail"])
def test_a_broken_writer_says_so_and_leaves_what_was_durable(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def life() -> None:
        device = SimDevice(device_bytes(16), sleep=asyncio.sleep)
        engine = await open_engine(device)
        slots = []
        for number in range(3):
            slot, future = put(engine, (NS, key_of(number)), b"kept" * 100)
            assert await future is Status.OK
            slots.append(slot)
        watching = asyncio.ensure_future(engine.until_broken())
        with monkeypatch.context() as broken:
            broken.setattr(Writer, where, bug)
            if where == "_fail":
                broken.setattr(Writer, "_take", no_memory)
            engine.remove(slots[0], RemoveReason.FORGOTTEN)
            waiting = asyncio.ensure_future(engine.barrier())
            await asyncio.sleep(0)
            _, future = put(engine, (NS, key_of(9)), b"new" * 100)
            async with asyncio.timeout(60):
                assert isinstance(await watching, BugError)
                assert await future is Status.IO_ERROR
                with pytest.raises(DeviceError, match="stopped writing"):
                    await waiting
        slot, future = put(engine, (NS, key_of(10)), b"later" * 100)
        assert (slot, await future) == (-1, Status.IO_ERROR)
        with pytest.raises(DeviceError, match="stopped writing"):
            await engine.barrier()
        assert (await get(engine, (NS, key_of(1))))[0] is Status.OK
        assert isinstance(await engine.until_broken(), BugError)
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="the writer broke"):
                await engine.close()
        engine = await open_engine(device.crash())
        for number in (1, 2):
            assert await get(engine, (NS, key_of(number))) == (Status.OK, b"kept" * 100)
        assert not stock_faults(engine)
        await engine.close()

    simloop.run(life())


@pytest.mark.parametrize("where", ["settle", "_requeue", "changed", "cancelled"])
def test_whoever_waits_hears_of_it_wherever_in_a_group_it_broke(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """With some of its blocks told and others not, and the books half written."""

    async def life() -> None:
        device = SimDevice(device_bytes(16), sleep=asyncio.sleep)
        engine = await open_engine(device)
        slot, future = put(engine, (NS, key_of(0)), b"kept" * 100)
        assert await future is Status.OK
        honest, calls = Pending.settle, 0

        def second(self: Pending, status: Status) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise BugError("in the middle")
            honest(self, status)

        with monkeypatch.context() as broken:
            if where == "settle":
                broken.setattr(Pending, "settle", second)
            elif where == "_requeue":
                broken.setattr(Writer, "_requeue", bug)
                broken.setattr(CountedDevice, "commit", no_memory_soon)
            elif where == "changed":
                broken.setattr(Segment, "changed", bug)
            waits = [put(engine, (NS, key_of(n)), b"new" * 100)[1] for n in range(1, 5)]
            engine.remove(slot, RemoveReason.FORGOTTEN)
            barrier = asyncio.ensure_future(engine.barrier())
            if where == "cancelled":
                await asyncio.sleep(0)
                engine._writer._task.cancel()  # type: ignore[union-attr]
            async with asyncio.timeout(60):
                await engine.until_broken()
                statuses = [await one for one in waits]
                await asyncio.wait({barrier})
        assert set(statuses) <= {Status.OK, Status.IO_ERROR}
        if where != "changed":
            assert Status.IO_ERROR in statuses
        barrier.exception()
        with pytest.raises(RuntimeError, match="the writer broke"):
            async with asyncio.timeout(60):
                await engine.close()
        engine = await open_engine(device.crash())
        for number, status in enumerate(statuses, 1):
            if status is Status.OK:
                assert (await get(engine, (NS, key_of(number))))[0] is Status.OK
        assert not stock_faults(engine)
        await engine.close()

    simloop.run(life())


async def no_memory_soon(*_: object) -> None:
    raise MemoryError("no room for it")


def no_memory(*_: object) -> None:
    raise MemoryError("no room for it")


def test_what_waits_for_a_barrier_hears_of_its_own_end() -> None:
    async def life() -> None:
        barriers = Barriers()
        assert barriers.reached
        assert barriers.wait().done()
        barriers.queued(2)
        first = barriers.wait()
        barriers.queued(3)
        second, left = barriers.wait(), barriers.wait()
        left.cancel()
        barriers.durable(2)
        assert barriers.settle(), "another still waits"
        assert (first.done(), second.done()) == (True, False)
        third = barriers.wait()
        barriers.fail("no room", Status.NO_SPACE)
        for one in (second, third):
            with pytest.raises(DeviceError, match="no room") as caught:
                await one
            assert caught.value.status is Status.NO_SPACE
        assert second.exception() is not third.exception()
        barriers.durable(3)
        assert not barriers.settle()
        assert barriers.reached

    asyncio.run(life())
