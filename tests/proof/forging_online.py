"""Forgeries shown to a running daemon: guessed and stolen numbers, replays, altered drives.

Invariant: a forger has a session of its own, captures of other sessions' frames and spans, and on
the drive the file's check key; it has no certificate and no KEK but its own. Every kind has a
control: the genuine thing, shown in the same way, is taken.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entresol_client.results import PutBlock, RequestFailedError
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import (
    RECORD_HEADER_BYTES,
    decode_record_header,
    encode_record_header,
    payload_hash,
)
from entresol_daemon.shard.dispatch import SessionHandler
from entresol_proto.fabric.base import ConnectOptions, RemoteSpan
from entresol_proto.identity import client_ssl_context
from entresol_proto.ids import EngineKey, TenantName, wire_key
from entresol_proto.limits import MIB
from entresol_proto.seal.block import BlockIdentity, BlockKey, BlockMeta, seal_into
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.frames import Frame, FrameDecoder, FrameType
from entresol_proto.wire.opening import NO_FABRIC, Attach, Hello, NamespaceOpened, OpenNamespace
from entresol_proto.wire.session import ClientSession
from tests.daemon.daemon_lab import client_of, shape
from tests.harness import running_daemon
from tests.proof.forging import Parts
from tests.proof.isolation_paths import _bits, _takes, altered
from tests.proof.tenancy import (
    BLOCK_BYTES,
    DESCRIPTOR,
    OTHER,
    OWN,
    Room,
    Session,
    chain,
    content,
    eventually,
    half_open,
    salted,
    soon,
    wire_keys,
)

DEADLINE_NS = 60_000_000_000
NOTHING = RemoteSpan(0, 0, 0)


@dataclass(slots=True)
class Shown:
    """What was shown, what of it was accepted, and whether the genuine thing was."""

    tried: int
    accepted: int
    genuine: bool


@dataclass(slots=True)
class Case:
    """A seed's blocks, stored by the owner."""

    rng: random.Random
    seed: int
    keys: list[bytes]
    names: bytes


Kind = Callable[[Room, Case], Awaitable[Shown]]


async def _refused(work: Awaitable[Any], *allowed: Status) -> int:
    """0 when the daemon refused, 1 when it answered as if nothing were wrong."""
    try:
        await work
    except RequestFailedError as error:
        if error.status not in (allowed or (Status.BAD_REQUEST,)):
            raise
        return 0
    return 1


async def names(room: Room, case: Case) -> Shown:
    """Guessed wire keys, and stolen ones with one bit off; asked by the owner, too."""
    stolen = data.split_keys(case.names)
    guesses = [case.rng.randbytes(16) for _ in range(256)]
    for _ in range(256):
        near = bytearray(case.rng.choice(stolen))
        near[case.rng.randrange(16)] ^= 1 << case.rng.randrange(8)
        guesses.append(bytes(near))
    accepted = tried = 0
    for session in (room.own.shm, room.other.shm):
        run = b"".join(guesses)
        accepted += _bits((await session.ask(data.Exists(session.space.handle, run))).bitmap)
        grants = await session.fetch(run[16 * 128 : 16 * 384])
        accepted += sum(len(grant.items) for grant in grants)
        session.release(grants)
        tried += len(guesses) + 256
    own = room.own.shm
    found = await own.ask(data.Exists(own.space.handle, case.names))
    return Shown(tried, accepted, found.prefix_blocks == len(stolen))


async def spaces(room: Room, case: Case) -> Shown:
    """The same tenant's namespace under another salt: its own names, and those of the first."""
    accepted = 0
    first, raw = room.own.shm, room.own.shm.raw
    other = Session(raw, await raw.namespace(salted(f"salt {case.seed % 8}")))
    for run in (wire_keys(other.space, case.keys), case.names):
        accepted += _bits((await other.ask(data.Exists(other.space.handle, run))).bitmap)
        for place in data.OpenAt:
            grants = await other.fetch(run, open_at=place)
            accepted += sum(len(grant.items) for grant in grants)
            other.release(grants)
    found = await first.ask(data.Exists(first.space.handle, case.names))
    return Shown(6 * len(case.keys), accepted, found.prefix_blocks == len(case.keys))


