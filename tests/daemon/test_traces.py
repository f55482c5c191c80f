"""OpenTelemetry: a real client and daemon export to a real OTLP collector, a gRPC server here.

What arrives there is looked at as it is on the wire: spans, links between the two sides, and that
nothing in it is a key, a token, a salt or payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon_lab import DESCRIPTOR, Site, blocks, client_of, get, keys_of, shape
from harness import Running, eventually, running_daemon

from entresol_client.client import AsyncClient
from entresol_client.namespace import Namespace
from entresol_client.results import PutBlock
from entresol_client.tracing import TracedNamespace, Tracing
from entresol_daemon import sandbox
from entresol_daemon.config import Config
from entresol_daemon.traces import traces_of
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import ConfigError
from entresol_proto.tracing import ids_of, sampled

pytestmark = pytest.mark.daemon
ROOT = Path(__file__).resolve().parents[2]

TOKENS = tuple(range(7_000_001, 7_000_017))


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
        reason="not run here: OpenTelemetry is not installed (pip install 'entresol[otel]')",
    )


class Collector:
    """What was exported, as bytes and as (service, span)."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.spans: list[tuple[str, Any]] = []

    def export(self, raw: bytes, _context: Any) -> bytes:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

        self.raw.append(raw)
        for of_resource in pb.ExportTraceServiceRequest.FromString(raw).resource_spans:
            names = {a.key: a.value.string_value for a in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.spans += [(names.get("service.name", ""), span) for span in scope.spans]
        return pb.ExportTraceServiceResponse().SerializeToString()

    def named(self, name: str) -> list[Any]:
        return [span for _, span in self.spans if span.name == name]


@contextlib.contextmanager
def collecting(address: str) -> Iterator[tuple[Collector, int]]:
    """An OTLP/gRPC receiver; the service is the one of opentelemetry-proto."""
    found = Collector()
    method = grpc.unary_unary_rpc_method_handler(found.export)
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"Export": method}),)
    )
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield found, port
    finally:
        server.stop(None).wait()


def traced(socket: Path, sample: float = 1.0, **options: Any) -> Callable[[Config], Config]:
    change = shape(**options)

    def more(config: Config) -> Config:
        config = change(config)
        return replace(config, traces=replace(config.traces, socket=socket, sample=sample))

    return more


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@contextlib.asynccontextmanager
async def both(
    folder: Path, sample: float = 1.0, **options: Any
) -> AsyncIterator[tuple[Running, AsyncClient, Collector, Collector]]:
    """A daemon and a client that export to collectors of their own. All is out at the end."""
    socket = folder / "otlp.sock"
    with (
        collecting(f"unix:{socket}") as (of_daemon, _),
        collecting("127.0.0.1:0") as (of_client, port),
    ):
        async with running_daemon(folder / "d", traced(socket, sample, **options)) as running:
            where = f"http://127.0.0.1:{port}"
            async with client_of(running, traces=where) as client:
                yield running, client, of_daemon, of_client


async def test_gets_and_puts_have_spans_on_both_sides_that_are_linked(tmp_path: Path) -> None:
    async with both(tmp_path) as (_, client, of_daemon, of_client):
        namespace = await client.namespace(DESCRIPTOR)
        assert type(namespace) is TracedNamespace
        keys = keys_of(5)
        assert (await namespace.put(blocks(keys[:4], 64 * KIB), ack="durable")).ok
        assert (await namespace.exists(keys)).prefix_blocks == 4
        result = await get(namespace, keys, 64 * KIB)
        assert result.prefix_blocks == 4
    (mine,) = of_client.named("entresol.get")
    told = attributes(mine)
    assert {name: told[f"entresol.{name}"] for name in
            ("blocks", "prefix_blocks", "memory_blocks", "flash_blocks", "plain_bytes")} == {
        "blocks": 5, "prefix_blocks": 4, "memory_blocks": 4, "flash_blocks": 0,
        "plain_bytes": 4 * 64 * KIB,
    }  # fmt: skip
    assert (told["entresol.status.ok"], told["entresol.status.miss"]) == (4, 1)
    assert mine.status.code == 0, "a miss is no error"
    assert 0 < mine.start_time_unix_nano < mine.end_time_unix_nano
    (fetch,) = of_daemon.named("entresold.fetch")
    told = attributes(fetch)
    assert (told["entresol.tenant"], told["entresol.fabric"]) == ("dev", "shm")
    assert (told["entresol.memory_blocks"], told["entresol.missed_blocks"]) == (4, 1)
    assert [event.name for event in fetch.events] == ["begun", "first_grant"]
    # Each request of a call is linked to the daemon's span of it.
    by_id = {(span.trace_id, span.span_id): span for _, span in of_daemon.spans}
    linked = {
        span.name: [by_id[link.trace_id, link.span_id].name for link in span.links]
        for _, span in of_client.spans
    }
    assert linked["entresol.get"] == ["entresold.fetch"]
    assert linked["entresol.put"] == ["entresold.reserve", "entresold.commit"]
    assert linked["entresol.exists"] == ["entresold.exists"]
    assert {attributes(link)["entresol.shard"] for link in mine.links} == {"dev"}
    assert {name for name, _ in of_daemon.spans} == {"entresold"}


