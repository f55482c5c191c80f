"""`entresol events` where a stream ends, falls behind or is refused: nothing is silently left out.

The command is a process that talks to the daemon's gRPC server over the admin socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from test_grpc import NS, A, B, Pod, running, store

from entresol_daemon.control import grpc_services
from entresol_daemon.events.log import EventLimits
from entresol_daemon.events.stream import snapshot_batches
from entresol_daemon.events.types import Event, Kind
from entresol_proto.ids import TenantName

SECONDS_MAX = 30.0
HELD = 4


@contextlib.asynccontextmanager
async def following(pod: Pod, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`entresol events --json` as the operator; it is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "entresol_client.cli.main", "events", "--json", *words,
        "--admin-socket", str(pod.socket),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def next_row(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    async with asyncio.timeout(SECONDS_MAX):
        line = await process.stdout.readline()
    if not line:
        assert process.stderr is not None
        raise AssertionError(f"it ended: {(await process.stderr.read()).decode()}")
    return json.loads(line)


async def watched(pod: Pod) -> None:
    """Return when somebody follows."""
    async with asyncio.timeout(SECONDS_MAX):
        while not pod.backend.event_log.subscriptions_count:
            await asyncio.sleep(0.01)


async def test_all_that_is_held_comes_although_a_watch_ends_before(tmp_path: Path) -> None:
    """A tenant's watch ends with its erasure, also with one that was long ago."""
    async with running(tmp_path) as pod:
        pod.backend.event_log.publish(Kind.TENANT_ERASED, A, time_unix_ns=1)
        for number in range(600):
            store(pod.backend, A, number)
        async with following(pod, "--tenant", "a") as process:
            out, err = await asyncio.wait_for(process.communicate(), SECONDS_MAX)
        assert process.returncode == 0, err.decode()
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["seq"] for row in rows[:-1]] == list(range(1, 602))
        assert rows[-1] == {"type": "position", "position": f"{77:016x}:601"}


async def test_a_daemon_that_stops_half_way_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as pod:
        for number in range(20_000):
            store(pod.backend, A, number, tokens=16)
        async with following(pod, "--tenant", "a") as process:
            assert (await next_row(process))["seq"] == 1
            closing = asyncio.create_task(pod.server.close())
            _, err = await asyncio.wait_for(process.communicate(), SECONDS_MAX)
            await closing
        assert process.returncode == 3, err.decode()


async def test_who_follows_all_tenants_too_slowly_is_told_of_whom_and_goes_on(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path, event_limits=EventLimits(tenant_events_max=HELD)) as pod,
        following(pod, "--all-tenants") as process,
    ):
        await watched(pod)
        store(pod.backend, A, 1)
        assert (await next_row(process))["seq"] == 1
        store(pod.backend, B, 1)
        assert (await next_row(process))["tenant"] == "b"
        for number in range(2 * HELD):  # in one turn of the loop: it can read none of them
            store(pod.backend, A, number)
        gap = await next_row(process)
        assert (gap["type"], gap["tenant"], gap["reason"]) == ("gap", "a", "slow")
        assert (gap["first_missed_seq"], gap["last_missed_seq"]) == (2, 1 + 2 * HELD)
        await watched(pod)
        store(pod.backend, A, 1)
        assert (await next_row(process))["seq"] == gap["last_missed_seq"] + 1


async def test_a_refusal_that_passes_does_not_end_who_follows(tmp_path: Path) -> None:
    """As after an outage, when the daemon has not noticed yet that the old watch is gone."""
    async with (
        running(tmp_path, event_limits=EventLimits(subscriptions_per_tenant_max=1)) as pod,
        following(pod, "--tenant", "a", "--follow") as process,
    ):
        await watched(pod)
        store(pod.backend, A, 1)
        assert (await next_row(process))["seq"] == 1
        for stream in [one for service in pod.server._events for one in service._streams]:
            stream.close()
        with contextlib.closing(pod.backend.event_log.subscribe(A)):
            assert process.stderr is not None
            said = b""
            async with asyncio.timeout(SECONDS_MAX):
                while b"are open" not in said:
                    said = await process.stderr.readline()
        store(pod.backend, A, 2)
        assert (await next_row(process))["seq"] == 2


