"""Every metric of the daemon, in one place: names, labels, children bound ahead of the hot path.

Invariants owned here: the number of series is bounded whatever tenants do (labels have closed
domains; tenants past `TENANT_LABELS_MAX` share the label "_other"; keys, namespaces and addresses
are never labels), nothing is global (own registry), and METRICS.md lists exactly what is here.

Hot paths use bound children: `metrics.requests[FrameType.FETCH, Status.OK].inc()` is a dict look-up
and an increment; only the first use of a combination goes through prometheus' `labels()`.
Updates are thread-safe; `refresh` and `follow` belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from entresol_daemon.control.admin import ShardState
from entresol_daemon.events.types import GapReason, Kind, Reason
from entresol_daemon.metric_codecs import DTYPES, OTHER, CodecMetrics
from entresol_daemon.metric_families import Domain, Family, Spec, table
from entresol_daemon.metric_makers import Makers
from entresol_daemon.metric_quotes import QuoteMetrics
from entresol_daemon.metric_worth import WorthMetrics
from entresol_proto.fabric.base import FabricKind
from entresol_proto.status import Status
from entresol_proto.wire.frames import FrameType

log = logging.getLogger("entresol.metrics")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_ANSWER = 64  # frame types from here on are answers, not requests
REQUEST_TYPES = tuple(kind.name.lower() for kind in FrameType if kind < _FIRST_ANSWER)
STATUSES = tuple(status.label for status in Status)
FABRICS = tuple(kind.label for kind in FabricKind)
TIERS = ("memory", "flash")
OPEN_AT = ("host", "daemon")
OPERATIONS, FLASH_OPERATIONS = ("get", "put"), ("read", "write", "flush")
FORMS = ("plain", "wire", "stored")
QUEUES = (
    "get", "hello", "loop", "flash_read", "flash_write", "compute", "pull", "put", "stage", "send",
)  # fmt: skip
DRAM_STATES = ("unassigned", "free", "loading", "ready", "dead")
SEGMENT_STATES = ("free", "open", "sealed", "condemned", "unread")
OF_HOSTS = (Reason.HOST_REPORT.label, "seal")  # corrupt by what a host said, or stored
CORRUPT_AT = (Reason.HEADER.label, Reason.FLASH.label, *OF_HOSTS, "scrub")
SCRUB_FOUND = (Status.CORRUPT.label, Status.IO_ERROR.label)
ROTATION_CAUSES = ("asked", "limit", "age", "forced")
QUOTA_RESOURCES = ("flash", "get", "leases", "sessions")

_STATUS_DOMAIN = Domain(STATUSES, words="status labels")
# Why a connection can end before its session opens; whatever else it were would be a bug of ours.
_REFUSALS = Domain(
    ("bad_request", "busy", "deadline", "disconnected", "forbidden", "internal",
     "too_large", "unsupported"),
    fallback="internal",
)  # fmt: skip


class _WithoutCreated:
    """A registry's metrics without the `_created` series, which double the page for no use."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class Metrics:
    """All metrics of one daemon. Labelled ones are `Family` attributes, the others are plain."""

    def __init__(self, *, version: str = "", shard: str = "") -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.specs: list[Spec] = []
        self._make = make = Makers(self.registry, self.specs)
        self._tenants = make.tenants
        self._hooks: list[Callable[[], None]] = []
        self._sealed: dict[str, tuple[int, int]] = {}  # dtype label: plain, stored bytes
        self._define_requests()
        self._define_tenants()
        self._define_keys()
        self._define_storage()
        self._define_care()
        self._define_process()
        self.quotes = QuoteMetrics(make)
        self.codecs = CodecMetrics(make)
        self.worth = WorthMetrics(make)
        ProcessCollector(namespace="entresol", registry=self.registry)
        info = self._make.gauges(
            "build_info",
            "Always 1: says what runs here.",
            version=Domain((version,), words="of the daemon"),
            shard=Domain((shard,), words="its name"),
        )
        info[version, shard].set(1)

    # ------------------------------------------------------------------------- definitions

    def _define_requests(self) -> None:
        types = Domain(REQUEST_TYPES, words="request frame types, lower case")
        statuses = _STATUS_DOMAIN
        self.sessions = self._make.gauges("sessions", "Open sessions.", fabric=Domain(FABRICS))
        self.sessions_opened = self._make.counters(
            "sessions_opened_total", "Sessions that reached the open state.", fabric=Domain(FABRICS)
        )
        self.sessions_refused = self._make.counters(
            "sessions_refused_total", "Connections ended before opening.", eager=True,
            status=_REFUSALS,
        )  # fmt: skip
        self.requests = self._make.counters(
            "requests_total", "Requests answered.", type=types, status=statuses
        )
        self.request_seconds = self._make.histograms(
            "request_seconds", "From a request's last byte to its last answer.", type=types
        )
        self.first_grant_seconds = self._make.histogram(
            "first_grant_seconds", "From a fetch's last byte to its first grant."
        )
        self.grants_carried = self._make.counter(
            "grants_carried_total", "Grants that had their blocks in them; there is no lease."
        )
        self.leases = self._make.gauge("leases", "Leases granted and neither released nor expired.")
        self.leased_bytes = self._make.gauge("leased_bytes", "Memory under leases of hosts.")
        self.leases_expired = self._make.counter(
            "leases_expired_total", "Leases that ran out before their release."
        )
        self.queue_depth = self._make.gauges(
            "queue_depth",
            "Entries waiting in a bounded queue; `send`: sessions whose host takes no answers.",
            queue=Domain(QUEUES),
        )
        self.queue_shed = self._make.counters(
            "queue_shed_total", "Entries refused because the queue was full.", eager=True,
            queue=Domain(QUEUES),
        )  # fmt: skip

    def _define_tenants(self) -> None:
        tenant, statuses = self._tenants, _STATUS_DOMAIN
        self.blocks_served = self._make.counters(
            "blocks_served_total",
            "Blocks granted, by where they were found and who opens them.",
            tenant=tenant,
            tier=Domain(TIERS),
            open_at=Domain(OPEN_AT),
        )
        self.misses = self._make.counters(
            "blocks_missed_total",
            "Blocks not served, by cause (a status label).",
            tenant=tenant,
            cause=statuses,
        )
        self.put_blocks = self._make.counters(
            "put_blocks_total", "Blocks offered for storing.", tenant=tenant, status=statuses
        )
        self.payload_bytes = self._make.counters(
            "payload_bytes_total",
            "Block bytes: plain as the engine sees them, wire as moved over the fabric, stored as "
            "padded on flash.",
            tenant=tenant,
            operation=Domain(OPERATIONS),
            form=Domain(FORMS),
        )
        self.tenant_flash_bytes = self._make.gauges(
            "tenant_flash_bytes", "Live bytes on flash.", tenant=tenant
        )
        self.tenant_dram_bytes = self._make.gauges(
            "tenant_dram_bytes", "Bytes of slabs owned.", tenant=tenant
        )
        held = (
            ("index_blocks", "Blocks in the index."),
            ("get_bytes", "Memory leased to its hosts or being staged for them."),
            ("put_bytes", "Puts reserved and not yet on flash."),
            ("sessions", "Open sessions."),
            ("leases", "Leases granted and neither released nor expired."),
            ("event_watchers", "Consumers that follow its events."),
        )
        self.tenant_holds = {n: self._make.gauges(f"tenant_{n}", t, tenant=tenant) for n, t in held}
        self.quota_refusals = self._make.counters(
            "quota_refusals_total",
            "Blocks and sessions refused because a tenant has what it may have.",
            tenant=tenant,
            resource=Domain(QUOTA_RESOURCES),
        )
        self.tenants = self._make.gauge("tenants", "Tenants in the keyring.")
        dtypes = Domain(DTYPES, fallback=OTHER)
        self.sealed_plain_bytes = self._make.counters(
            "sealed_plain_bytes_total", "Bytes of blocks before compression.", dtype=dtypes
        )
        self.sealed_stored_bytes = self._make.counters(
            "sealed_stored_bytes_total", "Bytes of blocks after compression.", dtype=dtypes
        )
        self.compression_ratio = self._make.gauges(
            "compression_ratio", "Plain over sealed bytes since the start.", dtype=dtypes
        )

    def _define_keys(self) -> None:
        tenant = self._tenants
        self.key_version = self._make.gauges(
            "tenant_key_version", "Version of the data key that seals.", tenant=tenant
        )
        self.key_versions = self._make.gauges(
            "tenant_key_versions", "Versions of the data key that are kept.", tenant=tenant
        )
        self.old_key_blocks = self._make.gauges(
            "tenant_old_key_blocks", "Stored blocks that need an older version.", tenant=tenant
        )
        self.uncounted_key_blocks = self._make.gauges(
            "tenant_uncounted_key_blocks",
            "Stored blocks whose version is not known yet: found at start, not read since.",
            tenant=tenant,
        )
        self.key_rotations = self._make.counters(
            "key_rotations_total",
            "New versions of data keys, by cause.",
            eager=True,
            cause=Domain(ROTATION_CAUSES),
        )

    def _define_storage(self) -> None:
        statuses, reasons = _STATUS_DOMAIN, Domain(tuple(r.label for r in Reason))
        self.dram_bytes = self._make.gauges(
            "dram_bytes", "The memory budget, by what it is used for.", state=Domain(DRAM_STATES)
        )
        self.opened_bytes = self._make.gauge(
            "opened_bytes", "Memory that holds, or is kept for, blocks opened for hosts."
        )
        self.staging_reads = self._make.counters(
            "staging_reads_total", "Blocks read from flash into memory.", status=statuses
        )
        self.staging_seconds = self._make.histogram(
            "staging_read_seconds", "From asking for a block on flash to having it in memory."
        )
        self.staging_in_flight = self._make.gauge(
            "staging_reads_in_flight", "Blocks being read from flash."
        )
        self.flash_capacity_bytes = self._make.gauge(
            "flash_capacity_bytes", "Size of the flash slice."
        )
        self.flash_live_bytes = self._make.gauge(
            "flash_live_bytes", "Bytes of records still indexed."
        )
        self.flash_written_bytes = self._make.counter(
            "flash_written_bytes_total",
            "Bytes written to flash, with headers, reinsertions and what a start writes again.",
        )
        self.flash_read_bytes = self._make.counter(
            "flash_read_bytes_total", "Bytes read from flash."
        )
        self.flash_blocks = self._make.gauge("flash_blocks", "Blocks in the index.")
        self.flash_flushes = self._make.counters(
            "flash_flushes_total", "Flushes of the flash device.", status=statuses
        )
        self.flash_flush_seconds = self._make.histogram("flash_flush_seconds", "Time of one flush.")
        self.flash_refusals = self._make.counters(
            "flash_refusals_total",
            "Transfers that the flash device refused: reads, batches of writes, flushes.",
            eager=True,
            operation=Domain(FLASH_OPERATIONS),
        )
        self.flash_segments = self._make.gauges(
            "flash_segments", "Segments by state.", state=Domain(SEGMENT_STATES)
        )
        self.evicted_blocks = self._make.counters(
            "evicted_blocks_total", "Blocks that left the index, by reason.", reason=reasons
        )
        self.reinserted_blocks = self._make.counter(
            "reinserted_blocks_total", "Blocks written again because the policy values them."
        )
        self.reinserted_bytes = self._make.counter(
            "reinserted_bytes_total", "Bytes of blocks written again."
        )
        self.corrupt_blocks = self._make.counters(
            "corrupt_blocks_total",
            "Blocks that failed verification, by where it was found; each became a miss. `seal`, "
            "`host_report`: they do not open, and their hosts may be why.",
            eager=True,
            where=Domain(CORRUPT_AT),
        )
        self.host_reports_lost = self._make.counters(
            "host_reports_lost_total",
            "Blocks that hosts said do not open while as many as may waited to be looked at.",
            tenant=self._tenants,
        )

    def _define_care(self) -> None:
        self.scrubbed_bytes = self._make.counter(
            "scrubbed_bytes_total", "Bytes the scrubber verified."
        )
        self.scrub_cycles = self._make.counter("scrub_cycles_total", "Times the scrubber read all.")
        self.scrub_cycle_seconds = self._make.gauge(
            "scrub_cycle_seconds", "How long the last scrub took, pauses and restarts included."
        )
        self.scrub_began = self._make.gauge(
            "scrub_began_seconds",
            "When the present scrub began, or the last, in seconds since 1970; 0: none yet.",
        )
        self.scrub_expected = self._make.gauge(
            "scrub_cycle_expected_seconds",
            "How long a scrub takes with what is on flash, at the configured rate; at least a day.",
        )
        self.scrub_progress = self._make.gauge(
            "scrub_progress", "Share of the present scrub that is done; 0 between two."
        )
        self.scrub_found = self._make.counters(
            "scrub_found_total",
            "Blocks the scrubber dropped: damaged, or refused by the device for good.",
            eager=True,
            what=Domain(SCRUB_FOUND),
        )
        self.recovery_seconds = self._make.gauge(
            "recovery_seconds", "How long the last recovery of the index took."
        )
        self.recovered_blocks = self._make.gauge(
            "recovered_blocks", "Blocks found by the last recovery of the index."
        )

    def _define_process(self) -> None:
        self.events_published = self._make.counters(
            "events_published_total",
            "Events appended to the log.",
            kind=Domain(tuple(kind.label for kind in Kind)),
        )
        self.event_gaps = self._make.counters(
            "event_consumers_dropped_total",
            "Watches, and snapshots that were followed, ended with a gap, by reason.",
            eager=True,
            reason=Domain(tuple(reason.label for reason in GapReason)),
        )
        self.event_subscriptions = self._make.gauge(
            "event_subscriptions", "Open event subscriptions."
        )
        self.event_log_bytes = self._make.gauge("event_log_bytes", "Memory of the events held.")
        self.tls_reloads = self._make.counter("tls_reloads_total", "New certificates taken over.")
        self.tls_reload_failures = self._make.counter(
            "tls_reload_failures_total", "New certificates that could not be used."
        )
        self.tls_stale = self._make.gauge(
            "tls_files_unusable", "1 while the TLS files cannot be used, and older ones serve."
        )
        self.tls_not_after = self._make.gauge(
            "tls_not_after_seconds",
            "When the certificate in force ends, or the last CA if sooner, in seconds since 1970.",
        )
        self.state = self._make.gauges(
            "state",
            "1 for the state the shard is in, 0 for the others.",
            eager=True,
            state=Domain(tuple(state.name.lower() for state in ShardState)),
        )
        self.loop_lag_seconds = self._make.histogram(
            "event_loop_lag_seconds", "How much later than asked the event loop ran a timer."
        )
        self.loop_lag_max_seconds = self._make.gauge(
            "event_loop_lag_max_seconds",
            "The longest delay of the event loop in the last minute or two.",
        )
        self.malloc_bytes = self._make.gauge(
            "malloc_bytes",
            "Memory in use that came from the C library: all but slabs, small objects and stacks.",
        )
        self.python_objects = self._make.gauge(
            "python_objects", "Objects of up to 512 bytes, by the interpreter's own count."
        )
        self.tasks = self._make.gauge("tasks", "Tasks of the event loop.")
        self.loop_stalls = self._make.counter(
            "event_loop_stalls_total", "Times the event loop hung; the log says where."
        )
        self.process_starved = self._make.counter(
            "starved_total", "Times the whole process could not run: an overloaded machine."
        )
        self.log_lines_dropped = self._make.counter(
            "log_lines_dropped_total", "Log lines lost because standard error is read too slowly."
        )

    # ------------------------------------------------------------------------------ verbs

    def event_gap(self, reason: GapReason) -> None:
        """For `EventLog(on_gap=...)`."""
        self.event_gaps[reason].inc()

    def record_sealed(self, dtype: str, plain_bytes: int, stored_bytes: int) -> None:
        """Count one block sealed, and keep the honest ratio of its dtype."""
        label = dtype if dtype in DTYPES else OTHER
        self.sealed_plain_bytes[label].inc(plain_bytes)
        self.sealed_stored_bytes[label].inc(stored_bytes)
        plain, stored = self._sealed.get(label, (0, 0))
        self._sealed[label] = (plain + plain_bytes, stored + stored_bytes)

    def set_tenant_bytes(self, flash: Mapping[str, int], dram: Mapping[str, int]) -> None:
        """Show what every tenant holds now; tenants without a label of their own are added up."""
        self.set_tenants(self.tenant_flash_bytes, flash)
        self.set_tenants(self.tenant_dram_bytes, dram)

    def set_tenants(self, family: Family[Gauge], found: Mapping[str, float]) -> None:
        """Show a number of every tenant; those without a label of their own are added up."""
        sums: dict[str, float] = {}
        for tenant, count in found.items():
            label = self._tenants.label(tenant)
            sums[label] = sums.get(label, 0) + count
        for gone in family.keys() - sums.keys():
            family[gone].set(0)
        for label, count in sums.items():
            family[label].set(count)

    def set_state(self, state: ShardState) -> None:
        """Show `state` and no other."""
        for other in ShardState:
            self.state[other].set(other is state)

    def forget_tenant(self, tenant: str) -> None:
        """Drop an erased tenant's series and free its label."""
        for family in self._make.tenant_families:
            family.forget(tenant)
        self._tenants.names.discard(tenant)

    def follow(self, metric: Counter | Gauge, read: Callable[[], float]) -> None:
        """Bring `metric` up to `read()` at every refresh; a counter takes only what was added."""
        if isinstance(metric, Gauge):
            self._hooks.append(lambda: metric.set(read()))
            return
        seen = 0.0

        def add_new() -> None:
            nonlocal seen
            now = read()
            if now > seen:
                metric.inc(now - seen)
                seen = now

        self._hooks.append(add_new)

    def on_refresh(self, hook: Callable[[], None]) -> None:
        """Call `hook` at every refresh, for gauges whose label values come and go."""
        self._hooks.append(hook)

    def refresh(self) -> None:
        """Read everything followed. On the event loop, right before `render`. Never raises."""
        for hook in self._hooks:
            try:
                hook()
            except Exception:  # one broken reader must not hide all other metrics
                log.exception("event=metric_refresh_failed")
        for dtype, (plain, stored) in self._sealed.items():
            if stored:
                self.compression_ratio[dtype].set(plain / stored)

    def render(self) -> bytes:
        """The page for Prometheus (`CONTENT_TYPE`). Any thread; milliseconds of work."""
        return generate_latest(_WithoutCreated(self.registry))


class LoopLagProbe:
    """Measures how late the event loop runs a timer, for as long as it is started."""

    def __init__(self, histogram: Histogram, *, interval_s: float = 0.25) -> None:
        self._histogram = histogram
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; call on the loop's thread."""
        assert self._timer is None, "started twice"
        self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._interval_s
        self._timer = loop.call_at(due, self._fire, loop, due)

    def _fire(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._histogram.observe(max(0.0, loop.time() - due))
        self._schedule(loop)

    def stop(self) -> None:
        """End. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


if __name__ == "__main__":
    print(table(Metrics().specs), end="")
