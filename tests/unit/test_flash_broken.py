"""A writer that ends by what no failed write explains: nothing waits, nothing durable is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from entresol_daemon.flash.barriers import Barriers
from entresol_daemon.flash.engine import RemoveReason
from entresol_daemon.flash.sim import SimDevice
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
            await engine.close()
        engine = await open_engine(device.crash())
        for number in (1, 2):
            assert await get(engine, (NS, key_of(number))) == (Status.OK, b"kept" * 100)
        assert not stock_faults(engine)
        await engine.close()

    simloop.run(life())


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
