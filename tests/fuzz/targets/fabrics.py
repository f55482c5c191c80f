"""The data paths: tcp messages (in Python and in the kernel), offers, shm and verbs messages."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import AbstractContextManager
from random import Random
from unittest.mock import patch

from entresol_proto import limits, native
from entresol_proto.fabric import framing, shm, shmlink, verbs_wire
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.fabric.framing import FrameReader
from entresol_proto.fabric.tcp_wire import TcpParams
from entresol_proto.native import Received, Receiving
from entresol_proto.status import FabricError, ProtocolError
from tests.fuzz.mutate import INTERESTING
from tests.fuzz.target import Parser, Target
from tests.fuzz.targets.wire import cut

TICKET = bytes(range(limits.TICKET_BYTES))
SINK = 4096  # longer payloads are dropped, as a stream does with what nobody asked for


# The tcp data stream ------------------------------------------------------------------------------


class Sink:
    """The other side of a `FrameReader`: memory for what fits, counts of the rest."""

    def __init__(self) -> None:
        self.memory = bytearray(SINK)
        self.seen: list[str] = []
        self.expected = 0

    def on_hello(self, number: int, streams: int, ticket: bytes) -> None:
        assert len(ticket) == limits.TICKET_BYTES
        self.seen.append("hello")

    def on_welcome(self) -> None:
        self.seen.append("welcome")

    def on_read(self, request: int, spans: memoryview) -> None:
        assert 0 < len(spans) <= limits.SPANS_PER_READ_MAX * framing.SPAN.size
        assert len(spans) % framing.SPAN.size == 0
        self.seen.append("read")

    def on_data(self, request: int, index: int, offset: int, length: int) -> memoryview | None:
        assert 0 < length <= limits.BLOCK_BYTES_MAX
        self.seen.append("data")
        return memoryview(self.memory)[:length] if length <= SINK and request % 2 else None

    def on_data_end(self) -> None:
        self.seen.append("end")

    def on_error(self, request: int, index: int, status: int) -> None:
        framing.answered_status(status)
        self.seen.append("error")

    def on_cancel(self, request: int) -> None:
        self.seen.append("cancel")


def tcp_seeds() -> list[bytes]:
    """`u8 how the network cuts it, u8 who is first`, then a stream."""
    spans = [RemoteSpan(1, 0, 100), RemoteSpan(2, 2**40, 5)]
    talk = (
        framing.read(1, spans)
        + framing.data(1, 0, 0, 100) + b"p" * 100 + framing.data(2, 1, 0, 5) + b"q" * 5
        + framing.error(1, framing.EVERY_INDEX, 12) + framing.cancel(1)
    )  # fmt: skip
    hello, welcome = framing.hello(0, 2, TICKET), framing.welcome()
    return [
        b"\0\0" + hello + talk, b"\1\1" + welcome + talk, b"\2\0" + hello, b"\3\1" + welcome,
        b"\0\1" + welcome + framing.HEADER.pack(framing.Message.READ, 0, 0, 1, 0, 20) + bytes(20),
        b"\4\1" + welcome + framing.data(1, 0, 0, SINK) + b"z" * SINK,
    ]  # fmt: skip


def fix_tcp(rng: Random, raw: bytes) -> bytes:
    """A whole greeting in front, so that what follows is read; at times an odd field behind it."""
    greeting = framing.welcome() if raw[1:2] == b"\1" else framing.hello(0, 2, TICKET)
    out = bytearray(raw[:2].ljust(2, b"\0") + greeting + raw[2 + len(greeting) :])
    at = 2 + len(greeting)
    if len(out) >= at + framing.HEADER.size and rng.random() < 0.4:
        if rng.random() < 0.5:
            out[at] = rng.randrange(8)
        field = at + rng.choice((4, 8, 12))
        value = rng.choice((*INTERESTING, limits.BLOCK_BYTES_MAX, 65_536, 16))
        out[field : field + 4] = ((value + rng.randint(-1, 1)) % 2**32).to_bytes(4, "little")
    return bytes(out)


def tcp_parser() -> Parser:
    """Calls within their bounds, or a ProtocolError; never more held than one message."""

    def parse(raw: bytes) -> str:
        sink = Sink()
        first = framing.Message.WELCOME if raw[1:2] == b"\1" else framing.Message.HELLO
        reader = FrameReader(sink, first)
        outcome = "ok"
        try:
            for part in cut(raw[2:], raw[0] if raw else 0):
                while part:
                    buffer = reader.buffer()
                    assert 0 < len(buffer) <= limits.BLOCK_BYTES_MAX
                    count = min(len(buffer), len(part))
                    buffer[:count] = part[:count]
                    reader.received(count)
                    part = part[count:]
        except ProtocolError:
            outcome = "refused"
        assert sink.seen.count("end") <= sink.seen.count("data")
        greetings = sink.seen.count("hello") + sink.seen.count("welcome")
        assert greetings == 0 or sink.seen[0] in ("hello", "welcome")
        assert greetings <= 1, "a second greeting was taken"
        return f"{outcome} {' '.join(sorted(set(sink.seen)))}"

    return parse


def _any_length() -> AbstractContextManager[object]:
    return patch.object(framing, "is_read_length", lambda length: True)


# The native kernel --------------------------------------------------------------------------------


def landing_seeds() -> list[bytes]:
    """`u16 length of the span`, then the stream that answers it."""

    def span(size: int, *pieces: int) -> bytes:
        at, parts = 0, []
        for piece in pieces:
            parts.append(framing.data(7, 3, at, piece) + bytes([at % 251]) * piece)
            at += piece
        return struct.pack("<H", size - 1) + b"".join(parts)

    return [span(100, 100), span(300, 100, 150, 50), span(64, 64) + framing.error(7, 3, 12),
            span(500, 200) + framing.cancel(1), span(2, 1, 1), struct.pack("<H", 9)]  # fmt: skip


def fix_landing(rng: Random, raw: bytes) -> bytes:
    """Sometimes an odd number in a header that is read."""
    at = 2 + rng.choice((0, 2, 4, 8, 12))
    if len(raw) < at + 4 or rng.random() < 0.4:
        return raw
    value = (rng.choice(INTERESTING) + rng.randint(-1, 1)) % 2**32
    return raw[:at] + value.to_bytes(4, "little") + raw[at + 4 :]


def landing_model(stream: bytes, length: int) -> tuple[int, bytes, bytes]:
    """(how it ends, what landed, what came of the next message): what kernel.c must do."""
    landed, at = b"", 0
    while len(landed) < length:
        head = stream[at : at + framing.HEADER.size]
        if len(head) < framing.HEADER.size:
            return Received.ENDED, landed, head
        kind, _, index, request, offset, size = framing.HEADER.unpack(head)
        fits = kind == framing.Message.DATA and (index, request) == (3, 7)
        if not fits or offset != len(landed) or not 0 < size <= length - len(landed):
            return Received.OTHER, landed, head
        at += framing.HEADER.size
        landed += stream[at : at + size]
        if len(stream) < at + size:
            return Received.ENDED, landed, b""
        at += size
    return Received.DONE, landed, stream[at : at + framing.HEADER.size]


def landing_parser() -> Parser:
    """The kernel lands what the model says, and writes nowhere else."""
    if native.KERNEL is None:
        return lambda raw: "not run here: built without a C compiler"
    kernel, guard = native.KERNEL, b"\x5a" * 64
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def parse(raw: bytes) -> str:
        length = 1 + int.from_bytes(raw[:2], "little") % 4096
        stream = raw[2:]
        memory = bytearray(guard + bytes(length) + guard)
        state = Receiving()
        state.into = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + len(guard)
        state.length_bytes, state.request, state.index = length, 7, 3
        ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, peer:
            peer.sendall(stream)
            peer.shutdown(socket.SHUT_WR)
            ended = kernel.receive(ours.fileno(), wake, state)
        expected, landed, header = landing_model(stream, length)
        assert memory[:64] == memory[-64:] == guard, "the kernel wrote outside the span"
        assert ended == expected, f"ended {ended}, the model {expected}"
        assert memory[64 : 64 + len(landed)] == landed, "other bytes landed"
        assert state.received_bytes == len(landed)
        assert bytes(state.header[: state.header_bytes]) == header
        return Received(ended).name

    return parse


def _kernel_that_skips_offsets() -> AbstractContextManager[object]:
    """Lands the pieces of a span in any order."""
    assert native.KERNEL is not None
    whole = native.KERNEL.receive

    def receive(fd: int, wake_fd: int, state: Receiving) -> int:
        ended = whole(fd, wake_fd, state)
        return int(Received.DONE) if ended == Received.OTHER else ended

    return patch.object(native.KERNEL, "receive", receive)


# Offers, shm and verbs messages -------------------------------------------------------------------

_TCP, _SHM, _OFFER, _REPLY, _HELLO, _SHM_MESSAGE, _VERBS_MESSAGE = range(7)


def _rails(count: int) -> tuple[verbs_wire.Rail, ...]:
    gid = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
    return tuple(verbs_wire.Rail(n, False, 1024, 16, 0, 17 + n, 5, gid) for n in range(count))


def offer_seeds() -> list[bytes]:
    """`u8 which`, `u8 descriptors or rails`, then the message."""
    message = verbs_wire.Message
    kind = verbs_wire.Kind
    host = TcpParams("127.0.0.1", 7442, 2, False, TICKET, None)
    pinned = TcpParams("pod-7.example", 7442, 8, True, TICKET, b"p" * 32)
    plain = [
        (_TCP, 0, host.encode()),
        (_TCP, 0, pinned.encode()),
        (_SHM, 0, shm._Params(b"h" * 16, TICKET, "/run/entresol/data.sock").encode()),
        (_OFFER, 0, verbs_wire.OfferParams(True, 5_000, TICKET, _rails(1)).encode()),
        (_OFFER, 0, verbs_wire.OfferParams(False, 1, TICKET, _rails(4)).encode()),
        (_REPLY, 0, verbs_wire.ReplyParams(TICKET, _rails(2)).encode()),
        (_HELLO, 0, shmlink.hello(TICKET)),
        (_SHM_MESSAGE, 1, shmlink.Message(shmlink.Kind.EXPOSE, 5, 0, 4096).encode()),
        (_SHM_MESSAGE, 0, shmlink.Message(shmlink.Kind.REVOKE, 5).encode()),
        (_VERBS_MESSAGE, 2, message(kind.EXPOSED, (1, 2), 2**40, 4096).encode(7)),
        (_VERBS_MESSAGE, 2, message(kind.REVOKE, (1,)).encode(8)),
        (_VERBS_MESSAGE, 1, message(kind.GOODBYE).encode(9)),
    ]
    return [bytes([which, count]) + raw for which, count, raw in plain]


def offers_parser() -> Parser:
    """Refused, or what the peer's own encoder would have sent."""

    def parse(raw: bytes) -> str:
        which, count, body = raw[0] % 7 if raw else 0, raw[1] % 5 if raw[1:] else 0, raw[2:]
        try:
            ok = _parse_one(which, count, body)
        except (FabricError, ProtocolError):
            return f"{which} refused"
        assert ok == body, f"{which}: two encodings"
        return f"{which} ok {count}"

    return parse


