"""The namespace of a vLLM engine's blocks, and whether its block hashes mean the same elsewhere.

Pure: takes vLLM's objects by their attributes and imports none.

Invariants:
- vLLM's key names token ids (and images, salt, the names of adapters), so everything else that
  shapes a chunk's bytes is in the descriptor: weights, what adapters hold, the model's
  configuration, dtype, layout, chunking, topology, vLLM's own version;
- an engine whose hashes another process would not compute does not start.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from entresol_client.engines import naming
from entresol_client.engines.settings import EngineSettings
from entresol_proto import limits
from entresol_proto.ids import BadKeyError, NamespaceDescriptor
from entresol_proto.status import ConfigError

# Of our own reading of vLLM's layout: raise it when the same parts come to mean other bytes.
LAYOUT_VERSION = 1
FIXED_SEED_SINCE = (0, 29)  # before it, hashes depended on PYTHONHASHSEED or on chance
SEED_VARIABLE = "PYTHONHASHSEED"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the offloading config does not say. Empty where it is not known.

    Attributes:
        version: vLLM's, as "0.32.0".
        revision: of the model, as the engine was told.
        hash_algorithm: of prefix caching: "sha256", "xxhash_cbor", ...
        device_type: of the platform: "cuda", "cpu", ...
        weights_path: folder or file of the weights on this host.
        extra: further things that shape the bytes, by name.
    """

    version: str
    revision: str = ""
    hash_algorithm: str = ""
    device_type: str = ""
    weights_path: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def release(self) -> tuple[int, ...]:
        """(0, 32) of "0.32.0"; () when it does not begin with two numbers."""
        parts = self.version.split(".")[:2]
        return tuple(int(one) for one in parts) if all(one.isdigit() for one in parts) else ()


def check_hashes(facts: EngineFacts, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse an engine whose block hashes are its own.

    An unknown algorithm passes: `roots_agree` decides once the engine has chosen its seed.
    Raises: ConfigError, with what to set.
    """
    if SEED_VARIABLE in environment:
        return
    hint = f"set {SEED_VARIABLE} to one text in the environment of every engine that shares blocks"
    if facts.release and facts.release < FIXED_SEED_SINCE:
        raise ConfigError(
            f"vLLM {facts.version} begins its block hashes with a random number, so that no other "
            "process could find the blocks",
            hint=hint,
        )
    if facts.hash_algorithm.startswith("xxhash"):
        raise ConfigError(
            f"block hashes of {facts.hash_algorithm} begin with a random number, so that no other "
            "process could find the blocks",
            hint=f"{hint}, or use --prefix-caching-hash-algo sha256",
        )


def roots_agree(seed: str | None, default: str, environment: Mapping[str, str]) -> bool:
    """Whether another process would begin its hashes with `seed` too; None: not known, so yes."""
    return seed is None or SEED_VARIABLE in environment or seed == default


def _layout(config: Any, chunk_bytes: int, facts: EngineFacts) -> dict[str, Any]:
    """All that decides which byte of a chunk means what."""
    parallel, cache = config.parallel, config.cache
    groups = [
        [
            getattr(group, "group_id", number),
            group.tokens_per_block,
            list(group.layer_names),
        ]
        for number, group in enumerate(config.groups)
    ]
    return {
        "layout": LAYOUT_VERSION,
        "vllm": ".".join(str(part) for part in facts.release) or facts.version,
        "device": facts.device_type,
        "dtype": config.model.dtype,
        "groups": groups,
        "tokens_per_hash": cache.tokens_per_hash,
        "blocks_per_chunk": cache.blocks_per_chunk,
        "chunk_bytes": chunk_bytes,
        "worker_bytes_per_block": config.worker_kv_bytes_per_block,
        "world": [
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ],
        "kv_cache_layout": getattr(config, "kv_cache_layout", None),
        "replicated": config.replicated_layout,
        "canonical": getattr(config, "canonical_layout", False),
        "hash_algorithm": facts.hash_algorithm,
        "extra": dict(facts.extra),
    }


def describe(
    config: Any,
    chunk_bytes: int,
    settings: EngineSettings,
    facts: EngineFacts,
    *,
    model: str = "",
    environment: Mapping[str, str] = os.environ,
) -> NamespaceDescriptor:
    """The descriptor of `config` (vLLM's OffloadingConfig); `model` overrides its model's name.

    Raises: ConfigError when this engine's blocks cannot be stored: too long, or too many tokens.
    """
    if chunk_bytes > limits.BLOCK_BYTES_MAX:
        raise ConfigError(
            f"a chunk of {chunk_bytes} bytes; the most is {limits.BLOCK_BYTES_MAX}",
            hint="set a smaller block_size in kv_connector_extra_config",
        )
    parts = _layout(config, chunk_bytes, facts)
    parts["hash_seed"] = environment.get(SEED_VARIABLE, "")
    try:
        return NamespaceDescriptor(
            model=model or config.model.name,
            model_revision=naming.revision(
                facts.weights_path or config.model.name,
                settings.model_revision,
                facts.revision,
                settings.weights,
                settings.adapters,
            ),
            dtype=naming.dtype_of(config.model.dtype).label,
            layers=sum(len(group.layer_names) for group in config.groups),
            page_layout=f"vllm:{naming.fingerprint(parts)}",
            block_tokens=config.groups[0].tokens_per_block * config.cache.blocks_per_chunk,
            tp_world=config.parallel.tp_size,
            pp_world=config.parallel.pp_size,
        )
    except BadKeyError as error:
        raise ConfigError(
            f"this engine's blocks cannot be named: {error}",
            hint=error.hint
            or f"a block_size of at most {limits.TOKENS_PER_BLOCK_MAX} tokens is possible",
        ) from None


def as_words(descriptor: NamespaceDescriptor) -> str:
    """What of a descriptor a log may show: no salt."""
    rows = dataclasses.asdict(descriptor)
    rows.pop("cache_salt")
    return " ".join(f"{name}={value!r}" for name, value in rows.items() if value is not None)
