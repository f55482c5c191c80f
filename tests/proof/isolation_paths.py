"""Every path on which one tenant could be told of another's blocks, as questions put by both.

Invariant: each path says how much its owner was given of what is its own (all of it, or the line
fails) and how much the other tenant was given of it (none). A path that raises is a crash.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from entresol_client.results import PutBlock, RequestFailedError
from entresol_daemon.shard.turns import WINDOW_BLOCKS_IN_TURN
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import ConnectOptions, Offer, RemoteSpan
from entresol_proto.identity import client_ssl_context
from entresol_proto.limits import TICKET_BYTES
from entresol_proto.status import FabricError, Status
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg
from entresol_proto.wire.data import (
    Ack,
    Commit,
    Exists,
    Explain,
    Forget,
    Grant,
    OpenAt,
    PutItem,
    Reason,
    Release,
    Reserve,
    Reserved,
    Stage,
    Touch,
    split_keys,
)
from entresol_proto.wire.opening import Attach
from tests.proof.tenancy import (
    BLOCK_BYTES,
    OTHER,
    OWN,
    Room,
    Session,
    Side,
    content,
    eventually,
    half_open,
    opened,
    soon,
    wire_keys,
)

HOLD_NS = 50_000_000
DEADLINE_NS = 60_000_000_000
CALLS = 100  # of a path on which each attempt is a call of its own
REFUSALS = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
SALT_OFFSET = 80  # of the salt in a sealed header (proto/FORMAT.md); 16 before it: the wire key


@dataclass(slots=True)
class Asked:
    """What a path gave: `own` of `own_of` to the owner, `other` of `other_of` to the other."""

    own: int
    own_of: int
    other: int
    other_of: int


@dataclass(slots=True)
class Batch:
    """Blocks the owner has just stored; `names` are their wire keys, which nobody else can make."""

    blocks: list[PutBlock]
    keys: list[bytes]
    names: bytes
    sentinel: list[PutBlock]  # of the other tenant: an event of its own to wait for
    sentinel_names: set[bytes] = field(default_factory=set)
    before: dict[str, int] = field(default_factory=dict)  # last event seen, by tenant

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def name_set(self) -> set[bytes]:
        return set(split_keys(self.names))


Path = Callable[[Room, Batch], Awaitable[Asked]]


def stolen_and_own(session: Session, batch: Batch) -> list[bytes]:
    """What a stranger asks with: its own names for the same engine keys, and the very names."""
    return [wire_keys(session.space, batch.keys), batch.names]


# -- the control stream: look-ups


def _bits(bitmap: bytes) -> int:
    return sum(byte.bit_count() for byte in bitmap)


async def _counted(
    room: Room, batch: Batch, ask: Callable[[Session, bytes], Awaitable[int]]
) -> Asked:
    """A question with a run of names that is answered with a count."""
    own = await ask(room.own.shm, batch.names)
    given = [await ask(room.other.shm, names) for names in stolen_and_own(room.other.shm, batch)]
    return Asked(own, batch.count, sum(given), len(given) * batch.count)


async def exists(room: Room, batch: Batch) -> Asked:
    """EXISTS: the bit of each key, and the longest prefix."""

    async def ask(session: Session, names: bytes) -> int:
        reply = await session.ask(Exists(session.space.handle, names))
        assert bool(reply.prefix_blocks) == bool(reply.bitmap[0] & 1), "prefix and bits disagree"
        return _bits(reply.bitmap)

    return await _counted(room, batch, ask)


async def touch(room: Room, batch: Batch) -> Asked:
    """TOUCH: how many it found."""

    async def ask(session: Session, names: bytes) -> int:
        return int((await session.ask(Touch(session.space.handle, names))).count)

    return await _counted(room, batch, ask)


async def stage(room: Room, batch: Batch) -> Asked:
    """STAGE: whether a block can be brought up."""

    async def ask(session: Session, names: bytes) -> int:
        message = Stage(session.space.handle, OpenAt.HOST, HOLD_NS, DEADLINE_NS, names)
        statuses = (await session.ask(message)).statuses
        return sum(status is not Status.MISS for status in statuses)

    return await _counted(room, batch, ask)


async def forget(room: Room, batch: Batch) -> Asked:
    """FORGET by the other tenant finds nothing, and nothing is gone afterwards."""
    other = 0
    for names in stolen_and_own(room.other.shm, batch):
        other += (await room.other.shm.ask(Forget(room.other.shm.space.handle, names))).count
    left = await room.own.shm.ask(Exists(room.own.shm.space.handle, batch.names))
    return Asked(_bits(left.bitmap), batch.count, other, 2 * batch.count)


async def explain(room: Room, batch: Batch) -> Asked:
    """EXPLAIN takes whole engine keys and looks into all namespaces of the tenant."""

    async def known(session: Session) -> int:
        rows = (await session.ask(Explain(session.space.handle, tuple(batch.keys)))).rows
        return sum(reason is not Reason.NEVER_STORED for reason, _ in rows)

    return Asked(
        await known(room.own.shm), batch.count, await known(room.other.shm), batch.count
    )  # fmt: skip


async def reserve(room: Room, batch: Batch) -> Asked:
    """RESERVE tells its tenant EXISTS; the other is asked for every block, and told nothing.

    Under a name that is not its own for the engine key it is refused, stored or not.
    """
    own = await _reserved(room.own.shm, batch, batch.names)
    mine, stolen = [
        await _reserved(room.other.shm, batch, names)
        for names in stolen_and_own(room.other.shm, batch)
    ]
    wanted = [item.put_id for item in mine.items if item.status is Status.OK]
    nothing = RemoteSpan(0, 0, 0)
    await room.other.shm.ask(Commit(tuple((put_id, nothing) for put_id in wanted)))
    refused = sum(item.status is Status.BAD_REQUEST for item in stolen.items)
    return Asked(
        sum(item.status is Status.EXISTS for item in own.items), batch.count,
        2 * batch.count - len(wanted) - refused, 2 * batch.count,
    )  # fmt: skip


async def _reserved(session: Session, batch: Batch, names: bytes) -> Reserved:
    items = tuple(
        PutItem(name, block.key, BLOCK_BYTES, block.position, block.parent_key or b"", b"")
        for name, block in zip(split_keys(names), batch.blocks, strict=True)
    )
    reply = await session.ask(Reserve(session.space.handle, Ack.ACCEPTED, DEADLINE_NS, items))
    assert isinstance(reply, Reserved)
    return reply


# -- the control stream: bytes


async def _get(room: Room, batch: Batch, sides: Sequence[Session], *, prefix: bool) -> Asked:
    own_session, other_session = sides
    own = await read_back(own_session, batch, prefix=prefix)
    given = 0
    for names in stolen_and_own(other_session, batch):
        grants = await other_session.fetch(names, prefix=prefix)
        given += sum(len(grant.items) for grant in grants)
        given += sum(s not in (Status.MISS, Status.GAP) for g in grants for _, s in g.misses)
        other_session.release(grants)
    return Asked(own, batch.count, given, 2 * batch.count)


async def read_back(session: Session, batch: Batch, *, prefix: bool = False) -> int:
    """How many of the batch its tenant reads, opens and finds as stored."""
    grants = await session.fetch(batch.names, prefix=prefix)
    items = [item for grant in grants for item in grant.items]
    got = await session.read([item.span for item in items])
    session.release(grants)
    good = 0
    for item, (status, sealed) in zip(items, got, strict=True):
        key = batch.keys[item.index]
        good += status is Status.OK and opened(session, key, item, sealed) == content(key)
    return good


async def get_shm(room: Room, batch: Batch) -> Asked:
    """FETCH, opened by the host, over shm."""
    return await _get(room, batch, (room.own.shm, room.other.shm), prefix=False)


async def get_tcp(room: Room, batch: Batch) -> Asked:
    """FETCH, opened by the host, over tcp (every other room: with TLS on it)."""
    return await _get(room, batch, (room.own.tcp, room.other.tcp), prefix=False)


async def _carried(session: Session, names: bytes) -> Grant:
    """A grant with these blocks in it; where the daemon had something before it, there is none."""
    for _ in range(100):
        (grant, *_others) = grants = await session.fetch(names, carry=True)
        if grant.carried:
            return grant
        session.release(grants)
        await asyncio.sleep(0.005)
    raise AssertionError("no grant carries its blocks")


async def get_carried(room: Room, batch: Batch) -> Asked:
    """FETCH of a few blocks at a time, over tcp, that come within the grant."""
    own_session, step = room.own.tcp, 16 * WINDOW_BLOCKS_IN_TURN
    await read_back(own_session, batch)  # its slabs are shown to it, and all is in memory
    own = 0
    for at in range(0, len(batch.names), step):
        grant = await _carried(own_session, batch.names[at : at + step])
        for item in grant.items:
            key, span = batch.keys[at // 16 + item.index], item.span
            sealed = grant.carried[span.address : span.address + span.length_bytes]
            own += opened(own_session, key, item, sealed) == content(key)
    given = 0
    for names in stolen_and_own(room.other.tcp, batch):
        for at in range(0, len(names), step):
            grants = await room.other.tcp.fetch(names[at : at + step], carry=True)
            given += sum(len(grant.items) + len(grant.carried) for grant in grants)
            given += sum(s not in (Status.MISS, Status.GAP) for g in grants for _, s in g.misses)
    return Asked(own, batch.count, given, 2 * batch.count)


async def get_prefix(room: Room, batch: Batch) -> Asked:
    """FETCH of a prefix."""
    return await _get(room, batch, (room.own.shm, room.other.shm), prefix=True)


async def get_opened(room: Room, batch: Batch) -> Asked:
    """FETCH, opened by the daemon: plaintext into memory of the session."""
    session = room.own.shm
    grants = await session.fetch(batch.names, open_at=OpenAt.DAEMON)
    items = [item for grant in grants for item in grant.items]
    spans = [item.span for item in items]
    got = await session.read(spans)
    own = sum(
        status is Status.OK and plain == content(batch.keys[item.index])
        for item, (status, plain) in zip(items, got, strict=True)
    )
    # Where the plaintext lies is told to no other session; guessed right, it is not there.
    stray = await room.other.shm.read(spans)
    other = sum(status is not Status.LEASE_EXPIRED or any(raw) for status, raw in stray)
    session.release(grants)
    for names in stolen_and_own(room.other.shm, batch):
        theirs = await room.other.shm.fetch(names, open_at=OpenAt.DAEMON)
        other += sum(len(grant.items) for grant in theirs)
        room.other.shm.release(theirs)
    return Asked(own, batch.count, other, 2 * batch.count + len(spans))


async def put(room: Room, batch: Batch) -> Asked:
    """The other tenant stores other content under the same keys: each then reads its own."""
    mine = [PutBlock(b.key, content(b.key, b"theirs"), b.position, b.parent_key, b.token_ids)
            for b in batch.blocks]  # fmt: skip
    result = await room.other.space.put(mine)
    assert result.stored == batch.count, "a put was not a first one"
    buffers = [bytearray(BLOCK_BYTES) for _ in batch.keys]
    found = await room.other.space.get_into(batch.keys, buffers)
    assert found.ok, found.statuses
    theirs = sum(
        bytes(b) != content(k, b"theirs") for k, b in zip(batch.keys, buffers, strict=True)
    )
    own = await read_back(room.own.shm, batch)
    assert (await room.other.space.forget(batch.keys)).count == batch.count
    return Asked(own, batch.count, theirs, batch.count)


# -- leases


async def leases(room: Room, batch: Batch) -> Asked:
    """RELEASE of somebody else's leases, and of every number near them, ends none."""
    session, table = room.own.shm, room.running.daemon.shard.parts.leases
    # Releases of earlier paths, which leave late, would count as the other's doing.
    await eventually(lambda: not len(table), "release of what was read before")
    grants = await session.fetch(batch.names)
    ids = [grant.lease_id for grant in grants if grant.items]
    held = len(table)
    around = range(max(0, min(ids) - batch.count), max(ids) + batch.count)
    await _say(room.other, Release(tuple(around)))
    gone = held - len(table)
    spans = [item.span for grant in grants for item in grant.items]
    own = sum(status is Status.OK for status, _ in await session.read(spans))
    session.release(grants)
    await eventually(lambda: not table.held_by(_number(room, OWN)), "release by the owner")
    return Asked(own, batch.count, gone, len(around))


