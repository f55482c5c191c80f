"""Which segment is freed next, whose it is, and which of its blocks are written again. Pure.

Flash is freed by whole segments, each of one tenant. Two questions, answered apart:

- Who pays (`choose_victim`): a tenant over its quota, with its own segments only; else the tenant
  most over its weighted fair share of what is short: bytes of flash, or entries of the index, which
  a flood of tiny blocks uses up long before the bytes.
- What of the payer's goes (`SegmentRanking`, `keep_blocks`): the segment whose *median* block was
  used longest ago. Half of that segment is older than its median; of the younger half the clearly
  younger blocks are kept, that is written again. On the traces, with room for a tenth of all
  blocks or more, this stays within 0.6 points of LRU per block and rewrites at most a tenth of
  what comes in (`entresol replay`).

Invariants: a tenant within its fair share loses nothing while one over it has a segment to give;
an eviction keeps at most half of the victim's bytes, so it always makes room; reinserted bytes
never exceed the share of inserted bytes that `ReinsertBudget` grants.

Touches are ticks of the index: larger is later. A request's blocks are touched tail first, read or
stored, so that a prefix is never less recent than its suffix and leaves after it.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

# A block is kept when its age is below this share of its segment's median age. The traces' hits are
# flat between 0.7 and 0.95; lower rewrites less, and with few segments a higher one keeps too much.
KEEP_AGE_SHARE = 0.85
REINSERT_RATIO = 0.15  # reinserted bytes per inserted byte: write amplification stays below 1.15
REINSERT_WINDOW_BYTES = 64 << 30  # inserted bytes whose unused grant may be saved up

Slots = TypeVar("Slots", list[int], npt.NDArray[np.int32], npt.NDArray[np.int64])

HEAPS_SPARE = 64  # so many entries that are of no use any more are not worth tidying up


class StateLike(Protocol):
    """A segment's state; `value` is "open" while blocks are appended, "sealed" afterwards."""

    @property
    def value(self) -> str: ...


class SegmentLike(Protocol):
    """What the policies read of a segment (flash.model.SegmentInfo has it).

    `oldest_touch` may be any lower bound of the live blocks' touches.
    """

    @property
    def segment(self) -> int: ...
    @property
    def stream(self) -> bytes: ...
    @property
    def sequence(self) -> int: ...
    @property
    def state(self) -> StateLike: ...
    @property
    def live_blocks(self) -> int: ...
    @property
    def live_bytes(self) -> int: ...
    @property
    def last_touch(self) -> int: ...
    @property
    def oldest_touch(self) -> int: ...


class StockLike(Protocol):
    """Segments that can be freed, by number; see flash.stock.Stock."""

    @property
    def sealed(self) -> Mapping[bytes, Mapping[int, SegmentLike]]: ...
    @property
    def opened(self) -> Mapping[bytes, Mapping[int, SegmentLike]]: ...
    @property
    def empty(self) -> Mapping[int, SegmentLike]: ...
    @property
    def condemned(self) -> Mapping[int, SegmentLike]: ...
    def stamp_of(self, number: int) -> int: ...


class Chooser(Protocol):
    """Chooses among one tenant's segments in another way than by age (core.worth_ranking)."""

    def coldest(
        self, stock: StockLike, stream: bytes, *, now_touch: int, room_bytes: int
    ) -> SegmentLike: ...


