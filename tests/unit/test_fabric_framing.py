"""The framing of tcp data streams: every split gives the same events, junk gives ProtocolError."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_proto import limits
from entresol_proto.fabric import framing
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.fabric.framing import FrameReader, Message
from entresol_proto.status import ProtocolError, Status

TICKET = bytes(range(16))


class Recorder:
    """Records events; data for odd requests is dropped."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.sink = bytearray()

    def on_hello(self, number: int, streams: int, ticket: bytes) -> None:
        self.events.append(("hello", number, streams, ticket))

    def on_welcome(self) -> None:
        self.events.append(("welcome",))

    def on_read(self, request: int, spans: memoryview) -> None:
        self.events.append(("read", request, bytes(spans)))

    def on_data(self, request: int, index: int, offset: int, length: int) -> memoryview | None:
        self.events.append(("data", request, index, offset, length))
        self.sink = bytearray(length)
        return None if request % 2 else memoryview(self.sink)

    def on_data_end(self) -> None:
        self.events.append(("end", bytes(self.sink)))

    def on_error(self, request: int, index: int, status: int) -> None:
        self.events.append(("error", request, index, status))

    def on_cancel(self, request: int) -> None:
        self.events.append(("cancel", request))


class Dropper(Recorder):
    """Takes any data and keeps none of it."""

    def on_data(self, request: int, index: int, offset: int, length: int) -> memoryview | None:
        self.events.append(("data", request, index, offset, length))
        return None


def feed(reader: FrameReader, content: bytes, sizes: list[int]) -> None:
    """Deliver `content` in receives of at most the given sizes, as a socket would."""
    at, turn = 0, 0
    while at < len(content):
        buffer = reader.buffer()
        assert len(buffer) > 0
        count = min(len(buffer), sizes[turn % len(sizes)], len(content) - at)
        buffer[:count] = content[at : at + count]
        reader.received(count)
        at, turn = at + count, turn + 1


def conversation() -> tuple[bytes, list[tuple[object, ...]]]:
    body = random.Random(7).randbytes(40_000)
    spans = [RemoteSpan(1, 2, 3), RemoteSpan(2**32 - 1, 2**63, 2**32 - 1)]
    packed = b"".join(framing.SPAN.pack(s.rkey, s.length_bytes, s.address) for s in spans)
    raw = b"".join(
        [
            framing.hello(1, 2, TICKET),
            framing.read(9, spans),
            framing.data(2, 5, 64, len(body)) + body,
            framing.error(3, 1, Status.LEASE_EXPIRED),
            framing.data(3, 0, 0, 100) + body[:100],
            framing.data(4, 0, 0, 1) + b"z",
            framing.cancel(77),
        ]
    )
    return raw, [
        ("hello", 1, 2, TICKET),
        ("read", 9, packed),
        ("data", 2, 5, 64, len(body)),
        ("end", body),
        ("error", 3, 1, 12),
        ("data", 3, 0, 0, 100),
        ("end", bytes(100)),
        ("data", 4, 0, 0, 1),
        ("end", b"z"),
        ("cancel", 77),
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 70_000), min_size=1, max_size=20))
def test_every_split_of_the_stream_gives_the_same_events(sizes: list[int]) -> None:
    raw, expected = conversation()
    recorder = Recorder()
    feed(FrameReader(recorder, Message.HELLO), raw, [max(1, size) for size in sizes])
    assert recorder.events == expected


def test_a_byte_at_a_time() -> None:
    raw, expected = conversation()
    recorder = Recorder()
    feed(FrameReader(recorder, Message.HELLO), raw, [1])
    assert recorder.events == expected


def test_diverting_leaves_the_rest_of_the_view_alone() -> None:
    recorder = Recorder()
    reader = FrameReader(recorder, Message.WELCOME)
    feed(reader, framing.welcome() + framing.data(8, 0, 0, 50_000) + b"a" * 20_000, [30_000])
    reader.divert(6)  # another request
    feed(reader, b"b" * 10_000, [30_000])
    reader.divert(8)
    feed(reader, b"c" * 20_000 + framing.cancel(1), [30_000])
    assert recorder.events[-1] == ("cancel", 1)
    assert recorder.sink == b"a" * 20_000 + b"b" * 10_000 + bytes(20_000)


