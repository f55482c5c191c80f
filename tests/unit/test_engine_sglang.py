"""Names of SGLang's pages: whatever changes a page's bytes gives another namespace or key."""

from __future__ import annotations

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entresol_client.engines import sglang_pages as pages
from entresol_proto.ids import check_engine_key
from entresol_proto.status import ConfigError

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


PROMPT = [*range(1000, 1020), 2**32 - 1, 0, 7, 8]


@pytest.mark.parametrize(
    ("extra_key", "cache_salt", "last"),
    [
        (None, None, "69124fdc8f0cc8fd6825c60b5e8f9f879524053e9cba2f3b772ae9606b068ef5"),
        (None, "someone", "4701029417db107bdadf04b45c7523813a584ba8eb72931c431c9de485dcdf7c"),
        ("lora-7", None, "ea6c04fbe0d45b9b169ce5f336a22925837016756707150555973cce16973d7f"),
        ("lora-7", "gr\u00fcn", "dc9045134b433a350f8fdcf59f817248d2614c0fc2091669e4e9a396970c4903"),
        ("", "", "486e56cba3eb8f82643ef444ed9bfc92b4a17e21e32f1a09487549c0b96043f3"),
    ],
)
def test_page_hashes_are_those_of_sglang(
    extra_key: str | None, cache_salt: str | None, last: str
) -> None:
    """Vectors from the native hash of SGLang 0.5.23; its own code is asked in tests/engines."""
    found = pages.page_hashes(PROMPT, 8, extra_key=extra_key, cache_salt=cache_salt)
    assert (len(found), found[-1]) == (3, last)
    cut = pages.page_hashes([*PROMPT, 1, 2, 3], 8, extra_key=extra_key, cache_salt=cache_salt)
    assert cut == found  # what fills no page has no name
    assert pages.page_hashes(PROMPT[:7], 8) == []


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


def device(**changes: Any) -> Any:
    """A device pool of SGLang's, as far as it is read."""
    usual = {"dtype": "torch.bfloat16", "store_dtype": "torch.bfloat16", "kv_cache_layout": "nhd"}
    return SimpleNamespace(**{**usual, **changes})


class Layout(enum.Enum):
    """As SGLang's KVBufferLayout."""

    NHD = "nhd"
    HND = "hnd"


def info(layout: Layout = Layout.NHD, **changes: Any) -> Any:
    """A buffer info of SGLang 0.5.23, which stands where the device pool stood."""
    return SimpleNamespace(dtype="torch.uint8", buffers=SimpleNamespace(layout=layout), **changes)


