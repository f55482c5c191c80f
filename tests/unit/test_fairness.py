"""Turns: shares by weight, gets before puts, nothing idle while something waits, bounds kept."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_daemon.core import fairness
from entresol_daemon.core.fairness import CREDIT_ROOM, GETS, PUTS, FairQueue, Gate, Pace, Spacing
from entresol_proto.status import QuotaError, Status


def served(queue: FairQueue[str], count: int) -> dict[str, int]:
    """Cost served by flow over so many pops."""
    found: dict[str, int] = {}
    for _ in range(count):
        unit = queue.pop()
        found[unit.item] = found.get(unit.item, 0) + unit.cost
    return found


def test_equal_weights_share_by_cost_and_not_by_units() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(1_000):
        queue.push("many", 1, 10, "many")
    for _ in range(100):
        queue.push("long", 1, 100, "long")
    found = served(queue, 550)
    assert abs(found["many"] - found["long"]) <= 100 + 10


def test_weights_are_shares() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, weight in (("one", 1), ("three", 3)):
        for _ in range(400):
            queue.push(name, weight, 7, name)
    found = served(queue, 400)
    assert abs(found["three"] - 3 * found["one"]) <= 3 * 7 + 7


def test_a_newcomer_waits_for_one_unit_and_not_for_a_backlog() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(10_000):
        queue.push("flood", 1, 5, "flood")
    served(queue, 3_000)
    queue.push("late", 1, 5, "late")
    assert "late" in served(queue, 2)


def test_idle_time_is_not_saved_up() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("idler", 1, 1, "idler")
    for _ in range(1_000):
        queue.push("busy", 1, 1, "busy")
    served(queue, 900)
    for _ in range(1_000):
        queue.push("idler", 1, 1, "idler")
    found = served(queue, 100)
    assert abs(found["idler"] - found["busy"]) <= 2


def test_who_returns_goes_first_up_to_its_credit_and_then_shares() -> None:
    """Being idle is worth at most `credit` of cost, once, and one unit that crosses it."""
    queue: FairQueue[str] = FairQueue(credit=50)
    for _ in range(1_000):
        queue.push("flood", 1, 10, "flood")
    served(queue, 500)
    for _ in range(100):
        queue.push("late", 1, 10, "late")
    order = [queue.pop().item for _ in range(47)]
    ahead = order.index("flood")
    assert 50 <= ahead * 10 <= 50 + 10
    after = order[ahead:]
    assert all(one != other for one, other in itertools.pairwise(after))


def test_credit_is_scaled_by_weight() -> None:
    queue: FairQueue[str] = FairQueue(credit=50)
    for _ in range(1_000):
        queue.push("flood", 1, 10, "flood")
    served(queue, 500)
    for _ in range(100):
        queue.push("late", 3, 10, "late")
    order = [queue.pop().item for _ in range(40)]
    assert 150 <= order.index("flood") * 10 <= 150 + 30 + 10


def test_going_idle_again_and_again_earns_no_more_than_a_share() -> None:
    """A tenant that leaves and returns is never served more than one that stayed."""
    queue: FairQueue[str] = FairQueue(credit=50)
    for _ in range(3_000):
        queue.push("flood", 1, 10, "flood")
    total = dict.fromkeys(("flood", "pulse"), 0)
    idle, waiting = 0, 0
    for _ in range(2_000):
        if not waiting and (idle := idle + 1) > 3:
            idle, waiting = 0, 12
            for _ in range(waiting):
                queue.push("pulse", 1, 10, "pulse")
        unit = queue.pop()
        total[unit.item] += unit.cost
        waiting -= unit.item == "pulse"
        assert total["pulse"] <= total["flood"] + 10
    assert total["pulse"] >= total["flood"] * 0.75, "it asked for most of its share"


def test_only_who_was_served_less_has_credit() -> None:
    queue: FairQueue[str] = FairQueue(credit=50)
    plain: FairQueue[str] = FairQueue()
    for one in (queue, plain):
        for _ in range(10):
            one.charge("flood", 1, 10)
    assert queue.has_credit("late")
    assert not queue.has_credit("flood")
    assert not plain.has_credit("late")
    queue.push("flood", 1, 10, "flood")
    assert not queue.next_has_credit
    queue.push("late", 1, 10, "late")
    assert queue.next_has_credit
    assert [queue.pop().item for _ in range(2)] == ["late", "flood"]


def test_a_turn_that_took_longer_is_counted_before_the_next() -> None:
    """Of a tenant that does not wait: the next unit starts so much later."""
    queue: FairQueue[str] = FairQueue()
    queue.charge("long", 2, 20)
    queue.add("long", 2, 180)
    queue.push("long", 2, 20, "long")
    for _ in range(30):
        queue.push("other", 1, 10, "other")
    order = [queue.pop().item for _ in range(20)]
    assert order.index("long") == (20 + 180) // 2 // 10


def test_a_turn_that_took_longer_is_counted_once_although_more_waits() -> None:
    """Of a tenant that waits: it is owed once, with the next unit popped, and then forgotten."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(30):
        queue.push("long", 1, 10, "long")
    queue.pop()
    queue.add("long", 1, 60)
    queue.add("long", 1, 30)
    for _ in range(30):
        queue.push("other", 1, 10, "other")
    found = served(queue, 30)
    assert abs(found["other"] - (found["long"] + 10 + 90)) <= 20
    more = served(queue, 20)
    assert more == {"long": 100, "other": 100}


