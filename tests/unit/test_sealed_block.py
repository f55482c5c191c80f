"""The sealed block: exact bytes or a miss, whatever happens to the stored bytes in between."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_proto import limits
from entresol_proto.ids import pack_token_ids
from entresol_proto.seal import block, codecs, header
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import SealError, Status

VECTORS = Path(__file__).parents[1] / "vectors"
CHUNK = limits.CHUNK_BYTES_MIN
DEK = bytes(range(32))
NAMESPACE = b"n" * 16
WIRE_KEY = b"w" * 16
ENGINE_KEY = b"engine key of 24 bytes.."
IDENTITY = block.BlockIdentity(NAMESPACE, WIRE_KEY, ENGINE_KEY, DType.BF16, 3)
META = block.BlockMeta(b"p" * 16, 512, 16, pack_token_ids(range(16)))
CRC_BYTES = 4


def kv_bytes(size: int, seed: int = 0) -> bytes:
    """bf16 noise with a narrow exponent, so that codecs have something to do."""
    rng = random.Random(seed)
    exponents = [round(rng.gauss(122, 1.5)) for _ in range(size // 2 + 1)]
    bits = [e << 7 | rng.getrandbits(16) & 0x807F for e in exponents]
    return struct.pack(f"<{len(bits)}H", *bits)[:size]


class Sealed:
    """One sealed block with everything needed to open it, or to try to."""

    def __init__(
        self,
        plain: bytes,
        codec_id: int = codecs.RAW,
        *,
        identity: block.BlockIdentity = IDENTITY,
        salt: bytes | None = None,
        meta: block.BlockMeta | None = META,
        chunk_bytes: int = CHUNK,
    ) -> None:
        self.plain = plain
        self.salt = salt or block.new_salt()
        self.key = block.derive_block_key(DEK, self.salt)
        self.identity = identity
        tokens = len(meta.token_ids) if meta else 0
        room = block.sealed_bytes_max(len(plain), chunk_bytes=chunk_bytes, meta_tokens=tokens)
        out = bytearray(b"\xa5" * (room + 16))
        self.header = block.seal_into(
            memoryview(out),
            memoryview(plain),
            identity=identity,
            block_key=self.key,
            salt=self.salt,
            codec_id=codec_id,
            meta=meta,
            chunk_bytes=chunk_bytes,
        )
        assert self.header.sealed_bytes <= room
        assert set(out[self.header.sealed_bytes :]) == {0xA5}, "wrote past the block"
        self.raw = bytes(out[: self.header.sealed_bytes])

    def open(self, raw: bytes | bytearray | None = None, **change: Any) -> Status:
        """Open with some arguments changed; asserts exact bytes after OK, zeros otherwise."""
        plain_bytes = change.pop("plain_bytes", len(self.plain))
        arena = bytearray(b"\xa5" * (plain_bytes + 32))
        arguments: dict[str, Any] = {
            "namespace_id": self.identity.namespace_id,
            "wire_key": self.identity.wire_key,
            "engine_key": self.identity.engine_key,
            "block_key": self.key,
        }
        sealed = memoryview(self.raw if raw is None else raw)
        into = memoryview(arena)[16 : 16 + plain_bytes]
        status = block.open_into(sealed, into, **(arguments | change))
        assert arena[:16] == arena[-16:] == b"\xa5" * 16, "wrote outside the destination"
        if status is Status.OK:
            assert into == self.plain
        else:
            assert not any(into), "left bytes behind a failure"
        return status

    def chunk(self, index: int) -> slice:
        """Where a chunk lies in `raw`."""
        start, size = self.header.chunk_span(index)
        return slice(start, start + size)


def fix_crc(raw: bytearray, header_bytes: int) -> None:
    """Make the header checksum right again, as an attacker would."""
    at = header_bytes - CRC_BYTES
    raw[at:header_bytes] = zlib.crc32(raw[:at]).to_bytes(4, "little")


@functools.cache
def three_chunks(codec_id: int) -> Sealed:
    """A block of two full chunks and a short one; shared, never modified."""
    return Sealed(kv_bytes(2 * CHUNK + 777), codec_id, salt=bytes(32))


every_codec = pytest.mark.parametrize("codec_id", range(len(codecs.names())))


# Round trips.


@every_codec
@pytest.mark.parametrize("size", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 70_001])
def test_round_trip(codec_id: int, size: int) -> None:
    for meta in (None, META):
        sealed = Sealed(kv_bytes(size), codec_id, meta=meta)
        assert sealed.open() is Status.OK
        assert sealed.open(sealed.raw + bytes(5000)) is Status.OK  # padding is not the block's
        assert sealed.open(engine_key=None) is Status.OK


@settings(deadline=None, max_examples=80)
@given(
    plain=st.binary(min_size=1, max_size=9000),
    repeat=st.integers(1, 5),
    codec_id=st.sampled_from([0, 1, 2, 3, 4]),
    dtype=st.sampled_from(DType),
    engine_key=st.binary(min_size=8, max_size=64),
    dek_version=st.integers(0, 2**32 - 1),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
)
def test_round_trip_of_anything(
    plain: bytes,
    repeat: int,
    codec_id: int,
    dtype: DType,
    engine_key: bytes,
    dek_version: int,
    tokens: list[int],
) -> None:
    identity = block.BlockIdentity(NAMESPACE, WIRE_KEY, engine_key, dtype, dek_version)
    meta = block.BlockMeta(WIRE_KEY, 7, 16, pack_token_ids(tokens))
    sealed = Sealed(plain * repeat, codec_id, identity=identity, meta=meta)
    assert sealed.open() is Status.OK
    parsed = block.SealedHeader.parse(sealed.raw)
    assert parsed == sealed.header
    assert (parsed.engine_key, parsed.dtype, parsed.dek_version) == (engine_key, dtype, dek_version)
    assert block.open_meta(memoryview(sealed.raw), parsed, sealed.key) == meta


def test_default_chunks_and_views_of_other_formats() -> None:
    size = 2 * limits.CHUNK_BYTES_DEFAULT + 80_000
    plain = kv_bytes(size)
    sealed = Sealed(plain, codecs.PLANE, chunk_bytes=limits.CHUNK_BYTES_DEFAULT)
    assert sealed.header.chunk_count == 3
    assert len(plain) / sealed.header.sealed_bytes > 1.4
    words = memoryview(bytearray(size)).cast("I")
    arguments = {"namespace_id": NAMESPACE, "wire_key": WIRE_KEY, "engine_key": ENGINE_KEY}
    status = block.open_into(memoryview(sealed.raw), words, block_key=sealed.key, **arguments)
    assert status is Status.OK
    assert words.cast("B") == plain
    out = memoryview(bytearray(4 * -(-sealed.header.sealed_bytes // 4))).cast("I")
    block.seal_into(
        out,
        memoryview(plain).cast("H"),
        identity=IDENTITY,
        block_key=sealed.key,
        salt=sealed.salt,
        codec_id=codecs.PLANE,
        meta=META,
    )
    assert out.cast("B")[: len(sealed.raw)] == sealed.raw


@every_codec
def test_incompressible_blocks_are_stored_raw(codec_id: int) -> None:
    sealed = Sealed(random.Random(1).randbytes(3 * CHUNK), codec_id)
    assert sealed.header.codec_id == codecs.RAW
    assert sealed.open() is Status.OK


def test_a_block_may_mix_raw_and_encoded_chunks() -> None:
    noise = random.Random(1).randbytes(CHUNK)
    sealed = Sealed(noise + kv_bytes(2 * CHUNK), codecs.PLANE)
    assert sealed.header.codec_id == codecs.PLANE
    stored = sealed.header.chunk_stored_bytes
    assert stored[0] == CHUNK + block.TAG_BYTES
    assert max(stored[1:]) < CHUNK
    assert sealed.open() is Status.OK


@every_codec
def test_chunks_open_one_by_one(codec_id: int) -> None:
    sealed = three_chunks(codec_id)
    view = memoryview(sealed.raw)
    for index in range(3):
        size = sealed.header.chunk_plain_bytes(index)
        bad: dict[str, Any]
        into = bytearray(size)
        options: dict[str, Any] = {"header": sealed.header, "index": index, "block_key": sealed.key}
        stored = view[sealed.chunk(index)]
        assert block.open_chunk_into(stored, memoryview(into), **options) is Status.OK
        assert into == sealed.plain[index * CHUNK : index * CHUNK + size]
        other_key = block.derive_block_key(DEK, b"s" * 32)
        for bad_stored, bad in (
            (stored, {"index": (index + 1) % 3}),
            (stored, {"index": -1}),
            (stored, {"index": 3}),
            (stored[:-1], {}),
            (stored, {"block_key": other_key}),
            (stored, {"header": replace(sealed.header, commitment=other_key.commitment)}),
            (bytes(len(stored)), {}),
        ):
            into = bytearray(b"\xa5" * size)
            status = block.open_chunk_into(
                memoryview(bad_stored), memoryview(into), **(options | bad)
            )
            assert status is Status.CORRUPT
            assert not any(into)


# Damage and forgery.


@every_codec
@pytest.mark.parametrize("forge", [False, True], ids=["damaged", "crc made right"])
def test_every_bit_of_the_header(codec_id: int, forge: bool) -> None:
    sealed = three_chunks(codec_id)
    header_bytes = sealed.header.header_bytes
    conflicts = 0
    for bit in range(8 * (header_bytes - (CRC_BYTES if forge else 0))):
        raw = bytearray(sealed.raw)
        raw[bit // 8] ^= 1 << bit % 8
        if forge:
            fix_crc(raw, header_bytes)
        status = sealed.open(raw)
        assert status in (Status.CORRUPT, Status.CONFLICT), f"bit {bit} of byte {bit // 8}"
        if status is Status.CONFLICT:
            conflicts += 1
            assert 128 <= bit // 8 < 200, "only the engine key can conflict"
        assert sealed.open(raw, engine_key=None) is Status.CORRUPT
    # A plain flip never gets past the CRC; a forged one in the key's used bytes is a conflict.
    assert conflicts >= 8 * len(ENGINE_KEY) if forge else conflicts == 0


@every_codec
def test_random_flips_in_the_payload(codec_id: int) -> None:
    sealed = three_chunks(codec_id)
    payload_start = sealed.header.header_bytes + sealed.header.meta_bytes
    seed = 11
    rng = random.Random(seed)
    raw = bytearray(sealed.raw)
    for trial in range(3000):
        bits = {rng.randrange(8 * payload_start, 8 * len(raw)) for _ in range(rng.randint(1, 3))}
        for bit in bits:
            raw[bit // 8] ^= 1 << bit % 8
        assert sealed.open(raw) is Status.CORRUPT, f"seed {seed} trial {trial} bits {bits}"
        for bit in bits:
            raw[bit // 8] ^= 1 << bit % 8
    assert sealed.open(raw) is Status.OK


def test_every_bit_of_the_meta() -> None:
    sealed = three_chunks(codecs.RAW)
    start = sealed.header.header_bytes
    for bit in range(8 * start, 8 * (start + sealed.header.meta_bytes)):
        raw = bytearray(sealed.raw)
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SealError):
            block.open_meta(memoryview(raw), sealed.header, sealed.key)


@every_codec
def test_every_truncation(codec_id: int) -> None:
    sealed = three_chunks(codec_id)
    cuts = [*range(400), *range(400, len(sealed.raw), 97), len(sealed.raw) - 1]
    for cut in cuts:
        assert sealed.open(sealed.raw[:cut]) is Status.CORRUPT, cut


def test_swapped_reordered_and_repeated_chunks() -> None:
    plain = kv_bytes(4 * CHUNK)
    sealed = Sealed(plain)
    spans = [sealed.chunk(index) for index in range(4)]
    chunks = [sealed.raw[span] for span in spans]
    head = sealed.raw[: spans[0].start]
    for order in ([1, 0, 2, 3], [0, 1, 3, 2], [3, 2, 1, 0], [0, 0, 2, 3], [0, 1, 2, 2]):
        assert sealed.open(head + b"".join(chunks[i] for i in order)) is Status.CORRUPT, order
    assert sealed.open(head + b"".join(chunks)) is Status.OK


def test_a_shortened_block_with_a_forged_header() -> None:
    """Dropping the last chunk and saying so in the header does not make a shorter valid block."""
    sealed = Sealed(kv_bytes(3 * CHUNK), meta=None)
    h = sealed.header
    forged = header.encode_header(
        IDENTITY,
        codec_id=h.codec_id,
        plain_bytes=2 * CHUNK,
        chunk_bytes=CHUNK,
        meta_bytes=0,
        salt=h.salt,
        commitment=h.commitment,
        chunk_stored_bytes=list(h.chunk_stored_bytes[:2]),
    )
    raw = forged + sealed.raw[h.header_bytes : h.header_bytes + sum(h.chunk_stored_bytes[:2])]
    assert block.SealedHeader.parse(raw).sealed_bytes == len(raw)
    assert sealed.open(raw, plain_bytes=2 * CHUNK) is Status.CORRUPT


def test_headers_swapped_between_blocks() -> None:
    """Same key material and lengths, another block: no mix of the two opens."""
    salt = b"s" * 32
    mine = Sealed(kv_bytes(2 * CHUNK, 1), salt=salt)
    for identity in (
        replace(IDENTITY, namespace_id=b"m" * 16),
        replace(IDENTITY, wire_key=b"v" * 16),
        replace(IDENTITY, engine_key=b"another engine key, 24 B"),
        replace(IDENTITY, dtype=DType.FP16),
        replace(IDENTITY, dek_version=4),
    ):
        other = Sealed(kv_bytes(2 * CHUNK, 2), salt=salt, identity=identity)
        cut = mine.header.header_bytes
        assert other.header.header_bytes == cut
        assert mine.open(mine.raw[:cut] + other.raw[cut:]) is Status.CORRUPT
        assert other.open(other.raw[:cut] + mine.raw[cut:]) is Status.CORRUPT
        assert other.open() is Status.OK
    assert mine.open() is Status.OK


def test_data_and_meta_cannot_stand_in_for_each_other() -> None:
    """The kind in the nonce separates the meta from a chunk of the same length and number."""
    tokens = pack_token_ids(range(16))
    meta = block.BlockMeta(bytes(16), 1, 16, tokens)
    sealed = Sealed(meta.encode(), meta=meta)
    start, size = sealed.header.chunk_span(0)
    assert size == sealed.header.meta_bytes
    cut = sealed.header.header_bytes
    head, sealed_meta, data = sealed.raw[:cut], sealed.raw[cut:start], sealed.raw[start:]
    assert sealed_meta != data
    swapped = head + data + sealed_meta
    assert sealed.open(swapped) is Status.CORRUPT
    with pytest.raises(SealError):
        block.open_meta(memoryview(swapped), sealed.header, sealed.key)


@every_codec
def test_wrong_key_namespace_engine_key_length(codec_id: int) -> None:
    sealed = three_chunks(codec_id)
    right = sealed.key
    other = block.derive_block_key(b"o" * 32, sealed.salt)
    assert sealed.open(block_key=other) is Status.CORRUPT
    # The commitment alone stops a wrong key, and the key alone stops a right commitment.
    assert sealed.open(block_key=block.BlockKey(right.key, other.commitment)) is Status.CORRUPT
    assert sealed.open(block_key=block.BlockKey(other.key, right.commitment)) is Status.CORRUPT
    assert sealed.open(namespace_id=b"m" * 16) is Status.CORRUPT
    assert sealed.open(wire_key=b"v" * 16) is Status.CORRUPT
    assert sealed.open(engine_key=b"another engine key, 24 B") is Status.CONFLICT
    assert sealed.open(engine_key=ENGINE_KEY[:-1]) is Status.CONFLICT
    for plain_bytes in (0, 1, len(sealed.plain) - 1, len(sealed.plain) + 1):
        assert sealed.open(plain_bytes=plain_bytes) is Status.CORRUPT
    assert sealed.open() is Status.OK


def test_authentic_bytes_that_do_not_decode_are_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken encoder elsewhere: the tag is right, the codec refuses; still only a miss."""

    class Broken:
        codec_id = codecs.PLANE
        name = "plane"

        def hopeless(self, first: memoryview, last: memoryview, dtype: DType) -> bool:
            return False

        def encode(self, plain: memoryview, dtype: DType) -> bytes:
            return b"\x01\x02\x03"

    with monkeypatch.context() as patch:
        patch.setitem(codecs._CODECS, codecs.PLANE, Broken())
        sealed = Sealed(kv_bytes(2 * CHUNK), codecs.PLANE)
    assert sealed.open() is Status.CORRUPT


