"""What a tier is worth: tokens per dollar, and what a token costs that need not be computed.

Invariant: a vendor's claim is named as one, and what was inferred from it as inferred.

VAST Data publishes hit rates of 40 to 60 % as common and "60-130 %" more tokens per dollar, without
the formula, and a first token after 3 s instead of 62 s for a context of 127,188 tokens
(vastdata.com/blog/nvidia-dynamo-vast-scalable-optimized-inference, 2025-12-16). The formula below
with all of the GPU's time in prefill, a hit that takes 3/62 of it and storage that costs nothing
gives 61 % and 133 % at these hit rates, so it is taken to be theirs. All three assumptions are
favourable; the first is the boldest.
"""

from __future__ import annotations

from dataclasses import dataclass

from entresol_client.sizing.shapes import SizingError

VENDOR_PREFILL_SHARE = 1.0
VENDOR_FETCH_COST = 3 / 62  # of recomputing: seconds to the first token, fetched over computed
MONTHS_PER_YEAR = 12
SECONDS_PER_MONTH = 365 * 86_400 / MONTHS_PER_YEAR


def work_left(hit_rate: float, prefill_share: float, fetch_cost: float) -> float:
    """Share of the GPU's work that remains. Raises: SizingError."""
    for name, value in (("hit rate", hit_rate), ("prefill share", prefill_share),
                        ("fetch cost", fetch_cost)):  # fmt: skip
        if not 0 <= value <= 1:
            raise SizingError(f"a {name} of {value:g}", hint="a share is 0 to 1, or 0% to 100%")
    return 1 - hit_rate * prefill_share * (1 - fetch_cost)


def more_tokens_per_dollar(
    hit_rate: float, prefill_share: float, fetch_cost: float, tier_over_gpu_cost: float = 0.0
) -> float:
    """0.6 is 60 % more tokens for the same money; below 0, the tier does not pay for itself.

    `tier_over_gpu_cost` is what the tier costs, over what the GPUs cost that the work would take
    without it. Raises: SizingError.
    """
    left = work_left(hit_rate, prefill_share, fetch_cost) + tier_over_gpu_cost
    if left <= 0:
        raise SizingError("nothing is left to compute", hint="a hit rate below 1")
    return 1 / left - 1


@dataclass(frozen=True, slots=True)
class Prices:
    """In one currency. 0 means: not told."""

    drive: float  # each
    shard: float  # each, without drives
    gpu_hour: float
    prefill_tokens_per_s: float  # of one GPU
    years: float  # over which the hardware is paid


@dataclass(frozen=True, slots=True)
class Worth:
    """Costs; None where a price that it needs was not told."""

    tier_per_month: float | None
    tier_per_million_tokens: float | None  # that came from the tier
    compute_per_million_tokens: float | None  # had they been computed


def worth(
    prices: Prices, drives: int, shards: int, drive_years: float, tokens_from_tier_per_s: float
) -> Worth:
    """What the tier costs, and what the tokens it serves would have cost.

    Drives that wear out earlier than `prices.years` are paid over their life.
    """
    per_month = None
    if prices.drive:
        drive_months = MONTHS_PER_YEAR * min(prices.years, drive_years)
        per_month = drives * prices.drive / drive_months
        per_month += shards * prices.shard / (MONTHS_PER_YEAR * prices.years)
    millions = tokens_from_tier_per_s * SECONDS_PER_MONTH / 1e6
    computed = None
    if prices.gpu_hour and prices.prefill_tokens_per_s:
        computed = prices.gpu_hour / 3600 / prices.prefill_tokens_per_s * 1e6
    return Worth(
        tier_per_month=per_month,
        tier_per_million_tokens=per_month / millions if per_month and millions else None,
        compute_per_million_tokens=computed,
    )
