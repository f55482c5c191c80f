"""Sealed blocks: header, meta, whole blocks, and the codecs behind the tags.

Invariant of all of them: a declared size is never believed before it is bounded, nothing outside
the destination is written, and behind anything but OK the destination is zero.
"""

from __future__ import annotations

import functools
import struct
import zlib
from contextlib import AbstractContextManager
from random import Random
from unittest.mock import patch

from entresol_proto import limits
from entresol_proto.seal import block as sealing
from entresol_proto.seal import codecs, header
from entresol_proto.seal.codecs import plane, zstd
from entresol_proto.seal.dtypes import DType
from entresol_proto.seal.header import BlockIdentity, BlockMeta, SealedHeader
from entresol_proto.status import CodecError, SealError, Status
from tests.fuzz.target import Parser, Target

KEY = sealing.derive_block_key(bytes(range(32)), b"s" * 32)
IDENTITY = BlockIdentity(b"n" * 16, b"w" * 16, b"engine-key-of-20byte", DType.BF16, 7)
CHUNK = 4096
DTYPES = tuple(DType)


def plain_of(size: int) -> bytes:
    """Bytes whose high halves repeat, as in KV: they compress a little."""
    rng = Random(size)
    return b"".join(struct.pack("<H", 0x3F80 | rng.randrange(128)) for _ in range(size // 2 + 1))[
        :size
    ]


@functools.cache
def sealed_blocks() -> tuple[bytes, ...]:
    """One per codec and length: raw, zstd, plane; one chunk, a cut last chunk; with and without
    meta."""
    found = []
    meta = BlockMeta(b"parent-key", 3, 4, (1, 2, 3, 4))
    for codec_id in (codecs.RAW, codecs.ZSTD, codecs.PLANE):
        for size, with_meta in ((600, True), (5_001, False)):
            out = bytearray(20_000)
            made = sealing.seal_into(
                memoryview(out), memoryview(plain_of(size)), identity=IDENTITY, block_key=KEY,
                salt=b"s" * 32, codec_id=codec_id, meta=meta if with_meta else None,
                chunk_bytes=CHUNK,
            )  # fmt: skip
            found.append(bytes(out[: made.sealed_bytes]))
    return tuple(found)


def fix_header(_: Random, raw: bytes) -> bytes:
    """Make the header's checksum right, at the length that its chunk count implies."""
    if len(raw) < header.HEADER_BYTES_MIN:
        return raw
    chunks = int.from_bytes(raw[36:40], "little")
    end = header.HEADER_BYTES_MIN - 8 + 4 * chunks  # of the part under the checksum
    if not 1 <= chunks <= limits.CHUNKS_PER_BLOCK_MAX or end + 4 > len(raw):
        return raw
    aad = raw[:12] + (end + 4).to_bytes(4, "little") + raw[16:end]
    return aad + zlib.crc32(aad).to_bytes(4, "little") + raw[end + 4 :]


def header_seeds() -> list[bytes]:
    """The headers of the blocks, alone."""
    return [raw[: SealedHeader.parse(raw).header_bytes] for raw in sealed_blocks()]


def header_parser() -> Parser:
    """Refused, or it encodes to its own bytes and its spans lie within the block."""

    def parse(raw: bytes) -> str:
        try:
            found = SealedHeader.parse(raw)
        except SealError:
            return "refused"
        identity = BlockIdentity(
            found.namespace_id, found.wire_key, found.engine_key, found.dtype, found.dek_version,
            found.host_sealed,
        )  # fmt: skip
        again = header.encode_header(
            identity, codec_id=found.codec_id, plain_bytes=found.plain_bytes,
            chunk_bytes=found.chunk_bytes, meta_bytes=found.meta_bytes, salt=found.salt,
            commitment=found.commitment, chunk_stored_bytes=list(found.chunk_stored_bytes),
        )  # fmt: skip
        assert raw.startswith(again), "a header with two encodings"
        last = found.chunk_count - 1
        assert sum(found.chunk_span(last)) == found.sealed_bytes
        assert 0 < found.chunk_plain_bytes(last) <= found.chunk_bytes
        assert found.plain_bytes <= limits.BLOCK_BYTES_MAX
        return f"ok {found.codec_id} {found.dtype.name} {found.meta_bytes > 0}"

    return parse


def meta_seeds() -> list[bytes]:
    """With and without a parent, with and without tokens."""
    return [
        BlockMeta(b"", 0, 0, ()).encode(),
        BlockMeta(b"p" * 8, 1, 16, tuple(range(16))).encode(),
        BlockMeta(b"p" * 64, 2**32 - 1, 2**32 - 1, (2**32 - 1,) * 64).encode(),
    ]


def meta_parser() -> Parser:
    """Refused, or it encodes to its own bytes."""

    def parse(raw: bytes) -> str:
        try:
            found = BlockMeta.decode(raw)
        except SealError:
            return "refused"
        assert found.encode() == raw
        return f"ok {bool(found.parent)} {bool(found.token_ids)}"

    return parse


def blocks_parser() -> Parser:
    """A damaged block is CORRUPT and leaves zeros; an undamaged one opens, whatever follows it.

    Undamaged is its header and its chunks: the meta between them is opened by itself."""
    good = set()
    for whole in sealed_blocks():
        found = SealedHeader.parse(whole)
        good.add((found.aad, whole[found.header_bytes + found.meta_bytes :]))
    sizes = sorted({SealedHeader.parse(whole).plain_bytes for whole in sealed_blocks()})
    plains = {size: plain_of(size) for size in sizes}
    buffers = {size: bytearray(size) for size in sizes}

    def parse(raw: bytes) -> str:
        outcome = []
        for size in sizes:
            into = buffers[size]
            into[:] = b"\xaa" * size
            status = sealing.open_into(
                memoryview(raw), memoryview(into), namespace_id=IDENTITY.namespace_id,
                wire_key=IDENTITY.wire_key, engine_key=IDENTITY.engine_key, block_key=KEY,
            )  # fmt: skip
            if status is Status.OK:
                found = SealedHeader.parse(raw)
                chunks = raw[found.header_bytes + found.meta_bytes : found.sealed_bytes]
                assert (found.aad, chunks) in good, "opened a block that was never sealed"
                assert into == plains[size]
            else:
                assert not any(into), "unverified bytes were left behind"
            outcome.append(status.label)
        return " ".join([*outcome, _meta_of(raw)])

    return parse


def _meta_of(raw: bytes) -> str:
    try:
        found = SealedHeader.parse(raw)
        meta = sealing.open_meta(memoryview(raw), found, KEY)
    except SealError as error:
        return error.status.label
    assert meta == BlockMeta(b"parent-key", 3, 4, (1, 2, 3, 4)), "a meta that was never sealed"
    return "meta"


# Codecs: behind a tag, so only a broken or hostile host writes such bytes ------------------------


def codec_seeds(codec_id: int) -> list[bytes]:
    """`u8 dtype, u16 plain length, encoded chunk`."""
    found = []
    for number, dtype in enumerate(DTYPES):
        for size in (64, 1000, 4096):
            plain = plain_of(size) if size != 1000 else bytes(size)
            encoded = codecs.get(codec_id).encode(memoryview(plain), dtype)
            if encoded is not None:
                found.append(bytes([number]) + struct.pack("<H", size) + bytes(encoded))
    return found


def codec_parser(codec_id: int) -> Parser:
    """Refused, or the destination is full and its surroundings are untouched."""
    codec = codecs.get(codec_id)
    guard = b"\x5a" * 64

    def parse(raw: bytes) -> str:
        if len(raw) < 3:
            return "short"
        dtype = DTYPES[raw[0] % len(DTYPES)]
        size = min(1 + int.from_bytes(raw[1:3], "little"), 2 * CHUNK) - 1 or 1
        memory = bytearray(guard + bytes(size) + guard)
        into = memoryview(memory)[64 : 64 + size]
        try:
            codec.decode_into(memoryview(raw)[3:], into, dtype)
            outcome = f"ok {dtype.name}"
        except CodecError:
            outcome = f"refused {dtype.item_bytes}"
        assert memory[:64] == guard, "wrote before the destination"
        assert memory[64 + size :] == guard, "wrote behind the destination"
        return outcome

    return parse


def _trusts_the_frame(stored: memoryview, plain_bytes: int) -> bytes:
    """Believes the length that a zstd frame declares."""
    return zstd._contexts.decompressor.decompress(stored)


def _no_length_check(*_: object) -> None:
    return None


def _no_zeros(into: memoryview) -> None:
    return None


def _without_lengths() -> AbstractContextManager[object]:
    return patch.object(header, "_check_lengths", _no_length_check)


def _meta_without_padding_check(raw: bytes) -> BlockMeta:
    size, position, tokens, count, padded = header._META_FIXED.unpack_from(raw)
    ids = struct.unpack_from(f"<{count}I", raw, header.META_BYTES_FIXED)
    return BlockMeta(padded[:size], position, tokens, ids)


TARGETS = (
    Target(
        name="sealed_header", share=50, seeds=header_seeds, make=header_parser, fix=fix_header,
        canaries=(_without_lengths,), modules=("entresol_proto.seal.header",),
    ),
    Target(
        name="sealed_meta", share=40, seeds=meta_seeds, make=meta_parser,
        canaries=(lambda: patch.object(BlockMeta, "decode", _meta_without_padding_check),),
        modules=("entresol_proto.seal.header",),
    ),
    Target(
        name="sealed_block", share=20, seeds=lambda: list(sealed_blocks()), make=blocks_parser,
        fix=fix_header, canaries=(lambda: patch.object(sealing, "_zero", _no_zeros),),
        modules=("entresol_proto.seal.block", "entresol_proto.seal.header"),
    ),
    Target(
        name="codec_plane", share=40, seeds=lambda: codec_seeds(codecs.PLANE),
        make=lambda: codec_parser(codecs.PLANE),
        canaries=(lambda: patch.object(zstd, "decompress_exact", _trusts_the_frame),),
        modules=(plane.__name__, zstd.__name__),
    ),
    Target(
        name="codec_zstd", share=40, seeds=lambda: codec_seeds(codecs.ZSTD),
        make=lambda: codec_parser(codecs.ZSTD),
        canaries=(lambda: patch.object(zstd, "decompress_exact", _trusts_the_frame),),
        modules=(zstd.__name__,),
    ),
)  # fmt: skip
