"""Metrics (names, bounds, document) and the HTTP endpoint that shows them."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import leaks
import pytest
import uvloop
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from entresol_daemon.control import http
from entresol_daemon.control.admin import ShardState
from entresol_daemon.control.http import HttpServer
from entresol_daemon.events.log import EventLimits, EventLog
from entresol_daemon.events.types import Kind, Medium, Position, Reason
from entresol_daemon.metric_families import OTHER_TENANT, TENANT_LABELS_MAX, Family, table
from entresol_daemon.metrics import LoopLagProbe, Metrics
from entresol_daemon.observe import follow_events
from entresol_proto.fabric.base import FabricKind
from entresol_proto.ids import TenantName
from entresol_proto.status import Status
from entresol_proto.wire.frames import FrameType

ROOT = pathlib.Path(__file__).parents[2]


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    metrics.refresh()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[(f"entresol_{name}", tuple(sorted(labels.items())))]


# ------------------------------------------------------------------------------- metrics


def test_the_document_is_the_table_of_the_code():
    text = (ROOT / "daemon" / "METRICS.md").read_text()
    assert text.endswith("\n\n" + table(Metrics().specs)), (
        "daemon/METRICS.md is out of date; its table is `python -m entresol_daemon.metrics`"
    )


def test_refusals_have_the_statuses_that_a_refusal_can_have():
    """Dashboards showed connections refused with "ok" and "miss", at zero for ever."""
    metrics = Metrics()
    declared = {
        dict(labels)["status"]
        for name, labels in samples(metrics)
        if name == "entresol_sessions_refused_total"
    }
    assert not declared & {"ok", "miss", "gap", "exists"}
    wire = "".join(path.read_text() for path in (ROOT / "proto/entresol_proto/wire").glob("*.py"))
    named = set(re.findall(r"ProtocolError\([^()]*(?:\([^()]*\))?[^()]*status=Status\.(\w+)", wire))
    assert len(named) > 3
    assert {name.lower() for name in named} <= declared
    metrics.sessions_refused[Status.ERASED].inc()  # a bug, and no crash
    assert value(metrics, "sessions_refused_total", status="internal") == 1


def test_every_metric_is_declared_named_by_the_rules_and_explained():
    metrics = Metrics()
    declared = {spec.name: spec for spec in metrics.specs}
    assert len(declared) == len(metrics.specs), "a name is used twice"
    kinds = {"counter", "gauge", "histogram"}
    units = ("_bytes", "_seconds", "_ratio", "_info")
    for name, spec in declared.items():
        assert re.fullmatch(r"entresol(_[a-z]+)+", name)
        assert spec.kind in kinds
        assert spec.help.endswith(".")
        # Prometheus shows it alone: it cannot go on from another metric's.
        leans = r"(under|of|by|between) (those|these|them|that)\b|^The same|such delay|present one"
        assert not re.search(leans, spec.help), name
        assert name.endswith("_total") == (spec.kind == "counter"), name
        if spec.kind == "histogram":
            assert name.endswith(("_seconds", "_ratio")), name
        middle = name.removesuffix("_total")
        for unit in units:  # a unit comes last
            assert unit not in middle or middle.endswith(unit), name
    exposed = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in metrics.registry.collect()
        if not metric.name.startswith("entresol_process_")
    }
    assert exposed == set(declared)


def test_nothing_is_global():
    before = set(REGISTRY._names_to_collectors)
    first, second = Metrics(), Metrics()
    first.leases.set(3)
    assert value(second, "leases") == 0
    assert set(REGISTRY._names_to_collectors) == before


def test_children_are_bound_once_and_enums_stand_for_their_label():
    metrics = Metrics()
    child = metrics.requests[FrameType.FETCH, Status.OK]
    assert metrics.requests[FrameType.FETCH, Status.OK] is child
    child.inc()
    metrics.requests["fetch", "ok"].inc(2)
    metrics.sessions[FabricKind.SHM].inc()
    assert value(metrics, "requests_total", type="fetch", status="ok") == 3
    assert value(metrics, "sessions", fabric="shm") == 1


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("requests", ("fetch", "no_such_status")),
        ("requests", ("fetch",)),
        ("requests", "fetch"),
        ("corrupt_blocks", Reason.EVICTED),
        ("flash_segments", "melted"),
    ],
)
def test_a_label_outside_its_domain_is_a_bug(family, key):
    metrics = Metrics()
    with pytest.raises(KeyError):
        getattr(metrics, family)[key]


def test_tenant_labels_are_bounded_and_strangers_share_one():
    metrics = Metrics()
    for number in range(TENANT_LABELS_MAX + 100):
        metrics.blocks_served[f"t{number}", "memory", "host"].inc()
        metrics.misses[f"t{number}", Status.MISS].inc()
    found = samples(metrics)
    labels = {
        dict(labels)["tenant"] for (name, labels) in found if name == "entresol_blocks_served_total"
    }
    assert len(labels) == TENANT_LABELS_MAX + 1
    assert (
        value(metrics, "blocks_served_total", tenant=OTHER_TENANT, tier="memory", open_at="host")
        == 100
    )
    assert value(metrics, "blocks_missed_total", tenant=OTHER_TENANT, cause="miss") == 100
    assert len(metrics.blocks_served) == TENANT_LABELS_MAX, "strangers are not remembered"


def test_an_erased_tenant_leaves_no_series_and_frees_its_label():
    metrics = Metrics()
    for number in range(TENANT_LABELS_MAX):
        metrics.put_blocks[f"t{number}", Status.OK].inc()
    metrics.set_tenant_bytes({"t1": 5}, {"t1": 6})
    metrics.forget_tenant("t1")
    assert 'tenant="t1"' not in metrics.render().decode()
    metrics.put_blocks["new", Status.OK].inc()
    assert value(metrics, "put_blocks_total", tenant="new", status="ok") == 1


def test_tenant_gauges_add_up_strangers_and_fall_to_zero():
    metrics = Metrics()
    everyone = {f"t{number}": 10 for number in range(TENANT_LABELS_MAX + 5)}
    metrics.set_tenant_bytes(everyone, {})
    assert value(metrics, "tenant_flash_bytes", tenant="t0") == 10
    assert value(metrics, "tenant_flash_bytes", tenant=OTHER_TENANT) == 50
    metrics.set_tenant_bytes({"t0": 7}, {"t0": 8})
    assert value(metrics, "tenant_flash_bytes", tenant="t0") == 7
    assert value(metrics, "tenant_dram_bytes", tenant="t0") == 8
    assert value(metrics, "tenant_flash_bytes", tenant="t1") == 0


def test_the_ratio_is_of_all_bytes_sealed():
    metrics = Metrics()
    metrics.record_sealed("bf16", 3_000, 1_000)
    metrics.record_sealed("bf16", 1_000, 1_000)
    metrics.record_sealed("my-own-dtype", 10, 20)
    assert value(metrics, "compression_ratio", dtype="bf16") == 2
    assert value(metrics, "compression_ratio", dtype="other") == 0.5
    assert value(metrics, "sealed_plain_bytes_total", dtype="bf16") == 4_000


def test_followed_values_are_read_at_refresh():
    metrics = Metrics()
    now = {"failures": 2, "leases": 4}
    metrics.follow(metrics.tls_reload_failures, lambda: now["failures"])
    metrics.follow(metrics.leases, lambda: now["leases"])
    assert value(metrics, "tls_reload_failures_total") == 2
    now.update(failures=5, leases=1)
    assert value(metrics, "tls_reload_failures_total") == 5
    assert value(metrics, "leases") == 1
    now["failures"] = 0  # a counter never goes back
    assert value(metrics, "tls_reload_failures_total") == 5


def test_a_broken_reader_does_not_hide_the_others(caplog):
    metrics = Metrics()
    metrics.follow(metrics.leases, lambda: 1 // 0)
    metrics.follow(metrics.tenants, lambda: 3)
    assert value(metrics, "tenants") == 3
    assert "metric_refresh_failed" in caplog.text


def test_exactly_one_state_is_shown():
    metrics = Metrics()
    for state in ShardState:
        metrics.set_state(state)
        shown = {s.name.lower(): value(metrics, "state", state=s.name.lower()) for s in ShardState}
        assert [name for name, on in shown.items() if on] == [state.name.lower()]


def test_alerts_have_their_series_from_the_start():
    metrics = Metrics(version="1.0", shard="s0")
    assert value(metrics, "corrupt_blocks_total", where="flash") == 0
    assert value(metrics, "event_consumers_dropped_total", reason="slow") == 0
    assert value(metrics, "build_info", version="1.0", shard="s0") == 1
    assert "_created" not in metrics.render().decode()


def test_the_event_log_counts_into_metrics():
    metrics = Metrics()
    log = EventLog(
        1,
        event_limits=EventLimits(tenant_events_max=2),
        on_gap=metrics.event_gap,
    )
    for number in range(5):
        log.publish(
            Kind.STORED,
            TenantName("a"),
            time_unix_ns=1,
            namespace_id=bytes(16),
            wire_keys=(bytes([number]) * 16,),
            medium=Medium.FLASH,
        )
    log.subscribe(TenantName("a"), after=Position(1, 0)).poll()
    follow_events(metrics, log)
    metrics.refresh()
    assert value(metrics, "events_published_total", kind="stored") == 5
    assert value(metrics, "events_published_total", kind="removed") == 0
    assert value(metrics, "event_log_bytes") == log.used_bytes
    assert value(metrics, "event_consumers_dropped_total", reason="trimmed") == 1


async def test_loop_lag_is_observed_until_stopped():
    metrics = Metrics()
    probe = LoopLagProbe(metrics.loop_lag_seconds, interval_s=0.001)
    probe.start(asyncio.get_running_loop())
    async with asyncio.timeout(10):
        while value(metrics, "event_loop_lag_seconds_count") < 3:
            await asyncio.sleep(0.002)
    probe.stop()
    probe.stop()
    count = value(metrics, "event_loop_lag_seconds_count")
    await asyncio.sleep(0.02)
    assert value(metrics, "event_loop_lag_seconds_count") == count


def test_families_are_what_labelled_attributes_are():
    metrics = Metrics()
    labelled = {spec.name for spec in metrics.specs if spec.labels} - {"entresol_build_info"}
    members = [*vars(metrics).values(), *metrics.tenant_holds.values()]
    for group in vars(metrics).values():  # those of modules of their own
        if type(group).__module__.startswith("entresol_daemon.metric_"):
            members += [m for m in getattr(group, "__dict__", {}).values() if m is not group]
    families = len({id(member) for member in members if isinstance(member, Family)})
    assert families == len(labelled)


# ---------------------------------------------------------------------------------- http


@asynccontextmanager
async def serving(reasons: list[str] | None = None, **options) -> AsyncIterator[HttpServer]:
    server = HttpServer(Metrics(), lambda: reasons or [], **options)
    before = leaks.snapshot()
    await server.start()
    try:
        yield server
    finally:
        await server.close()
        await server.close()
        await leaks.settle(before)
        leaks.assert_no_leaks(before)


async def ask(server: HttpServer, raw: bytes, *, finish: bool = False) -> tuple[int, str, bytes]:
    """Send `raw`; returns status code, head and body. With `finish`, half-close after sending."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(raw)
        if finish:
            writer.write_eof()
        reply = await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
        await writer.wait_closed()
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), head.decode(), body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def test_http_shows_metrics_for_prometheus():
    async with serving() as server:
        code, head, body = await ask(server, get("/metrics"))
        assert code == 200
        assert "Content-Type: text/plain; version=0.0.4" in head
        assert f"Content-Length: {len(body)}" in head
        names = {family.name for family in text_string_to_metric_families(body.decode())}
        assert "entresol_requests" in names
        assert (await ask(server, get("/metrics?name=x")))[0] == 200


