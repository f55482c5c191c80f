"""Blocks leave the index on request, and a tombstone says so: one at a time, or a namespace's.

Invariants: what left the index on request is not found after a crash once `Engine.barrier`
returned; no step is long, however many blocks a namespace has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from entresol_daemon.flash.index import U32, Index, Slots
from entresol_daemon.flash.model import DROP_BLOCKS_AT_ONCE, EngineStats, Removed, RemoveReason
from entresol_daemon.flash.segment import extent_bytes
from entresol_daemon.flash.space import SegmentTable
from entresol_daemon.flash.tombstones import Tombstone, TombstoneKind
from entresol_daemon.flash.writer import Writer

_NO_KEY = bytes(16)


class Remover:
    """See the module; the methods are the engine's."""

    def __init__(
        self, index: Index, table: SegmentTable, writer: Writer, stats: EngineStats
    ) -> None:
        self._index = index
        self._table = table
        self._writer = writer
        self._stats = stats

    def remove(self, slot: int, reason: RemoveReason) -> Removed:
        """See `Engine.remove`."""
        segment = self._table.segments[self._index.m_segment[slot]]
        gone = self._forget(slot, reason)
        self._bury(TombstoneKind.BLOCK, gone.namespace_id, gone.wire_key, segment.sequence)
        self._table.on_removed([gone])
        return gone

    def drop_namespace(self, namespace_id: bytes, reason: RemoveReason) -> Iterator[list[Removed]]:
        """See `Engine.drop_namespace`."""
        index = self._index
        slots = index.slots_of(namespace_id)
        homes, offsets = index.segment[slots], index.offset[slots]
        sequences = [segment.sequence for segment in self._table.segments]
        self.bury_namespace(namespace_id)
        return self._drop(slots, homes, offsets, sequences, reason)

    def _drop(
        self, slots: Slots, homes: U32, offsets: U32, sequences: list[int], reason: RemoveReason
    ) -> Iterator[list[Removed]]:
        index, segments = self._index, self._table.segments
        for at in range(0, len(slots), DROP_BLOCKS_AT_ONCE):
            if at:
                self._table.next_lsn()  # a checkpoint begun before this is out of date
            part = slice(at, at + DROP_BLOCKS_AT_ONCE)
            places = zip(
                slots[part].tolist(), homes[part].tolist(), offsets[part].tolist(), strict=True
            )
            # Where it was, and the segment has not begun another life: it is the record the
            # tombstone is about. A copy made since, and what came new into the slot, are younger.
            removed = [
                self._forget(slot, reason)
                for slot, home, offset in places
                if index.is_live(slot)
                and (index.m_segment[slot], index.m_offset[slot]) == (home, offset)
                and segments[home].sequence == sequences[home]
            ]
            self._table.on_removed(removed)
            yield removed

    def _forget(self, slot: int, reason: RemoveReason) -> Removed:
        index = self._index
        segment = self._table.segments[index.m_segment[slot]]
        size = extent_bytes(index.m_sealed_bytes[slot])
        space, key = index.namespace_of(slot), index.key_of(slot)
        pending = self._writer.pending.pop(slot, None)
        if pending is not None:  # its record is on the way
            pending.dead = True
        index.remove(slot)
        self._table.add_dead(segment, size)
        return Removed(space, key, slot, reason, size, segment.stream)

    def bury_namespace(self, namespace_id: bytes) -> None:
        """See `Engine.bury_namespace`."""
        self._bury(TombstoneKind.NAMESPACE, namespace_id, _NO_KEY, self._table.sequence)

    def bury_absent(self, namespace_id: bytes, keys: Sequence[bytes]) -> None:
        """See `Engine.bury_absent`."""
        if self._table.shadowing:
            for key in keys:
                self._bury(TombstoneKind.BLOCK, namespace_id, key, 0)

    def _bury(self, kind: TombstoneKind, namespace_id: bytes, wire_key: bytes, cover: int) -> None:
        self._stats.tombstones += 1
        lsn = self._table.next_lsn()
        self._writer.bury([Tombstone(kind, namespace_id, wire_key, lsn, cover)])
