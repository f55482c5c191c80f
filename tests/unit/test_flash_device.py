"""The file device on real files: batches, alignment, exclusivity, refusals, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import os
import random
import resource
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashlab import NAMESPACES, OPTIONS, get, key_of, put

from entresol_daemon.compute import ThreadCompute
from entresol_daemon.flash.device import BLOCK, IoOp, aligned_buffer, round_up
from entresol_daemon.flash.engine import Engine, RecoveryKind
from entresol_daemon.flash.file_device import FileDevice
from entresol_daemon.flash.runs import READ_MERGED_BYTES_MAX, RUN_BYTES_MAX, Run, Writes
from entresol_proto import native
from entresol_proto.status import DeviceError, Status

SIZE = 16 << 20
# For tests that stand in for `os.preadv`: how the native kernel reads is in test_flash_reading.
by_python = pytest.mark.parametrize("reader", ["python"], indirect=True)


@pytest.fixture(autouse=True, params=["kernel", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads: the native kernel's queue, or its twin."""
    if request.param == "python":
        monkeypatch.setattr(native, "KERNEL", None)
    elif native.KERNEL is None:
        pytest.skip("not run here: the package was built without a C compiler")


@asynccontextmanager
async def opened(path: Path, size: int | None = SIZE, **kwargs: Any) -> AsyncIterator[FileDevice]:
    device = await FileDevice.open(path, size, create=True, **kwargs)
    try:
        yield device
    finally:
        await device.close()


async def test_batches_of_all_sizes_come_back(tmp_path: Path) -> None:
    rng = random.Random(1)
    async with opened(tmp_path / "data") as device:
        assert device.size_bytes == SIZE
        sizes = [BLOCK * rng.randrange(1, 40) for _ in range(60)] + [RUN_BYTES_MAX + BLOCK]
        rng.shuffle(sizes)
        ops, at = [], 0
        for size in sizes:
            view = aligned_buffer(size)
            view[:] = rng.randbytes(size)
            ops.append(IoOp(at, view))
            at += size + BLOCK * rng.randrange(0, 2)  # contiguous and not
        rng.shuffle(ops)
        await device.write(ops)
        await device.flush()
        back = [IoOp(op.offset_bytes, aligned_buffer(op.view.nbytes)) for op in ops]
        assert await device.read(back) == [Status.OK] * len(ops)
        assert [bytes(b.view) for b in back] == [bytes(o.view) for o in ops]
        assert await device.read([]) == []
        await device.write([])


async def test_unaligned_and_outside_operations_are_bugs_not_faults(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as device:
        for offset, size in ((1, BLOCK), (0, BLOCK - 1), (SIZE, BLOCK), (-BLOCK, BLOCK)):
            with pytest.raises(ValueError, match="unaligned or outside"):
                await device.read([IoOp(offset, aligned_buffer(2 * BLOCK)[:size])])
        odd = aligned_buffer(2 * BLOCK)[8 : 8 + BLOCK]
        if device.direct and not kernel_takes(tmp_path / "raw", odd):
            with pytest.raises(ValueError, match="not aligned"):
                await device.write([IoOp(0, odd)])


def kernel_takes(path: Path, buffer: memoryview) -> bool:
    """Whether O_DIRECT on this file system takes a buffer that is not aligned, as tmpfs does."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        return os.pwrite(file, buffer, 0) == buffer.nbytes
    except OSError:
        return False
    finally:
        os.close(file)


async def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "data"):
        with pytest.raises(DeviceError, match="another daemon uses this data file"):
            await FileDevice.open(tmp_path / "data", SIZE)
    async with opened(tmp_path / "data", None) as device:
        assert device.size_bytes == SIZE


async def test_a_look_at_whether_it_is_in_use_keeps_no_daemon_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`inspect` takes the lock for a moment, and a daemon that started in it was refused."""
    async with opened(tmp_path / "data"):
        pass
    with (tmp_path / "data").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN))
        async with opened(tmp_path / "data", None) as device:
            assert device.size_bytes == SIZE


async def test_an_existing_file_keeps_its_size(tmp_path: Path) -> None:
    async with opened(tmp_path / "data"):
        pass
    async with opened(tmp_path / "data", 2 * SIZE) as device:
        assert device.size_bytes == SIZE
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o600


