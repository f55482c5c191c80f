"""Flash as a model: segments of equal blocks, freed by the daemon's policy.

Invariant: a block is in at most one segment; segments are opened, sealed and freed as
`flash.space` and `shard.removal` do it, one stream per tenant. Touches are ticks as `flash.index`
has them: a request's blocks tail first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from entresol_daemon.config import FlashConfig
from entresol_daemon.core.eviction import (
    REINSERT_RATIO,
    ReinsertBudget,
    SegmentRanking,
    TenantShare,
    Victim,
    choose_victim,
    keep_blocks,
    median_touch,
)
from entresol_daemon.core.valuing import Values
from entresol_daemon.core.worth import U64
from entresol_daemon.core.worth_ranking import Columns, WorthRanking
from entresol_daemon.flash.space import keeps_apart
from entresol_daemon.flash.stock import Stock
from entresol_daemon.replay.traces import Blocks, Trace, TraceError

BLOCK_BYTES = 1 << 20  # nominal: all blocks are equal here
POLICIES = ("median", "worth", "segment-lru", "lru")
POLICY_DEFAULT = FlashConfig().eviction  # what daemons do
SEGMENT_BYTES = FlashConfig().segment_bytes
SEGMENT_BLOCKS_MIN = 4  # a daemon stores no block that is larger than a quarter of a segment
SEGMENT_BLOCKS_MAX = 1024
GHOSTS_PER_BLOCK = 16  # of the capacity: as a daemon has with blocks of 1 MiB
_MIX = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True)
class Options:
    """How to replay.

    `policy` "median" and "worth" are the daemon's ([flash] eviction); "segment-lru" frees segments
    by their last touch and keeps nothing; "lru" is the yardstick without segments, LRU per block.
    """

    segment_blocks: int = 32
    policy: str = POLICY_DEFAULT
    forward: bool = False  # touch and insert head first, to see what tail first is worth
    per_tenant: bool = False  # a stream per tenant, equal weights, instead of one stream
    reinsert_ratio: float = REINSERT_RATIO
    write_blocks_per_s: float = 0.0  # 0: no write budget
    admission: str = "auto"


def segment_blocks_of(block_bytes: int) -> int:
    """How many blocks of a trace a daemon's segment holds, of the size that they have by default.

    A block of the trace that is larger than a daemon's may be is several there, side by side.
    """
    return min(SEGMENT_BLOCKS_MAX, max(SEGMENT_BLOCKS_MIN, SEGMENT_BYTES // block_bytes))


@dataclass(slots=True)
class Counts:
    """What a replay saw. Second half: the later half of the requests."""

    refs: int = 0
    found: int = 0
    usable: int = 0
    refs_second_half: int = 0
    usable_second_half: int = 0
    inserted: int = 0
    reinserted: int = 0
    evictions: int = 0

    def saw(self, present: npt.NDArray[np.bool_], *, second_half: bool) -> int:
        """Count the lookup of one request; returns how many blocks of it are usable."""
        refs = len(present)
        usable = refs if present.all() else int(present.argmin())
        self.refs += refs
        self.found += int(present.sum())
        self.usable += usable
        if second_half:
            self.refs_second_half += refs
            self.usable_second_half += usable
        return usable


@dataclass(frozen=True, slots=True)
class _State:
    """The part of a segment's state that policies read."""

    value: str


_OPEN, _SEALED = _State("open"), _State("sealed")


@dataclass(slots=True)
class Segment:
    """One segment of the model; a `core.eviction.SegmentLike`."""

    segment: int
    stream: bytes
    sequence: int
    oldest_touch: int  # of its first block when it came: a lower bound from then on
    last: npt.NDArray[np.int64]  # of all segments
    state: _State = _OPEN
    unread: bool = False
    ids: Blocks = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def live_blocks(self) -> int:
        return len(self.ids)

    @property
    def live_bytes(self) -> int:
        return len(self.ids) * BLOCK_BYTES

    @property
    def last_touch(self) -> int:
        return int(self.last[self.segment])


