"""The gRPC surface over real sockets: mutual TLS, tenants apart, rotation, the admin socket."""

from __future__ import annotations

import asyncio
import os
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import ClassVar

import certs
import grpc
import leaks
import pytest
import uvloop
from google.protobuf import descriptor_pb2

from entresol_daemon.control import grpc_convert
from entresol_daemon.control.admin import (
    DrainResult,
    EraseReceipt,
    NamespaceRecord,
    SegmentRecord,
    ShardDescription,
    ShardStat,
    ShardState,
    TenantQuota,
    TenantRecord,
)
from entresol_daemon.control.grpc_server import GrpcLimits, GrpcServer
from entresol_daemon.control.grpc_services import (
    GRPC_CODES,
    SNAPSHOTS_PER_TENANT_MAX,
    tenant_of_certificate,
)
from entresol_daemon.control.identity import ReloadingServerContext
from entresol_daemon.events.log import EventLimits, EventLog
from entresol_daemon.events.types import (
    Event,
    Gap,
    GapReason,
    Kind,
    Medium,
    Position,
    Reason,
)
from entresol_proto.ids import NamespaceDescriptor, NamespaceId, TenantName, pack_token_ids
from entresol_proto.status import ConfigError, EntresolError, Status
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg

A, B = TenantName("a"), TenantName("b")
NS = bytes(range(16))
DOMAIN = "pod.test"
ROOT = pathlib.Path(__file__).parents[2]


class Backend:
    """A shard with a real event log and an in-memory tenant table."""

    def __init__(self, event_limits: EventLimits | None = None) -> None:
        self.event_log = EventLog(77, event_limits=event_limits)
        self.table = {A: TenantRecord(A), B: TenantRecord(B)}
        self.erased: set[TenantName] = set()
        self.walking = asyncio.Event()
        self.walking.set()
        self.failure: Exception | None = None
        self.event_turns = 0
        self.reasons: list[str] = []

    def reasons_not_ready(self) -> list[str]:
        return self.reasons

    def admit(self, tenant: TenantName) -> None:
        if tenant in self.erased:
            raise EntresolError(f"tenant {tenant} was erased", status=Status.ERASED)
        self._known(tenant, Status.FORBIDDEN)

    def _known(self, tenant: TenantName, status: Status = Status.BAD_REQUEST) -> TenantRecord:
        if tenant not in self.table:
            raise EntresolError(f"no tenant {tenant}", hint="add it first", status=status)
        return self.table[tenant]

    async def snapshot(self, tenant: TenantName) -> AsyncIterator[Event]:
        await self.walking.wait()
        for number in range(3):
            key = f"{tenant}-{number}".encode().ljust(16)
            yield Event(0, 1, tenant, Kind.STORED, NS, (key,), medium=Medium.FLASH)

    async def namespaces(self, tenant: TenantName) -> Sequence[NamespaceRecord]:
        return [NamespaceRecord(NamespaceId(NS), NamespaceDescriptor(f"model-of-{tenant}"))]

    async def describe(self) -> ShardDescription:
        if self.failure is not None:
            raise self.failure
        return ShardDescription(
            "1.2.3",
            "shard7",
            "127.0.0.1:7440",
            ("127.0.0.1:7442",),
            ("tcp", "shm"),
            {"zebra_max": 2, "ant_bytes_max": 1},
            ShardState.SERVING,
        )

    async def stat(self) -> ShardStat:
        return ShardStat(ShardState.SERVING, uptime_ns=5, blocks=6, reasons_not_ready=("warming",))

    async def tenant_list(self) -> Sequence[TenantRecord]:
        return list(reversed(self.table.values()))

    async def event_turn(self, tenant: TenantName, events: int) -> None:
        self.event_turns += events

    async def tenant_add(self, name: TenantName, quota: TenantQuota) -> TenantRecord:
        if name in self.table:
            raise EntresolError(f"tenant {name} exists", status=Status.BAD_REQUEST)
        self.table[name] = TenantRecord(name, quota, dek_version=1)
        return self.table[name]

    async def tenant_set_quota(
        self, name: TenantName, quota: TenantQuota, fields: Collection[str] = ()
    ) -> TenantRecord:
        if fields:
            quota = replace(self.table[name].quota, **{f: getattr(quota, f) for f in fields})
        self.table[name] = replace(self._known(name), quota=quota)
        return self.table[name]

    async def scrub(self) -> bool:
        return True

    async def unlock(self, kek_file: str) -> str:
        return f"unlocked by {kek_file}"

    async def change_kek(self, kek_file: str) -> tuple[str, str]:
        return "old", f"of {kek_file}"

    async def tenant_rotate(self, name: TenantName, *, force: bool) -> TenantRecord:
        await self.walking.wait()
        self.table[name] = replace(self._known(name), dek_version=self.table[name].dek_version + 1)
        return self.table[name]

    async def tenant_erase(self, name: TenantName) -> EraseReceipt:
        self._known(name)
        await self.walking.wait()
        del self.table[name]
        self.erased.add(name)
        self.event_log.publish(Kind.TENANT_ERASED, name, time_unix_ns=9)
        return EraseReceipt(name, 9, (1, 2), 3, 4, 5, "shard7", self.event_log.incarnation)

    async def drain(self, deadline_ns: int) -> DrainResult:
        return DrainResult(complete=deadline_ns == 0, sessions_left=1, leases_left=2)

    async def segments(self, first_segment: int, count_max: int) -> Sequence[SegmentRecord]:
        numbers = range(first_segment, min(first_segment + count_max, 10))
        return [SegmentRecord(number, "sealed", "a", live_bytes=number) for number in numbers]


