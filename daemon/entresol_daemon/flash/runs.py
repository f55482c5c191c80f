"""What threads do for a device of production: runs of transfers, read and written whole.

Threads take one run after the other, and the loop hears once, of all: what is in service beyond
what threads are at waits where a thread finds it, so that the drive does not idle while the loop
hears of what was done and begins the next.

Invariants: threads get batches, never single small hand-overs; an op is looked at once, when all of
it is there.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entresol_daemon.flash.device import BLOCK, Check, IoOp
from entresol_proto.native import Kernel, Writing, Written
from entresol_proto.status import Status

log = logging.getLogger("entresol.flash")

RUN_BYTES_MAX = 4 << 20  # one preadv/pwritev moves at most this, so that threads share batches
READ_MERGED_BYTES_MAX = 1 << 20  # ops read together, so that several threads read a portion
RUN_VIEWS_MAX = 512  # below IOV_MAX (1024)
_THREAD_BYTES_MIN = 512 << 10  # below this a second thread costs more than it brings
_THREAD_RUNS_MIN = 8

Bad = tuple[int, Status]  # an op and what became of it


@dataclass(slots=True)
class Run:
    """Contiguous bytes on the device, scattered in memory."""

    offset_bytes: int
    length_bytes: int
    views: list[memoryview]
    owners: list[int]  # op number of each view
    has_pieces: bool = False  # of an op that was cut


def runs_of(
    ops: Sequence[IoOp], size_bytes: int, merged_bytes_max: int = RUN_BYTES_MAX
) -> list[Run]:
    """Merge neighbours into runs of at most `merged_bytes_max`; only ops of more than RUN_BYTES_MAX
    are cut into pieces, of that length."""
    runs: list[Run] = []
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
                or (not at and last.length_bytes + min(total, RUN_BYTES_MAX) > merged_bytes_max)
                or len(last.views) >= RUN_VIEWS_MAX
            ):
                last = Run(offset + at, 0, [], [])
                runs.append(last)
            size = min(total - at, RUN_BYTES_MAX - last.length_bytes)
            last.views.append(view[at : at + size])
            last.owners.append(number)
            last.length_bytes += size
            last.has_pieces |= size < total
            at += size
    return runs


def write_threads(threads: int, *, reads: bool) -> int:
    """How many of them one group of writes may take: few, as each has a long run at the drive, for
    which the next read waits. While there are reads, which somebody waits for: one, so that most of
    the drive's time is theirs."""
    return 1 if reads else max(1, threads // 4)


def read_threads(threads: int) -> int:
    """How many of them read."""
    return -(-threads // 2)


def read_runs(ops: Sequence[IoOp], size_bytes: int) -> list[Run]:
    """What one call of `preadv` each brings."""
    return runs_of(ops, size_bytes, READ_MERGED_BYTES_MAX)


def threads_of(runs: Sequence[Run], threads: int) -> int:
    """How many of these threads are worth while for some runs."""
    total = sum(run.length_bytes for run in runs)
    worth = max(1, total // _THREAD_BYTES_MIN, len(runs) // _THREAD_RUNS_MIN)
    return min(threads, len(runs), worth)


def _advance(views: list[memoryview], done: int) -> list[memoryview]:
    """The views that are left after `done` bytes of them were moved."""
    left = list(views)
    while left and done >= left[0].nbytes:
        done -= left.pop(0).nbytes
    if done and left:
        left[0] = left[0][done:]
    return left


def is_bug(error: OSError) -> bool:
    """True for errors that only our own code can cause: they must be loud, not a media fault."""
    return error.errno in (errno.EINVAL, errno.EBADF, errno.EFAULT)


def read_job(fd: int, run: Run, got: int, check: Check | None = None) -> list[Bad]:
    """Read a run and look at its ops; those that are not OK, by number. So many of its bytes are
    there already; below 0 it was tried, and this is the errno, negated. Runs in a thread."""
    offset, end = run.offset_bytes + max(0, got), run.offset_bytes + run.length_bytes
    views = _advance(run.views, got) if got > 0 else run.views
    try:
        if got < 0:
            raise OSError(-got, os.strerror(-got))
        while offset < end:
            done = os.preadv(fd, views, offset)
            if done == 0:
                raise OSError(errno.EIO, "unexpected end of device")
            offset += done
            if offset < end:
                views = _advance(views, done)
    except OSError as error:
        if is_bug(error):
            raise
        if len(run.views) == 1:
            log.warning("event=read_failed offset=%d errno=%s", offset, error.errno)
            return [(run.owners[0], Status.IO_ERROR)]
        failed: list[Bad] = []
        at = run.offset_bytes  # isolate the bad op: one by one
        for view, owner in zip(run.views, run.owners, strict=True):
            failed += read_job(fd, Run(at, view.nbytes, [view], [owner]), 0, check)
            at += view.nbytes
        return failed
    if check is None:
        return []
    return [(owner, Status.CORRUPT) for owner in run.owners if not check(owner)]


class Reads:
    """The runs of one call, which several threads read, and what became of them."""

    def __init__(
        self, fd: int, runs: Sequence[Run], ops: Sequence[IoOp], check: Check | None
    ) -> None:
        self.bad: list[Bad] = []
        self._fd = fd
        self._left = deque(runs)
        self._check = check
        # Of ops that were cut: pieces that are not there yet.
        sizes = ((n, op.view.nbytes) for n, op in enumerate(ops))
        self._pieces = {n: -(-size // RUN_BYTES_MAX) for n, size in sizes if size > RUN_BYTES_MAX}
        self._lock = threading.Lock()

    def give_up(self) -> None:
        """What no thread has begun is not read."""
        self._left.clear()

    def work(self) -> bool:
        """In a thread: one run after the other, until all are read or being read."""
        while True:
            try:
                run = self._left.popleft()
            except IndexError:
                return False
            self.came(run, 0)

    def came(self, run: Run, got: int) -> None:
        """In a thread: this is what was read of a run, in bytes or as an errno, negated. What is
        missing is read, then looked at."""
        check = None if self._check is None else self._look
        self.bad.extend(read_job(self._fd, run, got, check))

    def _look(self, number: int) -> bool:
        """What `check` says, but nothing yet of an op of which pieces are missing."""
        assert self._check is not None
        if number in self._pieces:
            with self._lock:
                self._pieces[number] -= 1
                if self._pieces[number]:
                    return True
        return self._check(number)


def write_job(fd: int, runs: list[Run]) -> None:
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


class Writes:
    """The runs of one call, which threads write: several while nobody reads, else one."""

    def __init__(self, fd: int, runs: Sequence[Run], somebody_reads: Callable[[], bool]) -> None:
        """`somebody_reads` is asked before each run, in a thread."""
        self._fd = fd
        self._left = deque(runs)
        self._somebody_reads = somebody_reads
        self._threads = 0  # that are in `work`
        self._lock = threading.Lock()

    def give_up(self) -> None:
        """What no thread has begun is not written."""
        with self._lock:  # not between another's look and its taking
            self._left.clear()

    def work(self) -> bool:
        """In a thread: one run after the other, until all are written or being written, or until
        somebody reads and another thread goes on. Raises: OSError."""
        with self._lock:
            self._threads += 1
        try:
            while (run := self._next()) is not None:
                write_job(self._fd, [run])
        except BaseException:
            self.give_up()
            raise
        return False

    def _next(self) -> Run | None:
        with self._lock:
            if not self._left or (self._threads > 1 and self._somebody_reads()):
                self._threads -= 1
                return None
            return self._left.popleft()


class FlushFailed(OSError):
    """All was written, and then the flush failed."""


class Commit:
    """The runs of one call, which one thread writes and makes durable without the interpreter's
    lock: `Writes` and a flush are the twin."""

    def __init__(self, kernel: Kernel, fd: int, runs: Sequence[Run]) -> None:
        """Raises: MemoryError."""
        self._kernel = kernel
        self._fd = fd
        self._writing = Writing()
        self._written = Written()
        for run in runs:
            self._writing.add(run.offset_bytes, run.views)

    @property
    def write_ns(self) -> int:
        """What writing took, once it has ended."""
        return int(self._written.write_ns)

    @property
    def flush_ns(self) -> int:
        """And the flush behind it."""
        return int(self._written.flush_ns)

    def give_up(self) -> None:
        """No further run is begun."""
        self._written.stop = 1

    def work(self) -> None:
        """In a thread. Raises: OSError; FlushFailed where all was written."""
        written = self._written
        try:
            self._kernel.write(self._fd, self._writing, written, block_bytes=BLOCK, flush=True)
        except MemoryError:
            written.failed = errno.ENOMEM
        if written.failed:
            kind = FlushFailed if written.flushing else OSError
            raise kind(written.failed, os.strerror(written.failed))
