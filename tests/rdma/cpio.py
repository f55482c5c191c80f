"""The kernel's initial file system format, from Python: no root, no tool, the same bytes each time.

Source of the format: Documentation/driver-api/early-userspace/buffer-format.rst of Linux ("newc").
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

_TRAILER = "TRAILER!!!"


def _entry(inode: int, name: str, mode: int, data: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def archive(entries: Mapping[str, tuple[int, bytes]]) -> bytes:
    """An archive of name -> (mode with type, content); owners are root, times zero.

    Folders are not implied: name them before what is in them. The result is padded so that another
    archive, compressed or not, may follow it.
    """
    parts = [
        _entry(number, name, mode, data)
        for number, (name, (mode, data)) in enumerate(entries.items(), start=1)
    ]
    data = b"".join(parts) + _entry(0, _TRAILER, 0, b"")
    return data + b"\0" * (-len(data) % 512)


def entries_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything under a folder, parents first."""
    entries: dict[str, tuple[int, bytes]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            entries[name] = (stat.S_IFLNK | 0o777, str(path.readlink()).encode())
        elif stat.S_ISDIR(mode):
            entries[name] = (stat.S_IFDIR | 0o755, b"")
        else:
            entries[name] = (stat.S_IFREG | stat.S_IMODE(mode), path.read_bytes())
    return entries


def files(contents: Mapping[str, bytes]) -> dict[str, tuple[int, bytes]]:
    """Entries of executable files by name, with the folders they need."""
    entries: dict[str, tuple[int, bytes]] = {}
    for name, data in contents.items():
        for parent in reversed(Path(name).parents[:-1]):
            entries.setdefault(parent.as_posix(), (stat.S_IFDIR | 0o755, b""))
        entries[name] = (stat.S_IFREG | 0o755, data)
    return entries
