"""vLLM's tier interface as it is in the versions we know, behind names that do not change.

Invariant: what differs between vLLM versions is handled here and nowhere else; a version that no
test of ours ran against is told of, never refused for that alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import vllm
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload import base as offload_base
from vllm.v1.kv_offload.tiering import base as tier_base

from entresol_client.engines import naming
from entresol_client.engines.vllm_facts import (
    attention_told,
    check_weights,
    config_facts,
    given_names,
)
from entresol_client.engines.vllm_naming import EngineFacts, roots_agree
from entresol_client.engines.vllm_versions import TESTED, told_apart
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import ConfigError

log = logging.getLogger("entresol.engine")

LookupResult = offload_base.LookupResult
Medium = offload_base.Medium
RequestOffloadingContext = offload_base.RequestOffloadingContext
SecondaryTierManager = tier_base.SecondaryTierManager
VERSION: str = vllm.__version__
CALLERS_MAX = 16  # frames that are looked at for what the interface does not pass on
NAMED_REQUESTS_MAX = 65_536  # remembered, the newest; far more than live at a time
_named_requests: OrderedDict[str, None] = OrderedDict()


@dataclasses.dataclass(slots=True)
class _Images:
    """Those of a live request: vLLM's own list, to which later parts of its input may add."""

    mm_features: Sequence[Any]
    looked_at: int = 0


_images: dict[str, _Images] = {}  # by request, until it has finished


def tell_version() -> None:
    """A warning when this vLLM is not one that was tested."""
    if words := told_apart(VERSION):
        log.warning("event=engine_version_untested vllm=%s reason=%r", VERSION, words)
    else:
        log.info("event=engine_version vllm=%s tested=%s", VERSION, ",".join(TESTED))


