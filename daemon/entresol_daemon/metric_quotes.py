"""What the metrics say of quotes: what was quoted, and how good the quotes were.

Invariant: like all others, these series have labels of closed domains, and a row in METRICS.md.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from entresol_daemon.metric_families import Domain, Family, Spec, TenantLabels
from entresol_proto.wire.data import Tier

RATIO_BUCKETS = (0.125, 0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0, 8.0)
_TIERS: dict[str, Domain | TenantLabels] = {"tier": Domain(tuple(tier.label for tier in Tier))}
_FROM: dict[str, Domain | TenantLabels] = {"tier": Domain((Tier.MEMORY.label, Tier.FLASH.label))}


class QuoteMetrics:
    """`blocks` by the tier they would come from; `error` by whether a get needed the flash."""

    def __init__(self, registry: CollectorRegistry, specs: list[Spec]) -> None:
        name, text = "entresol_quoted_blocks_total", "Keys quoted, by the tier (none: a miss)."
        specs.append(Spec(name, "counter", _TIERS, text))
        self.blocks = Family(Counter(name, text, list(_TIERS), registry=registry), _TIERS)
        name = "entresol_quote_error_ratio"
        text = "Time of a get over what a quote at its begin says; of tenants that ask for quotes."
        specs.append(Spec(name, "histogram", _FROM, text))
        self.error = Family(
            Histogram(name, text, list(_FROM), registry=registry, buckets=RATIO_BUCKETS), _FROM
        )
