"""The plain header of a sealed block, and the meta sealed beside the data.

Invariant: `SealedHeader.parse` bounds every length before using it and accepts exactly one byte
form of each header (no unknown flag, no non-zero padding), so an accepted header re-encodes to its
own bytes. Parsed is not authenticated: only a chunk or meta that opens proves a header.

Byte layout: proto/FORMAT.md, "Sealed block".
"""

from __future__ import annotations

import hmac
import struct
import zlib
from dataclasses import dataclass, field

from entresol_proto import limits
from entresol_proto.ids import unpack_token_ids
from entresol_proto.seal import codecs
from entresol_proto.seal.dtypes import DType
from entresol_proto.seal.keys import COMMITMENT_BYTES, SALT_BYTES
from entresol_proto.status import SealError, Status

MAGIC = b"ENTS"
VERSION = 1
FLAG_HOST_SEALED = 1  # sealed under a key of the tenant's own: no daemon can open it
TAG_BYTES = 16

_FIXED = struct.Struct("<4sHBBIIQQIIII16s16s32s16sB7s64s")
_CRC = struct.Struct("<I")
_META_FIXED = struct.Struct("<B3xIII64s")
_RESERVED, _PADDING = bytes(7), bytes(limits.ENGINE_KEY_BYTES_MAX)
_DTYPES = {int(dtype): dtype for dtype in DType}

HEADER_BYTES_MIN = _FIXED.size + 4 + _CRC.size
HEADER_BYTES_MAX = _FIXED.size + 4 * limits.CHUNKS_PER_BLOCK_MAX + _CRC.size
META_BYTES_FIXED = _META_FIXED.size
META_BYTES_MAX = _META_FIXED.size + 4 * limits.TOKENS_PER_BLOCK_MAX


# Not frozen, because one is made per block: a frozen one takes several times as long.
@dataclass(slots=True)
class BlockIdentity:
    """What a block is, as its header states and every tag authenticates."""

    namespace_id: bytes  # 16 bytes
    wire_key: bytes  # 16 bytes
    engine_key: bytes = field(repr=False)  # 8 to 64 bytes, in full
    dtype: DType
    dek_version: int  # which of the tenant's data keys; u32
    host_sealed: bool = False  # the data key is the tenant's own; the engine key is masked

    def __post_init__(self) -> None:
        if (
            len(self.namespace_id) != limits.NAMESPACE_ID_BYTES
            or len(self.wire_key) != limits.WIRE_KEY_BYTES
            or not _engine_key_bytes_ok(len(self.engine_key))
            or not 0 <= self.dek_version < 2**32
        ):
            raise SealError("block identity is out of range", status=Status.BAD_REQUEST)


def _engine_key_bytes_ok(size: int) -> bool:
    return limits.ENGINE_KEY_BYTES_MIN <= size <= limits.ENGINE_KEY_BYTES_MAX


def _is_engine_key(padded: bytes, size: int) -> bool:
    return _engine_key_bytes_ok(size) and padded.endswith(_PADDING[size:])


