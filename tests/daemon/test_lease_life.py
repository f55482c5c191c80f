"""Leases of the real daemon: how long a host may read, and what it sees when it reads on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from daemon_lab import (
    DESCRIPTOR,
    FABRICS,
    Raw,
    assert_idle,
    client_of,
    content,
    counts,
    get,
    keys_of,
    put,
    raw_of,
    run_of,
    shape,
)
from harness import eventually, running_daemon

from entresol_client.client import Namespace
from entresol_client.opening import Granted, OpenContext, Wanted, open_group
from entresol_client.staging import Arena, PrivateMemory
from entresol_client.workers import ThreadWorkers
from entresol_daemon.config import Config
from entresol_proto.fabric.base import ReadOp
from entresol_proto.ids import EngineKey, wire_key
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status
from entresol_proto.wire.data import Grant, OpenAt, Stage

pytestmark = pytest.mark.daemon

SIZE = 256 * KIB
SHORT_NS = 100_000_000  # the shortest lease a configuration may have


async def late_read(raw: Raw, grants: list[Grant], keys: list[bytes]) -> list[Status]:
    """Read and open granted blocks as the client does, however late it is."""
    opened_ns = await raw.namespace()
    workers, arena = ThreadWorkers(2), Arena(PrivateMemory(16 * MIB), 16 * MIB)
    wants = []
    for grant in grants:
        for item in grant.items:
            key = keys[item.index]
            name = wire_key(opened_ns.secret, EngineKey(key))
            wanted = Wanted(item.index, name, key, memoryview(bytearray(SIZE)))
            until = min(grant.expires_ns, time.monotonic_ns() + grant.lease_ns)
            wants.append(Granted(wanted, item, until, until))
    context = OpenContext(
        endpoint=raw.endpoint,
        workers=workers,
        staging=arena,
        namespace_id=opened_ns.namespace_id,
        at_daemon=False,
        deadline_ns=time.monotonic_ns() + 60_000_000_000,
    )
    try:
        opened = await open_group(context, wants)
    finally:
        workers.close()
        arena.close()
    for one, status in zip(wants, opened, strict=True):
        into = bytes(one.wanted.into)
        if status is Status.OK:
            assert into == content(one.wanted.engine_key, SIZE), "wrong bytes"
        else:
            assert not any(into), "bytes of a block that did not open"
    return opened


async def found_again(space: Namespace, keys: list[bytes]) -> None:
    """The blocks are found, by a host that is on time once: on a busy machine it may be late."""
    for _ in range(50):
        got = await get(space, keys, SIZE)
        assert set(got.statuses) <= {Status.OK, Status.LEASE_EXPIRED}, counts(got.statuses)
        if got.ok:
            return
    raise AssertionError("late readers are not believed")


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_sealed_reads_past_the_lease_are_exact_or_a_miss(tmp_path: Path, fabric: str) -> None:
    """Memory is reused under the reader's eyes; authentication and the clock decide."""
    change = shape(
        dram=16 * MIB, slab=4 * MIB, block_max=1 * MIB, fabrics=[fabric], lease_ns=SHORT_NS
    )
    async with running_daemon(tmp_path / "d", change) as running:
        async with (
            client_of(running, fabric=fabric) as client,
            raw_of(running, "dev", fabric) as raw,
        ):
            space = await client.namespace(DESCRIPTOR)
            keys = keys_of(16)
            assert (await put(space, keys, SIZE, ack="durable")).ok
            namespace = await raw.namespace()
            grants = await raw.fetch(namespace.handle, run_of(namespace, keys))
            assert sum(len(grant.items) for grant in grants) == 16
            leases = running.daemon.shard.parts.leases
            await eventually(lambda: not len(leases), what="the leases to expire")
            assert running.daemon.shard.parts.metrics.leases_expired._value.get() >= 1
            # Everything in memory is replaced by other blocks of this tenant.
            for at in range(4):
                assert (await put(space, keys_of(24, str(at)), SIZE, ack="durable")).stored
            statuses = await late_read(raw, grants, keys)
            allowed = {Status.OK, Status.LEASE_EXPIRED, Status.CORRUPT, Status.CONFLICT}
            assert set(statuses) <= allowed, counts(statuses)
            assert Status.OK not in statuses or fabric == "tcp"
            await found_again(space, keys)
        await assert_idle(running.daemon)