def test_check_header() -> None:
    h = three_chunks(codecs.RAW).header
    names: dict[str, Any] = {"namespace_id": NAMESPACE, "wire_key": WIRE_KEY}
    change: dict[str, Any]
    assert block.check_header(h, **names) is Status.OK
    full: dict[str, Any] = {
        "plain_bytes": h.plain_bytes,
        "commitment": h.commitment,
        "engine_key": ENGINE_KEY,
    }
    assert block.check_header(h, **names, **full) is Status.OK
    for change, status in (
        ({"namespace_id": bytes(16)}, Status.CORRUPT),
        ({"wire_key": bytes(16)}, Status.CORRUPT),
        ({"plain_bytes": h.plain_bytes + 1}, Status.CORRUPT),
        ({"commitment": bytes(16)}, Status.CORRUPT),
        ({"engine_key": b"x" * 24}, Status.CONFLICT),
        ({"engine_key": b"x" * 24, "wire_key": bytes(16)}, Status.CORRUPT),
        ({"host_sealed": True}, Status.CORRUPT),
        ({"host_sealed": False}, Status.OK),
    ):
        assert block.check_header(h, **(names | full | change)) is status
    own = Sealed(b"plain", identity=replace(IDENTITY, host_sealed=True)).header
    for host_sealed, status in ((True, Status.OK), (False, Status.CORRUPT)):
        assert block.check_header(own, **names, host_sealed=host_sealed) is status


