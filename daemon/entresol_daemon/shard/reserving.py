"""RESERVE: which blocks of a put are wanted, and what is reserved until its COMMIT.

Invariants: bytes between reservation and durability are within the put budget; a reservation is
closed exactly once, with its flush, its failure, its session or its time; a RESERVE of thousands
takes the loop a tenant's turn at a time. A namespace with anything reserved has its record in
the keyring (`Remembering`).
"""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Awaitable, Callable, Collection, Container, Mapping
from dataclasses import dataclass, field

from entresol_daemon.core.accounts import Account, Shared
from entresol_daemon.core.fairness import PUTS
from entresol_daemon.flash.segment import extent_bytes
from entresol_daemon.shard import turns
from entresol_daemon.shard.costing import size_of
from entresol_daemon.shard.keycare import KeyCare
from entresol_daemon.shard.parts import Parts, Room
from entresol_daemon.shard.pulls import Reservation
from entresol_daemon.shard.remembering import Remembering
from entresol_daemon.shard.sessions import OpenedNamespace, Session
from entresol_proto import limits
from entresol_proto.ids import EngineKey, wire_key
from entresol_proto.seal.block import Salts, derive_block_key, sealed_bytes_max
from entresol_proto.status import Status
from entresol_proto.wire.data import Ack, PutItem, Reason, Reserve, Reserved

COMMIT_WAIT_NS_MAX = 30_000_000_000  # a reservation waits so long for its COMMIT, at most
PUT_ROOM_WAIT_NS = 2_000_000_000  # a RESERVE waits so long for the put budget
WAITING_BYTES_MAX = 64 * limits.MIB  # of RESERVEs that wait, for room or for a flush
STALE_DEADLINES_MAX = 1_024  # beyond as many as there are reservations; then they are swept out
_BUSY = Reserved.Item(Status.BUSY)
_NOT_ADMITTED = Reserved.Item(Status.NOT_ADMITTED)


@dataclass(slots=True)
class _Decided:
    """`answers`: one per item. `waits`: those of them that wait for a flush under way.
    `no_room_bytes`: of the record of the first that the put budget had no room for; 0: of none.
    `not_admitted`: items that were refused by admission, which counts how often each is offered."""

    not_admitted: set[int] = field(default_factory=set)
    answers: list[Reserved.Item] = field(default_factory=list)
    waits: list[tuple[int, asyncio.Future[Status]]] = field(default_factory=list)
    no_room_bytes: int = 0

    @property
    def is_starved(self) -> bool:
        """Nothing was reserved, for want of room."""
        return bool(self.no_room_bytes) and not any(a.status is Status.OK for a in self.answers)