def test_within_a_tenant_gets_go_before_puts_and_equals_in_order() -> None:
    queue: FairQueue[int] = FairQueue()
    for number, rank in enumerate((PUTS, PUTS, GETS, PUTS, GETS)):
        queue.push("one", 1, 1, number, rank)
    assert [queue.pop().item for _ in range(5)] == [2, 4, 0, 1, 3]


def test_gets_of_one_do_not_starve_puts_of_another() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.push("reader", 1, 1, "reader", GETS)
        queue.push("writer", 1, 1, "writer", PUTS)
    assert served(queue, 100) == {"reader": 50, "writer": 50}


def test_what_was_dropped_costs_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    units = [queue.push("quitter", 1, 1_000, "quitter") for _ in range(10)]
    for unit in units:
        unit.drop()
    for _ in range(4):
        queue.push("quitter", 1, 10, "quitter")
        queue.push("other", 1, 10, "other")
    alive = []
    while len(queue):
        unit = queue.pop()
        if not unit.dropped:
            alive.append(unit.item)
    assert alive[:4].count("quitter") == 2


def test_at_the_limit_of_waiting_units_and_one_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "WAITING_MAX", 3)
    queue: FairQueue[int] = FairQueue()
    for number in range(3):
        queue.push("one", 1, 1, number)
    with pytest.raises(QuotaError) as caught:
        queue.push("two", 1, 1, 3)
    assert caught.value.status is Status.BUSY
    queue.pop()
    queue.push("two", 1, 1, 3)


def test_tenants_of_the_past_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "FLOWS_REMEMBERED_MAX", 8)
    queue: FairQueue[int] = FairQueue()
    for number in range(1_000):
        queue.push(number, 1, 1, number)
        queue.pop()
    assert len(queue._flows) <= 8 + 1


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 64), st.integers(0, 1)), max_size=300
    ),
    st.tuples(*[st.integers(1, 5)] * 3),
    st.randoms(use_true_random=False),
)
def test_backlogged_tenants_stay_within_one_unit_of_each_other(
    pushes: list[tuple[str, int, int]], weights: tuple[int, int, int], rng: random.Random
) -> None:
    """The bound of the method, over every stretch in which both wait; and nothing is lost."""
    weight = dict(zip("abc", weights, strict=True))
    queue: FairQueue[str] = FairQueue()
    backlog = dict.fromkeys("abc", 0)
    total: dict[str, float] = dict.fromkeys("abc", 0.0)
    since = dict(total)  # what each had when the present stretch of all three waiting began
    left = list(pushes)
    popped = 0
    while left or len(queue):
        if left and (not len(queue) or rng.random() < 0.6):
            flow, cost, rank = left.pop()
            queue.push(flow, weight[flow], cost, flow, rank)
            backlog[flow] += 1
            if backlog[flow] == 1:
                since = dict(total)
        else:
            unit = queue.pop()
            popped += 1
            backlog[unit.item] -= 1
            total[unit.item] += unit.cost / weight[unit.item]
        for one in "abc":
            for other in "abc":
                if one < other and backlog[one] and backlog[other]:
                    apart = (total[one] - since[one]) - (total[other] - since[other])
                    assert abs(apart) <= 64 / weight[one] + 64 / weight[other] + 1
        if not all(backlog.values()):
            since = dict(total)
    assert popped == len(pushes)


def test_a_gate_lets_in_what_fits_or_the_least_number() -> None:
    gate: Gate[str] = Gate(cost_max=100, count_min=2)
    assert gate.enter("a", 1, 500), "longer than all of it: alone"
    assert gate.enter("a", 1, 500), "two at a time, whatever their size"
    assert not gate.enter("b", 1, 1)
    gate.done(500)
    gate.done(500)
    assert all(gate.enter("a", 1, 40) for _ in range(2))
    assert not gate.enter("a", 1, 40)
    gate.queue.push("a", 1, 40, "waits")
    assert gate.enter("b", 1, 10) is False, "nobody overtakes"
    gate.done(40)
    assert [unit.item for unit in gate.starting()] == ["waits"]
    gate.done(40)
    gate.done(40)
    with pytest.raises(AssertionError):
        gate.done(40)


