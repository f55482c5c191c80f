"""The daemon's end and its return: draining, hurry, warm restart, a frozen process.

For a host each of them is a while of misses: calls end within their deadline, nothing raises, and
the client comes back by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from daemon_lab import (
    DESCRIPTOR,
    Site,
    Starter,
    all_are,
    assert_idle,
    blocks,
    client_of,
    content,
    counts,
    get,
    key_of,
    keys_of,
    put,
    put_item,
    raw_of,
    run_of,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness import eventually

from entresol_client.client import AsyncClient
from entresol_client.results import RequestFailedError
from entresol_daemon.control.grpc_server import ADMIN_SOCKET
from entresol_daemon.flash.model import RecoveryKind
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status

pytestmark = pytest.mark.daemon

SIZE = 64 * KIB


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    found = Starter(tmp_path_factory.mktemp("starter"))
    yield found
    found.close()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    found = Site.prepare(tmp_path / "d", dram=64 * MIB)
    found.fix_port()
    return found


async def test_a_put_under_way_when_the_drain_begins_ends_durable(site: Site) -> None:
    """Reserved before the goodbye, committed after it."""
    async with site.running() as running, raw_of(running) as raw:
        namespace = await raw.namespace()
        memory = MemfdBuffer(SIZE)
        memory.seal_for_readers()
        memory.view[:] = content(key_of(1), SIZE)
        exposure = await raw.endpoint.expose(memory)
        reserved = await raw.reserve(namespace.handle, [put_item(namespace, key_of(1), SIZE)])
        stopping = asyncio.create_task(running.daemon.stop(drain_ns=30_000_000_000))
        await eventually(lambda: raw.connection.draining, what="the goodbye")
        with pytest.raises(RequestFailedError) as caught:
            await raw.reserve(namespace.handle, [put_item(namespace, key_of(2), SIZE)])
        assert caught.value.status is Status.DRAINING
        await asyncio.sleep(0.2)
        assert not stopping.done(), "it did not wait for a put it had reserved"
        pairs = [(reserved.items[0].put_id, exposure.span(0, SIZE))]
        assert await raw.commit(pairs) == [Status.OK]
        await asyncio.wait_for(stopping, 20)
        memory.close()
    async with site.running() as running, client_of(running) as client:
        assert (await get(await client.namespace(DESCRIPTOR), [key_of(1)], SIZE)).ok


async def test_gets_and_puts_while_it_stops_are_blocks_or_misses(site: Site) -> None:
    keys = keys_of(64)
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        assert (await put(space, keys, 256 * KIB, ack="durable")).ok
        fresh = [keys_of(16, f"fresh {at}") for at in range(4)]
        work = [asyncio.create_task(get(space, keys, 256 * KIB)) for _ in range(4)]
        puts = [asyncio.create_task(put(space, more, 256 * KIB, ack="durable")) for more in fresh]
        await asyncio.sleep(0.03)
        await running.daemon.stop(drain_ns=30_000_000_000)
        allowed = {Status.OK, Status.DRAINING, Status.DISCONNECTED, Status.BREAKER_OPEN}
        for result in await asyncio.gather(*work):
            assert set(result.statuses) <= allowed | {Status.GAP}, counts(result.statuses)
        stored = []
        for more, result in zip(fresh, await asyncio.gather(*puts), strict=True):
            assert set(result.statuses) <= allowed, counts(result.statuses)
            stored += [k for k, s in zip(more, result.statuses, strict=True) if s is Status.OK]
        assert not (await get(space, keys, 256 * KIB)).prefix_blocks
    async with site.running() as running, client_of(running) as client:
        space = await client.namespace(DESCRIPTOR)
        assert running.daemon.shard.parts.engine.recovery.kind is RecoveryKind.CHECKPOINT
        assert (await get(space, keys + stored, 256 * KIB)).ok
        await assert_idle(running.daemon)


async def test_warm_restart_serves_everything_again_and_again(site: Site) -> None:
    keys: list[bytes] = []
    for life in range(4):
        async with site.running() as running, client_of(running, fabric="tcp") as client:
            space = await client.namespace(DESCRIPTOR)
            recovery = running.daemon.shard.parts.engine.recovery
            if life:
                assert recovery.kind is RecoveryKind.CHECKPOINT, recovery.checkpoint_refused
                assert recovery.blocks == len(keys)
                assert (await get(space, keys, SIZE)).ok
                assert (await space.put(blocks(keys, SIZE))).existed == len(keys)
            more = keys_of(50, f"life {life}")
            assert (await put(space, more, SIZE)).ok  # accepted only: a clean stop writes it
            keys += more
            assert (await get(space, keys, SIZE)).ok


async def test_a_daemon_whose_writing_broke_ends_and_comes_back(
    site: Site, starter: Starter, tmp_path: Path
) -> None:
    """It does not go on half: one line with a hint, status 1, and what was durable is there."""
    out, keys = tmp_path / "out", keys_of(3)
    out.touch()
    plant = "tests.daemon.plants:breaks_in_writing"
    pid = starter.start(out, "--config", str(site.toml), plant=plant)
    await eventually(lambda: "event=serving" in out.read_text(), seconds=30, what="the start")
    async with await AsyncClient.open(site.client_config()) as client:
        space = await client.namespace(DESCRIPTOR)
        for key in keys[:2]:
            assert (await put(space, [key], SIZE, ack="durable")).ok
        assert not (await put(space, keys[2:], SIZE, ack="durable")).ok
    code = await asyncio.to_thread(starter.wait, pid)
    said = out.read_text()
    assert code == 1, said
    assert "event=writer_broke" in said
    assert "RuntimeError: planted" in said
    assert "\nentresold: writing to flash broke" in said, said
    assert "\n  fix: start it again" in said, said
    async with site.running() as running, client_of(running) as client:
        assert running.daemon.shard.parts.engine.recovery.kind is RecoveryKind.FOOTERS
        space = await client.namespace(DESCRIPTOR)
        assert (await get(space, keys[:2], SIZE)).ok
        await assert_idle(running.daemon)


async def test_a_spoiled_checkpoint_costs_a_scan_only(site: Site) -> None:
    keys = keys_of(50)
    async with site.running() as running, client_of(running) as client:
        assert (await put(await client.namespace(DESCRIPTOR), keys, SIZE)).ok
    path = site.config.checkpoint_path
    good = path.read_bytes()
    for bad in (b"", good[:100], good[:-1], bytes([good[0] ^ 1]) + good[1:], os.urandom(5000)):
        path.write_bytes(bad)
        async with site.running() as running, client_of(running) as client:
            kind = running.daemon.shard.parts.engine.recovery.kind
            assert kind is not RecoveryKind.CHECKPOINT
            assert (await get(await client.namespace(DESCRIPTOR), keys, SIZE)).ok
        good = path.read_bytes()


def readiness(port: int, path: str = "/readyz") -> int:
    """HTTP status, 0 when nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return int(error.code)
    except OSError:
        return 0