async def test_a_new_files_name_is_synced_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may lose its power before anything else in its folder is."""
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "data"
    for _ in range(2):
        async with opened(path):
            pass
    assert synced[:2] == [str(path), str(tmp_path)]
    assert synced.count(str(tmp_path)) == 1, "of an existing file nothing is to be kept"


async def test_missing_empty_and_odd_paths(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="does not exist"):
        await FileDevice.open(tmp_path / "data", SIZE)
    with pytest.raises(DeviceError, match="create its directory first"):
        await FileDevice.open(tmp_path / "no" / "data", SIZE, create=True)
    with pytest.raises(DeviceError, match="not a regular file"):
        await FileDevice.open(tmp_path, SIZE)
    with pytest.raises(DeviceError, match="not a regular file"):
        await FileDevice.open("/dev/null", SIZE)
    with pytest.raises(DeviceError, match="configure its size"):
        await FileDevice.open(tmp_path / "data", None, create=True)
    assert not (tmp_path / "data").exists(), "a failed creation leaves nothing behind"
    for threads in (0, 257):
        with pytest.raises(DeviceError, match="io_threads"):
            await FileDevice.open(tmp_path / "data", SIZE, create=True, io_threads=threads)


async def test_a_full_file_system_is_told_before_it_is_filled(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    free = room.f_bavail * room.f_frsize
    with pytest.raises(DeviceError, match="configure a smaller data file") as caught:
        await FileDevice.open(tmp_path / "data", free + (1 << 40), create=True)
    assert caught.value.status is Status.NO_SPACE
    assert not (tmp_path / "data").exists()


async def test_a_failing_allocation_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DeviceError, match="No space left") as caught:
        await FileDevice.open(tmp_path / "data", SIZE, create=True)
    assert caught.value.status is Status.NO_SPACE
    assert not (tmp_path / "data").exists()


def in_child(work: Callable[[], str]) -> str:
    """Run `work` in a forked process, so that it may give up rights; returns what it said."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write_end, said.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


async def _open_and_write(path: Path) -> str:
    try:
        device = await FileDevice.open(path, SIZE, create=True)
    except DeviceError as error:
        return f"open: {error.status.label}: {error}"
    try:
        await device.write([IoOp(SIZE - BLOCK, aligned_buffer(BLOCK))])
    except DeviceError as error:
        return f"write: {error.status.label}: {error}"
    finally:
        await device.close()
    return "written"


def test_a_read_only_directory_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    for parent in (tmp_path, *tmp_path.parents[:2]):
        if parent.stat().st_uid == os.getuid():
            parent.chmod(0o755)
    folder.chmod(0o555)

    def work() -> str:
        if os.getuid() == 0:
            os.setuid(65534)
        return asyncio.run(_open_and_write(folder / "data"))

    said = in_child(work)
    assert said.startswith("open: io_error: cannot open"), said
    assert "let this user write the file and its directory" in said


def test_a_file_size_limit_is_told(tmp_path: Path) -> None:
    path = tmp_path / "data"

    def work() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2))
        return asyncio.run(_open_and_write(path))

    assert in_child(work).startswith("open: no_space: cannot reserve")
    with path.open("wb") as file:
        file.truncate(SIZE)  # as if the limit came later
    assert in_child(work).startswith("write: no_space: write of")


async def test_refused_direct_io_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(real(fd, command, argument))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    async with opened(tmp_path / "data") as device:
        assert not device.direct
        assert "direct_io_refused" in caplog.text
        view = aligned_buffer(BLOCK)
        view[:4] = b"here"
        await device.write([IoOp(0, view)])
        await device.flush()
        assert await device.read([IoOp(0, view)]) == [Status.OK]


@by_python
async def test_one_bad_block_fails_one_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, bad = os.preadv, 5 * BLOCK

    def flaky(fd: int, views: Any, offset: int) -> int:
        if offset <= bad < offset + sum(v.nbytes for v in views):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, offset)

    async with opened(tmp_path / "data") as device:
        monkeypatch.setattr(os, "preadv", flaky)
        ops = [IoOp(n * BLOCK, aligned_buffer(BLOCK)) for n in range(8)]
        statuses = await device.read(ops)
        assert statuses == [Status.IO_ERROR if n == 5 else Status.OK for n in range(8)]


@pytest.mark.parametrize("threads", [1, 4])
async def test_what_was_read_is_looked_at_once_and_whole(tmp_path: Path, threads: int) -> None:
    """Also an op that several threads read, and only where the device gave it."""
    sizes = [BLOCK, 3 * RUN_BYTES_MAX, 2 * BLOCK, RUN_BYTES_MAX, BLOCK]
    source = aligned_buffer(sum(sizes))
    source[:] = random.Random(4).randbytes(source.nbytes)
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    looked: list[int] = []
    async with opened(tmp_path / "data", 2 * source.nbytes, io_threads=threads) as device:
        await device.write([IoOp(0, source)])
        ops = [IoOp(at, aligned_buffer(n)) for at, n in zip(starts, sizes, strict=True)]

        def check(number: int) -> bool:
            looked.append(number)
            at, view = starts[number], ops[number].view
            assert view == source[at : at + view.nbytes], "a part of it is not there yet"
            return number not in (1, 4)

        wanted = [Status.CORRUPT if n in (1, 4) else Status.OK for n in range(len(sizes))]
        assert await device.read(ops, check) == wanted
        assert sorted(looked) == list(range(len(sizes)))


