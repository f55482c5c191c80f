"""The superblock on the device: making one, finding it, replacing both copies.

Invariants: a device that is neither blank nor ours is never written; one copy is flushed before the
other is touched, so a crash leaves at least one of them.
"""

from __future__ import annotations

from entresol_daemon.flash.device import BLOCK, Device, IoOp, aligned_buffer
from entresol_daemon.flash.model import EngineOptions, RandomBytes
from entresol_daemon.flash.segment import SEGMENT_MAGIC
from entresol_daemon.flash.superblock import (
    DATA_OFFSET,
    FORMAT_VERSION,
    SEGMENTS_MIN,
    Superblock,
    choose_superblock,
    decode_superblock,
    encode_superblock,
    version_of,
)
from entresol_proto.status import DeviceError, FormatError, Status

_TRIES_MAX = 2
_RESIZED = (
    "was its size changed? restore it: the second copy is where it ended; to start empty, remove "
    "the file or discard the device's content"
)


def new_superblock(device: Device, options: EngineOptions, random_bytes: RandomBytes) -> Superblock:
    """The superblock of a fresh file on this device. Raises: DeviceError when it is too small."""
    mirror_offset = (device.size_bytes & -BLOCK) - BLOCK
    count = (mirror_offset - DATA_OFFSET) // options.segment_bytes
    wanted = max(SEGMENTS_MIN, options.free_segments_min + 2)
    if count < wanted:
        raise DeviceError(
            f"{device.name} has room for {max(0, count)} segments of {options.segment_bytes:,} "
            f"bytes beside its superblocks, and {wanted} are needed",
            hint="use a larger data file or smaller segments",
            status=Status.NO_SPACE,
        )
    return Superblock(
        random_bytes(16), random_bytes(32), options.segment_bytes, count, mirror_offset
    )


def check_fit(device: Device, superblock: Superblock) -> None:
    """Raises: FormatError when the device is shorter than its superblock says."""
    needed = superblock.mirror_offset + BLOCK
    if device.size_bytes < needed:
        raise FormatError(
            f"{device.name} has {device.size_bytes} bytes, its superblock says {needed}",
            hint="the file was cut short: restore its size, or start with an empty one",
        )


async def read_superblock(device: Device) -> tuple[Superblock | None, int, bool]:
    """(superblock or None for a blank device, valid copies, whether both agree).

    A blank device is about to be formatted: it has to look blank twice, and to have no segments.
    What is none of ours is asked for twice, too.

    Raises: FormatError as `choose_superblock`; DeviceError when no copy can be read.
    """
    try:
        found = await _read_superblock(device)
    except FormatError:
        found = await _read_superblock(device)
        if found[0] is None:
            raise
    if found[0] is None:
        found = await _read_superblock(device)
    if found[0] is not None:
        return found
    begin = await _read_block(device, DATA_OFFSET)
    if begin is None:
        raise DeviceError(
            f"{device.name}: its first block is blank, and it cannot be read where segments begin",
            hint="nothing is formatted where segments may be: see the kernel's log",
        )
    if begin[:8] == SEGMENT_MAGIC:
        raise FormatError(
            f"{device.name} has segments, but its first block is blank and no superblock is at its "
            "end",
            hint=_RESIZED,
        )
    return found


async def _read_superblock(device: Device) -> tuple[Superblock | None, int, bool]:
    last = (device.size_bytes & -BLOCK) - BLOCK
    if last < DATA_OFFSET:
        raise DeviceError(
            f"{device.name} is smaller than an empty data file",
            hint="if it was cut short restore its size, else remove it to start empty",
        )
    first = await _read_block(device, 0)
    found = None if first is None else decode_superblock(first, 0)
    if found is not None:
        check_fit(device, found)
        last = found.mirror_offset  # the device may have grown since
    mirror = await _read_block(device, last)
    if first is None and mirror is None:
        raise DeviceError(
            f"{device.name}: no superblock copy can be read",
            hint="the device fails: see the kernel's log",
        )
    if mirror is None and first is not None and not any(first):
        raise DeviceError(
            f"{device.name}: its first block is blank and its last cannot be read",
            hint="nothing is formatted where a superblock may be: see the kernel's log",
        )
    lost = b"\xff" * BLOCK  # neither valid nor blank
    try:
        superblock, agree = choose_superblock(first or lost, mirror or lost)
    except FormatError as error:
        version = version_of(first or mirror or lost)
        if (first is None or mirror is None) and version in (None, FORMAT_VERSION):
            raise DeviceError(
                f"{device.name}: one superblock copy cannot be read, and where the other should be "
                "is none",
                hint="the device fails: see the kernel's log",
            ) from None
        hint = error.hint
        if version in (None, FORMAT_VERSION):
            begin = await _read_block(device, DATA_OFFSET)
            hint = _RESIZED if begin is not None and begin[:8] == SEGMENT_MAGIC else hint
        raise FormatError(f"{device.name}: {Exception.__str__(error)}", hint=hint) from None
    return superblock, 2 if agree else 1, agree


async def write_superblock(device: Device, superblock: Superblock) -> None:
    """Replace both copies. Raises: DeviceError."""
    for copy, offset in ((0, 0), (1, superblock.mirror_offset)):
        buffer = aligned_buffer(BLOCK)
        buffer[:] = encode_superblock(superblock, copy)
        await device.write([IoOp(offset, buffer)])
        await device.flush()


async def _read_block(device: Device, offset: int) -> bytes | None:
    buffer = aligned_buffer(BLOCK)
    for _ in range(_TRIES_MAX):
        if (await device.read([IoOp(offset, buffer)]))[0] is Status.OK:
            return bytes(buffer)
    return None
