"""Mutation fuzzing of everything that reads bytes of a peer before or after it is trusted.

Each input is a valid stream, message or descriptor, mutated. Only the documented rejections may
come out (ProtocolError, BadKeyError), whatever is accepted must encode to the very bytes that were
read, and what is held stays bounded. `ENTRESOL_FUZZ_INPUTS` sets how many inputs,
`ENTRESOL_FUZZ_SEED` where the walk begins; every failure names the seed of its input.

A canary runs the same loop over decoders that were broken on purpose. If the loop does not notice
them, it would not notice a real fault either, and the canary fails.
"""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable

import pytest
from wire_messages import EXAMPLES

from entresol_proto import limits
from entresol_proto.ids import BadKeyError, NamespaceDescriptor
from entresol_proto.status import ProtocolError
from entresol_proto.wire import session
from entresol_proto.wire.cursor import Cursor
from entresol_proto.wire.frames import Frame, FrameDecoder, FrameType, encode_frame
from entresol_proto.wire.session import ClientSession, ServerSession, State

INPUTS = int(os.environ.get("ENTRESOL_FUZZ_INPUTS", "60000"))
SEED = int(os.environ.get("ENTRESOL_FUZZ_SEED", "20250701"))
CANARY_INPUTS = 4_000  # at most; a canary is found after a few dozen
HELD_BYTES_MAX = limits.FRAME_HEADER_BYTES + limits.FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX
GROWTH_BYTES_MAX = 8 * limits.MIB
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 2**64 - 1)

Target = Callable[[random.Random], str]  # runs one input; what came of it; raises on a finding


# Mutation -----------------------------------------------------------------------------------------


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """One to four small damages, of the kinds that parsers get wrong."""
    out = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(8):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                out[at:at] = rng.randbytes(rng.randint(1, 24))
            case 4:
                size = rng.choice((1, 2, 4, 8))
                value = rng.choice(INTERESTING) + rng.randint(-1, 1)
                out[at : at + size] = (value % 256**size).to_bytes(size, "little")
            case 5:
                del out[at : at + rng.randint(1, 16)]
            case 6:
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case _:
                out += rng.randbytes(rng.randint(1, 8))
    return bytes(out)


def reframe(rng: random.Random, raw: bytes) -> bytes:
    """Damage a frame's header fields and make its checksum right again, to get past it."""
    magic, version, kind, request_id, length = struct.unpack_from("<HBBII", raw)
    match rng.randrange(6):
        case 0:
            length = rng.choice(INTERESTING) % 2**32
        case 1:
            kind = rng.randrange(256)
        case 2:
            version = rng.randrange(256)
        case 3:
            request_id = rng.choice((0, request_id, rng.getrandbits(32)))
        case 4:
            length = max(0, length + rng.randint(-4, 4))
        case _:
            kind = rng.choice(list(FrameType))
    head = struct.pack("<HBBII", magic, version, kind, request_id, length)
    return head + struct.pack("<I", zlib.crc32(head)) + raw[limits.FRAME_HEADER_BYTES :]


def a_frame(rng: random.Random) -> bytes:
    kind = rng.choice(list(FrameType))
    request_id = rng.choice((0, 1, 2, 3, rng.getrandbits(32)))
    return encode_frame(kind, request_id, EXAMPLES[kind].encode())


def a_fitting_frame(rng: random.Random, machine: ClientSession | ServerSession) -> bytes:
    """One that this side may well get now, so that the walk goes deeper than the door."""
    if isinstance(machine, ServerSession):
        kind = rng.choice([kind for kind in FrameType if kind < FrameType.WELCOME])
        one_way = kind in session.ONE_WAY
        return encode_frame(kind, 0 if one_way else rng.randint(10, 99), EXAMPLES[kind].encode())
    if not machine.in_flight or rng.random() < 0.1:
        return encode_frame(FrameType.GOODBYE, 0, EXAMPLES[FrameType.GOODBYE].encode())
    request_id, request = rng.choice(sorted(machine.in_flight.items()))
    kind = FrameType.ERROR if rng.random() < 0.2 else session.ANSWERS[request]
    return encode_frame(kind, request_id, EXAMPLES[kind].encode())


def chunks(rng: random.Random, raw: bytes) -> list[bytes]:
    """The stream as the network may deliver it."""
    parts = []
    while raw:
        size = rng.choice((1, 7, 16, 64, 1000, len(raw)))
        parts.append(raw[:size])
        raw = raw[size:]
    return parts


# Targets ------------------------------------------------------------------------------------------


