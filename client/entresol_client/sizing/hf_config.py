"""A model's own `config.json` (Hugging Face) as a shape.

Invariant: never a guess. A key that changes what is kept, and that this module does not know, is
refused with the options that take its place; what is not counted is told as a note.

Source of the layer patterns: the configuration classes of huggingface/transformers (gemma2, gemma3,
cohere2, qwen2, llama4).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entresol_client.sizing.shapes import KvShape, LayerGroup, SizingError

CONFIG_BYTES_MAX = 4 * 1024 * 1024
LAYERS_MAX = 10_000
VALUE_MAX = 10_000_000

_NESTED = ("text_config", "llm_config", "language_config")
# These change what is kept in ways that are not told apart here. Absent, null and 0 are fine.
_NOT_KNOWN = (
    "attention_k_eq_v",
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "global_head_dim",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "ssm_cfg",
    "ssm_state_size",
)
_WHICH = "--model-config is the config.json in a model's folder; the client's file is not needed"
_INSTEAD = "give --layers, --kv-heads and --head-dim (and --window-layers, --window) instead"
_WHOLE = ("full_attention", "attention")
_WINDOWED = ("sliding_attention", "chunked_attention")
_STATE = ("linear_attention", "mamba", "recurrent", "conv")
# Where nothing says which layers are windowed: every n-th sees everything.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "llama4_text": 4}
_ALL_WINDOWED = ("mistral", "mixtral", "phi3", "starcoder2")


def read(path: Path) -> KvShape:
    """The shape that a `config.json` describes. Raises: SizingError."""
    try:
        raw = path.read_bytes()[: CONFIG_BYTES_MAX + 1]
    except OSError as error:
        raise SizingError(
            f"{path} cannot be read: {error.strerror or error}",
            hint=_WHICH,
        ) from None
    if len(raw) > CONFIG_BYTES_MAX:
        raise SizingError(f"{path} is too large to be a config.json", hint="give --layers, ...")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        raise SizingError(f"{path} is not JSON", hint=_WHICH) from None
    if not isinstance(config, dict):
        raise SizingError(f"{path} holds no object", hint=_WHICH)
    return shape_of(config, path.resolve().parent.name or path.name)


def shape_of(config: Mapping[str, Any], name: str) -> KvShape:
    """The shape that a parsed `config.json` describes. Raises: SizingError."""
    told = str(config.get("_name_or_path") or name)
    text: Mapping[str, Any] = config
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, dict) and "num_hidden_layers" in inner:
            text = inner
    strange = sorted(key for key in _NOT_KNOWN if text.get(key))
    if strange:
        raise SizingError(f"{told}: {strange[0]} is not known here", hint=_INSTEAD)
    layers = _number(text, "num_hidden_layers", LAYERS_MAX, told)
    heads, head_values = _values(text, told)
    groups, notes = _groups(text, layers, heads, head_values, told)
    if text.get("index_head_dim"):
        notes.append("the indexer of sparse attention keeps keys of its own: not counted")
    if text.get("num_nextn_predict_layers") or text.get("mtp_transformer_layers"):
        notes.append("layers for predicting several tokens are not counted")
    most = text.get("max_position_embeddings")
    context_max = most if isinstance(most, int) and most > 0 else 0
    return KvShape(told, groups, context_max, f"config.json of {told}", tuple(notes))


def _values(text: Mapping[str, Any], told: str) -> tuple[int, int]:
    """(KV heads, elements of one head); (0, latent) where there is one latent."""
    if text.get("kv_lora_rank"):
        rank = _number(text, "kv_lora_rank", VALUE_MAX, told)
        return 0, rank + _number(text, "qk_rope_head_dim", VALUE_MAX, told)
    query_heads = _number(text, "num_attention_heads", VALUE_MAX, told)
    heads = query_heads
    if text.get("num_key_value_heads") is not None:
        heads = _number(text, "num_key_value_heads", VALUE_MAX, told)
    if text.get("head_dim") is not None:
        return heads, 2 * _number(text, "head_dim", VALUE_MAX, told)
    hidden = _number(text, "hidden_size", VALUE_MAX, told)
    if hidden % query_heads:
        raise SizingError(
            f"{told}: hidden_size {hidden} is no multiple of {query_heads} heads", hint=_INSTEAD
        )
    return heads, 2 * (hidden // query_heads)


def _groups(
    text: Mapping[str, Any], layers: int, heads: int, head_values: int, told: str
) -> tuple[tuple[LayerGroup, ...], list[str]]:
    """Layers that see everything, and layers that see a window."""
    whole, notes = _whole_layers(text, layers, told)
    kept, window_layers = whole
    window = 0
    if window_layers:
        key = "sliding_window" if text.get("sliding_window") else "attention_chunk_size"
        window = _number(text, key, VALUE_MAX, told)
    parts = (
        LayerGroup(kept, heads, head_values),
        LayerGroup(window_layers, heads, head_values, window),
    )
    groups = tuple(part for part in parts if part.layers)
    if not groups:
        raise SizingError(f"{told} keeps nothing per token", hint=_INSTEAD)
    return groups, notes


def _whole_layers(
    text: Mapping[str, Any], layers: int, told: str
) -> tuple[tuple[int, int], list[str]]:
    """(layers that see everything, layers that see a window), and what is not counted."""
    types = text.get("layer_types")
    if isinstance(types, list) and types:
        return _counted(types, layers, told)
    interval = text.get("full_attention_interval")
    if interval:
        every = _number(text, "full_attention_interval", LAYERS_MAX, told)
        return (layers // every, 0), [_state_note(layers - layers // every)]
    kind = str(text.get("model_type", ""))
    slides = text.get("use_sliding_window", not kind.startswith("qwen"))
    if not (text.get("sliding_window") and slides) and not text.get("attention_chunk_size"):
        return (layers, 0), []
    if kind.startswith("qwen") and text.get("max_window_layers") is not None:
        whole = min(layers, _number(text, "max_window_layers", LAYERS_MAX, told))
        return (whole, layers - whole), []
    if text.get("sliding_window_pattern") or kind in _PATTERNS:
        every = _PATTERNS.get(kind, 0)
        if text.get("sliding_window_pattern"):
            every = _number(text, "sliding_window_pattern", LAYERS_MAX, told)
        return (layers // every, layers - layers // every), []
    if kind in _ALL_WINDOWED:
        return (0, layers), []
    raise SizingError(f"{told} does not say which layers have a window", hint=_INSTEAD)


def _counted(types: list[Any], layers: int, told: str) -> tuple[tuple[int, int], list[str]]:
    strange = sorted({str(kind) for kind in types} - {*_WHOLE, *_WINDOWED, *_STATE})
    if strange:
        raise SizingError(f"{told}: layers of type {strange[0]} are not known here", hint=_INSTEAD)
    if len(types) != layers:
        raise SizingError(
            f"{told}: {len(types)} layer_types for {layers} layers", hint="is the file whole?"
        )
    states = sum(kind in _STATE for kind in types)
    whole = sum(kind in _WHOLE for kind in types)
    return (whole, layers - whole - states), [_state_note(states)] if states else []


def _state_note(layers: int) -> str:
    return f"{layers} layers keep a state per conversation, not per token: not counted"


def _number(text: Mapping[str, Any], key: str, most: int, told: str) -> int:
    """Raises: SizingError for anything but a whole number of 1 to `most`."""
    value = text.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        problem = "has no" if value is None else f"has {str(value)[:40]!r} as"
        raise SizingError(f"{told} {problem} {key}", hint=_INSTEAD)
    return value
