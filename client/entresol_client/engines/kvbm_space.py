"""Where KVBM's blocks are stored: the namespace of a worker, and every tenant's way to it.

Invariant: whatever changes the bytes of a block and is not in its tokens is in the descriptor.
A model whose blocks could differ under one descriptor is not served (`unfit`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from entresol_client.engines.answer import Answer
from entresol_client.engines.kvbm_plan import Lookup
from entresol_client.engines.naming import dtype_of, fingerprint, revision
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.store import EngineStore, Space
from entresol_client.engines.vllm_facts import (
    attention_told,
    backends_in_use,
    config_facts,
    release_of,
)
from entresol_proto import limits
from entresol_proto.ids import NamespaceDescriptor

LAYOUT_VERSION = 1
STAGING_BYTES_MIN = limits.MIB
STAGING_BYTES_MAX = 64 * 2**30

_STAGING: Any = dataclasses.field(
    default=256 * limits.MIB, metadata={"low": STAGING_BYTES_MIN, "high": STAGING_BYTES_MAX}
)


@dataclass(frozen=True, slots=True)
class KvbmSettings(EngineSettings):
    """Settings of this adapter beside the shared ones.

    Attributes:
        enabled: False leaves KVBM alone, as if the tier were not there.
        model: the model's name in the namespace, where paths differ between hosts.
        staging_bytes: host memory each for blocks on their way out and on their way in.
    """

    enabled: bool = True
    model: str = ""
    staging_bytes: int = _STAGING


def unfit(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine's blocks cannot be served; empty when they can."""
    groups: Any = getattr(kv_cache_config, "kv_cache_groups", None) or ()
    if len(groups) != 1:
        return f"the model has {len(groups)} groups of KV caches, the tier serves one"
    name = type(groups[0].kv_cache_spec).__name__
    if name not in ("FullAttentionSpec", "MLAAttentionSpec"):
        return f"blocks of {name} are not all kept by the engine"
    parallel = vllm_config.parallel_config
    for axis in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, axis, 1) > 1:
            return f"{axis} is not 1"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales makes the bytes of a block differ between engines"
    return ""


def describe(
    vllm_config: Any,
    kv_cache_config: Any,
    settings: KvbmSettings,
    layout: dict[str, Any],
    *,
    version: str = "",
) -> tuple[NamespaceDescriptor, tuple[int, int]]:
    """The namespace of this worker's blocks, and its (pipeline, tensor) ranks.

    `layout` is `BlockPages.layout`, `version` vLLM's.
    Raises: ConfigError when the weights cannot be read.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    pp_rank, tp_rank = divmod(parallel.rank, parallel.tensor_parallel_size)
    pp_rank %= parallel.pipeline_parallel_size
    page_layout = fingerprint(
        {
            "version": LAYOUT_VERSION,
            "engine": "vllm-kvbm",
            "spec": type(spec).__name__,
            "cache_dtype": str(vllm_config.cache_config.cache_dtype),
            "vllm": release_of(version),
            "attention": backends_in_use(vllm_config) or attention_told(vllm_config),
            "config": config_facts(vllm_config),
            **layout,
        }
    )
    descriptor = NamespaceDescriptor(
        model=settings.model or str(model.model),
        model_revision=revision(
            str(model.model),
            settings.model_revision,
            model.revision or "",
            settings.weights,
            settings.adapters,
        ),
        dtype=_dtype(str(spec.dtype), str(vllm_config.cache_config.cache_dtype)),
        layers=int(layout["layers"]),
        kv_heads=int(spec.num_kv_heads),
        head_dim=int(spec.head_size),
        page_layout=f"vllm-kvbm/{page_layout}",
        block_tokens=int(vllm_config.cache_config.block_size),
        tp_rank=tp_rank,
        tp_world=int(parallel.tensor_parallel_size),
        pp_rank=pp_rank,
        pp_world=int(parallel.pipeline_parallel_size),
    )
    return descriptor, (pp_rank, tp_rank)


def _dtype(stored: str, configured: str) -> str:
    """The descriptor's name for what is stored; vLLM stores fp8 as plain bytes."""
    if stored == "torch.uint8" and configured.startswith("fp8"):
        return "fp8_e5m2" if configured == "fp8_e5m2" else "fp8_e4m3"
    return dtype_of(stored).label


class Tenants:
    """A store per tenant this engine may act for. "" is the one of the engine's own certificate.

    Raises: ConfigError, IdentityError when a client configuration cannot be used.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._stores: dict[str, EngineStore] = {}
        try:
            self._stores[""] = EngineStore(settings)
            for name, path in settings.tenants.items():
                self._stores[name] = EngineStore(settings, config_path=path)
        except BaseException:
            self.close()
            raise

    def spaces(self, descriptor: NamespaceDescriptor) -> Callable[[str], Space]:
        """The blocks of one descriptor, by tenant."""
        found = {name: store.space(descriptor) for name, store in self._stores.items()}
        return found.__getitem__

    def lookup(self, descriptors: Sequence[NamespaceDescriptor]) -> Lookup:
        """A look-up that says which blocks are there under *all* descriptors (one per rank)."""
        ranks = [self.spaces(descriptor) for descriptor in descriptors]

        def look(tenant: str, keys: Sequence[bytes]) -> Future[list[bool]]:
            return _all_of([spaces(tenant).lookup(keys) for spaces in ranks])

        return look

    def connected(self) -> bool:
        """True when every tenant reaches a shard now."""
        return all(store.connected() for store in self._stores.values())

    def stats(self) -> dict[str, int]:
        """Counters of all tenants together."""
        total: dict[str, int] = {}
        for store in self._stores.values():
            for name, value in store.stats().items():
                total[name] = total.get(name, 0) + value
        return total

    def describe(self) -> str:
        """One line for a log."""
        rows = (f"{name or 'own'}: {store.describe()}" for name, store in self._stores.items())
        return "; ".join(rows)

    def close(self) -> None:
        """End every tenant's sessions. Idempotent."""
        for store in self._stores.values():
            store.close()


def _all_of(answers: Sequence[Future[list[bool]]]) -> Future[list[bool]]:
    if len(answers) == 1:
        return answers[0]
    together: Answer[list[bool]] = Answer()
    ended = itertools.count(1)  # from any thread, without a lock

    def one_more(_: Future[list[bool]]) -> None:
        if next(ended) == len(answers):
            rows = zip(*(answer.result() for answer in answers), strict=True)
            together.set_result([all(row) for row in rows])

    for answer in answers:
        answer.add_done_callback(one_more)
    return together
