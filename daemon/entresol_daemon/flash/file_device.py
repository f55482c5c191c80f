"""The device of production: a regular file or a raw block device, read and written by threads.

What the threads do is in `runs`. Half of `io_threads` are reads in service, so that these, which
somebody waits for, never wait for a thread that writes or flushes. With the native kernel reads are
handed over and begun without the interpreter's lock (`reading`).

Invariants: a write that returned was handed to the kernel in full; nothing touches a caller's
buffer after its call returned, cancelled or not; two daemons never share one data file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

from entresol_daemon.flash.device import BLOCK, Check, FlushError, IoOp, aligned_buffer
from entresol_daemon.flash.reading import ReadQueue
from entresol_daemon.flash.runs import (
    Commit,
    FlushFailed,
    Reads,
    Run,
    Writes,
    is_bug,
    read_runs,
    read_threads,
    runs_of,
    threads_of,
    write_threads,
)
from entresol_proto import native
from entresol_proto.status import DeviceError, Status
from entresol_proto.threads import Pool

log = logging.getLogger("entresol.flash")

READS_LATELY_S = 0.02  # so long after a read the next one is expected
IO_THREADS_MAX = 256
LOCK_TRIES_MAX = 5  # to have a data file for oneself
LOCK_PAUSE_S = 0.02
_BLKGETSIZE64 = 0x80081272  # linux/fs.h

_T = TypeVar("_T")
_E = TypeVar("_E", bound=DeviceError)


class FileDevice:
    """A regular file or raw block device, driven by `preadv`/`pwritev` from its own threads."""

    def __init__(
        self,
        fd: int,
        size_bytes: int,
        name: str,
        direct: bool,
        readers: Pool,
        pool: Pool,
        threads: int,
    ) -> None:
        """Use `open`."""
        self.size_bytes = size_bytes
        self.name = name
        self.direct = direct
        self._fd = fd
        self._pool = pool
        self._threads = threads
        self._readers = readers
        self._queue: ReadQueue | None = None
        if native.KERNEL is not None:
            reading = read_threads(threads)
            self._queue = ReadQueue(native.KERNEL, fd, reading, readers, 2 * reading)
        self._reading = 0  # batches of reads in service
        self._read_at = -READS_LATELY_S  # when the last one ended

    @classmethod
    async def open(
        cls,
        path: str | Path,
        size_bytes: int | None = None,
        *,
        io_threads: int = 4,
        create: bool = False,
        direct: bool = True,
    ) -> FileDevice:
        """Open `path` for one daemon, exclusively.

        A missing regular file is created with mode 0600 when `create`, and its `size_bytes` are
        reserved at once (`fallocate`), so that a full file system shows now, not under load. An
        existing file keeps its size. `direct=False` goes through the page cache.
        Raises: DeviceError, with what to do about it.
        """
        if not 1 <= io_threads <= IO_THREADS_MAX:
            raise DeviceError(f"io_threads is {io_threads}", hint=f"use 1 to {IO_THREADS_MAX}")
        reading = read_threads(io_threads)
        pool = Pool(max(1, io_threads - reading), "entresol-io")
        try:
            # With the kernel as many again, which look at what they read before they read on.
            more = 1 if native.KERNEL is None else 2
            readers = Pool(more * reading, "entresol-read")
        except BaseException:
            pool.close(wait=False)
            raise
        try:
            fd, size, is_direct = await pool.run(
                _open_blocking, str(path), size_bytes, create, direct
            )
        except BaseException:
            readers.close(wait=False)
            pool.close(wait=False)
            raise
        try:
            return cls(fd, size, str(path), is_direct, readers, pool, io_threads)
        except MemoryError:
            readers.close(wait=False)
            pool.close(wait=False)
            os.close(fd)
            raise DeviceError(f"no memory to read {path}", hint="raise MemoryMax=") from None

    async def read(self, ops: Sequence[IoOp], check: Check | None = None) -> list[Status]:
        statuses = [Status.OK] * len(ops)
        runs = read_runs(ops, self.size_bytes)
        if not runs:
            return statuses
        reads = Reads(self._fd, runs, ops, check)
        self._reading += 1
        try:
            # Held by nothing here: a job that failed has its error, which has this frame.
            await self._outcome(self._read(reads, runs, check), "read")
        finally:
            self._reading -= 1
            self._read_at = time.monotonic()
        for number, status in reads.bad:
            statuses[number] = status
        return statuses

    async def _read(self, reads: Reads, runs: Sequence[Run], check: Check | None) -> None:
        if self._queue is not None:
            await self._queue.read(reads, runs, check)
        else:
            threads = threads_of(runs, read_threads(self._threads))
            shared = self._readers.submit_shared
            await shared(reads.work, threads=threads).outcome(reads.give_up)

    async def write(self, ops: Sequence[IoOp]) -> None:
        runs = runs_of(ops, self.size_bytes)
        if runs:
            writes = Writes(self._fd, runs, self._somebody_reads)
            most = write_threads(self._threads, reads=self._somebody_reads())
            threads = threads_of(runs, most)
            work = self._pool.submit_shared(writes.work, threads=threads).outcome(writes.give_up)
            await self._outcome(work, "write")

    async def commit(self, ops: Sequence[IoOp]) -> tuple[int, int]:
        """See `CommittingDevice.commit`. With the kernel by one thread, which needs the
        interpreter's lock only before and behind both: it is wanted by others, and a group that
        waits for it keeps the drive idle."""
        if native.KERNEL is None:
            began_ns = time.monotonic_ns()
            await self.write(ops)
            written_ns = time.monotonic_ns()
            await self.flush()
            return written_ns - began_ns, time.monotonic_ns() - written_ns
        try:
            commit = Commit(native.KERNEL, self._fd, runs_of(ops, self.size_bytes))
        except MemoryError:
            raise DeviceError(f"no memory to write to {self.name}") from None
        work = self._pool.submit(commit.work).outcome(commit.give_up)
        try:
            await self._outcome(work, "write")
        except FlushFailed as error:
            failed = _device_error("flush", self.name, error, FlushError)
            failed.flush_ns = commit.flush_ns
            raise failed from error
        return commit.write_ns, commit.flush_ns

    def _somebody_reads(self) -> bool:
        """Now or lately. From any thread."""
        return self._reading > 0 or time.monotonic() - self._read_at < READS_LATELY_S

    async def flush(self) -> None:
        try:
            await self._pool.run(os.fdatasync, self._fd)
        except OSError as error:
            raise _device_error("flush", self.name, error, FlushError) from error

    async def close(self) -> None:
        """Release the file and its lock. Idempotent."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        if self._queue is not None:
            self._queue.close()
        self._readers.close()
        self._pool.close()
        os.close(fd)

    async def _outcome(self, work: Awaitable[_T], what: str) -> _T:
        """What threads return. Raises: DeviceError for what the device refused."""
        try:
            return await work
        except FlushFailed:
            raise
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise ValueError(f"{what}: a buffer is not aligned to {BLOCK} bytes") from error
            if is_bug(error):
                raise
            raise _device_error(what, self.name, error) from error


