"""Segments that can be freed, kept by stream and state; and the coldest of them, found cheaply."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_daemon.core.eviction import HEAPS_SPARE, Coldest, SegmentRanking
from entresol_daemon.flash.model import SegmentState
from entresol_daemon.flash.stock import Stock

STATES = (
    SegmentState.FREE, SegmentState.OPEN, SegmentState.SEALED, SegmentState.CONDEMNED,
    SegmentState.FREEING,
)  # fmt: skip


@dataclass(slots=True)
class Seg:
    segment: int
    stream: bytes = b"a"
    sequence: int = 1
    state: SegmentState = SegmentState.FREE
    live_blocks: int = 0
    live_bytes: int = 0
    last_touch: int = 1
    oldest_touch: int = 0
    unread: bool = False


steps = st.lists(
    st.tuples(
        st.integers(0, 7), st.sampled_from(STATES), st.integers(0, 2), st.sampled_from([b"a", b"b"])
    ),
    max_size=60,
)


@given(steps)
def test_every_segment_is_where_its_state_says(
    changes: list[tuple[int, SegmentState, int, bytes]],
) -> None:
    stock: Stock[Seg] = Stock()
    all_of_them = [Seg(number) for number in range(8)]
    for number, state, live, stream in changes:
        each = all_of_them[number]
        if each.state is SegmentState.FREE:
            each.stream = stream  # it changes with a new life only
        each.unread = live == 2
        each.state, each.live_blocks = state, live
        stock.put(each)
        sealed = [s for s in all_of_them if s.state is SegmentState.SEALED]
        assert set(stock.empty) == {s.segment for s in sealed if not s.live_blocks}
        condemned = [s for s in all_of_them if s.state is SegmentState.CONDEMNED]
        assert set(stock.condemned) == {s.segment for s in condemned if not s.unread}
        assert set(stock.unread) == {s.segment for s in condemned if s.unread}
        assert set(stock.idle) == {
            s.segment for s in all_of_them if s.state is SegmentState.OPEN and not s.live_blocks
        }
        for shelves, wanted in (
            (stock.sealed, sealed),
            (stock.opened, [s for s in all_of_them if s.state is SegmentState.OPEN]),
        ):
            found = {n: key for key, shelf in shelves.items() for n in shelf}
            assert found == {s.segment: s.stream for s in wanted if s.live_blocks}
            assert all(shelves.values()), "a stream that has none is not there"


def test_dropping_what_is_nowhere_is_nothing() -> None:
    stock: Stock[Seg] = Stock()
    stock.drop(3)
    stock.put(Seg(3, state=SegmentState.SEALED, live_blocks=1))
    stock.drop(3)
    stock.drop(3)
    assert not stock.sealed


def test_what_rests_is_nowhere_until_it_wakes() -> None:
    stock: Stock[Seg] = Stock()
    each = Seg(3, state=SegmentState.SEALED, live_blocks=1)
    stock.put(each)
    stock.rest(each)
    stock.put(each)
    each.live_blocks = 0
    stock.put(each)
    assert not stock.sealed
    assert not stock.empty
    stock.wake(each)
    assert set(stock.empty) == {3}
    stock.rest(each)
    stock.drop(3)
    assert not stock.resting


moves = st.lists(
    st.tuples(st.integers(0, 11), st.sampled_from(["touch", "free", "empty", "ask"])), max_size=120
)


@settings(max_examples=200)
@given(moves)
def test_the_coldest_is_found_whatever_comes_and_goes(told: list[tuple[int, str]]) -> None:
    stock: Stock[Seg] = Stock()
    coldest = Coldest(lambda each: each.last_touch, lambda each: each.oldest_touch)
    here: dict[int, Seg] = {}
    sequence = 0
    for now, (number, what) in enumerate(told, start=1):
        each = here.get(number)
        if each is None:
            sequence += 1
            each = Seg(
                number, b"a", sequence, SegmentState.SEALED, 1, last_touch=now, oldest_touch=now
            )
            here[number] = each
            stock.put(each)
        elif what == "touch":
            each.last_touch = now
        elif what == "free":
            stock.drop(number)
            del here[number]
        elif what == "empty":  # and filled again, by copies that did not become durable
            each.live_blocks = 0
            stock.put(each)
            each.live_blocks = 1
            stock.put(each)
        if what == "ask" and here:
            found = coldest.of(stock, b"a")
            assert found is here[found.segment]
            assert found.last_touch == min(s.last_touch for s in here.values())


def test_asking_again_and_again_looks_at_few_and_forgets_who_is_gone() -> None:
    stock: Stock[Seg] = Stock()
    ranking = SegmentRanking(lambda number: number)
    for number in range(1_000):
        stream = b"tenant %d" % (number % 200)
        stock.put(Seg(number, stream, 1, SegmentState.SEALED, 1, oldest_touch=number))
    for number in range(1_000):
        stream = b"tenant %d" % (number % 200)
        assert ranking.coldest(stock, stream).segment == number
        stock.drop(number)
    assert ranking.medians_computed == 1_000
    stock.put(Seg(1, b"last", 1, SegmentState.SEALED, 1))
    assert ranking.coldest(stock, b"last").segment == 1
    assert len(ranking._by_median._heaps) <= HEAPS_SPARE + 2, "of 200 tenants that are gone"


def test_what_was_there_at_the_start_is_taken_in_before_anybody_asks() -> None:
    stock: Stock[Seg] = Stock()
    bounds = []

    def bound(each: Seg) -> int:
        bounds.append(each.segment)
        return each.oldest_touch

    for number in range(300):
        stock.put(Seg(number, b"a", 1, SegmentState.SEALED, 1, oldest_touch=300 - number))
    coldest = Coldest(lambda each: each.oldest_touch, bound)  # type: ignore[arg-type]
    coldest.prepare(stock)
    assert sorted(bounds) == list(range(300))
    bounds.clear()
    stock.put(Seg(300, b"a", 1, SegmentState.SEALED, 1, oldest_touch=7))
    assert coldest.of(stock, b"a").segment == 299
    assert bounds == [300]
