"""What `entresol top` and the web page show: one document over metrics, flash, tenants and events.

Invariants: bounded whatever tenants do (`TENANTS_MAX` rows, `EVENTS_MAX` events, `CELLS_MAX` cells
of the flash map); says no more of blocks than that there are so many: neither keys nor namespaces,
tokens or addresses, nor when a single one came: events of one second, kind, reason and tenant are
one row, at the beginning of that second. Tenants that share a label in the metrics share a row
here. Numbers are totals since the start of the daemon; whoever shows rates takes two documents
apart.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entresol_daemon.control.admin import ShardStat
from entresol_daemon.events.types import Event, Kind, Reason
from entresol_daemon.flash.model import SegmentState
from entresol_daemon.metric_families import OTHER_TENANT
from entresol_daemon.metrics import OF_HOSTS, Metrics
from entresol_daemon.shard.shard import Shard

FORMAT = 1  # of the document: a number of its own, raised when a field changes its meaning
TENANTS_MAX = 32
EVENTS_MAX = 24
EVENTS_READ_MAX = 48  # for them; of as many tenants, on the loop
SECOND_NS = 1_000_000_000
CELLS_MAX = 256
PREFIX = "entresol_"

Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, slots=True)
class Looked:
    """What was read on the event loop, in plain values; turned into JSON elsewhere."""

    stat: Mapping[str, Any]
    budget: Mapping[str, Any] | None
    flash_map: Mapping[str, Any]
    events: list[dict[str, Any]]


class Overview:
    """Reads a running shard. `look` on the event loop, `render` in any thread."""

    def __init__(
        self, metrics: Metrics, shard: Shard, stat: Callable[[], ShardStat], version: str
    ) -> None:
        self._metrics = metrics
        self._shard = shard
        self._stat = stat
        self._version = version

    def look(self) -> Looked:
        """Cheap: what must be read between two turns of the loop."""
        self._metrics.refresh()
        parts, stat = self._shard.parts, self._stat()
        admission = parts.admission
        level = admission.budget_level(parts.now_ns())
        return Looked(
            stat={
                "version": self._version,
                "shard": parts.config.shard.name,
                "state": stat.state.name.lower(),
                "not_ready": list(stat.reasons_not_ready),
                "time_unix_ns": parts.unix_ns(),
                "uptime_ns": stat.uptime_ns,
                "flash_direct": stat.flash_direct,
                "scrub_state": stat.scrub_state,
                "blocks_corrupt": stat.blocks_corrupt,
            },
            budget=None
            if level is None
            else {
                "drive_writes_per_day": parts.config.admission.drive_writes_per_day,
                "policy": admission.policy,
                "room_bytes": level[0],
                "burst_bytes": level[1],
            },
            flash_map=flash_map(
                parts.engine.segment_states(),
                parts.engine.segment_live_bytes(),
                parts.engine.segment_bytes,
            ),
            events=events_by_second(parts.events.newest(EVENTS_READ_MAX)),
        )

    def render(self, looked: Looked) -> bytes:
        """The document."""
        samples = samples_of(self._metrics)
        return json.dumps(document(looked, samples), separators=(",", ":")).encode() + b"\n"


def events_by_second(newest: Iterable[Event]) -> list[dict[str, Any]]:
    """Rows, the newest first. Whoever reads this may be another tenant's program on this machine:
    it learns how much happened in a second, not block by block when."""
    rows: dict[tuple[int, Kind, Reason, str], dict[str, Any]] = {}
    for event in newest:
        second = event.time_unix_ns // SECOND_NS
        key = (second, event.kind, event.reason, event.tenant)
        row = rows.get(key)
        if row is None:
            if len(rows) == EVENTS_MAX:
                break
            row = rows[key] = {
                "time_unix_ns": second * SECOND_NS,
                "kind": event.kind.label,
                "reason": event.reason.label,
                "tenant": event.tenant,
                "blocks": 0,
                "bytes": 0,
            }
        row["blocks"] += len(event.wire_keys)
        row["bytes"] += event.size_bytes
    return list(rows.values())


def samples_of(metrics: Metrics) -> Samples:
    """Every sample by the name of its metric, without our prefix."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                name = sample.name.removeprefix(PREFIX)
                found.setdefault(name, []).append((sample.labels, sample.value))
    return found


