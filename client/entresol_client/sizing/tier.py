"""What a tier has to hold, move and survive: bytes, drives, links, years, memory of the index.

Invariant: every default here is an assumption with a name in `ASSUMED`, or was measured and says
where. Sizes of drives and rates of links are decimal, as they are sold.

Nothing is counted twice for safety: Entresol keeps one copy of a block (losing one costs a
recompute), so there is no replication factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from entresol_client.sizing.shapes import KvShape, SizingError

SECONDS_PER_DAY = 86_400
DAYS_PER_YEAR = 365
INDEX_BYTES_PER_BLOCK = 79  # measured at 5 M blocks (`make bench`, section index)
WRITE_AMPLIFICATION = 1.15  # the most that reinsertion may add (daemon/DESIGN.md, eviction)
# Plain over stored bytes of the `fast` codec, as `python -m bench.codec` measures them on KV of
# two small models (fp16 of full precision; fp8 rounded from it). Not measured on a large one.
MEASURED_RATIOS = {"bf16": 1.44, "fp16": 1.15, "fp8_e4m3": 1.17, "fp8_e5m2": 1.36}
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "fp32": 4}
BLOCKS_MAX = 10**18


@dataclass(frozen=True, slots=True)
class Context:
    """One user's KV, and how it is cut. `shape` is None where bytes per user were given."""

    shape: KvShape | None
    element_bytes: int
    tokens: int
    ranks: int
    every_rank: bool
    windows_only: bool  # of windowed layers only the last window is kept and moved
    block_tokens: int
    user_bytes: int  # 0: follows from the shape
    block_bytes: int  # 0: follows from the shape

    @property
    def stored_token_bytes(self) -> int:
        """Of one token over all ranks that store it; 0 where no shape is known."""
        if self.shape is None:
            return 0
        return self.shape.stored_token_bytes(
            self.element_bytes, self.ranks, every_rank=self.every_rank
        )

    @property
    def copies(self) -> float:
        """How often each element is stored, over all ranks."""
        if self.shape is None:
            return 1.0
        return self.stored_token_bytes / self.shape.token_bytes(self.element_bytes)

    @property
    def whole_bytes(self) -> int:
        """Of one context, every token of every layer."""
        return self.user_bytes or self.tokens * self.stored_token_bytes

    @property
    def needed_bytes(self) -> int:
        """Of one context, what going on from its end needs."""
        if self.shape is None or self.user_bytes:
            return self.whole_bytes
        return round(self.copies * self.shape.needed_bytes(self.tokens, self.element_bytes))

    @property
    def kept_bytes(self) -> int:
        """Of one context, what the tier keeps and moves."""
        return self.needed_bytes if self.windows_only else self.whole_bytes

    @property
    def one_block_bytes(self) -> int:
        """Plain bytes of one block as one rank puts it."""
        if self.block_bytes or self.shape is None:
            return self.block_bytes
        if self.shape.is_latent and not self.every_rank:
            return self.block_tokens * self.shape.token_bytes(self.element_bytes)
        return self.block_tokens * self.shape.rank_token_bytes(self.element_bytes, self.ranks)


@dataclass(frozen=True, slots=True)
class Use:
    """Who uses the tier, and how much. Rates of 0 mean: not told."""

    users: int
    retention: float  # contexts kept per user
    ratio: float  # plain over stored bytes
    turns_per_hour: float  # of each active user
    active_share: float
    hit_rate: float
    answer_tokens: int
    peak: float  # busiest over mean


@dataclass(frozen=True, slots=True)
class Hardware:
    """What it is built of."""

    drive_bytes: int
    drive_writes_per_day: float
    drive_warranty_years: float
    drives_per_shard: int
    shards: int  # 0: as many as the drives need
    link_gbit_per_s: float
    link_share: float  # of a link that payload may take
    headroom: float  # of flash kept free


@dataclass(frozen=True, slots=True)
class Footprint:
    """What lies on flash."""

    plain_bytes: int
    stored_bytes: int
    raw_bytes: int
    drives: int
    shards: int
    blocks: int
    block_bytes: int
    index_bytes: int

    @property
    def index_bytes_per_shard(self) -> int:
        """Memory of a daemon's index."""
        return -(-self.index_bytes // self.shards)


@dataclass(frozen=True, slots=True)
class Flow:
    """What moves, on average, all shards together."""

    turns_per_s: float
    tokens_from_tier_per_s: float
    read_bytes_per_s: float  # sealed, off the tier
    write_bytes_per_s: float  # sealed, onto it
    flash_bytes_per_day: float  # written, with reinsertions
    links: int  # that the busiest moment takes
    drive_writes_per_day: float  # of each drive
    drive_years: float  # until the writes it is warranted for are used up; inf without writes
    stays_days: float  # how long what is written stays before its room is needed; inf


def footprint(context: Context, use: Use, hardware: Hardware) -> Footprint:
    """Capacity. Raises: SizingError."""
    plain = math.ceil(use.users * _exact(use.retention) * context.kept_bytes)
    stored = math.ceil(plain / _exact(use.ratio))
    raw = math.ceil(stored / (1 - _exact(hardware.headroom)))
    drives = max(1, -(-raw // hardware.drive_bytes))
    shards = hardware.shards or -(-drives // hardware.drives_per_shard)
    drives = max(drives, shards)  # none without a drive
    block_bytes = context.one_block_bytes
    blocks = -(-plain // block_bytes) if block_bytes else 0
    if blocks > BLOCKS_MAX:
        raise SizingError("that is more blocks than can be counted", hint="check the quantities")
    return Footprint(
        plain, stored, raw, drives, shards, blocks, block_bytes, blocks * INDEX_BYTES_PER_BLOCK
    )


def _exact(number: float) -> Fraction:
    """What was typed: a float of 17 digits would cost bytes of an exabyte."""
    return Fraction(number).limit_denominator(10**9)


def flow(context: Context, use: Use, hardware: Hardware, held: Footprint) -> Flow | None:
    """Traffic and wear; None where no rate of turns was told."""
    if not use.turns_per_hour:
        return None
    turns_per_s = use.users * use.active_share * use.turns_per_hour / 3600
    read = turns_per_s * use.hit_rate * context.kept_bytes / use.ratio
    new = (1 - use.hit_rate) * context.kept_bytes + use.answer_tokens * context.stored_token_bytes
    write = turns_per_s * new / use.ratio
    link_bytes_per_s = hardware.link_gbit_per_s * 1e9 / 8 * hardware.link_share
    per_day = write * WRITE_AMPLIFICATION * SECONDS_PER_DAY
    drive_writes = per_day / held.drives / hardware.drive_bytes
    warranted = hardware.drive_writes_per_day * hardware.drive_warranty_years
    return Flow(
        turns_per_s=turns_per_s,
        tokens_from_tier_per_s=turns_per_s * use.hit_rate * context.tokens,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        flash_bytes_per_day=per_day,
        links=max(1, math.ceil(use.peak * max(read, write) / link_bytes_per_s)),
        drive_writes_per_day=drive_writes,
        drive_years=warranted / drive_writes if drive_writes else math.inf,
        stays_days=held.stored_bytes / write / SECONDS_PER_DAY if write else math.inf,
    )


def fetch_s(context: Context, use: Use, hardware: Hardware) -> float:
    """How long one context takes over one link that is otherwise idle."""
    link_bytes_per_s = hardware.link_gbit_per_s * 1e9 / 8 * hardware.link_share
    return context.kept_bytes / use.ratio / link_bytes_per_s
