"""A machine without memory for a moment: a group fails, writing goes on, nothing waits for ever."""

from __future__ import annotations

import asyncio
import errno
import importlib
import mmap
from typing import Any

import pytest

from entresol_daemon.flash import device as device_module
from entresol_daemon.flash import space
from entresol_daemon.flash.engine import RemoveReason
from entresol_daemon.flash.sim import SimDevice
from entresol_proto.status import DeviceError, Status
from tests import simloop
from tests.flashlab import (
    NAMESPACES,
    device_bytes,
    get,
    key_of,
    open_engine,
    put,
    stock_faults,
)

NS = NAMESPACES[0]


class Memory:
    """Stands for `mmap`: refuses its next requests."""

    MAP_PRIVATE, MAP_ANONYMOUS = mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS

    def __init__(self) -> None:
        self.refuses = 0
        self.refused = 0

    def mmap(self, *args: Any, **words: Any) -> mmap.mmap:
        if self.refuses:
            self.refuses -= 1
            self.refused += 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return mmap.mmap(*args, **words)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory()
    monkeypatch.setattr(device_module, "mmap", found)
    return found


def test_no_memory_reads_as_a_device_that_refuses(memory: Memory) -> None:
    memory.refuses = 1
    with pytest.raises(DeviceError, match="no memory for 8192 bytes"):
        device_module.aligned_buffer(5_000)
    assert device_module.aligned_buffer(5_000).nbytes == 8_192


@pytest.mark.parametrize("times", [1, 2, 40])
@pytest.mark.parametrize("removing", [False, True])
def test_writing_goes_on_when_there_is_memory_again(
    memory: Memory, times: int, removing: bool
) -> None:
    """Tombstones need memory of their own, before the group's."""

    async def life() -> None:
        engine = await open_engine(SimDevice(device_bytes(10), sleep=asyncio.sleep))
        slot, first = put(engine, (NS, key_of(0)), b"first" * 900)
        assert await first is Status.OK
        _, second = put(engine, (NS, key_of(1)), b"second" * 900)
        if removing:
            engine.remove(slot, RemoveReason.FORGOTTEN)
        memory.refuses = times
        status = await asyncio.wait_for(second, 60)
        assert status in (Status.OK, Status.IO_ERROR)
        while memory.refuses:  # a writer that has paused asks the device from time to time
            await asyncio.sleep(0.1)
            left, memory.refuses = memory.refuses, 0  # not this test's own memory
            again = put(engine, (NS, key_of(2)), b"third" * 900)[1]
            memory.refuses = left
            await asyncio.wait_for(again, 60)
            if (slot := engine.index.find(NS, key_of(2))) >= 0:
                engine.remove(slot, RemoveReason.FORGOTTEN)
        await asyncio.sleep(30)
        _, last = put(engine, (NS, key_of(3)), b"last" * 900)
        assert await asyncio.wait_for(last, 60) is Status.OK
        await asyncio.wait_for(engine.barrier(), 60)
        assert memory.refused == times
        if status is Status.OK:
            assert (await get(engine, (NS, key_of(1))))[0] is Status.OK
        await engine.close()

    simloop.run(life())


def no_memory(*_args: object, **_named: object) -> None:
    raise MemoryError("no room for it")


@pytest.mark.parametrize("times", [1, 7])
@pytest.mark.parametrize(
    "what",
    [
        "group.Group.note_headers", "writer.encode_tombstones", "writer.writes_of",
        "counted.CountedDevice.commit",
    ],
)  # fmt: skip
def test_a_group_for_which_there_is_no_memory_is_written_later(
    monkeypatch: pytest.MonkeyPatch, what: str, times: int
) -> None:
    """Nothing that was durable is lost, no removal either; and writing goes on by itself, also
    after so many that the engine paused."""
    module, _, name = what.partition(".")
    owner = importlib.import_module(f"entresol_daemon.flash.{module}")
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part)
    name = name.split(".")[-1]
    honest, left = getattr(owner, name), times

    def sometimes(*args: object, **named: object) -> object:
        nonlocal left
        left -= 1
        return no_memory() if left >= 0 else honest(*args, **named)

    async def life() -> None:
        device = SimDevice(device_bytes(16), sleep=asyncio.sleep)
        engine = await open_engine(device)
        slots = []
        for number in range(4):
            slot, future = put(engine, (NS, key_of(number)), b"kept" * 100)
            assert await future is Status.OK
            slots.append(slot)
        monkeypatch.setattr(owner, name, sometimes)
        engine.remove(slots[0], RemoveReason.FORGOTTEN)
        _, future = put(engine, (NS, key_of(9)), b"new" * 100)
        assert await future is (Status.OK if times == 1 else Status.IO_ERROR)
        async with asyncio.timeout(60):
            while engine.failed or left >= 0:
                await asyncio.sleep(0.1)
        await engine.barrier()
        slot, future = put(engine, (NS, key_of(10)), b"later" * 100)
        assert await future is Status.OK
        after = device.crash()
        await engine.close(clean=False)
        engine = await open_engine(after)
        there = {number for number in range(11) if engine.index.find(NS, key_of(number)) >= 0}
        assert there == {1, 2, 3, 10} | ({9} if times == 1 else set())
        assert not stock_faults(engine)
        await engine.close()

    simloop.run(life())


def test_a_block_for_whose_place_there_is_no_memory_is_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither in the index nor in its segment, which can be evicted afterwards."""

    async def life() -> None:
        engine = await open_engine(SimDevice(device_bytes(10), sleep=asyncio.sleep))
        _, future = put(engine, (NS, key_of(0)), b"kept")
        assert await future is Status.OK
        (segment,) = engine._table.open.values()
        used_bytes = segment.used_bytes
        with monkeypatch.context() as short:
            short.setattr(space, "pack_row", no_memory)
            with pytest.raises(MemoryError):
                put(engine, (NS, key_of(1)), b"not")
        assert len(engine.index) == 1
        assert (segment.used_bytes, segment.unflushed, segment.row_count) == (used_bytes, 0, 1)
        _, future = put(engine, (NS, key_of(1)), b"later")
        assert await future is Status.OK
        async with asyncio.timeout(10):
            assert len(await engine.evict(segment.index)) == 2
        await engine.close()

    simloop.run(life())
