"""Element types of stored KV bytes, as the sealed header names them.

Invariant: a number never changes its meaning, because it is in every stored block. The dtype only
helps a codec find structure: a wrong one costs compression, never bytes.
"""

from __future__ import annotations

import enum

from entresol_proto.status import CodecError


class DType(enum.IntEnum):
    """What one element of a block is; one byte in the sealed header."""

    OPAQUE = 0  # unknown or packed: bytes
    BF16 = 1
    FP16 = 2
    FP8_E4M3 = 3
    FP8_E5M2 = 4
    FP32 = 5
    INT8 = 6

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self]

    @property
    def label(self) -> str:
        """Lower-case text for descriptors, metrics and settings: "bf16", "fp8_e4m3"."""
        return self.name.lower()

    @classmethod
    def from_name(cls, name: str) -> DType:
        """The dtype of a label, case ignored.

        Raises: CodecError for an unknown name.
        """
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(dtype.label for dtype in cls)
            raise CodecError(f"unknown dtype {name!r}", hint=f"use one of {known}") from None


_ITEM_BYTES = {
    DType.OPAQUE: 1,
    DType.BF16: 2,
    DType.FP16: 2,
    DType.FP8_E4M3: 1,
    DType.FP8_E5M2: 1,
    DType.FP32: 4,
    DType.INT8: 1,
}
