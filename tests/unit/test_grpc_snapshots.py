"""Snapshots that are followed, over gRPC: what happens meanwhile comes in its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness import eventually
from test_grpc import NS, A, B, refusal, remaining, running, store

from entresol_daemon.control import grpc_services
from entresol_daemon.control.grpc_services import (
    SNAPSHOTS_HELD_MAX,
    SNAPSHOTS_PER_TENANT_MAX,
    operator,
)
from entresol_daemon.events.log import EventLimits
from entresol_daemon.events.types import Event, Kind, Medium
from entresol_proto.ids import TenantName
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg


async def test_a_followed_snapshot_tells_what_happens_meanwhile(tmp_path):
    """More than the log holds; each event is in its place and waits for the tenant's turn."""
    options = {"event_limits": EventLimits(tenant_events_max=4, batch_events_max=4)}
    async with running(tmp_path, **options) as pod, pod.dial(pod.tenant("b")) as channel:
        backend, honest = pod.backend, pod.backend.snapshot

        async def busy(tenant: TenantName) -> AsyncIterator[Event]:
            async for event in honest(tenant):
                yield event
                for number in range(4):
                    store(backend, B, number)
                store(backend, A, 0)

        backend.snapshot = busy
        request = pb.SnapshotRequest(follow=True)
        replies = [r async for r in pbg.EventsStub(channel).Snapshot(request)]
        assert replies[0].position == pb.Position(incarnation=77, seq=0)
        events = [event for reply in replies for event in reply.events]
        assert [event.seq for event in events] == [0, 0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 10, 11, 12]
        assert {event.tenant for event in events} == {"b"}
        assert backend.event_turns == 12
        assert replies[-1].complete
        assert not backend.event_log.subscriptions_count
        old = [r async for r in pbg.EventsStub(channel).Snapshot(pb.SnapshotRequest())]
        assert [event.seq for reply in old for event in reply.events] == [0, 0, 0]


@pytest.mark.parametrize("ended", ["gap", "erased"])
async def test_a_followed_snapshot_that_ends_early_is_not_complete(tmp_path, ended):
    options = {"event_limits": EventLimits(tenant_events_max=4)}
    async with running(tmp_path, **options) as pod, pod.dial(pod.tenant("b")) as channel:

        async def cut(tenant: TenantName) -> AsyncIterator[Event]:
            for _ in range(5 if ended == "gap" else 0):  # one more than is held
                store(pod.backend, B, 1)
            if ended == "erased":
                pod.backend.event_log.publish(Kind.TENANT_ERASED, B, time_unix_ns=9)
            yield Event(0, 1, tenant, Kind.STORED, NS, (bytes(16),), medium=Medium.FLASH)
            raise AssertionError("it went on")

        pod.backend.snapshot = cut
        request = pb.SnapshotRequest(follow=True)
        replies = [r async for r in pbg.EventsStub(channel).Snapshot(request)]
        assert not any(reply.complete for reply in replies)
        if ended == "gap":
            gap = replies[-1].gap
            assert (gap.reason, gap.asked_seq, gap.last_seq) == (pb.GAP_REASON_SLOW, 0, 5)
        else:
            assert replies[-1].events[-1].kind == pb.KIND_TENANT_ERASED


async def test_readers_that_read_no_more_keep_no_snapshot_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them, `entresol events --snapshot` behind a pager, and a relay of the tenant got none
    for as long as they were there. There may not be many, though: each has its walk in memory."""
    rows = 100_000  # more than waits on its way to a reader

    async def long(tenant: TenantName) -> AsyncIterator[Event]:
        for number in range(rows):
            wire_key = number.to_bytes(16)
            yield Event(0, 1, tenant, Kind.STORED, NS, (wire_key,), medium=Medium.FLASH)

    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        pod.backend.snapshot = long  # type: ignore[method-assign]
        stub = pbg.EventsStub(channel)
        (service,) = (one for one in pod.server._events if one._identify is not operator)

        async def begun() -> Any:
            call = stub.Snapshot(pb.SnapshotRequest())
            assert (await asyncio.wait_for(call.read(), 10)).HasField("position")
            return call

        held = [await begun() for _ in range(SNAPSHOTS_PER_TENANT_MAX)]
        code, _ = await refusal(stub.Snapshot(pb.SnapshotRequest()).read())
        assert code is grpc.StatusCode.UNAVAILABLE
        monkeypatch.setattr(grpc_services, "SNAPSHOT_HELD_S", 0.0)
        await eventually(lambda: None not in service._snapshots[A].values())
        whole = [reply async for reply in stub.Snapshot(pb.SnapshotRequest())]
        assert whole[-1].complete
        assert sum(len(reply.events) for reply in whole) == rows
        while len(held) < SNAPSHOTS_HELD_MAX:
            held.append(await begun())
            await eventually(lambda: None not in service._snapshots[A].values())
        code, details = await refusal(stub.Snapshot(pb.SnapshotRequest()).read())
        assert code is grpc.StatusCode.UNAVAILABLE
        assert f"{SNAPSHOTS_HELD_MAX} snapshots" in details
        assert sum([len(r.events) for r in await remaining(held[0])]) == rows, "it is no worse off"
        for call in held[1:]:
            call.cancel()
        await eventually(lambda: not service._snapshots)