def store(backend: Backend, tenant: TenantName, number: int, tokens: int = 0) -> Event:
    return backend.event_log.publish(
        Kind.STORED,
        tenant,
        time_unix_ns=3,
        namespace_id=NS,
        wire_keys=(f"{tenant}-{number}".encode().ljust(16),),
        engine_keys=(number.to_bytes(8, "little"),),
        parent=b"parent__",
        position=number,
        block_tokens=tokens,
        token_ids_u32le=pack_token_ids(range(tokens)),
        medium=Medium.MEMORY,
        reason=Reason.NONE,
        size_bytes=4096,
    )


class Pod:
    """A running server with everything to talk to it."""

    def __init__(self, folder: pathlib.Path, **options: object) -> None:
        self.folder = folder
        self.ca = certs.make_ca("pod")
        self.paths = self.shard_certificate(self.ca)
        self.tls = ReloadingServerContext(
            self.paths.cert, self.paths.key, self.paths.ca, interval_ns=0
        )
        event_limits = options.pop("event_limits", None)
        assert event_limits is None or isinstance(event_limits, EventLimits)
        self.backend = Backend(event_limits)
        self.socket = folder / "run" / "admin.sock"
        self.server = GrpcServer(
            self.backend,
            tls=self.tls.bundle,
            trust_domain=DOMAIN,
            unix_path=self.socket,
            grpc_limits=GrpcLimits(close_grace_s=0.5, **options),  # type: ignore[arg-type]
        )

    def shard_certificate(self, ca: certs.TestCA) -> certs.CertPaths:
        return ca.issue("shard", spiffe_uri=f"spiffe://{DOMAIN}/shard/shard7").write(self.folder)

    @asynccontextmanager
    async def dial(
        self, pair: certs.CertPair | None, ca: certs.TestCA | None = None
    ) -> AsyncIterator[grpc.aio.Channel]:
        """A channel over TCP with the given client certificate."""
        credentials = grpc.ssl_channel_credentials(
            (ca or self.ca).pem,
            pair.key_pem if pair else None,
            pair.cert_pem if pair else None,
        )
        async with grpc.aio.secure_channel(f"localhost:{self.server.port}", credentials) as channel:
            yield channel

    def tenant(self, name: str, domain: str = DOMAIN) -> certs.CertPair:
        return self.ca.issue(name, spiffe_uri=f"spiffe://{domain}/tenant/{name}")

    def operator(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"unix:{self.socket}")


