"""Slabs: one budget, one owner per slab, and no byte that belongs to two extents."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from entresol_daemon.memory.ranges import RangeAllocator, align_up
from entresol_daemon.memory.slabs import Extent, Slab, SlabPool
from entresol_proto.limits import ALIGN_BYTES, MIB

PAGE = ALIGN_BYTES
SLAB = 8 * PAGE
A, B, C = b"owner-a".ljust(16), b"owner-b".ljust(16), b"owner-c".ljust(16)


class Buffer:
    """Plain memory that notices being closed twice."""

    living = 0

    def __init__(self, length_bytes: int) -> None:
        self.view = memoryview(bytearray(length_bytes))
        self.closed = False
        Buffer.living += length_bytes

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        Buffer.living -= len(self.view)


@pytest.fixture(autouse=True)
def _count_afresh() -> None:
    Buffer.living = 0


def pool(slabs: int = 3, slab_bytes: int = SLAB) -> SlabPool:
    return SlabPool(slabs * slab_bytes, slab_bytes, Buffer)


def take(slabs: SlabPool, owner: bytes, length: int) -> Extent:
    extent = slabs.allocate(owner, length)
    assert extent is not None
    return extent


def test_extents_are_aligned_and_writable() -> None:
    slabs = pool()
    one, two = take(slabs, A, 1), take(slabs, A, PAGE + 1)
    assert (one.length_bytes, two.length_bytes) == (PAGE, 2 * PAGE)
    assert one.slab is two.slab
    assert two.offset_bytes % PAGE == 0
    one.view[:] = b"1" * PAGE
    two.view[:] = b"2" * (2 * PAGE)
    assert bytes(one.view) == b"1" * PAGE, "two extents share no byte"
    assert slabs.allocated_bytes == 3 * PAGE
    assert slabs.mapped_bytes == SLAB


def test_owners_never_share_a_slab() -> None:
    slabs = pool()
    one, two = take(slabs, A, PAGE), take(slabs, B, PAGE)
    assert one.slab is not two.slab
    assert one.slab.owner == A
    assert two.slab.owner == B
    assert slabs.owned_bytes(A) == SLAB
    assert slabs.used_bytes(A) == PAGE
    assert slabs.owned_bytes(C) == 0


def test_budget_at_the_limit_and_one_past() -> None:
    slabs = pool(2)
    held = [take(slabs, A, SLAB), take(slabs, A, SLAB)]
    assert slabs.allocate(A, 1) is None
    assert slabs.allocate(B, 1) is None
    assert slabs.mapped_bytes == slabs.budget_bytes == Buffer.living
    slabs.free(held[0])
    take(slabs, A, SLAB)


def test_an_empty_slab_of_another_owner_is_closed_and_made_anew() -> None:
    """Never handed over: a mapping the first owner kept must not show the second one's bytes."""
    closed: list[Slab] = []
    slabs = pool(1)
    slabs.on_close = closed.append
    mine = take(slabs, A, PAGE)
    assert slabs.allocate(B, PAGE) is None, "not while anything lives in it"
    old = mine.slab
    old.buffer.view[:PAGE] = b"a" * PAGE
    slabs.free(mine)
    assert closed == [], "an empty slab is kept as long as nobody needs it"
    theirs = take(slabs, B, PAGE)
    assert closed == [old]
    assert theirs.slab is not old
    assert theirs.slab.number != old.number
    assert theirs.slab.buffer is not old.buffer
    assert old.buffer.closed
    assert bytes(theirs.view) == bytes(PAGE)
    assert Buffer.living == SLAB


def test_an_empty_slab_serves_its_owner_again() -> None:
    slabs = pool(1)
    first = take(slabs, A, PAGE)
    slab = first.slab
    slabs.free(first)
    assert take(slabs, A, SLAB).slab is slab


def test_a_large_block_gets_a_slab_of_its_own_while_it_lives() -> None:
    slabs = SlabPool(4 * MIB, SLAB, Buffer)
    large = take(slabs, A, MIB + 1)
    assert large.slab.ranges.size_bytes == 2 * MIB
    slabs.free(large)
    assert slabs.mapped_bytes == 0, "not worth keeping"
    assert large.slab.buffer.closed


@pytest.mark.parametrize("length", [4 * MIB + 1, 1 << 40])
def test_what_exceeds_the_budget_closes_nothing(length: int) -> None:
    slabs = SlabPool(4 * MIB, SLAB, Buffer)
    slab = take(slabs, A, PAGE).slab
    slabs.free(take(slabs, B, PAGE))
    assert slabs.allocate(A, length) is None
    assert not slab.buffer.closed
    assert slabs.owned_bytes(B) == SLAB


def test_a_machine_without_memory_reads_as_no_room() -> None:
    def refuse(_length: int) -> Buffer:
        raise OSError(12, "Cannot allocate memory")

    slabs = SlabPool(4 * SLAB, SLAB, refuse)
    assert slabs.allocate(A, PAGE) is None
    assert slabs.mapped_bytes == 0


