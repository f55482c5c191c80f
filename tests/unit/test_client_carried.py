"""Small blocks over tcp that come within their grant: exact, or fetched again under a lease."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from client_peer import DESCRIPTOR, SECRET, Peer, PeerSession, serving

from entresol_client import AsyncClient, Namespace, connection, fetching
from entresol_client.opening import INLINE_BYTES_MAX
from entresol_proto.ids import EngineKey, wire_key
from entresol_proto.status import Status
from entresol_proto.wire import data, opening

OK = Status.OK
BLOCK_BYTES = 16 * 1024


def key(number: int) -> EngineKey:
    return EngineKey(hashlib.sha256(b"carried %d" % number).digest())


def content(number: int, length: int = BLOCK_BYTES) -> bytes:
    return np.random.default_rng(number).bytes(length)


def empty(count: int, length: int = BLOCK_BYTES) -> list[bytearray]:
    return [bytearray(b"\xa5" * length) for _ in range(count)]


def add(peer: Peer, number: int, length: int = BLOCK_BYTES) -> bytes:
    name = wire_key(SECRET, key(number))
    peer.add(name, key(number), content(number, length))
    return name


@contextlib.asynccontextmanager
async def opened(
    folder: Path, fabric: str = "tcp", *, protocol: int = opening.PROTOCOL_MAX, **changes: Any
) -> AsyncIterator[tuple[Peer, Namespace]]:
    async with serving(folder, fabric=fabric, seal_at_host=True) as peer:
        peer.protocol = protocol
        async with await AsyncClient.open(peer.config(**changes)) as client:
            yield peer, await client.namespace(DESCRIPTOR)


def fetches(peer: Peer) -> list[bool]:
    """Whether each FETCH allowed the blocks to be carried."""
    return [seen.carry for seen in peer.seen if isinstance(seen, data.Fetch)]


def leased(peer: Peer) -> int:
    return sum(session._next - 1 for session in peer.sessions)


@pytest.mark.parametrize("fabric", ["tcp", "tls"])
async def test_small_blocks_come_within_the_grant(tmp_path: Path, fabric: str) -> None:
    async with opened(tmp_path, fabric) as (peer, ns):
        for number in range(4):
            add(peer, number)
        into = empty(5)
        got = await ns.get_into([key(n) for n in range(5)], into)
        assert got.statuses == [OK] * 4 + [Status.MISS]
        assert [bytes(one) for one in into[:4]] == [content(n) for n in range(4)]
        assert into[4] == empty(1)[0]
        assert got.plain_bytes == 4 * BLOCK_BYTES < got.wire_bytes
        assert set(got.tiers[:4]) == {data.Tier.MEMORY}
        assert fetches(peer) == [True]
        assert leased(peer) == 0


@pytest.mark.parametrize(
    ("fabric", "protocol", "sizes", "place"),
    [
        ("shm", 4, [BLOCK_BYTES], "host"),  # where they are mapped they are not moved
        ("tcp", 3, [BLOCK_BYTES], "host"),  # a daemon that does not know of it
        ("tls", 4, [BLOCK_BYTES], "daemon"),
        ("tcp", 4, [INLINE_BYTES_MAX // 2] * 2 + [1], "host"),  # more than is worth it
    ],
)
async def test_others_are_read_as_ever(
    tmp_path: Path, fabric: str, protocol: int, sizes: list[int], place: Any
) -> None:
    async with opened(tmp_path, fabric, protocol=protocol) as (peer, ns):
        for number, size in enumerate(sizes):
            add(peer, number, size)
        into = [bytearray(size) for size in sizes]
        got = await ns.get_into([key(n) for n in range(len(sizes))], into, open_at=place)
        assert got.ok, got.statuses
        assert [bytes(one) for one in into] == [content(n, size) for n, size in enumerate(sizes)]
        assert fetches(peer) == [False]
        assert leased(peer) == 1


async def test_just_what_is_worth_it_is_asked_for(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        add(peer, 0, INLINE_BYTES_MAX)
        (into,) = empty(1, INLINE_BYTES_MAX)
        assert (await ns.get_into([key(0)], [into])).ok
        assert bytes(into) == content(0, INLINE_BYTES_MAX)
        assert fetches(peer) == [True]


async def test_a_damaged_one_is_fetched_again_and_reported(tmp_path: Path) -> None:
    """It may have been damaged on its way, or where it lies: only under a lease it is told."""
    async with opened(tmp_path) as (peer, ns):
        names = [add(peer, number) for number in range(3)]
        peer.faults.flip = {names[1]}  # in the daemon's memory, and it stays so
        into = empty(3)
        got = await ns.get_into([key(n) for n in range(3)], into)
        assert got.statuses == [OK, Status.CORRUPT, OK]
        assert [bytes(into[0]), bytes(into[2])] == [content(0), content(2)]
        assert bytes(into[1]) == bytes(BLOCK_BYTES)
        assert fetches(peer) == [True, False]
        while not any(session.reports for session in peer.sessions):
            await asyncio.sleep(0.01)
        (report,) = [one for session in peer.sessions for one in session.reports]
        assert report == (1, 0, Status.CORRUPT)
        assert not any(session.leases for session in peer.sessions)


async def test_one_damaged_on_its_way_comes_whole_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = PeerSession._carried

    def damaging(self: PeerSession, *args: Any) -> data.Grant:
        grant = honest(self, *args)
        return replace(grant, carried=grant.carried[:-1] + bytes([grant.carried[-1] ^ 1]))

    monkeypatch.setattr(PeerSession, "_carried", damaging)
    async with opened(tmp_path) as (peer, ns):
        add(peer, 0)
        add(peer, 1)
        into = empty(2)
        assert (await ns.get_into([key(0), key(1)], into)).ok
        assert [bytes(one) for one in into] == [content(0), content(1)]
        assert fetches(peer) == [True, False]


async def test_one_of_another_length_is_a_miss(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        add(peer, 0, BLOCK_BYTES + 1)
        (into,) = empty(1)
        got = await ns.get_into([key(0)], [into])
        assert got.statuses == [Status.BAD_REQUEST]
        assert into == empty(1)[0], "nothing is written"
        assert fetches(peer) == [True, False]


async def test_what_nobody_asked_to_be_carried_ends_the_session(tmp_path: Path) -> None:
    async with opened(tmp_path, "shm") as (peer, ns):
        add(peer, 0)
        peer.faults.carry_unasked = True
        (into,) = empty(1)
        got = await ns.get_into([key(0)], [into])
        assert got.statuses == [Status.DISCONNECTED]
        assert into == empty(1)[0]


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("most", [1, 100, 5_000])
def test_an_answer_longer_than_is_received_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Any, most: int
) -> None:
    """Over TLS, of either loop."""
    monkeypatch.setattr(connection, "RECEIVED_BYTES_MAX", most)

    async def story() -> None:
        async with opened(tmp_path) as (peer, ns):
            size = 3_000 if most == 1 else BLOCK_BYTES
            add(peer, 0, size)
            for _ in range(3):
                (into,) = empty(1, size)
                assert (await ns.get_into([key(0)], [into])).ok
                assert bytes(into) == content(0, size)
            assert fetches(peer) == [True] * 3
            assert leased(peer) == 0

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(story())


async def test_an_error_of_ours_while_one_is_opened_is_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> list[Status]:
        raise RuntimeError("a bug")

    async with opened(tmp_path) as (peer, ns):
        add(peer, 0)
        monkeypatch.setattr(fetching, "open_blocks", broken)
        got = await ns.get_into([key(0)], empty(1))
        assert got.statuses == [Status.INTERNAL]
        assert "event=bug where=open_carried" in caplog.text
        monkeypatch.undo()
        assert (await ns.get_into([key(0)], empty(1))).ok


async def test_one_that_comes_too_late_gives_nothing_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        add(peer, 0)
        peer.faults.grant_late_s = 0.2
        (into,) = empty(1)
        got = await ns.get_into([key(0)], [into], deadline_ns=50_000_000)
        assert got.statuses == [Status.DEADLINE]
        await asyncio.sleep(0.3)
        assert into == empty(1)[0], "nothing lands later"
        peer.faults.grant_late_s = 0.0
        assert (await ns.get_into([key(0)], [into])).ok
        assert not any(isinstance(seen, data.Release) for seen in peer.seen)
