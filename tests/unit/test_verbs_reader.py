"""Reads over verbs without a device: cutting, spreading, landing places, and giving memory back.

A scripted rail stands in for the queue pair: it keeps what is posted and completes it when told,
copying from the "remote" memory like the device would. What a real device does is tested in guests.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from entresol_proto import limits
from entresol_proto.fabric.base import ReadOp, RemoteSpan
from entresol_proto.fabric.verbs_api import ACCESS_LOCAL_WRITE
from entresol_proto.fabric.verbs_gpu import dmabuf_of
from entresol_proto.fabric.verbs_memory import (
    Bounce,
    DeviceLanding,
    Landing,
    Registry,
    address_of,
    group,
)
from entresol_proto.fabric.verbs_queue import QueuePair
from entresol_proto.fabric.verbs_rail import RailLink, next_window
from entresol_proto.fabric.verbs_reader import PeerRegion, Piece, Reader
from entresol_proto.fabric.verbs_status import name_of, status_of
from entresol_proto.status import FabricError, Status

MIB = limits.MIB
PAGE = mmap.PAGESIZE


class Registered:
    """A memory region that notes its end."""

    def __init__(self, domain: ScriptedDomain, key: int, address: int, length: int) -> None:
        self.lkey = self.rkey = key
        self._domain = domain
        domain.open[key] = (address, length)

    def close(self) -> None:
        self._domain.open.pop(self.lkey, None)


class ScriptedDomain:
    """Registers whatever is asked, up to `most` regions."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[int, int]] = {}
        self.made = 0
        self.most = 10**6

    def register(self, address: int, length_bytes: int, access: int) -> Registered:
        assert access == ACCESS_LOCAL_WRITE
        if len(self.open) >= self.most:
            raise FabricError("no locked memory", status=Status.BUSY)
        self.made += 1
        return Registered(self, self.made, address, length_bytes)

    def register_dmabuf(self, fd: int, offset: int, length_bytes: int, access: int) -> Registered:
        self.made += 1
        return Registered(self, self.made, offset, length_bytes)


class ScriptedRail:
    """Takes reads; `complete` does the oldest ones."""

    def __init__(self, number: int, remote: bytes) -> None:
        self.number = number
        self.destroyed = False
        self.refuses: Exception | None = None
        self.domain = ScriptedDomain()
        self.posted: list[Piece] = []
        self.bytes_posted = self.reads_posted = 0
        self.bytes_ever = 0
        self._remote = remote
        self._bounce: Bounce | None = None

    def has_room(self, length_bytes: int) -> bool:
        return self.reads_posted < 8 and self.bytes_posted + length_bytes <= 4 * MIB

    def reserve(self, length_bytes: int) -> None:
        self.reads_posted += 1
        self.bytes_posted += length_bytes
        self.bytes_ever += length_bytes

    def read_over(self, length_bytes: int) -> None:
        self.reads_posted -= 1
        self.bytes_posted -= length_bytes

    def bounce(self) -> Bounce:
        if self._bounce is None:
            self._bounce = Bounce(self.domain)  # type: ignore[arg-type]
        return self._bounce

    def post_reads(self, reads: Sequence[Piece]) -> None:
        self.posted += reads
        if self.refuses is not None:
            raise self.refuses

    def complete(self, count: int, status: Status = Status.OK) -> None:
        for _ in range(min(count, len(self.posted))):
            piece = self.posted.pop(0)
            base, length = self.domain.open[piece.lkey]
            where, size = piece.local_address, piece.length_bytes
            assert base <= where
            assert where + size <= base + length, "a read past its registration"
            if status is Status.OK:
                at = piece.remote_address
                ctypes.memmove(where, self._remote[at : at + size], size)
            piece.over(self, status)  # type: ignore[arg-type]

    def destroy(self) -> None:
        self.destroyed = True
        self.complete(len(self.posted), Status.DISCONNECTED)


