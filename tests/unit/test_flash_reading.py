"""Reads by the native kernel's queue: in order, so many at a time, without the interpreter's lock.

What the queue does without a device around it is in test_native_reads.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.flash.checking import RecordCheck
from entresol_daemon.flash.device import BLOCK, IoOp, aligned_buffer
from entresol_daemon.flash.file_device import FileDevice
from entresol_daemon.flash.reading import ReadQueue, _serve
from entresol_daemon.flash.runs import READ_MERGED_BYTES_MAX, RUN_BYTES_MAX, Reads, read_runs
from entresol_proto import native
from entresol_proto.eager import Eager
from entresol_proto.status import DeviceError, Status
from entresol_proto.threads import Pool
from tests.unit.gated_kernel import KEY, Gate, record

SIZE = READ_MERGED_BYTES_MAX  # of one read
OPS = 8
BYTES = random.Random(1).randbytes(OPS * SIZE)


@asynccontextmanager
async def opened(path: Path, gate: Gate, at_once: int) -> AsyncIterator[FileDevice]:
    """`OPS` reads long, of bytes at random."""
    path.write_bytes(BYTES)
    device = await FileDevice.open(path, io_threads=2 * at_once)
    try:
        yield device
    finally:
        gate.open(OPS)
        await device.close()


def prepared(folder: Path) -> Path:
    path = folder / "prepared"
    path.write_bytes(BYTES)
    return path


def ops(first: int = 0, count: int = OPS) -> list[IoOp]:
    return [IoOp(n * SIZE, aligned_buffer(SIZE)) for n in range(first, first + count)]


async def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def test_reads_are_begun_in_their_order_and_so_many_at_a_time(
    tmp_path: Path, gate: Gate
) -> None:
    async with opened(tmp_path / "data", gate, at_once=2) as device:
        wanted = ops()
        asked = [asyncio.ensure_future(device.read(wanted[n : n + 4])) for n in (0, 4)]
        await asyncio.sleep(0)
        gate.let_through(OPS, at_once=2)  # the loop is busy with this
        assert await asyncio.gather(*asked) == [[Status.OK] * 4] * 2
        # Two threads that begin at the same time may write themselves down the other way round.
        assert all(abs(at // SIZE - n) <= 1 for n, at in enumerate(gate.begun))
        assert b"".join(bytes(op.view) for op in wanted) == BYTES


@pytest.mark.parametrize("looked_at_here", [True, False])
async def test_reads_begin_and_go_on_while_the_interpreters_lock_is_held(
    tmp_path: Path, gate: Gate, looked_at_here: bool
) -> None:
    check = None if looked_at_here else lambda number: True
    async with opened(tmp_path / "data", gate, at_once=2) as device:
        gate.open(OPS + 4)
        assert await device.read(ops(0, 4)) == [Status.OK] * 4
        await asyncio.sleep(0.05)  # all threads wait for work
        asked = asyncio.ensure_future(device.read(ops(), check))
        asyncio.get_running_loop().call_soon(ctypes.PyDLL(None).usleep, 300_000)  # keeps the lock
        held: list[int] = []
        asyncio.get_running_loop().call_soon(lambda: held.append(len(gate.begun) - 4))
        assert await asked == [Status.OK] * OPS
        # What is looked at elsewhere brings its thread back: as many as there are threads.
        assert held[0] == OPS if looked_at_here else held[0] >= 4


async def test_of_a_cancelled_read_only_what_had_begun_is_read(tmp_path: Path, gate: Gate) -> None:
    async with opened(tmp_path / "data", gate, at_once=2) as device:
        mine = ops()
        asked = asyncio.ensure_future(device.read(mine))
        other = asyncio.ensure_future(device.read(ops(2, 1)))
        await asyncio.sleep(0)
        gate.wait(2)
        asked.cancel()
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.sleep(0.05)
        assert not asked.done(), "two reads still write to its buffers"
        gate.open(3)
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert await other == [Status.OK]
        assert sorted(gate.begun) == [0, SIZE, 2 * SIZE]
        assert not any(bytes(op.view).strip(b"\0") for op in mine[2:])


async def test_an_error_of_ours_ends_the_batch_and_nothing_else(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its threads have begun more of it: they are waited for."""

    def fails(number: int) -> bool:
        raise ZeroDivisionError("of a check")

    async with opened(tmp_path / "data", gate, at_once=2) as device:
        asked = asyncio.ensure_future(device.read(ops(), fails))
        await asyncio.sleep(0)
        gate.wait(2)
        gate.open(1)
        await asyncio.sleep(0.1)
        assert not asked.done()
        gate.open(OPS)
        with pytest.raises(ZeroDivisionError, match="of a check"):
            await asked
        assert len(gate.begun) <= 3
        assert await device.read(ops(3, 2)) == [Status.OK] * 2


