"""What is read together is answered together, and what is refused at the door costs no turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.shard.dispatch import READ_BYTES
from entresol_daemon.shard.staging import Staging
from entresol_daemon.shard.turns import SharedTurns
from entresol_proto.status import Status
from entresol_proto.wire import data, opening
from entresol_proto.wire.data import OpenAt
from entresol_proto.wire.session import Received
from tests.sim.shardlab import Host, World
from tests.sim.test_shard_review import KEYS, forget_memory, joined, names, simulate, stored


def heard(host: Host, raw: bytes) -> list[Received]:
    """What a host makes of bytes that came for it."""
    return list(host._machine.receive(raw, host._now()))


def pings(host: Host, count: int) -> bytes:
    """Requests that are answered in place, in one piece."""
    return b"".join(
        host._machine.send(opening.Ping(bytes([number] * 8)))[1] for number in range(count)
    )


def test_answers_to_what_was_read_together_leave_together(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        written: list[bytes] = []
        host._handler._write = written.append
        host._handler.receive(pings(host, 3))
        assert len(written) == 1
        tokens = [item.message.token for item in heard(host, written[0])]
        assert tokens == [bytes([number] * 8) for number in range(3)], "in their order"
        host._handler.receive(pings(host, 1))
        assert len(written) == 2, "and nothing is kept for the next"

    simulate(tmp_path, story)


def test_what_was_answered_leaves_before_a_connection_is_closed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        calls: list[Any] = []
        host._handler._write = calls.append
        host._handler._close = lambda: calls.append("closed")
        host._handler.receive(pings(host, 64) + b"\xff" * READ_BYTES)
        *answers, last = calls
        assert last == "closed"
        assert len(answers) == 1
        assert heard(host, answers[0])[0].message.token == bytes(8)

    simulate(tmp_path, story)


def test_a_get_that_the_door_refuses_takes_no_turn(tmp_path: Path) -> None:
    """A flood of them would else use up the round of the loop in which others could begin."""

    async def story(world: World) -> None:
        host = await joined(world)
        await asyncio.sleep(1)
        handler, parts, door = host._handler, world.shard.parts, world.shard.gets.door
        assert handler.session is not None
        account = handler.session.account
        written: list[bytes] = []
        handler._write = written.append
        loop_turns, before = parts.turns.loop, len(asyncio.all_tasks())
        many = 10 * door.at_once
        for _ in range(many):
            door._present[account.name] += 1
        fetch = data.Fetch(host.handle, OpenAt.HOST, False, 10**9, names(host, KEYS[:4]))
        fetches = b"".join(host._machine.send(fetch)[1] for _ in range(20))
        handler.receive(fetches)
        answers = [item.message for item in heard(host, b"".join(written))]
        assert [answer.status for answer in answers] == [Status.BUSY] * 20
        assert loop_turns._begun == 0
        assert loop_turns.waiting == 0
        assert len(asyncio.all_tasks()) == before
        for _ in range(many):
            door.depart(account)

    simulate(tmp_path, story)


@pytest.mark.parametrize("wrong", ["looked at", "begun"])
def test_a_load_that_fails_by_a_fault_of_ours_is_lost_and_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Its waiters hear at once, nothing stays pinned, and the next get reads the blocks again."""
    name = {"looked at": "_admit", "begun": "_load"}[wrong]
    real: Callable[..., Any] = getattr(Staging, name)
    left = [2 if wrong == "looked at" else 1]

    def fails(self: Staging, *args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        return real(self, *args)

    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:4])
        await asyncio.sleep(5)
        forget_memory(world)
        monkeypatch.setattr(SharedTurns, "read_bytes", 1)  # a read for each block
        monkeypatch.setattr(Staging, name, fails)
        began = asyncio.get_running_loop().time()
        found = set(await host.get(KEYS[:4], OpenAt.HOST))
        assert found & {Status.IO_ERROR, Status.INTERNAL}
        assert found <= {Status.OK, Status.IO_ERROR, Status.INTERNAL}
        assert asyncio.get_running_loop().time() - began < 1, "nobody waited for what never comes"
        gets, residency = world.shard.gets, world.shard.parts.residency
        assert gets.loading == 0
        await asyncio.sleep(5)  # what was granted is let go
        assert not any(one.pins for one in residency._by_slot.values())
        assert await host.get(KEYS[:4], OpenAt.HOST) == [Status.OK] * 4
        await asyncio.sleep(5)
        assert not any(one.pins for one in residency._by_slot.values())

    simulate(tmp_path, story)


def test_a_get_that_is_answered_at_once_is_here_no_more(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        door = world.shard.gets.door
        assert await host.get(KEYS[:4], OpenAt.HOST) == [Status.MISS] * 4
        bad = data.Fetch(host.handle + 9, OpenAt.HOST, False, 10**9, names(host, KEYS[:4]))
        host._handler.receive(host._machine.send(bad)[1])
        await asyncio.sleep(1)
        assert not door._present

    simulate(tmp_path, story)
