"""One tcp connection of a session's data path: asks for the peer's bytes and serves ours.

Invariants:
- Payload lands in a caller's view only while that caller waits for it; afterwards the rest of it is
  received into scratch memory.
- Of what the peer asks for, at most DATA_QUEUE_BYTES_MAX plus one piece is handed to the transport
  at a time, and its requests are held as the bytes they came in, bounded in number. A peer that
  asks and does not receive costs that much memory and no more.
- Every piece looks its exposure up again, so a revoked one is served no further than the pieces
  that are already with the transport; `flushing` tells when those are gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol, cast

from entresol_proto import limits, native
from entresol_proto.fabric import framing
from entresol_proto.fabric.asking import Asked, Batch, Part
from entresol_proto.fabric.base import RemoteSpan, span_error
from entresol_proto.fabric.landing import Lander, Landing, OnLanded
from entresol_proto.fabric.serving import Serving, ServingTurns, Turn
from entresol_proto.status import ProtocolError, Status
from entresol_proto.transports import abort, write_now

_log = logging.getLogger("entresol.fabric")

_WRITTEN_NOW_BYTES_MIN = 128 * limits.KIB  # what is copied sooner than the lock is had again
_HIGH_WATER_BYTES = limits.DATA_QUEUE_BYTES_MAX // 2
_LOW_WATER_BYTES = limits.DATA_QUEUE_BYTES_MAX // 8


class StreamOwner(Protocol):
    """What a stream needs of its session. `turns`: to serve `peer`, with other sessions of it."""

    turns: ServingTurns
    peer: Hashable

    def exposed(self, rkey: int) -> memoryview | None:
        """The bytes the peer may read under `rkey` now."""
        ...

    def stream_room(self) -> None:
        """A request ended: there may be room for another."""
        ...

    def stream_lost(self, stream: DataStream, error: Exception | None) -> None:
        """The connection is gone. Called once."""
        ...


class Greeter(Protocol):
    """The accepting side before the session of a connection is known."""

    def greet(self, stream: DataStream, number: int, streams: int, ticket: bytes) -> StreamOwner:
        """Who owns a stream that shows this ticket. Raises: ProtocolError to refuse it."""
        ...


class DataStream(asyncio.BufferedProtocol):
    """See the module. Made with `owner` (connecting side) or `greeter` (accepting side)."""

    def __init__(self, *, owner: StreamOwner | None = None, greeter: Greeter | None = None) -> None:
        assert (owner is None) != (greeter is None)
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._greeter = greeter
        first = framing.Message.WELCOME if greeter is None else framing.Message.HELLO
        self._reader = framing.FrameReader(self, first)
        self._transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self.opened: asyncio.Future[bool] = self._loop.create_future()  # false: refused or lost
        self.bytes_outstanding = 0  # asked for and not yet answered
        # Our requests.
        self._asked: dict[int, Asked] = {}
        self._asked_spans = 0
        self._next_request = 0
        self._current: tuple[Asked, int, int] | None = None  # the DATA in progress
        self._socket: socket.socket | None = None  # of a stream without TLS
        self._lander: Lander | None = None
        self._landerless = False  # there was no thread for one
        self._landings = 0  # requests it has; while there are any, it receives
        # The peer's requests.
        self._serving: OrderedDict[int, Serving] = OrderedDict()
        self._serving_spans = 0
        self._cancels_left = 0  # it may cancel each request once, while it is open
        self._paused = False
        self._gathers = False
        self._sent_bytes = 0
        self._last_use: dict[int, int] = {}  # rkey -> `_sent_bytes` after its last piece

    # -- connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if transport.get_extra_info("ssl_object") is None:
                self._socket = sock
        # uvloop gathers a list into one writev; stock asyncio would join it.
        self._gathers = not isinstance(transport, asyncio.Transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES, low=_LOW_WATER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._socket = None
        self._end_lander()
        self._reader.close()
        self._serving.clear()
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.stream_lost(self, exc)
        self._opened(False)
        if not self.lost.done():
            self.lost.set_result(None)

    def eof_received(self) -> bool:
        return False  # half-open makes no sense here: close

    def abort(self) -> None:
        """Cut the connection now; queued bytes are dropped. `lost` tells when it is done."""
        self._end_lander()
        abort(self._transport)

    @property
    def transport(self) -> asyncio.Transport | None:
        """None once the connection is lost."""
        return self._transport

    def _write(self, data: bytes | memoryview) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._sent_bytes += len(data)
            self._transport.write(data)

    def _write_all(self, parts: list[bytes | memoryview]) -> int:
        """Write parts in order, without joining them; returns their bytes."""
        size = sum(map(len, parts))
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._sent_bytes += size
            now = size >= _WRITTEN_NOW_BYTES_MIN and not transport.get_write_buffer_size()
            if now and self._socket is not None:
                parts = write_now(self._socket.fileno(), parts)
            if not parts:
                return size
            if self._gathers:
                transport.writelines(parts)
            else:
                for part in parts:
                    transport.write(part)
        return size

    def _break(self, error: ProtocolError) -> None:
        """The peer broke the protocol: end the stream (and with it the session's data path)."""
        owner, self._owner = self._owner, None
        self.abort()
        self._opened(False)
        if owner is not None:
            owner.stream_lost(self, error)

    def _opened(self, well: bool) -> None:
        if not self.opened.done():
            self.opened.set_result(well)

    # -- receiving ----------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._reader.received(nbytes)
        except ProtocolError as error:
            self._break(error)

    def on_hello(self, number: int, streams: int, ticket: bytes) -> None:
        assert self._greeter is not None
        self._owner = self._greeter.greet(self, number, streams, ticket)
        self._write(framing.welcome())
        self._opened(True)

    def send_hello(self, number: int, streams: int, ticket: bytes) -> None:
        self._write(framing.hello(number, streams, ticket))

    def on_welcome(self) -> None:
        self._opened(True)

    # -- asking -------------------------------------------------------------------------------

    def has_room(self, spans: int) -> bool:
        """Whether a request of so many spans may be sent now; the peer counts along."""
        return not self._landings and self._has_space(spans)

    def _has_space(self, spans: int) -> bool:
        return (
            len(self._asked) < limits.READS_PER_STREAM_MAX
            and self._asked_spans + spans <= limits.SPANS_PER_STREAM_MAX
        )

    def ask(self, batch: Batch, parts: Sequence[Part]) -> None:
        """Send one READ for `parts`, whose count is within `has_room`."""
        assert self.has_room(len(parts))
        self._ask(batch, parts, None)

    def _ask(self, batch: Batch, parts: Sequence[Part], on_landed: OnLanded | None) -> None:
        request = self._next_request
        self._next_request = (request + 1) & 0xFFFFFFFF
        message = framing.read(request, [part.span for part in parts])
        landing = None
        if on_landed is not None:
            lengths = [part.span.length_bytes for part in parts]
            landing = Landing(request, lengths, [part.op for part in parts], on_landed)
            self._take_over().submit(landing)
        self._asked[request] = Asked(batch, parts, landing)
        self._asked_spans += len(parts)
        self.bytes_outstanding += sum(part.span.length_bytes for part in parts)
        batch.requests.append((self, request))
        self._write(message)

    def can_land(self, spans: int) -> bool:
        """Whether a thread may receive the answer to a request of so many spans, sent now."""
        return (
            native.KERNEL is not None
            and self._socket is not None
            and (self._landings > 0 or not self._asked)
            and self._reader.between_payloads
            and self._has_space(spans)
            and self._has_lander()
        )

    def _has_lander(self) -> bool:
        """Make the thread on first use; where there is none to be had, the loop receives."""
        if self._lander is None and not self._landerless:
            assert native.KERNEL is not None
            assert self._socket is not None
            try:
                self._lander = Lander(native.KERNEL, self._socket, self)
            except (OSError, RuntimeError, MemoryError) as error:
                self._landerless = True
                _log.warning("event=no_landing_thread effect=slower_reads reason=%s", error)
        return self._lander is not None

    def ask_landing(self, batch: Batch, parts: Sequence[Part], on_landed: OnLanded) -> None:
        """Send one READ for `parts`, which have no view, and have a thread receive the answer."""
        assert self.can_land(len(parts))
        self._ask(batch, parts, on_landed)

    def _take_over(self) -> Lander:
        """The lander, which receives from now on."""
        assert self._transport is not None
        assert self._lander is not None
        if not self._landings:
            self._transport.pause_reading()
            self._lander.begin(self._reader.take())
        self._landings += 1
        return self._lander

    def landed(self, landing: Landing) -> None:
        """For the lander: a request is answered. With the last one the loop receives again."""
        if self._lander is None:
            return
        self._landings -= 1
        asked = self._asked[landing.request]
        for index, status in enumerate(landing.statuses):
            assert status is not None
            self._answer(landing.request, asked, index, status)
        if self._landings or self._lander is None or self._transport is None:
            return
        try:
            self._reader.resume(self._lander.end())
        except ProtocolError as error:
            self._break(error)
            return
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            if self._owner is not None:
                self._owner.stream_room()

    def peer_reads(self, request: int, spans: memoryview) -> None:
        """For the lander: the peer asks for spans of ours."""
        try:
            self.on_read(request, spans)
        except ProtocolError as error:
            self._break(error)

    def peer_cancels(self, request: int) -> None:
        """For the lander: the peer does not want the rest of a request."""
        try:
            self.on_cancel(request)
        except ProtocolError as error:
            self._break(error)

    def lander_lost(self, error: ProtocolError | None) -> None:
        """For the lander: the stream ended."""
        if self._lander is None:
            return
        if error is not None:
            self._break(error)
        else:
            self.abort()

    def _end_lander(self) -> None:
        lander, self._lander = self._lander, None
        self._landings = 0
        if lander is not None:
            lander.close()

    def give_up(self, request: int) -> None:
        """Nobody waits for a request any more: none of its bytes lands from here on."""
        asked = self._asked.get(request)
        if asked is None or asked.batch is None:
            return
        batch, asked.batch = asked.batch, None
        if asked.landing is not None:  # what landed before stays so: its function has run
            for part, status in zip(asked.parts, asked.landing.give_up(), strict=True):
                if part is not None and status is not None:
                    batch.answer(part.op, status)
        for part in asked.parts:
            if part is not None:
                part.view = None
        self._reader.divert(request)
        self._write(framing.cancel(request))

    def on_data(self, request: int, index: int, offset: int, length: int) -> memoryview | None:
        asked, part = self._part(request, index)
        if offset != part.received or length > part.span.length_bytes - offset:
            raise ProtocolError(f"data at {offset} of {length} bytes was not asked for")
        self._current = (asked, request, index)
        part.received += length
        return None if part.view is None else part.view[offset : offset + length]

    def on_data_end(self) -> None:
        assert self._current is not None
        asked, request, index = self._current
        self._current = None
        part = asked.parts[index]
        if part is not None and part.received == part.span.length_bytes:
            self._answer(request, asked, index, Status.OK)

    def on_error(self, request: int, index: int, status: int) -> None:
        known = framing.answered_status(status)
        if index != framing.EVERY_INDEX:
            asked, _ = self._part(request, index)
            self._answer(request, asked, index, known)
            return
        whole = self._asked.get(request)
        if whole is None:
            raise ProtocolError("an answer to a request that is not open")
        for number, part in enumerate(whole.parts):
            if part is not None:
                self._answer(request, whole, number, known)

    def _part(self, request: int, index: int) -> tuple[Asked, Part]:
        asked = self._asked.get(request)
        part = asked.parts[index] if asked is not None and index < len(asked.parts) else None
        if asked is None or part is None:
            raise ProtocolError("an answer to a span that is not open")
        return asked, part

    def _answer(self, request: int, asked: Asked, index: int, status: Status) -> None:
        part = asked.parts[index]
        assert part is not None
        asked.parts[index] = None
        part.view = None
        self.bytes_outstanding -= part.span.length_bytes
        asked.open -= 1
        if not asked.open:
            del self._asked[request]
            self._asked_spans -= len(asked.parts)
        if asked.batch is not None:
            asked.batch.answer(part.op, status)
        if not asked.open and self._owner is not None:
            self._owner.stream_room()

    # -- serving ------------------------------------------------------------------------------

    def on_read(self, request: int, spans: memoryview) -> None:
        serving = Serving(request, spans)
        if (
            request in self._serving
            or len(self._serving) >= limits.READS_PER_STREAM_MAX
            or self._serving_spans + serving.count > limits.SPANS_PER_STREAM_MAX
        ):
            raise ProtocolError("more read requests than allowed")
        self._serving[request] = serving
        self._serving_spans += serving.count
        self._cancels_left = min(self._cancels_left + 1, limits.READS_PER_STREAM_MAX)
        self._serve_soon()

    def on_cancel(self, request: int) -> None:
        self._cancels_left -= 1
        if self._cancels_left < 0:  # nothing else that a peer may say costs it nothing
            raise ProtocolError("more was cancelled than asked for")
        serving = self._serving.get(request)
        if serving is not None:
            serving.cancelled = True  # answered when its turn comes: the queue stays bounded

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._serve_soon()

    def _serve_soon(self) -> None:
        if self._serving and self._owner is not None:
            self._owner.turns.enter(self, self._owner.peer)

    def serve(self, turn: Turn) -> bool:
        """For the turns: hand pieces to the transport until it has enough, or the turn is over."""
        while self._serving and not self._paused and self._transport is not None:
            room = limits.DATA_QUEUE_BYTES_MAX - self._transport.get_write_buffer_size()
            if room <= 0 or self._transport.is_closing():
                return False  # resume_writing comes: the high-water mark is below this
            if turn.is_over:
                return True
            count, out = self._next_answers(min(room, turn.bytes_left), turn.answers)
            turn.answers -= count
            turn.bytes_left -= self._write_all(out)
        return False

    def _next_answers(
        self, bytes_wanted: int, answers_max: int
    ) -> tuple[int, list[bytes | memoryview]]:
        """About so many bytes of answers to the peer's requests, in order; how many answers, and
        their headers and views."""
        out: list[bytes | memoryview] = []
        size = count = 0
        while self._serving and size < bytes_wanted and count < answers_max:
            count += 1
            request, serving = next(iter(self._serving.items()))
            size += self._answer_next(serving, out, self._sent_bytes + size)
            if serving.cancelled or serving.index == serving.count:
                del self._serving[request]
                self._serving_spans -= serving.count
        return count, out

    def _answer_next(self, serving: Serving, out: list[bytes | memoryview], sent_bytes: int) -> int:
        """Append the next piece or error of a request; returns the bytes it takes."""
        if serving.cancelled:
            out.append(framing.error(serving.request, framing.EVERY_INDEX, Status.DEADLINE))
            return framing.HEADER.size
        index, at = serving.index, serving.offset
        rkey: int
        length: int
        address: int
        rkey, length, address = framing.SPAN.unpack_from(serving.spans, index * framing.SPAN.size)
        view = self._owner.exposed(rkey) if self._owner is not None else None
        status = span_error(RemoteSpan(rkey, address, length), None if view is None else len(view))
        if status is not Status.OK or view is None:
            serving.index, serving.offset = index + 1, 0
            out.append(framing.error(serving.request, index, status))
            return framing.HEADER.size
        size = min(length - at, limits.DATA_PIECE_BYTES_MAX)
        serving.offset = at + size
        if serving.offset == length:
            serving.index, serving.offset = index + 1, 0
        out.append(framing.data(serving.request, index, at, size))
        out.append(view[address + at : address + at + size])
        self._last_use[rkey] = sent_bytes + framing.HEADER.size + size
        return framing.HEADER.size + size

    def flushing(self, rkey: int) -> bool:
        """Whether bytes of an exposure may still be queued in the transport."""
        last = self._last_use.get(rkey)
        if last is None:
            return False
        if self._transport is not None:
            flushed = self._sent_bytes - self._transport.get_write_buffer_size()
            if flushed < last:
                return True
        del self._last_use[rkey]
        return False
