"""A GRANT that is bytes from the start: what most gets are answered with, where an object for each
of its blocks would cost as much as all the rest.

Invariant: the bytes are those of the `Grant` with the same fields.
"""

from __future__ import annotations

import struct
from typing import ClassVar

from entresol_proto.wire.data import Grant
from entresol_proto.wire.frames import FrameType

# As Grant._ITEM; a block's key and its commitment are one run of 48 bytes here.
_ITEM = struct.Struct("<IIIQII48s")
assert _ITEM.size == Grant._ITEM.size


class PackedGrant:
    """The final answer to a FETCH: all its blocks, in order, sealed and under one lease.

    Call `add` for each, then `lease` once. For sending; the other side decodes a `Grant`.
    """

    __slots__ = ("_at", "_count", "_raw")

    TYPE: ClassVar[FrameType] = FrameType.GRANT
    final: ClassVar[bool] = True

    def __init__(self, blocks: int) -> None:
        self._at, self._count = Grant._FIXED.size, blocks
        self._raw = bytearray(self._at + blocks * _ITEM.size)

    def add(
        self, index: int, tier: int, rkey: int, address: int, length_bytes: int, plain_bytes: int,
        key: bytes,
    ) -> None:  # fmt: skip
        """A block: fields as in `GrantItem`; `key` with the commitment behind it, 48 bytes."""
        _ITEM.pack_into(
            self._raw, self._at, index, tier, rkey, address, length_bytes, plain_bytes, key
        )
        self._at += _ITEM.size

    def lease(self, lease_id: int, lease_ns: int, expires_ns: int) -> None:
        """Fields as in `Grant`."""
        assert self._at == len(self._raw), "as many blocks as were announced"
        Grant._FIXED.pack_into(
            self._raw, 0, True, False, self._count, 0, lease_id, lease_ns, expires_ns
        )

    def encode(self) -> bytes:
        return bytes(self._raw)
