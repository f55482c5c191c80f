"""What a hunt for wrong answers found in the client: successes that were none, calls that raised,
stood or spun where they should have told a status."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_peer import DESCRIPTOR, SECRET, Peer, PeerSession, serving

from entresol_client import AsyncClient, Namespace, PutBlock, storing
from entresol_client.answers import Call, GrantSink, Line
from entresol_client.connection import Connection
from entresol_client.fetching import GetTally
from entresol_client.results import RequestFailedError
from entresol_client.staging import Arena, PrivateMemory
from entresol_client.storing import PutTally
from entresol_client.workers import ThreadWorkers
from entresol_proto.fabric import shmendpoint
from entresol_proto.ids import EngineKey, wire_key
from entresol_proto.status import EntresolError, ProtocolError, Status
from entresol_proto.wire import data, opening
from entresol_proto.wire.data import Tier

BLOCK = 100_000
SUCCESSES = [Status.OK, Status.EXISTS]


def key(number: int) -> EngineKey:
    return EngineKey(hashlib.sha256(b"key %d" % number).digest())


def store(peer: Peer, number: int) -> bytes:
    """Have the peer hold a block; its bytes."""
    plain = hashlib.sha256(b"block %d" % number).digest() * (BLOCK // 32)
    peer.add(wire_key(SECRET, key(number)), key(number), plain)
    return plain


async def test_of_what_was_answered_nothing_is_kept(tmp_path: Path) -> None:
    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        plain = store(peer, 0)
        ns = await client.namespace(DESCRIPTOR)
        connection = client._links[0]._session.connection  # type: ignore[union-attr]
        into = np.empty(BLOCK, np.uint8)
        assert (await ns.get_into([key(0)], [into])).ok
        assert into.tobytes() == plain
        for refused in (data.Fetch, data.Exists):
            peer.faults.refuse[refused] = Status.BUSY
        assert (await ns.get_into([key(0)], [into])).statuses == [Status.BUSY]
        assert not (await ns.exists([key(0)])).complete
        assert (await ns.touch([key(0)])).count == 1
        assert not connection._pending
        assert not connection.session.in_flight


def some_grant(final: bool, lease_id: int) -> data.Grant:
    return data.Grant(final, lease_id, 1, 1, (), ())


async def test_grants_are_given_out_in_order_and_then_the_end_or_the_error() -> None:
    one, two, last = some_grant(False, 1), some_grant(False, 2), some_grant(True, 3)
    sink, far_ns = GrantSink(), time.monotonic_ns() + 60 * 10**9

    async def given(of: GrantSink) -> list[data.Grant]:
        async with asyncio.timeout(10):
            return [grant for grant, _ in await of.next(far_ns)]

    assert not sink.deliver(one), "while nobody waits"
    assert await given(sink) == [one]
    waiting = asyncio.create_task(given(sink))
    await asyncio.sleep(0)
    assert [sink.deliver(two), sink.deliver(last)] == [False, True]  # before its turn
    assert await waiting == [two, last]
    assert await given(sink) == []
    failing = GrantSink()
    failing.deliver(one)
    assert failing.deliver(opening.ErrorReply(Status.BUSY, "no"))
    assert await given(failing) == [one]
    for _ in range(2):
        with pytest.raises(RequestFailedError) as caught:
            await given(failing)
        assert caught.value.status is Status.BUSY
    left = GrantSink()
    left.deliver(one)
    assert (left.leftovers(), left.leftovers()) == ([one], [])
    for late_ns in (0, time.monotonic_ns() + 20_000_000):
        with pytest.raises(RequestFailedError) as caught:
            async with asyncio.timeout(10):
                await GrantSink().next(late_ns)
        assert caught.value.status is Status.DEADLINE
    lost = GrantSink()
    waiting = asyncio.create_task(given(lost))
    await asyncio.sleep(0)
    lost.fail(RequestFailedError(Status.DISCONNECTED))
    with pytest.raises(RequestFailedError):
        await waiting


async def test_an_answer_settles_its_request_once_and_a_lost_session_never() -> None:
    settled: list[int] = []
    pong = opening.Pong(b"12345678")
    answered, refused, given_up, lost = (
        Call(lambda number=number: settled.append(number))  # type: ignore[misc]
        for number in range(4)
    )
    assert answered.deliver(pong)
    assert await answered.future is pong
    assert refused.deliver(opening.ErrorReply(Status.BUSY, "no"))
    error = await refused.future  # as a result: what raises it raises it anew
    assert isinstance(error, RequestFailedError)
    assert error.status is Status.BUSY
    given_up.future.cancel()
    assert given_up.deliver(pong)
    for call in (lost, answered):
        call.fail(RequestFailedError(Status.DISCONNECTED))
    error = await lost.future
    assert isinstance(error, RequestFailedError)
    assert error.status is Status.DISCONNECTED
    answered.settle()
    assert settled == [0, 1, 2]


async def test_a_line_lets_one_in_for_each_place_in_the_order_they_came() -> None:
    line, places, entered = Line(), 0, list[int]()
    far_ns = time.monotonic_ns() + 60 * 10**9

    def free() -> bool:
        return places > 0

    async def enter(number: int, deadline_ns: int) -> bool:
        nonlocal places
        if not await line.wait(free, deadline_ns):
            return False
        places -= 1
        entered.append(number)
        return True

    first, second, third = (asyncio.create_task(enter(number, far_ns)) for number in range(3))
    late = asyncio.create_task(enter(3, time.monotonic_ns() + 20_000_000))
    async with asyncio.timeout(10):
        assert not await late
        first.cancel()
        places = 1
        line.move(free)
        assert await second
        for _ in range(5):
            await asyncio.sleep(0)
        assert entered == [1]
        places = 1
        assert not third.done()
        line.move(free)
        assert await third
        assert not await enter(4, 0)
        places = 1
        assert await enter(5, 0), "there is room, and nobody before it"
    assert first.cancelled()
    assert (entered, places) == ([1, 2, 5], 0)


# Finding 1: a get that is OK and wrote nothing.


@pytest.mark.parametrize("fabric", ["tcp", "shm"])
@pytest.mark.parametrize("request_type", [data.Fetch, opening.OpenNamespace])
@pytest.mark.parametrize("status", SUCCESSES)
async def test_an_error_that_says_ok_is_no_success_of_a_get(
    tmp_path: Path, fabric: str, request_type: type, status: Status
) -> None:
    async with (
        serving(tmp_path, fabric=fabric) as peer,
        await AsyncClient.open(peer.config()) as client,
    ):
        peer.faults.refuse[request_type] = status
        ns = await client.namespace(DESCRIPTOR)
        into = np.full(BLOCK, 0xA5, np.uint8)
        got = await ns.get_into([key(0)], [into])
        assert got.statuses[0] not in SUCCESSES
        assert got.prefix_blocks == 0
        assert (into == 0xA5).all()


@pytest.mark.parametrize(
    "request_type", [data.Reserve, data.Commit, data.Stage, opening.OpenNamespace]
)
@pytest.mark.parametrize("status", SUCCESSES)
async def test_an_error_that_says_ok_is_no_success_of_other_calls(
    tmp_path: Path, request_type: type, status: Status
) -> None:
    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        peer.faults.refuse[request_type] = status
        ns = await client.namespace(DESCRIPTOR)
        if request_type is data.Stage:
            staged = await ns.stage([key(0)])
            assert staged.statuses[0] not in SUCCESSES
            assert staged.prefix_blocks == 0
            return
        put = await ns.put([PutBlock(key(0), bytes(BLOCK))])
        assert put.statuses[0] not in SUCCESSES
        assert (put.stored, put.existed) == (0, 0)


@pytest.mark.parametrize("status", SUCCESSES)
def test_no_message_and_no_error_of_a_request_says_that_it_went_well(status: Status) -> None:
    with pytest.raises(ProtocolError):
        opening.ErrorReply.decode(opening.ErrorReply(status, "all is well").encode())
    assert RequestFailedError(status).status is Status.INTERNAL


@pytest.mark.parametrize("status", SUCCESSES)
def test_a_tally_is_never_settled_with_a_success(status: Status) -> None:
    get, put = GetTally([None], [Tier.NONE]), PutTally([None])
    get.settle([0], status)
    put.settle([0], status)
    assert get.statuses == put.statuses == [Status.INTERNAL]


@pytest.mark.parametrize("status", SUCCESSES)
async def test_a_miss_that_says_ok_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    async def on_fetch(self: PeerSession, request_id: int, _message: data.Fetch) -> None:
        self.send(data.Grant(True, 0, 0, 0, (), ((0, status),)), request_id)

    monkeypatch.setattr(PeerSession, "on_fetch", on_fetch)
    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        ns = await client.namespace(DESCRIPTOR)
        into = np.full(BLOCK, 0xA5, np.uint8)
        got = await ns.get_into([key(0)], [into])
        assert got.statuses == [Status.MISS]


Change = Callable[[data.Grant], data.Grant]


def _twice(grant: data.Grant) -> data.Grant:
    return data.Grant(
        True, grant.lease_id, grant.lease_ns, grant.expires_ns, grant.items * 2, grant.misses
    )


def _and_missed(grant: data.Grant) -> data.Grant:
    return data.Grant(
        True, grant.lease_id, grant.lease_ns, grant.expires_ns, grant.items, ((0, Status.OK),)
    )


def _one_left_out(grant: data.Grant) -> data.Grant:
    return data.Grant(
        True, grant.lease_id, grant.lease_ns, grant.expires_ns, grant.items[1:], grant.misses
    )


def _nothing_at_all(_grant: data.Grant) -> data.Grant:
    return data.Grant(True, 0, 0, 0, (), ())


@pytest.mark.parametrize("fabric", ["tcp", "shm"])
@pytest.mark.parametrize("place", ["host", "daemon"])
@pytest.mark.parametrize("change", [_twice, _and_missed, _one_left_out, _nothing_at_all])
async def test_where_a_get_is_ok_the_block_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fabric: str, place: Any, change: Change
) -> None:
    """Whatever indices a grant names, doubles or leaves out."""
    send = PeerSession.send

    def changed(self: PeerSession, message: Any, request_id: int = 0) -> None:
        message = change(message) if isinstance(message, data.Grant) else message
        send(self, message, request_id)

    monkeypatch.setattr(PeerSession, "send", changed)
    async with (
        serving(tmp_path, fabric=fabric) as peer,
        await AsyncClient.open(peer.config()) as client,
    ):
        plains = [store(peer, number) for number in range(3)]
        ns = await client.namespace(DESCRIPTOR)
        into = [bytearray(b"\xa5" * len(plain)) for plain in plains]
        got = await ns.get_into([key(n) for n in range(3)], into, prefix=False, open_at=place)
        for status, plain, found in zip(got.statuses, plains, into, strict=True):
            assert found == plain if status is Status.OK else set(found) in ({0xA5}, {0})
        assert got.statuses != [Status.OK] * 3
        assert got.plain_bytes == sum(len(plains[0]) for s in got.statuses if s is Status.OK)


async def test_an_unforeseen_error_that_says_ok_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_options: Any) -> Any:
        raise EntresolError("all is well", status=Status.OK)

    monkeypatch.setattr("entresol_client.opening.open_into", fail)
    monkeypatch.setattr("entresol_client.storing.seal_into", fail)
    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        plain = store(peer, 0)
        ns = await client.namespace(DESCRIPTOR)
        got = await ns.get_into([key(0)], [bytearray(len(plain))])
        assert got.statuses == [Status.INTERNAL]
        put = await ns.put([PutBlock(key(1), bytes(BLOCK))])
        assert put.statuses == [Status.INTERNAL]


# Finding 2: callers that ask again at once, and a session that is full of requests.


async def never(request_id: int, message: Any) -> None:
    """A handler of a daemon that does not come to it."""


CROWD = 260  # more than the requests that one session may have in flight
SECOND_NS = 1_000_000_000


def connection_of(client: AsyncClient) -> Connection:
    session = client._links[0]._session
    assert session is not None
    return session.connection


async def fill_session(connection: Connection) -> list[asyncio.Task[Any]]:
    """Take every place for work; the requests stay without an answer."""
    waiting = [
        asyncio.create_task(connection.request(data.Exists(1, bytes(16)), 2**62))
        for _ in range(connection.session.requests_in_flight_max - 1)
    ]
    while len(connection.session.in_flight) < len(waiting):
        await asyncio.sleep(0)
    return waiting


async def one_given_up(peer: Peer) -> None:
    """A reservation came back unused, and none is left. It travels a moment after the put."""
    for _ in range(500):
        if peer.given_up:
            break
        await asyncio.sleep(0.01)
    assert len(peer.given_up) == 1
    assert not peer.reserved


async def ends(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_crowd_that_asks_again_at_once_is_served(tmp_path: Path) -> None:
    """It spun for ever in front of a session without a place: nothing else ran, no deadline."""
    asked = 0

    async def ask(ns: Namespace) -> None:
        nonlocal asked
        while True:
            asked += 1
            assert asked < 100 * CROWD, "they spin"
            if (await ns.exists([b"x" * 16], deadline_ns=SECOND_NS)).complete:
                return

    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        ns = await client.namespace(DESCRIPTOR)
        await asyncio.gather(*(ask(ns) for _ in range(CROWD)))
        assert asked == CROWD, "a place comes free long before the deadline"


async def test_callers_get_places_in_their_order_and_are_busy_at_their_deadline(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path) as peer,
        await AsyncClient.open(
            peer.config(ping_interval_ns=60 * 10**9)  # its own pings need that place, too
        ) as client,
    ):
        await client.namespace(DESCRIPTOR)
        (session,) = peer.sessions
        session.on_exists = never  # type: ignore[method-assign]
        connection = connection_of(client)
        waiting = await fill_session(connection)
        try:
            begun_ns = time.monotonic_ns()
            late = asyncio.create_task(
                connection.request(data.Touch(1, bytes(16)), begun_ns + 50_000_000)
            )
            await asyncio.sleep(0)
            order: list[int] = []

            async def ask(number: int) -> None:
                await connection.request(data.Touch(1, bytes(16)), 2**62)
                order.append(number)

            asking = [asyncio.create_task(ask(number)) for number in range(5)]
            with pytest.raises(RequestFailedError) as caught:
                await late
            assert caught.value.status is Status.BUSY
            assert time.monotonic_ns() >= begun_ns + 50_000_000
            assert order == []
            assert await connection.ping(2**62) > 0, "it keeps its place"
            answered = next(id for id, kind in connection.session.in_flight.items())
            session.send(data.ExistsReply(0, b"\0\0"), answered)
            await asyncio.gather(*asking)
            assert order == list(range(5))
        finally:
            await ends(waiting)


async def test_a_lost_session_ends_those_who_wait_for_a_place(tmp_path: Path) -> None:
    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        await client.namespace(DESCRIPTOR)
        (session,) = peer.sessions
        session.on_exists = never  # type: ignore[method-assign]
        connection = connection_of(client)
        waiting = await fill_session(connection)
        waiting += [
            asyncio.create_task(connection.request(data.Touch(1, bytes(16)), 2**62))
            for _ in range(20)
        ]
        await asyncio.sleep(0)
        connection.drop("by the test")
        for found in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(found, RequestFailedError)
            assert found.status is Status.DISCONNECTED


async def _exists(ns: Namespace) -> object:
    return await ns.exists([key(0)], deadline_ns=1)


async def _get(ns: Namespace) -> object:
    return await ns.get_into([key(0)], [bytearray(8)], deadline_ns=1)


async def _put(ns: Namespace) -> object:
    return await ns.put([PutBlock(key(0), bytes(8))], deadline_ns=1)


@pytest.mark.parametrize("ask", [_exists, _get, _put])
@pytest.mark.parametrize("fabric", ["tcp", None])
async def test_a_call_that_fails_gives_the_loop_a_turn(
    tmp_path: Path, fabric: str | None, ask: Callable[[Namespace], Awaitable[object]]
) -> None:
    async with (
        serving(tmp_path, fabric=fabric) as peer,
        await AsyncClient.open(peer.config()) as client,
    ):
        ns = await client.namespace(DESCRIPTOR)
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(turn)

        turn()
        for _ in range(20):
            before = turns
            await ask(ns)
            assert turns > before


# Finding 6: a reservation that was neither committed nor given up.


async def test_a_commit_that_cannot_be_sent_gives_its_reservation_up(tmp_path: Path) -> None:
    """Sealed, and then no place for the COMMIT until the deadline, nor for giving up: that goes as
    soon as there is one."""
    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        ns = await client.namespace(DESCRIPTOR)
        (session,) = peer.sessions
        session.on_exists = never  # type: ignore[method-assign]
        connection = connection_of(client)
        waiting: list[asyncio.Task[Any]] = []
        reserve = session.on_reserve

        async def on_reserve(request_id: int, message: data.Reserve) -> None:
            others = await fill_session(connection)  # all places but the one of this RESERVE
            waiting.extend(others)
            await reserve(request_id, message)

        session.on_reserve = on_reserve  # type: ignore[method-assign]
        try:
            put = await ns.put([PutBlock(key(0), bytes(BLOCK))], deadline_ns=300_000_000)
            assert put.statuses == [Status.BUSY]
            assert peer.given_up == []
            answered = next(iter(connection.session.in_flight))
            session.send(data.ExistsReply(0, b"\0\0"), answered)
            await one_given_up(peer)
        finally:
            await ends(waiting)


# Finding 3: puts that raised.


@contextlib.asynccontextmanager
async def opened(
    folder: Path, fabric: str, **changes: Any
) -> AsyncIterator[tuple[Peer, Namespace]]:
    async with (
        serving(folder, fabric=fabric) as peer,
        await AsyncClient.open(peer.config(**changes)) as client,
    ):
        yield peer, await client.namespace(DESCRIPTOR)


async def test_a_daemon_that_dies_while_staging_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last endpoint of the process takes the threads with it that fill its memory."""
    monkeypatch.setattr(shmendpoint, "POPULATE_BYTES", 1 << 20)
    real, filled = os.posix_fallocate, 0
    async with opened(tmp_path, "shm") as (peer, ns):
        loop = asyncio.get_running_loop()
        endpoint = ns._client._links[0]._session.endpoint  # type: ignore[union-attr]
        gone = threading.Event()

        def die() -> None:
            for each in (endpoint, *(session.endpoint for session in peer.sessions)):
                each.discard()
            gone.set()

        def fallocate(*args: int) -> None:
            nonlocal filled
            filled += 1
            if filled == 1:
                loop.call_soon_threadsafe(die)
                assert gone.wait(5)
            real(*args)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        put = await ns.put([PutBlock(key(0), bytes(BLOCK))])
        assert put.statuses == [Status.DISCONNECTED]
        assert filled == 1, "filled for nobody"


