"""The sections `flash` and `put`: what comes from flash and what is durable on it, beside fio.

    python -m bench.flash [--rounds 5] [--kib 1024] [--count 32] [--folder DIR]

One daemon with little memory and a data set several times as large, so that every get finds its
blocks on flash (each get's own tiers are checked). The first batches of a turn are not counted, nor
the first of the single blocks: a scheduler takes some ten milliseconds to spread threads that were
idle over the processors. fio reads the daemon's own data file, where the blocks lie, with O_DIRECT
into the region, eight requests always under way; ours, one get of a batch after the other, and
beside that two at a time, as of an engine that loads two requests. It writes a new preallocated
file of the same file system with one fdatasync per group of the daemon's size. Peers with flash do
the same work on files of their own. All take turns within a round. GB are 10^9 plain bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

from bench import contract, daemon, scratch
from bench.fio import Fio
from bench.ours import Ours
from bench.peers.base import Work
from bench.peers.running import NAMES, RunningPeer, peers, running
from bench.processes import NotRunError
from bench.region import Region
from bench.results import Line, Section, over
from entresol_proto.limits import KIB, MIB
from entresol_proto.wire.data import Tier

BATCHES = 4  # that the daemon's memory has room for, and that are put at a time
LEAD, COUNTED = 2, 6  # batches of a turn of gets
SET_BATCHES = 12  # the data set of each fabric
GROUP_BYTES = 8 * MIB  # group_commit_bytes of the daemon
SAMPLES_LEAD, SAMPLES = 10, 100  # single blocks per round
LEAD_MS = 10  # of fio, about as long


@dataclass(slots=True)
class Found:
    """By name, a number per round; and what did not run."""

    values: dict[str, list[float]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)


def data_runs(path: Path) -> Iterator[tuple[int, int]]:
    """(offset, length) of what was written of a file, in order (SEEK_DATA of lseek(2))."""
    fd = os.open(path, os.O_RDONLY)
    try:
        at, end = 0, os.fstat(fd).st_size
        while at < end:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return
            hole = os.lseek(fd, at, os.SEEK_HOLE)
            yield at, hole - at
            at = hole
    finally:
        os.close(fd)


def longest_run(path: Path, block_bytes: int) -> tuple[int, int]:
    """The longest written part, in whole blocks."""
    offset, length = max(data_runs(path), key=lambda run: run[1])
    begin = -(-offset // block_bytes) * block_bytes
    return begin, (offset + length - begin) // block_bytes * block_bytes


class Turns:
    """Everybody's turn of one round, over data that was put before."""

    def __init__(self, found: Found, region: Region, data_file: Path, download: bool) -> None:
        self._found = found
        self._region = region
        self._data_file = data_file
        self._fio: Fio | None = None
        self._next = 0
        self._rng = random.Random(1)
        try:
            self._fio = Fio.find(download=download)
            found.notes.append(self._fio.version())
        except NotRunError as error:
            found.not_run["fio"] = str(error)

    def _gbps(self, seconds: float, batches: int = BATCHES) -> float:
        return batches * self._region.plain_bytes / seconds / 1e9

    def fio_read(self, round_: int) -> None:
        """fio over the part of the data file that this round is at, and single requests."""
        if self._fio is None:
            return
        size = self._region.block_bytes
        offset, length = longest_run(self._data_file, size)
        part = min(length, COUNTED * self._region.plain_bytes)
        start = offset + (round_ * part) % max(1, length - part + size) // size * size
        memory = self._region.path
        rate = self._fio.read(
            self._data_file, block_bytes=size, offset=start, length=part, memory=memory
        )
        self._found.add("fio_read", rate.gbps)
        one = self._fio.read(
            self._data_file, block_bytes=size, offset=offset, length=length, memory=memory,
            depth=1, random=True, count=SAMPLES_LEAD + SAMPLES, lead_ms=LEAD_MS,
        )  # fmt: skip
        self._found.add("device_p50_us", one.p50_us)
        self._found.add("device_p99_us", one.p99_us)

    async def ours(self, name: str, ours: Ours) -> None:
        """The next batches of the set; each is on flash again by the time it comes round."""
        seconds = [await ours.get(each, tier=Tier.FLASH) for each in self._turn()]
        self._found.add(name, self._gbps(sum(seconds[LEAD:]), COUNTED))

    async def ours_together(self, name: str, pair: Sequence[Ours]) -> None:
        """The same with two gets under way, each into memory of its own, as long as there are
        batches."""

        async def some(ours: Ours, left: Iterator[int]) -> None:
            for each in left:
                await ours.get(each, tier=Tier.FLASH)

        turn = self._turn()
        for part in (turn[:LEAD], turn[LEAD:]):
            began, left = time.perf_counter(), iter(part)
            await asyncio.gather(*(some(ours, left) for ours in pair))
            seconds = time.perf_counter() - began
        self._found.add(name, self._gbps(seconds, COUNTED))

    def peer(self, one: RunningPeer) -> None:
        """The same generations of a peer."""
        seconds = [one.get(each) for each in self._turn()]
        self._found.add(one.peer.name, self._gbps(sum(seconds[LEAD:]), COUNTED))

    def _turn(self) -> list[int]:
        """The batches of this round; the time of the first LEAD is not counted."""
        return [(self._next + number) % SET_BATCHES for number in range(LEAD + COUNTED)]

    async def single(self, ours: Ours) -> None:
        """Single blocks of batches that are not in memory, at random places."""
        taken: list[float] = []
        while len(taken) < SAMPLES_LEAD + SAMPLES:
            rest = SET_BATCHES - LEAD - COUNTED
            generation = (self._next + LEAD + COUNTED + len(taken) % rest) % SET_BATCHES
            block = self._rng.randrange(self._region.count)
            seconds, tier = await ours.get_one(generation, block)
            if tier is Tier.FLASH:
                taken.append(seconds * 1e6)
        counted = taken[SAMPLES_LEAD:]
        self._found.add("first_byte_p50_us", float(np.percentile(counted, 50)))
        self._found.add("first_byte_p99_us", float(np.percentile(counted, 99)))

    def step(self) -> None:
        """On to the next batches."""
        self._next = (self._next + LEAD + COUNTED) % SET_BATCHES

    def fio_write(self, folder: Path) -> None:
        """A new file, written as the daemon writes, then removed."""
        if self._fio is None:
            return
        path = folder / "fio.data"
        try:
            rate = self._fio.write(
                path, block_bytes=self._region.block_bytes, memory=self._region.path,
                length=BATCHES * self._region.plain_bytes,
                flush_blocks=max(1, GROUP_BYTES // self._region.block_bytes),
            )  # fmt: skip
        finally:
            path.unlink(missing_ok=True)
        self._found.add("fio_write", rate.gbps)

    async def put(self, name: str, ours: Ours, first: int) -> None:
        """New batches, all at once, until all are durable; then dropped. Twice; the second time is
        the one that counts."""
        for generations in (
            range(first, first + BATCHES),
            range(first + BATCHES, first + BATCHES * 2),
        ):
            began = time.perf_counter()
            await asyncio.gather(*(ours.put(one, "durable") for one in generations))
            seconds = time.perf_counter() - began
            for one in generations:
                await ours.forget(one)
        self._found.add(name, self._gbps(seconds))

    def peer_put(self, one: RunningPeer) -> None:
        """Batches over old ones."""
        seconds = sum(one.put((self._next + n) % SET_BATCHES) for n in range(BATCHES))
        self._found.add(f"put_{one.peer.name}", self._gbps(seconds))


async def measure(
    *,
    rounds: int,
    block_bytes: int = MIB,
    count: int = 32,
    names: Sequence[str] = NAMES,
    where: Path | None = None,
    build_engines: bool = False,
    download: bool = True,
) -> Found:
    """All rounds of both sections; without `download`, fio only where it is installed."""
    found = Found()
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch.folder(where))
        region = stack.enter_context(scratch.region(folder, block_bytes, count))
        tier = stack.enter_context(
            daemon.process(
                folder / "d", {"memory": {"dram_bytes": BATCHES * region.plain_bytes}},
                flash=4 * SET_BATCHES * region.plain_bytes,
            )
        )  # fmt: skip
        variants: dict[str, Ours] = {}
        for name in ("shm", "tcp"):
            ours = await Ours.open(tier.client_config(), region, name, name)
            stack.push_async_callback(ours.client.close)
            variants[name] = ours
            for generation in range(SET_BATCHES):
                await ours.put(generation, "durable")
        other = stack.enter_context(
            scratch.region(folder, block_bytes, count, bytes(region.source))
        )  # of the second get of two
        first = variants["shm"]
        pair = (first, Ours(first.client, first.ns, other, "shm"))
        work = Work(block_bytes, count, str(region.path), str(folder), SET_BATCHES)
        others = []
        for peer in peers(names):
            if peer.place != "flash":
                continue
            try:
                one = stack.enter_context(running(peer, work, may_build_engines=build_engines))
                for generation in range(SET_BATCHES):
                    one.put(generation)
                one.get(0)
                region.check()
            except NotRunError as error:
                found.not_run[peer.name] = str(error)
            else:
                others.append(one)
        turns = Turns(found, region, folder / "d" / "state" / "flash.data", download)
        await _check_all(region, list(variants.values()), [])  # what was put last is in memory
        for round_ in range(rounds):
            turns.fio_read(round_)
            for name, ours in variants.items():
                await turns.ours(name, ours)
            await turns.ours_together("shm_together", pair)
            other.check()
            for one in others:
                turns.peer(one)
            await turns.single(variants["shm"])
            turns.fio_write(folder)
            for name, ours in variants.items():
                await turns.put(f"put_{name}", ours, 100 + 2 * BATCHES * round_)
            for one in others:
                turns.peer_put(one)
            turns.step()
        await _check_all(region, list(variants.values()), others)
    return found


