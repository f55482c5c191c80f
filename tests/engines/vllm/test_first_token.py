"""Time to first token with and without Entresol, on one quiet or busy machine: ratios count.

`computed` is a run in which nothing was cached anywhere, `fetched` one in which everything but the
last tokens came from Entresol (nothing was left in vLLM itself). Each is the median of several.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import Site
from tests.engines.vllm.engine import BLOCK_TOKENS, Engine, prompt

LENGTHS = (1000, 4000, 8000)
RUNS = 3
Figure = Callable[[str, float, str], None]
pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("length", LENGTHS)
def test_fetching_gives_the_first_token_sooner_than_computing(
    site: Site, figure: Figure, length: int
) -> None:
    computed, fetched = [], []
    for run in range(RUNS):
        tokens = prompt(1000 * length + run, length)
        cold = site.b.run(tokens, max_tokens=1)
        assert cold["cached_tokens"] == 0
        site.b.settle()
        site.b.forget()
        warm = site.b.run(tokens, max_tokens=1)
        assert warm["tokens"] == cold["tokens"]
        # vLLM computes the last token itself, so a whole number of blocks loses its last one.
        assert warm["cached_tokens"] >= (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        site.b.forget()
        computed.append(cold["seconds"])
        fetched.append(warm["seconds"])
    without, with_tier = statistics.median(computed), statistics.median(fetched)
    figure(f"TTFT of {length} tokens, computed", without, "s")
    figure(f"TTFT of {length} tokens, fetched from Entresol", with_tier, "s")
    figure(f"TTFT of {length} tokens, computed / fetched", without / with_tier, "times")
    if length >= 4000:
        assert with_tier < without, "a fetch must beat a recompute"


@pytest.mark.full_only
def test_a_vllm_without_the_tier_for_comparison(
    tiny_llama: Path, tmp_path: Path, figure: Figure
) -> None:
    engine = Engine("plain", tmp_path, tiny_llama, None).wait_up()
    try:
        engine.run(prompt(1, 1000))  # warm up
        for length in LENGTHS:
            seconds = []
            for run in range(RUNS):
                row = engine.run(prompt(2000 * length + run, length), max_tokens=1)
                assert row["cached_tokens"] == 0
                seconds.append(row["seconds"])
            figure(f"TTFT of {length} tokens, vLLM without tier", statistics.median(seconds), "s")
    finally:
        engine.kill()
