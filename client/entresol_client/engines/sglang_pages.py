"""How SGLang's pages name blocks in Entresol; knows SGLang's terms, not its modules.

Invariant: SGLang hashes tokens (and a request's salt) only, so everything else that changes a
page's bytes is in the namespace here: model, weights, ranks, the host pool's geometry and format,
and how a page is cut into blocks.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
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
)
# What the operator's command line may change about the bytes without changing the pool.
_ENGINE_FACTS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "json_model_override_args",
    "context_length",
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


def pool_facts(pool: Any) -> dict[str, Any]:
    """What a host pool tells of the form of its pages: numbers and texts only."""
    facts: dict[str, Any] = {"class": type(pool).__name__, "dtype": str(getattr(pool, "dtype", ""))}
    for name in _POOL_FACTS:
        value = getattr(pool, name, None)
        facts[name] = value if isinstance(value, int | str) else None
    return facts


def is_multimodal(server_args: Any) -> bool:
    """Whether prompts may hold images, sounds or films: SGLang's page hash has 30 bits of each.

    Source: SGLang 0.5.23, `pad_value` of managers/schedule_batch.py: it stands for the tokens of an
    item, and is what of the item is hashed. A request may give it (`mm_hashes`).
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
