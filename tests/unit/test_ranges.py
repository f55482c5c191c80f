"""First-fit ranges against a model that keeps a byte map of 4 KiB pages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from entresol_daemon.memory.ranges import RangeAllocator, align_up, cheapest_run
from entresol_proto.limits import ALIGN_BYTES, MIB

PAGE = ALIGN_BYTES


@pytest.mark.parametrize(
    ("length", "aligned"), [(0, 0), (1, PAGE), (PAGE - 1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)]
)
def test_align_up(length: int, aligned: int) -> None:
    assert align_up(length) == aligned


def test_align_up_to_another_unit() -> None:
    assert align_up(MIB + 1, MIB) == 2 * MIB


@pytest.mark.parametrize("size", [0, -PAGE, 1, PAGE + 1])
def test_sizes_that_are_not_whole_pages_are_asserted(size: int) -> None:
    with pytest.raises(AssertionError):
        RangeAllocator(size)


@pytest.mark.parametrize("length", [0, -PAGE, 1, PAGE - 1])
def test_lengths_that_are_not_whole_pages_are_asserted(length: int) -> None:
    with pytest.raises(AssertionError):
        RangeAllocator(4 * PAGE).allocate(length)


def test_full_at_the_last_page_and_one_past() -> None:
    ranges = RangeAllocator(3 * PAGE)
    assert [ranges.allocate(PAGE) for _ in range(4)] == [0, PAGE, 2 * PAGE, None]
    assert ranges.free_bytes == 0
    assert not ranges.is_empty


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2)])
def test_neighbours_merge_in_any_order(order: tuple[int, ...]) -> None:
    ranges = RangeAllocator(3 * PAGE)
    for _ in range(3):
        ranges.allocate(PAGE)
    for number in order:
        ranges.free(number * PAGE, PAGE)
    assert ranges.is_empty
    assert ranges.allocate(3 * PAGE) == 0


def test_the_first_hole_that_is_long_enough_is_used() -> None:
    ranges = RangeAllocator(8 * PAGE)
    for _ in range(8):
        ranges.allocate(PAGE)
    for number in (1, 4, 5, 7):
        ranges.free(number * PAGE, PAGE)
    assert ranges.allocate(2 * PAGE) == 4 * PAGE
    assert ranges.allocate(PAGE) == PAGE
    assert ranges.allocate(2 * PAGE) is None


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, PAGE),  # never allocated
        (PAGE, PAGE),  # twice
        (PAGE, 2 * PAGE),  # reaches from a free into an allocated range
        (2 * PAGE, 3 * PAGE),  # reaches from an allocated into a free range
        (0, 8 * PAGE),
        (7 * PAGE, 2 * PAGE),  # past the end
        (-PAGE, PAGE),
        (2 * PAGE, 0),
    ],
)
def test_freeing_what_is_not_allocated_is_asserted(offset: int, length: int) -> None:
    ranges = RangeAllocator(8 * PAGE)
    ranges.allocate(8 * PAGE)
    for number in (0, 1, 4):
        ranges.free(number * PAGE, PAGE)
    with pytest.raises(AssertionError):
        ranges.free(offset, length)


def test_asking_in_vain_again_looks_at_nothing() -> None:
    ranges = RangeAllocator(64 * PAGE)
    for _ in range(64):
        ranges.allocate(PAGE)
    for number in range(0, 64, 2):
        ranges.free(number * PAGE, PAGE)
    assert ranges.allocate(2 * PAGE) is None
    sizes, ranges._sizes = ranges._sizes, {}
    assert ranges.allocate(2 * PAGE) is None
    ranges._sizes = sizes
    ranges.free(5 * PAGE, PAGE)
    assert ranges.allocate(4 * PAGE) is None
    assert ranges.allocate(3 * PAGE) == 4 * PAGE


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 9)), max_size=12),
       st.integers(1, 12))  # fmt: skip
def test_the_cheapest_run(shapes: list[tuple[int, int, int]], length: int) -> None:
    pieces, at = [], 0
    for gap, size, cost in shapes:
        pieces.append((at + gap, size, cost * size))
        at += gap + size
    runs = {}
    for first in range(len(pieces)):
        for end in range(first + 1, len(pieces) + 1):
            part = pieces[first:end]
            together = all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(part))
            if together and sum(size for _, size, _ in part) >= length:
                runs[range(first, end)] = sum(cost for _, _, cost in part)
    found = cheapest_run(pieces, length)
    if runs:
        assert runs[found] == min(runs.values())
    else:
        assert not found


class Model(RuleBasedStateMachine):
    """Every page is in exactly one allocated range or free; first fit; partial frees allowed."""

    @initialize(pages=st.integers(1, 24))
    def begin(self, pages: int) -> None:
        self.pages = pages
        self.ranges = RangeAllocator(pages * PAGE)
        self.owner: list[int] = [0] * pages  # 0: free, else the number of its range
        self.last = 0

    def holes(self) -> list[tuple[int, int]]:
        found, start = [], None
        for page in range(self.pages + 1):
            free = page < self.pages and not self.owner[page]
            if free and start is None:
                start = page
            elif not free and start is not None:
                found.append((start, page - start))
                start = None
        return found

    @rule(pages=st.integers(1, 8))
    def allocate(self, pages: int) -> None:
        want = next((start for start, size in self.holes() if size >= pages), None)
        got = self.ranges.allocate(pages * PAGE)
        assert got == (None if want is None else want * PAGE)
        if want is not None:
            self.last += 1
            self.owner[want : want + pages] = [self.last] * pages

    @precondition(lambda self: any(self.owner))
    @rule(pick=st.integers(0, 1000), keep=st.integers(0, 3))
    def free(self, pick: int, keep: int) -> None:
        living = sorted({number for number in self.owner if number})
        number = living[pick % len(living)]
        mine = [page for page, owner in enumerate(self.owner) if owner == number]
        mine = mine[keep:] or mine  # all of it, or its tail (what `shrink` gives back)
        self.ranges.free(mine[0] * PAGE, len(mine) * PAGE)
        for page in mine:
            self.owner[page] = 0

    @precondition(lambda self: not all(self.owner))
    @rule(pick=st.integers(0, 1000))
    def free_twice(self, pick: int) -> None:
        free = [page for page in range(self.pages) if not self.owner[page]]
        page = free[pick % len(free)]
        before = (list(self.ranges._free), dict(self.ranges._sizes), self.ranges.free_bytes)
        with pytest.raises(AssertionError):
            self.ranges.free(page * PAGE, PAGE)
        assert before == (self.ranges._free, self.ranges._sizes, self.ranges.free_bytes)

    @invariant()
    def free_ranges_are_the_holes(self) -> None:
        if not hasattr(self, "ranges"):
            return
        free = [(at // PAGE, size // PAGE) for at, size in self.ranges.free_ranges()]
        assert free == self.holes(), "sorted, disjoint, never adjacent, nothing lost"
        assert set(self.ranges._sizes) == set(self.ranges._free)
        assert self.ranges.free_bytes == PAGE * self.owner.count(0)
        assert self.ranges.is_empty == (not any(self.owner))


Model.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase
