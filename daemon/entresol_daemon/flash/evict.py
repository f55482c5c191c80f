"""Freeing one segment: drop most of its blocks, copy the kept ones, carry its tombstones on.

Invariants: a segment is freed only after its kept blocks and still-needed tombstones are durable
elsewhere and nobody reads from it, also when an earlier eviction of it was cancelled; a kept block
whose copy cannot be written stays where it is; a tombstone is dropped only when no copy it covers
can be left on flash; a block goes with a tombstone, durable before its segment is free, where an
older one of its name may be on flash (`SegmentTable.doubtful`); eviction always ends, whatever the
device does. A segment that the device does not give is not chosen for a while, longer each time: an
outage of seconds costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from entresol_daemon.flash.checking import Expected
from entresol_daemon.flash.device import BLOCK, Device, IoOp, aligned_buffer
from entresol_daemon.flash.group import Pending
from entresol_daemon.flash.index import PENDING, Index, Slots
from entresol_daemon.flash.model import (
    COPY_BYTES_MAX,
    EVICT_REST_NS,
    EVICT_TRIES_MAX,
    EngineStats,
    Removed,
    RemoveReason,
    SegmentState,
)
from entresol_daemon.flash.reader import Reader
from entresol_daemon.flash.segment import (
    RECORD_HEADER_BYTES,
    RecordKind,
    decode_record_header,
    extent_bytes,
    lsn_of,
    payload_hash,
)
from entresol_daemon.flash.space import Segment, SegmentTable
from entresol_daemon.flash.tombstones import (
    NO_TOMBSTONES,
    Tombstone,
    TombstoneKind,
    Tombstones,
    decode_tombstones,
    joined,
    listed,
)
from entresol_daemon.flash.writer import Writer
from entresol_proto.status import DeviceError, Status

Keep = Callable[[Slots], "Slots | Sequence[int]"] | Sequence[int] | Slots
TOMBSTONE_READ_TRIES_MAX = 3
DROPPED_AT_ONCE_MAX = 32  # blocks let go of without a break, some 9 us each
CARRIED_AT_ONCE_MAX = 64  # tombstones written again without a break
CARRIED_MAX = 16_384  # that wait to be durable: objects of a quarter of a kilobyte
_FINISH_POLL_S = 0.0005


class Evictor:
    """See the module; one eviction per segment at a time."""

    def __init__(
        self,
        device: Device,
        index: Index,
        table: SegmentTable,
        writer: Writer,
        reader: Reader,
        stats: EngineStats,
        log: logging.Logger,
    ) -> None:
        self._device = device
        self._index = index
        self._table = table
        self._writer = writer
        self._reader = reader
        self._stats = stats
        self._log = log
        self._running: set[int] = set()
        self._finishing = False

    async def evict(self, number: int, keep: Keep) -> list[Removed]:
        """See `Engine.evict`."""
        segment = self._table.segments[number]
        if segment.state in (SegmentState.FREE, SegmentState.FREEING) or number in self._running:
            return []
        if self._writer.failed or self._finishing or number in self._table.stock.resting:
            await asyncio.sleep(0)  # a caller that asks again and again must not stop the loop
            return []  # nothing can be freed; what is there stays readable
        self._running.add(number)
        try:
            if segment.state is SegmentState.OPEN:
                self._table.close(segment)
            segment.footer_due = False  # it would only be written to be freed
            while segment.unflushed or segment.leaving:  # not for readers: they may never cease
                self._writer.kick()
                await segment.change()
            # To choose it took a millisecond or two of the loop, and so does what follows.
            await asyncio.sleep(0)
            return await self._empty(segment, keep)
        finally:
            self._running.discard(number)

    async def finish(self) -> None:
        """Begin no more evictions and wait for the ones in progress."""
        self._finishing = True
        for number in sorted(self._running):
            while number in self._running:
                self._writer.kick()
                await asyncio.sleep(_FINISH_POLL_S)

    async def _empty(self, segment: Segment, keep: Keep) -> list[Removed]:
        # First of all: nothing is dropped for a segment that cannot be freed.
        tombstones, refused, lost = await self._tombstones(segment)
        if refused and segment.refusals < EVICT_TRIES_MAX - 1:
            self._rest(segment)
            return []
        if self._writer.failed:
            return []  # meanwhile: as above, and what it has is served
        # From here on it holds copies of blocks that the index does not know in this place.
        self._table.cast_shadows(segment)
        removed: list[Removed] = []
        freed = False
        try:
            freed = await self._drop_and_free(segment, keep, removed, (tombstones, refused + lost))
        finally:
            if not freed:
                self._table.doubt(each.namespace_id + each.wire_key for each in removed)
        return removed

    async def _drop_and_free(
        self,
        segment: Segment,
        keep: Keep,
        removed: list[Removed],
        found: tuple[Tombstones, int],
    ) -> bool:
        """Whether it came to its end; what goes is in `removed`, whatever becomes of this. `found`:
        its tombstones, and how many records of them are lost."""
        tombstones, lost = found
        last_try = segment.evict_tries >= EVICT_TRIES_MAX - 1
        live = self.live_slots(segment)
        chosen = keep(live) if callable(keep) else keep
        kept = np.asarray(chosen, np.int64)
        kept = kept[np.isin(kept, live)]
        dropped = live[~np.isin(live, kept)]
        await self._drop_in_portions(dropped, segment, removed)
        self._stats.evicted_blocks += len(removed)
        await self._copy(segment, kept.tolist(), removed)
        if self._writer.failed or (segment.live_blocks and not last_try):
            segment.evict_tries += 1
            return False  # what could not be copied stays where it is, readable
        removed += self._give_up(self.live_slots(segment), segment)
        if not await self._carry(segment, tombstones, last_try=last_try):
            segment.evict_tries += 1
            return False
        if lost:
            self._stats.tombstones_lost += lost
            self._log.error("event=tombstones_lost segment=%d records=%d", segment.index, lost)
        await segment.quiet()
        if segment.hides and segment.state is SegmentState.CONDEMNED:
            self._stats.unread_freed += 1
            self._log.error("event=unread_segment_freed segment=%d", segment.index)
        freed = await self._writer.free(segment)
        self._stats.evicted_segments += freed
        return freed

    def _rest(self, segment: Segment) -> None:
        """The device does not give it: others are freed first, for a while."""
        wait_s = EVICT_REST_NS * 2**segment.refusals / 1e9
        segment.refusals += 1
        self._table.stock.rest(segment)
        self._log.warning(
            "event=eviction_waits segment=%d tries=%d wait_ms=%d",
            segment.index, segment.refusals, int(wait_s * 1000),
        )  # fmt: skip
        asyncio.get_running_loop().call_later(wait_s, self._wake, segment, segment.sequence)

    def _wake(self, segment: Segment, sequence: int) -> None:
        if segment.sequence == sequence:  # else it has another life by now
            self._table.stock.wake(segment)

    def live_slots(self, segment: Segment) -> Slots:
        """Slots of the blocks that live in the segment, in the order of their places."""
        appended = np.frombuffer(segment.slots, np.uint32).astype(np.int64)
        slots = self._still_in(segment, appended)
        places = self._index.offset[slots]
        if (places[1:] > places[:-1]).all():  # as they were appended, and each once
            return slots
        slots = np.unique(slots)  # one was removed, and its slot came back
        ordered: Slots = slots[np.argsort(self._index.offset[slots], kind="stable")]
        return ordered

    def _still_in(self, segment: Segment, slots: Slots) -> Slots:
        """Those whose block lives in the segment: nothing new comes to one that is being emptied,
        so that a slot with another block is one of another segment."""
        index = self._index
        here: Slots = slots[(index.segment[slots] == segment.index) & (index.flags[slots] != 0)]
        return here

    async def _drop_in_portions(
        self, slots: Slots, segment: Segment, removed: list[Removed]
    ) -> None:
        """Evict blocks; others use the loop in between. Until its turn a block is served, and may
        be removed by somebody else."""
        for at in range(0, len(slots), DROPPED_AT_ONCE_MAX):
            await asyncio.sleep(0)
            portion = self._still_in(segment, slots[at : at + DROPPED_AT_ONCE_MAX])
            removed += self._drop(portion, RemoveReason.EVICTED)

    def _drop(self, slots: Slots, reason: RemoveReason) -> list[Removed]:
        """Take durable blocks out of the index, without tombstones: their segment goes. But one of
        which an older copy may be on flash is buried, as that would be back; not where this one is
        damaged, for which the other may be the same."""
        index, doubtful, removed = self._index, self._table.doubtful, list[Removed]()
        for slot in slots.tolist():
            size = extent_bytes(index.m_sealed_bytes[slot])
            key = index.key_of(slot)
            home = self._table.segments[index.m_segment[slot]]
            space = index.namespace_of(slot)
            removed.append(Removed(space, key, slot, reason, size, home.stream))
            self._table.add_dead(home, size)
        index.remove_many(slots)
        self._table.on_removed(removed)
        if doubtful and removed and reason in (RemoveReason.EVICTED, RemoveReason.NO_SPACE):
            haunted = [each for each in removed if each.namespace_id + each.wire_key in doubtful]
            self._bury(haunted, home)
            doubtful.difference_update(each.namespace_id + each.wire_key for each in haunted)
        return removed

    def _bury(self, removed: list[Removed], segment: Segment) -> None:
        """No copy of these comes back, once that is durable; before, their segment is not free."""
        kind, cover, number = TombstoneKind.BLOCK, segment.sequence, self._table.next_lsn
        self._writer.bury(
            [Tombstone(kind, r.namespace_id, r.wire_key, number(), cover) for r in removed]
        )
        segment.owes |= bool(removed)

    def _give_up(self, slots: Slots, segment: Segment) -> list[Removed]:
        """Drop kept blocks that cannot be written elsewhere. A failed copy may be on flash all the
        same: buried, it cannot come back."""
        removed = self._drop(slots, RemoveReason.IO_ERROR)
        self._bury(removed, segment)
        return removed

    # -- kept blocks

    async def _copy(self, segment: Segment, slots: list[int], removed: list[Removed]) -> None:
        """Append kept blocks again, batch by batch; those that do not make it are removed."""
        left = deque(slots)
        while left:
            batch: list[int] = []
            size = 0
            while left:
                more = extent_bytes(self._index.m_sealed_bytes[left[0]])
                if batch and size + more > COPY_BYTES_MAX:
                    break
                batch.append(left.popleft())
                size += more
            await self._copy_batch(segment, batch, size, removed)

    async def _copy_batch(
        self, segment: Segment, slots: list[int], size: int, removed: list[Removed]
    ) -> None:
        scratch = aligned_buffer(size)
        items: list[tuple[int, Expected, memoryview]] = []
        at = 0
        for slot in slots:
            if not self._is_here(slot, segment):
                continue  # removed while an earlier batch was copied
            expected = self._reader.expect(slot)
            end = at + extent_bytes(expected.sealed_bytes)
            items.append((slot, expected, scratch[at:end]))
            at = end
        ops = [(slot, view) for slot, _, view in items]
        # Hashed whatever `verify_reads` says: the copy gets a hash of what is here, for good.
        statuses = await self._reader.read(ops, payloads=True, headers=True)
        moving: list[tuple[int, asyncio.Future[Status]]] = []
        for (slot, expected, view), status in zip(items, statuses, strict=True):
            if not self._is_here(slot, segment) or self._index.key_of(slot) != expected.wire_key:
                continue
            if status is not Status.OK:
                reason = RemoveReason.CORRUPT if status is Status.CORRUPT else RemoveReason.IO_ERROR
                removed += self._drop(np.array([slot]), reason)
                continue
            if self._writer.failed:
                continue  # it stays where it is, readable
            future = self._move(segment, slot, expected, view)
            if future is None:
                removed += self._drop(np.array([slot]), RemoveReason.NO_SPACE)
            else:
                moving.append((view.nbytes, future))
        self._writer.kick()
        for length_bytes, future in moving:
            if await future is Status.OK:  # else it is back where it was
                self._stats.copied_blocks += 1
                self._stats.copied_bytes += length_bytes

    def _is_here(self, slot: int, segment: Segment) -> bool:
        index = self._index
        return (
            index.is_live(slot)
            and index.m_segment[slot] == segment.index
            and not index.m_flags[slot] & PENDING
        )

    def _move(
        self, segment: Segment, slot: int, expected: Expected, view: memoryview
    ) -> asyncio.Future[Status] | None:
        """Place a copy; the slot stays, its location changes. None when nothing has room."""
        size = view.nbytes
        target = self._table.open_for_copy(segment.stream, size)
        if target is None:
            return None
        lsn = self._table.lsn_of_copy(target, lsn_of(view))
        e = expected
        sizes = (size, e.sealed_bytes, e.plain_bytes, e.position)
        offset = self._table.place(target, RecordKind.BLOCK, e.namespace_id, e.wire_key, sizes, lsn)
        self._table.add_dead(segment, size)
        self._index.m_segment[slot] = target.index
        self._index.m_offset[slot] = offset
        self._index.m_flags[slot] |= PENDING
        self._table.add_live(target, slot, size)
        future: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        pending = Pending(
            RecordKind.BLOCK, segment.stream, e.namespace_id, e.wire_key, view, e.sealed_bytes,
            e.plain_bytes, e.position, slot, target, offset, lsn, future,
            home=(segment, e.offset),
        )  # fmt: skip
        segment.leaving += 1
        self._writer.submit(pending)
        return future

    # -- tombstones

    async def _carry(self, segment: Segment, tombstones: Tombstones, *, last_try: bool) -> bool:
        """Make those of its tombstones that are still needed durable elsewhere, some at a time:
        there may be a million, and each takes some 10 us.

        False when that is not possible now; at the last of EVICT_TRIES_MAX it is given up.
        """
        needed = self._needed(tombstones, segment)
        if not (len(needed) or segment.owes):
            return True
        for at in range(0, max(1, len(needed)), CARRIED_MAX):
            part = needed[at : at + CARRIED_MAX]
            for first in range(0, len(part), CARRIED_AT_ONCE_MAX):
                await asyncio.sleep(0)
                self._writer.bury(listed(part[first : first + CARRIED_AT_ONCE_MAX]))
            try:
                await self._writer.barrier()
            except DeviceError as error:
                self._log.warning(
                    "event=tombstones_stuck segment=%d error=%s", segment.index, error
                )
                if not last_try or self._writer.failed:
                    return False
                self._stats.tombstones_lost += len(part)
            self._stats.tombstones_carried += len(part)
        return True

    async def _tombstones(self, segment: Segment) -> tuple[Tombstones, int, int]:
        """All entries of the segment, how many records the device refused to give, and how many
        are destroyed: what arrives and does not verify no later opening would find either."""
        found: list[Tombstones] = []
        refused = lost = 0
        for offset in segment.tombstone_offsets:
            for _ in range(TOMBSTONE_READ_TRIES_MAX):
                entries, status = await self._tombstone_record(segment, offset)
                if entries is not None:
                    found.append(entries)
                    break
            else:
                refused += status is not Status.OK
                lost += status is Status.OK
        return joined(found), refused, lost

    async def _tombstone_record(
        self, segment: Segment, offset: int
    ) -> tuple[Tombstones | None, Status]:
        """One record's entries, None where it does not verify, and what the device said."""
        superblock = self._table.superblock
        base = superblock.segment_at(segment.index)
        head = aligned_buffer(BLOCK)
        status = (await self._device.read([IoOp(base + offset * BLOCK, head)]))[0]
        header = decode_record_header(head, superblock.check_key)
        buffer = head
        size = BLOCK if header is None else header.extent_bytes
        if header is not None and BLOCK < size <= superblock.segment_bytes - offset * BLOCK:
            buffer = aligned_buffer(size)
            status = (await self._device.read([IoOp(base + offset * BLOCK, buffer)]))[0]
        if (
            status is Status.OK
            and header is not None
            and header.kind is RecordKind.TOMBSTONES
            and (header.sequence, header.offset) == (segment.sequence, offset)
            and size == buffer.nbytes
            and payload_hash(buffer, header.sealed_bytes) == header.payload_hash
        ):
            end = RECORD_HEADER_BYTES + header.sealed_bytes
            return decode_tombstones(buffer[RECORD_HEADER_BYTES:end]), status
        return None, status

    def _needed(self, tombstones: Tombstones, segment: Segment) -> Tombstones:
        """Those that may still cover something on flash outside `segment`."""
        table = self._table
        if not len(tombstones) or len(table.shadowing) > (segment.index in table.shadowing):
            return tombstones
        others = np.fromiter(table.lives, np.uint64, len(table.lives))
        others = others[others != segment.sequence]
        if not len(others):
            return NO_TOMBSTONES
        cover = tombstones["cover"]
        needed = np.isin(cover, others)
        needed |= (tombstones["kind"] == TombstoneKind.NAMESPACE) & (cover >= others[0])
        chosen: Tombstones = tombstones[needed]
        return chosen
