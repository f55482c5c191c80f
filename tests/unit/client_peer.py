"""A small daemon for client tests: the real server session, real fabrics and real sealed blocks,
with switches for what a real daemon does only when something is broken.

    async with serving(tmp_path, fabric="shm") as peer:
        client = await AsyncClient.open(peer.config())

Blocks live in one exposed memfd. What is wrong is chosen in `peer.faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import certs

from entresol_client.config import BreakerSettings, ClientConfig, ShardAddress, TlsFiles
from entresol_proto import limits
from entresol_proto.fabric.base import Endpoint, Exposure, FabricServer, Offer, ReadOp, RemoteSpan
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.registry import same_host_id
from entresol_proto.fabric.shm import ShmFabricServer
from entresol_proto.fabric.tcp import TcpFabricServer
from entresol_proto.identity import shard_uri, tenant_uri
from entresol_proto.ids import NamespaceDescriptor, engine_key_digest
from entresol_proto.seal import codecs
from entresol_proto.seal.block import (
    BlockIdentity,
    BlockKey,
    SealedHeader,
    derive_block_key,
    new_salt,
    open_into,
    seal_into,
    sealed_bytes_max,
)
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import ProtocolError, Status
from entresol_proto.wire import data, opening
from entresol_proto.wire.session import Message, ServerSession, State

TRUST = "test"
SECRET = bytes(range(32))
NAMESPACE_ID = bytes(range(16))
DEK = bytes(reversed(range(32)))
SLAB_BYTES = 96 * limits.MIB
DESCRIPTOR = NamespaceDescriptor(model="tiny", dtype="bf16")


@dataclass
class Faults:
    """What goes wrong from now on."""

    silent: bool = False  # take requests, answer nothing
    pings_silent: bool = False
    lease_ns: int = 10_000_000_000
    flip: set[bytes] = field(default_factory=set)  # wire keys whose stored bytes are damaged
    plain_bytes_off: int = 0  # added to the length each grant announces
    swap_engine_key: bool = False  # serve blocks sealed under another engine key
    bad_index: bool = False  # a grant for a block nobody asked for
    repeat_grant: bool = False
    huge_span: bool = False
    garbage: bool = False  # answer the next request with noise
    grant_one_by_one: bool = False
    hold_final: bool = False  # the final GRANT never comes
    carry_unasked: bool = False  # blocks come within the grant, whatever was asked for
    grant_late_s: float = 0.0  # what a GRANT is on its way; its lease has begun
    hold_put_done: bool = False
    refuse: dict[type, Status] = field(default_factory=dict)  # request type -> ERROR


@dataclass
class Stored:
    """One block in the slab."""

    offset: int
    sealed_bytes: int
    plain_bytes: int
    block_key: BlockKey
    engine_key: bytes


class Peer:
    """One shard. `store` is keyed by wire key."""

    def __init__(
        self, folder: Path, ca: certs.TestCA, *, name: str, fabric: str | None, seal_at_host: bool
    ) -> None:
        self.name = name
        self.faults = Faults()
        self.seal_at_host = seal_at_host
        self.protocol = 1  # from 4 on blocks come within the grant where that is asked for
        self.blocks_per_fetch_max = limits.BLOCKS_PER_FETCH_MAX
        self.codec_id = codecs.PLANE
        self.store: dict[bytes, Stored] = {}
        self.seen: list[Any] = []  # every request, in order
        self.sessions: set[PeerSession] = set()
        self.folder = folder
        self.port = 0
        self.slab = MemfdBuffer(SLAB_BYTES)
        self.slab.seal_for_readers()
        self._used = 0
        self._ca = ca
        self._pair = ca.issue(name, spiffe_uri=shard_uri(TRUST, name))
        self._fabric_kind = fabric
        self.fabrics: list[FabricServer] = []
        self._server: asyncio.Server | None = None
        self.reserved: dict[int, tuple[data.PutItem, bytes, BlockKey]] = {}
        self.given_up: list[int] = []

    def config(self, **changes: Any) -> ClientConfig:
        """A client config for this shard alone, with short times."""
        return config_for([self], **changes)

    def address(self) -> ShardAddress:
        return ShardAddress(self.name, "127.0.0.1", self.port)

    def tenant_files(self) -> TlsFiles:
        pair = self._ca.issue("tenant", spiffe_uri=tenant_uri(TRUST, "acme"))
        paths = pair.write(self.folder)
        return TlsFiles(paths.cert, paths.key, paths.ca, TRUST)

    async def start(self) -> None:
        """Listen; on the port it had before, when it is started again."""
        context = certs.server_context(self._pair, self._ca)
        if self._fabric_kind in ("tcp", "tls"):
            tls = context if self._fabric_kind == "tls" else None
            self.fabrics = [TcpFabricServer("127.0.0.1", ssl=tls)]
        elif self._fabric_kind == "shm":
            directory = self.folder / f"s-{self.name}"
            self.fabrics = [ShmFabricServer(directory), TcpFabricServer("127.0.0.1")]
        for fabric in self.fabrics:
            await fabric.start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: PeerSession(self), "127.0.0.1", self.port, ssl=context
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Like a process that ends: everything is cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for session in list(self.sessions):
            await session.stop()
        for fabric in self.fabrics:
            await fabric.close()
        self.fabrics = []

    def place(self, length_bytes: int) -> int:
        offset = self._used
        self._used += -(-length_bytes // 4096) * 4096
        assert self._used <= SLAB_BYTES, "the test's slab is full"
        return offset

    def add(self, wire_key: bytes, engine_key: bytes, plain: bytes) -> None:
        """Store a block as if it had been put."""
        salt = new_salt()
        key = derive_block_key(DEK, salt)
        room = sealed_bytes_max(len(plain), engine_key_bytes=len(engine_key))
        offset = self.place(room)
        header = seal_into(
            self.slab.view[offset : offset + room],
            memoryview(plain),
            identity=BlockIdentity(NAMESPACE_ID, wire_key, engine_key, DType.BF16, 1),
            block_key=key,
            salt=salt,
            codec_id=self.codec_id,
            meta=None,
        )
        self.store[wire_key] = Stored(offset, header.sealed_bytes, len(plain), key, engine_key)

    def plain_of(self, wire_key: bytes) -> bytes:
        """What is stored, opened."""
        stored = self.store[wire_key]
        into = bytearray(stored.plain_bytes)
        status = open_into(
            self.slab.view[stored.offset : stored.offset + stored.sealed_bytes],
            memoryview(into),
            namespace_id=NAMESPACE_ID,
            wire_key=wire_key,
            engine_key=stored.engine_key,
            block_key=stored.block_key,
        )
        assert status is Status.OK, status
        return bytes(into)

    def header_of(self, wire_key: bytes) -> SealedHeader:
        stored = self.store[wire_key]
        return SealedHeader.parse(self.slab.view[stored.offset :])


class PeerSession(asyncio.Protocol):
    """The daemon's side of one session."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.machine = ServerSession(now_ns=time.monotonic_ns())
        self.transport: asyncio.Transport | None = None
        self.endpoint: Endpoint | None = None
        self.offers: list[Offer] = []
        self.exposure: Exposure | None = None
        self.leases: set[int] = set()
        self.reports: list[tuple[int, int, Status]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self._next = 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.peer.sessions.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        task = asyncio.get_running_loop().create_task(self.stop())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def data_received(self, raw: bytes) -> None:
        try:
            received = self.machine.receive(raw, time.monotonic_ns())
        except ProtocolError:
            assert self.transport is not None
            self.transport.abort()
            raise
        for one in received:
            self.peer.seen.append(one.message)
            task = asyncio.get_running_loop().create_task(self._serve(one.request_id, one.message))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def send(self, message: Message, request_id: int = 0) -> None:
        if self.transport is not None and self.machine.state is not State.CLOSED:
            self.transport.write(self.machine.send(message, request_id))

    async def stop(self) -> None:
        self.machine.close()
        me = asyncio.current_task()
        tasks = [task for task in self.tasks if task is not me]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self.transport is not None:
            self.transport.abort()
        if self.endpoint is not None:
            await self.endpoint.close()
        self.peer.sessions.discard(self)

    async def _serve(self, request_id: int, message: Any) -> None:
        faults = self.peer.faults
        if isinstance(message, data.Release):
            self.leases -= set(message.lease_ids)
            self.reports += message.reports
            return
        if isinstance(message, opening.Goodbye) or faults.silent:
            return
        if faults.garbage:
            assert self.transport is not None
            self.transport.write(b"\x16\x03 this is not a frame" * 4)
            return
        if type(message) in faults.refuse:
            status = faults.refuse[type(message)]
            self.send(opening.ErrorReply(status, "refused by the test"), request_id)
            return
        handler: Callable[[int, Any], Any] = getattr(self, f"on_{type(message).__name__.lower()}")
        await handler(request_id, message)

    async def on_hello(self, request_id: int, message: opening.Hello) -> None:
        self.offers = [fabric.offer() for fabric in self.peer.fabrics]
        self.send(
            opening.Welcome(
                self.peer.protocol, bytes(16), 7, 10**10, limits.FRAME_PAYLOAD_BYTES_MAX,
                limits.BLOCK_BYTES_MAX, self.peer.blocks_per_fetch_max,
                limits.REQUESTS_IN_FLIGHT_MAX, same_host_id(),
                self.peer.name, "acme", tuple(self.offers),
            ),
            request_id,
        )  # fmt: skip

    async def on_attach(self, request_id: int, message: opening.Attach) -> None:
        for fabric, offer in zip(self.peer.fabrics, self.offers, strict=True):
            if offer.kind == message.kind:
                deadline_ns = time.monotonic_ns() + 5 * 10**9
                self.endpoint = await fabric.accept(offer, message.reply, deadline_ns)
        self.send(opening.Attached(message.kind), request_id)

    async def on_opennamespace(self, request_id: int, message: opening.OpenNamespace) -> None:
        self.send(
            opening.NamespaceOpened(
                1, NAMESPACE_ID, SECRET, self.peer.codec_id, self.peer.seal_at_host, 64 * 1024
            ),
            request_id,
        )

    async def on_ping(self, request_id: int, message: opening.Ping) -> None:
        if not self.peer.faults.pings_silent:
            self.send(opening.Pong(message.token), request_id)

    async def on_fetch(self, request_id: int, message: data.Fetch) -> None:
        faults, peer = self.peer.faults, self.peer
        assert self.endpoint is not None
        if self.exposure is None:
            self.exposure = await self.endpoint.expose(peer.slab)
        items: list[data.GrantItem] = []
        misses: list[tuple[int, Status]] = []
        gap = False
        for index, key in enumerate(data.split_keys(message.keys)):
            if gap or key not in peer.store:
                misses.append((index, Status.GAP if gap else Status.MISS))
                gap = message.prefix
                continue
            items.append(self._item(index, key, message.open_at))
        if faults.carry_unasked or (message.carry and peer.protocol >= opening.PROTOCOL_CARRY):
            await asyncio.sleep(faults.grant_late_s)
            self.send(self._carried(items, misses), request_id)
            return
        if faults.bad_index:
            items = [replace(item, index=item.index + 1000) for item in items]
        parts = [[item] for item in items] if faults.grant_one_by_one else [items]
        if faults.repeat_grant:
            parts *= 2
        for number, part in enumerate(parts):
            final = number == len(parts) - 1 and not faults.hold_final
            lease_id, self._next = self._next, self._next + 1
            self.leases.add(lease_id)
            expires_ns = time.monotonic_ns() + faults.lease_ns
            grant = data.Grant(
                final, lease_id, faults.lease_ns, expires_ns, tuple(part),
                tuple(misses) if final else (),
            )  # fmt: skip
            if faults.grant_late_s:
                await asyncio.sleep(faults.grant_late_s)
            self.send(grant, request_id)

    def _carried(self, items: list[data.GrantItem], misses: list[tuple[int, Status]]) -> data.Grant:
        parts: list[bytes] = []
        carried: list[data.GrantItem] = []
        for item in items:
            span, at = item.span, sum(map(len, parts))
            parts.append(
                bytes(self.peer.slab.view[span.address : span.address + span.length_bytes])
            )
            carried.append(replace(item, span=RemoteSpan(0, at, span.length_bytes)))
        return data.Grant(True, 0, 0, 0, tuple(carried), tuple(misses), b"".join(parts))

    def _item(self, index: int, key: bytes, open_at: data.OpenAt) -> data.GrantItem:
        faults, peer = self.peer.faults, self.peer
        stored = peer.store[key]
        assert self.exposure is not None
        if key in faults.flip:
            peer.slab.view[stored.offset + stored.sealed_bytes - 5] ^= 0x40
            faults.flip.discard(key)
        offset, length = stored.offset, stored.sealed_bytes
        granted, commitment = stored.block_key.key, stored.block_key.commitment
        if open_at is data.OpenAt.DAEMON:
            plain = peer.plain_of(key)
            offset, length = peer.place(len(plain)), len(plain)
            peer.slab.view[offset : offset + length] = plain
            granted, commitment = engine_key_digest(stored.engine_key), bytes(16)
        if faults.huge_span:
            length = SLAB_BYTES - offset
        return data.GrantItem(
            index, data.Tier.MEMORY, self.exposure.span(offset, length),
            stored.plain_bytes + faults.plain_bytes_off,
            granted, commitment,
        )  # fmt: skip

    async def on_reserve(self, request_id: int, message: data.Reserve) -> None:
        answers = []
        for item in message.items:
            if item.key in self.peer.store:
                answers.append(data.Reserved.Item(Status.EXISTS))
                continue
            salt = new_salt()
            key = derive_block_key(DEK, salt)
            put_id, self._next = self._next, self._next + 1
            self.peer.reserved[put_id] = (item, salt, key)
            answers.append(data.Reserved.Item(Status.OK, 1, put_id, salt, key.key, key.commitment))
        self.send(data.Reserved(tuple(answers)), request_id)

    async def on_commit(self, request_id: int, message: data.Commit) -> None:
        statuses = []
        for put_id, span in message.items:
            item, salt, key = self.peer.reserved.pop(put_id)
            if span.length_bytes == 0:
                self.peer.given_up.append(put_id)
                statuses.append(Status.OK)
                continue
            statuses.append(await self._take(item, salt, key, span))
        if not self.peer.faults.hold_put_done:
            self.send(data.PutDone(tuple(statuses)), request_id)

    async def _take(
        self, item: data.PutItem, salt: bytes, key: BlockKey, span: RemoteSpan
    ) -> Status:
        assert self.endpoint is not None
        into = bytearray(span.length_bytes)
        op = ReadOp(span, memoryview(into))
        (status,) = await self.endpoint.read([op], time.monotonic_ns() + 5 * 10**9)
        if status is not Status.OK:
            return status
        if not self.peer.seal_at_host:
            self.peer.add(item.key, item.engine_key, bytes(into))
            return Status.OK
        header = SealedHeader.parse(into)
        assert header.salt == salt
        assert header.engine_key == item.engine_key
        offset = self.peer.place(len(into))
        self.peer.slab.view[offset : offset + len(into)] = bytes(into)
        self.peer.store[item.key] = Stored(
            offset, len(into), header.plain_bytes, key, item.engine_key
        )
        return Status.OK

    async def on_exists(self, request_id: int, message: data.Exists) -> None:
        found = [key in self.peer.store for key in data.split_keys(message.keys)]
        bits = bytearray(-(-len(found) // 8))
        for index, here in enumerate(found):
            bits[index // 8] |= here << index % 8
        prefix = found.index(False) if False in found else len(found)
        self.send(data.ExistsReply(prefix, bytes(bits)), request_id)

    async def on_touch(self, request_id: int, message: data.Touch) -> None:
        count = sum(key in self.peer.store for key in data.split_keys(message.keys))
        self.send(data.Done(count), request_id)

    async def on_forget(self, request_id: int, message: data.Forget) -> None:
        keys = data.split_keys(message.keys)
        count = sum(self.peer.store.pop(key, None) is not None for key in keys)
        self.send(data.Done(count), request_id)

    async def on_stage(self, request_id: int, message: data.Stage) -> None:
        keys = data.split_keys(message.keys)
        found = [Status.OK if key in self.peer.store else Status.MISS for key in keys]
        self.send(data.Staged(tuple(found)), request_id)

    async def on_explain(self, request_id: int, message: data.Explain) -> None:
        here = {stored.engine_key for stored in self.peer.store.values()}
        rows = [
            (data.Reason.IN_MEMORY if key in here else data.Reason.NEVER_STORED, 0)
            for key in message.engine_keys
        ]
        self.send(data.Explained(tuple(rows)), request_id)


def config_for(peers: list[Peer], **changes: Any) -> ClientConfig:
    """A client config for these shards, with times fit for tests."""
    settings: dict[str, Any] = {
        "shards": tuple(peer.address() for peer in peers),
        "tls": peers[0].tenant_files(),
        "deadline_ns": 5_000_000_000,
        "connect_deadline_ns": 2_000_000_000,
        "ping_interval_ns": 50_000_000,
        "ping_deadline_ns": 200_000_000,
        "staging_bytes_max": 64 * limits.MIB,
        "breaker": BreakerSettings(3, 20_000_000, 200_000_000),
    }
    return ClientConfig(**{**settings, **changes})


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    fabric: str | None = "tcp",
    seal_at_host: bool = True,
    names: tuple[str, ...] = ("shard0",),
) -> AsyncIterator[Any]:
    """One peer, or a list of them when several names are given."""
    ca = certs.make_ca()
    peers = [
        Peer(folder, ca, name=name, fabric=fabric, seal_at_host=seal_at_host) for name in names
    ]
    try:
        for peer in peers:
            await peer.start()
        yield peers[0] if len(peers) == 1 else peers
    finally:
        for peer in peers:
            await peer.stop()
            peer.slab.close()
