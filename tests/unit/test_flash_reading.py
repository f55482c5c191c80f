"""Reads by the native kernel's queue: in order, so many at a time, without the interpreter's lock.

The kernel is built with a gate in front of `preadv`: a read begins when the test lets it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import random
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from entresol_daemon.flash.device import BLOCK, IoOp, aligned_buffer
from entresol_daemon.flash.file_device import FileDevice
from entresol_daemon.flash.runs import READ_MERGED_BYTES_MAX, Reads, read_runs
from entresol_proto import native
from entresol_proto.native import Taken
from entresol_proto.status import DeviceError, Status
from entresol_proto.threads import Pool

SIZE = READ_MERGED_BYTES_MAX  # of one read
OPS = 8
BYTES = random.Random(1).randbytes(OPS * SIZE)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("not run here: no C compiler")
    made = tmp_path_factory.mktemp("gated") / "gated.so"
    source, folder = Path(__file__).with_name("gated.c"), native.SOURCE.parent
    flags = ["-std=c11", "-O1", "-g", "-fPIC", "-shared", "-pthread", f"-I{folder}"]
    subprocess.run([compiler, *flags, "-o", made, source], check=True, timeout=120)
    return made


class Gate:
    """Lets reads go on, and knows which have begun."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.begun_offset.restype = ctypes.c_uint64
        self._out, self._in = os.pipe()
        self._library.gate(self._out)

    def open(self, reads: int = 1) -> None:
        os.write(self._in, bytes(reads))

    @property
    def begun(self) -> list[int]:
        """Offsets, in order."""
        return [self._library.begun_offset(number) for number in range(self._library.begun())]

    def wait(self, count: int) -> None:
        """Until so many have begun."""
        deadline = time.monotonic() + 30
        while self._library.begun() < count:
            assert time.monotonic() < deadline, f"{self._library.begun()} of {count} have begun"
            time.sleep(0.001)

    def let_through(self, at_once: int) -> None:
        """One read after the other, with never more than so many begun and not let through."""
        for number in range(OPS):
            self.wait(min(OPS, number + at_once))
            time.sleep(0.02)
            assert len(self.begun) <= number + at_once
            self.open()

    def close(self) -> None:
        self._library.gate(-1)
        os.close(self._in)
        os.close(self._out)


