"""OpenTelemetry spans of a client's calls, for who asks for them (`traces` of the configuration).

Off by default; then nothing of this is imported, and a call costs what it costs without: traced
namespaces are a class of their own.

Invariants: spans say how many blocks, bytes and outcomes, never which: no keys, prompts, payload,
salts or models. An exporter that hangs or is absent costs spans, never a call: they leave in the
background, from a bounded queue.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from entresol_client.arguments import count_of
from entresol_client.namespace import Namespace
from entresol_proto.status import ConfigError, EntresolError, Status
from entresol_proto.tracing import ids_of
from entresol_proto.wire.data import Tier

if TYPE_CHECKING:
    from entresol_client.handshake import OpenSession
    from entresol_client.results import (
        AckLevel,
        ExistsResult,
        GetResult,
        OpenPlace,
        PutBlock,
        PutResult,
        StageResult,
    )

SCOPE = "entresol_client"
SERVICE_NAME = "entresol-client"
GLOBAL = "global"
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0
PACKAGE_HINT = "pip install 'entresol[otel]'"
# Outcomes that make a span an error: a miss is none.
_ERRORS = frozenset({
    Status.CORRUPT, Status.DEADLINE, Status.DISCONNECTED, Status.BREAKER_OPEN,
    Status.FABRIC_ERROR, Status.INTERNAL, Status.IO_ERROR,
})  # fmt: skip


class Tracing:
    """Makes the spans of one client. `close` when the client closes."""

    def __init__(self, setting: str) -> None:
        """`setting`: "global" uses the tracer provider that this process has set up; an endpoint
        ("http://host:4317", "https://...", "unix:/path") exports there over OTLP.

        Raises: ConfigError without the packages, or for another setting; EntresolError (BUSY)
        where there is no thread for exporting.
        """
        try:
            from opentelemetry import trace
        except ImportError:
            raise ConfigError(
                "traces are asked for, and OpenTelemetry is not installed", hint=PACKAGE_HINT
            ) from None
        self._api = trace
        self._provider: Any = None
        if setting == GLOBAL:
            self._tracer = trace.get_tracer(SCOPE)
            return
        if not setting.startswith(("http://", "https://", "unix:")):
            raise ConfigError(
                f"traces = {setting!r} is no endpoint",
                hint='"global", "http://host:4317", "https://host:4317" or "unix:/path"',
            )
        self._provider = _provider_of(setting)
        self._tracer = self._provider.get_tracer(SCOPE)
        atexit.register(self.close)  # instead of the SDK's own, which waits for longer

    def close(self) -> None:
        """Send what waits, for two seconds at most. Blocks. Idempotent."""
        if (thread := self._ended()) is not None:
            thread.join(CLOSE_TIMEOUT_S)

    async def aclose(self) -> None:
        """`close` for an event loop."""
        try:
            await asyncio.to_thread(self.close)
        except RuntimeError:  # the interpreter ends, and starts no threads for that any more
            self.close()

    def _ended(self) -> threading.Thread | None:
        """The thread that sends what waits and shuts down: the SDK heeds no timeout, and tries an
        endpoint that is not there for as long as an export may last. It keeps no process alive."""
        if self._provider is None:
            return None
        provider, self._provider = self._provider, None
        atexit.unregister(self.close)

        def end() -> None:
            provider.force_flush(int(CLOSE_TIMEOUT_S * 1_000))
            provider.shutdown()

        thread = threading.Thread(target=end, name="entresol-traces", daemon=True)
        thread.start()
        return thread

    def watch(self, shard: str, opened: OpenSession) -> None:
        """Link the span that is current when a request goes out to the daemon's span of it."""
        opened.connection.on_request = functools.partial(
            self._link, opened.welcome.session_id, shard
        )

    def _link(self, session_id: bytes, shard: str, kind: str, request_id: int) -> None:
        span = self._api.get_current_span()
        if not span.is_recording():
            return
        trace_id, span_id = ids_of(session_id, request_id)
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        context = self._api.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
        span.add_link(context, {"entresol.request": kind.lower(), "entresol.shard": shard})

    @contextlib.contextmanager
    def call(self, name: str, blocks: int) -> Iterator[Any]:
        """The span of a call; an exception is told by its class only."""
        with self._tracer.start_as_current_span(
            f"entresol.{name}",
            kind=self._api.SpanKind.CLIENT,
            attributes={"entresol.blocks": blocks},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                self.failed(span, type(error).__name__)
                raise

    def outcomes(self, span: Any, statuses: Sequence[Status]) -> None:
        """How many blocks ended how."""
        if not span.is_recording():
            return
        for status, count in Counter(statuses).items():
            span.set_attribute(f"entresol.status.{status.label}", count)
        worst = sorted(status.label for status in _ERRORS.intersection(statuses))
        if worst:
            self.failed(span, ", ".join(worst))

    def failed(self, span: Any, text: str) -> None:
        """The call did not do what was asked."""
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, text))


