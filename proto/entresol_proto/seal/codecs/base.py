"""The codec seam: one chunk in, one chunk out, nothing remembered between calls.

Invariant: `decode_into` fills exactly `into` or raises CodecError. Its memory is bounded by a small
multiple of len(into), whatever `stored` says about itself.
"""

from __future__ import annotations

from typing import Protocol

from entresol_proto.seal.dtypes import DType

# A chunk (and a whole block) that does not shrink by at least 3 % is stored raw: the reader would
# spend a decode on nothing.
GAIN_MIN_PERMILLE = 30

CodecOutput = bytes | bytearray | memoryview


class Codec(Protocol):
    """A lossless transform of one chunk. Implementations are safe to call from many threads."""

    codec_id: int
    name: str

    def encode(self, plain: memoryview, dtype: DType) -> CodecOutput | None:
        """The encoded chunk, or None when it did not shrink enough to be worth decoding.

        `plain` is a contiguous view of bytes and is only read. The result is strictly shorter than
        `plain`. It may alias `plain` only for the raw codec, which never returns anything else.
        """
        ...

    def hopeless(self, first: memoryview, last: memoryview, dtype: DType) -> bool:
        """True when a quick look says that `encode` declines both chunks, the first and the last of
        a block. False says nothing."""
        ...

    def decode_into(self, stored: memoryview, into: memoryview, dtype: DType) -> None:
        """Fill `into` with the chunk's plaintext; len(into) is the authenticated length.

        Raises: CodecError when `stored` is not an encoding of exactly len(into) bytes; what `into`
        then holds is undefined. Nothing outside `into` is ever written.
        """
        ...


def worth_it(plain_bytes: int, stored_bytes: int) -> bool:
    """True when storing `stored_bytes` for `plain_bytes` gains at least GAIN_MIN_PERMILLE."""
    return stored_bytes * 1000 <= plain_bytes * (1000 - GAIN_MIN_PERMILLE)