def _header(kind: int, length: int, *, status: int = 0, request: int = 0) -> bytes:
    return framing.HEADER.pack(kind, status, 0, request, 0, length)


@pytest.mark.parametrize(
    "message",
    [
        _header(Message.READ, 0),
        _header(Message.READ, 17),
        _header(Message.READ, (limits.SPANS_PER_READ_MAX + 1) * framing.SPAN.size),
        _header(Message.READ, 2**32 - 16),
        _header(Message.DATA, 0),
        _header(Message.DATA, limits.BLOCK_BYTES_MAX + 1),
        _header(Message.ERROR, 1),
        _header(Message.CANCEL, 1),
        _header(0, 0),
        _header(7, 0),
        _header(255, 0),
        framing.hello(0, 1, TICKET),
        framing.welcome(),
    ],
)
def test_messages_past_their_limits_end_the_stream(message: bytes) -> None:
    recorder = Recorder()
    reader = FrameReader(recorder, Message.WELCOME)
    feed(reader, framing.welcome(), [64])
    with pytest.raises(ProtocolError):
        feed(reader, message, [64])
    assert recorder.events == [("welcome",)]


def test_messages_at_their_limits_pass() -> None:
    recorder = Recorder()
    reader = FrameReader(recorder, Message.WELCOME)
    spans = [RemoteSpan(0, 0, 1)] * limits.SPANS_PER_READ_MAX
    feed(reader, framing.welcome() + framing.read(1, spans), [5_000])
    feed(reader, framing.data(3, 0, 0, limits.BLOCK_BYTES_MAX), [64])
    assert recorder.events[1][2] == framing.SPAN.pack(0, 1, 0) * limits.SPANS_PER_READ_MAX
    assert recorder.events[2] == ("data", 3, 0, 0, limits.BLOCK_BYTES_MAX)


@pytest.mark.parametrize("first", [Message.HELLO, Message.WELCOME])
def test_only_the_right_greeting_is_first(first: Message) -> None:
    good = framing.hello(0, 1, TICKET) if first is Message.HELLO else framing.welcome()
    other = framing.welcome() if first is Message.HELLO else framing.hello(0, 1, TICKET)
    wrong_magic = good[:4] + b"\0\0\0\0" + good[8:]
    wrong_version = good[:1] + b"\x02" + good[2:]
    wrong_length = good[:12] + b"\x11\0\0\0" + good[16:]
    for raw in (other, wrong_magic, wrong_version, wrong_length, framing.cancel(0)):
        recorder = Recorder()
        with pytest.raises(ProtocolError):
            feed(FrameReader(recorder, first), raw, [64])
        assert recorder.events == []
    feed(FrameReader(Recorder(), first), good, [3])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.booleans(), st.lists(st.integers(1, 100), min_size=1))
def test_junk_is_refused_in_order_or_parsed(raw: bytes, greeted: bool, sizes: list[int]) -> None:
    """The canary: anything but a ProtocolError from junk fails this."""
    recorder = Recorder()
    reader = FrameReader(recorder, Message.WELCOME)
    if greeted:
        feed(reader, framing.welcome(), [64])
        recorder.events.clear()
    try:
        feed(reader, raw, sizes)
    except ProtocolError:
        return
    if not greeted:  # nothing passes without the greeting
        assert len(raw) < framing.HEADER.size or recorder.events[0] == ("welcome",)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 9), st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=90))
def test_junk_headers_with_valid_types(kind: int, status: int, length: int, tail: bytes) -> None:
    recorder = Dropper()
    reader = FrameReader(recorder, Message.WELCOME)
    feed(reader, framing.welcome(), [64])
    try:
        feed(reader, _header(kind, length, status=status) + tail, [64])
    except ProtocolError:
        return
    for event in recorder.events:
        assert event[0] != "data" or 0 < int(str(event[4])) <= limits.BLOCK_BYTES_MAX
