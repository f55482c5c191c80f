"""Blocks that lie one behind the other are read as one span, and opened each for itself."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from entresol_client import opening
from entresol_client.opening import (
    BETWEEN_BYTES_MAX,
    JOINED_BYTES_MAX,
    LANDING_BYTES_MIN,
    Granted,
    OpenContext,
    Wanted,
    open_group,
)
from entresol_client.staging import Arena, PrivateMemory
from entresol_proto.fabric.base import ReadOp, RemoteSpan
from entresol_proto.ids import EngineKey, WireKey
from entresol_proto.limits import KIB, MIB
from entresol_proto.seal import codecs
from entresol_proto.seal.block import (
    BlockIdentity,
    SealedHeader,
    derive_block_key,
    new_salt,
    seal_into,
    sealed_bytes_max,
)
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import Status
from entresol_proto.wire.data import GrantItem, Tier

NAMESPACE, DEK = bytes(range(16)), bytes(range(32))
PLAIN_BYTES = 64 * KIB
BEFORE = 96  # of a record, then its block
RKEY = 7


def granted_at(*places: tuple[int, int, int]) -> list[Granted]:
    """Blocks by remote key, address and length; nothing of them but that is looked at."""
    items = [
        GrantItem(at, Tier.MEMORY, RemoteSpan(*place), 1, bytes(32), bytes(16))
        for at, place in enumerate(places)
    ]
    return [Granted(Wanted(0, b"", b"", memoryview(b"")), item, 1, 1) for item in items]


def joined(*places: tuple[int, int, int]) -> list[tuple[int, int, tuple[int, int, int]]]:
    return [(one.first, one.end, tuple(one.span)) for one in opening._join(granted_at(*places))]


def test_neighbours_are_one_span_with_what_is_between_them() -> None:
    assert joined((1, 100, 50)) == [(0, 1, (1, 100, 50))]
    assert joined((1, 100, 50), (1, 150, 50)) == [(0, 2, (1, 100, 100))]
    apart = 150 + BETWEEN_BYTES_MAX
    assert joined((1, 100, 50), (1, apart, 50)) == [(0, 2, (1, 100, 100 + BETWEEN_BYTES_MAX))]


@pytest.mark.parametrize(
    "second",
    [
        (2, 150, 50),  # of another slab
        (1, 151 + BETWEEN_BYTES_MAX, 50),  # too far
        (1, 149, 50),  # into the first
        (1, 100, 50),  # the same
        (1, 0, 50),  # before it
        (1, 150, JOINED_BYTES_MAX - 49),  # too long together
    ],
)
def test_what_does_not_lie_behind_stays_alone(second: tuple[int, int, int]) -> None:
    assert joined((1, 100, 50), second) == [(0, 1, (1, 100, 50)), (1, 2, second)]


def test_every_block_is_in_one_span_that_holds_it() -> None:
    rng = random.Random(3)
    for _ in range(300):
        at, places = 0, []
        for _ in range(rng.randrange(1, 40)):
            at = max(0, at + rng.choice((0, 0, 96, 4_000, 9_000, -70_000, 5)))
            length = rng.choice((1, 4_096, 65_536, JOINED_BYTES_MAX, 3 * JOINED_BYTES_MAX))
            places.append((rng.choice((1, 1, 1, 2)), at, length))
            at += length
        found = joined(*places)
        assert [n for first, end, _ in found for n in range(first, end)] == list(range(len(places)))
        for first, end, (rkey, begin, length) in found:
            for key, address, size in places[first:end]:
                assert key == rkey
                assert begin <= address
                assert address + size <= begin + length
            assert end == first + 1 or length <= JOINED_BYTES_MAX


class Slab:
    """A daemon's memory with sealed blocks in records, and a fabric that lands spans of it."""

    threads = 1

    def __init__(self, count: int, *, lands: bool) -> None:
        self.capabilities = SimpleNamespace(maps=False, lands=lands)
        self.memory = bytearray(os.urandom(BEFORE))
        self.plain = [os.urandom(PLAIN_BYTES) for _ in range(count)]
        self.group: list[Granted] = []
        self.landed: list[RemoteSpan] = []
        self.fails: dict[int, Status] = {}
        for at, plain in enumerate(self.plain):
            self.group.append(self._store(at, plain))

    def _store(self, at: int, plain: bytes) -> Granted:
        name, wire, salt = EngineKey(bytes([at]) * 32), WireKey(bytes([at]) * 16), new_salt()
        key = derive_block_key(DEK, salt)
        room = memoryview(bytearray(sealed_bytes_max(PLAIN_BYTES, engine_key_bytes=32)))
        header: SealedHeader = seal_into(
            room, memoryview(plain), block_key=key, salt=salt, codec_id=codecs.RAW, meta=None,
            identity=BlockIdentity(NAMESPACE, wire, name, DType.BF16, 1),
        )  # fmt: skip
        address = len(self.memory)
        self.memory += room[: header.sealed_bytes]
        self.memory += bytes(-len(self.memory) % 4_096 + BEFORE)
        span = RemoteSpan(RKEY, address, header.sealed_bytes)
        item = GrantItem(at, Tier.MEMORY, span, PLAIN_BYTES, key.key, key.commitment)
        into = memoryview(bytearray(b"\xaa" * PLAIN_BYTES))
        return Granted(Wanted(at, wire, name, into), item, 2**63, 2**63)

    def can_land(self, spans: Sequence[RemoteSpan]) -> bool:
        return True

    async def land(
        self, spans: Sequence[RemoteSpan], on_landed: Callable[[int, memoryview], Status], _: int
    ) -> list[Status]:
        outcomes = []
        for number, span in enumerate(spans):
            self.landed.append(span)
            status = self.fails.get(number)
            if status is None:
                view = memoryview(
                    bytes(self.memory[span.address : span.address + span.length_bytes])
                )
                try:
                    status = on_landed(number, view)
                except RuntimeError:  # as a `Landing` tells it
                    status = Status.INTERNAL
            outcomes.append(status)
        return outcomes

    async def read(self, ops: Sequence[ReadOp], _: int) -> list[Status]:
        outcomes = []
        for number, op in enumerate(ops):
            span, into = op.span, op.into
            self.landed.append(span)
            outcomes.append(self.fails.get(number, Status.OK))
            if outcomes[-1] is Status.OK:
                into[:] = self.memory[span.address :][: span.length_bytes]
        return outcomes

    async def run(self, fn: Callable[..., Any], *args: Any, until_ns: int) -> Any:
        """As its own worker."""
        return fn(*args)

    async def open(self) -> list[Status]:
        staging = Arena(PrivateMemory(8 * MIB), 8 * MIB)
        given: dict[str, Any] = {"endpoint": self, "workers": self, "staging": staging}
        context = OpenContext(
            namespace_id=NAMESPACE, at_daemon=False, deadline_ns=2**63, **given
        )  # fmt: skip
        return await open_group(context, self.group)

    def content(self, at: int) -> bytes:
        return bytes(self.group[at].wanted.into)


