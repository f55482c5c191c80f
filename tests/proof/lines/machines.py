"""F2: both session machines against a model that was written from the format's page.

A unit is a walk of STEPS steps: one real machine and the model get the same frames, timers and
closings, fitting ones and ones that no peer should send, and must agree on what passes, the state
and what is in flight. Every slice also walks all (state, frame) pairs of both sides, both ways.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from unittest.mock import patch

from entresol_proto import limits
from entresol_proto.status import ProtocolError
from entresol_proto.wire.frames import FrameType, encode_frame
from entresol_proto.wire.session import ClientSession, ServerSession, State
from tests.proof.line import Line, Size, Slice, Tally
from tests.session_model import ANSWER, FROM_DAEMON, FROM_HOST, Model
from tests.wire_messages import EXAMPLES

STEPS = 50
F, S = FrameType, State
KINDS = tuple(FrameType)
PAYLOADS = {kind: EXAMPLES[kind].encode() for kind in KINDS}
GRANTS = tuple(dataclasses.replace(EXAMPLES[F.GRANT], final=final) for final in (False, True))
ROOM = 5  # requests in flight, so that walks get to the limit
BROKEN = b"\xff\xff\xff"  # behind any payload: no message has such a tail
# Their payload is one run of bytes of any length, which others read: a tail is part of it.
OPEN_ENDED = (F.OPEN_NAMESPACE, F.EXISTS_REPLY)
PAIRS = 2 * 2 * len(State) * len(FrameType)


class Disagree(AssertionError):
    """The machine did what the model did not."""


class Walk:
    """One machine beside its model."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.hosts = rng.random() < 0.5
        self.now_ns = 0
        room = rng.choice((1, 2, ROOM))
        kind = ClientSession if self.hosts else ServerSession
        self.machine: ClientSession | ServerSession = kind(now_ns=0, requests_in_flight_max=room)
        self.model = Model(room=room)
        self.ids: list[int] = []  # that the host gave, or that we gave it

    def step(self) -> None:
        """One action. Raises: Disagree."""
        rng = self.rng
        chance = rng.random()
        if chance < 0.02:
            self.now_ns += rng.choice((1, 10**9, limits.HANDSHAKE_DEADLINE_NS))
            said = self._passes(lambda: self.machine.handle_timer(self.now_ns))
            timed_out = self.model.state is not S.CLOSED and not self.model.on_time(self.now_ns)
            self._agree(said, not timed_out, "timer")
        elif chance < 0.025:
            self.machine.close()
            self.model.close()
            self._agree(True, True, "close")
        elif chance < 0.6:
            self._receive()
        else:
            self._send()

    def _receive(self) -> None:
        incoming = FROM_DAEMON if self.hosts else FROM_HOST
        kind, number = self._choose(incoming)
        payload, final = self._payload(kind)
        broken = self.rng.random() < 0.03 and kind not in OPEN_ENDED
        raw = encode_frame(kind, number, payload + (BROKEN if broken else b""))
        cut = self.rng.randrange(len(raw)) if self.rng.random() < 0.1 else 0
        said = self._passes(lambda: self._feed(raw, cut))
        expected = self.model.on_time(self.now_ns)
        if expected:
            before = self.model.state
            if self.hosts:
                expected = self.model.from_daemon(kind, number, final=final) and not broken
            else:
                expected = self.model.from_host(kind, number) and not broken
            if not expected:
                self.model.close()
            elif self.hosts and kind is F.WELCOME and before is S.GREETED:
                told = EXAMPLES[F.WELCOME].requests_in_flight_max
                self.model.room = min(self.model.room, max(1, told))
        self._agree(said, expected, f"receive {kind.name} {number}")

    def _feed(self, raw: bytes, cut: int) -> None:
        if cut:
            self.machine.receive(raw[:cut], self.now_ns)
        self.machine.receive(raw[cut:], self.now_ns)

    def _send(self) -> None:
        outgoing = FROM_HOST if self.hosts else FROM_DAEMON
        kind, number = self._choose(outgoing)
        final = True
        message = EXAMPLES[kind]
        if kind is F.GRANT:
            final = self.rng.random() < 0.5
            message = GRANTS[final]
        if isinstance(self.machine, ClientSession):
            self._host_sends(self.machine, kind)
            return
        machine = self.machine
        said = self._passes(lambda: machine.send(message, number))
        expected = self.model.from_daemon(kind, number, final=final)
        self._agree(said, expected, f"send {kind.name} {number}")

    def _host_sends(self, machine: ClientSession, kind: FrameType) -> None:
        given: list[int] = []
        said = self._passes(lambda: given.append(machine.send(EXAMPLES[kind])[0]))
        number = given[0] if given else (0 if kind not in ANSWER else 2**31)
        expected = self.model.from_host(kind, number)
        if given and given[0]:
            self.ids.append(given[0])
        self._agree(said, expected, f"send {kind.name} {number}")

    def _choose(self, table: dict[tuple[State, FrameType], State]) -> tuple[FrameType, int]:
        """Mostly what may pass now: otherwise every walk would end at its first step."""
        rng, flight = self.rng, self.model.in_flight
        if rng.random() < 0.04:
            return rng.choice(KINDS), rng.choice((0, 1, 2, *flight))
        if table is FROM_DAEMON and flight and rng.random() < 0.7:
            number = rng.choice(list(flight))
            return (F.ERROR if rng.random() < 0.15 else ANSWER[flight[number]]), number
        allowed = [kind for state, kind in table if state is self.model.state]
        kind = rng.choice(allowed) if allowed else rng.choice(KINDS)
        if table is FROM_HOST:
            free = rng.randrange(1, 1000)
            return kind, 0 if kind not in ANSWER else rng.choice((free, free, free, *flight))
        if kind is F.GOODBYE and rng.random() < 0.8:
            return (kind if rng.random() < 0.1 else F.PONG), 0
        return kind, rng.choice((0, *flight)) if rng.random() < 0.3 else 0

    def _payload(self, kind: FrameType) -> tuple[bytes, bool]:
        if kind is F.GRANT:
            final = self.rng.random() < 0.5
            return GRANTS[final].encode(), final
        return PAYLOADS[kind], True

    @staticmethod
    def _passes(action: object) -> bool:
        try:
            action()  # type: ignore[operator]
        except ProtocolError:
            return False
        return True

    def _agree(self, said: bool, expected: bool, what: str) -> None:
        machine, model = self.machine, self.model
        side = "host" if self.hosts else "daemon"
        if said is not expected:
            raise Disagree(f"{side} {what}: {said}, the model says {expected} in {model.state}")
        if machine.state is not model.state:
            raise Disagree(f"{side} {what}: state {machine.state}, the model {model.state}")
        if machine.in_flight != model.in_flight:
            raise Disagree(f"{side} {what}: in flight {machine.in_flight}, model {model.in_flight}")


