"""What requests take of the event loop is counted and shared: reading, decoding, answers."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.core.accounts import Account
from entresol_daemon.flash.segment import extent_bytes
from entresol_daemon.shard import gets
from entresol_daemon.shard.dispatch import (
    BACKLOG_BYTES_MAX,
    READ_COST_SHIFT,
    READ_FREE_COST,
)
from entresol_daemon.shard.turns import (
    BLOCK_COST,
    FLASH_ITEM_BYTES,
    FRAME_COST,
    LOOP_TURN_COST,
    WINDOW_COST,
    LoopTurns,
)
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire import data, opening
from entresol_proto.wire.data import Ack, OpenAt, Reason
from entresol_proto.wire.frames import FrameType, encode_frame
from tests.sim.shardlab import Host, World
from tests.sim.test_shard_review import KEYS, forget_memory, joined, names, simulate, stored

READ_FREE_BYTES = (READ_FREE_COST + 1) << READ_COST_SHIFT


def contend(world: World) -> None:
    """Another tenant uses the loop, and has used up this round of it."""
    accounts, loop_turns = world.shard.parts.accounts.by_name, world.shard.parts.turns.loop
    for name in ("alpha", "beta"):
        loop_turns.enter(accounts[name], LOOP_TURN_COST)
    assert loop_turns.contended


def piece_of(host: Host, length_bytes: int) -> bytes:
    """Requests of a host that come in one piece, just longer than that."""
    keys, raw = names(host, KEYS), b""
    while len(raw) <= length_bytes:
        raw += host._machine.send(data.Exists(host.handle, keys))[1]
    return raw


async def listening(world: World) -> tuple[Host, list[bool]]:
    """A host, and what its connection is told about reading."""
    host, reads = await joined(world), []
    await joined(world, tenant="beta")
    await asyncio.sleep(1)
    host._handler._read_on = reads.append
    return host, reads


def test_much_that_is_read_at_a_time_takes_a_turn(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, reads = await listening(world)
        contend(world)
        host._handler._unpaid = host._handler._unpaid_bytes = 0  # of opening the session
        host._handler.receive(piece_of(host, 0))
        assert reads == [], "little is free"
        await asyncio.sleep(1)
        for _ in range(3):
            contend(world)
            host._handler.receive(piece_of(host, READ_FREE_BYTES))
            assert reads == [False], "no more until it is its turn"
            await asyncio.sleep(1)
            assert reads == [False, True]
            assert host._handler._holds == 0
            reads.clear()

    simulate(tmp_path, story)


def test_two_reasons_not_to_read_are_one_for_the_connection(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, reads = await listening(world)
        contend(world)
        host._handler.receive(piece_of(host, READ_FREE_BYTES))
        host._handler._wait_for(BACKLOG_BYTES_MAX + 1)
        assert (reads, host._handler._holds) == ([False], 2)
        await asyncio.sleep(1)
        assert (reads, host._handler._holds) == ([False], 1)
        host._handler._wait_for(-BACKLOG_BYTES_MAX - 1)
        assert (reads, host._handler._holds) == ([False, True], 0)

    simulate(tmp_path, story)


def test_what_comes_before_reading_stops_is_kept_in_order(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, reads = await listening(world)
        contend(world)
        whole = piece_of(host, 3 * READ_FREE_BYTES)
        asked = len(host._machine.in_flight)
        for at in range(0, len(whole), 10_000):
            host._handler.receive(whole[at : at + 10_000])
        assert reads == [False]
        await asyncio.sleep(2)
        assert (reads[-1], host._handler._holds, len(host._handler._unread)) == (True, 0, 0)
        assert asked > 0
        assert not host._machine.in_flight, "each was answered"

    simulate(tmp_path, story)


UNASKED = {
    "releases": (FrameType.RELEASE, data.Release(()).encode()),
    "pings": (FrameType.PING, bytes(8)),
    "goodbyes": (FrameType.GOODBYE, opening.Goodbye().encode()),
}


@pytest.mark.parametrize("kind", list(UNASKED))
def test_messages_that_take_no_turn_are_not_a_way_to_have_the_loop(
    tmp_path: Path, kind: str
) -> None:
    """A piece of 30 kB had the loop for 24 ms with releases in it, at no charge."""
    frame_type, payload = UNASKED[kind]

    async def story(world: World) -> None:
        host, reads = await listening(world)
        seen = []
        dispatch = host._handler._dispatch
        host._handler._dispatch = lambda item: (seen.append(item), dispatch(item))
        host._handler._write = lambda _raw: None
        contend(world)
        numbers = range(1, 201) if frame_type is FrameType.PING else [0] * 200
        pieces = [encode_frame(frame_type, number, payload) for number in numbers]
        host._handler.receive(b"".join(pieces))
        assert reads == [False]
        assert len(seen) < 60, "about a millisecond of work"
        for _ in range(20):
            contend(world)
            await asyncio.sleep(0.1)
        assert (len(seen), reads[-1]) == (200, True)

    simulate(tmp_path, story)


def test_decoding_a_long_reserve_is_paid_for(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, reads = await listening(world)
        contend(world)
        items = (data.PutItem(bytes(16), b"k" * 8, 1, 0, b"", b""),) * 1_000
        host._handler.receive(host._machine.send(data.Reserve(99, Ack.ACCEPTED, 10**9, items))[1])
        assert reads == [False]
        await asyncio.sleep(1)
        assert reads == [False, True]

    simulate(tmp_path, story)


def long_requests(host: Host) -> list[Any]:
    many = names(host, KEYS) * 100
    absent = tuple(b"nowhere-%09d" % number for number in range(1_000))
    own = tuple(KEYS[number % len(KEYS)] for number in range(1_000))
    return [
        data.Touch(host.handle, many), data.Explain(host.handle, absent),
        data.Explain(host.handle, own), data.Forget(host.handle, many),
    ]  # fmt: skip


def test_long_requests_take_the_loop_a_turn_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EXPLAIN of 4,096 keys was 44 ms in one go, TOUCH and FORGET of 65,536 were 26."""
    turns = []
    take = LoopTurns.take

    async def counted(self: LoopTurns, account: Any, cost: int, rank: int = 0) -> None:
        turns.append(account.name)
        await take(self, account, cost, rank)

    async def story(world: World) -> None:
        host = await joined(world)
        await joined(world, tenant="beta")
        await stored(host, KEYS)
        monkeypatch.setattr(LoopTurns, "take", counted)
        for request in long_requests(host):
            turns.clear()
            contend(world)
            await host._call(request)
            assert turns.count("alpha") >= 10, request.TYPE.name
        left = await host._call(data.Exists(host.handle, names(host, KEYS)))
        assert not any(left.bitmap)

    simulate(tmp_path, story)


