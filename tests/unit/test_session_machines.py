"""Both session machines: every (state, frame) pair, and the two against each other.

`FROM_HOST` and `FROM_DAEMON` are those of tests/session_model.py, written out from proto/FORMAT.md.
Long walks against that model are the line F2 of tests/proof.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from session_model import FROM_DAEMON, FROM_HOST, WORK, WORK_ANSWERS
from wire_messages import EXAMPLES

from entresol_proto import limits
from entresol_proto.status import ProtocolError, Status
from entresol_proto.wire import data, opening, session
from entresol_proto.wire.frames import FrameType, encode_frame
from entresol_proto.wire.session import ClientSession, Received, ServerSession, State

F, S = FrameType, State
PAIRS = list(itertools.product(State, FrameType))
PAIR_IDS = [f"{state.value}-{kind.name.lower()}" for state, kind in PAIRS]
HELLO, WELCOME = EXAMPLES[F.HELLO], EXAMPLES[F.WELCOME]
ATTACH, ATTACHED = EXAMPLES[F.ATTACH], EXAMPLES[F.ATTACHED]
ANSWER_OF = {answer: request for request, answer in session.ANSWERS.items()}


class Both:
    """A host and a daemon without a wire: what one sends, the other has received on return."""

    def __init__(self, state: State = S.START, **options: Any) -> None:
        self.host = ClientSession(now_ns=0, **options)
        self.daemon = ServerSession(now_ns=0, **options)
        if state is not S.START:
            getattr(self, f"_to_{state.value}")()
        assert self.host.state is self.daemon.state is state

    def ask(self, message: Any) -> int:
        """Host to daemon; the request id."""
        request_id, raw = self.host.send(message)
        assert self.daemon.receive(raw, 0) == [Received(request_id, message)]
        return request_id

    def answer(self, request_id: int, message: Any) -> None:
        """Daemon to host."""
        raw = self.daemon.send(message, request_id)
        assert self.host.receive(raw, 0) == [Received(request_id, message)]

    def _to_greeted(self) -> None:
        self.ask(HELLO)

    def _to_welcomed(self) -> None:
        self.answer(self.ask(HELLO), WELCOME)

    def _to_attaching(self) -> None:
        self._to_welcomed()
        self.ask(ATTACH)

    def _to_open(self) -> None:
        self._to_welcomed()
        self.answer(self.ask(ATTACH), ATTACHED)

    def _to_draining(self) -> None:
        self._to_open()
        self.ask(opening.Goodbye())

    def _to_closed(self) -> None:
        self._to_open()
        self.host.close()
        self.daemon.close()


def waiting_request(both: Both, kind: FrameType) -> int:
    """A request in flight that a frame of the daemon may answer, or 0."""
    for request_id, request in both.daemon.in_flight.items():
        if kind is F.ERROR or session.ANSWERS[request] is kind:
            return request_id
    wanted = {F.ERROR: F.PING}.get(kind, ANSWER_OF.get(kind))
    if wanted in WORK and both.host.state in (S.OPEN, S.DRAINING):
        return both.ask(EXAMPLES[wanted])
    return 0 if kind in (F.GOODBYE, F.ERROR) else 99


def test_tables_are_what_the_format_says() -> None:
    assert FROM_HOST == session.HOST_FRAMES
    assert FROM_DAEMON == session.DAEMON_FRAMES
    assert set(session.REQUESTS) | {F.RELEASE, F.GOODBYE} == {k for k in F if k < 64}
    assert set(session.ANSWERS.values()) | {F.ERROR} == {k for k in F if k >= 64}


@pytest.mark.parametrize(("state", "kind"), PAIRS, ids=PAIR_IDS)
def test_daemon_on_every_frame_in_every_state(state: State, kind: FrameType) -> None:
    both = Both(state)
    daemon = both.daemon
    request_id = 0 if kind in (F.RELEASE, F.GOODBYE) else 99
    raw = encode_frame(kind, request_id, EXAMPLES[kind].encode())
    after = FROM_HOST.get((state, kind))
    if after is None:
        with pytest.raises(ProtocolError):
            daemon.receive(raw, 0)
        assert daemon.state is S.CLOSED
        assert not daemon.in_flight
        return
    assert daemon.receive(raw, 0) == [Received(request_id, EXAMPLES[kind])]
    assert daemon.state is after
    assert (request_id in daemon.in_flight) == bool(request_id)


@pytest.mark.parametrize(("state", "kind"), PAIRS, ids=PAIR_IDS)
def test_host_on_every_frame_in_every_state(state: State, kind: FrameType) -> None:
    both = Both(state)
    request_id = waiting_request(both, kind)
    host = both.host
    raw = encode_frame(kind, request_id, EXAMPLES[kind].encode())
    after = FROM_DAEMON.get((state, kind))
    if after is None:
        with pytest.raises(ProtocolError):
            host.receive(raw, 0)
        assert host.state is S.CLOSED
        assert not host.in_flight
        return
    assert host.receive(raw, 0) == [Received(request_id, EXAMPLES[kind])]
    assert host.state is after
    assert request_id not in host.in_flight


@pytest.mark.parametrize(("state", "kind"), PAIRS, ids=PAIR_IDS)
def test_host_sends_only_what_is_allowed(state: State, kind: FrameType) -> None:
    host = Both(state).host
    before = dict(host.in_flight)
    after = FROM_HOST.get((state, kind))
    if after is None:
        with pytest.raises(ProtocolError):
            host.send(EXAMPLES[kind])
        assert host.state is state, "a refused send changes nothing"
        assert host.in_flight == before
        return
    request_id, _ = host.send(EXAMPLES[kind])
    assert host.state is after
    assert (request_id in host.in_flight) == (kind not in (F.RELEASE, F.GOODBYE))


@pytest.mark.parametrize(("state", "kind"), PAIRS, ids=PAIR_IDS)
def test_daemon_sends_only_what_is_allowed(state: State, kind: FrameType) -> None:
    both = Both(state)
    request_id = waiting_request(both, kind)
    daemon = both.daemon
    before = dict(daemon.in_flight)
    after = FROM_DAEMON.get((state, kind))
    if after is None:
        with pytest.raises(ProtocolError):
            daemon.send(EXAMPLES[kind], request_id)
        assert daemon.state is state, "a refused send changes nothing"
        assert daemon.in_flight == before
        return
    daemon.send(EXAMPLES[kind], request_id)
    assert daemon.state is after
    assert request_id not in daemon.in_flight


# Requests -----------------------------------------------------------------------------------------


def test_a_handshake_has_one_request_at_a_time() -> None:
    """HELLO and ATTACH in one write: refused, because ATTACH needs the offers of WELCOME."""
    daemon = ServerSession(now_ns=0)
    raw = encode_frame(F.HELLO, 1, HELLO.encode()) + encode_frame(F.ATTACH, 2, ATTACH.encode())
    with pytest.raises(ProtocolError):
        daemon.receive(raw, 0)
    assert daemon.state is S.CLOSED


@pytest.mark.parametrize("limit", [1, 3, limits.REQUESTS_IN_FLIGHT_MAX])
def test_in_flight_limit(limit: int) -> None:
    both = Both(S.OPEN)
    both.host.requests_in_flight_max = both.daemon.requests_in_flight_max = limit
    ids = [both.ask(EXAMPLES[F.PING]) for _ in range(limit)]
    with pytest.raises(ProtocolError) as caught:
        both.host.send(EXAMPLES[F.PING])
    assert caught.value.status is Status.BUSY
    both.answer(ids[0], EXAMPLES[F.PONG])
    both.ask(EXAMPLES[F.PING])
    # One past the limit from a host that does not count.
    with pytest.raises(ProtocolError) as caught:
        both.daemon.receive(encode_frame(F.PING, 0xFFFF_FFFF, b"12345678"), 0)
    assert caught.value.status is Status.BUSY
    assert both.daemon.state is S.CLOSED


def test_one_way_frames_need_no_room() -> None:
    both = Both(S.OPEN)
    both.host.requests_in_flight_max = both.daemon.requests_in_flight_max = 1
    both.ask(EXAMPLES[F.PING])
    for _ in range(10):
        assert both.ask(EXAMPLES[F.RELEASE]) == 0


@pytest.mark.parametrize(("granted", "limit"), [(0, 1), (1, 1), (16, 16), (60_000, 256)])
def test_welcome_narrows_what_the_host_sends(granted: int, limit: int) -> None:
    both = Both(S.GREETED)
    fields = {name: getattr(WELCOME, name) for name in type(WELCOME).__slots__}
    both.answer(1, opening.Welcome(**{**fields, "requests_in_flight_max": granted}))
    assert both.host.requests_in_flight_max == limit


def test_a_request_id_is_in_flight_once() -> None:
    both = Both(S.OPEN)
    request_id = both.ask(EXAMPLES[F.PING])
    with pytest.raises(ProtocolError, match="in flight"):
        both.daemon.receive(encode_frame(F.EXISTS, request_id, EXAMPLES[F.EXISTS].encode()), 0)


def test_a_request_id_is_free_after_its_answer() -> None:
    both = Both(S.OPEN)
    for _ in range(3):
        assert len(both.daemon.receive(encode_frame(F.PING, 7, b"12345678"), 0)) == 1
        both.daemon.send(EXAMPLES[F.PONG], 7)


@pytest.mark.parametrize("kind", sorted(WORK))
def test_request_id_0_is_refused(kind: FrameType) -> None:
    daemon = Both(S.OPEN).daemon
    with pytest.raises(ProtocolError, match="request id 0"):
        daemon.receive(encode_frame(kind, 0, EXAMPLES[kind].encode()), 0)


@pytest.mark.parametrize("kind", [F.RELEASE, F.GOODBYE])
def test_one_way_frames_have_request_id_0(kind: FrameType) -> None:
    with pytest.raises(ProtocolError, match="request id 5"):
        Both(S.OPEN).daemon.receive(encode_frame(kind, 5, EXAMPLES[kind].encode()), 0)
    if kind is F.GOODBYE:
        both = Both(S.OPEN)
        with pytest.raises(ProtocolError, match="request id 5"):
            both.host.receive(encode_frame(kind, 5, EXAMPLES[kind].encode()), 0)
        with pytest.raises(ProtocolError, match="request id 5"):
            both.daemon.send(EXAMPLES[kind], 5)


def test_numbers_wrap_and_skip_what_is_in_flight() -> None:
    both = Both(S.OPEN)
    both.host._next_id = 0xFFFF_FFFE
    assert [both.ask(EXAMPLES[F.PING]) for _ in range(3)] == [0xFFFF_FFFF, 1, 2]
    both.host._next_id = 0
    assert both.ask(EXAMPLES[F.PING]) == 3


@pytest.mark.parametrize("kind", sorted(WORK_ANSWERS))
def test_an_answer_for_an_unknown_request_is_refused(kind: FrameType) -> None:
    for request_id in (1234, 0) if kind is not F.ERROR else (1234,):
        both = Both(S.OPEN)
        both.ask(EXAMPLES[F.PING])
        with pytest.raises(ProtocolError, match="answers no request"):
            both.host.receive(encode_frame(kind, request_id, EXAMPLES[kind].encode()), 0)
        assert both.host.state is S.CLOSED


@pytest.mark.parametrize("request_kind", sorted(WORK))
@pytest.mark.parametrize("kind", sorted(WORK_ANSWERS - {F.ERROR}))
def test_an_answer_of_another_type_is_refused(request_kind: FrameType, kind: FrameType) -> None:
    both = Both(S.OPEN)
    request_id = both.ask(EXAMPLES[request_kind])
    raw = encode_frame(kind, request_id, EXAMPLES[kind].encode())
    if session.ANSWERS[request_kind] is kind:
        assert len(both.host.receive(raw, 0)) == 1
        return
    with pytest.raises(ProtocolError):
        both.daemon.send(EXAMPLES[kind], request_id)
    assert request_id in both.daemon.in_flight
    with pytest.raises(ProtocolError, match="answers no request"):
        both.host.receive(raw, 0)


def test_a_second_answer_is_refused() -> None:
    both = Both(S.OPEN)
    request_id = both.ask(EXAMPLES[F.PING])
    both.answer(request_id, EXAMPLES[F.PONG])
    with pytest.raises(ProtocolError):
        both.daemon.send(EXAMPLES[F.PONG], request_id)
    with pytest.raises(ProtocolError):
        both.host.receive(encode_frame(F.PONG, request_id, b"12345678"), 0)


def grant(final: bool) -> data.Grant:
    return data.Grant(final, 1, 1, 1, (), ((0, Status.MISS),))


def test_grants_go_on_until_the_final_one() -> None:
    both = Both(S.OPEN)
    request_id = both.ask(EXAMPLES[F.FETCH])
    for _ in range(3):
        both.answer(request_id, grant(False))
        assert request_id in both.host.in_flight
        assert request_id in both.daemon.in_flight
    both.answer(request_id, grant(True))
    assert not both.host.in_flight
    assert not both.daemon.in_flight


def test_an_error_ends_a_fetch() -> None:
    both = Both(S.OPEN)
    request_id = both.ask(EXAMPLES[F.FETCH])
    both.answer(request_id, grant(False))
    both.answer(request_id, EXAMPLES[F.ERROR])
    assert not both.host.in_flight
    assert both.host.state is S.OPEN


@pytest.mark.parametrize("state", [S.GREETED, S.WELCOMED, S.ATTACHING, S.OPEN, S.DRAINING])
def test_an_error_without_a_request_ends_the_session(state: State) -> None:
    both = Both(state)
    both.answer(0, EXAMPLES[F.ERROR])
    assert both.host.state is both.daemon.state is S.CLOSED
    assert not both.host.in_flight
    assert not both.daemon.in_flight


def test_a_failed_attach_can_be_tried_again() -> None:
    both = Both(S.WELCOMED)
    for _ in range(3):
        both.answer(both.ask(ATTACH), EXAMPLES[F.ERROR])
        assert both.host.state is both.daemon.state is S.WELCOMED
    both.answer(both.ask(ATTACH), ATTACHED)
    assert both.host.state is both.daemon.state is S.OPEN


def test_an_answer_that_does_not_fit_can_become_an_error() -> None:
    """Sending changes nothing when it fails, so that the request is still answered."""
    both = Both(S.OPEN)
    request_id = both.ask(EXAMPLES[F.EXPLAIN])
    too_long = data.Explained(
        ((data.Reason.EVICTED, 1),) * (limits.FRAME_PAYLOAD_BYTES_MAX // 9 + 1)
    )
    with pytest.raises(ProtocolError) as caught:
        both.daemon.send(too_long, request_id)
    assert caught.value.status is Status.TOO_LARGE
    both.answer(request_id, EXAMPLES[F.ERROR])


def test_a_request_that_does_not_fit_uses_no_number() -> None:
    both = Both(S.OPEN)
    with pytest.raises(ProtocolError):
        both.host.send(data.Exists(1, bytes(limits.FRAME_PAYLOAD_BYTES_MAX + 16)))
    assert not both.host.in_flight


# Goodbye ------------------------------------------------------------------------------------------


def test_requests_in_flight_are_finished_after_a_goodbye() -> None:
    for who in ("host", "daemon"):
        both = Both(S.OPEN)
        ids = {kind: both.ask(EXAMPLES[kind]) for kind in sorted(WORK)}
        if who == "host":
            both.ask(opening.Goodbye())
        else:
            both.answer(0, opening.Goodbye(Status.DRAINING))
        for kind, request_id in ids.items():
            both.answer(request_id, EXAMPLES[session.ANSWERS[kind]])
        both.ask(EXAMPLES[F.RELEASE])
        assert both.host.state is both.daemon.state is S.DRAINING
        assert not both.host.in_flight


def test_goodbyes_that_cross() -> None:
    both = Both(S.OPEN)
    request_id, work = both.host.send(EXAMPLES[F.FETCH])
    _, hers = both.host.send(opening.Goodbye())
    his = both.daemon.send(opening.Goodbye(Status.DRAINING), 0)
    assert len(both.host.receive(his, 0)) == 1
    assert len(both.daemon.receive(work + hers, 0)) == 2
    both.answer(request_id, opening.ErrorReply(Status.DRAINING, "draining"))
    assert both.host.state is both.daemon.state is S.DRAINING


def test_a_goodbye_that_crosses_an_attach_ends_the_session() -> None:
    both = Both(S.WELCOMED)
    _, attach = both.host.send(ATTACH)
    goodbye = both.daemon.send(opening.Goodbye(Status.DRAINING), 0)
    assert len(both.host.receive(goodbye, 0)) == 1
    assert both.host.state is S.CLOSED
    with pytest.raises(ProtocolError) as caught:
        both.daemon.receive(attach, 0)
    assert caught.value.status is Status.DISCONNECTED


# Abandoned requests -------------------------------------------------------------------------------


def test_late_answers_are_swallowed() -> None:
    both = Both(S.OPEN)
    request_id = both.ask(EXAMPLES[F.FETCH])
    both.host.abandon(request_id)
    assert both.host.is_abandoned(request_id)
    assert request_id in both.host.in_flight, "the daemon still counts it"
    for final in (False, True):
        (received,) = both.host.receive(both.daemon.send(grant(final), request_id), 0)
        assert not both.host.settle(received)
    assert not both.host.is_abandoned(request_id)
    assert request_id not in both.host.in_flight


@pytest.mark.parametrize("kind", [F.PONG, F.ERROR])
def test_an_abandoned_request_of_one_answer_is_forgotten_with_it(kind: FrameType) -> None:
    both = Both(S.OPEN)
    request_id = both.ask(EXAMPLES[F.PING])
    both.host.abandon(request_id)
    (received,) = both.host.receive(both.daemon.send(EXAMPLES[kind], request_id), 0)
    assert not both.host.settle(received)
    assert not both.host.is_abandoned(request_id)


def test_abandoning_what_is_not_in_flight_does_nothing() -> None:
    host = Both(S.OPEN).host
    host.abandon(5)
    assert not host.is_abandoned(5)


def test_answers_that_somebody_waits_for_are_not_swallowed() -> None:
    both = Both(S.OPEN)
    one, two = both.ask(EXAMPLES[F.PING]), both.ask(EXAMPLES[F.PING])
    both.host.abandon(one)
    (received,) = both.host.receive(both.daemon.send(EXAMPLES[F.PONG], two), 0)
    assert both.host.settle(received)
    assert both.host.is_abandoned(one)


# Time and memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("side", ["host", "daemon"])
def test_handshake_timer(side: str, state: State) -> None:
    machine = getattr(Both(state), side)
    due = machine.deadline_ns()
    if state in (S.OPEN, S.DRAINING, S.CLOSED):
        assert due is None
        machine.handle_timer(10**18)
        assert machine.state is state
        return
    assert due == limits.HANDSHAKE_DEADLINE_NS
    machine.handle_timer(due - 1)
    assert machine.state is state
    with pytest.raises(ProtocolError) as caught:
        machine.handle_timer(due)
    assert caught.value.status is Status.DEADLINE
    assert machine.state is S.CLOSED


def test_bytes_after_the_handshake_deadline_are_refused() -> None:
    """A peer that trickles bytes does not stay: receiving looks at the clock too."""
    daemon = ServerSession(now_ns=100, handshake_ns=50)
    assert daemon.receive(encode_frame(F.HELLO, 1, HELLO.encode())[:10], 149) == []
    with pytest.raises(ProtocolError) as caught:
        daemon.receive(b"\x00", 150)
    assert caught.value.status is Status.DEADLINE


@pytest.mark.parametrize("state", [S.START, S.GREETED, S.WELCOMED, S.ATTACHING])
def test_before_open_a_peer_makes_us_hold_little(state: State) -> None:
    most = limits.FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX
    for machine in (Both(state).host, Both(state).daemon):
        with pytest.raises(ProtocolError) as caught:
            machine.receive(encode_frame(F.FETCH, 1, bytes(most + 1))[:16], 0)
        assert caught.value.status is Status.TOO_LARGE
        assert machine._decoder.buffered_bytes == 0


def test_open_sessions_take_whole_frames() -> None:
    both = Both(S.OPEN)
    keys = bytes(16 * limits.KEYS_PER_FRAME_MAX)
    assert both.ask(data.Exists(1, keys))
    bitmap = bytes(limits.KEYS_PER_FRAME_MAX // 8)
    both.answer(max(both.daemon.in_flight), data.ExistsReply(0, bitmap))


def test_a_closed_machine_refuses_everything() -> None:
    both = Both(S.OPEN)
    for machine in (both.host, both.daemon):
        machine.close()
        machine.close()
        with pytest.raises(ProtocolError) as caught:
            machine.receive(b"", 0)
        assert caught.value.status is Status.DISCONNECTED
    with pytest.raises(ProtocolError):
        both.host.send(EXAMPLES[F.PING])
    with pytest.raises(ProtocolError):
        both.daemon.send(opening.Goodbye(), 0)


def test_a_bad_payload_closes_the_session() -> None:
    daemon = Both(S.OPEN).daemon
    with pytest.raises(ProtocolError):
        daemon.receive(encode_frame(F.PING, 1, b"short"), 0)
    assert daemon.state is S.CLOSED


# The two against each other -----------------------------------------------------------------------


class Conversation(RuleBasedStateMachine):
    """Two machines and two byte pipes of any chunking, against a model of what is in flight.

    The model: `asked` holds what the host wants answered, `heard` what the daemon has received and
    not answered. Every request ends with exactly one final answer, or with the session.
    """

    @initialize(limit=st.integers(1, 6))
    def begin(self, limit: int) -> None:
        both = Both(S.OPEN)
        self.host, self.daemon = both.host, both.daemon
        self.limit = self.host.requests_in_flight_max = limit
        self.daemon.requests_in_flight_max = limit
        self.to_daemon = bytearray()
        self.to_host = bytearray()
        self.asked: dict[int, FrameType] = {}
        self.abandoned: set[int] = set()
        self.heard: dict[int, FrameType] = {}
        self.expected: list[Received] = []  # for the daemon, in order
        self.due: list[Received] = []  # for the host, in order
        self.said_goodbye = False

    @rule(kind=st.sampled_from(sorted(WORK | {F.RELEASE})))
    def host_sends(self, kind: FrameType) -> None:
        message = EXAMPLES[kind]
        if kind is not F.RELEASE and len(self.asked) >= self.limit:
            with pytest.raises(ProtocolError) as caught:
                self.host.send(message)
            assert caught.value.status is Status.BUSY
            return
        request_id, raw = self.host.send(message)
        assert request_id not in self.asked
        if kind is not F.RELEASE:
            self.asked[request_id] = kind
        self.to_daemon += raw
        self.expected.append(Received(request_id, message))

    @rule(size=st.integers(1, 400))
    def bytes_reach_the_daemon(self, size: int) -> None:
        part = bytes(self.to_daemon[:size])
        del self.to_daemon[:size]
        for received in self.daemon.receive(part, 0):
            assert received == self.expected.pop(0)
            if received.request_id:
                self.heard[received.request_id] = received.message.TYPE

    @precondition(lambda self: self.heard)
    @rule(pick=st.randoms(use_true_random=False), final=st.booleans(), error=st.booleans())
    def daemon_answers(self, pick: Any, final: bool, error: bool) -> None:
        request_id = pick.choice(sorted(self.heard))
        kind = self.heard[request_id]
        message = EXAMPLES[session.ANSWERS[kind]]
        if error:
            message = EXAMPLES[F.ERROR]
        elif kind is F.FETCH:
            message = grant(final)
        self.to_host += self.daemon.send(message, request_id)
        self.due.append(Received(request_id, message))
        if getattr(message, "final", True):
            del self.heard[request_id]

    @rule(size=st.integers(1, 400))
    def bytes_reach_the_host(self, size: int) -> None:
        part = bytes(self.to_host[:size])
        del self.to_host[:size]
        for received in self.host.receive(part, 0):
            assert received == self.due.pop(0)
            request_id = received.request_id
            wanted = self.host.settle(received)
            if request_id:
                assert wanted == (request_id not in self.abandoned)
                if getattr(received.message, "final", True):
                    del self.asked[request_id]
                    self.abandoned.discard(request_id)

    @precondition(lambda self: self.asked)
    @rule(pick=st.randoms(use_true_random=False))
    def host_abandons(self, pick: Any) -> None:
        request_id = pick.choice(sorted(self.asked))
        self.host.abandon(request_id)
        self.abandoned.add(request_id)

    @rule(by_host=st.booleans())
    def goodbye(self, by_host: bool) -> None:
        message = opening.Goodbye(Status.DRAINING)
        self.said_goodbye = True
        if by_host:
            _, raw = self.host.send(message)
            self.to_daemon += raw
            self.expected.append(Received(0, message))
        else:
            self.to_host += self.daemon.send(message, 0)
            self.due.append(Received(0, message))

    @invariant()
    def model_and_machines_agree(self) -> None:
        if not hasattr(self, "host"):
            return
        assert self.host.in_flight == self.asked
        assert self.daemon.in_flight == self.heard
        assert len(self.asked) <= self.limit
        states = {self.host.state, self.daemon.state}
        assert states <= ({S.OPEN, S.DRAINING} if self.said_goodbye else {S.OPEN})
        assert {r for r in self.asked if self.host.is_abandoned(r)} == self.abandoned

    def teardown(self) -> None:
        """Let everything arrive and be answered: nothing is left on either side."""
        if not hasattr(self, "host"):
            return
        self.bytes_reach_the_daemon(len(self.to_daemon) + 1)
        assert not self.expected
        for request_id, kind in sorted(self.heard.items()):
            message = grant(True) if kind is F.FETCH else EXAMPLES[session.ANSWERS[kind]]
            self.to_host += self.daemon.send(message, request_id)
            self.due.append(Received(request_id, message))
        self.heard.clear()
        self.bytes_reach_the_host(len(self.to_host) + 1)
        assert not self.due
        assert not self.asked
        assert not self.host.in_flight
        assert not self.daemon.in_flight


Conversation.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestConversation = Conversation.TestCase


class Handshakes(RuleBasedStateMachine):
    """Handshakes that fail, are retried, are refused or end early, with frames that cross."""

    @initialize()
    def begin(self) -> None:
        self.host, self.daemon = ClientSession(now_ns=0), ServerSession(now_ns=0)
        self.to_daemon: list[bytes] = []
        self.to_host: list[bytes] = []
        self.waiting = 0
        self.heard = 0

    def _over(self) -> bool:
        return S.CLOSED in (self.host.state, self.daemon.state)

    @rule(kind=st.sampled_from([F.HELLO, F.ATTACH, F.PING, F.GOODBYE]))
    def host_sends(self, kind: FrameType) -> None:
        try:
            request_id, raw = self.host.send(EXAMPLES[kind])
        except ProtocolError:
            assert (self.host.state, kind) not in FROM_HOST
            return
        assert (kind in (F.PING, F.GOODBYE)) <= (self.host.state in (S.OPEN, S.DRAINING))
        self.waiting = request_id or self.waiting
        self.to_daemon.append(raw)

    @rule(kind=st.sampled_from([F.WELCOME, F.ATTACHED, F.PONG, F.ERROR, F.GOODBYE]))
    def daemon_sends(self, kind: FrameType) -> None:
        ids = [0] if kind is F.GOODBYE else sorted(self.daemon.in_flight)
        for request_id in ids:
            try:
                raw = self.daemon.send(EXAMPLES[kind], request_id)
            except ProtocolError:
                continue
            self.to_host.append(raw)
            return

    @precondition(lambda self: self.to_daemon)
    @rule()
    def daemon_receives(self) -> None:
        raw = self.to_daemon.pop(0)
        if self.daemon.state is S.CLOSED:
            return  # it said why, or the timer ran; the stream is closed
        self.daemon.receive(raw, 0)

    @precondition(lambda self: self.to_host)
    @rule()
    def host_receives(self) -> None:
        raw = self.to_host.pop(0)
        if self.host.state is S.CLOSED:
            return
        self.host.receive(raw, 0)

    @invariant()
    def honest_peers_never_offend(self) -> None:
        """No rule above may raise: two machines that obey never see a ProtocolError."""
        if hasattr(self, "host") and not self._over():
            before_open = {S.START, S.GREETED, S.WELCOMED, S.ATTACHING}
            for machine in (self.host, self.daemon):
                if machine.state in before_open:
                    assert len(machine.in_flight) <= 1


Handshakes.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestHandshakes = Handshakes.TestCase