def state(*dtypes: str) -> list[Any]:
    return [SimpleNamespace(dtype=one) for one in dtypes]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"temporal_dtype": "torch.float16"}, {"temporal_dtype": "torch.bfloat16"}),
        ({"conv_dtype": "torch.float16"}, {"conv_dtype": "torch.bfloat16"}),
        ({"indexer_dtype": "torch.uint8"}, {"indexer_dtype": "torch.float8_e4m3fn"}),
        (
            {"slot_state_device_tensors": state("torch.float16")},
            {"slot_state_device_tensors": state("torch.bfloat16")},
        ),
        ({"device_pool": device()}, {"device_pool": device(kv_cache_layout="hnd")}),
        ({"device_pool": device(use_hnd=False)}, {"device_pool": device(use_hnd=True)}),
        (
            {"device_pool": device(store_dtype="torch.uint8", dtype="torch.float8_e4m3fn")},
            {"device_pool": device(store_dtype="torch.uint8", dtype="torch.float8_e5m2")},
        ),
        (
            {"decl": SimpleNamespace(device_pool=device(dtype="torch.float8_e4m3fn"))},
            {"decl": SimpleNamespace(device_pool=device(dtype="torch.float8_e4m3fnuz"))},
        ),
        ({"_buffer_infos": (info(),)}, {"_buffer_infos": (info(Layout.HND),)}),
        ({"_buffer_infos": (info(),)}, {"_buffer_infos": (info(packed_fp8=True),)}),
        ({"_buffer_infos": (info(),)}, {"_buffer_infos": (info(), info())}),
        ({"device_pool": device(quant_method=object())}, {"device_pool": device()}),
        ({"device_pool": MHATokenToKVPoolHost()}, {"device_pool": MLATokenToKVPoolHost()}),
        ({}, {"_buffer_infos": (info(),)}),
    ],
)
def test_how_rows_lie_on_the_device_is_in_the_name(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    """All of one size: a page is the same number of bytes, and they mean something else."""
    names = {name_of(config(), pool_of=pool(**changes)).canonical() for changes in (one, other)}
    assert len(names) == 2
    assert name_of(config(), pool_of=pool(**one)) == name_of(config(), pool_of=pool(**one))


def test_where_no_pool_tells_how_rows_lie_the_environment_does() -> None:
    def facts(pool_of: Any = None, **environment: str) -> dict[str, Any]:
        return pages.pool_facts(pool_of or pool(), environment)

    usual = facts(SGLANG_USE_HND_KVCACHE="0", SGLANG_AITER_KV_CACHE_LAYOUT="NHD")
    assert usual == facts()
    found = [
        facts(SGLANG_USE_HND_KVCACHE="1"), facts(SGLANG_AITER_KV_CACHE_LAYOUT="vectorized_5d"),
        facts(SGLANG_USE_AITER="1"),
    ]  # fmt: skip
    assert len({str(one) for one in [*found, usual]}) == 4
    told = pool(device_pool=device())
    assert facts(told, SGLANG_USE_HND_KVCACHE="1") == facts(told), "the pool has the last word"


@pytest.mark.parametrize(
    "change",
    [
        {"mamba_ssm_dtype": "float16"},
        {"mamba_ssm_dtype": "bfloat16"},
        {"device": "npu"},
        {"speculative_draft_model_path": "acme/draft"},
        {"load_format": "pt"},
        {"load_format": "sharded_state", "model_loader_extra_config": '{"pattern": "x"}'},
        {"load_format": "presharded", "model_loader_extra_config": '{"presharded_path": "/a"}'},
        {"load_format": "presharded", "model_loader_extra_config": '{"presharded_path": "/b"}'},
        {"speculative_draft_load_format": "gguf"},
        {"modelopt_quant": "fp8"},
        {"quantize_and_serve": True},
        {"modelopt_checkpoint_restore_path": "/a"},
        {"rl_quant_profile": "/a"},
        {"mm_process_config": {"image": {"max_pixels": 1048576}}},
        {"enable_precise_embedding_interpolation": True},
        {"enable_encoder_swa_bounded_replay": True},
        {"enable_decoder_swa_bounded_replay": True},
        {"enable_linear_replayssm": True},
        {"enable_linear_replayssm_spec": True},
        {"enable_int8_mamba_checkpoint": True},
        {"enable_deepseek_v4_fp4_indexer": True},
        {"experts_shared_outer_loras": True},
    ],
    ids=str,
)
def test_what_the_command_line_changes_about_the_bytes_is_in_the_name(
    change: dict[str, Any],
) -> None:
    usual = pages.engine_facts(SimpleNamespace(load_format="auto", model_loader_extra_config="{}"))
    assert set(usual.values()) == {""}
    assert pages.engine_facts(SimpleNamespace(**change)) != usual


def test_random_weights_are_refused_under_a_models_name() -> None:
    for name in ("load_format", "speculative_draft_load_format"):
        args = SimpleNamespace(**{name: "dummy"})
        for weights in ("auto", "off"):
            with pytest.raises(ConfigError, match="dummy"):
                pages.check_weights(args, weights)
        pages.check_weights(args, "bench-7")
    pages.check_weights(None, "auto")


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


def test_without_weights_the_models_own_path_is_in_the_name() -> None:
    """What an engine serves its model as may be another model's name, too."""
    found = [
        name_of(config(), engine=pages.engine_facts(SimpleNamespace(), "", path))
        for path in ("Qwen/one", "acme/tuned", "")
    ]
    assert len({str(one) for one in found}) == 3


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (None, False),
        (SimpleNamespace(), False),
        (SimpleNamespace(enable_multimodal=True), True),
        (SimpleNamespace(model_config=SimpleNamespace(is_multimodal=True)), True),
        (SimpleNamespace(get_model_config=lambda: SimpleNamespace(is_multimodal=True)), True),
        (SimpleNamespace(get_model_config=lambda: SimpleNamespace(is_multimodal=False)), False),
        (SimpleNamespace(get_model_config=lambda: 1 / 0, enable_multimodal=True), True),
        (
            SimpleNamespace(
                enable_multimodal=False, model_config=SimpleNamespace(is_multimodal=True)
            ),
            False,
        ),
    ],
)
def test_a_model_of_images_is_known(args: Any, expected: bool) -> None:
    assert pages.is_multimodal(args) is expected


def test_without_an_engine_its_arguments_are_empty() -> None:
    assert set(pages.engine_facts(None).values()) == {""}
    found = pages.engine_facts(SimpleNamespace(kv_cache_dtype="fp8_e4m3", dtype=None))
    assert found["kv_cache_dtype"] == "fp8_e4m3"
    assert found["dtype"] == ""
    scaled = SimpleNamespace(json_model_override_args='{"rope_scaling": {"factor": 4}}')
    assert pages.engine_facts(scaled) != pages.engine_facts(SimpleNamespace())


def test_adapters_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    """SGLang's hash has their name and path, which a new version of one keeps."""
    made: list[Any] = []
    for content in (b"one", b"two"):
        (tmp_path / "adapter_model.safetensors").write_bytes(content)
        for alpha in (16, 32):
            (tmp_path / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
            ref = SimpleNamespace(lora_name="sql", lora_path=str(tmp_path))
            forms = [ref, {"lora_name": "sql", "lora_path": str(tmp_path)}, f"sql={tmp_path}"]
            found = [pages.engine_facts(SimpleNamespace(lora_paths=[one])) for one in forms]
            assert found[0] == found[1] == found[2]
            made.append(found[0])
    assert len({str(one) for one in made}) == 4
    away = SimpleNamespace(lora_paths=["sql=somebody/sql"])
    with pytest.raises(ConfigError, match="somebody/sql"):
        pages.engine_facts(away)
    assert pages.engine_facts(away, "v1")["adapters"]
