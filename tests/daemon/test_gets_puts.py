"""Gets and puts of the real daemon: exact bytes or a miss, by every way a block can take."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import leaks
import pytest
from daemon_lab import (
    DESCRIPTOR,
    FABRICS,
    all_are,
    assert_idle,
    blocks,
    client_of,
    content,
    counts,
    disconnected,
    get,
    key_of,
    keys_of,
    put,
    put_item,
    raw_of,
    run_of,
    seed_of,
    shape,
)
from harness import DaemonProcess, Running, running_daemon

from entresol_client import fetching, opening, workers
from entresol_client.client import Namespace
from entresol_client.results import PutBlock, RequestFailedError
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.ids import TenantName
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import FabricError, Status
from entresol_proto.wire.data import Fetch, OpenAt, Reason, Tier

pytestmark = pytest.mark.daemon

SIZES = (1, 4 * KIB - 1, 64 * KIB, 1 * MIB + 1, 4 * MIB)


@contextlib.asynccontextmanager
async def lab(directory: Path, fabric: str = "shm", **options: Any) -> AsyncIterator[Running]:
    """A daemon that must be idle at the end and leave nothing behind."""
    before = leaks.snapshot()
    change = shape(fabrics=["shm"] if fabric == "shm" else ["tcp"], tcp_tls=fabric == "tls",
                   **options)  # fmt: skip
    async with running_daemon(directory / "d", change) as running:
        yield running
        await disconnected(running)
        await assert_idle(running.daemon)
    keep = ("asyncio_", "entresol-fabric", "entresol-copy", "shm")
    await leaks.settle(before, ignore_threads=keep, wait_s=10)
    leaks.assert_no_leaks(before, ignore_threads=keep)


@pytest.mark.parametrize("fabric", FABRICS)
async def test_exact_bytes_of_every_size_both_acks_and_places(tmp_path: Path, fabric: str) -> None:
    async with lab(tmp_path, fabric) as running, client_of(running, fabric=fabric) as client:
        namespace = await client.namespace(DESCRIPTOR)
        places = ["host"] if fabric == "tcp" else ["host", "daemon"]
        for ack in ("accepted", "durable"):
            for size in SIZES:
                keys = keys_of(2, f"{ack}/{size}")
                result = await put(namespace, keys, size, ack=ack)
                assert all_are(result, Status.OK), (fabric, size, counts(result.statuses))
                for place in places:
                    found = await get(namespace, keys, size, open_at=place)
                    assert found.ok, (fabric, ack, size, place, counts(found.statuses))
        if fabric == "tcp":
            refused = await get(namespace, keys, size, open_at="daemon")
            assert all_are(refused, Status.UNSUPPORTED), "plaintext over a wire others can see"


@pytest.mark.parametrize("fabric", FABRICS)
async def test_second_put_moves_no_bytes_and_wrong_lengths_are_misses(
    tmp_path: Path, fabric: str
) -> None:
    async with lab(tmp_path, fabric) as running, client_of(running, fabric=fabric) as client:
        namespace = await client.namespace(DESCRIPTOR)
        keys = keys_of(4)
        first = await put(namespace, keys, 64 * KIB, ack="durable")
        assert first.stored == 4
        assert first.wire_bytes >= 4 * 64 * KIB
        again = await namespace.put([PutBlock(key, b"other" * 100) for key in keys])
        assert all_are(again, Status.EXISTS)
        assert again.wire_bytes == again.plain_bytes == 0
        assert (await get(namespace, keys, 64 * KIB)).ok
        for size in (1, 64 * KIB - 1, 64 * KIB + 1, 2 * MIB):
            assert not (await get(namespace, keys, size)).prefix_blocks, "a block of another length"
        assert (await get(namespace, keys, 64 * KIB)).ok, "asking with a wrong length did harm"


@pytest.mark.parametrize("fabric", ["tcp", "tls", "shm"])
async def test_small_blocks_in_memory_come_within_their_grant_over_tcp(
    tmp_path: Path, fabric: str
) -> None:
    async with lab(tmp_path, fabric) as running, client_of(running, fabric=fabric) as client:
        namespace = await client.namespace(DESCRIPTOR)
        parts = running.daemon.shard.parts
        carried = parts.metrics.grants_carried._value
        keys = keys_of(8)
        await put(namespace, keys, 16 * KIB)
        assert (await get(namespace, keys, 16 * KIB)).ok  # its slab is shown to it
        for count in (1, 8):
            before = carried.get()
            found = await get(namespace, keys[:count], 16 * KIB)
            assert found.ok
            assert found.tiers == [Tier.MEMORY] * count
            assert carried.get() - before == (fabric != "shm")


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_one_key_put_by_many_sessions_at_once(tmp_path: Path, fabric: str) -> None:
    """Contents differ by writer, so that a mixture would show."""
    async with lab(tmp_path, fabric) as running, contextlib.AsyncExitStack() as stack:
        spaces: list[Namespace] = []
        for _ in range(4):
            client = await stack.enter_async_context(client_of(running, fabric=fabric))
            spaces.append(await client.namespace(DESCRIPTOR))
        size = 300 * KIB
        keys = keys_of(24)
        versions = [{key: content(key + bytes([w]), size) for key in keys} for w in range(4)]
        results = await asyncio.gather(
            *(
                space.put([PutBlock(key, versions[w][key]) for key in keys], ack="durable")
                for w, space in enumerate(spaces)
            )
        )
        won = [sum(r.statuses[at] is Status.OK for r in results) for at in range(len(keys))]
        assert won == [1] * len(keys), won
        assert all(
            status in (Status.OK, Status.EXISTS, Status.BUSY)
            for r in results
            for status in r.statuses
        )
        for space in spaces:
            buffers = [bytearray(size) for _ in keys]
            assert (await space.get_into(keys, buffers)).ok
            for at, key in enumerate(keys):
                winner = next(w for w in range(4) if results[w].statuses[at] is Status.OK)
                assert bytes(buffers[at]) == versions[winner][key]


@pytest.mark.parametrize("place", ["host", "daemon"])
async def test_prefix_stops_at_the_first_gap(tmp_path: Path, place: str) -> None:
    async with lab(tmp_path) as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        keys = keys_of(12)
        await put(namespace, [key for at, key in enumerate(keys) if at not in (5, 9)], 64 * KIB)
        found = await get(namespace, keys, 64 * KIB, prefix=True, open_at=place)
        assert found.statuses == [Status.OK] * 5 + [Status.MISS] + [Status.GAP] * 6
        assert found.prefix_blocks == 5
        loose = await get(namespace, keys, 64 * KIB, prefix=False, open_at=place)
        assert [s is Status.OK for s in loose.statuses] == [at not in (5, 9) for at in range(12)]
        assert (await namespace.exists(keys)).prefix_blocks == 5
        twice = await get(namespace, [keys[0], keys[0], keys[1], keys[0]], 64 * KIB, open_at=place)
        assert twice.ok, "one key several times in one get"


@pytest.mark.parametrize("place", ["host", "daemon"])
async def test_a_block_that_goes_while_a_prefix_is_read_is_a_gap(
    tmp_path: Path, place: str
) -> None:
    """Forgotten between windows: nothing after it may be served in prefix mode, on any tier."""
    async with (
        lab(tmp_path, dram=16 * MIB, slab=4 * MIB, block_max=1 * MIB) as running,
        client_of(running) as reader,
        client_of(running) as other,
    ):
        namespace = await reader.namespace(DESCRIPTOR)
        theirs = await other.namespace(DESCRIPTOR)
        keys = keys_of(80)
        await put(namespace, keys, 512 * KIB, ack="durable")
        getting = asyncio.create_task(get(namespace, keys, 512 * KIB, prefix=True, open_at=place))
        await asyncio.sleep(0.005)
        await theirs.forget(keys[60:62])
        found = await getting
        assert found.prefix_blocks in (60, 80), counts(found.statuses)
        if found.prefix_blocks == 60:
            assert Status.OK not in found.statuses[60:], "served behind a gap"


async def test_thousands_of_keys_in_one_call(tmp_path: Path) -> None:
    async with lab(tmp_path) as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        keys = keys_of(20_000)
        stored = keys[:1_000]
        await put(namespace, stored, 1, ack="durable")
        found = await namespace.exists(keys)
        assert found.prefix_blocks == 1_000
        assert sum(found.present) == 1_000
        assert (await namespace.touch(keys)).count == 1_000
        held = await namespace.stage(stored, hold_ns=2_000_000_000)
        assert held.prefix_blocks == 1_000
        why = await namespace.explain(keys[900:1_100])
        reasons = [row.reason for row in why]
        assert reasons == [Reason.IN_MEMORY] * 100 + [Reason.NEVER_STORED] * 100
        assert (await get(namespace, keys[:5_000], 1)).statuses.count(Status.OK) == 1_000
        gone = await namespace.forget(keys[500:])
        assert gone.count == 500
        assert (await namespace.exists(keys)).prefix_blocks == 500
        why = await namespace.explain(keys[498:502])
        assert [row.reason for row in why] == [Reason.IN_MEMORY] * 2 + [Reason.FORGOTTEN] * 2
        assert why[3].when_unix_ns > 0
        await put(namespace, stored[500:502], 1)
        assert (await get(namespace, stored[:502], 1)).ok, "a forgotten block can be put again"


@pytest.mark.parametrize(("fabric", "place"), [("shm", "host"), ("shm", "daemon"), ("tcp", "host")])
async def test_gets_far_larger_than_memory_come_from_flash_in_windows(
    tmp_path: Path, fabric: str, place: str
) -> None:
    options = {"dram": 16 * MIB, "slab": 4 * MIB, "block_max": 2 * MIB}
    async with (
        lab(tmp_path, fabric, flash=192 * MIB, **options) as running,
        client_of(running, fabric=fabric) as client,
    ):
        namespace = await client.namespace(DESCRIPTOR)
        keys = keys_of(96)
        stored = await put(namespace, keys, 1 * MIB, ack="durable")
        assert stored.ok, counts(stored.statuses)
        for _ in range(2):
            found = await get(namespace, keys, 1 * MIB, open_at=place)
            assert found.ok, counts(found.statuses)
            assert found.tiers.count(Tier.FLASH) > 60
        # Many at once, each more than fits: they wait for each other's memory.
        many = await asyncio.gather(
            *(get(namespace, keys[at : at + 48], 1 * MIB, open_at=place) for at in (0, 24, 48))
        )
        assert all(r.ok for r in many), [counts(r.statuses) for r in many]


async def test_a_batch_from_flash_is_granted_in_parts_the_first_one_small(tmp_path: Path) -> None:
    options = {"dram": 48 * MIB, "slab": 16 * MIB, "block_max": 2 * MIB, "flash": 192 * MIB}
    async with lab(tmp_path, **options) as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        keys = keys_of(64)
        for at in range(0, 64, 16):
            await put(namespace, keys[at : at + 16], 1 * MIB, ack="durable")
        async with raw_of(running) as raw:
            grants = await raw.fetch(
                (space := await raw.namespace()).handle, run_of(space, keys[:32])
            )
            items = [[item.index for item in grant.items] for grant in grants]
            assert sorted(index for part in items for index in part) == list(range(32))
            assert {item.tier for grant in grants for item in grant.items} == {Tier.FLASH}
            first = next(part for part in items if 0 in part)
            assert len(first) == 4, "a reader begins with these while the rest is read"
            assert max(map(len, items)) == 8, "and has not to look at every block by itself"
            assert {len(part) for part in items if part} <= {4, 8}
            assert len(items) <= 32 // 4 + 1


async def test_one_block_at_a_time_is_opened_where_the_caller_is_once_that_is_known_to_be_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From flash and from memory; of several, threads open each their part."""
    monkeypatch.setattr(workers, "HAND_OVER_NS", 10**12)  # on whatever machine
    done: list[bool] = []
    honest = opening.open_alone

    def counted(*args: Any) -> Any:
        found = honest(*args)
        done.append(found is not None)
        return found

    monkeypatch.setattr(fetching, "open_alone", counted)
    async with lab(tmp_path, dram=16 * MIB) as running, client_of(running) as client:
        space, keys = await client.namespace(DESCRIPTOR), keys_of(32)
        assert (await put(space, keys, MIB, ack="durable")).ok
        tiers = [(await get(space, [key], MIB)).tiers[0] for key in keys]
        assert Tier.FLASH in tiers
        tiers += [(await get(space, keys[-1:], MIB)).tiers[0] for _ in range(3)]
        assert tiers[-1] is Tier.MEMORY
        assert done[0] is False, "how long it takes is not known yet"
        assert done.count(True) >= 10
        done.clear()
        assert (await get(space, keys, MIB)).ok
        assert True not in done, "threads share them"


