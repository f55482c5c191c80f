"""What a daemon maps of its hosts: bounded over all sessions, shared by tenants, given back."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
import uvloop
from shm_peer import memfd, raw_server, raw_session, run, soon

from entresol_proto import limits
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import ReadOp
from entresol_proto.fabric.mapped import MappedBudget
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.shm import ShmFabricServer
from entresol_proto.fabric.shmlink import Kind, Message
from entresol_proto.status import FabricError, Status

MIB = limits.MIB


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> object:
    with asyncio.Runner(loop_factory=request.param) as one:
        yield one


def _page_table_kib() -> int:
    (found,) = re.findall(r"^VmPTE:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(found)


def test_one_peer_cannot_have_all_that_a_daemon_maps(
    runner: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Page tables are the daemon's own memory: of one memfd, shown in each of its sessions, a
    tenant made 2 MiB of them per session, as many as it had sessions."""

    async def scenario() -> None:
        budget = MappedBudget(96 * MIB)
        before = _page_table_kib()
        fd = memfd(16 * MIB)
        async with raw_server(tmp_path, budget=budget) as join:

            async def shown(tenant: str) -> int:
                _, peer = await join(tenant)
                peer.expose(1, 16 * MIB, fd)
                return (await peer.hear()).status

            assert [await shown("alpha") for _ in range(12)] == [0] * 3 + [Status.BUSY] * 9
            assert budget.used_bytes == 48 * MIB
            assert await shown("beta") == Status.OK
            assert await shown("beta") == Status.BUSY  # each may have what is free
            assert await shown("gamma") == Status.OK
            assert await shown("delta") == Status.OK
            assert await shown("omega") == Status.BUSY
            seen = -1
            while seen != (seen := _page_table_kib()):  # pages are found
                await asyncio.sleep(0.2)
            assert seen - before < 400, "six regions, 32 KiB for each 16 MiB mapped; 17 make 550"
        while budget.used_bytes:
            await asyncio.sleep(0.001)
        os.close(fd)

    with caplog.at_level("WARNING", "entresol.fabric"):
        run(runner, scenario())
    assert caplog.messages[0] == (
        "event=region_refused peer=alpha fabric=shm error=the peer's share of what is mapped is in "
        "use"
    )


def test_what_is_not_mapped_after_all_is_not_charged(runner: object, tmp_path: Path) -> None:
    async def scenario() -> None:
        budget = MappedBudget(64 * MIB)
        async with raw_server(tmp_path, budget=budget) as join:
            _, peer = await join("alpha")
            short, whole = memfd(4_096), memfd(3 * MIB)
            peer.expose(1, 8_192, short)
            assert (await peer.hear()).status == Status.BAD_REQUEST
            assert budget.used_bytes == 0
            peer.expose(2, 3 * MIB, whole)
            peer.say(Message(Kind.REVOKE, 2).encode())
            while (await peer.hear()).kind is not Kind.REVOKED:
                pass
            assert budget.used_bytes == 0
            peer.expose(3, 3 * MIB, whole)
            assert (await peer.hear()).status == Status.OK
            assert budget.used_bytes == 4 * MIB
            for fd in (short, whole):
                os.close(fd)
        while budget.used_bytes:
            await asyncio.sleep(0.001)

    run(runner, scenario())


def test_memory_is_mapped_once_in_a_session(runner: object, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            fd = memfd(MIB)
            for rkey, status in ((1, Status.OK), (2, Status.BUSY)):
                peer.expose(rkey, MIB, fd)
                assert (await peer.hear()).status == status
            assert endpoint._mapped_bytes == MIB
            peer.say(Message(Kind.REVOKE, 1).encode())
            assert (await peer.hear()).kind is Kind.REVOKED
            for rkey in (3, 4):  # at once
                peer.expose(rkey, MIB, fd)
            assert sorted([(await peer.hear()).status for _ in "34"]) == [0, Status.BUSY]
            os.close(fd)
            assert not endpoint.closed

    run(runner, scenario())


async def test_a_host_is_told_why_its_memory_is_not_mapped(tmp_path: Path) -> None:
    budget = MappedBudget(4 * MIB)
    server = ShmFabricServer(tmp_path / "run", budget=budget)
    await server.start()
    offer = server.offer(peer="alpha")
    host, _ = await registry.connect(offer, soon())
    daemon = await server.accept(offer, b"", soon())
    with MemfdBuffer(3 * MIB) as first, MemfdBuffer(3 * MIB) as second:
        assert first.seal_for_readers()
        assert second.seal_for_readers()
        exposure = await host.expose(first)
        with pytest.raises(FabricError, match="shm_mapped_bytes_max") as caught:
            await host.expose(second)
        assert caught.value.status is Status.BUSY
        await host.revoke(exposure)
        await host.expose(second)
        into = memoryview(bytearray(64))
        shown = await daemon.expose(second)  # the other way, what is granted, is as before
        assert await host.read([ReadOp(shown.span(0, 64), into)], soon()) == [Status.OK]
    await host.close()
    await daemon.close()
    await server.close()
