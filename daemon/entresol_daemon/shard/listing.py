"""Snapshots: what a tenant has stored, as events, read from the heads of its blocks.

Invariants: every block is listed that is stored from before the start to after the end, and none
that was gone when the one before it was given out; a tenant waits for its turns, of the loop and of
flash, and others have theirs in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np

from entresol_daemon.core.fairness import PUTS
from entresol_daemon.core.residency import ResidentState
from entresol_daemon.events import types as events
from entresol_daemon.events.types import Event
from entresol_daemon.flash.device import aligned_buffer
from entresol_daemon.flash.index import U32, Slots
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES, extent_bytes
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.staging import sealed_view
from entresol_daemon.shard.turns import BLOCK_COST, FLASH_ITEM_BYTES, REQUEST_COST
from entresol_proto import limits
from entresol_proto.ids import TenantName
from entresol_proto.seal.block import (
    HEADER_BYTES_MAX,
    META_BYTES_MAX,
    TAG_BYTES,
    BlockMeta,
    SealedHeader,
    derive_block_key,
    open_meta,
)
from entresol_proto.status import SealError, Status

SCAN_SLOTS, SCAN_COST = 65_536, 200  # of the index, looked through in one turn
HEADS_AT_ONCE = 32  # read from flash in one batch
SORTED_AT_ONCE = 4_096  # slots, on the loop: it stood for a second while five million were sorted
SORT_BYTES = 64  # of the sealing that a thread could do while it sorts one more
_HEAD_BYTES_MAX = HEADER_BYTES_MAX + META_BYTES_MAX + TAG_BYTES


def by_position(found: Sequence[Slots], positions: U32) -> U32:
    """Slots in order of their blocks' positions. Sixteen bits at a time, which numpy sorts in one
    pass: an eighth of the time. They take half the memory, as they are kept for long."""
    slots = np.concatenate(found)
    asked = positions[slots]
    order = np.argsort(asked.astype(np.uint16), kind="stable")
    if len(asked) and asked.max() > 0xFFFF:
        order = order[np.argsort((asked >> 16).astype(np.uint16)[order], kind="stable")]
    return slots[order].astype(np.uint32)


class Listing:
    """One snapshot of one tenant."""

    def __init__(self, parts: Parts, tenant: TenantName) -> None:
        self._parts = parts
        self._tenant = tenant
        self._heads: dict[int, bytes] = {}  # read ahead, by slot: perhaps of another block by now

    async def events(self) -> AsyncIterator[Event | None]:
        """In order of position within a namespace: parents before what follows them. None now and
        then, also while nothing is found: who follows must read the log before it is full."""
        parts = self._parts
        index = parts.engine.index
        if parts.keyring.info(self._tenant) is None:
            return  # admitted, but never seen: nothing is stored
        for namespace_id in parts.keyring.namespaces_of(self._tenant):
            found, first = [np.zeros(0, np.int64)], 0
            while index.has_namespace(namespace_id) and first < index.high:
                await self._turn(SCAN_COST)
                found.append(index.slots_of(namespace_id, first, first + SCAN_SLOTS))
                first += SCAN_SLOTS
                yield None
            ordered = await self._in_order(found)
            del found  # of millions of blocks it is large, and the walk is long
            for at in range(0, len(ordered), HEADS_AT_ONCE):
                if self._tenant not in parts.accounts.by_name:
                    return  # erased meanwhile: nothing is left, and there are no turns to look in
                some = ordered[at : at + HEADS_AT_ONCE].tolist()
                await self._read_ahead(namespace_id, some)
                yield None
                for slot in some:
                    await self._turn(BLOCK_COST)
                    event = await self._stored_event(namespace_id, slot)
                    if event is not None:
                        yield event

    async def _in_order(self, found: list[Slots]) -> U32:
        """By position; of many blocks not on the loop."""
        parts, account = self._parts, self._parts.accounts.by_name.get(self._tenant)
        count, positions = sum(map(len, found)), parts.engine.index.position
        if account is None:
            return np.zeros(0, np.uint32)  # erased meanwhile
        if count <= SORTED_AT_ONCE:
            return by_position(found, positions)
        await parts.turns.compute.take(account, count * SORT_BYTES, PUTS)
        try:
            return await parts.compute.run(by_position, found, positions)
        finally:
            parts.turns.compute.give(count * SORT_BYTES)

    async def _turn(self, cost: int) -> None:
        account = self._parts.accounts.by_name.get(self._tenant)
        if account is not None:
            await self._parts.turns.loop.take(account, REQUEST_COST + cost)

    def _is_here(self, namespace_id: bytes, slot: int) -> bool:
        index = self._parts.engine.index
        return index.is_live(slot) and index.namespace_of(slot) == namespace_id

    async def _read_ahead(self, namespace_id: bytes, slots: Sequence[int]) -> None:
        """The heads of those that are on flash only, together."""
        resident = self._parts.residency.get
        wanted = [
            slot for slot in slots if resident(slot) is None and self._is_here(namespace_id, slot)
        ]
        self._heads = dict(zip(wanted, await self._read(wanted), strict=True)) if wanted else {}

    async def _read(self, slots: list[int]) -> list[bytes]:
        async with self._flash_turn((limits.ALIGN_BYTES + FLASH_ITEM_BYTES) * len(slots)) as may:
            return await self._parts.engine.read_heads(slots) if may else [b""] * len(slots)

    @contextlib.asynccontextmanager
    async def _flash_turn(self, cost: int) -> AsyncIterator[bool]:
        """The tenant's turn to read; False when it is gone."""
        turns, account = self._parts.turns.flash, self._parts.accounts.by_name.get(self._tenant)
        if account is None:
            yield False
            return
        await turns.take(account, cost)
        try:
            yield True
        finally:
            turns.give(cost)

    async def _stored_event(self, namespace_id: bytes, slot: int) -> Event | None:
        """None when it is gone. What cannot be read just now is listed by its key alone: left out,
        it were gone for who follows, and no event would say that it is back."""
        parts, index = self._parts, self._parts.engine.index
        if not self._is_here(namespace_id, slot) or self._tenant not in parts.accounts.by_name:
            return None
        key = index.key_of(slot)
        resident = parts.residency.get(slot)
        in_memory = resident is not None and resident.state is ResidentState.READY
        bare = Event(
            seq=0,
            time_unix_ns=parts.unix_ns(),
            tenant=self._tenant,
            kind=events.Kind.STORED,
            namespace_id=namespace_id,
            wire_keys=(key,),
            position=index.m_position[slot],
            medium=events.Medium.MEMORY if in_memory else events.Medium.FLASH,
            size_bytes=index.m_sealed_bytes[slot],
        )
        try:
            if resident is not None and in_memory:
                sealed = memoryview(bytes(sealed_view(resident)[:_HEAD_BYTES_MAX]))
            else:
                sealed = await self._sealed_head(slot, key)
            header = SealedHeader.parse(sealed)
            if header.wire_key == key and header.namespace_id == namespace_id:
                meta = self._meta_of(sealed, header, bare.position)
                if meta is not None:
                    return replace(
                        bare, engine_keys=(header.engine_key,), parent=meta.parent,
                        position=meta.position, block_tokens=meta.block_tokens,
                        token_ids_u32le=meta.token_ids_u32le, size_bytes=header.sealed_bytes,
                    )  # fmt: skip
        except SealError:
            pass
        return bare if self._is_here(namespace_id, slot) and index.key_of(slot) == key else None

    def _meta_of(self, sealed: memoryview, header: SealedHeader, position: int) -> BlockMeta | None:
        """What routers may know; of a host-sealed block only its place. Raises: SealError."""
        keyring = self._parts.keyring
        if header.host_sealed:
            described = keyring.descriptor_of(header.namespace_id)
            return BlockMeta(b"", position, described.block_tokens if described else 0, b"")
        dek = keyring.get(self._tenant).dek(header.dek_version)
        return (
            None if dek is None else open_meta(sealed, header, derive_block_key(dek, header.salt))
        )

    async def _sealed_head(self, slot: int, key: bytes) -> memoryview:
        """The sealed bytes of a block, to the end of its meta; shorter where they cannot be had.

        Raises: SealError when they begin with no header.
        """
        engine = self._parts.engine
        sealed = memoryview(self._heads.pop(slot, b""))[RECORD_HEADER_BYTES:]
        if not sealed or SealedHeader.parse(sealed).wire_key != key:
            (head,) = await self._read([slot])
            sealed = memoryview(head)[RECORD_HEADER_BYTES:]
        header = SealedHeader.parse(sealed)
        if header.header_bytes + header.meta_bytes <= len(sealed):
            return sealed
        # A long meta. The slot may have become another block's meanwhile: then it is that one's.
        length_bytes, is_live = engine.index.m_sealed_bytes, engine.index.is_live
        async with self._flash_turn(extent_bytes(length_bytes[slot]) + FLASH_ITEM_BYTES) as may:
            if not (may and is_live(slot)):
                return sealed
            record = aligned_buffer(extent_bytes(length_bytes[slot]))
            statuses = await engine.read([(slot, record)])
        return record[RECORD_HEADER_BYTES:] if statuses == [Status.OK] else sealed
