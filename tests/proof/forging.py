"""Sealed blocks as a forger makes them, who has every other block, every header and other keys.

Invariant: a forger here knows all bytes ever stored, may rewrite every plain field and its
checksum, and has the keys of other blocks and tenants; not the key of the block asked for. What it
makes never equals the genuine block, so whatever opens is a forgery that was accepted.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from entresol_proto.ids import EngineKey, pack_token_ids, wire_key
from entresol_proto.seal import codecs, header
from entresol_proto.seal.block import (
    BlockIdentity,
    BlockKey,
    BlockMeta,
    SealedHeader,
    check_header,
    derive_block_key,
    open_chunk_into,
    open_into,
    seal_into,
    sealed_bytes_max,
)
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import SealError, Status

CHUNK_BYTES = 4096
_FIELDS = (
    "magic", "version", "codec", "dtype", "flags", "header_bytes", "plain_bytes", "payload_bytes",
    "chunk_bytes", "chunk_count", "meta_bytes", "dek_version", "namespace_id", "wire_key", "salt",
    "commitment", "engine_key_bytes", "reserved", "engine_key",
)  # fmt: skip
_IDENTITY = ("namespace_id", "wire_key", "engine_key", "engine_key_bytes", "dek_version")


@dataclass(frozen=True, slots=True)
class Secrets:
    """A namespace of a tenant: what names its blocks, and the key that seals them."""

    namespace_id: bytes
    naming: bytes
    dek: bytes
    dek_version: int


@dataclass(frozen=True, slots=True)
class Genuine:
    """A block as its tenant sealed it, and what its reader will ask with."""

    home: Secrets
    engine_key: bytes
    name: bytes
    key: BlockKey
    plain: bytes
    sealed: bytes

    def accepts(self, forged: bytes) -> bool:
        """Whether a reader who asks for this block takes other bytes for it, whole or by chunk."""
        if forged == self.sealed:
            return False  # it is the block
        into = bytearray(len(self.plain))
        status = open_into(
            memoryview(forged), memoryview(into), namespace_id=self.home.namespace_id,
            wire_key=self.name, engine_key=self.engine_key, block_key=self.key,
        )  # fmt: skip
        assert status is Status.OK or not any(into), "unverified bytes were left behind"
        return status is Status.OK or self._accepts_a_chunk(forged)

    def _accepts_a_chunk(self, forged: bytes) -> bool:
        """As blocks are opened that land in pieces. A genuine chunk of this block is no forgery."""
        try:
            found = SealedHeader.parse(forged)
        except SealError:
            return False
        checked = check_header(
            found, namespace_id=self.home.namespace_id, wire_key=self.name,
            plain_bytes=len(self.plain), commitment=self.key.commitment, engine_key=self.engine_key,
        )  # fmt: skip
        if checked is not Status.OK:
            return False
        for index in range(found.chunk_count):
            at, stored = found.chunk_span(index)
            piece = forged[at : at + stored]
            into = bytearray(found.chunk_plain_bytes(index))
            opened = open_chunk_into(
                memoryview(piece), memoryview(into), header=found, index=index, block_key=self.key
            )
            start = index * found.chunk_bytes
            if opened is Status.OK and bytes(into) != self.plain[start : start + len(into)]:
                return True
        return False


def genuine(
    rng: random.Random, home: Secrets, engine_key: bytes, chunks: int, *, codec: int = codecs.RAW
) -> Genuine:
    """Seal a block of `chunks` full chunks."""
    plain = rng.randbytes(CHUNK_BYTES * chunks // 4) + bytes(CHUNK_BYTES * chunks * 3 // 4)
    salt = rng.randbytes(32)
    key = derive_block_key(home.dek, salt)
    name = wire_key(home.naming, EngineKey(engine_key))
    room = memoryview(
        bytearray(sealed_bytes_max(len(plain), chunk_bytes=CHUNK_BYTES, meta_tokens=4))
    )
    made = seal_into(
        room, memoryview(plain),
        identity=BlockIdentity(home.namespace_id, name, engine_key, DType.BF16, home.dek_version),
        block_key=key, salt=salt, codec_id=codec,
        meta=BlockMeta(b"", 0, 16, pack_token_ids((1, 2, 3, 4))),
        chunk_bytes=CHUNK_BYTES,
    )  # fmt: skip
    return Genuine(home, engine_key, name, key, plain, bytes(room[: made.sealed_bytes]))


class Parts:
    """A sealed block taken apart, to be put together in another way with a right checksum."""

    def __init__(self, sealed: bytes) -> None:
        parsed = SealedHeader.parse(sealed)
        values = header._FIXED.unpack_from(sealed)
        self.fields = dict(zip(_FIELDS, values, strict=True))
        self.lengths = list(parsed.chunk_stored_bytes)
        start = parsed.header_bytes
        self.meta = sealed[start : start + parsed.meta_bytes]
        self.chunks = []
        for index in range(parsed.chunk_count):
            at, stored = parsed.chunk_span(index)
            self.chunks.append(sealed[at : at + stored])

    def take(self, other: Parts, *names: str) -> None:
        """Header fields of another block."""
        for name in names:
            self.fields[name] = other.fields[name]

    def fit(self) -> None:
        """Make counts and lengths agree with the chunks that are here now."""
        self.lengths = [len(chunk) for chunk in self.chunks]
        count = len(self.chunks)
        self.fields |= {
            "chunk_count": count, "payload_bytes": sum(self.lengths), "meta_bytes": len(self.meta),
            "header_bytes": header._FIXED.size + 4 * count + 4,
        }  # fmt: skip

    def join(self) -> bytes:
        """The bytes, with the checksum of what they say."""
        head = header._FIXED.pack(*self.fields.values())
        head += struct.pack(f"<{len(self.lengths)}I", *self.lengths)
        return head + struct.pack("<I", zlib.crc32(head)) + self.meta + b"".join(self.chunks)


@dataclass(frozen=True, slots=True)
class Shelf:
    """What a forger has: the block that will be asked for, and others of the same shape."""

    rng: random.Random
    target: Genuine
    sibling: Genuine  # same namespace, another key
    cousin: Genuine  # same tenant and engine key, another namespace
    elder: Genuine  # same name, sealed before under an older key version
    stranger: Genuine  # same engine key, another tenant
    own_dek: bytes  # a key of the forger's own

    @property
    def others(self) -> tuple[Genuine, ...]:
        return self.sibling, self.cousin, self.elder, self.stranger

    def parts(self) -> tuple[Parts, Parts]:
        """The target and any other block, taken apart."""
        return Parts(self.target.sealed), Parts(self.rng.choice(self.others).sealed)


def shelf(rng: random.Random) -> Shelf:
    """A fresh one; every block has the same number of chunks and the same codec."""
    home = Secrets(rng.randbytes(16), rng.randbytes(32), rng.randbytes(32), 2)
    beside = Secrets(rng.randbytes(16), rng.randbytes(32), home.dek, 2)
    before = Secrets(home.namespace_id, home.naming, rng.randbytes(32), 1)
    abroad = Secrets(rng.randbytes(16), rng.randbytes(32), rng.randbytes(32), 2)
    chunks, codec = rng.randint(2, 4), rng.choice((codecs.RAW, 1, 2))
    engine_key = rng.randbytes(32)

    def made(where: Secrets, key: bytes) -> Genuine:
        return genuine(rng, where, key, chunks, codec=codec)

    return Shelf(
        rng, made(home, engine_key), made(home, rng.randbytes(32)), made(beside, engine_key),
        made(before, engine_key), made(abroad, engine_key), rng.randbytes(32),
    )  # fmt: skip


# -- one forgery each


def ciphertext(on: Shelf) -> bytes:
    """The payload of another block under the target's header."""
    mine, other = on.parts()
    mine.chunks, mine.meta = other.chunks, other.meta
    mine.fit()
    return mine.join()


