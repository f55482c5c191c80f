"""Two tenants of one real daemon, each with every way in: what the lines about isolation share.

Invariant: a question is put by both, the tenant whose blocks these are and the other, with the very
same bytes wherever a stranger could have them. A test of refusals alone would pass with the store
switched off.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import uvloop

from entresol_client.client import AsyncClient, Namespace
from entresol_client.connection import Connection
from entresol_client.results import PutBlock
from entresol_proto.fabric.base import ReadOp, RemoteSpan
from entresol_proto.fabric.registry import same_host_id
from entresol_proto.identity import client_ssl_context
from entresol_proto.ids import EngineKey, NamespaceDescriptor, wire_key
from entresol_proto.limits import KIB, MIB
from entresol_proto.seal.block import BlockKey, open_into
from entresol_proto.status import Status
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg
from entresol_proto.wire.data import Fetch, Grant, OpenAt
from entresol_proto.wire.opening import Hello, NamespaceOpened, Welcome
from tests.daemon.daemon_lab import Raw, client_of, raw_of, shape
from tests.harness import Running, running_daemon

T = TypeVar("T")

OWN, OTHER = "dev", "other"
BLOCK_BYTES = 512
TOKENS = 16
DEADLINE_NS = 60_000_000_000
# The same for both: only the certificate differs. Without a salt, so that relays publish it.
DESCRIPTOR = NamespaceDescriptor(model="lab/model", block_tokens=TOKENS, page_layout="vllm:lab")


def chain(seed: int, blocks: int, name: str = "") -> list[PutBlock]:
    """Blocks of one prompt, under keys as vLLM makes them; the content depends on the key."""
    made: list[PutBlock] = []
    rng = random.Random(f"{name}/{seed}")
    for at in range(blocks):
        before = made[-1].key if made else None
        tokens = tuple(rng.randrange(1, 2**17) for _ in range(TOKENS))
        key = hashlib.sha256((before or b"") + repr((name, seed, tokens)).encode()).digest()
        made.append(PutBlock(key, content(key), at, before, tokens))
    return made


def content(key: bytes, mark: bytes = b"") -> bytes:
    """What a block of this key holds."""
    return hashlib.shake_128(key + mark).digest(BLOCK_BYTES)


def wire_keys(space: NamespaceOpened, keys: Sequence[bytes]) -> bytes:
    """A run of wire keys, as FETCH and its kin want them."""
    return b"".join(wire_key(space.secret, EngineKey(key)) for key in keys)


def soon(seconds: float = 60.0) -> int:
    """A deadline that only a hang meets."""
    return time.monotonic_ns() + int(seconds * 1e9)


@dataclass
class Session:
    """One raw session with its namespace open."""

    raw: Raw
    space: NamespaceOpened

    async def ask(self, message: Any) -> Any:
        """One request, its answer. Raises: RequestFailedError."""
        return await self.raw.ask(message)

    async def fetch(
        self,
        keys: bytes,
        *,
        open_at: OpenAt = OpenAt.HOST,
        prefix: bool = False,
        carry: bool = False,
    ) -> list[Grant]:
        """All grants; nothing is released."""
        message = Fetch(self.space.handle, open_at, prefix, DEADLINE_NS, keys, carry)
        request_id, sink = await self.raw.connection.fetch(message, soon())
        grants: list[Grant] = []
        try:
            while found := await sink.next(soon()):
                grants += [grant for grant, _ in found]
        finally:
            self.raw.connection.end_fetch(request_id, sink)
        return grants

    async def read(self, spans: Sequence[RemoteSpan]) -> list[tuple[Status, bytes]]:
        """What the data path gives for each span; bytes are only told where there are any."""
        buffers = [bytearray(span.length_bytes) for span in spans]
        ops = [ReadOp(s, memoryview(b)) for s, b in zip(spans, buffers, strict=True)]
        statuses = await self.raw.endpoint.read(ops, soon())
        return [(s, bytes(b)) for s, b in zip(statuses, buffers, strict=True)]

    def release(self, grants: Sequence[Grant]) -> None:
        """Give the leases back."""
        for grant in grants:
            if grant.lease_id:
                self.raw.connection.release(grant.lease_id)


@dataclass
class Watcher:
    """Follows a tenant's events over gRPC."""

    call: Any
    wire_keys: set[bytes] = field(default_factory=set)
    tenants: set[str] = field(default_factory=set)
    last_seq: int = 0
    task: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        """Until cancelled."""
        while reply := await self.call.read():
            if reply is grpc.aio.EOF:
                return
            for event in reply.events:
                self.wire_keys.update(event.wire_keys)
                self.tenants.add(event.tenant)
                self.last_seq = max(self.last_seq, event.seq)


@dataclass
class Side:
    """One tenant: sessions over shm and tcp, the client, gRPC, the events it is told."""

    name: str
    shm: Session
    tcp: Session
    client: AsyncClient
    space: Namespace
    channel: Any
    watcher: Watcher


@dataclass
class Room:
    """A daemon and its two tenants."""

    running: Running
    own: Side
    other: Side
    relays: dict[str, Any] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def session_of(running: Running, tenant: str, fabric: str) -> AsyncIterator[Session]:
    """A raw session and the namespace every tenant here uses."""
    async with raw_of(running, tenant, fabric) as raw:
        yield Session(raw, await raw.namespace(DESCRIPTOR))


