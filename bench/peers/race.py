"""The section `peers`: everybody does the same work in the same rounds.

    python -m bench.peers.race [--sizes 1MiBx32,...] [--rounds 5] [--only NAME,...]

Per size of blocks: our tcp (sealed, verified, opened on the host) and shm, the loopback ceilings,
and every peer that runs here. A round gives each its turn, of as many batches as fit into a quarter
of a second and at least four, after some that are not counted; the order rotates.
What arrives is compared byte by byte by this process before the first round and after the last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import uvloop

from bench import contract, daemon, fabric, gets, scratch
from bench.ours import Ours
from bench.peers.base import Work
from bench.peers.running import NAMES, RunningPeer, peers, running
from bench.processes import NotRunError, cpu_s
from bench.region import Region
from bench.results import Curve, Line, Section, over
from entresol_proto.limits import KIB, MIB
from entresol_proto.wire.data import Tier

SIZES = ((64 * KIB, 64), (MIB, 32), (8 * MIB, 8))
CANONICAL_SIZE = (MIB, 32)
TURN_S, TURN_BATCHES_MIN = gets.TURN_S, 4  # at least so many: less measures the scheduler
LEAD_SHARE = gets.LEAD_S / gets.TURN_S  # of a turn, before it and not counted
GENERATIONS = 3


@dataclass(slots=True)
class Variant:
    """One way of doing the work: seconds of a put, seconds of so many gets, CPU of both sides."""

    get: Callable[[int, int], Awaitable[float]]
    put: Callable[[int], Awaitable[float]] | None = None
    forget: Callable[[int], Awaitable[None]] | None = None
    cpu_s: Callable[[], float] | None = None
    gets_gbps: list[float] = field(default_factory=list)
    puts_gbps: list[float] = field(default_factory=list)
    gets_cpu_s_per_gb: list[float] = field(default_factory=list)
    batch_s: float = TURN_S  # that a get took in the last turn

    @property
    def turn(self) -> int:
        """Batches of the next turn."""
        return max(TURN_BATCHES_MIN, round(TURN_S / self.batch_s))


@dataclass(frozen=True, slots=True)
class Race:
    """GB/s by variant, a number per round, and CPU seconds per GB got; and who did not run."""

    gets: dict[str, list[float]]
    puts: dict[str, list[float]]
    not_run: dict[str, str]
    cpu: dict[str, list[float]] = field(default_factory=dict)


def of_peer(peer: RunningPeer) -> Variant:
    """A peer as a variant. Its calls block; nothing else is meant to run meanwhile."""

    async def put(generation: int) -> float:
        return peer.put(generation)

    async def get(generation: int, times: int) -> float:
        return peer.get(generation, times)

    async def forget(generation: int) -> None:
        peer.forget(generation)

    return Variant(get, put, forget, peer.cpu_s)


def of_ours(ours: Ours, daemon_pid: int) -> Variant:
    """Our client as a variant; what it gets is resident. CPU is this process's and the daemon's."""

    async def get(generation: int, times: int) -> float:
        return await ours.get(generation, times, tier=Tier.MEMORY)

    return Variant(get, ours.put, ours.forget, lambda: time.process_time() + cpu_s(daemon_pid))


def of_ceiling(call: Callable[[], object]) -> Variant:
    """A loopback ceiling as a variant; it moves the same bytes and stores nothing."""

    async def get(generation: int, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            pending = call()
            if isinstance(pending, Awaitable):
                await pending
        return time.perf_counter() - began

    return Variant(get)


async def run(
    variants: dict[str, Variant], region: Region, rounds: int, not_run: dict[str, str]
) -> None:
    """`rounds` rounds after one that warms up and is not counted, each of all that still run."""
    for round_ in range(rounds + 1):
        names = list(variants)
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            variant = variants[name]
            try:
                put_s = await _put(variant, region, round_, rounds)
                times = variant.turn
                await variant.get(round_, math.ceil(times * LEAD_SHARE))
                before = variant.cpu_s() if variant.cpu_s else 0.0
                get_s = await variant.get(round_, times)
                used = variant.cpu_s() - before if variant.cpu_s else 0.0
            except NotRunError as error:
                not_run[name] = f"stopped in round {round_}: {error}"
                del variants[name]
                continue
            variant.batch_s = get_s / times
            if round_:
                moved_gb = times * region.plain_bytes / 1e9
                variant.gets_gbps.append(moved_gb / get_s)
                if variant.cpu_s:
                    variant.gets_cpu_s_per_gb.append(used / moved_gb)
                if put_s is not None:
                    variant.puts_gbps.append(region.plain_bytes / put_s / 1e9)


async def _put(variant: Variant, region: Region, round_: int, rounds: int) -> float | None:
    """Seconds of the put of a round; what arrives is compared in the first round and the last."""
    if variant.put is None:
        return None
    put_s = await variant.put(round_)
    if round_ and variant.forget is not None:
        await variant.forget(round_ - 1)
    if round_ in (0, rounds):
        await variant.get(round_, 1)
        region.check()
    return put_s


async def race(
    block_bytes: int, count: int, *, rounds: int, names: Sequence[str], build_engines: bool = False
) -> Race:
    """One size of the work."""
    not_run: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch.folder())
        region = stack.enter_context(scratch.region(folder, block_bytes, count))
        tier = stack.enter_context(daemon.process(folder / "d"))
        assert tier.process is not None
        variants: dict[str, Variant] = {
            "loopback_blocking": of_ceiling(stack.enter_context(fabric._blocking(region.into))),
            "loopback_uvloop": of_ceiling(
                await stack.enter_async_context(fabric._minimal(region.into))
            ),
        }
        for name in ("tcp", "shm"):
            ours = await Ours.open(tier.client_config(), region, name, name)
            stack.push_async_callback(ours.client.close)
            variants[f"entresol_{name}"] = of_ours(ours, tier.process.pid)
        work = Work(block_bytes, count, str(region.path), str(folder), GENERATIONS)
        for peer in peers(names):
            if peer.place != "memory":
                continue
            try:
                one = stack.enter_context(running(peer, work, may_build_engines=build_engines))
            except NotRunError as error:
                not_run[peer.name] = str(error)
            else:
                variants[peer.name] = of_peer(one)
        await run(variants, region, rounds, not_run)
        gets = {name: v.gets_gbps for name, v in variants.items()}
        puts = {name: v.puts_gbps for name, v in variants.items() if v.puts_gbps}
        cpu = {n: v.gets_cpu_s_per_gb for n, v in variants.items() if v.gets_cpu_s_per_gb}
    return Race(gets, puts, not_run, cpu)


def best(found: dict[str, list[float]], names: Sequence[str]) -> list[float]:
    """Round by round, the best of these."""
    return [max(values) for values in zip(*(found[name] for name in names), strict=True)]


def section(
    *,
    rounds: int,
    sizes: Sequence[tuple[int, int]] = SIZES,
    names: Sequence[str] = NAMES,
    build_engines: bool = False,
) -> Section:
    """Lines of the canonical size, curves over all of them."""
    lines: list[Line] = []
    gets: dict[str, list[tuple[float, float]]] = {}
    not_run: dict[str, str] = {}
    for block_bytes, count in sizes:
        found = uvloop.run(
            race(block_bytes, count, rounds=rounds, names=names, build_engines=build_engines)
        )
        not_run |= found.not_run
        for name, values in found.gets.items():
            gets.setdefault(name, []).append((block_bytes / KIB, Line("", "", values).value))
        if (block_bytes, count) == CANONICAL_SIZE:
            lines += _lines(found)
    vs_peer = "get_resident_tcp_vs_best_peer"
    if vs_peer not in {line.name for line in lines}:
        not_run[vs_peer] = "no peer whose bytes cross a connection came up; why is said of each"
    curve = Curve("get_resident_by_block", "block size, KiB", "GB/s", gets)
    told = tuple(f"{name}: {why}" for name, why in not_run.items())
    return Section(lines, (curve,), told)


def _lines(found: Race) -> list[Line]:
    lines = [Line(f"peers_get_{name}_gbps", "GB/s", v) for name, v in found.gets.items()]
    lines += [Line(f"peers_put_{name}_gbps", "GB/s", v) for name, v in found.puts.items()]
    lines += [Line(f"peers_get_{n}_cpu_s_per_gb", "s/GB", v) for n, v in found.cpu.items()]
    ours = found.gets["entresol_tcp"]
    loopback = best(found.gets, ("loopback_blocking", "loopback_uvloop"))
    lines.append(Line("peers_get_tcp_vs_loopback", "ratio", over(ours, loopback)))
    others = [peer.name for peer in peers(list(found.gets.keys() & set(NAMES))) if peer.network]
    if others:
        ratio = over(ours, best(found.gets, others))
        lines.append(contract.line("get_resident_tcp_vs_best_peer", "ratio", ratio))
        ratio = over(found.puts["entresol_tcp"], best(found.puts, others))
        lines.append(Line("put_resident_tcp_vs_best_peer", "ratio", ratio))
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kib", type=int, default=1024)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    names = [name for name in asked.only.split(",") if name]
    found = uvloop.run(race(asked.kib * KIB, asked.count, rounds=asked.rounds, names=names))
    if asked.json:
        print(json.dumps({"gets": found.gets, "puts": found.puts, "not_run": found.not_run}))
        return 0
    for line in _lines(found):
        print(line.text())
    for name, why in found.not_run.items():
        print(f"  {name} not run: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