# Sealing: limits and refusals.


def test_sealed_bytes_max_is_reached_and_never_passed() -> None:
    for size in (1, CHUNK, CHUNK + 1, 5 * CHUNK + 3):
        for tokens in (0, 1, 2048):
            meta = block.BlockMeta(bytes(16), 0, 16, pack_token_ids(range(tokens)))
            sealed = Sealed(random.Random(size).randbytes(size), meta=meta)
            room = block.sealed_bytes_max(size, chunk_bytes=CHUNK, meta_tokens=tokens)
            assert sealed.header.sealed_bytes == room


def test_lengths_at_the_limit_and_one_past() -> None:
    most = limits.CHUNKS_PER_BLOCK_MAX * CHUNK
    block.sealed_bytes_max(most, chunk_bytes=CHUNK)
    block.sealed_bytes_max(limits.BLOCK_BYTES_MAX, meta_tokens=limits.TOKENS_PER_BLOCK_MAX)
    for size, chunk_bytes, tokens, status in (
        (most + 1, CHUNK, 0, Status.TOO_LARGE),
        (limits.BLOCK_BYTES_MAX + 1, limits.CHUNK_BYTES_MAX, 0, Status.TOO_LARGE),
        (0, CHUNK, 0, Status.BAD_REQUEST),
        (1, CHUNK - 1, 0, Status.BAD_REQUEST),
        (1, limits.CHUNK_BYTES_MAX + 1, 0, Status.BAD_REQUEST),
        (1, CHUNK, limits.TOKENS_PER_BLOCK_MAX + 1, Status.TOO_LARGE),
    ):
        with pytest.raises(SealError) as caught:
            block.sealed_bytes_max(size, chunk_bytes=chunk_bytes, meta_tokens=tokens)
        assert caught.value.status is status


