"""Leases of the real daemon over verbs: forged ones, a thousand at once, and what they cost it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from daemon_lab import (
    Raw,
    all_are,
    client_of,
    content,
    counts,
    get,
    keys_of,
    put,
    raw_of,
    run_of,
)
from tier import CONNECT_S, DEADLINE_NS, ForkedDaemon, daemon, descriptor

from entresol_client import AsyncClient, Namespace
from entresol_proto.fabric.base import ReadOp, RemoteSpan
from entresol_proto.fabric.verbs_endpoint import VerbsEndpoint
from entresol_proto.fabric.verbs_reader import PeerRegion
from entresol_proto.status import Status
from entresol_proto.wire.data import OpenAt, Release
from tests.harness import eventually
from tests.rdma import cost
from tests.rdma.evidence import figure, trying

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

SIZE = 4096
REFUSED = {Status.LEASE_EXPIRED, Status.FABRIC_ERROR, Status.DISCONNECTED}
_PAINT = b"\xa5"


async def read(raw: Raw, spans: list[RemoteSpan]) -> list[tuple[Status, bytes]]:
    """Statuses and what landed."""
    into = [bytearray(_PAINT * span.length_bytes) for span in spans]
    ops = [ReadOp(span, memoryview(one)) for span, one in zip(spans, into, strict=True)]
    statuses = await raw.endpoint.read(ops, time.monotonic_ns() + DEADLINE_NS)
    return [(status, bytes(one)) for status, one in zip(statuses, into, strict=True)]


async def steal(raw: Raw, span: RemoteSpan) -> tuple[Status, bytes]:
    """Read a span that this session believes is exposed to it: the device is asked, and refuses."""
    mine = raw.endpoint
    assert isinstance(mine, VerbsEndpoint)
    mine._regions[span.rkey] = PeerRegion((span.rkey,), 0, 2**63)
    [found] = await read(raw, [span])
    return found


async def test_forged_leases_open_nothing_and_end_no_others(tmp_path: Path) -> None:
    keys = keys_of(4)
    async with daemon(tmp_path) as running, raw_of(running, "dev", "verbs") as owner:
        async with client_of(running, fabric="verbs") as client:
            assert all_are(await put(await client.namespace(descriptor()), keys, SIZE), Status.OK)
        namespace = await owner.namespace(descriptor())
        grants = await owner.fetch(namespace.handle, run_of(namespace, keys), open_at=OpenAt.DAEMON)
        items = [item for grant in grants for item in grant.items]
        assert len(items) == len(keys)
        for number, item in enumerate(items):
            tenant = ("dev", "other")[number % 2]
            async with raw_of(running, tenant, "verbs") as thief:
                await thief.namespace(descriptor())
                with trying("forged lease") as trial:
                    forged = tuple(grant.lease_id + at for grant in grants for at in (0, 1_000))
                    reports = tuple((one, item.index, Status.CORRUPT) for one in forged)
                    link = thief.connection
                    link._write(link.session.send(Release((*forged, 2**64 - 1), reports))[1])
                    with trial.within(20):
                        status, landed = await steal(thief, item.span)
                    trial.same(landed, _PAINT * item.span.length_bytes)
                    assert status in REFUSED
                    [(status, landed)] = await read(owner, [item.span])
                    assert status is Status.OK, "a stranger ended the owner's lease"
                    trial.same(landed, content(keys[item.index], SIZE))


async def test_a_thousand_leases_at_once(tmp_path: Path) -> None:
    keys = keys_of(100)
    async with (
        daemon(tmp_path, lease_ns=DEADLINE_NS) as running,
        raw_of(running, "dev", "verbs") as raw,
    ):
        async with client_of(running, fabric="verbs") as client:
            assert all_are(await put(await client.namespace(descriptor()), keys, SIZE), Status.OK)
        namespace = await raw.namespace(descriptor())
        with trying("1,000 leases at once") as trial:
            found = []
            for _ in range(10):
                found += await asyncio.gather(
                    *(raw.fetch(namespace.handle, run_of(namespace, [key])) for key in keys)
                )
            grants = [grant for of in found for grant in of if grant.items]
            leases = running.daemon.shard.parts.leases
            assert len({grant.lease_id for grant in grants}) == len(leases) == 1_000
            items = [item for grant in grants for item in grant.items]
            with trial.within(DEADLINE_NS / 1e9):
                landed = await read(raw, [item.span for item in items])
            assert {status for status, _ in landed} == {Status.OK}
            # Sealed, so that all leases on one block have to show the same bytes.
            for number, (_, sealed) in enumerate(landed):
                trial.same(sealed, landed[number % len(keys)][1])
            for grant in grants:
                raw.connection.release(grant.lease_id)
            with trial.within(30):
                await eventually(lambda: not len(leases), seconds=30, what="the releases")
        async with client_of(running, fabric="verbs") as client:
            got = await get(await client.namespace(descriptor()), keys, SIZE)
            assert all_are(got, Status.OK), counts(got.statuses)


async def measured(
    ns: Namespace, keys: list[bytes], size: int, pid: int, fabric: str
) -> list[cost.Cost]:
    """Gets of blocks that are in the daemon's memory; every byte was compared."""
    into = [bytearray(size) for _ in keys]
    found = []
    idle = await cost.idle_cpu_per_s(pid)
    for number in range(cost.ROUNDS + 1):
        for one in into:
            one[:] = bytes(size)
        cpu, began = cost.cpu_seconds(pid), time.monotonic()
        got = await ns.get_into(keys, into, deadline_ns=DEADLINE_NS)
        took, cpu = time.monotonic() - began, cost.cpu_seconds(pid) - cpu
        assert all_are(got, Status.OK), counts(got.statuses)
        assert all(bytes(one) == content(key, size) for key, one in zip(keys, into, strict=True))
        if number:  # the first one warmed everything up
            found.append(cost.Cost(fabric, size, len(keys), took, cpu, idle))
    return found


