"""A whole shard in simulation: real Shard, Engine and session machines on a virtual clock.

Only the edges are simulated: the flash device (`flash.sim.SimDevice`, with faults and crashes), the
link between a host and the daemon (ordered bytes in random pieces with random delays, cut at random
moments) and the fabric (copies after a delay, with failures and flipped bits). The host is a small
one of its own around the real `ClientSession`, sealing and opening with the real code.

The oracle lives outside: the content of a block is a function of its key, so any byte that differs
is a wrong byte; it also knows which puts were acknowledged as durable, and what was forgotten.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from entresol_daemon.compute import InlineCompute
from entresol_daemon.config import Config, FlashConfig, LimitsConfig
from entresol_daemon.config_memory import MemoryConfig
from entresol_daemon.flash.device import aligned_buffer
from entresol_daemon.flash.engine import Engine, EngineOptions
from entresol_daemon.flash.sim import FaultPlan, SimDevice
from entresol_daemon.keys.keyring import Keyring
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.metrics import Metrics
from entresol_daemon.shard.dispatch import SessionHandler
from entresol_daemon.shard.shard import Shard, Surroundings
from entresol_proto.fabric.base import (
    Capabilities,
    Endpoint,
    Exposure,
    FabricKind,
    Offer,
    ReadOp,
    RemoteSpan,
)
from entresol_proto.ids import EngineKey, NamespaceDescriptor, TenantName, pack_token_ids, wire_key
from entresol_proto.seal import block
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import EntresolError, ProtocolError, Status
from entresol_proto.wire import data, opening
from entresol_proto.wire.session import ClientSession, State
from tests.flashlab import stock_faults
from tests.simloop import SimLoop

SEGMENT_BYTES = 1 << 20
SECOND_NS = 1_000_000_000


class SimBuffer:
    """Memory of a simulated slab."""

    def __init__(self, length_bytes: int) -> None:
        self.view = aligned_buffer(length_bytes)[:length_bytes]

    def close(self) -> None:
        self.view = memoryview(b"")


@dataclass(slots=True)
class LinkFaults:
    """How bad the network is; all are chances per occasion."""

    read_fails: float = 0.0  # one op of a fabric read
    bit_flips: float = 0.0  # in bytes a host reads
    cut: float = 0.0  # the link, per piece of the control stream


class Wire:
    """Both ends of one session's data path."""

    def __init__(self, rng: random.Random, faults: LinkFaults, *, private: bool) -> None:
        self.rng = rng
        self.faults = faults
        self.up = True
        self.private = private
        self.exposed: tuple[dict[int, memoryview], dict[int, memoryview]] = ({}, {})
        self.daemon = SimEndpoint(self, 0)
        self.host = SimEndpoint(self, 1)


