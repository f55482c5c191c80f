"""Finding the pages of a peer's memory: nobody waits for it, not even by what the kernel locks."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
import uvloop
from shm_peer import mapped, raw_session, run, soon

from entresol_proto import limits
from entresol_proto.fabric import regions
from entresol_proto.fabric.base import ReadOp, RemoteSpan
from entresol_proto.status import Status

MIB = limits.MIB


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> object:
    with asyncio.Runner(loop_factory=request.param) as one:
        yield one


def test_pages_are_found_a_few_at_a_time_behind_all_other_work(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for 32 MiB kept whoever maps memory from it for 160 ms, the event loop among them;
    and a thread that gives way held the interpreter while this one had the processor."""
    calls: list[tuple[int, int, int]] = []
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    class Libc:
        @staticmethod
        def madvise(address: int, length_bytes: int, advice: int) -> int:
            nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            calls.append((address, length_bytes, nice))
            return libc.madvise(address, length_bytes, advice)

    libc = regions._libc

    async def scenario() -> None:
        async with raw_session(tmp_path) as (_, peer):
            monkeypatch.setattr(regions, "_libc", Libc)
            await mapped(peer, 1, 3 * MIB + 4_096)
            while sum(length for _, length, _ in calls) < 3 * MIB + 4_096:
                await asyncio.sleep(0.001)
            assert max(length for _, length, _ in calls) <= 128 * limits.KIB
            starts = [at for at, _, _ in calls]
            assert starts == sorted(set(starts))
            assert all(nice >= min(usual + 15, 19) for _, _, nice in calls)

    run(runner, scenario())


def test_where_the_kernel_does_not_find_pages_it_is_asked_once(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Libc:
        @staticmethod
        def madvise(_address: int, length_bytes: int, _advice: int) -> int:
            asked.append(length_bytes)
            return -1

    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            monkeypatch.setattr(regions, "_libc", Libc)
            await mapped(peer, 1, 2 * MIB)
            op = ReadOp(RemoteSpan(1, 0, 64), memoryview(bytearray(64)))
            assert await endpoint.read([op], soon()) == [Status.OK]
            while not asked:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert len(asked) == 1

    run(runner, scenario())
