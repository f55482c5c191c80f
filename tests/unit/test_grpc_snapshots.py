"""Snapshots that are followed, over gRPC: what happens meanwhile comes in its place."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from test_grpc import NS, A, B, running, store

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
