"""The sections of the bench: which there are, their budgets, and how much of each at which size.

Invariant: a budget stands in one place, beside the name under which results.json keeps the number.
A section is a function of a `Plan` that returns a `Section`; naming it in SECTIONS is all it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
        kv: a folder with KV as .npy files of bf16 bit patterns.
    """

    size: str
    only_peers: tuple[str, ...] = ()
    kv: Path | None = None

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


def codec(plan: Plan) -> Section:
    """Codecs on bf16 KV, one core: the lower of each folder of .npy files (--kv)."""
    from bench import codec_budget as budget

    if plan.kv is None or not any(plan.kv.rglob("*.npy")):
        return Section([], not_run=("codec: no KV given (--kv DIR, .npy of bf16 bit patterns)",))
    found = budget.canonical(plan.kv, repeats=plan.of(2, 7, 15))
    budgets = {
        "codec_dense_ratio_bf16": 1.5,
        "codec_dense_decode_gbps": 2.0,
        "codec_fast_ratio_bf16": 1.42,
        "codec_fast_decode_gbps": 8.0,
        "codec_fast_encode_gbps": 8.0,
    }
    return Section([
        Line(name, "ratio" if "ratio" in name else "GB/s", [value], at_least=budgets.get(name))
        for name, value in found.items()
    ])  # fmt: skip


def quote(plan: Plan) -> Section:
    """Time to the first token with quotes, over fetching always and never (virtual time)."""
    from bench import quote as bench

    if plan.quick:
        return Section([], not_run=("quote: tests/sim/test_recompute.py runs a short one",))
    found = bench.measure(seeds=plan.of(0, 1, 3), per_phase=24)
    print(bench.table(found))
    budgets = {"always": 0.95, "never": 0.8, "oracle": 1.15}
    lines = [
        Line(
            f"ttft_auto_vs_{other}", "ratio",
            [one.total["auto"] / one.total[other] for one in found], at_most=budget,
        )
        for other, budget in budgets.items()
    ]  # fmt: skip
    errors = [one.quote_error for one in found]
    return Section([*lines, Line("fetch_time_over_quoted", "ratio", errors)])


SECTIONS: dict[str, Callable[[Plan], Section]] = {
    "flash": flash,
    "gets": gets,
    "peers": peers,
    "control": control,
    "cost": cost,
    "index": index,
    "restart": restart,
    "scale": scale,
    "codec": codec,
    "quote": quote,
}