def test_room_does_not_depend_on_the_engine_key() -> None:
    rooms = {block.sealed_bytes_max(CHUNK, engine_key_bytes=size) for size in (8, 16, 64)}
    assert rooms == {block.sealed_bytes_max(CHUNK)}
    for size in (7, 65):
        with pytest.raises(SealError):
            block.sealed_bytes_max(CHUNK, engine_key_bytes=size)


def test_a_key_and_its_commitment_end_to_end_are_the_same_two() -> None:
    salt = bytes(range(32))
    key = block.derive_block_key(DEK, salt)
    assert block.derive_key_and_commitment(DEK, salt) == key.key + key.commitment
    for dek, status in ((bytes(32), Status.ERASED), (b"short", Status.BAD_REQUEST)):
        with pytest.raises(SealError) as caught:
            block.derive_key_and_commitment(dek, salt)
        assert caught.value.status is status


def test_seal_refuses_what_it_cannot_seal() -> None:
    plain = kv_bytes(CHUNK)
    need = Sealed(plain).header.sealed_bytes
    out = bytearray(b"\xa5" * (need - 1))
    key = block.derive_block_key(DEK, bytes(32))
    good: dict[str, Any] = {
        "identity": IDENTITY,
        "block_key": key,
        "salt": bytes(32),
        "codec_id": codecs.RAW,
        "meta": META,
    }
    for source, change, status in (
        (plain, {}, Status.TOO_LARGE),
        (b"", {}, Status.BAD_REQUEST),
        (plain, {"salt": bytes(31)}, Status.BAD_REQUEST),
        (plain, {"codec_id": 77}, Status.CORRUPT),
        (plain, {"chunk_bytes": 1}, Status.BAD_REQUEST),
        (plain, {"meta": replace(META, position=-1)}, Status.BAD_REQUEST),
        (plain, {"meta": replace(META, token_ids_u32le=b"odd")}, Status.BAD_REQUEST),
        (plain, {"meta": replace(META, token_ids_u32le=bytes(4 * 2049))}, Status.TOO_LARGE),
        (plain, {"meta": replace(META, parent=b"short")}, Status.BAD_REQUEST),
    ):
        with pytest.raises(SealError) as caught:
            block.seal_into(memoryview(out), memoryview(source), **(good | change))
        assert caught.value.status is status
        assert set(out) == {0xA5}, "wrote before refusing"


