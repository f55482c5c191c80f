"""What of vLLM's configuration changes a block's content: it is in the names of the vLLM tier's
blocks and of KVBM's, and random weights are refused."""

from __future__ import annotations

import dataclasses
import enum
import json
from types import SimpleNamespace
from typing import Any

import pytest

from entresol_client.engines import naming, vllm_facts
from entresol_proto.status import ConfigError


class Backend(enum.Enum):
    """As vLLM's registry of attention backends: members stand for paths of classes."""

    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn"


@dataclasses.dataclass
class Spec:
    """As vLLM's QuantizationConfigArgs: an object without a text of its own."""

    weights: str = "fp8"
    ignore: tuple[str, ...] = ()


def engine(**changes: Any) -> Any:
    """vLLM's VllmConfig as far as it is read; `changes` by dotted name."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", mamba_cache_mode="align",
            use_replayssm=False, replayssm_buffer_len=16, kv_cache_dtype_skip_layers=[],
        ),
        model_config=SimpleNamespace(
            model="acme/model", quantization=None, dtype="torch.bfloat16",
            multimodal_config=SimpleNamespace(
                mm_processor_kwargs=None, media_io_kwargs={}, video_pruning_rate=None,
                video_pruning_method="evs", mm_encoder_attn_dtype=None,
            ),
        ),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        speculative_config=SimpleNamespace(
            draft_model_config=SimpleNamespace(model="acme/draft", revision=None, dtype="x"),
            draft_load_config=None, method="eagle3", attention_backend=None, kv_cache_dtype=None,
            draft_tensor_parallel_size=1,
        ),
        attention_config=SimpleNamespace(
            backend=None, backend_per_kind={}, indexer_kv_dtype="auto", use_non_causal=False,
        ),
        lora_config=SimpleNamespace(
            target_modules=None, lora_dtype="torch.bfloat16", enable_tower_connector_lora=False,
        ),
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=1, dcp_kv_cache_interleave_size=1,
        ),
    )  # fmt: skip
    for name, value in changes.items():
        *places, last = name.split(".")
        owner = config
        for place in places:
            owner = getattr(owner, place)
        setattr(owner, last, value)
    return config


def mark(**changes: Any) -> str:
    return naming.fingerprint(vllm_facts.config_facts(engine(**changes)))


@pytest.mark.parametrize(
    "change",
    [
        {"cache_config.mamba_cache_dtype": "float16"},
        {"cache_config.mamba_ssm_cache_dtype": "float16"},
        {"cache_config.mamba_ssm_cache_dtype": "bfloat16"},
        {"cache_config.mamba_cache_mode": "none"},
        {"cache_config.use_replayssm": True},
        {"cache_config.kv_cache_dtype_skip_layers": ["0"]},
        {"cache_config.kv_cache_dtype_skip_layers": ["sliding_window"]},
        {"model_config.quantization_config": {"linear": "fp8"}},
        {"model_config.quantization_config": Spec()},
        {"model_config.quantization_config": Spec(ignore=("lm_head",))},
        {"model_config.model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}},
        {"model_config.model_weights": "s3://bucket/model"},
        {"model_config.multimodal_config.mm_processor_kwargs": {"num_crops": 4}},
        {"model_config.multimodal_config.media_io_kwargs": {"video": {"num_frames": 40}}},
        {"model_config.multimodal_config.video_pruning_rate": 0.5},
        {"model_config.multimodal_config.video_pruning_method": "vidcom2"},
        {"model_config.multimodal_config.mm_encoder_attn_dtype": "fp8"},
        {"load_config.load_format": "pt"},
        {"load_config.load_format": "dummy"},
        {"load_config.model_loader_extra_config": {"pattern": "other-{rank}"}},
        {"load_config.model_loader_extra_config": Spec()},
        {"speculative_config.draft_model_config": None},
        {"speculative_config.draft_model_config.model": "acme/other-draft"},
        {"speculative_config.draft_model_config.dtype": "y"},
        {"speculative_config.draft_load_config": SimpleNamespace(load_format="tensorizer")},
        {"speculative_config.method": "mtp"},
        {"speculative_config.attention_backend": Backend.FLASH_ATTN},
        {"speculative_config.kv_cache_dtype": "fp8_e5m2"},
        {"speculative_config.draft_tensor_parallel_size": 4},
        {"attention_config.backend_per_kind": {"sliding_window": Backend.FLASH_ATTN}},
        {"attention_config.indexer_kv_dtype": "nvfp4"},
        {"attention_config.use_non_causal": True},
        {"parallel_config.cp_kv_cache_interleave_size": 16},
        {"parallel_config": SimpleNamespace(dcp_kv_cache_interleave_size=16)},
        {"additional_config": {"enable_kv_nz": True}},
        {"lora_config": None},
        {"lora_config.target_modules": ["q_proj"]},
        {"lora_config.lora_dtype": "torch.float16"},
        {"lora_config.enable_tower_connector_lora": True},
    ],
    ids=str,
)
def test_a_setting_that_keeps_a_blocks_size_and_changes_its_content_is_another_name(
    change: dict[str, Any],
) -> None:
    assert mark(**change) != mark()


def test_an_interleaving_that_workers_choose_is_another_name() -> None:
    """Before 0.33 the scheduler does not see it (vLLM: `adjust_dcp_kv_cache_interleave_size`)."""

    def of(ranks: int, *connectors: str) -> Any:
        return vllm_facts.config_facts(
            engine(
                **{
                    "kv_transfer_config": SimpleNamespace(has_connector=connectors.__contains__),
                    "parallel_config.decode_context_parallel_size": ranks,
                }
            ),
            {},
        )

    assert of(2, "NixlConnector", "OffloadingConnector") != of(2, "OffloadingConnector")
    assert of(1, "NixlConnector", "OffloadingConnector") == of(1, "OffloadingConnector")


@pytest.mark.parametrize(
    "variables",
    [{"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}, {"VLLM_PP_LAYER_PARTITION": "8,10,6,8"}],
    ids=str,
)
def test_so_is_what_the_environment_says_of_the_layout(variables: dict[str, str]) -> None:
    assert vllm_facts.config_facts(engine(), variables) != vllm_facts.config_facts(engine(), {})
    said = {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}  # as it is where nothing is said
    assert vllm_facts.config_facts(engine(), said) == vllm_facts.config_facts(engine(), {})


@pytest.mark.parametrize("load_format", sorted(naming.LOAD_FORMATS_ALIKE))
def test_how_the_same_files_are_read_changes_nothing(load_format: str) -> None:
    assert mark(**{"load_config.load_format": load_format}) == mark()
    for fast in (dict.fromkeys(naming.LOADER_HABITS, 8), "{}", "", None):
        assert mark(**{"load_config.model_loader_extra_config": fast}) == mark()
    told = json.dumps({"num_threads": 8})
    assert mark(**{"load_config.model_loader_extra_config": told}) == mark()
    other = "not JSON"
    assert mark(**{"load_config.model_loader_extra_config": other}) != mark()


def test_an_order_that_says_nothing_changes_nothing() -> None:
    assert mark(additional_config={}) == mark(additional_config=None) == mark()
    one, other = (
        {"cache_config.kv_cache_dtype_skip_layers": layers} for layers in (["1", "0"], ["0", "1"])
    )
    assert mark(**one) == mark(**other)


def test_without_a_configuration_the_facts_are_the_same_everywhere() -> None:
    assert vllm_facts.config_facts(None) == vllm_facts.config_facts(SimpleNamespace())
    assert naming.fingerprint(vllm_facts.config_facts(None)) != mark()


def test_settings_of_any_kind_have_one_form_in_every_process() -> None:
    class Opaque:
        """Its text is an address."""

    class Told:
        def __repr__(self) -> str:
            return "told"

    class Dumped:
        def model_dump(self) -> dict[str, Any]:
            return {"a": Backend.FLASH_ATTN}

    found = naming.plain(
        {"o": Opaque(), "t": Told(), "d": Dumped(), "s": {"b", "a"}, "l": (1, None, 0.5), 1: Spec}
    )
    assert found == {
        "o": f"{__name__}.{Opaque.__qualname__}", "t": "told",
        "d": {"a": "vllm.v1.attention.backends.flash_attn"}, "s": ["a", "b"], "l": [1, None, 0.5],
        "1": f"{__name__}.Spec",
    }  # fmt: skip
    assert naming.fingerprint(found)


@pytest.mark.parametrize(
    "change",
    [
        {"load_config.load_format": "dummy"},
        {"load_config.load_format": "DUMMY"},
        {"speculative_config.draft_load_config": SimpleNamespace(load_format="dummy")},
    ],
    ids=str,
)
@pytest.mark.parametrize("weights", ["auto", "off"])
def test_random_weights_are_refused_under_a_models_name(
    change: dict[str, Any], weights: str
) -> None:
    with pytest.raises(ConfigError, match="dummy"):
        vllm_facts.check_weights(engine(**change), weights)
    vllm_facts.check_weights(engine(**change), "bench-7")
    vllm_facts.check_weights(engine(), weights)
    vllm_facts.check_weights(None, weights)


def test_the_backend_is_what_layers_have_or_what_was_told() -> None:
    def layer(name: str) -> Any:
        return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name))

    layers = {"0": layer("FLASHINFER"), "1": layer("FLASH_ATTN"), "2": object(), "3": layer("X")}
    built = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert vllm_facts.backends_in_use(built) == ["FLASHINFER", "FLASH_ATTN", "X"]
    assert vllm_facts.backends_in_use(engine()) == []
    told = SimpleNamespace(attention_config=SimpleNamespace(backend=Backend.FLASH_ATTN))
    assert vllm_facts.attention_told(told, {}) == "FLASH_ATTN"
    assert vllm_facts.attention_told(engine(), {"VLLM_ATTENTION_BACKEND": "X"}) == "X"
    assert vllm_facts.attention_told(engine(), {}) == ""


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.32.1", "0.32"), ("0.33.0+cpu", "0.33"), ("dev", "dev"), ("", ""), ("0.x.1", "0.x.1")],
)
def test_a_release_is_told_by_its_first_two_numbers(version: str, release: str) -> None:
    assert vllm_facts.release_of(version) == release


def feature(identifier: Any) -> Any:
    return SimpleNamespace(identifier=identifier, mm_hash=identifier)


@pytest.mark.parametrize(
    "name", ["ab" * 32, "0f" * 64, "sql-adapter:" + "ab" * 32], ids=["blake3", "sha512", "adapter"]
)
def test_a_hash_of_an_image_is_no_given_name(name: str) -> None:
    assert vllm_facts.given_names(SimpleNamespace(mm_features=[feature(name)])) == []


@pytest.mark.parametrize(
    "name",
    ["cat", "", "AB" * 32, "ab" * 31, "7c9e6679-7425-40de-944b-e07fc1f90ae7",
     "renderer0-mm-1-image-0", "ab" * 32 + ":cat", None, "zz" * 32],
)  # fmt: skip
def test_a_name_that_a_caller_gave_an_image_is_seen(name: Any) -> None:
    """vLLM takes `multi_modal_uuids` for the hash itself: two images of one name share blocks."""
    request = SimpleNamespace(mm_features=[feature("ab" * 32), feature(name)])
    assert vllm_facts.given_names(request) == [str(name)]


def test_a_prompt_without_images_has_no_names() -> None:
    for request in (SimpleNamespace(), SimpleNamespace(mm_features=None), object()):
        assert vllm_facts.given_names(request) == []
