"""SGLang's own host pools, small, filled, and compared page by page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.engines.sglang import parts

LAYERS = 3
HEADS = 2
HEAD_DIM = 16
PAGE_TOKENS = 8
PAGES = 16
LATENT = 32  # of an MLA row
ROPE = 8
DTYPE = torch.bfloat16


def hashes(count: int, *, start: int = 0, salt: str | None = None) -> list[str]:
    """The page hashes of a prompt, as SGLang computes them."""
    tokens = list(range(start, start + count * PAGE_TOKENS))
    seed = parts.hashes.storage_namespace_seed(None, salt)
    found = parts.hashes.get_hash_str(tokens, seed, page_size=PAGE_TOKENS)
    assert len(found) == count
    return list(found)


def indices(pages: Sequence[int]) -> Any:
    """The token slots of pages, as SGLang passes them."""
    return torch.cat([torch.arange(p * PAGE_TOKENS, (p + 1) * PAGE_TOKENS) for p in pages])


def mha_pool(layout: str, seed: int | None = None, **changes: Any) -> Any:
    """A host pool of attention with heads; random content with a seed, zeros without."""
    layers, heads = changes.get("layers", LAYERS), changes.get("heads", HEADS)
    dtype = changes.get("dtype", DTYPE)
    device = tuple(
        torch.zeros(PAGE_TOKENS, heads, HEAD_DIM, dtype=dtype) for _ in range(2 * layers)
    )
    info = parts.device.MHABufferInfo(
        buffers=parts.device.KVBuffers(
            k=device[:layers], v=device[layers:], layout=parts.device.KVBufferLayout.NHD,
            k_data_ptrs=_pointers(device[:layers]), v_data_ptrs=_pointers(device[layers:]),
        ),
        page_size=PAGE_TOKENS, head_num=heads, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    return _made(parts.mha.MHATokenToKVPoolHost, info, layout, seed, layers)


def mla_pool(layout: str, seed: int | None = None) -> Any:
    """A host pool of MLA: one latent row per token, the same on every rank."""
    device = tuple(torch.zeros(PAGE_TOKENS, 1, LATENT + ROPE, dtype=DTYPE) for _ in range(LAYERS))
    info = parts.device.MLABufferInfo(
        buffers=device, data_ptrs=_pointers(device), layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS, page_size=PAGE_TOKENS, kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE, kv_cache_dim=LATENT + ROPE, dtype=DTYPE,
        device=torch.device("cpu"),
    )  # fmt: skip
    kind = parts.mla.MLATokenToKVPoolHost
    return _made(kind, info, layout, seed, LAYERS, target_layer_num=LAYERS)


def _pointers(tensors: Sequence[Any]) -> Any:
    return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64)


def _made(kind: Any, info: Any, layout: str, seed: int | None, layers: int, **more: Any) -> Any:
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

    with host_memory_budget_scope(2**30):
        pool = kind(
            info, 1.0, 0, PAGE_TOKENS, layout, pin_memory=False,
            device_capacity_tokens=PAGE_TOKENS, start_layer=0, end_layer=layers,
            host_token_capacity=PAGES * PAGE_TOKENS, **more,
        )  # fmt: skip
    pool.kv_buffer.zero_()
    if seed is not None:
        raw = pool.kv_buffer.view(torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return pool


def page(pool: Any, number: int) -> Any:
    """The bytes of one page."""
    return pool.get_data_page(number * PAGE_TOKENS, flat=True).view(torch.uint8)


def config(client_toml: Path, **changes: Any) -> Any:
    """What SGLang hands to its factory for one rank; `extra` goes into the operator's JSON."""
    extra = {
        "backend_name": "entresol",
        "module_path": "entresol_client.engines.sglang",
        "class_name": "EntresolHiCache",
        "config": str(client_toml),
        **changes.pop("extra", {}),
    }
    usual = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": "tiny",
        "extra_config": json.loads(json.dumps(extra)),
    }  # fmt: skip
    return parts.storage.HiCacheStorageConfig(**{**usual, **changes})


def backend(client_toml: Path, pool: Any, **changes: Any) -> Any:
    """A storage backend through SGLang's own factory, attached as its controller does."""
    made = parts.factory.StorageBackendFactory.create_backend(
        "dynamic", config(client_toml, **changes), pool
    )
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made
