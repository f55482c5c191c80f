"""Every message: one encoding, every cut refused, every count checked before it is believed."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import wire_messages
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import CARRYING, EXAMPLES, STRATEGIES, decode

from entresol_proto import limits
from entresol_proto.fabric.base import FabricKind, Offer, RemoteSpan
from entresol_proto.ids import pack_token_ids
from entresol_proto.status import ProtocolError, Status
from entresol_proto.wire import data, opening, session
from entresol_proto.wire.cursor import text16
from entresol_proto.wire.frames import FrameType

KINDS = list(FrameType)
# Messages that are a run of something: cut at a boundary they are a shorter, valid message.
RUNS = {
    FrameType.OPEN_NAMESPACE: 1, FrameType.FETCH: 16, FrameType.PUT_DONE: 1, FrameType.EXISTS: 16,
    FrameType.EXISTS_REPLY: 1, FrameType.STAGE: 16, FrameType.STAGED: 1, FrameType.TOUCH: 16,
    FrameType.FORGET: 16, FrameType.EXPLAINED: 9,
    FrameType.QUOTE: 16, FrameType.QUOTED: 1,
}  # fmt: skip


def test_every_type_is_tested_here_and_known_to_sessions() -> None:
    assert set(STRATEGIES) == set(EXAMPLES) == set(session._DECODERS) == set(FrameType)
    for kind, example in EXAMPLES.items():
        assert example.TYPE is kind
        assert session._DECODERS[kind] == type(example).decode


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_round_trip(kind: FrameType) -> None:
    @settings(max_examples=60)
    @given(STRATEGIES[kind])
    def check(message: wire_messages.Message) -> None:
        raw = message.encode()
        again = decode(kind, raw)
        assert again == message
        assert type(again) is type(message)
        assert again.encode() == raw
        assert len(raw) <= limits.FRAME_PAYLOAD_BYTES_MAX

    check()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_examples_round_trip(kind: FrameType) -> None:
    assert decode(kind, EXAMPLES[kind].encode()) == EXAMPLES[kind]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_every_cut_is_refused(kind: FrameType) -> None:
    raw = EXAMPLES[kind].encode()
    for size in range(len(raw)):
        try:
            shorter = decode(kind, raw[:size])
        except ProtocolError:
            continue
        assert (len(raw) - size) % RUNS.get(kind, len(raw) + 1) == 0, f"cut at {size} got through"
        assert shorter.encode() == raw[:size]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_a_trailing_byte_is_refused(kind: FrameType) -> None:
    raw = EXAMPLES[kind].encode()
    if RUNS.get(kind) == 1:
        longer = decode(kind, raw + b"\x00")
        assert longer != EXAMPLES[kind]
        assert longer.encode() == raw + b"\x00"
        return
    with pytest.raises(ProtocolError):
        decode(kind, raw + b"\x00")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_a_message_has_one_encoding(kind: FrameType) -> None:
    """Every bit of every example: refused, or another message. Nothing is ignored."""
    raw = EXAMPLES[kind].encode()
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            other = decode(kind, bytes(flipped))
        except ProtocolError:
            continue
        assert other != EXAMPLES[kind], f"bit {bit} is ignored"
        if kind is FrameType.WELCOME and len(other.offers) < len(EXAMPLES[kind].offers):
            continue  # an offer of a fabric that this build does not know is left out, on purpose
        assert other.encode() == flipped, f"bit {bit} does not survive"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_garbage_is_refused_with_the_documented_error(kind: FrameType) -> None:
    @settings(max_examples=60)
    @given(st.binary(max_size=300))
    def check(raw: bytes) -> None:
        try:
            message = decode(kind, raw)
        except ProtocolError:
            return
        if kind is not FrameType.WELCOME:
            assert message.encode() == raw

    check()


# Blocks within a grant ----------------------------------------------------------------------------


def test_a_grant_that_carries_its_blocks_has_one_encoding() -> None:
    raw = CARRYING.encode()
    assert data.Grant.decode(raw) == CARRYING
    others = [raw[:size] for size in range(len(raw))] + [raw + b"\0"]
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        others.append(bytes(flipped))
    for other in others:
        try:
            grant = data.Grant.decode(other)
        except ProtocolError:
            continue
        assert len(other) == len(raw), "a cut, or a byte more, got through"
        assert grant != CARRYING
        assert grant.encode() == other


BAD_CARRIED: dict[str, dict[str, Any]] = {
    "of a lease": {"lease_id": 1},
    "with a lease's time": {"lease_ns": 1},
    "with a lease's end": {"expires_ns": 1},
    "more than its items": {"carried": b"sealedblock."},
    "less than its items": {"carried": b"sealedbloc"},
    "nothing": {"carried": b"", "items": ()},
    "no item": {"items": ()},
    "elsewhere": {"span": RemoteSpan(0, 5, 5)},
    "of memory": {"span": RemoteSpan(1, 6, 5)},
    "an empty block": {"span": RemoteSpan(0, 6, 0), "carried": b"sealed"},
}


@pytest.mark.parametrize("how", list(BAD_CARRIED))
def test_what_a_grant_carries_is_what_its_items_say(how: str) -> None:
    change = dict(BAD_CARRIED[how])
    if (span := change.pop("span", None)) is not None:
        change["items"] = (CARRYING.items[0], replace(CARRYING.items[1], span=span))
    raw = bytearray(replace(CARRYING, **change).encode())
    raw[1] = 1  # an empty run is written as none
    with pytest.raises(ProtocolError, match="carries"):
        data.Grant.decode(bytes(raw))


@pytest.mark.parametrize("more", [0, 1])
def test_a_grant_carries_no_more_than_the_limit(more: int) -> None:
    size = limits.CARRIED_BYTES_MAX + more
    item = replace(CARRYING.items[0], span=RemoteSpan(0, 0, size))
    raw = data.Grant(True, 0, 0, 0, (item,), (), bytes(size)).encode()
    if not more:
        assert data.Grant.decode(raw).span_bytes == size
        return
    with pytest.raises(ProtocolError, match="carries"):
        data.Grant.decode(raw)


# Counts -------------------------------------------------------------------------------------------

U64 = struct.Struct("<Q")
FETCH_HEAD = struct.pack("<IBBHQ", 1, 0, 0, 0, 10**9)
GRANT_ROW = struct.pack("<IIIQII32s16s", 0, 1, 0, 0, 0, 0, bytes(32), bytes(16))
RESERVE_ROW = struct.pack("<16sIIHBB", bytes(16), 1, 0, 0, 8, 0) + bytes(8)


def _grant(items: int, misses: int) -> bytes:
    return struct.pack("<BBHIQQQ", 1, 0, items, misses, 1, 1, 1)


COUNTED: dict[str, tuple[FrameType, int, Callable[[int], bytes]]] = {
    "fetch keys": (
        FrameType.FETCH, limits.BLOCKS_PER_FETCH_MAX, lambda n: FETCH_HEAD + bytes(16 * n),
    ),
    "grant items": (
        FrameType.GRANT, limits.BLOCKS_PER_FETCH_MAX, lambda n: _grant(n, 0) + GRANT_ROW * n,
    ),
    "grant misses": (
        FrameType.GRANT, limits.BLOCKS_PER_FETCH_MAX, lambda n: _grant(0, n) + bytes(8 * n),
    ),
    "release leases": (
        FrameType.RELEASE, limits.BLOCKS_PER_FETCH_MAX,
        lambda n: struct.pack("<II", n, 0) + bytes(8 * n),
    ),
    "release reports": (
        FrameType.RELEASE, limits.BLOCKS_PER_FETCH_MAX,
        lambda n: struct.pack("<II", 0, n) + bytes(16 * n),
    ),
    "reserve items": (
        FrameType.RESERVE, limits.BLOCKS_PER_PUT_MAX,
        lambda n: struct.pack("<IBBHQ", 1, 0, 0, n, 10**9) + RESERVE_ROW * n,
    ),
    "reserve tokens": (
        FrameType.RESERVE, limits.TOKENS_PER_BLOCK_MAX,
        lambda n: struct.pack("<IBBHQ", 1, 0, 0, 1, 10**9)
        + struct.pack("<16sIIHBB", bytes(16), 1, 0, n, 8, 0) + bytes(8) + bytes(4 * n),
    ),
    "reserved items": (
        FrameType.RESERVED, limits.BLOCKS_PER_PUT_MAX,
        lambda n: struct.pack("<I", n) + bytes(96 * n),
    ),
    "commit items": (
        FrameType.COMMIT, limits.BLOCKS_PER_PUT_MAX,
        lambda n: struct.pack("<I", n) + bytes(24 * n),
    ),
    "put statuses": (FrameType.PUT_DONE, limits.BLOCKS_PER_PUT_MAX, bytes),
    "staged statuses": (FrameType.STAGED, limits.BLOCKS_PER_FETCH_MAX, bytes),
    "stage keys": (
        FrameType.STAGE, limits.BLOCKS_PER_FETCH_MAX,
        lambda n: struct.pack("<IIQQ", 1, 0, 0, 10**9) + bytes(16 * n),
    ),
    "exists keys": (
        FrameType.EXISTS, limits.KEYS_PER_FRAME_MAX, lambda n: bytes(4) + bytes(16 * n),
    ),
    "touch keys": (
        FrameType.TOUCH, limits.KEYS_PER_FRAME_MAX, lambda n: bytes(4) + bytes(16 * n),
    ),
    "forget keys": (
        FrameType.FORGET, limits.KEYS_PER_FRAME_MAX, lambda n: bytes(4) + bytes(16 * n),
    ),
    "quote keys": (
        FrameType.QUOTE, limits.BLOCKS_PER_FETCH_MAX, lambda n: bytes(8) + bytes(16 * n),
    ),
    "quoted tiers": (
        FrameType.QUOTED, limits.BLOCKS_PER_FETCH_MAX, lambda n: bytes(56) + bytes(n),
    ),
    "exists bitmap": (
        FrameType.EXISTS_REPLY, limits.KEYS_PER_FRAME_MAX // 8, lambda n: bytes(4) + bytes(n),
    ),
    "explain keys": (
        FrameType.EXPLAIN, limits.BLOCKS_PER_FETCH_MAX,
        lambda n: struct.pack("<II", 1, n) + (b"\x08" + bytes(8)) * n,
    ),
    "explained rows": (FrameType.EXPLAINED, limits.KEYS_PER_FRAME_MAX, lambda n: bytes(9 * n)),
    "descriptor bytes": (FrameType.OPEN_NAMESPACE, limits.DESCRIPTOR_BYTES_MAX, bytes),
    "attach reply": (
        FrameType.ATTACH, limits.OFFER_PARAMS_BYTES_MAX,
        lambda n: struct.pack("<BH", 1, n) + bytes(n),
    ),
    "client name": (
        FrameType.HELLO, 255,
        lambda n: struct.pack("<BBHH", 1, 1, 0, 0) + bytes(16) + struct.pack("<H", n) + b"a" * n,
    ),
    "error message": (
        FrameType.ERROR, 1024, lambda n: b"\x01" + struct.pack("<H", n) + b"a" * n + bytes(2),
    ),
    "error hint": (
        FrameType.ERROR, 1024, lambda n: b"\x01" + bytes(2) + struct.pack("<H", n) + b"a" * n,
    ),
    "goodbye message": (
        FrameType.GOODBYE, 1024, lambda n: b"\x01" + struct.pack("<H", n) + b"a" * n,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_counts_at_the_limit_and_one_past(name: str) -> None:
    kind, limit, build = COUNTED[name]
    at_limit = build(limit)
    assert len(at_limit) <= limits.FRAME_PAYLOAD_BYTES_MAX, "the limit does not fit into a frame"
    assert decode(kind, at_limit).encode() == at_limit
    with pytest.raises(ProtocolError):
        decode(kind, build(limit + 1))


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (FrameType.GRANT, _grant(0xFFFF, 0xFFFF_FFFF)),
        (FrameType.GRANT, _grant(0, 0xFFFF_FFFF)),
        (FrameType.RELEASE, struct.pack("<II", 0xFFFF_FFFF, 0)),
        (FrameType.RELEASE, struct.pack("<II", 0, 0xFFFF_FFFF)),
        (FrameType.RESERVE, struct.pack("<IBBHQ", 1, 0, 0, 0xFFFF, 10**9)),
        (FrameType.RESERVED, struct.pack("<I", 0xFFFF_FFFF)),
        (FrameType.COMMIT, struct.pack("<I", 0xFFFF_FFFF)),
        (FrameType.EXPLAIN, struct.pack("<II", 1, 0xFFFF_FFFF)),
        (FrameType.ATTACH, struct.pack("<BH", 1, 0xFFFF)),
    ],
)
def test_an_impossible_count_allocates_nothing(kind: FrameType, raw: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(kind, raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


def test_a_count_of_offers_is_checked() -> None:
    offers = tuple(Offer(FabricKind.TCP, b"") for _ in range(opening.OFFERS_MAX))
    welcome = dataclasses.replace(EXAMPLES[FrameType.WELCOME], offers=offers)
    assert opening.Welcome.decode(welcome.encode()) == welcome
    more = dataclasses.replace(welcome, offers=(*offers, offers[0]))
    with pytest.raises(ProtocolError):
        opening.Welcome.decode(more.encode())


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deadline_ns", [0, limits.DEADLINE_NS_MAX + 1, 2**64 - 1])
@pytest.mark.parametrize("kind", [FrameType.FETCH, FrameType.STAGE, FrameType.RESERVE])
def test_deadlines_out_of_range(kind: FrameType, deadline_ns: int) -> None:
    raw = dataclasses.replace(EXAMPLES[kind], deadline_ns=deadline_ns).encode()
    with pytest.raises(ProtocolError):
        decode(kind, raw)
    largest = dataclasses.replace(EXAMPLES[kind], deadline_ns=limits.DEADLINE_NS_MAX)
    assert decode(kind, largest.encode()) == largest


@pytest.mark.parametrize(
    "kind",
    [FrameType.FETCH, FrameType.STAGE, FrameType.EXISTS, FrameType.TOUCH, FrameType.FORGET],
)
def test_key_runs_are_whole_and_not_empty(kind: FrameType) -> None:
    example = EXAMPLES[kind]
    for keys in (b"", bytes(15), bytes(17), bytes(31)):
        with pytest.raises(ProtocolError):
            decode(kind, dataclasses.replace(example, keys=keys).encode())


@pytest.mark.parametrize("size", [0, 1, 7, 65, 255])
def test_engine_keys_of_other_length(size: int) -> None:
    item = data.PutItem(bytes(16), bytes(size), 1, 0, b"", b"")
    with pytest.raises(ProtocolError):
        data.Reserve.decode(data.Reserve(1, data.Ack.DURABLE, 1, (item,)).encode())
    with pytest.raises(ProtocolError):
        data.Explain.decode(data.Explain(1, (bytes(size),)).encode())
    if size:  # a parent may be absent
        item = data.PutItem(bytes(16), bytes(8), 1, 0, bytes(size), b"")
        with pytest.raises(ProtocolError):
            data.Reserve.decode(data.Reserve(1, data.Ack.DURABLE, 1, (item,)).encode())


@pytest.mark.parametrize("value", [len(Status), 128, 255])
def test_unknown_statuses_are_refused(value: int) -> None:
    for kind in (FrameType.PUT_DONE, FrameType.STAGED):
        with pytest.raises(ProtocolError):
            decode(kind, bytes([value]))
    with pytest.raises(ProtocolError):
        decode(FrameType.ERROR, bytes([value]) + bytes(4))
    with pytest.raises(ProtocolError):
        decode(FrameType.GOODBYE, bytes([value]) + bytes(2))
    with pytest.raises(ProtocolError):
        decode(FrameType.EXPLAINED, bytes([value]) + bytes(8))


def test_a_fabric_newer_than_this_build_is_left_out() -> None:
    known = EXAMPLES[FrameType.WELCOME]
    raw = bytearray(dataclasses.replace(known, offers=()).encode())
    fixed = opening.Welcome._FIXED.size
    raw[fixed - 2 : fixed] = struct.pack("<H", 2)
    raw += struct.pack("<BH", 200, 3) + b"new"
    raw += struct.pack("<BH", FabricKind.TCP, 3) + b"old"
    assert opening.Welcome.decode(bytes(raw)).offers == (Offer(FabricKind.TCP, b"old"),)


def test_text_is_cut_at_a_character() -> None:
    assert text16("äöü", 3) == b"\x02\x00" + "ä".encode()
    long = opening.ErrorReply(Status.INTERNAL, "é" * 2000, "x" * 2000)
    got = opening.ErrorReply.decode(long.encode())
    assert got.message == "é" * 512
    assert got.hint == "x" * 1024


def test_text_that_is_no_text_cannot_break_an_answer() -> None:
    """A file name of bytes, as os.fsdecode gives it, ends up in a message."""
    got = opening.ErrorReply.decode(opening.ErrorReply(Status.IO_ERROR, "no \udcff file").encode())
    assert got.message == "no ? file"


@pytest.mark.parametrize("raw", [b"\x02\x00\xc3\x28", b"\x01\x00\xff", b"\x03\x00\xed\xa0\x80"])
def test_text_that_is_not_utf8_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        opening.Goodbye.decode(b"\x00" + raw)


def test_keys_and_secrets_stay_out_of_the_repr() -> None:
    secret = b"\xa5" * 32
    item = data.GrantItem(0, data.Tier.MEMORY, RemoteSpan(0, 0, 1), 1, secret, secret[:16])
    granted = data.Grant(True, 1, 1, 1, (item,), ())
    reserved = data.Reserved((data.Reserved.Item(Status.OK, 1, 1, secret, secret, secret[:16]),))
    opened = opening.NamespaceOpened(1, bytes(16), secret, 0, True, 1)
    tokens = pack_token_ids((0xA5A5, 0xA5A6)) + secret
    put = data.Reserve(
        1, data.Ack.ACCEPTED, 1, (data.PutItem(bytes(16), bytes(8), 1, 0, b"", tokens),)
    )
    for message in (
        granted, reserved, opened, put, opening.OpenNamespace(secret), opening.Attach(1, secret),
        Offer(FabricKind.TCP, secret),
    ):  # fmt: skip
        for shown in (repr(message), repr(session.Received(1, message))):
            assert "xa5" not in shown
            assert str(0xA5A5) not in shown


def test_split_keys() -> None:
    run = bytes(range(48))
    assert data.split_keys(run) == [run[:16], run[16:32], run[32:]]
