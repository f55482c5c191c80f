"""Outages read as misses, in time, and end by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import certs
import pytest
from client_peer import DESCRIPTOR, SECRET, TRUST, Peer, PeerSession, config_for, serving

from entresol_client import (
    AsyncClient,
    BreakerSettings,
    ClientConfig,
    Namespace,
    PutBlock,
    ShardAddress,
    TlsFiles,
)
from entresol_client.connection import PINGS_ROOM
from entresol_client.surroundings import Surroundings
from entresol_client.tenant_key import TenantKey
from entresol_proto import limits
from entresol_proto.fabric.base import FabricKind
from entresol_proto.identity import IdentityError, shard_uri, tenant_uri
from entresol_proto.ids import EngineKey, wire_key
from entresol_proto.status import Status
from entresol_proto.wire import data, opening

OUTAGE = {Status.DISCONNECTED, Status.DEADLINE, Status.BREAKER_OPEN}
DEADLINE_NS = 300_000_000
# A bound for liveness only: far above the deadline, far below a hang.
LATEST_S = 5.0
BLOCK = 4096


def key(number: int) -> EngineKey:
    return EngineKey(hashlib.sha256(b"key %d" % number).digest())


async def get(ns: Namespace, deadline_ns: int = DEADLINE_NS) -> Status:
    """One get; its status, after checking that it came back in time with an untouched buffer."""
    into = bytearray(b"\xa5" * BLOCK)
    begun = time.monotonic()
    got = await ns.get_into([key(0)], [into], deadline_ns=deadline_ns)
    assert time.monotonic() - begun < LATEST_S
    if got.statuses[0] is not Status.OK:
        assert set(into) in ({0xA5}, {0})
    return got.statuses[0]


async def until(what: Callable[[], Awaitable[bool]], name: str) -> None:
    for _ in range(1000):
        if await what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never happened: {name}")


async def recovers(ns: Namespace) -> None:
    async def ok() -> bool:
        return await get(ns, 2_000_000_000) is Status.OK

    await until(ok, "the shard serves again")


@contextlib.asynccontextmanager
async def opened(folder: Path, **changes: Any) -> AsyncIterator[tuple[Peer, Namespace]]:
    async with serving(folder) as peer:
        peer.add(wire_key(SECRET, key(0)), key(0), bytes(BLOCK))
        async with await AsyncClient.open(peer.config(**changes)) as client:
            ns = await client.namespace(DESCRIPTOR)
            assert await get(ns, 2_000_000_000) is Status.OK
            yield peer, ns


@contextlib.asynccontextmanager
async def stranger(
    folder: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any], *, tls: bool
) -> AsyncIterator[ClientConfig]:
    """A listener that is no daemon, and a client config that leads to it."""
    ca = certs.make_ca()
    pair = ca.issue("shard0", spiffe_uri=shard_uri(TRUST, "shard0"))
    paths = ca.issue("tenant", spiffe_uri=tenant_uri(TRUST, "acme")).write(folder)
    context = certs.server_context(pair, ca) if tls else None
    writers: list[asyncio.StreamWriter] = []

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)

    server = await asyncio.start_server(on_client, "127.0.0.1", 0, ssl=context)
    try:
        yield ClientConfig(
            shards=(ShardAddress("shard0", port=server.sockets[0].getsockname()[1]),),
            tls=TlsFiles(paths.cert, paths.key, paths.ca, TRUST),
            connect_deadline_ns=DEADLINE_NS,
            breaker=BreakerSettings(3, 20_000_000, 200_000_000),
        )
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def hear_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def talk_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" * 10)
    await writer.drain()
    await asyncio.sleep(3600)


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize("serve", [hear_nothing, talk_garbage, hang_up])
@pytest.mark.parametrize("tls", [False, True])
async def test_strangers_read_as_misses_within_the_deadline(
    tmp_path: Path, serve: Any, tls: bool
) -> None:
    async with stranger(tmp_path, serve, tls=tls) as config:
        begun = time.monotonic()
        async with await AsyncClient.open(config) as client:
            ns = await client.namespace(DESCRIPTOR)
            assert time.monotonic() - begun < LATEST_S
            assert await get(ns) in OUTAGE
            put = await ns.put([PutBlock(key(0), bytes(8))], deadline_ns=DEADLINE_NS)
            assert put.statuses[0] in OUTAGE
            exists = await ns.exists([key(0)], deadline_ns=DEADLINE_NS)
            assert (exists.present, exists.complete) == ([False], False)
            (explained,) = await ns.explain([key(0)], deadline_ns=DEADLINE_NS)
            assert explained.status in OUTAGE
            assert explained.reason is None
            touched = await ns.touch([key(0)], deadline_ns=DEADLINE_NS)
            assert (touched.count, touched.complete) == (0, False)

            async def breaker_opens() -> bool:
                return await get(ns) is Status.BREAKER_OPEN

            await until(breaker_opens, "the breaker opens")
            report = client.shards()[0]
            assert not report.connected
            assert report.last_error
            assert client.stats()["breaker_openings"] >= 1


async def test_an_absent_daemon_then_one_that_comes(tmp_path: Path) -> None:
    async with serving(tmp_path) as peer:
        await peer.stop()
        async with await AsyncClient.open(peer.config()) as client:
            ns = await client.namespace(DESCRIPTOR)
            assert await get(ns) in OUTAGE
            assert "refused" in client.shards()[0].last_error.lower()
            peer.add(wire_key(SECRET, key(0)), key(0), bytes(BLOCK))
            await peer.start()
            await recovers(ns)


async def test_a_restart_is_survived_and_namespaces_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        await peer.stop()
        assert await get(ns) in OUTAGE
        await peer.start()
        before = sum(isinstance(seen, opening.OpenNamespace) for seen in peer.seen)
        await recovers(ns)
        assert sum(isinstance(seen, opening.OpenNamespace) for seen in peer.seen) == before + 1
        report = ns._client.shards()[0]
        assert (report.connects, report.breaker) == (2, "closed")


async def test_a_hang_costs_deadlines_then_nothing_then_ends(tmp_path: Path) -> None:
    async with opened(tmp_path, ping_interval_ns=10**9) as (peer, ns):
        peer.faults.silent = True
        first = await get(ns)
        assert first is Status.DEADLINE

        async def breaker_opens() -> bool:
            return await get(ns) is Status.BREAKER_OPEN

        await until(breaker_opens, "the breaker opens")
        begun = time.monotonic()
        for _ in range(20):
            assert await get(ns) is Status.BREAKER_OPEN
        assert time.monotonic() - begun < DEADLINE_NS / 1e9  # at once, not one deadline each
        peer.faults.silent = False
        await recovers(ns)


async def test_a_hang_without_traffic_is_noticed_and_ends(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        peer.faults.silent = True
        link = ns._client._links[0]

        async def is_open() -> bool:
            return not link.breaker.admits

        await until(is_open, "pings open the breaker")
        peer.faults.silent = False

        async def is_closed() -> bool:
            return link.breaker.admits

        await until(is_closed, "pings close the breaker")
        assert await get(ns, 2_000_000_000) is Status.OK


async def test_a_session_that_stays_silent_is_replaced(tmp_path: Path) -> None:
    async with opened(tmp_path, ping_deadline_ns=50_000_000) as (peer, ns):
        peer.faults.pings_silent = True

        async def replaced() -> bool:
            return ns._client.shards()[0].connects > 1

        await until(replaced, "a fresh session")
        peer.faults.pings_silent = False
        await recovers(ns)


@pytest.mark.parametrize("really", [False, True], ids=["only we were late", "silent too"])
async def test_silence_while_this_process_did_not_run(tmp_path: Path, really: bool) -> None:
    """A loop that was held up over a ping's deadline asks once more, and once only."""
    changes = {"ping_interval_ns": 20_000_000, "ping_deadline_ns": 150_000_000}
    async with opened(tmp_path, **changes) as (peer, ns):
        (session,) = peer.sessions
        answer, stalls, asked = session.on_ping, 0, 0

        async def held_up(request_id: int, message: opening.Ping) -> None:
            nonlocal stalls, asked
            asked += 1
            if not stalls:
                stalls = 1
                time.sleep(0.5)  # noqa: ASYNC251 - the loop of both sides hangs
                await asyncio.sleep(0.05)  # and the answer comes after the deadline was noticed
            if not really:
                await answer(request_id, message)

        session.on_ping = held_up  # type: ignore[method-assign]
        link = ns._client._links[0]

        async def happened() -> bool:
            return asked > 3 or not link.breaker.admits

        await until(happened, "pings after the stall")
        assert link.breaker.openings == (1 if really else 0)
        assert asked == 2 if really else asked > 3


