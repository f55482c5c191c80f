"""Which of a tenant's segments is freed, and what of it is kept, by the worth of its blocks. Pure.

The segment goes whose freeing costs least: the worth of what is dropped, and part of that of what
is written again, per byte that becomes free. Kept is what is worth clearly more than what usually
goes (the *price* of room). A segment that was just written may cost least: then what is nearly ripe
stays, and the newest goes.

Invariant: looks at no more than LOOKS segments and LOOK_BLOCKS of each per eviction, however many
there are; the cost of the others is remembered from earlier looks, and all come up in turn.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entresol_daemon.core.eviction import HEAPS_SPARE, SegmentLike, StockLike, newcomers
from entresol_daemon.core.worth import Holes, Ints, Ledger, Plan, plan

Slots = npt.NDArray[np.signedinteger[Any]]

LOOKS = 48
LOOK_BLOCKS = 64
KEEP_PRICES = 2.0  # kept is what is worth so many times the price
PRICE_STEP = 0.05


@dataclass(frozen=True, slots=True)
class Columns:
    """Of a segment's live blocks."""

    last_touch: npt.NDArray[np.uint64]
    uses: npt.NDArray[np.uint8]
    position: npt.NDArray[np.integer]
    size_bytes: npt.NDArray[np.integer]

    def some_of(self, mask: npt.NDArray[np.bool_]) -> Columns:
        """Those that the mask names."""
        return Columns(
            self.last_touch[mask], self.uses[mask], self.position[mask], self.size_bytes[mask]
        )


def some_of(slots: Slots, most: int) -> Slots:
    """An even selection of at most so many."""
    return slots[:: max(1, -(-len(slots) // most))]


class WorthRanking:
    """Of one tenant. `slots_of` gives a segment's live blocks, `columns_of` what is known of
    them."""

    def __init__(
        self, ledger: Ledger, slots_of: Callable[[int], Slots],
        columns_of: Callable[[Slots], Columns],
    ) -> None:  # fmt: skip
        self.ledger = ledger
        self._slots_of = slots_of
        self._columns_of = columns_of
        self._costs: dict[int, tuple[int, float]] = {}  # segment -> (sequence, cost when last seen)
        self._cheapest: list[tuple[float, int, int]] = []  # a heap: cost, sequence, segment
        self._in_turn: deque[tuple[int, int]] = deque()  # sequence, segment
        self._stamp = 0  # of the segment that came last
        self.holes = Holes()
        self.price = 0.0

    def coldest(
        self, stock: StockLike, stream: bytes, *, now_touch: int, room_bytes: int
    ) -> SegmentLike:
        """The segment to free of a stream that has one; the older one of equals."""
        candidates = self._candidates(stock, stock.sealed[stream])
        slots = [some_of(self._slots_of(each.segment), LOOK_BLOCKS) for each in candidates]
        counts = np.asarray([len(each) for each in slots])
        costs = self._plan(
            self._columns_of(np.concatenate(slots)), counts, now_touch, room_bytes
        ).cost.tolist()
        for each, cost in zip(candidates, costs, strict=True):
            self._costs[each.segment] = (each.sequence, cost)
            heapq.heappush(self._cheapest, (cost, each.sequence, each.segment))
        least, _, at = min(
            (cost, each.sequence, at)
            for at, (each, cost) in enumerate(zip(candidates, costs, strict=True))
        )
        self.price = self.price + PRICE_STEP * (least - self.price) if self.price else least
        return candidates[at]

    def keep(self, columns: Columns, *, now_touch: int, room_bytes: int) -> npt.NDArray[np.bool_]:
        """Which live blocks of the victim to write again."""
        counts = np.asarray([len(columns.uses)])
        return self._plan(columns, counts, now_touch, room_bytes).kept

    def _plan(self, columns: Columns, counts: Ints, now: int, room_bytes: int) -> Plan:
        worth = self.ledger.worth(columns.last_touch, columns.uses, now)
        worth[self.holes.behind(columns.last_touch, columns.position)] = 0.0
        bar = KEEP_PRICES * self.price if self.price else float("inf")
        return plan(
            worth, columns.position, columns.size_bytes, counts, bar=bar, limit_bytes=room_bytes
        )

    def _candidates(
        self, stock: StockLike, shelf: Mapping[int, SegmentLike]
    ) -> Sequence[SegmentLike]:
        """Those that cost least when last seen, and some in turn; who is new costs nothing."""
        self._take_in(stock, shelf)
        if len(shelf) <= LOOKS:
            self._cheapest.clear()
            return list(shelf.values())
        chosen: dict[int, SegmentLike] = {}
        while len(chosen) < LOOKS // 2:
            cost, sequence, number = heapq.heappop(self._cheapest)
            each = shelf.get(number)
            if each is not None and self._costs.get(number) == (sequence, cost) and (
                each.sequence == sequence
            ):  # fmt: skip
                chosen[number] = each
        turns = 0
        while turns < LOOKS // 2:
            sequence, number = self._in_turn.popleft()
            each = shelf.get(number)
            if each is not None and each.sequence == sequence:
                self._in_turn.append((sequence, number))
                chosen[number] = each
                turns += 1
        return list(chosen.values())

    def _take_in(self, stock: StockLike, shelf: Mapping[int, SegmentLike]) -> None:
        """Put who is new in both queues, and keep those who are gone from filling them."""
        for each in reversed(list(newcomers(stock, shelf, self._stamp))):
            self._costs[each.segment] = (each.sequence, 0.0)
            heapq.heappush(self._cheapest, (0.0, each.sequence, each.segment))
            self._in_turn.append((each.sequence, each.segment))
            self._stamp = stock.stamp_of(each.segment)

        def here(sequence: int, number: int) -> bool:
            return number in shelf and shelf[number].sequence == sequence

        if len(self._cheapest) > 4 * len(shelf) + HEAPS_SPARE:
            self._costs = {no: at for no, at in self._costs.items() if here(at[0], no)}
            self._cheapest = [(cost, sequence, no) for no, (sequence, cost) in self._costs.items()]
            heapq.heapify(self._cheapest)
        if len(self._in_turn) > 2 * len(shelf) + HEAPS_SPARE:
            self._in_turn = deque(each for each in dict.fromkeys(self._in_turn) if here(*each))
