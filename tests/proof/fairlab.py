"""A shard whose flash, fabric, compute threads and event loop all take time, on a virtual clock.

The shard, engine and session machines are the real ones. What they run on has rates instead of
being instant: a device and a link that share their bytes among what is in service, compute threads
that are busy for as long as a block is long, and an event loop that is busy for as long as its work
takes (measured once on one core, rounded up). So shares and latencies come out exact, and the same
for the same seed.

Hosts have processors of their own (`machines`), and one who waits for a link, a drive or a thread
wakes as soon as a real one would: one turn of the loop after it was told.

Guests are hosts that count and time; they do not open blocks (other lines do). Floods are guests
that want to hurt. Invariant: what is measured is what a guest sees, from its first byte sent to the
last byte of its answer or block.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from entresol_daemon.config import Config, FlashConfig, LimitsConfig, SealingConfig
from entresol_daemon.config_memory import MemoryConfig
from entresol_daemon.flash import file_device, runs
from entresol_daemon.flash.device import Check, IoOp, checked
from entresol_daemon.flash.engine import Engine, EngineOptions
from entresol_daemon.flash.sim import SimDevice
from entresol_daemon.keys.keyring import Keyring, TenantQuota
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.metrics import Metrics
from entresol_daemon.shard.dispatch import SessionHandler
from entresol_daemon.shard.shard import Shard, Surroundings
from entresol_proto.fabric.base import Capabilities, Exposure, FabricKind, Offer, ReadOp
from entresol_proto.ids import EngineKey, NamespaceDescriptor, TenantName, wire_key
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire import data, opening
from entresol_proto.wire.session import ClientSession
from tests.proof.machines import BusyLoop, busy, on
from tests.sim.shardlab import SimBuffer

KIB, MIB = 1024, 1024 * 1024
SECOND_NS = 1_000_000_000
DEVICE_BYTES_PER_S = 1_000_000_000
LINK_BYTES_PER_S = 3_000_000_000
IO_THREADS = 8
READS, WRITES = 0, 1  # of the device's threads
THREADS = 4
SEAL_BYTES_PER_S = 1_000_000_000  # one thread
LINK_LATENCY_S = 30e-6
DEVICE_LATENCY_S = 20e-6  # of a thread's run, beside its bytes
PIECE_BYTES = 256 * KIB  # of the control stream that the loop reads at a time
SEGMENT_BYTES = 4 * MIB
SLAB_BYTES = 512 * KIB

# Seconds of the event loop.
FRAME_S = 40e-6  # to receive or send one
FRAME_BYTE_S = 1e-9
KEY_S = 0.2e-6  # to look one up
MISS_S = 0.25e-6  # to answer one
BLOCK_S = 15e-6  # to grant one
ITEM_S = 20e-6  # to reserve one
APPEND_S = 100e-6  # to enter one into the index and the log
OPEN_S = 0.15e-3  # a session, after its TLS handshake


class Transfers:
    """Some transfers that are awaited together."""

    def __init__(self, done: asyncio.Future[None], count: int, line: int) -> None:
        self.done = done
        self.line = line
        self._left = count

    def end_one(self) -> None:
        """One has ended."""
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One of them."""

    of: Transfers


