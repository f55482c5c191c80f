"""The fuzz targets at a size for every run: the corpus, some mutations, and the planted faults.

Volume is the line F1 of tests/proof; `python -m tests.fuzz` runs targets by hand. Every failure
names the target and the seed of its input.
"""

from __future__ import annotations

import pytest

from tests.fuzz.loop import SHARES, Fuzzer, FuzzError, find_canaries, fuzz
from tests.fuzz.target import CORPUS, Target, find_targets

SEED = 20_261_121
INPUTS = 400
TARGETS = find_targets()


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_only_documented_rejections(target: Target) -> None:
    fuzzer = fuzz(target, INPUTS, SEED)
    mine = [what for name, what in fuzzer.outcomes if name == target.name]
    assert len(mine) > 1, "a fuzzer that is always refused at the door tests the door"


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_planted_faults_are_found(target: Target) -> None:
    find_canaries(target)


def test_shares_are_whole() -> None:
    assert sum(target.share for target in TARGETS.values()) == SHARES


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert not [path for path in CORPUS.iterdir() if not any(path.iterdir())], "an empty corpus"


def test_a_greedy_parser_is_noticed() -> None:
    """The bound on allocations is measured, not believed."""
    greedy = Target(
        name="greedy", share=1, seeds=lambda: [b"seed"], canaries=(), modules=(),
        make=lambda: lambda raw: str(len(bytearray(1 << 20)) > 0),
    )  # fmt: skip
    with pytest.raises(FuzzError, match="bytes allocated"):
        fuzz(greedy, 100, 0)


def test_a_seed_is_an_input() -> None:
    """The same seed gives the same input and outcome in any run."""
    targets = [TARGETS["messages"], TARGETS["frames"]]
    both = Fuzzer(targets), Fuzzer(targets)
    for seed in range(500, 600):
        both[0].one(seed)
    for seed in reversed(range(500, 600)):
        both[1].one(seed)
    assert both[0].outcomes == both[1].outcomes
