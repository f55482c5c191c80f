"""Messages of a tcp data stream, without sockets: bytes in, calls out.

Invariant: a length is checked against its limit before anything is allocated or received for it,
and payload is received straight into the view the owner names, or nowhere. Whatever the peer sends
ends in one of the calls of `StreamEvents` or in a ProtocolError; after that the stream is not used
again.

The byte layout is in proto/FABRICS.md.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Protocol

from entresol_proto import limits
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.status import ProtocolError, Status

VERSION = 1
MAGIC = 0x44544E45  # "ENTD", little-endian
# type, status, index, request, offset, length. Padded to a cache line: the kernel then copies the
# payload behind it between aligned addresses, which on loopback is clearly faster than 16 bytes.
HEADER = struct.Struct("<BBHIII48x")
SPAN = struct.Struct("<IIQ")  # rkey, length, address
EVERY_INDEX = 0xFFFF  # an error that answers all spans of a request still open
# What a peer may answer for a span; anything else it says counts as FABRIC_ERROR.
_ANSWERS = frozenset({Status.BAD_REQUEST, Status.LEASE_EXPIRED, Status.BUSY, Status.DEADLINE})
SCRATCH_BYTES = 16 * limits.KIB  # where headers land, with the first bytes of a payload behind them

assert limits.SPANS_PER_READ_MAX < EVERY_INDEX


class Message(enum.IntEnum):
    """Wire numbers of the messages."""

    HELLO = 1
    WELCOME = 2
    READ = 3
    DATA = 4
    ERROR = 5
    CANCEL = 6


class StreamEvents(Protocol):
    """What a `FrameReader` calls. Any of these may raise ProtocolError to end the stream."""

    def on_hello(self, number: int, streams: int, ticket: bytes) -> None: ...
    def on_welcome(self) -> None: ...
    def on_read(self, request: int, spans: memoryview) -> None:
        """`spans` holds whole SPAN records and belongs to the callee."""
        ...

    def on_data(self, request: int, index: int, offset: int, length: int) -> memoryview | None:
        """Where the payload goes: a view of exactly `length` bytes, or None to drop it."""
        ...

    def on_data_end(self) -> None: ...
    def on_error(self, request: int, index: int, status: int) -> None: ...
    def on_cancel(self, request: int) -> None: ...


class FrameReader:
    """Cuts the incoming bytes of one stream into events.

    Use: receive into `buffer()`, then call `received(count)`. `first` is the only message allowed
    at the beginning (HELLO for the side that accepts, WELCOME for the one that connects), and it is
    not allowed later.
    """

    __slots__ = ("_body", "_events", "_fill", "_first", "_header", "_need", "_scratch", "_sink")

    def __init__(self, events: StreamEvents, first: Message) -> None:
        self._events = events
        self._first: Message | None = first
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._fill = 0  # bytes of an unfinished header at the start of the scratch
        self._need = 0  # payload bytes still to come; then the scratch is empty
        self._sink: memoryview | None = None  # where they go: a view of `_need` bytes
        self._body: memoryview | None = None  # the payload of HELLO and READ, once it is whole
        self._header = (0, 0, 0, 0, 0, 0)

    def buffer(self) -> memoryview:
        """Where to receive next. Never empty."""
        if not self._need:
            return self._scratch[self._fill :]
        if self._sink is not None:
            return self._sink
        return self._scratch[: self._need]

    def close(self) -> None:
        """No more will come: let go of the memory."""
        self._scratch = memoryview(b"")
        self._sink = self._body = None

    @property
    def between_payloads(self) -> bool:
        """Whether nothing but a part of a header, if anything, has come since the last message."""
        return not self._need

    def take(self) -> bytes:
        """That part of a header, for someone else who goes on receiving; see `resume`."""
        assert not self._need
        header, self._fill = bytes(self._scratch[: self._fill]), 0
        return header

    def resume(self, header: bytes) -> None:
        """Go on with up to one header that someone else received. Raises: ProtocolError."""
        assert not self._need
        assert not self._fill
        self._scratch[: len(header)] = header
        self.received(len(header))

    def received(self, count: int) -> None:
        """Take `count` bytes that were put into `buffer()`. Raises: ProtocolError."""
        if self._need:
            self._advance(count)
            return
        end = self._fill + count
        at = 0
        while end - at >= HEADER.size:
            self._header = HEADER.unpack_from(self._scratch, at)
            at += HEADER.size
            self._begin()
            if self._need and at < end:
                take = min(self._need, end - at)
                if self._sink is not None:
                    self._sink[:take] = self._scratch[at : at + take]
                at += take
                self._advance(take)
        self._fill = end - at
        if self._fill and at:
            self._scratch[: self._fill] = self._scratch[at:end]

    def divert(self, request: int) -> None:
        """Drop the rest of a payload that is arriving for `request`; its view is left alone."""
        if self._need and self._header[0] == Message.DATA and self._header[3] == request:
            self._sink = None

    def _advance(self, count: int) -> None:
        assert 0 < count <= self._need
        self._need -= count
        if self._sink is not None:
            self._sink = self._sink[count:] if self._need else None
        if not self._need:
            self._end()

    def _begin(self) -> None:
        """Act on a header: deliver what has no payload, else say where the payload goes."""
        kind, status, index, request, offset, length = self._header
        if self._first is not None:
            self._begin_first()
        elif kind == Message.DATA:
            if not 0 < length <= limits.BLOCK_BYTES_MAX:
                raise ProtocolError(f"data of {length} bytes")
            self._sink = self._events.on_data(request, index, offset, length)
            assert self._sink is None or len(self._sink) == length
            self._need = length
        elif kind == Message.READ:
            if not is_read_length(length):
                raise ProtocolError(f"read request of {length} bytes")
            self._expect_body(length)
        elif length:
            raise ProtocolError(f"message {kind} of {length} bytes")
        elif kind == Message.ERROR:
            self._events.on_error(request, index, status)
        elif kind == Message.CANCEL:
            self._events.on_cancel(request)
        else:
            raise ProtocolError(f"message {kind} is not allowed here")

    def _begin_first(self) -> None:
        kind, version, _, magic, _, length = self._header
        if kind != self._first or magic != MAGIC:
            raise ProtocolError("this is not an entresol data stream")
        if version != VERSION:
            raise ProtocolError(f"data stream version {version}, ours is {VERSION}")
        if length != (limits.TICKET_BYTES if kind == Message.HELLO else 0):
            raise ProtocolError(f"greeting of {length} bytes")
        self._first = None
        if kind == Message.HELLO:
            self._expect_body(length)
        else:
            self._events.on_welcome()

    def _expect_body(self, length: int) -> None:
        self._body = self._sink = memoryview(bytearray(length))
        self._need = length

    def _end(self) -> None:
        """A payload is complete."""
        kind, _, index, request, offset, _ = self._header
        if kind == Message.DATA:
            self._events.on_data_end()
            return
        body, self._body = self._body, None
        assert body is not None
        if kind == Message.HELLO:
            self._events.on_hello(index, offset, bytes(body))
        else:
            self._events.on_read(request, body)


def is_read_length(length: int) -> bool:
    """Whether a READ may have so many bytes of spans."""
    return 0 < length <= limits.SPANS_PER_READ_MAX * SPAN.size and length % SPAN.size == 0


def answered_status(status: int) -> Status:
    """What an ERROR of the peer means."""
    return Status(status) if status in _ANSWERS else Status.FABRIC_ERROR


def hello(number: int, streams: int, ticket: bytes) -> bytes:
    """The first message of a connecting side: stream `number` of `streams` of one session."""
    return HEADER.pack(Message.HELLO, VERSION, number, MAGIC, streams, len(ticket)) + ticket


def welcome() -> bytes:
    """The first message of the accepting side."""
    return HEADER.pack(Message.WELCOME, VERSION, 0, MAGIC, 0, 0)


def read(request: int, spans: Sequence[RemoteSpan]) -> bytes:
    """Ask for spans; at most SPANS_PER_READ_MAX. Raises: struct.error outside u32/u32/u64."""
    assert 0 < len(spans) <= limits.SPANS_PER_READ_MAX
    parts = [HEADER.pack(Message.READ, 0, 0, request, 0, len(spans) * SPAN.size)]
    parts += [SPAN.pack(span.rkey, span.length_bytes, span.address) for span in spans]
    return b"".join(parts)


def data(request: int, index: int, offset: int, length: int) -> bytes:
    """The header before `length` payload bytes, which belong at `offset` of span `index`."""
    return HEADER.pack(Message.DATA, 0, index, request, offset, length)


def error(request: int, index: int, status: int) -> bytes:
    """Span `index` of a request (or EVERY_INDEX: all that are open) ends with `status`."""
    return HEADER.pack(Message.ERROR, status, index, request, 0, 0)


def cancel(request: int) -> bytes:
    """The reader no longer wants the rest of a request."""
    return HEADER.pack(Message.CANCEL, 0, 0, request, 0, 0)
