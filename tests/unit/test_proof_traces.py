"""The same seed is the same run on any machine: this one's traces are those that were committed."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import zstandard

from entresol_proto.seal.codecs import zstd
from tests.proof import traces
from tests.sim.plans import make_plan

CHANGED = (
    "another trace than was committed. After a change of what the product or the simulation does: "
    "`python -m tests.proof.traces --write`; without one, a run depends on its machine"
)


@pytest.mark.parametrize("seed", traces.SEEDS)
def test_a_seed_has_its_golden_trace(seed: int, tmp_path: Path) -> None:
    known = traces.golden().get(traces.this_python())
    if known is None:
        pytest.skip(f"not run here: no traces of Python {traces.this_python()} are known")
    assert traces.trace_of(seed, tmp_path) == known[str(seed)], CHANGED


def test_golden_seeds_are_of_many_kinds() -> None:
    plans = [make_plan(seed) for seed in traces.SEEDS]
    assert {plan.flavour for plan in plans} >= {"honest", "failing", "rotten"}
    assert {fabric for plan in plans for fabric in plan.geometry.fabrics} == {
        "tcp", "shm", "private"
    }  # fmt: skip
    assert max(plan.shards for plan in plans) > 1
    for known in traces.golden().values():
        assert set(known) == {str(seed) for seed in traces.SEEDS}
        assert len(set(known.values())) == len(traces.SEEDS)


def test_a_golden_trace_does_not_depend_on_what_a_library_makes(tmp_path: Path) -> None:
    """Another zstd makes other sizes; no run of these seeds sees them."""
    seed = traces.SEEDS[0]
    before = traces.trace_of(seed, tmp_path / "before")
    worse = zstandard.ZstdCompressor(level=-100)
    with patch.object(zstd._contexts, "general", worse):
        assert traces.trace_of(seed, tmp_path / "after") == before
