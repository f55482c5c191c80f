"""A whole trace through a store, and what it came to: hits, writes, drive life, time saved.

Invariant: the model is told, not hidden: equal blocks, every block a request misses is put at once
and visible at once, and only prompts are stored (generated tokens when a later prompt has them).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from entresol_daemon.core.admission import Admission, WriteBudget
from entresol_daemon.core.eviction import tail_first
from entresol_daemon.replay.store import BLOCK_BYTES, Counts, Options, Store
from entresol_daemon.replay.traces import Trace, TraceError

NS_PER_MS = 1_000_000
MS_PER_YEAR = 365 * 86_400_000
BURST_S = 10  # of --write-blocks-per-s: a trace is short

Told = Callable[[int, int], None]  # requests done, requests in all


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What turns blocks into bytes, years and seconds. Defaults: Llama-3.1-8B in bf16 (32 layers, 8
    heads of 128); 127,188 tokens of context in 62 s computed or 3 s fetched, as a vendor published
    (see `entresol size`); a drive of one write per day for five years, as large as the tier."""

    token_bytes: int = 131_072
    prefill_tokens_per_s: float = 2_051.0
    fetch_cost: float = 3 / 62  # of the time that computing takes
    drive_writes_per_day: float = 1.0
    drive_warranty_years: float = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the report. Hit rates are shares of block references.

    `drive_years` is how long a drive as large as the capacity lives when it is written like this;
    None when the trace takes no time or writes nothing. `ttft_saved_s` is the mean of all requests.
    """

    capacity: float
    usable_hit: float
    usable_hit_second_half: float
    block_hit: float
    write_amplification: float
    bytes_written: int
    capacity_blocks: int
    capacity_bytes: int
    writes_per_ref: float
    drive_years: float | None
    ttft_saved_s: float
    trace: str
    policy: str
    segment_blocks: int


def _no_telling(done: int, total: int) -> None:
    """Nobody looks."""


def replay(
    trace: Trace, capacity_blocks: int, options: Options, tell: Told = _no_telling
) -> Counts:
    """Run the whole trace through a store of this size. `tell` hears of every request."""
    if options.policy == "lru":
        return lru(trace, capacity_blocks, forward=options.forward, tell=tell)
    store = Store(trace, capacity_blocks, options)
    budget = None
    if options.write_blocks_per_s:
        rate = int(options.write_blocks_per_s * BLOCK_BYTES)
        budget = WriteBudget(rate, BURST_S * rate)
    admission = Admission(
        options.admission, budget=budget, ghost_keys_max=max(1, 4 * capacity_blocks)
    )
    asks = budget is not None or options.admission != "auto"
    alone = not options.per_tenant or len(set(trace.tenants)) == 1
    half = len(trace) // 2
    for at, ids in enumerate(trace.requests()):
        tell(at, len(trace))
        present = store.present(ids)
        usable = store.counts.saw(present, second_half=at >= half)
        stream = (trace.tenants[at] if options.per_tenant else 0).to_bytes(16, "big")
        hits, puts = ids[present], ids[~present]
        if asks:
            now_ns = trace.arrivals_ms[at] * NS_PER_MS
            admitted = [
                admission.admit(key, BLOCK_BYTES, now_ns, owner=stream, alone=alone)
                for key in puts.tolist()
            ]
            puts = puts[np.asarray(admitted, np.bool_)]
        if not options.forward:
            hits, puts = tail_first(hits), tail_first(puts)
        if len(hits):
            store.touch(stream, hits, usable=usable)
        store.insert(stream, puts)
    return store.counts


def lru(
    trace: Trace, capacity_blocks: int, *, forward: bool = False, tell: Told = _no_telling
) -> Counts:
    """LRU per block, exact: every reference in turn is a touch or an insertion."""
    counts = Counts()
    stored: OrderedDict[int, None] = OrderedDict()
    half = len(trace) // 2
    for at, ids in enumerate(trace.requests()):
        tell(at, len(trace))
        keys = ids.tolist()
        there = np.fromiter((key in stored for key in keys), np.bool_, len(keys))
        counts.saw(there, second_half=at >= half)
        for key in keys if forward else reversed(keys):
            if key in stored:
                stored.move_to_end(key)
                continue
            counts.inserted += 1
            stored[key] = None
            if len(stored) > capacity_blocks:
                stored.popitem(last=False)
    return counts


def measure(
    trace: Trace,
    capacity: float,
    options: Options,
    assumed: Assumptions | None = None,
    tell: Told = _no_telling,
) -> Result:
    """Replay at one capacity (a share of the distinct blocks, or blocks when above 1).

    Raises: TraceError where the capacity is too small.
    """
    assumed = assumed or Assumptions()
    blocks = int(capacity * trace.distinct) if capacity <= 1 else int(capacity)
    if blocks < 1:
        raise TraceError(f"a capacity of {capacity:g} holds no block", hint="a larger --capacity")
    counts = replay(trace, blocks, options, tell)
    block_bytes = trace.block_tokens * assumed.token_bytes
    written = (counts.inserted + counts.reinserted) * block_bytes
    rated = blocks * block_bytes * assumed.drive_writes_per_day * 365 * assumed.drive_warranty_years
    years = rated / (written * MS_PER_YEAR / trace.span_ms) if written and trace.span_ms else None
    tokens = counts.usable * trace.block_tokens / len(trace)
    saved_s = tokens / assumed.prefill_tokens_per_s * (1 - assumed.fetch_cost)
    return Result(
        capacity=capacity,
        usable_hit=round(counts.usable / counts.refs, 4),
        usable_hit_second_half=round(
            counts.usable_second_half / max(1, counts.refs_second_half), 4
        ),
        block_hit=round(counts.found / counts.refs, 4),
        write_amplification=round(1 + counts.reinserted / max(1, counts.inserted), 4),
        bytes_written=written,
        capacity_blocks=blocks,
        capacity_bytes=blocks * block_bytes,
        writes_per_ref=round((counts.inserted + counts.reinserted) / counts.refs, 4),
        drive_years=None if years is None else float(f"{years:.4g}"),
        ttft_saved_s=float(f"{saved_s:.4g}"),
        trace=trace.name,
        policy=options.policy,
        segment_blocks=options.segment_blocks,
    )