def document(looked: Looked, samples: Samples) -> dict[str, Any]:
    """`looked` and the metrics as one object."""
    corrupt = _by(samples, "corrupt_blocks_total", "where")
    return {
        "format": FORMAT,
        **looked.stat,
        "blocks": _one(samples, "flash_blocks"),
        "memory": _by(samples, "dram_bytes", "state"),
        "flash": {
            "capacity_bytes": _one(samples, "flash_capacity_bytes"),
            "live_bytes": _one(samples, "flash_live_bytes"),
            "written_bytes": _one(samples, "flash_written_bytes_total"),
            "read_bytes": _one(samples, "flash_read_bytes_total"),
            "rewritten_bytes": _one(samples, "reinserted_bytes_total"),
            "segments": _by(samples, "flash_segments", "state"),
            "refusals": _by(samples, "flash_refusals_total", "operation"),
            "map": looked.flash_map,
        },
        "budget": looked.budget,
        "served": _by(samples, "blocks_served_total", "tier"),
        "missed": _by(samples, "blocks_missed_total", "cause"),
        "stored": _by(samples, "put_blocks_total", "status"),
        "get_bytes": _bytes(samples, "get"),
        "put_bytes": _bytes(samples, "put"),
        "removed": _by(samples, "evicted_blocks_total", "reason"),
        "evicted_use": _by(samples, "evicted_use_blocks_total", "use"),
        "thrashed": _one(samples, "thrashed_blocks_total"),
        "looked_up": _by(samples, "lookup_blocks_total", "found"),
        "corrupt": {at: count for at, count in corrupt.items() if at not in OF_HOSTS},
        "not_opened": {at: count for at, count in corrupt.items() if at in OF_HOSTS},
        "first_grant": {
            "count": _one(samples, "first_grant_seconds_count"),
            "seconds": _one(samples, "first_grant_seconds_sum"),
        },
        "queues": _by(samples, "queue_depth", "queue"),
        "shed": _by(samples, "queue_shed_total", "queue"),
        "sessions": _by(samples, "sessions", "fabric"),
        "leases": _one(samples, "leases"),
        "leased_bytes": _one(samples, "leased_bytes"),
        "loop_lag_max_s": _one(samples, "event_loop_lag_max_seconds"),
        "loop_stalls": _one(samples, "event_loop_stalls_total"),
        "scrub_share": _one(samples, "scrub_progress"),
        "scrub_found": _by(samples, "scrub_found_total", "what"),
        "compression_ratio": _ratio(samples),
        "codecs": {
            "namespaces": _by(samples, "codec_namespaces", "codec"),
            "blocks": _by(samples, "sealed_blocks_total", "codec"),
        },
        "tenants": _tenants(samples),
        "events": looked.events,
    }


def flash_map(
    states: Sequence[SegmentState], live_bytes: Sequence[int], segment_bytes: int
) -> dict[str, Any]:
    """The data file from begin to end in at most `CELLS_MAX` cells of equal numbers of segments.

    Each cell is two characters of `cells`: the state of most of its segments (f free, o open,
    s sealed, c condemned; one that is condemned or open shows), and 0 to 9 for the share of live
    bytes.
    """
    per_cell = max(1, -(-len(states) // CELLS_MAX))
    cells = []
    for start in range(0, len(states), per_cell):
        part = states[start : start + per_cell]
        live = sum(live_bytes[start : start + per_cell]) / (len(part) * segment_bytes)
        cells.append(f"{_letter(part)}{min(9, math.ceil(9 * live))}")
    return {"segments_per_cell": per_cell, "segment_bytes": segment_bytes, "cells": "".join(cells)}


def _letter(part: Sequence[SegmentState]) -> str:
    for state, letter in ((SegmentState.CONDEMNED, "c"), (SegmentState.OPEN, "o")):
        if state in part:
            return letter
    return "s" if 2 * part.count(SegmentState.SEALED) >= len(part) else "f"


def _one(samples: Samples, name: str) -> float:
    """The only sample, or 0. Whole numbers come out whole."""
    return _whole(sum(value for _, value in samples.get(name, ())))


def _by(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Sums over all other labels."""
    found: dict[str, float] = {}
    for labels, value in samples.get(name, ()):
        found[labels[label]] = found.get(labels[label], 0) + value
    return {key: _whole(value) for key, value in found.items()}


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _bytes(samples: Samples, operation: str) -> dict[str, float]:
    rows = [
        (labels, value)
        for labels, value in samples.get("payload_bytes_total", ())
        if labels["operation"] == operation
    ]
    return _by({"": rows}, "", "form")


def _ratio(samples: Samples) -> float | None:
    stored = _one(samples, "sealed_stored_bytes_total")
    return _one(samples, "sealed_plain_bytes_total") / stored if stored else None


def _tenants(samples: Samples) -> dict[str, Any]:
    """The largest on flash; the others in one row, under the label that has no name."""
    columns = {
        "flash_bytes": "tenant_flash_bytes",
        "dram_bytes": "tenant_dram_bytes",
        "blocks": "tenant_index_blocks",
        "sessions": "tenant_sessions",
        "leases": "tenant_leases",
        "served": "blocks_served_total",
        "missed": "blocks_missed_total",
        "refused": "quota_refusals_total",
    }
    found: dict[str, dict[str, float]] = {}
    for column, name in columns.items():
        for tenant, value in _by(samples, name, "tenant").items():
            found.setdefault(tenant, dict.fromkeys(columns, 0))[column] = value
    others = found.pop(OTHER_TENANT, None)
    kept = heapq.nlargest(TENANTS_MAX, found, key=lambda name: (found[name]["flash_bytes"], name))
    left_out = [row for name, row in found.items() if name not in kept]
    if others is not None:
        left_out.append(others)
    rows = [{"tenant": name, **found[name]} for name in kept]
    if left_out:
        total = {column: _whole(sum(row[column] for row in left_out)) for column in columns}
        rows.append({"tenant": OTHER_TENANT, **total})
    return {"count": _one(samples, "tenants"), "rows": rows}
