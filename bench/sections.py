"""The sections of the bench: which there are, and how much of each is measured at which size.

Invariant: a number keeps its name only at the size that the name stands for; budgets are those of
`contract`. A section is a function of a `Plan` that returns a `Section`; naming it in SECTIONS is
all it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import uvloop

from bench.contract import line
from bench.results import Line, Section

T = TypeVar("T")
SIZES = ("quick", "commit", "full")
NO_PEERS = ("none",)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        size: `quick` looks whether the benches run: few rounds, nothing is installed, no verdict;
            `commit` takes some minutes; `full` is for numbers to quote.
        only_peers: names of peers, all when empty; ("none",) for none.
        kv: a folder with KV as .npy files, see `bench.kv`.
        traces: a folder with traces of requests, see `bench.policy`.
    """

    size: str
    only_peers: tuple[str, ...] = ()
    kv: Path | None = None
    traces: Path | None = None

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

        return () if self.quick or self.only_peers == NO_PEERS else self.only_peers or NAMES


def flash(plan: Plan) -> Section:
    """Gets from flash and durable puts, beside fio and peers on the same file system."""
    from bench import flash as bench
    from bench import flash_kv

    rounds, download = plan.of(2, 5, 11), not plan.quick
    return bench.section(
        rounds=rounds, names=plan.peers, build_engines=plan.size == "full", download=download
    ) + flash_kv.section(plan.kv, rounds=rounds, download=download)


def gets(plan: Plan) -> Section:
    """Gets from memory against loopback, AES-GCM and memcpy."""
    from bench import gets as bench

    found = uvloop.run(bench.measure(rounds=plan.of(3, 11, 21)))
    lines = [Line(f"ceiling_{n}_gbps", "GB/s", found[n]) for n in ("loopback", "aes", "memcpy")]
    lines += [
        Line(f"get_resident_{n}_gbps", "GB/s", found[n])
        for n in ("tcp", "shm", "shm_staged", "shm_daemon")
    ]
    lines += [line(name, "ratio", values) for name, values in bench.ratios(found).items()]
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
        line("daemon_us_per_block", "us", found["per_block_us"]),
        line("daemon_us_per_fetch", "us", found["per_fetch_us"]),
        line("daemon_cpu_us_per_block", "us", found["cpu_per_block_us"]),
        line("daemon_cpu_us_per_fetch", "us", found["cpu_per_fetch_us"]),
    ])  # fmt: skip


def index(plan: Plan) -> Section:
    """Index memory at 5 M blocks, in a new process each time."""
    from bench import index as bench

    blocks = plan.of(200_000, 5_000_000, 5_000_000)
    name = "index_200k_bytes_per_block" if plan.quick else "index_bytes_per_block"
    return Section([
        line(name, "B", [bench.bytes_per_block(blocks) for _ in range(plan.of(1, 5, 5))])
    ])  # fmt: skip


def restart(plan: Plan) -> Section:
    """Restart of 1 M blocks, warm and after a crash, each in a new process."""
    from bench import restart as bench

    blocks = plan.of(50_000, 1_000_000, 1_000_000)
    many = "50k" if plan.quick else "1m"
    found = [bench.measure(blocks=blocks) for _ in range(plan.of(1, 5, 5))]
    return Section([
        line(f"restart_{many}_warm_s", "s", [one["warm_s"] for one in found]),
        line(f"restart_{many}_crash_s", "s", [one["crash_s"] for one in found]),
    ])  # fmt: skip


def scale(plan: Plan) -> Section:
    """Cost curves over blocks, sessions, keys and shards."""
    from bench import scale as bench

    if plan.quick:
        return Section([], not_run=("scale: no curves at this size",))
    return bench.section(plan.of(bench.SMALL, bench.COMMIT, bench.FULL))


def codec(plan: Plan) -> Section:
    """Codecs on KV, one core: the worst of each folder of .npy files (--kv)."""
    from bench import codec_budget as bench
    from bench import kv

    if plan.kv is None:
        return Section([], not_run=(f"codec: no KV ({kv.GIVE})",))
    try:
        found = bench.canonical(plan.kv, rounds=plan.of(2, 5, 5), repeats=plan.of(1, 3, 7))
    except kv.KvError as error:
        return Section([], not_run=(f"codec: {error}",))
    units = {"codec_bypass_cost": "%"}
    return Section([
        line(name, units.get(name, "ratio" if "ratio" in name else "GB/s"), values)
        for name, values in found.items()
    ])  # fmt: skip


def policy(plan: Plan) -> Section:
    """Eviction and admission on traces, beside LRU and the optimum (--traces)."""
    from bench import policy as bench

    if plan.quick:
        return Section([], not_run=("policy: tests/unit/test_eviction.py replays short ones",))
    return bench.section(plan.traces, plan.of({}, bench.COMMIT, bench.FULL))


def quote(plan: Plan) -> Section:
    """Time to the first token with quotes, over fetching always and never (virtual time)."""
    from bench import quote as bench

    if plan.quick:
        return Section([], not_run=("quote: tests/sim/test_recompute.py runs a short one",))
    found = bench.measure(seeds=plan.of(0, 1, 3), per_phase=24)
    print(bench.table(found))
    lines = [
        line(
            f"ttft_auto_vs_{other}", "ratio",
            [one.total["auto"] / one.total[other] for one in found],
        )
        for other in ("always", "never", "oracle")
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
    "policy": policy,
    "quote": quote,
}