async def handles(room: Room, case: Case) -> Shown:
    """Namespace handles that were never given, in every message that takes one."""
    session, own = room.other.shm, room.own.shm
    item = data.PutItem(case.names[:16], case.keys[0], BLOCK_BYTES, 0, b"", b"")

    def messages(handle: int, run: bytes) -> list[Any]:
        return [
            data.Exists(handle, run), data.Touch(handle, run), data.Forget(handle, run),
            data.Explain(handle, (case.keys[0],)),
            data.Stage(handle, data.OpenAt.HOST, 1, DEADLINE_NS, run),
            data.Reserve(handle, data.Ack.ACCEPTED, DEADLINE_NS, (item,)),
        ]  # fmt: skip

    accepted = tried = 0
    for _ in range(12):
        wrong = case.rng.choice((0, 3, 2**32 - 1, case.rng.randrange(4, 2**32)))
        for message in messages(wrong, case.names):
            accepted += await _refused(session.ask(message))
            tried += 1
        accepted += await _refused(session.raw.fetch(wrong, case.names))
        tried += 1
    good = [await own.ask(m) for m in messages(own.space.handle, case.names[:16])[:2]]
    return Shown(tried, accepted, good[0].prefix_blocks == 1)


async def put_ids(room: Room, case: Case) -> Shown:
    """Numbers of reservations: guessed, and those of somebody else; then one's own, twice."""
    own = room.own.shm
    reply = await _reserve(own, chain(case.seed, 16, "puts"))
    ids = [item.put_id for item in reply.items]
    guesses = [case.rng.choice((0, 2**64 - 1, case.rng.randrange(2**64))) for _ in range(48)]
    accepted = tried = 0
    for session in (room.other.shm, room.other.tcp, room.own.tcp):
        for put_id in (*ids, *guesses[:16]):
            span = case.rng.choice((NOTHING, RemoteSpan(1, 0, BLOCK_BYTES)))
            accepted += await _refused(session.raw.commit([(put_id, span)]))
            tried += 1
    statuses = await own.raw.commit([(put_id, NOTHING) for put_id in ids])
    for put_id in ids:  # the very same again
        accepted += await _refused(own.raw.commit([(put_id, NOTHING)]))
        tried += 1
    return Shown(tried, accepted, len(statuses) == 16)


async def _reserve(session: Session, blocks: Sequence[PutBlock]) -> data.Reserved:
    items = tuple(
        data.PutItem(wire_key(session.space.secret, EngineKey(block.key)), block.key, BLOCK_BYTES,
                     block.position, block.parent_key or b"", b"")
        for block in blocks
    )  # fmt: skip
    handle = session.space.handle
    reply = await session.ask(data.Reserve(handle, data.Ack.DURABLE, DEADLINE_NS, items))
    assert all(item.status is Status.OK for item in reply.items), reply
    assert isinstance(reply, data.Reserved)
    return reply


async def lease_ids(room: Room, case: Case) -> Shown:
    """Numbers of leases, given back by whoever does not hold them; also with lies about them."""
    table = room.running.daemon.shard.parts.leases
    grants = await room.own.shm.fetch(case.names)
    real = [grant.lease_id for grant in grants if grant.items]
    held = len(table)
    near = range(max(0, min(real) - 256), max(real) + 256)
    guesses = [*near, *(case.rng.randrange(2**64) for _ in range(512))]
    lies = tuple((lease, case.rng.randrange(len(case.keys)), Status.CORRUPT) for lease in guesses)
    for session in (room.other.shm, room.own.tcp):
        connection = session.raw.connection
        message = data.Release(tuple(guesses), lies)
        connection._write(connection.session.send(message)[1])
        await connection.ping(soon())
    accepted = held - len(table) + room.running.daemon.shard.parts.meters.totals.blocks_corrupt
    room.own.shm.release(grants)
    await room.own.shm.raw.connection.ping(soon())
    await eventually(lambda: len(table) <= held - len(real), "release by the owner")
    return Shown(2 * len(guesses), accepted, True)


async def rkeys(room: Room, case: Case) -> Shown:
    """Remote keys guessed, and right ones with an address or a length outside."""
    accepted = tried = 0
    genuine = True
    for session in (room.own.shm, room.own.tcp):
        grants = await session.fetch(case.names)
        spans = [item.span for grant in grants for item in grant.items]
        known = {span.rkey for span in spans}
        given = await session.read(spans)
        genuine &= len(spans) > 0 and all(status is Status.OK for status, _ in given)
        wrong = [
            RemoteSpan(rkey, case.rng.randrange(2**21), 512)
            for rkey in (case.rng.randrange(2**32) for _ in range(256))
            if rkey not in known
        ]
        for _ in range(256):
            rkey = case.rng.choice(spans).rkey
            address = case.rng.choice((2**40, 2**62, case.rng.randrange(2**26, 2**40)))
            wrong.append(RemoteSpan(rkey, address, case.rng.choice((1, 512, 4096))))
        for status, raw in await session.read(wrong):
            accepted += status is Status.OK or any(raw)
        tried += len(wrong)
        session.release(grants)
    return Shown(tried, accepted, genuine)


