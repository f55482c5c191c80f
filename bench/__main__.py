"""`make bench`: every budget in one run, with peers and the machine's ceilings beside it.

    python -m bench [--size quick|commit|full] [--only NAME,...] [--peers NAME,...]
                    [--kv DIR] [--traces DIR] [--plots DIR] [--json]

Prints a table per section, then the two numbers of flash and all budgets, and merges what it
measured into bench/results.json: one flat object, `name: {value, unit, low, high}`, where value is
the median over rounds. Ratios compare things measured in turn within the same rounds, so a noisy
machine spoils both sides alike. A missed budget makes the exit status 1, and so does a number that
the sections should have measured and did not, except with --quick, which is for looking whether
the benches run. README.md beside this file says what each number means.

With --json the standard output is results.json's content and nothing else; tables go to standard
error.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import contract, kv, results
from bench.peers.running import NAMES
from bench.results import CANONICAL, Line, Section
from bench.sections import NO_PEERS, SECTIONS, SIZES, Plan

RDMA = "rdma: READs beside ib_read_bw run in an emulated guest: make test-rdma"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Budgets in one run.")
    parser.add_argument("--size", choices=SIZES, default="commit")
    parser.add_argument("--quick", action="store_true", help="the same as --size quick")
    parser.add_argument("--only", default="", help=f"of: {', '.join(SECTIONS)}")
    parser.add_argument("--peers", default="", help="these peers only; none: nobody")
    parser.add_argument(
        "--kv", type=Path, metavar="DIR", default=kv.beside("kv"),
        help=".npy files of bf16 KV, for codec and flash (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", default=kv.beside("traces"),
        help="traces and reference_results.csv, for policy (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw pictures there (PNG)")
    parser.add_argument("--json", action="store_true", help="print results.json's content only")
    return parser


def run(names: Sequence[str], plan: Plan, told: Mapping[str, Any]) -> Section:
    """Run sections one after the other, printing and keeping each; everything they found."""
    lines: list[Line] = []
    curves: list[results.Curve] = []
    not_run: list[str] = []
    for name in names:
        began = time.monotonic()
        print(f"\n{name}: {SECTIONS[name].__doc__}", flush=True)
        found = SECTIONS[name](plan)
        for line in found.lines:
            print(line.text())
        for curve in found.curves:
            print(curve.text())
        for reason in found.not_run:
            print(f"  not run: {reason}")
        print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
        results.save(found.lines, found.curves, told)
        lines += found.lines
        curves += found.curves
        not_run += found.not_run
    return Section(lines, tuple(curves), tuple(not_run))


def summary(found: Section, missing: Sequence[str]) -> str:
    """The two numbers of flash, what has a budget, what is missing, and what was not run."""
    by_name = {line.name: line for line in found.lines}
    first = [by_name[name] for name in CANONICAL if name in by_name]
    judged = [line for line in found.lines if line.at_least or line.at_most]
    rows = ["\nthe two numbers of flash", *(line.text() for line in first)] if first else []
    rows += ["\nbudgets", *(line.text() for line in judged)]
    rows += ["\nnot run", *(f"  {why}" for why in dict.fromkeys(found.not_run))]
    rows += [
        f"  {name}: missing, its section {contract.BUDGETS[name].section} did not find it"
        for name in missing
    ]
    return "\n".join([*rows, f"  {RDMA}"])


def _report(names: Sequence[str], plan: Plan, plots_folder: Path | None) -> int:
    """Measure and print; the exit status."""
    told = results.beside(plan.size, datetime.datetime.now(datetime.UTC))
    print(f"{told['machine']}, load {os.getloadavg()[0]:.1f}, commit {told['commit'] or '?'}")
    found = run(names, plan, told)
    missing = contract.missing(found.lines, names)
    print(summary(found, () if plan.quick else missing))
    if plots_folder:
        from bench import plots

        for path in plots.draw(plots_folder):
            print(f"drew {path}")
    missed = [line.name for line in found.lines if not line.holds]
    if plan.quick:
        return 0
    for what, which in (("missed", missed), ("missing", missing)):
        if which:
            print(f"\n{what}: {', '.join(which)}")
    return 1 if missed or missing else 0


def main(argv: list[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and clean up
    parser = _parser()
    asked = parser.parse_args(argv)
    names = [name for name in asked.only.split(",") if name] or list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            parser.error(f"no section {name!r}; there are {', '.join(SECTIONS)}")
    if asked.plots:
        from bench import plots

        plots.check()  # before minutes of measuring
    only = tuple(name for name in asked.peers.split(",") if name)
    if unknown := sorted(set(only) - set(NAMES)) if only != NO_PEERS else []:
        parser.error(f"no peer {unknown[0]!r}; there are {', '.join(NAMES)}, or none of them: none")
    plan = Plan("quick" if asked.quick else asked.size, only, asked.kv, asked.traces)
    if not asked.json:
        return _report(names, plan, asked.plots)
    with contextlib.redirect_stdout(sys.stderr):
        status = _report(names, plan, asked.plots)
    print(json.dumps(results.load(results.RESULTS)))
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; what was measured before is in bench/results.json", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
