"""What comes over the control stream: frames, messages, descriptors, the two session machines.

The last three begin with bytes that say how to go about it: which message, which state, how the
network cuts the stream.
"""

from __future__ import annotations

import copy
import functools
import struct
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

from entresol_proto import limits
from entresol_proto.ids import (
    BadKeyError,
    HostSealedNamespace,
    NamespaceDescriptor,
    parse_namespace,
)
from entresol_proto.status import ProtocolError
from entresol_proto.wire import session
from entresol_proto.wire.cursor import Cursor
from entresol_proto.wire.frames import Frame, FrameDecoder, FrameType, encode_frame
from entresol_proto.wire.session import ClientSession, ServerSession, State
from tests.fuzz.mutate import INTERESTING
from tests.fuzz.target import Parser, Target
from tests.wire_messages import CARRYING, EXAMPLES

HEADER = limits.FRAME_HEADER_BYTES
HELD_BYTES_MAX = HEADER + limits.FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX
PIECES = (1, 7, 16, 64, 1000, 1 << 30)
KINDS = tuple(FrameType)
PAYLOADS = {kind: EXAMPLES[kind].encode() for kind in KINDS}
STEPS = 5  # how far `advance` may take a session


def cut(raw: bytes, how: int) -> list[bytes]:
    """The stream as the network may deliver it; `how` is a byte of the input."""
    parts = []
    while raw:
        how = (how * 5 + 17) % 251
        size = PIECES[how % len(PIECES)]
        parts.append(raw[:size])
        raw = raw[size:]
    return parts


def fix_frames(rng: Random, raw: bytes, at: int) -> bytes:
    """Give the frames from `at` on a checksum again; sometimes after damaging a header field."""
    out = bytearray(raw)
    while at + HEADER <= len(out):
        if rng.random() < 0.2:
            damage_header(rng, out, at)
        out[at + 12 : at + HEADER] = zlib.crc32(out[at : at + 12]).to_bytes(4, "little")
        at += HEADER + int.from_bytes(out[at + 8 : at + 12], "little")
    return bytes(out)


def damage_header(rng: Random, out: bytearray, at: int) -> None:
    """Another value in one of a frame header's fields."""
    kind = rng.randrange(6)
    if kind == 0:
        out[at + 8 : at + 12] = (rng.choice(INTERESTING) % 2**32).to_bytes(4, "little")
    elif kind == 1:
        out[at + 3] = rng.randrange(256)
    elif kind == 2:
        out[at + 2] = rng.randrange(4)
    elif kind == 3:
        request_id = rng.choice((0, 1, 2, 10, 0xFFFF_FFFF))
        out[at + 4 : at + 8] = request_id.to_bytes(4, "little")
    elif kind == 4:
        length = int.from_bytes(out[at + 8 : at + 12], "little") + rng.randint(-4, 4)
        out[at + 8 : at + 12] = (length % 2**32).to_bytes(4, "little")
    else:
        out[at + 3] = rng.choice(KINDS)


# Frames -------------------------------------------------------------------------------------------


def frame_seeds() -> list[bytes]:
    """One of each type, streams of several, an empty one, the longest header-only ones."""
    one = [encode_frame(kind, kind % 3, PAYLOADS[kind]) for kind in KINDS]
    streams = [b"".join(one[at : at + 4]) for at in range(0, len(one), 4)]
    long = encode_frame(FrameType.PING, 1, bytes(limits.FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX))
    return [bytes([n]) + raw for n, raw in enumerate([b"", *one, *streams, long])]


def frames_parser() -> Parser:
    """What is accepted was announced, is bounded and has its checksum; nothing broken is held."""

    def parse(raw: bytes) -> str:
        stream = raw[1:]
        decoder = FrameDecoder()
        frames: list[Frame] = []
        outcome = f"ok {len(stream) % HEADER == 0}"
        for part in cut(stream, raw[0] if raw else 0):
            try:
                frames += decoder.feed(part)
            except ProtocolError as error:
                assert decoder.buffered_bytes == 0, "a broken stream is still held"
                outcome = f"refused {error.status.label}"
                break
            assert decoder.buffered_bytes <= HELD_BYTES_MAX, "holds more than a frame"
        again = b"".join(encode_frame(f.type, f.request_id, f.payload) for f in frames)
        assert stream.startswith(again), "accepted what was not there"
        assert all(len(f.payload) <= limits.FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX for f in frames)
        return outcome

    return parse


def _trusts_lengths(self: FrameDecoder, *_: object) -> None:
    self._payload_bytes_max = 2**33
    self._buffer = bytearray()
    self._broken = False


def _skips_the_checksum(
    self: FrameDecoder, data: memoryview, at: int
) -> tuple[FrameType, int, int]:
    magic, _, kind, request_id, length = struct.unpack_from("<HBBII", data, at)
    if magic != 0x5345 or kind not in KINDS or length > self._payload_bytes_max:
        raise ProtocolError("refused")
    return FrameType(kind), request_id, length


