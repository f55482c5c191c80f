"""Peer memory mapped into this process, and copying out of it without holding up the loop.

Invariant: nothing a peer passes can crash or block the reader. Only memfds are looked at (another
file may make wait whoever asks it anything), and only those that are sealed against shrinking and
writing are mapped (so there is no SIGBUS: a file that takes writes lets its owner punch holes, and
where pages are huge ones a hole may find none), only for reading, and only after the size was
checked against what was announced. A region stays mapped while in use. With `whole`, memory that
its owner only announced is refused: whoever reads a page first is charged for it, and a peer that
has none could so use up the reader's.

Copies run with the GIL released; long ones run in a worker thread in steps short enough that a
deadline or a cancelled caller is noticed within about a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from entresol_proto import limits, native
from entresol_proto.fabric.closing import CLOSER
from entresol_proto.fabric.mapped import Charge
from entresol_proto.fabric.memory import F_SEAL_GROW, is_readers_only, seals_of
from entresol_proto.status import EntresolError, FabricError, Status
from entresol_proto.threads import Job, Pool

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

POOL_THREADS = 2  # so that one long copy does not hold up another, or a mapping
STEP_BYTES = 4 * limits.MIB  # copied between two looks at the stop flag
POPULATE_BYTES = 32 * limits.MIB  # at a time: a slab may have a GiB, and copies wait for a thread
_POPULATE_STEP_BYTES = 128 * limits.KIB  # of them in one call; see `populate`
# Finding pages takes a processor for seconds, and nobody is in a hurry. It goes behind the daemon's
# compute threads as well: they give way themselves, and hold the interpreter at times.
_PAGES_NICE = 19
_STAT_BLOCK_BYTES = 512  # stat(2)
_BEYOND_BYTES_MAX = 32 * limits.MIB  # allocated past a file's end: of a huge page, honestly
_MADV_POPULATE_READ = 22  # linux/mman.h, Linux 5.14: fault pages in now, errors instead of SIGBUS
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PeerRegion:
    """Memory of the peer, readable. `users` counts the copies that are running on it.

    Where the peer is gone, the end of the mapping frees the whole file: at most about `file_bytes`.
    """

    __slots__ = (
        "_map", "array", "charge", "file", "file_bytes", "length_bytes", "revoked", "rkey", "users",
    )  # fmt: skip

    def __init__(
        self,
        rkey: int,
        mapping: mmap.mmap,
        length_bytes: int,
        file_bytes: int,
        file: tuple[int, int] = (0, 0),
    ) -> None:
        self.rkey = rkey
        self.file = file  # device and inode
        self.charge: Charge | None = None  # ended with the mapping
        self.length_bytes = length_bytes
        self.file_bytes = file_bytes
        self.users = 0
        self.revoked = False
        self._map: mmap.mmap | None = mapping
        self.array: Bytes = np.frombuffer(mapping, np.uint8, length_bytes)

    def view(self, address: int, length_bytes: int) -> memoryview:
        """A read-only view that keeps the pages mapped as long as it lives."""
        assert self._map is not None
        return memoryview(self._map)[address : address + length_bytes]

    def populate(self, begin: int, end: int) -> None:
        """Make page tables now rather than by one fault per page in the first read.

        In a worker: memory that its owner never touched is found and zeroed first, 1 to 2 s for a
        GiB. Where the kernel refuses (before Linux 5.14) the first read faults the pages in.
        While a call runs, nobody of the process can map or unmap memory: who wants to, the event
        loop of a daemon among them, waits for its end. So each is short.
        """
        for at in range(begin, end, _POPULATE_STEP_BYTES):
            step = self.array[at : min(at + _POPULATE_STEP_BYTES, end)]
            if not len(step) or _libc.madvise(step.ctypes.data, len(step), _MADV_POPULATE_READ):
                return

    def unmap(self) -> None:
        """Release the mapping; views given out keep it until they are gone. Idempotent."""
        mapping, self._map = self._map, None
        self.array = np.empty(0, np.uint8)
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()
        if self.charge is not None:
            self.charge.end()


def unmap_all(regions: Sequence[PeerRegion]) -> None:
    """Unmap many; worth a worker thread, since it takes 50 ns and more per page."""
    for region in regions:
        region.unmap()


def map_region(rkey: int, fd: int, length_bytes: int, *, whole: bool = False) -> PeerRegion:
    """Check and map a descriptor that a peer sent, and close it. Runs in a worker thread.

    `whole`: every page of the file must be there already, and the descriptor open for writing.
    Raises: FabricError (BAD_REQUEST) for one that is too short, not sealed, not whole or not
    memory.
    """
    mapping: mmap.mmap | None = None
    try:
        if not is_readers_only(fd):
            text = "no shared memory, or it could be shrunk, or its pages taken back"
            raise FabricError(text, status=Status.BAD_REQUEST)
        found = os.fstat(fd)
        if found.st_size < length_bytes or length_bytes <= 0:
            raise FabricError("shared memory is shorter than announced", status=Status.BAD_REQUEST)
        if whole and not _is_whole(fd, found.st_size):
            text = "shared memory that its owner never had"
            raise FabricError(text, status=Status.BAD_REQUEST)
        # Of huge pages only whole ones are unmapped; and only there is this more than was asked.
        mapped_bytes = min(-(-length_bytes // found.st_blksize) * found.st_blksize, found.st_size)
        may_grow = not seals_of(fd) & F_SEAL_GROW
        file_bytes = max(found.st_size, found.st_blocks * _STAT_BLOCK_BYTES)
        mapping = _map_for_reading(fd, mapped_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise FabricError(f"cannot map shared memory: {error}", status=Status.BAD_REQUEST) from None
    finally:
        if mapping is None:
            CLOSER.give(fd)  # anything, or memory that ends with it
        else:
            os.close(fd)
    if may_grow:
        file_bytes = sys.maxsize
    return PeerRegion(rkey, mapping, length_bytes, file_bytes, (found.st_dev, found.st_ino))


def _is_whole(fd: int, file_bytes: int) -> bool:
    """Whether a sealed memfd has all its pages; if so, it keeps them. Raises: OSError.

    `st_blocks` counts pages beyond the end of the file as well, where a file may have some for each
    that it lacks. To set the length that it has drops those, and no more come where it is sealed
    against growing. Pages that the system swapped out count as there.
    """

    def allocated_bytes() -> int:
        return os.fstat(fd).st_blocks * _STAT_BLOCK_BYTES

    beyond_bytes = allocated_bytes() - file_bytes
    if not seals_of(fd) & F_SEAL_GROW or not 0 <= beyond_bytes <= _BEYOND_BYTES_MAX:
        return False
    os.ftruncate(fd, file_bytes)
    return allocated_bytes() >= file_bytes


def _map_for_reading(fd: int, length_bytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):  # does not keep a duplicate of the descriptor
        return mmap.mmap(fd, length_bytes, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
    return mmap.mmap(fd, length_bytes, mmap.MAP_SHARED, mmap.PROT_READ)


class Piece(NamedTuple):
    """One copy of a batch: `into` and `source` have the same length."""

    into: memoryview
    source: Bytes


class CopyJob:
    """Pieces copied in order by one thread: a second one was no faster on two cores."""

    __slots__ = ("_stop", "copied", "pieces")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.copied = 0  # pieces done
        self._stop = False

    def stop(self) -> None:
        """Make `run` return before its next step; what it is copying right now still lands."""
        self._stop = True

    def run(self, deadline_ns: int) -> None:
        """Copy until done, stopped or past the deadline; looks every STEP_BYTES."""
        at = 0
        while at < len(self.pieces):
            end, step_bytes = at, 0
            while end < len(self.pieces) and (end == at or step_bytes < STEP_BYTES):
                step_bytes += len(self.pieces[end].source)
                end += 1
            if step_bytes <= 2 * STEP_BYTES:
                if self._late(deadline_ns):
                    return
                native.copy(*zip(*self.pieces[at:end], strict=True))
            elif not self._copy_long(self.pieces[at:end], deadline_ns):
                return
            self.copied = at = end

    def _copy_long(self, pieces: Sequence[Piece], deadline_ns: int) -> bool:
        for into, source in pieces:
            for at in range(0, len(source), STEP_BYTES):
                if self._late(deadline_ns):
                    return False
                part = slice(at, at + STEP_BYTES)
                native.copy((into[part],), (source[part],))
        return True

    def _late(self, deadline_ns: int) -> bool:
        return self._stop or time.monotonic_ns() > deadline_ns


class SharedPool:
    """The worker threads of every shm endpoint of this process; they end with the last of them.

    Finding and freeing pages has a thread of its own: peers can ask for as much of that as they
    like, and nobody's copies wait behind it. Only what a host itself exposes, once, is filled by
    the threads for copies, in pieces.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[asyncio.AbstractEventLoop | None] = Counter()  # by loop
        self._pools: tuple[Pool, Pool] | None = None  # for copies, for pages

    def acquire(self) -> None:
        """An endpoint begins to use the pool. Raises: FabricError when there are no threads."""
        with self._lock:
            if self._pools is None:
                try:
                    self._pools = self._make()
                except EntresolError as error:
                    text = Exception.__str__(error)
                    raise FabricError(text, hint=error.hint, status=error.status) from None
            self._users[asyncio._get_running_loop()] += 1

    def _make(self) -> tuple[Pool, Pool]:
        copies = Pool(POOL_THREADS, "entresol-shm")
        try:
            return copies, Pool(1, "entresol-shm-pages", nice=_PAGES_NICE)
        except BaseException:
            copies.close(wait=False)
            raise

    def release(self) -> None:
        """It no longer does. What was submitted still runs."""
        with self._lock:
            loop = asyncio._get_running_loop()
            self._users[loop] -= 1
            assert self._users[loop] >= 0
            if self._users[loop] or self._pools is None:
                return
            del self._users[loop]
            for pool in self._pools:
                if self._users:
                    pool.leave()
                else:
                    pool.close(wait=False)
            if not self._users:
                self._pools = None

    def submit(self, function: Callable[..., T], *args: object) -> Job[T]:
        """Run in a worker thread; only between `acquire` and `release`."""
        return self._get(0).submit(function, *args)

    def submit_pages(self, function: Callable[..., T], *args: object) -> Job[T]:
        """The same for what finds or frees pages."""
        return self._get(1).submit(function, *args)

    def post_pages(self, function: Callable[..., object], *args: object) -> None:
        """The same, and nobody waits for it."""
        self._get(1).post(function, *args)

    def _get(self, number: int) -> Pool:
        with self._lock:
            assert self._users
            assert self._pools is not None
            return self._pools[number]


POOL = SharedPool()
os.register_at_fork(after_in_child=POOL.__init__)  # type: ignore[misc]  # its threads are not there


Users = Sequence[tuple[int, PeerRegion]]
"""Which span of a borrowing is in which region."""


class InPlace:
    """See `base.Borrowed`. Invariant: its regions stay mapped until it is given back."""

    def __init__(
        self,
        views: list[memoryview | Status],
        users: Users,
        end: Callable[[Users], dict[int, Status]],
    ) -> None:
        """`end` lets go of the regions and says what became of them meanwhile."""
        self.views = views
        self._users = users
        self._end = end
        self._ended = False

    def give_back(self) -> list[Status]:
        """See `base.Borrowed.give_back`."""
        assert not self._ended, "given back twice"
        self._ended = True
        for view in self.views:
            if isinstance(view, memoryview):
                view.release()
        ended = self._end(self._users)
        return [
            view if isinstance(view, Status) else ended.get(number, Status.OK)
            for number, view in enumerate(self.views)
        ]