async def tickets(room: Room, case: Case) -> Shown:
    """Tickets of the data path: guessed, one bit off, and those that were used before."""
    running = room.running
    tls = running.client_config(OTHER).tls
    options = ConnectOptions(ssl=client_ssl_context(tls.cert, tls.key, tls.ca))
    accepted = tried = 0
    async with half_open(running, OWN) as (_, welcome):
        for offer in welcome.offers:
            for number in range(24):
                at = case.rng.randrange(128)
                guess = case.rng.randbytes(16) if number % 2 else None
                accepted += await _takes(altered(offer, at, guess), options)
                tried += 1
    async with half_open(running, OWN) as (_, welcome):  # a fresh one: tickets live for seconds
        shm = next(offer for offer in welcome.offers if offer.kind.label == "shm")
        genuine = await _takes(shm, options)
        accepted += await _takes(shm, options)
        tried += 1
    return Shown(tried, accepted, genuine)


# -- captured streams


class Tape:
    """One side of a control session, fed by hand: what it sends comes back as frames."""

    def __init__(self, room: Room, tenant: str) -> None:
        self._decoder = FrameDecoder()
        self._decoder.allow(2**22)
        self.replies: list[Frame] = []
        self.raw = bytearray()
        self.handler = SessionHandler(
            room.running.daemon.shard, TenantName(tenant), write=self._took, close=lambda: None
        )

    def _took(self, raw: bytes) -> None:
        self.raw += raw
        self.replies += self._decoder.feed(raw)

    async def say(self, raw: bytes) -> Frame:
        """Feed one frame, wait for one answer."""
        before = len(self.replies)
        self.handler.receive(raw)
        await eventually(lambda: len(self.replies) > before, "an answer")
        return self.replies[-1]


async def recorded(room: Room, case: Case) -> list[bytes]:
    """The frames of a session of the owner, as sent: opening, a namespace, questions."""
    tape, machine = Tape(room, OWN), ClientSession(now_ns=soon())
    frames: list[bytes] = []
    space: NamespaceOpened | None = None
    questions: list[Callable[[int], Any]] = [
        lambda handle: data.Exists(handle, case.names),
        lambda handle: data.Touch(handle, case.names),
        lambda handle: data.Explain(handle, tuple(case.keys)),
    ]
    opening = [Hello(1, 1, bytes(16), 1, "tape"), Attach(NO_FABRIC),
               OpenNamespace(DESCRIPTOR.canonical())]  # fmt: skip
    for message in [*opening, *questions]:
        if callable(message):
            assert space is not None
            message = message(space.handle)
        frames.append(machine.send(message)[1])
        tape.raw.clear()
        await tape.say(frames[-1])
        for received in machine.receive(bytes(tape.raw), soon()):
            if isinstance(received.message, NamespaceOpened):
                space = received.message
    await tape.handler.finish()
    return frames


async def frames(room: Room, case: Case) -> Shown:
    """A captured session played again, under another certificate and under its own."""
    tape = await recorded(room, case)
    given = []
    for tenant in (OTHER, OWN):
        played = Tape(room, tenant)
        for raw in tape:
            await played.say(raw)
        await played.handler.finish()
        given.append(_told(played.replies))
    return Shown(3 * len(case.keys), given[0], given[1] == 3 * len(case.keys))


def _told(replies: Sequence[Frame]) -> int:
    """Keys about which the answers say anything but that they are not there."""
    told = 0
    for frame in replies:
        if frame.type is FrameType.EXISTS_REPLY:
            told += _bits(data.ExistsReply.decode(frame.payload).bitmap)
        elif frame.type is FrameType.DONE:
            told += data.Done.decode(frame.payload).count
        elif frame.type is FrameType.EXPLAINED:
            rows = data.Explained.decode(frame.payload).rows
            told += sum(reason is not data.Reason.NEVER_STORED for reason, _ in rows)
    return told


# -- blocks that a host seals


async def host_sealed(room: Room, case: Case) -> Shown:
    """Over plain tcp the host seals: every header field must be the reservation's."""
    session = room.own.tcp
    if not session.space.seal_at_host:
        return Shown(0, 0, True)
    blocks = chain(case.seed, 20, "sealed")
    reply = await _reserve(session, blocks)
    sealed = [_sealed(session, b, g) for b, g in zip(blocks, reply.items, strict=True)]
    shown = list(sealed)
    for at in range(len(shown) - 2):
        mine, other = Parts(sealed[at]), Parts(sealed[at + 1])
        names = ("salt", "commitment", "wire_key", "engine_key", "dek_version", "namespace_id")
        name = names[at % len(names)]
        mine.take(other, name)
        if name == "dek_version":
            mine.fields[name] += 1
        if name == "namespace_id":
            mine.fields[name] = case.rng.randbytes(16)
        shown[at] = mine.join() if at % 3 else sealed[at + 1]
    memory = bytearray(b"".join(shown))
    exposure = await session.raw.endpoint.expose(memoryview(memory))
    pairs, at = [], 0
    for grant, raw in zip(reply.items, shown, strict=True):
        pairs.append((grant.put_id, exposure.span(at, len(raw))))
        at += len(raw)
    statuses = await session.raw.commit(pairs)
    await session.raw.endpoint.revoke(exposure)
    taken = sum(status is Status.OK for status in statuses[:-2])
    await room.own.space.forget([block.key for block in blocks])
    return Shown(len(statuses) - 2, taken, statuses[-2:] == [Status.OK] * 2)