async def test_full_flash_evicts_and_keeps_serving(tmp_path: Path) -> None:
    seed = seed_of("full_flash")
    rng = random.Random(seed)
    options = {"dram": 16 * MIB, "slab": 4 * MIB, "block_max": 1 * MIB, "segment": 4 * MIB}
    async with lab(tmp_path, flash=48 * MIB, **options) as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        keys = keys_of(600, str(seed))
        for at in range(0, 600, 20):
            result = await put(namespace, keys[at : at + 20], 200 * KIB, ack="durable")
            assert result.ok, (seed, at, counts(result.statuses))
            recent = keys[max(0, at - 40) : at + 20]
            found = await get(namespace, rng.sample(recent, len(recent)), 200 * KIB)
            assert found.statuses.count(Status.OK) >= 20, (seed, at, counts(found.statuses))
            last = await get(namespace, keys[at : at + 20], 200 * KIB)
            assert last.statuses.count(Status.OK) == 20, (seed, at, counts(last.statuses))
        present = (await namespace.exists(keys)).present
        assert 60 < sum(present) < 250, sum(present)
        found = await get(namespace, keys, 200 * KIB)
        assert [s is Status.OK for s in found.statuses] == present
        why = await namespace.explain(
            [k for k, here in zip(keys, present, strict=True) if not here]
        )
        assert {row.reason for row in why} == {Reason.EVICTED}


