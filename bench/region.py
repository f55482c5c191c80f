"""The memory that every variant of a bench reads into and writes from: one file of shared pages.

Invariant: whoever moves the bytes, ours or a peer's process, moves them between the same pages.
How fast a virtual disk or a loopback copies depends on the pages it copies to, by a factor of two
and more, so that buffers of everybody's own would compare buffers. Where the kernel makes huge
pages of shared memory, which are alike, these are such. And the judge of what arrived is the
bench, not the one that fetched it. What is got into comes first in the file: fio takes its buffers
from there, and writes into them whatever it does.

Only the standard library: it is imported by the interpreters of peers, too.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from types import TracebackType


def memory_folder(fallback: Path) -> Path:
    """Where files are memory; `fallback` where there is no such place."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else fallback


class Region:
    """`count` blocks to put, and as many to get into, in one shared mapping of a file."""

    def __init__(
        self,
        path: Path,
        block_bytes: int,
        count: int,
        *,
        create: bool = False,
        fill: bool = False,
        content: bytes | None = None,
    ) -> None:
        """`create`: make the file; it is not removed. `fill`: one that is there. Either way it has
        `content` in its second half, as long as that, or random blocks."""
        self.path = path
        self.block_bytes = block_bytes
        self.count = count
        self.plain_bytes = block_bytes * count
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create or fill:
                os.ftruncate(fd, 2 * self.plain_bytes)
            self._map = mmap.mmap(fd, 2 * self.plain_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them
                    self._map.madvise(mmap.MADV_HUGEPAGE)
        finally:
            os.close(fd)
        whole = memoryview(self._map)
        self.into, self.source = whole[: self.plain_bytes], whole[self.plain_bytes :]
        if create or fill:
            for number, block in enumerate(self.blocks(self.source)):
                at = number * block_bytes
                block[:] = content[at : at + block_bytes] if content else os.urandom(block_bytes)
            self.wipe()

    def blocks(self, view: memoryview) -> list[memoryview]:
        """`source` or `into`, block by block."""
        step = self.block_bytes
        return [view[at : at + step] for at in range(0, self.plain_bytes, step)]

    def wipe(self) -> None:
        """Zeros into what is got into: every page touched, and what was there cannot pass."""
        zeros = bytes(self.block_bytes)
        for block in self.blocks(self.into):
            block[:] = zeros

    def check(self) -> None:
        """Compare all bytes and wipe them. Raises: AssertionError unless every one arrived."""
        pairs = zip(self.blocks(self.source), self.blocks(self.into), strict=True)
        for number, (wanted, got) in enumerate(pairs):
            assert bytes(wanted) == bytes(got), f"wrong bytes in block {number}"
        self.wipe()

    def close(self) -> None:
        """Give the mapping up; views of others keep it alive."""
        for view in (self.source, self.into):
            view.release()
        try:
            self._map.close()
        except BufferError:
            return  # somebody still has a view; it goes with them

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
