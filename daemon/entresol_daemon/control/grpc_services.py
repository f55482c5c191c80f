"""The three services: who the caller is, what it may ask, and the shard's answer on the wire.

Invariant: over TCP the tenant is the one in the verified certificate and nothing in a request can
change that; the operator exists on the unix socket only. Every error an EntresolError explains
reaches the caller with its status and hint; any other is logged and answered without details.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

import grpc

from entresol_daemon.control import grpc_convert as convert
from entresol_daemon.control.admin import SEGMENTS_PER_PAGE_MAX, ShardBackend
from entresol_daemon.control.identity import judge_certificate, tenant_from_cert
from entresol_daemon.events.stream import EventStream, snapshot_batches
from entresol_daemon.events.types import Gap, Kind, Position
from entresol_proto import limits
from entresol_proto.ids import TenantName, check_tenant_name
from entresol_proto.status import EntresolError, Status
from entresol_proto.v1 import entresol_pb2 as pb

log = logging.getLogger("entresol.grpc")

TENANTS_IN_STEP = 16  # made into messages before others have their turns
NAMESPACES_IN_TURN = 32  # made into messages: each costs the loop as much as an event does
SNAPSHOTS_PER_TENANT_MAX = 2  # getting on at once, per server; each walks the tenant's index
SNAPSHOTS_HELD_MAX = 8  # of a tenant, with those that wait for their readers: 4 bytes for a block
SNAPSHOT_HELD_S = 10.0  # whose reader took nothing for so long does not get on

Identify = Callable[[Any], TenantName | None]
"""From a call's context: the tenant, or None for the operator. Raises: EntresolError."""

T = TypeVar("T")

_C = grpc.StatusCode
GRPC_CODES = {
    Status.OK: _C.OK,
    Status.MISS: _C.NOT_FOUND,
    Status.GAP: _C.OUT_OF_RANGE,
    Status.EXISTS: _C.ALREADY_EXISTS,
    Status.CORRUPT: _C.DATA_LOSS,
    Status.DEADLINE: _C.DEADLINE_EXCEEDED,
    Status.BUSY: _C.UNAVAILABLE,
    Status.QUOTA: _C.RESOURCE_EXHAUSTED,
    Status.TOO_LARGE: _C.INVALID_ARGUMENT,
    Status.BAD_REQUEST: _C.INVALID_ARGUMENT,
    Status.FORBIDDEN: _C.PERMISSION_DENIED,
    Status.UNSUPPORTED: _C.UNIMPLEMENTED,
    Status.LEASE_EXPIRED: _C.FAILED_PRECONDITION,
    Status.LOCKED: _C.FAILED_PRECONDITION,
    Status.DRAINING: _C.UNAVAILABLE,
    Status.NO_SPACE: _C.RESOURCE_EXHAUSTED,
    Status.IO_ERROR: _C.INTERNAL,
    Status.FABRIC_ERROR: _C.UNAVAILABLE,
    Status.DISCONNECTED: _C.UNAVAILABLE,
    Status.BREAKER_OPEN: _C.UNAVAILABLE,
    Status.CONFLICT: _C.ABORTED,
    Status.ERASED: _C.FAILED_PRECONDITION,
    Status.INTERNAL: _C.INTERNAL,
    Status.NOT_ADMITTED: _C.FAILED_PRECONDITION,
}
DETAILS_CHARS_MAX = 600  # up to 12 bytes each on the wire, and peers refuse trailers over 8 KiB
STATUS_METADATA_KEY = "entresol-status"  # trailing metadata: the status label


def operator(_: Any) -> None:
    """`Identify` of the unix socket: whoever can open it (mode 0600) is the operator."""
    return


def tenant_of_certificate(trust_domain: str) -> Identify:
    """`Identify` of the TCP server: the tenant in the client certificate, over TLS 1.3 only.

    gRPC's Python interface cannot set a minimum version for the handshake, so an older connection
    is refused at its first call. Nor can it be kept from resuming sessions, where nobody looks at
    the certificate again: so its dates are looked at with each call.
    """

    def identify(context: Any) -> TenantName:
        facts = context.auth_context()
        version = next(iter(facts.get("ssl_tls_version", ())), b"")
        if version not in (b"TLSv1.3", b""):  # b"": a grpc too old to say
            raise EntresolError(
                f"{version.decode(errors='replace')} is too old",
                hint="use TLS 1.3",
                status=Status.FORBIDDEN,
            )
        certificate = next(iter(facts.get("x509_pem_cert", ())), b"")
        tenant = tenant_from_cert(certificate, trust_domain)
        error = judge_certificate(certificate, None).problem(time.time())
        if error is not None:
            raise error
        return tenant

    return identify