class Pipe:
    """Something with a rate that so many transfers share at a time; the others wait in order.

    It goes on by itself while the loop is busy: what ended meanwhile ended when it did, and what
    waited for it began then.
    """

    def __init__(self, bytes_per_s: float, *at_once: int) -> None:
        """`at_once`: how many share it at a time, of each line of those that wait."""
        self._bytes_per_s = bytes_per_s
        self._active: dict[Transfer, float] = {}  # bytes left
        self._at_once = list(at_once) or [1_000_000]
        self._room = list(self._at_once)
        self._queues: list[deque[tuple[Transfer, float]]] = [deque() for _ in self._room]
        # When they enter, in this order: one link, one latency.
        self._coming: deque[tuple[float, list[tuple[Transfer, float]]]] = deque()
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def bound(self, line: int, at_once: int) -> None:
        """From now on so many of a line begin at a time."""
        self._room[line] += at_once - self._at_once[line]
        self._at_once[line] = at_once

    async def carry(
        self, lengths_bytes: Sequence[float], after_s: float = 0.0, *, line: int = 0
    ) -> None:
        """Return when so many bytes are through, which enter so much later.

        As with sockets and threads, whoever waits wakes one turn of the loop after the last of them
        ended, however many there are.
        """
        if not lengths_bytes:
            return
        loop = asyncio.get_running_loop()
        transfers = Transfers(loop.create_future(), len(lengths_bytes), line)
        self._advance(loop.time())
        enters = max(loop.time() + after_s, self._coming[-1][0] if self._coming else 0.0)
        self._coming.append((enters, [(Transfer(transfers), each) for each in lengths_bytes]))
        self._fill()
        self._plan(loop)
        await transfers.done

    def _fill(self) -> None:
        while self._coming and self._coming[0][0] <= self._at:
            for transfer, left in self._coming.popleft()[1]:
                self._queues[transfer.of.line].append((transfer, left))
        for line, queue in enumerate(self._queues):
            while queue and self._room[line] > 0:
                transfer, left = queue.popleft()
                self._active[transfer] = left
                self._room[line] -= 1

    def _next(self) -> tuple[float, Transfer | None]:
        """When something ends or enters next, if nobody comes; and what ends then."""
        enters = self._coming[0][0] if self._coming else math.inf
        if not self._active:
            return enters, None
        first = min(self._active, key=self._active.__getitem__)
        ends = self._at + self._active[first] * len(self._active) / self._bytes_per_s
        return (ends, first) if ends <= enters else (enters, None)

    def _advance(self, now: float) -> None:
        while True:
            when, first = self._next()
            passed = (min(when, now) - self._at) * self._bytes_per_s
            for each in self._active:
                self._active[each] -= passed / len(self._active)
            if when > now:
                break
            self._at = when
            if first is not None:
                del self._active[first]
                self._room[first.of.line] += 1
                first.of.end_one()
            self._fill()
        self._at = max(self._at, now)

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when, _ = self._next()
        if when < math.inf:
            self._timer = loop.call_at(when, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._advance(loop.time() + 1e-12)
        self._plan(loop)


class RatedDevice(SimDevice):
    """Threads that read and write as those of the real device do, over one drive they share."""

    def __init__(self, size_bytes: int, seed: int) -> None:
        super().__init__(size_bytes, seed=seed)
        reading = runs.read_threads(IO_THREADS)
        self._threads = Pipe(DEVICE_BYTES_PER_S, reading, 1)
        self._reading = 0
        self._read_at = -1.0

    async def read(self, ops: Sequence[IoOp], check: Check | None = None) -> list[Status]:
        self._reading += 1
        self._threads.bound(WRITES, runs.write_threads(IO_THREADS, reads=True))
        found = runs.read_runs(ops, self.size_bytes)
        await self._work([[run] for run in found], READS)
        self._reading -= 1
        self._read_at = asyncio.get_running_loop().time()
        return checked([self._read_one(op) for op in ops], check)

    async def write(self, ops: Sequence[IoOp]) -> None:
        found = runs.runs_of(ops, self.size_bytes)
        since = asyncio.get_running_loop().time() - self._read_at
        lately = self._reading > 0 or since < file_device.READS_LATELY_S
        threads = runs.threads_of(found, runs.write_threads(IO_THREADS, reads=lately))
        self._threads.bound(WRITES, threads)
        await self._work([[run] for run in found], WRITES)
        await super().write(ops)

    async def flush(self) -> None:
        await self._threads.carry([DEVICE_LATENCY_S * DEVICE_BYTES_PER_S], line=WRITES)
        await super().flush()

    async def _work(self, jobs: Sequence[Sequence[Any]], line: int) -> None:
        latency_bytes = DEVICE_LATENCY_S * DEVICE_BYTES_PER_S
        await self._threads.carry(
            [sum(run.length_bytes + latency_bytes for run in job) for job in jobs if job],
            line=line,
        )


def _bytes_of(value: Any) -> int:
    """How long the longest buffers of a job are."""
    if isinstance(value, memoryview):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    if hasattr(value, "plain"):
        return _bytes_of(value.plain)
    return _bytes_of(getattr(value, "into", ()))


class RatedCompute:
    """Threads that are busy for as long as a job's buffers are long; first come, first served."""

    def __init__(self) -> None:
        self._free_at = [0.0] * THREADS

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        await self._work([_bytes_of(args)])
        return fn(*args)

    async def map(self, fn: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
        await self._work([_bytes_of(item) for item in items])
        return [fn(item) for item in items]

    async def _work(self, lengths_bytes: Sequence[int]) -> None:
        """Until the last of them is done."""
        now = until = asyncio.get_running_loop().time()
        for length_bytes in lengths_bytes:
            thread = min(range(THREADS), key=lambda each: (self._free_at[each], each))
            start = max(now, self._free_at[thread])
            self._free_at[thread] = start + 5e-6 + length_bytes / SEAL_BYTES_PER_S
            until = max(until, self._free_at[thread])
        await asyncio.sleep(until - now)

    async def close(self) -> None:
        pass


class Endpoint:
    """One end of a guest's data path; the daemon's side pulls through the shared link."""

    kind = FabricKind.TCP
    capabilities = Capabilities(revokes=True, private=True, same_host=False, maps=False)

    def __init__(self, pipe: Pipe | None) -> None:
        self._pipe = pipe
        self.peer: Endpoint
        self.exposed: dict[int, memoryview] = {}
        self._next = 1

    async def expose(self, buffer: Any) -> Exposure:
        view = buffer if isinstance(buffer, memoryview) else buffer.view
        self._next += 1
        self.exposed[self._next] = view
        return Exposure(self._next, 0, view.nbytes)

    async def revoke(self, exposure: Exposure) -> None:
        self.exposed.pop(exposure.rkey, None)

    async def read(self, ops: Sequence[ReadOp], deadline_ns: int) -> list[Status]:
        if self._pipe is None:
            await asyncio.sleep(LINK_LATENCY_S)
        else:
            await self._pipe.carry([op.into.nbytes for op in ops], LINK_LATENCY_S)
        statuses = []
        for op in ops:
            view = self.peer.exposed.get(op.span.rkey)
            if view is None:
                statuses.append(Status.LEASE_EXPIRED)
                continue
            op.into[:] = view[op.span.address : op.span.address + op.span.length_bytes]
            statuses.append(Status.OK)
        return statuses

    async def close(self) -> None:
        self.exposed.clear()


class Fabric:
    """The daemon's side: its pulls share one link."""

    kind = FabricKind.TCP

    def __init__(self) -> None:
        self.pipe = Pipe(LINK_BYTES_PER_S)
        self._brought: dict[bytes, Endpoint] = {}
        self._next = 0

    async def start(self) -> None:
        pass

    def offer(self, *, peer: object | None = None) -> Offer:
        self._next += 1
        return Offer(self.kind, self._next.to_bytes(8, "little"))

    def bring(self, offer: Offer, endpoint: Endpoint) -> None:
        self._brought[offer.params] = endpoint

    async def accept(self, offer: Offer, reply: bytes, deadline_ns: int) -> Any:
        return self._brought.pop(offer.params)

    def withdraw(self, offer: Offer) -> None:
        self._brought.pop(offer.params, None)

    async def close(self) -> None:
        self._brought.clear()


@dataclass(slots=True)
class Place:
    """A shard on rated hardware, and the event loop it runs on."""

    loop: BusyLoop
    shard: Shard
    fabric: Fabric
    drive: RatedDevice
    keyring: Keyring
    rng: random.Random

    @classmethod
    async def open(
        cls, folder: Path, seed: int, tenants: dict[str, int], *, flash_segments: int = 40,
        dram_bytes: int = 16 * MIB, blocks_max: int = 20_000,
    ) -> Place:  # fmt: skip
        """With these tenants and weights."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, BusyLoop)
        rng = random.Random(seed)
        size_bytes = 64 * KIB + flash_segments * SEGMENT_BYTES
        drive = RatedDevice(size_bytes, seed)
        keyring = Keyring.open(folder, FileKek(bytes(range(32))), random=rng.randbytes)
        for name, weight in tenants.items():
            keyring.add_tenant(name, TenantQuota(weight=weight), now_unix_s=1)
        compute: Any = RatedCompute()
        engine = await Engine.open(
            drive,
            EngineOptions(
                segment_bytes=SEGMENT_BYTES, blocks_max=blocks_max, group_commit_ns=2_000_000,
                group_commit_bytes=4 * MIB,
            ),
            compute=compute, now_ns=loop.now_ns, random_bytes=rng.randbytes,
        )  # fmt: skip
        fabric = Fabric()
        shard = await Shard.open(
            _config(size_bytes, dram_bytes), engine=engine, keyring=keyring, compute=compute,
            metrics=Metrics(), fabrics={FabricKind.TCP: fabric}, incarnation=1,
            surroundings=Surroundings(
                make_buffer=SimBuffer, make_private=SimBuffer, host_id=bytes(16),
                now_ns=loop.now_ns, unix_ns=loop.now_ns,
            ),
        )  # fmt: skip
        _charge(shard)
        return cls(loop, shard, fabric, drive, keyring, rng)

    async def close(self) -> None:
        """Without waiting for anything."""
        await self.shard.close(clean=False)
        self.keyring.close()


def _config(size_bytes: int, dram_bytes: int) -> Config:
    return replace(
        Config(),
        flash=FlashConfig(size_bytes=size_bytes, segment_bytes=SEGMENT_BYTES),
        memory=MemoryConfig(dram_bytes=dram_bytes, slab_bytes=SLAB_BYTES),
        sealing=SealingConfig(codec="raw", threads=THREADS),
        limits=LimitsConfig(
            block_bytes_max=256 * KIB,
            lease_ns=SECOND_NS,
            inflight_bytes_per_session_max=8 * MIB,
            put_queue_bytes_max=32 * MIB,
            put_queue_blocks_max=4096,
            leases_max=4096,
            sessions_max=512,
            sessions_per_tenant_max=256,
        ),
    )


def _charge(shard: Shard) -> None:
    """What the loop does for a shard takes time. Instead of methods, so that it is all the work."""
    index, gets, puts = shard.parts.engine.index, shard.gets, shard.puts
    lookup, grant, reserve_one = index.lookup, gets.granting.grant, puts._reserving._reserve_one
    append, open_session = puts._entering._append, shard.open_session
    grant_now = gets.granting.grant_now
    granted = shard.parts.meters.granted

    def slow_lookup(namespace_id: bytes, keys: bytes) -> Any:
        busy(2e-6 + len(keys) / 16 * KEY_S)
        return lookup(namespace_id, keys)

    async def slow_grant(job: Any, entries: Any, *, final: bool) -> None:
        busy(len(entries) * BLOCK_S)
        await grant(job, entries, final=final)

    def slow_grant_now(session: Any, namespace: Any, residents: Any) -> Any:
        busy(len(residents) * BLOCK_S)
        return grant_now(session, namespace, residents)

    def slow_reserve(*args: Any) -> Any:
        busy(ITEM_S)
        return reserve_one(*args)

    def slow_granted(tenant: Any, items: Any, misses: Any, open_at: Any) -> None:
        busy(len(misses) * MISS_S)
        granted(tenant, items, misses, open_at)

    def slow_append(pull: Any, extent: Any) -> Any:
        busy(APPEND_S)
        return append(pull, extent)

    async def slow_open(name: Any, hello: Any) -> Any:
        busy(OPEN_S)
        return await open_session(name, hello)

    index.lookup = slow_lookup  # type: ignore[method-assign,assignment]
    gets.granting.grant = slow_grant  # type: ignore[method-assign]
    gets.granting.grant_now = slow_grant_now  # type: ignore[method-assign]
    puts._reserving._reserve_one = slow_reserve  # type: ignore[method-assign,assignment]
    puts._entering._append = slow_append  # type: ignore[method-assign]
    shard.parts.meters.granted = slow_granted  # type: ignore[method-assign]
    shard.open_session = slow_open  # type: ignore[method-assign]


SAMPLES_FOR_P99 = 300  # on a virtual clock


@dataclass(slots=True)
class Seen:
    """What came of a guest's calls."""

    seconds: list[float] = field(default_factory=list)
    done_bytes: int = 0
    blocks: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def note(self, statuses: Sequence[Status], block_bytes: int, seconds: float) -> None:
        good = sum(s in (Status.OK, Status.EXISTS) for s in statuses)
        self.blocks += good
        self.done_bytes += good * block_bytes
        self.seconds.append(seconds)
        for status in statuses:
            if status not in (Status.OK, Status.EXISTS):
                self.refused[status.label] = self.refused.get(status.label, 0) + 1

    @property
    def few(self) -> bool:
        """Whether a 99th percentile of these would be that of one or two calls."""
        return len(self.seconds) < SAMPLES_FOR_P99

    def slow(self, *, few: bool) -> float:
        """Seconds; the slowest but one in a hundred, or of `few` but one in twenty."""
        ordered = sorted(self.seconds)
        share = 0.95 if few else 0.99
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


class Guest:
    """One host with one session. Calls raise EntresolError when refused as a whole.

    It runs on the loop on which it is made: the daemon's, or the hosts' own.
    """

    def __init__(self, place: Place, tenant: str) -> None:
        self.place = place
        self.tenant = tenant
        self._loop = asyncio.get_running_loop()
        self._machine = ClientSession(now_ns=self._now())
        with place.loop.running():
            self._handler = SessionHandler(
                place.shard, TenantName(tenant), write=self._to_host, close=self._hang_up,
                read_on=self._reads,
            )  # fmt: skip
        self.mine = Endpoint(None)
        self.theirs = Endpoint(place.fabric.pipe)
        self.mine.peer, self.theirs.peer = self.theirs, self.mine
        self._waiting: dict[int, asyncio.Queue[Any]] = {}
        self._unread: list[bytes] = []
        self._reading = True
        self._up = True
        self._up_at = 0.0
        self.handle = 0
        self.secret = b""
        self.given_bytes = 0  # granted to it

    def _now(self) -> int:
        return int(self._loop.time() * 1e9)

    def _send(self, message: Any) -> int:
        request_id, raw = self._machine.send(message)
        for at in range(0, len(raw), PIECE_BYTES):
            self._up_at = max(self._up_at + 1e-9, self._loop.time() + LINK_LATENCY_S)
            self.place.loop.call_at(self._up_at, self._arrive, raw[at : at + PIECE_BYTES])
        return request_id

    def _arrive(self, raw: bytes) -> None:
        if not self._up:
            return
        if not self._reading or self._unread:
            self._unread.append(raw)  # in the peer's socket
            return
        self._receive(raw)

    def _receive(self, raw: bytes) -> None:
        busy(FRAME_S + len(raw) * FRAME_BYTE_S)
        self._handler.receive(raw)

    def _reads(self, reading: bool) -> None:
        self._reading = reading
        if reading and self._unread:
            self.place.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._up and self._reading and self._unread:
            self._receive(self._unread.pop(0))
            if self._reading and self._unread:
                self.place.loop.call_soon(self._read_on)

    def _to_host(self, raw: bytes) -> None:
        busy(FRAME_S + len(raw) * FRAME_BYTE_S)
        self._loop.call_at(self.place.loop.time() + LINK_LATENCY_S, self._arrive_at_host, raw)

    def _arrive_at_host(self, raw: bytes) -> None:
        if self._up:
            for item in self._machine.receive(raw, self._now()):
                queue = self._waiting.get(item.request_id)
                if queue is not None:
                    queue.put_nowait(item.message)

    def _hang_up(self) -> None:
        """The daemon closes: what it said before still arrives."""
        self._loop.call_at(self.place.loop.time() + 2 * LINK_LATENCY_S, self._cut)

    def _cut(self) -> None:
        self._up = False
        for queue in self._waiting.values():
            queue.put_nowait(None)

    async def gone(self) -> None:
        """The link breaks; return when the daemon has cleaned up."""
        self._cut()
        await on(self.place.loop, self._handler.finish())

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

    async def call(self, message: Any) -> Any:
        """The first answer."""
        async for answer in self._answers(message):
            return answer
        raise AssertionError("no answer and no error")

    async def open(self, *, attach: bool = True) -> None:
        """Session, data path and a namespace."""
        welcome = await self.call(opening.Hello(1, 1, bytes(16), 2, "fair"))
        if not attach:
            return
        offer = welcome.offers[0]
        self.place.fabric.bring(offer, self.theirs)
        await self.call(opening.Attach(offer.kind))
        opened = await self.call(
            opening.OpenNamespace(NamespaceDescriptor(model="fair").canonical())
        )
        self.handle, self.secret = opened.handle, opened.secret

    def names(self, keys: Sequence[bytes]) -> bytes:
        """Wire keys, joined."""
        return b"".join(wire_key(self.secret, EngineKey(key)) for key in keys)

    async def put(
        self, keys: Sequence[bytes], block_bytes: int, *, ack: data.Ack = data.Ack.DURABLE
    ) -> list[Status]:
        """Store blocks of nothing in particular."""
        names = [wire_key(self.secret, EngineKey(key)) for key in keys]
        items = tuple(
            data.PutItem(name, key, block_bytes, at, b"", b"")
            for at, (name, key) in enumerate(zip(names, keys, strict=True))
        )
        plain = memoryview(bytearray(block_bytes))
        reserved = await self.call(data.Reserve(self.handle, ack, 5 * SECOND_NS, items))
        statuses = [answer.status for answer in reserved.items]
        wanted = [at for at, status in enumerate(statuses) if status is Status.OK]
        if wanted:
            exposure = await self.mine.expose(plain)
            spans = tuple(
                (reserved.items[at].put_id, exposure.span(0, block_bytes)) for at in wanted
            )
            done = await self.call(data.Commit(spans))
            await self.mine.revoke(exposure)
            for at, status in zip(wanted, done.statuses, strict=True):
                statuses[at] = status
        return statuses

    async def get(self, names: bytes, *, release: bool = True) -> list[Status]:
        """Fetch, read and let go."""
        statuses = [Status.DISCONNECTED] * (len(names) // 16)
        message = data.Fetch(self.handle, data.OpenAt.HOST, False, 3 * SECOND_NS, names)
        async for grant in self._answers(message):
            for index, status in grant.misses:
                statuses[index] = status
            self.given_bytes += sum(item.plain_bytes for item in grant.items)
            ops = [
                ReadOp(item.span, memoryview(bytearray(item.span.length_bytes)))
                for item in grant.items
            ]
            if ops and release:
                found = await self.mine.read(ops, self._now() + SECOND_NS)
            else:
                found = [Status.OK] * len(ops)
            for item, status in zip(grant.items, found, strict=True):
                statuses[item.index] = status
            if grant.lease_id and release and self._up:
                self._send(data.Release((grant.lease_id,), ()))
        return statuses

    async def timed(
        self, seen: Seen, block_bytes: int, work: Awaitable[list[Status]], blocks: int
    ) -> None:
        """Do it and note what came and how long it took."""
        start = self._loop.time()
        try:
            statuses = await work
        except EntresolError as error:
            statuses = [error.status] * blocks
        seen.note(statuses, block_bytes, self._loop.time() - start)


def key_of(tenant: str, number: int) -> bytes:
    """An engine key."""
    return f"{tenant}-{number}".encode().ljust(32, b".")
