"""Quotes of a real daemon: what they say, what they must not say, and when there are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_lab import DESCRIPTOR, client_of, get, keys_of, put, raw_of, shape
from harness import Running, running_daemon

from entresol_client import Client, UsageError
from entresol_daemon.shard.costing import cost_of
from entresol_daemon.shard.quoting import Quoting
from entresol_proto import limits
from entresol_proto.ids import EngineKey, NamespaceDescriptor, wire_key
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status
from entresol_proto.wire import opening
from entresol_proto.wire.data import Exists, Fetch, OpenAt, Tier
from entresol_proto.wire.opening import NamespaceOpened, OpenNamespace
from entresol_proto.wire.quote import Quote, Quoted

SIZE = 256 * KIB
MINUTE_NS = 60_000_000_000


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with running_daemon(
        tmp_path / "d", shape(dram=16 * MIB, slab=2 * MIB, block_max=MIB)
    ) as one:
        yield one


async def test_a_quote_tells_what_a_get_then_finds(running: Running) -> None:
    keys = keys_of(100, "quoted")
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        assert (await put(space, keys, SIZE, ack="durable")).stored == 100  # more than memory holds
        quote = await space.quote(keys)
        assert quote.complete
        assert quote.prefix_blocks == 100
        assert set(quote.tiers) == {Tier.MEMORY, Tier.FLASH}
        assert 0 < quote.wait_ns <= quote.memory_ns <= quote.expected_ns <= quote.high_ns
        assert quote.flash_ns <= quote.expected_ns < MINUTE_NS
        assert 0 < quote.flash_bytes < quote.sealed_bytes
        assert quote.sealed_bytes >= 100 * SIZE
        of_memory = [
            key for key, tier in zip(keys, quote.tiers, strict=True) if tier is Tier.MEMORY
        ]
        found = await get(space, of_memory[:8], SIZE)
        assert found.tiers == [Tier.MEMORY] * 8, "it moved nothing out of memory or in"
        again = await space.quote(of_memory[:8])
        assert again.flash_bytes == 0
        assert again.flash_ns <= again.memory_ns == again.expected_ns
        assert (await get(space, keys, SIZE)).ok
    page = running.daemon.shard.parts.metrics.render().decode()
    assert 'entresol_quoted_blocks_total{tier="flash"}' in page
    assert 'entresol_quote_error_ratio_count{tier="flash"} 1.0' in page, "the get was timed"
    assert 'entresol_requests_total{status="ok",type="quote"} 2.0' in page


async def test_a_prefix_ends_at_the_first_gap(running: Running) -> None:
    keys = keys_of(8, "gap")
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys[:3] + keys[4:], SIZE)
        one = await space.quote(keys)
        assert one.prefix_blocks == 3
        assert one.tiers == [Tier.MEMORY] * 3 + [Tier.NONE] * 5
        all_of_them = await space.quote(keys, prefix=False)
        assert all_of_them.prefix_blocks == 3
        assert all_of_them.tiers.count(Tier.MEMORY) == 7
        assert all_of_them.sealed_bytes > one.sealed_bytes


async def test_a_quote_of_what_others_have_is_that_of_what_nobody_has(running: Running) -> None:
    """Bit for bit: other tenant, other namespace, absent."""
    keys = keys_of(64, "theirs")
    async with client_of(running) as owner:
        await put(await owner.namespace(DESCRIPTOR), keys, SIZE)
        space = await owner.namespace(replace(DESCRIPTOR, cache_salt="another"))
        mine = await space.quote(keys, prefix=False)
        assert mine == await space.quote(keys_of(64, "nobody's"), prefix=False)
    async with client_of(running, "other") as stranger:
        space = await stranger.namespace(DESCRIPTOR)
        for prefix in (True, False):
            theirs = await space.quote(keys, prefix=prefix)
            nobodys = await space.quote(keys_of(64, "nobody's"), prefix=prefix)
            assert theirs == nobodys
            assert theirs.tiers == [Tier.NONE] * 64
            assert (theirs.prefix_blocks, theirs.sealed_bytes) == (0, 0)


async def test_what_one_tenant_learns_is_in_no_other_tenants_quotes(running: Running) -> None:
    """A tenant whose gets are slow, for whatever reason of its own, spoils its own quotes only."""
    shard = running.daemon.shard
    keys = keys_of(16, "learned")
    answers: dict[str, Any] = {}
    async with client_of(running) as slow, client_of(running, "other") as other:
        spaces = {
            "slow": await slow.namespace(DESCRIPTOR),
            "other": await other.namespace(DESCRIPTOR),
        }
        for name, space in spaces.items():
            await put(space, keys, SIZE)
            answers[name] = await space.quote(keys)
        for errors in shard.quoting._known["dev"].errors.values():
            for _ in range(32):
                errors.note(50.0, 1.0)
        later = {name: await space.quote(keys) for name, space in spaces.items()}
        assert later["slow"].expected_ns > 20 * answers["slow"].expected_ns
        assert later["other"].expected_ns == answers["other"].expected_ns


async def test_as_many_keys_as_a_fetch_takes_and_no_more(running: Running) -> None:
    most = limits.BLOCKS_PER_FETCH_MAX
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys_of(1, "many"), SIZE)
        quote = await space.quote(keys_of(most, "many"))
        assert quote.prefix_blocks == 1
        assert len(quote.tiers) == most
        with pytest.raises(UsageError, match="to quote"):
            await space.quote(keys_of(most + 1, "many"))
        nothing = await space.quote([])
        assert nothing.complete
        assert nothing.first(1) == (0, 0)


async def test_thousands_of_keys_take_several_turns_on_the_loop(running: Running) -> None:
    """While others use it; and what is answered is the same."""
    keys = keys_of(64, "turns")
    taken: list[int] = []
    loop_turns = running.daemon.shard.parts.turns.loop
    take = loop_turns.take

    async def noted(account: Any, cost: int, *rest: Any) -> None:
        taken.append(cost)
        await take(account, cost, *rest)

    async with client_of(running) as client, client_of(running, "other") as other:
        space = await client.namespace(DESCRIPTOR)
        elsewhere = await other.namespace(DESCRIPTOR)
        await put(space, keys, SIZE)
        wanted = keys + keys_of(3000, "absent")
        quiet = await space.quote(wanted, prefix=False)
        loop_turns.take = noted  # type: ignore[method-assign]
        ask = asyncio.create_task(space.quote(wanted, prefix=False))
        while not ask.done():
            await elsewhere.exists(keys)
        assert (await ask).tiers == quiet.tiers
        assert len(taken) >= 3, "a stretch of 50 us at a time"


def test_a_quote_costs_the_loop_no_less_than_what_it_does() -> None:
    for count in (1, 64, 4096):
        keys = bytes(16 * count)
        quote, rank = cost_of(Quote(1, OpenAt.HOST, True, keys))
        exists, _ = cost_of(Exists(1, keys))
        fetch, rank_of_gets = cost_of(Fetch(1, OpenAt.HOST, True, 10**9, keys))
        assert exists <= quote <= fetch
        assert rank == rank_of_gets


async def test_an_older_daemon_gives_no_quote_and_no_error(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "PROTOCOL_MAX", 2)  # the daemon's; a client has read it already
    keys = keys_of(4, "old")
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        await put(space, keys, SIZE)
        quote = await space.quote(keys)
        assert not quote.complete
        assert quote.tiers == [Tier.NONE] * 4
        assert (await get(space, keys, SIZE)).ok
        assert client.shards()[0].connects == 1, "the session lives on"
    sessions = running.daemon.shard.parts.metrics.sessions_refused
    assert not sum(child._value.get() for child in sessions.values())


async def test_a_quote_that_does_not_come_ends_at_its_deadline(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: Quoting, session: Any, request: Any) -> Quoted:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Quoting, "quote", never)
    async with client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        quote = await space.quote(keys_of(3), deadline_ns=50_000_000)
        assert not quote.complete


async def test_a_handle_that_was_not_opened_is_refused(running: Running) -> None:
    async with raw_of(running) as raw:
        opened: NamespaceOpened = await raw.ask(OpenNamespace(DESCRIPTOR.canonical()))
        run = wire_key(opened.secret, EngineKey(keys_of(1)[0]))
        assert isinstance(await raw.ask(Quote(opened.handle, OpenAt.DAEMON, True, run)), Quoted)
        with pytest.raises(Exception, match="handle") as caught:
            await raw.ask(Quote(opened.handle + 7, OpenAt.HOST, True, run))
        assert getattr(caught.value, "status", None) is Status.BAD_REQUEST


async def test_the_facade_quotes_too(running: Running) -> None:
    config = running.client_config()

    def ask() -> int:
        with Client(config) as client:
            space = client.namespace(NamespaceDescriptor(model="facade"))
            return space.quote(keys_of(5)).prefix_blocks

    assert await asyncio.to_thread(ask) == 0
