"""The sections of the bench: which there are, their budgets, and how much of each at which size.

Invariant: a budget stands in one place, beside the name under which results.json keeps the number.
A section is a function of a `Plan` that returns a `Section`; naming it in SECTIONS is all it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import uvloop

from bench.results import Line, Section

T = TypeVar("T")
SIZES = ("quick", "commit", "full")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        size: `quick` looks whether the benches run: few rounds, nothing is installed, no verdict;
            `commit` takes some minutes; `full` is for numbers to quote.
        only_peers: names of peers, all when empty.
    """

    size: str
    only_peers: tuple[str, ...] = ()

    @property
    def quick(self) -> bool:
        return self.size == "quick"

    def of(self, quick: T, commit: T, full: T) -> T:
        """The value of this plan's size."""
        return dict(zip(SIZES, (quick, commit, full), strict=True))[self.size]

    @property
    def peers(self) -> tuple[str, ...]:
        """Peers that take part; none at the quick size."""
        from bench.peers.running import NAMES

        return () if self.quick else self.only_peers or NAMES


def flash(plan: Plan) -> Section:
    """Gets from flash and durable puts, beside fio and peers on the same file system."""
    from bench import flash as bench

    return bench.section(
        rounds=plan.of(2, 5, 11), count=plan.of(16, 32, 32), names=plan.peers,
        build_engines=plan.size == "full", download=not plan.quick,
    )  # fmt: skip


def gets(plan: Plan) -> Section:
    """Gets from memory against loopback, AES-GCM and memcpy."""
    from bench import gets as bench

    found = uvloop.run(bench.measure(rounds=plan.of(3, 11, 21)))
    lines = [Line(f"ceiling_{n}_gbps", "GB/s", found[n]) for n in ("loopback", "aes", "memcpy")]
    lines += [
        Line(f"get_resident_{n}_gbps", "GB/s", found[n])
        for n in ("tcp", "shm", "shm_staged", "shm_daemon")
    ]
    budgets = {
        "get_resident_tcp_vs_loopback": 0.9,
        "get_resident_shm_sealed_vs_aes": 0.9,
        "get_resident_shm_plain_vs_memcpy": 0.9,
    }
    lines += [
        Line(name, "ratio", values, at_least=budgets.get(name))
        for name, values in bench.ratios(found).items()
    ]
    return Section(lines)


def peers(plan: Plan) -> Section:
    """The same work by other stores, across processes, in the same rounds."""
    from bench.peers import race as bench

    if plan.quick:
        return Section([], not_run=("peers: nothing is installed at this size",))
    sizes = plan.of((), bench.SIZES, (*bench.SIZES, (2 << 20, 16), (256 << 10, 64)))
    return bench.section(
        rounds=plan.of(0, 5, 11), sizes=sizes, names=plan.peers,
        build_engines=plan.size == "full",
    )  # fmt: skip


def control(plan: Plan) -> Section:
    """Questions and small gets: what a message costs."""
    from bench import control as bench

    return bench.section(rounds=plan.of(2, 5, 11), times=plan.of(10, 50, 200))


def cost(plan: Plan) -> Section:
    """Daemon time per block and per fetch: the interpreter, and the whole process (cpu)."""
    from bench import daemon_cost as bench

    found = uvloop.run(bench.measure(fetches=plan.of(200, 1000, 2000), rounds=plan.of(2, 5, 5)))
    return Section([
        Line("daemon_us_per_block", "us", found["per_block_us"], at_most=50),
        Line("daemon_us_per_fetch", "us", found["per_fetch_us"], at_most=200),
        Line("daemon_cpu_us_per_block", "us", found["cpu_per_block_us"]),
        Line("daemon_cpu_us_per_fetch", "us", found["cpu_per_fetch_us"]),
    ])  # fmt: skip


def index(plan: Plan) -> Section:
    """Index memory at 5 M blocks."""
    from bench import index as bench

    found = bench.measure(blocks=plan.of(200_000, 5_000_000, 5_000_000))
    return Section([
        Line("index_bytes_per_block", "B", [found["bytes_per_block_resident"]], at_most=128)
    ])  # fmt: skip


def restart(plan: Plan) -> Section:
    """Restart of 1 M blocks, warm and after a crash."""
    from bench import restart as bench

    blocks = plan.of(50_000, 1_000_000, 1_000_000)
    found = [bench.measure(blocks=blocks) for _ in range(plan.of(1, 1, 5))]
    return Section([
        Line("restart_1m_warm_s", "s", [one["warm_s"] for one in found], at_most=5),
        Line("restart_1m_crash_s", "s", [one["crash_s"] for one in found], at_most=20),
    ])  # fmt: skip


def scale(plan: Plan) -> Section:
    """Cost curves over blocks, sessions, keys and shards."""
    from bench import scale as bench

    if plan.quick:
        return Section([], not_run=("scale: no curves at this size",))
    return bench.section(plan.of(bench.SMALL, bench.COMMIT, bench.FULL))


SECTIONS: dict[str, Callable[[Plan], Section]] = {
    "flash": flash,
    "gets": gets,
    "peers": peers,
    "control": control,
    "cost": cost,
    "index": index,
    "restart": restart,
    "scale": scale,
}