def _provider_of(endpoint: str) -> Any:
    """A provider that exports in the background. Raises: ConfigError; EntresolError (BUSY) where
    there is no thread for it."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "traces to an endpoint need OpenTelemetry's exporter", hint=PACKAGE_HINT
        ) from None
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https:"), timeout=EXPORT_TIMEOUT_S
    )
    # OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER, if set, have their say in these.
    name = os.environ.get("OTEL_SERVICE_NAME") or SERVICE_NAME
    resource = Resource.create({"service.name": name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    try:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except (RuntimeError, MemoryError) as error:
        exporter.shutdown()
        raise EntresolError(
            f"cannot start the thread that exports traces: {error or 'no memory'}",
            hint="raise the limits on memory and processes, or leave traces out",
            status=Status.BUSY,
        ) from None
    return provider


class TracedNamespace(Namespace):
    """A namespace whose calls have spans."""

    def __init__(self, client: Any, descriptor: Any, tracing: Tracing) -> None:
        super().__init__(client, descriptor)
        self._tracing = tracing

    async def get_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        *,
        deadline_ns: int | None = None,
        prefix: bool = True,
        open_at: OpenPlace = "host",
    ) -> GetResult:
        """See `Namespace.get_into`."""
        with self._tracing.call("get", count_of("keys", keys)) as span:
            result = await super().get_into(
                keys, buffers, deadline_ns=deadline_ns, prefix=prefix, open_at=open_at
            )
            self._tracing.outcomes(span, result.statuses)
            span.set_attributes(
                {
                    "entresol.prefix_blocks": result.prefix_blocks,
                    "entresol.memory_blocks": result.tiers.count(Tier.MEMORY),
                    "entresol.flash_blocks": result.tiers.count(Tier.FLASH),
                    "entresol.plain_bytes": result.plain_bytes,
                    "entresol.wire_bytes": result.wire_bytes,
                }
            )
            return result

    async def put(
        self,
        items: Sequence[PutBlock],
        *,
        ack: AckLevel = "accepted",
        deadline_ns: int | None = None,
    ) -> PutResult:
        """See `Namespace.put`."""
        with self._tracing.call("put", count_of("items", items)) as span:
            result = await super().put(items, ack=ack, deadline_ns=deadline_ns)
            self._tracing.outcomes(span, result.statuses)
            span.set_attributes(
                {
                    "entresol.ack": ack,
                    "entresol.plain_bytes": result.plain_bytes,
                    "entresol.wire_bytes": result.wire_bytes,
                }
            )
            return result

    async def exists(
        self, keys: Sequence[bytes], *, deadline_ns: int | None = None
    ) -> ExistsResult:
        """See `Namespace.exists`."""
        with self._tracing.call("exists", count_of("keys", keys)) as span:
            result = await super().exists(keys, deadline_ns=deadline_ns)
            span.set_attribute("entresol.prefix_blocks", result.prefix_blocks)
            if not result.complete:
                self._tracing.failed(span, "a shard did not answer")
            return result

    async def stage(
        self,
        keys: Sequence[bytes],
        *,
        hold_ns: int = 10_000_000_000,
        open_at: OpenPlace = "host",
        deadline_ns: int | None = None,
    ) -> StageResult:
        """See `Namespace.stage`."""
        with self._tracing.call("stage", count_of("keys", keys)) as span:
            result = await super().stage(
                keys, hold_ns=hold_ns, open_at=open_at, deadline_ns=deadline_ns
            )
            self._tracing.outcomes(span, result.statuses)
            return result
