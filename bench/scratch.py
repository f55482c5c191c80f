"""Folders of the bench, on the flash it measures and in memory.

Invariant: what a bench that was killed left behind goes with the next one: the name says which
process it belongs to, and that of a process that is gone belongs to nobody.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.region import Region, memory_folder
from entresol_proto.fabric.memory import huge_pages_are_made

PREFIX = "ent-bench-"
_NAME = re.compile(rf"{PREFIX}(\d+)-")


@contextlib.contextmanager
def folder(where: Path | None = None) -> Iterator[Path]:
    """A folder of this process, empty, removed with the block; first, those of the dead."""
    parent = where or Path(tempfile.gettempdir())
    sweep(parent)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=parent) as name:
        yield Path(name)


def sweep(parent: Path) -> list[Path]:
    """Remove what processes that are gone left there; what was removed."""
    left = []
    for path in parent.glob(f"{PREFIX}*"):
        named = _NAME.match(path.name)
        if named and not Path(f"/proc/{named[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)
            left.append(path)
    return left


@contextlib.contextmanager
def region(
    on_disk: Path, block_bytes: int, count: int, content: bytes | None = None
) -> Iterator[Region]:
    """Shared memory for so many blocks; `on_disk` where files cannot be memory."""
    if huge_pages_are_made():  # not of files of a file system, but of what has no name
        fd = os.memfd_create("bench-region")
        try:
            path = Path(f"/proc/{os.getpid()}/fd/{fd}")
            with Region(path, block_bytes, count, fill=True, content=content) as one:
                yield one
        finally:
            os.close(fd)
        return
    with (
        folder(memory_folder(on_disk)) as memory,
        Region(memory / "region", block_bytes, count, create=True, content=content) as one,
    ):
        yield one