async def test_a_namespace_that_one_call_had_no_time_to_open_is_opened_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls share the question, but not the deadline of whoever asked it first."""
    monkeypatch.setattr(limits, "DEADLINE_NS_DEFAULT", 100_000_000)
    async with serving(tmp_path) as peer:
        peer.add(wire_key(SECRET, key(0)), key(0), bytes(BLOCK))
        async with await AsyncClient.open(peer.config()) as client:
            (session,) = peer.sessions
            answer, unanswered, answers = session.on_opennamespace, 0, False

            async def on_opennamespace(request_id: int, message: opening.OpenNamespace) -> None:
                nonlocal unanswered
                if answers:
                    await answer(request_id, message)
                else:
                    unanswered += 1

            session.on_opennamespace = on_opennamespace  # type: ignore[method-assign]
            ns = await client.namespace(DESCRIPTOR)
            short = asyncio.create_task(get(ns, 20_000_000))
            long = asyncio.create_task(get(ns, 4_000_000_000))
            assert await short is Status.DEADLINE
            answers = True
            assert await long is Status.OK
            assert unanswered, "its first question was never answered"


async def test_late_grants_are_released_and_land_nowhere(tmp_path: Path) -> None:
    async with opened(tmp_path, ping_interval_ns=10**9) as (peer, ns):
        (session,) = peer.sessions
        serve = session.on_fetch

        async def late(request_id: int, message: data.Fetch) -> None:
            await asyncio.sleep(0.2)
            await serve(request_id, message)

        session.on_fetch = late  # type: ignore[method-assign]
        into = bytearray(b"\xa5" * BLOCK)
        got = await ns.get_into([key(0)], [into], deadline_ns=50_000_000)
        assert got.statuses == [Status.DEADLINE]

        async def came_back() -> bool:
            return ns._client._links[0]._session.connection.late_grants == 1  # type: ignore

        await until(came_back, "the late grant")

        async def released() -> bool:
            return not session.leases

        await until(released, "its release")
        assert set(into) == {0xA5}


async def test_a_slow_but_living_shard_does_not_trip_the_breaker(tmp_path: Path) -> None:
    async with opened(tmp_path, ping_interval_ns=20_000_000) as (peer, ns):
        peer.faults.hold_final = True  # grants come, the end never does
        for _ in range(6):
            into = bytearray(BLOCK)
            got = await ns.get_into([key(0)], [into], deadline_ns=60_000_000)
            assert got.statuses == [Status.OK]
        assert ns._client.shards()[0].breaker == "closed"


async def never(request_id: int, message: Any) -> None:
    """A handler of a daemon that does not come to it."""


@pytest.mark.parametrize("what", ["pongs", "grants", "nothing"])
async def test_a_session_that_is_full_of_requests(tmp_path: Path, what: str) -> None:
    """As many requests as a session may have wait for an answer: no outage while the daemon says
    anything, be it to the pings, or to a request while every ping waits with the others."""
    async with opened(tmp_path, ping_deadline_ns=300_000_000) as (peer, ns):
        (session,) = peer.sessions
        session.on_exists = session.on_fetch = never  # type: ignore[method-assign]
        link = ns._client._links[0]
        connection = link._session.connection  # type: ignore[union-attr]
        if what != "pongs":
            session.on_ping = never  # type: ignore[method-assign]
        fetch = data.Fetch(1, data.OpenAt.HOST, False, 10**9, wire_key(SECRET, key(0)))
        fetch_id, sink = await connection.fetch(fetch, 2**62)
        asked = [connection.request(data.Exists(1, bytes(16)), 2**62) for _ in range(300)]
        waiting = [asyncio.create_task(one) for one in asked]
        await asyncio.sleep(0)
        room = connection.session.requests_in_flight_max - PINGS_ROOM
        assert len(connection.session.in_flight) == room, "the others wait for a place"
        for _ in range(10):  # four intervals and more, and the deadlines of three pings
            await asyncio.sleep(0.15)
            if what == "grants":
                session.send(data.Grant(False, 1, 1, 1, (), ()), fetch_id)
        try:
            if what == "nothing":
                assert link.breaker.openings

                async def replaced() -> bool:
                    return connection.lost.done()

                await until(replaced, "the end of a session that says nothing")
            else:
                assert link.breaker.openings == 0
                assert ns._client.shards()[0].connects == 1
        finally:
            connection.end_fetch(fetch_id, sink)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def test_calls_that_meet_one_deadline_together_are_one_piece_of_evidence(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, ping_interval_ns=10**9) as (peer, ns):
        (session,) = peer.sessions

        async def never(request_id: int, message: data.Fetch) -> None:
            return None

        session.on_fetch = never  # type: ignore[method-assign]
        for _ in range(4):  # slow flash, say; pings are answered in between
            calls = [get(ns, 60_000_000) for _ in range(8)]
            assert set(await asyncio.gather(*calls)) == {Status.DEADLINE}
            await asyncio.sleep(0.05)
        assert ns._client.stats()["breaker_openings"] == 0


async def test_draining_is_told_and_ended(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        (old,) = peer.sessions
        old.send(opening.Goodbye(Status.DRAINING, "maintenance"))
        seen = set()

        async def elsewhere() -> bool:
            seen.add(await get(ns))
            return ns._client.shards()[0].connects == 2

        await until(elsewhere, "a new session")
        assert seen <= {Status.OK, Status.DRAINING}
        assert ns._client.stats()["breaker_openings"] == 0
        await recovers(ns)

        async def closed() -> bool:
            return old not in peer.sessions

        await until(closed, "the old session is closed")


async def test_a_get_under_way_survives_the_goodbye(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        (session,) = peer.sessions
        serve = session.on_fetch

        async def goodbye_first(request_id: int, message: data.Fetch) -> None:
            session.send(opening.Goodbye(Status.DRAINING, "maintenance"))
            await asyncio.sleep(0.1)
            await serve(request_id, message)

        session.on_fetch = goodbye_first  # type: ignore[method-assign]
        assert await get(ns, 2_000_000_000) is Status.OK


async def test_a_lost_session_fails_its_requests_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        peer.faults.silent = True
        waiting = asyncio.ensure_future(get(ns, 60_000_000_000))
        await asyncio.sleep(0.05)
        await peer.stop()
        begun = time.monotonic()
        assert await waiting is Status.DISCONNECTED
        assert time.monotonic() - begun < LATEST_S


async def test_a_dead_data_path_brings_a_fresh_session(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        (session,) = peer.sessions
        assert session.endpoint is not None
        await session.endpoint.close()
        assert await get(ns, 2_000_000_000) in {Status.DISCONNECTED, Status.FABRIC_ERROR}
        await recovers(ns)


@pytest.mark.parametrize(
    ("server_uri", "expected"),
    [
        (shard_uri(TRUST, "another"), "shard 'another'"),
        (tenant_uri(TRUST, "shard0"), "not a shard's"),
        (shard_uri("evil", "shard0"), "trust domain"),
    ],
)
async def test_nothing_is_said_to_the_wrong_server(
    tmp_path: Path, server_uri: str, expected: str
) -> None:
    heard: list[bytes] = []

    ca = certs.make_ca()
    pair = ca.issue("server", spiffe_uri=server_uri)
    tenant = ca.issue("tenant", spiffe_uri=tenant_uri(TRUST, "acme")).write(tmp_path)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=certs.server_context(pair, ca))
    try:
        config = ClientConfig(
            shards=(ShardAddress("shard0", port=server.sockets[0].getsockname()[1]),),
            tls=TlsFiles(tenant.cert, tenant.key, tenant.ca, TRUST),
        )
        async with await AsyncClient.open(config) as client:
            assert expected in client.shards()[0].last_error
    finally:
        server.close()
    assert b"".join(heard) == b""


class MadePath:
    """A data path of this side whose other end nobody has taken yet."""

    kind = FabricKind.TCP

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_data_path_that_the_daemon_does_not_take_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    made: list[MadePath] = []

    async def connect_fabric(*_: Any, **__: Any) -> tuple[Any, bytes]:
        made.append(MadePath())
        return made[-1], b""

    answers = PeerSession.on_attach

    async def on_attach(self: PeerSession, request_id: int, message: opening.Attach) -> None:
        if message.kind == opening.NO_FABRIC:
            await answers(self, request_id, message)
        elif refuses:
            self.send(opening.ErrorReply(Status.FABRIC_ERROR, "no"), request_id)

    monkeypatch.setattr(PeerSession, "on_attach", on_attach)
    async with serving(tmp_path, fabric="tcp") as peer:
        config = peer.config(connect_deadline_ns=DEADLINE_NS)
        around = Surroundings(connect_fabric=connect_fabric)
        async with await AsyncClient.open(config, around=around) as client:
            async with asyncio.timeout(LATEST_S):
                while not (refuses or client.shards()[0].last_error):
                    await asyncio.sleep(0.01)
            (shard,) = client.shards()
            assert shard.connected is refuses
            assert refuses or shard.last_error == "no answer in time"
    assert made
    assert [each.closed for each in made] == [1] * len(made)


@pytest.mark.parametrize("keeps_keys", [False, True])
@pytest.mark.parametrize("chosen", [0, 1, opening.PROTOCOL_MAX, opening.PROTOCOL_MAX + 1])
async def test_a_protocol_that_was_not_offered_is_refused(
    tmp_path: Path, chosen: int, keeps_keys: bool
) -> None:
    """Protocol 1 knows no namespaces whose keys the tenant keeps."""
    changes: dict[str, Any] = {}
    if keeps_keys:
        changes["tenant_key"] = tmp_path / "kept.key"
        TenantKey.generate(1).save(changes["tenant_key"], new=True)
    async with serving(tmp_path) as peer:
        peer.protocol = chosen
        async with await AsyncClient.open(peer.config(**changes)) as client:
            (shard,) = client.shards()
            if chosen == opening.PROTOCOL_MAX or (chosen == 1 and not keeps_keys):
                assert shard.connected
            else:
                assert not shard.connected
                assert f"chose protocol {chosen}" in shard.last_error


async def test_a_certificate_nobody_trusts(tmp_path: Path) -> None:
    async with serving(tmp_path) as peer:
        (tmp_path / "foreign").mkdir()
        paths = (
            certs.make_ca()
            .issue("tenant", spiffe_uri=tenant_uri(TRUST, "acme"))
            .write(tmp_path / "foreign")
        )
        own = peer.tenant_files()
        config = peer.config(tls=TlsFiles(paths.cert, paths.key, own.ca, TRUST))
        async with await AsyncClient.open(config) as client:
            assert not client.shards()[0].connected
            assert client.shards()[0].last_error
        config = peer.config(tls=TlsFiles(own.cert, own.key, paths.ca, TRUST))
        async with await AsyncClient.open(config) as client:
            assert client.shards()[0].last_error.startswith("TLS: ")
        with pytest.raises(IdentityError):
            await AsyncClient.open(peer.config(tls=TlsFiles(own.cert, own.key, Path("/no"), TRUST)))


async def test_files_that_were_replaced_are_taken_over_with_the_next_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate ends long before an engine does, and a CA may."""

    def warned() -> int:
        return sum("tls_reload_failed" in text for text in caplog.messages)

    async def connected() -> bool:
        return client.shards()[0].connected

    async def refused() -> bool:
        return client.shards()[0].refused

    async def told() -> bool:
        return warned() > 0

    async def explained() -> bool:
        return "replaced files are not used" in client.shards()[0].last_hint

    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        assert await connected()
        await peer.stop()
        peer._ca = certs.make_ca()
        peer._pair = peer._ca.issue("shard0", spiffe_uri=shard_uri(TRUST, "shard0"))
        await peer.start()
        await until(refused, "another CA is refused")
        (files := client.config.tls).cert.write_bytes(b"half a cert")
        await until(told, "what cannot be used is told")
        await asyncio.sleep(0.5)
        assert warned() == 1
        await until(explained, "and told of the shard")
        assert peer.tenant_files() == files  # written anew, to the same places
        await until(connected, "the new files are used")


