"""Plans: every key is answered once, gaps stop a prefix, budgets hold."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_daemon.core import planning
from entresol_daemon.core.planning import Shape, Window, granted_ahead, plan_fetch, take_window
from entresol_daemon.core.residency import Residency, Resident, ResidentState
from entresol_daemon.memory.slabs import SlabPool
from entresol_proto.limits import ALIGN_BYTES
from entresol_proto.status import Status

PAGE = ALIGN_BYTES
OWNER = b"owner-a".ljust(16)
NS = b"n" * 16
BIG = 1 << 40


class Buffer:
    """Plain memory."""

    def __init__(self, length_bytes: int) -> None:
        self.view = memoryview(bytearray(length_bytes))

    def close(self) -> None:
        pass


def residency(pages: int = 64) -> Residency:
    return Residency(SlabPool(pages * PAGE, pages * PAGE, Buffer))


def shape(slot: int, pages: int = 1) -> Shape:
    return Shape(slot, bytes([slot & 0xFF]) * 16, pages * PAGE, pages * PAGE - 64, pages * PAGE)


def window(
    pending: deque[int], shapes: list[Shape], table: Residency, *, owner_bytes_max: int = BIG,
    budget_bytes: int = BIG, load_bytes_max: int = BIG, prefix: bool = False,
) -> Window:  # fmt: skip
    return take_window(
        pending, shapes, table, namespace_id=NS, owner=OWNER, owner_bytes_max=owner_bytes_max,
        budget_bytes=budget_bytes, load_bytes_max=load_bytes_max, prefix=prefix,
    )  # fmt: skip


def resident(table: Residency, slot: int, state: ResidentState, pages: int = 1) -> Resident:
    extent = table.allocate(OWNER, pages * PAGE, BIG)
    assert extent is not None
    pins = 1 if state is ResidentState.LOADING else 0
    one = Resident(slot, NS, bytes([slot]) * 16, OWNER, extent, state, pins)
    table.add(one)
    return one


# The split by presence ----------------------------------------------------------------------------


@given(st.lists(st.integers(-1, 50), max_size=60), st.booleans())
def test_every_key_is_in_exactly_one_list(slots: list[int], prefix: bool) -> None:
    wanted = plan_fetch(slots, prefix=prefix)
    answered = [index for index, _ in wanted.misses]
    assert sorted([*wanted.pending, *answered]) == list(range(len(slots)))
    assert list(wanted.pending) == sorted(wanted.pending), "in order"
    assert all(slots[index] >= 0 for index in wanted.pending)


@given(st.lists(st.integers(-1, 50), max_size=60))
def test_prefix_mode_serves_nothing_after_the_first_gap(slots: list[int]) -> None:
    wanted = plan_fetch(slots, prefix=True)
    first = next((index for index, slot in enumerate(slots) if slot < 0), len(slots))
    assert list(wanted.pending) == list(range(first))
    assert wanted.misses == [
        (index, Status.MISS if index == first else Status.GAP) for index in range(first, len(slots))
    ]


@given(st.lists(st.integers(-1, 50), max_size=60))
def test_without_prefix_only_absent_keys_miss(slots: list[int]) -> None:
    wanted = plan_fetch(slots, prefix=False)
    assert wanted.misses == [(i, Status.MISS) for i, slot in enumerate(slots) if slot < 0]


# Windows ------------------------------------------------------------------------------------------


def test_ready_blocks_are_served_and_absent_ones_loaded() -> None:
    table = residency()
    ready = resident(table, 0, ResidentState.READY)
    loading = resident(table, 1, ResidentState.LOADING)
    pending = deque([4, 5, 6, 7])
    got = window(pending, [shape(0), shape(1), shape(2), shape(-1)], table)
    assert got.ready == [(4, ready)]
    assert got.joins == [(5, loading)]
    assert [(index, one.slot) for index, one in got.loads] == [(6, 2)]
    assert got.misses == [(7, Status.MISS)]
    assert not pending
    assert got.waits
    assert len(got) == 4
    assert (ready.pins, loading.pins, got.loads[0][1].pins) == (1, 2, 1)
    fresh = got.loads[0][1]
    assert fresh.state is ResidentState.LOADING
    assert fresh.from_flash
    assert table.get(2) is fresh
    assert (fresh.namespace_id, fresh.wire_key, fresh.owner) == (NS, b"\x02" * 16, OWNER)
    assert got.taken_bytes == 3 * PAGE


def test_a_key_asked_for_twice_is_loaded_once() -> None:
    table = residency()
    got = window(deque([0, 1]), [shape(3), shape(3)], table)
    assert [index for index, _ in got.loads] == [0]
    assert [index for index, _ in got.joins] == [1]
    assert got.loads[0][1] is got.joins[0][1]
    assert got.loads[0][1].pins == 2


def test_budget_at_the_limit_and_one_past() -> None:
    for budget, count in ((3 * PAGE, 3), (3 * PAGE - 1, 2), (4 * PAGE - 1, 3)):
        table = residency()
        for slot in range(5):
            resident(table, slot, ResidentState.READY)
        pending = deque(range(5))
        got = window(pending, [shape(slot) for slot in range(5)], table, budget_bytes=budget)
        assert len(got.ready) == count
        assert list(pending) == list(range(count, 5))


def test_load_budget_at_the_limit_and_one_past() -> None:
    for budget, count in ((3 * PAGE, 3), (3 * PAGE - 1, 2)):
        table = residency()
        pending = deque(range(5))
        got = window(pending, [shape(slot) for slot in range(5)], table, load_bytes_max=budget)
        assert len(got.loads) == count
        assert list(pending) == list(range(count, 5))


def test_of_what_is_loaded_the_longer_of_record_and_plaintext_counts() -> None:
    shapes = [replace(shape(slot), plain_bytes=3 * PAGE) for slot in range(5)]
    pending = deque(range(5))
    got = window(pending, shapes, residency(), load_bytes_max=6 * PAGE)
    assert len(got.loads) == 2
    assert got.taken_bytes == 2 * PAGE, "memory is held for records"


@pytest.mark.parametrize("state", [ResidentState.READY, None])
def test_a_block_larger_than_a_budget_goes_alone(state: ResidentState | None) -> None:
    table = residency()
    if state is not None:
        resident(table, 0, state, pages=4)
    pending = deque([0, 1])
    got = window(pending, [shape(0, 4), shape(1)], table, budget_bytes=PAGE, load_bytes_max=PAGE)
    assert len(got.ready) + len(got.loads) == 1
    assert list(pending) == [1]


def test_a_window_stops_where_memory_ends() -> None:
    table = residency(2)
    pending = deque(range(4))
    got = window(pending, [shape(slot) for slot in range(4)], table)
    assert len(got.loads) == 2
    assert list(pending) == [2, 3]
    again = window(pending, [shape(2), shape(3)], table)
    assert len(again) == 0, "all is pinned: wait for memory"
    assert list(pending) == [2, 3]


def test_a_window_never_evicts_what_it_just_took() -> None:
    table = residency(2)
    ready = resident(table, 0, ResidentState.READY)
    resident(table, 1, ResidentState.READY)
    got = window(deque([0, 1, 2]), [shape(0), shape(2), shape(3)], table)
    assert got.ready == [(0, ready)]
    assert table.holds(ready)
    assert [one.slot for _, one in got.loads] == [2], "slot 1 gave way, slot 0 did not"


def test_an_owner_at_its_limit_waits() -> None:
    table = residency()
    pending = deque(range(3))
    got = window(pending, [shape(slot) for slot in range(3)], table, owner_bytes_max=2 * PAGE)
    assert len(got.loads) == 2
    assert list(pending) == [2]


def test_a_block_that_went_away_is_a_gap_like_any_other() -> None:
    shapes = [shape(0), shape(-1), shape(2)]
    for prefix, rest in ((True, [(1, Status.MISS), (2, Status.GAP), (3, Status.GAP)]),
                         (False, [(1, Status.MISS)])):  # fmt: skip
        table = residency()
        pending = deque(range(4))  # one more than there are shapes
        got = window(pending, shapes, table, prefix=prefix)
        assert got.misses == rest
        assert [index for index, _ in got.loads] == ([0] if prefix else [0, 2])
        assert list(pending) == ([] if prefix else [3])


@settings(max_examples=200, deadline=None)
@given(
    slots=st.lists(st.integers(-1, 12), max_size=30),
    sizes=st.lists(st.integers(1, 6), min_size=13, max_size=13),
    states=st.lists(st.sampled_from(["ready", "loading", "absent"]), min_size=13, max_size=13),
    pool_pages=st.integers(6, 40),
    budget=st.integers(1, 20),
    load=st.integers(1, 20),
    prefix=st.booleans(),
)
def test_windows_answer_every_key_once(
    slots: list[int], sizes: list[int], states: list[str], pool_pages: int, budget: int, load: int,
    prefix: bool,
) -> None:  # fmt: skip
    table = residency(pool_pages)
    for slot, state in enumerate(states):
        if state != "absent" and sizes[slot] * PAGE + table.pool.allocated_bytes <= (
            pool_pages * PAGE // 2
        ):
            resident(table, slot, ResidentState(state), sizes[slot])
    held = Counter({one.slot: one.pins for one in table._by_slot.values()})
    pending = deque(range(len(slots)))
    shapes = {n: shape(slot, sizes[slot] if slot >= 0 else 1) for n, slot in enumerate(slots)}
    answered: Counter[int] = Counter()
    served: list[int] = []
    while pending:
        got = window(
            pending, [shapes[n] for n in pending], table, budget_bytes=budget * PAGE,
            load_bytes_max=load * PAGE, prefix=prefix,
        )  # fmt: skip
        taken = [*got.ready, *got.loads, *got.joins]
        for index, one in taken:
            answered[index] += 1
            served.append(index)
            held[one.slot] += 1
            assert table.holds(one)
            assert one.slot == slots[index]
        for index, _ in got.misses:
            answered[index] += 1
        assert got.taken_bytes == sum(one.extent.length_bytes for _, one in taken)
        assert got.taken_bytes <= budget * PAGE or len(taken) == 1
        loads = [one.extent.length_bytes for _, one in got.loads]
        assert sum(loads) <= load * PAGE or len(loads) == 1
        assert all(one.pins == held[one.slot] for _, one in taken), "one pin per taken key"
        for _, one in taken:  # the window was served
            one.state = ResidentState.READY
            held[one.slot] -= 1
            table.unpin(one)
        for slot in [s for s, pins in held.items() if not pins and table.get(s) is None]:
            del held[slot]
        if not len(got):
            break
    assert set(answered.values()) <= {1}, "a key was answered twice"
    assert sorted([*answered, *pending]) == list(range(len(slots)))
    if prefix and -1 in slots:
        assert all(index < slots.index(-1) for index in served), "served after a gap"


# What is granted ahead ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "ahead"),
    [
        ([], 0),
        ([1] * 7, 0),  # not worth a lease of its own
        ([1] * 8, 4),
        ([1] * 30, 4),
        ([3] * 10, 1),
        ([5] * 10, 0),  # the first block alone is more than the part ahead
    ],
)
def test_a_large_window_is_granted_in_two_parts(
    pages: list[int], ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "FIRST_GRANT_BYTES", 4 * PAGE)
    table = residency(256)
    entries = [
        (number, resident(table, number, ResidentState.READY, size))
        for number, size in enumerate(pages)
    ]
    assert granted_ahead(entries) == ahead
