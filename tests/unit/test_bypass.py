"""Blocks that do not shrink: hardly looked at, and noticed soon when they shrink again; bounded."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from entresol_proto import native
from entresol_proto.seal import block, bypass, codecs
from entresol_proto.seal.bypass import SKIPPED_MAX, TRIES, Bypass
from entresol_proto.seal.dtypes import DType

SPACE, OTHER = b"a" * 16, b"b" * 16
CHUNK = 64 * 1024

needs_kernel = pytest.mark.skipif(
    native.KERNEL is None, reason="not run here: the package was built without a C compiler"
)


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def activations(size: int) -> bytes:
    values = np.random.default_rng(1).standard_normal(size // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def step(of: Bypass, shrinks: bool, namespace_id: bytes = SPACE) -> int:
    """One block; returns what it was tried with."""
    tried = of.codec(namespace_id, DType.BF16, codecs.FAST)
    became = codecs.FAST if shrinks and tried == codecs.FAST else codecs.RAW
    of.learn(namespace_id, DType.BF16, tried, became)
    return tried


def test_most_blocks_that_never_shrink_are_not_looked_at() -> None:
    of = Bypass()
    tried = [step(of, shrinks=False) for _ in range(1000)]
    assert tried[:TRIES] == [codecs.FAST] * TRIES
    looked_at = 1000 - tried.count(codecs.RAW)
    assert looked_at < TRIES + 6 + 1000 // SKIPPED_MAX
    assert of.skipped == 1000 - looked_at


def test_pauses_double_up_to_the_longest() -> None:
    of = Bypass()
    looked_at = [at for at in range(300) if step(of, shrinks=False) == codecs.FAST]
    pauses = [after - at - 1 for at, after in itertools.pairwise(looked_at)]
    assert pauses == [0] * (TRIES - 1) + [1, 2, 4, 8, 16, 32, 64, 64, 64]
    before = of.skipped
    assert of.codec(SPACE, DType.BF16, codecs.RAW) == codecs.RAW
    assert of.skipped == before, "what was to be raw was not skipped"


@pytest.mark.parametrize("before", [0, 1, TRIES, TRIES + 3, 50, 1000])
def test_blocks_that_shrink_again_are_noticed_in_time(before: int) -> None:
    of = Bypass()
    for _ in range(before):
        step(of, shrinks=False)
    tried = [step(of, shrinks=True) for _ in range(SKIPPED_MAX + 20)]
    found = tried.index(codecs.FAST)
    assert found <= SKIPPED_MAX
    assert set(tried[found:]) == {codecs.FAST}  # nothing is held against them


def test_now_and_then_a_block_that_does_not_shrink_changes_nothing() -> None:
    of = Bypass()
    assert all(step(of, shrinks=at % TRIES != 0) == codecs.FAST for at in range(200))


def test_namespaces_and_dtypes_are_apart_and_raw_is_raw() -> None:
    of = Bypass()
    for _ in range(50):
        step(of, shrinks=False)
    assert of.codec(OTHER, DType.BF16, codecs.FAST) == codecs.FAST
    assert of.codec(SPACE, DType.FP16, codecs.FAST) == codecs.FAST
    assert of.codec(SPACE, DType.BF16, codecs.RAW) == codecs.RAW


def test_many_tried_at_once_do_not_lengthen_the_pause() -> None:
    """A window of blocks is decided before the outcome of the first is known."""
    of = Bypass()
    for _ in range(500):
        of.learn(SPACE, DType.BF16, codecs.FAST, codecs.RAW)
    tried = [of.codec(SPACE, DType.BF16, codecs.FAST) for _ in range(SKIPPED_MAX + 1)]
    assert tried.index(codecs.FAST) == SKIPPED_MAX


def test_places_are_bounded_and_the_oldest_go() -> None:
    of = Bypass(places_max=8)
    for number in range(100):
        for _ in range(TRIES):
            step(of, shrinks=False, namespace_id=number.to_bytes(16, "big"))
    assert len(of._places) == 8
    assert step(of, shrinks=True, namespace_id=(99).to_bytes(16, "big")) == codecs.RAW
    assert step(of, shrinks=True, namespace_id=(0).to_bytes(16, "big")) == codecs.FAST
    assert bypass.PLACES_MAX >= 256


def test_namespaces_of_one_tenant_push_out_no_other_ones() -> None:
    of = Bypass(places_max=8)
    for _ in range(TRIES):
        of.learn(SPACE, DType.BF16, codecs.FAST, codecs.RAW, "mine")
    for number in range(100):
        of.learn(number.to_bytes(16, "big"), DType.BF16, codecs.FAST, codecs.RAW, "theirs")
    assert len(of._places) == 8
    assert of.codec(SPACE, DType.BF16, codecs.FAST, "theirs") == codecs.FAST
    assert of.codec(SPACE, DType.BF16, codecs.FAST, "mine") == codecs.RAW
    of.forget("mine")
    assert of.codec(SPACE, DType.BF16, codecs.FAST, "mine") == codecs.FAST
    assert len(of._places) == 7


@needs_kernel
@pytest.mark.parametrize("name", ["fast", "dense"])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.FP8_E4M3, DType.FP8_E5M2])
def test_noise_is_hopeless_and_what_shrinks_is_not(name: str, dtype: DType) -> None:
    codec = codecs.by_name(name)
    for seed in range(50):
        first, last = memoryview(noise(CHUNK, seed)), memoryview(noise(500 + seed, seed + 50))
        assert codec.hopeless(first, last, dtype)
    good = memoryview(activations(CHUNK))
    if dtype is DType.BF16:
        assert not codec.hopeless(good, good, dtype)
        assert not codec.hopeless(first, good, dtype)
        assert not codec.hopeless(good, last, dtype)
    if name == "dense":
        padding = memoryview(bytes(CHUNK))
        assert not codec.hopeless(first, padding, dtype)
        assert not codec.hopeless(padding, last, dtype)


@needs_kernel
@pytest.mark.parametrize("name", ["fast", "dense"])
def test_sealing_noise_never_encodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look is all it costs: no chunk is handed to the encoder."""
    codec = codecs.by_name(name)
    calls: list[int] = []
    encode = type(codec).encode
    monkeypatch.setattr(
        type(codec),
        "encode",
        lambda self, plain, dtype: calls.append(1) or encode(self, plain, dtype),
    )
    salt = block.new_salt()
    key = block.derive_block_key(bytes(range(32)), salt)

    def seal(plain: bytes) -> int:
        out = memoryview(bytearray(block.sealed_bytes_max(len(plain), chunk_bytes=CHUNK)))
        return block.seal_into(
            out, memoryview(plain),
            identity=block.BlockIdentity(SPACE, bytes(range(16)), bytes(32), DType.BF16, 1),
            block_key=key, salt=salt, codec_id=codec.codec_id, meta=None, chunk_bytes=CHUNK,
        ).codec_id  # fmt: skip

    assert seal(noise(4 * CHUNK)) == codecs.RAW
    assert not calls
    assert seal(activations(4 * CHUNK)) == codec.codec_id
    assert len(calls) == 4
