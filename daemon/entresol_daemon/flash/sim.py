"""A device in memory that fails as real ones do, on a seed.

Fault model (sources: ALICE and CrashMonkey for crashes, the ATC'20 fsync study for failed flushes,
TigerBeetle's storage faults for media): every kind of `Fault` below, at a rate or at the k-th
occasion. Invariants: one seed gives one history; a byte is lost only by a crash, a failed flush or
an injected fault; every sector a media fault has touched is in `tainted`, so that an oracle can
tell an excused loss from a bug.

A write is visible to reads at once and durable after the next successful flush. A crash keeps a
random subset of the unflushed 4 KiB sectors, some of them torn at 512 bytes.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from entresol_daemon.flash.device import BLOCK, Check, IoOp, checked
from entresol_proto.status import DeviceError, Status

TEAR = 512  # the unit a drive writes atomically
LATENCY_SPIKE_NS = 1_000_000_000


class Fault(enum.StrEnum):
    """What can go wrong. The first groups are reported or merely late, the last one is silent."""

    READ_EIO = "read_eio"  # one read fails; the next may succeed
    LATENT_SECTOR = "latent_sector"  # a sector reads as an error until it is rewritten
    WRITE_EIO = "write_eio"  # a write fails; nothing of it may be on the device
    TORN_WRITE = "torn_write"  # a write fails after part of it, cut at 512 bytes
    ENOSPC = "enospc"  # a write fails for lack of space
    FLUSH_FAIL = "flush_fail"  # a flush fails; sectors it should have saved may never be saved
    LATENCY = "latency"  # one call takes up to LATENCY_SPIKE_NS
    MISDIRECTED_READ = "misdirected_read"  # bytes of another place, reported as success
    STALE_READ = "stale_read"  # what one sector held before its last write
    MISDIRECTED_WRITE = "misdirected_write"  # written elsewhere, reported as success
    LOST_WRITE = "lost_write"  # never written, reported as success
    BIT_ROT = "bit_rot"  # one bit of a sector at rest flips


READ_FAULTS = (
    Fault.READ_EIO,
    Fault.LATENT_SECTOR,
    Fault.MISDIRECTED_READ,
    Fault.STALE_READ,
    Fault.BIT_ROT,
)
WRITE_FAULTS = (
    Fault.WRITE_EIO,
    Fault.TORN_WRITE,
    Fault.ENOSPC,
    Fault.MISDIRECTED_WRITE,
    Fault.LOST_WRITE,
)


@dataclass(slots=True)
class FaultPlan:
    """When to fail: `rates` per occasion, `at` the k-th occasion (from 1) of a kind.

    An occasion is a read op, a write op, or a flush. `sticky` kinds go on failing from their k-th
    occasion. `injected` counts what happened. Occasions count from when a fault is planned.
    """

    rates: Mapping[Fault, float] = field(default_factory=dict)
    at: Mapping[Fault, int] = field(default_factory=dict)
    sticky: bool = False
    enabled: bool = True
    occasions: dict[Fault, int] = field(default_factory=dict)
    injected: dict[Fault, int] = field(default_factory=dict)

    def draw(self, kinds: Sequence[Fault], rng: random.Random) -> Fault | None:
        """The fault of this occasion, if any."""
        if not self.enabled or not (self.rates or self.at):
            return None
        found: Fault | None = None
        for kind in kinds:
            count = self.occasions[kind] = self.occasions.get(kind, 0) + 1
            wanted = self.at.get(kind)
            hit = wanted is not None and (count >= wanted if self.sticky else count == wanted)
            rate = self.rates.get(kind, 0.0)
            if found is None and (hit or (rate > 0 and rng.random() < rate)):
                found = kind
        if found is not None:
            self.injected[found] = self.injected.get(found, 0) + 1
        return found


@dataclass(frozen=True, slots=True)
class Logged:
    """One entry of the write log: a write, a flush, or a mark of the test's own."""

    kind: str  # "write", "flush" or "mark"
    offset_bytes: int = 0
    data: bytes = b""
    mark: object = None


