"""What the metrics say of how well the cache is used: what is asked, kept in vain, thrown away too
early, and written.

Invariant: like all others, these series have labels of closed domains, and a row in METRICS.md.
"""

from __future__ import annotations

from entresol_daemon.core.usefulness import Use
from entresol_daemon.metric_families import Domain
from entresol_daemon.metric_makers import Makers

FOUND = ("prefix", "behind", "absent")
THRASH_S = 600
AGE_BUCKETS_S = (1.0, 10.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 21600.0, 86400.0)


class WorthMetrics:
    """Looked up, then served or missed (elsewhere), then evicted, and maybe stored again."""

    def __init__(self, make: Makers) -> None:
        tenant = make.tenants
        self.looked_up = make.counters(
            "lookup_blocks_total",
            "Blocks that hosts asked about before they fetch any (EXISTS): where the hit-rate "
            "funnel begins. In the usable prefix, here but behind a gap, or absent.",
            tenant=tenant,
            found=Domain(FOUND),
        )
        self.evicted = make.counters(
            "evicted_use_blocks_total",
            "Blocks evicted, by whether anybody was granted them since they were stored: many that "
            "are `unused` pollute the flash; `unknown` were found at start.",
            tenant=tenant,
            use=Domain(tuple(use.label for use in Use)),
        )
        self.evicted_unused_bytes = make.counters(
            "evicted_unused_bytes_total", "Bytes on flash of blocks evicted unused.", tenant=tenant
        )
        self.thrashed = make.counters(
            "thrashed_blocks_total",
            f"Blocks stored again within {THRASH_S // 60} minutes of their eviction: many say that "
            "the flash is too small for what is asked of it.",
            tenant=tenant,
        )
        self.restored_after = make.histogram(
            "restored_after_eviction_seconds",
            "From a block's eviction to its being stored again; of the last 65,536 that went.",
            buckets=AGE_BUCKETS_S,
        )
        self.eviction_worth = make.gauges(
            "eviction_worth_rules",
            "1 while the tenant's blocks are evicted by learned worth, 0 while by age "
            "([flash] eviction).",
            tenant=tenant,
        )
        self.eviction_gain = make.gauges(
            "eviction_worth_gain_ratio",
            "Hits per reference that eviction by worth found beyond those of LRU per block, lately "
            "and in a sample; where it is negative, worth gives way.",
            tenant=tenant,
        )
        self.eviction_promise = make.gauges(
            "eviction_worth_promise_ratio",
            "Hits per reference beyond those of LRU in a store of the sampled keys alone that "
            "always evicts by worth, whoever rules: worth takes over while it is not clearly "
            "negative, and above what was missing from it where worth fell behind.",
            tenant=tenant,
        )
        self.drive_writes = make.counter(
            "flash_drive_writes_total",
            "Wear: times the size of the flash slice that were written, with all overhead.",
        )
        self.appended_bytes = make.counter(
            "flash_appended_bytes_total",
            "Bytes of new blocks on their way to flash; what is written over it is amplification.",
        )
        self.budget_per_day = make.gauge(
            "write_budget_drive_writes_per_day", "Configured endurance budget; 0: none."
        )
        self.budget_room = make.gauge(
            "write_budget_room_bytes",
            "Left of the write budget now; negative is owed: of tenants over their share only what "
            "is offered twice is stored.",
        )
        self.budget_burst = make.gauge(
            "write_budget_burst_bytes", "The most of the write budget that is saved up, or owed."
        )

    def restored(self, tenant: str, age_s: float) -> None:
        """A block is stored again so long after its eviction."""
        self.restored_after.observe(age_s)
        if age_s <= THRASH_S:
            self.thrashed[tenant].inc()