@pytest.mark.parametrize("begins", [(), ("--snapshot",)])
async def test_who_follows_is_told_what_happens_while_a_snapshot_is_taken(
    tmp_path: Path, begins: tuple[str, ...]
) -> None:
    """The log holds less than that, and a watch from the snapshot's position began with a gap, as
    it did after each snapshot that followed."""
    walks = 0

    async def long(tenant: TenantName) -> AsyncIterator[Event]:
        nonlocal walks
        walks += 1
        for number in range(3):
            yield Event(0, 1, tenant, Kind.STORED, NS, (bytes([number]) * 16,))
            for _ in range(HELD):
                store(pod.backend, tenant, number)

    limits = EventLimits(tenant_events_max=HELD)
    async with running(tmp_path, event_limits=limits) as pod:
        pod.backend.snapshot = long  # type: ignore[method-assign]
        async with following(pod, "--tenant", "a", "--follow", *begins) as process:
            if not begins:
                await watched(pod)
                for number in range(2 * HELD):  # in one turn of the loop: it can read none of them
                    store(pod.backend, A, number)
                gap = await next_row(process)
                assert gap["type"] == "gap"
            before = 0 if begins else 2 * HELD
            told = [await next_row(process) for _ in range(3 * HELD + 5)]
            assert told[0] == {"type": "snapshot", "position": f"{77:016x}:{before}"}
            last = before + 3 * HELD
            seqs = [row["seq"] for row in told[1:-1]]
            assert seqs.count(0) == 3
            assert [seq for seq in seqs if seq] == list(range(before + 1, last + 1))
            assert told[-1] == {"type": "complete", "position": f"{77:016x}:{last}"}
            await watched(pod)
            store(pod.backend, A, 9)
            assert (await next_row(process))["seq"] == last + 1
        assert walks == 1


async def test_a_snapshot_that_is_read_too_slowly_is_taken_again(tmp_path: Path) -> None:
    first = True

    async def cut(tenant: TenantName) -> AsyncIterator[Event]:
        nonlocal first
        yield Event(0, 1, tenant, Kind.STORED, NS, (bytes(16),))
        for _ in range(2 * HELD if first else 1):
            store(pod.backend, tenant, 1)
        first = False

    limits = EventLimits(tenant_events_max=HELD)
    async with running(tmp_path, event_limits=limits) as pod:
        pod.backend.snapshot = cut  # type: ignore[method-assign]
        async with following(pod, "--tenant", "a", "--follow", "--snapshot") as process:
            kinds = [(await next_row(process))["type"] for _ in range(7)]
            assert kinds == ["snapshot", "event", "gap", "snapshot", "event", "event", "complete"]


async def test_a_daemon_that_does_not_know_following_is_watched_from_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one takes no notice of the field: the watch gives what happened meanwhile."""

    async def busy(tenant: TenantName) -> AsyncIterator[Event]:
        yield Event(0, 1, tenant, Kind.STORED, NS, (bytes(16),))
        store(pod.backend, tenant, 1)

    def older(*args: Any, follow: bool, **more: Any) -> Any:
        return snapshot_batches(*args, **more)

    monkeypatch.setattr(grpc_services, "snapshot_batches", older)
    async with running(tmp_path) as pod:
        pod.backend.snapshot = busy  # type: ignore[method-assign]
        async with following(pod, "--tenant", "a", "--follow", "--snapshot") as process:
            rows = [await next_row(process) for _ in range(4)]
            assert [row["type"] for row in rows] == ["snapshot", "event", "complete", "event"]
            assert rows[0]["position"] == rows[2]["position"] == f"{77:016x}:0"
            assert [rows[1]["seq"], rows[3]["seq"]] == [0, 1]
