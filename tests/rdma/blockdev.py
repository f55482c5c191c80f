"""Block devices that misbehave, for suites inside a guest: brd, null_blk and the device mapper.

A host's kernel may have none of these. Owns one invariant: what a suite made in the kernel is gone
when its context manager ends, whatever happened to it. The device mapper is spoken to by its ioctls
(linux/dm-ioctl.h), as starting dmsetup takes an emulated machine longer than what it would do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SECTOR = 512
COMMAND_TIMEOUT_S = 60
GONE_TIMEOUT_S = 20.0
RAM_DISKS = 3
RAM_KIB = 32 << 10  # each; memory is taken as it is written
_CONTROL = "/dev/mapper/control"
_HEAD = struct.Struct("=6Ii3IQ128s129s7s")
_SPEC = struct.Struct("=QQiI16s")
_VERSION = (4, 0, 0)
_SUSPEND, _NO_LOCKFS, _NO_FLUSH = 1 << 1, 1 << 10, 1 << 11
_CREATE, _REMOVE, _SUSPEND_NR, _LOAD, _MESSAGE, _VERSIONS = 3, 4, 6, 9, 14, 13
_ANSWER_BYTES = 16 << 10
_NULLB = Path("/sys/kernel/config/nullb")


class NotOfferedError(Exception):
    """This kernel does not have what was asked for."""


def modprobe(*words: str) -> bool:
    """Load a module with its options; False when this kernel has none of that name."""
    done = subprocess.run(
        ["/sbin/modprobe", *words], capture_output=True, check=False, timeout=COMMAND_TIMEOUT_S
    )
    return done.returncode == 0


def ram_disks() -> list[str]:
    """Paths of RAM_DISKS empty disks, made once: `modprobe brd` a second time changes nothing."""
    if not modprobe("brd", f"rd_nr={RAM_DISKS}", f"rd_size={RAM_KIB}", "max_part=0"):
        raise NotOfferedError("this kernel has no brd")
    return [f"/dev/ram{number}" for number in range(RAM_DISKS)]


def wipe(path: str, length_bytes: int) -> None:
    """Zero the beginning of a device."""
    rewrite(path, bytes(length_bytes))


# The device mapper --------------------------------------------------------------------------------


def _ioctl(nr: int, name: str, *, flags: int = 0, targets: int = 0, data: bytes = b"") -> bytes:
    """One request about the device `name`; what the kernel wrote behind the header."""
    size = max(_ANSWER_BYTES, _HEAD.size + len(data))
    head = _HEAD.pack(
        *_VERSION, size, _HEAD.size, targets, 0, flags, 0, 0, 0, name.encode(), b"", b""
    )
    raw = bytearray((head + data).ljust(size, b"\0"))
    with open(_CONTROL, "rb", buffering=0) as control:
        fcntl.ioctl(control, (3 << 30) | (_HEAD.size << 16) | (0xFD << 8) | nr, raw)
    return bytes(raw)


def targets() -> set[str]:
    """The targets this kernel offers, those of modules that can be loaded included."""
    modprobe("dm-mod")
    for module in ("dm-flakey", "dm-log-writes", "dm-dust"):
        modprobe(module)
    raw = _ioctl(_VERSIONS, "")
    at, found = _HEAD.size, set()
    while True:
        (following,) = struct.unpack_from("=I", raw, at)
        found.add(raw[at + 16 :].split(b"\0", 1)[0].decode())
        if not following:
            return found
        at += following


@dataclass(frozen=True, slots=True)
class Mapped:
    """A device of the device mapper with one target over all of it."""

    name: str
    path: str
    length_bytes: int

    def switch(self, target: str, parameters: str) -> None:
        """From now on the device is that: what is in flight ends under the old table."""
        line = parameters.encode() + b"\0"
        spec = _SPEC.pack(0, self.length_bytes // SECTOR, 0, 0, target.encode())
        _ioctl(_LOAD, self.name, targets=1, data=spec + line.ljust(-(-len(line) // 8) * 8, b"\0"))
        _ioctl(_SUSPEND_NR, self.name, flags=_NO_LOCKFS | _NO_FLUSH)  # resume, with the new table

    def message(self, *words: str) -> None:
        """Tell the target something."""
        data = struct.pack("=Q", 0) + " ".join(words).encode() + b"\0"
        _ioctl(_MESSAGE, self.name, data=data)


@contextlib.contextmanager
def mapped(name: str, length_bytes: int, target: str, parameters: str) -> Iterator[Mapped]:
    """A device of so many bytes. Raises: OSError when the kernel refuses the table."""
    raw = _ioctl(_CREATE, name)
    number = struct.unpack_from("=Q", raw, 40)[0]
    minor = (number & 0xFF) | ((number >> 12) & 0xFFF00)
    made = Mapped(name, f"/dev/dm-{minor}", length_bytes)
    try:
        made.switch(target, parameters)
        yield made
    finally:
        _until_gone(name)


def _until_gone(name: str) -> None:
    """Somebody of the kernel's may still look at the device for a moment."""
    until = time.monotonic() + GONE_TIMEOUT_S
    while True:
        try:
            _ioctl(_REMOVE, name)
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def rewrite(path: str, content: bytes | bytearray) -> None:
    """Put this at the beginning of a device, past the page cache's knowledge of it."""
    with open(path, "r+b", buffering=0) as disk:
        left = memoryview(content)
        while left:
            left = left[disk.write(left) :]
        os.fsync(disk.fileno())
        os.posix_fadvise(disk.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# dm-log-writes ------------------------------------------------------------------------------------

LOG_MAGIC = 0x6A736677736872
_FLUSH, _DISCARD, _MARK = 1, 4, 8
_SUPER = struct.Struct("<QQQI")
_ENTRY = struct.Struct("<QQQQ")


@dataclass(frozen=True, slots=True)
class Logged:
    """One entry of the log: a write (perhaps empty), with a flush before it, or a mark."""

    offset_bytes: int
    data: bytes
    flush: bool
    mark: str


def read_log(path: str) -> list[Logged]:
    """All entries that dm-log-writes wrote, in the order of their completion.

    Its writer keeps what no flush covers back until one does, so that what stands before a flush is
    what that flush promised. Raises: ValueError for something else.
    """
    found = []
    with open(path, "rb", buffering=0) as log:
        os.posix_fadvise(log.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        magic, _, entries, sector_bytes = _SUPER.unpack(log.read(_SUPER.size))
        if magic != LOG_MAGIC:
            raise ValueError("no log of dm-log-writes")
        at = sector_bytes
        for _ in range(entries):
            log.seek(at)
            sector, sectors, flags, data_bytes = _ENTRY.unpack(log.read(_ENTRY.size))
            mark = log.read(data_bytes).rstrip(b"\0").decode() if flags & _MARK else ""
            at += sector_bytes
            data = b""
            if not flags & (_MARK | _DISCARD):
                log.seek(at)
                data = log.read(sectors * sector_bytes)
                at += len(data)
            found.append(Logged(sector * sector_bytes, data, bool(flags & _FLUSH), mark))
    return found


# null_blk -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NullDisk:
    """A disk of null_blk that keeps what is written, and whose sectors can be made bad."""

    folder: Path
    path: str

    def offers(self, attribute: str) -> bool:
        """Whether this kernel's null_blk has it."""
        return (self.folder / attribute).exists()

    def spoil(self, first_sector: int, last_sector: int) -> None:
        """Reads and writes that touch these sectors fail."""
        (self.folder / "badblocks").write_text(f"+{first_sector}-{last_sector}\n")

    def mend(self, first_sector: int, last_sector: int) -> None:
        """They no longer do."""
        (self.folder / "badblocks").write_text(f"-{first_sector}-{last_sector}\n")


@contextlib.contextmanager
def null_disk(mib: int, options: Sequence[str] = ()) -> Iterator[NullDisk]:
    """A disk with a memory; `options` are attributes to switch on where the kernel has them.

    Raises: NotOfferedError when this kernel has no null_blk that is set up through configfs.
    """
    modprobe("configfs")
    if not os.path.ismount("/sys/kernel/config"):
        subprocess.run(
            ["mount", "-t", "configfs", "configfs", "/sys/kernel/config"],
            capture_output=True, check=False, timeout=COMMAND_TIMEOUT_S,
        )  # fmt: skip
    if not modprobe("null_blk", "nr_devices=0") or not _NULLB.is_dir():
        raise NotOfferedError("this kernel has no null_blk")
    folder = _NULLB / "entresol"
    folder.mkdir()
    try:
        for name, value in (("size", str(mib)), ("memory_backed", "1"), ("blocksize", "512")):
            (folder / name).write_text(value)
        for name in options:
            if (folder / name).exists():
                (folder / name).write_text("1")
        (folder / "power").write_text("1")
        index = (folder / "index").read_text().strip()
        named = [Path(f"/dev/nullb{index}"), Path("/dev/entresol")]  # newer kernels: by its folder
        yield NullDisk(folder, str(next(path for path in named if path.exists())))
    finally:
        with contextlib.suppress(OSError):
            (folder / "power").write_text("0")
        folder.rmdir()
