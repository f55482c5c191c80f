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
import enum
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from entresol_daemon.control.admin import ShardState
from entresol_daemon.events.types import GapReason, Kind, Reason
from entresol_proto.fabric.base import FabricKind
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import Status
from entresol_proto.wire.frames import FrameType

log = logging.getLogger("entresol.metrics")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TENANT_LABELS_MAX = 64
OTHER_TENANT = "_other"  # not a tenant name: those begin with a letter or digit
OTHER = "other"

LATENCY_BUCKETS_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip

_FIRST_ANSWER = 64  # frame types from here on are answers, not requests
REQUEST_TYPES = tuple(kind.name.lower() for kind in FrameType if kind < _FIRST_ANSWER)
STATUSES = tuple(status.label for status in Status)
FABRICS = tuple(kind.label for kind in FabricKind)
TIERS = ("memory", "flash")
OPEN_AT = ("host", "daemon")
OPERATIONS = ("get", "put")
FORMS = ("plain", "wire", "stored")
QUEUES = ("flash_read", "flash_write", "compute", "put", "stage", "send")
DRAM_STATES = ("unassigned", "free", "loading", "ready", "dead")
SEGMENT_STATES = ("free", "open", "sealed", "condemned")
CORRUPT_AT = (Reason.HEADER.label, Reason.FLASH.label, Reason.HOST_REPORT.label)
QUOTA_RESOURCES = ("flash", "dram", "in_flight", "index", "sessions", "leases")
DTYPES = (*(dtype.label for dtype in DType), OTHER)

M = TypeVar("M", Counter, Gauge, Histogram)
Value = str | enum.Enum
Key = Value | tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Domain:
    """The values a label can take. `fallback` stands in for any other; without it they are bugs."""

    values: tuple[str, ...]
    fallback: str | None = None