async def test_two_tenants_under_pressure_stay_in_their_accounts(tmp_path: Path) -> None:
    options = {"dram": 16 * MIB, "slab": 4 * MIB, "block_max": 1 * MIB, "segment": 4 * MIB}
    async with (
        lab(tmp_path, flash=64 * MIB, **options) as running,
        client_of(running) as one,
        client_of(running, "other", "shm") as two,
    ):
        mine = await one.namespace(DESCRIPTOR)
        theirs = await two.namespace(DESCRIPTOR)
        keys = keys_of(80)
        for at in range(0, 80, 20):
            part = keys[at : at + 20]
            results = await asyncio.gather(
                put(mine, part, 500 * KIB, ack="durable"),
                put(theirs, part, 500 * KIB, ack="durable"),
            )
            assert all(r.ok for r in results), [counts(r.statuses) for r in results]
            found = await asyncio.gather(get(mine, part, 500 * KIB), get(theirs, part, 500 * KIB))
            assert all(r.statuses.count(Status.OK) for r in found)


async def test_a_commit_that_names_a_reservation_twice_is_refused_and_leaks_nothing(
    tmp_path: Path,
) -> None:
    async with lab(tmp_path) as running, raw_of(running) as raw:
        namespace = await raw.namespace()
        items = [put_item(namespace, key_of(at), 4096) for at in range(3)]
        put_ids = [item.put_id for item in (await raw.reserve(namespace.handle, items)).items]
        span = RemoteSpan(1, 0, 4096)
        for twice in (
            [(put_ids[0], span)] * 2,
            [(put_ids[0], RemoteSpan(0, 0, 0)), (put_ids[0], span)],
        ):
            with pytest.raises(RequestFailedError) as caught:
                await raw.commit(twice)
            assert caught.value.status is Status.BAD_REQUEST
        gave_up = await raw.commit([(put_id, RemoteSpan(0, 0, 0)) for put_id in put_ids])
        assert gave_up == [Status.OK] * 3
        await assert_idle(running.daemon)