def test_shrink_gives_the_tail_back() -> None:
    slabs = pool(1)
    extent = take(slabs, A, SLAB)
    extent.view[:4] = b"head"
    slabs.shrink(extent, PAGE + 1)
    assert extent.length_bytes == len(extent.view) == 2 * PAGE
    assert bytes(extent.view[:4]) == b"head"
    assert slabs.allocated_bytes == 2 * PAGE
    other = take(slabs, A, SLAB - 2 * PAGE)
    other.view[:] = b"x" * len(other.view)
    assert bytes(extent.view[:4]) == b"head"
    slabs.shrink(extent, 2 * PAGE)  # to its own length: nothing happens
    assert extent.length_bytes == 2 * PAGE
    slabs.free(extent)
    slabs.free(other)
    assert slabs.allocated_bytes == 0


@pytest.mark.parametrize("length", [0, PAGE + 1])
def test_shrink_to_nothing_or_beyond_is_asserted(length: int) -> None:
    slabs = pool(1)
    extent = take(slabs, A, PAGE)
    with pytest.raises(AssertionError):
        slabs.shrink(extent, length)


def test_freeing_twice_is_asserted_even_when_the_place_is_taken_again() -> None:
    slabs = pool(1)
    extent = take(slabs, A, PAGE)
    slabs.free(extent)
    again = take(slabs, A, PAGE)
    assert again.offset_bytes == extent.offset_bytes
    with pytest.raises(AssertionError, match="freed twice"):
        slabs.free(extent)
    with pytest.raises(AssertionError, match="freed already"):
        slabs.shrink(extent, PAGE)
    assert slabs.allocated_bytes == PAGE


def test_a_place_that_is_reused_belongs_to_the_new_extent_alone() -> None:
    slabs = pool()
    first, old = take(slabs, A, PAGE), take(slabs, A, 2 * PAGE)
    new = slabs.reuse(old)
    assert (new.slab, new.offset_bytes, new.length_bytes) == (old.slab, PAGE, 2 * PAGE)
    assert slabs.allocated_bytes == slabs.used_bytes(A) == 3 * PAGE
    with pytest.raises(ValueError, match="released"):
        bytes(old.view)
    for again in (slabs.free, slabs.reuse):
        with pytest.raises(AssertionError, match="freed"):
            again(old)
    slabs.free(new)
    slabs.free(first)
    assert slabs.allocated_bytes == 0


def test_a_freed_view_cannot_be_used() -> None:
    slabs = pool(1)
    extent = take(slabs, A, PAGE)
    view = extent.view
    slabs.free(extent)
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_release_owner_closes_its_empty_slabs_only() -> None:
    slabs = pool()
    held = [take(slabs, A, SLAB), take(slabs, A, SLAB), take(slabs, B, SLAB)]
    slabs.free(held[0])
    slabs.free(held[2])
    slabs.release_owner(A)
    assert slabs.owned_bytes(A) == SLAB
    assert slabs.owned_bytes(B) == SLAB
    slabs.release_owner(C)
    assert Buffer.living == slabs.mapped_bytes == 2 * SLAB


def test_close_closes_everything() -> None:
    closed: list[Slab] = []
    slabs = pool()
    slabs.on_close = closed.append
    for owner in (A, A, B):
        take(slabs, owner, SLAB)
    slabs.close()
    assert len(closed) == 3
    assert Buffer.living == slabs.mapped_bytes == 0
    slabs.close()


