"""The raw codec: bytes as they are.

Sealing and opening never call it for bulk data (they encrypt straight from and into the caller's
memory); it exists so that every codec id in a header has one registry entry.
"""

from __future__ import annotations

from entresol_proto.seal.codecs.base import CodecOutput
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import CodecError


class RawCodec:
    """Identity."""

    codec_id = 0
    name = "raw"

    def encode(self, plain: memoryview, dtype: DType) -> CodecOutput | None:
        """None: raw bytes never shrink."""
        return None

    def hopeless(self, first: memoryview, last: memoryview, dtype: DType) -> bool:
        """False: to encode is the only look there is."""
        return False

    def decode_into(self, stored: memoryview, into: memoryview, dtype: DType) -> None:
        """Copy.

        Raises: CodecError when the lengths differ.
        """
        if len(stored) != len(into):
            raise CodecError(f"raw chunk of {len(stored)} bytes for {len(into)} bytes")
        into[:] = stored