def foreign_header(on: Shelf) -> bytes:
    """Another block's header over the target's payload."""
    mine, other = on.parts()
    other.chunks, other.meta = mine.chunks, mine.meta
    other.fit()
    return other.join()


def relabelled(on: Shelf) -> bytes:
    """Another block that says it is the target; it keeps its own salt and commitment."""
    mine, other = on.parts()
    other.take(mine, *_IDENTITY)
    return other.join()


def relabelled_whole(on: Shelf) -> bytes:
    """The same with the target's salt and commitment."""
    mine, other = on.parts()
    other.take(mine, *_IDENTITY, "salt", "commitment")
    return other.join()


def salt(on: Shelf) -> bytes:
    """Another block's salt, or one bit off."""
    mine, other = on.parts()
    if on.rng.random() < 0.5:
        mine.take(other, "salt")
    else:
        mine.fields["salt"] = _flipped(on.rng, mine.fields["salt"])
    return mine.join()


def commitment(on: Shelf) -> bytes:
    """Another block's commitment, or one bit off."""
    mine, other = on.parts()
    if on.rng.random() < 0.5:
        mine.take(other, "commitment")
    else:
        mine.fields["commitment"] = _flipped(on.rng, mine.fields["commitment"])
    return mine.join()


def chunk_order(on: Shelf) -> bytes:
    """Two chunks change places."""
    mine, _ = on.parts()
    first, second = on.rng.sample(range(len(mine.chunks)), 2)
    mine.chunks[first], mine.chunks[second] = mine.chunks[second], mine.chunks[first]
    mine.fit()
    return mine.join()


