"""Fail the k-th I/O, k = 1, 2, 3 ... until the workload gets through (spdk's loop).

A workload is a fixed life over a simulated device, or one operation on the keyring's files. One
attempt lets the k-th occasion of one kind of fault fail, once or for ever from there on; afterwards
everything is opened again on a device that is well. Invariants checked: no exception but the
documented ones, no wrong byte, nothing acknowledged lost, nothing forgotten back, every hang ends,
and the engine's counters equal what was injected.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from entresol_daemon.flash.engine import Engine, EngineOptions
from entresol_daemon.flash.index import ABSENT
from entresol_daemon.flash.sim import Fault, FaultPlan, SimDevice
from entresol_daemon.keys.keyring import Keyring, TenantQuota
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import DeviceError, KeyringError, Status
from tests import simloop
from tests.flashlab import (
    FORGOTTEN,
    NAMESPACES,
    OPTIONS,
    Name,
    device_bytes,
    drop_namespace,
    get,
    key_of,
    open_engine,
    put,
    victims,
)
from tests.unit.keyring_lab import (
    KEK_B,
    Crash,
    FaultyCalls,
    everything,
    keys_of,
    open_any_kek,
    open_ring,
    seeded,
    wrapped_of,
)

HANG_S = 30.0
SEGMENTS = 10
HANG = "hang"
KINDS: tuple[Fault | str, ...] = (
    Fault.READ_EIO, Fault.WRITE_EIO, Fault.TORN_WRITE, Fault.ENOSPC, Fault.FLUSH_FAIL, HANG,
)  # fmt: skip
SECONDS_MAX = 40_000.0  # of virtual time: a life in which every call hangs ends within


@dataclass(slots=True)
class Outcome:
    """What one attempt, or many, showed."""

    tried: int = 0
    injected: int = 0
    condemned: int = 0
    refused: int = 0  # openings that said what the device said
    wrong: int = 0
    lost: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep the first few words."""
        if len(self.notes) < 5:
            self.notes.append(text)

    def add(self, other: Outcome) -> None:
        """Take in another one."""
        for name in ("tried", "injected", "condemned", "refused", "wrong", "lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for text in other.notes:
            self.note(text)


class HangingDevice(SimDevice):
    """The k-th call, or every one from there on, takes HANG_S."""

    hang_at = 0
    hang_for_ever = False
    calls = 0
    hung = 0

    async def _wait(self) -> None:
        self.calls += 1
        if self.hang_at and (
            self.calls >= self.hang_at if self.hang_for_ever else self.calls == self.hang_at
        ):
            self.hung += 1
            await asyncio.sleep(HANG_S)
        await super()._wait()


def make_device(kind: Fault | str, k: int, sticky: bool, seed: int, size: int) -> HangingDevice:
    """A blank one with its fault planned."""
    plan = FaultPlan() if kind == HANG else FaultPlan(at={Fault(kind): k}, sticky=sticky)
    device = HangingDevice(size, seed=seed, plan=plan, sleep=asyncio.sleep)
    if kind == HANG:
        device.hang_at, device.hang_for_ever = k, sticky
    return device


class Work:
    """A life over one device. Remembers what was acknowledged; `engines` are all it opened."""

    def __init__(self, seed: int, options: EngineOptions) -> None:
        self.rng = random.Random(seed)
        self.options = options
        self.engines: list[Engine] = []
        self.ever: dict[Name, set[bytes]] = {}
        self.durable: dict[Name, bytes] = {}
        self.gone: dict[Name, set[bytes]] = {}

    async def opened(self, device: SimDevice) -> Engine:
        engine = await open_engine(device, self.options)
        self.engines.append(engine)
        return engine

    async def put(self, engine: Engine, number: int) -> None:
        name = (NAMESPACES[number % 3], key_of(number))
        if engine.index.find(*name) != ABSENT:
            return
        data = self.rng.randbytes(self.rng.randrange(100, 20_000))
        self.ever.setdefault(name, set()).add(data)
        slot, future = put(engine, name, data)
        if slot == -1:
            assert await future in (Status.NO_SPACE, Status.IO_ERROR)
            return
        status = await future
        assert status in (Status.OK, Status.IO_ERROR, Status.NO_SPACE)
        if status is Status.OK:
            self.durable[name] = data
            self.gone.get(name, set()).discard(data)
        else:
            assert engine.index.find(*name) == ABSENT

    async def fill(self, engine: Engine, first: int, last: int) -> None:
        await asyncio.gather(*(self.put(engine, n) for n in range(first, last)))

    async def forget(self, engine: Engine, names: Sequence[Name]) -> None:
        """Remove, then wait for the barrier; only then are they gone for good."""
        for name in names:
            slot = engine.index.find(*name)
            if slot != ABSENT:
                engine.remove(slot, FORGOTTEN)
                self.durable.pop(name, None)
        await self.barrier(engine, names)

    async def drop(self, engine: Engine, namespace: bytes) -> None:
        names = [name for name in self.ever if name[0] == namespace]
        drop_namespace(engine, namespace)
        for name in names:
            self.durable.pop(name, None)
        await self.barrier(engine, names)

    async def barrier(self, engine: Engine, names: Sequence[Name]) -> None:
        try:
            await engine.barrier()
        except DeviceError:
            return
        for name in names:
            self.gone[name] = set(self.ever.get(name, ()))

    async def evict(self, engine: Engine, segment: int, kept: int = 2) -> None:
        for r in await engine.evict(segment, lambda slots: slots[::kept]):
            self.durable.pop((r.namespace_id, r.wire_key), None)

    async def read_all(self, engine: Engine) -> None:
        for slot in engine.index.live_slots().tolist():
            name = (engine.index.namespace_of(slot), engine.index.key_of(slot))
            status, data = await get(engine, name)
            assert status in (Status.OK, Status.IO_ERROR), status
            if status is Status.OK:
                assert data in self.ever[name], f"wrong bytes of {name}"

    async def verify(self, device: SimDevice, outcome: Outcome) -> None:
        """Everything acknowledged is there, on a device that is well again."""
        engine = await open_engine(device, self.options)
        for name, data in self.durable.items():
            if await get(engine, name) != (Status.OK, data):
                outcome.lost += 1
                outcome.note(f"lost {name}")
        lost_tombstones = sum(each.stats.tombstones_lost for each in self.engines)
        for name, versions in self.ever.items():
            status, data = await get(engine, name)
            if status not in (Status.OK, Status.MISS):
                outcome.note(f"{name} is {status.label} on a device that is well")
            elif status is Status.OK and data not in versions:
                outcome.wrong += 1
                outcome.note(f"wrong bytes of {name}")
            elif status is Status.OK and data in self.gone.get(name, ()) and not lost_tombstones:
                outcome.note(f"{name} came back")
        await engine.close(clean=False)


Life = Callable[[Work, SimDevice], Any]


async def _small(work: Work, device: SimDevice) -> None:
    """Put, forget, evict with kept blocks, put again, read, close cleanly."""
    engine = await work.opened(device)
    try:
        await work.fill(engine, 0, 18)
        await work.forget(engine, [(NAMESPACES[n % 3], key_of(n)) for n in range(0, 18, 4)])
        for segment in victims(engine)[:2]:
            await work.evict(engine, segment)
        await work.fill(engine, 20, 30)
        await work.read_all(engine)
    finally:
        await engine.close(clean=True)


async def _recover(work: Work, device: SimDevice) -> None:
    """Two openings after crashes, each with footers to read and segments to scan."""
    for first in (0, 12):
        engine = await work.opened(device)
        try:
            await work.fill(engine, first, first + 12)
            await work.forget(engine, [(NAMESPACES[first % 3], key_of(first))])
            await work.read_all(engine)
        finally:
            await engine.close(clean=False)


async def _checkpoint(work: Work, device: SimDevice) -> None:
    """Clean closes with a checkpoint, and openings from it."""
    for first in (0, 8, 16):
        engine = await work.opened(device)
        try:
            await work.fill(engine, first, first + 8)
        finally:
            await engine.close(clean=True)


async def _reinsert(work: Work, device: SimDevice) -> None:
    """Eviction that keeps two blocks of three, again and again."""
    engine = await work.opened(device)
    try:
        for first in range(0, 32, 8):
            await work.fill(engine, first, first + 8)
            for segment in victims(engine)[:1]:
                await work.evict(engine, segment, 1)
            for segment in victims(engine)[:1]:
                await work.evict(engine, segment, 3)
        await work.read_all(engine)
    finally:
        await engine.close(clean=True)


async def _drop(work: Work, device: SimDevice) -> None:
    """Namespaces dropped between puts, and their segments evicted."""
    engine = await work.opened(device)
    try:
        for first in (0, 12, 24):
            await work.fill(engine, first, first + 12)
            await work.drop(engine, NAMESPACES[(first // 12) % 3])
            for segment in victims(engine)[:1]:
                await work.evict(engine, segment)
        await work.read_all(engine)
    finally:
        await engine.close(clean=True)


async def _scrub(work: Work, device: SimDevice) -> None:
    """Everything written, then all of it verified twice."""
    engine = await work.opened(device)
    try:
        await work.fill(engine, 0, 18)
        for _ in range(2):
            for info in engine.segments():
                for _, status in await engine.scrub(engine.segment_slots(info.segment)):
                    assert status is Status.IO_ERROR, "a refused read is not corruption"
    finally:
        await engine.close(clean=True)


LIVES: dict[str, Life] = {
    "small": _small, "recover": _recover, "checkpoint": _checkpoint, "reinsert": _reinsert,
    "drop": _drop, "scrub": _scrub,
}  # fmt: skip
NEEDS_NO_CONDEMNING = (Fault.READ_EIO, HANG)


def attempt(
    life: str, seed: int, kind: Fault | str, k: int, sticky: bool, folder: Path,
    make: Callable[..., HangingDevice] = make_device,
) -> Outcome:  # fmt: skip
    """One life with the k-th occasion failing."""
    options = OPTIONS
    if life == "checkpoint":
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        options = replace(OPTIONS, checkpoint_path=folder / "index.arrow")
    device = make(kind, k, sticky, seed, device_bytes(SEGMENTS))
    work, outcome = Work(seed, options), Outcome()

    async def live() -> None:
        await LIVES[life](work, device)

    try:
        simloop.run(live(), seed, loop=simloop.SimLoop(seed, seconds_max=SECONDS_MAX))
    except DeviceError:
        outcome.refused = 1  # opening says what the device said
    outcome.injected = device.hung + sum(device.plan.injected.values())
    outcome.tried = int(outcome.injected > 0)
    if not outcome.refused:
        _compare_counters(work, device, kind, outcome)
    outcome.condemned = sum(engine.stats.condemned for engine in work.engines)
    device.plan.enabled = False
    well = device.crash()
    simloop.run(work.verify(well, outcome), seed)
    return outcome


def _compare_counters(
    work: Work, device: HangingDevice, kind: Fault | str, outcome: Outcome
) -> None:
    """The engines' counters are what was injected."""
    counted = {
        "reads": sum(engine.stats.refused_reads for engine in work.engines),
        "writes": sum(engine.stats.refused_writes for engine in work.engines),
        "flushes": sum(engine.stats.refused_flushes for engine in work.engines),
    }
    made = sum(device.plan.injected.values())
    wanted = dict.fromkeys(counted, 0)
    if kind == Fault.READ_EIO:
        wanted["reads"] = made
    elif kind == Fault.FLUSH_FAIL:
        wanted["flushes"] = made
    elif kind != HANG:
        wanted["writes"] = made
    if counted != wanted:
        outcome.note(f"injected {wanted}, counted {counted}")


# -- the keyring's files


def _rotate(ring: Keyring) -> object:
    return ring.rotate("acme", now_unix_s=7)


OPERATIONS: dict[str, Callable[[Keyring], object]] = {
    "add": lambda ring: ring.add_tenant("new", now_unix_s=7),
    "quota": lambda ring: ring.set_quota("acme", TenantQuota(weight=7)),
    "rotate": _rotate,
    "retire": lambda ring: ring.retire("acme", 1),
    "erase": lambda ring: ring.erase("acme", now_unix_s=7),
    "rewrap": lambda ring: ring.rewrap(KEK_B),
    "namespace": lambda ring: ring.remember_namespace(
        "acme", NamespaceDescriptor(model="m2").canonical()
    ),
    "forget": lambda ring: ring.forget_namespaces("acme", ring.namespaces_of("acme")),
}
FILE_KINDS = ("killed", "eio", "enospc")
_ERRNO = {"eio": errno.EIO, "enospc": errno.ENOSPC}


class StickyCalls(FaultyCalls):
    """As `FaultyCalls`, but an error lasts from the k-th call on."""

    def _step(self, what: str) -> bool:
        self.count += 1
        self.trace.append(what)
        return 0 < self.k <= self.count


def keys_attempt(operation: str, kind: str, k: int, sticky: bool, folder: Path) -> Outcome:
    """One operation whose k-th system call kills the process, or fails; then all is well again."""
    outcome = Outcome()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seeded(folder)
    blobs = wrapped_of(folder, "acme")
    crash = kind == "killed"
    number = _ERRNO.get(kind, errno.EIO)
    calls = (StickyCalls if sticky else FaultyCalls)(crash=crash, error_number=number)
    ring = open_ring(folder, calls=calls)
    before = keys_of(ring)
    calls.count, calls.k = 0, k
    failure: KeyringError | None = None
    try:
        OPERATIONS[operation](ring)
    except Crash:
        pass
    except KeyringError as error:
        failure = error
    outcome.injected = outcome.tried = int(calls.count >= k)
    calls.k = -1
    if failure is not None:
        if failure.status is not Status.IO_ERROR or os.strerror(number) not in str(failure):
            outcome.note(f"{operation}: {failure}")
        if ring.was_erased("acme"):
            outcome.note("an erasure failed and says it is done")
        OPERATIONS[operation](ring)  # a try later, on a disk that is well
    done = not crash or not outcome.injected
    expected = keys_of(ring) if done else None
    ring.close()
    _judge_keys(folder, operation, before, expected, blobs, outcome)
    return outcome


def _judge_keys(
    folder: Path, operation: str, before: dict[str, Any], expected: dict[str, Any] | None,
    blobs: list[bytes], outcome: Outcome,
) -> None:  # fmt: skip
    ring = open_any_kek(folder)
    now = keys_of(ring)
    if expected is not None and now != expected:
        outcome.note(f"{operation}: not what was acknowledged")
        outcome.lost += 1
    for name, (naming, deks, _, _) in before.items():
        if name not in now:
            if (name, operation) != ("acme", "erase"):
                outcome.lost += 1
                outcome.note(f"{operation}: {name} is lost")
            continue
        shared = deks.keys() & now[name][1].keys()
        if now[name][0] != naming or any(now[name][1][v] != deks[v] for v in shared):
            outcome.wrong += 1
            outcome.note(f"{operation}: {name} has another key")
    if "acme" not in now and any(blob in everything(folder) for blob in blobs):
        outcome.wrong += 1
        outcome.note("an erased key is still in a file")
    if not ring.was_erased("acme"):
        ring.erase("acme", now_unix_s=8)
    ring.close()
    if any(blob in everything(folder) for blob in blobs):
        outcome.wrong += 1
        outcome.note("an erased key is still in a file, after erasing")