async def test_readiness_follows_the_drain(site: Site) -> None:
    async with site.running() as running, raw_of(running) as raw:
        port = running.daemon.http.port
        ask = asyncio.to_thread
        assert await ask(readiness, port) == 200
        namespace = await raw.namespace()
        await raw.reserve(namespace.handle, [put_item(namespace, key_of(1), SIZE)])
        stopping = asyncio.create_task(running.daemon.stop(drain_ns=30_000_000_000))
        await eventually(lambda: running.daemon.shard.draining, what="the drain")
        assert await ask(readiness, port) == 503
        assert await ask(readiness, port, "/healthz") == 200
        raw.connection.drop("gone")  # the reservation goes with it
        await asyncio.wait_for(stopping, 20)
        assert await ask(readiness, port) == 0


async def test_a_drain_that_was_asked_for_is_told_everywhere(site: Site) -> None:
    """Not only at /readyz: orchestrators ask gRPC, dashboards the gauge."""

    def gauge() -> str:
        running.daemon.metrics.refresh()
        rows = running.daemon.metrics.render().decode().splitlines()
        return next(
            row for row in rows if row.startswith("entresol_state{") and row.endswith(" 1.0")
        )

    async with site.running() as running:
        where = f"unix:{site.config.listen.unix_dir / ADMIN_SOCKET}"
        async with grpc.aio.insecure_channel(where) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
            assert "serving" in gauge()
            await running.daemon.admin.drain(1_000_000)
            status = (await health.Check(request)).status
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert "draining" in gauge()


async def test_a_second_signal_hurries(site: Site, starter: Starter, tmp_path: Path) -> None:
    """A host that keeps its lease holds the daemon up until somebody insists."""
    limits = replace(site.config.limits, lease_ns=120_000_000_000)
    site.config = replace(site.config, limits=limits)
    site.write(site.config)
    log = tmp_path / "log"
    pid = starter.start(log, "--config", str(site.toml))
    async with client_of(site) as client, raw_of(site) as raw:
        space = await client.namespace(DESCRIPTOR)
        keys = keys_of(20)
        assert (await put(space, keys, SIZE)).ok
        namespace = await raw.namespace()
        assert await raw.fetch(namespace.handle, run_of(namespace, keys))
        os.kill(pid, signal.SIGTERM)
        await eventually(lambda: raw.connection.draining, what="the goodbye")
        await asyncio.sleep(0.5)
        os.kill(pid, 0)  # still there
        os.kill(pid, signal.SIGTERM)
        assert await asyncio.to_thread(starter.wait, pid) == 0, log.read_text()[-2000:]
    assert "hurried" in log.read_text()
    assert "Traceback" not in log.read_text()
    async with site.running() as running, client_of(running) as client:
        assert (await get(await client.namespace(DESCRIPTOR), keys, SIZE)).ok


