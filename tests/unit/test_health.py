"""grpc.health.v1: it follows the shard, and nobody who asks can hold it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from entresol_daemon.control.grpc_server import GrpcServer

Reply = health_pb2.HealthCheckResponse
HEADERS, SETTINGS, DATA = 1, 4, 0
END_HEADERS, END_STREAM = 4, 1
INITIAL_WINDOW_SIZE = 4  # RFC 9113, 6.5.2
WATCH = "/grpc.health.v1.Health/Watch"


@asynccontextmanager
async def running(folder: Path, reasons: list[str]) -> AsyncIterator[tuple[GrpcServer, Path]]:
    """`reasons` keep the shard from being ready."""
    path, shard = folder / "s", SimpleNamespace(event_log=None, reasons_not_ready=lambda: reasons)
    server = GrpcServer(shard, unix_path=path)  # type: ignore[arg-type]
    await server.start()
    try:
        yield server, path
    finally:
        await asyncio.wait_for(server.close(), 10)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """RFC 9113, 4.1."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def header(name: str, value: str) -> bytes:
    """A literal that is not indexed, RFC 7541, 6.2.2."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


async def watch_without_reading(path: Path) -> asyncio.StreamWriter:
    """A caller of Watch who allows the server no byte of an answer."""
    _, writer = await asyncio.open_unix_connection(str(path))
    window = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + bytes(4)
    words = {
        ":method": "POST", ":scheme": "http", ":path": WATCH, ":authority": "x",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    writer.write(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, window)
        + frame(SETTINGS, 1, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, b"".join(header(*each) for each in words.items()))
        + frame(DATA, END_STREAM, 1, bytes(5))
    )
    await writer.drain()
    return writer


async def test_a_watcher_who_does_not_read_holds_nobody(tmp_path: Path) -> None:
    reasons: list[str] = []
    async with running(tmp_path, reasons) as (server, path):
        server.announce()
        writer = await watch_without_reading(path)
        try:
            await asyncio.sleep(0.3)
            reasons.append("draining")
            server.tell_health()
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                found = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
                assert found.status == Reply.NOT_SERVING
            await asyncio.wait_for(server.close(), 10)
        finally:
            writer.close()


async def test_watchers_hear_of_every_change_and_of_the_end(tmp_path: Path) -> None:
    reasons = ["flash failed"]
    async with (
        running(tmp_path, reasons) as (server, path),
        grpc.aio.insecure_channel(f"unix:{path}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        known, unknown = (
            stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=30)
            for name in ("entresol.v1.Events", "nobody.Knows")
        )

        async def told(call: Any) -> Any:
            answer = await call.read()
            return answer if answer is grpc.aio.EOF else answer.status

        assert await told(known) == Reply.NOT_SERVING
        assert await told(unknown) == Reply.SERVICE_UNKNOWN
        server.announce()
        reasons.clear()  # nobody tells of it
        assert await told(known) == Reply.SERVING
        server.tell_health()
        reasons.append("draining")
        server.tell_health()
        assert await told(known) == Reply.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody.Knows"), timeout=10)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        await server.close()
        assert await told(known) is await told(unknown) is grpc.aio.EOF