async def _check_all(
    region: Region, variants: Sequence[Ours], others: Sequence[RunningPeer]
) -> None:
    """Every byte of everybody's set, once more."""
    for generation in range(SET_BATCHES):
        for ours in variants:
            await ours.get(generation)
            region.check()
        for one in others:
            one.get(generation)
            region.check()


def lines(found: Found) -> list[Line]:
    """The numbers of a run, those that are the bench's purpose first."""
    values = found.values
    result = [
        Line("get_flash_sealed_gbps", "GB/s", values["shm"]),
        Line("first_byte_flash_p99_us", "us", values["first_byte_p99_us"]),
        Line("first_byte_flash_p50_us", "us", values["first_byte_p50_us"]),
        Line("get_flash_tcp_gbps", "GB/s", values["tcp"]),
        Line("get_flash_together_gbps", "GB/s", values["shm_together"]),
        Line("put_durable_shm_gbps", "GB/s", values["put_shm"]),
        Line("put_durable_tcp_gbps", "GB/s", values["put_tcp"]),
    ]
    known = {
        "shm", "tcp", "shm_together", "put_shm", "put_tcp",
        "first_byte_p50_us", "first_byte_p99_us",
    }  # fmt: skip
    for name in values.keys() - known:
        unit = "us" if name.endswith("_us") else "GB/s"
        suffix = "" if unit == "us" else "_gbps"
        result.append(Line(f"flash_{name}{suffix}", unit, values[name]))
    if "fio_read" in values:
        ratio = over(values["shm"], values["fio_read"])
        result.append(contract.line("get_flash_vs_fio_read", "ratio", ratio))
        ratio = over(values["shm_together"], values["fio_read"])
        result.append(contract.line("get_flash_together_vs_fio_read", "ratio", ratio))
        ratio = over(values["first_byte_p99_us"], values["device_p99_us"])
        result.append(contract.line("first_byte_p99_vs_device", "ratio", ratio))
    if "fio_write" in values:
        ratio = over(values["put_shm"], values["fio_write"])
        result.append(contract.line("put_durable_vs_fio_write", "ratio", ratio))
    return [*result[:7], *sorted(result[7:], key=lambda line: line.name)]


def section(
    *,
    rounds: int,
    count: int = 32,
    names: Sequence[str] = NAMES,
    build_engines: bool = False,
    download: bool = True,
) -> Section:
    """Both sections, because they share daemon, data and rounds."""
    found = uvloop.run(
        measure(
            rounds=rounds, count=count, names=names, build_engines=build_engines, download=download
        )
    )
    told = tuple(f"{name}: {why}" for name, why in found.not_run.items())
    return Section(lines(found), not_run=told)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kib", type=int, default=1024)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--only", default="files,nixl_posix,lmcache_fs")
    parser.add_argument("--folder", type=Path, help="on the flash to measure")
    asked = parser.parse_args(argv)
    found = uvloop.run(
        measure(
            rounds=asked.rounds, block_bytes=asked.kib * KIB, count=asked.count,
            names=[name for name in asked.only.split(",") if name], where=asked.folder,
        )
    )  # fmt: skip
    for line in lines(found):
        print(line.text())
    for name, why in found.not_run.items():
        print(f"  {name} not run: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