Choosers = Callable[[bytes, int], "Chooser | None"]  # by stream, and how many blocks it has


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What one tenant uses and may use of flash. A quota of 0 means no limit of its own.

    To make room for a write, count it into what its tenant uses.
    """

    stream: bytes
    used_bytes: int
    quota_bytes: int = 0
    weight: int = 1
    used_blocks: int = 0
    quota_blocks: int = 0

    def __post_init__(self) -> None:
        assert self.weight >= 1, "a weight starts at 1"

    @property
    def over_quota(self) -> bool:
        """True when the tenant must give up segments of its own whatever the others do."""
        return self.of_quota > 1

    @property
    def of_quota(self) -> float:
        """What is used of the quota that is used up most; 0 without quotas."""
        of_bytes = self.used_bytes / self.quota_bytes if self.quota_bytes else 0.0
        of_blocks = self.used_blocks / self.quota_blocks if self.quota_blocks else 0.0
        return max(of_bytes, of_blocks)

    def used(self, short: Short) -> int:
        """What it uses of what is short."""
        return self.used_bytes if short is Short.BYTES else self.used_blocks


class Short(enum.Enum):
    """What room has to be made of."""

    BYTES = "bytes"
    BLOCKS = "blocks"


class VictimReason(enum.StrEnum):
    """Why this segment: for the log and for metric labels."""

    EMPTY = "empty"  # nothing alive in it: freeing it costs nobody anything
    ORPHAN = "orphan"  # its stream belongs to no tenant any more
    CONDEMNED = "condemned"  # a flush failed: it takes no more writes, its blocks move elsewhere
    OVER_QUOTA = "over_quota"
    OVER_QUOTA_OPEN = "over_quota_open"  # still written; the tenant has no other. Seal it first.
    OVER_SHARE = "over_share"
    OVER_SHARE_OPEN = "over_share_open"  # its entries of the index are all in the one still written
    PRESSURE = "pressure"  # no tenant over its fair share has a segment to give


@dataclass(frozen=True, slots=True)
class Victim:
    """The segment to free and the tenant that pays for it.

    `reinsert` says whether its valued blocks are worth writing again (`keep_blocks`); if not, all
    of them go.
    """

    segment: int
    reason: VictimReason
    charged_stream: bytes
    reinsert: bool = False


class ReinsertBudget:
    """Bounds reinserted bytes to `ratio` of inserted bytes, from the first byte on.

    Grants not used are saved up to `ratio * window_bytes`. The owner reports every byte that
    callers append with `inserted`, and what an eviction kept with `spend`.
    """

    def __init__(
        self, *, ratio: float = REINSERT_RATIO, window_bytes: int = REINSERT_WINDOW_BYTES
    ) -> None:
        assert ratio >= 0, "a budget is not negative"
        self._ratio = ratio
        self._room_bytes_max = ratio * window_bytes
        self._room_bytes = 0.0

    @property
    def room_bytes(self) -> int:
        """Bytes that may be reinserted now."""
        return int(self._room_bytes)

    def inserted(self, length_bytes: int) -> None:
        """New bytes were appended (not reinserted ones)."""
        self._room_bytes = min(self._room_bytes + self._ratio * length_bytes, self._room_bytes_max)

    def spend(self, length_bytes: int) -> None:
        """Bytes were reinserted; never more than `room_bytes`."""
        assert length_bytes <= self._room_bytes, "reinserted more than the budget"
        self._room_bytes -= length_bytes


def newcomers(
    stock: StockLike, shelf: Mapping[int, SegmentLike], last_stamp: int
) -> Iterator[SegmentLike]:
    """Of a stream's sealed segments those that came later than the one of that stamp, the latest
    first."""
    for number in reversed(cast("dict[int, SegmentLike]", shelf)):
        if stock.stamp_of(number) <= last_stamp:
            return
        yield shelf[number]


class Coldest:
    """Of each stream the sealed segment with the least `key`, without looking at all of them.

    Keys only grow, so one seen once is a lower bound from then on: keys are computed in the order
    of their bounds until one turns out to be the least. Where blocks are removed one by one a key
    may fall below its bound; such a segment merely waits until its bound comes up.
    """

    def __init__(
        self, key: Callable[[SegmentLike], int], bound: Callable[[SegmentLike], int]
    ) -> None:
        """`bound` is at most `key`, and cheap: it is asked once, for each segment that comes."""
        self._key = key
        self._bound = bound
        self._heaps: dict[bytes, list[tuple[int, int, int]]] = {}  # bound, sequence, number
        self._stamps: dict[bytes, int] = {}  # of the segment that came last
        self.keys_computed = 0

    def prepare(self, stock: StockLike) -> None:
        """Take in what is there: of a hundred thousand that takes long, once."""
        for stream, shelf in stock.sealed.items():
            self._with_new(stock, stream, shelf)

    def of(self, stock: StockLike, stream: bytes) -> SegmentLike:
        """The segment of a stream that has one; the older one of equals."""
        shelf = stock.sealed[stream]
        heap = self._with_new(stock, stream, shelf)
        known: dict[int, int] = {}
        while True:
            bound, sequence, number = heap[0]
            each = shelf.get(number)
            if each is None or each.sequence != sequence:
                heapq.heappop(heap)  # it was freed
            elif known.get(number) == bound:
                return each
            else:
                key = known[number] = self._key(each)
                self.keys_computed += 1
                heapq.heapreplace(heap, (key, sequence, number))

    def _with_new(
        self, stock: StockLike, stream: bytes, shelf: Mapping[int, SegmentLike]
    ) -> list[tuple[int, int, int]]:
        if len(self._heaps) > 2 * len(stock.sealed) + HEAPS_SPARE:  # of tenants that are gone
            for gone in self._heaps.keys() - stock.sealed.keys():
                del self._heaps[gone], self._stamps[gone]
        heap, last = self._heaps.setdefault(stream, []), self._stamps.get(stream, 0)
        if len(heap) > 2 * len(shelf) + HEAPS_SPARE:  # of segments that are gone
            heap.clear()
            last = 0
        new = [
            (self._bound(each), each.sequence, each.segment)
            for each in newcomers(stock, shelf, last)
        ]
        if new:
            self._stamps[stream] = stock.stamp_of(new[0][2])
        if len(new) > HEAPS_SPARE:
            heap += new
            heapq.heapify(heap)
        else:
            for entry in new:
                heapq.heappush(heap, entry)
        return heap


class SegmentRanking:
    """Finds a stream's segment with the least recent median touch, computing few medians, and the
    one whose last touch is oldest.

    `median_of` gives the median touch of a segment's live blocks (see `median_touch`).
    """

    def __init__(self, median_of: Callable[[int], int]) -> None:
        self._by_median = Coldest(
            lambda each: median_of(each.segment), lambda each: each.oldest_touch
        )
        self._by_last_touch = Coldest(lambda each: each.last_touch, lambda each: each.oldest_touch)

    def prepare(self, stock: StockLike) -> None:
        """Take in what is there, so that the first eviction need not."""
        self._by_median.prepare(stock)
        self._by_last_touch.prepare(stock)

    @property
    def medians_computed(self) -> int:
        """Since the start."""
        return self._by_median.keys_computed

    def coldest(self, stock: StockLike, stream: bytes) -> SegmentLike:
        """The segment to free, by the median; the older one of equals."""
        return self._by_median.of(stock, stream)

    def least_recent(self, stock: StockLike, stream: bytes) -> SegmentLike:
        """The segment to free, by its last touch; the older one of equals."""
        return self._by_last_touch.of(stock, stream)


def median_touch(last_touch: npt.NDArray[np.unsignedinteger]) -> int:
    """The median of a segment's live blocks; of two middle ones the less recent. 0 if empty."""
    count = len(last_touch)
    if not count:
        return 0
    middle = (count - 1) // 2
    return int(np.partition(last_touch, middle)[middle])


