"""How worn the drives below the data are, as they say themselves: for `entresol doctor`.

The daemon cannot ask them: its unit gives it no devices and no capability, and the question is
root's. So this runs beside it, in whoever examines a configuration.

Invariant: drives are only asked, never changed; what cannot be told is said, with the reason, and
never guessed.

Source: NVM Express Base Specification 2.0, Get Log Page, "SMART / Health Information";
linux/nvme_ioctl.h; Documentation/ABI of Linux, /sys/dev/block and /sys/block.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from entresol_proto.status import DeviceError, Status

LAYERS_MAX = 8  # of device mapper, md and loop over each other
SMART_BYTES = 512
DATA_UNIT_BYTES = 512_000  # the specification counts thousands of 512 bytes
_ADMIN_CMD = 0xC0484E41  # _IOWR('N', 0x41, struct nvme_passthru_cmd)
_GET_LOG_PAGE, _SMART_LOG = 0x02, 0x02
_EVERY_NAMESPACE = 0xFFFFFFFF
_TIMEOUT_MS = 5_000
# opcode, flags, two reserved, nsid, cdw2, cdw3, metadata, address, metadata and data length,
# cdw10 to cdw15, timeout, result
_COMMAND = struct.Struct("<BBH3I2Q2I6I2I")
_NVME = re.compile(r"nvme\d+n\d+")
_WARNINGS = (
    "little spare is left", "too hot or too cold", "not reliable any more", "read-only",
    "its backup of volatile memory failed", "its persistent memory is read-only",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wear:
    """What a drive says of itself. Percentages may pass 100: the warranted life is used up then."""

    used_percent: int
    spare_percent: int
    spare_least_percent: int  # below it the drive warns
    written_bytes: int
    media_errors: int
    warnings: tuple[str, ...]


def parse_smart(page: bytes) -> Wear:
    """Of an NVMe drive's SMART log. Raises: DeviceError for what is none."""
    if len(page) != SMART_BYTES or not any(page):
        raise DeviceError("the drive's health page is empty", status=Status.IO_ERROR)
    flags, spare, least, used = page[0], page[3], page[4], page[5]
    return Wear(
        used_percent=used,
        spare_percent=spare,
        spare_least_percent=least,
        written_bytes=int.from_bytes(page[48:64], "little") * DATA_UNIT_BYTES,
        media_errors=int.from_bytes(page[160:176], "little"),
        warnings=tuple(words for bit, words in enumerate(_WARNINGS) if flags >> bit & 1),
    )


def drives_below(path: Path, root: Path = Path("/")) -> list[str]:
    """Names of the drives that hold a file, folder or block device, such as "nvme0n1".

    Empty where the kernel names none: tmpfs, overlay, a network file system. `root` has sys and
    proc. Raises: OSError.
    """
    found = path.stat()
    number = found.st_rdev if stat.S_ISBLK(found.st_mode) else _below_file(path, found, root)
    if number is None:
        return []
    return list(dict.fromkeys(_leaves(_device_folder(number, root), root, LAYERS_MAX)))


def _below_file(path: Path, found: os.stat_result, root: Path) -> int | None:
    """The device number under a file system. Some (btrfs) have one of their own, and name the
    device in the table of mounts."""
    if os.major(found.st_dev):
        return found.st_dev
    wanted = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        words, source = before.split(), after.split()
        if len(words) > 2 and words[2] == wanted and len(source) > 1:
            device = Path(source[1])
            if source[1].startswith("/dev/") and device.exists():
                return device.stat().st_rdev
    return None


def _device_folder(number: int, root: Path) -> Path:
    return (root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()


def _leaves(folder: Path, root: Path, layers: int) -> Iterator[str]:
    if not folder.is_dir() or not layers:
        return
    if (folder / "partition").exists():
        folder = folder.parent
    lower = sorted((folder / "slaves").iterdir()) if (folder / "slaves").is_dir() else []
    for one in lower:
        yield from _leaves(one.resolve(), root, layers - 1)
    backing = folder / "loop/backing_file"
    if backing.exists():
        file = Path(backing.read_text(encoding="utf-8").strip())
        number = _below_file(file, file.stat(), root) if file.exists() else None
        if number is not None:
            yield from _leaves(_device_folder(number, root), root, layers - 1)
    elif not lower:
        yield folder.name


def read_wear(drive: str, devices: Path = Path("/dev")) -> Wear:
    """Ask a drive. Raises: DeviceError: UNSUPPORTED where it is no NVMe drive, FORBIDDEN where this
    user may not ask, IO_ERROR where it does not answer."""
    if not _NVME.fullmatch(drive):
        raise DeviceError("it is no NVMe drive", status=Status.UNSUPPORTED)
    page = (ctypes.c_ubyte * SMART_BYTES)()
    dwords = (SMART_BYTES // 4 - 1) << 16 | _SMART_LOG  # one less than their number
    command = _COMMAND.pack(
        _GET_LOG_PAGE, 0, 0, _EVERY_NAMESPACE, 0, 0, 0, ctypes.addressof(page), 0, SMART_BYTES,
        dwords, 0, 0, 0, 0, 0, _TIMEOUT_MS, 0,
    )  # fmt: skip
    try:
        link = os.open(devices / drive, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            refused = fcntl.ioctl(link, _ADMIN_CMD, bytearray(command))
        finally:
            os.close(link)
    except OSError as error:
        kind = {errno.EACCES: Status.FORBIDDEN, errno.EPERM: Status.FORBIDDEN}
        kind |= {errno.ENOTTY: Status.UNSUPPORTED, errno.ENOENT: Status.UNSUPPORTED}
        status = kind.get(error.errno or 0, Status.IO_ERROR)
        raise DeviceError(error.strerror or str(error), status=status) from None
    if refused:
        raise DeviceError(f"the drive answers with status {refused:#x}", status=Status.IO_ERROR)
    return parse_smart(bytes(page))