async def test_from_flash_is_told_from_memory(tmp_path: Path) -> None:
    async with both(tmp_path, dram=16 * MIB) as (_, client, of_daemon, _of_client):
        namespace = await client.namespace(DESCRIPTOR)
        keys = keys_of(24)
        for at in range(0, 24, 4):
            assert (await namespace.put(blocks(keys[at : at + 4], MIB), ack="durable")).ok
        assert (await get(namespace, keys[:2], MIB)).ok
    (fetch,) = of_daemon.named("entresold.fetch")
    assert attributes(fetch)["entresol.flash_blocks"] == 2


async def test_spans_have_no_keys_tokens_salts_models_or_payload(tmp_path: Path) -> None:
    descriptor = replace(DESCRIPTOR, model="secret-model", cache_salt="grain-of-salt")
    payload = b"PAYLOAD-CANARY!!" * 4096
    key = b"ENGINE-KEY-CANARY-0123456789abcd"
    async with both(tmp_path) as (running, client, of_daemon, of_client):
        namespace = await client.namespace(descriptor)
        block = PutBlock(key, payload, token_ids=TOKENS, parent_key=b"PARENT-CANARY-16")
        assert (await namespace.put([block])).ok
        into = bytearray(len(payload))
        assert (await namespace.get_into([key], [into])).ok
        await namespace.explain([key])
        await namespace.forget([key])
        ids = running.daemon.shard.parts.keyring.namespaces_of("dev")  # type: ignore[arg-type]
    found = b"".join(of_daemon.raw + of_client.raw)
    assert len(of_daemon.spans) >= 5
    canaries = [payload[:16], key, b"PARENT-CANARY", b"secret-model", b"grain-of-salt", *ids]
    canaries += [each.hex().encode() for each in (payload[:16], key, *ids)]
    canaries += [str(token).encode() for token in TOKENS]
    assert [canary for canary in canaries if canary in found] == []


def started(site: Site, log_path: Path) -> subprocess.Popen[bytes]:
    """`entresold` with the site's configuration."""
    words = [sys.executable, "-m", "entresol_daemon", "--config", str(site.toml)]
    with open(log_path, "wb") as log:
        return subprocess.Popen(words, stderr=log)


async def test_a_sandboxed_daemon_reaches_its_collector_and_no_other(tmp_path: Path) -> None:
    """The process locks itself in first: TCP is refused to it, its collector's socket is not."""
    socket = tmp_path / "otlp.sock"
    site = Site.prepare(tmp_path / "d")
    site.fix_port()
    site.change("traces", socket=socket, sample=1.0)
    with collecting(f"unix:{socket}") as (collector, _):
        process = started(site, tmp_path / "log")
        try:
            config = site.client_config(deadline_ns=30 * 10**9)
            async with await AsyncClient.open(config) as client:
                await eventually(lambda: client.shards()[0].connected, seconds=60, what="a session")
                namespace = await client.namespace(DESCRIPTOR)
                assert (await namespace.put(blocks(keys_of(2), KIB))).ok
                assert (await namespace.exists(keys_of(2))).prefix_blocks == 2
        finally:
            process.terminate()
            assert await asyncio.to_thread(process.wait, 60) == 0
        found = (tmp_path / "log").read_text()
    assert f"event=traces socket={socket} sample=1" in found
    if sandbox.abi() >= 4:
        assert "connects=no" in found
    assert collector.named("entresold.exists"), found[-2000:]
    assert collector.named("entresold.commit")