async def test_reading_resident_blocks_costs_the_daemon_no_cpu_per_byte(tmp_path: Path) -> None:
    """Per block it grants a lease; per byte it does nothing, as the device serves the reads."""
    found: list[cost.Cost] = []
    with ForkedDaemon(tmp_path / "d", "--flash", "128MiB") as process:
        for fabric in ("verbs", "tcp"):
            config = process.client_config(
                fabric=fabric, fallback=False, deadline_ns=DEADLINE_NS,
                ping_deadline_ns=20_000_000_000, connect_deadline_ns=5_000_000_000,
            )  # fmt: skip
            async with await AsyncClient.open(config) as client:
                await eventually(lambda: client.shards()[0].connected, seconds=CONNECT_S)
                assert client.shards()[0].fabric == fabric
                for size in cost.BLOCK_SIZES:
                    ns = await client.namespace(descriptor(f"{fabric}{size}"))
                    keys = keys_of(cost.BLOCKS_PER_GET, f"{fabric}{size}")
                    stored = await put(ns, keys, size, ack="durable")
                    assert all_are(stored, Status.OK), counts(stored.statuses)
                    found += await measured(ns, keys, size, process.pid, fabric)
                spaces = {size: await client.namespace(descriptor(f"{fabric}{size}"))
                          for size in cost.BLOCK_SIZES}  # fmt: skip
                for _ in range(cost.SERIES_MAX - 1):
                    if fabric != "verbs" or cost.growth(found, fabric) <= cost.GROWTH_MAX:
                        break
                    for size, ns in spaces.items():
                        keys = keys_of(cost.BLOCKS_PER_GET, f"{fabric}{size}")
                        found += await measured(ns, keys, size, process.pid, fabric)
    for one in found:
        figure(cost.FIGURE, **one.values())
    print("\n".join(cost.lines(found)))
    assert cost.growth(found, "verbs") <= cost.GROWTH_MAX