class SimDevice:
    """See the module. `sleep` (seconds) gives I/O a duration drawn from `latency_ns`."""

    def __init__(
        self,
        size_bytes: int,
        *,
        seed: int = 0,
        plan: FaultPlan | None = None,
        image: bytes | bytearray | None = None,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        latency_ns: tuple[int, int] = (20_000, 200_000),
        keep_log: bool = False,
        name: str = "sim",
    ) -> None:
        if size_bytes % BLOCK or (image is not None and len(image) != size_bytes):
            raise ValueError("size is not a multiple of the block, or not the image's")
        self.size_bytes = size_bytes
        self.name = name
        self.direct = True
        self.rng = random.Random(seed)
        self.plan = plan if plan is not None else FaultPlan()
        self.log: list[Logged] | None = [] if keep_log else None
        self.reads = self.writes = self.flushes = 0
        self.closed = False
        self.tainted: set[int] = set()  # sector numbers that a media fault has touched
        self._sleep = sleep
        self._latency_ns = latency_ns
        self._data = _pages(size_bytes, image)
        self._durable = _pages(size_bytes, image)
        self._dirty: set[int] = set()
        self._dropped: set[int] = set()  # lost by a failed flush: no later flush saves them
        self._latent: set[int] = set()
        self._before: dict[int, bytes] = {}  # sector -> content before its last write

    # -- the Device protocol

    async def read(self, ops: Sequence[IoOp], check: Check | None = None) -> list[Status]:
        try:
            await self._wait()
        except DeviceError:
            return [Status.IO_ERROR] * len(ops)
        return checked([self._read_one(op) for op in ops], check)

    async def write(self, ops: Sequence[IoOp]) -> None:
        await self._wait()
        for op in ops:
            self._check(op)
            self.writes += 1
            self._write_one(op)

    async def flush(self) -> None:
        await self._wait()
        self.flushes += 1
        if self.plan.draw((Fault.FLUSH_FAIL,), self.rng) is not None:
            for sector in sorted(self._dirty):
                if self.rng.random() < 0.5:
                    self._dropped.add(sector)
            raise DeviceError(f"flush of {self.name} failed: injected")
        for sector in self._dirty - self._dropped:
            at = sector * BLOCK
            self._durable[at : at + BLOCK] = self._data[at : at + BLOCK]
        self._dirty &= self._dropped
        if self.log is not None:
            self.log.append(Logged("flush"))

    async def close(self) -> None:
        self.closed = True

    # -- for tests

    def mark(self, what: object) -> None:
        """Put the test's own entry into the write log (an acknowledgement, for instance)."""
        if self.log is not None:
            self.log.append(Logged("mark", mark=what))

    def image(self) -> bytes:
        """What a reader sees now."""
        return bytes(self._data)

    def image_at(self, offset_bytes: int, length_bytes: int) -> bytes:
        """A part of `image`."""
        return bytes(self._data[offset_bytes : offset_bytes + length_bytes])

    def poke(self, offset_bytes: int, data: bytes) -> None:
        """Damage the medium directly (and taint it)."""
        self._data[offset_bytes : offset_bytes + len(data)] = data
        self._durable[offset_bytes : offset_bytes + len(data)] = data
        self._taint(offset_bytes, len(data))

    def crash(self, *, seed: int | None = None, plan: FaultPlan | None = None) -> SimDevice:
        """The device after a power failure now; this one must not be used any more."""
        image = bytearray(self._durable)
        for sector in sorted(self._dirty - self._dropped):
            at = sector * BLOCK
            _land(image, at, self._data[at : at + BLOCK], self.rng)
        self.closed = True
        after = SimDevice(
            self.size_bytes,
            seed=self.rng.getrandbits(32) if seed is None else seed,
            plan=self.plan if plan is None else plan,
            image=image,
            sleep=self._sleep,
            latency_ns=self._latency_ns,
            keep_log=self.log is not None,
            name=self.name,
        )
        after.tainted = set(self.tainted)
        after._latent = set(self._latent)
        return after

    # -- inside

    async def _wait(self) -> None:
        if self.closed:
            raise DeviceError(f"{self.name} is gone")
        slow = self.plan.draw((Fault.LATENCY,), self.rng) is not None
        if self._sleep is not None:
            longest_ns = LATENCY_SPIKE_NS if slow else self._latency_ns[1]
            await self._sleep(self.rng.randint(self._latency_ns[0], longest_ns) / 1e9)
            if self.closed:
                raise DeviceError(f"{self.name} is gone")

    def _check(self, op: IoOp) -> None:
        size = op.view.nbytes
        if op.offset_bytes % BLOCK or size % BLOCK or op.offset_bytes + size > self.size_bytes:
            raise ValueError(f"I/O of {size} bytes at {op.offset_bytes} is unaligned or outside")

    def _taint(self, offset_bytes: int, length_bytes: int) -> None:
        self.tainted.update(
            range(offset_bytes // BLOCK, -(-(offset_bytes + length_bytes) // BLOCK))
        )

    def _read_one(self, op: IoOp) -> Status:
        self._check(op)
        self.reads += 1
        size, offset = op.view.nbytes, op.offset_bytes
        fault = self.plan.draw(READ_FAULTS, self.rng)
        sector = (offset + self.rng.randrange(size)) // BLOCK if fault is not None else 0
        if fault is Fault.LATENT_SECTOR:
            self._latent.add(sector)
            self._taint(sector * BLOCK, BLOCK)
        if fault is Fault.BIT_ROT:
            at = sector * BLOCK + self.rng.randrange(BLOCK)
            bit = 1 << self.rng.randrange(8)
            self._data[at] ^= bit
            self._durable[at] ^= bit
            self._taint(at, 1)
        if fault is Fault.READ_EIO or (
            self._latent
            and not self._latent.isdisjoint(range(offset // BLOCK, (offset + size) // BLOCK))
        ):
            op.view[:] = b"\xa5" * size
            return Status.IO_ERROR
        if fault is Fault.MISDIRECTED_READ:
            offset = self.rng.randrange(0, self.size_bytes - size + 1, BLOCK)
        op.view[:] = self._data[offset : offset + size]
        if fault is Fault.STALE_READ:
            at = sector * BLOCK - offset
            op.view[at : at + BLOCK] = self._before.get(sector, bytes(BLOCK))
        return Status.OK

    def _write_one(self, op: IoOp) -> None:
        data, offset = bytes(op.view), op.offset_bytes
        fault = self.plan.draw(WRITE_FAULTS, self.rng)
        if fault is Fault.WRITE_EIO:
            raise DeviceError(f"write of {self.name} failed: injected")
        if fault is Fault.ENOSPC:
            raise DeviceError(f"write of {self.name} failed: injected", status=Status.NO_SPACE)
        if fault is Fault.LOST_WRITE:
            self._taint(offset, len(data))
            return
        if fault is Fault.MISDIRECTED_WRITE:
            self._taint(offset, len(data))
            offset = self.rng.randrange(0, self.size_bytes - len(data) + 1, BLOCK)
            self._taint(offset, len(data))
        if fault is Fault.TORN_WRITE:
            keep = self.rng.randrange(0, len(data), TEAR)
            old = bytes(self._data[offset + keep : offset + len(data)])
            data = data[:keep] + old
        for at in range(0, len(data), BLOCK):
            sector = (offset + at) // BLOCK
            self._before[sector] = bytes(self._data[offset + at : offset + at + BLOCK])
            self._dirty.add(sector)
            self._dropped.discard(sector)
            self._latent.discard(sector)
        self._data[offset : offset + len(data)] = data
        if self.log is not None:
            self.log.append(Logged("write", offset, data))
        if fault is Fault.TORN_WRITE:
            raise DeviceError(f"write of {self.name} failed: injected, after {keep} bytes")


def _pages(size_bytes: int, image: bytes | bytearray | None) -> memoryview:
    """Writable memory with this content, or zeros that cost nothing until they are written."""
    if image is not None:
        return memoryview(bytearray(image))
    return np.zeros(size_bytes, np.uint8).data


def _land(image: bytearray, at: int, new: bytes | memoryview, rng: random.Random) -> None:
    """One unflushed sector meets a power failure: new, old, or a mix of 512-byte pieces."""
    chance = rng.random()
    if chance < 0.4:
        image[at : at + BLOCK] = new
    elif chance < 0.6:
        for piece in range(0, BLOCK, TEAR):
            if rng.random() < 0.5:
                image[at + piece : at + piece + TEAR] = new[piece : piece + TEAR]


def crash_images(
    base: bytes, log: Sequence[Logged], rng: random.Random, *, subsets: int = 2
) -> Iterator[tuple[int, bytearray]]:
    """Every state a power failure could leave: for each prefix of `log`, the image with none of
    the unflushed sectors, with all of them, and `subsets` random mixes (torn at 512 bytes).

    Yields (entries of the log that had happened, image). Prefixes that end in a mark are skipped:
    they have the images of the entry before.
    """
    durable = bytearray(base)
    unsynced: list[tuple[int, bytes]] = []  # sectors in the order written
    for number, entry in enumerate(log, start=1):
        if entry.kind == "flush":
            for at, data in unsynced:
                durable[at : at + BLOCK] = data
            unsynced.clear()
            yield number, bytearray(durable)
        elif entry.kind == "write":
            unsynced += [
                (entry.offset_bytes + at, entry.data[at : at + BLOCK])
                for at in range(0, len(entry.data), BLOCK)
            ]
            yield number, bytearray(durable)
            everything = bytearray(durable)
            for at, data in unsynced:
                everything[at : at + BLOCK] = data
            yield number, everything
            for _ in range(subsets):
                mixed = bytearray(durable)
                for at, data in unsynced:
                    _land(mixed, at, data, rng)
                yield number, mixed