async def test_a_share_of_the_requests_is_traced(tmp_path: Path) -> None:
    async with both(tmp_path, sample=0.25) as (running, client, of_daemon, _):
        namespace = await client.namespace(DESCRIPTOR)
        for number in range(200):
            await namespace.touch(keys_of(1, str(number)))
        (session,) = running.daemon.shard.sessions.values()
        name = session.session_id
    found = {(span.trace_id, span.span_id) for span in of_daemon.named("entresold.touch")}
    ids = [ids_of(name, request) for request in range(1, 400)]
    chosen = {
        (trace.to_bytes(16, "big"), span.to_bytes(8, "big"))
        for trace, span in ids if sampled(trace, 0.25)
    }  # fmt: skip
    assert found <= chosen
    assert 20 < len(found) < 90


async def test_a_collector_that_is_not_there_costs_spans_only(tmp_path: Path) -> None:
    change = traced(tmp_path / "nobody.sock", fabrics=["shm"])
    async with running_daemon(tmp_path / "d", change) as running:
        config_where = "http://127.0.0.1:1"
        async with client_of(running, traces=config_where) as client:
            namespace = await client.namespace(DESCRIPTOR)
            keys = keys_of(3)
            assert (await namespace.put(blocks(keys, KIB))).ok
            assert (await get(namespace, keys, KIB)).ok


async def test_spans_of_the_application_are_the_parents(tmp_path: Path) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing("global")
    tracing._tracer = provider.get_tracer("test")  # a global one could be set only once
    async with running_daemon(tmp_path, shape()) as running, client_of(running) as client:
        plain = await client.namespace(DESCRIPTOR)
        assert type(plain) is Namespace, "off: not even another class"
        assert client._tracing is None
        namespace = TracedNamespace(client, DESCRIPTOR, tracing)
        with provider.get_tracer("engine").start_as_current_span("request") as outer:
            await namespace.exists(keys_of(2))
            assert trace.get_current_span() is outer
    found = {span.name: span for span in exporter.get_finished_spans()}
    parent = found["entresol.exists"].parent
    assert parent is not None
    assert parent.span_id == found["request"].context.span_id


@pytest.mark.parametrize("setting", ["127.0.0.1:4317", "ftp://x", "yes"])
def test_settings_that_are_none(setting: str) -> None:
    with pytest.raises(ConfigError, match="no endpoint"):
        Tracing(setting)


def test_without_the_packages_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="not installed") as raised:
        Tracing("global")
    assert "entresol[otel]" in raised.value.hint
    config = traced(tmp_path / "s")(Config())
    with pytest.raises(ConfigError, match="not installed"):
        traces_of(config)
    assert traces_of(Config()) is None


async def test_the_document_names_every_span_and_attribute(tmp_path: Path) -> None:
    text = (ROOT / "daemon" / "TRACES.md").read_text()
    async with both(tmp_path) as (_, client, of_daemon, of_client):
        namespace = await client.namespace(DESCRIPTOR)
        keys = keys_of(2)
        assert (await namespace.put(blocks(keys, KIB))).ok
        await get(namespace, [*keys, b"absent-key-16byt"], KIB)
        await namespace.exists(keys)
        await namespace.stage(keys)
        await namespace.touch(keys)
        await namespace.quote(keys)
        await namespace.explain(keys)
        await namespace.forget(keys)
    for _, span in of_daemon.spans + of_client.spans:
        assert f"`{span.name}`" in text or span.name.partition(".")[2] in text, span.name
        for name in attributes(span):
            shown = "entresol.status.*" if name.startswith("entresol.status.") else name
            assert f"`{shown}`" in text, name
        for event in span.events:
            assert f"`{event.name}`" in text
