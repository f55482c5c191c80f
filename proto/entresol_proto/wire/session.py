"""The two session machines, host and daemon, as one transition table each. No I/O, no clock.

Bytes go in with `receive(data, now_ns)`, (request id, message) pairs come out; `send()` gives bytes
to write. Time only enters as `now_ns`. A peer that breaks the protocol gets a ProtocolError, after
which the machine is CLOSED and refuses everything. The tables below are the whole protocol order;
tests walk every (state, frame) pair of both.

Invariants owned here:
- a request id is in flight at most once and never 0, and at most `requests_in_flight_max` are;
- an answer belongs to a request in flight and has a type its request allows;
- `send` changes nothing when it raises, so that an answer that does not fit can become an ERROR;
- until the session is open, a peer can make us hold only FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from entresol_proto import limits
from entresol_proto.status import ProtocolError, Status
from entresol_proto.wire import data, opening, quote
from entresol_proto.wire.frames import Frame, FrameDecoder, FrameType, encode_frame


class Message(Protocol):
    """Anything with a frame type and a byte form."""

    TYPE: ClassVar[FrameType]

    def encode(self) -> bytes: ...


class State(enum.Enum):
    """Where a session stands; the same names on both sides."""

    START = "start"  # nothing said yet
    GREETED = "greeted"  # HELLO sent or received, WELCOME due
    WELCOMED = "welcomed"  # WELCOME sent or received; a data path may be attached
    ATTACHING = "attaching"  # data path being set up
    OPEN = "open"
    DRAINING = "draining"  # a GOODBYE was said; requests in flight are finished
    CLOSED = "closed"


F = FrameType
S = State

_DECODERS: dict[FrameType, Any] = {
    kind.TYPE: kind.decode
    for kind in (
        opening.Hello, opening.Welcome, opening.Attach, opening.Attached, opening.OpenNamespace,
        opening.NamespaceOpened, opening.ErrorReply, opening.Goodbye, opening.Ping, opening.Pong,
        data.Fetch, data.Grant, data.Release, data.Reserve, data.Reserved, data.Commit,
        data.PutDone, data.Exists, data.ExistsReply, data.Stage, data.Staged, data.Touch,
        data.Forget, data.Done, data.Explain, data.Explained, quote.Quote, quote.Quoted,
    )
}  # fmt: skip

# Which answers end or continue a request. ERROR may answer any of them; an ERROR with request id 0
# answers none, is about the session and ends it.
ANSWERS: dict[FrameType, FrameType] = {
    F.HELLO: F.WELCOME,
    F.ATTACH: F.ATTACHED,
    F.OPEN_NAMESPACE: F.NAMESPACE_OPENED,
    F.FETCH: F.GRANT,  # several; the one marked final ends it
    F.RESERVE: F.RESERVED,
    F.COMMIT: F.PUT_DONE,
    F.EXISTS: F.EXISTS_REPLY,
    F.STAGE: F.STAGED,
    F.TOUCH: F.DONE,
    F.FORGET: F.DONE,
    F.EXPLAIN: F.EXPLAINED,
    F.PING: F.PONG,
    F.QUOTE: F.QUOTED,
}
REQUESTS = frozenset(ANSWERS)
ONE_WAY = frozenset({F.RELEASE, F.GOODBYE})
_WORK = frozenset(REQUESTS - {F.HELLO, F.ATTACH})

# (state, frame from host) -> state after. The daemon applies it on receipt, the host on sending.
HOST_FRAMES: dict[tuple[State, FrameType], State] = {
    (S.START, F.HELLO): S.GREETED,
    (S.WELCOMED, F.ATTACH): S.ATTACHING,
    (S.OPEN, F.RELEASE): S.OPEN,
    (S.OPEN, F.GOODBYE): S.DRAINING,
    (S.DRAINING, F.RELEASE): S.DRAINING,
    (S.DRAINING, F.GOODBYE): S.DRAINING,
    # A commit belongs to a reservation made before the goodbye; other work is answered DRAINING.
    **{(S.OPEN, kind): S.OPEN for kind in _WORK},
    **{(S.DRAINING, kind): S.DRAINING for kind in _WORK},
}
# (state, frame from daemon) -> state after. The host applies it on receipt, the daemon on sending.
DAEMON_FRAMES: dict[tuple[State, FrameType], State] = {
    (S.GREETED, F.WELCOME): S.WELCOMED,
    (S.GREETED, F.ERROR): S.CLOSED,
    (S.WELCOMED, F.ERROR): S.CLOSED,  # with request id 0 only: nothing is in flight
    (S.ATTACHING, F.ATTACHED): S.OPEN,
    (S.ATTACHING, F.ERROR): S.WELCOMED,  # this data path failed; the host may try the next
    # Before it is open a session has nothing to finish: a goodbye ends it.
    (S.GREETED, F.GOODBYE): S.CLOSED,
    (S.WELCOMED, F.GOODBYE): S.CLOSED,
    (S.ATTACHING, F.GOODBYE): S.CLOSED,
    (S.OPEN, F.GOODBYE): S.DRAINING,
    (S.DRAINING, F.GOODBYE): S.DRAINING,
    **{(S.OPEN, kind): S.OPEN for kind in {ANSWERS[w] for w in _WORK} | {F.ERROR}},
    **{(S.DRAINING, kind): S.DRAINING for kind in {ANSWERS[w] for w in _WORK} | {F.ERROR}},
}


# Not frozen, because several are made per request: a frozen one takes several times as long.
@dataclass(slots=True)
class Received:
    """One decoded message of the peer. `message` is a dataclass of opening, data or quote."""

    request_id: int
    message: Any


_HANDSHAKE = frozenset({S.START, S.GREETED, S.WELCOMED, S.ATTACHING})


class _Machine:
    """What both sides share: framing, state, requests in flight, the handshake deadline."""

    def __init__(
        self,
        *,
        now_ns: int,
        requests_in_flight_max: int = limits.REQUESTS_IN_FLIGHT_MAX,
        handshake_ns: int = limits.HANDSHAKE_DEADLINE_NS,
    ) -> None:
        self.state = State.START
        self.requests_in_flight_max = requests_in_flight_max
        self.in_flight: dict[int, FrameType] = {}
        self._decoder = FrameDecoder()
        self._handshake_until_ns = now_ns + handshake_ns

    @property
    def missing_bytes(self) -> int:
        """Of the message that has begun, as far as is known: until then nothing more comes out."""
        return self._decoder.missing_bytes

    def receive(self, raw: bytes | bytearray | memoryview, now_ns: int) -> list[Received]:
        """Take bytes of the peer, return its messages in order.

        Raises: ProtocolError; the session must then be closed.
        """
        if self.state is State.CLOSED:
            raise ProtocolError("session is closed", status=Status.DISCONNECTED)
        self.handle_timer(now_ns)
        try:
            return [self._accept(frame) for frame in self._decoder.feed(raw)]
        except ProtocolError:
            self.close()
            raise

    def handle_timer(self, now_ns: int) -> None:
        """Raises: ProtocolError when the handshake took too long. Call it at `deadline_ns()`."""
        due = self.deadline_ns()
        if due is not None and now_ns >= due:
            self.close()
            raise ProtocolError("session was not opened in time", status=Status.DEADLINE)

    def deadline_ns(self) -> int | None:
        """When `handle_timer` wants to be called, or None."""
        return self._handshake_until_ns if self.state in _HANDSHAKE else None

    def close(self) -> None:
        """Forget everything; idempotent."""
        self.state = State.CLOSED
        self.in_flight.clear()

    def _accept(self, frame: Frame) -> Received:
        raise NotImplementedError

    def _decode(self, frame: Frame) -> Received:
        return Received(frame.request_id, _DECODERS[frame.type](frame.payload))

    def _after(
        self,
        table: dict[tuple[State, FrameType], State],
        kind: FrameType,
        status: Status = Status.BAD_REQUEST,
    ) -> State:
        """The state a frame leads to. Raises: ProtocolError when it is not allowed now."""
        after = table.get((self.state, kind))
        if after is None:
            raise ProtocolError(
                f"{kind.name} is not allowed in state {self.state.value}", status=status
            )
        return after

    def _enter(self, after: State) -> None:
        if after is State.CLOSED:
            self.close()
            return
        if after is State.OPEN and self.state is not State.OPEN:
            self._decoder.allow(limits.FRAME_PAYLOAD_BYTES_MAX)
        self.state = after

    def _check_answer(self, request_id: int, kind: FrameType) -> None:
        """Raises: ProtocolError for a frame of the daemon that belongs to no request in flight."""
        if kind is F.GOODBYE or (kind is F.ERROR and request_id == 0):
            if request_id:
                raise ProtocolError(f"{kind.name} with request id {request_id}, not 0")
            return
        request = self.in_flight.get(request_id)
        if request is None or (kind is not F.ERROR and ANSWERS[request] is not kind):
            raise ProtocolError(f"{kind.name} answers no request of this session")

    def _answered(self, request_id: int, message: Any, after: State) -> None:
        """Apply a frame of the daemon that `_after` and `_check_answer` let pass."""
        if message.TYPE is F.ERROR and request_id == 0:
            after = State.CLOSED
        if getattr(message, "final", True):
            self.in_flight.pop(request_id, None)  # a GOODBYE has none
        self._enter(after)


class ServerSession(_Machine):
    """The daemon's side. Work received while DRAINING is still returned: the caller answers it."""

    def _accept(self, frame: Frame) -> Received:
        kind = frame.type
        after = self._after(HOST_FRAMES, kind)
        if (kind in REQUESTS) is (frame.request_id == 0):
            raise ProtocolError(f"{kind.name} with request id {frame.request_id}")
        if kind in REQUESTS:
            if frame.request_id in self.in_flight:
                raise ProtocolError(f"request id {frame.request_id} is in flight already")
            if len(self.in_flight) >= self.requests_in_flight_max:
                raise ProtocolError(
                    f"more than {self.requests_in_flight_max} requests in flight",
                    status=Status.BUSY,
                )
        received = self._decode(frame)
        self._enter(after)
        if kind in REQUESTS:
            self.in_flight[frame.request_id] = kind
        return received

    def send(self, message: Message, request_id: int = 0) -> bytes:
        """Bytes of an answer; with request id 0 of a GOODBYE, or of an ERROR that ends the session.

        Raises: ProtocolError if the protocol does not allow it now or it is too long for a frame:
        a bug of the caller. Nothing has changed then, the request can still be answered.
        """
        kind = message.TYPE
        after = self._after(DAEMON_FRAMES, kind)
        self._check_answer(request_id, kind)
        raw = encode_frame(kind, request_id, message.encode())
        self._answered(request_id, message, after)
        return raw


