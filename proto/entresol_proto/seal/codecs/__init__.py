"""Registry of codecs by the id that is on disk. A new codec is one new file and one line here.

Invariant: an id never changes its meaning and is never reused.
"""

from __future__ import annotations

from entresol_proto import native
from entresol_proto.seal.codecs.base import Codec
from entresol_proto.seal.codecs.ladder import DenseCodec, FastCodec
from entresol_proto.seal.codecs.plane import PlaneCodec
from entresol_proto.seal.codecs.raw import RawCodec
from entresol_proto.seal.codecs.zstd import ZstdCodec
from entresol_proto.status import CodecError

RAW = RawCodec.codec_id
ZSTD = ZstdCodec.codec_id
PLANE = PlaneCodec.codec_id
FAST = FastCodec.codec_id
DENSE = DenseCodec.codec_id

_CODECS: dict[int, Codec] = {
    codec.codec_id: codec
    for codec in (RawCodec(), ZstdCodec(), PlaneCodec(), FastCodec(), DenseCodec())
}
_BY_NAME: dict[str, Codec] = {codec.name: codec for codec in _CODECS.values()}

__all__ = ["DENSE", "FAST", "PLANE", "RAW", "ZSTD", "Codec", "by_name", "get", "known", "names",
           "writable_here"]  # fmt: skip


def known(codec_id: int) -> bool:
    """True when this build can decode the codec."""
    return codec_id in _CODECS


def get(codec_id: int) -> Codec:
    """The codec of an id read from a header.

    Raises: CodecError when this build does not know it.
    """
    try:
        return _CODECS[codec_id]
    except KeyError:
        raise CodecError(f"unknown codec {codec_id}") from None


def writable_here(codec_id: int) -> int:
    """The codec to write with where `codec_id` was asked for: without the native kernel `plane`
    instead of the two that are slow without it. Every block names its own codec.
    """
    return PLANE if native.KERNEL is None and codec_id in (FAST, DENSE) else codec_id


def by_name(name: str) -> Codec:
    """The codec of a configured name.

    Raises: CodecError when there is none.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise CodecError(
            f"unknown codec {name!r}", hint=f"use one of {', '.join(_BY_NAME)}"
        ) from None


def names() -> list[str]:
    """Names of all codecs, in the order of their ids."""
    return list(_BY_NAME)