async def refuse(context: Any, error: Exception, method: str) -> None:
    """End the call as `error` says. Always raises (grpc's AbortError)."""
    if isinstance(error, EntresolError):
        status, details = error.status, str(error)
    else:
        log.error("event=grpc_failed method=%s", method, exc_info=error)
        status, details = Status.INTERNAL, "internal error; the daemon's log has it"
    assert status is not Status.OK, "an error is not a success"
    if len(details) > DETAILS_CHARS_MAX:  # a name or path in it is long; the hint is at the end
        details = f"{details[: DETAILS_CHARS_MAX // 2]} ... {details[-DETAILS_CHARS_MAX // 2 :]}"
    code = GRPC_CODES.get(status, _C.INTERNAL)
    await context.abort(code, details, ((STATUS_METADATA_KEY, status.label),))


async def _answer(context: Any, method: str, answer: Awaitable[T]) -> T:
    try:
        return await answer
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        await refuse(context, error, method)
        raise AssertionError("abort returned") from error


class DescribeService:
    """`entresol.v1.Describe`."""

    def __init__(self, backend: ShardBackend, identify: Identify) -> None:
        self._backend = backend
        self._identify = identify

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        """Who and where this shard is, and who it takes the caller for."""
        return await _answer(context, "Describe", self._describe(context))

    async def _describe(self, context: Any) -> pb.DescribeReply:
        tenant = self._identify(context)
        if tenant is not None:
            self._backend.admit(tenant)
        found = await self._backend.describe()
        incarnation = self._backend.event_log.incarnation
        return convert.description_message(found, incarnation, tenant or "")


class EventsService:
    """`entresol.v1.Events`."""

    def __init__(self, backend: ShardBackend, identify: Identify) -> None:
        self._backend = backend
        self._identify = identify
        self._streams: set[EventStream] = set()
        # Of each snapshot that is taken, since when it waits for its reader.
        self._snapshots: dict[TenantName, dict[object, float | None]] = {}
        self._closed = False

    def close(self) -> None:
        """End every watch (with OK), refuse new ones."""
        self._closed = True
        for stream in tuple(self._streams):
            stream.close()

    def _tenant(self, context: Any, named: str) -> TenantName | None:
        """Whose events the call is about; None is the operator's view of all."""
        caller = self._identify(context)
        if caller is None:
            return check_tenant_name(named) if named else None
        if named not in ("", caller):
            raise EntresolError(
                "a certificate gives access to its own tenant only",
                hint="leave the tenant field empty",
                status=Status.FORBIDDEN,
            )
        self._backend.admit(caller)
        return caller

    async def Watch(
        self, request: pb.WatchRequest, context: Any
    ) -> AsyncGenerator[pb.WatchReply, None]:
        """Replay, then follow; ends with a gap, with the tenant's erasure, or with the server."""
        try:
            if self._closed:
                raise EntresolError("the shard is stopping", status=Status.DRAINING)
            after = None
            if request.HasField("after"):
                after = Position(request.after.incarnation, request.after.seq)
            tenant = self._tenant(context, request.tenant)
            stream = EventStream(self._backend.event_log, tenant, after=after)
        except Exception as error:
            await refuse(context, error, "Watch")
            return
        self._streams.add(stream)
        try:
            async with contextlib.aclosing(self._follow(stream, tenant)) as replies:
                async for reply in replies:
                    yield reply
        except Exception as error:
            await refuse(context, error, "Watch")
        finally:
            self._streams.discard(stream)
            stream.close()

    async def _follow(
        self, stream: EventStream, tenant: TenantName | None
    ) -> AsyncGenerator[pb.WatchReply, None]:
        incarnation = self._backend.event_log.incarnation
        start = stream.position
        yield pb.WatchReply(
            incarnation=incarnation,
            position=convert.position_message(start) if start is not None else None,
        )
        async for batch in stream:
            if isinstance(batch, Gap):
                yield pb.WatchReply(incarnation=incarnation, gap=convert.gap_message(batch))
                return
            if tenant is not None:
                await self._backend.event_turn(tenant, len(batch))
            for group in convert.event_groups(batch):
                yield pb.WatchReply(incarnation=incarnation, events=group)
            if tenant is not None and any(e.kind is Kind.TENANT_ERASED for e in batch):
                return

    async def Snapshot(
        self, request: pb.SnapshotRequest, context: Any
    ) -> AsyncGenerator[pb.SnapshotReply, None]:
        """What the tenant has stored; the reader follows from the position in the first reply."""
        try:
            tenant = self._tenant(context, request.tenant)
            if tenant is None:
                raise EntresolError(
                    "a snapshot is of one tenant", hint="name it", status=Status.BAD_REQUEST
                )
            self._check_snapshots(tenant)
        except Exception as error:
            await refuse(context, error, "Snapshot")
            return
        taken = self._snapshots.setdefault(tenant, {})
        clock, mine = asyncio.get_running_loop().time, object()
        taken[mine] = None
        try:
            async with contextlib.aclosing(self._walk(tenant, request.follow)) as replies:
                async for reply in replies:
                    taken[mine] = clock()
                    yield reply
                    taken[mine] = None
        except Exception as error:
            await refuse(context, error, "Snapshot")
        finally:
            del taken[mine]
            if not taken:
                self._snapshots.pop(tenant, None)

    def _check_snapshots(self, tenant: TenantName) -> None:
        """Whether one more may begin. A reader that reads no more, as behind a pager, does not keep
        others waiting. Raises: EntresolError BUSY."""
        taken = self._snapshots.get(tenant, {}).values()
        long_ago = asyncio.get_running_loop().time() - SNAPSHOT_HELD_S
        get_on = sum(1 for since in taken if since is None or since > long_ago)
        if get_on >= SNAPSHOTS_PER_TENANT_MAX or len(taken) >= SNAPSHOTS_HELD_MAX:
            raise EntresolError(
                f"{len(taken)} snapshots are being taken",
                hint="try again when one has ended",
                status=Status.BUSY,
            )

    async def Namespaces(self, request: pb.NamespacesRequest, context: Any) -> pb.NamespacesReply:
        """What the namespace ids in a tenant's events stand for."""

        async def find() -> pb.NamespacesReply:
            tenant = self._tenant(context, request.tenant)
            if tenant is None:
                raise EntresolError(
                    "namespaces are of one tenant", hint="name it", status=Status.BAD_REQUEST
                )
            found = await self._backend.namespaces(tenant)
            messages: list[pb.NamespaceInfo] = []
            for at in range(0, len(found), NAMESPACES_IN_TURN):
                part = found[at : at + NAMESPACES_IN_TURN]
                await self._backend.event_turn(tenant, len(part))
                messages += map(convert.namespace_message, part)
            return pb.NamespacesReply(namespaces=messages)

        return await _answer(context, "Namespaces", find())

    async def _walk(
        self, tenant: TenantName, follow: bool
    ) -> AsyncGenerator[pb.SnapshotReply, None]:
        event_log = self._backend.event_log
        batches = snapshot_batches(
            event_log,
            self._backend.snapshot,
            tenant,
            batch_events=event_log.limits.batch_events_max,
            follow=follow,
        )
        async with contextlib.aclosing(batches):
            async for batch in batches:
                if isinstance(batch, Position):
                    yield pb.SnapshotReply(position=convert.position_message(batch))
                    continue
                if isinstance(batch, Gap):
                    yield pb.SnapshotReply(gap=convert.gap_message(batch))
                    return
                numbered = sum(1 for event in batch if event.seq)  # the walk paid for the others
                if numbered:
                    await self._backend.event_turn(tenant, numbered)
                for group in convert.event_groups(batch):
                    yield pb.SnapshotReply(events=group)
                if any(event.kind is Kind.TENANT_ERASED for event in batch):
                    return
        yield pb.SnapshotReply(complete=True)


