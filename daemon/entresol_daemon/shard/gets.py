"""The way home of a block: flash → slab → lease, and the end of the lease.

A FETCH is served in windows, each in a turn of its tenant on the loop. What is in memory is granted
at once; the rest is read from flash in batches (`staging`) and granted as it lands.

Invariants: a block is granted only when it is READY (`staging`); every pin taken here
is given to a lease or undone; a host that stops reading holds memory no longer than its lease.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from entresol_daemon.core.fairness import BEGUN
from entresol_daemon.core.planning import Shape, Window, granted_ahead, plan_fetch, take_window
from entresol_daemon.core.residency import Resident
from entresol_daemon.flash.segment import extent_bytes
from entresol_daemon.shard.door import Door
from entresol_daemon.shard.granting import Granting
from entresol_daemon.shard.jobs import Job
from entresol_daemon.shard.lookups import slots_of
from entresol_daemon.shard.parts import Parts, Room
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.reports import HostReports
from entresol_daemon.shard.resident import ResidentGets
from entresol_daemon.shard.sessions import Session
from entresol_daemon.shard.staging import Read, Staging
from entresol_daemon.shard.turns import (
    BLOCK_COST,
    FRAME_COST,
    LOOP_TURN_COST,
    WINDOW_BLOCKS_IN_TURN,
    WINDOW_COST,
)
from entresol_proto import limits
from entresol_proto.status import EntresolError, QuotaError, Status
from entresol_proto.wire.data import (
    Fetch,
    Grant,
    OpenAt,
    Release,
    Stage,
    Staged,
)

RECORD_ROOM_BYTES = 64 * limits.KIB  # so that blocks of a whole number of MiB fill a window
LOAD_FIRST_BYTES = 4 * (limits.MIB + RECORD_ROOM_BYTES)  # read from flash and granted together:
LOAD_WINDOW_BYTES = 2 * LOAD_FIRST_BYTES  # the first of a request soon, the others with less ado
GRANT_BYTES_MAX = LOAD_WINDOW_BYTES  # of windows that are granted together
WINDOWS_LANDING_MAX = 8  # of those of one request under way
WINDOW_BLOCKS_MAX = 64
MISSES_PER_COST = 4  # of the loop, to be told
_KEY = limits.WIRE_KEY_BYTES

log = logging.getLogger("entresol.get")


class GetPath:
    """FETCH, STAGE and RELEASE of all sessions of a shard."""

    def __init__(self, parts: Parts, removal: Removal) -> None:
        self._parts = parts
        self._removal = removal
        self.granting = Granting(parts, removal)
        self.opened = self.granting.opened
        self._staging = Staging(parts, removal, self._spawn)
        self.reads = self._staging.reads
        self._reports = HostReports(parts, removal, self.opened, self._spawn)
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = 0
        self.door = Door(parts.config.limits.gets_at_once_max, parts.meters, parts.now_ns)
        self.resident = ResidentGets(parts, self.granting, self.door)

    @property
    def loading(self) -> int:
        """Blocks being read from flash."""
        return len(self._staging)

    @property
    def rising(self) -> set[int]:
        """Their slots."""
        return self._staging.slots()

    @property
    def serving(self) -> int:
        """Requests whose last answer is not out yet."""
        return self._serving

    async def close_session(self, session: Session) -> None:
        """Give up a session's plaintext; its leases have ended."""
        await self.opened.close_session(session)

    async def close(self) -> None:
        """Wait for the reads from flash that are under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def fetch(self, session: Session, request: Fetch, emit: Callable[[Grant], None]) -> None:
        """Answer a FETCH: `emit` is called with each GRANT, the last one final.

        Raises: EntresolError when the request as a whole is refused; nothing was emitted then.
        """
        job = self._job(session, request.handle, request.open_at, request.keys, request.deadline_ns)
        job.lease_ns = self._parts.config.limits.lease_ns
        job.emit = emit
        job.prefix = request.prefix
        await self._serve(job)

    async def stage(self, session: Session, request: Stage) -> Staged:
        """Bring blocks up and hold them for `hold_ns` (at most ten lease times)."""
        job = self._job(session, request.handle, request.open_at, request.keys, request.deadline_ns)
        job.lease_ns = min(request.hold_ns, 10 * self._parts.config.limits.lease_ns)
        statuses = [Status.OK] * (len(request.keys) // limits.WIRE_KEY_BYTES)

        def note(grant: Grant) -> None:
            for index, status in grant.misses:
                statuses[index] = status

        job.emit = note
        await self._serve(job)
        return Staged(tuple(statuses))

    def release(self, session: Session, request: Release) -> None:
        """End leases; look into what the host could not verify. Unknown leases are ignored."""
        self._reports.take(session, request)
        for lease_id in request.lease_ids:
            lease = self._parts.leases.release(session.number, lease_id)
            if lease is not None:
                self.granting.let_go(lease.payload)

    def _job(
        self, session: Session, handle: int, open_at: OpenAt, keys: bytes, deadline_ns: int
    ) -> Job:
        if open_at is OpenAt.DAEMON and not session.data_path().capabilities.private:
            raise EntresolError(
                "daemon-opened reads need a private data path",
                hint="use shm, verbs or tcp with TLS, or let the host open blocks",
                status=Status.UNSUPPORTED,
            )
        session.data_path()
        until_ns = self._parts.now_ns() + deadline_ns
        namespace = session.namespace(handle)
        if open_at is OpenAt.DAEMON and namespace.host_sealed:
            raise EntresolError(
                "this namespace is sealed by its hosts: the daemon has no key to open a block",
                hint="let the host open blocks (open_at = host)",
                status=Status.UNSUPPORTED,
            )
        return Job(session, namespace, open_at, keys, until_ns, 0, lambda _grant: None)

    async def _serve(self, job: Job) -> None:
        left_ns, blocks = job.deadline_ns - self._parts.now_ns(), len(job.keys) // _KEY
        job.visit = await self.door.enter(job.session.account, left_ns, blocks)
        self._serving += 1
        try:
            await self._serve_windows(job)
        finally:
            self._serving -= 1
            job.visit.leave()

    async def _serve_windows(self, job: Job) -> None:
        index = self._parts.engine.index
        job.slots, fresh = await slots_of(self._parts, job.session, job.namespace, job.keys)
        job.slots_at = index.changes if fresh else -1
        wanted = plan_fetch(job.slots, prefix=job.prefix)
        job.misses, job.pending = wanted.misses, wanted.pending
        landing: dict[asyncio.Task[None], Window] = {}
        in_vain = False
        if len(job.misses) > self._parts.turns.loop.stretch * MISSES_PER_COST:
            await self._tell_misses(job)
        try:
            while wanted.pending:
                if len(landing) >= WINDOWS_LANDING_MAX:
                    await self._first_of(landing)
                again = in_vain
                if not again:
                    await self._at_once(job, len(wanted.pending))
                window = self._window(job, wanted.pending)
                in_vain = not len(window)  # before it is landed, which takes it apart
                job.misses += window.misses
                alone = not (wanted.pending or landing or window.ready)
                first = bool(window.loads) and not (landing or alone)
                if window.waits and alone:  # nothing goes on beside it: that takes no task
                    await self._land(job, window, self._reads(job, window))
                elif window.waits:
                    landing[self._begin(job, window)] = window
                if window.ready:
                    await self._grant_ready(job, window.ready)
                    if job.ended:
                        return
                elif in_vain and not await job.visit.outside(
                    self._wait_for_room(job, landing, again),
                    own=self.granting.full(job.session) > 0,
                ):
                    self._refuse(job, wanted.pending)
                if first:
                    await asyncio.sleep(0)  # the drive begins before the rest is planned
            while landing:
                await self._first_of(landing)
            if not job.ended:
                await self.granting.grant(job, [], final=True)
        finally:
            hits = [slot for slot in reversed(job.hits) if index.is_live(slot)]
            self._parts.meters.usefulness.served(hits)
            self._parts.engine.touch(hits)  # tail first: the prefix is most recent
            self._parts.valued.used(hits)
            for task, window in landing.items():
                task.cancel()
                self.granting.undo(job, window.take_waits())  # not begun, and never will be
            self.granting.undo(job, list(itertools.chain.from_iterable(job.landed)))
            job.landed.clear()
            if landing:  # last: this may be cancelled once more
                await asyncio.gather(*landing, return_exceptions=True)

    async def _tell_misses(self, job: Job) -> None:
        """Thousands of absent keys are told in parts, each in a turn on the loop; what is left is
        told with the next grant, in the last of them."""
        parts, account = self._parts, job.session.account
        while True:
            await parts.turns.loop.take(account, FRAME_COST + LOOP_TURN_COST)
            stretch = parts.turns.loop.extend(account, -(-len(job.misses) // MISSES_PER_COST))
            most = stretch * MISSES_PER_COST
            if len(job.misses) <= most:
                return
            now, job.misses = tuple(job.misses[:most]), job.misses[most:]
            parts.meters.granted(account.name, (), now, job.open_at)
            job.emit(Grant(False, 0, job.lease_ns, parts.now_ns() + job.lease_ns, (), now))

    def _refuse(self, job: Job, pending: deque[int]) -> None:
        """No room for the rest by the deadline: BUSY, and counted where the tenant holds it."""
        parts, account = self._parts, job.session.account
        job.misses += [(index, Status.BUSY) for index in pending]
        if not self.granting.may_lease(job.session):
            parts.metrics.quota_refusals[account.name, "leases"].inc(len(pending))
        elif parts.held.get_room(account, parts.accounts.of_free(account)) <= 0:
            parts.metrics.quota_refusals[account.name, "get"].inc(len(pending))
        pending.clear()

    async def _at_once(self, job: Job, blocks: int) -> None:
        """A turn on the loop for the next window."""
        loop_turns, account = self._parts.turns.loop, job.session.account
        most = WINDOW_BLOCKS_IN_TURN if loop_turns.waiting else WINDOW_BLOCKS_MAX
        if job.paid:
            job.paid = False
            loop_turns.count(account, (min(blocks, most) - WINDOW_BLOCKS_IN_TURN) * BLOCK_COST)
            return
        cost = WINDOW_COST + min(blocks, most) * BLOCK_COST
        if not loop_turns.enter(account, cost):
            await loop_turns.take(account, cost)

    async def _first_of(self, landing: dict[asyncio.Task[None], Window]) -> None:
        done, _ = await asyncio.wait(landing, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del landing[task]
        for task in done:
            task.result()

    async def _wait_for_room(
        self, job: Job, landing: dict[asyncio.Task[None], Window], again: bool
    ) -> bool:
        """Until it is time to look for room again; False when the deadline comes first."""
        parts, session = self._parts, job.session
        left_ns = job.deadline_ns - parts.now_ns()
        if left_ns <= 0:
            return False
        if landing:
            await self._first_of(landing)
            return True
        return await parts.room.wait(
            session.account, left_ns, Room.GET, session=self.granting.full(session),
            again=again, cost=WINDOW_COST + BLOCK_COST,
        )  # fmt: skip

    def _window(self, job: Job, pending: deque[int]) -> Window:
        """What of `pending` can be served or loaded now."""
        parts = self._parts
        account = job.session.account
        room = parts.config.limits.inflight_bytes_per_session_max - job.session.held_bytes
        room = min(room, parts.held.get_room(account, parts.accounts.of_free(account)))
        if room <= 0 or not self.granting.may_lease(job.session):
            return Window()
        most = WINDOW_BLOCKS_IN_TURN if parts.turns.loop.waiting else WINDOW_BLOCKS_MAX
        window = take_window(
            pending,
            self._shapes(job, list(itertools.islice(pending, most))),
            parts.residency,
            namespace_id=job.namespace.namespace_id,
            owner=account.stream,
            owner_bytes_max=account.dram_quota_bytes or parts.config.memory.dram_bytes,
            budget_bytes=room,
            load_bytes_max=LOAD_WINDOW_BYTES if job.owed or job.hits else LOAD_FIRST_BYTES,
            prefix=job.prefix,
        )
        job.session.held_bytes += window.taken_bytes
        parts.held.hold(account, window.taken_bytes)
        return window

    def _shapes(self, job: Job, wanted: list[int]) -> Iterator[Shape]:
        """Of each block as it is asked for, without an await between: most are not, of many."""
        index, namespace_id = self._parts.engine.index, job.namespace.namespace_id
        fresh = job.slots_at == index.changes
        for at in wanted:
            key = job.keys[_KEY * at : _KEY * (at + 1)]
            slot = job.slots[at] if fresh else index.find(namespace_id, key)
            if slot < 0:
                yield Shape(-1, key, 0, 0, 0)
            else:
                sealed = index.m_sealed_bytes[slot]
                yield Shape(slot, key, extent_bytes(sealed), sealed, index.m_plain_bytes[slot])

    def _begin(self, job: Job, window: Window) -> asyncio.Task[None]:
        """Read what a window loads, and grant it as it lands."""
        reads = self._reads(job, window)
        try:
            return asyncio.create_task(self._land(job, window, reads))
        except BaseException:
            job.owed -= 1
            self.granting.undo(job, window.take_waits() + window.ready)
            raise

    def _reads(self, job: Job, window: Window) -> dict[Resident, Read]:
        """Begin to read what a window loads; `_land` is owed."""
        try:
            reads = self._staging.begin(job.session.account, window)
        except BaseException:
            self.granting.undo(job, window.take_waits() + window.ready)
            raise
        job.owed += 1
        return reads

    async def _land(self, job: Job, window: Window, reads: dict[Resident, Read]) -> None:
        """Wait for a window's reads, then grant what arrived."""
        mine = sorted(window.take_waits(), key=lambda entry: entry[0])
        arrived: list[tuple[int, Resident]] = []
        lost: list[tuple[int, Resident]] = []
        misses: list[tuple[int, Status]] = []
        try:
            await self._staging.until_read(reads.values(), job.deadline_ns)
            for index, resident in mine:
                status = self._staging.arrival(resident, reads.get(resident))
                if status is Status.OK:
                    arrived.append((index, resident))
                else:
                    lost.append((index, resident))
                    misses.append((index, status))
            mine = []
        finally:
            self.granting.undo(job, mine)
        self.granting.undo(job, lost)
        job.misses += misses
        if not arrived:
            job.owed -= 1  # what is missing is told with the next grant
            return
        job.landed.append(arrived)
        await self._grant_landed(job)

    async def _grant_landed(self, job: Job) -> None:
        """Grant what has landed, in a turn on the loop; what lands while that is waited for goes
        along: the busier the loop, the fewer frames."""
        loop_turns, account = self._parts.turns.loop, job.session.account
        cost = FRAME_COST + BLOCK_COST
        while job.landed and not job.granter:
            if not loop_turns.enter(account, cost):
                job.granter = True
                try:
                    await loop_turns.take(account, cost, BEGUN)
                except QuotaError:
                    job.owed += 1  # what landed is not granted: no other grant is the last
                    raise
                finally:
                    job.granter = False
            mine = job.take_landed(WINDOW_BLOCKS_MAX, GRANT_BYTES_MAX)
            loop_turns.count(account, (len(mine) - 1) * BLOCK_COST)
            if mine:
                job.owed += 1
                await self.granting.grant(job, mine, final=job.is_last)
                job.owed -= 1

    async def _grant_ready(self, job: Job, rest: list[tuple[int, Resident]]) -> None:
        """Grant what is in memory, and with it what has landed; of the first window, if it is
        large, a part at once: afterwards the host has work while the next is prepared."""
        more = WINDOW_BLOCKS_MAX - len(rest)
        landed = job.take_landed(more, GRANT_BYTES_MAX) if more > 0 else []
        self._parts.turns.loop.count(job.session.account, len(landed) * BLOCK_COST)
        rest = landed + rest
        job.owed += 1
        try:
            if not job.hits and (first := granted_ahead(rest)):
                ahead, rest = rest[:first], rest[first:]
                await self.granting.grant(job, ahead, final=False)
                await asyncio.sleep(0)  # the frame leaves while the rest is prepared
            mine, rest = rest, []
            await self.granting.grant(job, mine, final=job.is_last)
            job.owed -= 1
        finally:
            self.granting.undo(job, rest)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("event=task_failed", exc_info=task.exception())
