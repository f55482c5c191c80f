"""OpenTelemetry spans of a share of the requests, for who asks for them ([traces]).

A span is written down when its request has ended and leaves in the background, over OTLP to a UNIX
socket: the daemon calls nobody by TCP (`sandbox`), so a collector listens beside it. Ids follow
from session and request (`entresol_proto.tracing`), which is how a host's spans link to these.

Invariants: off, it costs a look at None per request. A span says what a log line may: tenant,
numbers of blocks and bytes, tiers, outcome; never keys, namespaces, tokens or payload. A collector
that is absent, slow or hostile costs spans, never a request nor a stop: the queue is bounded and
drops, and so does `close`.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from entresol_proto import __version__, limits
from entresol_proto.status import ConfigError, Status
from entresol_proto.tracing import ids_of, sampled
from entresol_proto.wire import data, quote
from entresol_proto.wire.data import Grant, Tier

if TYPE_CHECKING:
    from entresol_daemon.config import Config
    from entresol_daemon.shard.sessions import Session

log = logging.getLogger("entresol.traces")

EXPORT_TIMEOUT_S = 5.0
CLOSE_SECONDS_MAX = 3.0  # the SDK's own shutdown takes several times its timeout
QUEUE_SPANS_MAX = 2048
BATCH_SPANS_MAX = 512
EVERY_MS = 2_000
PACKAGE_HINT = "pip install 'entresol[otel]'"
_TRACED = (
    data.Fetch, data.Stage, data.Exists, data.Touch, data.Reserve, data.Commit, data.Forget,
    data.Explain, quote.Quote,
)  # fmt: skip
_BAD = frozenset({Status.CORRUPT, Status.INTERNAL, Status.IO_ERROR, Status.FABRIC_ERROR})


class Trace:
    """One request that is traced. Times are Unix nanoseconds."""

    __slots__ = ("_ids", "_now_ns", "_owner", "attributes", "began_ns", "events", "name")

    def __init__(
        self, owner: Traces, name: str, ids: tuple[int, int], now_ns: Callable[[], int]
    ) -> None:
        self._owner = owner
        self._ids = ids
        self._now_ns = now_ns
        self.name = name
        self.began_ns = now_ns()
        self.events: list[tuple[str, int]] = []
        self.attributes: dict[str, str | int] = {}

    def event(self, name: str) -> None:
        """Something happened now."""
        self.events.append((name, self._now_ns()))

    def watch(self, emit: Callable[[Grant], None]) -> Callable[[Grant], None]:
        """`emit`, which also notes what was granted, from where, and when first."""

        def tell(grant: Grant) -> None:
            found = self.attributes
            if grant.items and "entresol.memory_blocks" not in found:
                self.event("first_grant")
            flash = sum(item.tier is Tier.FLASH for item in grant.items)
            for name, more in (
                ("memory_blocks", len(grant.items) - flash), ("flash_blocks", flash),
                ("missed_blocks", len(grant.misses)),
                ("wire_bytes", sum(item.span.length_bytes for item in grant.items)),
            ):  # fmt: skip
                if grant.items or name == "missed_blocks":
                    found[f"entresol.{name}"] = int(found.get(f"entresol.{name}", 0)) + more
            emit(grant)

        return tell

    def end(self, status: Status) -> None:
        """The request has its last answer."""
        self._owner.write(self, self._ids, status, self._now_ns())


class Traces:
    """Of one shard. `begin` for every request, `close` at the end."""

    def __init__(self, processor: Any, resource: Any, ratio: float) -> None:
        """`processor` takes finished spans (`on_end`); `resource` says whose they are."""
        self._processor = processor
        self._resource = resource
        self._ratio = ratio
        self._api: Any = importlib.import_module("opentelemetry.trace")
        self._sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
        util: Any = importlib.import_module("opentelemetry.sdk.util.instrumentation")
        self._scope = util.InstrumentationScope("entresol_daemon", __version__)

    def begin(
        self, session_id: bytes, request_id: int, name: str, tenant: str, now_ns: Callable[[], int]
    ) -> Trace | None:
        """A request arrived; None when it is not among those that are traced."""
        ids = ids_of(session_id, request_id)
        if not sampled(ids[0], self._ratio):
            return None
        trace = Trace(self, name, ids, now_ns)
        trace.attributes["entresol.tenant"] = tenant
        return trace

    def of_request(
        self, session: Session, tenant: str, request_id: int, message: Any,
        now_ns: Callable[[], int],
    ) -> Trace | None:  # fmt: skip
        """The same of any message of a session; None for a kind that is never traced."""
        if not isinstance(message, _TRACED):
            return None
        name = message.TYPE.name.lower()
        trace = self.begin(session.session_id, request_id, name, tenant, now_ns)
        if trace is not None:
            blocks = len(getattr(message, "keys", b"")) // limits.WIRE_KEY_BYTES
            trace.attributes["entresol.blocks"] = blocks or len(getattr(message, "items", ()))
            trace.attributes["entresol.fabric"] = session.fabric
        return trace

    def write(self, trace: Trace, ids: tuple[int, int], status: Status, ended_ns: int) -> None:
        """Hand a finished span over. Never raises: a lost span is no failed request."""
        api, sdk = self._api, self._sdk
        try:
            flags = api.TraceFlags(api.TraceFlags.SAMPLED)
            code = api.StatusCode.ERROR if status in _BAD else api.StatusCode.UNSET
            self._processor.on_end(
                sdk.ReadableSpan(
                    f"entresold.{trace.name}",
                    context=api.SpanContext(*ids, is_remote=False, trace_flags=flags),
                    resource=self._resource,
                    attributes={**trace.attributes, "entresol.status": status.label},
                    events=[sdk.Event(name, timestamp=when) for name, when in trace.events],
                    kind=api.SpanKind.SERVER,
                    status=api.Status(code, status.label if status in _BAD else None),
                    start_time=trace.began_ns,
                    end_time=max(trace.began_ns, ended_ns),
                    instrumentation_scope=self._scope,
                )
            )
        except Exception:
            log.exception("event=trace_lost")

    def close(self, seconds_max: float = CLOSE_SECONDS_MAX) -> None:
        """Send what waits, within `seconds_max`; then it is abandoned, with its thread. Blocks."""
        thread = threading.Thread(target=self._shut_down, name="entresol-traces", daemon=True)
        thread.start()
        thread.join(seconds_max)
        if thread.is_alive():
            log.warning("event=traces_abandoned seconds=%g hint='see the collector'", seconds_max)

    def _shut_down(self) -> None:
        try:
            self._processor.force_flush(int(EXPORT_TIMEOUT_S * 1000))
            self._processor.shutdown()
        except Exception:
            log.exception("event=traces_close_failed")


def traces_of(config: Config) -> Traces | None:
    """As configured; None when off. Raises: ConfigError without the packages."""
    if config.traces.socket is None:
        return None
    try:
        exporters: Any = importlib.import_module(
            "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
        )
        resources: Any = importlib.import_module("opentelemetry.sdk.resources")
        export: Any = importlib.import_module("opentelemetry.sdk.trace.export")
    except ImportError:
        raise ConfigError(
            "[traces] socket is set, and OpenTelemetry is not installed", hint=PACKAGE_HINT
        ) from None
    exporter = exporters.OTLPSpanExporter(
        endpoint=f"unix:{config.traces.socket}", insecure=True, timeout=EXPORT_TIMEOUT_S
    )
    resource = resources.Resource.create(
        {
            "service.name": "entresold",
            "service.namespace": "entresol",
            "service.version": __version__,
            "service.instance.id": config.shard.name,
        }
    )
    processor = export.BatchSpanProcessor(
        exporter, max_queue_size=QUEUE_SPANS_MAX, max_export_batch_size=BATCH_SPANS_MAX,
        schedule_delay_millis=EVERY_MS, export_timeout_millis=int(EXPORT_TIMEOUT_S * 1000),
    )  # fmt: skip
    log.info("event=traces socket=%s sample=%g", config.traces.socket, config.traces.sample)
    return Traces(processor, resource, config.traces.sample)