class _Tenants:
    """Which tenants have a label of their own; first come, first served."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self.names:
            if len(self.names) >= TENANT_LABELS_MAX:
                return OTHER_TENANT
            self.names.add(name)
        return name


@dataclass(frozen=True, slots=True)
class Spec:
    """One row of METRICS.md."""

    name: str
    kind: str
    labels: dict[str, Domain | _Tenants] = field(compare=False)
    help: str


class Family(dict[Key, M], Generic[M]):
    """The children of one labelled metric, bound on first use: `family["fetch", "ok"]`.

    Keys are one value, or a tuple in the order of the labels; enum members stand for their label.
    Raises: KeyError for a value outside a closed domain, which is a bug of the caller.
    """

    def __init__(self, parent: M, labels: dict[str, Domain | _Tenants]) -> None:
        super().__init__()
        self._parent: M = parent
        self._domains = tuple(labels.values())

    def __missing__(self, key: Key) -> M:
        values = key if isinstance(key, tuple) else (key,)
        if len(values) != len(self._domains):
            raise KeyError(f"{len(values)} label values for {len(self._domains)} labels")
        stands_in = False
        labels = []
        for value, domain in zip(values, self._domains, strict=True):
            text = _text(value)
            if isinstance(domain, _Tenants):
                label = domain.label(text)
            elif text in domain.values:
                label = text
            elif domain.fallback is not None:
                label = domain.fallback
            else:
                raise KeyError(f"{text!r} is not among {domain.values}")
            stands_in |= label != text
            labels.append(label)
        child: M = self._parent.labels(*labels)
        if not stands_in:  # strangers are not remembered, or this dict would grow without bound
            self[key] = child
        return child

    def forget(self, tenant: str) -> None:
        """Drop the series of one tenant (the first label)."""
        for key in [key for key in self if isinstance(key, tuple) and key[0] == tenant]:
            self._parent.remove(*(_text(value) for value in key))
            del self[key]
        if self.pop(tenant, None) is not None:
            self._parent.remove(tenant)


def _text(value: Value) -> str:
    if isinstance(value, enum.Enum):
        label = getattr(value, "label", None)
        return label if isinstance(label, str) else value.name.lower()
    return value


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
        self._tenants = _Tenants()
        self._tenant_families: list[Family[Counter] | Family[Gauge]] = []
        self._hooks: list[Callable[[], None]] = []
        self._sealed: dict[str, tuple[int, int]] = {}  # dtype label: plain, stored bytes
        self._define_requests()
        self._define_tenants()
        self._define_storage()
        self._define_process()
        ProcessCollector(namespace="entresol", registry=self.registry)
        info = self._gauges(
            "build_info",
            "Always 1: says what runs here.",
            version=Domain((version,)),
            shard=Domain((shard,)),
        )
        info[version, shard].set(1)

    # ------------------------------------------------------------------------- definitions

    def _define_requests(self) -> None:
        types, statuses = Domain(REQUEST_TYPES), Domain(STATUSES)
        self.sessions = self._gauges("sessions", "Open sessions.", fabric=Domain(FABRICS))
        self.sessions_opened = self._counters(
            "sessions_opened_total", "Sessions that reached the open state.", fabric=Domain(FABRICS)
        )
        self.sessions_refused = self._counters(
            "sessions_refused_total", "Connections ended before opening.", status=statuses
        )
        self.requests = self._counters(
            "requests_total", "Requests answered.", type=types, status=statuses
        )
        self.request_seconds = self._histograms(
            "request_seconds", "From a request's last byte to its last answer.", type=types
        )
        self.first_grant_seconds = self._histogram(
            "first_grant_seconds", "From a fetch's last byte to its first grant."
        )
        self.leases = self._gauge("leases", "Leases granted and neither released nor expired.")
        self.leased_bytes = self._gauge("leased_bytes", "Memory under those leases.")
        self.leases_expired = self._counter(
            "leases_expired_total", "Leases that ran out before their release."
        )
        self.queue_depth = self._gauges(
            "queue_depth", "Entries waiting in a bounded queue.", queue=Domain(QUEUES)
        )
        self.queue_shed = self._counters(
            "queue_shed_total", "Entries refused because the queue was full.", queue=Domain(QUEUES)
        )

    def _define_tenants(self) -> None:
        tenant, statuses = self._tenants, Domain(STATUSES)
        self.blocks_served = self._counters(
            "blocks_served_total",
            "Blocks granted, by where they were found and who opens them.",
            tenant=tenant,
            tier=Domain(TIERS),
            open_at=Domain(OPEN_AT),
        )
        self.misses = self._counters(
            "blocks_missed_total",
            "Blocks not served, by cause (a status label).",
            tenant=tenant,
            cause=Domain(STATUSES[1:]),
        )
        self.put_blocks = self._counters(
            "put_blocks_total", "Blocks offered for storing.", tenant=tenant, status=statuses
        )
        self.payload_bytes = self._counters(
            "payload_bytes_total",
            "Block bytes: plain as the engine sees them, wire as moved over the fabric, stored as "
            "padded on flash.",
            tenant=tenant,
            operation=Domain(OPERATIONS),
            form=Domain(FORMS),
        )
        self.tenant_flash_bytes = self._gauges(
            "tenant_flash_bytes", "Live bytes on flash.", tenant=tenant
        )
        self.tenant_dram_bytes = self._gauges(
            "tenant_dram_bytes", "Bytes of slabs owned.", tenant=tenant
        )
        self.quota_refusals = self._counters(
            "quota_refusals_total",
            "Requests refused by a tenant's quota.",
            tenant=tenant,
            resource=Domain(QUOTA_RESOURCES),
        )
        self.tenants = self._gauge("tenants", "Tenants in the keyring.")
        dtypes = Domain(DTYPES, fallback=OTHER)
        self.sealed_plain_bytes = self._counters(
            "sealed_plain_bytes_total", "Bytes of blocks before compression.", dtype=dtypes
        )
        self.sealed_stored_bytes = self._counters(
            "sealed_stored_bytes_total", "Bytes of the same blocks sealed.", dtype=dtypes
        )
        self.compression_ratio = self._gauges(
            "compression_ratio", "Plain over sealed bytes since the start.", dtype=dtypes
        )

    def _define_storage(self) -> None:
        statuses, reasons = Domain(STATUSES), Domain(tuple(r.label for r in Reason))
        self.dram_bytes = self._gauges(
            "dram_bytes", "The memory budget, by what it is used for.", state=Domain(DRAM_STATES)
        )
        self.staging_reads = self._counters(
            "staging_reads_total", "Blocks read from flash into memory.", status=statuses
        )
        self.staging_seconds = self._histogram(
            "staging_read_seconds", "From asking for a block on flash to having it in memory."
        )
        self.staging_in_flight = self._gauge(
            "staging_reads_in_flight", "Blocks being read from flash."
        )
        self.flash_capacity_bytes = self._gauge("flash_capacity_bytes", "Size of the flash slice.")
        self.flash_live_bytes = self._gauge("flash_live_bytes", "Bytes of records still indexed.")
        self.flash_written_bytes = self._counter(
            "flash_written_bytes_total", "Bytes written to flash, with headers and reinsertions."
        )
        self.flash_read_bytes = self._counter("flash_read_bytes_total", "Bytes read from flash.")
        self.flash_blocks = self._gauge("flash_blocks", "Blocks in the index.")
        self.flash_flushes = self._counters(
            "flash_flushes_total", "Flushes of the flash device.", status=statuses
        )
        self.flash_flush_seconds = self._histogram("flash_flush_seconds", "Time of one flush.")
        self.flash_segments = self._gauges(
            "flash_segments", "Segments by state.", state=Domain(SEGMENT_STATES)
        )
        self.evicted_blocks = self._counters(
            "evicted_blocks_total", "Blocks that left the index, by reason.", reason=reasons
        )
        self.reinserted_blocks = self._counter(
            "reinserted_blocks_total", "Blocks written again because the policy values them."
        )
        self.reinserted_bytes = self._counter("reinserted_bytes_total", "Bytes of those blocks.")
        self.corrupt_blocks = self._counters(
            "corrupt_blocks_total",
            "Blocks that failed verification, by where it was found; each became a miss.",
            eager=True,
            where=Domain(CORRUPT_AT),
        )
        self.scrubbed_bytes = self._counter("scrubbed_bytes_total", "Bytes the scrubber verified.")
        self.recovery_seconds = self._gauge(
            "recovery_seconds", "How long the last recovery of the index took."
        )
        self.recovered_blocks = self._gauge("recovered_blocks", "Blocks found by that recovery.")

    def _define_process(self) -> None:
        self.events_published = self._counters(
            "events_published_total",
            "Events appended to the log.",
            kind=Domain(tuple(kind.label for kind in Kind)),
        )
        self.event_gaps = self._counters(
            "event_consumers_dropped_total",
            "Event subscriptions ended with a gap, by reason.",
            eager=True,
            reason=Domain(tuple(reason.label for reason in GapReason)),
        )
        self.event_subscriptions = self._gauge("event_subscriptions", "Open event subscriptions.")
        self.event_log_bytes = self._gauge("event_log_bytes", "Memory of the events held.")
        self.tls_reloads = self._counter("tls_reloads_total", "New certificates taken over.")
        self.tls_reload_failures = self._counter(
            "tls_reload_failures_total", "New certificates that could not be used."
        )
        self.state = self._gauges(
            "state",
            "1 for the state the shard is in, 0 for the others.",
            eager=True,
            state=Domain(tuple(state.name.lower() for state in ShardState)),
        )
        self.loop_lag_seconds = self._histogram(
            "event_loop_lag_seconds", "How much later than asked the event loop ran a timer."
        )

    # ------------------------------------------------------------------------------ makers

    def _spec(self, name: str, kind: str, text: str, labels: dict[str, Domain | _Tenants]) -> Spec:
        spec = Spec(name, kind, labels, text)
        self.specs.append(spec)
        return spec

    def _family(
        self,
        parent: M,
        labels: dict[str, Domain | _Tenants],
        eager: bool,
    ) -> Family[M]:
        family = Family(parent, labels)
        if eager:  # series that alerts watch exist, at zero, from the start
            (domain,) = labels.values()
            assert isinstance(domain, Domain)
            for value in domain.values:
                family[value]
        return family

    def _counters(
        self, name: str, text: str, *, eager: bool = False, **labels: Domain | _Tenants
    ) -> Family[Counter]:
        name = f"entresol_{name}"
        self._spec(name, "counter", text, labels)
        parent = Counter(name, text, list(labels), registry=self.registry)
        family = self._family(parent, labels, eager)
        if "tenant" in labels:
            self._tenant_families.append(family)
        return family

    def _gauges(
        self, name: str, text: str, *, eager: bool = False, **labels: Domain | _Tenants
    ) -> Family[Gauge]:
        name = f"entresol_{name}"
        self._spec(name, "gauge", text, labels)
        parent = Gauge(name, text, list(labels), registry=self.registry)
        family = self._family(parent, labels, eager)
        if "tenant" in labels:
            self._tenant_families.append(family)
        return family

    def _histograms(self, name: str, text: str, **labels: Domain | _Tenants) -> Family[Histogram]:
        name = f"entresol_{name}"
        self._spec(name, "histogram", text, labels)
        parent = Histogram(
            name, text, list(labels), registry=self.registry, buckets=LATENCY_BUCKETS_SECONDS
        )
        return self._family(parent, labels, False)

    def _counter(self, name: str, text: str) -> Counter:
        name = f"entresol_{name}"
        self._spec(name, "counter", text, {})
        return Counter(name, text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        name = f"entresol_{name}"
        self._spec(name, "gauge", text, {})
        return Gauge(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        name = f"entresol_{name}"
        self._spec(name, "histogram", text, {})
        return Histogram(name, text, registry=self.registry, buckets=LATENCY_BUCKETS_SECONDS)

    # ------------------------------------------------------------------------------ verbs

    def event_published(self, kind: Kind) -> None:
        """For `EventLog(on_publish=...)`."""
        self.events_published[kind].inc()

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

    def set_state(self, state: ShardState) -> None:
        """Show `state` and no other."""
        for other in ShardState:
            self.state[other].set(other is state)

    def forget_tenant(self, tenant: str) -> None:
        """Drop an erased tenant's series and free its label."""
        for family in self._tenant_families:
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


def _domain_text(domain: Domain | _Tenants) -> str:
    if isinstance(domain, _Tenants):
        return f"tenant names, {TENANT_LABELS_MAX} at most, then `{OTHER_TENANT}`"
    return ", ".join(f"`{value}`" for value in domain.values)


def table(specs: Iterable[Spec]) -> str:
    """METRICS.md's table: one row per metric, sorted by name."""
    rows = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    for spec in sorted(specs, key=lambda spec: spec.name):
        labels = "; ".join(f"`{n}`: {_domain_text(d)}" for n, d in spec.labels.items())
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(Metrics().specs), end="")
