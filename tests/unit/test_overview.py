"""The document of `entresol top` and the web page: bounded, true to the metrics, no content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from entresol_daemon import overview
from entresol_daemon.core.admission import Admission, WriteBudget
from entresol_daemon.events.log import EventLimits, EventLog
from entresol_daemon.events.types import Kind, Medium
from entresol_daemon.flash.model import SegmentState
from entresol_daemon.metric_families import TENANT_LABELS_MAX
from entresol_daemon.metrics import Metrics
from entresol_proto.ids import TenantName
from entresol_proto.status import Status

NOTHING = overview.Looked(
    stat={"shard": "s0"}, budget=None, flash_map={"cells": ""}, events=[]
)  # fmt: skip


def found(metrics: Metrics) -> dict[str, Any]:
    document = overview.document(NOTHING, overview.samples_of(metrics))
    return dict(json.loads(json.dumps(document)))


# The document -------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_metrics() -> None:
    metrics = Metrics()
    metrics.blocks_served["a", "memory", "host"].inc(5)
    metrics.blocks_served["b", "memory", "daemon"].inc(2)
    metrics.blocks_served["b", "flash", "host"].inc(1)
    metrics.misses["a", Status.MISS].inc(4)
    metrics.payload_bytes["a", "get", "plain"].inc(1_000)
    metrics.payload_bytes["b", "get", "plain"].inc(10)
    metrics.payload_bytes["b", "put", "stored"].inc(7)
    metrics.record_sealed("bf16", 300, 200)
    metrics.corrupt_blocks["seal"].inc(3)
    metrics.first_grant_seconds.observe(0.25)
    got = found(metrics)
    assert got["served"] == {"memory": 7, "flash": 1}
    assert got["missed"] == {"miss": 4}
    assert got["get_bytes"] == {"plain": 1_010}
    assert got["put_bytes"] == {"stored": 7}
    assert got["compression_ratio"] == 1.5
    assert got["first_grant"] == {"count": 1, "seconds": 0.25}
    assert got["corrupt"]["flash"] == 0, "what alerts watch is there from the start"
    assert not {"seal", "host_report"} & set(got["corrupt"]), "a host can have it so at will"
    assert got["not_opened"] == {"host_report": 0, "seal": 3}
    rows = {row["tenant"]: row for row in got["tenants"]["rows"]}
    assert (rows["b"]["served"], rows["b"]["missed"]) == (3, 0)


def test_tenants_are_bounded_and_none_is_lost_from_the_sums() -> None:
    metrics = Metrics()
    count = TENANT_LABELS_MAX + 40
    metrics.set_tenant_bytes({f"t{n}": n for n in range(count)}, {})
    got = found(metrics)["tenants"]["rows"]
    assert len(got) == overview.TENANTS_MAX + 1
    assert sum(row["flash_bytes"] for row in got) == sum(range(count))
    assert got[-1]["tenant"] == "_other"
    sizes = [row["flash_bytes"] for row in got[:-1]]
    assert sizes == sorted(sizes, reverse=True)


# The map of the flash -----------------------------------------------------------------------------


def test_a_small_flash_has_a_cell_per_segment() -> None:
    states = [SegmentState.SEALED, SegmentState.OPEN, SegmentState.FREE, SegmentState.FREEING,
              SegmentState.CONDEMNED]  # fmt: skip
    got = overview.flash_map(states, [100, 1, 0, 0, 50], 100)
    assert got == {"segments_per_cell": 1, "segment_bytes": 100, "cells": "s9o1f0f0c5"}


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 4_096, 10_001])
def test_a_large_flash_has_a_bounded_map(count: int) -> None:
    got = overview.flash_map([SegmentState.SEALED] * count, [100] * count, 100)
    cells = len(got["cells"]) // 2
    assert cells <= overview.CELLS_MAX
    assert cells * got["segments_per_cell"] >= count > (cells - 1) * got["segments_per_cell"]
    assert got["cells"] == "s9" * cells


def test_one_bad_segment_of_many_shows() -> None:
    states = [SegmentState.SEALED] * 10_000
    states[5_000] = SegmentState.CONDEMNED
    assert overview.flash_map(states, [100] * 10_000, 100)["cells"].count("c") == 1


# Where it comes from ------------------------------------------------------------------------------


def publish(log: EventLog, tenant: str, time_unix_ns: int) -> None:
    log.publish(
        Kind.STORED, TenantName(tenant), time_unix_ns=time_unix_ns, namespace_id=bytes(16),
        wire_keys=(bytes(16),), medium=Medium.FLASH,
    )  # fmt: skip


def test_the_newest_events_of_all_tenants() -> None:
    log = EventLog(1, event_limits=EventLimits(tenant_events_max=4))
    assert log.newest(3) == []
    for time in range(1, 31):
        publish(log, f"t{time % 3}", time)
    assert [event.time_unix_ns for event in log.newest(5)] == [30, 29, 28, 27, 26]
    assert len(log.newest(100)) == 12, "what was trimmed is gone"
    assert len(log.newest(1)) == 1


def test_events_do_not_tell_when_a_single_block_came() -> None:
    """Whoever reaches the page would otherwise follow another tenant block by block."""
    log = EventLog(1, event_limits=EventLimits(tenant_events_max=64))
    second = 10**9
    for time in (second + 1, second + 999_999_999, 2 * second + 7, 2 * second + 8):
        publish(log, "a", time)
    publish(log, "b", 2 * second + 9)
    rows = overview.events_by_second(log.newest(overview.EVENTS_READ_MAX))
    assert [(row["time_unix_ns"], row["tenant"], row["blocks"]) for row in rows] == [
        (2 * second, "b", 1), (2 * second, "a", 2), (second, "a", 2),
    ]  # fmt: skip
    assert set(rows[0]) == {"time_unix_ns", "kind", "reason", "tenant", "blocks", "bytes"}


def test_rows_of_events_are_bounded() -> None:
    log = EventLog(1, event_limits=EventLimits(tenant_events_max=64))
    for number in range(40):
        publish(log, "a", number * 10**9)
    assert len(overview.events_by_second(log.newest(overview.EVENTS_READ_MAX))) == (
        overview.EVENTS_MAX
    )


def test_the_budget_is_told_as_it_is() -> None:
    assert Admission("auto", budget=None).budget_level(0) is None
    admission = Admission("auto", budget=WriteBudget(10, 100))
    assert admission.budget_level(0) == (100, 100)
    admission.charge(130)
    assert admission.budget_level(0) == (-30, 100)
    assert admission.budget_level(2_000_000_000) == (-10, 100)