async def test_reservations_end_with_deadline_or_session(tmp_path: Path) -> None:
    async with lab(tmp_path) as running, raw_of(running) as raw:
        namespace = await raw.namespace()
        items = [put_item(namespace, key_of(at), 64 * KIB) for at in range(50)]
        short = await raw.reserve(namespace.handle, items[:25], seconds=0.2)
        assert all(item.status is Status.OK for item in short.items)
        await assert_idle(running.daemon)
        with pytest.raises(RequestFailedError):
            await raw.commit([(short.items[0].put_id, RemoteSpan(1, 0, 1))])
        again = await raw.reserve(namespace.handle, items)
        assert all(item.status is Status.OK for item in again.items)
    await disconnected(running)
    await assert_idle(running.daemon)


@pytest.mark.parametrize("place", [OpenAt.HOST, OpenAt.DAEMON])
async def test_sessions_cut_in_the_middle_of_everything_hold_nothing(
    tmp_path: Path, place: OpenAt
) -> None:
    seed = seed_of("cut")
    rng = random.Random(seed)
    options = {"dram": 16 * MIB, "slab": 4 * MIB, "block_max": 1 * MIB}
    async with lab(tmp_path, **options) as running:
        keys = keys_of(64)
        async with client_of(running) as client:
            await put(await client.namespace(DESCRIPTOR), keys, 500 * KIB, ack="durable")
        for _ in range(12):
            async with raw_of(running) as raw:
                namespace = await raw.namespace()
                fetching = [
                    asyncio.create_task(
                        raw.fetch(namespace.handle, run_of(namespace, keys), open_at=place)
                    )
                    for _ in range(3)
                ]
                fresh = [put_item(namespace, key_of(at, "x"), 4096) for at in range(8)]
                await raw.reserve(namespace.handle, fresh)
                await asyncio.sleep(rng.random() * 0.05)
                raw.connection.drop("cut")
                await asyncio.gather(*fetching, return_exceptions=True)
        await disconnected(running)
        await assert_idle(running.daemon)
        async with client_of(running) as client:
            assert (await get(await client.namespace(DESCRIPTOR), keys, 500 * KIB)).ok, seed


