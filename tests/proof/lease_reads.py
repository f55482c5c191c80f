"""Line S3: a lease ends when it ends, for its holder alone, on tcp, TLS and shm (verbs: line G3).

One unit is a batch of hostile reads on one fabric, each with something that its reader does not, or
no longer, hold: a lease that was revoked or has run out, one of another session or tenant, more
than was leased, numbers made up. Between them honest reads, which must succeed: else refusing would
prove nothing. What is exposed is random, where reads land is painted: any other byte has leaked.

Half of the units work on the fabrics alone, half on a whole daemon with two tenants, whose leases
they also try to end from outside, and whose shared memory they keep mapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "daemon"))

from daemon_lab import DESCRIPTOR, Raw, blocks, client_of, content, keys_of, raw_of, run_of, shape
from fabrics import FABRICS, Pair, filled, join, serving, soon
from harness import Running, eventually, running_daemon

from entresol_client.results import RequestFailedError
from entresol_daemon.shard import opened
from entresol_proto.fabric import tcp
from entresol_proto.fabric.base import Endpoint, ReadOp, RemoteSpan
from entresol_proto.fabric.shmendpoint import ShmEndpoint
from entresol_proto.limits import KIB
from entresol_proto.status import Status
from entresol_proto.wire.data import Commit, Grant, GrantItem, OpenAt
from tests.proof.line import Size, Slice, Tally

READS = 500  # hostile ones of a unit
HONEST_EVERY = 50
SECRET_BYTES = 64 * KIB
SPAN_BYTES_MAX = 512
PAINT = b"\xa5"
REFUSALS = {Status.LEASE_EXPIRED, Status.BAD_REQUEST}
BARE = ("tcp-plain", "tcp-tls", "shm")
WHOLE = ("tls", "shm")
BLOCK_BYTES = 8 * KIB
LEASE_NS = 300_000_000


class Judge:
    """Reads, and counts what came of them."""

    def __init__(self, tally: Tally, seed: int) -> None:
        self.tally = tally
        self.seed = seed

    async def hostile(self, reader: Endpoint, spans: Sequence[RemoteSpan], what: str) -> None:
        """None of these may bring a byte."""
        arena = bytearray(PAINT * sum(span.length_bytes for span in spans))
        ops, at, view = [], 0, memoryview(arena)
        for span in spans:
            ops.append(ReadOp(span, view[at : at + span.length_bytes]))
            at += span.length_bytes
        statuses = await reader.read(ops, soon(60))
        served = [status for status in statuses if status not in REFUSALS]
        leaked = len(arena) - arena.count(PAINT)
        self.tally.tried += len(ops)
        self.tally.survived += len(ops) - len(served)
        self.tally.figure("leaked_bytes", leaked)
        self.tally.wrong_bytes += leaked
        if served or leaked:
            self.tally.found(self.seed, f"{what}: {served[:3]}, {leaked} bytes leaked")

    async def honest(
        self, reader: Endpoint, span: RemoteSpan, wanted: bytes, until_ns: int = 2**63
    ) -> None:
        """This one must, if it is over by then."""
        into = bytearray(span.length_bytes)
        statuses = await reader.read([ReadOp(span, memoryview(into))], soon(60))
        if time.monotonic_ns() >= until_ns:
            return
        self.tally.figure("honest_reads", 1)
        if statuses != [Status.OK] or into != wanted:
            self.tally.found(self.seed, f"an honest read was refused: {statuses}")

    def holds(self, held: bool, what: str) -> None:
        """One more attempt of another kind."""
        self.tally.tried += 1
        self.tally.survived += held
        if not held:
            self.tally.found(self.seed, what)


def inside(rng: random.Random, rkey: int, address: int, length: int) -> RemoteSpan:
    """A small part of what begins at `address`."""
    size = rng.randrange(1, min(SPAN_BYTES_MAX, length) + 1)
    return RemoteSpan(rkey, address + rng.randrange(length - size + 1), size)


def outside(rng: random.Random, rkey: int, address: int, length: int) -> RemoteSpan:
    """A part that is not, or not all of it, within."""
    size = rng.randrange(1, SPAN_BYTES_MAX + 1)
    end = address + length
    begin = rng.choice(
        (end - size + rng.randrange(1, size + 1), end + rng.randrange(1 << 20), 2**62,
         2**63 - rng.randrange(1, 4096))
    )  # fmt: skip
    return RemoteSpan(rkey, begin, size)


# The fabrics alone --------------------------------------------------------------------------------


async def bare_unit(judge: Judge, mine: Pair, other: Pair, rng: random.Random) -> None:
    """Hostile reads of a host that has a session, next to another session."""
    secret = rng.randbytes(SECRET_BYTES)
    with filled(secret) as buffer:
        living = await mine.daemon.expose(buffer)
        foreign = await other.daemon.expose(buffer)
        dead = [await mine.daemon.expose(buffer) for _ in range(3)]
        for exposure in dead:
            await mine.daemon.revoke(exposure)
        known = {living.rkey}
        spans: list[RemoteSpan] = []
        for _ in range(READS):
            kind = rng.randrange(4)
            if kind == 0:
                spans.append(inside(rng, rng.choice(dead).rkey, 0, SECRET_BYTES))
            elif kind == 1:
                spans.append(inside(rng, foreign.rkey, 0, SECRET_BYTES))
            elif kind == 2:
                spans.append(outside(rng, living.rkey, 0, SECRET_BYTES))
            else:
                near = (living.rkey ^ 1 << rng.randrange(32), rng.getrandbits(32))
                rkey = rng.choice(near)
                spans.append(inside(rng, rkey ^ (rkey in known), 0, SECRET_BYTES))
        for at in range(0, READS, HONEST_EVERY):
            await judge.hostile(mine.host, spans[at : at + HONEST_EVERY], mine.fabric.name)
            span = inside(rng, living.rkey, 0, SECRET_BYTES)
            wanted = secret[span.address : span.address + span.length_bytes]
            await judge.honest(mine.host, span, wanted)
        for pair, exposure in ((mine, living), (other, foreign)):
            await pair.daemon.revoke(exposure)
        await judge.hostile(
            mine.host, [inside(rng, living.rkey, 0, SECRET_BYTES) for _ in range(8)], "at the end"
        )


@contextlib.asynccontextmanager
async def bare_world(name: str, folder: Path) -> AsyncIterator[tuple[Pair, Pair]]:
    """Two sessions of one server."""
    folder.mkdir(0o700)
    async with serving(FABRICS[name], folder) as server:
        pairs = (await join(FABRICS[name], server), await join(FABRICS[name], server))
        try:
            yield pairs
        finally:
            for pair in pairs:
                await pair.host.close()
                await pair.daemon.close()


# A whole daemon -----------------------------------------------------------------------------------


@dataclass
class Sessions:
    """A daemon with a victim, another session of its tenant, and a session of another tenant."""

    running: Running
    victim: Raw
    sibling: Raw
    stranger: Raw
    keys: list[bytes]
    handles: dict[str, int]
    names: bytes


@contextlib.asynccontextmanager
async def whole_world(fabric: str, folder: Path) -> AsyncIterator[Sessions]:
    """The daemon, with blocks of both tenants in memory."""
    fabrics = ["shm"] if fabric == "shm" else ["tcp"]
    change = shape(fabrics=fabrics, tcp_tls=fabric == "tls", lease_ns=LEASE_NS)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_daemon(folder, change))
        keys, others = keys_of(8, "victim"), keys_of(8, "stranger")
        for tenant, own in (("dev", keys), ("other", others)):
            async with client_of(running, tenant, fabric) as client:
                space = await client.namespace(DESCRIPTOR)
                assert (await space.put(blocks(own, BLOCK_BYTES))).ok
        raws = [
            await stack.enter_async_context(raw_of(running, tenant, fabric))
            for tenant in ("dev", "dev", "other")
        ]
        spaces = [await raw.namespace() for raw in raws]
        handles = {"victim": spaces[0].handle, "stranger": spaces[2].handle}
        for grant in await raws[2].fetch(handles["stranger"], run_of(spaces[2], others)):
            raws[2].connection.release(grant.lease_id)  # it has seen memory of its own tenant
        victim, sibling, stranger = raws
        names = run_of(spaces[0], keys)
        yield Sessions(running, victim, sibling, stranger, keys, handles, names)


def items_of(grants: Sequence[Grant]) -> list[GrantItem]:
    return [item for grant in grants for item in grant.items]


async def whole_unit(judge: Judge, world: Sessions, rng: random.Random) -> None:
    """The victim's leases, while they live and after their end, by all the wrong hands."""
    leases = world.running.daemon.shard.parts.leases
    victim, began_ns = world.victim, time.monotonic_ns()
    plain = await victim.fetch(world.handles["victim"], world.names, open_at=OpenAt.DAEMON)
    sealed = await victim.fetch(world.handles["victim"], world.names)
    item = rng.choice(items_of(plain))
    kept = kept_mapping(victim.endpoint, items_of(plain))
    wanted = content(world.keys[item.index], BLOCK_BYTES)
    await judge.honest(victim.endpoint, item.span, wanted, began_ns + LEASE_NS)
    spans = [item.span for item in items_of(plain) + items_of(sealed)]
    sets = [within(rng, spans, READS // 4) for _ in range(2)]
    await judge.hostile(world.stranger.endpoint, sets[0], "leases of another tenant")
    plains = [item.span for item in items_of(plain)]
    await judge.hostile(
        world.sibling.endpoint, within(rng, plains, READS // 4), "plaintext of another session"
    )
    await forge(judge, world, [grant.lease_id for grant in plain + sealed], rng)
    if rng.random() < 0.7:
        for grant in plain + sealed:
            victim.connection.release(grant.lease_id)
    await eventually(lambda: not len(leases), seconds=30, what="the leases to end")
    sessions = world.running.daemon.shard.sessions.values()
    await eventually(
        lambda: not any(s.plain_blocks or s.exposed_blocks for s in sessions),
        seconds=30, what="the plaintext to go",
    )  # fmt: skip
    if not isinstance(victim.endpoint, ShmEndpoint):
        await judge.hostile(victim.endpoint, within(rng, plains, READS // 4), "after its end")
    for view in kept:  # on shm the memory stays mapped, and must be empty
        judge.holds(not any(view), "plaintext outlived its lease in mapped memory")
        view.release()
    for region in mapped_by(world.stranger.endpoint):
        judge.tally.figure("mapped_regions_searched", 1)
        found = [key for key in world.keys if key in region]  # as a sealed header has it
        found += [key for key in world.keys if content(key, BLOCK_BYTES)[:64] in region]
        judge.holds(not found, "a block of another tenant in mapped memory")


def within(rng: random.Random, spans: Sequence[RemoteSpan], count: int) -> list[RemoteSpan]:
    """Parts of these spans."""
    chosen = [rng.choice(spans) for _ in range(count)]
    return [inside(rng, span.rkey, span.address, span.length_bytes) for span in chosen]


def kept_mapping(endpoint: Endpoint, items: Sequence[GrantItem]) -> list[memoryview]:
    """Views that a dishonest host keeps, where the fabric shows it memory."""
    if not isinstance(endpoint, ShmEndpoint):
        return []
    views = [endpoint.map_span(item.span) for item in items]
    return [view for view in views if isinstance(view, memoryview)]


def mapped_by(endpoint: Endpoint) -> Iterator[bytes]:
    """Everything that a host on shm was ever shown and still has."""
    if isinstance(endpoint, ShmEndpoint):
        for region in endpoint._regions.values():
            yield region.array.tobytes()


async def forge(judge: Judge, world: Sessions, real: Sequence[int], rng: random.Random) -> None:
    """End others' leases, commit what was not reserved, use a handle that was not opened."""
    leases = world.running.daemon.shard.parts.leases
    numbers = {lease.session for lease in leases._leases.values()}
    before = {number: leases.held_by(number) for number in numbers}
    began = time.monotonic_ns()
    for raw in (world.sibling, world.stranger):
        for lease_id in (*real, *(rng.getrandbits(64) for _ in range(32))):
            raw.connection.release(lease_id)
        await raw.connection.ping(soon(60))
    after = {number: leases.held_by(number) for number in numbers}
    if time.monotonic_ns() - began < LEASE_NS // 4:  # else they may have run out by themselves
        judge.holds(after == before, "a lease was ended by another session")
        judge.tally.tried += 2 * (len(real) + 32)
        judge.tally.survived += 2 * (len(real) + 32)
    spans = tuple((rng.getrandbits(63), RemoteSpan(rng.getrandbits(32), 0, 4096)) for _ in range(8))
    await refused(judge, world.stranger.ask(Commit(spans)), "a forged commit")
    handle = rng.randrange(world.handles["stranger"] + 1, 2**32)
    await refused(judge, world.stranger.fetch(handle, world.names), "a forged namespace handle")


async def refused(judge: Judge, asking: Coroutine[Any, Any, Any], what: str) -> None:
    """An error, or statuses of which none is OK."""
    try:
        answer = await asking
    except RequestFailedError as error:
        judge.holds(error.status is Status.BAD_REQUEST, f"{what}: {error.status}")
        return
    judge.holds(Status.OK not in getattr(answer, "statuses", [Status.OK]), f"{what}: {answer}")


# The line -----------------------------------------------------------------------------------------


async def work(slice_: Slice, tally: Tally) -> None:
    """All units; sessions and daemons are made when a unit first needs them."""
    async with contextlib.AsyncExitStack() as stack:
        bare: dict[str, tuple[Pair, Pair]] = {}
        whole: dict[str, Sessions] = {}
        for seed in slice_.seeds:
            rng, judge = random.Random(seed), Judge(tally, seed)
            if seed % 4:
                name = BARE[seed % 3]
                if name not in bare:
                    made = bare_world(name, slice_.folder / name)
                    bare[name] = await stack.enter_async_context(made)
                await bare_unit(judge, *bare[name], rng)
            else:
                name = WHOLE[seed // 4 % 2]
                if name not in whole:
                    found = whole_world(name, slice_.folder / f"daemon-{name}")
                    whole[name] = await stack.enter_async_context(found)
                await whole_unit(judge, whole[name], rng)


def run(slice_: Slice) -> Tally:
    """See the module."""
    tally = Tally()
    asyncio.run(work(slice_, tally))
    return tally


@contextlib.contextmanager
def planted(owner: Any, name: str, bug: Callable[..., Any]) -> Iterator[None]:
    """With this in place of what is there."""
    honest = getattr(owner, name)
    setattr(owner, name, bug)
    try:
        yield
    finally:
        setattr(owner, name, honest)


def canary() -> None:
    """Leases of tcp that no revocation ends; plaintext that is not wiped when its lease ends."""

    async def revoke(self: tcp.TcpEndpoint, exposure: Any) -> None:
        """Nothing."""

    def wipe(self: opened.OpenedBlocks, session: Any, block: Any) -> None:
        session.plain_pool.free(block.extent)

    for seed, bug in (
        (3, planted(tcp.TcpEndpoint, "revoke", revoke)),
        (4, planted(opened.OpenedBlocks, "_wipe", wipe)),
    ):
        with tempfile.TemporaryDirectory(prefix="entresol-s3-") as folder, bug:
            tally = run(Slice(seed, 1, Size.COMMIT, Path(folder)))
        assert tally.findings, f"seed={seed}: nothing was found"
