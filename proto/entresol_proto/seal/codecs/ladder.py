"""The ladder codecs: exponents as ranks, ranks as short codes with escapes to a next level.

Sign and mantissa stay as they are. The three likeliest exponents take two bits; a code that says
"rarer" sends the value to the next level, and so on for four levels, so that no table has to be
searched and a vector of values is coded at once. On exponents of activations that comes within 1 %
of Huffman codes. Two codecs share the format and differ in what a rank is relative to:

- `fast` (3): the likeliest exponents of 32,768 values. For links as fast as memory: of bf16 the
  seven likeliest take three bits, so that few values escape, which costs ratio (1.44 instead of
  1.48) and saves a fifth of the time to encode.
- `dense` (4): what the same channel had before, found by trying how many values a row has. No
  table of channels is stored: reader and writer keep the same running mean. Rows that are better
  predicted by one value, or by all channels moved together, say so in a byte. Where bytes have
  other structure than exponents do, or the dtype is none of those below, it stores a plane chunk.

Invariant: decoding checks every length before it is used, native or not, and both give the same
bytes. Byte layout: proto/FORMAT.md, "Ladder".
"""

from __future__ import annotations

from entresol_proto import native
from entresol_proto.seal.codecs import ladder_twin as twin
from entresol_proto.seal.codecs.base import GAIN_MIN_PERMILLE, CodecOutput
from entresol_proto.seal.codecs.plane import PlaneCodec
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import CodecError

_KINDS = {DType.BF16: 1, DType.FP16: 2, DType.FP8_E4M3: 3, DType.FP8_E5M2: 4}
_PLANE = b"\x02"  # the first byte of a dense chunk that is a plane chunk; 1 is the ladder's
_PLANES = PlaneCodec()
_PROBED = 64
_DIFFERENT_MIN = 40


def bytes_max_of(plain_bytes: int) -> int:
    """The longest chunk that is still worth storing instead of the plain one."""
    return plain_bytes * (1000 - GAIN_MIN_PERMILLE) // 1000


def _encode(plain: memoryview, kind: int, by_channel: bool) -> CodecOutput | None:
    bytes_max = bytes_max_of(len(plain))
    if native.KERNEL is not None:
        return native.KERNEL.ladder_encode(plain, kind, by_channel, bytes_max)
    return twin.encode(plain, kind, by_channel, bytes_max)


def _hopeless(first: memoryview, last: memoryview, kind: int | None, by_channel: bool) -> bool:
    if native.KERNEL is None or kind is None:
        return False
    return not native.KERNEL.ladder_pays(first, last, kind, by_channel)


def _decode_into(stored: memoryview, kind: int, into: memoryview) -> None:
    if native.KERNEL is None:
        twin.decode_into(stored, kind, into)
        return
    problem = native.KERNEL.ladder_decode(stored, kind, into)
    if problem:
        raise CodecError(f"ladder chunk of {len(stored)} bytes for {len(into)}: {problem}")


def _has_other_structure(plain: memoryview, width: int) -> bool:
    """True when low bytes repeat, which mantissas do not: padding, or values of fewer bits.

    Looks at 64 bytes, because chunks that will be declined pay for it too. Among so many, noise has
    about 57 different ones, and 8-bit KV more than 30.
    """
    step = max(1, len(plain) // (_PROBED * width)) * width
    picked = plain[::step]
    return len(set(picked)) < (_DIFFERENT_MIN if width > 1 else _DIFFERENT_MIN // 2)


class FastCodec:
    """Ranks relative to the section."""

    codec_id = 3
    name = "fast"

    def encode(self, plain: memoryview, dtype: DType) -> CodecOutput | None:
        """The chunk, or None when it gains less than 3 % or the dtype has no short exponent."""
        kind = _KINDS.get(dtype)
        return None if kind is None else _encode(plain, kind, by_channel=False)

    def hopeless(self, first: memoryview, last: memoryview, dtype: DType) -> bool:
        """True when neither chunk has exponents that are worth coding."""
        return _hopeless(first, last, _KINDS.get(dtype), by_channel=False)

    def decode_into(self, stored: memoryview, into: memoryview, dtype: DType) -> None:
        """Rebuild the chunk in `into`.

        Raises: CodecError unless `stored` encodes exactly len(into) bytes of this dtype.
        """
        kind = _KINDS.get(dtype)
        if kind is None:
            raise CodecError(f"ladder chunk of dtype {dtype.label}")
        _decode_into(stored, kind, into)


class DenseCodec:
    """Ranks relative to the channel, or byte planes."""

    codec_id = 4
    name = "dense"

    def encode(self, plain: memoryview, dtype: DType) -> CodecOutput | None:
        """The chunk, or None when it gains less than 3 %."""
        kind = _KINDS.get(dtype)
        if kind is not None and not _has_other_structure(plain, dtype.item_bytes):
            return _encode(plain, kind, by_channel=True)
        planes = _PLANES.encode(plain, dtype)
        if planes is None or len(planes) >= bytes_max_of(len(plain)):
            return None
        return _PLANE + bytes(planes)

    def hopeless(self, first: memoryview, last: memoryview, dtype: DType) -> bool:
        """True when neither chunk has exponents that are worth coding, nor bytes that repeat."""
        return _hopeless(first, last, _KINDS.get(dtype), by_channel=True)

    def decode_into(self, stored: memoryview, into: memoryview, dtype: DType) -> None:
        """Rebuild the chunk in `into`.

        Raises: CodecError unless `stored` encodes exactly len(into) bytes of this dtype.
        """
        kind = _KINDS.get(dtype)
        if stored[:1] == _PLANE:
            _PLANES.decode_into(stored[1:], into, dtype)
        elif kind is None:
            raise CodecError(f"ladder chunk of dtype {dtype.label}")
        else:
            _decode_into(stored, kind, into)