def _sealed(session: Session, block: PutBlock, grant: Any) -> bytes:
    room = memoryview(bytearray(4096))
    made = seal_into(
        room, memoryview(content(block.key)),
        identity=BlockIdentity(
            session.space.namespace_id, wire_key(session.space.secret, EngineKey(block.key)),
            block.key, DType.from_name(DESCRIPTOR.dtype), grant.dek_version,
        ),
        block_key=BlockKey(grant.key, grant.commitment), salt=grant.salt, codec_id=0,
        meta=BlockMeta(block.parent_key or b"", block.position, 16, b""),
        chunk_bytes=session.space.chunk_bytes,
    )  # fmt: skip
    return bytes(room[: made.sealed_bytes])


# -- a drive that was written to


async def drive(folder: Path, seed: int) -> Shown:
    """Records exchanged on the drive, with headers and checks that fit; then a restart reads it."""
    rng = random.Random(seed)
    change = shape(fabrics=("shm",), flash=64 * MIB, segment=4 * MIB, block_max=1 * MIB)
    blocks = chain(seed, 48, "drive")
    keys = [block.key for block in blocks]
    async with running_daemon(folder, change) as running:
        for tenant in (OWN, OTHER):
            async with client_of(running, tenant, "shm") as client:
                space = await client.namespace(DESCRIPTOR)
                mark = tenant.encode()
                mine = [replace(block, buffer=content(block.key, mark)) for block in blocks]
                assert (await space.put(mine, ack="durable")).ok
        engine, index = running.daemon.shard.parts.engine, None
        index = engine.index
        check_key = engine._superblock.check_key
        spots = {
            (index.namespace_of(slot), index.key_of(slot)):
            engine._superblock.segment_at(int(index.m_segment[slot]))
            + int(index.m_offset[slot]) * BLOCK
            for slot in index.live_slots().tolist()
        }  # fmt: skip
        path = running.daemon.config.flash_path
    forged = _rewrite(path, spots, check_key, rng)
    accepted = 0
    good = 0
    async with running_daemon(folder, change) as running:
        for tenant in (OWN, OTHER):
            async with client_of(running, tenant, "shm") as client:
                space = await client.namespace(DESCRIPTOR)
                buffers = [bytearray(BLOCK_BYTES) for _ in keys]
                result = await space.get_into(keys, buffers)
                for key, buffer, status in zip(keys, buffers, result.statuses, strict=True):
                    right = bytes(buffer) == content(key, tenant.encode())
                    good += status is Status.OK and right
                    accepted += status is Status.OK and not right
    return Shown(forged, accepted, good == 2 * len(keys) - forged)


def _rewrite(
    path: Path, spots: dict[tuple[bytes, bytes], int], check_key: bytes, rng: random.Random
) -> int:
    """Put other bytes into two thirds of the records; how many."""
    with path.open("r+b") as file:

        def load(at: int) -> bytes:
            file.seek(at)
            return file.read(BLOCK)

        records = {place: load(at) for place, at in spots.items()}
        heads = {place: decode_record_header(raw, check_key) for place, raw in records.items()}
        order = sorted(spots)
        rng.shuffle(order)
        doomed = order[: 2 * len(order) // 3]
        for number, place in enumerate(doomed):
            source = rng.choice([each for each in order if each != place])
            head, other = heads[place], heads[source]
            assert head is not None, "the check key is the file's"
            assert other is not None
            body = records[source][RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + other.sealed_bytes]
            own = records[place][RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + head.sealed_bytes]
            mine, its = Parts(own), Parts(body)
            its.take(mine, "namespace_id", "wire_key", "engine_key", "dek_version")
            if number % 3 == 1:
                body = its.join()
            elif number % 3 == 2:
                its.take(mine, "salt", "commitment")
                body = its.join()
            head = replace(head, sealed_bytes=len(body))
            extent = bytes(RECORD_HEADER_BYTES) + body
            head = replace(head, payload_hash=payload_hash(extent, len(body)))
            raw = encode_record_header(head, check_key) + body
            file.seek(spots[place])
            file.write(raw.ljust(BLOCK, b"\0"))
    return len(doomed)


KINDS: dict[str, Kind] = {
    each.__name__: each
    for each in (names, spaces, handles, put_ids, lease_ids, rkeys, tickets, frames, host_sealed)
}
