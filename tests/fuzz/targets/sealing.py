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

import numpy as np

from entresol_proto import limits, native
from entresol_proto.ids import pack_token_ids
from entresol_proto.seal import block as sealing
from entresol_proto.seal import codecs, header
from entresol_proto.seal.codecs import ladder, ladder_twin, plane, zstd
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
    """One per codec and length; one chunk, a cut last chunk; with and without
    meta."""
    found = []
    meta = BlockMeta(b"parent-key", 3, 4, pack_token_ids((1, 2, 3, 4)))
    for codec_id in (codecs.RAW, codecs.ZSTD, codecs.PLANE, codecs.FAST, codecs.DENSE):
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
        BlockMeta(b"", 0, 0, b"").encode(),
        BlockMeta(b"p" * 8, 1, 16, pack_token_ids(range(16))).encode(),
        BlockMeta(b"p" * 64, 2**32 - 1, 2**32 - 1, pack_token_ids((2**32 - 1,) * 64)).encode(),
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
    sealed = BlockMeta(b"parent-key", 3, 4, pack_token_ids((1, 2, 3, 4)))
    assert meta == sealed, "a meta that was never sealed"
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


def ladder_seeds() -> list[bytes]:
    """Chunks of exponents in rows of 64 and without rows, of every kind."""
    rng = Random(1)
    exponents = bytes(rng.choice((120, 121, 122, 123, 124)) + at % 64 // 22 for at in range(4096))
    found = []
    for number, dtype in enumerate(DTYPES):
        kind = ladder._KINDS.get(dtype)
        for size in (64, 1001, 4096) if kind is not None else ():
            words = rng.randbytes(size)
            values = [
                e << 7 | w & 0x7F | (w & 0x80) << 8 for e, w in zip(exponents, words, strict=False)
            ]
            plain = b"".join(v.to_bytes(2, "little") for v in values)[:size]
            for by_channel in (False, True):
                made = ladder_twin.encode(memoryview(plain), kind or 0, by_channel, 3 * size + 200)
                if made is not None:
                    found.append(bytes([number]) + struct.pack("<H", size) + made)
    return found


def ladder_parser() -> Parser:
    """Refused or decoded, and the kernel, with vectors and without, says the same as numpy."""
    guard = b"\x5a" * 64

    def one(raw: bytes, kind: int, size: int, way: str) -> bytes | None:
        memory = bytearray(guard + bytes(size) + guard)
        into = memoryview(memory)[64 : 64 + size]
        problem = ""
        try:
            if way == "numpy" or native.KERNEL is None:
                ladder_twin.decode_into(memoryview(raw)[3:], kind, into)
            else:
                native.KERNEL.portable = way == "portable"
                problem = native.KERNEL.ladder_decode(memoryview(raw)[3:], kind, into)
        except CodecError as error:
            problem = str(error)
        finally:
            if native.KERNEL is not None:
                native.KERNEL.portable = False
        assert memory[:64] == guard, "wrote before the destination"
        assert memory[64 + size :] == guard, "wrote behind the destination"
        return None if problem else bytes(into)

    def parse(raw: bytes) -> str:
        if len(raw) < 3:
            return "short"
        kind = ladder._KINDS.get(DTYPES[raw[0] % len(DTYPES)])
        if kind is None:
            return "no kind"
        size = min(1 + int.from_bytes(raw[1:3], "little"), 2 * CHUNK) - 1 or 1
        found = [one(raw, kind, size, way) for way in ("numpy", "vectors", "portable")]
        assert found[0] == found[1] == found[2], "the kernel and its twin disagree"
        return f"refused {kind}" if found[0] is None else f"ok {kind}"

    return parse


def _no_end(self: ladder_twin._Reader, size: int) -> object:
    """Believes that there is as much as asked for."""
    piece, self.data = self.data[:size], self.data[size:]
    return np.concatenate([piece, np.zeros(size - len(piece), np.uint8)])


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
    ids = raw[header.META_BYTES_FIXED : header.META_BYTES_FIXED + 4 * count]
    return BlockMeta(padded[:size], position, tokens, ids)


TARGETS = (
    Target(
        name="sealed_header", share=45, seeds=header_seeds, make=header_parser, fix=fix_header,
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
        name="codec_plane", share=25, seeds=lambda: codec_seeds(codecs.PLANE),
        make=lambda: codec_parser(codecs.PLANE),
        canaries=(lambda: patch.object(zstd, "decompress_exact", _trusts_the_frame),),
        modules=(plane.__name__, zstd.__name__),
    ),
    Target(
        name="codec_ladder", share=30, seeds=ladder_seeds, make=ladder_parser,
        canaries=(lambda: patch.object(ladder_twin._Reader, "take", _no_end),),
        modules=(ladder.__name__, ladder_twin.__name__),
    ),
    Target(
        name="codec_zstd", share=25, seeds=lambda: codec_seeds(codecs.ZSTD),
        make=lambda: codec_parser(codecs.ZSTD),
        canaries=(lambda: patch.object(zstd, "decompress_exact", _trusts_the_frame),),
        modules=(zstd.__name__,),
    ),
)  # fmt: skip