async def test_without_memory_to_ask_for_it_nothing_of_a_call_is_read(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = native.Reads.add, [1]

    def scarce(self: native.Reads, *args: Any, **more: Any) -> None:
        if not left[0]:
            raise MemoryError
        left[0] -= 1
        real(self, *args, **more)

    async with opened(tmp_path / "data", gate, at_once=2) as device:
        monkeypatch.setattr(native.Reads, "add", scarce)
        first = asyncio.ensure_future(device.read(ops(0, 1)))
        await asyncio.sleep(0)
        with pytest.raises(MemoryError):
            await device.read(ops(1, 3))
        gate.open(OPS)
        assert await first == [Status.OK]
        monkeypatch.undo()
        assert gate.begun == [0]
        assert device._queue is not None
        assert not device._queue._under_way


async def test_without_memory_to_keep_account_of_it_nothing_is_asked_for(
    tmp_path: Path, gate: Gate
) -> None:
    class Scarce(dict[int, object]):
        def __setitem__(self, number: int, value: object) -> None:
            if number == 0:
                raise MemoryError
            super().__setitem__(number, value)

    async with opened(tmp_path / "data", gate, at_once=2) as device:
        assert device._queue is not None
        device._queue._under_way = Scarce()  # type: ignore[assignment]
        gate.open(OPS)
        with pytest.raises(MemoryError):
            await device.read(ops())
        assert await device.read(ops(4, 1)) == [Status.OK]
        assert not device._queue._under_way
        assert gate.begun == [4 * SIZE]


async def test_who_waits_for_a_read_is_told_when_there_is_memory_again(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {"next": 3, "settle": 4, "ended": 2}

    def scarce(name: str) -> Callable[..., Any]:
        real = getattr(native.Reads, name)

        def call(self: native.Reads, *args: object) -> Any:
            if left[name]:
                left[name] -= 1
                raise MemoryError
            return real(self, *args)

        return call

    class Scarce(dict[int, object]):
        failed = 0

        def __getitem__(self, number: int) -> object:
            if self.failed < 5:
                self.failed += 1
                raise MemoryError
            return super().__getitem__(number)

    for name in left:
        monkeypatch.setattr(native.Reads, name, scarce(name))
    async with opened(tmp_path / "data", gate, at_once=2) as device:
        assert device._queue is not None
        device._queue._under_way = Scarce()  # type: ignore[assignment]
        gate.open(OPS)
        assert await device.read(ops(), lambda number: True) == [Status.OK] * OPS
        assert device._queue._under_way.failed == 5  # type: ignore[attr-defined]
        assert not any(left.values())


async def test_threads_that_came_are_let_go_where_others_cannot(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = Pool.post, [2]

    def scarce(self: Pool, *args: object) -> None:
        if not left[0]:
            raise MemoryError
        left[0] -= 1
        real(self, *args)  # type: ignore[arg-type]

    before = {one.name for one in threading.enumerate()}
    monkeypatch.setattr(Pool, "post", scarce)
    (tmp_path / "data").write_bytes(BYTES)
    with pytest.raises(DeviceError, match="no memory"):
        await FileDevice.open(tmp_path / "data")
    await eventually(lambda: {one.name for one in threading.enumerate()} <= before)


async def test_a_cancelled_read_waits_for_what_is_being_read_whatever_else_fails(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: native.Reads, number: int) -> None:
        raise MemoryError

    async with opened(tmp_path / "data", gate, at_once=1) as device:
        mine = ops()
        asked = asyncio.ensure_future(device.read(mine))
        await asyncio.sleep(0)
        gate.wait(1)
        monkeypatch.setattr(native.Reads, "drop", fails)
        asked.cancel()
        await asyncio.sleep(0.05)
        assert not asked.done()
        gate.open(OPS)
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert len(gate.begun) == OPS, "nothing could be dropped"


async def test_a_device_that_is_closed_by_one_loop_reads_nothing_for_another(
    tmp_path: Path, gate: Gate
) -> None:
    device = await FileDevice.open(prepared(tmp_path), io_threads=2)
    gate.open(1000)
    ended: list[str] = []

    async def reads_on() -> None:
        try:
            while True:
                assert await device.read(ops(0, 2)) == [Status.OK] * 2
        except RuntimeError as error:
            ended.append(str(error))

    other = asyncio.create_task(asyncio.to_thread(asyncio.run, reads_on()))
    await asyncio.sleep(0.05)
    await device.close()
    await asyncio.wait_for(other, 30)
    assert "closed" in ended[0]


@pytest.mark.parametrize("step", ["ask", "serve"])
async def test_who_waits_is_told_wherever_there_is_no_memory_for_once(
    tmp_path: Path, gate: Gate, step: str
) -> None:
    """Each single allocation fails once: of asking for a read, or of the thread that reads it and
    has it judged. Nothing is written to a buffer after its call ended."""
    memory = pytest.importorskip("_testcapi", reason="not run here: Python without its test parts")
    gate.open(1000)
    path = prepared(tmp_path)
    device = await FileDevice.open(path, io_threads=2)
    fd = os.open(path, os.O_RDONLY)
    failed = 0
    for number in range(60):
        pool = Pool(1, "mine")
        assert native.KERNEL is not None
        queue = ReadQueue(native.KERNEL, fd, 1, pool, 0)
        mine = ops(0, 1)
        reading = Reads(fd, runs := read_runs(mine, len(BYTES)), mine, lambda _: True)
        asked = Eager(queue.read(reading, runs, lambda _: True))
        gc.disable()
        if step == "ask":
            memory.set_nomemory(number, number + 1)
        try:
            asked.begin()
        finally:
            memory.remove_mem_hooks()
        calls = (native.Taken(), queue._native.next, queue._judge, queue._native.settle)
        queue._native.close()
        if step == "serve":
            memory.set_nomemory(number, number + 1)
        try:
            _serve(*calls)
        finally:
            memory.remove_mem_hooks()
            gc.enable()
        try:
            await asyncio.wait_for(asked, 10)
            assert bytes(mine[0].view) == BYTES[:SIZE]
        except MemoryError:
            failed += 1
        assert not queue._under_way
        queue.close()
    assert failed
    await device.close()
    os.close(fd)


async def test_a_read_that_is_cancelled_after_the_close_is_the_callers_again(
    tmp_path: Path, gate: Gate
) -> None:
    async with opened(tmp_path / "data", gate, at_once=2) as device:
        asked = asyncio.ensure_future(device.read(ops()))
        await asyncio.sleep(0)
        gate.open(OPS)
        await device.close()  # all of it was read, which its caller has not heard
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked


async def test_close_waits_for_what_was_asked_for(tmp_path: Path, gate: Gate) -> None:
    async with opened(tmp_path / "data", gate, at_once=1) as device:
        asked = asyncio.ensure_future(device.read(ops()))
        await asyncio.sleep(0)
        gate.wait(1)
        threading.Timer(0.05, gate.open, [OPS]).start()
        await device.close()
        assert await asked == [Status.OK] * OPS
        await device.close()
        with pytest.raises(RuntimeError, match="closed"):
            await device.read(ops())


async def test_nothing_keeps_a_buffer_once_its_read_has_ended(tmp_path: Path, gate: Gate) -> None:
    def fails(number: int) -> bool:
        raise ZeroDivisionError

    async with opened(tmp_path / "data", gate, at_once=2) as device:
        gate.open(2 * OPS)
        gc.collect()
        gc.disable()
        try:
            for check in (None, fails):
                mine = ops(0, 2)
                kept = [weakref.ref(op.view) for op in mine]
                if check is None:
                    assert await device.read(mine) == [Status.OK] * 2
                else:
                    with pytest.raises(ZeroDivisionError) as caught:
                        await device.read(mine, check)
                    del caught
                del mine
                await eventually(lambda kept=kept: not any(one() for one in kept))
        finally:
            gc.enable()


@pytest.mark.parametrize("bad", [None, 0, 2])
async def test_records_that_are_read_together_are_judged_one_by_one(
    tmp_path: Path, gate: Gate, bad: int | None
) -> None:
    gate.open(100)
    made = [record(1000 + n, n) for n in range(4)]
    raw = [bytearray(each) for _, each in made]
    if bad is not None:
        raw[bad][500] ^= 1
    (tmp_path / "data").write_bytes(b"".join(raw))
    device = await FileDevice.open(tmp_path / "data", io_threads=2)
    views = [aligned_buffer(len(each)) for each in raw]
    check = RecordCheck([(e, v) for (e, _), v in zip(made, views, strict=True)], KEY, True)
    at, wanted = 0, []
    for view in views:
        wanted.append(IoOp(at, view))
        at += view.nbytes
    statuses = await device.read(wanted, check)
    assert statuses == [Status.CORRUPT if n == bad else Status.OK for n in range(4)]
    assert b"".join(views) == b"".join(raw)
    await device.close()


async def test_a_record_that_was_cut_is_looked_at_once_and_whole(
    tmp_path: Path, gate: Gate
) -> None:
    """An op of more than RUN_BYTES_MAX is read in pieces, and its twin judges it."""
    gate.open(100)
    expected, raw = record(2 * RUN_BYTES_MAX + 5)
    behind, more = record(700)
    for flipped in (False, True):
        raw[-BLOCK] ^= flipped
        (tmp_path / "data").write_bytes(raw + more)
        device = await FileDevice.open(tmp_path / "data", io_threads=2)
        views = [aligned_buffer(len(raw)), aligned_buffer(len(more))]
        check = RecordCheck(list(zip((expected, behind), views, strict=True)), KEY, True)
        found = await device.read([IoOp(0, views[0]), IoOp(len(raw), views[1])], check)
        assert found == [Status.CORRUPT if flipped else Status.OK, Status.OK]
        await device.close()


async def test_two_loops_may_read_of_one_device(tmp_path: Path, gate: Gate) -> None:
    """Whichever loop is woken, each call ends on its own."""
    async with opened(tmp_path / "data", gate, at_once=2) as device:
        gate.open(1000)

        async def some(times: int) -> None:
            for _ in range(times):
                assert await device.read(ops(0, 2)) == [Status.OK] * 2

        await asyncio.gather(some(20), asyncio.to_thread(asyncio.run, some(20)))
        await some(1)


def test_what_came_short_is_read_on(tmp_path: Path) -> None:
    """`Reads.came` goes on where the kernel's read ended, or says which op cannot be had."""
    path = tmp_path / "data"
    data = random.Random(3).randbytes(3 * BLOCK)
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        for got in (0, 1, BLOCK, BLOCK + 5, 2 * BLOCK - 1):
            mine = [IoOp(n * BLOCK, aligned_buffer(BLOCK)) for n in range(2)]
            looked: list[int] = []
            (run,) = read_runs(mine, 3 * BLOCK)
            whole = b"".join([data[:got], bytes(2 * BLOCK - got)])
            mine[0].view[:], mine[1].view[:] = whole[:BLOCK], whole[BLOCK:]
            one = Reads(fd, [run], mine, lambda n, looked=looked: looked.append(n) or n == 0)  # type: ignore[misc]
            one.came(run, got)
            assert b"".join(bytes(op.view) for op in mine) == data[: 2 * BLOCK]
            assert (looked, one.bad) == ([0, 1], [(1, Status.CORRUPT)])
    finally:
        os.close(fd)


@pytest.mark.parametrize("views", [1, 2])
def test_what_a_read_of_the_kernel_failed_with_is_of_the_device_or_ours(
    tmp_path: Path, views: int
) -> None:
    """A fault of the device is of one op; of several each is tried again, alone. An error that only
    we can cause is loud."""
    path = tmp_path / "data"
    path.write_bytes(bytes(views * BLOCK))
    fd = os.open(path, os.O_RDONLY)
    try:
        mine = [IoOp(n * BLOCK, aligned_buffer(BLOCK)) for n in range(views)]
        (run,) = read_runs(mine, views * BLOCK)
        one = Reads(fd, [run], mine, None)
        one.came(run, -errno.EIO)
        assert one.bad == ([(0, Status.IO_ERROR)] if views == 1 else [])
        for bug in (errno.EINVAL, errno.EBADF, errno.EFAULT):
            with pytest.raises(OSError, match=os.strerror(bug)):
                one.came(run, -bug)
    finally:
        os.close(fd)
