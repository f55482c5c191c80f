"""Recompute or fetch: time to the first token of three policies and the best, as load changes.

    python -m bench.quote [--seeds 3] [--requests 24] [--plot FILE]

A simulated engine beside a shard whose hardware has rates, on a virtual clock
(`tests.sim.quotelab`): the numbers are the same on every machine, and say nothing of how fast a
real engine or drive is. The policies are to fetch whatever is stored, to fetch nothing, and what
`recompute_or_fetch = auto` does with quotes; the oracle takes, request by request, the better of
the first two. With --plot, and matplotlib, a picture of the first seed, request by request.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.sim import quotelab

POLICIES = (*quotelab.POLICIES, "oracle")


def measure(*, seeds: int, per_phase: int) -> list[quotelab.Comparison]:
    """One comparison per seed."""
    return [quotelab.compare(seed, per_phase=per_phase) for seed in range(1, seeds + 1)]


def table(found: Sequence[quotelab.Comparison]) -> str:
    """Mean milliseconds to the first token, by phase, over all seeds."""
    rows = [f"{'':18}" + "".join(f"{policy:>10}" for policy in POLICIES) + f"{'fetched':>10}"]
    for phase in quotelab.PHASES:
        means = [
            statistics.fmean(one.by_phase[phase.name][policy] for one in found)
            for policy in POLICIES
        ]
        fetched = statistics.fmean(one.fetched[phase.name] for one in found)
        cells = "".join(f"{1e3 * mean:10.2f}" for mean in means)
        rows.append(f"{phase.name:18}{cells}{fetched:10.0%}")
    means = [statistics.fmean(one.total[policy] for one in found) for policy in POLICIES]
    rows.append(f"{'all phases':18}" + "".join(f"{1e3 * mean:10.2f}" for mean in means))
    return "\n".join(rows)


def plot(path: Path, *, seed: int, per_phase: int) -> bool:
    """Draw time to the first token, request by request. False where there is no matplotlib."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(10, 4))
    for policy in quotelab.POLICIES:
        outcome = quotelab.run(seed, policy, per_phase)
        axes.plot([1e3 * each for each in outcome.ttft_s], label=policy, linewidth=1.2)
    for at, phase in enumerate(quotelab.PHASES):
        axes.axvline(at * per_phase, color="grey", linewidth=0.5)
        axes.text(at * per_phase + 0.5, axes.get_ylim()[1], phase.name, va="top", fontsize=8)
    axes.set_xlabel("request")
    axes.set_ylabel("ms to the first token (simulated)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24, help="in each phase")
    parser.add_argument("--plot", type=Path, help="draw seed 1 into this file")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    found = measure(seeds=asked.seeds, per_phase=asked.requests)
    if asked.json:
        print(json.dumps([{"seed": one.seed, "total": one.total, "by_phase": one.by_phase,
                           "fetched": one.fetched, "quote_error": one.quote_error}
                          for one in found]))  # fmt: skip
        return 0
    print(table(found))
    if asked.plot and not plot(asked.plot, seed=1, per_phase=asked.requests):
        print("no plot: there is no matplotlib")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
