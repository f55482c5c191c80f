"""Messages of the control stream for tests: one hypothesis strategy and one plain example per type.

`STRATEGIES` and `EXAMPLES` must know every FrameType; tests/unit/test_messages.py checks that, so a
new message cannot go untested.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from entresol_proto import ids, limits
from entresol_proto.fabric.base import FabricKind, Offer, RemoteSpan
from entresol_proto.status import Status
from entresol_proto.wire import data, opening, quote
from entresol_proto.wire.frames import FrameType

Message = Any

u8 = st.integers(0, 0xFF)
u16 = st.integers(0, 0xFFFF)
u32 = st.integers(0, 0xFFFF_FFFF)
u64 = st.integers(0, 0xFFFF_FFFF_FFFF_FFFF)
deadlines = st.integers(1, limits.DEADLINE_NS_MAX)
statuses = st.sampled_from(Status)
flags = st.booleans()
spans = st.builds(RemoteSpan, u32, u64, u32)
keys = st.integers(1, 20).flatmap(lambda n: st.binary(min_size=16 * n, max_size=16 * n))
engine_keys = st.binary(min_size=limits.ENGINE_KEY_BYTES_MIN, max_size=limits.ENGINE_KEY_BYTES_MAX)


def fixed(size: int) -> st.SearchStrategy[bytes]:
    """Exactly `size` bytes."""
    return st.binary(min_size=size, max_size=size)


def texts(bytes_max: int) -> st.SearchStrategy[str]:
    """Text that survives `text16` uncut."""
    return st.text(st.characters(codec="utf-8"), max_size=min(40, bytes_max // 4))


def rows(items: st.SearchStrategy[Any], count_max: int = 6) -> st.SearchStrategy[tuple[Any, ...]]:
    """A short tuple."""
    return st.lists(items, max_size=count_max).map(tuple)


_offers = st.builds(Offer, st.sampled_from(FabricKind), st.binary(max_size=64))
_grant_items = st.builds(
    data.GrantItem, u32, st.sampled_from(data.Tier), spans, u32, fixed(32), fixed(16)
)
_put_items = st.builds(
    data.PutItem,
    fixed(16),
    engine_keys,
    u32,
    u32,
    st.just(b"") | engine_keys,
    rows(u32, 20).map(ids.pack_token_ids),
)
_reserved_items = st.builds(data.Reserved.Item, statuses, u32, u64, fixed(32), fixed(32), fixed(16))

_misses = rows(st.tuples(u32, statuses))
_carried = st.tuples(_grant_items, st.binary(min_size=1, max_size=40))


def _carrying(
    final: bool, blocks: tuple[tuple[data.GrantItem, bytes], ...], misses: Any
) -> data.Grant:
    """A grant with its blocks in it."""
    items, at = [], 0
    for item, sealed in blocks:
        items.append(replace(item, span=RemoteSpan(0, at, len(sealed))))
        at += len(sealed)
    carried = b"".join(sealed for _, sealed in blocks)
    return data.Grant(final, 0, 0, 0, tuple(items), misses, carried)


_times = st.lists(st.integers(0, limits.DEADLINE_NS_MAX), min_size=5, max_size=5)
_amounts = st.lists(u64, min_size=2, max_size=2).map(lambda two: sorted(two, reverse=True))


def _quoted(amounts: list[int], times: list[int], tiers: bytes) -> quote.Quoted:
    sealed_bytes, flash_bytes = amounts
    wait, memory, flash, expected, high = sorted(times)
    if flash % 2:  # these two come in either order
        memory, flash = flash, memory
    return quote.Quoted(sealed_bytes, flash_bytes, wait, memory, flash, expected, high, tiers)


STRATEGIES: dict[FrameType, st.SearchStrategy[Message]] = {
    FrameType.HELLO: st.builds(opening.Hello, u8, u8, fixed(16), u16, texts(255)),
    FrameType.WELCOME: st.builds(
        opening.Welcome, u8, fixed(16), u64, u64, u32, u32, u32, u16, fixed(16), texts(255),
        texts(255), rows(_offers),
    ),
    FrameType.ATTACH: st.builds(
        opening.Attach, u8, st.binary(max_size=limits.OFFER_PARAMS_BYTES_MAX)
    ),
    FrameType.ATTACHED: st.builds(opening.Attached, u8),
    FrameType.OPEN_NAMESPACE: st.builds(opening.OpenNamespace, st.binary(max_size=600)),
    FrameType.NAMESPACE_OPENED: st.builds(
        opening.NamespaceOpened, u32, fixed(16), fixed(32), u8, flags,
        st.integers(limits.CHUNK_BYTES_MIN, limits.CHUNK_BYTES_MAX),
    ),
    FrameType.ERROR: st.builds(
        opening.ErrorReply, statuses.filter(lambda why: why.is_failure), texts(1024), texts(1024)
    ),
    FrameType.GOODBYE: st.builds(opening.Goodbye, statuses, texts(1024)),
    FrameType.PING: st.builds(opening.Ping, fixed(8)),
    FrameType.PONG: st.builds(opening.Pong, fixed(8)),
    FrameType.FETCH: st.builds(
        data.Fetch, u32, st.sampled_from(data.OpenAt), flags, deadlines, keys, flags
    ),
    FrameType.GRANT: st.builds(
        data.Grant, flags, u64, u64, u64, rows(_grant_items), _misses
    ) | st.builds(_carrying, flags, rows(_carried).filter(bool), _misses),
    FrameType.RELEASE: st.builds(data.Release, rows(u64), rows(st.tuples(u64, u32, statuses))),
    FrameType.RESERVE: st.builds(
        data.Reserve, u32, st.sampled_from(data.Ack), deadlines, rows(_put_items, 4)
    ),
    FrameType.RESERVED: st.builds(data.Reserved, rows(_reserved_items)),
    FrameType.COMMIT: st.builds(data.Commit, rows(st.tuples(u64, spans))),
    FrameType.PUT_DONE: st.builds(data.PutDone, rows(statuses, 40)),
    FrameType.EXISTS: st.builds(data.Exists, u32, keys),
    FrameType.EXISTS_REPLY: st.builds(data.ExistsReply, u32, st.binary(max_size=64)),
    FrameType.STAGE: st.builds(
        data.Stage, u32, st.sampled_from(data.OpenAt), u64, deadlines, keys
    ),
    FrameType.STAGED: st.builds(data.Staged, rows(statuses, 40)),
    FrameType.TOUCH: st.builds(data.Touch, u32, keys),
    FrameType.FORGET: st.builds(data.Forget, u32, keys),
    FrameType.DONE: st.builds(data.Done, u32),
    FrameType.EXPLAIN: st.builds(data.Explain, u32, rows(engine_keys)),
    FrameType.EXPLAINED: st.builds(
        data.Explained, rows(st.tuples(st.sampled_from(data.Reason), u64))
    ),
    FrameType.QUOTE: st.builds(quote.Quote, u32, st.sampled_from(data.OpenAt), flags, keys),
    FrameType.QUOTED: st.builds(
        _quoted, _amounts, _times, st.lists(st.sampled_from(data.Tier), max_size=40).map(bytes)
    ),
}  # fmt: skip

_SPAN = RemoteSpan(7, 0x1122_3344_5566, 8192)
_KEYS = bytes(range(32))

EXAMPLES: dict[FrameType, Message] = {
    FrameType.HELLO: opening.Hello(1, 1, bytes(range(16)), 4, "entresol-py/1"),
    FrameType.WELCOME: opening.Welcome(
        1, bytes(range(16)), 3, limits.LEASE_NS_DEFAULT, limits.FRAME_PAYLOAD_BYTES_MAX,
        limits.BLOCK_BYTES_MAX, limits.BLOCKS_PER_FETCH_MAX, limits.REQUESTS_IN_FLIGHT_MAX,
        bytes(16), "dpu-0", "team-a",
        (Offer(FabricKind.SHM, b"@socket"), Offer(FabricKind.TCP, b"ticket")),
    ),
    FrameType.ATTACH: opening.Attach(1, b"reply"),
    FrameType.ATTACHED: opening.Attached(1),
    FrameType.OPEN_NAMESPACE: opening.OpenNamespace(b"entresol/ns/v1..."),
    FrameType.NAMESPACE_OPENED: opening.NamespaceOpened(
        1, bytes(range(16)), bytes(range(32)), 2, True, 256 * limits.KIB
    ),
    FrameType.ERROR: opening.ErrorReply(Status.QUOTA, "too much", "ask for more"),
    FrameType.GOODBYE: opening.Goodbye(Status.DRAINING, "maintenance"),
    FrameType.PING: opening.Ping(b"12345678"),
    FrameType.PONG: opening.Pong(b"12345678"),
    FrameType.FETCH: data.Fetch(1, data.OpenAt.DAEMON, True, limits.DEADLINE_NS_DEFAULT, _KEYS),
    FrameType.GRANT: data.Grant(
        True, 9, limits.LEASE_NS_DEFAULT, 10**15,
        (
            data.GrantItem(0, data.Tier.MEMORY, _SPAN, 1 << 20, b"k" * 32, b"c" * 16),
            data.GrantItem(1, data.Tier.FLASH, _SPAN, 1 << 20, b"K" * 32, b"C" * 16),
        ),
        ((2, Status.MISS), (3, Status.GAP)),
    ),
    FrameType.RELEASE: data.Release((9, 10), ((9, 1, Status.CORRUPT),)),
    FrameType.RESERVE: data.Reserve(
        1, data.Ack.DURABLE, limits.DEADLINE_NS_DEFAULT,
        (
            data.PutItem(b"w" * 16, b"e" * 36, 1 << 20, 0, b"", ids.pack_token_ids((1, 2, 3))),
            data.PutItem(b"x" * 16, b"f" * 36, 1 << 20, 1, b"e" * 36, ids.pack_token_ids((4, 5))),
        ),
    ),
    FrameType.RESERVED: data.Reserved(
        (
            data.Reserved.Item(Status.OK, 1, 77, b"s" * 32, b"k" * 32, b"c" * 16),
            data.Reserved.Item(Status.EXISTS),
        )
    ),
    FrameType.COMMIT: data.Commit(((77, _SPAN), (78, RemoteSpan(0, 0, 0)))),
    FrameType.PUT_DONE: data.PutDone((Status.OK, Status.BUSY)),
    FrameType.EXISTS: data.Exists(1, _KEYS),
    FrameType.EXISTS_REPLY: data.ExistsReply(1, b"\x01"),
    FrameType.STAGE: data.Stage(1, data.OpenAt.HOST, 10**10, limits.DEADLINE_NS_DEFAULT, _KEYS),
    FrameType.STAGED: data.Staged((Status.OK, Status.MISS)),
    FrameType.TOUCH: data.Touch(1, _KEYS),
    FrameType.FORGET: data.Forget(1, _KEYS),
    FrameType.DONE: data.Done(2),
    FrameType.EXPLAIN: data.Explain(1, (b"e" * 8, b"f" * 36)),
    FrameType.EXPLAINED: data.Explained(
        ((data.Reason.EVICTED, 10**18), (data.Reason.NEVER_STORED, 0))
    ),
    FrameType.QUOTE: quote.Quote(1, data.OpenAt.HOST, True, _KEYS),
    FrameType.QUOTED: quote.Quoted(
        3 << 20, 1 << 20, 40_000, 200_000, 900_000, 1_500_000, 3_000_000,
        bytes((data.Tier.MEMORY, data.Tier.MEMORY, data.Tier.FLASH, data.Tier.NONE)),
    ),
}  # fmt: skip

CARRYING = data.Grant(
    True, 0, 0, 0,
    (
        data.GrantItem(0, data.Tier.MEMORY, RemoteSpan(0, 0, 6), 4, b"k" * 32, b"c" * 16),
        data.GrantItem(1, data.Tier.FLASH, RemoteSpan(0, 6, 5), 3, b"K" * 32, b"C" * 16),
    ),
    ((2, Status.MISS),),
    b"sealedblock",
)  # fmt: skip

any_message = st.one_of(list(STRATEGIES.values()))


def decode(kind: FrameType, raw: bytes) -> Message:
    """What a session makes of a payload of this type."""
    return type(EXAMPLES[kind]).decode(raw)
