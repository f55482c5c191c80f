"""The section `scale`: what grows with blocks, sessions, keys and shards, as cost curves.

    python -m bench.scale [--full] [--only blocks,sessions,keys,shards]

- `blocks`: look-up of 8,192 keys in an index of so many blocks, its bytes per block, and how long
  the engine takes to open a file of so many, after a clean stop and after a crash.
- `sessions`: the daemon's resident memory with so many open sessions that do nothing, and what a
  get of one resident block of 64 KiB takes beside them.
- `keys`: one `exists` of so many keys, from call to answer, and the CPU time of this side of it.
- `shards`: gets of 1 MiB x 32 over tcp from so many daemons, all on the processors there are: with
  two of those, four daemons show what sharding costs and nothing of what it gains.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from bench import daemon, index, restart, scratch
from bench.control import DEADLINE_NS, keys_of, timed
from bench.ours import Ours
from bench.region import Region
from bench.results import Curve, Section
from entresol_client import AsyncClient
from entresol_client.namespace import KEYS_PER_CALL_MAX
from entresol_daemon.flash.index import Index
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.limits import KIB, MIB
from entresol_proto.wire.data import Tier

LOOKUP_KEYS = 8192
FILES_SPARE = 256  # descriptors beside those of sessions
FILES_PER_SESSION = 4
PARTS = ("blocks", "sessions", "keys", "shards")
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Size:
    """How far the axes go, and how often each point is measured."""

    blocks: tuple[int, ...]
    sessions: tuple[int, ...]
    keys: tuple[int, ...]
    shards: tuple[int, ...]
    times: int


SMALL = Size((1_000, 10_000, 100_000), (1, 10, 100), (1, 100, 1_000, 10_000), (1, 2), 20)
COMMIT = Size(
    (1_000, 10_000, 100_000, 1_000_000), (1, 10, 100, 300), (1, 10, 100, 1_000, 10_000, 100_000),
    (1, 2, 4), 50,
)  # fmt: skip
FULL = Size(
    (1_000, 10_000, 100_000, 1_000_000, 5_000_000), (1, 10, 100, 300, 1_000),
    (1, 10, 100, 1_000, 10_000, 100_000), (1, 2, 4), 200,
)  # fmt: skip


def blocks(size: Size) -> list[Curve]:
    """Index and restart over the number of blocks."""
    lookups: Points = []
    held: Points = []
    warm: Points = []
    crash: Points = []
    for count in size.blocks:
        lookups.append((count, _lookup_us(count, size.times)))
        held.append((count, index.measure(count)["bytes_per_block_columns"]))
        opened = restart.measure(count)
        warm.append((count, opened["warm_s"]))
        crash.append((count, opened["crash_s"]))
    axis = "blocks"
    return [
        Curve("scale_lookup_8192", axis, "us", {"index look-up": lookups}),
        Curve("scale_index_bytes", axis, "B per block", {"index": held}),
        Curve("scale_restart", axis, "s", {"clean stop": warm, "crash": crash}, "block"),
    ]


def _lookup_us(count: int, times: int) -> float:
    """Median microseconds of a look-up of 8,192 keys, half of them there."""
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 2**64, (count, 2), dtype=np.uint64)
    zeros = np.zeros(count, np.uint32)
    one = Index(count, seed=b"bench")
    one.insert_many(
        zeros + one.intern(index.NAMESPACE), keys[:, 0], keys[:, 1], segment=zeros, offset=zeros,
        sealed_bytes=zeros, plain_bytes=zeros, position=zeros,
    )  # fmt: skip
    there = keys[rng.integers(0, count, LOOKUP_KEYS // 2)]
    absent = rng.integers(0, 2**64, (LOOKUP_KEYS // 2, 2), dtype=np.uint64)
    asked = np.concatenate([there, absent])
    raws = [rng.permutation(asked).tobytes() for _ in range(times)]
    taken = []
    for raw in raws:
        began = time.perf_counter()
        one.lookup(index.NAMESPACE, raw)
        taken.append((time.perf_counter() - began) * 1e6)
    return statistics.median(taken)


def resident_mib(pid: int) -> float:
    """Resident memory of a process (proc(5): statm)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