def test_what_goes_through_no_gate_takes_at_most_half_of_the_room() -> None:
    gate: Gate[str] = Gate(cost_max=100, count_min=1)
    gate.occupy(30)
    assert gate.enter("a", 1, 70)
    assert not gate.enter("a", 1, 1)
    gate.done(70)
    gate.occupy(1_000)
    assert gate.enter("a", 1, 45)
    assert gate.enter("a", 1, 5)
    assert not gate.enter("a", 1, 1)
    gate.occupy(-1_030)
    assert gate.enter("a", 1, 50)
    with pytest.raises(AssertionError):
        gate.occupy(-1)


def flooded(credit: int) -> Gate[str]:
    """A gate that is full of what one tenant has in service, after it alone used it for long."""
    gate: Gate[str] = Gate(cost_max=100, count_min=1, credit=credit)
    for _ in range(50):
        assert gate.enter("flood", 1, 100)
        gate.done(100)
    assert gate.enter("flood", 1, 100)
    return gate


def test_a_full_gate_has_more_room_for_who_has_credit() -> None:
    gate = flooded(credit=10_000)
    assert not gate.enter("flood", 1, 1)
    entered = 0
    while gate.enter("late", 1, 20):
        entered += 20
    assert gate.cost_in_service == CREDIT_ROOM * 100 == 100 + entered, "its credit is larger"
    assert not flooded(credit=0).enter("late", 1, 1)


def test_a_gate_has_no_more_room_than_the_credit() -> None:
    gate = flooded(credit=60)
    entered = 0
    while gate.enter("late", 1, 20):
        entered += 20
    assert entered == 60


def test_who_has_credit_goes_past_those_who_wait_at_a_full_gate() -> None:
    gate = flooded(credit=10_000)
    for _ in range(10):
        gate.queue.push("flood", 1, 100, "flood")
    assert gate.starting() == []
    for _ in range(10):
        gate.queue.push("late", 1, 100, "late")
    assert [unit.item for unit in gate.starting()] == ["late"] * (CREDIT_ROOM - 1)
    assert gate.cost_in_service == CREDIT_ROOM * 100
    assert gate.starting() == []


def test_an_idle_gate_gives_all_to_one() -> None:
    gate: Gate[int] = Gate(cost_max=8, count_min=1)
    assert all(gate.enter("only", 1, 1) for _ in range(8))
    for number in range(100):
        gate.queue.push("only", 1, 1, number)
    started = 0
    while len(gate.queue):
        gate.done(1)
        started += len(gate.starting())
        assert gate.cost_in_service == 8 or not len(gate.queue)
    assert started == 100


def settle(pace: Pace, bytes_per_s: float, latency_ns: int, seconds: float) -> None:
    """A resource of such a rate and latency, with as much in service as the pace says."""
    now = 0.0
    pace.busy(0)
    while now < seconds * 1e9:
        cost = pace.cost // 4
        now += max(cost / bytes_per_s * 1e9, latency_ns / 4)
        pace.done(cost, int(now))


@pytest.mark.parametrize("rate", [200e6, 1e9, 7e9, 50e9])
def test_a_pace_finds_what_a_resource_does_in_its_target(rate: float) -> None:
    pace = Pace(target_ns=1_000_000, cost_min=1 << 16, cost_max=1 << 30)
    settle(pace, rate, 200_000, 1.0)
    assert rate * 0.8e-3 <= pace.cost <= rate * 1.3e-3


def test_a_pace_that_was_too_slow_recovers() -> None:
    pace = Pace(target_ns=1_000_000, cost_min=1 << 16, cost_max=1 << 30)
    settle(pace, 50e6, 200_000, 1.0)
    assert pace.cost == 1 << 16
    settle(pace, 7e9, 200_000, 1.0)
    assert pace.cost >= 5_600_000


def in_service(took_ns: int) -> int:
    """What a pace of 1 ms keeps in service of a byte per nanosecond, where units take so long."""
    pace, now = Pace(target_ns=1_000_000, cost_min=1, cost_max=1 << 30), 0
    pace.busy(0)
    for _ in range(2_000):
        now += 100_000
        pace.done(100_000, now, took_ns=took_ns)
    return pace.cost


def test_the_target_is_three_times_the_quickest_unit_and_at_most_four_times_itself() -> None:
    assert in_service(0) == in_service(200_000) == 1_000_000
    assert in_service(800_000) == 2_400_000
    assert in_service(50_000_000) == 4_000_000


