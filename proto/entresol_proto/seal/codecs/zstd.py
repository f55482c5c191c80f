"""zstd, used two ways: as a general codec and as the entropy stage of the plane codec.

Invariant: a frame is only expanded when its header declares exactly the length the caller already
knows from authenticated bytes, and nothing follows it. So no input can make zstd allocate more.

Format: RFC 8878. Any zstd decoder reads these frames; only the encoder's parameters are ours.
"""

from __future__ import annotations

import threading

import zstandard

from entresol_proto.seal.codecs.base import CodecOutput, worth_it
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import CodecError

# Level 1: on KV bytes level 3 gains nothing and level 19 gains 1 % at a hundredth of the speed.
_GENERAL_LEVEL = 1

# Entropy-only: no match below 7 bytes is looked for and hardly any is found, so nearly every byte
# is a Huffman literal, which is what an exponent plane wants. The 16 KiB window also makes 16 KiB
# zstd blocks, each with its own Huffman table, so tables follow layers and K/V: 0.0 to 0.8 % denser
# than one table per 128 KiB on real KV, for 12 % more time to decode the plane.
_ENTROPY_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=14,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=1,
    write_checksum=0,
)


class _Contexts(threading.local):
    """zstandard's objects must not be used by two threads at once: one set per thread."""

    def __init__(self) -> None:
        self.general = zstandard.ZstdCompressor(level=_GENERAL_LEVEL)
        self.entropy = zstandard.ZstdCompressor(compression_params=_ENTROPY_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress_general(plain: memoryview) -> bytes:
    """One zstd frame at the general level."""
    return _contexts.general.compress(plain)


def compress_entropy(plain: memoryview) -> bytes:
    """One zstd frame that is nearly all Huffman literals."""
    return _contexts.entropy.compress(plain)


def decompress_exact(stored: memoryview, plain_bytes: int) -> bytes:
    """The content of the one frame in `stored`, which must be `plain_bytes` long.

    Raises: CodecError for anything else; then nothing larger than `plain_bytes` was allocated.
    """
    try:
        declared_bytes = zstandard.frame_content_size(stored)
        if declared_bytes != plain_bytes:
            raise CodecError(f"zstd frame declares {declared_bytes} bytes, not {plain_bytes}")
        plain = _contexts.decompressor.decompress(
            stored, max_output_size=plain_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd frame does not decode: {error}") from None
    if len(plain) != plain_bytes:
        raise CodecError(f"zstd frame holds {len(plain)} bytes, not {plain_bytes}")
    return plain


class ZstdCodec:
    """A chunk as one zstd frame, whatever the dtype."""

    codec_id = 1
    name = "zstd"

    def encode(self, plain: memoryview, dtype: DType) -> CodecOutput | None:
        """The frame, or None when it gains less than 3 %."""
        stored = compress_general(plain)
        return stored if worth_it(len(plain), len(stored)) else None

    def hopeless(self, first: memoryview, last: memoryview, dtype: DType) -> bool:
        """False: to encode is the only look there is."""
        return False

    def decode_into(self, stored: memoryview, into: memoryview, dtype: DType) -> None:
        """Expand the frame into `into`.

        Raises: CodecError unless `stored` is exactly one frame of len(into) bytes.
        """
        into[:] = decompress_exact(stored, len(into))
