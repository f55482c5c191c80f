"""What the metrics say of quotes: what was quoted, and how good the quotes were.

Invariant: like all others, these series have labels of closed domains, and a row in METRICS.md.
"""

from __future__ import annotations

from entresol_daemon.metric_families import Domain
from entresol_daemon.metric_makers import Makers
from entresol_proto.wire.data import Tier

RATIO_BUCKETS = (0.125, 0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0, 8.0)


class QuoteMetrics:
    """`blocks` by the tier they would come from; `error` by whether a get needed the flash."""

    def __init__(self, make: Makers) -> None:
        self.blocks = make.counters(
            "quoted_blocks_total",
            "Keys quoted, by the tier (none: a miss).",
            tier=Domain(tuple(tier.label for tier in Tier)),
        )
        self.error = make.histograms(
            "quote_error_ratio",
            "Time of a get over what a quote at its begin says; of tenants that ask for quotes.",
            buckets=RATIO_BUCKETS,
            tier=Domain((Tier.MEMORY.label, Tier.FLASH.label)),
        )
