"""Puts over shared memory that are sealed where they lie: what the host does to them meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_lab import (
    DESCRIPTOR,
    Raw,
    all_are,
    assert_idle,
    client_of,
    content,
    disconnected,
    get,
    key_of,
    keys_of,
    put,
    put_item,
    raw_of,
    shape,
)
from harness import Running, running_daemon

from entresol_daemon.config import Config
from entresol_daemon.shard import pulls, puts
from entresol_daemon.shard.pulls import Sealing
from entresol_proto.fabric.base import Exposure, FabricKind
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.shm import ShmFabricServer
from entresol_proto.limits import GIB, KIB, MIB
from entresol_proto.status import Status

pytestmark = pytest.mark.daemon

SIZE = 1 * MIB


class Gate:
    """Sealing waits here. A worker thread says that it has begun, and is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.jobs: list[bool] = []  # whether each was to be wiped: was a copy
        seal = pulls.seal

        def gated(job: Sealing) -> Any:
            self.jobs.append(job.wipe)
            self.begun.set()
            assert self.open.wait(30)
            return seal(job)

        monkeypatch.setattr(puts, "seal", gated)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 30), "nothing was sealed"


@contextlib.asynccontextmanager
async def committing(running: Running) -> AsyncIterator[tuple[Raw, Exposure, Any]]:
    """A host whose COMMIT of one block is under way."""
    async with raw_of(running) as raw:
        namespace = await raw.namespace()
        with MemfdBuffer(SIZE) as buffer:
            buffer.view[:] = content(key_of(1), SIZE)
            assert buffer.seal_for_readers()
            exposure = await raw.endpoint.expose(buffer)
            item = put_item(namespace, key_of(1), SIZE)
            (granted,) = (await raw.reserve(namespace.handle, [item])).items
            pairs = [(granted.put_id, exposure.span(0, SIZE))]
            commit = asyncio.ensure_future(raw.commit(pairs))
            yield raw, exposure, commit
            if not commit.done():
                commit.cancel()
            await asyncio.wait({commit})


async def test_what_the_host_takes_back_while_it_is_sealed_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with running_daemon(tmp_path / "d", shape(fabrics=["shm"])) as running:
        async with committing(running) as (raw, exposure, commit):
            await gate.reached()
            assert gate.jobs == [False], "the block was copied before"
            revoked = asyncio.ensure_future(raw.endpoint.revoke(exposure))
            (region,) = next(
                iter(running.daemon.shard.sessions.values())
            ).endpoint._regions.values()  # type: ignore[union-attr]
            while not region.revoked:
                await asyncio.sleep(0.001)
            assert not revoked.done(), "memory was given back while a thread reads it"
            gate.open.set()
            await revoked
            assert await commit == [Status.LEASE_EXPIRED]
        async with client_of(running) as client:
            found = await get(await client.namespace(DESCRIPTOR), [key_of(1)], SIZE)
            assert all_are(found, Status.MISS)
        await disconnected(running)
        await assert_idle(running.daemon)


async def test_a_host_that_leaves_while_its_block_is_sealed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with running_daemon(tmp_path / "d", shape(fabrics=["shm"])) as running:
        async with committing(running) as (raw, _, _):
            await gate.reached()
            endpoint = next(iter(running.daemon.shard.sessions.values())).endpoint
            await raw.endpoint.close()
            while endpoint is not None and not endpoint.closed:
                await asyncio.sleep(0.001)
            gate.open.set()
        await disconnected(running)
        await assert_idle(running.daemon)
        async with client_of(running) as client:
            found = await get(await client.namespace(DESCRIPTOR), [key_of(1)], SIZE)
            assert all_are(found, Status.MISS)