def _device_error(
    what: str,
    name: str,
    error: OSError,
    kind: type[_E] = DeviceError,  # type: ignore[assignment]
) -> _E:
    text = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return kind(
            f"{what} of {name} failed: {text}",
            hint="free space on its file system, or configure a smaller data file",
            status=Status.NO_SPACE,
        )
    return kind(f"{what} of {name} failed: {text}")


def _open_blocking(
    path: str, size_bytes: int | None, create: bool, direct: bool
) -> tuple[int, int, bool]:
    """Open, lock and size the device. Returns (fd, size, direct). Runs in a thread."""
    created = False
    try:
        info = os.stat(path)
    except FileNotFoundError:
        if not create:
            raise DeviceError(
                f"{path} does not exist", hint="create it, or check the path"
            ) from None
        info, created = None, True
    except OSError as error:
        raise _open_error(path, error) from error
    if info is not None and not (stat.S_ISREG(info.st_mode) or stat.S_ISBLK(info.st_mode)):
        raise DeviceError(
            f"{path} is not a regular file or block device", hint="name one in [flash] path"
        )
    flags = os.O_RDWR | os.O_CLOEXEC
    if created:
        flags |= os.O_CREAT | os.O_EXCL
    elif info is not None and stat.S_ISBLK(info.st_mode):
        flags |= os.O_EXCL  # refuses a mounted device
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise _open_error(path, error) from error
    try:
        _lock(fd, path)
        size = _size(fd, path, size_bytes)
        is_direct = direct and _try_direct(fd, path)
        if created:
            _keep_name(fd, path)
    except BaseException:
        os.close(fd)
        if created:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise
    return fd, size, is_direct


