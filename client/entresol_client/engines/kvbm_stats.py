"""The tier's counters on vLLM's ways: its log line of transfers, and its Prometheus metrics.

Invariant: what a report says was counted since the report before it, so that sums are right
whoever adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

PREFIX = "vllm:kvbm_entresol_"
# Levels are not summed up, and counters that vLLM need not see are left out.
COUNTERS = {
    "kvbm_blocks": "Blocks that KVBM loaded from its own caches.",
    "matched_blocks": "Blocks behind KVBM's that were promised from Entresol.",
    "lookup_blocks": "Blocks the daemon was asked for.",
    "lookup_hit_blocks": "Blocks of these that Entresol had.",
    "lookup_unanswered": "Lookups not answered in time; they read as misses.",
    "load_blocks": "Blocks loaded and verified.",
    "load_bytes": "Bytes loaded and verified.",
    "load_failed_blocks": "Blocks that were to be loaded and were not; vLLM recomputes them.",
    "load_corrupt_blocks": "Blocks of these whose bytes did not verify.",
    "given_up_requests": "Requests with a failed load; they were computed.",
    "stored_blocks": "Blocks stored.",
    "stored_bytes": "Bytes stored.",
    "existed_blocks": "Blocks that were there already; no bytes moved.",
    "store_failed_blocks": "Blocks that were to be stored and were not.",
    "shed_blocks": "Blocks not stored because too many waited.",
    "unfit_requests": "Requests the tier is not used for: adapters, images, embeddings.",
    "unknown_tenant_requests": "Requests that name an unknown tenant, or what makes no sense.",
}


class Differences:
    """What has grown since the last time."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def take(self, now: Mapping[str, int]) -> dict[str, int]:
        """Growth of the known counters; those that did not grow are left out."""
        grown = {name: now.get(name, 0) - self._last.get(name, 0) for name in COUNTERS}
        self._last = dict(now)
        return {name: value for name, value in grown.items() if value}


@dataclass
class TierStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: counter -> growth."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> TierStats:
        names = self.data.keys() | other.data.keys()
        return TierStats({n: self.data.get(n, 0) + other.data.get(n, 0) for n in names})

    def reduce(self) -> dict[str, int | float]:
        return {f"entresol_{name}": self.data[name] for name in COUNTERS if name in self.data}

    def is_empty(self) -> bool:
        return not self.data


class TierMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter each, per engine."""

    def __init__(self, vllm_config: Any, types: Any, labels: list[str], engines: Any) -> None:
        super().__init__(vllm_config, types, labels, engines)
        self._counters = {}
        for name, about in COUNTERS.items():
            counter = self._counter_cls(PREFIX + name, about, labelnames=labels)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in engines.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
