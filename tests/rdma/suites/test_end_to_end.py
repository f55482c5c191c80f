"""The real daemon and the real client over verbs: every path, and every way it can break.

Both run on the guest's one stack (`--net loopback`), or as processes of their own; two machines are
the pod's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from daemon_lab import all_are, client_of, counts, get, keys_of, put
from tier import BLOCK, CONNECT_S, DEADLINE_NS, ForkedDaemon, daemon, descriptor

from entresol_client import AsyncClient
from entresol_client.cli import main as cli
from entresol_proto.fabric.verbs_endpoint import VerbsEndpoint
from entresol_proto.status import Status
from tests.harness import eventually
from tests.rdma.evidence import trying

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]  # slow: they come first


async def test_blocks_go_out_and_come_home(tmp_path: Path) -> None:
    keys = keys_of(8)
    async with daemon(tmp_path) as running, client_of(running, fabric="verbs") as client:
        ns = await client.namespace(descriptor())
        done = await put(ns, keys, BLOCK, ack="durable")  # the daemon READs it from the host
        assert all_are(done, Status.OK), counts(done.statuses)
        for place in ("host", "daemon"):
            got = await get(ns, keys, BLOCK, open_at=place, deadline_ns=DEADLINE_NS)
            assert all_are(got, Status.OK), (place, counts(got.statuses))
        held = await ns.stage(keys, hold_ns=5_000_000_000, open_at="daemon")
        assert set(held.statuses) == {Status.OK}
        got = await get(ns, keys, BLOCK, open_at="daemon", deadline_ns=DEADLINE_NS)
        assert all_are(got, Status.OK)
        absent = await get(ns, keys_of(2, "absent"), BLOCK)
        assert all_are(absent, Status.MISS)


async def test_sizes_that_need_several_reads_or_the_bounce_buffer(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running, client_of(running, fabric="verbs") as client:
        ns = await client.namespace(descriptor())
        for size in (4_096, 65_537, (1 << 20) + 1):
            keys = keys_of(3, f"size{size}")
            assert all_are(await put(ns, keys, size), Status.OK)
            for place in ("host", "daemon"):
                got = await get(ns, keys, size, open_at=place, deadline_ns=DEADLINE_NS)
                assert all_are(got, Status.OK), (size, place, counts(got.statuses))


async def test_what_fell_out_of_memory_comes_from_flash(tmp_path: Path) -> None:
    keys = keys_of(200)  # 50 MiB through 32 MiB of memory
    async with daemon(tmp_path) as running, client_of(running, fabric="verbs") as client:
        ns = await client.namespace(descriptor())
        for at in range(0, len(keys), 20):
            assert all_are(await put(ns, keys[at : at + 20], BLOCK, ack="durable"), Status.OK)
        got = await get(ns, keys[:40], BLOCK, deadline_ns=DEADLINE_NS)
        assert all_are(got, Status.OK), counts(got.statuses)
        got = await get(ns, keys[-20:], BLOCK, open_at="daemon", deadline_ns=DEADLINE_NS)
        assert all_are(got, Status.OK), counts(got.statuses)


async def test_another_tenant_finds_nothing(tmp_path: Path) -> None:
    keys = keys_of(4)
    async with daemon(tmp_path) as running, client_of(running, fabric="verbs") as mine:
        assert all_are(await put(await mine.namespace(descriptor()), keys, BLOCK), Status.OK)
        async with client_of(running, "other", fabric="verbs") as theirs:
            got = await get(await theirs.namespace(descriptor()), keys, BLOCK)
            assert all_are(got, Status.MISS)
        got = await get(await mine.namespace(descriptor()), keys, BLOCK)
        assert all_are(got, Status.OK)


async def test_a_lease_that_ends_under_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host dawdles between grant and READ: the fence is the deregistered memory."""
    keys = keys_of(3)
    dawdle_s = 0.0
    read = VerbsEndpoint.read

    async def late(self: VerbsEndpoint, ops: Any, deadline_ns: int) -> list[Status]:
        if dawdle_s and ops:
            await asyncio.sleep(dawdle_s)
        return await read(self, ops, deadline_ns)

    async with (
        daemon(tmp_path, lease_ns=1_000_000_000) as running,
        client_of(running, fabric="verbs") as client,
    ):
        ns = await client.namespace(descriptor())
        assert all_are(await put(ns, keys, BLOCK), Status.OK)
        monkeypatch.setattr(VerbsEndpoint, "read", late)
        with trying("rkey after lease end") as trial:
            dawdle_s = 3.0
            with trial.within(DEADLINE_NS / 1e9):
                got = await get(ns, keys, BLOCK, open_at="daemon", deadline_ns=DEADLINE_NS)
            assert not any(status is Status.OK for status in got.statuses), got.statuses
            dawdle_s = 0.0
            await eventually(lambda: client.shards()[0].connected, seconds=CONNECT_S)
            got = await get(ns, keys, BLOCK, open_at="daemon", deadline_ns=DEADLINE_NS)
            assert all_are(got, Status.OK), counts(got.statuses)


