"""What is known of a block's use, and what the metrics make of it."""

from __future__ import annotations

import pytest

from entresol_daemon.core.history import History
from entresol_daemon.core.usefulness import Use, Usefulness
from entresol_daemon.metric_worth import THRASH_S
from entresol_daemon.metrics import Metrics
from entresol_daemon.shard.meters import Meters
from entresol_proto.ids import TenantName
from entresol_proto.wire.data import Reason

DEV = TenantName("dev")


def test_a_block_is_unused_until_somebody_got_it() -> None:
    uses = Usefulness(4)
    uses.stored(1)
    uses.stored(2)
    uses.served([2, 3])
    uses.served([])
    assert [uses.gone(slot) for slot in range(4)] == [
        Use.UNKNOWN, Use.UNUSED, Use.SERVED, Use.SERVED,
    ]  # fmt: skip


def test_a_slot_that_is_another_blocks_knows_nothing_of_the_former() -> None:
    uses = Usefulness(1)
    uses.stored(0)
    uses.served([0])
    uses.gone(0)
    assert uses.gone(0) is Use.UNKNOWN
    uses.stored(0)
    assert uses.gone(0) is Use.UNUSED


def test_history_tells_what_it_forgets() -> None:
    history = History(2)
    history.record(b"n", b"k", Reason.EVICTED, 7, b"o")
    assert history.forget(b"n", b"k") == (Reason.EVICTED, 7)
    assert history.forget(b"n", b"k") == (Reason.NEVER_STORED, 0)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"entresol_{name}", labels)
    return found or 0.0


def test_evictions_are_counted_by_use_and_bytes_of_the_unused() -> None:
    metrics = Metrics()
    meters = Meters(metrics, 1)
    meters.evicted(DEV, [(Use.UNUSED, 10), (Use.UNUSED, 5), (Use.SERVED, 100), (Use.UNKNOWN, 1)])
    for use, count in (("unused", 2), ("served", 1), ("unknown", 1)):
        assert value(metrics, "evicted_use_blocks_total", tenant="dev", use=use) == count
    assert value(metrics, "evicted_unused_bytes_total", tenant="dev") == 15


@pytest.mark.parametrize(("age_s", "thrashed"), [(0, 1), (THRASH_S, 1), (THRASH_S + 1, 0), (-5, 1)])
def test_what_comes_back_soon_was_thrown_away_too_early(age_s: int, thrashed: int) -> None:
    metrics = Metrics()
    Meters(metrics, 1).restored(DEV, age_s * 10**9)  # a clock may have been set back meanwhile
    assert value(metrics, "thrashed_blocks_total", tenant="dev") == thrashed
    assert value(metrics, "restored_after_eviction_seconds_count") == 1


def test_lookups_are_told_apart_by_the_gap() -> None:
    metrics = Metrics()
    meters = Meters(metrics, 1)
    meters.looked_up(DEV, asked=10, present=7, prefix=4)
    meters.looked_up(DEV, asked=0, present=0, prefix=0)
    for found, count in (("prefix", 4), ("behind", 3), ("absent", 3)):
        assert value(metrics, "lookup_blocks_total", tenant="dev", found=found) == count
