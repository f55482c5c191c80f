"""Frames: one header, checked before a byte of payload is kept."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_proto import limits
from entresol_proto.status import ProtocolError, Status
from entresol_proto.wire.frames import (
    MAGIC,
    VERSION,
    Frame,
    FrameDecoder,
    FrameType,
    encode_frame,
)

BEFORE_OPEN = limits.FRAME_PAYLOAD_BYTES_BEFORE_OPEN_MAX
HEADER = limits.FRAME_HEADER_BYTES

# On the wire since protocol 1: never reused or renamed.
NUMBERS = {
    "HELLO": 1, "ATTACH": 2, "OPEN_NAMESPACE": 3, "FETCH": 4, "RELEASE": 5, "RESERVE": 6,
    "COMMIT": 7, "EXISTS": 8, "STAGE": 9, "TOUCH": 10, "FORGET": 11, "EXPLAIN": 12, "PING": 13,
    "GOODBYE": 14, "WELCOME": 65, "ATTACHED": 66, "NAMESPACE_OPENED": 67, "GRANT": 68,
    "RESERVED": 70, "PUT_DONE": 71, "EXISTS_REPLY": 72, "STAGED": 73, "DONE": 74,
    "EXPLAINED": 76, "PONG": 77, "ERROR": 78,
    "QUOTE": 15, "QUOTED": 79,  # since protocol 3
}  # fmt: skip

frames = st.builds(
    Frame, st.sampled_from(FrameType), st.integers(0, 2**32 - 1), st.binary(max_size=300)
)


def header(
    kind: int, request_id: int, length: int, *, magic: int = MAGIC, version: int = VERSION
) -> bytes:
    """A header with a matching checksum, whatever its fields say."""
    head = struct.pack("<HBBII", magic, version, kind, request_id, length)
    return head + struct.pack("<I", zlib.crc32(head))


def test_numbers_stay() -> None:
    assert {item.name: int(item) for item in FrameType} == NUMBERS


def test_bytes_on_the_wire() -> None:
    """Written out by hand: a client in another language must produce exactly these."""
    raw = encode_frame(FrameType.PING, 0x01020304, b"12345678")
    head = b"ES" + b"\x01" + b"\x0d" + b"\x04\x03\x02\x01" + b"\x08\x00\x00\x00"
    assert raw == head + bytes.fromhex("f0857a2c") + b"12345678"


@given(st.lists(frames, max_size=8), st.data())
def test_frames_survive_any_chunking(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(f.type, f.request_id, f.payload) for f in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = FrameDecoder()
    got: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[start:end])
        assert decoder.buffered_bytes < HEADER + BEFORE_OPEN
    assert got == sent
    assert decoder.buffered_bytes == 0


def test_one_byte_at_a_time() -> None:
    stream = encode_frame(FrameType.PING, 1, b"abc") + encode_frame(FrameType.PONG, 2)
    decoder = FrameDecoder()
    got = [frame for at in range(len(stream)) for frame in decoder.feed(stream[at : at + 1])]
    assert got == [Frame(FrameType.PING, 1, b"abc"), Frame(FrameType.PONG, 2, b"")]


def test_what_is_missing_is_known_once_the_header_is_whole() -> None:
    stream = encode_frame(FrameType.PING, 1, b"12345678")
    decoder = FrameDecoder()
    missing = [decoder.missing_bytes]
    for at in range(len(stream)):
        decoder.feed(stream[at : at + 1])
        missing.append(decoder.missing_bytes)
    assert missing == [0] * HEADER + list(range(8, -1, -1))


def test_what_came_before_a_wrong_header_is_not_kept() -> None:
    whole = encode_frame(FrameType.PING, 1, b"12345678")
    decoder = FrameDecoder()
    assert decoder.feed(whole[: HEADER - 1]) == []
    with pytest.raises(ProtocolError, match="checksum"):
        decoder.feed(b"\0" * 9)
    assert decoder.buffered_bytes == 0
    with pytest.raises(ProtocolError, match="broken already"):
        decoder.feed(whole)


def test_payloads_are_private_copies() -> None:
    received = bytearray(encode_frame(FrameType.PING, 1, b"12345678"))
    (frame,) = FrameDecoder().feed(memoryview(received))
    received[:] = bytes(len(received))
    assert frame.payload == b"12345678"
    assert type(frame.payload) is bytes


@pytest.mark.parametrize("bit", range(8 * HEADER))
def test_every_flipped_header_bit_is_refused(bit: int) -> None:
    raw = bytearray(encode_frame(FrameType.EXISTS, 0x0A0B0C0D, b"p" * 20))
    raw[bit // 8] ^= 1 << bit % 8
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError):
        decoder.feed(raw)
    assert decoder.buffered_bytes == 0


@given(st.integers(0, 8 * HEADER - 1), st.integers(0, 8 * HEADER - 1))
def test_two_flipped_header_bits_are_refused(one: int, two: int) -> None:
    raw = bytearray(encode_frame(FrameType.EXISTS, 0x0A0B0C0D, b"p" * 20))
    raw[one // 8] ^= 1 << one % 8
    raw[two // 8] ^= 1 << two % 8
    if one == two:
        assert len(FrameDecoder().feed(raw)) == 1
        return
    with pytest.raises(ProtocolError):
        FrameDecoder().feed(raw)


@pytest.mark.parametrize("kind", [k for k in range(256) if k not in set(NUMBERS.values())])
def test_unknown_types_are_refused(kind: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        FrameDecoder().feed(header(kind, 1, 0))
    assert caught.value.status is Status.UNSUPPORTED


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_versions_are_refused_with_a_hint(version: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        FrameDecoder().feed(header(FrameType.HELLO, 1, 0, version=version))
    assert caught.value.status is Status.UNSUPPORTED
    assert caught.value.hint


def test_wrong_magic_is_told_from_a_damaged_header() -> None:
    with pytest.raises(ProtocolError, match="magic"):
        FrameDecoder().feed(header(FrameType.HELLO, 1, 0, magic=0x4854))
    with pytest.raises(ProtocolError, match="magic"):
        FrameDecoder().feed(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProtocolError, match="checksum"):
        FrameDecoder().feed(header(FrameType.HELLO, 1, 0)[:12] + b"\x00\x00\x00\x00")


@pytest.mark.parametrize("limit", [0, 1, BEFORE_OPEN, limits.FRAME_PAYLOAD_BYTES_MAX])
def test_length_at_the_limit_and_one_past(limit: int) -> None:
    decoder = FrameDecoder(limit)
    (frame,) = decoder.feed(header(FrameType.PING, 1, limit) + bytes(limit))
    assert len(frame.payload) == limit
    # One past: refused by the header alone, before any payload.
    with pytest.raises(ProtocolError) as caught:
        decoder.feed(header(FrameType.PING, 1, limit + 1))
    assert caught.value.status is Status.TOO_LARGE
    assert decoder.buffered_bytes == 0


@pytest.mark.parametrize("length", [BEFORE_OPEN + 1, 2**31, 2**32 - 1])
def test_an_oversized_announcement_allocates_nothing(length: int) -> None:
    raw = header(FrameType.FETCH, 1, length)
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decoder.feed(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024
    assert decoder.buffered_bytes == 0


def test_the_limit_rises_with_allow() -> None:
    decoder = FrameDecoder()
    decoder.allow(BEFORE_OPEN + 1)
    assert len(decoder.feed(header(FrameType.PING, 1, BEFORE_OPEN + 1) + bytes(BEFORE_OPEN + 1)))


def test_a_slow_sender_makes_us_hold_one_frame() -> None:
    decoder = FrameDecoder()
    raw = header(FrameType.FETCH, 1, BEFORE_OPEN) + bytes(BEFORE_OPEN)
    held = 0
    for at in range(0, len(raw) - 1, 100):
        assert decoder.feed(raw[at : min(at + 100, len(raw) - 1)]) == []
        held = max(held, decoder.buffered_bytes)
    assert held == HEADER + BEFORE_OPEN - 1
    assert len(decoder.feed(raw[-1:])) == 1


def test_a_broken_stream_holds_and_accepts_nothing() -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError):
        decoder.feed(b"\x00" * 65536)
    for _ in range(100):
        with pytest.raises(ProtocolError):
            decoder.feed(encode_frame(FrameType.PING, 1, b"12345678") * 100)
        assert decoder.buffered_bytes == 0


def test_the_writer_refuses_what_no_reader_takes() -> None:
    largest = bytes(limits.FRAME_PAYLOAD_BYTES_MAX)
    assert len(encode_frame(FrameType.GRANT, 1, largest)) == HEADER + len(largest)
    with pytest.raises(ProtocolError) as caught:
        encode_frame(FrameType.GRANT, 1, largest + b"x")
    assert caught.value.status is Status.TOO_LARGE