def choose_victim(
    stock: StockLike,
    shares: Collection[TenantShare],
    *,
    capacity_bytes: int,
    now_touch: int,
    ranking: SegmentRanking,
    budget: ReinsertBudget | None = None,
    short: Short = Short.BYTES,
    capacity_blocks: int = 0,
    choosers: Choosers | None = None,
    only: bytes | None = None,
) -> Victim | None:
    """The next segment to free, or None when nothing may be evicted.

    Only sealed segments are chosen, except for a tenant over its quota, or over its share of blocks
    where these are short, that has nothing but its open one, and condemned ones, which go first:
    their space is of no use until they are freed.
    `capacity_bytes` is what tenants share, `capacity_blocks` where blocks are `short`. Without a
    `budget` nothing is written again; while it could not pay for what the ranked victim may keep,
    the segment whose last touch is oldest is taken (segment LRU), whole. Where `choosers` has one
    for the tenant, that one chooses, and keeps. `only` names a stream that gives up its own.
    """
    mine = [each for each in stock.empty.values() if only in (None, each.stream)]
    if mine:
        return Victim(mine[0].segment, VictimReason.EMPTY, mine[0].stream)
    bad = [each for each in stock.condemned.values() if only in (None, each.stream)]
    if bad:
        worst = min(bad, key=lambda each: (each.live_bytes, each.segment))
        return Victim(worst.segment, VictimReason.CONDEMNED, worst.stream, reinsert=True)
    tenants = [each for each in shares if only in (None, each.stream)]

    def pick(tenant: TenantShare, reason: VictimReason) -> Victim:
        chosen, reinsert = _coldest(stock, tenant, ranking, budget, choosers, now_touch)
        assert chosen.last_touch <= now_touch, "a block was touched in the future"
        return Victim(chosen.segment, reason, tenant.stream, reinsert)

    orphans = stock.sealed.keys() - {tenant.stream for tenant in shares}
    if orphans and only is None:
        stream = min(orphans)
        return Victim(next(iter(stock.sealed[stream])), VictimReason.ORPHAN, stream)
    over_quota = [tenant for tenant in tenants if tenant.over_quota]
    for tenant in sorted(over_quota, key=lambda t: (-t.of_quota, t.stream)):
        if tenant.stream in stock.sealed:
            return pick(tenant, VictimReason.OVER_QUOTA)
        if tenant.stream in stock.opened:
            return Victim(_fullest(stock, tenant), VictimReason.OVER_QUOTA_OPEN, tenant.stream)
    capacity = capacity_bytes if short is Short.BYTES else capacity_blocks
    for tenant in sorted(tenants, key=lambda t: (-t.used(short) / t.weight, t.stream)):
        over = tenant.used(short) > fair_share(tenant, shares, capacity, short)
        if tenant.stream in stock.sealed:
            return pick(tenant, VictimReason.OVER_SHARE if over else VictimReason.PRESSURE)
        if over and short is Short.BLOCKS and tenant.stream in stock.opened:
            # Tiny blocks fill the index before they fill a segment.
            return Victim(_fullest(stock, tenant), VictimReason.OVER_SHARE_OPEN, tenant.stream)
    return None