@pytest.fixture(params=["landing", "copied"])
def slab(request: pytest.FixtureRequest) -> Slab:
    count = -(-LANDING_BYTES_MIN // PLAIN_BYTES)
    assert count > 2 * (JOINED_BYTES_MAX // PLAIN_BYTES)
    return Slab(count, lands=request.param == "landing")


async def test_every_block_of_a_span_is_opened_into_its_place(slab: Slab) -> None:
    assert await slab.open() == [Status.OK] * len(slab.group)
    assert all(slab.content(at) == plain for at, plain in enumerate(slab.plain))
    each = JOINED_BYTES_MAX // (PLAIN_BYTES + 2 * 4_096)
    assert len(slab.landed) == -(-len(slab.group) // each)


async def test_damage_is_that_of_its_block_alone(slab: Slab) -> None:
    span = slab.group[1].item.span
    slab.memory[span.address + span.length_bytes - 40] ^= 1
    assert await slab.open() == [
        Status.CORRUPT if at == 1 else Status.OK for at in range(len(slab.group))
    ]
    assert slab.content(1) == bytes(PLAIN_BYTES)
    assert slab.content(2) == slab.plain[2]


async def test_what_lies_between_blocks_is_of_no_account(slab: Slab) -> None:
    first, second = slab.group[0].item.span, slab.group[1].item.span
    between = slice(first.address + first.length_bytes, second.address)
    slab.memory[between] = os.urandom(between.stop - between.start)
    assert await slab.open() == [Status.OK] * len(slab.group)


async def test_a_span_that_does_not_come_is_the_outcome_of_its_blocks(slab: Slab) -> None:
    slab.fails[1] = Status.DEADLINE
    each = JOINED_BYTES_MAX // (PLAIN_BYTES + 2 * 4_096)
    assert await slab.open() == [
        Status.DEADLINE if each <= at < 2 * each else Status.OK for at in range(len(slab.group))
    ]
    assert slab.content(each) == b"\xaa" * PLAIN_BYTES


async def test_a_bug_in_one_block_leaves_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = Slab(LANDING_BYTES_MIN // PLAIN_BYTES, lands=True)
    real = opening._open_block

    def broken(context: Any, one: Granted, *rest: Any, **named: Any) -> Status:
        if one.item.index == 1:
            raise RuntimeError("a bug")
        return real(context, one, *rest, **named)

    monkeypatch.setattr(opening, "_open_block", broken)
    each = JOINED_BYTES_MAX // (PLAIN_BYTES + 2 * 4_096)
    assert (await slab.open())[: each + 1] == [
        Status.OK, *[Status.INTERNAL] * (each - 1), Status.OK
    ]  # fmt: skip
