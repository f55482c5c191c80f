"""Of a vLLM engine's configuration, what changes the content of its blocks and not their size.

Pure: takes vLLM's VllmConfig by its attributes and imports nothing of it. What a version does not
have is None, which is a value like any other.

Invariant: two engines whose facts are equal compute the same KV for the same hashes, as far as
their configurations say; the vLLM tier and KVBM's have them in their namespaces alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from entresol_client.engines import naming

# Of CacheConfig. A state in float16 is as long as one in bfloat16, a layer left out of fp8 is
# padded, and a state may be kept with or without the inputs since it was written.
CACHE_FACTS = (
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_cache_mode",
    "use_replayssm",
    "replayssm_buffer_len",
    "use_kda_recoverssm",
    "swa_bounded_replay",
)
# Of MultiModalConfig: what makes other embeddings of an image with the same hash.
MULTIMODAL_FACTS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)
# Of AttentionConfig, beside the backend: that of single kinds of layers, what the keys of a sparse
# indexer are kept in, and whether tokens see those behind them.
ATTENTION_FACTS = ("backend_per_kind", "indexer_kv_dtype", "use_non_causal")
# Of LoRAConfig: to which modules adapters are applied, and in which numbers. Their content is in
# `EngineSettings.adapters`.
LORA_FACTS = ("target_modules", "lora_dtype", "enable_tower_connector_lora")
# Of SpeculativeConfig: how the KV of a draft's layers lies, which is in the same blocks.
DRAFT_FACTS = ("method", "attention_backend", "kv_cache_dtype", "draft_tensor_parallel_size")
# Of ParallelConfig, the name of today first: with context parallelism, how many tokens in a row lie
# on one rank.
INTERLEAVE_FACTS = ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
# How vLLM lays out Mamba's convolution states where nothing is said (get_conv_state_layout).
CONV_STATES_DEFAULT = "SD"


def config_facts(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """See the module. JSON values; nothing of a model where there is no configuration to ask."""
    cache = getattr(vllm_config, "cache_config", None)
    model = getattr(vllm_config, "model_config", None)
    attention = getattr(vllm_config, "attention_config", None)
    lora = getattr(vllm_config, "lora_config", None)
    images = getattr(model, "multimodal_config", None)
    facts: dict[str, Any] = {
        "cache": _some(cache, CACHE_FACTS),
        "skipped": sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ())),
        "load": _load_facts(getattr(vllm_config, "load_config", None)),
        "attention": _some(attention, ATTENTION_FACTS),
        "interleave": _interleave(vllm_config),
        "conv_states": environment.get("VLLM_SSM_CONV_STATE_LAYOUT") or CONV_STATES_DEFAULT,
        # What it means only the platform's own package knows; one lays KV out otherwise by it.
        "platform_config": naming.plain(getattr(vllm_config, "additional_config", None) or {}),
        "stages": environment.get("VLLM_PP_LAYER_PARTITION", ""),
    }
    if lora is not None:
        facts["lora"] = _some(lora, LORA_FACTS)
    if images is not None:
        facts["images"] = _some(images, MULTIMODAL_FACTS)
    drafts = getattr(vllm_config, "speculative_config", None)
    draft = getattr(drafts, "draft_model_config", None)
    for name, each in (("model", model), ("draft", draft)):
        if each is not None:
            facts[name] = naming.fingerprint(naming.model_facts(each))
    if draft is not None:
        facts["draft_name"] = [str(draft.model), str(getattr(draft, "revision", None) or "")]
        facts["draft_load"] = _load_facts(getattr(drafts, "draft_load_config", None))
        facts["draft_kv"] = _some(drafts, DRAFT_FACTS)
    return facts


def _some(config: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: naming.plain(getattr(config, name, None)) for name in names}


def _interleave(vllm_config: Any) -> list[Any]:
    """What is told, and whether vLLM chooses another because of NIXL: before 0.33 its workers do,
    and this process still has what was told."""
    parallel = getattr(vllm_config, "parallel_config", None)
    has = getattr(getattr(vllm_config, "kv_transfer_config", None), "has_connector", None)
    sharded = (getattr(parallel, "decode_context_parallel_size", None) or 1) > 1
    chosen = sharded and has is not None and bool(has("NixlConnector"))
    return [*_some(parallel, INTERLEAVE_FACTS).values(), chosen]


def _load_facts(load: Any) -> dict[str, Any]:
    return naming.load_facts(
        getattr(load, "load_format", None), getattr(load, "model_loader_extra_config", None)
    )


def check_weights(vllm_config: Any, weights: str) -> None:
    """Refuse random weights under a model's name; also a draft model's. Raises: ConfigError."""
    drafts = getattr(vllm_config, "speculative_config", None)
    for load in (
        getattr(vllm_config, "load_config", None),
        getattr(drafts, "draft_load_config", None),
    ):
        naming.check_loaded(getattr(load, "load_format", None), weights)


def attention_told(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> str:
    """The attention backend that the engine was told to use; empty: vLLM chooses."""
    told = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    # The variable: before 0.30.
    return str(getattr(told, "name", told) or "") or environment.get("VLLM_ATTENTION_BACKEND", "")


def backends_in_use(vllm_config: Any) -> list[str]:
    """The attention backends that the layers of this worker's model have; [] where that cannot be
    asked, as before the model is built."""
    compilation = getattr(vllm_config, "compilation_config", None)
    layers = getattr(compilation, "static_forward_context", None)
    return sorted(set(_backends(layers))) if isinstance(layers, Mapping) else []


def _backends(layers: Mapping[str, Any]) -> Iterator[str]:
    for layer in layers.values():
        try:
            yield str(layer.get_attn_backend().get_name())
        except Exception:  # a layer without one, or not yet: each version and backend has its own
            continue


def release_of(version: str) -> str:
    """Major and minor number of "0.32.1", which may change how bytes lie; else all of it."""
    parts = version.split("+")[0].split(".")[:2]
    return ".".join(parts) if len(parts) == 2 and all(one.isdigit() for one in parts) else version


def given_names(request: Any) -> list[str]:
    """Of a request's images, sounds and films, the names in its block hashes that are no digests:
    given by the caller (`multi_modal_uuids`), or numbers. Whoever gives two contents one name
    gets the KV of one for the other.

    Source: vLLM 0.33.0, multimodal/processing/inputs.py and v1/engine/input_processor.py: a hash of
    64 or 128 hex digits, behind an adapter's name where that has an encoder's weights; so in 0.31.
    """
    names = []
    for one in getattr(request, "mm_features", None) or ():
        name = getattr(one, "identifier", None) or getattr(one, "mm_hash", None)
        if not isinstance(name, str) or not _is_digest(name.rpartition(":")[2]):
            names.append(str(name))
    return names


def _is_digest(name: str) -> bool:
    return len(name) in (64, 128) and set(name) <= set("0123456789abcdef")
