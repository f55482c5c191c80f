"""The client against a real daemon that stops, hangs, drains, dies and comes back.

What every test asserts beside its own point: a block that reads as OK has the exact bytes, and a
block that does not left its buffer untouched or zero.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import leaks
import pytest
from daemon_lab import DESCRIPTOR, blocks, content, keys_of, shape
from harness import DaemonProcess, eventually, running_daemon

from bench.processes import free_ports
from entresol_client import AsyncClient, BreakerSettings, Client, Namespace
from entresol_client.results import GetResult
from entresol_daemon.config import Config
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status
from entresol_proto.wire.data import Tier

pytestmark = pytest.mark.daemon

OUTAGE = {Status.DISCONNECTED, Status.DEADLINE, Status.BREAKER_OPEN, Status.DRAINING}
BLOCK = 192 * KIB
# Bounds for liveness: far above any deadline used here, far below a hang.
LATEST_S = 15.0
FAST: dict[str, Any] = {
    "connect_deadline_ns": 3_000_000_000,
    "ping_interval_ns": 100_000_000,
    "ping_deadline_ns": 500_000_000,
    "breaker": BreakerSettings(3, 50_000_000, 500_000_000),
}


def judge(keys: Sequence[bytes], buffers: Sequence[bytearray], got: GetResult) -> None:
    """Exact bytes or nothing."""
    for key, buffer, status in zip(keys, buffers, got.statuses, strict=True):
        if status is Status.OK:
            assert buffer == content(key, len(buffer)), "wrong bytes under OK"
        else:
            same = max(buffer.count(0xA5), buffer.count(0))
            assert same == len(buffer), f"bytes behind {status.label}"


async def get(
    ns: Namespace, keys: Sequence[bytes], *, deadline_ns: int = 30_000_000_000, **more: Any
) -> GetResult:
    buffers = [bytearray(b"\xa5" * BLOCK) for _ in keys]
    got = await ns.get_into(keys, buffers, deadline_ns=deadline_ns, **more)
    judge(keys, buffers, got)
    return got


async def serves(ns: Namespace, keys: Sequence[bytes]) -> GetResult:
    """Wait until everything is served again."""
    until = time.monotonic() + 60
    while not (got := await get(ns, keys)).ok:
        assert time.monotonic() < until, (got.statuses, ns._client.shards())
        await asyncio.sleep(0.02)
    return got


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_a_restart_keeps_durable_blocks_and_the_client_finds_them(
    tmp_path: Path, fabric: str
) -> None:
    (port,) = free_ports(1)

    def change(config: Config) -> Config:
        config = shape()(config)
        return replace(config, listen=replace(config.listen, control_port=port))

    keys = keys_of(24)
    async with running_daemon(tmp_path / "d", change) as first:
        config = first.client_config(fabric=fabric, **FAST)
        client = await AsyncClient.open(config)
        ns = await client.namespace(DESCRIPTOR)
        assert (await ns.put(blocks(keys, BLOCK), ack="durable")).ok
        assert (await get(ns, keys)).tiers == [Tier.MEMORY] * 24
        incarnation = client.shards()[0].incarnation
    async with client:
        gone = await get(ns, keys, deadline_ns=500_000_000)
        assert set(gone.statuses) <= OUTAGE
        async with running_daemon(tmp_path / "d", change):
            got = await serves(ns, keys)
            assert Tier.FLASH in got.tiers
            report = client.shards()[0]
            assert report.incarnation != incarnation
            assert report.connects >= 2
            await client.close()


async def test_a_stopped_process_costs_the_deadline_then_nothing_and_comes_back(
    tmp_path: Path,
) -> None:
    with DaemonProcess(tmp_path / "d") as daemon:
        config = daemon.client_config(fabric="shm", **FAST)
        async with await AsyncClient.open(config) as client:
            ns = await client.namespace(DESCRIPTOR)
            keys = keys_of(16)
            assert (await ns.put(blocks(keys, BLOCK))).ok
            daemon.signal(signal.SIGSTOP)
            try:
                begun = time.monotonic()
                statuses = set()
                while Status.BREAKER_OPEN not in statuses:
                    got = await get(ns, keys, deadline_ns=300_000_000)
                    statuses.update(got.statuses)
                    assert time.monotonic() - begun < LATEST_S, statuses
                assert statuses <= OUTAGE
                put = await ns.put(blocks(keys_of(2, "more"), BLOCK), deadline_ns=300_000_000)
                assert set(put.statuses) <= OUTAGE
                assert not (await ns.exists(keys, deadline_ns=300_000_000)).complete
            finally:
                daemon.signal(signal.SIGCONT)
            await serves(ns, keys)
            await eventually(lambda: client.shards()[0].breaker == "closed", seconds=30)


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_gets_under_way_when_the_process_stops_land_nothing_late(
    tmp_path: Path, fabric: str
) -> None:
    with DaemonProcess(tmp_path / "d") as daemon:
        config = daemon.client_config(fabric=fabric, **FAST)
        async with await AsyncClient.open(config) as client:
            ns = await client.namespace(DESCRIPTOR)
            keys = keys_of(64)
            assert (await ns.put(blocks(keys, BLOCK))).ok
            buffers = [[bytearray(b"\xa5" * BLOCK) for _ in keys] for _ in range(4)]
            gets = [
                asyncio.ensure_future(ns.get_into(keys, some, deadline_ns=800_000_000))
                for some in buffers
            ]
            await asyncio.sleep(0.004)
            daemon.signal(signal.SIGSTOP)
            try:
                done = await asyncio.wait_for(asyncio.gather(*gets), LATEST_S)
            finally:
                daemon.signal(signal.SIGCONT)
            for some, got in zip(buffers, done, strict=True):
                judge(keys, some, got)
            kept = [[bytes(buffer) for buffer in some] for some in buffers]
            await serves(ns, keys)
            assert kept == [[bytes(buffer) for buffer in some] for some in buffers]


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_kill_9_in_the_middle_gives_no_wrong_byte(tmp_path: Path, fabric: str) -> None:
    keys, fresh = keys_of(48), keys_of(48, "fresh")
    daemon = DaemonProcess(tmp_path / "d")
    with daemon:
        async with await AsyncClient.open(daemon.client_config(fabric=fabric, **FAST)) as client:
            ns = await client.namespace(DESCRIPTOR)
            assert (await ns.put(blocks(keys, BLOCK), ack="durable")).ok
            work = [asyncio.ensure_future(get(ns, keys)) for _ in range(3)]
            put = asyncio.ensure_future(ns.put(blocks(fresh, BLOCK), ack="durable"))
            await asyncio.sleep(0.01)
            daemon.kill()
            begun = time.monotonic()
            for got in await asyncio.gather(*work):
                assert set(got.statuses) <= OUTAGE | {Status.OK, Status.FABRIC_ERROR, Status.GAP}
            stored = await put
            assert time.monotonic() - begun < LATEST_S
            assert set((await get(ns, keys, deadline_ns=10**9)).statuses) <= OUTAGE
    with daemon:
        async with await AsyncClient.open(daemon.client_config(fabric=fabric, **FAST)) as client:
            ns = await client.namespace(DESCRIPTOR)
            assert (await get(ns, keys)).ok, "a durable block is gone"
            promised = [
                key for key, s in zip(fresh, stored.statuses, strict=True) if s is Status.OK
            ]
            assert (await get(ns, promised, prefix=False)).ok, "an acknowledged block is gone"


async def test_sigterm_drains_and_the_client_goes_on_missing(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d") as daemon:
        async with await AsyncClient.open(daemon.client_config(**FAST)) as client:
            ns = await client.namespace(DESCRIPTOR)
            keys = keys_of(16)
            assert (await ns.put(blocks(keys, BLOCK))).ok
            stop = asyncio.get_running_loop().run_in_executor(None, daemon.stop)
            seen: set[Status] = set()
            while not stop.done():
                seen.update((await get(ns, keys, deadline_ns=10**9)).statuses)
            assert await stop == 0
            assert seen <= OUTAGE | {Status.OK, Status.GAP, Status.FABRIC_ERROR}
            assert set((await get(ns, keys, deadline_ns=10**9)).statuses) <= OUTAGE


async def test_a_session_past_its_age_is_replaced_without_an_outage(tmp_path: Path) -> None:
    change = shape(tls={"session_age_max_ns": 1_000_000_000})
    async with (
        running_daemon(tmp_path / "d", change) as running,
        await AsyncClient.open(running.client_config(**FAST)) as client,
    ):
        ns = await client.namespace(DESCRIPTOR)
        keys = keys_of(4)
        assert (await ns.put(blocks(keys, BLOCK))).ok
        seen: set[Status] = set()
        until = time.monotonic() + 60
        while client.shards()[0].connects < 3 and time.monotonic() < until:
            seen.update((await get(ns, keys)).statuses)
            await asyncio.sleep(0.01)
        assert client.shards()[0].connects >= 3
        assert seen <= {Status.OK, Status.DRAINING, Status.DISCONNECTED}
        assert client.stats()["breaker_openings"] == 0
        await serves(ns, keys)


async def test_many_cancelled_calls_leave_no_lease_and_no_staging(tmp_path: Path) -> None:
    async with (
        running_daemon(tmp_path / "d", shape(dram=128 * MIB)) as running,
        await AsyncClient.open(running.client_config(fabric="tcp", **FAST)) as client,
    ):
        ns = await client.namespace(DESCRIPTOR)
        keys = keys_of(32)
        assert (await ns.put(blocks(keys, BLOCK))).ok
        for step in range(40):
            buffers = [bytearray(BLOCK) for _ in keys]
            call = asyncio.ensure_future(ns.get_into(keys, buffers))
            await asyncio.sleep(0.0005 * step)
            call.cancel()
            await asyncio.wait((call,))
        link = client._links[0]
        assert link.read_staging.used_bytes == 0
        leased = running.daemon.shard.parts.leases
        await eventually(lambda: not len(leased), what="every lease is back")
        assert (await get(ns, keys)).ok


def test_the_facade_against_a_process_leaves_nothing(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d") as daemon:
        config = daemon.client_config(**FAST)
        keys = keys_of(8)
        with Client(config) as client:
            assert client.namespace(DESCRIPTOR).put(blocks(keys, BLOCK), ack="durable").ok
        before = leaks.snapshot()
        for fabric in ("shm", "tcp"):
            with Client(replace(config, fabric=fabric)) as client:
                buffers = [bytearray(b"\xa5" * BLOCK) for _ in keys]
                got = client.namespace(DESCRIPTOR).get_into(keys, buffers)
                assert got.ok
                judge(keys, buffers, got)
                assert client.shards()[0].fabric == fabric
        leaks.assert_no_leaks(before)
