"""One control session with one shard: asyncio I/O around the sans-IO `ClientSession`.

Invariants:
- every request ends: answered, failed, or given up at its deadline; a lost session fails all of
  them at once with DISCONNECTED;
- a request given up stays known until its answer comes: late grants are released, late
  reservations returned, and staging memory behind a late commit is not reused before it;
- at most WRITE_QUEUE_BYTES_MAX of requests wait for a peer that does not read, then no more are
  accepted;
- of the requests that may be in flight, work leaves one to PING: a daemon that is merely full can
  still say that it is there;
- a request waits for its place until its deadline, in the order of the callers, and is BUSY only
  then; reservations that nobody uses go back as soon as there is a place.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

from entresol_client.answers import Call, GrantSink, Line
from entresol_client.results import RequestFailedError
from entresol_proto import limits
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.status import ProtocolError, Status
from entresol_proto.transports import abort
from entresol_proto.wire.data import Commit, Fetch, Grant, Release, Reserved
from entresol_proto.wire.opening import ErrorReply, Goodbye, NamespaceOpened, OpenNamespace, Ping
from entresol_proto.wire.session import ClientSession, Message, Received, State

log = logging.getLogger("entresol.client")

RELEASE_DELAY_S = 0.001  # how long a finished lease may wait for company
# From so much on leases go with the next request; fewer wait for company.
RELEASE_AHEAD_BYTES, RELEASE_AHEAD_COUNT = 256 * limits.KIB, 16
# They go behind a FETCH, which is answered first, while all that is leased is not more: a session
# may hold several times as much. Else before it, because it may need the room.
RELEASE_BEHIND_BYTES_MAX = 48 * limits.MIB
RECEIVED_BYTES_MAX = limits.CARRIED_BYTES_MAX  # taken from the stream at once
WRITE_QUEUE_BYTES_MAX = 2 * limits.FRAME_PAYLOAD_BYTES_MAX
PINGS_ROOM = 1  # requests in flight that are kept for PING
CLOSED_BY_DAEMON, PROTOCOL_BROKEN = "closed by the daemon", "protocol error"  # why it is lost
_NOTHING = RemoteSpan(0, 0, 0)

Report = tuple[int, int, Status]  # lease id, index in the FETCH, what was wrong


class Connection(asyncio.BufferedProtocol):
    """The control stream. Made by `handshake.connect`; ends by itself when the stream does.

    Attributes:
        session: the protocol machine.
        lost: done when the stream is gone; its result says why, in words.
        ending: set when it takes no new work any more: a goodbye was said, or it is lost.
        last_received_ns: when the peer last said anything.
        late_grants: leases released because nobody waited for them any more.
        on_request: told the type and number of every request, for traces; None: nobody is.
    """

    def __init__(self) -> None:
        self.session = ClientSession(now_ns=time.monotonic_ns())
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ending = asyncio.Event()
        self.last_received_ns = time.monotonic_ns()
        self.late_grants = 0
        self.on_request: Callable[[str, int], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, Call | GrantSink] = {}
        self._writable = asyncio.Event()
        self._writable.set()
        self._places = Line()
        self._unused: list[int] = []  # reservations to give up
        self._namespaces: dict[bytes, asyncio.Task[NamespaceOpened]] = {}
        self._release_ids: list[int] = []
        self._release_bytes = 0  # that those hold
        self.held_bytes = 0  # by all leases, those included; who takes one adds it
        self._reports: list[Report] = []
        self._flush_due = False
        self._why_closed = CLOSED_BY_DAEMON
        # Of its own: for each read a loop would allocate as much, and give most of it back.
        self._received = memoryview(bytearray(RECEIVED_BYTES_MAX))

    # asyncio.BufferedProtocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_QUEUE_BYTES_MAX)

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Where bytes are received, all that have come at once."""
        return self._received

    def buffer_updated(self, length_bytes: int) -> None:
        self.data_received(self._received[:length_bytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Take bytes of the peer; nothing of them is kept."""
        now_ns = self.last_received_ns = time.monotonic_ns()
        try:
            for received in self.session.receive(data, now_ns):
                self._dispatch(received)
        except ProtocolError as error:
            self.drop(f"{PROTOCOL_BROKEN}: {error}")
            return
        self._return_unused()
        self._places.move(self._has_place)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        self._places.move(self._has_place)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc else self._why_closed)
        self._transport = None  # a transport keeps its protocol's methods: both would stay

    # Requests --------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """True when new work may be sent."""
        return self.session.state is State.OPEN

    @property
    def draining(self) -> bool:
        """True when the daemon said goodbye: what is under way is finished, nothing new."""
        return self.session.state is State.DRAINING

    @property
    def ssl_object(self) -> ssl.SSLObject | None:
        """TLS details of the stream."""
        found = self._transport.get_extra_info("ssl_object") if self._transport else None
        return found if found is not None else None

    async def request(
        self,
        message: Message,
        deadline_ns: int,
        *,
        sent: Callable[[], None] | None = None,
        settled: Callable[[], None] | None = None,
    ) -> Any:
        """Send a request, wait for its one answer.

        `sent` runs when it is on its way: never if it could not be sent. `settled` runs once the
        daemon is known to be done with the request: at its answer, even after the deadline, or at
        once if it could not be sent. Not when the session is lost.

        Raises: RequestFailedError: what the daemon answered, DEADLINE, DISCONNECTED, or BUSY when
        too many requests were in flight until the deadline.
        """
        try:
            await self._place(message, deadline_ns)
            call = Call(settled)
            request_id = self._send(message, call)
            if sent is not None:
                sent()
        except BaseException:
            if settled is not None:
                settled()
            raise
        loop = asyncio.get_running_loop()
        left_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        timer = loop.call_later(left_s, _expire, call.future)
        try:
            answer = await call.future
        except asyncio.CancelledError:
            if call.future.done() and not call.future.cancelled():
                self._late(call.future.result())  # answered and cancelled in one turn of the loop
            raise
        finally:
            timer.cancel()
            if request_id in self._pending:
                call.future.cancel()
                self.session.abandon(request_id)
        if isinstance(answer, RequestFailedError):
            raise answer.anew()
        return answer

    async def fetch(self, message: Message, deadline_ns: int) -> tuple[int, GrantSink]:
        """Send a FETCH; end it with `end_fetch`. Raises: RequestFailedError."""
        await self._place(message, deadline_ns)
        sink = GrantSink()
        return self._send(message, sink), sink

    def end_fetch(self, request_id: int, sink: GrantSink) -> None:
        """The caller reads no more grants of this request; what comes is released."""
        for grant in sink.leftovers():
            self._refuse(grant)
        if request_id in self._pending:
            self.session.abandon(request_id)

    def _post(self, message: Message) -> None:
        """Send a request whose answer nobody needs. Dropped when the session is gone."""
        call = Call(None)
        try:
            request_id = self._send(message, call)
        except RequestFailedError:
            return
        call.future.cancel()
        self.session.abandon(request_id)

    def release(
        self, lease_id: int, reports: Iterable[Report] = (), *, held_bytes: int = 0
    ) -> None:
        """Give back a lease that holds so much; sent after RELEASE_DELAY_S, or with the next
        request if that comes sooner and it is much: behind a FETCH that needs no room of it."""
        self._release_ids.append(lease_id)
        self._release_bytes += held_bytes
        self._reports.extend(reports)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_later(RELEASE_DELAY_S, self._flush_releases)

    async def ping(self, deadline_ns: int) -> int:
        """Round trip time, ns. Raises: RequestFailedError."""
        token = os.urandom(8)
        begun_ns = time.monotonic_ns()
        pong = await self.request(Ping(token), deadline_ns)
        if pong.token != token:
            self.drop("pong with another token")
            raise RequestFailedError(Status.DISCONNECTED)
        return time.monotonic_ns() - begun_ns

    async def namespace(self, canonical: bytes, deadline_ns: int) -> NamespaceOpened:
        """The handle of a namespace on this session, opened once. Raises: RequestFailedError."""
        while True:
            task = self._opening(canonical, deadline_ns)
            if task.done() and not task.cancelled() and task.exception() is None:
                return task.result()  # opened before, as a rule
            left_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
            done, _ = await asyncio.wait((task,), timeout=left_s)
            if not done:
                raise RequestFailedError(Status.DEADLINE)
            if task.cancelled():
                raise RequestFailedError(Status.DISCONNECTED)
            error = task.exception()
            if not isinstance(error, RequestFailedError):
                return task.result()
            if error.status is not Status.DEADLINE or time.monotonic_ns() >= deadline_ns:
                raise error.anew()
            # It was asked for by somebody who had less time than this caller: ask again.

    def _opening(self, canonical: bytes, deadline_ns: int) -> asyncio.Task[NamespaceOpened]:
        """The task that opens it, or has. Of the session: the first caller's cancellation must not
        fail the others."""
        task = self._namespaces.get(canonical)
        if task is not None and not (task.done() and (task.cancelled() or task.exception())):
            return task
        until_ns = max(deadline_ns, time.monotonic_ns() + limits.DEADLINE_NS_DEFAULT)
        opening = self.request(OpenNamespace(canonical), until_ns)
        task = asyncio.get_running_loop().create_task(opening)
        self._namespaces[canonical] = task
        task.add_done_callback(functools.partial(self._opened, canonical))
        return task

    def _opened(self, canonical: bytes, task: asyncio.Task[NamespaceOpened]) -> None:
        """What was refused is not kept: there may be any number of those."""
        failed = task.cancelled() or task.exception() is not None
        if failed and self._namespaces.get(canonical) is task:
            del self._namespaces[canonical]

    # Ending ----------------------------------------------------------------------------------

    def drop(self, reason: str) -> None:
        """End the session now. Idempotent."""
        abort(self._transport)
        self._end(reason)

    async def close(self) -> None:
        """Say goodbye, send what is queued for a moment, end. Idempotent."""
        self._flush_releases()
        if not self.lost.done() and self._transport is not None:
            with contextlib.suppress(ProtocolError):  # not far enough for a goodbye
                self._write(self.session.send(Goodbye())[1])
            self._why_closed = "closed by this client"
            if not self._transport.is_closing():
                self._transport.close()
            await asyncio.wait((self.lost,), timeout=0.2)
        self.drop(self._why_closed)
        tasks = [task for task in self._namespaces.values() if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _end(self, reason: str) -> None:
        self.session.close()
        if not self.lost.done():
            self.lost.set_result(reason)
        self.ending.set()
        self._writable.set()
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            entry.fail(RequestFailedError(Status.DISCONNECTED, reason))
        self._unused.clear()
        self._places.move(self._has_place)

    # Inside ----------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        """Work in flight takes every place but that of PING."""
        session = self.session
        return len(session.in_flight) >= max(1, session.requests_in_flight_max - PINGS_ROOM)

    def _has_place(self) -> bool:
        """Work may be sent, or learns at once that it may not."""
        if self.session.state is State.CLOSED:
            return True
        return self._writable.is_set() and not self._is_full()

    async def _place(self, message: Message, deadline_ns: int) -> None:
        """Wait while the peer does not read, and for a place among the requests in flight.

        Raises: RequestFailedError at the deadline: DEADLINE, or BUSY where every place is taken.
        """
        if not isinstance(message, Ping):
            if await self._places.wait(self._has_place, deadline_ns):
                return
            if self._writable.is_set():
                raise RequestFailedError(Status.BUSY, "too many requests in flight")
        elif self._writable.is_set():
            return
        else:
            left_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._writable.wait()
                return
        raise RequestFailedError(Status.DEADLINE, "the daemon reads nothing")

    def _send(self, message: Message, entry: Call | GrantSink) -> int:
        if self.draining and not isinstance(message, Commit):  # it ends what was begun before
            raise RequestFailedError(Status.DRAINING)
        try:
            request_id, raw = self.session.send(message)
        except ProtocolError as error:
            raise RequestFailedError(error.status, str(error)) from None
        self._pending[request_id] = entry
        if self.on_request is not None:
            self.on_request(message.TYPE.name, request_id)
        if (
            self._release_bytes >= RELEASE_AHEAD_BYTES
            or len(self._release_ids) >= RELEASE_AHEAD_COUNT
            or self._reports
        ):
            behind = isinstance(message, Fetch) and not self._reports
            if behind and self.held_bytes <= RELEASE_BEHIND_BYTES_MAX:
                raw += self._encode_releases()  # it is answered first
            else:
                raw = self._encode_releases() + raw
        self._write(raw)
        return request_id

    def _write(self, raw: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(raw)
        if transport.get_write_buffer_size() > 2 * WRITE_QUEUE_BYTES_MAX:
            self.drop("the daemon reads nothing")

    def _dispatch(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Goodbye):
            log.info("event=goodbye status=%s reason=%r", message.status.label, message.message)
            self.ending.set()
            if self.session.state is State.CLOSED:
                self.drop(message.message or message.status.label)  # it never opened
            return
        wanted = self.session.settle(received)
        entry = self._pending.get(received.request_id)
        if entry is None:  # only an ERROR of the whole session has no request
            assert isinstance(message, ErrorReply), "an answer without a request got through"
            self.drop(f"{message.status.label}: {message.message}")
            return
        if not wanted or (isinstance(entry, Call) and entry.future.done()):
            self._late(message)
            if isinstance(entry, Call):
                entry.settle()
            last = getattr(message, "final", True)
        else:
            last = entry.deliver(message)
        if last:
            self._pending.pop(received.request_id, None)

    def _late(self, message: Any) -> None:
        """An answer to a request that was given up: hand back what it gives."""
        if isinstance(message, Grant):
            self._refuse(message)
        elif isinstance(message, Reserved):
            self.give_up([item.put_id for item in message.items if item.status is Status.OK])

    def _refuse(self, grant: Grant) -> None:
        if grant.items and not grant.carried:
            self.late_grants += 1
            self.held_bytes += grant.span_bytes
            self.release(grant.lease_id, held_bytes=grant.span_bytes)

    def give_up(self, put_ids: list[int]) -> None:
        """Return reservations unused, now or when there is a place for it."""
        self._unused += put_ids
        self._return_unused()

    def _return_unused(self) -> None:
        while self._unused and not self._is_full():
            some = self._unused[: limits.BLOCKS_PER_PUT_MAX]
            del self._unused[: len(some)]
            self._post(Commit(tuple((put_id, _NOTHING) for put_id in some)))

    def _flush_releases(self) -> None:
        self._flush_due = False
        if raw := self._encode_releases():
            self._write(raw)

    def _encode_releases(self) -> bytes:
        if not self._release_ids and not self._reports:
            return b""
        ids, self._release_ids = self._release_ids, []
        self.held_bytes -= self._release_bytes
        self._release_bytes = 0
        reports, self._reports = self._reports, []
        step = limits.BLOCKS_PER_FETCH_MAX
        parts: list[bytes] = []
        for at in range(0, max(len(ids), len(reports)), step):
            if self.session.state not in (State.OPEN, State.DRAINING):
                break
            part = Release(tuple(ids[at : at + step]), tuple(reports[at : at + step]))
            parts.append(self.session.send(part)[1])
        return b"".join(parts)


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(RequestFailedError(Status.DEADLINE))