def test_a_tenant_alone_has_three_times_as_much_in_service_up_to_four_targets() -> None:
    def alone(took_ns: int, cost_max: int = 1 << 30) -> int:
        pace, now = Pace(target_ns=1_000_000, cost_min=1, cost_max=cost_max), 0
        pace.busy(0)
        for _ in range(2_000):
            now += 100_000
            pace.done(100_000, now, took_ns=took_ns)
        return pace.alone_cost

    assert alone(0) == alone(200_000) == 3_000_000
    assert alone(800_000) == 4_000_000  # three times 2.4 ms would be more
    assert alone(50_000_000) == in_service(50_000_000) == 4_000_000
    assert alone(0, cost_max=2_000_000) == 2_000_000


def test_a_gate_has_the_room_of_a_tenant_alone_and_none_for_credit_beside() -> None:
    gate: Gate[str] = Gate(cost_max=100, count_min=1, credit=1_000)
    gate.alone_max = 300
    assert gate.enter("a", 1, 200)
    assert gate.enter("a", 1, 100)
    assert not gate.enter("a", 1, 1)
    assert gate.enter("b", 1, 100), "four times the usual room, as ever, for who has credit"
    assert not gate.enter("b", 1, 101)
    gate.alone_max = 0
    gate.done(200)
    assert gate.cost_in_service == 200
    assert not gate.enter("a", 1, 1), "no longer alone: the usual room"
    gate.done(100)
    gate.done(100)
    assert gate.enter("a", 1, 100)


def test_what_is_written_takes_up_half_of_the_room_there_is() -> None:
    gate: Gate[str] = Gate(cost_max=100, count_min=1)
    gate.alone_max = 300
    gate.occupy(1_000)
    assert gate.enter("a", 1, 100)
    assert gate.enter("a", 1, 50)
    assert not gate.enter("a", 1, 1)


def test_a_quick_unit_is_forgotten_after_two_windows_at_most() -> None:
    pace, now = Pace(target_ns=1_000_000, cost_min=1, cost_max=1 << 30), 0
    pace.busy(0)
    pace.done(100_000, 100_000, took_ns=100_000)
    while now < 2_500_000_000:
        now += 100_000
        pace.done(100_000, now, took_ns=1_000_000)
        if now == 500_000_000:
            assert pace.cost == 1_000_000, "the quickest of a while counts"
    assert pace.cost == 3_000_000


def test_what_passes_between_two_units_is_added_to_the_target() -> None:
    plain, late = (Pace(target_ns=1_000_000, cost_min=1, cost_max=1 << 30) for _ in range(2))
    for pace, lag_ns in ((plain, 0), (late, 500_000)):
        pace.busy(0)
        pace.done(4_000, 4_000_000, lag_ns=lag_ns)
    assert (plain.cost, late.cost) == (1_000, 1_500)


def test_a_pace_is_not_lowered_while_there_was_spare_room() -> None:
    """One moment with nobody waiting spoils a measurement, but only downwards and only that one."""
    pace = Pace(target_ns=1_000_000, cost_min=1, cost_max=1 << 30)
    pace.busy(0)
    pace.done(4_000, 4_000_000)
    pace.done(200, 6_000_000, waiting=False)
    pace.done(200, 8_000_000)
    assert pace.cost == 1_000
    pace.done(8_000, 12_000_000, waiting=False)
    assert pace.cost == 2_000
    pace.done(400, 16_000_000)
    assert pace.cost == (2_000 + 100) // 2


def test_a_burst_passes_at_once_and_then_one_each_spacing() -> None:
    spacing = Spacing(spacing_ns=10, burst=3)
    assert [spacing.note("a", 0, 1_000) for _ in range(6)] == [0, 0, 0, 10, 20, 30]
    assert spacing.note("b", 0, 1_000) == 0, "each tenant has its own"
    assert spacing.note("a", 30, 1_000) == 10
    assert [spacing.note("a", 1_000, 1_000) for _ in range(4)] == [0, 0, 0, 10], "no more is saved"


def test_who_would_wait_too_long_is_refused_and_not_counted() -> None:
    spacing = Spacing(spacing_ns=10, burst=1)
    assert [spacing.note("a", 0, 20) for _ in range(3)] == [0, 10, 20]
    assert [spacing.note("a", 0, 20) for _ in range(100)] == [None] * 100
    assert spacing.note("a", 10, 20) == 20
    assert spacing.note("a", 10, 20) is None


def test_spacing_forgets_who_keeps_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded; who is ahead of the rate is still held to it."""
    monkeypatch.setattr(fairness, "FLOWS_REMEMBERED_MAX", 8)
    spacing = Spacing(spacing_ns=10, burst=2)
    for _ in range(102):
        spacing.note("many", 0, 10_000)
    for number in range(100):
        assert spacing.note(number, number * 10, 0) == 0
        assert len(spacing._due_ns) <= 8
    assert spacing.note("many", 1_000, 10_000) == 10
    for number in range(100):  # all of them ahead of it
        spacing.note(f"flood {number}", 2_000, 10_000)
        assert len(spacing._due_ns) <= 8