class SimEndpoint:
    """One end of a `Wire`. The daemon is side 0.

    Bit flips only hit sealed bytes that a host reads: a put's bytes are not opened before they are
    stored, so a flip there is a lost block, and plaintext only travels on fabrics that protect it.
    """

    kind = FabricKind.TCP

    def __init__(self, wire: Wire, side: int) -> None:
        self._wire = wire
        self._side = side
        self.capabilities = Capabilities(
            revokes=True, private=wire.private, same_host=False, maps=False
        )

    async def expose(self, buffer: Any) -> Exposure:
        await asyncio.sleep(0)
        view = buffer if isinstance(buffer, memoryview) else buffer.view
        mine = self._wire.exposed[self._side]
        rkey = self._wire.rng.randrange(1, 2**32)
        mine[rkey] = view
        return Exposure(rkey, 0, view.nbytes)

    async def revoke(self, exposure: Exposure) -> None:
        self._wire.exposed[self._side].pop(exposure.rkey, None)

    async def read(self, ops: Sequence[ReadOp], deadline_ns: int) -> list[Status]:
        loop = asyncio.get_running_loop()
        rng, faults = self._wire.rng, self._wire.faults
        statuses = []
        for op in ops:
            await asyncio.sleep(rng.uniform(0, 0.002))
            peer = self._wire.exposed[1 - self._side].get(op.span.rkey)
            end = op.span.address + op.span.length_bytes
            if not self._wire.up:
                statuses.append(Status.DISCONNECTED)
            elif int(loop.time() * 1e9) >= deadline_ns:
                statuses.append(Status.DEADLINE)
            elif peer is None:
                statuses.append(Status.LEASE_EXPIRED)
            elif end > peer.nbytes or op.into.nbytes != op.span.length_bytes:
                statuses.append(Status.BAD_REQUEST)
            elif rng.random() < faults.read_fails:
                op.into[: op.into.nbytes // 2] = rng.randbytes(op.into.nbytes // 2)
                statuses.append(Status.FABRIC_ERROR)
            else:
                op.into[:] = peer[op.span.address : end]
                if self._side == 1 and not self._wire.private and rng.random() < faults.bit_flips:
                    op.into[rng.randrange(op.into.nbytes)] ^= 1 << rng.randrange(8)
                statuses.append(Status.OK)
        return statuses

    async def close(self) -> None:
        self._wire.up = False
        self._wire.exposed[self._side].clear()


class SimFabric:
    """The daemon's side of the simulated fabric: hands out the wires that hosts brought."""

    kind = FabricKind.TCP

    def __init__(self) -> None:
        self._wires: dict[bytes, Wire] = {}
        self._next = 0

    async def start(self) -> None:
        pass

    def offer(self, *, peer: object | None = None) -> Offer:
        self._next += 1
        return Offer(self.kind, self._next.to_bytes(8, "little"))

    def bring(self, offer: Offer, wire: Wire) -> None:
        self._wires[offer.params] = wire

    async def accept(self, offer: Offer, reply: bytes, deadline_ns: int) -> Endpoint:
        return self._wires.pop(offer.params).daemon

    def withdraw(self, offer: Offer) -> None:
        self._wires.pop(offer.params, None)

    async def close(self) -> None:
        self._wires.clear()


@dataclass(slots=True)
class Oracle:
    """What must hold, kept outside of everything under test."""

    seed: int
    tried: int = 0
    wrong_bytes: int = 0
    served: int = 0
    durable: set[tuple[str, bytes]] = field(default_factory=set)
    forgotten: set[tuple[str, bytes]] = field(default_factory=set)
    offered: set[tuple[str, bytes]] = field(default_factory=set)
    changes: dict[tuple[str, bytes], int] = field(default_factory=dict)
    trace: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def content(self, tenant: str, key: bytes) -> bytes:
        """The one content a key can have for a tenant: 1 byte to about 40 KiB."""
        seeded = random.Random(tenant.encode() + key)
        return seeded.randbytes(seeded.choice((1, 4095, 4096, 9000, 20_000, 40_000)))

    def begin(self, tenant: str, keys: Sequence[bytes]) -> dict[tuple[str, bytes], int]:
        """A put or forget of these keys starts: what was known of them no longer is."""
        for key in keys:
            place = (tenant, key)
            self.changes[place] = self.changes.get(place, 0) + 1
            self.durable.discard(place)
            self.forgotten.discard(place)
        return {(tenant, key): self.changes[(tenant, key)] for key in keys}

    def alone(self, begun: dict[tuple[str, bytes], int], key: tuple[str, bytes]) -> bool:
        """True if nothing else touched the key since `begin`, so that the answer is the truth.

        Ends the operation: whatever overlapped with it learns nothing, nor has it learned before.
        """
        alone = self.changes[key] == begun[key]
        self.changes[key] += 1
        if not alone:
            self.durable.discard(key)
            self.forgotten.discard(key)
        return alone

    def note(self, *what: object) -> None:
        """One line of the run's trace; equal seeds give equal traces."""
        self.trace.update(repr(what).encode())

    def saw(self, tenant: str, key: bytes, raw: bytes) -> None:
        """A get was answered OK with these bytes."""
        self.served += 1
        if raw != self.content(tenant, key) or (tenant, key) not in self.offered:
            self.wrong_bytes += max(1, len(raw))


class World:
    """A shard over a simulated device; `crash` and `reopen` as often as wanted."""

    def __init__(
        self, folder: Path, seed: int, *, segments: int = 48, plan: FaultPlan | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.oracle = Oracle(seed)
        self.folder = folder
        self.fabric = SimFabric()
        self.faults = LinkFaults()
        self.size_bytes = 64 * 1024 + segments * SEGMENT_BYTES
        self.device = SimDevice(
            self.size_bytes, seed=seed, plan=plan or FaultPlan(), sleep=asyncio.sleep
        )
        self.config = replace(
            Config(),
            flash=FlashConfig(size_bytes=self.size_bytes, segment_bytes=SEGMENT_BYTES),
            memory=MemoryConfig(dram_bytes=8 << 20, slab_bytes=2 << 20),
            limits=LimitsConfig(
                block_bytes_max=256 * 1024,
                lease_ns=SECOND_NS // 2,
                inflight_bytes_per_session_max=2 << 20,
                put_queue_bytes_max=4 << 20,
            ),
        )
        self.incarnation = 0
        self.scrub_file: Path | None = None
        self.shard: Shard
        self.hosts: list[Host] = []

    async def open(self, tenants: Sequence[str], *, locked: bool = False) -> None:
        """Format or recover the device and start a shard over it; `locked`: without the KEK."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.incarnation += 1
        kek = None if locked else FileKek(bytes(range(32)))
        self.keyring = Keyring.open(self.folder, kek, random=self.rng.randbytes)
        for name in tenants:
            if self.keyring.info(name) is None:
                self.keyring.add_tenant(name, now_unix_s=1)
        engine = await Engine.open(
            self.device,
            EngineOptions(
                segment_bytes=SEGMENT_BYTES, blocks_max=20_000, group_commit_ns=2_000_000,
                group_commit_bytes=256 * 1024,
            ),
            compute=InlineCompute(), now_ns=loop.now_ns, random_bytes=self.rng.randbytes,
        )  # fmt: skip
        self.shard = await Shard.open(
            self.config,
            engine=engine,
            keyring=self.keyring,
            compute=InlineCompute(),
            metrics=Metrics(),
            fabrics={FabricKind.TCP: self.fabric},
            surroundings=Surroundings(
                make_buffer=SimBuffer, make_private=SimBuffer, host_id=bytes(16),
                now_ns=loop.now_ns, unix_ns=loop.now_ns, scrub_file=self.scrub_file,
            ),
            incarnation=self.incarnation,
        )  # fmt: skip

    async def crash(self) -> None:
        """Power loss: whatever was not flushed may be gone; hosts lose their sessions."""
        self.device = self.device.crash(seed=self.rng.randrange(2**32))
        for host in self.hosts:
            host.cut()
        await self._stop(clean=False)

    async def stop(self) -> None:
        """A clean stop."""
        for host in self.hosts:
            host.cut()
        await self._stop(clean=True)

    async def _stop(self, *, clean: bool) -> None:
        for host in self.hosts:
            await host.gone()
        self.hosts.clear()
        await self.shard.close(clean=clean)
        self.keyring.close()

    def check_idle(self) -> None:
        """With no session left nothing may be held, and the books agree with the index."""
        parts = self.shard.parts
        assert not self.shard.sessions, "a session is left"
        assert len(parts.leases) == 0, "a lease is left"
        assert parts.held.leases.used == 0, "a lease is left in the books"
        assert parts.held.get_bytes.used == 0, "leased bytes are left in the books"
        assert parts.put_budget.used_blocks == 0, "a put is left"
        assert parts.put_budget.used_bytes == 0, "put bytes are left"
        assert self.shard.gets.loading == 0, "a load is left"
        assert not stock_faults(parts.engine), stock_faults(parts.engine)
        index = parts.engine.index
        for slot in index.live_slots().tolist():
            resident = parts.residency.get(slot)
            assert resident is None or resident.pins == 0, "a pin is left"
        for account in parts.accounts.by_name.values():
            live = sum(
                info.live_bytes for info in parts.engine.segments() if info.stream == account.stream
            )
            assert account.flash_bytes == live, (account.name, account.flash_bytes, live)
        assert parts.scratch.allocated_bytes == 0, "plaintext scratch is left"
        pool = parts.residency.pool
        known = sum(each.extent.length_bytes for each in parts.residency._by_slot.values())
        assert pool.allocated_bytes == known, "memory of a block that is gone is left"


class Host:
    """One simulated host with one session. Every call returns statuses, an outage included."""

    def __init__(
        self, world: World, tenant: str, *, private: bool = False, careful: bool = False
    ) -> None:
        """A `careful` host never dawdles and gives every lease back."""
        self.world = world
        self.careful = careful
        self.tenant = tenant
        self.rng = random.Random(world.rng.randrange(2**63))
        self.wire = Wire(self.rng, world.faults, private=private)
        self._loop = asyncio.get_running_loop()
        self._machine = ClientSession(now_ns=self._now())
        self._handler = SessionHandler(
            world.shard, TenantName(tenant), write=self._to_host, close=self.cut
        )
        self._waiting: dict[int, asyncio.Queue[Any]] = {}
        self._clock = {"up": 0.0, "down": 0.0}
        self._up = True
        self._finished: asyncio.Task[None] | None = None
        self.handle = 0
        self.secret = b""
        self.namespace_id = b""
        world.hosts.append(self)

    def _now(self) -> int:
        return int(asyncio.get_running_loop().time() * 1e9)

    # The link: ordered, in random pieces, late.

    def _carry(self, way: str, raw: bytes, deliver: Any) -> None:
        at = 0
        while at < len(raw):
            size = self.rng.choice((1, 7, 64, 1500, 65_536))
            piece, at = raw[at : at + size], at + size
            when = max(self._clock[way], self._loop.time()) + self.rng.uniform(0, 0.0005)
            self._clock[way] = when
            self._loop.call_at(when, deliver, piece)

    def _send(self, message: Any) -> int:
        request_id, raw = self._machine.send(message)
        self._carry("up", raw, self._arrive_at_daemon)
        return request_id

    def _arrive_at_daemon(self, piece: bytes) -> None:
        if self._up and self.rng.random() < self.world.faults.cut:
            self.cut()
        if self._up:
            self._handler.receive(piece)

    def _to_host(self, raw: bytes) -> None:
        self._carry("down", raw, self._arrive_at_host)

    def _arrive_at_host(self, piece: bytes) -> None:
        if not self._up:
            return
        try:
            received = self._machine.receive(piece, self._now())
        except ProtocolError:
            self.cut()
            raise
        for item in received:
            queue = self._waiting.get(item.request_id)
            if queue is not None:
                queue.put_nowait(item.message)

    def cut(self) -> None:
        """The link breaks, both sides notice."""
        if not self._up:
            return
        self._up = False
        self.wire.up = False
        for queue in self._waiting.values():
            queue.put_nowait(None)
        self._finished = self._loop.create_task(self._handler.finish())

    async def gone(self) -> None:
        """Cut, and wait until the daemon has cleaned up."""
        self.cut()
        assert self._finished is not None
        await self._finished

    async def _call(self, message: Any) -> Any:
        """The first answer. Raises: EntresolError for an ERROR or a broken link."""
        async for answer in self._answers(message):
            return answer
        raise AssertionError("no answer and no error")

    async def _answers(self, message: Any) -> Any:
        if not self._up:
            raise EntresolError("cut", status=Status.DISCONNECTED)
        request_id = self._send(message)
        queue = self._waiting[request_id] = asyncio.Queue()
        try:
            while True:
                answer = await queue.get()
                if answer is None:
                    raise EntresolError("cut", status=Status.DISCONNECTED)
                if isinstance(answer, opening.ErrorReply):
                    raise EntresolError(answer.message, status=answer.status)
                yield answer
                if getattr(answer, "final", True):
                    return
        finally:
            del self._waiting[request_id]

    # The protocol.

    async def open(self, salt: str = "s") -> None:
        """Open session, data path and one namespace."""
        welcome = await self._call(opening.Hello(1, opening.PROTOCOL_MAX, bytes(16), 2, "sim"))
        offer = welcome.offers[0]
        self.world.fabric.bring(offer, self.wire)
        await self._call(opening.Attach(offer.kind))
        descriptor = NamespaceDescriptor(model="sim", cache_salt=salt)
        opened = await self._call(opening.OpenNamespace(descriptor.canonical()))
        self.handle, self.secret, self.namespace_id = (
            opened.handle, opened.secret, opened.namespace_id,
        )  # fmt: skip
        self.at_host = opened.seal_at_host

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [wire_key(self.secret, EngineKey(key)) for key in keys]

    async def put(self, keys: Sequence[bytes], ack: data.Ack) -> list[Status]:
        """Store the content of keys, in order."""
        oracle = self.world.oracle
        contents = [oracle.content(self.tenant, key) for key in keys]
        tokens = pack_token_ids((1, 2, 3))
        items = tuple(
            data.PutItem(name, key, len(plain), at, keys[at - 1] if at else b"", tokens)
            for at, (name, key, plain) in enumerate(
                zip(self._names(keys), keys, contents, strict=True)
            )
        )
        oracle.offered.update((self.tenant, key) for key in keys)
        begun = oracle.begin(self.tenant, keys)
        statuses = [Status.DISCONNECTED] * len(keys)
        try:
            reserved = await self._call(data.Reserve(self.handle, ack, 5 * SECOND_NS, items))
            spans, places = [], []
            for at, answer in enumerate(reserved.items):
                statuses[at] = answer.status
                if answer.status is Status.OK:
                    spans.append(
                        (answer.put_id, await self._expose(items[at], answer, contents[at]))
                    )
                    places.append(at)
            if spans:
                done = await self._call(data.Commit(tuple(spans)))
                for at, status in zip(places, done.statuses, strict=True):
                    statuses[at] = status
        except EntresolError as error:
            statuses = [error.status if s is Status.OK else s for s in statuses]
        for key, status in zip(keys, statuses, strict=True):
            alone = oracle.alone(begun, (self.tenant, key))
            if alone and ack is data.Ack.DURABLE and status in (Status.OK, Status.EXISTS):
                oracle.durable.add((self.tenant, key))
        oracle.note("put", self.tenant, [s.label for s in statuses])
        return statuses

    async def _expose(
        self, item: data.PutItem, answer: data.Reserved.Item, plain: bytes
    ) -> RemoteSpan:
        raw = memoryview(bytearray(plain))
        if self.at_host:
            room = memoryview(bytearray(block.sealed_bytes_max(len(plain), meta_tokens=3)))
            header = block.seal_into(
                room,
                raw,
                identity=block.BlockIdentity(
                    self.namespace_id, item.key, item.engine_key, DType.BF16, answer.dek_version
                ),
                block_key=block.BlockKey(answer.key, answer.commitment),
                salt=answer.salt,
                codec_id=self.rng.choice((0, 1, 2)),
                meta=block.BlockMeta(item.parent, item.position, 16, item.token_ids_u32le),
            )
            raw = room[: header.sealed_bytes]
        exposure = await self.wire.host.expose(raw)
        return exposure.span(0, raw.nbytes)

    async def get(
        self, keys: Sequence[bytes], open_at: data.OpenAt, *, carry: bool | None = None
    ) -> list[Status]:
        """Fetch, verify, tell the oracle what came. `carry`: it may come within the grant."""
        if carry is None:
            carry = not self.careful and self.rng.random() < 0.3
        oracle = self.world.oracle
        sizes = [len(oracle.content(self.tenant, key)) for key in keys]
        statuses = [Status.DISCONNECTED] * len(keys)
        names = self._names(keys)
        message = data.Fetch(self.handle, open_at, False, 3 * SECOND_NS, b"".join(names), carry)
        try:
            async for grant in self._answers(message):
                received_ns = self._now()
                for index, status in grant.misses:
                    statuses[index] = status
                reports = []
                for item in grant.items:
                    status = await self._open(
                        item, names[item.index], keys[item.index], sizes[item.index], open_at,
                        received_ns + grant.lease_ns, grant.carried,
                    )  # fmt: skip
                    statuses[item.index] = status
                    if status is not Status.OK:
                        reports.append((grant.lease_id, item.index, status))
                kept = not self.careful and self.rng.random() < 0.1
                if grant.lease_id and self._machine.state is State.OPEN and not kept:
                    self._send(data.Release((grant.lease_id,), tuple(reports)))
        except EntresolError as error:
            statuses = [error.status if s is Status.DISCONNECTED else s for s in statuses]
        oracle.note("get", self.tenant, [s.label for s in statuses])
        return statuses

    async def _open(
        self, item: data.GrantItem, name: bytes, key: bytes, size: int, open_at: data.OpenAt,
        lease_until_ns: int, carried: bytes,
    ) -> Status:  # fmt: skip
        span = item.span
        sealed = memoryview(bytearray(span.length_bytes))
        deadline_ns = self._now() + SECOND_NS
        if not self.careful and self.rng.random() < 0.02:
            await asyncio.sleep(1.0)  # a reader that dawdles past its lease
        if carried:
            sealed = memoryview(carried)[span.address : span.address + span.length_bytes]
            status = Status.OK
        else:
            status = (await self.wire.host.read([ReadOp(span, sealed)], deadline_ns))[0]
        if status is not Status.OK:
            return status
        into = bytearray(size)
        if item.plain_bytes != size:
            return Status.CONFLICT
        if open_at is data.OpenAt.DAEMON:
            if self._now() >= lease_until_ns:
                return Status.LEASE_EXPIRED
            into[:] = sealed
        else:
            status = block.open_into(
                sealed, memoryview(into), namespace_id=self.namespace_id, wire_key=name,
                engine_key=key, block_key=block.BlockKey(item.key, item.commitment),
            )  # fmt: skip
        if status is Status.OK:
            self.world.oracle.saw(self.tenant, key, bytes(into))
        return status

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Drop blocks; those acknowledged must never come back."""
        oracle = self.world.oracle
        begun = oracle.begin(self.tenant, keys)
        done = False
        try:
            await self._call(data.Forget(self.handle, b"".join(self._names(keys))))
            done = True
        except EntresolError:
            pass
        for key in keys:
            if oracle.alone(begun, (self.tenant, key)) and done:
                oracle.forgotten.add((self.tenant, key))

    async def present(self, keys: Sequence[bytes]) -> list[bool]:
        """What EXISTS says. Raises: EntresolError."""
        reply = await self._call(data.Exists(self.handle, b"".join(self._names(keys))))
        return [bool(reply.bitmap[at // 8] >> at % 8 & 1) for at in range(len(keys))]
