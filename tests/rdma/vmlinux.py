"""The kernel proper out of a compressed x86 image: unpacking is the host's work, not the guest's.

QEMU enters an uncompressed kernel directly (PVH), which spares every boot seconds of emulated
decompression. Source of the offsets: Documentation/arch/x86/boot.rst of Linux, fields setup_sects,
payload_offset and payload_length.
"""

from __future__ import annotations

import lzma
import shutil
import struct
import subprocess

_SETUP_SECTS = 0x1F1
_MAGIC = 0x202
_PAYLOAD = 0x248
_SECTOR = 512
_SIZE_FIELD = 4  # the build appends the unpacked size
_ZSTD = b"\x28\xb5\x2f\xfd"
_XZ = b"\xfd7zXZ\x00"
ZSTD_TIMEOUT_S = 120


def payload(image: bytes) -> bytes | None:
    """The compressed kernel inside a bzImage; None when this is none."""
    if len(image) < 0x268 or image[_MAGIC : _MAGIC + 4] != b"HdrS":
        return None
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    start = (image[_SETUP_SECTS] + 1) * _SECTOR + offset
    found = image[start : start + length - _SIZE_FIELD]
    return found if len(found) == length - _SIZE_FIELD else None


def _unzstd(data: bytes) -> bytes | None:
    try:
        import zstandard
    except ImportError:
        command = shutil.which("zstd")
        if command is None:
            return None
        done = subprocess.run(
            [command, "-dc"], input=data, capture_output=True, timeout=ZSTD_TIMEOUT_S, check=False
        )
        return done.stdout or None
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def uncompressed(image: bytes) -> bytes | None:
    """The kernel as an ELF file; None when it cannot be had here, and the image must do."""
    packed = payload(image)
    if packed is None:
        return None
    if packed.startswith(_ZSTD):
        kernel = _unzstd(packed)
    elif packed.startswith(_XZ):
        kernel = lzma.LZMADecompressor().decompress(packed)
    else:
        return None
    return kernel if kernel and kernel.startswith(b"\x7fELF") else None