async def test_a_get_that_fails_and_is_cut_in_the_same_moment_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data path goes, so that a grant fails; a moment later the session is ended. What was
    about to be read in the same window is nobody's then."""
    async with lab(tmp_path, dram=16 * MIB, slab=4 * MIB, block_max=1 * MIB) as running:
        shard, keys = running.daemon.shard, keys_of(64)
        async with client_of(running) as client:
            await put(await client.namespace(DESCRIPTOR), keys, 500 * KIB, ack="durable")
        await disconnected(running)
        async with raw_of(running) as raw:
            namespace = await raw.namespace()
            session = next(iter(shard.sessions.values()))
            find, space = shard.parts.engine.index.find, session.namespace(namespace.handle)
            slots = {key: find(space.namespace_id, run_of(namespace, [key])) for key in keys}
            here = [key for key in keys if shard.parts.residency.get(slots[key]) is not None]
            away = [key for key in keys if key not in here]
            request = Fetch(
                namespace.handle, OpenAt.HOST, False, 10**10,
                run_of(namespace, [*here[-3:], *away[:3]]),
            )  # fmt: skip
            fetching = asyncio.create_task(shard.gets.fetch(session, request, lambda _grant: None))

            async def refused(_job: object, rest: list[Any]) -> None:
                assert rest, "nothing of the window was in memory"
                shard.gets.granting.undo(_job, rest)  # type: ignore[arg-type]
                asyncio.get_running_loop().call_soon(fetching.cancel)
                raise FabricError("the session is gone", status=Status.DISCONNECTED)

            monkeypatch.setattr(shard.gets, "_grant_ready", refused)
            with pytest.raises((FabricError, asyncio.CancelledError)):
                await fetching
        await disconnected(running)
        await assert_idle(running.daemon)


async def test_forgotten_blocks_stay_forgotten_after_kill_9(tmp_path: Path) -> None:
    process = DaemonProcess(tmp_path / "d", "--flash", "128MiB")
    with process:
        async with client_of(process) as client:
            namespace = await client.namespace(DESCRIPTOR)
            keys = keys_of(40)
            assert (await put(namespace, keys, 64 * KIB, ack="durable")).ok
            assert (await namespace.forget(keys[10:30])).count == 20
        for _ in range(2):
            process.kill()
            process.start()
            async with client_of(process) as client:
                namespace = await client.namespace(DESCRIPTOR)
                found = await get(namespace, keys, 64 * KIB)
                expected = [Status.MISS if 10 <= at < 30 else Status.OK for at in range(40)]
                assert found.statuses == expected
        assert process.stop() == 0


async def test_large_blocks_and_small_ones_share_a_commit(tmp_path: Path) -> None:
    async with lab(tmp_path) as running, client_of(running) as client:
        namespace = await client.namespace(replace(DESCRIPTOR, cache_salt="mixed"))
        items = []
        for at in range(60):
            key = key_of(at, "mixed")
            items.append(PutBlock(key, content(key, (at % 7) * 500_000 + 1), position=at))
        assert (await namespace.put(items, ack="durable")).ok
        buffers = [bytearray(len(item.buffer)) for item in items]
        assert (await namespace.get_into([item.key for item in items], buffers)).ok
        assert [bytes(b) for b in buffers] == [item.buffer for item in items]
        assert len(blocks(keys_of(1), 1)) == 1


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_snapshot_tells_what_the_put_said(tmp_path: Path, fabric: str) -> None:
    """Parents, positions and token ids come back out of the sealed block, whoever sealed it."""
    async with lab(tmp_path, fabric) as running, client_of(running, fabric=fabric) as client:
        namespace = await client.namespace(DESCRIPTOR)
        keys = keys_of(6)
        chain = blocks(keys, 64 * KIB, token_ids=tuple(range(100, 116)))
        tenant = TenantName("dev")
        following = running.daemon.shard.parts.events.subscribe(tenant)
        assert (await namespace.put(chain, ack="durable")).ok
        events = following.poll()
        following.close()
        assert isinstance(events, list)
        assert [event.engine_keys[0] for event in events] == keys, "a child before its parent"
        steps = running.daemon.admin.snapshot(tenant)
        told = {event.engine_keys[0]: event async for event in steps if event is not None}
        assert list(told) == keys
        for at, block in enumerate(chain):
            event = told[block.key]
            assert event.parent == (block.parent_key or b""), at
            assert event.position == at
            assert event.token_ids == tuple(range(100, 116))
