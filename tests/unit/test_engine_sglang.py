"""Names of SGLang's pages: whatever changes a page's bytes gives another namespace or key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from entresol_client.engines import sglang_pages as pages
from entresol_proto.ids import check_engine_key

HASH = "ab" * 32


class MHATokenToKVPoolHost(SimpleNamespace):
    """Carries the attributes that a host pool of SGLang has."""


class MLATokenToKVPoolHost(SimpleNamespace):
    pass


def pool(kind: Any = MHATokenToKVPoolHost, **changes: Any) -> Any:
    usual = {
        "dtype": "torch.bfloat16",
        "layout": "page_first",
        "page_size": 64,
        "size_per_token": 1024,
        "storage_format_tag": None,
        "start_layer": 0,
        "end_layer": 4,
        "layer_num": 4,
        "head_num": 2,
        "head_dim": 64,
        "size": 4096,
    }
    return kind(**{**usual, **changes})


def config(**changes: Any) -> Any:
    usual = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "model_name": "tiny",
    }
    return SimpleNamespace(**{**usual, **changes})


def name_of(
    config_of: Any, pool_name: str = pages.KV, pool_of: Any = None, **changes: Any
) -> pages.NamespaceDescriptor:
    usual: dict[str, Any] = {
        "piece_bytes": (65536, 65536),
        "engine": {"kv_cache_dtype": "auto"},
        "revision": "main",
        "kv_format": "sglang-0",
        "cache_salt": None,
    }
    return pages.descriptor(config_of, pool_name, pool_of or pool(), **{**usual, **changes})


def test_pieces_and_hashes_have_keys_of_their_own() -> None:
    names = [HASH, "cd" * 32, HASH + "ab", "not-hex", "AB" * 32, "ab" * 4, f"{HASH}.mamba"]
    keys = {pages.page_key(name, piece) for name in names for piece in range(pages.PIECES_MAX)}
    assert len(keys) == len(names) * pages.PIECES_MAX
    for key in keys:
        check_engine_key(key)
    assert pages.page_key(HASH, 1) == bytes.fromhex(HASH) + b"\1"


@pytest.mark.parametrize(
    "other",
    [
        {"config_of": config(model_name="other")},
        {"config_of": config(tp_size=2)},
        {"config_of": config(tp_rank=1, tp_size=2)},
        {"config_of": config(pp_size=2)},
        {"config_of": config(attn_cp_size=2)},
        {"config_of": config(dcp_size=2, dcp_rank=1)},
        {"config_of": config(is_mla_model=True)},
        {"pool_name": "swa"},
        {"pool_of": pool(dtype="torch.float16")},
        {"pool_of": pool(layout="layer_first")},
        {"pool_of": pool(page_size=32)},
        {"pool_of": pool(head_num=1)},
        {"pool_of": pool(storage_format_tag="fp8")},
        {"pool_of": pool(start_layer=4, end_layer=8)},
        {"pool_of": pool(MLATokenToKVPoolHost)},
        {"piece_bytes": (131072,)},
        {"engine": {"kv_cache_dtype": "fp8_e5m2"}},
        {"revision": "main+w:1"},
        {"kv_format": "sglang-1"},
        {"cache_salt": "engine-b"},
    ],
)
def test_whatever_changes_the_bytes_makes_another_namespace(other: dict[str, Any]) -> None:
    usual = {"config_of": config()}
    assert name_of(**usual).canonical() != name_of(**{**usual, **other}).canonical()


def test_how_much_a_host_holds_changes_nothing() -> None:
    assert name_of(config(), pool_of=pool(size=8)) == name_of(config(), pool_of=pool(size=9))


def test_replicated_pools_have_one_namespace_for_all_ranks_and_worlds() -> None:
    latent = pool(MLATokenToKVPoolHost)
    first = name_of(config(is_mla_model=True, tp_size=8), pool_of=latent)
    second = name_of(config(is_mla_model=True, tp_rank=3, tp_size=4), pool_of=latent)
    assert first == second
    assert (first.tp_rank, first.tp_world) == (0, 1)


def test_state_and_heads_stay_sharded_where_the_models_kv_is_replicated() -> None:
    assert not pages.is_sharded(pages.KV, pool(MLATokenToKVPoolHost), is_mla=True)
    assert pages.is_sharded(pages.MAMBA, pool(MLATokenToKVPoolHost), is_mla=True)
    assert pages.is_sharded("draft", pool(), is_mla=True)
    assert pages.is_sharded(pages.KV, pool(MLATokenToKVPoolHost), is_mla=False)


def test_without_an_engine_its_arguments_are_empty() -> None:
    assert set(pages.engine_facts(None).values()) == {""}
    found = pages.engine_facts(SimpleNamespace(kv_cache_dtype="fp8_e4m3", dtype=None))
    assert found["kv_cache_dtype"] == "fp8_e4m3"
    assert found["dtype"] == ""
