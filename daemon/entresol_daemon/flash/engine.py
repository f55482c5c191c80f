"""The flash engine: append, read, remove, touch, evict, recover. The one door to the package.

It knows streams, namespaces and keys as opaque bytes; no tenants, no policy, no secrets of theirs.
Invariants: a read gives exactly the bytes appended under the key, or a status; a block whose future
said OK survives a crash; a block removed before a `barrier` that returned never comes back.

All calls belong to one event loop. Nothing here makes threads: the device and `compute` have them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from entresol_daemon.compute import Compute
from entresol_daemon.flash import checkpoint
from entresol_daemon.flash.counted import CountedDevice
from entresol_daemon.flash.device import BLOCK, Device
from entresol_daemon.flash.evict import Evictor, Keep
from entresol_daemon.flash.group import Pending
from entresol_daemon.flash.index import PENDING, SCALAR_KEYS_MAX, Index, Slots
from entresol_daemon.flash.model import (
    EngineOptions,
    EngineStats,
    RandomBytes,
    Record,
    RecoveryKind,
    RecoveryReport,
    Removed,
    RemovedHook,
    RemoveReason,
    SegmentInfo,
    SegmentState,
    default_random_bytes,
)
from entresol_daemon.flash.opening import (
    check_fit,
    new_superblock,
    read_superblock,
    write_superblock,
)
from entresol_daemon.flash.reader import Reader
from entresol_daemon.flash.recovery import Found, Recovery
from entresol_daemon.flash.removing import Remover
from entresol_daemon.flash.segment import (
    RECORD_HEADER_BYTES,
    RecordKind,
    Superblock,
    extent_bytes,
)
from entresol_daemon.flash.space import SegmentTable
from entresol_daemon.flash.superblock import GENERATIONS_LOST_MAX
from entresol_daemon.flash.writer import Writer
from entresol_proto.status import DeviceError, FormatError, Status

__all__ = [
    "RECORD_HEADER_BYTES",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "Record",
    "RecoveryKind",
    "RecoveryReport",
    "RemoveReason",
    "Removed",
    "SegmentInfo",
    "SegmentState",
    "extent_bytes",
]


class Engine:
    """See the module. Make one with `open`; the device stays the caller's to close."""

    def __init__(
        self,
        device: CountedDevice,
        options: EngineOptions,
        superblock: Superblock,
        compute: Compute,
        stats: EngineStats,
        log: logging.Logger,
    ) -> None:
        """Use `open`."""
        seed = hashlib.blake2b(superblock.check_key, person=b"entresol-seed").digest()
        self.index = Index(options.blocks_max, seed=seed)
        self.options = options
        self.stats = stats
        self.segment_count = superblock.segment_count  # numbered from 0
        self.recovery = RecoveryReport()
        self._device = device
        self.hooks = device.hooks  # of whoever wants to hear what the device is asked
        self._compute = compute
        self._superblock = superblock
        self._log = log
        self._closing = False
        self._table = table = SegmentTable(superblock, options, self.index, stats)
        self.stock = table.stock  # what can be freed, to look at
        self._writer = Writer(device, superblock, options, compute, self.index, table, stats, log)
        self._reader = Reader(device, self.index, table, self._writer, stats, options.verify_reads)
        self._remover = Remover(self.index, table, self._writer, stats)
        self._evictor = Evictor(device, self.index, table, self._writer, self._reader, stats, log)

    @classmethod
    async def open(
        cls,
        device: Device,
        options: EngineOptions,
        *,
        compute: Compute,
        now_ns: Callable[[], int],
        random_bytes: RandomBytes = default_random_bytes,
        log: logging.Logger | None = None,
    ) -> Engine:
        """Format a blank device, or recover what one holds; `recovery` then tells how it went.

        Raises: FormatError when the device holds something else, another version, or is damaged
        beyond use; DeviceError when it cannot be read or written.
        """
        began = now_ns()
        logger = log if log is not None else logging.getLogger("entresol.flash")
        stats = EngineStats()
        counted = CountedDevice(device, stats, now_ns)
        found, copies, agree = await read_superblock(counted)
        blank = found is None
        if blank and not options.may_format:
            raise FormatError(
                f"{device.name} is blank, and nothing is formatted without a key-encryption key",
                hint="give the KEK for the first start; `entresold keygen FILE` makes one",
            )
        superblock = found if found is not None else new_superblock(device, options, random_bytes)
        check_fit(device, superblock)
        # No number is given out twice: a copy that is lost may have been newer than the other.
        generation = superblock.generation + (1 if agree else GENERATIONS_LOST_MAX)
        opened = replace(
            superblock, generation=generation, clean=False, checkpoint_bytes=0,
            checkpoint_digest=bytes(32),
        )  # fmt: skip
        engine = cls(counted, options, opened, compute, stats, logger)
        engine.recovery.superblock_copies = copies
        handed = Found()
        if blank:
            engine._table.free.extend(range(superblock.segment_count))
            engine.recovery.segments = superblock.segment_count
        else:
            if superblock.segment_bytes != options.segment_bytes:
                logger.warning(
                    "event=segment_bytes_kept file=%d configured=%d",
                    superblock.segment_bytes, options.segment_bytes,
                )  # fmt: skip
            handed = await engine._recover(superblock, agree)
        # From here on the old checkpoint is stale; both copies must say so before any other write.
        await write_superblock(counted, opened)
        engine._table.keep_unread(logger)
        engine._writer.start()
        for segment in handed.to_footer:
            engine._writer.owe_footer(segment)
        for segment in handed.to_free:
            engine._writer.free(segment)
        engine.recovery.elapsed_ns = now_ns() - began
        logger.info(
            "event=engine_open kind=%s segments=%d scanned=%d damaged=%d blocks=%d elapsed_ms=%d",
            engine.recovery.kind, engine.recovery.segments, engine.recovery.segments_scanned,
            engine.recovery.segments_damaged, engine.recovery.blocks,
            engine.recovery.elapsed_ns // 1_000_000,
        )  # fmt: skip
        return engine

    async def _recover(self, superblock: Superblock, agree: bool) -> Found:
        """Checkpoint if it can be believed, footers otherwise."""
        path = self.options.checkpoint_path
        parts = (self._device, self._compute, self.index, self._table, self.recovery, self._log)
        refused = ""
        if path is not None and superblock.clean and agree:
            try:
                loaded = await self._compute.run(checkpoint.load, path, superblock)
                refused = await Recovery(*parts).from_checkpoint(loaded)
                if not refused:
                    return Found()
            except FormatError as error:
                refused = str(error)
        elif path is not None:
            refused = "the last close was not clean"
        self.recovery.checkpoint_refused = refused
        if refused:
            self._log.info("event=checkpoint_refused reason=%r", refused)
        return await Recovery(*parts).from_footers()

    def listen(self, hook: RemovedHook) -> None:
        """Call `hook` with whatever leaves the index, in the moment it does: slots are reused.

        It must not raise, nor call back into the engine.
        """
        self._table.on_removed = hook

    # -- room

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all segments."""
        return self._superblock.segment_count * self._superblock.segment_bytes

    @property
    def failed(self) -> bool:
        """True after too many failed groups, until the device writes again: nothing is written."""
        return self._writer.failed

    async def until_broken(self) -> BaseException:
        """Return what broke the writer, if ever: nothing is written any more, what was under way
        may be on flash or not, and whoever runs the engine opens it again, as after a crash."""
        return await asyncio.shield(self._writer.broken)

    @property
    def closing(self) -> bool:
        """True from the beginning of `close` on: nothing is appended or freed any more."""
        return self._closing

    @property
    def hides_blocks(self) -> bool:
        """True while flash may hold blocks that the opening did not find, or left out."""
        return bool(self._table.hiding)

    @property
    def is_haunted(self) -> bool:
        """True while a crash may bring blocks back that left the index: until the segments they lie
        in are free, or what was removed is written down."""
        return bool(self._table.shadowing or self._writer.burying)

    @property
    def spare_segments(self) -> int:
        """Free segments that the next tenants to write may open; the engine's own not counted."""
        return len(self._table.free) - self.options.free_segments_min

    @property
    def write_bytes_per_s(self) -> float:
        """How fast groups of records are written, as measured lately."""
        return self._writer.length.bytes_per_s

    @property
    def writes_wait(self) -> bool:
        """True while another whole group is queued behind the one being written."""
        return self._writer.queued_bytes >= self.options.group_commit_bytes

    @property
    def writes_queued(self) -> int:
        """Records that wait for their group, or are in the one being written."""
        return self._writer.queued

    @property
    def removals_queued(self) -> int:
        """Removals that no group has taken yet."""
        return len(self._writer.tombstones)

    @property
    def segment_bytes(self) -> int:
        """Segment size of this data file."""
        return self._superblock.segment_bytes

    @property
    def sealed_bytes_max(self) -> int:
        """Longest sealed block that fits a segment."""
        return self._table.extent_bytes_max - RECORD_HEADER_BYTES

    @property
    def free_segments(self) -> int:
        """Segments ready to be written, the engine's own reserve included."""
        return len(self._table.free)

    def room_for(self, stream: bytes, extent_bytes: int) -> bool:
        """True when an append of this size to this stream would be placed without an eviction."""
        return (
            not (self._writer.failed or self._closing)
            and self.index.free > 0
            and self._table.has_room(stream, extent_bytes, self.options.free_segments_min)
        )

    # -- blocks

    def append(self, stream: bytes, record: Record) -> tuple[int, asyncio.Future[Status]]:
        """Place a block. It is found and read at once; the future tells when it is durable.

        Returns the slot and a future: OK when flushed, IO_ERROR when the device would not take it
        (the block is then out of the index). With slot -1 nothing was placed and the future is
        done: NO_SPACE, TOO_LARGE, IO_ERROR (failed engine) or DRAINING. A key that is in the index
        already is the caller's bug and asserts. For `record.extent` see `Record`.
        """
        extent = record.extent
        size = extent.nbytes
        assert len(stream) == 16, "a stream is 16 bytes"
        assert size == extent_bytes(record.sealed_bytes), "extent is not the record's length"
        future: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        refused = self._refusal(size)
        segment = None
        if refused is None:
            segment = self._table.open_for(stream, size, self.options.free_segments_min)
        if segment is None:
            self.stats.append_failures += 1
            future.set_result(refused if refused is not None else Status.NO_SPACE)
            return -1, future
        lsn = self._table.next_lsn()
        sizes = (size, record.sealed_bytes, record.plain_bytes, record.position)
        slot = self.index.insert(
            record.namespace_id, record.wire_key, segment=segment.index,
            offset=segment.used_bytes // BLOCK, sealed_bytes=record.sealed_bytes,
            plain_bytes=record.plain_bytes, position=record.position, flags=PENDING,
        )  # fmt: skip
        try:
            offset = self._table.place(
                segment, RecordKind.BLOCK, record.namespace_id, record.wire_key, sizes, lsn
            )
        except MemoryError:
            self.index.remove(slot)
            raise
        self._table.add_live(segment, slot, size)
        self.stats.appends += 1
        self.stats.appended_bytes += size
        pending = Pending(
            RecordKind.BLOCK, stream, record.namespace_id, record.wire_key, extent,
            record.sealed_bytes, record.plain_bytes, record.position, slot, segment, offset, lsn,
            future, payload_hash=record.payload_hash,
        )  # fmt: skip
        self._writer.submit(pending)
        return slot, future

    def _refusal(self, extent_bytes: int) -> Status | None:
        if self._closing:
            return Status.DRAINING
        if self._writer.failed:
            return Status.IO_ERROR
        if extent_bytes > self._table.extent_bytes_max:
            return Status.TOO_LARGE
        return Status.NO_SPACE if self.index.free == 0 else None

    async def read(self, ops: Sequence[tuple[int, memoryview]]) -> list[Status]:
        """Read whole records: `(slot, extent)` with `extent_bytes(sealed_bytes)` aligned bytes.

        OK: the sealed bytes follow the header's (wiped) RECORD_HEADER_BYTES, exactly as appended.
        MISS: the slot holds no block, or another one by now. CORRUPT: what is on flash is not the
        record, asked twice; the caller removes it. IO_ERROR: the device refuses. With anything but
        OK the extent's content is undefined. The extents belong to the caller, who leaves them
        alone until this returns.
        """
        return await self._reader.read(ops)

    async def read_heads(self, slots: Sequence[int]) -> list[bytes]:
        """Of each record the beginning: its header, which is verified, then sealed bytes, which are
        not, to the end of their header at least. Empty where it cannot be had."""
        return await self._reader.heads(slots)

    def remove(self, slot: int, reason: RemoveReason) -> Removed:
        """Forget a live block at once; a tombstone follows in the next group commit."""
        return self._remover.remove(slot, reason)

    def drop_namespace(
        self, namespace_id: bytes, reason: RemoveReason = RemoveReason.NAMESPACE_DROPPED
    ) -> Iterator[list[Removed]]:
        """Forget all blocks that a namespace has now, under one tombstone.

        The tombstone is queued at once, the blocks leave with every step, some at a time. Between
        steps others may run: what is put meanwhile stays. So do blocks that an eviction or a failed
        group moves meanwhile; the caller looks for those afterwards. Run it to its end.
        """
        return self._remover.drop_namespace(namespace_id, reason)

    def bury_namespace(self, namespace_id: bytes) -> None:
        """A crash after `barrier` brings nothing back that a namespace without blocks has had: a
        copy that failed while it was dropped may be on flash, and younger than that tombstone."""
        assert not self.index.has_namespace(namespace_id), "it has blocks"
        self._remover.bury_namespace(namespace_id)

    def bury_absent(self, namespace_id: bytes, keys: Sequence[bytes]) -> None:
        """A crash after `barrier` brings none of these back, which left the index before, or were
        not found at opening: what was dropped lies on flash until its segment is free."""
        self._remover.bury_absent(namespace_id, keys)

    async def barrier(self) -> None:
        """Return when every removal so far is durable.

        Raises: DeviceError; with status NO_SPACE an eviction makes room for the tombstones.
        """
        await self._writer.barrier()

    def hurry(self) -> None:
        """Somebody waits for what is appended, and adds no more: write it soon."""
        self._writer.hurry()

    def touch(self, slots: Sequence[int] | Slots) -> None:
        """Mark live blocks as used, in the order given: later means more recent."""
        if not len(slots):
            return
        if len(slots) <= SCALAR_KEYS_MAX:
            for slot in slots:
                number = self.index.m_segment[slot]
                self._table.segments[number].last_touch = self.index.touch_one(slot)
            return
        chosen = np.asarray(slots, np.int64)
        ticks = self.index.touch(chosen)
        segments = self._table.segments
        for number, tick in zip(self.index.segment[chosen].tolist(), ticks.tolist(), strict=True):
            segments[number].last_touch = tick

    # -- segments

    def segments(self) -> list[SegmentInfo]:
        """Every segment, free ones included, by number."""
        return self._table.infos()

    def segment_states(self) -> list[SegmentState]:
        """Of every segment, by number; cheap where `segments` is not."""
        return self._table.states()

    def segment_live_bytes(self) -> list[int]:
        """Of every segment, by number."""
        return self._table.live_bytes()

    def segment_info(self, segment: int) -> SegmentInfo:
        """One of them."""
        return self._table.info(self._table.segments[segment])

    def stream_of(self, segment: int) -> bytes:
        """Whose segment it is; cheap where `segment_info` is not."""
        return self._table.segments[segment].stream

    def segment_slots(self, segment: int) -> Slots:
        """Slots of the blocks that live in a segment, in the order of their places."""
        return self._evictor.live_slots(self._table.segments[segment])

    async def evict(self, segment: int, keep: Keep = ()) -> list[Removed]:
        """Free a segment; `keep` (slots, or a function of the live slots) is appended again.

        Returns what is gone from the index: reason EVICTED for what was not kept; CORRUPT,
        IO_ERROR or NO_SPACE for kept blocks that could not be read or found no room. When this
        returns the segment is FREE, unless the device does not take the copies (they stay where
        they are) or its tombstones cannot be carried on right now: then it is still used, and a
        later call tries again (at most EVICT_TRIES_MAX times, then it is freed regardless); where
        the device refuses reads, some time later. Never raises for device faults.
        """
        return await self._evictor.evict(segment, keep)

    async def scrub(self, slots: Sequence[int] | Slots) -> list[tuple[int, Status]]:
        """Read and verify the durable ones of these blocks, payloads included whatever
        `verify_reads` says; returns those that are CORRUPT (read twice) or IO_ERROR.

        At most COPY_BYTES_MAX bytes of memory and of I/O at a time. The caller sets the pace and
        removes what is found.
        """
        return await self._reader.scrub(slots)

    # -- end

    async def close(self, *, clean: bool = True) -> None:
        """Stop. `clean` first makes everything durable and writes the checkpoint.

        Pending futures end as OK (clean) or IO_ERROR. Idempotent. Raises: RuntimeError at its end
        if it was to be clean and the writer broke.
        """
        if self._closing:
            return
        self._closing = True
        self._table.give_up_unread()
        try:
            if clean and not self._writer.failed:
                await self._evictor.finish()
                for segment in list(self._table.open.values()):
                    self._table.close(segment)
                await self._writer.drain()
                if self._writer.idle and not self._writer.failed:
                    await self._write_checkpoint()
        finally:
            await self._writer.stop()
        if clean and self._writer.broken.done():
            raise RuntimeError("the writer broke") from self._writer.broken.result()

    async def _write_checkpoint(self) -> None:
        path = self.options.checkpoint_path
        if path is None or self._table.hiding:  # what this opening did not find, the next may
            return
        last = self._table.lsn
        try:
            raw = await self._compute.run(
                checkpoint.encode, self._superblock, self.index, self._table
            )
            digest = await self._compute.run(checkpoint.save, path, self._superblock, raw)
            clean = replace(
                self._superblock, clean=True, checkpoint_bytes=len(raw), checkpoint_digest=digest
            )
            if self._table.lsn != last:  # somebody went on removing: the footers know better
                self._log.warning("event=checkpoint_outdated effect=not_used")
                return
            await write_superblock(self._device, clean)
        except ImportError as error:
            self._log.warning("event=no_checkpoint reason=%r", str(error))
        except (OSError, DeviceError) as error:
            self._log.warning("event=checkpoint_failed error=%s", error)
