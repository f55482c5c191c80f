"""The way out of a block: host memory → sealed record in a slab → flash.

RESERVE answers which keys are wanted, COMMIT says where they lie. The daemon reads them at its own
pace, in windows, and either takes the host's sealed bytes (after checking every header field
against the reservation) or seals plaintext itself in worker threads. A block is visible as soon as
its record is complete in memory, durable once the engine flushed it.

Invariants: bytes between reservation and durability are within the put budget; a block enters the
index only with a complete record; the host's memory is not read after PUT_DONE.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from entresol_daemon.core.census import HOST_SEALED, code_of
from entresol_daemon.core.residency import Resident, ResidentState
from entresol_daemon.events import types as events
from entresol_daemon.flash.engine import Record
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES, extent_bytes
from entresol_daemon.shard.keycare import KeyCare
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.pulls import (
    Pull,
    Reservation,
    check_sealed,
    seal,
    sealing,
    windows,
    zero_tail,
)
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.sessions import OpenedNamespace, Session
from entresol_proto import limits
from entresol_proto.fabric.base import ReadOp
from entresol_proto.ids import EngineKey, short, wire_key
from entresol_proto.seal.block import derive_block_key, new_salt, sealed_bytes_max
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire.data import Ack, Commit, PutDone, PutItem, Reason, Reserve, Reserved

BLOCK_MEMORY_WAIT_NS = 2_000_000_000  # a COMMIT waits so long for the memory of its next block
COMMIT_WAIT_NS_MAX = 30_000_000_000  # a reservation waits so long for its COMMIT, at most
PUT_ROOM_WAIT_NS = 2_000_000_000  # a RESERVE waits so long for the put budget

log = logging.getLogger("entresol.put")


class PutPath:
    """RESERVE and COMMIT of all sessions of a shard."""

    def __init__(self, parts: Parts, removal: Removal, keycare: KeyCare) -> None:
        self._parts = parts
        self._removal = removal
        self._keycare = keycare
        self._reservations: dict[int, Reservation] = {}
        self._wanted: dict[tuple[bytes, bytes], Reservation] = {}
        self._durable: dict[int, asyncio.Future[Status]] = {}  # by slot, until flushed
        self._next_id = 1
        self._committing = 0

    async def reserve(self, session: Session, request: Reserve) -> Reserved:
        """Decide item by item; wanted ones carry an id and, for host sealing, their key.

        A key that is stored but not yet durable is waited for when the put asks for `durable`.
        Items beyond the put budget are BUSY; a RESERVE of which nothing fits waits for room first.
        """
        parts = self._parts
        deadline_ns = parts.now_ns() + request.deadline_ns
        patience_ns = min(deadline_ns, parts.now_ns() + PUT_ROOM_WAIT_NS)
        answers, waits = self._decide(session, request, deadline_ns)
        while not any(answer.status is Status.OK for answer in answers):
            # Nothing to commit that would make room: wait for what others have under way.
            if not self._starved(session, request, answers):
                break
            if not await parts.room.wait(patience_ns - parts.now_ns()):
                break
            answers, waits = self._decide(session, request, deadline_ns)
        for place, flushing in waits:
            left_ns = deadline_ns - parts.now_ns()
            done, _ = await asyncio.wait({flushing}, timeout=max(0, left_ns) / 1e9)
            if not done or flushing.result() is not Status.OK:
                answers[place] = Reserved.Item(Status.BUSY)
        for answer in answers:
            if answer.status is not Status.OK:
                parts.meters.put_ended(session.account.name, answer.status)
        return Reserved(tuple(answers))

    def _decide(
        self, session: Session, request: Reserve, deadline_ns: int
    ) -> tuple[list[Reserved.Item], list[tuple[int, asyncio.Future[Status]]]]:
        """An answer per item, and those of them that wait for a flush under way."""
        namespace = session.namespace(request.handle)
        session.data_path()
        keys = b"".join(item.key for item in request.items)
        index = self._parts.engine.index
        slots = index.lookup(namespace.namespace_id, keys).tolist() if keys else []
        answers = []
        waits: list[tuple[int, asyncio.Future[Status]]] = []
        for place, (item, slot) in enumerate(zip(request.items, slots, strict=True)):
            if slot >= 0:
                answers.append(Reserved.Item(Status.EXISTS))
                flushing = self._durable.get(slot)
                if flushing is not None and request.ack is Ack.DURABLE:
                    waits.append((place, flushing))
            else:
                answers.append(
                    self._reserve_one(session, namespace, item, request.ack, deadline_ns)
                )
        return answers, waits

    def _starved(
        self, session: Session, request: Reserve, answers: Sequence[Reserved.Item]
    ) -> bool:
        """True if some item was refused for want of room, not because it is being stored."""
        namespace_id = session.namespace(request.handle).namespace_id
        return any(
            answer.status is Status.BUSY and (namespace_id, item.key) not in self._wanted
            for item, answer in zip(request.items, answers, strict=True)
        )

    def _reserve_one(
        self,
        session: Session,
        namespace: OpenedNamespace,
        item: PutItem,
        ack: Ack,
        deadline_ns: int,
    ) -> Reserved.Item:
        parts = self._parts
        place = (namespace.namespace_id, item.key)
        if item.plain_bytes < limits.BLOCK_BYTES_MIN:
            return Reserved.Item(Status.BAD_REQUEST)
        # Readers whose blocks the daemon opens do not see the whole key: the short name must be it.
        if wire_key(namespace.secret, EngineKey(item.engine_key)) != item.key:
            return Reserved.Item(Status.BAD_REQUEST)
        if item.plain_bytes > parts.config.limits.block_bytes_max:
            return Reserved.Item(Status.TOO_LARGE)
        if place in self._wanted:
            return Reserved.Item(Status.BUSY)  # someone else is storing it right now
        # What a host sealed under its own key may carry token ids that nobody was told of.
        tokens = limits.TOKENS_PER_BLOCK_MAX if namespace.host_sealed else len(item.token_ids)
        record_bytes = extent_bytes(
            sealed_bytes_max(
                item.plain_bytes,
                chunk_bytes=parts.config.sealing.chunk_bytes,
                meta_tokens=tokens,
                engine_key_bytes=len(item.engine_key),
            )
        )
        alone = len(parts.accounts.by_name) == 1
        status = parts.put_budget.admit(session.account, record_bytes, alone=alone)
        if status is not Status.OK:
            return Reserved.Item(status)
        # Asked last: a block that had no room must not count as touched when it comes again.
        if not parts.admission.admit(place, item.plain_bytes, parts.now_ns()):
            parts.put_budget.refund(session.account, record_bytes)
            parts.history.record(*place, Reason.NOT_ADMITTED, parts.unix_ns())
            return Reserved.Item(Status.NOT_ADMITTED)
        at_host = namespace.host_sealed or not session.data_path().capabilities.private
        version, salt, block_key = 0, b"", None
        if not namespace.host_sealed:
            version, salt = session.tenant.active_version, new_salt()
            block_key = derive_block_key(session.tenant.active_dek, salt)
            self._keycare.reserved(session, version)
        reservation = Reservation(
            self._next_id, session, namespace, item, ack, deadline_ns, record_bytes, version, salt,
            block_key, at_host, min(deadline_ns, parts.now_ns() + COMMIT_WAIT_NS_MAX),
        )  # fmt: skip
        self._next_id += 1
        self._reservations[reservation.put_id] = reservation
        self._wanted[place] = reservation
        if not at_host or block_key is None:
            return Reserved.Item(Status.OK, version, reservation.put_id)
        return Reserved.Item(
            Status.OK, version, reservation.put_id, salt, block_key.key, block_key.commitment
        )

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
            reservation = self._reservations.get(put_id)
            if reservation is None or reservation.session is not session:
                raise EntresolError(
                    f"put {put_id} is not reserved in this session",
                    hint="it may have passed its deadline",
                    status=Status.BAD_REQUEST,
                )
            if span.length_bytes == 0:
                gave_up.append(reservation)
            else:
                pulls.append(Pull(reservation, span, place))
        for reservation in gave_up:
            self._close(reservation)
        for pull in pulls:
            del self._reservations[pull.reservation.put_id]  # a second COMMIT finds nothing
        statuses = [Status.OK] * len(request.items)
        waits: list[tuple[Pull, asyncio.Future[Status]]] = []
        self._committing += 1
        try:
            for window in windows(pulls):
                waits += await self._store(session, window)
            for pull in pulls:
                statuses[pull.place] = pull.status
            for pull, flushed in waits:
                if pull.reservation.ack is Ack.DURABLE:
                    statuses[pull.place] = await self._await_durable(pull, flushed)
        finally:
            self._committing -= 1
            for pull in pulls:
                if not pull.reservation.appended:
                    self._close(pull.reservation)
        for status in statuses:
            self._parts.meters.put_ended(session.account.name, status)
        return PutDone(tuple(statuses))

    def close_session(self, session: Session) -> None:
        """Give up what the session reserved and did not commit."""
        for reservation in list(self._reservations.values()):
            if reservation.session is session:
                self._close(reservation)

    def expire(self, now_ns: int) -> None:
        """Give up reservations whose time passed without a COMMIT."""
        for reservation in list(self._reservations.values()):
            if reservation.commit_by_ns <= now_ns:
                self._close(reservation)

    @property
    def under_way(self) -> int:
        """Reservations without a COMMIT yet, and COMMITs without an answer yet."""
        return len(self._reservations) + self._committing

    async def drain(self) -> None:
        """Wait until everything accepted is durable or failed."""
        while self._durable:
            await asyncio.wait(list(self._durable.values()))
            await asyncio.sleep(0)

    def is_wanted(self, namespace_id: bytes, key: bytes) -> bool:
        """True while some session is storing this key."""
        return (namespace_id, key) in self._wanted

    async def _await_durable(self, pull: Pull, flushed: asyncio.Future[Status]) -> Status:
        left_ns = pull.reservation.deadline_ns - self._parts.now_ns()
        done, _ = await asyncio.wait({flushed}, timeout=max(0, left_ns) / 1e9)
        return flushed.result() if done else Status.DEADLINE

    async def _store(
        self, session: Session, window: list[Pull]
    ) -> list[tuple[Pull, asyncio.Future[Status]]]:
        """Store one window, in as many rounds as its memory comes in; patient while some comes."""
        waits: list[tuple[Pull, asyncio.Future[Status]]] = []
        until_ns = self._parts.now_ns() + BLOCK_MEMORY_WAIT_NS
        while window:
            batch, taken = await self._take(session, window, until_ns)
            waits += taken
            window = window[batch:]
            if taken:
                until_ns = self._parts.now_ns() + BLOCK_MEMORY_WAIT_NS
        return waits

    async def _take(
        self, session: Session, window: list[Pull], until_ns: int
    ) -> tuple[int, list[tuple[Pull, asyncio.Future[Status]]]]:
        """Bring the first blocks of a window into records and append them; returns how many.

        Nobody waits for memory while holding some: as many as have it are taken at once. They go
        in prefix order, so that nobody hears of a block before its parent; then they are made
        recent tail first, so that what many sequences share is evicted last.
        """
        try:
            here: list[Pull] = []
            batch = 0
            for pull in window:
                await self._find_memory(session, pull, 0 if here else until_ns)
                if pull.status is Status.BUSY and here:
                    pull.status = Status.OK  # its turn comes in the next round
                    break
                batch += 1
                here += [pull] if pull.status is Status.OK else []
            await self._read(session, here)
            here = [pull for pull in here if pull.status is Status.OK]
            for pull in here:
                if pull.reservation.at_host:
                    pull.status = check_sealed(pull)
            await self._seal([p for p in here if not p.reservation.at_host])
            waits = []
            for pull in sorted(here, key=lambda p: p.reservation.item.position):
                if pull.status is Status.OK:
                    flushed = await self._append(pull)
                    if flushed is not None:
                        waits.append((pull, flushed))
            stored = [pull.reservation for pull, _ in reversed(waits)]
            find = self._parts.engine.index.find
            slots = [find(r.namespace.namespace_id, r.item.key) for r in stored]
            self._parts.engine.touch([slot for slot in slots if slot >= 0])
            return batch, waits
        finally:
            for pull in window:
                self._drop_memory(pull)

    async def _find_memory(self, session: Session, pull: Pull, until_ns: int) -> None:
        parts, item = self._parts, pull.reservation.item
        account = session.account
        length = pull.reservation.record_bytes_max
        if pull.reservation.at_host:
            length = extent_bytes(pull.span.length_bytes)
            if length > pull.reservation.record_bytes_max:
                pull.status = Status.TOO_LARGE
                return
        elif pull.span.length_bytes != item.plain_bytes:
            pull.status = Status.BAD_REQUEST
            return
        while True:
            if pull.extent is None:
                pull.extent = parts.residency.allocate(
                    account.stream,
                    length,
                    account.dram_quota_bytes or parts.residency.pool.budget_bytes,
                )
            if pull.extent is not None and not pull.reservation.at_host and pull.plain is None:
                pull.plain = parts.scratch.allocate(account.stream, item.plain_bytes)
            if pull.extent is not None and (pull.reservation.at_host or pull.plain is not None):
                return
            until_ns = min(until_ns, pull.reservation.deadline_ns)
            if not await parts.room.wait(until_ns - parts.now_ns()):
                pull.status = Status.BUSY
                return

    async def _read(self, session: Session, window: list[Pull]) -> None:
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
        statuses = await session.data_path().read(ops, deadline_ns)
        for pull, status in zip(window, statuses, strict=True):
            pull.status = status
            pull.sealed_bytes = pull.span.length_bytes
        self._parts.meters.pulled(session.account.name, sum(p.span.length_bytes for p in window))

    async def _seal(self, window: list[Pull]) -> None:
        """Seal pulled plaintext in worker threads; the plaintext is wiped right after."""
        if not window:
            return
        chunk_bytes = self._parts.config.sealing.chunk_bytes
        jobs = [sealing(pull, chunk_bytes) for pull in window]
        sealed = await self._parts.compute.map(seal, jobs)
        for pull, header in zip(window, sealed, strict=True):
            if header is None:
                pull.status = Status.BAD_REQUEST
                continue
            pull.header = header
            pull.sealed_bytes = header.sealed_bytes
            assert pull.extent is not None
            self._parts.residency.pool.shrink(pull.extent, extent_bytes(header.sealed_bytes))

    async def _append(self, pull: Pull) -> asyncio.Future[Status] | None:
        """Enter one complete record into the index and the open segment."""
        parts, reservation = self._parts, pull.reservation
        item, account = reservation.item, reservation.session.account
        assert pull.extent is not None
        extent = pull.extent
        zero_tail(extent, RECORD_HEADER_BYTES + pull.sealed_bytes)
        if not await self._removal.make_room(account, extent.length_bytes):
            quota = account.flash_quota_bytes
            full = quota and account.flash_bytes + extent.length_bytes > quota
            pull.status = Status.QUOTA if full else Status.NO_SPACE
            return None
        namespace_id = reservation.namespace.namespace_id
        if parts.engine.index.find(namespace_id, item.key) >= 0:
            pull.status = Status.EXISTS
            return None
        header = pull.header
        assert header is not None
        if not header.host_sealed and header.dek_version not in reservation.session.tenant.deks:
            pull.status = Status.ERASED  # its key was destroyed since: nobody could ever open it
            return None
        record = Record(
            namespace_id, item.key, extent.view, pull.sealed_bytes, item.plain_bytes, item.position
        )
        slot, flushed = parts.engine.append(account.stream, record)
        if slot < 0:
            pull.status = flushed.result()
            return None
        pull.extent = None  # the resident's now
        code = HOST_SEALED if header.host_sealed else code_of(header.dek_version)
        parts.census.note(slot, account.stream, code)
        resident = Resident(
            slot, namespace_id, item.key, account.stream, extent, ResidentState.READY, 1,
            pull.sealed_bytes, item.plain_bytes, header.salt, header.dek_version,
            header.host_sealed,
        )  # fmt: skip
        parts.residency.add(resident)
        account.flash_bytes += extent.length_bytes
        parts.history.forget(namespace_id, item.key)
        parts.meters.stored(account.name, header, extent.length_bytes)
        self._publish(reservation, pull.sealed_bytes)
        self._removal.inserted(extent.length_bytes)
        self._durable[slot] = flushed
        reservation.appended = True
        flushed.add_done_callback(lambda done: self._flushed(reservation, resident, done))
        return flushed

    def _flushed(
        self, reservation: Reservation, resident: Resident, done: asyncio.Future[Status]
    ) -> None:
        if self._durable.get(resident.slot) is done:
            del self._durable[resident.slot]
        self._close(reservation)
        status = Status.IO_ERROR if done.cancelled() else done.result()
        if status is not Status.OK:
            log.error("event=put_lost block=%s status=%s", short(resident.wire_key), status.label)
        self._parts.residency.unpin(resident)
        self._parts.room.notify()

    def _publish(self, reservation: Reservation, sealed_bytes: int) -> None:
        item = reservation.item
        self._parts.events.publish(
            events.Kind.STORED,
            reservation.session.account.name,
            time_unix_ns=self._parts.unix_ns(),
            namespace_id=reservation.namespace.namespace_id,
            wire_keys=(item.key,),
            engine_keys=(item.engine_key,),
            parent=item.parent,
            position=item.position,
            block_tokens=reservation.namespace.block_tokens,
            token_ids_u32le=events.pack_token_ids(item.token_ids),
            medium=events.Medium.MEMORY,
            size_bytes=sealed_bytes,
        )

    def _drop_memory(self, pull: Pull) -> None:
        if pull.plain is not None:
            view = pull.plain.view
            view[:] = bytes(len(view))
            self._parts.scratch.free(pull.plain)
            pull.plain = None
        if pull.extent is not None:
            self._parts.residency.pool.free(pull.extent)
            pull.extent = None
        self._parts.room.notify()

    def _close(self, reservation: Reservation) -> None:
        """The put ended, one way or another: its budget and its name are free again."""
        if reservation.closed:
            return
        reservation.closed = True
        if reservation.block_key is not None:
            self._keycare.put_ended(reservation.session, reservation.dek_version)
        self._reservations.pop(reservation.put_id, None)
        place = (reservation.namespace.namespace_id, reservation.item.key)
        if self._wanted.get(place) is reservation:
            del self._wanted[place]
        self._parts.put_budget.refund(reservation.session.account, reservation.record_bytes_max)
        self._parts.room.notify()
