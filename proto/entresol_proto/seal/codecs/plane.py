"""The plane codec: put the bits that have structure in one byte plane, entropy-code only that one.

A KV element's exponent has about 2.6 bits of entropy, its sign and mantissa are noise. So a chunk
is split into byte planes: plane 0 holds the exponent, later planes the rest with the sign on top,
and each plane picks its own mode after a probe. 8-bit types are one plane.

Invariant: the transform is a bijection on bit patterns (NaN payloads, negative zero, padding and
any odd tail included), and every length in a stored chunk is checked against the authenticated
plain length before it is used. Byte layout: proto/FORMAT.md, "Codecs".

Source of the idea: the exponent/mantissa split of ZipNN (arXiv 2411.05239) and DFloat11 (arXiv
2504.11651), with literal-only zstd as the entropy stage. Per-channel exponent bases were tried
inside the chunk and lose (1.48 against 1.49 on bf16): their own bytes cost more than they save.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from entresol_proto.seal.codecs import zstd
from entresol_proto.seal.codecs.base import CodecOutput, worth_it
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import CodecError

FORMAT = 1
MODE_RAW = 0  # the plane's bytes
MODE_CONST = 1  # one byte, repeated
MODE_ZSTD = 2  # one zstd frame that declares the plane's length

_HEAD = struct.Struct("<BB")  # format, planes
_PLANE = struct.Struct("<BI")  # mode, stored bytes

_PROBE_SLICES = 4
_PROBE_SLICE_BYTES = 1024

_U8 = npt.NDArray[np.uint8]


def _split(plain: memoryview, width: int) -> list[_U8]:
    """The byte planes of `plain` (whose length is a multiple of `width`), exponent plane first."""
    if width == 1:
        return [np.frombuffer(plain, np.uint8)]
    if width == 2:
        x = np.frombuffer(plain, "<u2")
        low = x >> 8
        low &= 0x80
        low |= x & 0x7F
        return [(x >> 7).astype(np.uint8), low.astype(np.uint8)]
    y = np.frombuffer(plain, "<u4")
    second = y >> 24
    second &= 0x80
    second |= (y >> 16) & 0x7F
    return [part.astype(np.uint8) for part in (y >> 23, second, y >> 8, y)]


def _join_into(planes: list[_U8], into: memoryview, width: int) -> None:
    """Inverse of `_split`, straight into `into`."""
    if width == 1:
        np.frombuffer(into, np.uint8)[:] = planes[0]
        return
    # The sign travels from bit 7 of plane 1 to the top by sign extension.
    if width == 2:
        x = planes[0].astype(np.uint16)
        x <<= 7
        low = planes[1].view(np.int8).astype(np.int16).view(np.uint16)
        low &= 0x807F
        np.bitwise_or(x, low, out=np.frombuffer(into, "<u2"))
        return
    y = planes[0].astype(np.uint32)
    y <<= 23
    second = planes[1].view(np.int8).astype(np.int32).view(np.uint32)
    y |= second & 0x80000000
    y |= (second & 0x7F) << 16
    y |= planes[2].astype(np.uint32) << 8
    np.bitwise_or(y, planes[3], out=np.frombuffer(into, "<u4"))


def _probe(plane: _U8) -> memoryview:
    """About 4 KiB of the plane, from four places spread over it."""
    step = len(plane) // _PROBE_SLICES
    if step <= _PROBE_SLICE_BYTES:
        return plane.data
    starts = range(0, _PROBE_SLICES * step, step)
    return np.concatenate([plane[start : start + _PROBE_SLICE_BYTES] for start in starts]).data


def _encode_plane(plane: _U8) -> tuple[int, CodecOutput]:
    """The mode chosen for one plane, and its stored bytes."""
    probe = _probe(plane)
    entropy_bytes = len(zstd.compress_entropy(probe))
    general_bytes = len(zstd.compress_general(probe))
    if not worth_it(len(probe), min(entropy_bytes, general_bytes)):
        return MODE_RAW, plane.data
    if probe[0] == probe[-1] and bool((plane == plane[0]).all()):
        return MODE_CONST, bytes(plane[:1])
    # Matches cost decode speed and, on exponents, ratio: they must pay clearly.
    use_general = worth_it(entropy_bytes, general_bytes)
    compress = zstd.compress_general if use_general else zstd.compress_entropy
    stored = compress(plane.data)
    if not worth_it(len(plane), len(stored)):
        return MODE_RAW, plane.data
    return MODE_ZSTD, stored


def _decode_plane(mode: int, stored: memoryview, count: int) -> _U8:
    """One plane of `count` bytes.

    Raises: CodecError for an unknown mode or a length that does not fit.
    """
    if mode == MODE_RAW and len(stored) == count:
        return np.frombuffer(stored, np.uint8)
    if mode == MODE_CONST and len(stored) == 1:
        return np.full(count, stored[0], np.uint8)
    if mode == MODE_ZSTD:
        return np.frombuffer(zstd.decompress_exact(stored, count), np.uint8)
    raise CodecError(f"plane mode {mode} with {len(stored)} bytes for {count}")


class PlaneCodec:
    """Byte planes by dtype, each raw, constant or a zstd frame."""

    codec_id = 2
    name = "plane"

    def encode(self, plain: memoryview, dtype: DType) -> CodecOutput | None:
        """The planes, or None when they gain less than 3 %."""
        width = dtype.item_bytes
        body_bytes = len(plain) - len(plain) % width
        if body_bytes == 0:
            return None
        planes = [_encode_plane(plane) for plane in _split(plain[:body_bytes], width)]
        parts: list[CodecOutput] = [_HEAD.pack(FORMAT, width)]
        parts += [_PLANE.pack(mode, len(stored)) for mode, stored in planes]
        parts += [stored for _, stored in planes]
        parts.append(plain[body_bytes:])
        if not worth_it(len(plain), sum(map(len, parts))):
            return None
        return b"".join(parts)

    def hopeless(self, first: memoryview, last: memoryview, dtype: DType) -> bool:
        """False: to encode is the only look there is."""
        return False

    def decode_into(self, stored: memoryview, into: memoryview, dtype: DType) -> None:
        """Rebuild the chunk in `into`.

        Raises: CodecError unless every plane and the tail have exactly the length that len(into)
        and `dtype` imply.
        """
        width = dtype.item_bytes
        count, tail_bytes = divmod(len(into), width)
        at = _HEAD.size + width * _PLANE.size
        if count == 0 or len(stored) < at:
            raise CodecError(f"plane chunk of {len(stored)} bytes for {len(into)} bytes")
        if _HEAD.unpack_from(stored, 0) != (FORMAT, width):
            raise CodecError("plane chunk of an unknown format, or of another dtype")
        planes = []
        for number in range(width):
            mode, stored_bytes = _PLANE.unpack_from(stored, _HEAD.size + number * _PLANE.size)
            if stored_bytes > len(stored) - at:
                raise CodecError(f"plane {number} is cut short")
            planes.append(_decode_plane(mode, stored[at : at + stored_bytes], count))
            at += stored_bytes
        if len(stored) - at != tail_bytes:
            raise CodecError(f"plane chunk ends with {len(stored) - at} bytes, not {tail_bytes}")
        _join_into(planes, into[: count * width], width)
        into[count * width :] = stored[at:]