async def test_a_drain_ends_at_its_bound(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A host that keeps its lease holds the daemon up no longer than that, and nothing is lost."""
    limits = replace(site.config.limits, lease_ns=120_000_000_000)
    site.config = replace(site.config, limits=limits)
    keys = keys_of(20)
    with caplog.at_level("INFO", "entresol"):
        async with site.running() as running, raw_of(running) as raw, client_of(running) as client:
            assert (await put(await client.namespace(DESCRIPTOR), keys, SIZE)).ok
            namespace = await raw.namespace()
            assert await raw.fetch(namespace.handle, run_of(namespace, keys))
            assert len(running.daemon.shard.parts.leases), "the lease is held"
            await asyncio.wait_for(running.daemon.stop(drain_ns=300_000_000), 60)
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "event=drained" in text and "complete=False" in text], said
    async with site.running() as running, client_of(running) as client:
        assert running.daemon.shard.parts.engine.recovery.kind is RecoveryKind.CHECKPOINT
        assert (await get(await client.namespace(DESCRIPTOR), keys, SIZE)).ok


async def test_clients_outlive_restarts_and_kills(
    site: Site, starter: Starter, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    pid = starter.start(log, "--config", str(site.toml))
    keys = keys_of(20)
    config = site.client_config(deadline_ns=20_000_000_000, connect_deadline_ns=5_000_000_000)
    async with await AsyncClient.open(config) as client:
        await eventually(lambda: client.shards()[0].connected, seconds=60, what="a connection")
        space = await client.namespace(DESCRIPTOR)
        assert (await put(space, keys, SIZE, ack="durable")).ok
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
            os.kill(pid, number)
            code = await asyncio.to_thread(starter.wait, pid)
            assert code == (-9 if number is signal.SIGKILL else 0), log.read_text()[-2000:]
            await eventually(lambda: not client.shards()[0].connected, what="its absence")
            found = await get(space, keys, SIZE)
            assert Status.OK not in found.statuses
            assert not (await put(space, keys_of(3, "x"), SIZE)).stored
            assert not (await space.exists(keys)).complete
            pid = starter.start(log, "--config", str(site.toml))
            await eventually(lambda: client.shards()[0].connected, seconds=60, what="its return")
            found = await get(space, keys, SIZE)
            assert found.ok, (number, counts(found.statuses))
        os.kill(pid, signal.SIGTERM)
        assert await asyncio.to_thread(starter.wait, pid) == 0


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_a_frozen_daemon_is_misses_within_the_deadline(
    site: Site, starter: Starter, tmp_path: Path, fabric: str
) -> None:
    pid = starter.start(tmp_path / "log", "--config", str(site.toml))
    keys = keys_of(40)
    deadline_ns = 1_000_000_000
    async with client_of(site, fabric=fabric, ping_deadline_ns=500_000_000,
                         ping_interval_ns=500_000_000) as client:  # fmt: skip
        space = await client.namespace(DESCRIPTOR)
        assert (await put(space, keys, SIZE, ack="durable")).ok
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(4):
                begun = time.monotonic()
                found = await get(space, keys, SIZE, deadline_ns=deadline_ns)
                waited = time.monotonic() - begun
                assert Status.OK not in found.statuses, counts(found.statuses)
                assert waited < 20, f"{waited} s for a deadline of one second"
            await eventually(
                lambda: client.shards()[0].breaker != "closed", seconds=30, what="the breaker"
            )
            found = await get(space, keys, SIZE)
            assert set(found.statuses) <= {Status.BREAKER_OPEN, Status.DISCONNECTED}
            assert not (await put(space, keys_of(2, "x"), SIZE)).stored
        finally:
            os.kill(pid, signal.SIGCONT)
        await eventually(
            lambda: client.shards()[0].breaker == "closed" and client.shards()[0].connected,
            seconds=60, what="recovery",
        )  # fmt: skip
        found = await get(space, keys, SIZE)
        assert all_are(found, Status.OK), counts(found.statuses)
    os.kill(pid, signal.SIGTERM)
    assert await asyncio.to_thread(starter.wait, pid) == 0
