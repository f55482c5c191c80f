"""The scrubber: reads every durable block in turn, at a bounded rate, and drops what is damaged.

A latent error found here is a miss counted today instead of one met by a host next month, and tells
the operator of a drive that goes bad. It needs no keys: record check and payload hash are enough,
so a locked daemon scrubs too. What to read when is decided in `core.scrubbing`. A block that a get
was refused is asked for again a minute later, between cycles and with cycles switched off too: as
long as it stays, every get of it fails and no put can replace it.

Invariants: one read of at most STEP_BYTES_MAX (or one block) is under way at a time; a block leaves
the index only when what is on flash was read twice and is not the block, or the device refused it
twice, a minute apart, and gave another the second time; a restart goes on where the last one was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from entresol_daemon.compute import ComputeError
from entresol_daemon.core.scrubbing import (
    INTERVAL_NS,
    REFUSED_PAUSE_NS,
    START_NS,
    Name,
    Pace,
    Progress,
    steps,
)
from entresol_daemon.flash.index import ABSENT
from entresol_daemon.flash.segment import extent_bytes
from entresol_daemon.keys import files
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.removal import Removal
from entresol_proto.status import DeviceError, EntresolError, Status

CHANCES_NS_MAX = 3 * REFUSED_PAUSE_NS  # a cycle waits so long for refused blocks
SAVE_NS = 60_000_000_000
CHANCE_BYTES_PER_S = 1 << 20  # at which refused blocks are asked for again where cycles are off
_VERSION = 1

log = logging.getLogger("entresol.scrub")


class Scrubber:
    """See the module. `start` it once, `close` it before the engine.

    Attributes:
        found: blocks that were damaged or refused for good, since this start of the daemon.
        scrubbed_bytes: bytes verified since then.
    """

    def __init__(
        self, parts: Parts, removal: Removal, *, busy: Callable[[], bool], file: Path | None
    ) -> None:
        """`busy` tells whether gets wait for flash. `file` keeps the place over a restart."""
        self.progress = Progress()
        self.found = 0
        self.scrubbed_bytes = 0
        self._parts = parts
        self._removal = removal
        self._busy = busy
        self._file = file
        self._refused = parts.refused
        self._saved_ns = 0
        self._wanted = asyncio.Event()
        self._under_way = False
        self._task: asyncio.Task[None] | None = None

    @property
    def on(self) -> bool:
        """False when the configuration switched it off."""
        return self._parts.config.flash.scrub_bytes_per_s > 0

    @property
    def running(self) -> bool:
        """True while a cycle is under way."""
        return self._under_way

    @property
    def state(self) -> str:
        """off, resting or running."""
        return "off" if not self.on else "running" if self.running else "resting"

    def share(self) -> float:
        """How much of the present cycle is done, 0 to 1; 0 between cycles."""
        progress, engine = self.progress, self._parts.engine
        if progress.resting:
            return 0.0
        return min(1.0, progress.segment * engine.segment_bytes / engine.capacity_bytes)

    def expected_s(self) -> float:
        """How long a cycle takes with what is on flash now: a day, or longer where the configured
        rate needs longer."""
        rate = self._parts.config.flash.scrub_bytes_per_s
        stored = sum(each.flash_bytes for each in self._parts.accounts.by_name.values())
        return max(INTERVAL_NS / 1e9, stored / rate if rate else 0.0)

    def start(self) -> None:
        """Begin; with cycles switched off, only what gets were refused is looked at."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="scrubber")

    def begin_now(self) -> bool:
        """Start a cycle at once, or let the one under way go on. Returns whether it was under way.

        Raises: EntresolError when the scrubber is off.
        """
        if not self.on or self._task is None or self._task.done():
            raise EntresolError(
                "the scrubber is off",
                hint="set [flash] scrub_bytes_per_s and restart the daemon",
                status=Status.UNSUPPORTED,
            )
        running = self.running
        if not running:
            self._wanted.set()
        return running

    async def close(self) -> None:
        """Stop, and remember the place. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._save(self._progress_json())

    # -- the task

    async def _run(self) -> None:
        try:
            if self._file is not None:
                self._load(await self._parts.compute.run(_read, self._file))
            await self._sleep(START_NS)
            while True:
                try:
                    await self._until_due()
                    self._under_way = True
                    await self._cycle()
                    self._under_way = False
                except (DeviceError, MemoryError) as error:  # it goes on where it was
                    log.warning("event=scrub_waits error=%s", error)
                    await self._sleep(START_NS)
        except Exception:
            log.exception("event=scrubber_broke effect=no_scrubbing")

    async def _sleep(self, wait_ns: int) -> None:
        """Until the time has passed, or somebody wants a cycle now."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ns / 1e9):
                await self._wanted.wait()

    async def _until_due(self) -> None:
        """Until a cycle is due; meanwhile, what gets were refused has its second chance."""
        pace = self._pace()
        while not self._wanted.is_set():
            wait_ns = self.progress.due_in_ns(self._parts.unix_ns())
            if self.on and not wait_ns:
                break
            await self._sleep(min(wait_ns, REFUSED_PAUSE_NS) if self.on else REFUSED_PAUSE_NS)
            await self._second_chances(pace, wait=False)
        self._wanted.clear()

    def _pace(self) -> Pace:
        return Pace(self._parts.config.flash.scrub_bytes_per_s or CHANCE_BYTES_PER_S)

    async def _cycle(self) -> None:
        parts, progress = self._parts, self.progress
        pace = self._pace()
        if progress.resting:
            progress.begin(parts.unix_ns())
        log.info("event=scrub_begins segment=%d", progress.segment)
        found_before = self.found
        count = parts.engine.segment_count
        while progress.segment < count:
            await self._segment(progress.segment, pace)
            progress.segment += 1
            await self._save_sometimes()
        await self._second_chances(pace, wait=True)
        progress.end(parts.unix_ns())
        parts.metrics.scrub_cycles.inc()
        parts.metrics.scrub_cycle_seconds.set(progress.last_cycle_ns / 1e9)
        await self._save_sometimes(now=True)
        log.info(
            "event=scrub_ended cycle=%d found=%d seconds=%d",
            progress.cycles, self.found - found_before, progress.last_cycle_ns // 10**9,
        )  # fmt: skip

    async def _segment(self, number: int, pace: Pace) -> None:
        """Every block that was in the segment when its turn came."""
        engine = self._parts.engine
        slots = engine.segment_slots(number).tolist()
        sizes = [extent_bytes(engine.index.m_sealed_bytes[slot]) for slot in slots]
        at = 0
        for many in steps(sizes):
            names = [_name(self._parts, slot) for slot in slots[at : at + many]]
            size = sum(sizes[at : at + many])
            at += many
            await self._second_chances(pace, wait=False)
            await self._pause(pace, size)
            await self._step([name for name in names if name is not None])

    async def _pause(self, pace: Pace, size_bytes: int) -> None:
        """Until a step of this size may be taken."""
        now_ns = self._parts.now_ns
        while wait_ns := pace.wait_ns(now_ns(), busy=self._busy()):
            await asyncio.sleep(wait_ns / 1e9)
        pace.took(now_ns(), size_bytes)

    async def _step(self, names: list[Name], *, again: Name | None = None) -> None:
        """Read and judge these blocks, those of them that are still there. `again`: one that was
        refused before; it is lost if the device gives another of them and not this one."""
        parts = self._parts
        find = parts.engine.index.find
        slots = [slot for name in names if (slot := find(*name)) != ABSENT]
        if not slots:
            return
        size = sum(extent_bytes(parts.engine.index.m_sealed_bytes[slot]) for slot in slots)
        bad = dict(await parts.engine.scrub(slots))
        now_ns = parts.now_ns()
        self.scrubbed_bytes += size
        parts.metrics.scrubbed_bytes.inc(size)
        # From here to the end without a pause: the slots are those that were read.
        good = [name for slot in slots if slot not in bad and (name := _name(parts, slot))]
        for slot, status in bad.items():
            name = _name(parts, slot)
            if name is None:
                continue
            if status is Status.CORRUPT or (name == again and good):
                self._drop(slot, status)
            else:
                self._refused.refused(name, now_ns)
        if good:
            self._refused.gave(good[-1])
        if self._refused.full:
            log.error("event=scrub_device_refuses blocks=%d effect=asked_later", len(self._refused))
            self._refused.forget()

    def _drop(self, slot: int, status: Status) -> None:
        self.found += 1
        self._parts.metrics.scrub_found[status].inc()
        self._removal.damaged(slot, status)

    async def _second_chances(self, pace: Pace, *, wait: bool) -> None:
        """Ask again for what was refused a while ago; `wait` for those whose time has not come."""
        parts = self._parts
        until_ns = parts.now_ns() + (CHANCES_NS_MAX if wait else 0)
        while (due_ns := self._refused.next_due_ns()) is not None and due_ns <= until_ns:
            await asyncio.sleep(max(0, due_ns - parts.now_ns()) / 1e9)
            for name in self._refused.due(parts.now_ns()):
                slot = parts.engine.index.find(*name)
                if slot != ABSENT:
                    await self._pause(pace, extent_bytes(parts.engine.index.m_sealed_bytes[slot]))
                    witness = self._refused.witness
                    await self._step([name] if witness is None else [name, witness], again=name)
        if wait:
            self._refused.forget()  # the device gave nothing meanwhile: another cycle asks again

    # -- the place

    def _progress_json(self) -> bytes:
        return json.dumps({"version": _VERSION, **asdict(self.progress)}).encode()

    async def _save_sometimes(self, *, now: bool = False) -> None:
        time_ns = self._parts.now_ns()
        if self._file is None or not (now or time_ns - self._saved_ns >= SAVE_NS):
            return
        self._saved_ns = time_ns
        with contextlib.suppress(ComputeError):  # busy or closing: the place is only a hint
            await self._parts.compute.run(self._save, self._progress_json())

    def _save(self, raw: bytes) -> None:
        if self._file is None:
            return
        try:
            files.replace(files.OsCalls(), self._file, raw)
        except OSError as error:
            log.warning("event=scrub_place_not_saved error=%s", error.strerror or error)

    def _load(self, raw: bytes) -> None:
        """Take over what an earlier run left; whatever is wrong with it, begin anew."""
        try:
            fields = json.loads(raw) if raw else {"version": 0}
            if fields.pop("version") == _VERSION:
                found = Progress(**fields)
                numbers = (found.segment, found.cycles, found.began_unix_ns, found.last_cycle_ns)
                if all(type(n) is int and n >= 0 for n in numbers):
                    self.progress = found
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            log.warning("event=scrub_place_unusable effect=begins_anew")


def _read(path: Path) -> bytes:
    try:
        return files.read(files.OsCalls(), path) or b""
    except OSError:
        return b""


def _name(parts: Parts, slot: int) -> Name | None:
    index = parts.engine.index
    return (index.namespace_of(slot), index.key_of(slot)) if index.is_live(slot) else None