async def _say(side: Side, message: Release) -> None:
    """Send what has no answer, and wait until it was taken in."""
    connection = side.shm.raw.connection
    connection._write(connection.session.send(message)[1])
    await connection.ping(soon())


def _number(room: Room, tenant: str) -> int:
    """The shm session of a tenant that is raw (the client has one of its own)."""
    sessions = room.running.daemon.shard.sessions.values()
    mine = room.own if tenant == OWN else room.other
    wanted = mine.shm.raw.opened.welcome.session_id
    return next(each.number for each in sessions if each.session_id == wanted)


class _Looks(logging.Handler):
    """Counts the blocks that the daemon opened because a host said they were bad."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "event=report_examined" in record.msg


async def reports(room: Room, batch: Batch) -> Asked:
    """A report on a lease makes the daemon look at the block; on another's lease it does not."""
    looks, logger = _Looks(), logging.getLogger("entresol.get")
    logger.addHandler(looks)
    session = room.own.shm
    try:
        grants = await session.fetch(batch.names)
        said = [(g.lease_id, item.index, Status.CORRUPT) for g in grants for item in g.items]
        await _say(room.other, Release((), tuple(said)))
        few = said[:16]  # the daemon looks at a bounded number at a time
        connection = session.raw.connection
        connection._write(connection.session.send(Release((), tuple(few)))[1])
        scratch = room.running.daemon.shard.parts.scratch  # in use while it looks
        await eventually(lambda: looks.count >= len(few) and not scratch.allocated_bytes, "looks")
        session.release(grants)
        return Asked(min(looks.count, len(few)), len(few), looks.count - len(few), len(said))
    finally:
        logger.removeHandler(looks)