class Bench:
    """A reader over scripted rails and the region they read."""

    def __init__(self, rails: int, remote_bytes: int) -> None:
        self.remote = random.Random(remote_bytes).randbytes(remote_bytes)
        self.rails = [ScriptedRail(n, self.remote) for n in range(rails)]
        self.freed: list[PeerRegion] = []
        self.reader = Reader(self.rails, region_free=self.freed.append)  # type: ignore[arg-type]
        self.region = PeerRegion(tuple(range(7, 7 + rails)), 0, remote_bytes)
        self.cuts = 0

    def read(
        self, spans: Sequence[tuple[int, int]], into: Sequence[memoryview], deadline_s: float = 60
    ) -> asyncio.Task[list[Status]]:
        ops = [
            ReadOp(RemoteSpan(7, at, n), view) for (at, n), view in zip(spans, into, strict=True)
        ]
        regions = [self.region] * len(ops)
        return asyncio.ensure_future(self.reader.run(ops, regions, deadline_s, self.cut))

    def cut(self) -> None:
        self.cuts += 1
        for rail in self.rails:
            rail.destroy()
        self.reader.abort(Status.DISCONNECTED)

    async def finish(self, reading: asyncio.Task[list[Status]]) -> list[Status]:
        """Complete everything as it comes."""
        async with asyncio.timeout(20):
            while not reading.done():
                for rail in self.rails:
                    rail.complete(3)
                self.reader.pump()
                await asyncio.sleep(0)
        return reading.result()

    def assert_nothing_held(self, *, bounce: int = 0) -> None:
        for rail in self.rails:
            assert rail.bytes_posted == rail.reads_posted == 0
            assert len(rail.domain.open) <= bounce
        assert self.region.users == 0
        assert not self.reader.busy


SIZES = [1, 63, 4096, limits.VERBS_BOUNCE_OP_BYTES_MAX, limits.VERBS_BOUNCE_OP_BYTES_MAX + 1,
         MIB, 3 * MIB + 17]  # fmt: skip


@pytest.mark.parametrize("rails", [1, 2, 3])
@pytest.mark.parametrize("registered", [False, True])
async def test_every_size_lands_exactly_and_nothing_else_does(rails: int, registered: bool) -> None:
    bench = Bench(rails, 20 * MIB)
    memory = memoryview(bytearray(b"\xa5" * 20 * MIB))
    landing = Landing([rail.domain for rail in bench.rails], address_of(memory), len(memory))  # type: ignore[misc]
    if registered:
        bench.reader.registry.add(landing)
    spans, views, at = [], [], 100
    for size in SIZES:
        spans.append((at + 5, size))
        views.append(memory[at : at + size])
        at += size + 64
    statuses = await bench.finish(bench.read(spans, views))
    assert set(statuses) == {Status.OK}
    end = 0
    for (remote_at, size), view in zip(spans, views, strict=True):
        assert view == bench.remote[remote_at : remote_at + size], size
        start = address_of(view) - address_of(memory)
        assert memory[end:start] == b"\xa5" * (start - end)
        end = start + size
    assert memory[end:] == b"\xa5" * (len(memory) - end)
    landing.close()
    bench.assert_nothing_held(bounce=1)
    if rails > 1:
        shares = [rail.bytes_ever for rail in bench.rails]
        assert min(shares) > sum(shares) / rails / 2  # spread over all of them


async def test_pieces_are_bounded_and_never_cross_a_granule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "VERBS_GRANULE_BYTES", 3 * PAGE + 5)
    bench = Bench(1, MIB)
    memory = memoryview(bytearray(MIB))
    landing = Landing([bench.rails[0].domain], address_of(memory), MIB)  # type: ignore[list-item]
    bench.reader.registry.add(landing)
    reading = bench.read([(0, MIB)], [memory])
    assert await bench.finish(reading) == [Status.OK]  # `complete` checks each piece's bounds
    assert memory == bench.remote
    assert bench.rails[0].domain.made == -(-MIB // (3 * PAGE + 5))
    landing.close()
    bench.assert_nothing_held()


async def test_memory_is_given_back_only_when_the_device_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "VERBS_DRAIN_NS", 10**12)
    bench = Bench(1, 8 * MIB)
    memory = memoryview(bytearray(8 * MIB))
    reading = bench.read([(0, 8 * MIB)], [memory], deadline_s=0.01)
    await asyncio.sleep(0.05)
    assert not reading.done()  # past its deadline, but reads are on the wire
    on_wire = len(bench.rails[0].posted)
    bench.rails[0].complete(on_wire - 1)
    await asyncio.sleep(0.01)
    assert not reading.done()
    bench.rails[0].complete(1)
    async with asyncio.timeout(20):  # and then at once
        assert await reading == [Status.DEADLINE]
    assert bench.cuts == 0
    assert not bench.rails[0].posted  # and none was begun after the deadline
    bench.assert_nothing_held()