@pytest.mark.parametrize("fabric", ["shm", "tls"])
async def test_opened_memory_is_wiped_when_the_lease_ends(tmp_path: Path, fabric: str) -> None:
    fabrics = ["shm"] if fabric == "shm" else ["tcp"]
    change = shape(fabrics=fabrics, tcp_tls=fabric == "tls", lease_ns=SHORT_NS)
    async with (
        running_daemon(tmp_path / "d", change) as running,
        client_of(running, fabric=fabric) as client,
        raw_of(running, "dev", fabric) as raw,
    ):
        keys = keys_of(8)
        assert (await put(await client.namespace(DESCRIPTOR), keys, SIZE)).ok
        namespace = await raw.namespace()
        run = run_of(namespace, keys)
        for give_back in (False, True):
            grants = await raw.fetch(namespace.handle, run, open_at=OpenAt.DAEMON)
            items = [item for grant in grants for item in grant.items]
            ops = [ReadOp(item.span, memoryview(bytearray(SIZE))) for item in items]
            until = time.monotonic_ns() + 60_000_000_000
            statuses = await raw.endpoint.read(ops, until)
            for item, op, status in zip(items, ops, statuses, strict=True):
                if status is Status.OK and any(op.into):
                    assert bytes(op.into) == content(keys[item.index], SIZE)
            if give_back:
                for grant in grants:
                    raw.connection.release(grant.lease_id)
            await assert_idle(running.daemon)
            late = [ReadOp(item.span, memoryview(bytearray(SIZE))) for item in items]
            for op, status in zip(late, await raw.endpoint.read(late, until), strict=True):
                if status is Status.OK:
                    assert fabric == "shm", "a fenced exposure outlived its lease"
                    assert not any(op.into), "plaintext outlived its lease"
                else:
                    assert status is Status.LEASE_EXPIRED
        assert await get(await client.namespace(DESCRIPTOR), keys, SIZE, open_at="daemon")


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_thousand_leases_at_once(tmp_path: Path, fabric: str) -> None:
    fabrics = ["shm"] if fabric == "shm" else ["tcp"]
    change = shape(fabrics=fabrics, tcp_tls=fabric == "tls", lease_ns=5_000_000_000)
    async with running_daemon(tmp_path / "d", change) as running:
        async with (
            client_of(running, fabric=fabric) as client,
            raw_of(running, "dev", fabric) as raw,
        ):
            keys = keys_of(100)
            assert (await put(await client.namespace(DESCRIPTOR), keys, 4 * KIB)).ok
            namespace = await raw.namespace()
            ids = []
            for _ in range(10):
                found = await asyncio.gather(
                    *(raw.fetch(namespace.handle, run_of(namespace, [key])) for key in keys)
                )
                ids += [grant.lease_id for grants in found for grant in grants if grant.items]
            assert len(set(ids)) == 1_000
            leases = running.daemon.shard.parts.leases
            assert len(leases) == 1_000
            for lease_id in ids[:500]:
                raw.connection.release(lease_id)
            await eventually(lambda: len(leases) == 500, seconds=30, what="500 releases")
            raw.connection.drop("gone")
            await eventually(lambda: not len(leases), seconds=30, what="the session's end")
            assert (await get(await client.namespace(DESCRIPTOR), keys, 4 * KIB)).ok
        await assert_idle(running.daemon)


