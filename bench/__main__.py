"""`make bench`: every budget in one run, with the machine's ceilings beside it.

    python -m bench [--quick] [--only NAME,...] [--kv FOLDER] [--json]

Prints a table per section and writes bench/results.json: one flat object, `name: {value, unit,
low, high}`, where value is the median over rounds. Ratios compare things measured in turn within
the same rounds, so a noisy machine spoils both sides alike. A missed budget makes the exit status
1, except with --quick, which is for looking whether the benches run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

RESULTS = Path(__file__).parent / "results.json"


@dataclass(frozen=True, slots=True)
class Line:
    """One measured quantity over its rounds."""

    name: str
    unit: str
    values: list[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def holds(self) -> bool:
        """True when there is no budget or it is met."""
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    def text(self) -> str:
        """One row of the table."""
        budget = ""
        if self.at_least is not None:
            budget = f"at least {self.at_least:g}"
        elif self.at_most is not None:
            budget = f"at most {self.at_most:g}"
        verdict = ("" if not budget else "ok" if self.holds else "MISSED").rjust(6)
        spread = f"{min(self.values):.3g}..{max(self.values):.3g}"
        return (
            f"  {self.name:42} {self.value:9.3g} {self.unit:6} {spread:>16}  {budget:14} {verdict}"
        )


def gets(quick: bool) -> list[Line]:
    """Gets from memory against loopback, AES-GCM and memcpy."""
    from bench import gets as bench

    found = uvloop.run(bench.measure(rounds=3 if quick else 11))
    lines = [Line(f"ceiling_{n}_gbps", "GB/s", found[n]) for n in ("loopback", "aes", "memcpy")]
    lines += [
        Line(f"get_resident_{n}_gbps", "GB/s", found[n])
        for n in ("tcp", "shm", "shm_staged", "shm_daemon")
    ]
    budgets = {
        "get_resident_tcp_vs_loopback": 0.7,
        "get_resident_shm_sealed_vs_aes": 0.7,
        "get_resident_shm_plain_vs_memcpy": 0.7,
    }
    lines += [
        Line(name, "ratio", values, at_least=budgets.get(name))
        for name, values in bench.ratios(found).items()
    ]
    return lines


def cost(quick: bool) -> list[Line]:
    """Daemon time per block and per fetch: the interpreter, and the whole process (cpu)."""
    from bench import daemon_cost as bench

    found = uvloop.run(bench.measure(fetches=200 if quick else 2000, rounds=2 if quick else 5))
    return [
        Line("daemon_us_per_block", "us", found["per_block_us"], at_most=50),
        Line("daemon_us_per_fetch", "us", found["per_fetch_us"], at_most=200),
        Line("daemon_cpu_us_per_block", "us", found["cpu_per_block_us"]),
        Line("daemon_cpu_us_per_fetch", "us", found["cpu_per_fetch_us"]),
    ]


def index(quick: bool) -> list[Line]:
    """Index memory at 5 M blocks."""
    from bench import index as bench

    found = bench.measure(blocks=200_000 if quick else 5_000_000)
    return [Line("index_bytes_per_block", "B", [found["bytes_per_block_resident"]], at_most=128)]


def restart(quick: bool) -> list[Line]:
    """Restart of 1 M blocks, warm and after a crash."""
    from bench import restart as bench

    found = bench.measure(blocks=50_000 if quick else 1_000_000)
    return [
        Line("restart_1m_warm_s", "s", [found["warm_s"]], at_most=5),
        Line("restart_1m_crash_s", "s", [found["crash_s"]], at_most=20),
    ]


def codec(quick: bool) -> list[Line]:
    """Codecs on bf16 KV, one core, the lower of each folder of .npy files (--kv)."""
    from bench import codec_budget as budget

    folder = KV_FOLDER if KV_FOLDER is not None else os.environ.get("CODEC_KV")
    if folder is None or not any(Path(folder).rglob("*.npy")):
        print("  not run: no folder of KV given (--kv FOLDER, .npy of bf16 bit patterns)")
        return []
    found = budget.canonical(Path(folder), repeats=2 if quick else 7)
    budgets = {
        "codec_dense_ratio_bf16": 1.5,
        "codec_dense_decode_gbps": 2.0,
        "codec_fast_ratio_bf16": 1.42,
        "codec_fast_decode_gbps": 8.0,
        "codec_fast_encode_gbps": 8.0,
    }
    return [
        Line(name, "ratio" if "ratio" in name else "GB/s", [value], at_least=budgets.get(name))
        for name, value in found.items()
    ]


def quote(quick: bool) -> list[Line]:
    """Time to the first token with quotes, over fetching always and never (virtual time)."""
    from bench import quote as bench

    found = bench.measure(seeds=1 if quick else 3, per_phase=8 if quick else 24)
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
    return [*lines, Line("fetch_time_over_quoted", "ratio", errors)]


KV_FOLDER: str | None = None
SECTIONS: dict[str, Callable[[bool], list[Line]]] = {
    "gets": gets,
    "cost": cost,
    "index": index,
    "restart": restart,
    "codec": codec,
    "quote": quote,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Budgets in one run.")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes, no verdict")
    parser.add_argument("--only", default="", help=f"of: {', '.join(SECTIONS)}")
    parser.add_argument("--kv", metavar="FOLDER", help="of .npy files with KV, for codec")
    parser.add_argument("--json", action="store_true", help="print results.json's content as well")
    asked = parser.parse_args(argv)
    global KV_FOLDER
    KV_FOLDER = asked.kv
    names = [name for name in asked.only.split(",") if name] or list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            parser.error(f"no section {name!r}; there are {', '.join(SECTIONS)}")
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    print(
        f"{platform.machine()}, {cores} cores, load {load:.1f}, Python {platform.python_version()}"
    )
    lines: list[Line] = []
    for name in names:
        began = time.monotonic()
        print(f"\n{name}: {SECTIONS[name].__doc__}", flush=True)
        found = SECTIONS[name](asked.quick)
        for line in found:
            print(line.text())
        print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
        lines += found
    results = {
        line.name: {
            "value": line.value, "unit": line.unit,
            "low": min(line.values), "high": max(line.values),
        }
        for line in lines
    }  # fmt: skip
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if asked.json:
        print(json.dumps(results))
    missed = [line.name for line in lines if not line.holds]
    if missed and not asked.quick:
        print(f"\nmissed: {', '.join(missed)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