@pytest.fixture
def gate(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(native, "KERNEL", native.Kernel(library))
    one = Gate(library)
    yield one
    one.close()


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
        gate.let_through(at_once=2)  # the loop is busy with this
        assert await asyncio.gather(*asked) == [[Status.OK] * 4] * 2
        # Two threads that begin at the same time may write themselves down the other way round.
        assert all(abs(at // SIZE - n) <= 1 for n, at in enumerate(gate.begun))
        assert b"".join(bytes(op.view) for op in wanted) == BYTES


async def test_reads_begin_and_go_on_while_the_interpreters_lock_is_held(
    tmp_path: Path, gate: Gate
) -> None:
    async with opened(tmp_path / "data", gate, at_once=2) as device:
        gate.open(OPS + 4)
        assert await device.read(ops(0, 4)) == [Status.OK] * 4
        await asyncio.sleep(0.05)  # all threads wait for work
        asked = asyncio.ensure_future(device.read(ops()))
        asyncio.get_running_loop().call_soon(ctypes.PyDLL(None).usleep, 300_000)  # keeps the lock
        held: list[int] = []
        asyncio.get_running_loop().call_soon(lambda: held.append(len(gate.begun) - 4))
        assert await asked == [Status.OK] * OPS
        # As many as there are threads: each has to come for the lock before it takes another.
        assert held[0] >= 4


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


async def test_without_memory_for_all_of_it_what_was_asked_for_is_waited_for(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = native.Reads.add, [3]

    def scarce(self: native.Reads, *args: object) -> None:
        if not left[0]:
            raise MemoryError
        left[0] -= 1
        real(self, *args)  # type: ignore[arg-type]

    async with opened(tmp_path / "data", gate, at_once=2) as device:
        monkeypatch.setattr(native.Reads, "add", scarce)
        asked = asyncio.ensure_future(device.read(ops()))
        await asyncio.sleep(0.05)
        begun = len(gate.begun)  # what had not begun is given up
        assert begun <= 2
        assert not asked.done() or not begun
        gate.open(OPS)
        with pytest.raises(MemoryError):
            await asked
        monkeypatch.undo()
        assert device._queue is not None
        assert not device._queue._under_way


@pytest.mark.parametrize("fails_at", [0, 2])
async def test_without_memory_to_keep_account_of_it_nothing_is_asked_for(
    tmp_path: Path, gate: Gate, fails_at: int
) -> None:
    class Scarce(dict[int, object]):
        def __setitem__(self, number: int, value: object) -> None:
            if number == fails_at:
                raise MemoryError
            super().__setitem__(number, value)

    async with opened(tmp_path / "data", gate, at_once=2) as device:
        assert device._queue is not None
        device._queue._under_way = Scarce()  # type: ignore[assignment]
        gate.open(2)
        with pytest.raises(MemoryError):
            await device.read(ops())
        gate.open(OPS)
        assert await device.read(ops(4, 1)) == [Status.OK]
        assert not device._queue._under_way
        assert set(gate.begun) <= {0, SIZE, 4 * SIZE}


async def test_who_waits_for_a_read_is_told_when_there_is_memory_again(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = native.Reads.next, [3]

    def scarce(self: native.Reads, taken: Taken) -> bool:
        if left[0]:
            left[0] -= 1
            raise MemoryError
        return real(self, taken)

    class Scarce(dict[int, object]):
        failed = 0

        def pop(self, *args: object) -> object:  # type: ignore[override]
            if self.failed < 5:
                self.failed += 1
                raise MemoryError
            return super().pop(*args)  # type: ignore[arg-type,call-overload]

    monkeypatch.setattr(native.Reads, "next", scarce)
    async with opened(tmp_path / "data", gate, at_once=2) as device:
        assert device._queue is not None
        device._queue._under_way = Scarce()  # type: ignore[assignment]
        gate.open(OPS)
        assert await device.read(ops()) == [Status.OK] * OPS
        assert (left, device._queue._under_way.failed) == ([0], 5)  # type: ignore[attr-defined]


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


# Of the kernel's queue itself ---------------------------------------------------------------------


@pytest.fixture
def reads(tmp_path: Path, gate: Gate) -> Iterator[native.Reads]:
    path = tmp_path / "data"
    path.write_bytes(random.Random(2).randbytes(4 * BLOCK + 100))
    fd = os.open(path, os.O_RDONLY)
    assert native.KERNEL is not None
    queue = native.KERNEL.reads(fd, 1)
    gate.open(100)
    yield queue
    queue.close()
    queue.free()
    os.close(fd)


def test_what_was_read_lies_where_it_was_wanted(tmp_path: Path, reads: native.Reads) -> None:
    data = (tmp_path / "data").read_bytes()
    views = [memoryview(bytearray(n)) for n in (1, 4096, 77, 3000)]
    reads.add(7, 10, views)
    taken = Taken()
    assert reads.next(taken)
    assert (taken.number, taken.got_bytes) == (7, 7174)
    assert b"".join(views) == data[10:7184]


def test_what_is_missing_is_told(reads: native.Reads) -> None:
    view = memoryview(bytearray(200))
    for offset in (4 * BLOCK, 5 * BLOCK):
        reads.add(1 << 40, offset, [view])
    taken = Taken()
    assert reads.next(taken)
    assert (taken.number, taken.got_bytes) == (1 << 40, 100)
    assert reads.next(taken)
    assert taken.got_bytes == 0


def test_an_error_is_told(gate: Gate) -> None:
    assert native.KERNEL is not None
    out, into = os.pipe()
    queue = native.KERNEL.reads(out, 1)
    gate.open(1)
    queue.add(3, 0, [memoryview(bytearray(10))])
    taken = Taken()
    assert queue.next(taken)
    assert (taken.number, os.strerror(-taken.got_bytes)) == (3, "Illegal seek")
    queue.close()
    queue.free()
    os.close(out)
    os.close(into)


def test_a_read_only_view_is_refused(reads: native.Reads) -> None:
    with pytest.raises((TypeError, BufferError)):
        reads.add(1, 0, [memoryview(bytes(10))])


def test_what_was_dropped_is_not_read_and_the_others_are(reads: native.Reads) -> None:
    views = [memoryview(bytearray(BLOCK)) for _ in range(5)]
    for number, view in enumerate(views):
        reads.add(number, number * BLOCK, [view])
    assert [reads.drop(n) for n in (0, 4, 2, 2, 9)] == [True, True, True, False, False]
    reads.add(5, BLOCK, [views[0]])  # behind the one that became the last
    taken, numbers = Taken(), []
    for _ in range(3):
        assert reads.next(taken)
        numbers.append(taken.number)
    assert numbers == [1, 3, 5]
    assert not reads.drop(1)
    reads.close()
    assert not reads.next(taken)


@pytest.mark.parametrize("waiting", [True, False])
def test_all_threads_are_let_go_at_the_end(gate: Gate, tmp_path: Path, waiting: bool) -> None:
    """Those that wait for a piece, and those that wait because as many as may are in service."""
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * BLOCK))
    fd = os.open(path, os.O_RDONLY)
    assert native.KERNEL is not None
    queue = native.KERNEL.reads(fd, 1)
    numbers: list[int] = []

    def work() -> None:
        taken = Taken()
        while queue.next(taken):
            numbers.append(taken.number)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for one in threads:
        one.start()
    view = memoryview(bytearray(BLOCK))
    for number in range(0 if waiting else 4):
        queue.add(number, 0, [view])
    if not waiting:
        gate.wait(1)
    queue.close()
    gate.open(4)
    for one in threads:
        one.join(30)
        assert not one.is_alive()
    assert sorted(numbers) == ([] if waiting else [0, 1, 2, 3])
    queue.free()
    os.close(fd)


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
