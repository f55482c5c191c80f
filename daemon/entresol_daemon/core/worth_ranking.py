"""Which of a tenant's segments is freed, and what of it is kept, by the worth of its blocks. Pure.

The segment goes whose freeing costs least: the worth of what is dropped, and part of that of what
is written again, per byte that becomes free. Kept is what is worth clearly more than what usually
goes (the *price* of room). A segment that was just written may cost least: then what is nearly ripe
stays, and the newest goes.

Invariant: looks at no more than LOOKS segments and LOOK_BLOCKS of each per eviction; the cost of
the others is remembered from earlier looks, and all come up in turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entresol_daemon.core.eviction import SegmentLike
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
        self.holes = Holes()
        self._turn = 0
        self.price = 0.0

    def coldest(
        self, segments: Sequence[SegmentLike], *, now_touch: int, room_bytes: int
    ) -> SegmentLike:
        """The segment to free among these (at least one)."""
        candidates = self._candidates(segments)
        slots = [some_of(self._slots_of(each.segment), LOOK_BLOCKS) for each in candidates]
        counts = np.asarray([len(each) for each in slots])
        costs = self._plan(
            self._columns_of(np.concatenate(slots)), counts, now_touch, room_bytes
        ).cost.tolist()
        for each, cost in zip(candidates, costs, strict=True):
            self._costs[each.segment] = (each.sequence, cost)
        least = min(costs)
        best: SegmentLike = candidates[costs.index(least)]
        self._costs.pop(best.segment, None)
        self.price = self.price + PRICE_STEP * (least - self.price) if self.price else least
        return best

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

    def _candidates(self, segments: Sequence[SegmentLike]) -> Sequence[SegmentLike]:
        """Those that cost least when last seen, and some in turn."""
        if len(segments) <= LOOKS:
            return segments
        costs = []
        for at, each in enumerate(segments):
            sequence, cost = self._costs.get(each.segment, (-1, 0.0))
            costs.append((cost if sequence == each.sequence else 0.0, at))
        chosen = {at for _, at in heapq.nsmallest(LOOKS // 2, costs)}
        chosen |= {(self._turn + step) % len(segments) for step in range(LOOKS // 2)}
        self._turn = (self._turn + LOOKS // 2) % len(segments)
        return [segments[at] for at in sorted(chosen)]
