"""How opened blocks end with their session: no byte of them changes while a host can read it, and
no memory of theirs stays when it was given back to the budget.
"""

from __future__ import annotations

import asyncio
import mmap
import weakref
from dataclasses import replace
from pathlib import Path

from entresol_proto.fabric.base import ReadOp
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.status import Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Ack, OpenAt
from tests.sim.shardlab import SECOND_NS, Host, World
from tests.sim.test_shard_review import KEYS, joined, names, simulate


async def opened(world: World, *, revokes: bool = True) -> tuple[Host, bytes, data.GrantItem]:
    """A host, the content of a long block, and where the daemon lets it read that."""
    host = await joined(world, private=True)
    end = host.wire.daemon
    end.capabilities = replace(end.capabilities, revokes=revokes)
    content = world.oracle.content
    key = next(key for key in KEYS if len(content("alpha", key)) >= 9000)
    assert await host.put([key], Ack.DURABLE) == [Status.OK]
    fetch = data.Fetch(host.handle, OpenAt.DAEMON, False, SECOND_NS, names(host, [key]))
    (item,) = [item async for grant in host._answers(fetch) for item in grant.items]
    return host, content("alpha", key), item


def test_a_lease_that_ends_while_its_session_closes_is_fenced_before_it_is_wiped(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        host, content, item = await opened(world)
        honest = host.wire.daemon.close

        async def late() -> None:
            await asyncio.sleep(1)  # the reads of a peer are answered meanwhile
            await honest()

        host.wire.daemon.close = late  # type: ignore[method-assign]
        (session,) = world.shard.sessions.values()
        closing = asyncio.ensure_future(world.shard.close_session(session))
        seen = set()
        while not closing.done():
            into = bytearray(len(content))
            op = ReadOp(item.span, memoryview(into))
            (status,) = await host.wire.host.read([op], host._now() + SECOND_NS)
            assert status is not Status.OK or bytes(into) == content
            seen.add(status)
            await asyncio.sleep(0.01)
        assert {Status.OK, Status.LEASE_EXPIRED} <= seen
        assert session.exposed_blocks == 0

    simulate(tmp_path, story)


def test_memory_that_was_shown_is_gone_when_its_budget_is_given_back(tmp_path: Path) -> None:
    """Leases of a session over shm go on after it: they kept the pages, which nobody counted."""

    async def story(world: World) -> None:
        maps: list[weakref.ref[mmap.mmap]] = []

        def make(length_bytes: int) -> MemfdBuffer:
            buffer = MemfdBuffer(length_bytes)
            maps.append(weakref.ref(buffer._map))
            return buffer

        parts = world.shard.parts
        parts.make_plain_buffer = make
        host, _, _ = await opened(world, revokes=False)
        assert parts.leases.held_by(1) == 1
        (left,) = maps
        assert world.shard.gets.opened.memory.mapped_bytes > 0
        await host.gone()
        assert parts.leases.held_by(1) == 1, "its host may be opening a block in place"
        assert world.shard.gets.opened.memory.mapped_bytes == 0
        found = left()
        assert found is None or found.closed
        await asyncio.sleep(1)
        assert parts.leases.held_by(1) == 0

    simulate(tmp_path, story)