class Reserving:
    """Reservations of all sessions. `durable` are the flushes under way, by slot; `following` those
    of them that every put waits for, as a crash would bring an older block back; `await_durable`
    waits for one, until a deadline, and says how it ended, for a session that holds so many
    reservations that come to nothing meanwhile. `on_none_left`: told when it has none."""

    def __init__(
        self,
        parts: Parts,
        keycare: KeyCare,
        remembering: Remembering,
        durable: Mapping[int, asyncio.Future[Status]],
        following: Container[int],
        await_durable: Callable[[Session, asyncio.Future[Status], int, int], Awaitable[Status]],
        on_none_left: Callable[[Session], None],
    ) -> None:
        self._parts = parts
        self._keycare = keycare
        self._remembering = remembering
        self._salts = Salts()
        self._durable = durable
        self._following = following
        self._await_durable = await_durable
        self._on_none_left = on_none_left
        # Without a COMMIT yet, by the session's number and put id.
        self.open: dict[tuple[int, int], Reservation] = {}
        self.wanted: dict[tuple[bytes, bytes], Reservation] = {}
        self._of_session: dict[int, dict[int, Reservation]] = {}
        self._deadlines: list[tuple[int, tuple[int, int]]] = []
        self._all_waiting = Shared(WAITING_BYTES_MAX)
        self._waiting: dict[bytes, int] = {}  # of that, by tenant

    async def reserve(self, session: Session, request: Reserve) -> Reserved:
        """Decide item by item; wanted ones carry an id and, for host sealing, their key.

        A key that is stored but not yet durable is waited for when the put asks for `durable`, or
        when flash may hold an older block of that name.
        Items beyond the put budget are BUSY; a RESERVE of which nothing fits waits for room first.
        Where as much waits already as may (WAITING_BYTES_MAX), none does: it is BUSY at once.
        Raises: KeyringError, QuotaError where a new namespace cannot be written down; EntresolError
        (BAD_REQUEST) for a handle that was not opened.
        """
        namespace_id = session.namespace(request.handle).namespace_id
        session.data_path()
        self._remembering.hold(namespace_id)
        try:
            await self._remembering.write_down(session, request.handle)
            return await self._reserve(session, request)
        finally:
            self._remembering.let_go(namespace_id)

    async def _reserve(self, session: Session, request: Reserve) -> Reserved:
        account, deadline_ns = session.account, self._parts.now_ns() + request.deadline_ns
        decided = await self._decide(session, request, deadline_ns)
        if decided.is_starved or decided.waits:
            length_bytes = size_of(request)
            if self._may_wait(account, length_bytes):
                self._wait_with(account, length_bytes)
                try:
                    decided = await self._waited(session, request, decided, deadline_ns)
                finally:
                    self._wait_with(account, -length_bytes)
            else:
                for place, _ in decided.waits:
                    decided.answers[place] = _BUSY
        answers = decided.answers
        refused = [answer.status for answer in answers if answer.status is not Status.OK]
        self._parts.meters.puts_ended(account.name, refused)
        return Reserved(tuple(answers))

    async def _waited(
        self, session: Session, request: Reserve, decided: _Decided, deadline_ns: int
    ) -> _Decided:
        """What is decided once there was room, if there was; and what was flushed meanwhile."""
        patience_ns = min(deadline_ns, self._parts.now_ns() + PUT_ROOM_WAIT_NS)
        while decided.is_starved:
            # Nothing to commit that would make room: wait for what others have under way.
            if not await self._room_for_one(session, decided.no_room_bytes, patience_ns):
                break
            decided = await self._decide(session, request, deadline_ns, decided.not_admitted)
        held = sum(answer.status is Status.OK for answer in decided.answers)
        for place, flushing in decided.waits:
            if await self._await_durable(session, flushing, deadline_ns, held) is not Status.OK:
                decided.answers[place] = _BUSY
        return decided

    def _may_wait(self, account: Account, length_bytes: int) -> bool:
        """Whether a RESERVE may be kept while it waits: a host may have hundreds under way."""
        held, of_free = self._waiting.get(account.stream, 0), self._parts.accounts.of_free(account)
        return self._all_waiting.admits(held, length_bytes, 0, of_free)

    def _wait_with(self, account: Account, length_bytes: int) -> None:
        """So much is kept from now on; below 0: no longer."""
        self._all_waiting.take(length_bytes)
        left = self._waiting.get(account.stream, 0) + length_bytes
        if left:
            self._waiting[account.stream] = left
        else:
            del self._waiting[account.stream]

    async def _room_for_one(self, session: Session, record_bytes: int, until_ns: int) -> bool:
        """Wait until the put budget would take a record; False when `until_ns` comes first. It is
        asked at once: others had their turns since the record was looked at."""
        parts, account = self._parts, session.account
        again = False
        while (left_ns := until_ns - parts.now_ns()) > 0:
            alone = len(parts.accounts.by_name) == 1
            if parts.put_budget.judge(account, record_bytes, alone=alone) is not Status.BUSY:
                return True
            if not await parts.room.wait(account, left_ns, Room.RESERVE, again=again):
                return False
            again = True
        return False

    async def _decide(
        self,
        session: Session,
        request: Reserve,
        deadline_ns: int,
        not_admitted: Collection[int] = (),
    ) -> _Decided:
        """An answer per item. `not_admitted` were offered before by the same request.

        After the first that finds no room no further one is looked into: they are BUSY, or EXISTS.
        """
        decided = _Decided(set(not_admitted))
        try:
            await self._decide_each(session, request, deadline_ns, decided)
        except BaseException:  # nobody will hear of what was reserved so far
            for answer in decided.answers:
                reserved = self.open.get((session.number, answer.put_id))
                if answer.status is Status.OK and reserved is not None:
                    self.close(reserved)
            raise
        return decided

    async def _decide_each(
        self, session: Session, request: Reserve, deadline_ns: int, decided: _Decided
    ) -> None:
        """Item by item, into `decided`."""
        namespace = session.namespace(request.handle)
        session.data_path()
        parts, items, doomed = self._parts, request.items, self._keycare.drop_if_doomed
        answers, full, start = decided.answers, False, 0
        while start < len(items):
            left = (len(items) - start) * turns.ITEM_COST
            if start:
                await parts.turns.loop.take(session.account, turns.LOOP_TURN_COST, PUTS)
            stretch = parts.turns.loop.extend(session.account, left)
            most = stretch << turns.KEY_COST_SHIFT if full else max(1, stretch // turns.ITEM_COST)
            part = items[start : start + most]
            keys = b"".join(item.key for item in part)
            slots = parts.engine.index.lookup(namespace.namespace_id, keys).tolist()
            for place, (item, slot) in enumerate(zip(part, slots, strict=True), start):
                if slot >= 0 and not doomed(namespace.namespace_id, slot):
                    answers.append(Reserved.Item(Status.EXISTS))
                    flushing = self._durable.get(slot)
                    waited_for = request.ack is Ack.DURABLE or slot in self._following
                    if flushing is not None and waited_for:
                        decided.waits.append((place, flushing))
                elif full or (namespace.namespace_id, item.key) in self.wanted:
                    answers.append(_BUSY)  # or someone else is storing it right now
                elif place in decided.not_admitted:
                    answers.append(_NOT_ADMITTED)
                else:
                    answer = self._reserve_one(session, namespace, item, request.ack, deadline_ns)
                    if full := answer.status is Status.BUSY:
                        decided.no_room_bytes = self._record_bytes(namespace, item)
                    elif answer.status is Status.NOT_ADMITTED:
                        decided.not_admitted.add(place)
                    answers.append(answer)
            start += len(part)

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
        record_bytes = self._record_bytes(namespace, item)
        alone = len(parts.accounts.by_name) == 1
        status = parts.put_budget.admit(session.account, record_bytes, alone=alone)
        if status is not Status.OK:
            return Reserved.Item(status)
        # Asked last: a block that had no room must not count as touched when it comes again.
        owner, weight = session.account.stream, session.account.weight
        if not parts.admission.admit(
            place, item.plain_bytes, parts.now_ns(), owner=owner, weight=weight, alone=alone
        ):
            parts.put_budget.refund(session.account, record_bytes)
            parts.history.record(*place, Reason.NOT_ADMITTED, parts.unix_ns(), owner)
            return _NOT_ADMITTED
        at_host = namespace.host_sealed or not session.data_path().capabilities.private
        version, salt, block_key = 0, b"", None
        if not namespace.host_sealed:
            version, salt = session.tenant.active_version, self._salts.new()
            block_key = derive_block_key(session.tenant.active_dek, salt)
            self._keycare.reserved(session, version)
        reservation = Reservation(
            session.next_id(), session, namespace, item, ack, deadline_ns, record_bytes, version,
            salt, block_key, at_host, min(deadline_ns, parts.now_ns() + COMMIT_WAIT_NS_MAX),
        )  # fmt: skip
        self._enter(reservation)
        if not at_host or block_key is None:
            return Reserved.Item(Status.OK, version, reservation.put_id)
        return Reserved.Item(
            Status.OK, version, reservation.put_id, salt, block_key.key, block_key.commitment
        )

    def _record_bytes(self, namespace: OpenedNamespace, item: PutItem) -> int:
        """The longest record that a block can become."""
        tokens = len(item.token_ids_u32le) // 4
        if namespace.host_sealed:  # and may carry token ids that nobody was told of
            tokens = limits.TOKENS_PER_BLOCK_MAX
        chunk_bytes = self._parts.config.sealing.chunk_bytes
        return _record_bytes_max(item.plain_bytes, chunk_bytes, tokens, len(item.engine_key))

    def _enter(self, reservation: Reservation) -> None:
        number, put_id = reservation.session.number, reservation.put_id
        self.open[number, put_id] = reservation
        self._of_session.setdefault(number, {})[put_id] = reservation
        place = (reservation.namespace.namespace_id, reservation.item.key)
        self.wanted[place] = reservation
        self._remembering.hold(place[0])
        heapq.heappush(self._deadlines, (reservation.commit_by_ns, (number, put_id)))
        if len(self._deadlines) > 2 * len(self.open) + STALE_DEADLINES_MAX:
            self._deadlines = [row for row in self._deadlines if row[1] in self.open]
            heapq.heapify(self._deadlines)

    def committed(self, reservation: Reservation) -> None:
        """Its COMMIT has come: a second one finds nothing."""
        number, put_id = reservation.session.number, reservation.put_id
        if self.open.pop((number, put_id), None) is None:
            return
        mine = self._of_session[number]
        del mine[put_id]
        if not mine:
            del self._of_session[number]

    def held_by(self, session: Session) -> int:
        """Reservations of it without a COMMIT yet."""
        return len(self._of_session.get(session.number, ()))

    def close_session(self, session: Session) -> None:
        """Give up what the session reserved and did not commit."""
        for reservation in list(self._of_session.get(session.number, {}).values()):
            self.close(reservation)

    def expire(self, now_ns: int) -> None:
        """Give up reservations whose time passed without a COMMIT."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            reservation = self.open.get(heapq.heappop(self._deadlines)[1])
            if reservation is not None:
                self.close(reservation)

    def close(self, reservation: Reservation) -> None:
        """The put ended, one way or another: its budget and its name are free again."""
        if reservation.closed:
            return
        reservation.closed = True
        self._remembering.let_go(reservation.namespace.namespace_id)
        if reservation.block_key is not None:
            self._keycare.put_ended(reservation.session, reservation.dek_version)
        self.committed(reservation)
        place = (reservation.namespace.namespace_id, reservation.item.key)
        if self.wanted.get(place) is reservation:
            del self.wanted[place]
        self._parts.put_budget.refund(reservation.session.account, reservation.record_bytes_max)
        if not reservation.appended:
            owner = reservation.session.account.stream
            self._parts.admission.give_up(reservation.item.plain_bytes, owner=owner)
        self._parts.room.notify()
        if reservation.session.number not in self._of_session:
            self._on_none_left(reservation.session)


@functools.lru_cache(maxsize=256)  # blocks of one engine are all alike
def _record_bytes_max(
    plain_bytes: int, chunk_bytes: int, meta_tokens: int, engine_key_bytes: int
) -> int:
    sealed = sealed_bytes_max(
        plain_bytes, chunk_bytes=chunk_bytes, meta_tokens=meta_tokens,
        engine_key_bytes=engine_key_bytes,
    )  # fmt: skip
    return extent_bytes(sealed)