def _keeps_broken_streams(self: FrameDecoder, data: bytes) -> list[Frame]:
    return self._feed(data)


# Messages -----------------------------------------------------------------------------------------


def message_seeds() -> list[bytes]:
    """An example of each type behind the type's byte, and a get whose blocks are carried."""
    asks = replace(EXAMPLES[FrameType.FETCH], carry=True).encode()
    carrying = [bytes([FrameType.FETCH]) + asks, bytes([FrameType.GRANT]) + CARRYING.encode()]
    return [bytes([kind]) + PAYLOADS[kind] for kind in KINDS] + carrying


def messages_parser() -> Parser:
    """Refused, or they mean exactly the bytes they were."""

    def parse(raw: bytes) -> str:
        kind = KINDS[(raw[0] if raw else 0) % len(KINDS)]
        if raw and raw[0] in session._DECODERS:
            kind = FrameType(raw[0])
        payload = raw[1:]
        try:
            message = session._DECODERS[kind](payload)
        except ProtocolError:
            return f"{kind.name} refused"
        if kind is not FrameType.WELCOME:  # it leaves out fabrics that it does not know
            assert message.encode() == payload, f"{kind.name} has two encodings"
        return kind.name

    return parse


def _short(self: Cursor, length: int) -> bytes:
    part = self._raw[self._at : self._at + length]
    self._at += len(part)
    return part


def _unchecked(self: Cursor, layout: struct.Struct) -> tuple[Any, ...]:
    values = layout.unpack_from(self._raw, self._at)
    self._at += layout.size
    return values


_CURSOR_FAULTS: tuple[tuple[str, Callable[..., object]], ...] = (
    ("done", lambda self: None),  # trailing bytes pass
    ("zero", lambda self, value: None),  # reserved fields carry anything
    ("flag", lambda self, value: bool(value)),  # 2 is true as well
    ("take", _short),  # what is there, instead of refusing
    ("unpack", _unchecked),  # struct.error instead of ProtocolError
    ("text", lambda self, length, bytes_max=1024: self.take(length).decode()),
)


def cursor_fault(name: str, fault: Callable[..., object]) -> AbstractContextManager[object]:
    """A cursor that is broken in one place."""
    return patch.object(Cursor, name, fault)


# Descriptors --------------------------------------------------------------------------------------


def descriptor_seeds() -> list[bytes]:
    """The least and the most that one can say."""
    return [
        NamespaceDescriptor("m").canonical(),
        NamespaceDescriptor(
            "org/model", lora="adapter", cache_salt="salt", layers=126, kv_heads=8, head_dim=128
        ).canonical(),
        NamespaceDescriptor("é" * 256, "r" * 512, page_layout="x" * 512).canonical(),
        HostSealedNamespace(bytes(range(32)), 1, 16).canonical(),
    ]


def descriptors_parser() -> Parser:
    """Refused, or canonical."""

    def parse(raw: bytes) -> str:
        try:
            found = parse_namespace(raw)
        except BadKeyError:
            return "refused"
        assert found.canonical() == raw
        if isinstance(found, HostSealedNamespace):
            return "host-sealed"
        return f"ok {found.lora is None} {found.cache_salt is None}"

    return parse


def _descriptor_fault() -> AbstractContextManager[object]:
    def parse(raw: bytes) -> NamespaceDescriptor:
        raw.decode("ascii")
        raise BadKeyError("never gets this far with other bytes")

    return patch.object(NamespaceDescriptor, "parse", parse)


# Sessions -----------------------------------------------------------------------------------------


def advance(steps: int, stop_early: bool, hosts: bool) -> ClientSession | ServerSession:
    """One side some way into a session, with requests in flight."""
    machine = copy.copy(_advanced(steps, stop_early)[0 if hosts else 1])
    machine.in_flight = dict(machine.in_flight)
    machine._decoder = FrameDecoder(machine._decoder._payload_bytes_max)
    return machine


@functools.cache
def _advanced(steps: int, stop_early: bool) -> tuple[ClientSession, ServerSession]:
    host, daemon = ClientSession(now_ns=0), ServerSession(now_ns=0)
    for kind in (FrameType.HELLO, FrameType.ATTACH)[: min(steps, 2)]:
        request_id, raw = host.send(EXAMPLES[kind])
        daemon.receive(raw, 0)
        if steps == 1 and stop_early:
            return host, daemon
        host.receive(daemon.send(EXAMPLES[session.ANSWERS[kind]], request_id), 0)
    if steps >= 3:
        for kind in (FrameType.FETCH, FrameType.RESERVE, FrameType.PING):
            daemon.receive(host.send(EXAMPLES[kind])[1], 0)
    if steps == 4:
        host.receive(daemon.send(EXAMPLES[FrameType.GOODBYE], 0), 0)
    return host, daemon


