"""Names of LMCache's objects: every field that LMCache tells apart gives another name."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from entresol_client.engines import lmcache_keys as keys
from entresol_proto import limits
from entresol_proto.ids import check_engine_key
from entresol_proto.status import ConfigError

HASH = bytes(range(32))
LAYOUT: keys.Layout = (((2, 4, 256, 128), "bfloat16"),)


def test_every_field_of_an_object_key_takes_part_in_the_key() -> None:
    hashes = [HASH, HASH[:-1] + b"\0"]
    ranks, groups = [0, 1, 2**24, 2**40], [0, 1]
    salts = ["", "team-a", "team-b"]
    cases = list(itertools.product(hashes, ranks, groups, salts))
    names = {keys.engine_key(*case) for case in cases}
    assert len(names) == len(cases)
    for name in names:
        check_engine_key(name)


def test_the_longest_fields_still_make_a_key_and_one_byte_more_is_refused() -> None:
    longest = bytes(keys.CHUNK_HASH_BYTES_MAX)
    key = keys.engine_key(longest, keys.KV_RANK_MAX, keys.GROUP_MAX, "s" * 128)
    assert len(key) == limits.ENGINE_KEY_BYTES_MAX
    with pytest.raises(ConfigError, match="chunk hash"):
        keys.engine_key(longest + b"\0", 0, 0, "")
    with pytest.raises(ConfigError, match="out of range"):
        keys.engine_key(HASH, keys.KV_RANK_MAX + 1, 0, "")
    with pytest.raises(ConfigError, match="out of range"):
        keys.engine_key(HASH, 0, keys.GROUP_MAX + 1, "")


def test_the_short_hashes_of_lmcaches_own_checks_make_keys() -> None:
    assert check_engine_key(keys.engine_key(b"\0\0\0\1", 0, 0, ""))


def test_a_salt_is_not_in_the_key_as_text() -> None:
    assert b"team-a" not in keys.engine_key(HASH, 0, 0, "team-a")


@pytest.mark.parametrize(
    "other",
    [
        {"model": "m2"},
        {"revision": "r2"},
        {"layout": (((2, 4, 256, 128), "float16"),)},
        {"layout": (((2, 4, 128, 256), "bfloat16"),)},
        {"layout": (((2, 4, 256, 64), "bfloat16"), ((2, 4, 256, 64), "bfloat16"))},
        {"kv_format": "f2"},
        {"hash_bytes": 16},
    ],
    ids=lambda other: "-".join(other),
)
def test_another_model_layout_or_format_is_another_namespace(other: dict[str, object]) -> None:
    usual = {
        "model": "m",
        "revision": "r",
        "layout": LAYOUT,
        "kv_format": "f",
        "hash_bytes": 32,
    }
    first = keys.descriptor(**usual)  # type: ignore[arg-type]
    second = keys.descriptor(**{**usual, **other})  # type: ignore[arg-type]
    assert first.canonical() != second.canonical()


def test_a_descriptor_tells_people_layers_tokens_and_dtype() -> None:
    found = keys.descriptor("m", "r", LAYOUT, "f", 32)
    assert (found.layers, found.block_tokens, found.dtype) == (4, 256, "bf16")
    odd = keys.descriptor("m", "r", (((7,), "uint8"),), "f", 32)
    assert (odd.layers, odd.block_tokens, odd.dtype) == (0, 1, "opaque")
    assert keys.descriptor("m", "r", (), "f", 32).dtype == "opaque"


def test_layouts_are_the_same_however_they_are_spelt() -> None:
    class Dtype:  # as torch prints one
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert keys.layout_of([[2, 4, 256, 128]], [Dtype()]) == LAYOUT
    assert keys.layout_of([(2, 4, 256, 128)], ["bfloat16"]) == LAYOUT


def test_a_chunk_longer_than_a_block_of_tokens_still_has_a_namespace() -> None:
    found = keys.descriptor(
        "m", "r", (((2, 4, 2 * limits.TOKENS_PER_BLOCK_MAX, 8), "int8"),), "f", 32
    )
    assert found.block_tokens == limits.TOKENS_PER_BLOCK_MAX
    assert dataclasses.replace(found, block_tokens=1).page_layout == found.page_layout