def base_arguments(tier: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that the base class of `tier` takes in this version."""
    known = inspect.signature(tier.__mro__[1].__init__).parameters  # type: ignore[misc]
    return {name: value for name, value in arguments.items() if name in known}


def slots_of(job: Any) -> list[int]:
    """The rows of the primary view that a job is about, one per key."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids  # before 0.31
    return [int(one) for one in ids]


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def job_result(
    job_id: int,
    success: bool,
    *,
    successful_keys: Collection[bytes] | None,
    seconds: float,
    length_bytes: int,
) -> Any:
    """A JobResult; what this version has no field for is left out."""
    values = {
        "job_id": job_id,
        "success": success,
        "successful_keys": successful_keys,
        "transfer_time": seconds,
        "transfer_bytes": length_bytes,
    }
    return tier_base.JobResult(**_known(tier_base.JobResult, values))


def event(keys: Sequence[bytes], *, removed: bool) -> Any:
    """A KV event of storage: no locality, because routers drop what is marked as remote."""
    values = {
        "keys": list(keys),
        "medium": Medium.STORAGE,
        "removed": removed,
        "ownership": "entresol",
        "removal_expected": True,
    }
    return offload_base.OffloadingEvent(**_known(offload_base.OffloadingEvent, values))


def end_token_of(context: Any, key: bytes) -> int | None:
    """How many tokens of the request end with this key's chunk; None before 0.31."""
    position = getattr(context, "get_offload_key_position", None)
    return None if position is None else position(key)


# Metrics ----------------------------------------------------------------------------------------


def metric_definitions(counters: Mapping[str, str], gauges: Mapping[str, str]) -> dict[str, Any]:
    """Prometheus definitions: name -> what it counts."""
    return {
        **{name: offload_base.OffloadingCounterMetadata(text) for name, text in counters.items()},
        **{name: offload_base.OffloadingGaugeMetadata(text) for name, text in gauges.items()},
    }


def make_stats(counters: Mapping[str, int], gauges: Mapping[str, int]) -> Any:
    """An OffloadingConnectorStats of increases and levels; None when nothing increased."""
    if not counters:
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

    stats = OffloadingConnectorStats()
    for name, amount in counters.items():
        stats.increase_counter(name, amount)
    for name, level in gauges.items():
        stats.set_gauge(name, level)
    return stats


# What the tier is not told ----------------------------------------------------------------------


def _callers() -> Iterator[Mapping[str, Any]]:
    frame = sys._getframe(1)
    for _ in range(CALLERS_MAX):
        if frame.f_back is None:
            return
        frame = frame.f_back
        yield frame.f_locals


def config_of_callers() -> Any | None:
    """vLLM's configuration, from the function of vLLM's that is building the tier; None elsewhere.

    The interface does not pass it on, and without it neither the model's revision nor the hash
    algorithm is known before the first request.
    """
    for names in _callers():
        found = names.get("vllm_config")
        if found is not None and hasattr(found, "cache_config"):
            return found
    return None


def note_images(context: Any) -> None:
    """Note a new request's images, for `has_given_names`.

    The interface does not pass the request on, so it is looked for among the callers, as above.
    """
    for names in _callers():
        request = names.get("request")
        if getattr(request, "request_id", None) == context.req_id:
            features = getattr(request, "mm_features", None)
            if features is not None:
                _images[context.req_id] = _Images(features)
            return


def has_given_names(context: Any) -> bool:
    """Whether images of the request have names that a caller gave. To be asked each time: a
    session's images may come when it has been going on for long. What was found is kept: jobs may
    come when the request is over."""
    images = _images.get(context.req_id)
    if images is not None and len(images.mm_features) != images.looked_at:
        images.looked_at = len(images.mm_features)
        if given_names(images):
            _named_requests[context.req_id] = None
            while len(_named_requests) > NAMED_REQUESTS_MAX:
                _named_requests.popitem(last=False)
    return context.req_id in _named_requests


def forget_images(context: Any) -> None:
    """The request has finished: let go of its images, after a last look."""
    has_given_names(context)
    _images.pop(context.req_id, None)


def engine_facts(config: Any, vllm_config: Any | None) -> EngineFacts:
    """What is known of this engine: `config` is the offloading config."""
    from vllm.platforms import current_platform

    model_config = getattr(vllm_config, "model_config", None)
    cache_config = getattr(vllm_config, "cache_config", None)
    revision = getattr(model_config, "revision", None) or ""
    told = attention_told(vllm_config)
    extra: dict[str, Any] = {
        "attention": told,
        **_platform_facts(config, current_platform, told),
        "config": config_facts(vllm_config),
    }
    return EngineFacts(
        version=VERSION,
        revision=revision,
        hash_algorithm=str(getattr(cache_config, "prefix_caching_hash_algo", "") or ""),
        device_type=str(current_platform.device_type),
        weights_path=naming.weights_folder(config.model.name, revision),
        extra=extra,
    )


def _platform_facts(config: Any, platform: Any, attention: str) -> dict[str, Any]:
    """Of the machine, what decides the bytes without being said in vLLM's configuration."""
    facts: dict[str, Any] = {
        "platform": str(getattr(getattr(platform, "_enum", None), "name", "")),
        "shuffled": os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", ""),
    }
    layout = getattr(config, "kv_cache_layout", None)
    if layout is None:  # before 0.29 the tier is not told of it
        facts["layout"] = os.environ.get("VLLM_KV_CACHE_LAYOUT", "")
    if "fp8" in str(config.model.dtype):  # MI300 has another e4m3 than all others
        facts["fp8"] = _asked(platform, "fp8_dtype")
    if platform.device_type == "cpu":  # keys lie as its tiles or vectors want them
        facts["processor"] = _asked(platform, "get_cpu_architecture")
        facts["amx"] = _asked(torch.cpu, "_is_amx_tile_supported")
    canonical = getattr(config, "canonical_layout", False)
    own = naming.dtype_of(config.model.dtype) is DType.OPAQUE  # a format of the backend's
    if platform.device_type != "cpu" and not canonical and (own or not (attention and layout)):
        # Then vLLM chooses backend and layout itself, by the processor's generation; or the backend
        # its numbers: TurboQuant has another fp8 before sm_89.
        facts["capability"] = _asked(platform, "get_device_capability")
    if "turboquant" in str(config.model.dtype):  # its rows lie otherwise where FlyDSL is installed
        facts["flydsl"] = _asked(_flydsl(), "is_flydsl_available")
    return facts


def _flydsl() -> Any:
    try:
        return importlib.import_module("vllm.v1.attention.ops.flydsl_turboquant_decode")
    except Exception:  # not in this version, or not on this platform
        return None


def _asked(platform: Any, name: str) -> str:
    """What vLLM's platform or PyTorch answers; empty if it has no such thing, or cannot now."""
    try:
        return str(getattr(platform, name)())
    except Exception:  # each platform has its own
        log.warning("event=platform_unknown asked=%s", name)
        return ""


def check_fit(vllm_config: Any | None, adapters: str, weights: str) -> None:
    """Refuse an engine whose blocks could differ under one name. Raises: ConfigError."""
    check_weights(vllm_config, weights)
    if getattr(vllm_config, "lora_config", None) is not None and not adapters:
        raise ConfigError(
            "this engine uses LoRA adapters, which vLLM's block hashes name without their content",
            hint="set adapters to a text, and change it whenever an adapter's content changes",
        )
    cache_config = getattr(vllm_config, "cache_config", None)
    images = getattr(getattr(vllm_config, "model_config", None), "multimodal_config", None)
    if getattr(images, "mm_processor_cache_gb", None) == 0 and not getattr(
        cache_config, "enable_prefix_caching", True
    ):
        raise ConfigError(
            "without its processor's cache and prefix caching vLLM numbers images instead of "
            "hashing them: one would be taken for the other of that number",
            hint="leave one of --mm-processor-cache-gb 0 and --no-enable-prefix-caching out",
        )
    if getattr(cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales makes the bytes of a block differ between engines",
            hint="leave --calculate-kv-scales out",
        )


def hashes_are_shared(environment: Mapping[str, str]) -> bool:
    """Whether the seed that the engine chose is one that others choose too; ask once it runs."""
    default = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "")
    seed = getattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    return roots_agree(seed, default, environment)