def test_requests_in_parts_answer_as_in_one(tmp_path: Path) -> None:
    """Of what is forgotten in several turns everything is gone, and nothing is counted twice."""

    async def story(world: World) -> None:
        host = await joined(world)
        await joined(world, tenant="beta")
        await stored(host, KEYS[::2])
        mixed = names(host, KEYS) * 20
        contend(world)
        assert (await host._call(data.Touch(host.handle, mixed))).count == 20 * len(KEYS) // 2
        contend(world)
        found = await host._call(data.Explain(host.handle, tuple(KEYS)))
        assert [row[0] for row in found.rows[::2]] == [Reason.IN_MEMORY] * (len(KEYS) // 2)
        assert [row[0] for row in found.rows[1::2]] == [Reason.NEVER_STORED] * (len(KEYS) // 2)
        contend(world)
        assert (await host._call(data.Forget(host.handle, mixed))).count == len(KEYS) // 2
        assert (await host._call(data.Forget(host.handle, mixed))).count == 0

    simulate(tmp_path, story)


def test_a_session_that_ends_before_its_turn_to_read_holds_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host, reads = await listening(world)
        loop_turns = world.shard.parts.turns.loop
        account = world.shard.parts.accounts.by_name["alpha"]
        contend(world)
        ahead = [asyncio.ensure_future(loop_turns.take(account, 1_000)) for _ in range(50)]
        await asyncio.sleep(0)
        host._handler.receive(piece_of(host, READ_FREE_BYTES))
        await asyncio.sleep(0)
        assert not ahead[-1].done(), "its turn is after those"
        await host._handler.finish()
        await asyncio.sleep(0)
        assert (reads, host._handler._holds) == ([False, True], 0)
        assert not host._handler._tasks
        await asyncio.gather(*ahead)
        assert loop_turns.waiting == 0

    simulate(tmp_path, story)


def test_a_read_costs_its_tenant_more_than_its_length(tmp_path: Path) -> None:
    """Of blocks of a few bytes thousands would be read before one of another tenant."""

    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:8])
        forget_memory(world)
        queue, costs = world.shard.parts.turns.flash, []
        take = queue.take

        async def counted(account: Account, cost: int, *rest: int) -> int:
            costs.append(cost)
            return await take(account, cost, *rest)

        queue.take = counted  # type: ignore[method-assign]
        assert await host.get(KEYS[:8], OpenAt.HOST) == [Status.OK] * 8
        index = world.shard.parts.engine.index
        length_bytes = sum(extent_bytes(index.m_sealed_bytes[s]) for s in index.live_slots())
        assert sum(costs) == length_bytes + 8 * FLASH_ITEM_BYTES
        assert not queue.in_service

    simulate(tmp_path, story)


