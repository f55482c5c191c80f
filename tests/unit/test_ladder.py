"""The ladder codecs: C with and without vectors, and numpy, give the same bytes and refusals."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_proto import native
from entresol_proto.seal import codecs
from entresol_proto.seal.codecs import ladder, ladder_twin
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import CodecError

KINDS = ladder._KINDS
VECTORS = Path(__file__).parents[1] / "vectors"
WAYS = ("vectors", "portable", "numpy")
GUARD = 64
every_kind = pytest.mark.parametrize("dtype", list(KINDS))
by_channel = pytest.mark.parametrize("by_channel", [False, True], ids=["fast", "dense"])


def kernel(way: str) -> native.Kernel | None:
    """The kernel set to go that way; None for numpy."""
    if way == "numpy":
        return None
    if native.KERNEL is None:
        pytest.skip("not run here: the package was built without a C compiler")
    native.KERNEL.portable = way == "portable"
    return native.KERNEL


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    if native.KERNEL is not None:
        native.KERNEL.portable = False


def ways() -> tuple[str, ...]:
    return WAYS if native.KERNEL is not None else ("numpy",)


def encode(way: str, plain: bytes, dtype: DType, channels: bool, bytes_max: int) -> bytes | None:
    found = kernel(way)
    view, kind = memoryview(plain), KINDS[dtype]
    if found is None:
        return ladder_twin.encode(view, kind, channels, bytes_max)
    made = found.ladder_encode(view, kind, channels, bytes_max)
    return None if made is None else bytes(made)


def decode(way: str, stored: bytes, plain_bytes: int, dtype: DType) -> bytes | None:
    """None when refused; fails when anything outside the destination was written."""
    found = kernel(way)
    arena = bytearray(b"\xa5" * (plain_bytes + 2 * GUARD))
    into = memoryview(arena)[GUARD : GUARD + plain_bytes]
    try:
        if found is None:
            ladder_twin.decode_into(memoryview(stored), KINDS[dtype], into)
        elif found.ladder_decode(memoryview(stored), KINDS[dtype], into):
            return None
    except CodecError:
        return None
    finally:
        assert arena[:GUARD] == arena[-GUARD:] == b"\xa5" * GUARD, way
    return bytes(into)


def check(plain: bytes, dtype: DType, channels: bool, bytes_max: int | None = None) -> bytes | None:
    """All ways encode the same, and each decodes it to the plain bytes."""
    room = 3 * len(plain) + 4096 if bytes_max is None else bytes_max
    made = [encode(way, plain, dtype, channels, room) for way in ways()]
    assert all(one == made[0] for one in made)
    if made[0] is not None:
        assert len(made[0]) <= room
        for way in ways():
            assert decode(way, made[0], len(plain), dtype) == plain, way
    return made[0]


def activations(dtype: DType, rows: int, channels: int, seed: int = 1) -> bytes:
    """Normal values; each channel has its own scale, each 40 rows another order of channels."""
    rng = np.random.default_rng(seed)
    scales = rng.lognormal(0, 0.6, (rows // 40 + 1, channels)).repeat(40, 0)[:rows]
    values = (rng.standard_normal((rows, channels)) * scales).reshape(-1).astype(np.float32)
    if dtype is DType.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    half = values.astype(np.float16).view(np.uint16)
    if dtype is DType.FP16:
        return half.tobytes()
    if dtype is DType.FP8_E5M2:
        return (half >> 8).astype(np.uint8).tobytes()
    exponents = np.clip((half >> 10 & 31).astype(int) - 7, 0, 15)
    return (half >> 8 & 0x80 | exponents << 3 | half >> 7 & 7).astype(np.uint8).tobytes()


@every_kind
@by_channel
@pytest.mark.parametrize("channels", [64, 96, 128, 384, 1024, 2048])
def test_activations_come_back(dtype: DType, by_channel: bool, channels: int) -> None:
    plain = activations(dtype, 50_000 // channels, channels)
    assert check(plain, dtype, by_channel) is not None


@every_kind
@by_channel
@pytest.mark.parametrize("values", [1, 31, 32, 33, 64, 255, 16_383, 16_416, 40_001])
def test_every_length_comes_back(dtype: DType, by_channel: bool, values: int) -> None:
    for odd in (0, 1):
        plain = activations(dtype, values // 64 + 1, 64)[: values * dtype.item_bytes + odd]
        check(plain, dtype, by_channel)


@every_kind
@by_channel
def test_every_bit_pattern_comes_back(dtype: DType, by_channel: bool) -> None:
    every = np.arange(65_536, dtype="<u2").tobytes()  # NaNs, zeros of both signs, denormals
    if dtype.item_bytes == 1:
        every = bytes(range(256)) * 4
    common = activations(dtype, len(every) // 16, 64)
    assert check(common + every + common, dtype, by_channel) is not None


@every_kind
@by_channel
def test_zeros_amid_values_come_back(dtype: DType, by_channel: bool) -> None:
    plain = bytearray(activations(dtype, 500, 128))
    plain[10_000:30_000] = bytes(20_000)
    assert check(bytes(plain), dtype, by_channel) is not None


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(list(KINDS)),
    channels=st.booleans(),
    values=st.integers(1, 9000),
    wide=st.integers(1, 200),
)
def test_random_exponents_come_back(
    seed: int, dtype: DType, channels: bool, values: int, wide: int
) -> None:
    rng = np.random.default_rng(seed)
    base = int(rng.integers(0, 256))
    exponents = (base + rng.integers(0, wide, values) * rng.integers(0, 2, values)) & 0xFF
    bits = (exponents << 7 | rng.integers(0, 128, values)).astype("<u2")
    plain = bits.tobytes()[: values * dtype.item_bytes]
    check(plain, dtype, channels)
    check(plain, dtype, channels, len(plain) * 970 // 1000)


@settings(max_examples=25)
@given(plain=st.binary(min_size=1, max_size=3000), dtype=st.sampled_from(list(KINDS)))
def test_any_bytes_come_back(plain: bytes, dtype: DType) -> None:
    for channels in (False, True):
        check(plain * 3, dtype, channels)


@every_kind
@by_channel
def test_room_that_is_one_byte_short_is_refused(dtype: DType, by_channel: bool) -> None:
    plain = activations(dtype, 300, 96)
    made = check(plain, dtype, by_channel)
    assert made is not None
    for short in (1, 2, 1000, len(made)):
        assert check(plain, dtype, by_channel, len(made) - short) is None
    assert check(plain, dtype, by_channel, len(made)) == made


@every_kind
def test_a_section_with_the_tables_of_the_one_before_needs_no_room_for_its_own(
    dtype: DType,
) -> None:
    """Also where it is shorter than tables are."""
    section = 32_768 // 96 * 96
    plain = activations(dtype, 500, 96)[: (section + 32) * dtype.item_bytes]
    made = check(plain, dtype, channels=True)
    assert made is not None
    assert ladder_twin.HEAD.unpack_from(made)[4] == 96
    assert check(plain, dtype, True, len(made)) == made
    assert check(plain, dtype, True, len(made) - 1) is None


@every_kind
@by_channel
def test_noise_is_declined(dtype: DType, by_channel: bool) -> None:
    for size in (1, 64, 5000, 100_000):
        plain = random.Random(size).randbytes(size)
        assert check(plain, dtype, by_channel, size * 970 // 1000) is None


@every_kind
@by_channel
def test_every_truncation_and_extension_is_refused(dtype: DType, by_channel: bool) -> None:
    plain = activations(dtype, 6, 64)[:-1]
    made = check(plain, dtype, by_channel)
    assert made is not None
    for way in ways():
        for end in range(len(made)):
            assert decode(way, made[:end], len(plain), dtype) is None, (way, end)
        assert decode(way, made + b"\0", len(plain), dtype) is None
        for size in (0, 1, len(plain) - 64, len(plain) + 1, len(plain) + 64, 2 * len(plain)):
            assert decode(way, made, size, dtype) is None, (way, size)


@every_kind
@by_channel
def test_damage_is_refused_alike(dtype: DType, by_channel: bool) -> None:
    """The three agree on what they refuse, and on what they make of what they do not."""
    plain = activations(dtype, 100, 64)
    made = check(plain, dtype, by_channel)
    assert made is not None
    rng = random.Random(1)
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(made)
        for _ in range(rng.choice((1, 1, 4))):
            at = rng.choice((rng.randrange(60), rng.randrange(len(made))))
            damaged[at] = rng.randrange(256)
        found = [decode(way, bytes(damaged), len(plain), dtype) for way in ways()]
        assert all(one == found[0] for one in found), damaged[:60].hex()
        outcomes.add(found[0] is None)
    assert outcomes == {True, False}


@every_kind
@pytest.mark.parametrize("values", [64, 2048, 32_768, 32_800, 70_016])
def test_codes_of_three_bits_come_back(dtype: DType, values: int) -> None:
    """Where they cost little of what is saved: bf16 with one scale. Elsewhere none are taken."""
    rng = np.random.default_rng(values)
    bits = (rng.standard_normal(values).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    made = check(bits.tobytes()[: values * dtype.item_bytes], dtype, channels=False)
    if dtype is DType.BF16 and values >= 2048:
        assert made is not None
        assert made[ladder_twin.HEAD.size] >> 3 == 1
        for wrong in (0x10, 0x01, 0x0F):  # an unknown flag; three bits and two
            damaged = bytearray(made)
            damaged[ladder_twin.HEAD.size] |= wrong
            assert all(decode(way, bytes(damaged), 2 * values, dtype) is None for way in ways())
        with_rows = bytearray(made)
        with_rows[4] = 32  # three bits and a period
        assert all(decode(way, bytes(with_rows), 2 * values, dtype) is None for way in ways())


@pytest.mark.parametrize("rare", [0.0, 0.005, 0.05, 0.2])
def test_few_and_many_escapes_from_three_bits(rare: float) -> None:
    """Whatever number of 64 values escapes, also all of them in one place."""
    rng = np.random.default_rng(int(rare * 1000))
    exponents = 118 + rng.integers(0, 7, 40_000) * (rng.random(40_000) < 0.6)
    exponents[rng.random(40_000) < rare] = 70
    exponents[20_000:20_200] = rng.integers(0, 256, 200)
    bits = (exponents << 7 | rng.integers(0, 128, 40_000)).astype("<u2")
    assert check(bits.tobytes(), DType.BF16, channels=False) is not None


def test_channels_are_found_and_pay() -> None:
    """Scales that differ by channel cost `fast`, and not `dense`."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((512, 192)) * rng.lognormal(0, 1.5, 192)
    plain = (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    fast = check(plain, DType.BF16, channels=False)
    dense = check(plain, DType.BF16, channels=True)
    assert fast is not None
    assert dense is not None
    assert ladder_twin.HEAD.unpack_from(dense)[4] == 192
    assert len(dense) * 1.04 < len(fast)


@every_kind
def test_values_without_channels_have_no_rows(dtype: DType) -> None:
    """`dense` is never much worse than `fast` where channels do not differ."""
    values = np.random.default_rng(3).standard_normal(60_000).astype(np.float32)
    bits = values.astype(np.float16) if dtype is not DType.BF16 else values.view(np.uint32) >> 16
    plain = bits.view(np.uint16).tobytes() if dtype is DType.FP16 else bits.astype("<u2").tobytes()
    if dtype in (DType.FP8_E4M3, DType.FP8_E5M2):
        plain = values.astype(np.float16).view(np.uint8)[1::2].tobytes()
    fast, dense = (check(plain, dtype, channels) for channels in (False, True))
    if dtype is not DType.FP8_E4M3:  # whose cut takes a bit of the mantissa for the exponent's here
        assert fast is not None
        assert dense is not None
        assert ladder_twin.HEAD.unpack_from(dense)[4] == 0
        assert len(dense) <= len(fast) * 1.001


def test_padding_and_short_mantissas_go_to_planes() -> None:
    for plain in (bytes(100_000), np.ones(50_000, np.float16).tobytes() + bytes(1000)):
        for dtype in (DType.BF16, DType.FP16, DType.FP8_E4M3):
            made = codecs.by_name("dense").encode(memoryview(plain), dtype)
            assert made is not None
            assert bytes(made[:1]) == ladder._PLANE
            into = bytearray(len(plain))
            codecs.by_name("dense").decode_into(memoryview(made), memoryview(into), dtype)
            assert into == plain


def test_dtypes_without_a_short_exponent() -> None:
    plain = activations(DType.BF16, 500, 64)
    into = memoryview(bytearray(len(plain)))
    for dtype in set(DType) - set(KINDS):
        assert codecs.by_name("fast").encode(memoryview(plain), dtype) is None
        for name in ("fast", "dense"):
            with pytest.raises(CodecError):
                codecs.by_name(name).decode_into(memoryview(b"\x01" * 1000), into, dtype)


def test_a_read_only_destination_is_refused() -> None:
    plain = activations(DType.BF16, 500, 64)
    made = codecs.by_name("fast").encode(memoryview(plain), DType.BF16)
    assert made is not None
    with pytest.raises((TypeError, ValueError)):
        codecs.by_name("fast").decode_into(
            memoryview(made), memoryview(bytes(len(plain))), DType.BF16
        )


@pytest.mark.parametrize("case", json.loads((VECTORS / "ladder.json").read_text()))
def test_golden_chunks(case: dict[str, Any]) -> None:
    """Stored chunks decode for ever, whichever way, to what they were made from."""
    stored = (VECTORS / f"ladder_{case['name']}.bin").read_bytes()
    dtype = DType.from_name(case["dtype"])
    for way in ways():
        plain = decode(way, stored, case["plain_bytes"], dtype)
        assert plain is not None, way
        assert hashlib.sha256(plain).hexdigest() == case["plain_sha256"]
        codec = codecs.by_name(case["codec"])
        into = bytearray(len(plain))
        codec.decode_into(memoryview(stored), memoryview(into), dtype)
        assert into == plain
