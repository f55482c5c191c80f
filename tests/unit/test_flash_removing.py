"""A namespace leaves the index some blocks at a time; whoever runs in between loses nothing."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import simloop
from flashlab import (
    FORGOTTEN,
    NAMESPACES,
    OPTIONS,
    device_bytes,
    get,
    key_of,
    open_engine,
    put,
    stock_faults,
    stream_of,
)

from entresol_daemon.flash import checkpoint
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.model import DROP_BLOCKS_AT_ONCE, RecoveryKind
from entresol_daemon.flash.segment import footer_bytes
from entresol_daemon.flash.sim import SimDevice
from entresol_proto.status import DeviceError, Status

SPACE = NAMESPACES[0]


def test_a_namespace_is_dropped_some_blocks_at_a_time_and_spares_what_comes_meanwhile() -> None:
    async def life() -> None:
        device = SimDevice(device_bytes(40), sleep=asyncio.sleep)
        engine = await open_engine(device)
        space, other = NAMESPACES[:2]
        count = 2 * DROP_BLOCKS_AT_ONCE + 10
        for number in range(count):
            _, future = put(engine, (space, key_of(number)), b"gone")
        await future
        steps = engine.drop_namespace(space)
        first = next(steps)
        assert len(first) == DROP_BLOCKS_AT_ONCE
        assert len(engine.index) == count - len(first)
        # The slots are used again, by others and by the namespace; what waits is moved, or leaves.
        for number in range(20):
            put(engine, (other, key_of(number)), b"kept")
        for number in (0, 5000):
            _, future = put(engine, (space, key_of(number)), b"new")
        await future
        last = engine.index.find(space, key_of(count - 1))
        segment = engine.index.m_segment[last]
        await engine.evict(segment, lambda slots: slots)
        moved = engine.index.namespaces()[space] - sum(map(len, steps)) - 2
        assert 0 < moved < 20
        assert engine.index.namespaces() == {other: 20, space: moved + 2}
        assert not stock_faults(engine)
        for slot in engine.index.slots_of(space).tolist():
            if engine.index.key_of(slot) not in (key_of(0), key_of(5000)):
                engine.remove(slot, FORGOTTEN)
        await engine.barrier()
        after = await open_engine(device.crash())
        assert after.index.namespaces() == {other: 20, space: 2}
        assert await get(after, (space, key_of(0))) == (Status.OK, b"new")
        assert await get(after, (space, key_of(5000))) == (Status.OK, b"new")
        await after.close()

    simloop.run(life(), 1)


def test_a_checkpoint_is_not_believed_if_a_namespace_was_being_dropped(tmp_path: Path) -> None:
    """It would bring back what left the index while it was made."""

    async def life() -> None:
        options = replace(OPTIONS, checkpoint_path=tmp_path / "index.arrow")
        device = SimDevice(device_bytes(24), seed=1)
        engine = await open_engine(device, options)
        for number in range(2 * DROP_BLOCKS_AT_ONCE):
            _, future = put(engine, (NAMESPACES[0], key_of(number)), b"gone")
        await future
        steps = engine.drop_namespace(NAMESPACES[0])
        next(steps)
        run = engine._compute.run

        async def meanwhile(work: Any, *args: Any) -> Any:
            result = await run(work, *args)
            if work is checkpoint.encode:
                list(steps)
            return result

        engine._compute.run = meanwhile  # type: ignore[method-assign,assignment]
        await engine.close()
        after = await open_engine(device, options)
        assert (after.recovery.kind, len(after.index)) == (RecoveryKind.FOOTERS, 0)
        await after.close()

    simloop.run(life(), 1)


def test_a_checkpoint_is_flushed_whole_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine leaves the one before, or all of this one."""
    path, flushed = tmp_path / "index.arrow", list[tuple[bool, int | None]]()
    fsync = os.fsync

    def noted(fd: int) -> None:
        found = os.fstat(fd)
        length = found.st_size if stat.S_ISREG(found.st_mode) else None
        flushed.append((path.exists(), length))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    raw = bytes(1000)
    checkpoint.save(path, cast(Any, SimpleNamespace(check_key=bytes(32))), raw)
    assert flushed == [(False, len(raw)), (True, None)]
    assert path.read_bytes() == raw


def test_more_removals_than_a_segment_has_room_for_are_written_down() -> None:
    """They were to be one record, for which no segment was long enough: none was ever durable."""

    async def life() -> None:
        device = SimDevice(device_bytes(200), sleep=asyncio.sleep)
        engine = await open_engine(device)
        futures = [put(engine, (SPACE, key_of(number)), b"gone")[1] for number in range(1100)]
        assert {await future for future in futures} == {Status.OK}
        for number in range(1100):
            engine.remove(engine.index.find(SPACE, key_of(number)), FORGOTTEN)
        await engine.barrier()
        await engine.close(clean=False)
        again = await open_engine(device.crash(), seed=1)
        assert not len(again.index)
        await again.close()

    simloop.run(life())


def test_removals_share_what_room_there_is_where_no_segment_is_free() -> None:
    async def life() -> None:
        device = SimDevice(device_bytes(60), sleep=asyncio.sleep)
        engine = await open_engine(device)
        spaces, count = NAMESPACES[:2], 0  # each of a tenant, with a segment of its own

        def left(space: bytes) -> int:
            segment = engine._table.open.get((stream_of(space), False))
            if segment is None:
                return 0
            return engine.segment_bytes - segment.used_bytes - footer_bytes(segment.row_count + 1)

        for space in spaces:
            while count < 100 or left(space) != BLOCK:
                assert await put(engine, (space, key_of(count)), b"gone")[1] is Status.OK
                count += 1
        engine._table.free.clear()
        for number in range(100):  # in one record they are two blocks long
            engine.remove(engine.index.find(SPACE, key_of(number)), FORGOTTEN)
        await engine.barrier()
        assert [left(space) for space in spaces] == [0, 0]
        engine.remove(engine.index.find(SPACE, key_of(100)), FORGOTTEN)
        with pytest.raises(DeviceError, match="no segment has room"):
            await engine.barrier()
        await engine.close(clean=False)

    simloop.run(life())
