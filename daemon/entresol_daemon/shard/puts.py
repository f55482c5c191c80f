"""The way out of a block: host memory → sealed record in a slab → flash.

RESERVE answers which keys are wanted, COMMIT says where they lie. The daemon reads them at its own
pace, in windows, and either takes the host's sealed bytes (after checking every header field
against the reservation) or seals plaintext itself in worker threads: what was read, which is wiped
then, or over shared memory where it lies. A block is visible as soon as
its record is complete in memory, durable once the engine flushed it.

Invariants: bytes between reservation and durability are within the put budget; a block enters the
index only with a complete record; the host's memory is not read after PUT_DONE. While flash may
hold what the name had before, `accepted` is said when durable: no crash brings that back, then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from entresol_daemon.core.accounts import Account
from entresol_daemon.core.fairness import PUTS
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES, extent_bytes
from entresol_daemon.shard.entering import Entered, Entering, outcome
from entresol_daemon.shard.keycare import KeyCare
from entresol_daemon.shard.parts import Parts, Room
from entresol_daemon.shard.pulls import (
    Pull,
    Reservation,
    borrowed,
    check_sealed,
    seal,
    sealing,
    sealing_bytes,
    windows,
)
from entresol_daemon.shard.remembering import Remembering
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.reserving import Reserving
from entresol_daemon.shard.sessions import Session
from entresol_daemon.shard.turns import HeldTurn, compute_in_turns
from entresol_proto.fabric.base import ReadOp, RemoteSpan
from entresol_proto.seal import codecs
from entresol_proto.seal.wiping import zero
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire.data import Ack, Commit, PutDone, Reserve, Reserved

BLOCK_MEMORY_WAIT_NS = 2_000_000_000  # a COMMIT waits so long for the memory of its next block
HOST_READ_NS_MAX = 30_000_000_000  # and for its host to be read, one window of it
SLOW_HOST_S = 0.02  # then others take the turn of a window whose host has not answered


class PutPath:
    """RESERVE and COMMIT of all sessions of a shard."""

    def __init__(self, parts: Parts, removal: Removal, keycare: KeyCare) -> None:
        self._parts = parts
        self._entering = Entering(parts, removal, lambda ended: self._reserving.close(ended))
        self._reserving = Reserving(
            parts, keycare, Remembering(parts, removal), self._entering.durable,
            self._entering.following, self._await_durable, self._hurry,
        )  # fmt: skip
        self._reservations = self._reserving.open
        self._wanted = self._reserving.wanted
        self._committing = 0
        # By session number: COMMITs that still bring blocks into records, flushes waited for.
        self._storing: Counter[int] = Counter()
        self._awaiting: Counter[int] = Counter()

    async def commit(self, session: Session, request: Commit) -> PutDone:
        """Read, seal and append the blocks of a COMMIT; answers when all are acknowledged.

        Raises: EntresolError (BAD_REQUEST) for an id that is not a reservation of this session;
        nothing of the request is read then.
        """
        pulls: list[Pull] = []
        gave_up: list[Reservation] = []
        if len({put_id for put_id, _ in request.items}) != len(request.items):
            raise EntresolError("a put is committed twice", status=Status.BAD_REQUEST)
        for place, (put_id, span) in enumerate(request.items):
            reservation = self._reservations.get((session.number, put_id))
            if reservation is None:
                raise EntresolError(
                    f"put {put_id} is not reserved in this session",
                    hint="it may have passed its deadline",
                    status=Status.BAD_REQUEST,
                )
            if span.length_bytes == 0:
                gave_up.append(reservation)
            else:
                pulls.append(self._pull(reservation, span, place))
        for reservation in gave_up:
            self._reserving.close(reservation)
        for pull in pulls:
            self._reserving.committed(pull.reservation)
        statuses = [Status.OK] * len(request.items)
        waits: list[Entered] = []
        self._committing += 1
        try:
            try:
                with _counted(self._storing, session):
                    for window in windows([pull for pull in pulls if pull.status is Status.OK]):
                        waits += await self._store(session, window)
            finally:
                self._hurry(session)
            for pull in pulls:
                statuses[pull.place] = pull.status
            for pull, flushed in waits:
                reservation = pull.reservation
                if reservation.ack is Ack.DURABLE or pull.follows:
                    deadline_ns = reservation.deadline_ns
                    statuses[pull.place] = await self._await_durable(session, flushed, deadline_ns)
        finally:
            self._committing -= 1
            for pull in pulls:
                if not pull.reservation.appended:
                    self._reserving.close(pull.reservation)
        self._parts.meters.puts_ended(session.account.name, statuses)
        return PutDone(tuple(statuses))

    def _pull(self, reservation: Reservation, span: RemoteSpan, place: int) -> Pull:
        """Sealed here with the raw codec, a block is read once: where it can be, where it lies."""
        pull, of = Pull(reservation, span, place), reservation.namespace
        if reservation.at_host:
            if extent_bytes(span.length_bytes) > reservation.record_bytes_max:
                pull.status = Status.TOO_LARGE
        elif span.length_bytes != reservation.item.plain_bytes:
            pull.status = Status.BAD_REQUEST
        else:
            bypass = self._parts.codecs.bypass
            tenant = reservation.session.account.name
            pull.codec_id = bypass.codec(of.namespace_id, of.dtype, of.choice.codec_id, tenant)
            endpoint = reservation.session.endpoint
            maps = endpoint is not None and endpoint.capabilities.maps
            pull.stays = maps and pull.codec_id == codecs.RAW
        return pull

    async def reserve(self, session: Session, request: Reserve) -> Reserved:
        """See `Reserving.reserve`."""
        return await self._reserving.reserve(session, request)

    def close_session(self, session: Session) -> None:
        """Give up what the session reserved and did not commit."""
        self._reserving.close_session(session)

    def expire(self, now_ns: int) -> None:
        """Give up reservations whose time passed without a COMMIT."""
        self._reserving.expire(now_ns)

    @property
    def under_way(self) -> int:
        """Reservations without a COMMIT yet, and COMMITs without an answer yet."""
        return len(self._reservations) + self._committing

    async def drain(self) -> None:
        """Wait until everything accepted is durable or failed."""
        await self._entering.drain()

    def is_wanted(self, namespace_id: bytes, key: bytes) -> bool:
        """True while some session is storing this key."""
        return (namespace_id, key) in self._wanted

    async def _await_durable(
        self,
        session: Session,
        flushed: asyncio.Future[Status],
        deadline_ns: int,
        held: int = 0,
    ) -> Status:
        """How a block's flush ended, or DEADLINE; see `_hurry` for `held`."""
        if not flushed.done():  # with the group of a block before it: waiting costs a loop's turn
            with _counted(self._awaiting, session):
                self._hurry(session, held)
                left_ns = deadline_ns - self._parts.now_ns()
                await asyncio.wait({flushed}, timeout=max(0, left_ns) / 1e9)
        return outcome(flushed) if flushed.done() else Status.DEADLINE

    def _hurry(self, session: Session, held: int = 0) -> None:
        """A group waits for more to come. Where a session waits for it, and nothing of its own is
        coming but so many reservations that cannot meanwhile, it is written soon: it must not be
        late for what others may put, and what comes meanwhile makes the next group."""
        number = session.number
        waited_for = self._awaiting[number] and not self._storing[number]
        if waited_for and self._reserving.held_by(session) <= held:
            self._parts.engine.hurry()

    async def _store(self, session: Session, window: list[Pull]) -> list[Entered]:
        """Store one window, in as many rounds as its memory comes in; patient while some comes."""
        parts, waits = self._parts, []
        until_ns, again = parts.now_ns() + BLOCK_MEMORY_WAIT_NS, False
        while window:
            cost = max(1, sum(pull.span.length_bytes for pull in window))
            turn = await self._turn(session.account, cost, window)
            if turn is None:
                window = [pull for pull in window if pull.status is Status.OK]
                continue
            batch, taken = await self._take(session, window, turn)
            waits += taken
            window = window[batch:]
            if batch:
                until_ns, again = parts.now_ns() + BLOCK_MEMORY_WAIT_NS, False
                continue
            left_ns = min(until_ns, window[0].reservation.deadline_ns) - parts.now_ns()
            again = await parts.room.wait(session.account, left_ns, Room.COMMIT, again=again)
            if not again:
                window[0].status = Status.BUSY
                window = window[1:]
        return waits

    async def _turn(self, account: Account, cost: int, window: list[Pull]) -> HeldTurn | None:
        """The tenant's turn to pull a window; None when a deadline came before it, and then its
        blocks' statuses say so."""
        parts = self._parts
        pulls = parts.turns.pulls
        left_ns = min(pull.reservation.deadline_ns for pull in window) - parts.now_ns()
        try:
            async with asyncio.timeout(max(0, left_ns) / 1e9):
                await pulls.take(account, cost, PUTS)
        except TimeoutError:
            now_ns = parts.now_ns()
            for pull in window:
                if pull.reservation.deadline_ns <= now_ns:
                    pull.status = Status.DEADLINE
            return None
        return HeldTurn(pulls, cost)

    async def _take(
        self, session: Session, window: list[Pull], turn: HeldTurn
    ) -> tuple[int, list[Entered]]:
        """Bring the first blocks of a window into records and append them; returns how many.

        Nobody waits for memory while holding some, or a turn: as many as have it are taken at once.
        """
        parts, account = self._parts, session.account
        try:
            try:
                batch, here = self._find_memory_for(session, window)
                await self._read(session, [pull for pull in here if not pull.stays], turn)
                here = [pull for pull in here if pull.status is Status.OK]
                for pull in here:
                    if pull.reservation.at_host:
                        pull.status = check_sealed(pull)
                meters = self._parts.meters
                meters.pulled(account.name, sum(pull.span.length_bytes for pull in here))
                stay = [pull for pull in here if pull.stays]
                with borrowed(session, stay, parts.now_ns()):
                    ready = [p for p in here if p.status is Status.OK]
                    await self._seal(account, [p for p in ready if not p.reservation.at_host])
            finally:
                turn.give()
            return batch, await self._entering.enter(account, here)
        finally:
            for pull in window:
                self._drop_memory(pull)

    def _find_memory_for(self, session: Session, window: list[Pull]) -> tuple[int, list[Pull]]:
        """How many of the first blocks have their memory, and these."""
        here: list[Pull] = []
        for batch, pull in enumerate(window):
            if not self._find_memory(session, pull):
                return batch, here  # its turn comes in the next round
            here.append(pull)
        return len(window), here

    def _find_memory(self, session: Session, pull: Pull) -> bool:
        """Memory for one block, now."""
        parts, item = self._parts, pull.reservation.item
        account = session.account
        length = pull.reservation.record_bytes_max
        if pull.reservation.at_host:
            length = extent_bytes(pull.span.length_bytes)
        most = account.dram_quota_bytes or parts.residency.pool.budget_bytes
        pull.extent = parts.residency.allocate(account.stream, length, most)
        if pull.extent is None:
            return False
        if not pull.reservation.at_host and not pull.stays:
            pull.plain = parts.scratch.allocate(account.stream, item.plain_bytes)
            if pull.plain is None:
                parts.residency.pool.free(pull.extent)
                pull.extent = None
        return pull.extent is not None

    async def _read(self, session: Session, window: list[Pull], turn: HeldTurn) -> None:
        """Read what hosts wrote. The turn is for what moves: a host that is waited for keeps it for
        SLOW_HOST_S, and not at all while it is waited for already. Then memory bounds it alone."""
        if not window:
            return
        ops = []
        for pull in window:
            if pull.plain is not None:
                session.land_in(pull.plain.slab)
                into = pull.plain.view[: pull.span.length_bytes]
            else:
                assert pull.extent is not None
                session.land_in(pull.extent.slab)
                start = RECORD_HEADER_BYTES
                into = pull.extent.view[start : start + pull.span.length_bytes]
            ops.append(ReadOp(pull.span, into))
        deadline_ns = min(pull.reservation.deadline_ns for pull in window)
        deadline_ns = min(deadline_ns, self._parts.now_ns() + HOST_READ_NS_MAX)
        slow = False

        def waits_long() -> None:
            nonlocal slow
            slow = True
            session.slow_reads += 1
            turn.give()

        patience_s = 0.0 if session.slow_reads else SLOW_HOST_S
        timer = asyncio.get_running_loop().call_later(patience_s, waits_long)
        try:
            statuses = await session.data_path().read(ops, deadline_ns)
        finally:
            timer.cancel()
            session.slow_reads -= slow
        for pull, status in zip(window, statuses, strict=True):
            pull.status = status
            pull.sealed_bytes = pull.span.length_bytes

    async def _seal(self, account: Account, window: list[Pull]) -> None:
        """Seal plaintext in worker threads; what was read is wiped right after."""
        if not window:
            return
        parts, chunk_bytes = self._parts, self._parts.config.sealing.chunk_bytes
        jobs = [sealing(pull, chunk_bytes) for pull in window]
        sealed = await compute_in_turns(
            parts.turns.compute, parts.compute, account, seal, jobs, sealing_bytes, PUTS,
            parts.turns.seal_bytes,
        )  # fmt: skip
        for pull, job, made in zip(window, jobs, sealed, strict=True):
            pull.wiped = True
            if made is None:
                pull.status = Status.BAD_REQUEST
                continue
            header, pull.payload_hash = made.header, made.payload_hash
            parts.codecs.sealed(
                account.name, job.identity.namespace_id, job.identity.dtype, job.codec_id,
                header.codec_id, header.plain_bytes, made.sealing_ns,
            )  # fmt: skip
            pull.header = header
            pull.sealed_bytes = header.sealed_bytes
            assert pull.extent is not None
            self._parts.residency.pool.shrink(pull.extent, extent_bytes(header.sealed_bytes))

    def _drop_memory(self, pull: Pull) -> None:
        if pull.plain is None and pull.extent is None:
            return  # nobody gains: those who wait for memory must not wake each other
        if pull.plain is not None:
            if not pull.wiped:
                zero(pull.plain.view)
            self._parts.scratch.free(pull.plain)
            pull.plain = None
        if pull.extent is not None:
            self._parts.residency.pool.free(pull.extent)
            pull.extent = None
        self._parts.room.notify()


@contextlib.contextmanager
def _counted(counts: Counter[int], session: Session) -> Iterator[None]:
    """One more of this session, meanwhile."""
    counts[session.number] += 1
    try:
        yield
    finally:
        counts[session.number] -= 1
        if not counts[session.number]:
            del counts[session.number]
