"""The write budget among tenants: shares by weight, what others leave, bounds, no traces."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_daemon.core.admission import STALE_ENDS_MAX, Admission, GhostList, WriteBudget

SECOND_NS = 1_000_000_000
RATE, BURST = 1_000, 100_000


def gate_of(policy: str = "auto") -> tuple[Admission, WriteBudget]:
    budget = WriteBudget(RATE, BURST)
    return Admission(policy, budget=budget, ghost_keys_max=10_000), budget


class Flood:
    """Offers ten times the rate, each block twice; what it is given."""

    def __init__(self, gate: Admission, name: bytes, weight: int = 1, *, times: int = 2) -> None:
        self._gate, self._name, self._weight, self._times = gate, name, weight, times
        self.bytes = 0

    def second(self, number: int, now_ns: int) -> None:
        for key in list(range(100)) * self._times:
            given = self._gate.admit(
                (number, key), 100, now_ns, owner=self._name, weight=self._weight, alone=False
            )
            self.bytes += 100 * given


@pytest.mark.parametrize("times", [1, 2])
def test_who_asks_for_its_share_is_refused_nothing_whatever_another_offers(times: int) -> None:
    gate, _ = gate_of()
    flood = Flood(gate, b"a", times=times)
    for number in range(200):
        now_ns = number * SECOND_NS
        flood.second(number, now_ns)
        for part in range(4):
            assert gate.admit((number, part), 100, now_ns, owner=b"b", alone=False)
    assert flood.bytes > 200 * 600, "and the other has the rest"
    flooded = flood.bytes
    for number in range(200, 400):
        flood.second(number, number * SECOND_NS)
    assert flood.bytes - flooded == pytest.approx(200 * RATE, rel=0.02), "what is left by others"


def test_floods_are_given_their_shares_by_weight() -> None:
    gate, _ = gate_of()
    floods = [Flood(gate, b"a", 1), Flood(gate, b"b", 3), Flood(gate, b"c", 6)]
    for number in range(500):
        if number == 200:  # the burst is used up, and its debt
            for flood in floods:
                flood.bytes = 0
        for flood in floods:
            flood.second(number, number * SECOND_NS)
    assert [flood.bytes for flood in floods] == [
        pytest.approx(300 * RATE * share, rel=0.03) for share in (0.1, 0.3, 0.6)
    ]


def test_one_of_several_leaves_some_of_the_debt_and_may_save_up_and_owe_alone() -> None:
    gate, budget = gate_of()
    flood = Flood(gate, b"a", times=1)
    for number in range(20):
        flood.second(number, 0)
    assert flood.bytes == BURST, "all that was saved up, as if it were alone"
    for number in range(20):
        flood.second(number, 0)
    assert budget.drawn(b"a") == pytest.approx(2 * BURST * 8 / 9, abs=100)
    assert gate.admit("first", 100, 0, owner=b"b", alone=False)
    assert not gate.admit("first", 100, 0, owner=b"a", alone=False)


OPS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "offer", "charge", "give up", "forget"]),
        st.sampled_from([b"a", b"b", b"c", b"d"]),
        st.integers(1, 5),  # weight
        st.integers(0, 9),  # key
        st.integers(1, 500),
        st.sampled_from([0, 0, 1, SECOND_NS // 7, SECOND_NS, 60 * SECOND_NS]),
    ),
    max_size=200,
)


@given(OPS, st.sampled_from(["auto", "second_touch"]), st.booleans())
def test_admitted_bytes_of_all_tenants_stay_within_rate_and_burst(
    ops: list[tuple[str, bytes, int, int, int, int]], policy: str, alone: bool
) -> None:
    budget = WriteBudget(10, 1_000)
    gate = Admission(policy, budget=budget)
    given_to: dict[bytes, list[int]] = {}
    now = net = charged = 0
    forgotten = False
    for what, owner, weight, key, size, step in ops:
        now += step
        if what == "offer" and gate.admit(key, size, now, owner=owner, weight=weight, alone=alone):
            given_to.setdefault(owner, []).append(size)
            net += size
        elif what == "charge":
            gate.charge(size, owner=owner, weight=weight)
            charged += size
        elif what == "give up" and given_to.get(owner):
            less = given_to[owner].pop()
            gate.give_up(less, owner=owner)
            net -= less
        elif what == "forget":
            gate.forget(owner)
            forgotten = True
        room = budget.room(now)
        assert room >= -1_000 - 500 - charged
        assert net <= 10 * now / SECOND_NS + 2 * 1_000 + 500
        drawn = sum(map(budget.drawn, (b"a", b"b", b"c", b"d")))
        assert drawn <= 1_000 - room + 4, "no more than is missing, but for rounding"
        assert forgotten or drawn >= 1_000 - room, "and no less"
        assert len(budget) <= 4


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 50), st.integers(0, SECOND_NS)), max_size=300
    ),
    st.sampled_from(["auto", "second_touch", "all"]),
    st.integers(1, 7),
)
def test_a_tenant_alone_is_answered_as_if_there_were_no_shares(
    offers: list[tuple[int, int, int]], policy: str, weight: int
) -> None:
    gate = Admission(policy, budget=WriteBudget(10, 100), ghost_keys_max=8)
    level, level_max, ghost = 100 * SECOND_NS, 100 * SECOND_NS, OrderedDict[int, None]()
    now = 0
    for key, size, step in offers:
        now += step
        level = min(level_max, level + 10 * step)
        room = level // SECOND_NS
        admitted = policy == "all" or (policy == "auto" and room > 0)
        if not admitted:
            admitted = key in ghost and room > -100
            ghost[key] = None
            ghost.move_to_end(key)
            if len(ghost) > 8:
                ghost.popitem(last=False)
        level -= size * SECOND_NS * admitted
        assert gate.admit(key, size, now, owner=b"a", weight=weight) == admitted


def test_what_is_given_up_is_its_owners_and_what_it_has_back_already_the_others() -> None:
    gate, budget = gate_of()
    for owner in (b"a", b"b"):
        assert gate.admit(owner, 5_000, 0, owner=owner, alone=False)
    gate.give_up(2_000, owner=b"a")
    assert [budget.drawn(b"a"), budget.drawn(b"b")] == [3_000, 5_000]
    gate.give_up(4_000, owner=b"a")
    assert [budget.drawn(b"a"), budget.drawn(b"b")] == [0, 4_000]
    assert len(budget) == 1, "who has drawn nothing is not kept"
    assert budget.room(0) == BURST - 4_000
    assert budget.room(4 * SECOND_NS) == BURST
    assert len(budget) == 0


def test_an_erased_tenant_leaves_nothing_behind() -> None:
    gate, budget = gate_of()
    for owner in (b"a", b"b"):
        for number in range(3):
            gate.charge(BURST, owner=owner)
            gate.admit(number, 100, 0, owner=owner, alone=False)
    gate.forget(b"a")
    assert (len(budget), len(gate.ghost)) == (1, 3)
    assert {owner for _, _, owner in budget._ends} == set(gate.ghost._owners) == {b"b"}
    gate.give_up(100, owner=b"a")  # a reservation that ended late
    gate.forget(b"a")
    gate.forget(b"b")
    assert (len(budget), len(gate.ghost), budget._ends, budget._weights) == (0, 0, [], 0)
    assert budget.room(0) == 100 - 5 * BURST, "what is written stays written"


def test_the_list_of_ends_is_bounded_however_often_puts_are_given_up() -> None:
    budget = WriteBudget(RATE, BURST)
    now_ns = 0
    for _ in range(50):
        for owner in (b"a", b"b", b"c"):
            for _ in range(100):
                budget.spend(10, owner)
        now_ns += SECOND_NS // 10  # what is listed is passed
        budget.room(now_ns)
        for owner in (b"a", b"b", b"c"):
            for _ in range(99):
                budget.refund(10, owner)
                assert len(budget._ends) <= 2 * len(budget) + STALE_ENDS_MAX


def test_a_flood_of_refused_offers_pushes_out_no_others_remembered_keys() -> None:
    ghost = GhostList(1_000)
    for key in range(300):
        assert not ghost.note(key, b"quiet")
    for key in range(20_000):
        ghost.note(key, b"flood")
        assert len(ghost) <= 1_000
    assert all(ghost.note(key, b"quiet") for key in range(300))
    assert ghost.note(19_999, b"flood")
    assert not ghost.note(1, b"flood")
    assert not ghost.note(5, b"third"), "what another has noted is no answer to a third"


def test_ghost_keys_of_owners_at_the_limit_and_one_past() -> None:
    ghost = GhostList(4)
    for owner, key in ((b"a", 1), (b"a", 2), (b"a", 3), (b"b", 1)):
        assert not ghost.note(key, owner)
    assert not ghost.note(2, b"b"), "one past it, the owner with most gives one"
    assert len(ghost) == 4
    assert ghost.note(1, b"b")
    assert ghost.note(2, b"a")
    assert not ghost.note(1, b"a")
