"""Small secret files, replaced in one step and destroyed in place.

Invariant: at every instant, and after a crash at any system call, a reader finds under a name the
whole old content or the whole new one, or (`replace_secret`, between its two renames) the old one
under `old_of` the name. What `replace_secret` and `destroy` let go is overwritten before its blocks
go back to the file system; until then it has a name by which the next start finds it.

How much the overwriting is worth: ext4 and xfs write over the same blocks; copy-on-write file
systems and the flash translation layer of an SSD may keep an old copy. What such a copy holds is
wrapped under the KEK; changing the KEK (`Keyring.rewrap`) and destroying the old one closes that.
"""

from __future__ import annotations

import contextlib
import errno
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


def old_of(path: Path) -> Path:
    """Where `replace_secret` puts the former content of `path` until it is overwritten."""
    return path.with_name(path.name + ".old")


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
    temporary = _prepare(calls, path, raw)
    calls.rename(temporary, path)
    sync_folder(calls, path.parent)


def replace_secret(calls: OsCalls, path: Path, raw: bytes) -> None:
    """As `replace`, and what `path` held before is overwritten, whenever the process dies.

    A rename over `path` would leave the old bytes without a name until they are overwritten, and
    for ever after a crash. So they first get a name of their own; `destroy(old_of(path))` at the
    next start is the rest of an interrupted call.

    Raises: OSError; then `path` holds the old content, or (after the second rename) the new one, or
        nothing if putting the old one back failed as well: it is under `old_of(path)` then.
    """
    old = old_of(path)
    temporary = _prepare(calls, path, raw)
    if _exists(calls, path):  # else it is the first, or what it held is still under `old`
        destroy(calls, old)  # of a call that failed halfway; a rename over it would lose its name
        calls.rename(path, old)
    try:
        calls.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            calls.rename(old, path)
        raise
    sync_folder(calls, path.parent)
    destroy(calls, old)


def _exists(calls: OsCalls, path: Path) -> bool:
    try:
        calls.close(calls.open(path, os.O_RDONLY | os.O_NOFOLLOW))
    except FileNotFoundError:
        return False
    return True


def _prepare(calls: OsCalls, path: Path, raw: bytes) -> Path:
    """The next content of `path`, durable under a temporary name, which is returned. What no `read`
    would take is not written."""
    if len(raw) > FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"{len(raw)} bytes, and {FILE_BYTES_MAX} are read", str(path))
    temporary = temporary_of(path)
    fd = calls.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
    try:
        _write_all(calls, fd, raw)
        calls.fsync(fd)
    finally:
        calls.close(fd)
    return temporary


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
    try:
        fd = calls.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        _write_all(calls, fd, bytes(calls.size(fd)))
        calls.fsync(fd)
        with contextlib.suppress(FileNotFoundError):
            calls.unlink(path)
    finally:
        calls.close(fd)
    sync_folder(calls, path.parent)


def _write_all(calls: OsCalls, fd: int, raw: bytes) -> None:
    view = memoryview(raw)
    while view:
        view = view[calls.write(fd, view) :]
