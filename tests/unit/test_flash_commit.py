"""A group that is written and flushed in one call: on real files, by the native kernel over a
device that is stubborn (stubborn.c), and by its twin."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from entresol_daemon.flash import counted as counting
from entresol_daemon.flash.counted import CountedDevice, DeviceHooks
from entresol_daemon.flash.device import BLOCK, FlushError, IoOp, aligned_buffer
from entresol_daemon.flash.file_device import FileDevice
from entresol_daemon.flash.model import EngineStats
from entresol_daemon.flash.runs import RUN_BYTES_MAX
from entresol_daemon.flash.sim import SimDevice
from entresol_proto import native
from entresol_proto.status import DeviceError, Status
from tests.unit.gated_kernel import build

SIZE = 16 << 20


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[FileDevice]:
    device = await FileDevice.open(path, SIZE, create=True, direct=False)
    try:
        yield device
    finally:
        await device.close()


def ops_of(*sizes: int, gap: int = 0, seed: int = 1) -> list[IoOp]:
    """Random bytes, one after the other."""
    rng, ops, at = random.Random(seed), list[IoOp](), 0
    for size in sizes:
        view = aligned_buffer(size)
        view[:] = rng.randbytes(size)
        ops.append(IoOp(at, view))
        at += size + gap
    return ops


def is_there(path: Path, ops: list[IoOp]) -> bool:
    raw = path.read_bytes()
    return all(raw[op.offset_bytes :][: op.view.nbytes] == op.view for op in ops)


class Stubborn:
    """Says how the device behaves, and what it was asked."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.plan.argtypes = (ctypes.c_size_t, *[ctypes.c_int] * 4)

    def plan(
        self, most_bytes: int = 0, *, refused: int = 0, write: int = 0, sync: int = 0,
        gate: int = -1,
    ) -> None:  # fmt: skip
        self._library.plan(most_bytes, refused, write, sync, gate)

    @property
    def asked(self) -> tuple[int, int]:
        """Writes, flushes."""
        return self._library.begun_writes(), self._library.begun_syncs()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("stubborn"), "stubborn")


@pytest.fixture
def stubborn(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubborn]:
    monkeypatch.setattr(native, "KERNEL", native.Kernel(library))
    made = Stubborn(library)
    made.plan()
    yield made
    made.plan()


@pytest.mark.parametrize("by", ["kernel", "python"])
async def test_a_group_of_all_sizes_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "python":
        monkeypatch.setattr(native, "KERNEL", None)
    elif native.KERNEL is None:
        pytest.skip("not run here: the package was built without a C compiler")
    sizes = [BLOCK * random.Random(2).randrange(1, 40) for _ in range(40)]
    async with opened(tmp_path / "data") as device:
        for gap in (0, BLOCK):
            ops = ops_of(*sizes, RUN_BYTES_MAX + BLOCK, gap=gap, seed=gap)
            random.Random(3).shuffle(ops)
            write_ns, flush_ns = await device.commit(ops)
            assert write_ns > 0
            assert flush_ns > 0
            assert is_there(tmp_path / "data", ops)
        await device.commit([])
        with pytest.raises(ValueError, match="unaligned"):
            await device.commit([IoOp(1, aligned_buffer(BLOCK))])


