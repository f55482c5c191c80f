"""Markers in every payload, token id and salt; then every place that outsiders can see is searched.

Token ids may stand in the tenant's own events, because routers need them, and nowhere else.
"""

from __future__ import annotations

import asyncio
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from canary_lab import IN_EVENTS, MARKERS, TOKENS, busy, files_under, found_in, search
from daemon_lab import DESCRIPTOR, client_of
from harness import DaemonProcess

from entresol_client.results import PutBlock
from entresol_proto.limits import MIB
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg

pytestmark = pytest.mark.daemon


def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    """A canary that cannot sing would prove nothing."""
    path = tmp_path / "file"
    for what, marker in MARKERS.items():
        path.write_bytes(bytes(8 * MIB - 5) + marker + bytes(100))
        assert search(path) == [what]
        assert search(path, what) == []


@pytest.fixture
def process(tmp_path: Path) -> Iterator[DaemonProcess]:
    found = DaemonProcess(tmp_path / "d", "--flash", "128MiB", "--codec", "raw")
    with found:
        yield found


async def events_seen(process: DaemonProcess, tenant: str) -> tuple[list[Any], bytes]:
    """Everything the tenant is told: a snapshot over gRPC."""
    config = process.client_config(tenant)
    credentials = grpc.ssl_channel_credentials(
        config.tls.ca.read_bytes(), config.tls.key.read_bytes(), config.tls.cert.read_bytes()
    )
    address = f"localhost:{config.shards[0].grpc_port}"
    async with grpc.aio.secure_channel(address, credentials) as channel:
        stub = pbg.EventsStub(channel)
        replies = [reply async for reply in stub.Snapshot(pb.SnapshotRequest())]
        describe = await pbg.DescribeStub(channel).Describe(pb.DescribeRequest())
    events = [event for reply in replies for event in reply.events]
    return events, b"".join(m.SerializeToString() for m in (*replies, describe))


async def test_markers_are_nowhere_to_be_seen(process: DaemonProcess, tmp_path: Path) -> None:
    async with (
        client_of(process) as mine,
        client_of(process, "dev", "tcp") as far,
        client_of(process, "other") as theirs,
    ):
        for client, ack in ((mine, "durable"), (far, "accepted"), (mine, "accepted")):
            await busy(client, ack)
        space = await theirs.namespace(DESCRIPTOR)
        await space.put([PutBlock(b"an-innocent-key", b"innocent" * 100)])
        events, told = await events_seen(process, "dev")
        assert len(events) == 110
        assert {tuple(event.token_ids) for event in events} == {TOKENS}, "routers need them"
        assert not found_in(told, *IN_EVENTS)
        events, told = await events_seen(process, "other")
        assert len(events) == 1
        assert not found_in(told)
        base = mine.config.shards[0].metrics
        for path in ("/metrics", "/healthz", "/readyz", "/nothing"):
            page = await asyncio.to_thread(fetch, base + path)
            assert not found_in(page), path
    assert process.process is not None
    pid = process.process.pid
    arguments = (
        Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    )
    assert not found_in(arguments)
    process.signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.process.wait, 60) == 0
    log = process.log_path.read_bytes()
    assert len(log) > 500, "there is a log to search"
    assert not found_in(log)
    searched = 0
    for path in files_under(tmp_path):
        # The plain header of a sealed block holds the engine key, as the format says.
        allowed = ("engine key",) if path.name == "flash.data" else ()
        assert search(path, *allowed) == [], path
        searched += path.stat().st_size
    assert searched > 100 * MIB, "the data file was among them"


def fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.read()