def chunk_repeated(on: Shelf) -> bytes:
    """One chunk stands in another's place, too."""
    mine, _ = on.parts()
    first, second = on.rng.sample(range(len(mine.chunks)), 2)
    mine.chunks[first] = mine.chunks[second]
    mine.fit()
    return mine.join()


def chunk_of_another(on: Shelf) -> bytes:
    """One chunk is another block's, from the same place."""
    mine, other = on.parts()
    at = on.rng.randrange(len(mine.chunks))
    mine.chunks[at] = other.chunks[at]
    mine.fit()
    return mine.join()


def shortened(on: Shelf) -> bytes:
    """The last chunk is gone, and the header says so; the plain length it tells varies."""
    mine, _ = on.parts()
    del mine.chunks[-1]
    if on.rng.random() < 0.5:
        mine.fields["plain_bytes"] -= CHUNK_BYTES
    mine.fit()
    return mine.join()


def extended(on: Shelf) -> bytes:
    """One chunk more, and the header says so; the plain length it tells varies."""
    mine, other = on.parts()
    mine.chunks.append(on.rng.choice((mine, other)).chunks[-1])
    if on.rng.random() < 0.5:
        mine.fields["plain_bytes"] += CHUNK_BYTES
    mine.fit()
    return mine.join()


def cut(on: Shelf) -> bytes:
    """Cut off anywhere."""
    return on.target.sealed[: on.rng.randrange(len(on.target.sealed))]


def codec_and_type(on: Shelf) -> bytes:
    """Another codec, dtype or flag."""
    mine, _ = on.parts()
    name = on.rng.choice(("codec", "dtype", "flags"))
    was = mine.fields[name]
    while mine.fields[name] == was:
        mine.fields[name] = on.rng.randrange(3 if name == "codec" else 8)
    return mine.join()


def key_version(on: Shelf) -> bytes:
    """Another key version, up to the elder block under the target's."""
    mine, _ = on.parts()
    if on.rng.random() < 0.5:
        mine.fields["dek_version"] = on.rng.choice((0, 1, 3, 2**32 - 1))
        return mine.join()
    elder = Parts(on.elder.sealed)
    elder.fields["dek_version"] = mine.fields["dek_version"]
    return elder.join()


def lengths(on: Shelf) -> bytes:
    """A length in the header that is not the right one."""
    mine, _ = on.parts()
    name = on.rng.choice(("plain_bytes", "payload_bytes", "chunk_bytes", "meta_bytes"))
    mine.fields[name] = max(0, mine.fields[name] + on.rng.choice((-4096, -1, 1, 16, 4096)))
    return mine.join()


def meta(on: Shelf) -> bytes:
    """The target under another's meta, which moves no chunk but is data of no tag; or a chunk as
    meta, or the meta as a chunk."""
    mine, other = on.parts()
    choice = on.rng.random()
    if choice < 0.4:
        mine.chunks[on.rng.randrange(len(mine.chunks))] = mine.meta
    elif choice < 0.7:
        mine.chunks[-1] = other.meta + mine.chunks[-1][len(other.meta) :]
    else:
        mine.meta = b""
    mine.fit()
    return mine.join()


def tag(on: Shelf) -> bytes:
    """One bit of one chunk or its tag."""
    mine, _ = on.parts()
    at = on.rng.randrange(len(mine.chunks))
    piece = mine.chunks[at]
    mine.chunks[at] = piece[:-16] + _flipped(on.rng, piece[-16:])
    if on.rng.random() < 0.5:
        mine.chunks[at] = _flipped(on.rng, piece)
    return mine.join()


def header_bit(on: Shelf) -> bytes:
    """One bit anywhere in the header, with a right checksum."""
    end = SealedHeader.parse(on.target.sealed).header_bytes - 4
    head = _flipped(on.rng, on.target.sealed[:end])
    return head + struct.pack("<I", zlib.crc32(head)) + on.target.sealed[end + 4 :]


def sealed_by_another(on: Shelf) -> bytes:
    """A whole new block under a key of the forger's own, with the target's identity and salt.

    Once with the commitment of that key, once with the target's.
    """
    target = on.target
    mine = Parts(target.sealed)
    own = derive_block_key(on.own_dek, mine.fields["salt"])
    shown = own.commitment if on.rng.random() < 0.5 else target.key.commitment
    room = memoryview(
        bytearray(sealed_bytes_max(len(target.plain), chunk_bytes=CHUNK_BYTES, meta_tokens=4))
    )
    made = seal_into(
        room, memoryview(bytes(len(target.plain))),
        identity=BlockIdentity(target.home.namespace_id, target.name, target.engine_key,
                               DType.BF16, target.home.dek_version),
        block_key=BlockKey(own.key, shown), salt=mine.fields["salt"], codec_id=codecs.RAW,
        meta=None, chunk_bytes=CHUNK_BYTES,
    )  # fmt: skip
    return bytes(room[: made.sealed_bytes])


