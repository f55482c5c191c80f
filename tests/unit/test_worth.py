"""Eviction by worth: what is learned, what it chooses, when LRU takes over, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_daemon.core import worth
from entresol_daemon.core.eviction import HEAPS_SPARE
from entresol_daemon.core.trial import SLACK, Shadow, Trial
from entresol_daemon.core.valuing import TENANT_BYTES, TENANTS_MAX, Values
from entresol_daemon.core.worth import (
    BINS,
    CLASSES,
    LEARN_EVERY,
    Ghosts,
    Holes,
    Ledger,
    age_bin,
    plan,
    yields,
)
from entresol_daemon.core.worth_ranking import LOOKS, Columns, Slots, WorthRanking, some_of
from entresol_daemon.flash.model import SegmentInfo, SegmentState
from entresol_daemon.flash.stock import Stock

NOW = 100_000
NEVER = np.zeros(0, np.int64)  # none of them is there again


def keys(rng: np.random.Generator, count: int) -> worth.U64:
    return rng.integers(1, 1 << 63, count, dtype=np.uint64)


def uses(count: int, value: int = 0) -> worth.U8:
    return np.full(count, value, np.uint8)


# -- worth from what was seen


def test_worth_of_a_constant_chance_is_that_chance_at_every_age() -> None:
    # Half of what is left is used in every tick's length that a bin has: a chance of 1/1000 a tick.
    edges = np.exp2(np.arange(BINS + 1) / worth.BINS_PER_OCTAVE) - 1
    left = 1e9 * np.exp(-edges / 1_000)
    used = np.tile(left[:-1] - left[1:], (CLASSES, 1))
    found = yields(used, np.zeros_like(used))
    # By whole bins: a bin that is wider than the time between uses can tell no more than its width.
    young = found[:, : int(age_bin(np.asarray([500]))[0])]
    assert np.allclose(young, 1e-3, rtol=0.25), young


def test_what_is_used_at_one_age_is_worth_more_the_nearer_it_comes_and_nothing_after() -> None:
    used = np.zeros((CLASSES, BINS))
    at = int(age_bin(np.asarray([1_000]))[0])
    used[0, at] = 500.0
    lost = np.zeros_like(used)
    lost[0, at + 10] = 500.0  # the others are never used
    found = yields(used, lost)[0]
    assert (np.diff(found[: at + 1]) >= -1e-12).all()
    assert found[at] > 2 * found[0]
    assert found[at + 1] < found[0] / 10


def test_a_class_that_was_never_seen_is_worth_what_the_whole_is() -> None:
    used = np.zeros((CLASSES, BINS))
    used[1, 5:20] = 100.0
    found = yields(used, np.zeros_like(used))
    assert np.allclose(found[3], found[2])
    assert found[3].max() > 0


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=50))
def test_ages_fall_into_bins_in_order(ages: list[int]) -> None:
    bins = age_bin(np.asarray(sorted(ages)))
    assert (np.diff(bins) >= 0).all()
    assert bins.min() >= 0
    assert bins.max() < BINS


def note(ledger: Ledger, some: worth.U64, used: worth.U8, now: int, *, found: bool) -> None:
    ledger.note(some, used, np.full(len(some), now), np.full(len(some), found))


def tell(
    values: Values, stream: bytes, slots: Slots, some: worth.U64, now: int, *, put: bool
) -> None:
    each = np.full(len(some), put)
    values.told(stream, slots, some, np.full(len(some), now), each, ~each)


def test_what_is_told_together_is_learned_as_if_told_one_by_one() -> None:
    rng = np.random.default_rng(9)
    known = keys(rng, 64)
    one, all_ = unranked(), unranked()
    now = NOW
    stored = np.zeros(64, np.bool_)
    for _ in range(LEARN_EVERY // 48 - 1):
        chosen = rng.integers(0, 12 if now % 3 else 64, 48)  # some many times
        ticks = now + np.arange(1, 49)
        put = np.asarray([not stored[slot] and at == list(chosen).index(slot)
                          for at, slot in enumerate(chosen)])  # fmt: skip
        stored[chosen] = True
        stored[rng.integers(0, 64, 8)] = False
        now += 48
        slots = chosen.astype(np.int64)
        for at in range(48):
            few = slice(at, at + 1)
            one.told(bytes(16), slots[few], known[chosen][few], ticks[few], put[few], ~put[few])
        all_.told(bytes(16), slots, known[chosen], ticks, put, ~put)
    assert (one.uses == all_.uses).all()
    (first, second) = (next(iter(each._tenants.values())).ledger for each in (one, all_))
    for name in ("_keys", "_touch", "_uses", "_used", "_lost"):
        assert (getattr(first, name) == getattr(second, name)).all(), name
    for name in ("_found", "_lru", "_seen", "_put"):
        assert getattr(first.trial, name) == getattr(second.trial, name), name


def test_the_ledger_learns_who_comes_back() -> None:
    """Blocks that are used once come back after 200 ticks, the others never."""
    rng = np.random.default_rng(3)
    ledger, now = Ledger(), 0
    ledger.fit(2_000)
    due: list[tuple[int, worth.U64]] = []
    while ledger.learned < 8:
        now += 20
        fresh = keys(rng, 20)
        note(ledger, fresh, uses(20), now, found=False)
        note(ledger, fresh[:4], uses(4, 1), now, found=True)
        due.append((now + 200, fresh[:4]))
        if due[0][0] <= now:
            again = due.pop(0)[1]
            note(ledger, again, uses(4, 2), now, found=True)
    touched = np.full(3, NOW, np.uint64)
    never, once, late = (
        float(ledger.worth(touched[:1], uses(1, n), NOW + age)[0])
        for n, age in ((0, 50), (1, 50), (1, 5_000))
    )
    assert once > 3 * never, (once, never)
    assert late < once / 3, (late, once)


def test_of_those_worth_the_same_the_oldest_go_first() -> None:
    ledger, rng = Ledger(), np.random.default_rng(12)
    count = worth.LEDGER_ENTRIES
    ledger._touch[:] = rng.permutation(count) + 1
    ledger._uses[:] = rng.integers(0, CLASSES, count)
    table = rng.integers(0, 5, (CLASSES, worth.BINS)) / 7.0
    ledger._worth = table
    ledger._rank = np.unique(table, return_inverse=True)[1].reshape(table.shape)
    held = np.flatnonzero(rng.random(count) < 0.5)
    now = count + 50
    values = ledger.worth(ledger._touch[held], ledger._uses[held], now)
    ordered = held[np.lexsort((ledger._touch[held], values))]
    for many in (1, 100, len(held) - 1, len(held)):
        assert set(ledger._worth_least(held, many, now)) == set(ordered[:many])


def test_a_large_store_is_sampled() -> None:
    ledger = Ledger()
    ledger.fit(100 * worth.LEDGER_ENTRIES)
    rng = np.random.default_rng(4)
    taken = int(ledger._sampled(keys(rng, 100_000)).sum())
    assert 100_000 / 1_024 < taken < 100_000 / 256


def test_tables_never_grow() -> None:
    rng = np.random.default_rng(5)
    ledger = Ledger()
    tables = [each for each in vars(ledger).values() if isinstance(each, np.ndarray)]
    before = sum(each.nbytes for each in tables)
    assert before <= worth.LEDGER_BYTES
    for now in range(0, 5_000, 10):
        note(ledger, keys(rng, 50), uses(50), now, found=False)
    after = [each for each in vars(ledger).values() if isinstance(each, np.ndarray)]
    assert sum(each.nbytes for each in after) == before


# -- evicted blocks, cut prefixes


def test_ghosts_remember_uses_and_take_few_for_another() -> None:
    rng = np.random.default_rng(6)
    ghosts = Ghosts(4_096)
    gone = keys(rng, 500)
    ghosts.gone(gone, (np.arange(500) % 3).astype(np.uint8))
    found = ghosts.uses(gone)
    assert (found[found > 0] == (np.arange(500) % 3 + 1)[found > 0]).all()
    assert (found > 0).sum() > 400, "some were overwritten, most were not"
    assert (ghosts.uses(keys(rng, 10_000)) > 0).sum() <= 5
    assert ghosts.memory_bytes == 4_096 * 2


def test_behind_a_hole_everything_is_useless_until_it_is_used_again() -> None:
    holes = Holes()
    # One request of ten blocks, tail first: the first block has the last tick.
    position = np.arange(10, dtype=np.uint32)
    touch = (NOW - position).astype(np.uint64)
    assert not holes.behind(touch, position).any()
    holes.cut(touch[6:8], position[6:8])
    assert holes.behind(touch, position).tolist() == [False] * 7 + [True] * 3
    holes.cut(touch[3:4], position[3:4])
    assert holes.behind(touch, position).tolist() == [False] * 4 + [True] * 6
    assert not holes.behind(touch + np.uint64(50), position).any()


# -- the plan for one segment


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 50), st.integers(1, 1_000)),
        min_size=1, max_size=64,
    ),
    st.floats(0, 1),
    st.integers(0, 20_000),
)  # fmt: skip
def test_a_plan_keeps_the_best_within_budget_and_half(
    rows: list[tuple[float, int, int]], bar: float, limit_bytes: int
) -> None:
    value, position, size = (np.asarray(each) for each in zip(*rows, strict=True))
    found = plan(value, position, size, np.asarray([len(size)]), bar=bar, limit_bytes=limit_bytes)
    kept = int(size[found.kept].sum())
    assert kept <= limit_bytes
    assert 2 * kept <= size.sum()
    assert (value[found.kept] > bar).all()
    if found.kept.any():
        assert value[~found.kept].max(initial=0) <= max(bar, value[found.kept].min())
    assert (found.cost >= 0).all()


def test_keeping_costs_so_that_equal_blocks_are_not_moved_for_nothing() -> None:
    one = np.ones(8)
    low = plan(one, np.arange(8), one, np.asarray([8]), bar=2.0, limit_bytes=100)
    assert (low.kept.any(), low.cost.tolist()) == (False, [1.0])
    few = np.asarray([9.0, 9.0, 0, 0, 0, 0, 0, 0])
    high = plan(few, np.arange(8), one, np.asarray([8]), bar=2.0, limit_bytes=100)
    assert high.kept.tolist() == [True] * 2 + [False] * 6
    assert high.cost.tolist() == pytest.approx([0.5 * 2.0 * 2 / 6])


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8), st.floats(0, 1), st.integers(0, 5_000),
    st.integers(0, 99),
)  # fmt: skip
def test_plans_of_several_segments_are_those_of_each(
    lengths: list[int], bar: float, limit_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    counts = np.asarray(lengths)
    many = int(counts.sum())
    value, position = rng.random(many), rng.integers(0, 50, many)
    size = rng.integers(1, 1_000, many)
    whole = plan(value, position, size, counts, bar=bar, limit_bytes=limit_bytes)
    for number, end in enumerate(np.cumsum(counts).tolist()):
        part = slice(end - lengths[number], end)
        one = plan(
            value[part], position[part], size[part], counts[number : number + 1],
            bar=bar, limit_bytes=limit_bytes,
        )  # fmt: skip
        assert one.cost[0] == pytest.approx(whole.cost[number])
        assert one.kept.tolist() == whole.kept[part].tolist()


# -- whose turn it is


def trial_of(found: int, lru: int, rounds: int = 10, *, shadow: int = 60) -> Trial:
    """After so many turnovers in each of which LRU would have found `lru` of 100."""
    trial = Trial()
    for _ in range(rounds):
        trial.saw(found, lru, 100, shadow)
        trial.judge(100)
    return trial


def test_lru_rules_until_the_shadow_found_more_for_a_whole_turnover() -> None:
    trial = Trial()
    trial.judge(100)
    trial.saw(0, 50, 99, 60)
    trial.judge(100)
    assert not trial.rules
    trial.saw(0, 0, 1, 0)
    trial.judge(100)
    assert (trial.rules, trial.gain) == (True, 0.0)


@pytest.mark.parametrize("shadow", [0, 40, 49])
def test_worth_that_promises_less_never_rules(shadow: int) -> None:
    """Not even for a trial, which would cost what it loses."""
    trial = Trial()
    for _ in range(1_000):
        trial.saw(50, 50, 100, shadow)
        trial.judge(100)
        assert not trial.rules
    assert trial.lost == 0


def test_a_store_that_is_not_full_promises_nothing() -> None:
    """LRU would have lost nothing of it either; it looked as if it would have lost everything."""
    ledger, rng = Ledger(), np.random.default_rng(1)
    some = keys(rng, 64)
    for turn in range(2 * LEARN_EVERY * worth.LEARNED_MIN // 64):
        note(ledger, some, uses(64, 1), NOW + 64 * turn, found=turn > 0)
    assert ledger.learned >= worth.LEARNED_MIN
    assert abs(ledger.trial.promise) < 0.01
    assert abs(ledger.trial.gain) < 0.01


def test_what_the_shadow_found_long_ago_is_forgotten() -> None:
    trial = Trial()
    for _ in range(50):
        trial.saw(50, 50, 100, 10)
        trial.judge(100)
    rounds = 0
    while not trial.rules:
        trial.saw(50, 50, 100, 60)
        trial.judge(100)
        rounds += 1
    assert rounds < 10


def test_worth_rules_while_it_finds_no_less_than_lru() -> None:
    assert trial_of(50, 50).rules
    assert trial_of(60, 50).gain > 0.05


def test_worth_that_falls_behind_gives_way_and_each_time_for_longer() -> None:
    trial = trial_of(40, 50, 4)
    assert (trial.rules, trial.lost) == (False, 1)
    rests = []
    for shadow in (75, 90, 105):  # it must promise more each time, see below
        rounds = 0
        while not trial.rules:
            trial.saw(50, 50, 100, shadow)
            trial.judge(100)
            rounds += 1
            assert rounds < 1_000
        rests.append(rounds)
        while trial.rules:
            trial.saw(40, 50, 100, shadow)
            trial.judge(100)
    assert rests[1] >= 1.5 * rests[0]
    assert rests[2] >= 1.5 * rests[1]


def test_a_shadow_that_promised_too_much_is_believed_when_it_promises_more() -> None:
    """Segments and rewriting cost what a miniature without them does not see."""
    trial = trial_of(40, 50, 4)  # promised were 10 more of 150, and it found 10 less of 140
    for shadow, believed in ((60, False), (70, False), (72, True)):
        for _ in range(100):
            if not trial.rules:
                trial.saw(50, 50, 100, shadow)
                trial.judge(100)
        assert trial.rules is believed


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=400), st.integers(1, 40), st.integers(0, 9)
)
def test_a_shadow_holds_the_best_of_what_was_asked_for(
    asked: list[int], room: int, seed: int
) -> None:
    worths = np.random.default_rng(seed).permutation(64)
    shadow = Shadow(64)
    inside: set[int] = set()
    slack = max(1, room // SLACK)

    def least(held: worth.Ints, count: int) -> worth.Ints:
        return held[np.argsort(worths[held])[:count]]

    for each in asked:
        at = np.asarray([each])
        assert shadow.asked(at, np.asarray([True]), NEVER) == (each in inside)
        inside.add(each)
        shadow.fit(room, least)
        if len(inside) > room + slack // 2:
            inside = set(sorted(inside, key=lambda x: worths[x])[-(room - slack // 2) :])
        assert len(inside) <= room + slack
    other = np.asarray([asked[-1]])
    assert shadow.asked(other, np.asarray([False]), NEVER) == 0, "another key has that entry now"


def test_a_shadow_forgets_entries_that_are_of_no_key_and_waits_for_a_full_store() -> None:
    shadow = Shadow(16)
    every = np.arange(16)
    shadow.asked(every, np.zeros(16, np.bool_), NEVER)
    shadow.fit(0, lambda held, count: pytest.fail("nothing leaves a store that was never full"))
    shadow.keep(every < 4)
    assert shadow.asked(every, np.ones(16, np.bool_), NEVER) == 4


# -- which segment


def info(number: int, sequence: int) -> SegmentInfo:
    return SegmentInfo(
        number, bytes(16), sequence, SegmentState.SEALED, 8, 8, 80, number + 1, number
    )


class _Told(Ledger):
    """A ledger of which it is known what it says: the worth is the touch."""

    def worth(self, last_touch: worth.U64, uses: worth.U8, now: int) -> worth.Floats:
        return last_touch.astype(np.float64)


class Told:
    """Segments whose cost is told, and which of them are looked at."""

    def __init__(self) -> None:
        self.stock: Stock[SegmentInfo] = Stock()
        self.costs = np.zeros(4_096, np.uint64)
        self.looked: list[int] = []
        self.ranking = WorthRanking(_Told(), self._slots, self._columns)
        self._sequence = 0

    def _slots(self, number: int) -> Slots:
        self.looked.append(number)
        return np.full(8, number)

    def _columns(self, slots: Slots) -> Columns:
        many = len(slots)
        touch = self.costs[slots]
        return Columns(touch, uses(many), np.zeros(many, np.int64), np.full(many, 10))

    def put(self, number: int, cost: int) -> None:
        self._sequence += 1
        self.costs[number] = cost
        self.stock.put(info(number, self._sequence))

    def coldest(self) -> SegmentInfo:
        self.looked.clear()
        best = self.ranking.coldest(self.stock, bytes(16), now_touch=NOW, room_bytes=0)
        assert len(self.looked) == len(set(self.looked)) <= LOOKS
        assert self.stock.sealed[bytes(16)][best.segment] is best
        return best  # type: ignore[return-value]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=200))
def test_the_cheapest_of_all_is_found_and_of_many_in_time(costs: list[int]) -> None:
    told = Told()
    for number, cost in enumerate(costs):
        told.put(number, cost)
    rounds = 1 if len(costs) <= LOOKS else 2 + 2 * len(costs) // LOOKS
    for _ in range(rounds):
        best = told.coldest()
    assert costs[best.segment] == min(costs)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32))
def test_what_comes_goes_and_changes_is_found_and_forgotten(many: int, seed: int) -> None:
    told, random = Told(), np.random.default_rng(seed)
    for number in range(many):
        told.put(number, int(random.integers(1, 1_000)))
    for _ in range(2 * many):
        best = told.coldest()
        told.stock.drop(best.segment)
        told.put(best.segment, int(random.integers(1, 1_000)))
        told.costs[random.integers(many)] += 10  # dearer while nobody looked, as after a use
    ranking = told.ranking
    assert len(ranking._cheapest) <= 5 * many + LOOKS + HEAPS_SPARE
    assert len(ranking._in_turn) <= 2 * many + LOOKS + HEAPS_SPARE
    for _ in range(2 + 2 * many // LOOKS):
        best = told.coldest()
    assert told.costs[best.segment] == told.costs[:many].min()


def test_only_some_blocks_of_a_segment_of_thousands_are_looked_at() -> None:
    many = np.arange(10_000)
    assert 32 <= len(some_of(many, 64)) <= 64
    assert some_of(many[:64], 64).tolist() == many[:64].tolist()
    assert not len(some_of(many[:0], 64))


# -- all of it, by tenant


def unranked() -> Values:
    return Values(
        64, lambda number: pytest.fail("nobody is ranked"),
        lambda slots: pytest.fail("nobody is ranked"),
    )  # fmt: skip


def scan_beside_regulars(values: Values, stream: bytes, seed: int) -> None:
    """Twenty-eight new blocks a round, and four of thirty-two that come back every eighth: LRU of
    64 blocks has lost those by then, and needs not."""
    rng = np.random.default_rng(seed)
    regulars, now = keys(rng, 32), NOW
    for turn in range(2 * LEARN_EVERY * worth.LEARNED_MIN // 32):
        now += 32
        tell(values, stream, np.arange(28), keys(rng, 28), now, put=True)
        at = np.arange(28, 32)
        tell(values, stream, at, regulars[4 * (turn % 8) :][:4], now, put=False)
        values.ranking(stream, 64)


def test_tenants_beyond_the_limit_leave_by_lru_and_learn_nothing() -> None:
    values = unranked()
    for tenant in range(TENANTS_MAX + 1):
        scan_beside_regulars(values, tenant.to_bytes(16, "big"), tenant)
    assert values.ranking((0).to_bytes(16, "big"), 64) is not None
    assert values.ranking(TENANTS_MAX.to_bytes(16, "big"), 64) is None
    assert len(values.report()) == TENANTS_MAX
    values.forget((0).to_bytes(16, "big"))
    assert values.ranking((0).to_bytes(16, "big"), 64) is None
    assert values.memory_bytes <= 64 * (1 + 8)
    assert TENANT_BYTES < 768 << 10


def test_one_tenants_use_teaches_nothing_about_anothers() -> None:
    values = unranked()
    rng = np.random.default_rng(8)
    mine, other = bytes(15) + b"a", bytes(15) + b"b"
    scan_beside_regulars(values, mine, 8)
    tell(values, other, np.arange(4), keys(rng, 4), NOW, put=True)
    assert values.ranking(mine, 64) is not None
    assert values.ranking(other, 4) is None