async def test_http_health_and_readiness():
    reasons = ["recovering: 40 %", 'quote " here']
    async with serving(reasons) as server:
        assert (await ask(server, get("/healthz")))[0::2] == (200, b"alive\n")
        code, _, body = await ask(server, get("/readyz"))
        assert code == 503
        assert json.loads(body) == {"ready": False, "reasons": reasons}
        reasons.clear()
        code, _, body = await ask(server, get("/readyz"))
        assert code == 200
        assert json.loads(body) == {"ready": True, "reasons": []}


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (get("/"), 404),
        (get("/metrics/../metrics"), 404),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET http://localhost/metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n: empty\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00" + bytes(64) + b"\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
    ],
)
async def test_http_refuses_what_is_malformed(raw, code):
    async with serving() as server:
        assert (await ask(server, raw))[0] == code
        assert (await ask(server, get("/healthz")))[0] == 200


async def test_http_request_at_the_limit_and_one_past_it():
    async with serving() as server:
        base = len(b"GET /healthz HTTP/1.1\r\nX: \r\n\r\n")

        def request(total: int) -> bytes:
            return b"GET /healthz HTTP/1.1\r\nX: " + b"y" * (total - base) + b"\r\n\r\n"

        # The reader's limit does not count the final separator.
        assert (await ask(server, request(http.REQUEST_BYTES_MAX)))[0] == 200
        assert (await ask(server, request(http.REQUEST_BYTES_MAX + 5)))[0] == 431
        assert (await ask(server, request(40 * http.REQUEST_BYTES_MAX)))[0] == 431
        assert (await ask(server, b"G" * (4 * http.REQUEST_BYTES_MAX)))[0] == 431


