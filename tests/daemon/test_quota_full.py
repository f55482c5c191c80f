"""Limits of the real daemon, at the limit and one past it: sizes, quotas, queues, tables, flash."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_lab import (
    DESCRIPTOR,
    Raw,
    all_are,
    assert_idle,
    blocks,
    client_of,
    counts,
    get,
    key_of,
    keys_of,
    put,
    put_item,
    raw_of,
    run_of,
    shape,
)
from harness import eventually, running_daemon

from entresol_client.results import RequestFailedError
from entresol_daemon.config import Config
from entresol_daemon.control.admin import TenantQuota
from entresol_proto.ids import TenantName
from entresol_proto.limits import KIB, MIB, NAMESPACES_PER_SESSION_MAX
from entresol_proto.status import Status
from entresol_proto.wire.data import Reason

pytestmark = pytest.mark.daemon

SMALL = {"dram": 16 * MIB, "slab": 4 * MIB, "block_max": 1 * MIB, "segment": 4 * MIB}


def with_tenants(change: Callable[[Config], Config], **values: Any) -> Callable[[Config], Config]:
    def both(config: Config) -> Config:
        config = change(config)
        return replace(config, tenants=replace(config.tenants, **values))

    return both


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_the_longest_block_and_one_byte_more(tmp_path: Path, fabric: str) -> None:
    async with (
        running_daemon(tmp_path / "d", shape(block_max=1 * MIB)) as running,
        client_of(running, fabric=fabric) as client,
    ):
        space = await client.namespace(DESCRIPTOR)
        keys = keys_of(2)
        assert all_are(await put(space, keys[:1], 1 * MIB, ack="durable"), Status.OK)
        assert all_are(await put(space, keys[1:], 1 * MIB + 1), Status.TOO_LARGE)
        mixed = [*blocks(keys_of(3, "m"), 1 * MIB), *blocks(keys_of(2, "n"), 2 * MIB)]
        result = await space.put(mixed)
        assert result.statuses == [Status.OK] * 3 + [Status.TOO_LARGE] * 2
        assert (await get(space, keys[:1], 1 * MIB)).ok
        assert all_are(await get(space, keys[1:], 1 * MIB + 1), Status.MISS)
        await assert_idle(running.daemon)


async def test_a_block_larger_than_the_whole_quota(tmp_path: Path) -> None:
    change = with_tenants(shape(**SMALL), flash_bytes=300 * KIB)
    async with running_daemon(tmp_path / "d", change) as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        assert all_are(await put(space, keys_of(1, "big"), 400 * KIB), Status.QUOTA)
        keys = keys_of(20)
        for key in keys:  # each fits; older ones give way
            assert all_are(await put(space, [key], 100 * KIB, ack="durable"), Status.OK)
            account = running.daemon.shard.parts.accounts.by_name[TenantName("dev")]
            assert account.flash_bytes <= 300 * KIB
        assert (await get(space, keys[-1:], 100 * KIB)).ok
        present = (await space.exists(keys)).present
        assert 1 <= sum(present) <= 3
        gone = [key for key, here in zip(keys, present, strict=True) if not here]
        assert {row.reason for row in await space.explain(gone)} == {Reason.EVICTED}
        await assert_idle(running.daemon)


async def test_one_tenants_quota_does_not_touch_another(tmp_path: Path) -> None:
    async with (
        running_daemon(tmp_path / "d", shape(flash=64 * MIB, **SMALL)) as running,
        client_of(running) as mine,
        client_of(running, "other") as theirs,
    ):
        own, foreign = await mine.namespace(DESCRIPTOR), await theirs.namespace(DESCRIPTOR)
        keys = keys_of(60)
        assert (await put(foreign, keys[:20], 100 * KIB, ack="durable")).ok
        assert (await put(own, keys, 100 * KIB, ack="durable")).ok
        quota = TenantQuota(flash_bytes=2 * MIB)
        record = await running.daemon.admin.tenant_set_quota(TenantName("dev"), quota)
        assert record.flash_bytes <= 2 * MIB, "a smaller quota holds at once"
        assert (await get(foreign, keys[:20], 100 * KIB)).ok
        found = await get(own, keys, 100 * KIB)
        assert set(found.statuses) <= {Status.OK, Status.MISS}
        more = keys_of(40, "more")
        await put(own, more, 100 * KIB, ack="durable")
        assert (await get(foreign, keys[:20], 100 * KIB)).ok, "dev's puts displaced the other"
        account = running.daemon.shard.parts.accounts.by_name[TenantName("dev")]
        assert account.flash_bytes <= 2 * MIB
        await assert_idle(running.daemon)


async def test_memory_quota_of_a_tenant(tmp_path: Path) -> None:
    """A tenant at its memory quota displaces only itself; blocks larger than it are refused."""
    change = with_tenants(shape(**SMALL), dram_bytes=2 * MIB)
    async with (
        running_daemon(tmp_path / "d", change) as running,
        client_of(running) as mine,
        client_of(running, "other") as theirs,
    ):
        own, foreign = await mine.namespace(DESCRIPTOR), await theirs.namespace(DESCRIPTOR)
        keys = keys_of(40)
        assert (await put(foreign, keys[:10], 100 * KIB, ack="durable")).ok
        for at in range(0, 40, 5):
            assert (await put(own, keys[at : at + 5], 300 * KIB, ack="durable")).ok
        pool = running.daemon.shard.parts.residency.pool
        account = running.daemon.shard.parts.accounts.by_name[TenantName("dev")]
        assert pool.used_bytes(account.stream) <= 2 * MIB
        found = await get(own, keys, 300 * KIB)
        assert found.ok, counts(found.statuses)
        assert {row.reason for row in await foreign.explain(keys[:10])} == {Reason.IN_MEMORY}
        await assert_idle(running.daemon)


async def test_put_queue_in_blocks_at_its_limit(tmp_path: Path) -> None:
    change = shape(put_queue_blocks_max=8)
    async with running_daemon(tmp_path / "d", change) as running:
        async with raw_of(running) as raw:
            namespace = await raw.namespace()
            items = [put_item(namespace, key_of(at), 4 * KIB) for at in range(12)]
            reply = await raw.reserve(namespace.handle, items)
            found = [item.status for item in reply.items]
            assert found == [Status.OK] * 8 + [Status.BUSY] * 4
            waiting = asyncio.create_task(raw.reserve(namespace.handle, items[8:], seconds=30))
            await asyncio.sleep(0.1)
            assert not waiting.done(), "a RESERVE of which nothing fits waits"
            raw.connection.give_up([item.put_id for item in reply.items[:4]])
            reply = await waiting
            assert [item.status for item in reply.items] == [Status.OK] * 4
        async with client_of(running) as client:
            space = await client.namespace(DESCRIPTOR)
            result = await put(space, keys_of(100, "many"), 4 * KIB, ack="durable")
            assert result.ok, counts(result.statuses)
        await assert_idle(running.daemon)


async def wrote_in(raw: Raw, rank: int) -> list[int]:
    """Open a namespace and reserve a block of it: what is to be given up again."""
    namespace = await raw.namespace(replace(DESCRIPTOR, tp_rank=rank))
    reply = await raw.reserve(namespace.handle, [put_item(namespace, key_of(rank), 4 * KIB)])
    return [item.put_id for item in reply.items]


async def test_sessions_and_namespaces_at_their_limits(tmp_path: Path) -> None:
    change = shape(sessions_per_tenant_max=3, sessions_max=4, namespaces_per_tenant_max=70)
    async with running_daemon(tmp_path / "d", change) as running:
        async with contextlib.AsyncExitStack() as stack:
            raws = [await stack.enter_async_context(raw_of(running)) for _ in range(3)]
            with pytest.raises(RequestFailedError) as caught:
                await stack.enter_async_context(raw_of(running))
            assert caught.value.status is Status.QUOTA
            await stack.enter_async_context(raw_of(running, "other"))
            with pytest.raises(RequestFailedError) as caught:
                await stack.enter_async_context(raw_of(running, "other"))
            assert caught.value.status is Status.BUSY
            reserved: list[int] = []
            for at in range(NAMESPACES_PER_SESSION_MAX):
                reserved += await wrote_in(raws[0], at)
            with pytest.raises(RequestFailedError) as caught:
                await raws[0].namespace(replace(DESCRIPTOR, tp_rank=1000))
            assert caught.value.status is Status.QUOTA
            for at in range(6):
                await wrote_in(raws[1], 100 + at)
            with pytest.raises(RequestFailedError) as caught:
                await wrote_in(raws[1], 1000)  # asking about it is free, a put is not
            assert caught.value.status is Status.QUOTA
            assert (await raws[1].namespace(replace(DESCRIPTOR, tp_rank=0))).handle
            raws[0].connection.give_up(reserved)
            await raws[0].namespace(replace(DESCRIPTOR, tp_rank=1))  # read behind that
            await wrote_in(raws[1], 1000)  # in the place of one that has nothing
        async with client_of(running) as client:
            space = await client.namespace(replace(DESCRIPTOR, tp_rank=0))
            assert (await put(space, keys_of(4), 4 * KIB)).ok, "places are free again"


async def test_a_client_remembers_no_more_namespaces_than_a_session_has(tmp_path: Path) -> None:
    """Of more those that were used last, also one that was named first."""
    count = NAMESPACES_PER_SESSION_MAX + 8
    async with running_daemon(tmp_path / "d") as running, client_of(running) as client:
        oldest = await client.namespace(replace(DESCRIPTOR, tp_rank=0))
        for at in range(1, count):
            await client.namespace(replace(DESCRIPTOR, tp_rank=at))
        assert (await put(oldest, keys_of(1), 4 * KIB)).ok
        (link,) = client._links
        first = link._session
        assert first is not None
        assert len(link._namespaces) == NAMESPACES_PER_SESSION_MAX
        assert len(first.connection._namespaces) == NAMESPACES_PER_SESSION_MAX, "refused ones"
        first.connection.drop("test")

        def reopened() -> bool:
            session = link._session
            return session not in (None, first) and all(
                name in session.connection._namespaces for name in link._namespaces
            )

        await eventually(reopened)
        latest = await client.namespace(replace(DESCRIPTOR, tp_rank=count - 1))
        assert (await put(latest, keys_of(1), 4 * KIB)).ok
        assert (await get(oldest, keys_of(1), 4 * KIB)).ok


async def test_too_many_requests_in_flight_end_only_that_session(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "d", shape(block_max=1 * MIB)) as running:
        async with client_of(running) as client:
            space = await client.namespace(DESCRIPTOR)
            keys = keys_of(8)
            assert (await put(space, keys, 64 * KIB)).ok
            results = await asyncio.gather(*(get(space, keys, 64 * KIB) for _ in range(400)))
            seen = counts(status for result in results for status in result.statuses)
            assert set(seen) <= {"ok", "busy"}, seen
            assert seen["ok"] > 1_000, seen
            assert (await get(space, keys, 64 * KIB)).ok
        await assert_idle(running.daemon)


async def test_a_ping_waits_behind_nothing(tmp_path: Path) -> None:
    """A host that asks for much hears all the same, at once, that somebody is here."""
    async with running_daemon(tmp_path / "d", shape(block_max=1 * MIB)) as running:
        async with client_of(running) as client, raw_of(running) as raw:
            space = await client.namespace(DESCRIPTOR)
            keys = keys_of(64)
            assert (await put(space, keys, 4 * KIB)).ok
            namespace = await raw.namespace()
            run = run_of(namespace, keys)
            asked = [asyncio.create_task(raw.fetch(namespace.handle, run)) for _ in range(100)]
            for _ in range(10):
                await asyncio.sleep(0)
                assert await raw.connection.ping(time.monotonic_ns() + 60_000_000_000) > 0
            await asyncio.gather(*asked)
        await assert_idle(running.daemon)


async def test_gets_at_once_at_their_limit_and_far_over_it(tmp_path: Path) -> None:
    """Everything is served or busy, and counted alike on both sides; then all are served again."""
    change = shape(gets_at_once_max=2)
    async with running_daemon(tmp_path / "d", change) as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        keys = keys_of(32)
        assert (await put(space, keys, 4 * KIB)).ok
        results = await asyncio.gather(*(get(space, keys, 4 * KIB) for _ in range(60)))
        seen = counts(status for result in results for status in result.statuses)
        assert set(seen) <= {"ok", "busy"}, seen
        assert seen["ok"] >= 2 * 32, seen
        assert seen["busy"], seen
        metrics = running.daemon.metrics
        assert metrics.misses["dev", Status.BUSY]._value.get() == seen["busy"]
        assert client.stats()["misses"] == {"busy": seen["busy"]}
        assert (await get(space, keys, 4 * KIB)).ok
        await assert_idle(running.daemon)


async def test_in_flight_bytes_smaller_than_a_slab(tmp_path: Path) -> None:
    """The budget of one session only slows it, sealed or opened by the daemon."""
    change = shape(slab=8 * MIB, block_max=1 * MIB, inflight_bytes_per_session_max=3 * MIB)
    async with running_daemon(tmp_path / "d", change) as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        keys = keys_of(12)
        assert (await put(space, keys, 1 * MIB, ack="durable")).ok
        for place in ("host", "daemon"):
            found = await get(space, keys, 1 * MIB, open_at=place)
            assert found.ok, (place, counts(found.statuses))
        await assert_idle(running.daemon)


async def test_a_large_explain_lets_others_through(tmp_path: Path) -> None:
    async with (
        running_daemon(tmp_path / "d", shape()) as running,
        client_of(running) as curious,
        client_of(running, "other") as other,
    ):
        for rank in range(60):
            each = await curious.namespace(replace(DESCRIPTOR, tp_rank=rank))
            assert (await put(each, keys_of(1, str(rank)), 64)).ok
        theirs = await other.namespace(DESCRIPTOR)
        keys = [key_of(0, "59"), *keys_of(4_000, "absent")]
        space = await curious.namespace(replace(DESCRIPTOR, tp_rank=0))
        explaining = asyncio.create_task(space.explain(keys))
        for _ in range(5):
            await theirs.exists(keys_of(3))
        assert not explaining.done(), "the whole shard waited for it"
        reasons = [row.reason for row in await explaining]
        assert reasons == [Reason.OTHER_NAMESPACE] + [Reason.NEVER_STORED] * 4_000


async def test_an_index_of_few_blocks(tmp_path: Path) -> None:
    """Many tiny blocks fill the index before the flash: eviction has to make room there too."""

    def change(config: Config) -> Config:
        config = shape(flash=64 * MIB, **SMALL)(config)
        return replace(config, flash=replace(config.flash, blocks_max=500))

    async with running_daemon(tmp_path / "d", change) as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        keys = keys_of(1_500)
        for at in range(0, 1_500, 100):
            result = await put(space, keys[at : at + 100], 64, ack="durable")
            assert result.ok, (at, counts(result.statuses))
            assert (await get(space, keys[at : at + 100], 64)).ok, at
        assert sum((await space.exists(keys)).present) <= 500
        await assert_idle(running.daemon)


async def test_more_tenants_than_segments(tmp_path: Path) -> None:
    """Every tenant has an open segment of its own; one more tenant must still find room."""
    names = [f"t{number}" for number in range(9)]
    change = shape(flash=36 * MIB, **SMALL)
    async with running_daemon(tmp_path / "d", change, tenants=names) as running:
        segments = len(running.daemon.shard.parts.engine.segments())
        assert segments < len(names)
        keys = keys_of(5)
        for name in names * 2:
            async with client_of(running, name) as client:
                space = await client.namespace(DESCRIPTOR)
                result = await put(space, keys, 64 * KIB, ack="durable")
                assert result.ok, (name, counts(result.statuses))
                assert (await get(space, keys, 64 * KIB)).ok
        await assert_idle(running.daemon)


async def test_nonsense_in_reservations(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "d", shape()) as running, raw_of(running) as raw:
        namespace = await raw.namespace()
        good = put_item(namespace, key_of(1), 4 * KIB)
        other = put_item(namespace, key_of(2), 4 * KIB)
        items = [
            replace(good, plain_bytes=0),
            replace(good, plain_bytes=2**32 - 1),
            replace(good, key=bytes(16)),
            replace(good, key=other.key),
            replace(good, engine_key=good.engine_key[:-1]),
            replace(other, position=2**32 - 1),
            good,
            good,
        ]
        reply = await raw.reserve(namespace.handle, items)
        assert [item.status for item in reply.items] == [
            Status.BAD_REQUEST, Status.TOO_LARGE, Status.BAD_REQUEST, Status.BAD_REQUEST,
            Status.BAD_REQUEST, Status.OK, Status.OK, Status.BUSY,
        ]  # fmt: skip
        assert (await raw.reserve(namespace.handle, [])).items == ()
        raw.connection.give_up([i.put_id for i in reply.items if i.status is Status.OK])
        await assert_idle(running.daemon)