def head_of(raw: bytes) -> tuple[int, bool, bool, int, int]:
    """(steps, stop early, host's side, how the stream is cut, time) from the first two bytes."""
    first, second = (*raw[:2], 0, 0)[:2]
    now_ns = (0, 1, limits.HANDSHAKE_DEADLINE_NS - 1, limits.HANDSHAKE_DEADLINE_NS)[second >> 6]
    return first % STEPS, bool(first & 0x40), bool(first & 0x80), second & 0x3F, now_ns


def fitting(rng: Random, machine: ClientSession | ServerSession) -> bytes:
    """A frame that this side may well get now, so that the walk goes deeper than the door."""
    if isinstance(machine, ServerSession):
        kind = rng.choice([kind for kind in KINDS if kind < FrameType.WELCOME])
        request_id = 0 if kind in session.ONE_WAY else rng.randint(10, 99)
        return encode_frame(kind, request_id, PAYLOADS[kind])
    if not machine.in_flight or rng.random() < 0.1:
        return encode_frame(FrameType.GOODBYE, 0, PAYLOADS[FrameType.GOODBYE])
    request_id, request = rng.choice(sorted(machine.in_flight.items()))
    kind = FrameType.ERROR if rng.random() < 0.2 else session.ANSWERS[request]
    return encode_frame(kind, request_id, PAYLOADS[kind])


def a_session(rng: Random) -> bytes:
    """Any state, and up to four frames that may come then."""
    head = bytes([rng.randrange(256), rng.randrange(192)])
    steps, early, hosts, _, _ = head_of(head)
    machine = advance(steps, early, hosts)
    parts = [fitting(rng, machine) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.3:
        kind = rng.choice(KINDS)
        parts.append(encode_frame(kind, rng.choice((0, 1, 2)), PAYLOADS[kind]))
    return head + b"".join(parts)


def session_seeds() -> list[bytes]:
    """Every state of both sides, with one of each frame."""
    rng = Random(1)
    found = []
    for side in (0, 0x80):
        for steps in range(STEPS):
            for early in (0, 0x40):
                first = next(n for n in range(side | early, 256) if n % STEPS == steps
                             and n & 0xC0 == side | early)  # fmt: skip
                machine = advance(steps, bool(early), bool(side))
                found.append(bytes([first, 0]) + fitting(rng, machine) + fitting(rng, machine))
    return found


def sessions_parser() -> Parser:
    """A machine in any state, given anything: it closes, or stays within its bounds."""

    def parse(raw: bytes) -> str:
        steps, early, hosts, how, now_ns = head_of(raw)
        machine = advance(steps, early, hosts)
        state = machine.state
        bound = HELD_BYTES_MAX
        if state in (State.OPEN, State.DRAINING):
            bound = HEADER + limits.FRAME_PAYLOAD_BYTES_MAX
        for part in cut(raw[2:], how):
            try:
                machine.receive(part, now_ns)
            except ProtocolError as error:
                assert machine.state is State.CLOSED
                assert not machine.in_flight
                return f"{hosts} {state.value} refused {error.status.label}"
            if machine.state is State.OPEN:
                bound = HEADER + limits.FRAME_PAYLOAD_BYTES_MAX
            assert machine._decoder.buffered_bytes <= bound
            assert len(machine.in_flight) <= machine.requests_in_flight_max
            if machine.state is State.CLOSED:
                return f"{hosts} {state.value} ended"
        return f"{hosts} {state.value} {machine.state.value}"

    return parse


class _StaysOpen:
    """A machine that stays open after an offence, on both sides."""

    def __enter__(self) -> None:
        self._patches = [
            patch.object(side, "close", lambda self: None)
            for side in (ServerSession, ClientSession)
        ]
        for one in self._patches:
            one.start()

    def __exit__(self, *_: object) -> None:
        for one in self._patches:
            one.stop()


TARGETS = (
    Target(
        name="frames", share=60, seeds=frame_seeds, make=frames_parser,
        fix=lambda rng, raw: fix_frames(rng, raw, 1), bytes_max=70_000,
        canaries=(
            lambda: patch.object(FrameDecoder, "__init__", _trusts_lengths),
            lambda: patch.object(FrameDecoder, "_header", _skips_the_checksum),
            lambda: patch.object(FrameDecoder, "feed", _keeps_broken_streams),
        ),
        modules=("entresol_proto.wire.frames",),
    ),
    Target(
        name="messages", share=75, seeds=message_seeds, make=messages_parser,
        canaries=tuple(functools.partial(cursor_fault, *fault) for fault in _CURSOR_FAULTS),
        modules=("entresol_proto.wire.data", "entresol_proto.wire.opening",
                 "entresol_proto.wire.quote", "entresol_proto.wire.cursor"),
    ),
    Target(
        name="descriptors", share=45, seeds=descriptor_seeds, make=descriptors_parser,
        canaries=(_descriptor_fault,), modules=("entresol_proto.ids",),
    ),
    Target(
        name="sessions", share=50, seeds=session_seeds, make=sessions_parser,
        generate=a_session, fix=lambda rng, raw: fix_frames(rng, raw, 2),
        canaries=(_StaysOpen,), modules=("entresol_proto.wire.session",),
    ),
)  # fmt: skip