async def test_a_lost_session_comes_back(tmp_path: Path) -> None:
    keys = keys_of(4)
    async with daemon(tmp_path) as running, client_of(running, fabric="verbs") as client:
        ns = await client.namespace(descriptor())
        assert all_are(await put(ns, keys, BLOCK), Status.OK)
        for connection in list(running.daemon.control.connections):
            connection.abort()
        await eventually(lambda: not client.shards()[0].connected, seconds=30, what="the loss")
        await eventually(lambda: client.shards()[0].connected, seconds=60, what="a session")
        assert client.shards()[0].fabric == "verbs"
        got = await get(ns, keys, BLOCK, deadline_ns=DEADLINE_NS)
        assert all_are(got, Status.OK), counts(got.statuses)


async def test_a_daemon_killed_and_started_again(tmp_path: Path) -> None:
    keys = keys_of(4)
    process = ForkedDaemon(tmp_path / "d", "--flash", "128MiB")
    with process:
        config = process.client_config(
            fabric="verbs", fallback=False, deadline_ns=DEADLINE_NS,
            ping_interval_ns=500_000_000, connect_deadline_ns=5_000_000_000,
        )  # fmt: skip
        async with await AsyncClient.open(config) as client:
            await eventually(lambda: client.shards()[0].connected, seconds=CONNECT_S)
            ns = await client.namespace(descriptor())
            assert all_are(await put(ns, keys, BLOCK, ack="durable"), Status.OK)
            with trying("daemon killed") as trial:
                process.kill()
                with trial.within(30):  # a miss, not a hang
                    got = await get(ns, keys, BLOCK, deadline_ns=3_000_000_000)
                assert not any(status is Status.OK for status in got.statuses)
                await asyncio.to_thread(process.start)
                # dev takes any free port: the new file says which
                async with await AsyncClient.open(
                    process.client_config(fabric="verbs", fallback=False, deadline_ns=DEADLINE_NS)
                ) as again:
                    await eventually(lambda: again.shards()[0].connected, seconds=CONNECT_S)
                    ns = await again.namespace(descriptor())
                    got = await get(ns, keys, BLOCK, deadline_ns=DEADLINE_NS)
                    assert all_are(got, Status.OK), counts(got.statuses)


async def test_without_a_usable_device_it_falls_back_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(2)
    async with daemon(tmp_path) as running:
        config = running.client_config(
            fabric="verbs", verbs_devices=("nosuch0",), deadline_ns=DEADLINE_NS
        )
        with caplog.at_level(logging.INFO, "entresol.client"):
            async with await AsyncClient.open(config) as client:
                await eventually(lambda: client.shards()[0].connected, seconds=CONNECT_S)
                shard = client.shards()[0]
                assert shard.fabric == "tcp"
                assert "not verbs" in shard.fabric_reason
                assert "nosuch0" in shard.fabric_reason
                ns = await client.namespace(descriptor())
                assert all_are(await put(ns, keys, BLOCK), Status.OK)
                assert all_are(await get(ns, keys, BLOCK), Status.OK)
        assert "nosuch0" in caplog.text


def test_doctor_shows_devices_and_the_path(tmp_path: Path) -> None:
    with ForkedDaemon(tmp_path / "d", "--flash", "128MiB") as process:
        found = _doctor(process, ())
        text = "\n".join(f["text"] for f in found)
        assert "is used, with GID" in text
        assert "RoCE v2" in text
        assert "verbs" in text
        lines = (process.directory / "client.toml").read_text()
        wrong = process.directory / "wrong.toml"
        wrong.write_text(f'fabric = "verbs"\nverbs_devices = ["nosuch0"]\n{lines}')
        warned = [f for f in _doctor(process, ("--config", str(wrong))) if f["level"] == "warn"]
        assert any("nosuch0" in f["text"] for f in warned), warned


def _doctor(process: ForkedDaemon, arguments: tuple[str, ...]) -> list[dict[str, str]]:
    """The command in this process: another one would import for ten emulated seconds."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setenv("ENTRESOL_CONFIG", str(process.directory / "client.toml"))
        cli.main(["doctor", "--json", *arguments])
    findings: list[dict[str, str]] = json.loads(said.getvalue())["findings"]
    return findings