async def test_a_block_that_changes_while_it_is_sealed_is_whole_all_the_same(
    tmp_path: Path,
) -> None:
    """Every byte is read once: what was sealed opens, whichever of the bytes it was."""
    async with (
        running_daemon(tmp_path / "d", shape(fabrics=["shm"])) as running,
        raw_of(running) as raw, client_of(running) as client,
    ):  # fmt: skip
        ns = await client.namespace(DESCRIPTOR)
        for round_ in range(20):
            keys = keys_of(16, f"changing {round_}")
            assert await _put_what_changes(raw, keys) == [Status.OK] * len(keys)
            into = [bytearray(SIZE) for _ in keys]
            got = await ns.get_into(keys, into)
            assert got.ok, got.statuses
            if any(0 < block.count(0) < SIZE for block in into):
                return
        raise AssertionError("no block changed while it was sealed: nothing was shown")


async def _put_what_changes(raw: Raw, keys: list[bytes]) -> list[Status]:
    """Put blocks that all lie in the same place, where a thread writes all the while."""
    stop = threading.Event()
    namespace = await raw.namespace()
    with MemfdBuffer(SIZE) as buffer:
        assert buffer.seal_for_readers()
        exposure = await raw.endpoint.expose(buffer)

        def scribble() -> None:
            ones, zeros = b"\xff" * SIZE, bytes(SIZE)
            while not stop.is_set():
                buffer.view[:] = ones
                buffer.view[:] = zeros

        scribbler = threading.Thread(target=scribble)
        scribbler.start()
        try:
            items = [put_item(namespace, key, SIZE) for key in keys]
            granted = (await raw.reserve(namespace.handle, items)).items
            return await raw.commit([(each.put_id, exposure.span(0, SIZE)) for each in granted])
        finally:
            stop.set()
            scribbler.join()
            await raw.endpoint.revoke(exposure)


@pytest.mark.parametrize("codec", ["raw", "dense"])
async def test_only_blocks_that_stay_raw_are_sealed_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    gate = Gate(monkeypatch)
    gate.open.set()

    def change(config: Config) -> Config:
        config = shape(fabrics=["shm"])(config)
        return replace(config, sealing=replace(config.sealing, codec=codec))

    async with (
        running_daemon(tmp_path / "d", change) as running, client_of(running) as client,
    ):  # fmt: skip
        ns = await client.namespace(DESCRIPTOR)
        for size in (SIZE + 1, 64 * KIB, 1):
            keys = keys_of(4, f"{size}")
            assert all_are(await put(ns, keys, size, ack="durable"), Status.OK)
            assert (await get(ns, keys, size)).ok
        # Where a codec gains nothing, the next blocks are not tried with it.
        assert gate.jobs[:4] == [codec != "raw"] * 4
        assert codec == "raw" or not all(gate.jobs)
        assert codec != "raw" or not any(gate.jobs)


async def test_a_host_of_whom_no_more_is_mapped_is_busy_with_its_puts_only(tmp_path: Path) -> None:
    """Its tenant's share of what the daemon maps is in use: it hears so, and goes on after."""
    async with running_daemon(tmp_path / "d", shape(fabrics=["shm"])) as running:
        server = running.daemon.shard.fabrics[FabricKind.SHM]
        assert isinstance(server, ShmFabricServer)
        async with client_of(running) as client:
            assert all_are(
                await put(await client.namespace(DESCRIPTOR), keys_of(3), SIZE), Status.OK
            )
            assert set(server._budget._held) == {"dev"}
            others = server._budget.take("greedy", 64 * GIB - server._budget.used_bytes)
            assert others is not None
            async with client_of(running) as late:
                space = await late.namespace(DESCRIPTOR)
                assert all_are(await put(space, keys_of(3, "new"), SIZE), Status.BUSY)
                assert all_are(await get(space, keys_of(3), SIZE), Status.OK)
                others.end()
                assert all_are(await put(space, keys_of(3, "new"), SIZE), Status.OK)
        await disconnected(running)
        while server._budget.used_bytes:
            await asyncio.sleep(0.001)