async def test_a_process_without_descriptors_when_it_first_puts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dup(_fd: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    async with opened(tmp_path, "shm") as (_, ns):
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", dup)
            put = await ns.put([PutBlock(key(0), bytes(BLOCK))])
            assert put.statuses == [Status.BUSY]
        assert (await ns.put([PutBlock(key(0), bytes(BLOCK))])).ok


async def test_a_process_without_descriptors_when_a_thread_is_first_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def eventfd(*_args: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    async with opened(tmp_path, "tcp") as (peer, ns):
        plain = bytes(1 << 19)
        peer.add(wire_key(SECRET, key(0)), key(0), plain)
        with monkeypatch.context() as patch:
            patch.setattr(os, "eventfd", eventfd)
            got = await ns.get_into([key(0)], [bytearray(len(plain))])
            assert got.statuses == [Status.BUSY]
            put = await ns.put([PutBlock(key(1), bytes(BLOCK))])
            assert put.statuses == [Status.BUSY]
        assert (await ns.put([PutBlock(key(1), bytes(BLOCK))])).ok
        assert (await ns.get_into([key(0)], [bytearray(len(plain))])).ok


def chunks_of(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    """From now on peers want blocks sealed in chunks so long."""
    real = opening.NamespaceOpened

    def made(*args: Any) -> opening.NamespaceOpened:
        return real(*args[:-1], chunk_bytes)

    monkeypatch.setattr(opening, "NamespaceOpened", made)


@pytest.mark.parametrize("chunk_bytes", [0, 4095, (1 << 20) + 1, 2**32 - 1])
async def test_a_daemon_that_wants_impossible_chunks_breaks_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        chunks_of(monkeypatch, chunk_bytes)
        ns = await client.namespace(DESCRIPTOR)
        put = await ns.put([PutBlock(key(0), bytes(BLOCK))])
        assert put.statuses[0] in (Status.DISCONNECTED, Status.BREAKER_OPEN)


async def test_a_block_of_more_chunks_than_may_be_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        chunks_of(monkeypatch, 4096)
        ns = await client.namespace(DESCRIPTOR)
        put = await ns.put([PutBlock(key(0), bytes(8 << 20)), PutBlock(key(1), bytes(BLOCK))])
        assert put.statuses == [Status.TOO_LARGE, Status.OK]
        await one_given_up(peer)


async def test_what_was_sealed_too_late_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon has no such reservation any more: it would call that a bad request."""
    seal = storing.seal_blocks

    def slow(context: Any, *rest: Any) -> list[int | Status]:
        done = seal(context, *rest)
        while time.monotonic_ns() < context.deadline_ns:
            time.sleep(0.01)
        return done

    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        ns = await client.namespace(DESCRIPTOR)
        monkeypatch.setattr(storing, "seal_blocks", slow)
        put = await ns.put([PutBlock(key(0), bytes(BLOCK))], deadline_ns=200_000_000)
        assert put.statuses == [Status.DEADLINE]
        await one_given_up(peer)
        commits = [seen for seen in peer.seen if isinstance(seen, data.Commit)]
        assert [span.length_bytes for one in commits for _, span in one.items] == [0]


@pytest.mark.parametrize("what", ["_room", "_commit", "round"])
async def test_a_bug_in_a_put_is_a_status_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    async def fail(*_args: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(storing._Put, what, fail)
    async with opened(tmp_path, "tcp") as (_, ns):
        blocks = [PutBlock(key(n), bytes(9 << 20)) for n in range(3)]  # several rounds
        put = await ns.put(blocks)
        assert put.statuses == [Status.INTERNAL] * 3
        assert any("event=bug" in row.getMessage() for row in caplog.records)


async def test_a_bug_in_a_get_or_a_question_is_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_args: Any) -> Any:
        raise ZeroDivisionError

    async with opened(tmp_path, "tcp") as (_, ns):
        monkeypatch.setattr(Connection, "namespace", fail)
        got = await ns.get_into([key(0)], [bytearray(BLOCK)])
        assert got.statuses == [Status.INTERNAL]
        put = await ns.put([PutBlock(key(0), bytes(BLOCK))])
        assert put.statuses == [Status.INTERNAL]
        assert not (await ns.exists([key(0)])).complete


# Finding 4: a session that fell silent just after it was opened anew.


async def test_a_session_that_is_silent_from_its_first_moment_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked to open the namespaces of the last one, with the deadline of a call, before it
    was asked whether it is there."""
    silent: list[PeerSession] = []
    open_namespace, pong = PeerSession.on_opennamespace, PeerSession.on_ping

    async def on_opennamespace(self: PeerSession, *request: Any) -> None:
        if not silent or self in silent:
            silent.append(self)
        else:
            await open_namespace(self, *request)

    async def on_ping(self: PeerSession, *request: Any) -> None:
        if self not in silent:
            await pong(self, *request)

    async with opened(tmp_path, "tcp", deadline_ns=60 * SECOND_NS) as (peer, ns):
        store(peer, 0)
        link = ns._client._links[0]
        monkeypatch.setattr(PeerSession, "on_opennamespace", on_opennamespace)
        monkeypatch.setattr(PeerSession, "on_ping", on_ping)
        connection_of(ns._client).drop("by the test")
        async with asyncio.timeout(20):
            while link.breaker.openings == 0:
                await asyncio.sleep(0.01)
            into = bytearray(BLOCK)
            while not (await ns.get_into([key(0)], [into], deadline_ns=SECOND_NS)).ok:
                await asyncio.sleep(0.01)
        assert link._connects == 3


async def test_namespaces_are_opened_anew_before_they_are_used(tmp_path: Path) -> None:
    async with opened(tmp_path, "tcp") as (peer, ns):
        connection_of(ns._client).drop("by the test")
        async with asyncio.timeout(10):
            while sum(isinstance(each, opening.OpenNamespace) for each in peer.seen) < 2:
                await asyncio.sleep(0.01)


# Finding 5: calls in the clean-up of a cancelled task.


async def in_clean_up(call: Callable[[], Awaitable[Any]]) -> Any:
    """What a call gives in a task that was cancelled and goes on for a moment."""

    async def work() -> Any:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return await call()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    return await task


@pytest.mark.parametrize("how", ["run", "share", "run_later"])
async def test_a_deadline_in_a_clean_up_is_a_deadline(how: str) -> None:
    workers, held = ThreadWorkers(1), threading.Event()
    busy = asyncio.create_task(workers.run(held.wait))
    await asyncio.sleep(0)

    async def call() -> Any:
        until_ns = time.monotonic_ns() + 20_000_000
        if how == "share":
            return await workers.share(lambda: False, threads=1, until_ns=until_ns)
        return await getattr(workers, how)(int, until_ns=until_ns)

    try:
        with pytest.raises(RequestFailedError) as caught:
            await in_clean_up(call)
        assert caught.value.status is Status.DEADLINE
        again = asyncio.create_task(in_clean_up(lambda: workers.run(int)))
        await asyncio.sleep(0.01)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again
    finally:
        held.set()
        await busy
        workers.close()


async def test_staging_that_is_not_to_be_had_in_a_clean_up_is_a_deadline() -> None:
    arena = Arena(PrivateMemory(1 << 20), 1 << 20)
    region = await arena.take(1 << 20, 2**62)
    assert region is not None
    late_ns = time.monotonic_ns() + 20_000_000
    assert await in_clean_up(lambda: arena.take(1, late_ns)) is None
    region.give_back()
    arena.close()
