"""What the two session machines must do, written out from proto/FORMAT.md and not from the code.

Who changes the tables in `wire/session.py` has to do so twice, on purpose. `Model` predicts one
side: which frames it takes and sends, its state and what is in flight afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from entresol_proto import limits
from entresol_proto.wire.frames import FrameType
from entresol_proto.wire.session import State

F, S = FrameType, State
WORK = {
    F.OPEN_NAMESPACE, F.FETCH, F.RESERVE, F.COMMIT, F.EXISTS, F.STAGE, F.TOUCH, F.FORGET,
    F.EXPLAIN, F.PING, F.QUOTE,
}  # fmt: skip
WORK_ANSWERS = {
    F.NAMESPACE_OPENED, F.GRANT, F.RESERVED, F.PUT_DONE, F.EXISTS_REPLY, F.STAGED, F.DONE,
    F.EXPLAINED, F.PONG, F.QUOTED, F.ERROR,
}  # fmt: skip
ANSWER: dict[FrameType, FrameType] = {
    F.HELLO: F.WELCOME, F.ATTACH: F.ATTACHED, F.OPEN_NAMESPACE: F.NAMESPACE_OPENED,
    F.FETCH: F.GRANT, F.RESERVE: F.RESERVED, F.COMMIT: F.PUT_DONE, F.EXISTS: F.EXISTS_REPLY,
    F.STAGE: F.STAGED, F.TOUCH: F.DONE, F.FORGET: F.DONE, F.EXPLAIN: F.EXPLAINED, F.PING: F.PONG,
    F.QUOTE: F.QUOTED,
}  # fmt: skip

FROM_HOST: dict[tuple[State, FrameType], State] = {
    (S.START, F.HELLO): S.GREETED,
    (S.WELCOMED, F.ATTACH): S.ATTACHING,
    **{
        (state, kind): state
        for state in (S.OPEN, S.DRAINING)
        for kind in (*WORK, F.RELEASE)
    },
    (S.OPEN, F.GOODBYE): S.DRAINING,
    (S.DRAINING, F.GOODBYE): S.DRAINING,
}  # fmt: skip
FROM_DAEMON: dict[tuple[State, FrameType], State] = {
    (S.GREETED, F.WELCOME): S.WELCOMED,
    (S.GREETED, F.ERROR): S.CLOSED,
    (S.WELCOMED, F.ERROR): S.CLOSED,
    (S.ATTACHING, F.ATTACHED): S.OPEN,
    (S.ATTACHING, F.ERROR): S.WELCOMED,
    (S.GREETED, F.GOODBYE): S.CLOSED,
    (S.WELCOMED, F.GOODBYE): S.CLOSED,
    (S.ATTACHING, F.GOODBYE): S.CLOSED,
    **{(state, kind): state for state in (S.OPEN, S.DRAINING) for kind in WORK_ANSWERS},
    (S.OPEN, F.GOODBYE): S.DRAINING,
    (S.DRAINING, F.GOODBYE): S.DRAINING,
}
TIMED = (S.START, S.GREETED, S.WELCOMED, S.ATTACHING)


@dataclass(slots=True)
class Model:
    """One side of a session. Methods say whether a frame passes, and change what it changes."""

    room: int = limits.REQUESTS_IN_FLIGHT_MAX
    until_ns: int = limits.HANDSHAKE_DEADLINE_NS
    state: State = S.START
    in_flight: dict[int, FrameType] = field(default_factory=dict)

    def close(self) -> bool:
        """It is over; False, for `return self.close()`."""
        self.state = S.CLOSED
        self.in_flight = {}
        return False

    def on_time(self, now_ns: int) -> bool:
        """False when a handshake took too long: then it is over."""
        if self.state in TIMED and now_ns >= self.until_ns:
            return self.close()
        return self.state is not S.CLOSED

    def from_host(self, kind: FrameType, number: int) -> bool:
        """A frame of the host, at whichever side. What does not pass changes nothing here."""
        after = FROM_HOST.get((self.state, kind))
        if after is None or (kind in ANSWER) is (number == 0):
            return False
        if kind in ANSWER:
            if number in self.in_flight or len(self.in_flight) >= self.room:
                return False
            self.in_flight[number] = kind
        self.state = after
        return True

    def from_daemon(self, kind: FrameType, number: int, *, final: bool = True) -> bool:
        """A frame of the daemon, at whichever side."""
        after = FROM_DAEMON.get((self.state, kind))
        if after is None:
            return False
        if kind is F.GOODBYE:
            if number:
                return False
        elif kind is F.ERROR and number == 0:
            after = S.CLOSED
        else:
            asked = self.in_flight.get(number)
            if asked is None or (kind is not F.ERROR and ANSWER[asked] is not kind):
                return False
            if final:
                del self.in_flight[number]
        self.state = after
        if after is S.CLOSED:
            self.in_flight = {}
        return True