def frames_target(make: Callable[[], FrameDecoder] = FrameDecoder) -> Target:
    """Streams of frames: what is accepted was announced, bounded and has its checksum."""

    def run(rng: random.Random) -> str:
        stream = b"".join(
            reframe(rng, a_frame(rng)) if rng.random() < 0.3 else a_frame(rng)
            for _ in range(rng.randint(1, 4))
        )
        if rng.random() < 0.7:
            stream = mutate(rng, stream)
        if rng.random() < 0.05:
            stream += rng.randbytes(65_536)
        decoder = make()
        frames: list[Frame] = []
        fed = 0
        for part in chunks(rng, stream):
            try:
                frames += decoder.feed(part)
            except ProtocolError:
                assert decoder.buffered_bytes == 0, "a broken stream is still held"
                break
            fed += len(part)
            assert decoder.buffered_bytes <= HELD_BYTES_MAX, "holds more than a frame"
        again = b"".join(encode_frame(f.type, f.request_id, f.payload) for f in frames)
        assert stream.startswith(again), "accepted what was not there"
        assert all(len(f.payload) <= limits.FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX for f in frames)
        return "accepted" if fed == len(stream) else "rejected"

    return run


def messages_target() -> Target:
    """Payloads of every type: refused, or they mean exactly the bytes they were."""

    def run(rng: random.Random) -> str:
        kind = rng.choice(list(FrameType))
        raw = mutate(rng, EXAMPLES[kind].encode())
        if rng.random() < 0.05:
            raw = mutate(rng, EXAMPLES[rng.choice(list(FrameType))].encode())
        try:
            message = session._DECODERS[kind](raw)
        except ProtocolError:
            return "rejected"
        if kind is not FrameType.WELCOME:  # it leaves out fabrics that it does not know
            assert message.encode() == raw, f"{kind.name} has two encodings"
        return "accepted"

    return run


def descriptors_target() -> Target:
    """Namespace descriptors: refused, or canonical."""
    good = NamespaceDescriptor(
        "org/model", lora="adapter", cache_salt="salt", layers=126, kv_heads=8, head_dim=128
    ).canonical()

    def run(rng: random.Random) -> str:
        raw = mutate(rng, good)
        try:
            found = NamespaceDescriptor.parse(raw)
        except BadKeyError:
            return "rejected"
        assert found.canonical() == raw
        return "accepted"

    return run


def sessions_target() -> Target:
    """A daemon or a host in any state, given frames of any kind, whole or damaged."""

    def run(rng: random.Random) -> str:
        host, daemon = ClientSession(now_ns=0), ServerSession(now_ns=0)
        state = advance(rng, host, daemon)
        machine = rng.choice((host, daemon))
        frames = [
            a_fitting_frame(rng, machine) if rng.random() < 0.9 else a_frame(rng)
            for _ in range(rng.randint(1, 4))
        ]
        stream = b"".join(mutate(rng, f) if rng.random() < 0.2 else f for f in frames)
        bound = HELD_BYTES_MAX
        if state in (State.OPEN, State.DRAINING):
            bound = limits.FRAME_HEADER_BYTES + limits.FRAME_PAYLOAD_BYTES_MAX
        for part in chunks(rng, stream):
            try:
                machine.receive(part, rng.choice((0, 1, 10**9)))
            except ProtocolError:
                assert machine.state is State.CLOSED
                assert not machine.in_flight
                return "rejected"
            assert machine._decoder.buffered_bytes <= bound
            assert len(machine.in_flight) <= machine.requests_in_flight_max
            if machine.state is State.CLOSED:
                return "ended"
        return "accepted"

    return run


def advance(rng: random.Random, host: ClientSession, daemon: ServerSession) -> State:
    """Take both some way into a session, with requests in flight."""
    steps = rng.randint(0, 4)
    for kind in (FrameType.HELLO, FrameType.ATTACH)[: min(steps, 2)]:
        request_id, raw = host.send(EXAMPLES[kind])
        daemon.receive(raw, 0)
        if steps == 1 and rng.random() < 0.5:
            return host.state
        answer = EXAMPLES[session.ANSWERS[kind]]
        host.receive(daemon.send(answer, request_id), 0)
    if steps >= 3:
        for kind in (FrameType.FETCH, FrameType.RESERVE, FrameType.PING):
            daemon.receive(host.send(EXAMPLES[kind])[1], 0)
    if steps == 4:
        host.receive(daemon.send(EXAMPLES[FrameType.GOODBYE], 0), 0)
    return host.state