@pytest.mark.parametrize("length", [MIB // 4, MIB // 4 + PAGE])
def test_full_slabs_are_not_asked_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """A machine has hundreds, nearly all of them full nearly all the time."""
    pool = SlabPool(64 * MIB, MIB, Buffer)
    extents = [pool.allocate(A, length) for _ in range(MIB // length * 64)]
    assert all(extents)
    assert pool.allocate(A, length) is None
    asked: list[int] = []
    real = RangeAllocator.allocate

    def noted(self: RangeAllocator, length_bytes: int) -> int | None:
        asked.append(length_bytes)
        return real(self, length_bytes)

    monkeypatch.setattr(RangeAllocator, "allocate", noted)
    for extent in extents[::7]:
        assert extent is not None
        slab, place = extent.slab, extent.offset_bytes
        pool.free(extent)
        again = pool.allocate(A, length)
        assert again is not None
        assert (again.slab, again.offset_bytes) == (slab, place)
        assert pool.allocate(A, length) is None
    assert len(asked) <= 3 * len(extents[::7])
    pool.close()


def test_what_fits_most_closely_is_taken_from() -> None:
    """So the slabs with most room become empty, and are there for others and for large blocks."""
    pool = SlabPool(2 * MIB, MIB, Buffer)
    first = [pool.allocate(A, 4 * PAGE) for _ in range(MIB // (4 * PAGE))]
    second = pool.allocate(A, 4 * PAGE)
    assert second is not None
    assert first[0] is not None
    assert second.slab is not first[0].slab
    pool.free(first[0])
    found = pool.allocate(A, 4 * PAGE)
    assert found is not None
    assert found.slab is first[1].slab  # type: ignore[union-attr]
    pool.close()


class Model(RuleBasedStateMachine):
    """Extents carry a pattern of their own: overlap, reuse or a lost view shows as wrong bytes."""

    @initialize(slabs=st.integers(1, 4), slab_pages=st.integers(1, 8))
    def begin(self, slabs: int, slab_pages: int) -> None:
        Buffer.living = 0
        self.closed: list[Slab] = []
        self.slab_bytes = slab_pages * PAGE
        self.budget = slabs * self.slab_bytes + 2 * MIB
        self.pool = SlabPool(self.budget, self.slab_bytes, Buffer)
        self.pool.on_close = self.note_close
        self.living: list[tuple[bytes, Extent, bytes]] = []
        self.number = 0

    def note_close(self, slab: Slab) -> None:
        assert all(extent.slab is not slab for _, extent, _ in self.living)
        self.closed.append(slab)

    @rule(owner=st.sampled_from([A, B, C]), length=st.integers(1, 12 * PAGE))
    def allocate(self, owner: bytes, length: int) -> None:
        self._allocate(owner, length)

    @rule(owner=st.sampled_from([A, B]), length=st.integers(MIB - PAGE, 2 * MIB))
    def allocate_large(self, owner: bytes, length: int) -> None:
        self._allocate(owner, length)

    def _allocate(self, owner: bytes, length: int) -> None:
        extent = self.pool.allocate(owner, length)
        if extent is None:
            used = sum(
                {e.slab.number: e.slab.ranges.size_bytes for _, e, _ in self.living}.values()
            )
            need = align_up(length, MIB) if align_up(length) > self.slab_bytes else self.slab_bytes
            assert used + need > self.budget, "there was room"
            return
        assert extent.slab.owner == owner
        assert extent.length_bytes == len(extent.view) == align_up(length)
        assert extent.slab not in self.closed
        self.number += 1
        mark = self.number.to_bytes(4, "little") * (extent.length_bytes // 4)
        extent.view[:] = mark
        self.living.append((owner, extent, mark))

    @precondition(lambda self: self.living)
    @rule(pick=st.integers(0, 1000))
    def free(self, pick: int) -> None:
        _, extent, _ = self.living.pop(pick % len(self.living))
        self.pool.free(extent)

    @precondition(lambda self: self.living)
    @rule(pick=st.integers(0, 1000), part=st.integers(1, 100))
    def shrink(self, pick: int, part: int) -> None:
        at = pick % len(self.living)
        owner, extent, mark = self.living[at]
        self.pool.shrink(extent, max(1, extent.length_bytes * part // 100))
        self.living[at] = (owner, extent, mark[: extent.length_bytes])

    @rule(owner=st.sampled_from([A, B, C]))
    def release_owner(self, owner: bytes) -> None:
        self.pool.release_owner(owner)
        for slab in self.pool._owned.get(owner, []):
            assert not slab.ranges.is_empty

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.mapped_bytes == Buffer.living <= self.budget
        assert self.pool.allocated_bytes == sum(e.length_bytes for _, e, _ in self.living)
        used: Counter[bytes] = Counter()
        for owner, extent, mark in self.living:
            used[owner] += extent.length_bytes
            assert extent.view == mark, "bytes of an extent changed under its owner"
        for owner in (A, B, C):
            assert self.pool.used_bytes(owner) == used[owner]
            assert self.pool.owned_bytes(owner) >= used[owner]
        assert sum(self.pool.owned_bytes(owner) for owner in (A, B, C)) == self.pool.mapped_bytes
        assert len({id(slab) for slab in self.closed}) == len(self.closed), "closed twice"
        self._rooms_are_right()

    def _rooms_are_right(self) -> None:
        """Every slab is where it is looked for, and so are the empty ones."""
        pool, empty = self.pool, set[int]()
        for owner, slabs in pool._owned.items():
            for slab in slabs:
                longest = max((size for _, size in slab.ranges.free_ranges()), default=0)
                assert longest <= slab.ranges.longest_bytes_max
                empty |= {slab.number} if slab.ranges.is_empty else set()
            rooms = sorted((slab.ranges.longest_bytes_max, slab.number) for slab in slabs)
            assert pool._rooms[owner] == rooms
        numbers = {slab.number: slab for slabs in pool._owned.values() for slab in slabs}
        assert pool._slabs == numbers
        assert pool._rooms.keys() == pool._owned.keys()
        assert {slab.number for slab in pool._empty} == empty


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestModel = Model.TestCase