def test_identities_and_keys_of_wrong_lengths_are_refused() -> None:
    for change in (
        {"namespace_id": bytes(15)},
        {"wire_key": bytes(17)},
        {"engine_key": bytes(7)},
        {"engine_key": bytes(65)},
        {"dek_version": 2**32},
        {"dek_version": -1},
    ):
        with pytest.raises(SealError):
            replace(IDENTITY, **change)
    for change in (
        {"engine_key": bytes(limits.ENGINE_KEY_BYTES_MIN)},
        {"engine_key": bytes(limits.ENGINE_KEY_BYTES_MAX)},
        {"dek_version": 0},
        {"dek_version": 2**32 - 1},
    ):
        sealed = Sealed(b"plain", identity=replace(IDENTITY, **change))
        assert sealed.open() is Status.OK, change
        assert block.SealedHeader.parse(sealed.raw).dek_version == sealed.identity.dek_version
    for dek, salt in ((bytes(31), bytes(32)), (bytes(32), bytes(33))):
        with pytest.raises(SealError):
            block.derive_block_key(dek, salt)
    with pytest.raises(SealError):
        block.BlockKey(bytes(16), bytes(16))


def test_caller_bugs_are_loud() -> None:
    sealed = three_chunks(codecs.RAW)
    names: dict[str, Any] = {
        "namespace_id": NAMESPACE,
        "wire_key": WIRE_KEY,
        "engine_key": None,
    }
    with pytest.raises(TypeError):
        block.open_into(
            memoryview(sealed.raw), memoryview(sealed.plain), block_key=sealed.key, **names
        )
    strided = memoryview(bytearray(2 * len(sealed.plain)))[::2]
    with pytest.raises(TypeError):
        block.open_into(memoryview(sealed.raw), strided, block_key=sealed.key, **names)


