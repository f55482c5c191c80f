"""kill -9 of the real daemon at random times, judged by what was written down outside of it.

Per key the oracle holds which contents a get may give afterwards. A durable put leaves one, an
accepted put that or a miss, a forget that returned only a miss; whatever was under way when the
daemon died leaves both before and after. Any other answer is a lost block, wrong bytes or a
resurrection. ENTRESOL_KILL_CYCLES sets how often it is killed, ENTRESOL_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
from daemon_lab import DESCRIPTOR, Site, Starter, client_of, content, key_of, seed_of

from entresol_client.client import Namespace
from entresol_client.results import PutBlock
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(600)]

CYCLES = int(os.environ.get("ENTRESOL_KILL_CYCLES", "12"))
LIFE_SECONDS_MAX = 1.2  # of a daemon between its start and its death
SIZES = (1, 5_000, 64 * KIB, 200 * KIB, 700 * KIB)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    found = Starter(tmp_path_factory.mktemp("starter"))
    yield found
    found.close()


@dataclass
class Oracle:
    """What a get of each key may answer: versions of its content, None for a miss."""

    journal: IO[str]
    evicts: bool  # blocks may also leave by themselves
    may: dict[int, set[int | None]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)  # keys with an operation under way
    wrong: int = 0
    checked: int = 0
    durable: int = 0

    def note(self, *words: Any) -> None:
        """Written down before and after each operation, outside of the daemon."""
        self.journal.write(json.dumps([time.monotonic_ns(), *words]) + "\n")
        self.journal.flush()

    def size(self, number: int) -> int:
        return SIZES[number % len(SIZES)]

    def bytes_of(self, number: int, version: int) -> bytes:
        return content(key_of(number) + version.to_bytes(4, "little"), self.size(number))

    def take(self, rng: random.Random, count: int, spread: int) -> list[int]:
        """Some keys nobody is working on."""
        found = rng.sample(range(spread), min(spread, count * 2))
        mine = [number for number in found if number not in self.busy][:count]
        self.busy.update(mine)
        return mine

    async def put(self, space: Namespace, numbers: list[int], ack: Any) -> None:
        new = {}
        for number in numbers:
            new[number] = self.versions[number] = self.versions.get(number, 0) + 1
            self.may.setdefault(number, {None}).add(new[number])
        self.note("put", ack, new)
        items = [PutBlock(key_of(n), self.bytes_of(n, new[n]), position=n) for n in numbers]
        result = await space.put(items, ack=ack)
        self.note("put answered", ack, dict(zip(numbers, map(int, result.statuses), strict=True)))
        for number, status in zip(numbers, result.statuses, strict=True):
            if status is Status.OK:
                lasting: set[int | None] = {new[number]}
                self.may[number] = lasting if ack == "durable" else lasting | {None}
                self.durable += ack == "durable"
            elif status is not Status.DISCONNECTED and status is not Status.DEADLINE:
                self.may[number].discard(new[number])  # refused: it was never stored
                if not self.may[number]:
                    self.may[number] = {None}
        self.busy.difference_update(numbers)

    async def forget(self, space: Namespace, numbers: list[int]) -> None:
        for number in numbers:
            self.may.setdefault(number, {None}).add(None)
        self.note("forget", numbers)
        result = await space.forget([key_of(number) for number in numbers])
        self.note("forget answered", numbers, result.count, result.complete)
        if result.complete:
            for number in numbers:
                self.may[number] = {None}
        self.busy.difference_update(numbers)

    async def check(self, space: Namespace, numbers: list[int], *, settle: bool) -> None:
        """Every answer must be allowed. `settle`: nothing is under way, what is seen is so."""
        buffers = [bytearray(self.size(number)) for number in numbers]
        keys = [key_of(number) for number in numbers]
        result = await space.get_into(keys, buffers, prefix=False)
        for number, buffer, status in zip(numbers, buffers, result.statuses, strict=True):
            may = self.may.get(number, {None})
            self.checked += 1
            if status is Status.OK:
                versions = [v for v in may if v and bytes(buffer) == self.bytes_of(number, v)]
                self.note("seen", number, versions)
                assert versions, f"key {number}: wrong or resurrected bytes, allowed {may}"
                if settle:
                    self.may[number] = set(versions)
            elif settle:
                assert status is Status.MISS, f"key {number}: {status.label} when nothing is wrong"
                assert None in may or self.evicts, f"key {number}: durable block lost, had {may}"
                self.may[number] = {None}


async def work(oracle: Oracle, space: Namespace, rng: random.Random, spread: int) -> None:
    """Random operations until the daemon is gone."""
    while True:
        numbers = oracle.take(rng, rng.choice([1, 3, 12]), spread)
        try:
            choice = rng.random()
            if not numbers:
                await asyncio.sleep(0.001)
            elif choice < 0.45:
                await oracle.put(space, numbers, "durable")
            elif choice < 0.65:
                await oracle.put(space, numbers, "accepted")
            elif choice < 0.8:
                await oracle.forget(space, numbers)
            else:
                await oracle.check(space, numbers, settle=False)
        finally:
            oracle.busy.difference_update(numbers)
        if not space._client.shards()[0].connected:
            return


@pytest.mark.parametrize("pressure", [False, True], ids=["roomy", "evicting"])
async def test_killed_at_random_times(tmp_path: Path, starter: Starter, pressure: bool) -> None:
    seed = seed_of("kill9")
    rng = random.Random(seed)
    flash = 32 * MIB if pressure else 256 * MIB
    site = Site.prepare(tmp_path / "d", flash=flash, segment=4 * MIB, dram=16 * MIB, slab=4 * MIB)
    site.fix_port()
    spread = 400 if pressure else 240
    log = tmp_path / "daemon.log"
    with open(tmp_path / "oracle.jsonl", "w") as journal:  # noqa: ASYNC230 - as small as a print
        oracle = Oracle(journal, evicts=pressure)
        for cycle in range(max(1, CYCLES // 2)):
            place = f"seed {seed}, cycle {cycle}, journal {journal.name}"
            if rng.random() < 0.3:  # die while starting
                pid = starter.start(log, "--config", str(site.toml))
                await asyncio.sleep(rng.random() * 0.4)
                kill(starter, pid)
            pid = starter.start(log, "--config", str(site.toml))
            try:
                async with client_of(site, fabric=rng.choice(["shm", "tcp"])) as client:
                    space = await client.namespace(DESCRIPTOR)
                    known = sorted(oracle.may)
                    oracle.note("started", cycle, pid)
                    for at in range(0, len(known), 100):
                        await oracle.check(space, known[at : at + 100], settle=True)
                    workers = [
                        asyncio.create_task(
                            work(oracle, space, random.Random(rng.random()), spread)
                        )
                        for _ in range(4)
                    ]
                    await asyncio.sleep(0.05 + rng.random() * LIFE_SECONDS_MAX)
                    oracle.note("kill", cycle)
                    kill(starter, pid)
                    pid = 0
                    async with asyncio.timeout(60):
                        await asyncio.gather(*workers)
            except BaseException as error:
                error.add_note(place)
                raise
            finally:
                if pid:
                    kill(starter, pid)
        pid = starter.start(log, "--config", str(site.toml))
        try:
            async with client_of(site) as client:
                space = await client.namespace(DESCRIPTOR)
                await oracle.check(space, sorted(oracle.may), settle=True)
        finally:
            os.kill(pid, signal.SIGTERM)
            assert starter.wait(pid) == 0
    print(
        f"kill9: seed {seed}, cycles {max(1, CYCLES // 2)}, durable acks {oracle.durable}, "
        f"answers checked {oracle.checked}, wrong 0, lost 0"
    )
    assert oracle.durable > 10 * (1 if pressure else 2), "the oracle judged next to nothing"
    assert "Traceback" not in log.read_text()


def kill(starter: Starter, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    starter.wait(pid)
