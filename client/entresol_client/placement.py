"""Which shard owns a key: weighted rendezvous hashing, agreed by every host without talking.

Invariant: the owner depends only on (namespace descriptor, engine key, shard names and weights).
Adding a shard moves to it only the keys it now owns; removing one moves only the keys it had.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); weights by
the logarithm method, Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from entresol_proto.ids import EngineKey, placement_hash
from entresol_proto.naming import placement_hashes

_SPAN = 2.0**64
_BELOW_ONE = 1 - 2.0**-53  # the next number below 1


class Placement:
    """Owners of keys among a fixed list of shards, given as (name, weight)."""

    __slots__ = ("_equal", "_names", "_weights")

    def __init__(self, shards: Sequence[tuple[str, float]]) -> None:
        assert shards, "placement needs a shard"
        assert all(weight > 0 for _, weight in shards), "weights are positive"
        self._names = [name.encode() for name, _ in shards]
        self._weights = [weight for _, weight in shards]
        self._equal = len(set(self._weights)) == 1

    def owner(self, descriptor_digest: bytes, key: EngineKey) -> int:
        """Number of the shard that owns `key`."""
        if len(self._names) == 1:
            return 0
        scores = [placement_hash(descriptor_digest, key, name) for name in self._names]
        if self._equal:
            return scores.index(max(scores))
        # -weight / ln(u), u in (0, 1): among competitors each wins in proportion to its weight.
        weighted = [
            # The highest scores round to 1, whose logarithm is 0.
            -weight / math.log(min((score + 0.5) / _SPAN, _BELOW_ONE))
            for weight, score in zip(self._weights, scores, strict=True)
        ]
        return weighted.index(max(weighted))

    def split(
        self, descriptor_digest: bytes, keys: Sequence[EngineKey]
    ) -> dict[int, Sequence[int]]:
        """Shard number → positions in `keys` that it owns, in ascending order; of a single shard
        as a range."""
        if len(self._names) == 1:
            return {0: range(len(keys))} if keys else {}
        if self._equal and keys:
            scores = np.array([placement_hashes(descriptor_digest, keys, n) for n in self._names])
            owners = scores.argmax(axis=0)  # the first of equals, as `owner` finds it
            # Not np.unique, whose first call imports numpy.ma: 50 ms in somebody's first get.
            present = np.flatnonzero(np.bincount(owners)).tolist()
            return {owner: np.flatnonzero(owners == owner).tolist() for owner in present}
        parts: dict[int, list[int]] = {}
        for position, key in enumerate(keys):
            parts.setdefault(self.owner(descriptor_digest, key), []).append(position)
        return dict(parts)
