"""The device of production: a regular file or a raw block device, read and written by threads.

Neighbouring transfers become runs, runs become jobs, and each job is one hand-over to a thread.
Invariants: a write that returned was handed to the kernel in full; nothing touches a caller's
buffer after its call returned, cancelled or not; two daemons never share one data file; threads get
batches, never single small hand-overs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from entresol_daemon.flash.device import BLOCK, Check, IoOp, aligned_buffer
from entresol_proto.status import DeviceError, Status
from entresol_proto.threads import Pool, all_outcomes

log = logging.getLogger("entresol.flash")

RUN_BYTES_MAX = 4 << 20  # one preadv/pwritev moves at most this, so that threads share batches
READS_LATELY_S = 0.02  # so long after a read the next one is expected
WRITE_BATCH_BYTES = 4 << 20  # then it is looked again whether somebody reads
RUN_VIEWS_MAX = 512  # below IOV_MAX (1024)
IO_THREADS_MAX = 256
_JOB_BYTES_MIN = 512 << 10  # below this a second thread costs more than it brings
_JOB_RUNS_MIN = 8
_BLKGETSIZE64 = 0x80081272  # linux/fs.h

_T = TypeVar("_T")
_Bad = tuple[int, Status]  # an op and what became of it


@dataclass(slots=True)
class _Run:
    """Contiguous bytes on the device, scattered in memory."""

    offset_bytes: int
    length_bytes: int
    views: list[memoryview]
    owners: list[int]  # op number of each view


def _runs(ops: Sequence[IoOp], size_bytes: int) -> list[_Run]:
    """Merge neighbours into runs of at most RUN_BYTES_MAX; only longer ops are cut into pieces."""
    runs: list[_Run] = []
    for number in sorted(range(len(ops)), key=lambda i: ops[i].offset_bytes):
        offset, view = ops[number].offset_bytes, ops[number].view
        total = view.nbytes
        if offset % BLOCK or total % BLOCK or offset < 0 or offset + total > size_bytes:
            raise ValueError(f"I/O of {total} bytes at {offset} is unaligned or outside the device")
        at = 0
        while at < total:
            last = runs[-1] if runs else None
            if (
                last is None
                or last.offset_bytes + last.length_bytes != offset + at
                or last.length_bytes >= RUN_BYTES_MAX
                or (not at and last.length_bytes + min(total, RUN_BYTES_MAX) > RUN_BYTES_MAX)
                or len(last.views) >= RUN_VIEWS_MAX
            ):
                last = _Run(offset + at, 0, [], [])
                runs.append(last)
            size = min(total - at, RUN_BYTES_MAX - last.length_bytes)
            last.views.append(view[at : at + size])
            last.owners.append(number)
            last.length_bytes += size
            at += size
    return runs


def write_batches(runs: list[_Run]) -> list[list[_Run]]:
    """A group of writes in parts of about WRITE_BATCH_BYTES, so that it can give way to reads."""
    batches: list[list[_Run]] = []
    size = WRITE_BATCH_BYTES
    for run in runs:
        if size >= WRITE_BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(run)
        size += run.length_bytes
    return batches


def write_threads(threads: int, *, reads: bool) -> int:
    """How many of them one batch of writes may take. While there are reads, which somebody waits
    for: one, so that they find the others free, and most of the drive's time theirs."""
    return 1 if reads else max(1, threads // 2)


def _jobs(runs: list[_Run], threads: int) -> list[list[_Run]]:
    """Deal runs to at most `threads` lists of about equal bytes."""
    total = sum(run.length_bytes for run in runs)
    count = min(threads, len(runs), max(1, total // _JOB_BYTES_MIN, len(runs) // _JOB_RUNS_MIN))
    if count <= 1:
        return [runs]
    jobs: list[list[_Run]] = [[] for _ in range(count)]
    done = 0
    for run in runs:
        jobs[min(count - 1, done * count // max(1, total))].append(run)
        done += run.length_bytes
    return [job for job in jobs if job]


def _advance(views: list[memoryview], done: int) -> list[memoryview]:
    """The views that are left after `done` bytes of them were moved."""
    left = list(views)
    while left and done >= left[0].nbytes:
        done -= left.pop(0).nbytes
    if done and left:
        left[0] = left[0][done:]
    return left


def _is_bug(error: OSError) -> bool:
    """True for errors that only our own code can cause: they must be loud, not a media fault."""
    return error.errno in (errno.EINVAL, errno.EBADF, errno.EFAULT)


def _read_job(fd: int, runs: list[_Run], check: Check | None = None) -> list[_Bad]:
    """Read runs and look at their ops; those that are not OK, by number. Runs in a thread."""
    failed: list[_Bad] = []
    for run in runs:
        offset, views = run.offset_bytes, run.views
        end = offset + run.length_bytes
        try:
            while offset < end:
                done = os.preadv(fd, views, offset)
                if done == 0:
                    raise OSError(errno.EIO, "unexpected end of device")
                offset += done
                if offset < end:
                    views = _advance(views, done)
        except OSError as error:
            if _is_bug(error):
                raise
            if len(run.views) == 1:
                log.warning("event=read_failed offset=%d errno=%s", offset, error.errno)
                failed.append((run.owners[0], Status.IO_ERROR))
                continue
            at = run.offset_bytes  # isolate the bad op: one by one
            for view, owner in zip(run.views, run.owners, strict=True):
                failed += _read_job(fd, [_Run(at, view.nbytes, [view], [owner])], check)
                at += view.nbytes
            continue
        if check is not None:
            failed += [(owner, Status.CORRUPT) for owner in run.owners if not check(owner)]
    return failed


def _check_whole(check: Check, cut: set[int], number: int) -> bool:
    """What `check` says, but nothing yet of an op that was cut into pieces."""
    return number in cut or check(number)


def _refused(check: Check, numbers: Sequence[int]) -> list[int]:
    """Those that `check` says no to. Runs in a thread."""
    return [number for number in numbers if not check(number)]


def _write_job(fd: int, runs: list[_Run]) -> None:
    """Write runs in full, completing short writes. Runs in a thread. Raises: OSError."""
    for run in runs:
        offset, views = run.offset_bytes, run.views
        end = offset + run.length_bytes
        while offset < end:
            done = os.pwritev(fd, views, offset)
            if done == 0:
                raise OSError(errno.EIO, "device accepts no bytes")
            offset += done
            if offset < end:
                if offset % BLOCK:
                    raise OSError(errno.EIO, "short write inside a block")
                views = _advance(views, done)


class FileDevice:
    """A regular file or raw block device, driven by `preadv`/`pwritev` from its own threads."""

    def __init__(
        self,
        fd: int,
        size_bytes: int,
        name: str,
        direct: bool,
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
        pool = Pool(io_threads, "entresol-io")
        try:
            fd, size, is_direct = await pool.run(
                _open_blocking, str(path), size_bytes, create, direct
            )
        except BaseException:
            pool.close(wait=False)
            raise
        return cls(fd, size, str(path), is_direct, pool, io_threads)

    async def read(self, ops: Sequence[IoOp], check: Check | None = None) -> list[Status]:
        jobs = _jobs(_runs(ops, self.size_bytes), self._threads)
        statuses = [Status.OK] * len(ops)
        cut = {n for n, op in enumerate(ops) if op.view.nbytes > RUN_BYTES_MAX}
        early = None if check is None else functools.partial(_check_whole, check, cut)
        self._reading += 1
        try:
            for failed in await self._each(_read_job, jobs, "read", early):
                for number, status in failed:
                    statuses[number] = status
            if cut and check is not None:  # now that all pieces of those are there
                late = [n for n in cut if statuses[n] is Status.OK]
                for number in await self._pool.run(_refused, check, late):
                    statuses[number] = Status.CORRUPT
        finally:
            self._reading -= 1
            self._read_at = time.monotonic()
        return statuses

    async def write(self, ops: Sequence[IoOp]) -> None:
        for batch in write_batches(_runs(ops, self.size_bytes)):
            lately = self._reading > 0 or time.monotonic() - self._read_at < READS_LATELY_S
            threads = write_threads(self._threads, reads=lately)
            await self._each(_write_job, _jobs(batch, threads), "write")

    async def flush(self) -> None:
        try:
            await self._pool.run(os.fdatasync, self._fd)
        except OSError as error:
            raise _device_error("flush", self.name, error) from error

    async def close(self) -> None:
        """Release the file and its lock. Idempotent."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        self._pool.close()
        os.close(fd)

    async def _each(
        self, work: Callable[..., _T], jobs: list[list[_Run]], what: str, *more: object
    ) -> list[_T]:
        """`work(fd, job, *more)` of every job, each in a thread."""
        if not jobs[0]:
            return []
        handed = [self._pool.submit(work, self._fd, job, *more) for job in jobs]
        try:
            return await all_outcomes(handed)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise ValueError(f"{what}: a buffer is not aligned to {BLOCK} bytes") from error
            if _is_bug(error):
                raise
            raise _device_error(what, self.name, error) from error


def _device_error(what: str, name: str, error: OSError) -> DeviceError:
    text = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DeviceError(
            f"{what} of {name} failed: {text}",
            hint="free space on its file system, or configure a smaller data file",
            status=Status.NO_SPACE,
        )
    return DeviceError(f"{what} of {name} failed: {text}")


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
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DeviceError(
            f"another daemon uses this data file: {path}", hint="stop it, or name another file"
        ) from None


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
