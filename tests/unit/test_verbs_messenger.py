"""Messages of the verbs fabric between two messengers, without a device: what each may send."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from entresol_proto import limits
from entresol_proto.fabric import verbs_messenger
from entresol_proto.fabric.verbs_messenger import Messenger
from entresol_proto.fabric.verbs_wire import MESSAGE_BYTES, Kind, Message
from entresol_proto.status import ProtocolError, Status

SEED = 20_261_128
WINDOW = limits.VERBS_MESSAGES_IN_FLIGHT_MAX


class _Receive:
    def __init__(self, number: int, address: int, lkey: int, length_bytes: int) -> None:
        self.number, self.address = number, address

    def close(self) -> None:
        """It has nothing."""


class _Link:
    """A rail that keeps what is sent until it is asked for, and receives in order."""

    def __init__(self) -> None:
        self.destroyed = False
        self.sent: deque[tuple[Any, bytes]] = deque()
        self.receives: deque[_Receive] = deque()
        self.domain = SimpleNamespace(register=self._register)
        self.queue_pair = SimpleNamespace(post_receive=self.receives.append)

    def _register(self, address: int, length_bytes: int, access: int) -> Any:
        return SimpleNamespace(lkey=1, close=lambda: None)

    def post_send(self, work: Any, address: int, lkey: int) -> None:
        self.sent.append((work, ctypes.string_at(address, MESSAGE_BYTES)))


class _Side:
    def __init__(self) -> None:
        self.link = _Link()
        self.messenger = Messenger(self.link, 1)  # type: ignore[arg-type]
        self.messenger.start()

    def hear(self, raw: bytes) -> Message | None:
        receive = self.link.receives.popleft()  # a device never finds none
        ctypes.memmove(receive.address, raw, MESSAGE_BYTES)
        return self.messenger.take(receive.number, MESSAGE_BYTES)

    def pass_on(self, other: _Side) -> Message | None:
        work, raw = self.link.sent.popleft()
        work.over(self.link, Status.OK)
        return other.hear(raw)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(verbs_messenger, "Receive", _Receive)
    both = _Side(), _Side()
    yield both
    for side in both:
        side.messenger.close()


@pytest.mark.parametrize("seed", range(SEED, SEED + 20))
def test_whoever_keeps_to_the_rules_is_never_cut_off(sides: tuple[_Side, _Side], seed: int) -> None:
    random_ = random.Random(seed)
    talk = random_.random()  # of one side; the other one says the less
    said, heard = [0, 0], [0, 0]

    def pass_some() -> None:
        at = random_.randrange(2)
        if sides[at].link.sent and sides[at].pass_on(sides[1 - at]) is not None:
            heard[at] += 1

    for _ in range(3_000):
        at = random_.random() < talk
        if said[at] - heard[at] < 3 * WINDOW:
            said[at] += 1
            sides[at].messenger.send(Message(Kind.REVOKED, (7,)))
        for _ in range(random_.randrange(4)):
            pass_some()
    while any(side.link.sent for side in sides):
        pass_some()
    assert heard == said


def test_a_count_that_tells_nothing_new_ends_the_session(sides: tuple[_Side, _Side]) -> None:
    """Nothing bounded them: each was handled, up to 256 in a turn of the loop."""
    side = sides[0]
    side.messenger.send(Message(Kind.REVOKED, (7,)))
    assert side.hear(Message(Kind.TAKEN).encode(1)) is None
    with pytest.raises(ProtocolError, match="nothing new"):
        side.hear(Message(Kind.TAKEN).encode(1))


def test_more_messages_than_the_window_end_the_session(sides: tuple[_Side, _Side]) -> None:
    """Its own device takes nothing from it: what was told of its messages stays unsaid."""
    side = sides[0]
    heard = 0

    def flood() -> None:
        nonlocal heard
        for _ in range(100 * WINDOW):
            side.hear(Message(Kind.REVOKE, (7,)).encode(0))
            heard += 1

    with pytest.raises(ProtocolError, match="more messages"):
        flood()
    assert heard >= WINDOW