@asynccontextmanager
async def running(folder: pathlib.Path, **options: object) -> AsyncIterator[Pod]:
    pod = Pod(folder, **options)
    await pod.server.start()
    try:
        yield pod
    finally:
        await pod.server.close()


async def describe(channel: grpc.aio.Channel) -> pb.DescribeReply:
    return await pbg.DescribeStub(channel).Describe(pb.DescribeRequest(), timeout=10)


async def refusal(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def read(call, count: int) -> list[pb.WatchReply]:
    return [await asyncio.wait_for(call.read(), 10) for _ in range(count)]


async def remaining(call) -> list:
    """The replies up to the end of the stream."""
    replies = []
    while (reply := await asyncio.wait_for(call.read(), 10)) is not grpc.aio.EOF:
        replies.append(reply)
    return replies


# ------------------------------------------------------------------------------ identity


async def test_a_tenant_is_taken_from_its_certificate(tmp_path):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        found = await describe(channel)
        assert found.tenant == "a"
        assert found.incarnation == 77
        assert found.shard == "shard7"
        assert list(found.fabrics) == ["tcp", "shm"]
        assert [(limit.name, limit.value) for limit in found.limits] == [
            ("ant_bytes_max", 1),
            ("zebra_max", 2),
        ]
        assert found.state == pb.STATE_SERVING


@pytest.mark.parametrize("case", ["none", "foreign", "expired"])
async def test_no_call_without_a_verified_certificate(tmp_path, case):
    async with running(tmp_path) as pod:
        pair = {
            "none": None,
            "foreign": certs.make_ca("else").issue("a", spiffe_uri=f"spiffe://{DOMAIN}/tenant/a"),
            "expired": pod.ca.issue("a", spiffe_uri=f"spiffe://{DOMAIN}/tenant/a", days=-1),
        }[case]
        async with pod.dial(pair) as channel:
            code, _ = await refusal(describe(channel))
            assert code is grpc.StatusCode.UNAVAILABLE
        async with pod.dial(pod.tenant("a")) as channel:  # the same call with a good one
            assert (await describe(channel)).tenant == "a"


@pytest.mark.parametrize(
    ("uris", "words"),
    [
        ([], "no URI name"),
        ([f"spiffe://{DOMAIN}/tenant/a", f"spiffe://{DOMAIN}/tenant/b"], "URI names"),
        (["spiffe://other.test/tenant/a"], "trust domain"),
        ([f"spiffe://{DOMAIN}/shard/a"], "not a tenant"),
        ([f"spiffe://{DOMAIN}/tenant/stranger"], "no tenant stranger"),
    ],
)
async def test_certificates_that_name_no_tenant_of_ours(tmp_path, uris, words):
    async with running(tmp_path) as pod, pod.dial(pod.ca.issue("x", uris=uris)) as channel:
        for call in (
            describe(channel),
            pbg.EventsStub(channel).Watch(pb.WatchRequest()).read(),
            pbg.EventsStub(channel).Snapshot(pb.SnapshotRequest()).read(),
            pbg.EventsStub(channel).Namespaces(pb.NamespacesRequest()),
        ):
            code, details = await refusal(call)
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert words in details


@pytest.mark.parametrize("version", [b"TLSv1.2", b"TLSv1.1", b"SSLv3"])
def test_an_older_tls_is_refused_whatever_the_certificate(version):
    pair = certs.make_ca("pod").issue("a", spiffe_uri=f"spiffe://{DOMAIN}/tenant/a")

    class Call:  # what grpc says about a connection that its own client would not make
        facts: ClassVar = {"x509_pem_cert": [pair.cert_pem], "ssl_tls_version": [version]}

        def auth_context(self) -> dict[str, list[bytes]]:
            return self.facts

    identify = tenant_of_certificate(DOMAIN)
    with pytest.raises(EntresolError, match="too old") as caught:
        identify(Call())
    assert caught.value.status is Status.FORBIDDEN
    Call.facts["ssl_tls_version"] = [b"TLSv1.3"]
    assert identify(Call()) == "a"


async def test_a_client_refuses_a_server_of_another_ca(tmp_path):
    other = certs.make_ca("else")
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a"), ca=other) as channel:
        code, _ = await refusal(describe(channel))
        assert code is grpc.StatusCode.UNAVAILABLE


async def test_rotation_without_restart(tmp_path):
    async with running(tmp_path) as pod:
        old = pod.tenant("a")
        async with pod.dial(old) as channel:
            assert (await describe(channel)).tenant == "a"
        other = certs.make_ca("next")
        pod.shard_certificate(other)
        new = other.issue("b", spiffe_uri=f"spiffe://{DOMAIN}/tenant/b")
        async with pod.dial(new, ca=other) as channel:
            assert (await describe(channel)).tenant == "b"
        async with pod.dial(old) as channel:
            assert (await refusal(describe(channel)))[0] is grpc.StatusCode.UNAVAILABLE
        assert pod.tls.reloads == 1


async def test_a_broken_new_certificate_changes_nothing(tmp_path):
    async with running(tmp_path) as pod:
        pod.paths.cert.write_bytes(b"not a certificate")
        async with pod.dial(pod.tenant("a")) as channel:
            assert (await describe(channel)).tenant == "a"
        assert pod.tls.failures >= 1
        pod.shard_certificate(pod.ca)
        async with pod.dial(pod.tenant("a")) as channel:
            assert (await describe(channel)).tenant == "a"
        assert pod.tls.reloads == 1


async def test_connections_end_at_their_maximum_age(tmp_path):
    async with (
        running(tmp_path, connection_age_max_s=0.3, connection_age_grace_s=0.3) as pod,
        pod.dial(pod.tenant("a")) as channel,
    ):
        watch = pbg.EventsStub(channel).Watch(pb.WatchRequest())
        await read(watch, 1)
        code, _ = await refusal(read(watch, 1))
        assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


# -------------------------------------------------------------------------------- events


async def test_watch_replays_and_follows_one_tenant_only(tmp_path):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        for number in range(4):
            store(pod.backend, A, number)
            store(pod.backend, B, number)
        after = pb.Position(incarnation=77, seq=2)
        watch = pbg.EventsStub(channel).Watch(pb.WatchRequest(after=after))
        first, second = await read(watch, 2)
        assert first.position == after
        assert not first.events
        assert [event.seq for event in second.events] == [3, 4]
        store(pod.backend, B, 9)
        last = store(pod.backend, A, 9, tokens=16)
        (third,) = await read(watch, 1)
        assert [grpc_convert.event_record(event) for event in third.events] == [last]
        assert third.incarnation == 77


async def test_a_watch_without_a_position_confirms_where_it_begins(tmp_path):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        store(pod.backend, A, 0)
        watch = pbg.EventsStub(channel).Watch(pb.WatchRequest())
        (first,) = await read(watch, 1)
        assert first.position == pb.Position(incarnation=77, seq=1)
        store(pod.backend, A, 1)
        (second,) = await read(watch, 1)
        assert [event.seq for event in second.events] == [2]


async def test_a_gap_is_the_last_reply(tmp_path):
    limits = EventLimits(tenant_events_max=2)
    async with running(tmp_path, event_limits=limits) as pod:
        for number in range(9):
            store(pod.backend, A, number)
        async with pod.dial(pod.tenant("a")) as channel:
            after = pb.Position(incarnation=77, seq=1)
            watch = pbg.EventsStub(channel).Watch(pb.WatchRequest(after=after))
            replies = [reply async for reply in watch]
            assert grpc_convert.gap_record(replies[-1].gap) == Gap(A, GapReason.TRIMMED, 1, 8, 9)
            assert len(replies) == 2
        assert pod.backend.event_log.subscriptions_count == 0


@pytest.mark.parametrize("method", ["Watch", "Snapshot", "Namespaces"])
async def test_naming_another_tenant_is_forbidden(tmp_path, method):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        stub = pbg.EventsStub(channel)
        for name in ("b", "nobody", "../b"):
            request = getattr(pb, f"{method}Request")(tenant=name)
            call = getattr(stub, method)(request)
            code, details = await refusal(call if method == "Namespaces" else call.read())
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "leave the tenant field empty" in details
            assert dict(await call.trailing_metadata())["entresol-status"] == "forbidden"
        watch = stub.Watch(pb.WatchRequest(tenant="a"))  # its own name is fine
        await read(watch, 1)


async def test_snapshot_then_watch(tmp_path):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("b")) as channel:
        store(pod.backend, B, 1)
        store(pod.backend, A, 1)
        replies = [r async for r in pbg.EventsStub(channel).Snapshot(pb.SnapshotRequest())]
        assert replies[0].position == pb.Position(incarnation=77, seq=1)
        events = [event for reply in replies for event in reply.events]
        assert [event.wire_keys[0].rstrip() for event in events] == [b"b-0", b"b-1", b"b-2"]
        assert all(event.seq == 0 and event.tenant == "b" for event in events)
        assert [reply.complete for reply in replies] == [False] * (len(replies) - 1) + [True]