async def test_a_device_that_never_finishes_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "VERBS_DRAIN_NS", 20_000_000)
    bench = Bench(2, 8 * MIB)
    memory = memoryview(bytearray(8 * MIB))
    reading = bench.read([(0, 8 * MIB)], [memory], deadline_s=0.01)
    async with asyncio.timeout(10):
        assert await reading == [Status.DEADLINE]
    assert bench.cuts == 1
    assert all(rail.destroyed for rail in bench.rails)
    bench.assert_nothing_held()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_read_waits_for_the_device_too(times: int) -> None:
    bench = Bench(1, 4 * MIB)
    reading = bench.read([(0, 4 * MIB)], [memoryview(bytearray(4 * MIB))])
    await asyncio.sleep(0)
    for _ in range(times):  # impatient callers cancel again
        reading.cancel()
        await asyncio.sleep(0.01)
        assert not reading.done()
    bench.rails[0].complete(100)
    with pytest.raises(asyncio.CancelledError):
        await reading
    bench.assert_nothing_held()


async def test_small_foreign_memory_is_given_back_at_once_and_never_written_late() -> None:
    """It is read through the bounce buffer: the device does not know it."""
    bench = Bench(1, MIB)
    memory = memoryview(bytearray(b"\xa5" * 8192))
    reading = bench.read([(0, 4096), (4096, 4096)], [memory[:4096], memory[4096:]], 0.05)
    await asyncio.sleep(0)
    bench.rails[0].complete(1)
    assert await reading == [Status.OK, Status.DEADLINE]
    bench.rails[0].complete(1)
    assert memory[:4096] == bench.remote[:4096]
    assert memory[4096:] == b"\xa5" * 4096
    bench.assert_nothing_held(bounce=1)


async def test_what_cannot_be_registered_is_copied() -> None:
    bench = Bench(1, 8 * MIB)
    bench.rails[0].bounce()
    bench.rails[0].domain.most = 1
    memory = memoryview(bytearray(8 * MIB))
    assert await bench.finish(bench.read([(0, 8 * MIB)], [memory])) == [Status.OK]
    assert memory == bench.remote
    bench.assert_nothing_held(bounce=1)


async def test_a_device_that_registers_nothing_any_more_is_broken() -> None:
    bench = Bench(1, 4 * MIB)
    domain = bench.rails[0].domain
    memory = memoryview(bytearray(4 * MIB))
    reading = bench.read([(0, 4 * MIB)], [memory])
    await asyncio.sleep(0)
    posted = len(bench.rails[0].posted)
    assert posted > 1

    def broken(address: int, length_bytes: int, access: int) -> Registered:
        raise FabricError("Input/output error")

    domain.register = broken  # type: ignore[method-assign]
    other = bench.read([(0, 100)], [memoryview(bytearray(100))])
    bench.rails[0].complete(posted)
    bench.reader.pump()
    bench.rails[0].complete(posted)
    assert await reading == [Status.OK]
    with pytest.raises(FabricError, match="Input/output"):
        await other
    bench.assert_nothing_held()


