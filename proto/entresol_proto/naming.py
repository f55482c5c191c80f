"""Names of thousands of blocks at once: what `ids` gives of each, natively if there is a kernel.

Apart from `ids`, because the brain may use that and touches no native code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from entresol_proto import limits, native
from entresol_proto.ids import EngineKey, masked_engine_key, placement_hash, wire_key

_SHARD_BYTES_BATCHED_MAX = native.BLAKE2B_INPUT_BYTES_MAX - limits.ENGINE_KEY_BYTES_MAX


def _differ(engine_keys: Sequence[EngineKey]) -> bool:
    """Whether they are not all of one length."""
    return len(set(map(len, engine_keys))) > 1


def wire_keys(secret: bytes, engine_keys: Sequence[EngineKey]) -> bytes:
    """`wire_key` of each, end to end: a fraction of a microsecond for one of thousands."""
    if _differ(engine_keys):
        return b"".join([wire_key(secret, key) for key in engine_keys])
    return native.blake2b_many(
        b"".join(engine_keys), len(engine_keys), digest_bytes=limits.WIRE_KEY_BYTES, key=secret,
        person=b"entresol-block",
    )  # fmt: skip


def masked_engine_keys(secret: bytes, engine_keys: Sequence[EngineKey]) -> list[EngineKey]:
    """`masked_engine_key` of each."""
    if _differ(engine_keys):
        return [masked_engine_key(secret, key) for key in engine_keys]
    run = native.blake2b_many(
        b"".join(engine_keys), len(engine_keys), digest_bytes=32, key=secret,
        person=b"entresol-hskey",
    )  # fmt: skip
    return [EngineKey(run[at : at + 32]) for at in range(0, len(run), 32)]


def placement_hashes(
    descriptor_digest: bytes, engine_keys: Sequence[EngineKey], shard: bytes
) -> npt.NDArray[np.uint64]:
    """`placement_hash` of each key."""
    if _differ(engine_keys) or len(shard) > _SHARD_BYTES_BATCHED_MAX:
        scores = [placement_hash(descriptor_digest, key, shard) for key in engine_keys]
        return np.array(scores, np.uint64)
    run = shard.join(engine_keys) + shard if engine_keys else b""
    raw = native.blake2b_many(
        run, len(engine_keys), digest_bytes=8, key=descriptor_digest, person=b"entresol-place"
    )
    return np.frombuffer(raw, "<u8")
