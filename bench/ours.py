"""Entresol's client as one of the variants: the same memory, the same work, from outside.

Invariant: the blocks that are put and got are the region's, so that what arrives is judged by the
same comparison as a peer's.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace

from bench.region import Region
from entresol_client import AsyncClient, ClientConfig, Namespace, PutBlock
from entresol_client.results import AckLevel, OpenPlace
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.wire.data import Tier

DEADLINE_NS = 60_000_000_000


class Ours:
    """A client of a running daemon over one fabric."""

    def __init__(self, client: AsyncClient, ns: Namespace, region: Region, salt: str) -> None:
        self.client = client
        self.ns = ns
        self._region = region
        self._salt = salt
        self._from = region.blocks(region.source)
        self._into = region.blocks(region.into)

    @classmethod
    async def open(cls, config: ClientConfig, region: Region, fabric: str, salt: str) -> Ours:
        """Connect; the caller closes `client`."""
        client = await AsyncClient.open(replace(config, fabric=fabric, fallback=False))
        ns = await client.namespace(NamespaceDescriptor(model="bench", cache_salt=salt))
        return cls(client, ns, region, salt)

    def keys(self, generation: int) -> list[bytes]:
        """Engine keys of a batch, 32 bytes each."""
        text = f"{self._salt}/{generation}/"
        return [
            hashlib.sha256(f"{text}{block}".encode()).digest()
            for block in range(self._region.count)
        ]

    async def put(self, generation: int, ack: AckLevel = "accepted") -> float:
        """Seconds for storing a batch. Raises: AssertionError unless all of it was stored."""
        keys = self.keys(generation)
        items = [
            PutBlock(key, block, number, keys[number - 1] if number else None)
            for number, (key, block) in enumerate(zip(keys, self._from, strict=True))
        ]
        began = time.perf_counter()
        done = await self.ns.put(items, ack=ack, deadline_ns=DEADLINE_NS)
        took = time.perf_counter() - began
        assert done.stored == len(keys), done.statuses
        return took

    async def get(
        self,
        generation: int,
        times: int = 1,
        *,
        open_at: OpenPlace = "host",
        tier: Tier | None = None,
    ) -> float:
        """Seconds for getting a batch `times` times over.

        Raises: AssertionError unless every block came, and from `tier` when that is given.
        """
        keys = self.keys(generation)
        began = time.perf_counter()
        for _ in range(times):
            got = await self.ns.get_into(keys, self._into, open_at=open_at, deadline_ns=DEADLINE_NS)
            assert got.ok, got.statuses
            assert tier is None or set(got.tiers) == {tier}, got.tiers
        return time.perf_counter() - began

    async def get_one(self, generation: int, block: int) -> tuple[float, Tier]:
        """Seconds for one block of a batch, and where the daemon found it."""
        key = self.keys(generation)[block]
        began = time.perf_counter()
        got = await self.ns.get_into([key], [self._into[block]], deadline_ns=DEADLINE_NS)
        took = time.perf_counter() - began
        assert got.ok, got.statuses
        return took, got.tiers[0]

    async def forget(self, generation: int) -> None:
        """Drop a batch."""
        await self.ns.forget(self.keys(generation), deadline_ns=DEADLINE_NS)
