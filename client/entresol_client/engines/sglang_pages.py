"""How SGLang's pages name blocks in Entresol; knows SGLang's terms, not its modules.

Invariant: SGLang hashes tokens (and a request's salt) only, so everything else that changes a
page's bytes is in the namespace here: model, weights, ranks, the host pool's geometry and format,
and how a page is cut into blocks.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from entresol_client.engines import naming
from entresol_proto import limits
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import ConfigError

KV = "kv"
MAMBA = "mamba"
PIECES_MAX = 8  # a page in more pieces than this travels as one block, through a copy
_SEED_WORD = b"sglang-cache-namespace-v1"
_HASH = re.compile(r"(?:[0-9a-f]{2}){8,62}")
# What a host pool may tell of its geometry; absent ones are None, which is a value like any other.
_POOL_FACTS = (
    "layout",
    "page_size",
    "size_per_token",
    "storage_format_tag",
    "start_layer",
    "end_layer",
    "layer_num",
    "target_layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "num_mamba_layers",
    "dcp_size",
    "indexer_page_stride_size",
    "head_group_num",
    "dsa_kv_cache_store_fp8",
)
# Its data types beside the first; of a state's parts each may have its own.
_POOL_DTYPES = ("conv_dtype", "temporal_dtype", "indexer_dtype")
# What the device pools behind it may tell: rows are copied as they lie there, and fp8 is stored as
# plain bytes.
_DEVICE_FACTS = ("dtype", "store_dtype", "kv_cache_layout", "use_hnd", "layout", "packed_fp8")
# How rows lie on a device, where no pool tells; and what says the same as nothing there.
_LAYOUT_VARIABLES = ("SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT", "SGLANG_USE_AITER")
_USUAL_LAYOUT = frozenset({"", "0", "false", "no", "off", "nhd"})
# What the operator's command line may change about the bytes without changing the pool.
_ENGINE_FACTS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "json_model_override_args",
    "context_length",
    "device",
    "mamba_ssm_dtype",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "mm_process_config",
    "enable_precise_embedding_interpolation",
    "enable_encoder_swa_bounded_replay",
    "enable_decoder_swa_bounded_replay",
    "enable_linear_replayssm",
    "enable_linear_replayssm_spec",
    "enable_int8_mamba_checkpoint",
    "enable_deepseek_v4_fp4_indexer",
    "experts_shared_outer_loras",
)


def page_key(page_hash: str, piece: int) -> bytes:
    """The engine key of one piece of a page: the hash's bytes and the piece's number.

    SGLang's hashes are hex digests; another text is taken by its digest. At most 63 bytes.
    """
    if _HASH.fullmatch(page_hash):
        return bytes.fromhex(page_hash) + bytes([piece])
    digest = hashlib.blake2b(page_hash.encode(), digest_size=32, person=b"entresol-sglang")
    return digest.digest() + bytes([piece])


def page_hashes(
    token_ids: Sequence[int],
    page_tokens: int,
    *,
    extra_key: str | None = None,
    cache_salt: str | None = None,
) -> list[str]:
    """The hashes of a prompt's full pages, as SGLang names them, in hex: SHA-256 over the digest of
    the page before and the page's token ids, four bytes each, little-endian. What stands before the
    first page comes from the request's extra key and salt, and is nothing where it has neither.

    Source: SGLang 0.5.23, mem_cache/utils.py and its native hash. Not for EAGLE's pairs of tokens.
    """
    digest = b""
    if extra_key is not None or cache_salt is not None:
        seed = hashlib.sha256(_SEED_WORD)
        for part in (extra_key, cache_salt):
            raw = (part or "").encode()
            seed.update(b"\0" if part is None else b"\1" + struct.pack("<Q", len(raw)) + raw)
        digest = seed.digest()
    found = []
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        page = token_ids[start : start + page_tokens]
        digest = hashlib.sha256(digest + struct.pack(f"<{page_tokens}I", *page)).digest()
        found.append(digest.hex())
    return found


def is_sharded(pool_name: str, pool: Any, is_mla: bool) -> bool:
    """Whether each tensor-parallel rank holds other bytes of a page of this pool.

    Where the model's KV is replicated (MLA), its state pools are not, and neither is a draft
    model's KV with heads. SGLang has rank 0 alone write what it takes for replicated.
    """
    return not is_mla or pool_name == MAMBA or type(pool).__name__.startswith("MHA")


def pool_facts(pool: Any, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What a host pool tells of the form of its pages, and the device pools behind it of the form
    of their rows: numbers and texts only. `environment` counts where none tells of the latter."""
    facts: dict[str, Any] = {"class": type(pool).__name__, "dtype": str(getattr(pool, "dtype", ""))}
    for name in _POOL_FACTS:
        value = getattr(pool, name, None)
        facts[name] = value if isinstance(value, int | str) else None
    for name in _POOL_DTYPES:
        facts[name] = _text(getattr(pool, name, None))
    states = getattr(pool, "slot_state_device_tensors", None)
    facts["states"] = [str(one.dtype) for one in states] if isinstance(states, list | tuple) else []
    device = [_device_facts(one) for one in _device_pools(pool)]
    facts["device"] = device
    if not any(one["kv_cache_layout"] or one["layout"] or one["buffers"] for one in device):
        told = {name: environment.get(name, "").strip().lower() for name in _LAYOUT_VARIABLES}
        facts["environment"] = {k: v for k, v in told.items() if v not in _USUAL_LAYOUT}
    return facts


