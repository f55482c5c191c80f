"""Replays request traces through the daemon's own eviction and admission code.

    python -m bench.eviction_replay TRACE --capacity 0.02,0.05,0.1,0.2 [--segment-blocks 64]

TRACE is a parquet file with run_start/run_len lists (the project's trace set) or a jsonl file with
hash_ids (the Mooncake format). Capacities are shares of the distinct blocks in the file, or counts
of blocks when above 1. Prints one JSON list, an object per capacity.

The model: equal blocks in segments of `--segment-blocks`, every block a request misses is put at
once. Hits are counted twice: any block found, and the usable ones, which are those of the longest
prefix found; only the latter save work. Write amplification is (inserted + reinserted) / inserted.
`--policy lru-r` is the yardstick without segments: LRU per block, tail first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from entresol_daemon.core.admission import Admission, WriteBudget
from entresol_daemon.core.eviction import (
    REINSERT_RATIO,
    ReinsertBudget,
    SegmentRanking,
    TenantShare,
    Victim,
    choose_victim,
    keep_blocks,
    median_touch,
    tail_first,
)

Ints = npt.NDArray[np.int64]
POLICIES = ("median", "segment-lru", "lru-r")
BLOCK_BYTES = 1 << 20  # nominal: all blocks are equal here
NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order. Block ids are dense from 0, each request's in prefix order."""

    name: str
    requests: list[Ints]
    arrivals_ms: list[int]
    tenants: list[int]
    distinct: int


@dataclass(frozen=True, slots=True)
class Options:
    """How to replay."""

    segment_blocks: int = 64
    policy: str = "median"
    forward: bool = False  # touch and insert head first, to see what tail first is worth
    per_tenant: bool = False  # a stream per tenant, equal weights, instead of one stream
    reinsert_ratio: float = REINSERT_RATIO
    write_blocks_per_s: float = 0.0  # 0: no write budget
    admission: str = "auto"


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
    medians: int = 0

    def saw(self, present: npt.NDArray[np.bool_], *, second_half: bool) -> None:
        """Count the lookup of one request."""
        refs = len(present)
        usable = refs if present.all() else int(present.argmin())
        self.refs += refs
        self.found += int(present.sum())
        self.usable += usable
        if second_half:
            self.refs_second_half += refs
            self.usable_second_half += usable


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the report."""

    trace: str
    policy: str
    segment_blocks: int
    capacity: float
    capacity_blocks: int
    usable_hit: float
    usable_hit_second_half: float
    block_hit: float
    write_amplification: float
    writes_per_ref: float
    medians_per_eviction: float


def load(path: Path, *, rows: int | None = None) -> Trace:
    """Read a trace. Raises: OSError, ValueError for a file that is neither kind."""
    lists: list[Ints]
    if path.suffix == ".jsonl":
        parsed = [json.loads(line) for line in path.read_text().splitlines()[:rows]]
        lists = [np.asarray(each["hash_ids"], np.int64) for each in parsed]
        arrivals = [int(each["timestamp"]) for each in parsed]
        tenants = [0] * len(parsed)
    elif path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        table = parquet.read_table(path)
        table = table.slice(0, rows) if rows else table
        runs = zip(table["run_start"].to_pylist(), table["run_len"].to_pylist(), strict=True)
        lists = [_expand(starts, lengths) for starts, lengths in runs]
        arrivals = table["ts_ms"].to_pylist()
        tenants = table["tenant"].to_pylist()
    else:
        raise ValueError(f"{path.name} is neither .parquet nor .jsonl")
    ids, dense = np.unique(np.concatenate(lists), return_inverse=True)
    cuts = np.cumsum([len(each) for each in lists])[:-1]
    requests = np.split(dense.astype(np.int64), cuts)
    return Trace(path.stem, requests, arrivals, tenants, len(ids))


def _expand(starts: Sequence[int], lengths: Sequence[int]) -> Ints:
    """The ids of one request from its runs."""
    if not starts:
        return np.zeros(0, np.int64)
    pairs = zip(starts, lengths, strict=True)
    return np.concatenate([np.arange(s, s + n, dtype=np.int64) for s, n in pairs])


@dataclass(frozen=True, slots=True)
class _State:
    """The part of a segment's state that policies read."""

    value: str


OPEN, SEALED = _State("open"), _State("sealed")


@dataclass(slots=True)
class Segment:
    """One segment of the model; a `SegmentLike`."""

    segment: int
    stream: bytes
    sequence: int
    oldest_touch: int  # of its first block when it came: a lower bound from then on
    last_touch: int = 0
    state: _State = OPEN
    ids: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def live_blocks(self) -> int:
        return len(self.ids)

    @property
    def live_bytes(self) -> int:
        return len(self.ids) * BLOCK_BYTES


