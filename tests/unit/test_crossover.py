"""Fetch or recompute: lines that find what they are fed, and choices that follow them."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_client.crossover import (
    CANDIDATES,
    EXPLORE_AFTER,
    EXPLORED_SHARE,
    FRESH_S,
    REACH,
    SEEN_MIN,
    Crossover,
    Line,
    Offer,
    solve,
)
from entresol_client.results import QuoteResult
from entresol_proto.wire.data import Tier

OVERHEAD_S, TOKEN_S, PAIR_S = 2e-3, 20e-6, 5e-10
BLOCK_TOKENS = 64


def prefill_s(context: int, tokens: int) -> float:
    return OVERHEAD_S + TOKEN_S * tokens + PAIR_S * tokens * (context + tokens / 2)


def learned(rng: random.Random, *, slow: float = 1.0, count: int = 60, outliers: int = 0,
            told: int = 0, most: int = 8192, at_s: float = 0.0) -> Crossover:  # fmt: skip
    """A crossover that has seen so many prefills."""
    one = Crossover(prefill_tokens_per_s=told)
    for number in range(count):
        tokens, context = rng.randint(32, most), rng.randint(0, most)
        seconds = prefill_s(context, tokens) * slow * rng.uniform(0.95, 1.05)
        if outliers and number % outliers == outliers - 1:
            seconds *= 30
        one.prefilled(context, tokens, seconds, at_s + number / 1000)
    return one


def offer(blocks: int, ns_per_block: float, *, tail: int = 64) -> Offer:
    return Offer(blocks, blocks * BLOCK_TOKENS, lambda n: (n * ns_per_block / 1e9, n << 8), 0, tail)


# Lines --------------------------------------------------------------------------------------------


def test_a_system_of_equations_is_solved() -> None:
    assert solve([[0.0, 2.0], [3.0, 1.0]], [4.0, 5.0]) == pytest.approx([1.0, 2.0])
    assert solve([[1.0, 2.0], [2.0, 4.0]], [1.0, 2.0]) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_prefill_is_learned_with_its_quadratic_term(seed: int) -> None:
    one = learned(random.Random(seed))
    for context, tokens in ((0, 500), (0, 8000), (6000, 2000), (8000, 8000)):
        found = one.expect_prefill(context, tokens, 0.1)
        assert found == pytest.approx(prefill_s(context, tokens), rel=0.12)


@pytest.mark.parametrize("seed", range(5))
def test_outliers_count_little(seed: int) -> None:
    one = learned(random.Random(seed), outliers=8)
    found = one.expect_prefill(0, 6000, 0.1)
    assert found == pytest.approx(prefill_s(0, 6000), rel=0.3)


@pytest.mark.parametrize("slow", [0.3, 4.0])
def test_a_busier_or_idler_engine_is_noticed_within_a_few(slow: float) -> None:
    rng = random.Random(7)
    one = learned(rng, at_s=100.0)
    for number in range(6):
        tokens = rng.randint(4000, 8000)
        one.prefilled(0, tokens, prefill_s(0, tokens) * slow, 101.0 + number)
    assert one.expect_prefill(0, 6000, 107.0) == pytest.approx(slow * prefill_s(0, 6000), rel=0.3)


def test_short_ones_that_are_quick_again_are_believed_for_long_ones() -> None:
    """All is fetched while the engine is busy: only tails show that it is idle again."""
    rng = random.Random(8)
    one = learned(rng, at_s=0.0)
    for number in range(5):
        one.prefilled(0, 6000, 5 * prefill_s(0, 6000), 1.0 + number / 10)
    assert one.expect_prefill(0, 6000, 1.6) > 3 * prefill_s(0, 6000)
    for number in range(4):
        one.prefilled(5000, 100, prefill_s(5000, 100), 2.0 + number / 10)
    assert one.expect_prefill(0, 6000, 2.5) < 2 * prefill_s(0, 6000)


def test_one_slow_sight_is_half_believed_and_two_are_news() -> None:
    line = Line([])
    for number in range(40):
        line.note((1.0, 100.0, 0.0), 1.0, number / 10)
    line.note((1.0, 100.0, 0.0), 50.0, 4.0)
    assert line.expect((1.0, 100.0, 0.0), 4.1) <= 25, "one that was slow is half believed"
    fresh = line.expect((1.0, 100.0, 0.0), 4.1 + 2 * FRESH_S)
    assert fresh == pytest.approx(line.base((1.0, 100.0, 0.0)))
    assert fresh < 5
    line.note((1.0, 100.0, 0.0), 1.0, 4.2)
    assert line.expect((1.0, 100.0, 0.0), 4.3) < 5, "and one that is not ends that"
    for number in range(2):
        line.note((1.0, 100.0, 0.0), 50.0, 4.4 + number / 10)
    assert line.expect((1.0, 100.0, 0.0), 4.6) > 20, "two of three are news"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(1, 100_000), st.floats(1e-7, 1e4)),
        max_size=40,
    )
)
def test_no_sight_whatever_makes_a_time_negative_or_unknown(
    seen: list[tuple[int, int, float]],
) -> None:
    one = Crossover(prefill_tokens_per_s=1000)
    for number, (context, tokens, seconds) in enumerate(seen):
        one.prefilled(context, tokens, seconds, number / 10)
        one.fetched(seconds / 2, tokens << 10, seconds, number / 10)
    found = one.expect_prefill(10, 1000, len(seen) / 10)
    assert found is not None
    assert 0 <= found < float("inf")
    assert 0 <= one.expect_fetch(0.1, 1 << 20, 5.0) < float("inf")
    blocks = one.choose(offer(40, 1e6), 5.0).fetch_blocks
    assert 0 <= blocks <= 40


# Choices ------------------------------------------------------------------------------------------


def test_nothing_is_decided_before_anything_is_known() -> None:
    one = Crossover()
    assert one.choose(offer(20, 1e12), 0.0).fetch_blocks == 20
    for _ in range(SEEN_MIN):
        one.prefilled(0, 100, 0.001, 0.0)
    assert one.expect_prefill(0, 100 * REACH, 0.0) is not None
    assert one.expect_prefill(0, 100 * REACH + 1, 0.0) is None
    choice = one.choose(offer(160, 1e12, tail=1), 0.0)
    assert choice.fetch_blocks > 0, "no further than it was ever seen"
    assert (160 - choice.fetch_blocks) * BLOCK_TOKENS + 1 <= 100 * REACH


def test_what_the_user_knows_stands_in_until_it_is_seen() -> None:
    one = Crossover(prefill_tokens_per_s=10_000)
    assert one.expect_prefill(0, 5_000, 0.0) == pytest.approx(0.5, rel=0.1)
    assert one.choose(offer(80, 1e9), 0.0).fetch_blocks == 0
    assert one.choose(offer(80, 1e5), 1.0).fetch_blocks == 80
    for number in range(40):
        one.prefilled(0, 1000 + number * 50, (1000 + number * 50) / 50_000, number / 10)
    assert one.expect_prefill(0, 5_000, 4.0) == pytest.approx(0.1, rel=0.2)


def test_the_quicker_side_is_taken_and_a_small_difference_changes_nothing() -> None:
    one = learned(random.Random(1))
    even = prefill_s(0, 100 * BLOCK_TOKENS) / 100 * 1e9
    assert one.choose(offer(100, even * 0.2), 0.1).fetch_blocks == 100
    assert one.choose(offer(100, even * 0.97), 0.1).fetch_blocks == 100
    # Far behind in a prompt a token costs more: there the first ones may be computed, or none.
    assert one.choose(offer(100, even * 5), 0.1).fetch_blocks == 0
    assert one.choose(offer(100, even * 0.97), 0.1).fetch_blocks == 0, "it stays where it is"


def test_a_prefix_in_memory_is_fetched_and_what_is_behind_a_flood_is_computed() -> None:
    one = learned(random.Random(3))
    tiers = [Tier.MEMORY] * 48 + [Tier.FLASH] * 48
    quote = QuoteResult(96, tiers, 96 << 20, 48 << 20, 100_000, 2_000_000, 900_000_000,
                        5_000_000_000, 9_000_000_000)  # fmt: skip
    found = one.choose(
        Offer(96, 96 * BLOCK_TOKENS, lambda n: (quote.first(n)[0] / 1e9, quote.first(n)[1])), 0.1
    )
    assert found.fetch_blocks == 48
    assert found.expected_s is not None
    assert found.expected_s < min(found.fetch_all_s or 0, found.recompute_all_s or 0)


def test_quotes_that_are_wrong_are_corrected() -> None:
    """A link that takes twice as long as all of the daemon's part."""
    one = learned(random.Random(4))
    rng = random.Random(4)
    for number in range(40):
        quoted, length = rng.uniform(0.001, 0.05), rng.randint(1, 64) << 20
        one.fetched(quoted, length, 1.5 * quoted + length / 1e9 + 0.001, number / 100)
    found = one.expect_fetch(0.02, 32 << 20, 0.5)
    assert found == pytest.approx(0.03 + (32 << 20) / 1e9 + 0.001, rel=0.15)