class AdminService:
    """`entresol.v1.Admin`; registered on the unix socket only."""

    def __init__(self, backend: ShardBackend) -> None:
        self._backend = backend

    async def Stat(self, request: pb.StatRequest, context: Any) -> pb.StatReply:
        """The operator's overview."""
        return convert.stat_message(await _answer(context, "Stat", self._backend.stat()))

    async def TenantAdd(self, request: pb.TenantAddRequest, context: Any) -> pb.TenantInfo:
        """Make a tenant known and give it keys."""

        async def add() -> pb.TenantInfo:
            name, quota = check_tenant_name(request.name), convert.quota_record(request.quota)
            added = await self._backend.tenant_add(name, quota)
            log.info("event=tenant_added tenant=%s", name)
            return convert.tenant_message(added)

        return await _answer(context, "TenantAdd", asyncio.shield(_unattended(add())))

    async def TenantList(self, request: pb.TenantListRequest, context: Any) -> pb.TenantListReply:
        """All tenants, sorted by name."""
        found = await _answer(context, "TenantList", self._backend.tenant_list())
        ordered = sorted(found, key=lambda tenant: tenant.name)
        messages: list[pb.TenantInfo] = []
        for at in range(0, len(ordered), TENANTS_IN_STEP):
            messages += map(convert.tenant_message, ordered[at : at + TENANTS_IN_STEP])
            await asyncio.sleep(0)  # hosts' requests come in between
        return pb.TenantListReply(tenants=messages)

    async def TenantSetQuota(
        self, request: pb.TenantSetQuotaRequest, context: Any
    ) -> pb.TenantInfo:
        """Change a tenant's quota: some fields of it, or all."""

        async def change() -> pb.TenantInfo:
            name, quota = check_tenant_name(request.name), convert.quota_record(request.quota)
            fields = convert.quota_fields(request.fields)
            changed = await self._backend.tenant_set_quota(name, quota, fields)
            return convert.tenant_message(changed)

        return await _answer(context, "TenantSetQuota", asyncio.shield(_unattended(change())))

    async def TenantRotate(self, request: pb.TenantRotateRequest, context: Any) -> pb.TenantInfo:
        """New data-encryption key version. Runs to its end even when the caller goes away."""

        async def rotate() -> pb.TenantInfo:
            name = check_tenant_name(request.name)
            changed = await self._backend.tenant_rotate(name, force=request.force)
            log.info(
                "event=tenant_rotated tenant=%s dek_version=%d", changed.name, changed.dek_version
            )
            return convert.tenant_message(changed)

        return await _answer(context, "TenantRotate", asyncio.shield(_unattended(rotate())))

    async def Unlock(self, request: pb.UnlockRequest, context: Any) -> pb.UnlockReply:
        """The key-encryption key has arrived. Runs to its end even when the caller goes away."""

        async def unlock() -> pb.UnlockReply:
            kek_id = await self._backend.unlock(request.kek_file)
            state = (await self._backend.stat()).state
            return pb.UnlockReply(state=cast("pb.State", state.value), kek_id=kek_id)

        return await _answer(context, "Unlock", asyncio.shield(_unattended(unlock())))

    async def Scrub(self, request: pb.ScrubRequest, context: Any) -> pb.ScrubReply:
        """Verify everything on flash."""

        async def scrub() -> pb.ScrubReply:
            return pb.ScrubReply(was_running=await self._backend.scrub())

        return await _answer(context, "Scrub", scrub())

    async def ChangeKek(self, request: pb.ChangeKekRequest, context: Any) -> pb.ChangeKekReply:
        """Another key-encryption key from now on. Runs to its end even when the caller goes."""

        async def change() -> pb.ChangeKekReply:
            old, new = await self._backend.change_kek(request.kek_file)
            return pb.ChangeKekReply(old_kek_id=old, new_kek_id=new)

        return await _answer(context, "ChangeKek", asyncio.shield(_unattended(change())))

    async def TenantErase(self, request: pb.TenantEraseRequest, context: Any) -> pb.EraseReceipt:
        """Destroy a tenant's keys. Runs to its end even when the caller goes away."""

        async def erase() -> pb.EraseReceipt:
            name = check_tenant_name(request.name)
            if request.confirm != name:
                raise EntresolError(
                    "erasing is not confirmed",
                    hint="repeat the tenant's name in `confirm`; this cannot be undone",
                    status=Status.BAD_REQUEST,
                )
            receipt = await self._backend.tenant_erase(name)
            log.warning(
                "event=tenant_erased tenant=%s blocks=%d digest=%s",
                name,
                receipt.blocks_dropped,
                receipt.digest().hex()[:16],
            )
            return convert.receipt_message(receipt)

        # A half-done erasure must not depend on a client staying connected.
        return await _answer(context, "TenantErase", asyncio.shield(_unattended(erase())))

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        """Refuse new work, finish what runs."""

        async def drain() -> pb.DrainReply:
            if request.deadline_ns > limits.DEADLINE_NS_MAX:
                raise EntresolError(
                    f"a deadline of {request.deadline_ns} ns is too long",
                    hint=f"at most {limits.DEADLINE_NS_MAX} ns",
                    status=Status.BAD_REQUEST,
                )
            done = await self._backend.drain(request.deadline_ns)
            return pb.DrainReply(
                complete=done.complete,
                sessions_left=done.sessions_left,
                leases_left=done.leases_left,
            )

        return await _answer(context, "Drain", drain())

    async def Segments(self, request: pb.SegmentsRequest, context: Any) -> pb.SegmentsReply:
        """One page of the flash segments."""
        count_max = min(request.count_max or SEGMENTS_PER_PAGE_MAX, SEGMENTS_PER_PAGE_MAX)
        page = await _answer(
            context, "Segments", self._backend.segments(request.first_segment, count_max)
        )
        full = len(page) >= count_max
        return pb.SegmentsReply(
            segments=[convert.segment_message(segment) for segment in page],
            next_segment=page[-1].segment + 1 if full else 0,
        )


_running: set[asyncio.Task[Any]] = set()  # the loop holds tasks weakly


def _unattended(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Work that ends whether or not anybody waits for it."""
    task = asyncio.get_running_loop().create_task(work)
    _running.add(task)
    task.add_done_callback(_finish_unattended)
    return task


def _finish_unattended(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # whoever still waits gets it; nobody else needs to hear of it twice
