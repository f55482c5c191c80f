"""The sealed header's parser: every rule at its limit, fuzz, and a canary for the fuzz."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from entresol_proto import limits
from entresol_proto.seal import codecs, header
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import CodecError, SealError, Status

CHUNK = limits.CHUNK_BYTES_MIN
IDENTITY = header.BlockIdentity(b"n" * 16, b"w" * 16, b"engine key of 24 bytes..", DType.BF16, 3)
CRC_BYTES = 4


def fix_crc(raw: bytearray, header_bytes: int) -> None:
    """Make the header checksum right again, as an attacker would."""
    at = header_bytes - CRC_BYTES
    raw[at:header_bytes] = zlib.crc32(raw[:at]).to_bytes(4, "little")


def forged_header(**change: Any) -> bytes:
    """A header with a right CRC whose fields need not make sense."""
    fields: dict[str, Any] = {
        "codec_id": codecs.PLANE,
        "plain_bytes": 3 * CHUNK,
        "chunk_bytes": CHUNK,
        "meta_bytes": 0,
        "salt": bytes(32),
        "commitment": bytes(16),
        "chunk_stored_bytes": [100, 100, 100],
    }
    return header.encode_header(IDENTITY, **(fields | change))


def whole(plain_bytes: int, chunk_bytes: int) -> dict[str, Any]:
    """Fields of a raw block of that length."""
    sizes = [chunk_bytes + 16] * (plain_bytes // chunk_bytes)
    if plain_bytes % chunk_bytes:
        sizes.append(plain_bytes % chunk_bytes + 16)
    lengths = {"plain_bytes": plain_bytes, "chunk_bytes": chunk_bytes}
    return {"codec_id": codecs.RAW, "chunk_stored_bytes": sizes, **lengths}


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ({"chunk_stored_bytes": [17, 100, 100]}, {"chunk_stored_bytes": [16, 100, 100]}),
        (
            {"chunk_stored_bytes": [CHUNK + 16, 100, 100]},
            {"chunk_stored_bytes": [CHUNK + 17, 100, 100]},
        ),
        (
            {"chunk_stored_bytes": [100, 100, CHUNK + 16]},
            {"chunk_stored_bytes": [100, 100, CHUNK + 17]},
        ),
        (whole(3 * CHUNK, CHUNK), whole(3 * CHUNK, CHUNK) | {"plain_bytes": 3 * CHUNK - 1}),
        (
            whole(2 * CHUNK, CHUNK),
            whole(2 * CHUNK, CHUNK) | {"chunk_stored_bytes": [CHUNK + 17, CHUNK + 15]},
        ),
        (
            whole(2 * CHUNK, CHUNK),
            whole(2 * CHUNK, CHUNK) | {"chunk_stored_bytes": [CHUNK + 15, CHUNK + 16]},
        ),
        ({"meta_bytes": 96}, {"meta_bytes": 95}),
        ({"meta_bytes": 96 + 4 * 2048}, {"meta_bytes": 97 + 4 * 2048}),
        (
            {"plain_bytes": 2 * CHUNK + 1, "chunk_stored_bytes": [17, 17, 17]},
            {"plain_bytes": 2 * CHUNK, "chunk_stored_bytes": [17, 17, 17]},
        ),
        ({"plain_bytes": 3 * CHUNK}, {"plain_bytes": 3 * CHUNK + 1}),
        (
            whole(limits.BLOCK_BYTES_MAX, limits.CHUNK_BYTES_MAX),
            whole(limits.BLOCK_BYTES_MAX + 1, limits.CHUNK_BYTES_MAX),
        ),
        (
            whole(1024 * CHUNK, CHUNK),
            whole(1024 * CHUNK + 1, CHUNK),
        ),
        (whole(CHUNK, CHUNK), whole(CHUNK - 1, CHUNK - 1)),
        (
            whole(limits.CHUNK_BYTES_MAX, limits.CHUNK_BYTES_MAX),
            whole(limits.CHUNK_BYTES_MAX + 1, limits.CHUNK_BYTES_MAX + 1),
        ),
        ({"codec_id": 4}, {"codec_id": 5}),
    ],
)
def test_lengths_in_a_header(inside: dict[str, Any], outside: dict[str, Any]) -> None:
    raw = forged_header(**inside)
    check_accepted(header.SealedHeader.parse(raw), raw)
    with pytest.raises(SealError):
        header.SealedHeader.parse(forged_header(**outside))


_FIELDS = (0, 4, 6, 7, 8, 12, 16, 24, 32, 36, 40, 44, 128, 129, 136, 199, 200, 204)


class Finding(AssertionError):
    """The fuzz loop caught the parser doing what it must not."""


def fuzz_parser(parse: Callable[[bytes], Any], seed: int, rounds: int) -> tuple[int, int]:
    """Feed mutated headers; returns (accepted, refused).

    Raises: Finding when `parse` raises anything but SealError, takes more memory than a few
    headers, or accepts lengths that are out of bounds or do not add up.
    """
    rng = random.Random(seed)
    good = forged_header() + bytes(180)
    header_bytes = len(forged_header())
    accepted = refused = 0
    for trial in range(rounds):
        raw = bytearray(good if rng.random() < 0.97 else rng.randbytes(rng.randrange(400)))
        for _ in range(rng.randint(1, 3)):
            at = rng.choice(_FIELDS)
            if at + 8 > len(raw):
                continue
            match rng.randrange(4):
                case 0:
                    bit = rng.randrange(8 * len(raw))
                    raw[bit // 8] ^= 1 << bit % 8
                case 1:
                    width = rng.choice((1, 2, 4, 8))
                    raw[at : at + width] = rng.choice((b"\0", b"\xff")) * width
                case 2:
                    raw[at] = (raw[at] + rng.choice((-1, 1))) % 256
                case _:
                    del raw[rng.randrange(len(raw)) :]
        claimed = int.from_bytes(raw[12:16], "little")
        end = claimed if rng.random() < 0.5 else header_bytes
        if rng.random() < 0.8 and CRC_BYTES < end <= len(raw):
            fix_crc(raw, end)
        try:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            parsed = parse(bytes(raw))
            accepted += 1
            check_accepted(parsed, bytes(raw))
        except SealError:
            refused += 1
        except Exception as error:
            raise Finding(f"seed {seed} trial {trial}: {error!r}") from error
        peak_bytes = tracemalloc.get_traced_memory()[1] - before
        if peak_bytes > 64 * limits.KIB:
            raise Finding(f"seed {seed} trial {trial}: {peak_bytes} bytes of memory")
    return accepted, refused


def check_accepted(h: header.SealedHeader, raw: bytes) -> None:
    """An accepted header is in bounds and encodes to the bytes it came from."""
    assert 1 <= h.plain_bytes <= limits.BLOCK_BYTES_MAX
    assert h.header_bytes <= len(raw)
    assert sum(map(h.chunk_plain_bytes, range(h.chunk_count))) == h.plain_bytes
    assert sum(h.chunk_stored_bytes) == h.payload_bytes
    for index, stored in enumerate(h.chunk_stored_bytes):
        assert 0 < stored - header.TAG_BYTES <= h.chunk_plain_bytes(index) <= h.chunk_bytes
    again = header.encode_header(
        header.BlockIdentity(
            h.namespace_id, h.wire_key, h.engine_key, h.dtype, h.dek_version, h.host_sealed
        ),
        codec_id=h.codec_id,
        plain_bytes=h.plain_bytes,
        chunk_bytes=h.chunk_bytes,
        meta_bytes=h.meta_bytes,
        salt=h.salt,
        commitment=h.commitment,
        chunk_stored_bytes=list(h.chunk_stored_bytes),
    )
    assert again == raw[: h.header_bytes]


@pytest.fixture(name="traced")
def _traced() -> Any:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_parser_fuzz() -> None:
    accepted, refused = fuzz_parser(header.SealedHeader.parse, seed=2025, rounds=8000)
    assert accepted > 100, "the mutations never get past the checks"
    assert refused > 4000


def trusts_the_chunk_count(raw: bytes) -> Any:
    """Broken on purpose: unpacks the table before its length is known to be there."""
    if len(raw) >= header.HEADER_BYTES_MIN:
        struct.unpack_from(f"<{int.from_bytes(raw[36:40], 'little') % 5000}I", raw, 200)
    return header.SealedHeader.parse(raw)


def allocates_first(raw: bytes) -> Any:
    """Broken on purpose: makes room for the plaintext before checking anything."""
    room = bytearray(min(int.from_bytes(raw[16:24], "little"), limits.BLOCK_BYTES_MAX))
    parsed = header.SealedHeader.parse(raw)
    assert len(room) == parsed.plain_bytes
    return parsed


def ignores_the_table(raw: bytes) -> Any:
    """Broken on purpose: repairs the sum instead of refusing a table that does not add up."""
    fixed = bytearray(raw)
    if len(raw) >= header.HEADER_BYTES_MIN + 8:
        fixed[24:32] = sum(struct.unpack_from("<3I", raw, 200)).to_bytes(8, "little")
        fix_crc(fixed, len(forged_header()))
    return header.SealedHeader.parse(fixed)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "broken", [trusts_the_chunk_count, allocates_first, ignores_the_table], ids=lambda f: f.__name__
)
def test_parser_fuzz_catches_broken_parsers(broken: Callable[[bytes], Any]) -> None:
    """The canary: the same loop must find each of these, or it proves nothing."""
    with pytest.raises(Finding):
        fuzz_parser(broken, seed=2025, rounds=8000)


@pytest.mark.parametrize("size", [0, limits.ENGINE_KEY_BYTES_MIN, limits.ENGINE_KEY_BYTES_MAX])
def test_a_meta_has_a_parent_key_of_any_allowed_length(size: int) -> None:
    meta = header.BlockMeta(b"p" * size, 1, 16, bytes(8))
    assert header.BlockMeta.decode(meta.encode()) == meta


@pytest.mark.parametrize("size", [limits.ENGINE_KEY_BYTES_MIN - 1, limits.ENGINE_KEY_BYTES_MAX + 1])
def test_and_of_no_other(size: int) -> None:
    with pytest.raises(SealError):
        header.BlockMeta(b"p" * size, 1, 16, bytes(8)).encode()
    raw = bytearray(header.BlockMeta(b"", 1, 16, bytes(8)).encode())
    raw[0] = size
    with pytest.raises(SealError):
        header.BlockMeta.decode(bytes(raw))


def test_codec_error_is_a_seal_error() -> None:
    assert issubclass(CodecError, SealError)
    assert CodecError("x").status is Status.CORRUPT
