"""R1, R2 and S6: the real client, shard and engine on a simulated network, device and clock.

One unit is a seed: about 1,000 blocks put, got, looked up and forgotten by up to three hosts on one
to three shards, in up to three rounds, each of which ends with everything healed and checked; see
`tests.sim.story`. All three lines check everything. They differ in what happens more often: R2 has
more outages, S6 seals more and rotates keys.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable

from tests.proof.line import Line, Size, Slice, Tally
from tests.sim.plans import Plan, make_plan
from tests.sim.planted import PLANT_ENV, PLANTS, planted
from tests.sim.shrinking import Shrinker
from tests.sim.story import Outcome, run_plan

CANARY_SEEDS_MAX = 60
COLLECT_EVERY_SEEDS = 35
R1_PLANTS = ("tag", "ack", "reuse", "forget", "leak", "events")


def run_seeds(part: Slice, emphasis: str) -> Tally:
    """The seeds of a slice."""
    tally = Tally()
    gc.collect()
    gc.freeze()
    gc.disable()  # a seed leaves little behind; it is collected between seeds
    with planted(os.environ.get(PLANT_ENV, "")):
        for seed in part.seeds:
            plan = make_plan(seed, emphasis)
            outcome = _once(part, plan)
            if outcome.wrong and part.minimise:
                plan, outcome = _minimised(part, plan)
            if part.trace:
                tell(plan, outcome)
            _count(tally, outcome)
            if seed % COLLECT_EVERY_SEEDS == 0:
                gc.collect()
    gc.enable()
    gc.unfreeze()
    return tally


def _once(part: Slice, plan: Plan) -> Outcome:
    folder = part.folder / f"seed{plan.seed}"
    try:
        return run_plan(plan, folder, lines=part.trace)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _minimised(part: Slice, plan: Plan) -> tuple[Plan, Outcome]:
    shrinker = Shrinker(plan, lambda smaller: bool(_once(part, smaller).wrong))
    small = shrinker.shrink()
    print(f"minimised in {shrinker.tries} runs; left out: {shrinker.mask}")
    return small, _once(part, small)


def tell(plan: Plan, outcome: Outcome) -> None:
    """What happened, for a person who replays a seed."""
    print(f"seed {plan.seed}: {plan.flavour}, {plan.shards} shards, {plan.geometry}")
    print(f"network {plan.network}")
    print(f"media { ({kind.value: rate for kind, rate in plan.media.items()}) }")
    for line in outcome.lines:
        print(line)
    print(f"trace {outcome.trace}")
    for text in outcome.wrong:
        print(f"WRONG {text}")


def _count(tally: Tally, outcome: Outcome) -> None:
    tally.tried += outcome.tried
    tally.survived += 0 if outcome.wrong else outcome.tried
    tally.wrong_bytes += outcome.wrong_bytes
    tally.durable_lost += outcome.lost
    for text in outcome.wrong:
        tally.found(outcome.seed, f"{outcome.flavour}: {text}")
    figures: dict[str, float] = {
        "seeds": 1,
        f"seeds_{outcome.flavour}": 1,
        "operations_through_the_client": outcome.full_stack,
        "operations_of_hostile_hosts": outcome.tried - outcome.full_stack,
        "blocks_served_exact": outcome.served,
        "faults_injected": sum(outcome.injected.values()),
        "seals": outcome.seals,
        "keys": outcome.keys,
        "key_nonce_reused": outcome.reused,
        "max_seals_per_key": outcome.seals_per_key_max,
        "max_blocks_per_dek": outcome.blocks_per_dek_max,
        "virtual_seconds": round(outcome.virtual_s),
        "traces": int(outcome.trace[:8], 16),  # equal sums, equal runs: on any machine
    }
    for name, value in figures.items():
        tally.figure(name, value)


def seeds_to_find(name: str, emphasis: str, folder: Callable[[int], Slice]) -> int:
    """How many seeds it takes to find a planted bug. Raises: AssertionError after too many."""
    with planted(name):
        for seed in range(1, CANARY_SEEDS_MAX + 1):
            if _once(folder(seed), make_plan(seed, emphasis)).wrong:
                return seed
    raise AssertionError(f"{name}: {PLANTS[name][0]}; not found in {CANARY_SEEDS_MAX} seeds")


def _canary(names: tuple[str, ...], emphasis: str) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(prefix="entresol-canary-") as name:
        for plant in names:
            part = Slice(0, 1, Size.COMMIT, Path(name) / plant)
            count = seeds_to_find(plant, emphasis, lambda _seed, part=part: part)  # type: ignore[misc]
            print(f"{plant}: {PLANTS[plant][0]}: found after {count} seeds", flush=True)


LINES = (
    Line(
        id="R1",
        name="simulation: faults of device, network, machines, clocks",
        unit="seeds",
        units={Size.COMMIT: 140, Size.NIGHTLY: 2_000, Size.RELEASE: 20_000},
        slice_units=70,
        run=lambda part: run_seeds(part, ""),
        in_memory=True,
        canary=lambda: _canary(R1_PLANTS, ""),
    ),
    Line(
        id="R2",
        name="liveness after healing: calls end, clients come back, the tier serves",
        unit="seeds",
        units={Size.COMMIT: 30, Size.NIGHTLY: 200, Size.RELEASE: 1_000},
        slice_units=50,
        run=lambda part: run_seeds(part, "outages"),
        in_memory=True,
        canary=lambda: _canary(("breaker",), "outages"),
    ),
    Line(
        id="S6",
        name="no (key, nonce) pair sealed twice, under rotation",
        unit="seeds",
        units={Size.COMMIT: 30, Size.NIGHTLY: 200, Size.RELEASE: 1_000},
        slice_units=50,
        run=lambda part: run_seeds(part, "sealing"),
        in_memory=True,
        canary=lambda: _canary(("salt",), "sealing"),
    ),
)
