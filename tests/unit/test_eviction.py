"""Eviction, admission and their judgement: properties, limits, and real traces in small."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_daemon.config import AdmissionConfig
from entresol_daemon.core import admission, eviction
from entresol_daemon.core.admission import Admission, GhostList, WriteBudget
from entresol_daemon.core.eviction import (
    ReinsertBudget,
    SegmentRanking,
    Short,
    TenantShare,
    VictimReason,
    choose_victim,
    fair_share,
    keep_blocks,
    median_touch,
    tail_first,
)
from entresol_daemon.flash.model import SegmentInfo, SegmentState
from entresol_daemon.flash.stock import Stock
from entresol_daemon.replay.run import measure
from entresol_daemon.replay.store import Options
from entresol_daemon.replay.traces import Trace, load

ROOT = Path(__file__).resolve().parents[2]
TRACES = Path(os.environ.get("ENTRESOL_SHARED", ROOT.parent / "shared")) / "data" / "traces"
SECOND_NS = 1_000_000_000
NOW = 1_000


def trace(name: str, *, rows: int | None = None) -> Trace:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"not run here: {name} is not in the shared data")
    return load(path, rows=rows)


def usable(found: Trace, capacity: int, **options: object) -> float:
    return measure(
        found,
        capacity,
        Options(**options),  # type: ignore[arg-type]
    ).usable_hit


def stream(number: int) -> bytes:
    return number.to_bytes(16, "big")


def info(
    number: int,
    owner: int = 0,
    *,
    state: SegmentState = SegmentState.SEALED,
    live: int = 8,
    last: int = 10,
    oldest: int = 1,
) -> SegmentInfo:
    return SegmentInfo(
        segment=number,
        stream=stream(owner),
        sequence=number,
        state=state,
        blocks=max(live, 8),
        live_blocks=live,
        live_bytes=live * 10,
        last_touch=last,
        oldest_touch=oldest,
    )


def choose(
    segments: list[SegmentInfo], shares: list[TenantShare], capacity: int = 1_000, **more: object
) -> eviction.Victim | None:
    more.setdefault("ranking", SegmentRanking(lambda number: 0))
    return choose_victim(
        stock_of(segments),
        shares,
        capacity_bytes=capacity,
        now_touch=NOW,
        **more,  # type: ignore[arg-type]
    )


def stock_of(segments: list[SegmentInfo]) -> Stock[SegmentInfo]:
    stock: Stock[SegmentInfo] = Stock()
    for each in segments:
        stock.put(each)
    return stock


# -- who pays


@dataclass(frozen=True, slots=True)
class Scene:
    segments: list[SegmentInfo]
    shares: list[TenantShare]
    capacity: int


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    tenants = draw(st.integers(1, 5))
    shares = [
        TenantShare(
            stream(number),
            used_bytes=draw(st.integers(0, 400)),
            quota_bytes=draw(st.sampled_from([0, 0, 50, 200])),
            weight=draw(st.integers(1, 4)),
        )
        for number in range(tenants)
    ]
    segments = [
        info(
            number,
            draw(st.integers(0, tenants - 1)),
            state=draw(st.sampled_from(list(SegmentState))),
            live=draw(st.integers(1, 8)),
            last=draw(st.integers(1, NOW)),
        )
        for number in range(draw(st.integers(0, 12)))
    ]
    return Scene(segments, shares, draw(st.integers(1, 1_000)))


def givers(scene: Scene) -> set[bytes]:
    """Streams with a segment that may be taken any time."""
    return {each.stream for each in scene.segments if each.state is SegmentState.SEALED}


@given(scenes())
def test_only_sealed_segments_go_except_the_only_one_of_a_tenant_over_quota(scene: Scene) -> None:
    victim = choose(scene.segments, scene.shares, scene.capacity)
    if victim is None:
        assert not givers(scene)
        return
    chosen = scene.segments[victim.segment]
    share = next(each for each in scene.shares if each.stream == chosen.stream)
    assert victim.charged_stream == chosen.stream
    if victim.reason is VictimReason.OVER_QUOTA_OPEN:
        assert chosen.state is SegmentState.OPEN
        assert share.over_quota
        assert chosen.stream not in givers(scene)
    else:
        condemned = victim.reason is VictimReason.CONDEMNED
        assert chosen.state is (SegmentState.CONDEMNED if condemned else SegmentState.SEALED)


@given(scenes())
def test_a_tenant_over_its_quota_pays_first(scene: Scene) -> None:
    victim = choose(scene.segments, scene.shares, scene.capacity)
    over = {each.stream for each in scene.shares if each.over_quota} & givers(scene)
    if over:
        assert victim is not None
        if victim.reason is VictimReason.CONDEMNED:
            return  # costs nobody a block
        assert victim.reason in (VictimReason.OVER_QUOTA, VictimReason.OVER_QUOTA_OPEN)
        assert next(s for s in scene.shares if s.stream == victim.charged_stream).over_quota


@given(scenes())
def test_within_its_fair_share_a_tenant_loses_nothing_while_another_is_over(scene: Scene) -> None:
    victim = choose(scene.segments, scene.shares, scene.capacity)
    if victim is None or victim.reason in (
        VictimReason.CONDEMNED,
        VictimReason.OVER_QUOTA,
        VictimReason.OVER_QUOTA_OPEN,
    ):
        return
    over = {
        each.stream
        for each in scene.shares
        if each.used_bytes > fair_share(each, scene.shares, scene.capacity)
    }
    if over & givers(scene):
        assert victim.charged_stream in over
        assert victim.reason is VictimReason.OVER_SHARE
    else:
        assert victim.reason is VictimReason.PRESSURE


def test_fair_shares_divide_the_capacity_among_those_who_use_it() -> None:
    shares = [
        TenantShare(stream(0), used_bytes=1, weight=3),
        TenantShare(stream(1), used_bytes=900, weight=1),
        TenantShare(stream(2), used_bytes=0, weight=96),
    ]
    assert [fair_share(each, shares, 1_000) for each in shares[:2]] == [750, 250]
    assert fair_share(shares[2], shares, 1_000) == 960


def test_weights_decide_who_is_over_its_share() -> None:
    shares = [
        TenantShare(stream(0), used_bytes=600, weight=3),
        TenantShare(stream(1), used_bytes=400, weight=1),
    ]
    victim = choose([info(0, 0), info(1, 1)], shares)
    assert victim is not None
    assert victim.charged_stream == stream(1)


def test_nothing_to_evict_is_none() -> None:
    shares = [TenantShare(stream(0), used_bytes=2_000)]
    assert choose([], shares) is None
    assert choose([info(0, state=SegmentState.OPEN)], shares) is None
    assert choose([info(0, state=SegmentState.FREEING)], shares) is None


def test_an_empty_open_segment_frees_nothing_for_a_tenant_over_quota() -> None:
    shares = [TenantShare(stream(0), used_bytes=200, quota_bytes=100)]
    assert choose([info(0, state=SegmentState.OPEN, live=0)], shares) is None
    victim = choose([info(0, state=SegmentState.OPEN)], shares)
    assert victim == eviction.Victim(0, VictimReason.OVER_QUOTA_OPEN, stream(0), reinsert=False)


def test_empty_segments_and_those_of_nobody_go_first() -> None:
    shares = [TenantShare(stream(0), used_bytes=200, quota_bytes=100)]
    segments = [info(0, 0), info(1, 7), info(2, 0, live=0)]
    victim = choose(segments, shares)
    assert victim == eviction.Victim(2, VictimReason.EMPTY, stream(0))
    victim = choose(segments[:2], shares)
    assert victim == eviction.Victim(1, VictimReason.ORPHAN, stream(7))


def test_condemned_segments_are_freed_before_anything_that_works() -> None:
    shares = [TenantShare(stream(0), used_bytes=200, quota_bytes=100)]
    segments = [info(0, 0), info(1, 7), info(3, 0, state=SegmentState.CONDEMNED)]
    victim = choose(segments, shares)
    assert victim == eviction.Victim(3, VictimReason.CONDEMNED, stream(0), reinsert=True)


# -- which segment


@given(
    st.lists(
        st.lists(st.integers(1, NOW), min_size=1, max_size=9),
        min_size=1,
        max_size=10,
    ),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 8)), max_size=20),
)
def test_ranking_finds_the_least_median_however_blocks_are_touched(
    touches: list[list[int]], later: list[tuple[int, int]]
) -> None:
    now = NOW

    def median(number: int) -> int:
        return median_touch(np.asarray(touches[number], np.uint64))

    ranking = SegmentRanking(median)
    for number, at in [*later, (0, 0)]:
        blocks = touches[number % len(touches)]
        now += 1
        blocks[at % len(blocks)] = now
        segments = [
            info(n, live=len(each), last=max(each), oldest=min(each))
            for n, each in enumerate(touches)
        ]
        best = ranking.coldest(stock_of(segments), stream(0))
        assert median(best.segment) == min(median(n) for n in range(len(touches)))


def test_ranking_forgets_the_median_of_a_segment_that_was_freed_and_used_again() -> None:
    medians = {0: 500, 1: 400}
    ranking = SegmentRanking(lambda number: medians[number])
    first = [info(0), info(1, oldest=300)]
    stock = stock_of(first)
    assert ranking.coldest(stock, stream(0)).segment == 1
    medians[0] = 100
    stock.drop(0)
    stock.put(SegmentInfo(0, stream(0), 99, SegmentState.SEALED, 8, 8, 80, 100, 50))
    assert ranking.coldest(stock, stream(0)).segment == 0


def test_ranking_computes_few_medians() -> None:
    ranking = SegmentRanking(lambda number: 10 * number + 5)
    segments = [info(n, oldest=10 * n) for n in range(100)]
    assert ranking.coldest(stock_of(segments), stream(0)).segment == 0
    assert ranking.medians_computed == 1


def test_median_is_the_less_recent_of_two_middle_ones() -> None:
    assert median_touch(np.asarray([4, 1, 3, 2], np.uint64)) == 2
    assert median_touch(np.asarray([5, 1, 3], np.uint64)) == 3
    assert median_touch(np.zeros(0, np.uint64)) == 0


def test_segment_lru_while_the_budget_cannot_pay_for_what_a_ranked_victim_keeps() -> None:
    # Segment 0: mostly old, one block just used. Segment 1: all of middle age.
    medians = {0: 10, 1: 50}
    segments = [info(0, last=900), info(1, last=60)]
    shares = [TenantShare(stream(0), used_bytes=160)]
    budget = ReinsertBudget(ratio=0.5)
    ranking = SegmentRanking(lambda number: medians[number])
    poor = choose(segments, shares, ranking=ranking, budget=budget)
    assert poor is not None
    assert (poor.segment, poor.reinsert) == (1, False)
    budget.inserted(80)
    rich = choose(segments, shares, ranking=ranking, budget=budget)
    assert rich is not None
    assert (rich.segment, rich.reinsert) == (0, True)


# -- what is kept

columns = st.lists(st.tuples(st.integers(1, NOW), st.integers(1, 1_000)), min_size=1, max_size=64)


@given(columns, st.integers(0, 40_000))
def test_kept_bytes_stay_within_budget_and_half_of_the_victim(
    rows: list[tuple[int, int]], budget_bytes: int
) -> None:
    touch = np.asarray([row[0] for row in rows], np.uint64)
    size = np.asarray([row[1] for row in rows], np.uint32)
    position = np.arange(len(rows), dtype=np.uint32)
    mask = keep_blocks(touch, position, size, now_touch=NOW, budget_bytes=budget_bytes)
    kept = int(size[mask].sum())
    assert kept <= budget_bytes
    assert 2 * kept <= int(size.sum())
    assert mask.sum() <= len(rows) // 2
    if mask.any():  # the most recent are kept: no dropped candidate is younger than a kept one
        limit = eviction.KEEP_AGE_SHARE * (NOW - median_touch(touch))
        assert (NOW - touch[mask].astype(int)).max() < limit
        dropped = touch[~mask]
        assert touch[mask].min() >= dropped.max()


@given(st.integers(2, 40), st.integers(0, 40), st.integers(1, 30))
def test_keeping_never_tears_a_prefix(old: int, young: int, budget_blocks: int) -> None:
    # `old` cold blocks, then one request's prefix of `young` blocks touched tail first.
    touch = np.concatenate([np.arange(1, old + 1), NOW - np.arange(young)]).astype(np.uint64)
    position = np.concatenate([np.arange(old), np.arange(young)]).astype(np.uint32)
    size = np.full(old + young, 10, np.uint32)
    mask = keep_blocks(touch, position, size, now_touch=NOW, budget_bytes=10 * budget_blocks)
    kept = mask[old:]
    assert not (np.diff(kept.astype(int)) > 0).any(), "a later block of the prefix outlived one"


def test_blocks_of_one_age_are_not_kept() -> None:
    same = np.full(8, 7, np.uint64)
    size = np.full(8, 10, np.uint32)
    mask = keep_blocks(same, size, size, now_touch=NOW, budget_bytes=1_000)
    assert not mask.any()


def test_a_touch_from_the_future_is_a_bug() -> None:
    one = np.asarray([NOW + 1], np.uint64)
    with pytest.raises(AssertionError, match="future"):
        keep_blocks(one, one, one, now_touch=NOW, budget_bytes=10)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=50))
def test_reinsertion_never_exceeds_its_share_of_insertion(steps: list[tuple[int, int]]) -> None:
    budget = ReinsertBudget(ratio=0.25, window_bytes=20_000)
    inserted = reinserted = 0
    for new, wanted in steps:
        budget.inserted(new)
        inserted += new
        assert budget.room_bytes <= 5_000
        take = min(wanted, budget.room_bytes)
        budget.spend(take)
        reinserted += take
        assert reinserted <= 0.25 * inserted
    with pytest.raises(AssertionError, match="more than the budget"):
        budget.spend(budget.room_bytes + 1)


# -- the order of touches


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40))
def test_a_prefix_is_never_less_recent_than_its_suffix(lengths: list[int]) -> None:
    touch = np.zeros(40, np.int64)
    now = 0
    for length in lengths:  # requests for the first `length` blocks of one chain
        slots = tail_first(np.arange(length))
        touch[slots] = np.arange(now + 1, now + 1 + length)
        now += length
        assert (np.diff(touch) <= 0).all()


def test_tail_first_beats_head_first_on_real_chats() -> None:
    found = trace("mooncake_conv_first35min.parquet", rows=1_500)
    pairs = [
        tuple(
            usable(found, blocks, segment_blocks=16, forward=forward) for forward in (False, True)
        )
        for blocks in (2_048, 4_096, 8_192)
    ]
    assert all(tail > head for tail, head in pairs), pairs


def test_tail_first_beats_head_first_on_real_agents() -> None:
    found = trace("weka_agentic_a.parquet", rows=100)
    tail, head = (
        usable(found, 4_096, segment_blocks=16, forward=forward) for forward in (False, True)
    )
    assert tail > 1.1 * head, (tail, head)


# -- judgement on traces


def test_the_yardstick_agrees_with_an_independent_simulator() -> None:
    # reference_results.csv, LRU-r, the whole file: usable_hit and usable_hit_w.
    found = trace("mooncake_conv_first35min.parquet")
    result = measure(found, 0.1, Options(policy="lru"))
    assert (result.usable_hit, result.usable_hit_second_half) == (0.2154, 0.2177)


def test_the_policy_is_near_lru_per_block_and_above_segment_lru() -> None:
    found = trace("mooncake_conv_first35min.parquet", rows=4_000)
    results = {
        policy: measure(found, 0.1, Options(policy=policy))
        for policy in ("lru", "segment-lru", "median")
    }
    ours = results["median"]
    assert ours.usable_hit_second_half > results["lru"].usable_hit_second_half - 0.005
    assert ours.usable_hit_second_half > results["segment-lru"].usable_hit_second_half
    assert ours.write_amplification <= 1.15
    assert results["segment-lru"].write_amplification == 1


def test_replay_keeps_write_amplification_below_any_ratio() -> None:
    found = trace("mooncake_conv_first35min.parquet", rows=3_000)
    options = Options(reinsert_ratio=0.03)
    result = measure(found, 4_096, options)
    assert 1 < result.write_amplification <= 1.03


def test_replay_of_many_tenants_accounts_every_block() -> None:
    found = trace("mooncake_conv_first35min.parquet", rows=1_500)
    options = Options(segment_blocks=16, per_tenant=True)
    result = measure(found, 2_048, options)
    assert 0 < result.usable_hit <= result.block_hit < 1


# -- admission


def test_the_write_budget_refills_and_bounds_what_is_saved() -> None:
    budget = WriteBudget(rate_bytes_per_s=100, burst_bytes=1_000)
    assert budget.room(0) == 1_000
    budget.spend(1_000)
    assert budget.room(0) == 0
    assert budget.room(SECOND_NS // 2) == 50
    assert budget.room(0) == 50, "time does not run backwards"
    budget.spend(150)
    assert budget.room(SECOND_NS // 2) == -100
    assert budget.room(3_600 * SECOND_NS) == 1_000


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=200))
def test_the_write_budget_loses_nothing_to_rounding(steps_ns: list[int]) -> None:
    budget = WriteBudget(rate_bytes_per_s=7, burst_bytes=10**6)
    budget.room(0)
    budget.spend(10**6)
    now = 0
    for step in steps_ns:
        now += step
        budget.room(now)
    assert budget.room(now) == 7 * now // SECOND_NS


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 50), st.integers(0, SECOND_NS)), max_size=300
    ),
    st.sampled_from(["auto", "second_touch"]),
)
def test_admitted_bytes_stay_within_rate_and_burst(
    offers: list[tuple[int, int, int]], policy: str
) -> None:
    gate = Admission(policy, budget=WriteBudget(10, 100))
    now = written = 0
    for key, size, step in offers:
        now += step
        written += size if gate.admit(key, size, now) else 0
        assert written <= 10 * now / SECOND_NS + 2 * 100 + 50


def test_over_the_budget_the_second_touch_is_admitted() -> None:
    gate = Admission("auto", budget=WriteBudget(1, 10))
    assert gate.admit("a", 10, 0)
    assert not gate.admit("b", 10, 0)
    assert not gate.admit("c", 10, 0)
    assert gate.admit("b", 10, 0)
    assert not gate.admit("c", 10, 0), "debt as deep as the burst refuses everything"
    assert gate.admit("c", 10, 1 * SECOND_NS)
    assert gate.admit("d", 10, 60 * SECOND_NS), "the budget has room again"


def test_reinserted_bytes_count_against_the_write_budget() -> None:
    gate = Admission("auto", budget=WriteBudget(1, 10))
    gate.charge(10)
    assert not gate.admit("a", 1, 0)


def test_what_is_not_written_after_all_is_given_back_and_no_more_saved_than_may_be() -> None:
    gate = Admission("auto", budget=WriteBudget(1, 10))
    assert gate.admit("a", 14, 0)
    gate.give_up(14)
    assert gate.budget_level(0) == (10, 10)
    assert gate.admit("a", 4, 0)
    gate.budget_level(9 * SECOND_NS)  # full again
    gate.give_up(4)
    assert gate.budget_level(9 * SECOND_NS) == (10, 10)


def test_policies_without_a_budget() -> None:
    everything = Admission("all", budget=None)
    assert all(everything.admit(key, 10**12, 0) for key in range(100))
    assert len(everything.ghost) == 0
    second = Admission("second_touch", budget=None)
    assert [second.admit(key, 1, 0) for key in "aab"] == [False, True, False]


def test_ghost_list_at_its_limit_and_one_past() -> None:
    ghost = GhostList(3)
    assert not any(ghost.note(key) for key in "abc")
    assert len(ghost) == 3
    assert ghost.note("a"), "at the limit nothing is forgotten"
    assert not ghost.note("d")
    assert len(ghost) == 3
    assert not ghost.note("b"), "one past it the least recent is"
    assert ghost.note("d")


def test_the_ghost_list_is_capped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GHOST_KEYS_MAX", 5)
    gate = Admission("second_touch", budget=None, ghost_keys_max=10**9)
    for key in range(6):
        gate.admit(key, 1, 0)
    assert len(gate.ghost) == 5


def test_configured_in_drive_writes_per_day() -> None:
    day = 86_400
    gate = Admission.from_config(AdmissionConfig(drive_writes_per_day=2.0), day, cache_blocks=1)
    # 2 bytes per second, an hour of them at once.
    assert gate.admit("a", 7_200, 0)
    assert not gate.admit("b", 1, 0)
    assert gate.admit("c", 1, 1 * SECOND_NS)
    unlimited = Admission.from_config(AdmissionConfig(), day)
    assert unlimited.admit("a", 10**15, 0)
    assert unlimited.admit("b", 10**15, 0)


def test_a_write_budget_costs_fewer_writes_and_keeps_prefixes_whole() -> None:
    found = trace("mooncake_conv_first35min.parquet", rows=3_000)
    free = measure(found, 2_048, Options())
    tight = measure(found, 2_048, Options(write_blocks_per_s=5))
    assert tight.writes_per_ref < free.writes_per_ref / 4
    assert tight.usable_hit > 0.95 * tight.block_hit


def test_whoever_fills_the_index_pays_for_its_entries() -> None:
    """A flood of tiny blocks: few bytes, all the entries. Its payer is not who has the bytes."""
    tiny, large = info(1, 1, live=900), info(2, 2, live=50)
    shares = [
        TenantShare(stream(1), used_bytes=9_000, used_blocks=901),
        TenantShare(stream(2), used_bytes=500_000, used_blocks=50),
    ]
    for short, payer in ((Short.BLOCKS, stream(1)), (Short.BYTES, stream(2))):
        victim = choose([tiny, large], shares, 600_000, capacity_blocks=950, short=short)
        assert victim is not None
        assert victim.charged_stream == payer
        assert victim.reason is VictimReason.OVER_SHARE


def test_a_quota_of_blocks_is_a_quota() -> None:
    share = TenantShare(stream(1), used_bytes=10, used_blocks=11, quota_blocks=10)
    assert share.over_quota
    assert not TenantShare(stream(1), used_bytes=10, used_blocks=10, quota_blocks=10).over_quota


def test_whoever_fills_the_index_from_one_open_segment_pays_with_that() -> None:
    """Found by Q3, seed 1: others within their share had lost sealed segments instead."""
    filler, other = info(1, 1, state=SegmentState.OPEN, live=900), info(2, 2, live=50)
    shares = [
        TenantShare(stream(1), used_bytes=9_000, used_blocks=901),
        TenantShare(stream(2), used_bytes=500_000, used_blocks=50),
    ]
    victim = choose([filler, other], shares, 600_000, capacity_blocks=950, short=Short.BLOCKS)
    assert victim is not None
    assert (victim.segment, victim.reason) == (1, VictimReason.OVER_SHARE_OPEN)