@pytest.mark.parametrize("most_bytes", [BLOCK, 3 * BLOCK, 1 << 20])
async def test_short_writes_are_completed(
    tmp_path: Path, stubborn: Stubborn, most_bytes: int
) -> None:
    stubborn.plan(most_bytes)
    ops = ops_of(5 * BLOCK, BLOCK, 7 * BLOCK, 2 * BLOCK)
    async with opened(tmp_path / "data") as device:
        await device.commit(ops)
    assert is_there(tmp_path / "data", ops)
    assert stubborn.asked == (sum(-(-op.view.nbytes // most_bytes) for op in ops), 1)


async def test_what_a_device_refuses_fails_the_group_and_nothing_is_flushed(
    tmp_path: Path, stubborn: Stubborn
) -> None:
    ops = ops_of(BLOCK, BLOCK, BLOCK, gap=BLOCK)
    async with opened(tmp_path / "data") as device:
        stubborn.plan(refused=2, write=errno.EIO)
        with pytest.raises(DeviceError, match=r"write of .*Input/output error") as caught:
            await device.commit(ops)
        assert not isinstance(caught.value, FlushError)
        assert stubborn.asked == (2, 0)
        stubborn.plan(refused=1, write=errno.ENOSPC)
        with pytest.raises(DeviceError, match="free space") as full:
            await device.commit(ops)
        assert full.value.status is Status.NO_SPACE
        stubborn.plan(BLOCK // 2)  # a part of a block is none
        with pytest.raises(DeviceError, match=r"write of .*Input/output error"):
            await device.commit(ops)
        assert stubborn.asked == (1, 0)
        stubborn.plan(refused=2, write=errno.EINTR)  # a signal: asked again
        await device.commit(ops)
        assert stubborn.asked == (4, 1)
    assert is_there(tmp_path / "data", ops)


async def test_a_flush_that_fails_is_told_as_one(tmp_path: Path, stubborn: Stubborn) -> None:
    ops = ops_of(BLOCK)
    async with opened(tmp_path / "data") as device:
        stubborn.plan(sync=errno.EIO)
        with pytest.raises(FlushError, match=r"flush of .*Input/output error"):
            await device.commit(ops)
        assert stubborn.asked == (1, 1)
        stubborn.plan(sync=errno.EINTR)
        await device.commit(ops)
        assert stubborn.asked == (1, 2)


async def test_a_cancelled_group_ends_with_the_run_that_was_begun(
    tmp_path: Path, stubborn: Stubborn
) -> None:
    """Its buffers are the caller's again then, and nothing looks at them any more."""
    out, into = os.pipe()
    try:
        stubborn.plan(gate=out)
        ops = ops_of(BLOCK, BLOCK, BLOCK, gap=BLOCK)
        async with opened(tmp_path / "data") as device:
            work = asyncio.create_task(device.commit(ops))
            deadline = time.monotonic() + 30
            while stubborn.asked[0] < 1:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.001)
            work.cancel()
            await asyncio.sleep(0.05)
            assert not work.done(), "a thread still has the buffers"
            os.write(into, bytes(3))
            with pytest.raises(asyncio.CancelledError):
                await work
            assert stubborn.asked == (1, 0)
            stubborn.plan()
            await device.commit(ops)
    finally:
        os.close(into)
        os.close(out)


@pytest.mark.parametrize("in_one_go", [True, False])
async def test_a_group_is_counted_and_timed_however_it_is_written(
    tmp_path: Path, stubborn: Stubborn, in_one_go: bool
) -> None:
    told: list[tuple[Status, int]] = []
    length_bytes: list[int] = []
    stats = EngineStats()
    async with opened(tmp_path / "data") as device:
        counted = CountedDevice(device, stats, time.monotonic_ns)
        if not in_one_go:
            counted._in_one_go = None
        counted.hooks = DeviceHooks(lambda *flush: told.append(flush), length_bytes.append)
        await counted.commit(ops_of(BLOCK, BLOCK))
        assert [status for status, _ in told] == [Status.OK]
        assert told[0][1] > 0
        assert length_bytes == [2 * BLOCK, -2 * BLOCK]
        assert (stats.flushes, stats.refused_writes, stats.refused_flushes) == (1, 0, 0)
        if in_one_go:
            counted._apart = 0  # that flush may have been a long one
            stubborn.plan(refused=1, write=errno.EIO)
            with pytest.raises(DeviceError, match="write of"):
                await counted.commit(ops_of(BLOCK))
            stubborn.plan(sync=errno.EIO)
            with pytest.raises(DeviceError, match="flush of"):
                await counted.commit(ops_of(BLOCK))
            assert [status for status, _ in told] == [Status.OK, Status.IO_ERROR]
            assert sum(length_bytes) == 0
            assert (stats.flushes, stats.refused_writes, stats.refused_flushes) == (2, 1, 1)
            assert stats.written_bytes == 3 * BLOCK, "what was refused was not written"


async def test_reads_leave_no_room_for_long_flushes(
    tmp_path: Path, stubborn: Stubborn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told of as being written is not what is only being flushed."""
    monkeypatch.setattr(counting, "IN_ONE_GO_FLUSH_NS_MAX", 0)
    monkeypatch.setattr(counting, "APART", 2)
    told: list[int | str] = []
    async with opened(tmp_path / "data") as device:
        counted = CountedDevice(device, EngineStats(), time.monotonic_ns)
        counted.hooks = DeviceHooks(lambda *_: told.append("flushed"), told.append)
        for _ in range(4):
            await counted.commit(ops_of(BLOCK))
    assert told == 4 * [BLOCK, -BLOCK, "flushed"]
    assert stubborn.asked == (2, 2), "two of four by the kernel's call"


async def test_a_simulated_device_is_written_then_flushed() -> None:
    device, stats = SimDevice(SIZE), EngineStats()
    await CountedDevice(device, stats, time.monotonic_ns).commit(ops_of(BLOCK, BLOCK))
    assert (device.writes, device.flushes, stats.flushes) == (2, 1, 1)
