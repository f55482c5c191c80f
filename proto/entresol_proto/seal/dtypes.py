"""Element types of stored KV bytes, as the sealed header names them.

Invariant: a number never changes its meaning, because it is in every stored block. The dtype only
helps a codec find structure: a wrong one costs compression, never bytes.
"""

from __future__ import annotations

import enum

from entresol_proto.ids import BadKeyError


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
        """The dtype of a label, case ignored. Other names it has elsewhere: `own_name`.

        Raises: BadKeyError for an unknown name.
        """
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(dtype.label for dtype in cls)
            raise BadKeyError(f"unknown dtype {name!r}", hint=f"use one of {known}") from None


_ITEM_BYTES = {
    DType.OPAQUE: 1,
    DType.BF16: 2,
    DType.FP16: 2,
    DType.FP8_E4M3: 1,
    DType.FP8_E5M2: 1,
    DType.FP32: 4,
    DType.INT8: 1,
}

_ELSEWHERE = {
    "bfloat16": DType.BF16,
    "float16": DType.FP16,
    "half": DType.FP16,
    "float32": DType.FP32,
    "float": DType.FP32,
    "float8_e4m3fn": DType.FP8_E4M3,
    "float8_e5m2": DType.FP8_E5M2,
}  # what PyTorch and engines call them; "fp8" is two of ours, so it is none here


def own_name(name: str) -> str:
    """`name` as a namespace descriptor may have it: "torch.bfloat16" is "bf16".

    A label stays as it is written, also in capitals: the text is part of what a namespace's id is
    made of. Another name stands for no namespace, so it becomes the label before there is an id.

    Raises: BadKeyError for an unknown name.
    """
    if name.upper() in DType.__members__:
        return name
    bare = name.lower().removeprefix("torch.")
    if bare in _ELSEWHERE:
        return _ELSEWHERE[bare].label
    return bare if bare.upper() in DType.__members__ else DType.from_name(name).label