# -- the data path


async def shm_spans(room: Room, batch: Batch) -> Asked:
    """Spans granted to one tenant, read by the other over its own shm."""
    return await _spans(room.own.shm, room.other.shm, batch)


async def tcp_spans(room: Room, batch: Batch) -> Asked:
    """The same over tcp."""
    return await _spans(room.own.tcp, room.other.tcp, batch)


async def _spans(own: Session, other: Session, batch: Batch) -> Asked:
    grants = await own.fetch(batch.names)
    spans = [item.span for grant in grants for item in grant.items]
    read = sum(status is Status.OK for status, _ in await own.read(spans))
    given = await other.read(spans)
    own.release(grants)
    strange = sum(status is not Status.LEASE_EXPIRED or any(raw) for status, raw in given)
    return Asked(read, batch.count, strange, len(spans))


async def shm_mapped(room: Room, batch: Batch) -> Asked:
    """All the memory that was ever shown to a tenant, searched for the other's blocks."""
    grants = await room.own.shm.fetch(batch.names)
    items = [item for grant in grants for item in grant.items]
    sealed = await room.own.shm.read([item.span for item in items])
    room.own.shm.release(grants)
    words = np.array([np.frombuffer(raw[SALT_OFFSET : SALT_OFFSET + 8], np.uint64)[0]
                      for _, raw in sealed])  # fmt: skip
    found = [_seen(side.shm, words) for side in (room.own, room.other)]
    return Asked(found[0], batch.count, found[1], batch.count)