def _flipped(rng: random.Random, raw: bytes) -> bytes:
    out = bytearray(raw)
    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


FORGERIES: dict[str, Callable[[Shelf], bytes]] = {
    each.__name__: each
    for each in (
        ciphertext, foreign_header, relabelled, relabelled_whole, salt, commitment, chunk_order,
        chunk_repeated, chunk_of_another, shortened, extended, cut, codec_and_type, key_version,
        lengths, meta, tag, header_bit, sealed_by_another,
    )
}  # fmt: skip


# -- one block, two keys: AES-GCM alone does not forbid it

_POLY = 0xE1 << 120


def _times(a: int, b: int) -> int:
    """Product in GCM's field, whose first bit is the highest (NIST SP 800-38D, 6.3)."""
    out = 0
    while a:
        if a >> 127:
            out ^= b
        a = a << 1 & (1 << 128) - 1
        b = b >> 1 ^ (_POLY if b & 1 else 0)
    return out


def _inverse(a: int) -> int:
    """a to the power of 2^128 - 2."""
    out, square = 1 << 127, a
    for _ in range(127):
        square = _times(square, square)
        out = _times(out, square)
    return out


def _hash_key(key: bytes, nonce: bytes) -> tuple[int, int]:
    """GHASH's key, and what the tag is masked with."""
    ecb = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    raw = ecb.update(bytes(16) + nonce + b"\0\0\0\1")
    return int.from_bytes(raw[:16]), int.from_bytes(raw[16:])


def two_keyed_chunk(
    rng: random.Random, first: bytes, second: bytes, nonce: bytes, aad: bytes, length_bytes: int
) -> bytes:
    """Ciphertext and tag that AES-GCM opens under both keys, to two different plaintexts.

    All of the ciphertext but one 16-byte block is free; that one makes both tags agree: GHASH is
    linear in it, so one equation in one unknown remains.
    """
    assert length_bytes % 16 == 0
    blocks = [int.from_bytes(aad[at : at + 16].ljust(16, b"\0")) for at in range(0, len(aad), 16)]
    free = len(blocks)  # the first block of ciphertext
    body = rng.randbytes(length_bytes - 16)
    blocks += [0] + [int.from_bytes(body[at : at + 16]) for at in range(0, len(body), 16)]
    blocks.append((8 * len(aad)) << 64 | 8 * length_bytes)
    sums, powers = [], []
    for key in (first, second):
        ghash, mask = _hash_key(key, nonce)
        total, power = 0, 1 << 127
        for block in blocks:
            total = _times(total ^ block, ghash)
        for _ in range(len(blocks) - free):
            power = _times(power, ghash)
        sums.append(total ^ mask)
        powers.append(power)
    fitting = _times(sums[0] ^ sums[1], _inverse(powers[0] ^ powers[1]))
    made = sums[0] ^ _times(fitting, powers[0])
    return fitting.to_bytes(16) + body + made.to_bytes(16)


def two_keyed_block(rng: random.Random, on: Shelf) -> tuple[bytes, Genuine]:
    """A block that the forger's own key and the target's both open, as far as AES-GCM goes.

    Returns it and the reader it is meant for. The forger is a tenant who knows both block keys, the
    strongest case: what it shows one reader must not be what it shows another.
    """
    target = on.target
    parts = Parts(target.sealed)
    own = derive_block_key(on.own_dek, parts.fields["salt"])
    length = CHUNK_BYTES // 32
    parts.fields |= {
        "codec": codecs.RAW, "plain_bytes": length, "commitment": own.commitment,
        "chunk_bytes": CHUNK_BYTES,
    }  # fmt: skip
    parts.meta, parts.chunks = b"", [bytes(length + 16)]
    parts.fit()
    aad = SealedHeader.parse(parts.join()).aad
    nonce = struct.pack("<IBB6x", 0, 0, 1)
    parts.chunks = [two_keyed_chunk(rng, own.key, target.key.key, nonce, aad, length)]
    made = parts.join()
    plains = [AESGCM(key).decrypt(nonce, parts.chunks[0], aad) for key in (own.key, target.key.key)]
    assert plains[0] != plains[1], "the trick works: one chunk, two keys, two contents"
    holder = Genuine(target.home, target.engine_key, target.name, own, plains[0], b"")
    assert holder.accepts(made), "the key that is committed to opens it"
    reader = Genuine(target.home, target.engine_key, target.name, target.key, plains[1], b"")
    return made, reader