def _fullest(stock: StockLike, tenant: TenantShare) -> int:
    """Of a tenant's open segments."""
    found = stock.opened[tenant.stream].values()
    return max(found, key=lambda each: (each.live_blocks, each.segment)).segment


def _coldest(
    stock: StockLike,
    tenant: TenantShare,
    ranking: SegmentRanking,
    budget: ReinsertBudget | None,
    choosers: Choosers | None,
    now_touch: int,
) -> tuple[SegmentLike, bool]:
    """A tenant's segment to free, and whether to reinsert from it."""
    stream = tenant.stream
    if choosers is not None:
        chooser = choosers(stream, tenant.used_blocks)
        if chooser is not None:
            room_bytes = budget.room_bytes if budget is not None else 0
            return chooser.coldest(stock, stream, now_touch=now_touch, room_bytes=room_bytes), True
    if budget is not None:
        chosen = ranking.coldest(stock, stream)
        if budget.room_bytes >= chosen.live_bytes // 2:
            return chosen, True
    return ranking.least_recent(stock, stream), False


def fair_share(
    tenant: TenantShare, tenants: Iterable[TenantShare], capacity: int, short: Short = Short.BYTES
) -> float:
    """What this tenant may hold when all want more: capacity by weight among those using any."""
    weights = sum(each.weight for each in tenants if each.used(short) > 0 or each is tenant)
    return capacity * tenant.weight / weights


def keep_blocks(
    last_touch: npt.NDArray[np.unsignedinteger],
    position: npt.NDArray[np.unsignedinteger],
    sealed_bytes: npt.NDArray[np.unsignedinteger],
    *,
    now_touch: int,
    budget_bytes: int,
) -> npt.NDArray[np.bool_]:
    """Which live blocks of a victim to write again, as a mask over the given columns.

    Kept is what is clearly younger than the median (KEEP_AGE_SHARE), the most recent first, as far
    as `budget_bytes` and half of the victim's bytes go. Cutting there leaves no hole in a prefix,
    because prefixes are more recent than their suffixes. Spend the kept bytes on the budget.
    """
    mask = np.zeros(len(last_touch), np.bool_)
    if not len(mask) or budget_bytes <= 0:
        return mask
    age = now_touch - last_touch.astype(np.int64)
    assert age.min() >= 0, "a block was touched in the future"
    order = np.lexsort((position, age))
    order = order[age[order] < KEEP_AGE_SHARE * (now_touch - median_touch(last_touch))]
    sizes = sealed_bytes.astype(np.int64)
    limit_bytes = min(budget_bytes, int(sizes.sum()) // 2)
    mask[order[np.cumsum(sizes[order]) <= limit_bytes]] = True
    return mask


def tail_first(slots_in_prefix_order: Slots) -> Slots:
    """The order in which a request's blocks are inserted and touched: the last block first.

    The first block of the prefix becomes the most recent, which makes plain LRU drop suffixes
    before their prefixes.
    """
    return slots_in_prefix_order[::-1]