class Store:
    """Segments of equal blocks in memory, freed by the daemon's policy. One clock for touches."""

    def __init__(self, trace: Trace, capacity_blocks: int, options: Options) -> None:
        self._size = options.segment_blocks
        self._free = list(range(capacity_blocks // self._size))
        if len(self._free) < 2:
            raise ValueError(f"{capacity_blocks} blocks are fewer than two segments")
        self._capacity_bytes = len(self._free) * self._size * BLOCK_BYTES
        self._segments: dict[int, Segment] = {}
        self._open: dict[bytes, Segment] = {}
        self._used: dict[bytes, int] = {}  # blocks per stream
        self._sequence = 0
        self._where = np.full(trace.distinct, -1, np.int64)
        self._touch = np.zeros(trace.distinct, np.uint64)
        self._position = np.zeros(trace.distinct, np.uint32)
        for ids in trace.requests:
            self._position[ids] = np.arange(len(ids), dtype=np.uint32)
        self._now = 0
        self._budget = ReinsertBudget(ratio=options.reinsert_ratio)
        self._ranking: SegmentRanking | None = None
        if options.policy == "median":
            self._ranking = SegmentRanking(
                lambda segment: median_touch(self._touch[self._segments[segment].ids])
            )
        self.counts = Counts()

    def present(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which of the blocks are stored."""
        return self._where[ids] >= 0

    def touch(self, ids: Ints) -> None:
        """Make stored blocks the most recent, the last one most."""
        ticks = np.arange(self._now + 1, self._now + 1 + len(ids), dtype=np.uint64)
        self._touch[ids] = ticks
        self._now += len(ids)
        numbers, at = np.unique(self._where[ids][::-1], return_index=True)
        for number, back in zip(numbers.tolist(), at.tolist(), strict=True):
            self._segments[number].last_touch = int(ticks[len(ids) - 1 - back])

    def insert(self, stream: bytes, ids: Ints) -> None:
        """Store new blocks in this order, evicting as needed."""
        self._budget.inserted(len(ids) * BLOCK_BYTES)
        self.counts.inserted += len(ids)
        self._touch[ids] = np.arange(self._now + 1, self._now + 1 + len(ids), dtype=np.uint64)
        self._now += len(ids)
        self._append(stream, ids)

    def _append(self, stream: bytes, ids: Ints) -> None:
        while len(ids):
            segment = self._open.get(stream)
            if segment is None or len(segment.ids) == self._size:
                segment = self._open_segment(stream, int(self._touch[ids[0]]))
            room = self._size - len(segment.ids)
            taken, ids = ids[:room], ids[room:]
            segment.ids = np.concatenate([segment.ids, taken])
            segment.oldest_touch = min(segment.oldest_touch, int(self._touch[taken].min()))
            segment.last_touch = max(segment.last_touch, int(self._touch[taken].max()))
            self._where[taken] = segment.segment
            self._used[stream] = self._used.get(stream, 0) + len(taken)

    def _open_segment(self, stream: bytes, touch: int) -> Segment:
        full = self._open.pop(stream, None)
        if full is not None:
            full.state = SEALED
        while not self._free:
            self._evict()
            again = self._open.get(stream)
            if again is not None:  # reinserted blocks opened one
                return again
        self._sequence += 1
        segment = Segment(self._free.pop(), stream, self._sequence, touch)
        self._segments[segment.segment] = segment
        self._open[stream] = segment
        return segment

    def _evict(self) -> None:
        victim = self._victim()
        segment = self._segments.pop(victim.segment)
        self._open = {k: v for k, v in self._open.items() if v is not segment}
        ids = segment.ids
        touch = self._touch[ids]
        mask = np.zeros(len(ids), np.bool_)
        if victim.reinsert:
            mask = keep_blocks(
                touch,
                self._position[ids],
                np.full(len(ids), BLOCK_BYTES, np.uint32),
                now_touch=self._now,
                budget_bytes=self._budget.room_bytes,
            )
        kept = ids[mask]
        self._budget.spend(len(kept) * BLOCK_BYTES)
        self.counts.evictions += 1
        self.counts.reinserted += len(kept)
        self._where[ids] = -1
        self._used[segment.stream] -= len(ids)
        self._free.append(segment.segment)
        self._append(segment.stream, kept[np.argsort(self._touch[kept])])
        if self._ranking is not None:
            self.counts.medians = self._ranking.medians_computed

    def _victim(self) -> Victim:
        shares = [TenantShare(s, used * BLOCK_BYTES) for s, used in self._used.items()]
        victim = choose_victim(
            self._segments.values(),
            shares,
            capacity_bytes=self._capacity_bytes,
            now_touch=self._now,
            ranking=self._ranking,
            budget=self._budget,
        )
        if victim is None:
            raise ValueError("fewer segments than streams: everything is open")
        return victim


def replay(trace: Trace, capacity_blocks: int, options: Options) -> Counts:
    """Run the whole trace through a store of this size."""
    if options.policy == "lru-r":
        return lru(trace, capacity_blocks, forward=options.forward)
    store = Store(trace, capacity_blocks, options)
    budget = None
    if options.write_blocks_per_s:
        rate = int(options.write_blocks_per_s * BLOCK_BYTES)
        budget = WriteBudget(rate, 10 * rate)
    admission = Admission(
        options.admission, budget=budget, ghost_keys_max=max(1, 4 * capacity_blocks)
    )
    half = len(trace.requests) // 2
    for at, ids in enumerate(trace.requests):
        present = store.present(ids)
        store.counts.saw(present, second_half=at >= half)
        stream = (trace.tenants[at] if options.per_tenant else 0).to_bytes(16, "big")
        hits, puts = ids[present], ids[~present]
        if budget is not None or options.admission != "auto":
            now_ns = trace.arrivals_ms[at] * NS_PER_MS
            admitted = [admission.admit(key, BLOCK_BYTES, now_ns) for key in puts.tolist()]
            puts = puts[np.asarray(admitted, np.bool_)]
        if not options.forward:
            hits, puts = tail_first(hits), tail_first(puts)
        if len(hits):
            store.touch(hits)
        store.insert(stream, puts)
    return store.counts


def lru(trace: Trace, capacity_blocks: int, *, forward: bool = False) -> Counts:
    """LRU per block, exact: every reference in turn is a touch or an insertion."""
    counts = Counts()
    stored: OrderedDict[int, None] = OrderedDict()
    half = len(trace.requests) // 2
    for at, ids in enumerate(trace.requests):
        keys = ids.tolist()
        counts.saw(
            np.fromiter((key in stored for key in keys), np.bool_, len(keys)),
            second_half=at >= half,
        )
        for key in keys if forward else reversed(keys):
            if key in stored:
                stored.move_to_end(key)
                continue
            counts.inserted += 1
            stored[key] = None
            if len(stored) > capacity_blocks:
                stored.popitem(last=False)
    return counts


def measure(trace: Trace, capacity: float, options: Options) -> Result:
    """Replay at one capacity (a share of the distinct blocks, or blocks when above 1)."""
    share = capacity <= 1
    blocks = int(capacity * trace.distinct) if share else int(capacity)
    counts = replay(trace, blocks, options)
    return Result(
        trace=trace.name,
        policy=options.policy,
        segment_blocks=options.segment_blocks,
        capacity=capacity,
        capacity_blocks=blocks,
        usable_hit=round(counts.usable / counts.refs, 4),
        usable_hit_second_half=round(counts.usable_second_half / counts.refs_second_half, 4),
        block_hit=round(counts.found / counts.refs, 4),
        write_amplification=round(1 + counts.reinserted / max(1, counts.inserted), 4),
        writes_per_ref=round((counts.inserted + counts.reinserted) / counts.refs, 4),
        medians_per_eviction=round(counts.medians / max(1, counts.evictions), 2),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="python -m bench.eviction_replay", description="Replay a trace through the policies."
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", default="0.02,0.05,0.1,0.2", help="comma-separated")
    parser.add_argument("--segment-blocks", type=int, default=defaults.segment_blocks)
    parser.add_argument("--policy", choices=POLICIES, default=defaults.policy)
    parser.add_argument("--forward", action="store_true", help="head first instead of tail first")
    parser.add_argument("--per-tenant", action="store_true", help="one stream per tenant")
    parser.add_argument("--reinsert-ratio", type=float, default=defaults.reinsert_ratio)
    parser.add_argument("--write-blocks-per-s", type=float, default=0.0, help="write budget")
    parser.add_argument("--admission", choices=("auto", "all", "second_touch"), default="auto")
    parser.add_argument("--rows", type=int, help="only the first requests")
    args = parser.parse_args(argv)
    options = Options(
        segment_blocks=args.segment_blocks,
        policy=args.policy,
        forward=args.forward,
        per_tenant=args.per_tenant,
        reinsert_ratio=args.reinsert_ratio,
        write_blocks_per_s=args.write_blocks_per_s,
        admission=args.admission,
    )
    trace = load(args.trace, rows=args.rows)
    rows = [asdict(measure(trace, float(text), options)) for text in args.capacity.split(",")]
    json.dump(rows, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
