"""One control connection's messages → the shard, and its answers back. No sockets.

Bytes come in through `receive`, go out through the `write` callable. Short requests are answered in
place, the others run as tasks of this session and end with it.

Invariant: every request is answered exactly once (FETCH: ends with one final GRANT), by its answer
or by an ERROR; an unexpected exception is logged and answered as INTERNAL, never swallowed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from entresol_daemon.core.accounts import Account
from entresol_daemon.core.fairness import Unit
from entresol_daemon.shard import lookups
from entresol_daemon.shard.costing import cost_of, reading_cost_of, size_of
from entresol_daemon.shard.sessions import Session
from entresol_daemon.shard.shard import Shard
from entresol_daemon.traces import Trace
from entresol_proto import limits
from entresol_proto.eager import task_of
from entresol_proto.fabric.base import FabricKind, Offer
from entresol_proto.ids import TenantName
from entresol_proto.status import EntresolError, ProtocolError, QuotaError, Status
from entresol_proto.wire import data, opening, quote
from entresol_proto.wire.frames import FrameType
from entresol_proto.wire.session import Message, Received, ServerSession, State

Work = Callable[[], Coroutine[Any, Any, None]]
"""Begins when it is called: a task that ends before its first step has begun nothing."""

BACKLOG_BYTES_MAX = 256 * limits.KIB  # of one session's requests that wait for their turn
CARRIED_AHEAD_BYTES_MAX = 128 * limits.KIB  # answers on their way beside which blocks are carried
READ_FREE_COST = 64  # of messages read: whenever it is more, that takes a turn on the loop
READ_COST_SHIFT = 10  # about a microsecond for a KiB
READ_BYTES = 1 * limits.KIB  # looked at together, unless they are of one message

log = logging.getLogger("entresol.session")

_TASK_NAMES = {kind: f"session {kind.name}" for kind in FrameType}
_NEW_WORK = (data.Fetch, data.Reserve, data.Stage, opening.OpenNamespace)


def _nothing(*_: object) -> None:
    """For a request whose end nobody waits for, a caller that cannot hold bytes back, and in the
    place of a connection that is no more."""


class SessionHandler:
    """The daemon's end of one session. Call `finish` exactly once, when the connection is gone."""

    def __init__(
        self,
        shard: Shard,
        tenant: TenantName,
        *,
        write: Callable[[bytes], None],
        close: Callable[[], None],
        read_on: Callable[[bool], None] = _nothing,
        queued_bytes: Callable[[], int] = int,  # none
    ) -> None:
        """`read_on(False)` asks for no more bytes until `read_on(True)`: enough work waits.
        `queued_bytes`: of answers that the peer has not taken."""
        self._shard = shard
        self._tenant = tenant
        self._write = write
        self._close = close
        self._read_on = read_on
        self._queued_bytes = queued_bytes
        self._protocol = opening.PROTOCOL_MIN  # until it is chosen
        self._backlog_bytes = 0  # of requests that wait for their turn on the loop
        self._holds = 0  # reasons not to read on
        self._unread = bytearray()  # came before it was asked to stop
        self._turn: Unit[asyncio.Future[None]] | None = None  # to read on: waited for
        self._answers: list[bytes] | None = None  # of what is being read: they leave together
        self._early = False  # some of them left before all of it was looked at: once
        self._unpaid = self._unpaid_bytes = 0  # read since the last turn for it
        self._machine = ServerSession(now_ns=shard.parts.now_ns())
        self._tasks: set[asyncio.Task[None]] = set()
        self._offers: list[Offer] = []
        self._attaching = False
        self._finished = False
        self.session: Session | None = None

    def deadline_ns(self) -> int | None:
        """When `handle_timer` wants to be called."""
        return self._machine.deadline_ns()

    def handle_timer(self) -> None:
        """End a session that is not opened in time."""
        try:
            self._machine.handle_timer(self._shard.parts.now_ns())
        except ProtocolError as error:
            self._refuse(error)

    def receive(self, raw: bytes | bytearray | memoryview) -> None:
        """Take bytes of the host; a protocol error ends the connection."""
        if self._finished or self._machine.state is State.CLOSED:
            return
        if self._turn is not None:
            self._unread += raw
            return
        self._answers, self._early = [], False
        try:
            self._read(raw)
        finally:
            self._flush()

    def _flush(self, further: list[bytes] | None = None) -> None:
        """Send the answers to what was read: in one piece, which costs about as much as one."""
        answers, self._answers = self._answers, further
        if answers:
            self._write(answers[0] if len(answers) == 1 else b"".join(answers))

    def _read(self, raw: bytes | bytearray | memoryview) -> None:
        """Take what has come, message by message; for many of them the tenant's turns are taken.
        Otherwise those that ask for no turn would be its own way to have all of the loop."""
        at, size = 0, len(raw)
        if size > READ_BYTES:
            raw = memoryview(raw)
        while at < size and self._machine.state is not State.CLOSED:
            end = size
            if size - at > READ_BYTES:
                end = min(size, at + max(READ_BYTES, self._machine.missing_bytes))
            piece = raw[at:end] if end - at < size else raw
            try:
                received = self._machine.receive(piece, self._shard.parts.now_ns())
            except ProtocolError as error:
                self._refuse(error)
                return
            self._unpaid_bytes += end - at
            at = end
            for item in received:
                self._dispatch(item)
                self._unpaid += reading_cost_of(item.message)
            cost = self._unpaid + (self._unpaid_bytes >> READ_COST_SHIFT)
            if cost > READ_FREE_COST and self.session is not None:
                self._unpaid = self._unpaid_bytes = 0
                if not self._reads_on(self.session.account, cost):
                    self._unread += raw[at:]
                    return

    def _reads_on(self, account: Account, cost: int) -> bool:
        """Much was read: so much more is read only when it is this tenant's turn. False when that
        is not now."""
        loop_turns = self._shard.parts.turns.loop
        if loop_turns.enter(account, cost):
            return True
        try:
            self._turn = loop_turns.ask(account, cost)
        except QuotaError:  # too much waits: then this does not
            return True
        self._hold(1)
        self._turn.item.add_done_callback(self._turn_to_read)
        return False

    def _turn_to_read(self, _turn: object) -> None:
        self._turn = None
        if not self._finished:
            raw, self._unread = self._unread, bytearray()
            self.receive(raw)
        self._hold(-1)

    def say_goodbye(self, status: Status, message: str) -> None:
        """Tell the host to take new work elsewhere."""
        if self._machine.state is State.OPEN:
            self._send(opening.Goodbye(status, message), 0)
        elif self._machine.state is not State.DRAINING:
            self._close()  # not open yet: there is nothing to finish

    async def finish(self) -> None:
        """The connection is gone: end the tasks, the offers and the session."""
        if self._finished:
            return
        self._finished = True
        self._machine.close()
        if self._turn is not None:
            self._turn.drop()
            self._turn.item.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._withdraw()
        try:
            if self.session is not None:
                await self._shard.close_session(self.session)
        finally:
            # They are the connection's, which has this: with its buffers, both would stay until
            # the collector looks at what is old, which is seldom.
            self._write = self._close = self._read_on = _nothing
            self._queued_bytes = int

    def _refuse(self, error: ProtocolError) -> None:
        metrics = self._shard.parts.metrics
        metrics.sessions_refused[error.status].inc()
        log.warning(
            "event=protocol_error tenant=%s status=%s reason=%s",
            self._tenant, error.status.label, error,
        )  # fmt: skip
        self._end()

    def _end(self) -> None:
        """Close the connection, after what is answered already."""
        self._flush()
        self._close()

    def _dispatch(self, received: Received) -> None:
        message, request_id = received.message, received.request_id
        if isinstance(message, data.Release):
            if self._answers and not self._early:  # who asked before it waits; this does not
                self._early = True
                self._flush([])
            if self.session is not None:
                self._shard.gets.release(self.session, message)
            return
        if isinstance(message, opening.Goodbye):
            return
        draining = self._shard.draining or self._machine.state is State.DRAINING
        if draining and isinstance(message, _NEW_WORK):
            error = EntresolError("draining", hint="ask another shard", status=Status.DRAINING)
            self._fail(request_id, message.TYPE, error)
            return
        account = self.session.account if self.session is not None else None
        leave = self._arrive(request_id, message, account)
        if leave is None:
            return
        trace = self._trace(request_id, message)
        cost, rank = cost_of(message)
        # A PING asks whether anybody is here: its answer waits for nothing.
        entered = (
            account is None
            or isinstance(message, opening.Ping)
            or self._shard.parts.turns.loop.enter(account, cost)
        )
        try:
            answer = self._answer_now(message, traced=trace is not None) if entered else None
        except EntresolError as error:
            leave(None)
            self._fail(request_id, message.TYPE, error)
            return
        except Exception as error:
            leave(None)
            self._fail_unexpectedly(request_id, message.TYPE, error)
            return
        if answer is not None:
            leave(None)
            self._send(answer, request_id)
            self._shard.parts.metrics.requests[message.TYPE, Status.OK].inc()
            if trace is not None:
                trace.end(Status.OK)
            return
        arrived_ns = self._shard.parts.now_ns()
        work: Work = functools.partial(self._work, request_id, message, arrived_ns, trace)
        if not entered:
            assert account is not None
            try:
                asked = self._shard.parts.turns.loop.ask(account, cost, rank)
            except QuotaError as error:  # too much waits
                leave(None)
                self._fail(request_id, message.TYPE, error)
                return
            work = functools.partial(self._in_turn, asked, size_of(message), work)
        now = entered and isinstance(message, data.Fetch)  # the drive has work meanwhile
        answering = self._guard(request_id, message.TYPE, work, trace)
        task = task_of(answering, name=_TASK_NAMES[message.TYPE], now=now)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(leave)

    def _arrive(
        self, request_id: int, message: Any, account: Account | None
    ) -> Callable[[object], None] | None:
        """What to call when the request is over; None when it was refused, for a frame's price."""
        if account is None or not isinstance(message, data.Fetch | data.Stage):
            return _nothing
        door = self._shard.gets.door
        try:
            door.arrive(account, len(message.keys) // limits.WIRE_KEY_BYTES)
        except EntresolError as error:
            self._fail(request_id, message.TYPE, error)
            return None
        return lambda _over: door.depart(account)

    async def _in_turn(
        self, asked: Unit[asyncio.Future[None]], size_bytes: int, work: Work
    ) -> None:
        """Begin a request when its tenant's turn has come; read no more than so much ahead."""
        self._wait_for(size_bytes)
        try:
            await self._shard.parts.turns.loop.until(asked)
        finally:
            self._wait_for(-size_bytes)
        await work()

    def _wait_for(self, more_bytes: int) -> None:
        before, self._backlog_bytes = self._backlog_bytes, self._backlog_bytes + more_bytes
        if before <= BACKLOG_BYTES_MAX < self._backlog_bytes:
            self._hold(1)
        elif self._backlog_bytes <= BACKLOG_BYTES_MAX < before:
            self._hold(-1)

    def _hold(self, change: int) -> None:
        before, self._holds = self._holds, self._holds + change
        if (before == 0) is not (self._holds == 0):
            self._read_on(self._holds == 0)

    def _answer_now(self, message: Any, *, traced: bool) -> Message | None:
        if isinstance(message, opening.Ping):
            return opening.Pong(message.token)
        session = self.session
        if session is None:
            return None
        if isinstance(message, data.Fetch):
            gets, quoting = self._shard.gets, self._shard.quoting
            if traced or quoting.times(session):  # which look at the way that every get goes
                return None
            carry = message.carry and self._may_carry()
            return gets.resident.fetch_now(session, message, carry=carry)
        if isinstance(message, data.Exists) and lookups.at_once(self._shard.parts, message.keys):
            return lookups.exists_now(self._shard.parts, session, message)
        if isinstance(message, data.Touch) and lookups.touches_at_once(self._shard.parts, message):
            return data.Done(lookups.touch_now(self._shard.parts, session, message))
        return None

    def _may_carry(self) -> bool:
        """Whether an answer may have blocks in it. What waits to be sent is charged to nobody, so
        that of one session is not much, however many it asks for and does not read."""
        ahead_bytes = sum(map(len, self._answers or ()))
        knows, free = self._protocol >= opening.PROTOCOL_CARRY, not self._queued_bytes()
        return knows and free and ahead_bytes <= CARRIED_AHEAD_BYTES_MAX

    def _trace(self, request_id: int, message: Any) -> Trace | None:
        """The trace of a request, if it is to have one."""
        parts, session = self._shard.parts, self.session
        if (traces := parts.meters.traces) is None or session is None:
            return None
        return traces.of_request(session, self._tenant, request_id, message, parts.unix_ns)

    async def _guard(
        self, request_id: int, kind: FrameType, work: Work, trace: Trace | None
    ) -> None:
        status = Status.DISCONNECTED  # unless it comes to its end
        try:
            status = await self._guarded(request_id, kind, work)
        finally:
            if trace is not None:
                trace.end(status)

    async def _guarded(self, request_id: int, kind: FrameType, work: Work) -> Status:
        metrics = self._shard.parts.metrics
        started_ns = self._shard.parts.now_ns()
        try:
            await work()
        except EntresolError as error:
            self._fail(request_id, kind, error)
            return error.status
        except Exception as error:
            self._fail_unexpectedly(request_id, kind, error)
            return Status.INTERNAL
        metrics.requests[kind, Status.OK].inc()
        metrics.request_seconds[kind].observe((self._shard.parts.now_ns() - started_ns) / 1e9)
        return Status.OK

    async def _work(
        self, request_id: int, message: Any, arrived_ns: int, trace: Trace | None
    ) -> None:
        shard = self._shard
        if trace is not None:
            trace.event("begun")  # until then it waited for its tenant's turn
        if isinstance(message, opening.Hello):
            await self._greet(request_id, message)
            return
        session = self.session
        assert session is not None, "the machine lets nothing pass before HELLO"
        if isinstance(message, opening.Attach):
            await self._attach(session, request_id, message)
        elif isinstance(message, data.Fetch):
            send = functools.partial(self._send, request_id=request_id)
            emit = shard.parts.meters.until_first_grant(send, arrived_ns, shard.parts.now_ns)
            emit = emit if trace is None else trace.watch(emit)
            await shard.gets.fetch(session, message, shard.quoting.watch(session, message, emit))
        elif isinstance(message, data.Exists):
            self._send(await lookups.exists(shard.parts, session, message), request_id)
        elif isinstance(message, data.Touch):
            self._send(data.Done(await lookups.touch(shard.parts, session, message)), request_id)
        elif isinstance(message, data.Reserve):
            self._send(await shard.puts.reserve(session, message), request_id)
        elif isinstance(message, data.Commit):
            self._send(await shard.puts.commit(session, message), request_id)
        elif isinstance(message, data.Stage):
            self._send(await shard.gets.stage(session, message), request_id)
        elif isinstance(message, quote.Quote):
            self._send(await shard.quoting.quote(session, message), request_id)
        elif isinstance(message, data.Explain):
            self._send(await shard.explain(session, message), request_id)
        elif isinstance(message, data.Forget):
            self._send(data.Done(await shard.forget(session, message)), request_id)
        elif isinstance(message, opening.OpenNamespace):
            self._send(shard.open_namespace(session, message.descriptor), request_id)
        else:
            raise AssertionError(f"no handler for {message!r}")

    async def _greet(self, request_id: int, hello: opening.Hello) -> None:
        shard, config = self._shard, self._shard.parts.config
        version = min(hello.protocol_max, opening.PROTOCOL_MAX)
        if version < max(hello.protocol_min, opening.PROTOCOL_MIN):
            raise EntresolError(
                f"host speaks protocol {hello.protocol_min}..{hello.protocol_max}, "
                f"this daemon {opening.PROTOCOL_MIN}..{opening.PROTOCOL_MAX}",
                hint="upgrade the older side",
                status=Status.UNSUPPORTED,
            )
        self._protocol = version
        known = shard.parts.accounts.by_name.get(self._tenant)
        weight = known.weight if known is not None else 1
        try:
            await shard.parts.turns.loop.greet(self._tenant, weight, shard.parts.now_ns())
        except QuotaError:
            shard.parts.metrics.queue_shed["hello"].inc()
            raise
        session = await shard.open_session(self._tenant, hello)
        self.session = session
        self._offers = shard.offers(session)
        self._send(
            opening.Welcome(
                protocol=version,
                session_id=session.session_id,
                incarnation=shard.incarnation,
                lease_ns=config.limits.lease_ns,
                frame_payload_bytes_max=limits.FRAME_PAYLOAD_BYTES_MAX,
                block_bytes_max=config.limits.block_bytes_max,
                blocks_per_fetch_max=limits.BLOCKS_PER_FETCH_MAX,
                requests_in_flight_max=limits.REQUESTS_IN_FLIGHT_MAX,
                host_id=shard.host_id,
                shard=config.shard.name,
                tenant=session.account.name,
                offers=tuple(self._offers),
            ),
            request_id,
        )

    async def _attach(self, session: Session, request_id: int, message: opening.Attach) -> None:
        metrics = self._shard.parts.metrics
        if message.kind != opening.NO_FABRIC:
            offer = next((o for o in self._offers if o.kind == message.kind), None)
            if offer is None:
                raise EntresolError(
                    f"fabric {message.kind} was not offered", status=Status.UNSUPPORTED
                )
            self._offers.remove(offer)
            await self._shard.attach(session, offer, message.reply)
            kind = FabricKind(message.kind)
            metrics.sessions[kind].inc()
            metrics.sessions_opened[kind].inc()
        self._withdraw()
        self._shard.opened(session)
        self._send(opening.Attached(message.kind), request_id)

    def _withdraw(self) -> None:
        offers, self._offers = self._offers, []
        for offer in offers:
            try:
                self._shard.fabrics[offer.kind].withdraw(offer)
            except Exception:  # the other offers, and the session, end all the same
                log.exception("event=withdraw_failed fabric=%s", offer.kind.label)

    def _fail_unexpectedly(self, request_id: int, kind: FrameType, error: Exception) -> None:
        text, hint = "internal error", "see the daemon's log"
        if isinstance(error, MemoryError):  # no bug; what was asked for may have been done in part
            text, hint = "out of memory", "give the daemon more, or a smaller [memory] dram_bytes"
            log.error("event=out_of_memory type=%s error=%s", kind.name.lower(), error)
        else:
            log.exception("event=request_failed type=%s", kind.name.lower())
        self._fail(request_id, kind, EntresolError(text, hint=hint))

    def _fail(self, request_id: int, kind: FrameType, error: EntresolError) -> None:
        self._shard.parts.metrics.requests[kind, error.status].inc()
        # A shard that sheds load must not spend what it saves on saying so.
        log.log(
            logging.DEBUG if error.status is Status.BUSY else logging.INFO,
            "event=request_refused tenant=%s type=%s status=%s reason=%s",
            self._tenant, kind.name.lower(), error.status.label, error,
        )  # fmt: skip
        text = Exception.__str__(error)
        self._send(opening.ErrorReply(error.status, text, error.hint), request_id)
        if kind is FrameType.HELLO:
            self._end()

    def _send(self, message: Message, request_id: int) -> None:
        if self._finished or self._machine.state is State.CLOSED:
            return
        raw = self._machine.send(message, request_id)
        send = self._write if self._answers is None else self._answers.append
        send(raw)
