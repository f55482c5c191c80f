"""Small secret files, replaced in one step and destroyed in place.

Invariant: at every instant, and after a crash at any system call, a reader finds either the whole
old content or the whole new one under a name. What is destroyed is overwritten before its blocks go
back to the file system.

How much the overwriting is worth: ext4 and xfs write over the same blocks; copy-on-write file
systems and the flash translation layer of an SSD may keep an old copy. What such a copy holds is
wrapped under the KEK; changing the KEK (`Keyring.rewrap`) and destroying the old one closes that.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE_BYTES_MAX = 64 * 1024 * 1024
_READ_BYTES = 1024 * 1024


class OsCalls:
    """The system calls used here: the seam at which tests make the k-th one fail."""

    def open(self, path: Path, flags: int) -> int:
        """open(2), mode 0600, close-on-exec."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def read(self, fd: int, length_bytes: int) -> bytes:
        """read(2)."""
        return os.read(fd, length_bytes)

    def write(self, fd: int, raw: bytes | memoryview) -> int:
        """write(2): may write less than asked."""
        return os.write(fd, raw)

    def seek(self, fd: int, offset_bytes: int) -> None:
        """lseek(2) from the start."""
        os.lseek(fd, offset_bytes, os.SEEK_SET)

    def size(self, fd: int) -> int:
        """st_size of fstat(2)."""
        return os.fstat(fd).st_size

    def fsync(self, fd: int) -> None:
        """fsync(2)."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """close(2)."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """rename(2)."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """unlink(2)."""
        os.unlink(path)


def temporary_of(path: Path) -> Path:
    """Where `replace` prepares the next content of `path`."""
    return path.with_name(path.name + ".tmp")


def read(calls: OsCalls, path: Path) -> bytes | None:
    """The whole file, or None when there is none. Raises: OSError, also when it is too long."""
    try:
        fd = calls.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        parts: list[bytes] = []
        total = 0
        while part := calls.read(fd, _READ_BYTES):
            parts.append(part)
            total += len(part)
            if total > FILE_BYTES_MAX:
                raise OSError(f"{path} is over {FILE_BYTES_MAX} bytes")
        return b"".join(parts)
    finally:
        calls.close(fd)


def replace(calls: OsCalls, path: Path, raw: bytes) -> None:
    """Make `raw` the durable content of `path`: temporary, fsync, rename, fsync of the folder.

    Raises: OSError; then `path` holds the old content, or (after the rename) the new one.
    """
    temporary = temporary_of(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    fd = calls.open(temporary, flags)
    try:
        _write_all(calls, fd, raw)
        calls.fsync(fd)
    finally:
        calls.close(fd)
    calls.rename(temporary, path)
    sync_folder(calls, path.parent)


def sync_folder(calls: OsCalls, folder: Path) -> None:
    """Make renames and unlinks in `folder` durable. Raises: OSError."""
    fd = calls.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        calls.fsync(fd)
    finally:
        calls.close(fd)


def destroy(calls: OsCalls, path: Path) -> None:
    """Overwrite, unlink and forget `path`; nothing happens when it does not exist.

    Raises: OSError.
    """
    doomed = Doomed(calls, path)
    try:
        doomed.overwrite()
        with contextlib.suppress(FileNotFoundError):
            calls.unlink(path)
    finally:
        doomed.close()
    sync_folder(calls, path.parent)


class Doomed:
    """Keeps hold of a file's present content, so that it can be overwritten after the name has
    gone to its successor. Close it in any case."""

    def __init__(self, calls: OsCalls, path: Path) -> None:
        """Raises: OSError; a file that does not exist is no error."""
        self._calls = calls
        self._fd = -1
        with contextlib.suppress(FileNotFoundError):
            self._fd = calls.open(path, os.O_WRONLY | os.O_NOFOLLOW)

    def overwrite(self) -> None:
        """Zeros over everything, flushed. Raises: OSError."""
        if self._fd < 0:
            return
        size = self._calls.size(self._fd)
        self._calls.seek(self._fd, 0)
        _write_all(self._calls, self._fd, bytes(size))
        self._calls.fsync(self._fd)

    def close(self) -> None:
        """Let go. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._calls.close(fd)


def _write_all(calls: OsCalls, fd: int, raw: bytes) -> None:
    view = memoryview(raw)
    while view:
        view = view[calls.write(fd, view) :]
