"""Blocks enter index, books and event log: in one turn for several, and whole where that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.flash.engine import Record
from entresol_daemon.shard import turns
from entresol_proto.status import Status
from entresol_proto.wire.data import Ack, OpenAt
from tests.sim.shardlab import World
from tests.sim.test_shard_review import KEYS, forget_memory, joined, simulate, stored

# Of the books that learn of a block once it is in the index: each may find no memory.
BOOKS = {
    "census": ("census", "note"),
    "history": ("history", "forget"),
    "usefulness": ("meters.usefulness", "stored"),
    "codecs": ("codecs", "learn"),
    "events": ("events", "publish"),
}


@pytest.mark.parametrize("book", BOOKS)
def test_a_block_whose_book_fails_is_counted_durable_and_can_go(tmp_path: Path, book: str) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        parts = world.shard.parts
        path, name = BOOKS[book]
        owner: Any = parts
        for step in path.split("."):
            owner = getattr(owner, step)
        real, calls = getattr(owner, name), 0

        def fails_at_the_second(*args: Any, **words: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise MemoryError(book)
            return real(*args, **words)

        setattr(owner, name, fails_at_the_second)
        assert Status.OK not in await host.put(KEYS[:4], Ack.DURABLE), "an ERROR answers it"
        setattr(owner, name, real)
        await world.shard.puts.drain()
        assert len(parts.engine.index) == 2, "the one before, and the one that was in already"
        assert parts.meters.totals.blocks_stored == 2
        assert parts.accounts.by_name[host.tenant].flash_blocks == 2
        assert parts.put_budget.used_blocks == 0, "of those that did not enter, too"
        forget_memory(world)
        found = await host.get(KEYS[:4], OpenAt.HOST)
        assert found == [Status.OK] * 2 + [Status.MISS] * 2
        await stored(host, KEYS[2:4])
        await host.forget(KEYS[:4])
        assert parts.accounts.by_name[host.tenant].flash_blocks == 0

    simulate(tmp_path, story)


@pytest.mark.parametrize("ack", Ack)
def test_a_block_that_the_engine_does_not_take_is_not_said_to_be_stored(
    tmp_path: Path, ack: Ack
) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        engine = world.shard.parts.engine
        append, calls = engine.append, 0

        def refuses_the_second(stream: bytes, record: Record) -> tuple[int, asyncio.Future[Status]]:
            nonlocal calls
            calls += 1
            if calls != 2:
                return append(stream, record)
            refused = asyncio.get_running_loop().create_future()
            refused.set_result(Status.IO_ERROR)
            return -1, refused

        engine.append = refuses_the_second  # type: ignore[method-assign]
        assert await host.put(KEYS[:3], ack) == [Status.OK, Status.IO_ERROR, Status.OK]
        found = await host.get(KEYS[:3], OpenAt.HOST)
        assert found == [Status.OK, Status.MISS, Status.OK]
        await world.shard.puts.drain()
        assert world.shard.parts.put_budget.used_blocks == 0

    simulate(tmp_path, story)


@pytest.mark.parametrize("others", [False, True])
def test_blocks_enter_in_one_turn_unless_others_want_the_loop(tmp_path: Path, others: bool) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        entering, loop_turns = world.shard.puts._entering, world.shard.parts.turns.loop
        enter_some, counts = entering._enter_some, []

        async def noted(account: Any, pulls: Any, entered: Any) -> None:
            counts.append(len(pulls))
            await enter_some(account, pulls, entered)

        entering._enter_some = noted  # type: ignore[method-assign]
        if others:
            loop_turns._contended_until = float("inf")
        await stored(host, KEYS[:12])
        most = turns.LOOP_ROUND_COST // turns.APPEND_COST
        assert counts == ([1] * 12 if others else [most, 12 - most])

    simulate(tmp_path, story)