class Store:
    """Segments of equal blocks in memory. One clock for touches."""

    def __init__(self, trace: Trace, capacity_blocks: int, options: Options) -> None:
        self._size = options.segment_blocks
        count = capacity_blocks // self._size
        if count < 2:
            raise TraceError(
                f"{capacity_blocks:,} blocks are fewer than two segments of {self._size}",
                hint="a larger --capacity, or fewer --segment-blocks",
            )
        self._free = list(range(count))
        self._capacity_bytes = count * self._size * BLOCK_BYTES
        self._last = np.zeros(count, np.int64)
        self._segments: dict[int, Segment] = {}
        self._open: dict[tuple[bytes, bool], Segment] = {}  # by stream, and whether of kept blocks
        self._count = count
        self._used: dict[bytes, int] = {}  # blocks per stream
        self._sequence = 0
        self._where = np.full(trace.distinct, -1, np.int32)
        self._touch = np.zeros(trace.distinct, np.uint64)
        self._position = np.zeros(trace.distinct, np.uint32)
        for ids in trace.requests():
            self._position[ids] = np.arange(len(ids), dtype=np.uint32)
        self._now = 0
        self._budget = ReinsertBudget(ratio=options.reinsert_ratio)
        self._stock: Stock[Segment] = Stock()
        self._keeps = options.policy in ("median", "worth")
        self._values: Values | None = None
        self._keys = _names(trace.distinct)
        if options.policy == "worth":
            ghosts = GHOSTS_PER_BLOCK * capacity_blocks
            self._values = Values(
                trace.distinct, lambda number: self._segments[number].ids, self._columns,
                ghosts=ghosts,
            )  # fmt: skip
        self._ranking = SegmentRanking(
            lambda segment: median_touch(self._touch[self._segments[segment].ids])
        )
        self.counts = Counts()

    def present(self, ids: Blocks) -> npt.NDArray[np.bool_]:
        """Which of the blocks are stored."""
        found: npt.NDArray[np.bool_] = self._where[ids] >= 0
        return found

    def touch(self, stream: bytes, ids: Blocks, *, usable: int) -> None:
        """Make stored blocks the most recent, the last one most; so many of one request are in
        the usable prefix."""
        ticks = np.arange(self._now + 1, self._now + 1 + len(ids))
        self._touch[ids] = ticks
        self._now += len(ids)
        self._last[self._where[ids]] = ticks  # of a segment met again, the later one
        if self._values is not None:
            behind = self._position[ids] >= usable
            for these, found in ((ids[~behind], True), (ids[behind], False)):
                self._tell(stream, these, put=False, found=found)

    def insert(self, stream: bytes, ids: Blocks) -> None:
        """Store new blocks in this order, evicting as needed."""
        self._budget.inserted(len(ids) * BLOCK_BYTES)
        self.counts.inserted += len(ids)
        self._touch[ids] = np.arange(self._now + 1, self._now + 1 + len(ids))
        self._now += len(ids)
        if self._values is not None:
            self._tell(stream, ids, put=True, found=False)
        self._append(stream, ids)

    def _tell(self, stream: bytes, ids: Blocks, *, put: bool, found: bool) -> None:
        assert self._values is not None, "nobody learns"
        if len(ids):
            self._values.told(
                stream, ids, self._keys[ids], self._touch[ids].astype(np.int64),
                np.full(len(ids), put), np.full(len(ids), found),
            )  # fmt: skip

    def _append(self, stream: bytes, ids: Blocks, *, kept: bool = False) -> None:
        while len(ids):
            segment = self._open.get((stream, kept))
            if segment is None or len(segment.ids) == self._size:
                segment = self._open_segment((stream, kept), int(self._touch[ids[0]]))
            room = self._size - len(segment.ids)
            taken, ids = ids[:room], ids[room:]
            segment.ids = np.concatenate([segment.ids, taken])
            touch = self._touch[taken]
            number = segment.segment
            segment.oldest_touch = min(segment.oldest_touch, int(touch.min()))
            self._last[number] = max(int(self._last[number]), int(touch.max()))
            self._stock.put(segment)
            self._where[taken] = number
            self._used[stream] = self._used.get(stream, 0) + len(taken)

    def _open_segment(self, place: tuple[bytes, bool], touch: int) -> Segment:
        full = self._open.pop(place, None)
        if full is not None:
            full.state = _SEALED
            self._stock.put(full)
        while not self._free:
            self._evict()
            again = self._open.get(place)
            if again is not None and len(again.ids) < self._size:  # reinserted blocks opened one
                return again
        self._sequence += 1
        number = self._free.pop()
        self._last[number] = touch
        segment = Segment(number, place[0], self._sequence, touch, self._last)
        self._segments[number] = segment
        self._open[place] = segment
        return segment

    def _evict(self) -> None:
        victim = self._victim()
        segment = self._segments.pop(victim.segment)
        self._stock.drop(victim.segment)
        self._open = {k: v for k, v in self._open.items() if v is not segment}
        ids = segment.ids
        mask = np.zeros(len(ids), np.bool_)
        columns = self._columns(ids)
        room_bytes = self._budget.room_bytes
        keeper = self._values.keeper(segment.stream) if self._values is not None else None
        if victim.reinsert and keeper is not None:
            mask = keeper.keep(columns, now_touch=self._now, room_bytes=room_bytes)
        elif victim.reinsert:
            mask = keep_blocks(
                self._touch[ids],
                self._position[ids],
                np.full(len(ids), BLOCK_BYTES, np.uint32),
                now_touch=self._now,
                budget_bytes=room_bytes,
            )
        kept, gone = ids[mask], ids[~mask]
        if self._values is not None:
            self._values.evicted(segment.stream, gone, self._keys[gone], columns.some_of(~mask))
        self._budget.spend(len(kept) * BLOCK_BYTES)
        self.counts.evictions += 1
        self.counts.reinserted += len(kept)
        self._where[ids] = -1
        self._used[segment.stream] -= len(ids)
        self._free.append(segment.segment)
        others = len(self._open) - ((segment.stream, True) in self._open)
        apart = keeps_apart(others, self._count)
        self._append(segment.stream, kept[np.argsort(self._touch[kept])], kept=apart)

    def _columns(self, ids: Blocks) -> Columns:
        sizes = np.full(len(ids), BLOCK_BYTES, np.uint32)
        uses = np.zeros(len(ids), np.uint8) if self._values is None else self._values.uses[ids]
        return Columns(self._touch[ids], uses, self._position[ids], sizes)

    def _chooser(self, stream: bytes, blocks: int) -> WorthRanking | None:
        return None if self._values is None else self._values.ranking(stream, blocks)

    def _victim(self) -> Victim:
        shares = [
            TenantShare(stream, used * BLOCK_BYTES, used_blocks=used)
            for stream, used in self._used.items()
        ]
        victim = choose_victim(
            self._stock,
            shares,
            capacity_bytes=self._capacity_bytes,
            now_touch=self._now,
            ranking=self._ranking,
            budget=self._budget if self._keeps else None,
            choosers=self._chooser,
        )
        if victim is None:
            raise TraceError(
                "fewer segments than tenants: every one is still written",
                hint="a larger --capacity, or fewer --segment-blocks",
            )
        return victim


def _names(count: int) -> U64:
    """64 bits that look random for each block, as wire keys do."""
    names = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * _MIX
    names = (names ^ (names >> np.uint64(32))) * _MIX
    mixed: U64 = names ^ (names >> np.uint64(29))
    return mixed