@pytest.mark.parametrize("problem", [FabricError("cannot post"), OverflowError("a bug")])
async def test_a_rail_that_refuses_keeps_no_other_from_its_reads(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else memory taken for them would be held by nobody who could hand it back."""
    monkeypatch.setattr(limits, "VERBS_DRAIN_NS", 20_000_000)
    bench = Bench(3, 8 * MIB)
    bench.rails[0].refuses = problem
    reading = bench.read([(0, 8 * MIB)], [memoryview(bytearray(8 * MIB))])
    await asyncio.sleep(0)
    assert all(rail.posted for rail in bench.rails)
    assert all(rail.reads_posted == len(rail.posted) for rail in bench.rails)
    async with asyncio.timeout(10):
        with pytest.raises(type(problem)):
            await reading
    assert bench.cuts == 1
    bench.assert_nothing_held()


async def test_a_bug_in_the_middle_of_taking_memory_holds_none() -> None:
    bench = Bench(1, 8 * MIB)
    domain = bench.rails[0].domain
    register, calls = domain.register, 0

    def breaks(address: int, length_bytes: int, access: int) -> Registered:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise MemoryError
        return register(address, length_bytes, access)

    domain.register = breaks  # type: ignore[method-assign]
    granule = limits.VERBS_GRANULE_BYTES
    memory = memoryview(mmap.mmap(-1, 2 * granule))
    views = [memory[granule - 2 * MIB :][:MIB], memory[granule:][:MIB]]
    landing = Landing([domain], address_of(memory), len(memory))  # type: ignore[list-item]
    bench.reader.registry.add(landing)
    reading = bench.read([(0, MIB), (MIB, MIB)], views)
    await asyncio.sleep(0)
    assert calls == 2
    assert len(bench.rails[0].posted) == 1
    bench.rails[0].complete(1)
    landing.close()
    with pytest.raises(MemoryError):
        await reading
    bench.assert_nothing_held()


class ScriptedQueuePair:
    """The end of pyverbs's queue pair: what destroying and resetting it answer."""

    def __init__(self, destroy: int, reset: int = 0) -> None:
        self._destroy, self._reset = destroy, reset
        self.resets = 0

    def close(self) -> None:
        if self._destroy:
            raise ScriptedError(self._destroy)

    def modify(self, attributes: object, mask: int) -> None:
        self.resets += 1
        if self._reset:
            raise ScriptedError(self._reset)


class ScriptedError(Exception):
    def __init__(self, error_code: int) -> None:
        super().__init__(os.strerror(error_code))
        self.error_code = error_code


class Held:
    """Work on the wire; `bad` breaks when it is handed back."""

    length_bytes = 1

    def __init__(self, *, bad: bool = False) -> None:
        self.bad = bad
        self.statuses: list[Status] = []

    def over(self, link: RailLink, status: Status) -> None:
        self.statuses.append(status)
        if self.bad:
            raise AssertionError("a broken owner")


def rail_of(raw: ScriptedQueuePair, works: Sequence[Held]) -> RailLink:
    """A real rail, as far as its end needs one, over a scripted queue pair."""
    queue_pair = object.__new__(QueuePair)
    queue_pair.raw = raw
    queue_pair._closed = False
    queue_pair._api = SimpleNamespace(  # type: ignore[assignment]
        error=ScriptedError, qp=SimpleNamespace(QPAttr=lambda qp_state: qp_state)
    )
    link = object.__new__(RailLink)
    link.destroyed, link._loop, link.queue_pair = False, None, queue_pair
    link.posted = deque((n, work) for n, work in enumerate(works))
    link._closers = [queue_pair.close]
    return link


@pytest.mark.parametrize("code", [0, errno.EIO, errno.ENODEV, errno.EBUSY])
def test_a_queue_pair_that_ends_gives_back_all_even_past_a_broken_owner(code: int) -> None:
    """Busy ones are stopped instead; of a device that went, nothing is left to stop."""
    raw, works = ScriptedQueuePair(code), [Held(), Held(bad=True), Held()]
    link = rail_of(raw, works)
    with pytest.raises(AssertionError, match="broken owner"):
        link.destroy(Status.DISCONNECTED)
    assert [work.statuses for work in works] == [[Status.DISCONNECTED]] * 3
    assert not link.posted
    assert raw.resets == (code == errno.EBUSY)
    link.destroy(Status.DISCONNECTED)
    assert [len(work.statuses) for work in works] == [1] * 3


def test_a_queue_pair_that_cannot_be_stopped_gives_nothing_back() -> None:
    """The device may still write there."""
    work = Held()
    link = rail_of(ScriptedQueuePair(errno.EBUSY, errno.EINVAL), [work])
    with pytest.raises(FabricError, match="not destroyed"):
        link.destroy(Status.DISCONNECTED)
    assert work.statuses == []
    assert link.posted


async def test_a_revocation_stops_what_is_not_on_the_wire() -> None:
    bench = Bench(1, 16 * MIB)
    memory = memoryview(bytearray(16 * MIB))
    reading = bench.read(
        [(0, 2 * MIB), (2 * MIB, 14 * MIB)], [memory[: 2 * MIB], memory[2 * MIB :]]
    )
    await asyncio.sleep(0)
    on_wire = len(bench.rails[0].posted)
    assert 2 < on_wire < 16
    bench.region.revoked = True
    assert bench.freed == []
    bench.rails[0].complete(on_wire - 1)
    bench.reader.pump()
    assert bench.freed == []
    bench.rails[0].complete(1)
    assert bench.freed == [bench.region]  # now the owner may be told
    assert await reading == [Status.OK, Status.LEASE_EXPIRED]
    assert memory[: 2 * MIB] == bench.remote[: 2 * MIB]
    bench.assert_nothing_held()


async def test_an_op_of_an_unknown_region_has_its_status_and_the_others_are_read() -> None:
    bench = Bench(1, 2 * MIB)
    memory = memoryview(bytearray(2 * MIB)).cast("I")
    ops = [ReadOp(RemoteSpan(7, at * MIB, MIB), memory[at * MIB // 4 :][: MIB // 4])
           for at in range(2)]  # fmt: skip
    regions = [Status.LEASE_EXPIRED, bench.region]
    reading = asyncio.ensure_future(bench.reader.run(ops, regions, 60, bench.cut))
    await asyncio.sleep(0)
    assert await bench.finish(reading) == [Status.LEASE_EXPIRED, Status.OK]
    assert not any(memory.cast("B")[:MIB])
    assert memory.cast("B")[MIB:] == bench.remote[MIB:]
    assert await bench.reader.run(ops[:1], regions[:1], 60, bench.cut) == [Status.LEASE_EXPIRED]
    bench.assert_nothing_held()


async def test_reads_of_a_session_that_is_cut_end_with_it() -> None:
    bench = Bench(1, 16 * MIB)
    reading = bench.read([(0, 16 * MIB)], [memoryview(bytearray(16 * MIB))])
    await asyncio.sleep(0)
    bench.cut()  # some of it is on the wire, some waits
    async with asyncio.timeout(10):
        assert await reading == [Status.DISCONNECTED]
        assert await bench.read([(0, 9)], [memoryview(bytearray(9))]) == [Status.DISCONNECTED]
    bench.assert_nothing_held()


async def test_what_failed_first_is_told_also_after_the_deadline() -> None:
    bench = Bench(1, 2 * MIB)
    reading = bench.read([(0, 2 * MIB)], [memoryview(bytearray(2 * MIB))], deadline_s=0.05)
    await asyncio.sleep(0)
    bench.rails[0].complete(1, Status.LEASE_EXPIRED)
    await asyncio.sleep(0.1)
    bench.rails[0].complete(9)
    assert await reading == [Status.LEASE_EXPIRED]
    bench.assert_nothing_held()


async def test_one_failed_piece_fails_its_op_alone() -> None:
    bench = Bench(1, 4 * MIB)
    memory = memoryview(bytearray(4 * MIB))
    reading = bench.read([(0, 2 * MIB), (2 * MIB, 2 * MIB)], [memory[: 2 * MIB], memory[2 * MIB :]])
    await asyncio.sleep(0)
    bench.rails[0].complete(1)
    bench.rails[0].complete(1, Status.LEASE_EXPIRED)
    bench.rails[0].complete(9)
    assert await reading == [Status.LEASE_EXPIRED, Status.OK]
    bench.assert_nothing_held()


@pytest.mark.parametrize("seed", range(20))
async def test_any_order_of_events_gives_everything_back(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "VERBS_DRAIN_NS", 10_000_000)
    rng = random.Random(seed)
    bench = Bench(rng.choice([1, 2, 3]), 4 * MIB)
    jobs: list[tuple[asyncio.Task[list[Status]], list[tuple[int, int]], list[memoryview]]] = []
    actions: list[Callable[[], object]] = [
        lambda: rng.choice(bench.rails).complete(rng.randrange(1, 6)),
        lambda: rng.choice(jobs)[0].cancel() if jobs and rng.random() < 0.2 else None,
        bench.reader.pump,
    ]
    for _ in range(120):
        if rng.random() < 0.2 and len(jobs) < 12:
            sizes = [rng.choice([1, 5_000, 300_000, 2 * MIB]) for _ in range(rng.randrange(1, 5))]
            spans = [(rng.randrange(4 * MIB - size + 1), size) for size in sizes]
            views = [memoryview(bytearray(b"\xa5" * size)) for size in sizes]
            jobs.append((bench.read(spans, views, rng.choice([0.002, 30])), spans, views))
        rng.choice(actions)()
        await asyncio.sleep(0.001 if rng.random() < 0.1 else 0)
    if rng.random() < 0.3:
        bench.cut()
    async with asyncio.timeout(20):
        while not all(job.done() for job, _, _ in jobs):
            for rail in bench.rails:
                rail.complete(5)
            bench.reader.pump()
            await asyncio.sleep(0)
    for rail in bench.rails:  # late bounce reads
        rail.complete(len(rail.posted))
    for job, spans, views in jobs:
        statuses = [Status.DEADLINE] * len(spans) if job.cancelled() else job.result()
        for status, (at, size), view in zip(statuses, spans, views, strict=True):
            if status is Status.OK:
                assert view == bench.remote[at : at + size], f"seed={seed}"
    bench.assert_nothing_held(bounce=1)


# Memory -------------------------------------------------------------------------------------------


def test_ranges_on_touching_pages_are_registered_together() -> None:
    assert group([]) == []
    assert group([(PAGE * 4, 10), (PAGE, 10)]) == [(PAGE, 10), (PAGE * 4, 10)]
    assert group([(PAGE, 10), (PAGE * 2 + 5, 10)]) == [(PAGE, PAGE + 15)]
    assert group([(PAGE, 3 * PAGE), (PAGE + 5, 10)]) == [(PAGE, 3 * PAGE)]


def test_the_registry_finds_only_what_is_whole_inside_and_open() -> None:
    domain = ScriptedDomain()
    registry = Registry()
    first, second = (Landing([domain], at, 100) for at in (1_000, 2_000))  # type: ignore[list-item]
    registry.add(second)
    registry.add(first)
    assert registry.find(1_000, 100) is first
    assert registry.find(1_050, 50) is first
    assert registry.find(1_050, 51) is None
    assert registry.find(999, 2) is None
    assert registry.find(2_099, 1) is second
    for address, length in ((1_099, 2), (990, 11), (900, 300)):
        with pytest.raises(FabricError):
            registry.add(Landing([domain], address, length))  # type: ignore[list-item]
    first.close()
    assert registry.find(1_000, 100) is None
    registry.add(Landing([domain], 1_000, 50))  # type: ignore[list-item]
    assert registry.find(1_000, 50) is not None


def test_registrations_are_bounded_and_closed_ones_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "VERBS_REGISTRATIONS_MAX", 3)
    domain = ScriptedDomain()
    registry = Registry()
    landings = [Landing([domain], n * 1_000, 100) for n in range(1, 5)]  # type: ignore[list-item]
    for landing in landings[:3]:
        registry.add(landing)
    with pytest.raises(FabricError) as caught:
        registry.add(landings[3])
    assert caught.value.status is Status.BUSY
    landings[0].close()
    registry.add(landings[3])


def test_gpu_memory_is_registered_whole_and_never_copied() -> None:
    domain = ScriptedDomain()
    landing = DeviceLanding([domain], 5_000, 4_000, dmabuf_fd=9, offset=64)  # type: ignore[list-item]
    assert landing.device
    assert landing.room(5_500) == 3_500
    assert landing.key(0, 5_500) == (1, 564)  # the device counts from the dma-buf's beginning
    landing.close()
    assert not domain.open
    domain.most = 0
    with pytest.raises(FabricError, match="nvidia-peermem") as caught:
        DeviceLanding([domain], 5_000, 4_000)  # type: ignore[list-item]
    assert caught.value.status is Status.UNSUPPORTED


@pytest.mark.parametrize("seed", range(5))
def test_the_bounce_ring_never_hands_out_bytes_twice(seed: int) -> None:
    rng = random.Random(seed)
    ring = Bounce(ScriptedDomain(), 64 * 1024)  # type: ignore[arg-type]
    held: list[tuple[int, int]] = []
    given = 0
    for _ in range(4_000):
        if held and rng.random() < 0.5:
            ring.give(*held.pop(0), None)
            continue
        size = rng.choice([1, 64, 65, 4_096, 30_000])
        at = ring.take(size)
        if at is None:
            assert held, "an empty ring refuses"
            continue
        given += 1
        for other, length in held:
            assert at + size <= other or other + length <= at, f"seed={seed}"
        held.append((at, size))
    assert given > 500
    ring.close()


def test_statuses_of_completions() -> None:
    expected = {0: Status.OK, 5: Status.DISCONNECTED, 10: Status.LEASE_EXPIRED,
                12: Status.DISCONNECTED, 13: Status.DISCONNECTED}  # fmt: skip
    for code in range(30):
        assert status_of(code) is expected.get(code, Status.DISCONNECTED if code == 20 else
                                               Status.FABRIC_ERROR)  # fmt: skip
    assert name_of(12) == "RETRY_EXC_ERR"
    assert name_of(99) == "status 99"


def test_without_a_cuda_driver_there_is_no_dmabuf() -> None:
    for library in ("libcuda-that-is-not-here.so.1", "libc.so.6"):
        with pytest.raises(FabricError, match="no CUDA driver") as caught:
            dmabuf_of(0x7F00_0000_1000, 4096, library=library)
        assert caught.value.status is Status.UNSUPPORTED
        assert "nvidia-peermem" in caught.value.hint


def test_the_window_follows_the_wire() -> None:
    short, long = limits.VERBS_WINDOW_NS // 4, limits.VERBS_WINDOW_NS + 1
    window = limits.VERBS_WINDOW_BYTES_START
    for _ in range(10):
        window = next_window(window, short)
    assert window == limits.VERBS_WINDOW_BYTES
    assert next_window(window, limits.VERBS_WINDOW_NS // 2) == window
    for _ in range(10):
        window = next_window(window, long)
    assert window == limits.VERBS_WINDOW_BYTES_MIN


async def test_waiting_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the device is bounded; an op beyond that is told so, the others go on."""
    monkeypatch.setattr(limits, "VERBS_READS_QUEUED_MAX", 20)
    bench = Bench(1, 4096)
    whole = memoryview(bytearray(4096))
    spans = [(at, 10) for at in range(21)]
    first = bench.read(spans[:20], [whole[at : at + 10] for at in range(20)])
    await asyncio.sleep(0)
    on_wire = len(bench.rails[0].posted)
    assert 0 < on_wire < 20
    second = bench.read(
        [(at, 10) for at in range(on_wire + 1)],
        [memoryview(bytearray(10)) for _ in range(on_wire + 1)],
    )
    await asyncio.sleep(0)
    assert await bench.finish(first) == [Status.OK] * 20
    assert await bench.finish(second) == [Status.OK] * on_wire + [Status.BUSY]
    over = bench.read([(0, 10)] * 21, [memoryview(bytearray(10)) for _ in range(21)])
    found = await bench.finish(over)
    assert found == [Status.OK] * 20 + [Status.BUSY]
    bench.assert_nothing_held(bounce=1)