def fuzz(target: Target, inputs: int, seed: int) -> Counter[str]:
    """Run inputs; any exception that a target does not expect is a finding, named by its seed."""
    outcomes: Counter[str] = Counter()
    for number in range(inputs):
        rng = random.Random(seed + number)
        try:
            outcomes[target(rng)] += 1
        except Exception as error:
            raise AssertionError(
                f"ENTRESOL_FUZZ_SEED={seed + number} ENTRESOL_FUZZ_INPUTS=1: {error!r}"
            ) from error
    return outcomes


TARGETS: dict[str, tuple[Callable[[], Target], float]] = {
    # name: (target, its share of the inputs)
    "frames": (frames_target, 0.25),
    "messages": (messages_target, 0.45),
    "descriptors": (descriptors_target, 0.10),
    "sessions": (sessions_target, 0.20),
}


@pytest.mark.parametrize("name", TARGETS)
def test_only_documented_rejections(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, share = TARGETS[name]
    inputs = max(1, int(INPUTS * share))
    target = make()
    fuzz(target, min(inputs, 200), SEED)  # warm, so that caches do not count as growth
    started = time.monotonic()
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        outcomes = fuzz(target, min(inputs, 2_000), SEED)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - before < GROWTH_BYTES_MAX, f"seed {SEED}: {peak - before} bytes at the peak"
    outcomes += fuzz(target, inputs - min(inputs, 2_000), SEED + min(inputs, 2_000))
    with capsys.disabled():
        print(
            f"\nfuzz target={name} seed={SEED} inputs={sum(outcomes.values())} "
            f"{' '.join(f'{what}={n}' for what, n in sorted(outcomes.items()))} findings=0 "
            f"seconds={time.monotonic() - started:.1f}"
        )
    assert sum(outcomes.values()) == inputs
    if inputs >= 1_000:  # a fuzzer that is always refused at the door tests the door
        assert outcomes["rejected"] > inputs // 50
        assert outcomes["accepted"] > inputs // 100


# Canaries -----------------------------------------------------------------------------------------


class TrustsLengths(FrameDecoder):
    """Believes whatever length a header announces."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(2**33)


class SkipsTheChecksum(FrameDecoder):
    """Repairs every header before it is checked."""

    __slots__ = ()

    def _feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        raw = bytearray(data)
        if not self._buffer and len(raw) >= limits.FRAME_HEADER_BYTES:
            raw[12:16] = zlib.crc32(raw[:12]).to_bytes(4, "little")
        return super()._feed(raw)


class KeepsBrokenStreams(FrameDecoder):
    """Forgets to let go of what it refused."""

    __slots__ = ()

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        return self._feed(data)


@pytest.mark.parametrize("broken", [TrustsLengths, SkipsTheChecksum, KeepsBrokenStreams])
def test_canary_frames(broken: Callable[[], FrameDecoder]) -> None:
    with pytest.raises(AssertionError, match="ENTRESOL_FUZZ_SEED"):
        fuzz(frames_target(broken), CANARY_INPUTS, SEED)


def _short(self: Cursor, length: int) -> bytes:
    """Takes what is there instead of refusing."""
    part = self._raw[self._at : self._at + length]
    self._at += len(part)
    return part


def _unchecked(self: Cursor, layout: struct.Struct) -> tuple[object, ...]:
    values = layout.unpack_from(self._raw, self._at)
    self._at += layout.size
    return values


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("done", lambda self: None),  # trailing bytes pass
        ("zero", lambda self, value: None),  # reserved fields carry anything
        ("flag", lambda self, value: bool(value)),  # 2 is true as well
        ("take", _short),
        ("unpack", _unchecked),  # struct.error instead of ProtocolError
        ("text", lambda self, length, bytes_max=1024: self.take(length).decode()),
    ],
)
def test_canary_messages(
    name: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cursor, name, fault)
    with pytest.raises(AssertionError, match="ENTRESOL_FUZZ_SEED"):
        fuzz(messages_target(), 5 * CANARY_INPUTS, SEED)


def test_canary_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stays open after an offence is noticed."""
    monkeypatch.setattr(ServerSession, "close", lambda self: None)
    monkeypatch.setattr(ClientSession, "close", lambda self: None)
    with pytest.raises(AssertionError, match="ENTRESOL_FUZZ_SEED"):
        fuzz(sessions_target(), CANARY_INPUTS, SEED)


def test_canary_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that lets an undocumented error out is noticed."""

    def parse(raw: bytes) -> NamespaceDescriptor:
        raw.decode("ascii")
        raise BadKeyError("never gets this far with other bytes")

    monkeypatch.setattr(NamespaceDescriptor, "parse", parse)
    with pytest.raises(AssertionError, match="ENTRESOL_FUZZ_SEED"):
        fuzz(descriptors_target(), CANARY_INPUTS, SEED)
