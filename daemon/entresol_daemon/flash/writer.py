"""Group commit: the one task that writes. Records, tombstones, headers and footers leave in groups.

A group is one batch of writes and one flush. Invariants: a future says OK only after the flush that
covers its record; a footer is written only when all records it lists are durable; a segment is
reused only after its FREE header is durable; after a failed write or flush the segments whose
records were in the group are condemned, and those records go elsewhere from memory, never by
flushing again and believing it. After GROUP_FAILURES_MAX failed groups in a row writing pauses
until the device takes a write and a flush again; what was removed meanwhile is written down then.
What no failed write explains (a bug, no memory for its own books) ends the task, and `broken` says
so: whoever runs it begins again from flash.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from math import inf

from entresol_daemon.compute import Compute
from entresol_daemon.flash.barriers import Barriers
from entresol_daemon.flash.counted import CountedDevice
from entresol_daemon.flash.device import aligned_buffer
from entresol_daemon.flash.group import (
    NO_KEY,
    Group,
    GroupLength,
    Pending,
    PendingQueue,
    takes_writes,
    writes_of,
)
from entresol_daemon.flash.index import PENDING, Index
from entresol_daemon.flash.model import (
    APPEND_TRIES_MAX,
    GROUP_FAILURES_MAX,
    HURRY_S,
    TOMBSTONE_RECORDS_PER_GROUP_MAX,
    EngineOptions,
    EngineStats,
    Removed,
    RemoveReason,
    SegmentState,
)
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES, RecordKind, Superblock, extent_bytes
from entresol_daemon.flash.space import COPY_RESERVE, NO_STREAM, Segment, SegmentTable
from entresol_daemon.flash.tombstones import (
    TOMBSTONES_PER_RECORD_MAX,
    Tombstone,
    TombstoneKind,
    encode_tombstones,
)
from entresol_proto.status import DeviceError, Status

FAILURE_BACKOFF_NS = 100_000_000  # after the first failed group; doubles with each further one
PROBE_NS_MIN = 500_000_000  # between tries of a device that failed; doubles up to the next
PROBE_NS_MAX = 5_000_000_000
STOPPED = "the flash engine has stopped writing"
_WIPE = bytes(RECORD_HEADER_BYTES)


class Writer:
    """See the module. All methods but `start` and `stop` are synchronous and cheap."""

    def __init__(
        self,
        device: CountedDevice,
        superblock: Superblock,
        options: EngineOptions,
        compute: Compute,
        index: Index,
        table: SegmentTable,
        stats: EngineStats,
        log: logging.Logger,
    ) -> None:
        self.failed = False  # paused: nothing is taken until the device writes again
        self.pending: dict[int, Pending] = {}  # by slot
        self._device = device
        self._superblock = superblock
        self._options = options
        self._compute = compute
        self._index = index
        self._table = table
        self._stats = stats
        self._log = log
        self._queue = PendingQueue()
        self._inflight: list[Pending] = []  # in the group being written
        self.queued_bytes = 0
        self.length = GroupLength()
        self._since = 0.0  # loop time of the oldest waiting thing
        self.tombstones: deque[Tombstone] = deque()  # that no group has taken yet
        self.burying: set[int] = set()  # lsns of the queued and the in-flight ones
        self._barriers = Barriers()
        self._footers: list[Segment] = []
        self._frees: dict[int, tuple[Segment, asyncio.Future[bool]]] = {}
        self._stalled = False  # tombstones wait and no segment has room for them
        self._urgent = False
        self._hurry_by = inf  # loop time at which what is queued leaves, full group or not
        self._failures = 0
        self._busy = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ending = False  # `stop` was called
        self.broken: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @property
    def queued(self) -> int:
        """Records that wait or are being written."""
        return len(self._queue) + len(self._inflight)

    # -- what the engine calls

    def start(self) -> None:
        """Begin writing."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="flash-writer")

    async def stop(self) -> None:
        """End the task; what is pending then ends as IO_ERROR."""
        if self._task is None:
            return
        self._ending = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if not self.broken.done():
            self._pause()

    def submit(self, pending: Pending) -> None:
        """Queue a placed record for the next group."""
        assert not self.failed, "the writer has paused"
        if not self._queue:
            self._since, self._hurry_by = self._now(), inf
        self._queue.append(pending)
        self.queued_bytes += pending.extent.nbytes
        self.length.came(pending.stream, self._now())
        if pending.slot >= 0:
            self.pending[pending.slot] = pending
        self._wake.set()

    def bury(self, tombstones: list[Tombstone]) -> None:
        """Queue tombstones for the next group; those that wait already are left out.

        Also while writing has paused: there are never more than blocks that were in the index.
        """
        tombstones = [t for t in tombstones if t.lsn not in self.burying]
        if not tombstones:
            return
        self.burying.update(t.lsn for t in tombstones)
        if not self._queue and not self.tombstones:
            self._since = self._now()
        self.tombstones.extend(tombstones)
        self._barriers.queued(len(tombstones))
        self._wake.set()

    def free(self, segment: Segment) -> asyncio.Future[bool]:
        """Write the FREE header of a dead segment; True when durable, False when writing failed.

        It is written all the same, once the device writes again.
        """
        self._table.begin_free(segment)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._frees[segment.index] = (segment, future)
        if self.failed:
            future.set_result(False)
        else:
            self.kick()
        return future

    def owe_footer(self, segment: Segment) -> None:
        """Write the footer of a segment whose records are all durable."""
        self._footers.append(segment)
        self.kick()

    def kick(self) -> None:
        """Do not wait for a fuller group."""
        self._urgent = True
        self._wake.set()

    def hurry(self) -> None:
        """Somebody waits for what is queued: others have HURRY_S to join."""
        self._hurry_by = min(self._hurry_by, self._now() + HURRY_S)
        self._wake.set()

    def barrier(self) -> asyncio.Future[None]:
        """Done when all tombstones queued so far are durable.

        Fails with DeviceError when they cannot be written: the device fails (IO_ERROR), or no
        segment has room (NO_SPACE; they stay queued until an eviction makes room).
        """
        future = self._barriers.wait()
        if self.failed:
            self._barriers.fail(STOPPED)
        elif not future.done():
            self._stalled = False
            self.kick()
        return future

    @property
    def idle(self) -> bool:
        """True when nothing is queued or being written."""
        return not (
            self._busy or self._queue or self.tombstones or self._footers or self._frees
            or self._table.closed
        )  # fmt: skip

    async def drain(self) -> None:
        """Wait until everything queued is durable, or the writer has failed or stalled."""
        wait_s = 0.0005
        while not (self.failed or self.idle or (self._stalled and not self._queue)):
            self.kick()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.05)

    # -- the task

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _run(self) -> None:
        group = Group()
        try:
            while True:
                if self.failed:
                    await self._until_it_writes()
                await self._wait_for_work()
                self._busy = True
                group = Group()
                try:
                    await self._commit(group)
                finally:
                    self._busy = False
        except BaseException as error:
            if self._ending and isinstance(error, asyncio.CancelledError):
                raise
            self._log.exception("event=writer_broke effect=writes_stop")
            self._break(group, error)
            if not isinstance(error, Exception):
                raise

    def _break(self, group: Group, error: BaseException) -> None:
        """Whoever waits hears of it, and no book is touched: any may be wrong."""
        self.failed = True
        self.broken.set_result(error)
        for p in (*group.records, *self.pending.values(), *self._queue):
            if p.future is not None and not p.future.done():
                p.future.set_result(Status.IO_ERROR)
        self._tell_stopped()

    async def _until_it_writes(self) -> None:
        """Try the device from time to time; return when it takes a write and a flush again."""
        wait_ns = PROBE_NS_MIN
        while True:
            await asyncio.sleep(wait_ns / 1e9)
            wait_ns = min(2 * wait_ns, PROBE_NS_MAX)
            if not await takes_writes(self._device, self._table):
                continue
            self._log.warning("event=engine_writes_again tombstones=%d", len(self.tombstones))
            self.failed = False
            self._failures = GROUP_FAILURES_MAX - 1  # the next one that fails is enough
            self._urgent = True
            return

    async def _wait_for_work(self) -> None:
        loop = asyncio.get_running_loop()
        wait = self._options.group_commit_ns / 1e9
        while True:
            if self._urgent or self.queued_bytes >= self._options.group_commit_bytes:
                return
            timer = None
            if self._queue or (self.tombstones and not self._stalled):
                until = min(self._since + wait, self._hurry_by)
                if loop.time() >= until:
                    return
                timer = loop.call_at(until, self._wake.set)
            self._wake.clear()
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def _take(self, group: Group) -> None:
        """Decide what goes out together."""
        self._urgent = False
        group.records = self._inflight = self._queue.take(self.length.shared_bytes_max(self._now()))
        if not self._queue:
            self._hurry_by = inf
        self.queued_bytes -= sum(p.extent.nbytes for p in group.records)
        self._since = self._now()
        self._take_tombstones(group)
        group.note_headers()
        for segment in [s for s in self._table.closed if not s.unflushed]:
            self._table.closed.remove(segment)
            self._footers.append(segment)
        group.footers = [s for s in self._footers if s.footer_due]
        self._footers.clear()
        group.frees = [segment for segment, _ in self._frees.values()]

    def _take_tombstones(self, group: Group) -> None:
        for _ in range(TOMBSTONE_RECORDS_PER_GROUP_MAX):
            if not self.tombstones:
                break
            fit = min(TOMBSTONES_PER_RECORD_MAX, self._table.tombstones_fit())
            count = min(len(self.tombstones), fit)
            payload = encode_tombstones(self.tombstones[i] for i in range(count))
            extent = extent_bytes(len(payload))
            segment = self._table.open_anywhere(NO_STREAM, extent)
            if segment is None:
                self._stall()
                break
            try:
                buffer = aligned_buffer(extent)
            except DeviceError as error:  # they wait for the next group
                self._log.warning("event=tombstones_wait error=%s", error)
                break
            buffer[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + len(payload)] = payload
            taken = [self.tombstones[i] for i in range(count)]
            lsn, kind = self._table.next_lsn(), RecordKind.TOMBSTONES
            sizes = (extent, len(payload), 0, 0)
            offset = self._table.place(segment, kind, NO_KEY, NO_KEY, sizes, lsn)
            group.bury(segment, buffer, len(payload), offset, lsn, taken)
            for _ in taken:
                self.tombstones.popleft()

    def _stall(self) -> None:
        self._stalled = True
        self._barriers.fail("no segment has room for tombstones", Status.NO_SPACE)

    async def _commit(self, group: Group) -> None:
        """Fill a group and write it."""
        try:
            self._take(group)
            if group.is_empty:
                return
            self._stats.groups += 1
            ops = await writes_of(group, self._superblock, self._compute)
            write_ns, flush_ns = await self._device.commit(ops)
        except (DeviceError, MemoryError) as error:
            if isinstance(error, MemoryError):
                error = DeviceError(f"out of memory: {error}")
            self._fail(group, error)
            if not self.failed:
                await asyncio.sleep(FAILURE_BACKOFF_NS * 2 ** (self._failures - 1) / 1e9)
        else:
            length_bytes = sum(op.view.nbytes for op in ops)
            self.length.wrote(length_bytes, write_ns / 1e9, flush_ns / 1e9)
            self._succeed(group)

    # -- outcomes

    def _succeed(self, group: Group) -> None:
        self._failures = 0
        self._inflight = []
        for segment in group.headers:
            segment.header_written = True
        touched: dict[int, Segment] = {}
        for p in group.records:
            p.segment.unflushed -= 1
            touched[p.segment.index] = p.segment
            if p.kind is RecordKind.TOMBSTONES:
                self._barriers.durable(len(p.tombstones))
                self.burying.difference_update(t.lsn for t in p.tombstones)
                continue
            if not p.dead:
                self._index.m_flags[p.slot] &= ~PENDING & 0xFF
                del self.pending[p.slot]
            p.extent[:RECORD_HEADER_BYTES] = _WIPE
            p.settle(Status.OK)
        for segment in group.footers:
            segment.footer_due = False
            segment.rows = bytearray()
            self._stats.sealed_segments += 1
        for segment in group.frees:
            self._table.end_free(segment)
            _, future = self._frees.pop(segment.index)
            self._stalled = False
            if not future.done():
                future.set_result(True)
        for segment in touched.values():
            segment.changed()
        if any(not s.unflushed for s in self._table.closed):
            self._urgent = True
        if self._barriers.settle():
            self._urgent = True

    def _fail(self, group: Group, error: DeviceError) -> None:
        """The group's writes are unknown: condemn, and move what is still in memory."""
        self._failures += 1
        self._stats.failed_groups += 1
        self._log.error("event=group_failed failures=%d error=%s", self._failures, error)
        self._inflight = []
        for p in reversed(group.records):  # tombstones return to the front in their old order
            self._requeue(p)
            self._table.condemn(p.segment)
        self._table.closed = [s for s in self._table.closed if s.footer_due]
        for segment in group.footers:
            segment.footer_due = False  # its records are durable; recovery scans it
        if self._failures >= GROUP_FAILURES_MAX:
            self._log.error("event=engine_failed effect=writes_pause reads=go_on")
            self.failed = True
        moving = list(group.records)
        stay: list[Pending] = []
        for p in self._queue:
            (moving if p.segment.state is SegmentState.CONDEMNED else stay).append(p)
        self._queue = PendingQueue(stay)
        self.queued_bytes = sum(p.extent.nbytes for p in stay)
        for p in moving:
            self._move(p, error.status)
        if self.failed:
            self._pause()
        else:
            self._urgent = True

    def _requeue(self, p: Pending) -> None:
        """The tombstones of a record that was not written wait again, before all others."""
        if p.kind is RecordKind.TOMBSTONES:
            self.tombstones.extendleft(reversed(p.tombstones))
            p.segment.tombstone_offsets.remove(p.offset)

    def _move(self, p: Pending, status: Status) -> None:
        """Place a record of a condemned segment elsewhere, or end it."""
        old, table = p.segment, self._table
        old.unflushed -= 1
        old.changed()
        if p.kind is RecordKind.TOMBSTONES:
            return  # their entries are queued again
        p.extent[:RECORD_HEADER_BYTES] = _WIPE
        size = p.extent.nbytes
        if p.dead:
            p.settle(Status.IO_ERROR)
            return
        target = None
        if not self.failed and p.tries < APPEND_TRIES_MAX:
            target = table.open_for(p.stream, size, COPY_RESERVE)
            status = status if target is not None else Status.NO_SPACE
        table.add_dead(old, size)
        if target is None:
            self._end(p, status)
            return
        p.tries, p.segment = p.tries + 1, target
        p.lsn = table.lsn_of_copy(target, p.lsn) if p.home is not None else table.next_lsn()
        sizes = (size, p.sealed_bytes, p.plain_bytes, p.position)
        p.offset = table.place(target, p.kind, p.namespace_id, p.wire_key, sizes, p.lsn)
        self._index.m_segment[p.slot] = target.index
        self._index.m_offset[p.slot] = p.offset
        table.add_live(target, p.slot, size)
        table.doubt([p.namespace_id + p.wire_key])
        if not self._queue:
            self._since = self._now()
        self._queue.append(p)
        self.queued_bytes += size

    def _end(self, p: Pending, status: Status) -> None:
        """A record that will not become durable: out of the index. It may be on flash all the same;
        buried, it cannot come back after a host was told that it is not there. A block that was
        only being copied lives on where it was, durable."""
        del self.pending[p.slot]
        if p.home is not None:
            self._table.doubt([p.namespace_id + p.wire_key])  # the copy may be on flash
            self._table.bring_home(p.slot, p.extent.nbytes, *p.home)
            p.settle(status)
            return
        reason = RemoveReason.NO_SPACE if status is Status.NO_SPACE else RemoveReason.IO_ERROR
        size = p.extent.nbytes
        gone = Removed(p.namespace_id, p.wire_key, p.slot, reason, size, p.stream)
        self._index.remove(p.slot)
        self._stats.append_failures += 1
        name, lsn = (p.namespace_id, p.wire_key), self._table.next_lsn()
        self.bury([Tombstone(TombstoneKind.BLOCK, *name, lsn, p.segment.sequence)])
        p.settle(status)
        self._table.on_removed([gone])

    def _pause(self) -> None:
        """Nothing is written now: records that wait are told so, tombstones and frees stay.

        The segments of those records are condemned: what they list was never written.
        """
        self.failed = True
        queued = self._inflight + list(self._queue)
        self._inflight, self.queued_bytes = [], 0
        self._queue.clear()
        for p in queued:
            p.segment.unflushed -= 1
            self._requeue(p)
            self._table.condemn(p.segment)
            if p.dead:
                p.settle(Status.IO_ERROR)
            elif p.slot >= 0:
                self._table.add_dead(p.segment, p.extent.nbytes)
                self._end(p, Status.IO_ERROR)
            p.segment.changed()
        self._table.closed = [s for s in self._table.closed if s.footer_due]
        self._tell_stopped()

    def _tell_stopped(self) -> None:
        self._barriers.fail(STOPPED)
        for _, future in self._frees.values():
            if not future.done():
                future.set_result(False)