def test_salts_are_fresh_and_keys_differ() -> None:
    salts = {block.new_salt() for _ in range(100)}
    assert len(salts) == 100
    assert len({block.derive_block_key(DEK, salt).key for salt in salts}) == 100
    plain = kv_bytes(CHUNK)
    assert Sealed(plain).raw[300:] != Sealed(plain).raw[300:]


def test_texts_show_no_secrets() -> None:
    sealed = three_chunks(codecs.RAW)
    shown = " ".join(map(repr, (sealed.key, sealed.header, IDENTITY, META)))
    for secret in (sealed.key.key, sealed.key.commitment, sealed.salt, ENGINE_KEY):
        assert repr(secret)[2:-1] not in shown
        assert secret.hex() not in shown
    assert "token_ids" not in shown


# Meta.


def test_meta_round_trip_and_refusals() -> None:
    raw = META.encode()
    assert block.BlockMeta.decode(raw) == META
    root = replace(META, parent=b"")
    assert block.BlockMeta.decode(root.encode()) == root
    long = replace(META, token_ids_u32le=bytes(4 * limits.TOKENS_PER_BLOCK_MAX))
    assert block.BlockMeta.decode(long.encode()) == long
    with pytest.raises(SealError):
        block.BlockMeta.decode(long.encode() + bytes(4))
    count, short, loose = bytearray(raw), bytearray(raw), bytearray(raw)
    count[12:16] = b"\xff\xff\xff\xff"
    short[0] = 7
    loose[79] = 1
    for bad in (b"", raw[:-1], raw + b"\0", raw[:79], count, short, loose):
        with pytest.raises(SealError):
            block.BlockMeta.decode(bad)