async def test_snapshots_at_once_are_limited(tmp_path):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        stub = pbg.EventsStub(channel)
        pod.backend.walking.clear()
        walks = [stub.Snapshot(pb.SnapshotRequest()) for _ in range(SNAPSHOTS_PER_TENANT_MAX)]
        for walk in walks:
            await asyncio.wait_for(walk.read(), 10)
        code, details = await refusal(stub.Snapshot(pb.SnapshotRequest()).read())
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "try again" in details
        pod.backend.walking.set()
        for walk in walks:
            assert (await remaining(walk))[-1].complete


async def test_large_events_fit_the_readers_message_limit(tmp_path):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        for number in range(40):
            store(pod.backend, A, number, tokens=60_000)  # 240 KB each in memory
        after = pb.Position(incarnation=77, seq=0)
        watch = pbg.EventsStub(channel).Watch(pb.WatchRequest(after=after))
        seen: list[int] = []
        while len(seen) < 40:
            (reply,) = await read(watch, 1)
            seen += [event.seq for event in reply.events]
            assert len(reply.events) <= 5
        assert seen == list(range(1, 41))


async def test_watches_are_limited_per_tenant(tmp_path):
    limits = EventLimits(subscriptions_per_tenant_max=1)
    running_pod = running(tmp_path, event_limits=limits)
    async with running_pod as pod, pod.dial(pod.tenant("a")) as channel:
        stub = pbg.EventsStub(channel)
        first = stub.Watch(pb.WatchRequest())
        await read(first, 1)
        code, _ = await refusal(stub.Watch(pb.WatchRequest()).read())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        while pod.backend.event_log.subscriptions_count:
            await asyncio.sleep(0.01)
        await read(stub.Watch(pb.WatchRequest()), 1)