@pytest.mark.parametrize(
    ("hangs_up", "ends", "status"),
    [(9, False, Status.FORBIDDEN), (1, True, Status.DISCONNECTED), (1, False, None)],
    ids=["it refuses", "it died", "it was begun anew"],
)
async def test_who_hangs_up_before_the_session_begins_is_asked_once_more(
    hangs_up: int, ends: bool, status: Status | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A daemon that dies behind the handshake looks like one that takes no such certificate."""
    begins, came = PeerSession.connection_made, 0

    def connection_made(session: PeerSession, transport: asyncio.BaseTransport) -> None:
        nonlocal came
        came += 1
        if came > hangs_up:
            begins(session, transport)
            return
        if ends and session.peer._server is not None:
            session.peer._server.close()
        assert isinstance(transport, asyncio.Transport)
        transport.abort()

    monkeypatch.setattr(PeerSession, "connection_made", connection_made)
    async with serving(tmp_path) as peer, await AsyncClient.open(peer.config()) as client:
        (report,) = client.shards()
        assert (report.connected, report.last_status) == (status is None, status or Status.OK)
        assert report.refused is (status is Status.FORBIDDEN)
        assert came == (1 if ends else 2)


async def test_asking_in_a_loop_does_not_keep_the_loop_from_healing(tmp_path: Path) -> None:
    async with opened(tmp_path) as (peer, ns):
        await peer.stop()
        await peer.start()
        until_ns = time.monotonic_ns() + 30_000_000_000
        into = bytearray(BLOCK)
        while not (await ns.get_into([key(0)], [into])).ok:  # no sleep of its own
            assert time.monotonic_ns() < until_ns


def keys_by_shard(ns: Namespace, count: int) -> dict[int, list[int]]:
    placement = ns._client._placement
    return placement.split(ns._digest, [key(n) for n in range(count)])


async def test_three_shards_answer_in_the_callers_order(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, names=("a", "b", "c")) as peers,
        await AsyncClient.open(config_for(peers)) as client,
    ):
        ns = await client.namespace(DESCRIPTOR)
        items = [PutBlock(key(n), bytes([n]) * BLOCK, n) for n in range(60)]
        assert (await ns.put(items)).ok
        assert all(len(peer.store) > 5 for peer in peers)
        assert sum(len(peer.store) for peer in peers) == 60
        into = [bytearray(BLOCK) for _ in range(60)]
        got = await ns.get_into([key(n) for n in range(60)], into)
        assert got.ok
        assert all(into[n] == bytes([n]) * BLOCK for n in range(60))
        assert (await ns.exists([key(n) for n in range(70)])).prefix_blocks == 60

        # A hole on one shard: the others' blocks behind it are in place, but no prefix.
        hole = keys_by_shard(ns, 60)[1][3]
        del peers[1].store[wire_key(SECRET, key(hole))]
        got = await ns.get_into([key(n) for n in range(60)], into)
        assert got.prefix_blocks == hole
        assert got.statuses[hole] is Status.MISS
        behind = set(got.statuses[hole + 1 :])
        assert behind == {Status.OK, Status.GAP}
        exists = await ns.exists([key(n) for n in range(60)])
        assert exists.prefix_blocks == hole
        assert exists.present.count(False) == 1
        forgotten = await ns.forget([key(n) for n in range(60)])
        assert (forgotten.count, forgotten.complete) == (59, True)


async def test_a_dead_shard_is_misses_for_its_keys_only(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, names=("a", "b", "c")) as peers,
        await AsyncClient.open(config_for(peers)) as client,
    ):
        ns = await client.namespace(DESCRIPTOR)
        assert (await ns.put([PutBlock(key(n), bytes(BLOCK), n) for n in range(30)])).ok
        await peers[2].stop()
        owned = keys_by_shard(ns, 30)
        got = await ns.get_into(
            [key(n) for n in range(30)],
            [bytearray(BLOCK) for _ in range(30)],
            deadline_ns=2_000_000_000,
        )
        for number, positions in owned.items():
            expected = OUTAGE if number == 2 else {Status.OK}
            assert {got.statuses[p] for p in positions} <= expected
        exists = await ns.exists([key(n) for n in range(30)])
        assert not exists.complete
        assert exists.prefix_blocks == min(owned[2])
