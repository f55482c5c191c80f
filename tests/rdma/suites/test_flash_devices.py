"""The flash engine on block devices that fail: dm-flakey, dm-log-writes, dm-dust, null_blk.

The engine runs as the daemon runs it, over a raw device with O_DIRECT and threads of its own; the
kernel does the damage. Random work is judged by the oracle of the simulation. Wrong bytes 0 always;
durable lost 0 wherever the device kept what it had flushed. `ENTRESOL_PROOF_SEED` and
`ENTRESOL_PROOF_UNITS` say where to begin and how many lives each fault gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from flashlab import Name, Oracle, device_bytes, get_all, open_engine

from entresol_daemon.flash.counted import CountedDevice
from entresol_daemon.flash.device import IoOp
from entresol_daemon.flash.engine import Engine
from entresol_daemon.flash.file_device import FileDevice
from entresol_daemon.flash.sim import Fault, FaultPlan
from entresol_proto.status import DeviceError, FormatError, Status
from tests.rdma import blockdev
from tests.rdma.evidence import figure, trying
from tests.unit.test_flash_oracle import SEGMENTS, Run

pytestmark = pytest.mark.timeout(600)

SEED = int(os.environ.get("ENTRESOL_PROOF_SEED", "1"))
UNITS = int(os.environ.get("ENTRESOL_PROOF_UNITS", "1"))
BYTES = device_bytes(SEGMENTS)
SECTORS = BYTES // blockdev.SECTOR
STEPS = 45  # of work before, during and after a fault
READS_IN_A_FAULT = 24  # beside those of the work, so that a fault of reads is met
FELT_S = 0.05
CYCLES = 2  # faults in one life
IMAGES_MAX = 16  # states of one log that are opened and compared
CANARY = os.environ.get("ENTRESOL_PROOF_CANARY", "").split(",")  # bugs to plant: "no flush"

Switch = Callable[[bool], None]


class DeviceRun(Run):
    """One seed's life on a device of the kernel: work, a fault, its end, a crash, all is read."""

    def __init__(self, seed: int, path: str, switch: Switch, *, media: bool, lies: bool) -> None:
        """`switch` begins and ends the fault. `media`: it may damage or lose what was flushed.
        `lies`: while it lasts, what the device acknowledges is not so."""
        super().__init__(seed, FaultPlan(), media=media, steps=STEPS)
        self.path = path
        self.switch = switch
        self.lies = lies
        self.lying = False
        self.lives = 0
        self.felt = 0  # what the fault did to the engine, by the engine's own count

    @property
    def faulty(self) -> bool:
        return bool(self.plan.rates)

    async def open(self) -> tuple[FileDevice, Engine]:
        device = await FileDevice.open(self.path, BYTES)
        assert device.direct, "the device is read and written past the page cache"
        return device, await open_engine(device, seed=self.seed)

    async def go(self) -> Oracle:
        device, self.engine = await self.open()
        for _ in range(CYCLES):
            await self.work()
            self.plan.rates = {Fault.READ_EIO: 1.0}
            self.lying = self.lies
            self.switch(True)
            await self.work(STEPS // 2)
            for _ in range(READS_IN_A_FAULT):
                self.later(self.read(self.engine))
            await asyncio.sleep(FELT_S)  # for what is under way to meet the fault
            if self.lies:  # the power fails: nothing after the cut has happened
                device = await self.reborn(device, clean=False)
            else:
                self.switch(False)
                await self.settle()  # reads that met the fault may say so
                self.plan.rates = {Fault.READ_EIO: 1.0} if self.media else {}
                await self.work(STEPS // 2)
                device = await self.reborn(device, clean=self.rng.random() < 0.3)
            self.lives += 1
        engine = self.engine
        assert engine is not None
        await engine.close(clean=True)
        self.count(engine)
        await device.close()
        return self.oracle

    def count(self, engine: Engine) -> None:
        """What an engine that has ended met; damage on a medium also where it opened."""
        stats, found = engine.stats, engine.recovery
        self.lost_tombstones += stats.tombstones_lost
        self.condemned += stats.condemned
        self.felt += stats.refused_reads + stats.refused_writes + stats.refused_flushes
        self.felt += stats.read_retries + stats.corrupt_reads
        if self.media:
            self.felt += found.records_damaged + found.segments_damaged

    async def work(self, steps: int = STEPS) -> None:
        """Random operations; ends early where the engine has given up."""
        for _ in range(steps):
            engine = self.engine
            assert engine is not None
            if engine.failed:
                return
            await asyncio.sleep(0)  # the writer and the readers have their turn
            action = self.rng.random()
            if action < 0.60:
                await self.put(engine)
            elif action < 0.78:
                self.later(self.read(engine))
            elif action < 0.86:
                self.remove(engine)
            elif action < 0.90:
                await self.barrier(engine)
            elif action < 0.94:
                await self.evict(engine)
            else:
                await asyncio.sleep(self.rng.random() * 0.003)

    async def ack(self, name: Name, data: bytes, future: asyncio.Future) -> None:  # type: ignore[type-arg]
        status = await future
        if self.lying:
            self.felt += status is Status.OK  # a lie
        else:
            self.oracle.acked(name, data, status)

    async def barrier(self, engine: Engine) -> None:
        if not self.lying:
            await super().barrier(engine)

    async def reborn(self, device: FileDevice, *, clean: bool) -> FileDevice:
        """The engine ends, the device heals, another engine must find what it owes."""
        engine = self.engine
        assert engine is not None
        if clean and not engine.failed:
            await engine.close(clean=True)
        for name, story in self.oracle.stories.items():
            if engine.index.find(*name) < 0:
                story.required = None  # dropped by an eviction that has not returned
        self.engine = None
        await engine.close(clean=False)
        await self.settle()
        await device.close()
        self.count(engine)
        self.gone.clear()
        self.switch(False)
        self.lying, self.plan.rates = False, {}
        device, fresh = await self.open()
        excused = self.media or self.lost_tombstones > 0
        await self.oracle.check(fresh, media=excused, after_crash=True)
        self.engine = fresh
        return device


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary: a device whose flush does nothing, and says that it did."""
    if "no flush" in CANARY:

        async def flush(self: FileDevice) -> None:
            """Nothing."""

        async def commit(self: CountedDevice, ops: Sequence[IoOp]) -> tuple[int, int]:
            await self.write(ops)
            return 1, 1

        monkeypatch.setattr(FileDevice, "flush", flush)
        monkeypatch.setattr(CountedDevice, "commit", commit)


def seeds() -> range:
    return range(SEED, SEED + UNITS)


async def live(fault: str, seed: int, path: str, switch: Switch, **kind: bool) -> int:
    """One life, counted under `fault`; how often the engine felt it."""
    run = DeviceRun(seed, path, switch, **kind)
    with trying(fault) as trial:
        try:
            oracle = await run.go()
        finally:
            found = run.oracle
            trial.wrong_bytes += found.wrong
            trial.durable_lost += found.lost
            figure(
                "flash device", fault=fault, seed=seed, lives=run.lives, reads=found.reads,
                blocks_checked=found.blocks_checked, puts=found.puts, condemned=run.condemned,
                felt=run.felt, corrupt=found.corrupt, notes=found.notes[:3],
            )  # fmt: skip
        assert oracle.clean, f"seed={seed} {fault}: {oracle.verdict()}"
        assert oracle.blocks_checked > 2, f"seed={seed} {fault}: hardly anything was there to lose"
    return run.felt


def in_a_guest() -> None:
    """A module's fixtures come before the suites' own look at where they are."""
    if os.environ.get("ENTRESOL_RDMA_GUEST") != "1":
        pytest.skip("not run here: no soft-RoCE guest (make test-rdma)")


@pytest.fixture(scope="module")
def disks() -> list[str]:
    in_a_guest()
    return blockdev.ram_disks()


@pytest.fixture(scope="module")
def have() -> set[str]:
    in_a_guest()
    return blockdev.targets()


@contextlib.contextmanager
def flakey(disk: str) -> Iterator[tuple[str, Callable[[str], None]]]:
    """A device over `disk`, and what to call to have dm-flakey do something to it all the time."""
    blockdev.wipe(disk, BYTES)
    with blockdev.mapped("entresol-flakey", BYTES, "linear", f"{disk} 0") as device:

        def do(features: str) -> None:
            if not features:
                device.switch("linear", f"{disk} 0")
            else:
                words = features.split()
                count = "" if features == "down" else f"{len(words)} {features}"
                device.switch("flakey", f"{disk} 0 0 3600 {count}".strip())

        yield device.path, do


FLAKEY = {
    # what dm-flakey does: (its features, whether the medium is damaged, whether it lies)
    "power cut": ("drop_writes", False, True),
    "writes fail": ("error_writes", False, False),
    "reads fail": ("error_reads", False, False),
    "device gone": ("down", False, False),
    "reads corrupted": ("random_read_corrupt 500000000", True, False),
    "writes corrupted": ("random_write_corrupt 600000000", True, False),
    "one byte of every write": ("corrupt_bio_byte 77 w 165 0", True, False),
    "one byte of every read": ("corrupt_bio_byte 4500 r 90 0", True, False),
}


@pytest.mark.parametrize("what", list(FLAKEY))
async def test_dm_flakey(what: str, disks: list[str], have: set[str]) -> None:
    if "flakey" not in have:
        pytest.skip("not run here: this kernel has no dm-flakey")
    features, media, lies = FLAKEY[what]
    felt = 0
    for seed in seeds():
        with flakey(disks[0]) as (path, do):
            try:
                do(features)
            except OSError:
                pytest.skip(f"not run here: this kernel's dm-flakey has no {features.split()[0]}")
            do("")
            felt += await live(
                f"flakey: {what}", seed, path, lambda on, do=do: do(features if on else ""),
                media=media, lies=lies,
            )  # fmt: skip
    assert felt, f"{what}: nobody felt it"


async def test_dm_dust(disks: list[str], have: set[str]) -> None:
    """Bad blocks that cannot be read until they are written again."""
    if "dust" not in have:
        pytest.skip("not run here: this kernel has no dm-dust")
    felt = 0
    for seed in seeds():
        rng = random.Random(seed)
        blockdev.wipe(disks[0], BYTES)
        with blockdev.mapped("entresol-dust", BYTES, "dust", f"{disks[0]} 0 4096") as device:

            def switch(on: bool, device: blockdev.Mapped = device) -> None:
                device.message("clearbadblocks")
                device.message("enable" if on else "disable")
                for block in rng.sample(range(16, BYTES // 4096 - 1), 40 if on else 0):  # noqa: B023
                    device.message("addbadblock", str(block))

            felt += await live(
                "dust: bad blocks", seed, device.path, switch, media=False, lies=False
            )  # fmt: skip
    assert felt, "nobody felt it"


async def test_null_blk_bad_sectors() -> None:
    """Reads and writes over bad sectors fail, in part where this kernel's null_blk can do that."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(blockdev.null_disk(2, ("badblocks_partial_io",)))
        except blockdev.NotOfferedError as error:
            pytest.skip(f"not run here: {error}")
        felt = sum([await _bad_sectors(disk, seed) for seed in seeds()])
        assert felt, "nobody felt it"


async def _bad_sectors(disk: blockdev.NullDisk, seed: int) -> int:
    rng = random.Random(seed)
    blockdev.wipe(disk.path, BYTES)
    bad: list[tuple[int, int]] = []

    def switch(on: bool) -> None:
        while bad:
            disk.mend(*bad.pop())
        for _ in range(16 if on else 0):
            first = rng.randrange(128, SECTORS - 16)
            bad.append((first, first + rng.choice((0, 3, 7, 15))))
            disk.spoil(*bad[-1])

    try:
        return await live("null_blk: bad sectors", seed, disk.path, switch, media=False, lies=False)
    finally:
        switch(False)


# Every write in order: dm-log-writes --------------------------------------------------------------


class LoggedRun(DeviceRun):
    """Writes a mark behind what the device has seen when an acknowledgement arrives."""

    def __init__(self, seed: int, device: blockdev.Mapped) -> None:
        super().__init__(seed, device.path, lambda on: None, media=False, lies=False)
        self.log = device
        self.owed: dict[str, dict[Name, bytes]] = {}

    async def ack(self, name: Name, data: bytes, future: asyncio.Future) -> None:  # type: ignore[type-arg]
        await super().ack(name, data, future)
        if not future.result():
            mark = f"m{len(self.owed)}"
            self.owed[mark] = {
                name: story.required
                for name, story in self.oracle.stories.items()
                if story.required is not None
            }
            self.log.message("mark", mark)

    async def write(self) -> None:
        """Puts and reads alone: whatever was acknowledged stays owed to the end."""
        device, self.engine = await self.open()
        for _ in range(3 * STEPS):
            if self.rng.random() < 0.8:
                await self.put(self.engine)
            else:
                await asyncio.sleep(self.rng.random() * 0.003)
        await asyncio.sleep(0.05)
        engine, self.engine = self.engine, None
        await engine.close(clean=False)
        await self.settle()
        await device.close()


async def _compare(path: str, image: bytearray, run: LoggedRun, owed: dict[Name, bytes]) -> str:
    """Open what a power cut would have left; what is wrong or missing, in words."""
    blockdev.rewrite(path, image)
    device = await FileDevice.open(path, BYTES)
    try:
        try:
            engine = await open_engine(device, seed=run.seed)
        except (FormatError, DeviceError) as error:
            return f"it did not open: {error}" if owed else ""
        try:
            found = await get_all(engine)
            for name, (status, data) in found.items():
                story = run.oracle.stories.get(name)
                if not status and (story is None or data not in story.ever):
                    return f"wrong bytes of {name!r}"
            for name, wanted in owed.items():
                status, data = found.get(name, (Status.MISS, b""))
                if status or data != wanted:
                    return f"lost {name!r}: {status.label}"
        finally:
            await engine.close(clean=False)
    finally:
        await device.close()
    return ""


async def test_dm_log_writes(disks: list[str], have: set[str]) -> None:
    """Power may be cut after any write: what was acknowledged is there, whatever else is."""
    if "log-writes" not in have:
        pytest.skip("not run here: this kernel has no dm-log-writes")
    for seed in seeds():
        base, log, replay = disks
        blockdev.wipe(base, BYTES)
        blockdev.wipe(log, 1 << 20)
        parameters = f"{base} {log}"
        with blockdev.mapped("entresol-log", BYTES, "log-writes", parameters) as device:
            run = LoggedRun(seed, device)
            await run.write()
        entries = blockdev.read_log(log)
        flushes = sum(entry.flush for entry in entries)
        assert flushes >= 5 or "no flush" in CANARY, f"seed={seed}: flushes do not reach the device"
        assert run.owed, f"seed={seed}: nothing was acknowledged"
        await _cut_everywhere(entries, replay, run)


async def _cut_everywhere(entries: list[blockdev.Logged], replay: str, run: LoggedRun) -> None:
    rng = random.Random(run.seed)
    cuts = sorted(rng.sample(range(len(entries)), min(IMAGES_MAX, len(entries))))
    image, owed, at = bytearray(BYTES), dict[Name, bytes](), 0
    for cut in cuts:
        flushed = max((n + 1 for n in range(cut) if entries[n].flush), default=0)
        for entry in entries[at:flushed]:
            image[entry.offset_bytes : entry.offset_bytes + len(entry.data)] = entry.data
        at = max(at, flushed)
        for entry in entries[:cut]:
            owed = run.owed.get(entry.mark, owed)
        with trying("log-writes: power cut") as trial:
            wrong = await _compare(replay, _torn(image, entries[at:], rng), run, owed)
            trial.wrong_bytes += wrong.startswith("wrong")
            trial.durable_lost += wrong.startswith(("lost", "it did"))
            assert not wrong, f"seed={run.seed} cut after {cut} of {len(entries)} entries: {wrong}"


def _torn(image: bytearray, rest: list[blockdev.Logged], rng: random.Random) -> bytearray:
    """What no flush has covered yet: any of it may have arrived, or a part of it."""
    state = bytearray(image)
    for entry in rest:
        if entry.flush:
            break
        if rng.random() < 0.5:
            part = rng.randrange(0, len(entry.data) + 1, 512)
            size = rng.choice((len(entry.data), part))
            state[entry.offset_bytes : entry.offset_bytes + size] = entry.data[:size]
    return state