async def test_what_is_behind_the_end_of_the_file_fails_alone(tmp_path: Path) -> None:
    """A run of several ops, one of which is cut, and a run that is not there at all."""
    async with opened(tmp_path / "data") as device:
        data = random.Random(6).randbytes(4 * BLOCK)
        source = aligned_buffer(4 * BLOCK)
        source[:] = data
        await device.write([IoOp(0, source)])
        os.truncate(tmp_path / "data", 3 * BLOCK - 512)
        ops = [IoOp(n * BLOCK, aligned_buffer(BLOCK)) for n in (0, 1, 2, 3, 9)]
        looked: list[int] = []
        statuses = await device.read(ops, lambda number: not looked.append(number))
        assert statuses == [Status.OK] * 2 + [Status.IO_ERROR] * 3
        assert looked == [0, 1]
        assert b"".join(bytes(op.view) for op in ops[:2]) == data[: 2 * BLOCK]


async def test_an_unaligned_buffer_of_a_read_is_a_bug_not_a_fault(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as device:
        odd = aligned_buffer(2 * BLOCK)[1 : 1 + BLOCK]
        with contextlib.suppress(OSError):
            os.preadv(device._fd, [odd], 0)
            pytest.skip("not run here: this file system takes any buffer")
        with pytest.raises(ValueError, match="not aligned"):
            await device.read([IoOp(0, odd)])
        assert await device.read([IoOp(0, aligned_buffer(BLOCK))]) == [Status.OK]


@by_python
async def test_what_was_not_read_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, views: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    async with opened(tmp_path / "data") as device:
        monkeypatch.setattr(os, "preadv", broken)
        for size in (BLOCK, 2 * RUN_BYTES_MAX):
            ops = [IoOp(0, aligned_buffer(size))]
            assert await device.read(ops, lambda number: False) == [Status.IO_ERROR]


@by_python
async def test_short_transfers_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_read, real_write = os.preadv, os.pwritev

    def short_read(fd: int, views: Any, offset: int) -> int:
        return real_read(fd, [views[0][:BLOCK]], offset)

    def short_write(fd: int, views: Any, offset: int) -> int:
        return real_write(fd, [views[0][:BLOCK]], offset)

    async with opened(tmp_path / "data") as device:
        monkeypatch.setattr(os, "preadv", short_read)
        monkeypatch.setattr(os, "pwritev", short_write)
        source = aligned_buffer(5 * BLOCK)
        source[:] = random.Random(3).randbytes(5 * BLOCK)
        await device.write([IoOp(0, source[: 3 * BLOCK]), IoOp(3 * BLOCK, source[3 * BLOCK :])])
        target = aligned_buffer(5 * BLOCK)
        assert await device.read([IoOp(0, target)]) == [Status.OK]
        assert bytes(target) == bytes(source)


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
async def test_failed_writes_and_flushes_are_device_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    async with opened(tmp_path / "data") as device:
        monkeypatch.setattr(os, call, refuse)
        ops = [IoOp(0, aligned_buffer(BLOCK))]
        work = device.write(ops) if call == "pwritev" else device.flush()
        with pytest.raises(DeviceError, match="Input/output error"):
            await work


@by_python
async def test_a_cancelled_read_leaves_the_buffer_alone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, finished = os.preadv, threading.Event(), threading.Event()

    def slow(fd: int, views: Any, offset: int) -> int:
        begun.set()
        time.sleep(0.05)
        done = real(fd, views, offset)
        finished.set()
        return done

    async with opened(tmp_path / "data") as device:
        monkeypatch.setattr(os, "preadv", slow)
        task = asyncio.create_task(device.read([IoOp(0, aligned_buffer(BLOCK))]))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert finished.is_set(), "the caller may reuse its buffer now"


async def test_an_engine_on_a_real_file(tmp_path: Path) -> None:
    options = replace(OPTIONS, checkpoint_path=tmp_path / "index.arrow")
    compute = ThreadCompute(2)
    blocks = {n: random.Random(n).randbytes(n * 700 + 1) for n in range(40)}
    kinds = []
    for opening in range(3):
        device = await FileDevice.open(tmp_path / "data", SIZE, create=True)
        engine = await Engine.open(device, options, compute=compute, now_ns=time.monotonic_ns)
        kinds.append(engine.recovery.kind)
        if opening == 0:
            futures = [put(engine, (NAMESPACES[0], key_of(n)), b)[1] for n, b in blocks.items()]
            assert set(await asyncio.gather(*futures)) == {Status.OK}
        for number, data in blocks.items():
            assert await get(engine, (NAMESPACES[0], key_of(number))) == (Status.OK, data)
        await engine.close(clean=opening == 0)
        await device.close()
    await compute.close()
    assert kinds == [RecoveryKind.FORMATTED, RecoveryKind.CHECKPOINT, RecoveryKind.FOOTERS]


def test_round_up() -> None:
    assert [round_up(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, BLOCK, BLOCK, 2 * BLOCK]


async def test_one_thread_goes_on_writing_while_somebody_reads(tmp_path: Path) -> None:
    """The others leave between two runs, and nothing is left out."""
    reads = threading.Event()
    begun: Counter[int] = Counter()
    both = threading.Barrier(2)
    real = os.pwritev

    def watched(fd: int, views: Any, offset: int) -> int:
        me = threading.get_ident()
        begun[me] += 1
        if begun[me] == 1 and not reads.is_set():
            both.wait(30)  # each of the two has one run
            reads.set()
        return real(fd, views, offset)

    path = tmp_path / "data"
    source = random.Random(5).randbytes(8 * BLOCK)
    path.write_bytes(bytes(len(source)))
    fd = os.open(path, os.O_RDWR)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwritev", watched)
            spans = [slice(at, at + BLOCK) for at in range(0, len(source), BLOCK)]
            runs = [Run(s.start, BLOCK, [memoryview(source)[s]], [0]) for s in spans]
            writes = Writes(fd, runs, reads.is_set)
            threads = [threading.Thread(target=writes.work) for _ in range(2)]
            for one in threads:
                one.start()
            for one in threads:
                one.join(30)
                assert not one.is_alive()
    finally:
        os.close(fd)
    assert path.read_bytes() == source
    assert sorted(begun.values()) == [1, 7]


async def test_after_a_write_that_failed_no_other_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def refuse(fd: int, views: Any, offset: int) -> int:
        written.append(offset)
        raise OSError(errno.EIO, "Input/output error")

    async with opened(tmp_path / "data", 8 * RUN_BYTES_MAX, io_threads=4) as device:
        monkeypatch.setattr(os, "pwritev", refuse)
        view = aligned_buffer(8 * RUN_BYTES_MAX)
        with pytest.raises(DeviceError, match="Input/output error"):
            await device.write([IoOp(0, view)])
        assert written == [0]  # one of four threads writes


@by_python
async def test_reads_are_begun_in_the_order_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what waits is begun by the thread that is free, whatever the loop does."""
    real, begun, every = os.preadv, list[int](), threading.Event()

    def watched(fd: int, views: Any, offset: int) -> int:
        begun.append(offset)
        if len(begun) == 16:
            every.set()
        return real(fd, views, offset)

    size = READ_MERGED_BYTES_MAX
    async with opened(tmp_path / "data", 16 * size, io_threads=2) as device:
        monkeypatch.setattr(os, "preadv", watched)
        views = [aligned_buffer(size) for _ in range(16)]
        ops = [IoOp(number * size, view) for number, view in enumerate(views)]
        asked = [asyncio.ensure_future(device.read(ops[at : at + 4])) for at in range(0, 16, 4)]
        await asyncio.sleep(0)
        assert every.wait(30), "it needed the loop, which is busy"
        assert await asyncio.gather(*asked) == [[Status.OK] * 4] * 4
    assert begun == [op.offset_bytes for op in ops]


def test_giving_up_does_not_take_what_a_thread_is_about_to_write(tmp_path: Path) -> None:
    """An error that is none of the device's would end the engine's writer for good."""
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * BLOCK))
    others: list[threading.Thread] = []

    def somebody_reads() -> bool:
        others.append(threading.Thread(target=writes.give_up))
        others[-1].start()
        others[-1].join(0.05)  # it waits, or it is over
        return False

    fd = os.open(path, os.O_RDWR)
    try:
        view = memoryview(bytes(BLOCK))
        runs = [Run(at * BLOCK, BLOCK, [view], [at]) for at in range(4)]
        writes = Writes(fd, runs, somebody_reads)
        writes._threads = 1  # another one is at it
        assert writes.work() is False
        for other in others:
            other.join(30)
    finally:
        os.close(fd)


async def test_a_write_that_failed_keeps_no_buffer_until_the_collector_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, views: Any, offset: int) -> int:
        raise OSError(errno.EIO, "refused")

    async with opened(tmp_path / "data") as device:
        monkeypatch.setattr(os, "pwritev", refuse)
        gc.collect()
        gc.disable()
        try:
            view = aligned_buffer(BLOCK)
            kept = weakref.ref(view)
            with pytest.raises(DeviceError, match="refused") as caught:
                await device.write([IoOp(0, view)])
            del view, caught
            deadline = time.monotonic() + 30  # a thread drops its own last
            while kept() is not None and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert kept() is None
        finally:
            gc.enable()
