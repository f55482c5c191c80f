"""The sealed block: the only form in which KV bytes leave a tenant's hands.

Plain header (header.py), optional sealed meta, sealed chunks. AES-256-GCM per chunk, under a key
that is used for this one block.

Invariants:
- Every header byte except the CRC is associated data of every AEAD call, so no field, length, order
  or codec can change without the chunks becoming unopenable.
- Nonces (chunk number, kind, final flag) never repeat under one key, because a key seals one block.
- Nothing is decompressed before its tag verified; behind any status but OK, `open_into` leaves
  zeros, never unverified bytes.

The memory of a sealed block must not change while it is being opened: the cipher reads it twice.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from entresol_proto import limits
from entresol_proto.limits import CHUNK_BYTES_DEFAULT
from entresol_proto.seal import codecs
from entresol_proto.seal.codecs.base import CodecOutput, worth_it
from entresol_proto.seal.header import (
    HEADER_BYTES_MAX,
    HEADER_BYTES_MIN,
    META_BYTES_FIXED,
    META_BYTES_MAX,
    TAG_BYTES,
    BlockIdentity,
    BlockMeta,
    SealedHeader,
    check_header,
    encode_header,
)
from entresol_proto.seal.keys import (
    COMMITMENT_BYTES,
    DEK_BYTES,
    HOST_KEY_LABEL,
    KEY_BYTES,
    SALT_BYTES,
    BlockKey,
    Salts,
    derive_block_key,
    derive_key_and_commitment,
    new_salt,
)
from entresol_proto.status import CodecError, SealError, Status

if not hasattr(AESGCM, "encrypt_into"):
    raise ImportError("entresol needs cryptography 47 or newer (AESGCM.encrypt_into, decrypt_into)")

__all__ = [
    "CHUNK_BYTES_DEFAULT",
    "COMMITMENT_BYTES",
    "DEK_BYTES",
    "HEADER_BYTES_MAX",
    "HEADER_BYTES_MIN",
    "HOST_KEY_LABEL",
    "KEY_BYTES",
    "META_BYTES_MAX",
    "SALT_BYTES",
    "TAG_BYTES",
    "BlockIdentity",
    "BlockKey",
    "BlockMeta",
    "KeyOf",
    "Salts",
    "SealedHeader",
    "check_header",
    "derive_block_key",
    "derive_key_and_commitment",
    "new_salt",
    "open_chunk_into",
    "open_into",
    "open_meta",
    "seal_into",
    "sealed_bytes_max",
]

KeyOf = Callable[[SealedHeader], BlockKey | Status]
"""For whoever derives block keys itself: the key of a header, or why there is none."""

_NONCE = struct.Struct("<IBB6x")
_KIND_DATA = 0
_KIND_META = 1
_META_NONCE = _NONCE.pack(0, _KIND_META, 1)


def sealed_bytes_max(
    plain_bytes: int,
    *,
    chunk_bytes: int = CHUNK_BYTES_DEFAULT,
    meta_tokens: int = 0,
    engine_key_bytes: int = limits.ENGINE_KEY_BYTES_MAX,
) -> int:
    """The most bytes a block of `plain_bytes` can seal to, whatever its content and codec.

    Room for a meta with `meta_tokens` token ids is always included. What is allocated before the
    data is seen. The engine key's length is only checked: every header has room for the longest.

    Raises: SealError (TOO_LARGE, BAD_REQUEST) when no such block may exist.
    """
    count = _chunk_count(plain_bytes, chunk_bytes)
    if not 0 <= meta_tokens <= limits.TOKENS_PER_BLOCK_MAX:
        raise SealError(f"{meta_tokens} token ids in one block", status=Status.TOO_LARGE)
    if not limits.ENGINE_KEY_BYTES_MIN <= engine_key_bytes <= limits.ENGINE_KEY_BYTES_MAX:
        raise SealError(f"engine key of {engine_key_bytes} bytes", status=Status.BAD_REQUEST)
    header_bytes = HEADER_BYTES_MIN + 4 * (count - 1)
    meta_bytes = META_BYTES_FIXED + 4 * meta_tokens + TAG_BYTES
    return header_bytes + meta_bytes + plain_bytes + count * TAG_BYTES


def _chunk_count(plain_bytes: int, chunk_bytes: int) -> int:
    """Chunks of a block. Raises: SealError when a length is out of range."""
    if not limits.CHUNK_BYTES_MIN <= chunk_bytes <= limits.CHUNK_BYTES_MAX:
        raise SealError(f"chunks of {chunk_bytes} bytes", status=Status.BAD_REQUEST)
    if plain_bytes < limits.BLOCK_BYTES_MIN:
        raise SealError(f"a block of {plain_bytes} bytes", status=Status.BAD_REQUEST)
    count = -(-plain_bytes // chunk_bytes)
    if plain_bytes > limits.BLOCK_BYTES_MAX or count > limits.CHUNKS_PER_BLOCK_MAX:
        raise SealError(
            f"a block of {plain_bytes} bytes in chunks of {chunk_bytes}", status=Status.TOO_LARGE
        )
    return count


def _bytes_view(view: memoryview | bytearray | bytes) -> memoryview:
    """The same memory as bytes; raises TypeError when it is not contiguous."""
    flat = memoryview(view)
    return flat if flat.format == "B" and flat.ndim == 1 and flat.contiguous else flat.cast("B")


def seal_into(
    out: memoryview,
    plain: memoryview,
    *,
    identity: BlockIdentity,
    block_key: BlockKey,
    salt: bytes,
    codec_id: int,
    meta: BlockMeta | None,
    chunk_bytes: int = CHUNK_BYTES_DEFAULT,
) -> SealedHeader:
    """Seal `plain` into the start of `out` and return the header written there.

    `out` must be writable, must not overlap `plain`, and needs `sealed_bytes_max` bytes to be
    certain to fit; what lies behind `sealed_bytes` is left alone. `block_key` is
    `derive_block_key(dek, salt)` of a salt used for this call and no other. When the codec gains
    less than 3 % on the block, the block is stored raw; the header says so. Bulk work releases the
    GIL. With the raw codec nothing is copied on the way.

    Raises: SealError (BAD_REQUEST, TOO_LARGE) for lengths out of range, or when `out` is too short
    (then `out` is untouched); CodecError for an unknown codec.
    """
    out, plain = _bytes_view(out), _bytes_view(plain)
    count = _chunk_count(len(plain), chunk_bytes)
    if len(salt) != SALT_BYTES:
        raise SealError("salt is not 32 bytes", status=Status.BAD_REQUEST)
    meta_plain = meta.encode() if meta is not None else b""
    meta_bytes = len(meta_plain) + TAG_BYTES if meta_plain else 0
    pieces: list[CodecOutput] = [
        plain[start : start + chunk_bytes] for start in range(0, len(plain), chunk_bytes)
    ]
    if codec_id != codecs.RAW:
        codec_id, pieces = _encode(plain, pieces, codec_id, identity)
    raw = encode_header(
        identity,
        codec_id=codec_id,
        plain_bytes=len(plain),
        chunk_bytes=chunk_bytes,
        meta_bytes=meta_bytes,
        salt=salt,
        commitment=block_key.commitment,
        chunk_stored_bytes=[len(piece) + TAG_BYTES for piece in pieces],
    )
    header = SealedHeader.parse(raw)
    if len(out) < header.sealed_bytes:
        raise SealError(
            f"sealed block of {header.sealed_bytes} bytes for a space of {len(out)}",
            status=Status.TOO_LARGE,
        )
    at = len(raw)
    out[:at] = raw
    aead = AESGCM(block_key.key)
    if meta_plain:
        aead.encrypt_into(_META_NONCE, meta_plain, header.aad, out[at : at + meta_bytes])
        at += meta_bytes
    for index, piece in enumerate(pieces):
        end = at + len(piece) + TAG_BYTES
        nonce = _NONCE.pack(index, _KIND_DATA, index == count - 1)
        aead.encrypt_into(nonce, piece, header.aad, out[at:end])
        at = end
    assert at == header.sealed_bytes
    return header


def _encode(
    plain: memoryview, raw_pieces: list[CodecOutput], codec_id: int, identity: BlockIdentity
) -> tuple[int, list[CodecOutput]]:
    """Encoded pieces (a piece that gains nothing stays raw), or raw for the whole block: also when
    neither the first nor the last gains, so that incompressible blocks cost two looks."""
    codec = codecs.get(codec_id)
    if codec.hopeless(memoryview(raw_pieces[0]), memoryview(raw_pieces[-1]), identity.dtype):
        return codecs.RAW, raw_pieces
    pieces: list[CodecOutput] = []
    for piece in raw_pieces:
        if len(pieces) == 1 < len(raw_pieces) - 1 and pieces[0] is raw_pieces[0]:
            last = memoryview(raw_pieces[-1])
            if codec.encode(last, identity.dtype) is None:
                return codecs.RAW, raw_pieces
        encoded = codec.encode(memoryview(piece), identity.dtype)
        assert encoded is None or len(encoded) < len(piece)
        pieces.append(piece if encoded is None else encoded)
    if worth_it(len(plain), sum(map(len, pieces))):
        return codec_id, pieces
    return codecs.RAW, raw_pieces


def _open_chunk(
    aead: AESGCM, header: SealedHeader, index: int, stored: memoryview, into: memoryview
) -> None:
    """Open one chunk whose stored and plain lengths are already right.

    Raises: InvalidTag, CodecError.
    """
    nonce = _NONCE.pack(index, _KIND_DATA, index == len(header.chunk_stored_bytes) - 1)
    encoded_bytes = len(stored) - TAG_BYTES
    if encoded_bytes == len(into):  # only a raw piece is as long as its plaintext
        aead.decrypt_into(nonce, stored, header.aad, into)
        return
    encoded = aead.decrypt(nonce, stored, header.aad)
    codecs.get(header.codec_id).decode_into(memoryview(encoded), into, header.dtype)


def _zero(into: memoryview) -> None:
    if len(into):
        np.frombuffer(into, np.uint8).fill(0)


def open_into(
    sealed: memoryview,
    into: memoryview,
    *,
    namespace_id: bytes,
    wire_key: bytes,
    engine_key: bytes | None,
    block_key: BlockKey | KeyOf,
) -> Status:
    """Verify and open a whole sealed block into `into`.

    `sealed` begins at the header and may be longer than the block (padding is ignored). `into` must
    be writable, must not overlap `sealed`, and its length must be the block's plain length.

    Returns OK with the exact bytes in place; CORRUPT when the bytes are damaged, cut short, of
    another block, namespace, length or key; CONFLICT when the header has the wire key asked for but
    another engine key; what `block_key` answered instead of a key. On anything but OK all of `into`
    is zeroed. Never raises for bad bytes. Bulk work releases the GIL.

    Raises: TypeError when `into` is read-only or not contiguous (a caller's bug).
    """
    sealed, into = _bytes_view(sealed), _bytes_view(into)
    if into.readonly:
        raise TypeError("the destination is read-only")
    status = Status.CORRUPT
    try:
        header = SealedHeader.parse(sealed)
        key = block_key if isinstance(block_key, BlockKey) else block_key(header)
        if isinstance(key, BlockKey):
            status = check_header(
                header,
                namespace_id=namespace_id,
                wire_key=wire_key,
                plain_bytes=len(into),
                commitment=key.commitment,
                engine_key=engine_key,
            )
            if status is Status.OK:
                status = _open_all(sealed, into, header, key)
        else:
            status = key
    except (SealError, InvalidTag):
        status = Status.CORRUPT
    finally:
        # Also when something unforeseen passes through: no unverified byte stays behind.
        if status is not Status.OK:
            _zero(into)
    return status


def _open_all(
    sealed: memoryview, into: memoryview, header: SealedHeader, block_key: BlockKey
) -> Status:
    """Open every chunk. Raises: InvalidTag, CodecError."""
    if len(sealed) < header.sealed_bytes:
        return Status.CORRUPT
    aead = AESGCM(block_key.key)
    at = header.header_bytes + header.meta_bytes
    start, step, size = 0, header.chunk_bytes, header.plain_bytes
    for index, stored_bytes in enumerate(header.chunk_stored_bytes):
        end = start + step if start + step < size else size
        _open_chunk(aead, header, index, sealed[at : at + stored_bytes], into[start:end])
        at += stored_bytes
        start = end
    return Status.OK


def open_chunk_into(
    stored: memoryview,
    into: memoryview,
    *,
    header: SealedHeader,
    index: int,
    block_key: BlockKey,
) -> Status:
    """Verify and open one chunk, for range reads and for opening chunks as they land.

    `stored` is exactly the bytes at `header.chunk_span(index)`, `into` exactly
    `header.chunk_plain_bytes(index)` long. The caller has checked `header` with `check_header`; an
    OK here authenticates all of it.

    Returns OK, or CORRUPT with `into` zeroed. Never raises for bad bytes.

    Raises: TypeError when `into` is read-only or not contiguous (a caller's bug).
    """
    stored, into = _bytes_view(stored), _bytes_view(into)
    if into.readonly:
        raise TypeError("the destination is read-only")
    status = Status.CORRUPT
    try:
        if (
            0 <= index < header.chunk_count
            and len(stored) == header.chunk_stored_bytes[index]
            and len(into) == header.chunk_plain_bytes(index)
            and header.commitment == block_key.commitment
        ):
            _open_chunk(AESGCM(block_key.key), header, index, stored, into)
            status = Status.OK
    except (InvalidTag, CodecError):
        status = Status.CORRUPT
    finally:
        if status is not Status.OK:
            _zero(into)
    return status


def open_meta(sealed: memoryview, header: SealedHeader, block_key: BlockKey) -> BlockMeta:
    """Verify and decode the meta of a block; `sealed` needs to reach only to the meta's end.

    Raises: SealError when there is none, or it is cut short or does not verify.
    """
    end = header.header_bytes + header.meta_bytes
    if header.meta_bytes == 0:
        raise SealError("block has no meta", status=Status.MISS)
    if header.commitment != block_key.commitment or len(sealed) < end:
        raise SealError("block meta is cut short, or under another key")
    try:
        raw = AESGCM(block_key.key).decrypt(
            _META_NONCE, _bytes_view(sealed)[header.header_bytes : end], header.aad
        )
    except InvalidTag:
        raise SealError("block meta does not verify") from None
    return BlockMeta.decode(raw)