class ClientSession(_Machine):
    """The host's side."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._next_id = 0
        self._abandoned: set[int] = set()

    def send(self, message: Message) -> tuple[int, bytes]:
        """Number and bytes of a request.

        Raises: ProtocolError if it is not allowed now (Status.BUSY: too many in flight).
        """
        kind = message.TYPE
        after = self._after(HOST_FRAMES, kind, Status.DISCONNECTED)
        request_id = 0
        if kind in REQUESTS:
            if len(self.in_flight) >= self.requests_in_flight_max:
                raise ProtocolError("too many requests in flight", status=Status.BUSY)
            self._next_id = self._next_id % 0xFFFF_FFFF + 1
            while self._next_id in self.in_flight:
                self._next_id = self._next_id % 0xFFFF_FFFF + 1
            request_id = self._next_id
        raw = encode_frame(kind, request_id, message.encode())
        self._enter(after)
        if kind in REQUESTS:
            self.in_flight[request_id] = kind
        return request_id, raw

    def abandon(self, request_id: int) -> None:
        """Stop caring for a request whose deadline passed.

        Late answers are swallowed; it counts as in flight until the final one.
        """
        if request_id in self.in_flight:
            self._abandoned.add(request_id)

    def is_abandoned(self, request_id: int) -> bool:
        return request_id in self._abandoned

    def _accept(self, frame: Frame) -> Received:
        after = self._after(DAEMON_FRAMES, frame.type)
        self._check_answer(frame.request_id, frame.type)
        received = self._decode(frame)
        self._answered(frame.request_id, received.message, after)
        if isinstance(received.message, opening.Welcome):
            self.requests_in_flight_max = min(
                self.requests_in_flight_max, max(1, received.message.requests_in_flight_max)
            )
        return received

    def settle(self, received: Received) -> bool:
        """True if somebody still waits for this answer; a final abandoned one is forgotten."""
        if received.request_id not in self._abandoned:
            return True
        if getattr(received.message, "final", True):
            self._abandoned.discard(received.request_id)
        return False
