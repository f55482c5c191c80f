"""The namespace of KVBM's blocks: whatever changes a block's bytes changes it, or is not served."""

from __future__ import annotations

import dataclasses
import json
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entresol_client.engines import kvbm_space
from entresol_client.engines.kvbm_space import KvbmSettings, describe, unfit
from entresol_proto.status import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "client" / "KVBM.md"
LAYOUT = {"layers": 2, "shapes": ["p1:2;"], "planes": [1], "page_bytes": [64], "dtypes": ["bf16"]}


class FullAttentionSpec(SimpleNamespace):
    """vLLM's, by name: that is what is looked at."""


class SlidingWindowSpec(SimpleNamespace):
    """The same."""


class FlashLayer(SimpleNamespace):
    """A layer of a built model."""

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "FLASH_ATTN")


def engine(tmp_path: Path, **changes: Any) -> tuple[Any, Any]:
    """vLLM's configuration of an engine, and of its caches; `changes` by dotted name."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "a.safetensors").write_bytes(b"weights" * 100)
    facts = {"rope_theta": 1e4, "_name_or_path": str(model), "transformers_version": "5"}
    facts |= changes.pop("hf", {})
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model), revision=None, quantization=None, dtype="torch.bfloat16",
            hf_config=SimpleNamespace(to_json_string=lambda use_diff: json.dumps(facts)),
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=16, calculate_kv_scales=False
        ),
        parallel_config=SimpleNamespace(
            rank=0, tensor_parallel_size=1, pipeline_parallel_size=1,
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
    )  # fmt: skip
    spec = FullAttentionSpec(dtype="torch.bfloat16", num_kv_heads=2, head_size=64)
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    for name, value in changes.items():
        place, _, last = name.rpartition(".")
        owner = spec if place == "spec" else getattr(config, place) if place else config
        setattr(owner, last, value)
    return config, caches


def namespace(
    tmp_path: Path,
    layout: dict[str, Any] | None = None,
    settings: Any = None,
    version: str = "0.32.0",
    **changes: Any,
) -> Any:
    config, caches = engine(tmp_path, **changes)
    settings = settings or KvbmSettings()
    return describe(config, caches, settings, {**LAYOUT, **(layout or {})}, version=version)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"hf": {"rope_theta": 5e5}},
        {"model_config.revision": "v2"},
        {"model_config.quantization": "fp8"},
        {"model_config.dtype": "torch.float16"},
        {"cache_config.cache_dtype": "fp8"},
        {"cache_config.block_size": 32},
        {"parallel_config.tensor_parallel_size": 2},
        {"spec.dtype": "torch.float16"},
        {"spec.num_kv_heads": 4},
        {"spec.head_size": 128},
        {"layout": {"shapes": ["o0:2;p1:2;"]}},
        {"layout": {"planes": [2]}},
        {"layout": {"layers": 3}},
        {"settings": KvbmSettings(model="other")},
        {"settings": KvbmSettings(model_revision="other")},
        {"settings": KvbmSettings(weights="off")},
        {"version": "0.33.0"},
        {"attention_config": SimpleNamespace(backend="FLASHINFER")},
        {"cache_config.kv_cache_dtype_skip_layers": ["0"]},
        {"model_config.quantization_config": {"linear": "fp8"}},
        {"load_config": SimpleNamespace(load_format="sharded_state")},
        {
            "speculative_config": SimpleNamespace(
                draft_model_config=SimpleNamespace(model="acme/draft", dtype="x")
            )
        },
        {"compilation_config": SimpleNamespace(static_forward_context={"0": FlashLayer()})},
    ],
    ids=lambda one: next(iter(one)),
)
def test_whatever_changes_a_blocks_bytes_is_another_namespace(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert namespace(tmp_path, **changes) != namespace(tmp_path)


def test_other_weights_are_another_namespace(tmp_path: Path) -> None:
    before = namespace(tmp_path)
    config, caches = engine(tmp_path)
    (tmp_path / "model" / "a.safetensors").write_bytes(b"others!" * 100)
    assert describe(config, caches, KvbmSettings(), LAYOUT)[0] != before


def test_what_does_not_change_them_is_left_out(tmp_path: Path) -> None:
    assert namespace(tmp_path, hf={"transformers_version": "6"}) == namespace(tmp_path)
    assert namespace(tmp_path, version="0.32.7+cpu") == namespace(tmp_path)


def test_every_rank_has_a_namespace_of_its_own(tmp_path: Path) -> None:
    seen = {}
    for rank in range(4):
        config, caches = engine(tmp_path)
        config.parallel_config.rank = rank
        config.parallel_config.tensor_parallel_size = 2
        config.parallel_config.pipeline_parallel_size = 2
        descriptor, ranks = describe(config, caches, KvbmSettings(), LAYOUT)
        assert (descriptor.pp_rank, descriptor.tp_rank) == ranks == divmod(rank, 2)
        seen[ranks] = descriptor
    assert len(set(seen.values())) == 4


def test_ranks_of_another_replica_are_the_same(tmp_path: Path) -> None:
    assert namespace(tmp_path, **{"parallel_config.rank": 1}) == namespace(tmp_path)


@pytest.mark.parametrize(
    ("stored", "configured", "name"),
    [
        ("torch.bfloat16", "auto", "bf16"),
        ("torch.uint8", "fp8", "fp8_e4m3"),
        ("torch.uint8", "fp8_e5m2", "fp8_e5m2"),
        ("torch.uint8", "nvfp4", "opaque"),
        ("torch.int4", "auto", "opaque"),
    ],
)
def test_dtypes_have_the_names_the_daemon_knows(stored: str, configured: str, name: str) -> None:
    assert kvbm_space._dtype(stored, configured) == name


def test_what_is_fit_is_served(tmp_path: Path) -> None:
    assert unfit(*engine(tmp_path)) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel_config.decode_context_parallel_size": 2},
        {"parallel_config.prefill_context_parallel_size": 2},
        {"cache_config.calculate_kv_scales": True},
    ],
)
def test_an_engine_whose_blocks_could_differ_is_not_served(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert unfit(*engine(tmp_path, **changes))


def test_models_with_other_caches_are_not_served(tmp_path: Path) -> None:
    config, caches = engine(tmp_path)
    window = SlidingWindowSpec(dtype="torch.bfloat16", num_kv_heads=2, head_size=64)
    caches.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=window))
    assert "2 groups" in unfit(config, caches)
    del caches.kv_cache_groups[0]
    assert "SlidingWindowSpec" in unfit(config, caches)
    assert unfit(config, None)


def test_a_block_counts_when_every_rank_has_it() -> None:
    answers: list[Future[list[bool]]] = [Future() for _ in range(3)]
    together = kvbm_space._all_of(answers)
    for answer, row in zip(answers, ([1, 1, 0], [1, 0, 1], [1, 1, 1]), strict=True):
        assert not together.done()
        answer.set_result([bool(one) for one in row])
    assert together.result() == [True, False, False]


def test_settings_have_bounds() -> None:
    for wrong in ({"staging_bytes": 0}, {"enabled": 1}, {"stagin_bytes": 2**20}):
        with pytest.raises(ConfigError):
            KvbmSettings.from_mapping(wrong, where="entresol", also=frozenset())
    made = KvbmSettings.from_mapping({"enabled": False}, where="entresol", also=frozenset())
    assert made.enabled is False


def test_the_page_names_every_setting_and_its_default() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+?) \|", page, re.M))
    for one in dataclasses.fields(KvbmSettings):
        default = one.default
        if default is dataclasses.MISSING:
            shown = "`{}`"
        elif isinstance(default, bool):
            shown = str(default).lower()
        elif isinstance(default, str):
            shown = f'`"{default}"`'
        else:
            sizes = {2**30: "1 GiB", 256 * 2**20: "256 MiB"}
            shown = sizes.get(default, str(default))  # type: ignore[call-overload]
        assert rows.get(one.name) == shown, one.name