def pair(
    side: type[ClientSession | ServerSession], state: State, kind: FrameType, out: bool
) -> None:
    """A frame in a state, received or sent, by a side. Raises: Disagree."""
    machine, model = side(now_ns=0), Model()
    machine.state = model.state = state
    hosts = side is ClientSession
    from_host = hosts is out
    number = 0 if kind is F.GOODBYE else 7
    if from_host:
        number = 7 if kind in ANSWER else 0
    else:
        asked = next((ask for ask, answer in ANSWER.items() if answer is kind), F.FETCH)
        if state not in (S.START, S.CLOSED) and not (state is S.WELCOMED and kind is F.ERROR):
            machine.in_flight[7] = model.in_flight[7] = asked
        else:
            number = 0 if kind is F.ERROR else number
    try:
        if not out:
            machine.receive(encode_frame(kind, number, PAYLOADS[kind]), 1)
        elif isinstance(machine, ClientSession):
            machine._next_id = 6
            machine.send(EXAMPLES[kind])
        else:
            machine.send(EXAMPLES[kind], number)
        said = True
    except ProtocolError:
        said = False
    final = getattr(EXAMPLES[kind], "final", True)
    expected = state is not S.CLOSED and (
        model.from_host(kind, number) if from_host else model.from_daemon(kind, number, final=final)
    )
    if not expected and not out:
        model.close()
    if said is not expected or machine.state is not model.state:
        raise Disagree(f"{side.__name__} {state.name} {kind.name} out={out}: {said}, {expected}")


def all_pairs() -> int:
    """Every (state, frame) of both sides, received and sent; how many."""
    done = 0
    for side in (ServerSession, ClientSession):
        for state in State:
            for kind in FrameType:
                for out in (False, True):
                    pair(side, state, kind, out)
                    done += 1
    return done


def run(work: Slice) -> Tally:
    """All pairs once, then the walks of the slice."""
    tally = Tally()
    try:
        pairs = all_pairs()
        assert pairs == PAIRS, "a pair was left out"
        tally.figure("min_pairs", pairs)
    except Disagree as error:
        tally.found(work.seed, str(error))
    for seed in work.seeds:
        walk = Walk(Random(seed))
        steps = 0
        try:
            while steps < STEPS:
                if walk.model.state is S.CLOSED and walk.rng.random() < 0.7:
                    walk = Walk(walk.rng)
                walk.step()
                steps += 1
        except Disagree as error:
            tally.found(seed, str(error))
        except Exception as error:
            tally.crashes += 1
            tally.found(seed, f"{type(error).__name__}: {error}")
        tally.tried += STEPS
        tally.survived += steps
    tally.figure("walks", work.units)
    return tally


def canary() -> None:
    """A machine that lets one request too many in flight is found, and so is a pair too much."""
    from entresol_proto.wire import session

    with patch.dict(session.HOST_FRAMES, {(S.GREETED, F.FETCH): S.GREETED}):
        broken = run(Slice(1, 1, Size.COMMIT, _NOWHERE))
    assert broken.findings, "a pair that is allowed by mistake was not found"
    whole = ServerSession.__init__

    def one_more(self: ServerSession, **options: int) -> None:
        options["requests_in_flight_max"] = options.get("requests_in_flight_max", 256) + 1
        whole(self, **options)

    with patch.object(ServerSession, "__init__", one_more):
        broken = run(Slice(1, 200, Size.COMMIT, _NOWHERE))
    assert broken.findings, "one request too many in flight was not found"


_NOWHERE = Path("/nonexistent")  # the line writes nothing

LINES = (
    Line(
        id="F2",
        name="session machines against a model",
        unit="walks of 50 steps",
        units={Size.COMMIT: 400, Size.NIGHTLY: 20_000, Size.RELEASE: 100_000},
        slice_units=10_000,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
    ),
)