@contextlib.asynccontextmanager
async def side_of(running: Running, tenant: str) -> AsyncIterator[Side]:
    """Everything a tenant can open."""
    async with (
        session_of(running, tenant, "shm") as shm,
        session_of(running, tenant, "tcp") as tcp,
        client_of(running, tenant, "shm") as client,
        channel_of(running, tenant) as channel,
    ):
        watcher = Watcher(pbg.EventsStub(channel).Watch(pb.WatchRequest()))
        await watcher.call.read()  # confirms the position
        watcher.task = asyncio.create_task(watcher.follow())
        try:
            space = await client.namespace(DESCRIPTOR)
            yield Side(tenant, shm, tcp, client, space, channel, watcher)
        finally:
            watcher.call.cancel()
            watcher.task.cancel()
            await asyncio.gather(watcher.task, return_exceptions=True)


@contextlib.asynccontextmanager
async def channel_of(running: Running, tenant: str) -> AsyncIterator[Any]:
    """gRPC under the tenant's certificate."""
    tls = running.client_config(tenant).tls
    credentials = grpc.ssl_channel_credentials(
        tls.ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
    )
    address = f"localhost:{running.daemon.grpc.port}"
    async with grpc.aio.secure_channel(address, credentials) as channel:
        yield channel


@contextlib.asynccontextmanager
async def room_in(folder: Path, *, tls: bool = False, **options: Any) -> AsyncIterator[Room]:
    """A daemon in this process with both tenants connected; `tls`: on the tcp data path, too."""
    options = {"dram": 64 * MIB, "slab": 2 * MIB, "flash": 128 * MIB, "segment": 8 * MIB,
               "block_max": 1 * MIB, **options}  # fmt: skip
    change = shape(fabrics=("shm", "tcp"), tcp_tls=tls, **options)
    async with (
        running_daemon(folder, change, tenants=(OWN, OTHER)) as running,
        side_of(running, OWN) as own,
        side_of(running, OTHER) as other,
    ):
        yield Room(running, own, other)


@contextlib.asynccontextmanager
async def half_open(running: Running, tenant: str) -> AsyncIterator[tuple[Connection, Welcome]]:
    """A session that was offered its data paths and took none yet."""
    config = running.client_config(tenant)
    context = client_ssl_context(config.tls.cert, config.tls.key, config.tls.ca)
    shard = config.shards[0]
    _, connection = await asyncio.get_running_loop().create_connection(
        Connection, shard.host, shard.port, ssl=context
    )
    try:
        welcome = await connection.request(Hello(1, 1, same_host_id(), 1, "proof"), soon())
        yield connection, welcome
    finally:
        await connection.close()


def opened(session: Session, key: bytes, item: Any, sealed: bytes) -> bytes | None:
    """The plaintext of a granted block, verified as a host does; None when it does not open."""
    into = bytearray(item.plain_bytes)
    status = open_into(
        memoryview(sealed), memoryview(into), namespace_id=session.space.namespace_id,
        wire_key=wire_key(session.space.secret, EngineKey(key)), engine_key=key,
        block_key=BlockKey(item.key, item.commitment),
    )  # fmt: skip
    return bytes(into) if status is Status.OK else None


async def eventually(check: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait until `check()` holds. Raises: AssertionError after `seconds`."""
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, f"{what} did not come true in {seconds} s"
        await asyncio.sleep(0.002)


class RelayTap:
    """`entresol relay` of one tenant in a thread, and a reader on its socket."""

    def __init__(self, running: Running, tenant: str) -> None:
        import zmq

        from entresol_client.relay.service import Options, Relay
        from entresol_client.relay.workers import Worker

        config = running.client_config(tenant)
        workers = (Worker("pod0", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),)
        options = Options(workers=workers, match={"model": DESCRIPTOR.model}, hashes_as_bytes=True)
        self._again = zmq.Again
        self._noblock = zmq.NOBLOCK
        self.relay = Relay(options, lambda: config, model=DESCRIPTOR.model)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(self.relay.publisher.endpoints(self.relay.publisher.outlets[0])[0])
        self.heard = bytearray()
        self.failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    async def start(self) -> None:
        """Until it has its reader."""
        self._thread.start()
        await eventually(lambda: self.relay.publisher.outlets[0].readers > 0, "a reader")

    def _run(self) -> None:
        try:
            self.relay.run()
        except BaseException as error:
            self.failed.append(error)

    def hear(self) -> bytes:
        """Everything published since `forget`."""
        with contextlib.suppress(self._again):
            while True:
                self.heard += self._socket.recv_multipart(self._noblock)[-1]
        return bytes(self.heard)

    def forget(self) -> None:
        """Begin anew."""
        self.hear()
        self.heard.clear()

    async def close(self) -> None:
        """Stop the relay, close the sockets. Raises: AssertionError when it had failed."""
        self.relay.stop()
        await asyncio.to_thread(self._thread.join)
        self._socket.close(linger=0)
        self._context.term()
        assert not self.failed, self.failed


@contextlib.asynccontextmanager
async def relays_of(room: Room) -> AsyncIterator[None]:
    """A relay per tenant, each as that tenant."""
    for name in (OWN, OTHER):
        room.relays[name] = RelayTap(room.running, name)
    try:
        for tap in room.relays.values():
            await tap.start()
        yield
    finally:
        for tap in room.relays.values():
            await tap.close()
        room.relays.clear()


def run_on_loop(work: Awaitable[T]) -> T:
    """Run on a loop as the daemon has it."""

    async def whole() -> T:
        return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(whole())


def salted(salt: str | None) -> NamespaceDescriptor:
    """The descriptor under another salt."""
    return replace(DESCRIPTOR, cache_salt=salt)


assert BLOCK_BYTES < 4 * KIB, "a record is one device block: many of them cost little"