# --------------------------------------------------------------------------------- admin


async def test_admin_is_not_there_over_tcp(tmp_path):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        stub = pbg.AdminStub(channel)
        for call in (
            stub.Stat(pb.StatRequest()),
            stub.TenantErase(pb.TenantEraseRequest(name="b", confirm="b")),
            stub.Drain(pb.DrainRequest()),
        ):
            assert (await refusal(call))[0] is grpc.StatusCode.UNIMPLEMENTED
        assert B in pod.backend.table


async def test_admin_on_the_unix_socket(tmp_path):
    async with running(tmp_path) as pod, pod.operator() as channel:
        admin = pbg.AdminStub(channel)
        stat = await admin.Stat(pb.StatRequest())
        assert (stat.state, stat.uptime_ns, stat.blocks) == (pb.STATE_SERVING, 5, 6)
        assert list(stat.reasons_not_ready) == ["warming"]
        quota = pb.Quota(flash_bytes=10, leases=3, weight=2)
        added = await admin.TenantAdd(pb.TenantAddRequest(name="new", quota=quota))
        assert (added.name, added.quota, added.dek_version) == ("new", quota, 1)
        changed = await admin.TenantSetQuota(
            pb.TenantSetQuotaRequest(name="new", quota=pb.Quota(flash_bytes=11))
        )
        assert changed.quota == pb.Quota(flash_bytes=11)
        request = pb.TenantSetQuotaRequest(name="new", quota=pb.Quota(leases=4), fields=["leases"])
        assert (await admin.TenantSetQuota(request)).quota == pb.Quota(flash_bytes=11, leases=4)
        request.fields.append("what")
        assert "no field 'what'" in (await refusal(admin.TenantSetQuota(request)))[1]
        assert (await admin.TenantRotate(pb.TenantRotateRequest(name="new"))).dek_version == 2
        listed = await admin.TenantList(pb.TenantListRequest())
        assert [tenant.name for tenant in listed.tenants] == ["a", "b", "new"]
        drained = await admin.Drain(pb.DrainRequest(deadline_ns=1))
        assert (drained.complete, drained.sessions_left, drained.leases_left) == (False, 1, 2)


