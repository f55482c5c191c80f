"""A process without memory: what was begun comes to its end, or is refused in a line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.core.valuing import Values
from entresol_daemon.shard import lookups
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire import data
from entresol_proto.wire.data import Ack, OpenAt
from tests.sim.shardlab import World
from tests.sim.test_shard_review import KEYS, joined, names, simulate, stored


def no_memory(*_args: Any, **_named: Any) -> None:
    raise MemoryError("Unable to allocate 82.1 KiB for an array")


def test_blocks_leave_where_there_is_no_memory_to_learn_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the index let go of must go from memory and from the books, too: its place in the index
    is another block's next."""

    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:8])
        assert await host.get(KEYS[:8], OpenAt.HOST) == [Status.OK] * 8
        monkeypatch.setattr(Values, "told", no_memory)
        for key in KEYS[:8]:
            await host._call(data.Forget(host.handle, names(host, [key])))
        assert "event=not_learned" in caplog.text
        parts = world.shard.parts
        assert not parts.valued._told
        assert parts.accounts.by_name["alpha"].flash_blocks == 0
        assert not parts.residency._by_slot
        await stored(host, KEYS[8:24])  # in the places of those
        assert await host.get(KEYS[:24], OpenAt.HOST) == [Status.MISS] * 8 + [Status.OK] * 16

    simulate(tmp_path, story)
    assert not [each for each in caplog.records if each.exc_info]


def test_a_request_for_which_there_is_no_memory_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        host = await joined(world)
        await stored(host, KEYS[:2])
        run = names(host, KEYS[:2])
        with monkeypatch.context() as short:
            short.setattr(lookups, "forget", no_memory)  # by its task
            short.setattr(lookups, "touch_now", no_memory)  # where it is read
            for message in (data.Forget(host.handle, run), data.Touch(host.handle, run)):
                with pytest.raises(EntresolError, match="out of memory") as raised:
                    await host._call(message)
                assert raised.value.status is Status.INTERNAL, "perhaps it was done in part"
        assert await host.put(KEYS[:2], Ack.DURABLE) == [Status.EXISTS] * 2

    simulate(tmp_path, story)
    told = [each for each in caplog.records if "event=out_of_memory" in each.getMessage()]
    assert len(told) == 2
    assert not any(each.exc_info for each in told)
    assert all(each.levelno == logging.ERROR for each in told)