async def test_lease_table_at_its_limit_and_one_past_it(tmp_path: Path) -> None:
    change = shape(leases_per_session_max=16, lease_ns=3_000_000_000)
    async with (
        running_daemon(tmp_path / "d", change) as running,
        client_of(running) as client,
        raw_of(running) as raw,
    ):
        keys = keys_of(17)
        assert (await put(await client.namespace(DESCRIPTOR), keys, 4 * KIB)).ok
        namespace = await raw.namespace()
        held = []
        for key in keys[:16]:
            grants = await raw.fetch(namespace.handle, run_of(namespace, [key]))
            assert sum(len(grant.items) for grant in grants) == 1
            held += [grant.lease_id for grant in grants if grant.items]
        run = run_of(namespace, keys[16:])
        past = await raw.fetch(namespace.handle, run, seconds=0.3)
        assert [m for g in past for m in g.misses] == [(0, Status.BUSY)]
        # Another session of the tenant has a table of its own.
        assert (await get(await client.namespace(DESCRIPTOR), keys, 4 * KIB)).ok
        waiting = asyncio.create_task(raw.fetch(namespace.handle, run))
        await asyncio.sleep(0.05)
        raw.connection.release(held[0])
        grants = await waiting
        assert sum(len(grant.items) for grant in grants) == 1
        raw.connection.drop("done")
        await assert_idle(running.daemon)


@pytest.mark.parametrize("place", ["host", "daemon"])
async def test_a_small_lease_table_only_slows_a_large_get(tmp_path: Path, place: str) -> None:
    """Windows that land together must not overrun the table: they wait for each other."""
    change = shape(
        dram=64 * MIB, slab=4 * MIB, block_max=1 * MIB, leases_per_session_max=1, flash=256 * MIB
    )
    async with running_daemon(tmp_path / "d", change) as running, client_of(running) as writer:
        keys = keys_of(96)
        stored = await put(await writer.namespace(DESCRIPTOR), keys, 1 * MIB, ack="durable")
        assert stored.ok, counts(stored.statuses)
    async with running_daemon(tmp_path / "d", change) as running:  # all of it on flash only
        async with client_of(running) as client:
            space = await client.namespace(DESCRIPTOR)
            found = await get(space, keys, 1 * MIB, open_at=place)
            assert found.ok, counts(found.statuses)
        await assert_idle(running.daemon)


async def test_holds_of_stage_end_by_themselves(tmp_path: Path) -> None:
    change = shape(lease_ns=SHORT_NS)
    async with (
        running_daemon(tmp_path / "d", change) as running,
        client_of(running) as client,
        raw_of(running) as raw,
    ):
        space = await client.namespace(DESCRIPTOR)
        keys = keys_of(10)
        assert (await put(space, keys, SIZE)).ok
        namespace = await raw.namespace()
        for place in OpenAt:
            reply = await raw.ask(
                Stage(namespace.handle, place, 10**18, 60_000_000_000, run_of(namespace, keys))
            )
            assert set(reply.statuses) == {Status.OK}
        leases = running.daemon.shard.parts.leases
        assert len(leases) >= 2
        await assert_idle(running.daemon)  # at most ten lease times, whatever was asked for
        assert (await get(space, keys, SIZE, open_at="daemon")).ok


@pytest.mark.parametrize("fabric", ["shm", "tls"])
async def test_opened_blocks_that_one_memory_does_not_hold_come_one_after_the_other(
    tmp_path: Path, fabric: str
) -> None:
    """8 of 20 came, and the others were BUSY at once."""

    def change(config: Config) -> Config:
        fabrics = ["shm"] if fabric == "shm" else ["tcp"]
        config = shape(fabrics=fabrics, tcp_tls=fabric == "tls", slab=8 * MIB)(config)
        return replace(config, memory=replace(config.memory, opened_bytes=8 * MIB))

    keys = keys_of(20)
    async with running_daemon(tmp_path, change) as running:
        async with client_of(running, fabric=fabric) as client:
            namespace = await client.namespace(DESCRIPTOR)
            assert (await put(namespace, keys, MIB)).ok
            for _ in range(2):
                found = await get(namespace, keys, MIB, open_at="daemon", deadline_ns=20 * 10**9)
                assert found.ok, counts(found.statuses)
        await assert_idle(running.daemon)