def _seen(session: Session, words: Any) -> int:
    """How many of these 8-byte words are in the regions a session has mapped."""
    endpoint: Any = session.raw.endpoint
    regions = [region.array for region in endpoint._regions.values()]
    assert regions, "nothing is mapped: the search would mean nothing"
    inside = np.concatenate([array[: len(array) // 8 * 8].view(np.uint64) for array in regions])
    return int(np.isin(words, inside).sum())


async def tickets(room: Room, batch: Batch) -> Asked:
    """Tickets of the data path: guessed, one bit off, spent. The owner's own opens its session."""
    running = room.running
    tls = running.client_config(OTHER).tls
    options = ConnectOptions(ssl=client_ssl_context(tls.cert, tls.key, tls.ca))
    opened_by_stranger = 0
    async with half_open(running, OWN) as (_, welcome):
        offers = {offer.kind.label: offer for offer in welcome.offers}
        for number in range(CALLS):
            offer = offers["tcp" if number % 5 == 0 else "shm"]
            guess = batch.names[:TICKET_BYTES] if number % 2 else None
            if await _takes(altered(offer, number, guess), options):
                opened_by_stranger += 1
    async with half_open(running, OWN) as (connection, welcome):  # a ticket lives for seconds
        taken = next(offer for offer in welcome.offers if offer.kind.label == "shm")
        endpoint, reply = await registry.connect(taken, soon(5), options=ConnectOptions())
        await connection.request(Attach(int(taken.kind), reply), soon())
        own = int(not endpoint.closed)
        opened_by_stranger += await _takes(taken, options)
        await endpoint.close()
    return Asked(own, 1, opened_by_stranger, CALLS + 1)


def altered(offer: Offer, number: int, guess: bytes | None) -> Offer:
    """The offer with another ticket in it: `guess`, or its own with one bit flipped."""
    at = 6 if offer.kind.label == "tcp" else 17  # where the ticket begins (proto/FABRICS.md)
    params = bytearray(offer.params)
    if guess is not None:
        params[at : at + TICKET_BYTES] = guess
    else:
        params[at + number // 8 % TICKET_BYTES] ^= 1 << number % 8
    return Offer(offer.kind, bytes(params))


async def _takes(offer: Offer, options: ConnectOptions) -> bool:
    try:
        endpoint, _ = await registry.connect(offer, soon(5), options=options)
    except FabricError:
        return False
    await endpoint.close()
    return True


# -- what is told


async def watched(room: Room, batch: Batch) -> Asked:
    """Events.Watch, open since before the put; the other's own event comes after it."""
    own, other = room.own.watcher, room.other.watcher
    await eventually(lambda: batch.name_set <= own.wire_keys, "events of the owner")
    await eventually(lambda: batch.sentinel_names <= other.wire_keys, "the other's own events")
    assert own.tenants == {OWN}, own.tenants
    assert other.tenants == {OTHER}, other.tenants
    given = len(batch.name_set & other.wire_keys)
    return Asked(len(batch.name_set & own.wire_keys), batch.count, given, batch.count)


async def replayed(room: Room, batch: Batch) -> Asked:
    """Events.Watch from a position before the put."""
    seen = {}
    incarnation = room.running.daemon.shard.incarnation
    for side, until in ((room.own, batch.name_set), (room.other, batch.sentinel_names)):
        after = pb.Position(incarnation=incarnation, seq=batch.before[side.name])
        call = pbg.EventsStub(side.channel).Watch(pb.WatchRequest(after=after))
        seen[side.name] = told = set()
        while not until <= told:
            reply = await asyncio.wait_for(call.read(), 30)
            assert not reply.HasField("gap"), reply.gap
            told.update(key for event in reply.events for key in event.wire_keys)
        call.cancel()
    given = [len(batch.name_set & seen[name]) for name in (OWN, OTHER)]
    return Asked(given[0], batch.count, given[1], batch.count)


async def snapshot(room: Room, batch: Batch) -> Asked:
    """Events.Snapshot: everything stored, read from the records' heads."""
    given = []
    for side in (room.own, room.other):
        call = pbg.EventsStub(side.channel).Snapshot(pb.SnapshotRequest())
        told = {key async for reply in call for event in reply.events for key in event.wire_keys}
        given.append(len(batch.name_set & told))
    return Asked(given[0], batch.count, given[1], batch.count)


async def relayed(room: Room, batch: Batch) -> Asked:
    """The relay of each tenant: what a router on its socket hears."""
    own, other = room.relays[OWN], room.relays[OTHER]
    last, sentinel = batch.keys[-1], batch.sentinel[-1].key
    await eventually(lambda: last in own.hear(), "the owner's relay")
    await eventually(lambda: sentinel in other.hear(), "the other's relay")
    given = [sum(key in tap.hear() for key in batch.keys) for tap in (own, other)]
    for tap in (own, other):
        tap.forget()
    return Asked(given[0], batch.count, given[1], batch.count)


async def named_by_request(room: Room, batch: Batch) -> Asked:
    """User services that have a tenant field, asked by name; the operator may, on its socket."""
    stub = pbg.EventsStub(room.other.channel)
    requests = (pb.WatchRequest, pb.SnapshotRequest)
    given = calls = 0
    while calls < CALLS:
        for method, request in zip((stub.Watch, stub.Snapshot), requests, strict=True):
            given += await _answered(method(request(tenant=OWN)).read())
        given += await _answered(stub.Namespaces(pb.NamespacesRequest(tenant=OWN)))
        calls += 3
    mine = await pbg.EventsStub(room.own.channel).Namespaces(pb.NamespacesRequest(tenant=OWN))
    space = room.own.shm.space.namespace_id
    own = sum(info.namespace_id == space for info in mine.namespaces)
    theirs = await stub.Namespaces(pb.NamespacesRequest())
    given += sum(info.namespace_id == space for info in theirs.namespaces)
    return Asked(own, 1, given, calls + 1)


async def admin(room: Room, batch: Batch) -> Asked:
    """The operator's service does not exist for a tenant; on the unix socket it does."""
    stub = pbg.AdminStub(room.other.channel)
    given = calls = 0
    while calls < CALLS:
        for call in (
            stub.TenantList(pb.TenantListRequest()),
            stub.TenantAdd(pb.TenantAddRequest(name="third")),
            stub.TenantSetQuota(pb.TenantSetQuotaRequest(name=OWN)),
            stub.TenantRotate(pb.TenantRotateRequest(name=OWN)),
            stub.TenantErase(pb.TenantEraseRequest(name=OWN, confirm=OWN)),
            stub.Drain(pb.DrainRequest()),
            stub.Segments(pb.SegmentsRequest()),
        ):
            given += await _answered(call)
            calls += 1
    address = f"unix:{room.running.daemon.config.listen.unix_dir / 'admin.sock'}"
    async with grpc.aio.insecure_channel(address) as channel:
        found = await pbg.AdminStub(channel).TenantList(pb.TenantListRequest())
        names = [tenant.name for tenant in found.tenants]
    return Asked(int(OWN in names and OTHER in names), 1, given, calls)


async def stat(room: Room, batch: Batch) -> Asked:
    """The operator's figures are not a tenant's to see."""
    stub = pbg.AdminStub(room.other.channel)
    given = sum([await _answered(stub.Stat(pb.StatRequest())) for _ in range(CALLS)])
    address = f"unix:{room.running.daemon.config.listen.unix_dir / 'admin.sock'}"
    async with grpc.aio.insecure_channel(address) as channel:
        found = await pbg.AdminStub(channel).Stat(pb.StatRequest())
    return Asked(int(found.blocks >= batch.count), 1, given, CALLS)


async def _answered(call: Any) -> int:
    """1 when a call that must be refused was not."""
    try:
        reply = await call
    except grpc.aio.AioRpcError as error:
        if error.code() not in REFUSALS:
            raise
        return 0
    return int(reply is not grpc.aio.EOF)


async def metrics(room: Room, batch: Batch) -> Asked:
    """The metrics page is the operator's; it counts a tenant's blocks and names none of them."""
    page = await asyncio.to_thread(
        _page, f"http://127.0.0.1:{room.running.daemon.http.port}/metrics"
    )
    counted = f'entresol_blocks_served_total{{open_at="host",tenant="{OWN}",tier="memory"}}'
    own = int(any(line.startswith(counted) for line in page.decode().splitlines()))
    space = room.own.shm.space.namespace_id
    lowered = page.lower()
    secrets = [*batch.keys, *split_keys(batch.names)]
    given = sum(raw in page or raw.hex()[:16].encode() in lowered for raw in (*secrets, space))
    return Asked(own, 1, given, len(secrets) + 1)


def _page(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as reply:
        return bytes(reply.read())


async def handles(room: Room, batch: Batch) -> Asked:
    """Numbers of namespaces opened by another session mean nothing in this one."""
    session, first = room.other.shm, room.own.shm.space.handle
    highest = max(first, session.space.handle)
    given = 0
    for number in range(CALLS):
        wrong = highest + 1 + number
        try:
            await session.ask(Exists(wrong, batch.names))
            given += 1
        except RequestFailedError as error:
            if error.status is not Status.BAD_REQUEST:
                raise
    own = await room.own.shm.ask(Exists(first, batch.names))
    return Asked(_bits(own.bitmap), batch.count, given, CALLS)


# In this order: what looks comes before what changes.
PATHS: dict[str, Path] = {
    "watch": watched, "replay": replayed, "snapshot": snapshot, "relay": relayed,
    "exists": exists, "touch": touch, "stage": stage, "explain": explain,
    "get_shm": get_shm, "get_tcp": get_tcp, "get_carried": get_carried,
    "get_prefix": get_prefix, "get_opened": get_opened,
    "shm_spans": shm_spans, "tcp_spans": tcp_spans, "shm_mapped": shm_mapped,
    "leases": leases, "reports": reports, "handles": handles, "tickets": tickets,
    "named": named_by_request, "admin": admin, "stat": stat, "metrics": metrics,
    "reserve": reserve, "put": put, "forget": forget,
}  # fmt: skip