async def test_http_does_not_wait_for_ever_for_a_request():
    async with serving(request_deadline_s=0.05) as server:
        assert (await ask(server, b"GET /metr"))[0] == 408
        assert (await ask(server, b"GET /metr", finish=True))[0] == 400
        assert (await ask(server, b"", finish=True))[0] == 400


async def test_http_connections_are_limited():
    async with serving() as server:
        idle = [
            await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(http.CONNECTIONS_MAX)
        ]
        async with asyncio.timeout(10):
            while len(server._tasks) < http.CONNECTIONS_MAX:
                await asyncio.sleep(0.01)
        assert (await ask(server, get("/healthz")))[0] == 200, "whoever asks is answered"
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(idle[0][0].readexactly(1), 10)
        for _, other in idle:
            other.close()
            try:
                await other.wait_closed()
            except ConnectionError:
                continue
        async with asyncio.timeout(10):
            while server._tasks:
                await asyncio.sleep(0.01)
        assert (await ask(server, get("/healthz")))[0] == 200


async def test_http_survives_a_broken_readiness_callback(caplog):
    def broken() -> list[str]:
        raise RuntimeError("no idea")

    server = HttpServer(Metrics(), broken)
    await server.start()
    code, _, body = await ask(server, get("/readyz"))
    await server.close()
    assert code == 500
    assert b"no idea" not in body
    assert "no idea" in caplog.text


async def test_http_closes_with_requests_under_way():
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /met")
        async with asyncio.timeout(10):
            while not server._tasks:
                await asyncio.sleep(0.01)
        await server.close()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reader.readexactly(1), 10)
        writer.close()
        with pytest.raises(ConnectionError):
            await writer.wait_closed()


async def test_http_refuses_a_taken_port():
    async with serving() as server:
        second = HttpServer(Metrics(), list, port=server.port)
        with pytest.raises(OSError, match="in use"):
            await second.start()
        await second.close()


def test_http_on_uvloop():
    async def main() -> None:
        async with serving() as server:
            assert (await ask(server, get("/metrics")))[0] == 200
            assert (await ask(server, b"G" * (4 * http.REQUEST_BYTES_MAX)))[0] == 431
            assert (await ask(server, b"GET /metr", finish=True))[0] == 400

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