async def sessions(size: Size) -> list[Curve]:
    """Memory and a get's time over the number of open sessions."""
    memory: Points = []
    taken: Points = []
    counts = [n for n in size.sessions if n <= _files() // FILES_PER_SESSION]
    async with contextlib.AsyncExitStack() as stack:
        folder, region = _place(stack, 64 * KIB, 1)
        tier = stack.enter_context(daemon.process(folder / "d"))
        assert tier.process is not None
        config = tier.client_config()
        first = await Ours.open(config, region, "tcp", "one")
        stack.push_async_callback(first.client.close)
        await first.put(0)
        opened = 1
        for count in counts:
            while opened < count:
                more = await AsyncClient.open(tier.client_config(fabric="tcp", fallback=False))
                stack.push_async_callback(more.close)
                await more.namespace(NamespaceDescriptor(model="bench", cache_salt="one"))
                opened += 1
            times = await timed(lambda: first.get(0, tier=Tier.MEMORY), 2 * size.times)
            memory.append((count, resident_mib(tier.process.pid)))
            taken.append((count, statistics.median(times)))
    axis = "open sessions"
    return [
        Curve("scale_sessions_memory", axis, "MiB", {"daemon, resident": memory}),
        Curve("scale_sessions_get_64k", axis, "us", {"get of 64 KiB, p50": taken}),
    ]


def _files() -> int:
    """Descriptors that sessions may take; both ends are told the hard limit first."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard - FILES_SPARE


async def keys(size: Size) -> list[Curve]:
    """`exists` over the number of keys; more than a call takes are asked in several."""
    taken: Points = []
    cpu: Points = []
    async with contextlib.AsyncExitStack() as stack:
        folder, region = _place(stack, 64 * KIB, 1)
        tier = stack.enter_context(daemon.process(folder / "d"))
        ours = await Ours.open(tier.client_config(), region, "tcp", "keys")
        stack.push_async_callback(ours.client.close)
        every = keys_of(max(size.keys), "absent")

        async def ask(asked: Sequence[bytes]) -> None:
            for at in range(0, len(asked), KEYS_PER_CALL_MAX):
                part = asked[at : at + KEYS_PER_CALL_MAX]
                assert (await ours.ns.exists(part, deadline_ns=DEADLINE_NS)).complete

        for count in size.keys:
            asked = every[:count]
            began = time.process_time()
            times = await timed(lambda asked=asked: ask(asked), size.times)  # type: ignore[misc]
            cpu.append((count, (time.process_time() - began) / size.times * 1e6))
            taken.append((count, statistics.median(times)))
    points = {"from call to answer, p50": taken, "CPU of the host's side": cpu}
    return [Curve("scale_exists", "keys per exists", "us", points, "key")]


async def shards(size: Size) -> list[Curve]:
    """Throughput over the number of daemons."""
    rates: Points = []
    for count in size.shards:
        async with contextlib.AsyncExitStack() as stack:
            folder, region = _place(stack, MIB, 32)
            config = stack.enter_context(daemon.fleet(folder, count))
            ours = await Ours.open(config, region, "tcp", "shards")
            stack.push_async_callback(ours.client.close)
            await ours.put(0)
            await ours.get(0)
            region.check()
            times = [await ours.get(0, 4, tier=Tier.MEMORY) / 4 for _ in range(7)]
            rates.append((count, region.plain_bytes / statistics.median(times) / 1e9))
    return [Curve("scale_shards", "shards", "GB/s", {"get of 1 MiB x 32, tcp": rates})]


def _place(stack: contextlib.AsyncExitStack, block_bytes: int, count: int) -> tuple[Path, Region]:
    """A folder and a region that go with the stack."""
    folder = stack.enter_context(scratch.folder())
    return folder, stack.enter_context(scratch.region(folder, block_bytes, count))


def section(size: Size, parts: Sequence[str] = PARTS) -> Section:
    """All curves."""
    found: list[Curve] = []
    if "blocks" in parts:
        found += blocks(size)
    if "sessions" in parts:
        found += uvloop.run(sessions(size))
    if "keys" in parts:
        found += uvloop.run(keys(size))
    if "shards" in parts:
        found += uvloop.run(shards(size))
    return Section([], tuple(found))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS))
    asked = parser.parse_args(argv)
    size = FULL if asked.full else SMALL if asked.small else COMMIT
    for curve in section(size, asked.only.split(",")).curves:
        print(curve.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