def test_open_meta_needs_only_the_front_and_the_right_key() -> None:
    sealed = three_chunks(codecs.PLANE)
    end = sealed.header.header_bytes + sealed.header.meta_bytes
    front = memoryview(sealed.raw)[:end]
    assert block.open_meta(front, sealed.header, sealed.key) == META
    other = block.derive_block_key(DEK, b"s" * 32)
    for view, key in ((front[:-1], sealed.key), (front, other)):
        with pytest.raises(SealError):
            block.open_meta(view, sealed.header, key)
    bare = Sealed(b"x", meta=None)
    with pytest.raises(SealError) as caught:
        block.open_meta(memoryview(bare.raw), bare.header, bare.key)
    assert caught.value.status is Status.MISS


# Golden blocks.


def load_maker() -> Any:
    spec = importlib.util.spec_from_file_location("maker", VECTORS / "make_sealed_block.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", json.loads((VECTORS / "sealed_block.json").read_text()))
def test_golden_blocks(case: dict[str, Any]) -> None:
    """Stored blocks open for ever; raw ones also come out byte for byte the same."""
    raw = (VECTORS / case["file"]).read_bytes()
    assert hashlib.sha256(raw).hexdigest() == case["sealed_sha256"]
    h = block.SealedHeader.parse(raw)
    key = block.derive_block_key(bytes.fromhex(case["dek"]), h.salt)
    assert (key.key.hex(), key.commitment.hex()) == (case["block_key"], case["commitment"])
    assert (codecs.get(h.codec_id).name, h.dtype.label) == (case["codec"], case["dtype"])
    assert (h.dek_version, h.chunk_bytes) == (case["dek_version"], case["chunk_bytes"])
    assert (h.salt.hex(), h.engine_key.hex()) == (case["salt"], case["engine_key"])
    into = bytearray(case["plain_bytes"])
    status = block.open_into(
        memoryview(raw),
        memoryview(into),
        namespace_id=bytes.fromhex(case["namespace_id"]),
        wire_key=bytes.fromhex(case["wire_key"]),
        engine_key=bytes.fromhex(case["engine_key"]),
        block_key=key,
    )
    assert status is Status.OK
    assert hashlib.sha256(into).hexdigest() == case["plain_sha256"]
    maker = load_maker()
    assert into == maker.plain_of(case["recipe"], case["plain_bytes"])
    if case["meta"]:
        meta = block.open_meta(memoryview(raw), h, key)
        assert meta.parent.hex() == case["meta"]["parent"]
        assert list(meta.token_ids) == case["meta"]["token_ids"]
    if case["codec"] == "raw":
        assert maker.seal(case) == raw