def _parse_one(which: int, count: int, body: bytes) -> bytes:
    """The bytes that the decoded message encodes to."""
    if which == _TCP:
        offer = TcpParams.parse(body)
        assert len(offer.ticket) == limits.TICKET_BYTES, "a ticket that is cut short"
        assert offer.pin is None or len(offer.pin) == 32, "a pin that is cut short"
        return offer.encode()
    if which == _SHM:
        return shm._Params.parse(body).encode()
    if which == _OFFER:
        return verbs_wire.OfferParams.parse(body).encode()
    if which == _REPLY:
        return verbs_wire.ReplyParams.parse(body).encode()
    if which == _HELLO:
        return shmlink.hello(shmlink.parse_hello(body))
    if which == _SHM_MESSAGE:
        return shmlink.parse(body, [9] * count).encode()
    message, taken = verbs_wire.Message.parse(body, max(1, min(count, limits.VERBS_RAILS_MAX)))
    return message.encode(taken)


def _any_hello(packet: bytes) -> bytes:
    return packet[-limits.TICKET_BYTES :]


TARGETS = (
    Target(
        name="tcp_stream", share=45, seeds=tcp_seeds, make=tcp_parser, fix=fix_tcp,
        canaries=(_any_length,), modules=("entresol_proto.fabric.framing",),
    ),
    Target(
        name="tcp_kernel", share=30, seeds=landing_seeds, make=landing_parser, fix=fix_landing,
        canaries=(_kernel_that_skips_offsets,) if native.KERNEL is not None else (_any_length,),
        modules=(),
    ),
    Target(
        name="fabric_messages", share=50, seeds=offer_seeds, make=offers_parser,
        canaries=(lambda: patch.object(shmlink, "parse_hello", _any_hello),),
        modules=("entresol_proto.fabric.tcp_wire", "entresol_proto.fabric.shm",
                 "entresol_proto.fabric.shmlink", "entresol_proto.fabric.verbs_wire"),
    ),
)  # fmt: skip