def _device_pools(pool: Any) -> Iterator[Any]:
    """The device pools behind a host pool, or what stands for them: each version its own way.

    Source: SGLang 0.5.23, mem_cache/pool_host (mha.py, mla.py, mamba.py, dsa.py); before, all had
    `device_pool`.
    """
    yield getattr(pool, "device_pool", None)
    yield getattr(getattr(pool, "decl", None), "device_pool", None)
    infos = getattr(pool, "_buffer_infos", None)
    yield from infos if isinstance(infos, list | tuple) else ()


def _device_facts(one: Any) -> dict[str, str]:
    facts = {name: _text(getattr(one, name, None)) for name in _DEVICE_FACTS}
    for name in ("buffers", "scales"):
        facts[name] = _text(getattr(getattr(one, name, None), "layout", None))
    facts["class"] = "" if one is None else type(one).__name__
    facts["quantized"] = _kind(getattr(one, "quant_method", None))
    return facts


def _text(value: Any) -> str:
    """A fact as a text that is the same in every process: empty for none."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, int | str) or type(value).__name__ == "dtype":
        return "" if value is None else str(value)
    return _kind(value)


def _kind(value: Any) -> str:
    return "" if value is None else type(value).__name__


def is_multimodal(server_args: Any) -> bool:
    """Whether prompts may hold images, sounds or films, which SGLang names by 64 bits, or as the
    request says.

    Source: SGLang 0.5.23, `padding_values` of managers/schedule_batch.py: 62 bits of SHA-256 of an
    item's hash stand for its tokens and are what of it is hashed. That hash has 64 bits: of SHA-256
    for an item in host memory, of `gpu_tensor_hash`, made for speed, for one on a GPU, or those of
    the request's `mm_hashes`. Four such words of 32 bytes for Kimi.
    """
    if getattr(server_args, "enable_multimodal", None) is False:
        return False
    model = getattr(server_args, "model_config", None)
    make = getattr(server_args, "get_model_config", None)
    if model is None and make is not None:
        try:
            model = make()
        except Exception:  # SGLang's own business; what it is told stays
            model = None
    return bool(getattr(model, "is_multimodal", getattr(server_args, "enable_multimodal", False)))


def engine_facts(server_args: Any, adapters: str = "", model_path: str = "") -> dict[str, Any]:
    """What the engine's own arguments tell; empty values when there are none. `model_path` where
    nothing else tells the weights: what the engine serves them as may be any model's name.

    LoRA adapters that the engine starts with are in SGLang's hashes by name and path, so here is
    what their files hold; `adapters` stands for those that are not here to be read. One that is
    loaded later gets an id of chance, which nobody finds again.

    Raises: ConfigError for an adapter that is neither here nor stood for.
    """
    facts: dict[str, Any] = {
        name: str(getattr(server_args, name, None) or "") for name in _ENGINE_FACTS
    }
    for draft in ("", "speculative_draft_"):
        loaded = naming.load_facts(
            getattr(server_args, f"{draft}load_format", None),
            getattr(server_args, "model_loader_extra_config", None),
        )
        if loaded:
            facts[f"{draft}load"] = loaded
    if model_path:
        facts["model_path"] = model_path
    marks = []
    for one in getattr(server_args, "lora_paths", None) or ():
        told = one.get("lora_path") if isinstance(one, Mapping) else getattr(one, "lora_path", one)
        path = str(told).rpartition("=")[2]
        mark = naming.weights_fingerprint(path)
        if mark is None and not adapters:
            raise ConfigError(
                f"the LoRA adapter {path!r} is not on this host to be told from another",
                hint="set adapters to a text, and change it whenever an adapter's content changes",
            )
        marks.append([path, mark or ""])
    if marks:
        facts["adapters"] = sorted(marks)
    return facts


def check_weights(server_args: Any, weights: str) -> None:
    """Refuse random weights under a model's name; also a draft model's. Raises: ConfigError."""
    for name in ("load_format", "speculative_draft_load_format"):
        naming.check_loaded(getattr(server_args, name, None), weights)


def rank_facts(config: Any, sharded: bool) -> dict[str, Any]:
    """Which shard of a page this rank holds, apart from tensor and pipeline parallelism."""
    return {
        "attn_cp_rank": int(getattr(config, "attn_cp_rank", 0)),
        "attn_cp_size": int(getattr(config, "attn_cp_size", 1)),
        "dcp_rank": int(getattr(config, "dcp_rank", 0)),
        "dcp_size": int(getattr(config, "dcp_size", 1)),
        "is_mla": bool(config.is_mla_model),
        "sharded": sharded,
    }


def descriptor(
    config: Any,
    pool_name: str,
    pool: Any,
    *,
    piece_bytes: Sequence[int],
    engine: dict[str, Any],
    revision: str,
    kv_format: str,
    cache_salt: str | None,
) -> NamespaceDescriptor:
    """The namespace of one rank's pages of one pool.

    `config` is SGLang's HiCacheStorageConfig; `piece_bytes` are the lengths of the blocks that a
    page is cut into. Replicated pools have one namespace for all tensor-parallel ranks and worlds.
    Raises: BadKeyError for a model name or salt that no namespace can hold.
    """
    sharded = is_sharded(pool_name, pool, bool(config.is_mla_model))
    facts = pool_facts(pool)
    parts = {
        "by": "sglang",
        "format": kv_format,
        "pool": pool_name,
        "facts": facts,
        "engine": engine,
        "ranks": rank_facts(config, sharded),
        "pieces": list(piece_bytes),
    }
    return NamespaceDescriptor(
        model=config.model_name or "unnamed",
        model_revision=revision,
        cache_salt=cache_salt or None,
        dtype=naming.dtype_of(facts["dtype"]).label,
        layers=_number(facts["layer_num"]),
        kv_heads=_number(facts["head_num"]),
        head_dim=_number(facts["head_dim"]),
        page_layout=f"sglang:{naming.fingerprint(parts)}",
        block_tokens=min(max(_number(facts["page_size"]), 1), limits.TOKENS_PER_BLOCK_MAX),
        tp_rank=int(config.tp_rank) if sharded else 0,
        tp_world=int(config.tp_size) if sharded else 1,
        pp_rank=int(config.pp_rank),
        pp_world=int(config.pp_size),
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
