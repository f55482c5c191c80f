"""Markers in every payload, token id and salt; then every place that outsiders can see is searched.

Token ids may stand in the tenant's own events, because routers need them, and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon_lab import DESCRIPTOR, client_of, counts, keys_of
from harness import DaemonProcess

from entresol_client.client import AsyncClient
from entresol_client.results import PutBlock
from entresol_proto.limits import KIB, MIB
from entresol_proto.status import Status
from entresol_proto.v1 import entresol_pb2 as pb
from entresol_proto.v1 import entresol_pb2_grpc as pbg

pytestmark = pytest.mark.daemon

SALT = "canary-salt-0d9f4c1e7ab2"
PAYLOAD = b"CANARY/payload/6b1f9e02d7c4"
TOKENS = (0x43414E41, 0x52592F74, 0x6F6B656E, 0x2F39663A)  # "CANA" "RY/t" "oken" "/9f:"
ENGINE_KEY = b"canary-engine-key"


def varint(number: int) -> bytes:
    """As protobuf packs it."""
    groups = [(number >> shift) & 0x7F for shift in range(0, 35, 7)]
    while len(groups) > 1 and not groups[-1]:
        groups.pop()
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


MARKERS = {
    "payload": PAYLOAD,
    "salt": SALT.encode(),
    "token ids": struct.pack("<4I", *TOKENS),
    "token ids in words": str(TOKENS[0]).encode(),
    "token ids in hex": f"{TOKENS[1]:08x}".encode(),
    "token ids in events": b"".join(varint(token) for token in TOKENS),
    "engine key": ENGINE_KEY,
}
IN_EVENTS = ("token ids", "token ids in events", "engine key")


def payload(number: int, length_bytes: int) -> bytes:
    """Nothing but the marker, so that every piece of it is one."""
    unit = PAYLOAD + number.to_bytes(4, "little")
    return (unit * (length_bytes // len(unit) + 1))[:length_bytes]


def found_in(raw: bytes, *allowed: str) -> list[str]:
    return [what for what, marker in MARKERS.items() if marker in raw and what not in allowed]


def search(path: Path, *allowed: str) -> list[str]:
    """Markers in a file, read in pieces that overlap."""
    found: set[str] = set()
    with path.open("rb") as file:
        tail = b""
        while piece := file.read(8 * MIB):
            found.update(found_in(tail + piece, *allowed))
            tail = piece[-64:]
    return sorted(found)


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


async def busy(client: AsyncClient, ack: str) -> None:
    """Every way of use, with some failures among them."""
    space = await client.namespace(replace(DESCRIPTOR, cache_salt=SALT))
    keys = [ENGINE_KEY + key[:8] for key in keys_of(120)]
    items = [
        PutBlock(key, payload(at, 64 * KIB), at, keys[at - 1] if at else None, TOKENS)
        for at, key in enumerate(keys)
    ]
    result = await space.put(items, ack=ack)  # type: ignore[arg-type]
    assert set(result.statuses) <= {Status.OK, Status.EXISTS}, counts(result.statuses)
    buffers = [bytearray(64 * KIB) for _ in keys]
    places = ["host"] if client.shards()[0].fabric == "tcp" else ["host", "daemon"]
    for place in places:
        assert (await space.get_into(keys, buffers, open_at=place)).ok  # type: ignore[arg-type]
        assert bytes(buffers[7]) == payload(7, 64 * KIB)
    await space.get_into(keys[:3], [bytearray(100)] * 3)  # wrong lengths
    await space.get_into([b"canary-engine-key-absent"], [bytearray(9)])
    await space.put([PutBlock(ENGINE_KEY, payload(1, 5 * MIB), token_ids=TOKENS)])  # too large
    await space.stage(keys, hold_ns=100_000_000)
    await space.touch(keys)
    await space.forget(keys[:10])
    await space.explain(keys)


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
    for folder, _, names in os.walk(tmp_path):
        for name in names:
            path = Path(folder) / name
            if path.is_file() and not path.is_symlink():
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