def _keep_name(fd: int, path: str) -> None:
    """A new file is still there after the machine lost its power. Raises: DeviceError."""
    try:
        os.fsync(fd)
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _device_error("creation", path, error) from error


def _open_error(path: str, error: OSError) -> DeviceError:
    text = error.strerror or str(error)
    hints = {
        errno.EACCES: "let this user write the file and its directory",
        errno.EPERM: "let this user write the file and its directory",
        errno.EROFS: "its file system is read-only for this process: under systemd name its folder "
        "in ReadWritePaths= of the unit, else remount it",
        errno.EBUSY: "it is mounted or in use: unmount it first",
        errno.ENOTDIR: "check the path",
        errno.ENOENT: "create its directory first",
        errno.EISDIR: "name a file, not a directory",
    }
    return DeviceError(
        f"cannot open {path}: {text}", hint=hints.get(error.errno or 0, "check [flash] path")
    )


def _lock(fd: int, path: str) -> None:
    for left in reversed(range(LOCK_TRIES_MAX)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # `inspect` has it, too, for as long as it takes to see that
            if left:
                time.sleep(LOCK_PAUSE_S)
        else:
            return
    raise DeviceError(
        f"another daemon uses this data file: {path}", hint="stop it, or name another file"
    )


def _size(fd: int, path: str, size_bytes: int | None) -> int:
    """The usable size in bytes; an empty regular file is first extended to `size_bytes`."""
    info = os.fstat(fd)
    if stat.S_ISBLK(info.st_mode):
        raw = fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8))
        size = int(struct.unpack("=Q", raw)[0])
        return min(size, size_bytes or size) & -BLOCK
    if info.st_size:
        if size_bytes is not None and info.st_size != size_bytes & -BLOCK:
            log.warning(
                "event=size_kept path=%s size_bytes=%d configured_bytes=%d",
                path,
                info.st_size,
                size_bytes,
            )
        return info.st_size & -BLOCK
    if size_bytes is None or size_bytes < BLOCK:
        raise DeviceError(f"{path} is empty", hint="configure its size")
    size = size_bytes & -BLOCK
    room = os.fstatvfs(fd)
    if room.f_bavail * room.f_frsize < size:  # ask first: a failing fallocate fills the disk
        raise _no_space(path, size, "not enough free space")
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise _no_space(path, size, error.strerror or str(error)) from error
        raise _device_error("allocation", path, error) from error
    return size


def _no_space(path: str, size: int, text: str) -> DeviceError:
    return DeviceError(
        f"cannot reserve {size} bytes for {path}: {text}",
        hint="free space on its file system, or configure a smaller data file",
        status=Status.NO_SPACE,
    )


def _try_direct(fd: int, path: str) -> bool:
    """Switch the descriptor to O_DIRECT and prove it with one read; False where it is refused."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        probe = aligned_buffer(BLOCK)
        os.preadv(fd, [probe], 0)
    except OSError as error:
        if error.errno == errno.EIO:
            return True  # a bad first block is not a refusal; the reader will meet it again
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        log.warning(
            "event=direct_io_refused path=%s errno=%s effect=page_cache_used", path, error.errno
        )
        return False
    return True