def held_reads(world: World) -> asyncio.Event:
    """What is read from flash from now on lands once this is set."""
    engine, read = world.shard.parts.engine, asyncio.Event()
    honest = engine.read

    async def slow(ops: Any) -> list[Status]:
        statuses = await honest(ops)
        await read.wait()
        return statuses

    engine.read = slow  # type: ignore[method-assign]
    return read


@dataclass
class Landing:
    """A request whose blocks were read, a few at a time, and wait for a turn on the loop."""

    host: Host
    grants: list[data.Grant]
    asking: asyncio.Future[None]
    turn: asyncio.Event
    turns: list[int]  # what was asked for, and what was counted later: the cost of each

    @classmethod
    async def begin(cls, world: World) -> Landing:
        host = await joined(world)
        await stored(host, KEYS[:16])
        forget_memory(world)
        read = held_reads(world)
        grants: list[data.Grant] = []
        asking = asyncio.ensure_future(cls._ask(host, grants))
        await asyncio.sleep(0.1)  # all windows wait for their reads
        turn, turns = asyncio.Event(), world.shard.parts.turns.loop
        costs: list[int] = []

        async def later(_account: Account, cost: int, *_: int) -> None:
            costs.append(cost)
            await turn.wait()

        turns.enter, turns.take = lambda *_: False, later  # type: ignore[method-assign,assignment]
        turns.count = lambda _, cost: costs.append(cost)  # type: ignore[method-assign]
        read.set()
        await asyncio.sleep(0.1)
        assert not grants
        return cls(host, grants, asking, turn, costs)

    @staticmethod
    async def _ask(host: Host, grants: list[data.Grant]) -> None:
        keys = names(host, KEYS[:16])
        async for grant in host._answers(
            data.Fetch(host.handle, OpenAt.HOST, False, 5_000_000_000, keys)
        ):
            grants.append(grant)
            host._send(data.Release((grant.lease_id,)))


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block or two each."""
    monkeypatch.setattr(gets, "LOAD_FIRST_BYTES", 32_768)
    monkeypatch.setattr(gets, "LOAD_WINDOW_BYTES", 32_768)


@pytest.mark.usefixtures("small_windows")
def test_what_lands_while_the_loop_is_busy_is_granted_together(tmp_path: Path) -> None:
    """With a frame for each window, frames to and fro were half of what a flooded loop did."""

    async def story(world: World) -> None:
        landing = await Landing.begin(world)
        landing.turn.set()
        await landing.asking
        many = landing.grants[0].items
        assert len(many) > 4, "only what one window brought"
        # (Turns for more windows cost WINDOW_COST and so much a block.)
        windows = [cost for cost in landing.turns if (cost - WINDOW_COST) % BLOCK_COST == 0]
        granted = [cost for cost in landing.turns if cost not in windows]
        turns = [cost for cost in granted if cost == FRAME_COST + BLOCK_COST]
        assert len(turns) <= len(landing.grants), "turns for nothing"
        assert sum(granted) == len(turns) * FRAME_COST + 16 * BLOCK_COST, "each block once"
        assert sum(len(grant.items) for grant in landing.grants) == 16
        assert [grant.final for grant in landing.grants[:-1]] == [False] * (len(landing.grants) - 1)
        assert landing.grants[-1].final

    simulate(tmp_path, story)


@pytest.mark.usefixtures("small_windows")
def test_a_host_that_leaves_before_the_turn_of_what_landed_leaves_no_pin(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        landing = await Landing.begin(world)
        landing.host.cut()
        with contextlib.suppress(EntresolError):
            await landing.asking
        await asyncio.sleep(1)
        assert not world.shard.sessions
        residents = world.shard.parts.residency._by_slot.values()
        assert [each.pins for each in residents] == [0] * len(residents)
        assert not landing.grants

    simulate(tmp_path, story)


def test_what_landed_goes_before_what_its_tenant_has_not_begun(tmp_path: Path) -> None:
    """It holds a place at the door and memory that others wait for."""

    async def story(world: World) -> None:
        host = await joined(world)
        await joined(world, tenant="beta")
        await stored(host, KEYS[:4])
        forget_memory(world)
        read = held_reads(world)
        getting = asyncio.ensure_future(host.get(KEYS[:4], OpenAt.HOST))
        await asyncio.sleep(0.1)
        contend(world)
        turns, account = world.shard.parts.turns.loop, world.shard.parts.accounts.by_name["alpha"]
        left: list[int] = []
        granting = world.shard.gets.granting
        grant = granting.grant

        async def noting(*args: Any, **words: Any) -> None:
            left.append(turns.waiting)
            await grant(*args, **words)

        granting.grant = noting  # type: ignore[method-assign]
        asked = [turns.ask(account, LOOP_TURN_COST) for _ in range(10_000)]
        read.set()
        assert await getting == [Status.OK] * 4
        assert min(left) > 9_000, "it waited for its tenant's other work"
        assert all(unit.item.done() for unit in asked)

    simulate(tmp_path, story)
