"""The weights file of the demo's decoder: small, checked, and readable without unpickling anything.

Invariant: what `read_weights` returns is bit for bit what `write_weights` was given, or it raises.

Layout, all integers little-endian:

    offset  size  field
    0       8     magic "ENTLWTS\\n"
    8       4     format version (1)
    12      4     header length H, bytes
    16      32    BLAKE2b-256 over everything from offset 48 to the end of the file
    48      H     header: UTF-8 JSON {"config": {...}, "tensors": [[name, [shape...]], ...],
                  "exponent_zstd_bytes": E, "values": N}
    48+H    E     exponent plane: one zstd frame of N bytes
    48+H+E  N     sign-and-mantissa plane: N bytes as they are

Values are bf16 bit patterns, tensors concatenated in header order, C order. Each 16-bit pattern is
rotated left by one so that the 8 exponent bits fill one byte (the only compressible one: trained
weights have near-random mantissas); the other byte is mantissa, then sign.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from entresol_proto.status import FormatError

MAGIC = b"ENTLWTS\n"
FORMAT_VERSION = 1
DIGEST_BYTES = 32
FIXED = struct.Struct("<8sII32s")
FILE_BYTES_MAX = 64 * 1024 * 1024
HEADER_BYTES_MAX = 64 * 1024
VALUES_MAX = 32 * 1024 * 1024
TENSORS_MAX = 1024
ZSTD_LEVEL = 19  # written once, read often


@dataclass(frozen=True, slots=True)
class Weights:
    """What a weights file holds.

    Attributes:
        config: the model's shape, as written (plain JSON numbers).
        tensors: name -> bf16 bit patterns (u16), read-only views of one array.
        digest: the file's BLAKE2b-256; names these exact weights.
    """

    config: dict[str, float]
    tensors: dict[str, NDArray[np.uint16]]
    digest: bytes


def write_weights(config: dict[str, float], tensors: dict[str, NDArray[np.uint16]]) -> bytes:
    """The file's bytes for `tensors` (bf16 bit patterns), in the order given."""
    flat = np.concatenate([np.ascontiguousarray(t).reshape(-1) for t in tensors.values()])
    rotated = (flat << np.uint16(1)) | (flat >> np.uint16(15))
    exponents = (rotated >> np.uint16(8)).astype(np.uint8).tobytes()
    rest = (rotated & np.uint16(0xFF)).astype(np.uint8).tobytes()
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False).compress(exponents)
    fields = {
        "config": config,
        "tensors": [[name, list(t.shape)] for name, t in tensors.items()],
        "exponent_zstd_bytes": len(packed),
        "values": int(flat.size),
    }
    header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    body = header + packed + rest
    return FIXED.pack(MAGIC, FORMAT_VERSION, len(header), _digest(body)) + body


def read_weights(data: bytes) -> Weights:
    """Checks and unpacks a weights file.

    Raises:
        FormatError: not a weights file, another version, or damaged anywhere.
    """
    if not FIXED.size <= len(data) <= FILE_BYTES_MAX:
        raise FormatError(f"weights file has an impossible length length_bytes={len(data)}")
    magic, version, header_bytes, digest = FIXED.unpack_from(data)
    if magic != MAGIC:
        raise FormatError("not a weights file")
    if version != FORMAT_VERSION:
        raise FormatError(f"weights file has another format version={version}")
    body = memoryview(data)[FIXED.size :]
    if _digest(body) != digest:
        raise FormatError("weights file is damaged: its digest does not match")
    try:
        return _unpack(body, header_bytes, digest)
    except (ValueError, TypeError, KeyError, zstandard.ZstdError) as error:
        raise FormatError(f"weights file is malformed: {error}") from error


def _unpack(body: memoryview, header_bytes: int, digest: bytes) -> Weights:
    if header_bytes > min(HEADER_BYTES_MAX, len(body)):
        raise ValueError("header length")
    fields = json.loads(bytes(body[:header_bytes]))
    packed_bytes, values = int(fields["exponent_zstd_bytes"]), int(fields["values"])
    shapes = [(str(name), tuple(int(n) for n in shape)) for name, shape in fields["tensors"]]
    if not 0 < values <= VALUES_MAX or len(shapes) > TENSORS_MAX or packed_bytes < 0:
        raise ValueError("sizes beyond the limits")
    if header_bytes + packed_bytes + values != len(body):
        raise ValueError("sizes do not add up to the file")
    if sum(math.prod(shape) for _, shape in shapes) != values:
        raise ValueError("tensor shapes do not add up")
    packed = body[header_bytes : header_bytes + packed_bytes]
    if zstandard.frame_content_size(packed) != values:
        raise ValueError("exponent plane has another length")
    plane = zstandard.ZstdDecompressor().decompress(packed, max_output_size=values)
    flat = np.frombuffer(plane, np.uint8).astype(np.uint16) << np.uint16(8)
    flat |= np.frombuffer(body, np.uint8, values, header_bytes + packed_bytes)
    flat = (flat >> np.uint16(1)) | (flat << np.uint16(15))
    flat.flags.writeable = False
    tensors: dict[str, NDArray[np.uint16]] = {}
    at = 0
    for name, shape in shapes:
        size = math.prod(shape)
        tensors[name] = flat[at : at + size].reshape(shape)
        at += size
    return Weights({str(k): v for k, v in fields["config"].items()}, tensors, digest)


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
