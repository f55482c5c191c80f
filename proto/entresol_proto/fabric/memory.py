"""Memory that two processes can share: memfds, sealed so that a peer can only read them.

Invariant: once `seal_for_readers` returned true, nobody who receives the descriptor can write,
shrink or grow the memory; only mappings made before (ours) stay writable. A reader therefore never
meets SIGBUS, and an owner's bytes never change under it by a peer's hand.

Used by the daemon's slabs and by the host's put staging. Nothing here is named in the file system
or known to Python's resource tracker: the memory ends with its last descriptor and mapping.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import warnings
from pathlib import Path
from types import TracebackType

from entresol_proto import limits
from entresol_proto.status import FabricError, Status

# linux/fcntl.h; Python 3.11 does not name the last one (Linux 5.1).
F_SEAL_SEAL = 0x0001
F_SEAL_SHRINK = 0x0002
F_SEAL_GROW = 0x0004
F_SEAL_WRITE = 0x0008
F_SEAL_FUTURE_WRITE = 0x0010
HUGE_PAGE_BYTES = 2 * limits.MIB
SHARED_MADE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MADE_WHERE_ASKED = {"always", "within_size", "advise", "force"}


def huge_pages_are_made(setting: Path = SHARED_MADE) -> bool:
    """Whether the kernel makes huge pages of shared memory where that is asked for, none reserved
    (Linux, Documentation/admin-guide/mm/transhuge.rst)."""
    try:
        words = setting.read_text().split()
    except OSError:
        return False
    return any(word[1:-1] in _MADE_WHERE_ASKED for word in words if word.startswith("["))


def seals_of(fd: int) -> int:
    """The file seals of `fd`; 0 for a file that knows none (so it counts as unsealed)."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def is_readers_only(fd: int) -> bool:
    """True when a receiver of `fd` can neither write nor shrink it, and nobody can punch holes."""
    seals = seals_of(fd)
    return bool(seals & F_SEAL_SHRINK) and bool(seals & (F_SEAL_FUTURE_WRITE | F_SEAL_WRITE))


class MemfdBuffer:
    """Zeroed memory of `length_bytes` behind a file descriptor (a `SharedBuffer`).

    `huge_pages` asks for 2 MiB pages: for reserved ones, which never fail later, and where the
    system has none to spare, for those that it makes as pages are touched, if it does so for shared
    memory (`shmem_enabled`: Linux, Documentation/admin-guide/mm/transhuge.rst), else for ordinary
    ones. `huge` tells whether they are reserved ones. `fd` and `view` are owned by the buffer.

    Closing: views cut from `view` by others may outlive `close`. It never raises for them: the
    descriptor and `view` end at once, and the pages are given back when the last such view is
    released. Whoever needs the memory back at once releases its views first.

    Raises: FabricError when the memory cannot be had (status BUSY) or the length is not positive.
    """

    def __init__(
        self, length_bytes: int, *, name: str = "entresol", huge_pages: bool = False
    ) -> None:
        if length_bytes <= 0:
            raise FabricError(f"buffer of {length_bytes} bytes", status=Status.BAD_REQUEST)
        self.length_bytes = length_bytes
        self.huge = False
        self._fd = -1
        made = _map(name, length_bytes, huge=True) if huge_pages else None
        if made is not None:
            self.huge = True
        else:
            made = _map(name, length_bytes, huge=False)
            if made is not None and huge_pages:
                with contextlib.suppress(OSError):  # a kernel without them
                    made[1].madvise(mmap.MADV_HUGEPAGE)
        if made is None:
            raise FabricError(
                f"cannot get {length_bytes} bytes of shared memory",
                hint="lower the memory budget or raise the process's limits",
                status=Status.BUSY,
            )
        self._fd, self._map = made
        self._view = memoryview(self._map)[:length_bytes]

    @property
    def fd(self) -> int:
        """The memfd, or -1 once closed. Borrowed: do not close it."""
        return self._fd

    @property
    def view(self) -> memoryview:
        """All `length_bytes`, writable. Raises: ValueError on use after `close`."""
        return self._view

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def seal_for_readers(self) -> bool:
        """Make the descriptor safe to give away; our own mapping stays writable. Idempotent.

        False on Linux before 5.1 (no F_SEAL_FUTURE_WRITE): then only the size is sealed, a receiver
        could write, and the shm fabric refuses the buffer.
        """
        assert self._fd >= 0, "sealing a closed buffer"
        if is_readers_only(self._fd):
            return True
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Release the descriptor and our view; views held by others: see the class. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            # Somebody holds a view: the last of them unmaps the pages.
            self._view = memoryview(b"")
            del self._map

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def __enter__(self) -> MemfdBuffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _map(name: str, length_bytes: int, *, huge: bool) -> tuple[int, mmap.mmap] | None:
    """A memfd and its shared writable mapping, or None when there is no memory of that kind."""
    page = HUGE_PAGE_BYTES if huge else mmap.PAGESIZE
    size = -(-length_bytes // page) * page
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    fd = -1
    try:
        fd = os.memfd_create(name, flags)
        os.ftruncate(fd, size)
        return fd, mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError):
        if fd >= 0:
            os.close(fd)
        return None
