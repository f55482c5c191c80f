"""A machine without memory for a moment: a group fails, writing goes on, nothing waits for ever."""

from __future__ import annotations

import asyncio
import errno
import mmap
from typing import Any

import pytest

from entresol_daemon.flash import device as device_module
from entresol_daemon.flash.engine import RemoveReason
from entresol_daemon.flash.sim import SimDevice
from entresol_proto.status import DeviceError, Status
from tests import simloop
from tests.flashlab import NAMESPACES, device_bytes, get, key_of, open_engine, put

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
