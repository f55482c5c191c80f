"""Turns: shares by weight, gets before puts, nothing idle while something waits, bounds kept."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_daemon.core import fairness
from entresol_daemon.core.fairness import GETS, PUTS, FairQueue, Gate, Pace
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
