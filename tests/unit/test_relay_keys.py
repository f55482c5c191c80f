"""The rule by which an engine key becomes a router's block hash, and which layout is published."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_client.engines import kvbm_space
from entresol_client.engines.naming import salted
from entresol_client.relay import keys
from entresol_client.relay.layouts import MATCH_FIELDS, Chooser, NamespaceInfo
from entresol_proto.ids import NamespaceDescriptor

SHA = hashlib.sha256(b"block").digest()
GROUP = (3).to_bytes(4, "big")
U64 = 0xFEDC_BA98_7654_3210


@pytest.mark.parametrize(
    ("maker", "key", "block_hash"),
    [
        ("vllm", SHA, SHA),
        ("vllm", SHA + GROUP, SHA),
        ("vllm-kvbm", U64.to_bytes(8, "big") + bytes(24), U64.to_bytes(8, "big")),
        ("opaque", SHA + GROUP, SHA),
        ("opaque", b"8 bytes.", b"8 bytes."),
        ("opaque", b"sixteen bytes of", b"sixteen bytes of"),
        ("lmcache", b"chunk-hash-and-rank-and-group", b"chunk-hash-and-rank-and-group"),
    ],
)
def test_the_hash_in_an_engine_key(maker: str, key: bytes, block_hash: bytes) -> None:
    assert keys.split(key, maker).hash == block_hash
    assert not keys.split(key, maker).salted


@pytest.mark.parametrize(
    ("maker", "key"), [("vllm", SHA), ("vllm", SHA + GROUP), ("vllm-kvbm", bytes(32))]
)
def test_a_salted_key_is_told_from_one_without(maker: str, key: bytes) -> None:
    parts = keys.split(salted(key, "grain"), maker)
    assert parts.salted
    assert parts.hash == keys.split(key, maker).hash
    assert parts.group == keys.split(key, maker).group


def test_the_number_of_a_hash_is_what_vllm_and_its_readers_cut_off() -> None:
    assert keys.number(SHA) == int.from_bytes(SHA, "big") & (2**64 - 1)
    assert keys.number(U64.to_bytes(8, "big")) == U64


def test_the_maker_is_what_stands_before_the_fingerprint() -> None:
    for layout in ("vllm-kvbm/0123", "vllm-kvbm:0123", "vllm-kvbm"):
        assert keys.maker_of(layout) == "vllm-kvbm"
    assert keys.maker_of("vllm:0123/45") == "vllm"


def test_the_kvbm_adapter_names_itself_so() -> None:
    source = Path(kvbm_space.__file__).read_text(encoding="utf-8")
    assert 'page_layout=f"vllm-kvbm/' in source


def test_kvbm_keys_give_kvbms_own_hash() -> None:
    pytest.importorskip("xxhash", reason="not run here: KVBM's hashes need xxhash")
    from entresol_client.engines.kvbm_hash import KeyChain

    chain = KeyChain(16)
    chain.extend(list(range(64)))
    found = [keys.number(keys.split(key, "vllm-kvbm").hash) for key in chain.keys]
    assert found == chain.sequence_hashes


@pytest.mark.parametrize("block_hash", [U64, SHA])
def test_parts_of_a_chunk_have_names_of_their_own(block_hash: keys.Hash) -> None:
    names = keys.names_in_chunk(block_hash, 4)
    assert names[-1] == block_hash
    assert len(set(names)) == 4
    assert names == keys.names_in_chunk(block_hash, 4), "every relay gives the same names"
    assert {type(name) for name in names} == {type(block_hash)}
    assert keys.names_in_chunk(block_hash, 1) == (block_hash,)
    other = keys.names_in_chunk(U64 + 1 if block_hash == U64 else bytes(32), 4)
    assert not set(names) & set(other)


# Layouts ------------------------------------------------------------------------------------------


def info(number: int, *, blocks: int = 1, **fields: str | int) -> NamespaceInfo:
    given = NamespaceDescriptor(**{"model": "m", **fields})  # type: ignore[arg-type]
    return NamespaceInfo(
        "s", bytes([number]) * 16, tuple(getattr(given, name) for name in MATCH_FIELDS),
        given.lora or "", given.cache_salt is not None, given.tp_rank, given.pp_rank, blocks,
    )  # fmt: skip


def test_ranks_adapters_and_shards_are_one_layout() -> None:
    found = [
        info(1, tp_world=2),
        info(2, tp_world=2, tp_rank=1),
        info(3, tp_world=2, lora="tuned"),
        replace(info(4, tp_world=2), shard="other"),
    ]
    chooser = Chooser()
    chooser.choose(found)
    assert not chooser.others
    assert all(chooser.admits(one) for one in found)
    assert [one.rank for one in found] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "change",
    [{"model_revision": "other"}, {"dtype": "fp8_e4m3"}, {"page_layout": "other"},
     {"block_tokens": 32}, {"tp_world": 4}, {"model": "n"}],
)  # fmt: skip
def test_two_layouts_are_never_published_as_one(change: dict[str, str | int]) -> None:
    chooser = Chooser()
    chooser.choose([info(1), info(2, **change)])
    assert chooser.chosen is None
    assert len(chooser.others) == 2
    (name, value), *_ = change.items()
    chooser = Chooser({name: str(value)})
    chooser.choose([info(1), info(2, **change)])
    assert not chooser.admits(info(1))
    assert chooser.admits(info(2, **change))
    assert not chooser.others


def test_a_layout_without_blocks_gives_way_and_a_chosen_one_stays() -> None:
    chooser = Chooser()
    chooser.choose([info(1, blocks=0, dtype="fp16"), info(2)])
    assert chooser.chosen == info(2).layout
    chooser.choose([info(1, blocks=9, dtype="fp16"), info(2)])
    assert chooser.chosen == info(2).layout
    assert chooser.others == {info(1, dtype="fp16").layout}


def test_a_salted_namespace_is_not_published() -> None:
    chooser = Chooser()
    chooser.choose([info(1), info(2, cache_salt="grain")])
    assert chooser.admits(info(1))
    assert not chooser.admits(info(2, cache_salt="grain"))


@pytest.mark.parametrize(
    "place",
    [{"tp_rank": 2}, {"pp_rank": 1}, {"tp_rank": 1 << 31}, {"tp_world": 4096, "pp_world": 4096}],
)
def test_a_rank_that_its_layout_does_not_have_is_not_published(place: dict[str, int]) -> None:
    """A block's state has a place for every rank: one far out took gigabytes for two blocks."""
    one = info(1, **{"tp_world": 2, **place})
    chooser = Chooser()
    chooser.choose([one])
    assert not chooser.admits(one)
    assert one.ranks > 2 or chooser.admits(info(1, tp_world=2, tp_rank=1))


def test_patterns_narrow() -> None:
    chooser = Chooser({"model_revision": "v2*", "tp_world": "[24]"})
    chooser.choose([info(1), info(2, model_revision="v2.1", tp_world=4)])
    assert chooser.admits(info(2, model_revision="v2.1", tp_world=4))
    assert not chooser.admits(info(1))
