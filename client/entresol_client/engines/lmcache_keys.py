"""How LMCache's object keys name blocks in Entresol; knows LMCache's terms, not its modules.

Invariant: every field of an ObjectKey and the layout of the object take part in the name. Model and
layout are in the namespace; hash, rank, object group and salt are in the key, because one lookup
asks for all ranks of a world at once and a session has few namespaces.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from entresol_client.engines import naming
from entresol_proto import limits
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import ConfigError

Layout = tuple[tuple[tuple[int, ...], str], ...]  # (shape, dtype) of each tensor of an object

CHUNK_HASH_BYTES_MAX = limits.ENGINE_KEY_BYTES_MAX - naming.SALT_BYTES - 12
KV_RANK_MAX = 2**64 - 1
GROUP_MAX = 2**32 - 1
DECORATION = "##lmcache-"  # what stands behind it in a model's name says how its KV lies
KV_DIMENSIONS = 4  # [K and V, layers, tokens, hidden]: LMCache's form of attention KV


def layout_of(shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> Layout:
    """The layout of an object, from the shapes and the torch dtypes of its tensors."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return tuple((tuple(map(int, shape)), name) for shape, name in zip(shapes, names, strict=True))


def model_of(name: str) -> str:
    """The model itself, of the name that LMCache keeps its KV under.

    Source: LMCache 0.5.6, integration/vllm/lmcache_mp_connector.py (get_dcp_decorated_model_name).
    """
    return name.partition(DECORATION)[0]


def engine_key(chunk_hash: bytes, kv_rank: int, group: int, salt: str) -> bytes:
    """The engine key of one object: hash, u64 rank, u32 group, and 16 bytes of the salt's digest.

    Unambiguous among hashes of one length; `descriptor` keeps lengths apart.
    Raises: ConfigError when a field does not fit.
    """
    if not 0 < len(chunk_hash) <= CHUNK_HASH_BYTES_MAX:
        raise ConfigError(f"a chunk hash of {len(chunk_hash)} bytes, not 1..{CHUNK_HASH_BYTES_MAX}")
    if not 0 <= kv_rank <= KV_RANK_MAX or not 0 <= group <= GROUP_MAX:
        raise ConfigError(f"kv_rank {kv_rank} or object group {group} is out of range")
    return naming.salted(chunk_hash + struct.pack(">QI", kv_rank, group), salt or None)


def descriptor(
    model: str, revision: str, layout: Layout, kv_format: str, hash_bytes: int
) -> NamespaceDescriptor:
    """The namespace of one model's objects of one layout.

    `kv_format` names who lays out the bytes inside these shapes (LMCache's version, or the
    operator's text), because neither key nor shape tells. Layers and tokens are read off shapes of
    the usual form and are for people only: the fingerprint covers all of it.
    Raises: BadKeyError for a model name that no namespace can hold.
    """
    shape, dtype = layout[0] if layout else ((), "")
    usual = len(layout) == 1 and len(shape) == KV_DIMENSIONS
    parts = {
        "by": "lmcache",
        "format": kv_format,
        "tensors": [[list(shape), dtype] for shape, dtype in layout],
        "hash_bytes": hash_bytes,
    }
    return NamespaceDescriptor(
        model=model,
        model_revision=revision,
        dtype=naming.dtype_of(dtype).label if len(layout) == 1 else "opaque",
        layers=shape[1] if usual else 0,
        page_layout=f"lmcache:{naming.fingerprint(parts)}",
        block_tokens=min(max(shape[2], 1), limits.TOKENS_PER_BLOCK_MAX) if usual else 1,
    )


def size_bytes(layout: Layout) -> int:
    """Bytes of an object of this layout; 0 when a dtype is not known here."""
    kinds = [(shape, naming.dtype_of(dtype)) for shape, dtype in layout]
    return sum(
        math.prod(shape) * kind.item_bytes for shape, kind in kinds if kind is not DType.OPAQUE
    )