# Not frozen, because one is made per block: a frozen one takes several times as long.
@dataclass(slots=True)
class BlockMeta:
    """What routers need to know about a block. Sealed, because token ids are the prompt."""

    parent: bytes  # engine key of the block before it, 8 to 64 bytes; empty at the root
    position: int  # index of the block in its sequence
    block_tokens: int
    token_ids_u32le: bytes = field(repr=False)  # `ids.pack_token_ids`

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids as integers (unpacked on every call)."""
        return unpack_token_ids(self.token_ids_u32le)

    def encode(self) -> bytes:
        """The plain bytes of the meta.

        Raises: SealError (BAD_REQUEST, TOO_LARGE) when a field is out of range.
        """
        count, odd = divmod(len(self.token_ids_u32le), 4)
        size = len(self.parent)
        if size and not limits.ENGINE_KEY_BYTES_MIN <= size <= limits.ENGINE_KEY_BYTES_MAX:
            raise SealError(f"parent key is {size} bytes", status=Status.BAD_REQUEST)
        if count > limits.TOKENS_PER_BLOCK_MAX:
            raise SealError(f"{count} token ids in one block", status=Status.TOO_LARGE)
        if odd:
            raise SealError("token ids are not 4 bytes each", status=Status.BAD_REQUEST)
        try:
            fixed = _META_FIXED.pack(size, self.position, self.block_tokens, count, self.parent)
            return fixed + self.token_ids_u32le
        except struct.error:
            raise SealError("block meta is out of range", status=Status.BAD_REQUEST) from None

    @classmethod
    def decode(cls, raw: bytes | memoryview) -> BlockMeta:
        """Inverse of `encode`.

        Raises: SealError when `raw` is not exactly one encoded meta.
        """
        if not META_BYTES_FIXED <= len(raw) <= META_BYTES_MAX:
            raise SealError(f"block meta of {len(raw)} bytes")
        size, position, block_tokens, count, padded = _META_FIXED.unpack_from(raw)
        parent = padded[:size]
        sane = size == 0 or limits.ENGINE_KEY_BYTES_MIN <= size <= limits.ENGINE_KEY_BYTES_MAX
        if not sane or any(padded[size:]) or any(raw[1:4]):
            raise SealError("block meta has a malformed parent key")
        if len(raw) != META_BYTES_FIXED + 4 * count:
            raise SealError("block meta has a wrong token count")
        return cls(parent, position, block_tokens, bytes(raw[META_BYTES_FIXED:]))


# Not frozen, because one is made per opening of a block: a frozen one takes a microsecond more.
@dataclass(slots=True)
class SealedHeader:
    """A well-formed header: every length is within its limit and agrees with the others."""

    namespace_id: bytes
    wire_key: bytes
    engine_key: bytes = field(repr=False)
    dtype: DType
    codec_id: int
    dek_version: int
    plain_bytes: int
    payload_bytes: int  # all stored chunks, tags included
    chunk_bytes: int  # plaintext per chunk; the last chunk may hold less
    meta_bytes: int  # stored meta, tag included; 0 when there is none
    salt: bytes = field(repr=False)
    commitment: bytes = field(repr=False)
    chunk_stored_bytes: tuple[int, ...] = field(repr=False)
    aad: bytes = field(repr=False)  # the header without its CRC, a private copy
    host_sealed: bool = False

    @property
    def header_bytes(self) -> int:
        """Length of the header, CRC included."""
        return len(self.aad) + _CRC.size

    @property
    def sealed_bytes(self) -> int:
        """Length of the whole sealed block: header, meta, chunks."""
        return len(self.aad) + _CRC.size + self.meta_bytes + self.payload_bytes

    @property
    def chunk_count(self) -> int:
        """Number of chunks, at least 1."""
        return len(self.chunk_stored_bytes)

    def chunk_plain_bytes(self, index: int) -> int:
        """Plaintext length of one chunk; its plaintext begins at index * chunk_bytes."""
        return min(self.chunk_bytes, self.plain_bytes - index * self.chunk_bytes)

    def chunk_span(self, index: int) -> tuple[int, int]:
        """Offset in the sealed block, and stored length (tag included), of one chunk."""
        before_bytes = sum(self.chunk_stored_bytes[:index])
        start = self.header_bytes + self.meta_bytes + before_bytes
        return start, self.chunk_stored_bytes[index]

    @classmethod
    def parse(cls, view: memoryview | bytes | bytearray) -> SealedHeader:
        """Read a header from the start of `view`, which may hold only the header, or more.

        `view` is bytes-like with items of one byte; what is needed of it is copied, of at most
        HEADER_BYTES_MAX bytes. Raises: SealError for anything but a canonical header of this
        version whose codec and dtype this build knows.
        """
        if len(view) < HEADER_BYTES_MIN:
            raise SealError("sealed block is shorter than a header")
        (
            magic,
            version,
            codec_id,
            dtype_id,
            flags,
            header_bytes,
            plain_bytes,
            payload_bytes,
            chunk_bytes,
            chunk_count,
            meta_bytes,
            dek_version,
            namespace_id,
            wire_key,
            salt,
            commitment,
            engine_key_bytes,
            reserved,
            engine_key,
        ) = _FIXED.unpack_from(view)
        if magic != MAGIC or version != VERSION:
            raise SealError("not a sealed block of version 1")
        if (
            not 1 <= chunk_count <= limits.CHUNKS_PER_BLOCK_MAX
            or header_bytes != _FIXED.size + 4 * chunk_count + _CRC.size
            or header_bytes > len(view)
        ):
            raise SealError("sealed header has an impossible length")
        aad = bytes(view[: header_bytes - _CRC.size])
        if zlib.crc32(aad) != _CRC.unpack_from(view, len(aad))[0]:
            raise SealError("sealed header fails its checksum")
        dtype = _DTYPES.get(dtype_id)
        if (
            flags & ~FLAG_HOST_SEALED
            or reserved != _RESERVED
            or dtype is None
            or not codecs.known(codec_id)
        ):
            raise SealError("sealed header names a codec, dtype or flag this build does not know")
        if not _is_engine_key(engine_key, engine_key_bytes):
            raise SealError("sealed header has a malformed engine key")
        stored = struct.unpack_from(f"<{chunk_count}I", aad, _FIXED.size)
        _check_lengths(plain_bytes, payload_bytes, chunk_bytes, meta_bytes, stored, codec_id)
        return cls(
            namespace_id,
            wire_key,
            engine_key[:engine_key_bytes],
            dtype,
            codec_id,
            dek_version,
            plain_bytes,
            payload_bytes,
            chunk_bytes,
            meta_bytes,
            salt,
            commitment,
            stored,
            aad,
            bool(flags),
        )


def _check_lengths(
    plain_bytes: int,
    payload_bytes: int,
    chunk_bytes: int,
    meta_bytes: int,
    stored: tuple[int, ...],
    codec_id: int,
) -> None:
    """Raises: SealError unless all lengths are in range and agree."""
    if not limits.BLOCK_BYTES_MIN <= plain_bytes <= limits.BLOCK_BYTES_MAX:
        raise SealError(f"sealed header states a block of {plain_bytes} bytes")
    if (
        not limits.CHUNK_BYTES_MIN <= chunk_bytes <= limits.CHUNK_BYTES_MAX
        or len(stored) != -(-plain_bytes // chunk_bytes)
        or sum(stored) != payload_bytes
    ):
        raise SealError("sealed header has chunks that do not add up")
    if meta_bytes and not META_BYTES_FIXED <= meta_bytes - TAG_BYTES <= META_BYTES_MAX:
        raise SealError(f"sealed header states a meta of {meta_bytes} bytes")
    full_bytes = chunk_bytes + TAG_BYTES
    last_bytes = plain_bytes - (len(stored) - 1) * chunk_bytes + TAG_BYTES
    if codec_id == codecs.RAW:
        fits = payload_bytes == plain_bytes + len(stored) * TAG_BYTES
    else:
        fits = min(stored) > TAG_BYTES
    if not fits or stored[-1] > last_bytes or max(stored) > full_bytes:
        raise SealError("sealed header has a chunk of an impossible length")


def encode_header(
    identity: BlockIdentity,
    *,
    codec_id: int,
    plain_bytes: int,
    chunk_bytes: int,
    meta_bytes: int,
    salt: bytes,
    commitment: bytes,
    chunk_stored_bytes: list[int],
) -> bytes:
    """The bytes of a header, CRC included. The caller has checked the ranges."""
    assert len(salt) == SALT_BYTES
    assert len(commitment) == COMMITMENT_BYTES
    count = len(chunk_stored_bytes)
    aad = _FIXED.pack(
        MAGIC,
        VERSION,
        codec_id,
        identity.dtype,
        FLAG_HOST_SEALED if identity.host_sealed else 0,
        _FIXED.size + 4 * count + _CRC.size,
        plain_bytes,
        sum(chunk_stored_bytes),
        chunk_bytes,
        count,
        meta_bytes,
        identity.dek_version,
        identity.namespace_id,
        identity.wire_key,
        salt,
        commitment,
        len(identity.engine_key),
        b"",
        identity.engine_key,
    ) + struct.pack(f"<{count}I", *chunk_stored_bytes)
    return aad + _CRC.pack(zlib.crc32(aad))


def check_header(
    header: SealedHeader,
    *,
    namespace_id: bytes,
    wire_key: bytes,
    plain_bytes: int | None = None,
    commitment: bytes | None = None,
    engine_key: bytes | None = None,
    host_sealed: bool | None = None,
) -> Status:
    """Whether the header is that of the block asked for; None leaves a field unchecked.

    Returns OK; CORRUPT when the block is another one, of another length or under another key;
    CONFLICT when everything agrees except the engine key, that is, two engine keys met in one wire
    key. The answer rests on bytes that are not yet authenticated.
    """
    if header.namespace_id != namespace_id or header.wire_key != wire_key:
        return Status.CORRUPT
    if plain_bytes is not None and header.plain_bytes != plain_bytes:
        return Status.CORRUPT
    if host_sealed is not None and header.host_sealed != host_sealed:
        return Status.CORRUPT
    if commitment is not None and not hmac.compare_digest(header.commitment, commitment):
        return Status.CORRUPT
    if engine_key is not None and header.engine_key != engine_key:
        return Status.CONFLICT
    return Status.OK
