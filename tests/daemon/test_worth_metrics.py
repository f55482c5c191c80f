"""What a running daemon says of its own worth: funnel, thrash, pollution, wear, queues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from daemon_lab import DESCRIPTOR, blocks, client_of, get, keys_of, shape
from harness import Running, eventually, running_daemon

from entresol_daemon.config import Config
from entresol_daemon.control.admin import SegmentRecord
from entresol_proto.limits import MIB

pytestmark = pytest.mark.daemon


def value(running: Running, name: str, **labels: str) -> float:
    metrics = running.daemon.metrics
    metrics.refresh()
    return metrics.registry.get_sample_value(f"entresol_{name}", labels) or 0.0


async def segments(running: Running) -> list[SegmentRecord]:
    return [each for each in await running.daemon.admin.segments(0, 1000) if each.state != "free"]


async def test_evicted_blocks_were_read_or_not_and_come_back_or_not(tmp_path: Path) -> None:
    def change(config: Config) -> Config:
        config = shape(flash=160 * MIB, segment=16 * MIB, fabrics=["shm"])(config)
        admission = replace(config.admission, policy="all", drive_writes_per_day=100.0)
        return replace(config, admission=admission)

    async with running_daemon(tmp_path, change) as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        first, later = keys_of(8, "first"), keys_of(200, "later")
        assert (await namespace.put(blocks(first, MIB))).ok
        assert (await get(namespace, first[:3], MIB)).ok
        found = await namespace.exists([*first[:5], b"not here, no", *first[5:7]])
        assert found.prefix_blocks == 5
        for kind, count in (("prefix", 5), ("behind", 2), ("absent", 1)):
            assert value(running, "lookup_blocks_total", tenant="dev", found=kind) == count
        for at in range(0, len(later), 8):
            assert (await namespace.put(blocks(later[at : at + 8], MIB), ack="durable")).ok
        here = (await namespace.exists(first)).present
        assert not any(here), "the flash is too large for this test"
        told = {
            use: value(running, "evicted_use_blocks_total", tenant="dev", use=use)
            for use in ("unused", "served", "unknown")
        }
        evicted = value(running, "evicted_blocks_total", reason="evicted")
        assert (told["served"], told["unknown"]) == (3, 0)
        assert told["unused"] == evicted - 3 > 5
        unused_bytes = value(running, "evicted_unused_bytes_total", tenant="dev")
        assert unused_bytes >= told["unused"] * MIB
        assert (await namespace.put(blocks(first[:4], MIB))).ok
        assert value(running, "thrashed_blocks_total", tenant="dev") == 4
        assert value(running, "restored_after_eviction_seconds_count") == 4
        written = value(running, "flash_written_bytes_total")
        capacity = value(running, "flash_capacity_bytes")
        assert value(running, "flash_drive_writes_total") == pytest.approx(written / capacity)
        appended = value(running, "flash_appended_bytes_total")
        assert appended >= 212 * MIB
        assert 0.9 < written / appended < 1.3  # the last four may still wait
        assert value(running, "write_budget_drive_writes_per_day") == 100.0
        burst = value(running, "write_budget_burst_bytes")
        assert burst == pytest.approx(100 * capacity / 24, rel=0.01)
        assert value(running, "write_budget_room_bytes") < burst - 100 * MIB


async def test_after_a_restart_what_was_read_is_not_known(tmp_path: Path) -> None:
    change = shape(flash=160 * MIB, segment=16 * MIB, fabrics=["shm"])
    async with running_daemon(tmp_path, change) as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        assert (await namespace.put(blocks(keys_of(8, "old"), MIB), ack="durable")).ok
    async with running_daemon(tmp_path, change) as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        assert (await get(namespace, keys_of(2, "old"), MIB)).ok
        later = keys_of(200, "later")
        for at in range(0, len(later), 8):
            assert (await namespace.put(blocks(later[at : at + 8], MIB), ack="durable")).ok
        assert value(running, "evicted_use_blocks_total", tenant="dev", use="unknown") == 6
        assert value(running, "evicted_use_blocks_total", tenant="dev", use="served") == 2


async def test_segments_say_how_far_they_are_written(tmp_path: Path) -> None:
    async with running_daemon(tmp_path, shape()) as running, client_of(running) as client:
        namespace = await client.namespace(DESCRIPTOR)
        keys = keys_of(6)
        assert (await namespace.put(blocks(keys, MIB), ack="durable")).ok
        (before,) = await segments(running)
        assert before.used_bytes > before.live_bytes >= 6 * MIB  # and its header
        assert (await namespace.forget(keys[:4])).count == 4
        (after,) = await segments(running)
        assert after.live_bytes < 3 * MIB
        assert after.used_bytes >= before.used_bytes  # what died still takes its place


async def test_a_host_that_takes_no_answers_is_counted_while_it_is_there(tmp_path: Path) -> None:
    """The transport says when its buffer is full; here the test does, to the same methods.

    Nothing is read from that host any more, not even that it has left.
    """
    async with running_daemon(tmp_path, shape(fabrics=["shm"])) as running:
        assert value(running, "queue_depth", queue="send") == 0
        assert value(running, "queue_depth", queue="flash_write") == 0
        async with client_of(running) as client:
            namespace = await client.namespace(DESCRIPTOR)
            (connection,) = running.daemon.control.connections
            connection.pause_writing()
            assert value(running, "queue_depth", queue="send") == 1
            connection.resume_writing()
            assert value(running, "queue_depth", queue="send") == 0
            assert (await namespace.exists(keys_of(3))).complete
            connection.pause_writing()
            assert not (await namespace.exists(keys_of(3), deadline_ns=200_000_000)).complete
        await eventually(
            lambda: value(running, "queue_depth", queue="send") == 0, what="the host to be gone"
        )