def test_trying_the_other_side_costs_its_share_at_most() -> None:
    one, rng, now = learned(random.Random(5)), random.Random(6), 0.1
    spent, best, tried = 0.0, 0.0, 0
    for _ in range(3000):
        now += 0.01
        choice = one.choose(offer(100, rng.uniform(0.1e6, 0.9e6)), now)
        assert choice.expected_s is not None
        assert choice.fetch_all_s is not None
        assert choice.recompute_all_s is not None
        if choice.explored:
            tried += 1
            paid = choice.fetch_all_s if choice.fetch_blocks else choice.recompute_all_s
            spent += max(0.0, paid - choice.expected_s)
        best += choice.expected_s
        one.prefilled(0, 6000, prefill_s(0, 6000), now)
    assert 0 < tried <= 3000 / EXPLORE_AFTER + 1
    assert spent <= EXPLORED_SHARE * best * 1.01


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_close_to_the_best_on_random_days(seed: int) -> None:
    """Engine and daemon change their speed; what is chosen costs little more than what was best."""
    rng, one = random.Random(seed), learned(random.Random(seed), at_s=0.0)
    now, paid, best, always, never = 1.0, [], [], [], []
    for _ in range(40):
        engine, daemon = rng.choice((1, 1, 3)), rng.choice((0.2, 0.2, 4.0))
        for _ in range(12):
            now += 0.2
            blocks = rng.randint(60, 120)
            per_block_s = daemon * TOKEN_S * BLOCK_TOKENS
            choice = one.choose(offer(blocks, per_block_s * 1e9), now)

            def cost(
                fetch: int, blocks: int = blocks, slow: int = engine, each: float = per_block_s
            ) -> float:
                tokens = (blocks - fetch) * BLOCK_TOKENS + 64
                return fetch * each + slow * prefill_s(fetch * BLOCK_TOKENS, tokens)

            paid.append(cost(choice.fetch_blocks))
            always.append(cost(blocks))
            never.append(cost(0))
            best.append(min(cost(blocks * step // CANDIDATES) for step in range(CANDIDATES + 1)))
            tokens = (blocks - choice.fetch_blocks) * BLOCK_TOKENS + 64
            context = choice.fetch_blocks * BLOCK_TOKENS
            one.prefilled(context, tokens, engine * prefill_s(context, tokens), now)
            if choice.fetch_blocks:
                quoted = choice.fetch_blocks * per_block_s
                one.fetched(quoted, choice.fetch_blocks << 20, quoted, now)
    assert statistics.fmean(paid) < 1.12 * statistics.fmean(best)
    assert statistics.fmean(paid) < 0.95 * min(statistics.fmean(always), statistics.fmean(never))


# Quotes -------------------------------------------------------------------------------------------


def test_the_first_blocks_of_a_quote_take_their_part() -> None:
    tiers = [Tier.MEMORY, Tier.FLASH, Tier.MEMORY, Tier.FLASH, Tier.NONE]
    quote = QuoteResult(4, tiers, 4000, 2000, 10, 110, 500, 1500, 3000)
    times = [quote.first(blocks)[0] for blocks in range(6)]
    assert times == [0, 60, 1000, 1000, 1500, 1500]
    assert times == sorted(times)
    assert quote.first(2)[1] == 2000
    assert QuoteResult(0, [Tier.NONE], 0, 0, 1, 1, 1, 1, 1).first(1) == (0, 0)
