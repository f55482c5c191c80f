"""What the paths of a shard count: Prometheus series and the running totals of `entresol stat`.

Invariant: every block of every request is counted exactly once, as served, missed, stored or
refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from entresol_daemon.compute import Compute
from entresol_daemon.config import Config
from entresol_daemon.core.usefulness import Use, Usefulness
from entresol_daemon.metric_codecs import OTHER, name_of
from entresol_daemon.metrics import Metrics
from entresol_daemon.traces import traces_of
from entresol_proto.ids import TenantName
from entresol_proto.seal.block import SealedHeader
from entresol_proto.seal.dtypes import DType
from entresol_proto.seal.meter import RatioMeter
from entresol_proto.status import Status
from entresol_proto.wire.data import Grant, GrantItem, OpenAt, Tier


@dataclass(slots=True)
class Totals:
    """Counts since this start of the daemon."""

    blocks_served: int = 0
    blocks_missed: int = 0
    blocks_stored: int = 0
    blocks_corrupt: int = 0
    plain_bytes: int = 0  # of blocks stored
    stored_bytes: int = 0
    corrupt_where: dict[str, int] = field(default_factory=dict)


class Meters:
    """Verbs for the paths. All are cheap and never raise."""

    def __init__(self, metrics: Metrics, slots_max: int, config: Config | None = None) -> None:
        """`slots_max`: of the index. Raises: ConfigError for traces that cannot be sent."""
        self.traces = None if config is None else traces_of(config)
        self.metrics = metrics
        self.usefulness = Usefulness(slots_max)
        self.totals = Totals()
        self.ratios = RatioMeter()

    async def close(self, compute: Compute) -> None:
        """Let the last traces go out. Idempotent."""
        traces, self.traces = self.traces, None
        if traces is not None:
            await compute.run(traces.close)

    def granted(
        self,
        tenant: TenantName,
        items: Sequence[GrantItem],
        misses: Sequence[tuple[int, Status]],
        open_at: OpenAt,
    ) -> None:
        """One GRANT frame was sent."""
        if items:
            flash = sum([item.tier is Tier.FLASH for item in items])
            plain = sum([item.plain_bytes for item in items])
            wire = sum([item.span.length_bytes for item in items])
            self.served(tenant, open_at, len(items), flash, plain, wire)
        for status, count in Counter(status for _, status in misses).items():
            self.metrics.misses[tenant, status].inc(count)
        self.totals.blocks_missed += len(misses)

    def served(
        self, tenant: TenantName, open_at: OpenAt, blocks: int, flash: int, plain: int, wire: int
    ) -> None:
        """Blocks were granted, so many of them found on flash; bytes as plain and as sealed."""
        m = self.metrics
        place = "host" if open_at is OpenAt.HOST else "daemon"
        if flash:
            m.blocks_served[tenant, "flash", place].inc(flash)
        if blocks > flash:
            m.blocks_served[tenant, "memory", place].inc(blocks - flash)
        m.payload_bytes[tenant, "get", "plain"].inc(plain)
        m.payload_bytes[tenant, "get", "wire"].inc(wire)
        self.totals.blocks_served += blocks

    def until_first_grant(
        self, emit: Callable[[Grant], None], arrived_ns: int, now_ns: Callable[[], int]
    ) -> Callable[[Grant], None]:
        """`emit`, which also counts how long the first grant with blocks took."""
        waiting = True

        def tell(grant: Grant) -> None:
            nonlocal waiting
            told_ns = now_ns()
            emit(grant)
            if waiting and grant.items:
                waiting = False
                self.metrics.first_grant_seconds.observe((told_ns - arrived_ns) / 1e9)

        return tell

    def shed(self, tenant: TenantName, blocks: int) -> None:
        """A whole request was refused at the door."""
        self.metrics.misses[tenant, Status.BUSY].inc(blocks)
        self.metrics.queue_shed["get"].inc()
        self.totals.blocks_missed += blocks

    def staged(self, statuses: Sequence[Status], elapsed_ns: int) -> None:
        """A batch of reads from flash ended."""
        for status in set(statuses):
            self.metrics.staging_reads[status].inc(statuses.count(status))
        self.metrics.staging_seconds.observe(elapsed_ns / 1e9)

    def flushed(self, status: Status, elapsed_ns: int) -> None:
        """The flash device ended a flush."""
        self.metrics.flash_flushes[status].inc()
        self.metrics.flash_flush_seconds.observe(elapsed_ns / 1e9)

    def puts_ended(self, tenant: TenantName, statuses: Iterable[Status]) -> None:
        """Offered blocks have their answers."""
        for status, count in Counter(statuses).items():
            self.metrics.put_blocks[tenant, status].inc(count)
            if status is Status.QUOTA:
                self.metrics.quota_refusals[tenant, "flash"].inc(count)

    def pulled(self, tenant: TenantName, wire_bytes: int) -> None:
        """Bytes were read from a host."""
        self.metrics.payload_bytes[tenant, "put", "wire"].inc(wire_bytes)

    def stored(
        self, tenant: TenantName, headers: Iterable[SealedHeader], record_bytes: int
    ) -> None:
        """Blocks entered the index; their records take so many bytes."""
        m, totals = self.metrics, self.totals
        kinds: dict[tuple[bytes, DType, int], list[int]] = {}
        for header in headers:
            kind = (header.namespace_id, header.dtype, header.codec_id)
            sums = kinds.setdefault(kind, [0, 0, 0])
            sums[0] += 1
            sums[1] += header.plain_bytes
            sums[2] += header.sealed_bytes
        for (namespace_id, dtype, codec_id), (count, plain_bytes, sealed_bytes) in kinds.items():
            m.payload_bytes[tenant, "put", "plain"].inc(plain_bytes)
            m.record_sealed(dtype.label, plain_bytes, sealed_bytes)
            m.codecs.sealed(dtype, codec_id, count)
            if name_of(codec_id) != OTHER:  # a host may seal with what only it knows
                self.ratios.add(
                    tenant, namespace_id, dtype, codec_id, plain_bytes, sealed_bytes, count
                )
            totals.blocks_stored += count
            totals.plain_bytes += plain_bytes
            totals.stored_bytes += sealed_bytes
        if record_bytes:
            m.payload_bytes[tenant, "put", "stored"].inc(record_bytes)

    def corrupt(self, where: str, blocks: int = 1) -> None:
        """Blocks failed verification at `where` (`metrics.CORRUPT_AT`), and are gone."""
        self.metrics.corrupt_blocks[where].inc(blocks)
        self.totals.blocks_corrupt += blocks
        self.totals.corrupt_where[where] = self.totals.corrupt_where.get(where, 0) + blocks

    def looked_up(self, tenant: TenantName, asked: int, present: int, prefix: int) -> None:
        """An EXISTS was answered."""
        found = self.metrics.worth.looked_up
        for word, count in (
            ("prefix", prefix), ("behind", present - prefix), ("absent", asked - present),
        ):  # fmt: skip
            if count:
                found[tenant, word].inc(count)

    def evicted(self, tenant: TenantName, uses: Sequence[tuple[Use, int]]) -> None:
        """Blocks were evicted: what is known of their use, and what each took on flash."""
        worth = self.metrics.worth
        for use, count in Counter(use for use, _ in uses).items():
            worth.evicted[tenant, use].inc(count)
        unused_bytes = sum(size for use, size in uses if use is Use.UNUSED)
        if unused_bytes:
            worth.evicted_unused_bytes[tenant].inc(unused_bytes)

    def restored(self, tenant: TenantName, age_ns: int) -> None:
        """A block that was evicted is stored again."""
        self.metrics.worth.restored(tenant, max(0, age_ns) / 1e9)

    def removed(self, reason: str, count: int) -> None:
        """Blocks left the index."""
        self.metrics.evicted_blocks[reason].inc(count)