async def test_segments_come_in_pages(tmp_path):
    async with running(tmp_path) as pod, pod.operator() as channel:
        admin, seen, first = pbg.AdminStub(channel), [], 0
        while True:
            page = await admin.Segments(pb.SegmentsRequest(first_segment=first, count_max=4))
            seen += [segment.segment for segment in page.segments]
            first = page.next_segment
            if not first:
                break
        assert seen == list(range(10))


@pytest.mark.parametrize("confirm", ["", "b", "A"])
async def test_erasing_needs_its_confirmation(tmp_path, confirm):
    async with running(tmp_path) as pod, pod.operator() as channel:
        request = pb.TenantEraseRequest(name="a", confirm=confirm)
        code, details = await refusal(pbg.AdminStub(channel).TenantErase(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be undone" in details
        assert A in pod.backend.table


async def test_erasing_gives_a_receipt_and_ends_the_tenants_watch(tmp_path):
    async with (
        running(tmp_path) as pod,
        pod.operator() as operator,
        pod.dial(pod.tenant("a")) as channel,
    ):
        watch = pbg.EventsStub(channel).Watch(pb.WatchRequest())
        await read(watch, 1)
        request = pb.TenantEraseRequest(name="a", confirm="a")
        receipt = await pbg.AdminStub(operator).TenantErase(request)
        assert list(receipt.dek_versions_destroyed) == [1, 2]
        record = EraseReceipt(A, 9, (1, 2), 3, 4, 5, "shard7", 77)
        assert receipt.digest == record.digest()
        assert replace(record, blocks_dropped=4).digest() != record.digest()
        rest = await remaining(watch)
        assert [event.kind for event in rest[-1].events] == [pb.KIND_TENANT_ERASED]
        code, details = await refusal(describe(channel))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "erased" in details


@pytest.mark.parametrize(("what", "more"), [("Erase", {"confirm": "a"}), ("Rotate", {})])
async def test_an_erasure_or_rotation_outlives_its_caller(tmp_path, what, more):
    async with running(tmp_path) as pod, pod.operator() as channel:
        pod.backend.walking.clear()
        ask = getattr(pbg.AdminStub(channel), f"Tenant{what}")
        call = ask(getattr(pb, f"Tenant{what}Request")(name="a", **more))
        await asyncio.sleep(0.2)
        call.cancel()
        await asyncio.sleep(0.2)
        pod.backend.walking.set()
        async with asyncio.timeout(10):
            while pod.backend.table.get(A) == TenantRecord(A):
                await asyncio.sleep(0.01)


async def test_the_operator_follows_all_tenants_or_one(tmp_path):
    async with running(tmp_path) as pod, pod.operator() as channel:
        events = pbg.EventsStub(channel)
        everything = events.Watch(pb.WatchRequest())
        one = events.Watch(pb.WatchRequest(tenant="b", after=pb.Position(incarnation=77)))
        (first,) = await read(everything, 1)
        assert not first.HasField("position")
        await read(one, 1)
        store(pod.backend, A, 1)
        store(pod.backend, B, 1)
        (both,) = await read(everything, 1)
        assert {event.tenant for event in both.events} == {"a", "b"}
        (only,) = await read(one, 1)
        assert [event.tenant for event in only.events] == ["b"]
        assert (await describe(channel)).tenant == ""
        code, _ = await refusal(events.Snapshot(pb.SnapshotRequest()).read())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        replay_all = pb.WatchRequest(after=pb.Position(incarnation=77))
        code, _ = await refusal(events.Watch(replay_all).read())
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_admin_socket_is_private(tmp_path):
    async with running(tmp_path) as pod:
        assert pod.socket.stat().st_mode & 0o777 == 0o600
        assert pod.socket.parent.stat().st_mode & 0o777 == 0o700
    assert not pod.socket.exists()


@pytest.mark.parametrize("case", ["writable", "long", "file"])
async def test_unsafe_places_for_the_admin_socket_are_refused(tmp_path, case):
    path = tmp_path / "run" / "admin.sock"
    path.parent.mkdir(mode=0o700)
    if case == "writable":
        path.parent.chmod(0o777)
    elif case == "long":
        path = tmp_path / ("x" * 120) / "admin.sock"
    else:
        path.write_text("mine")
    with pytest.raises(ConfigError):
        await GrpcServer(Backend(), unix_path=path).start()
    if case == "file":
        assert path.read_text() == "mine"


# -------------------------------------------------------------------------------- errors


async def test_errors_keep_their_status_and_hint(tmp_path):
    async with running(tmp_path) as pod, pod.operator() as channel:
        admin = pbg.AdminStub(channel)
        call = admin.TenantRotate(pb.TenantRotateRequest(name="nobody"))
        code, details = await refusal(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == "no tenant nobody (add it first)"
        assert dict(await call.trailing_metadata())["entresol-status"] == "bad_request"
        code, details = await refusal(admin.TenantAdd(pb.TenantAddRequest(name="../x")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "tenant name" in details


async def test_unexpected_errors_are_logged_and_say_nothing(tmp_path, caplog):
    async with running(tmp_path) as pod, pod.operator() as channel:
        pod.backend.failure = RuntimeError("where the treasure lies")
        code, details = await refusal(describe(channel))
        assert code is grpc.StatusCode.INTERNAL
        assert "treasure" not in details
        assert "treasure" in caplog.text
        pod.backend.failure = None
        assert (await describe(channel)).shard == "shard7"


def test_every_status_has_a_grpc_code():
    assert set(GRPC_CODES) == set(Status)
    assert [s for s, code in GRPC_CODES.items() if code is grpc.StatusCode.OK] == [Status.OK]


async def test_requests_over_the_limit_are_refused(tmp_path):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        request = pb.WatchRequest(tenant="x" * 70_000)
        code, _ = await refusal(pbg.EventsStub(channel).Watch(request).read())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


# ----------------------------------------------------------------------------- lifecycle


async def test_a_taken_port_is_refused(tmp_path):
    async with running(tmp_path) as pod:
        second = GrpcServer(
            pod.backend, tls=pod.tls.bundle, trust_domain=DOMAIN, port=pod.server.port
        )
        with pytest.raises(ConfigError, match="cannot listen"):
            await second.start()


async def test_closing_ends_open_watches_at_once(tmp_path):
    async with running(tmp_path) as pod, pod.dial(pod.tenant("a")) as channel:
        watch = pbg.EventsStub(channel).Watch(pb.WatchRequest())
        await read(watch, 1)
        closing = asyncio.ensure_future(pod.server.close())
        assert await asyncio.wait_for(watch.read(), 10) is grpc.aio.EOF
        await closing
        await pod.server.close()  # idempotent
    assert pod.backend.event_log.subscriptions_count == 0


def test_uvloop_starts_and_stops_clean(tmp_path):
    async def once(folder: pathlib.Path) -> None:
        folder.mkdir()
        async with running(folder) as pod, pod.dial(pod.tenant("a")) as channel:
            watch = pbg.EventsStub(channel).Watch(pb.WatchRequest())
            await read(watch, 1)
            store(pod.backend, A, 1)
            await read(watch, 1)

    async def main() -> None:
        await once(tmp_path / "first")  # what grpc itself keeps per process comes into being
        before = leaks.snapshot()
        for number in range(3):
            await once(tmp_path / f"run{number}")
        await leaks.settle(before)
        leaks.assert_no_leaks(before)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# ---------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Kind, pb.Kind, "KIND"),
        (Medium, pb.Medium, "MEDIUM"),
        (Reason, pb.Reason, "REASON"),
        (GapReason, pb.GapReason, "GAP_REASON"),
        (ShardState, pb.State, "STATE"),
    ],
)
def test_enum_numbers_agree_with_the_proto(ours, theirs, prefix):
    expected = {f"{prefix}_{member.name}": member.value for member in ours if member.name != "NONE"}
    expected[f"{prefix}_UNSPECIFIED"] = 0
    assert dict(theirs.items()) == expected


def test_events_survive_the_wire():
    event = Event(
        5,
        6,
        A,
        Kind.PINNED,
        NS,
        (b"k" * 16, b"l" * 16),
        (b"e" * 8, b"f" * 64),
        b"p" * 32,
        7,
        2,
        pack_token_ids([1, 2, 3, 2**32 - 1]),
        Medium.REMOTE,
        Reason.QUOTA,
        2**40,
        2**63,
    )
    raw = grpc_convert.event_message(event).SerializeToString()
    assert grpc_convert.event_record(pb.Event.FromString(raw)) == event
    assert grpc_convert.position_message(Position(2**64 - 1, 1)).incarnation == 2**64 - 1


def test_committed_code_is_what_the_proto_says(tmp_path):
    pytest.importorskip("grpc_tools", reason="not run here: grpcio-tools is not installed")
    from grpc_tools import protoc

    out = tmp_path / "set.pb"
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"--descriptor_set_out={out}"]
    assert protoc.main([*arguments, "entresol_proto/v1/entresol.proto"]) == 0
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    for message in fresh.message_type:  # protoc adds these to a set, not to generated code
        for field in message.field:
            field.ClearField("json_name")
    committed = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    assert committed == fresh
    for service in committed.service:  # the stubs come from the same run
        stub = getattr(pbg, f"{service.name}Servicer")
        assert {method.name for method in service.method} <= set(dir(stub))


def test_generate_runs_and_insists_on_its_generator(tmp_path):
    pytest.importorskip("grpc_tools", reason="not run here: grpcio-tools is not installed")
    script = [sys.executable, str(ROOT / "proto" / "generate.py"), "--out", str(tmp_path)]
    run = subprocess.run([*script, "--any-generator"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    made = sorted(path.name for path in (tmp_path / "entresol_proto" / "v1").iterdir())
    assert made == ["entresol_pb2.py", "entresol_pb2.pyi", "entresol_pb2_grpc.py"]
    text = (tmp_path / "entresol_proto" / "v1" / "entresol_pb2_grpc.py").read_text()
    assert "from entresol_proto.v1 import entresol_pb2" in text


def test_the_light_core_imports_neither_grpc_nor_protobuf():
    code = (
        "import sys, entresol_proto, entresol_proto.ids, entresol_proto.wire.frames, "
        "entresol_proto.fabric.base, entresol_proto.identity, entresol_daemon.events.stream\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('grpc', 'google', 'grpc_health')]\n"
        "assert not bad, bad\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr.decode()
