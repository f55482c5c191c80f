"""tcp peers that break the rules: no wrong byte lands, memory stays bounded, others go on."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import certs
import leaks
import pytest
import uvloop
from tcp_peer import BAD_ANSWERS, raw_session, run, soon, target

from entresol_daemon.logs import _kind_of
from entresol_proto import limits
from entresol_proto.fabric import datastream, framing, registry, tcp
from entresol_proto.fabric.base import ConnectOptions, Exposure, Offer, RemoteSpan
from entresol_proto.fabric.framing import EVERY_INDEX, HEADER, SPAN, Message
from entresol_proto.fabric.serving import Turn
from entresol_proto.fabric.tcp import TcpFabricServer
from entresol_proto.fabric.tcp_wire import TcpParams
from entresol_proto.status import FabricError, QuotaError, Status

KIB, MIB = limits.KIB, limits.MIB


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> object:
    with asyncio.Runner(loop_factory=request.param) as one:
        yield one


@pytest.mark.parametrize("how", list(BAD_ANSWERS))
def test_a_bad_answer_ends_the_session_and_lands_nowhere(runner: object, how: str) -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            memory, ops = target(1_000, 1_000)
            reading = asyncio.ensure_future(endpoint.read(ops, soon()))
            peer.say(BAD_ANSWERS[how](await peer.asked()))
            statuses = await asyncio.wait_for(reading, 5)
            # What came before the violation counts; the rest failed with the session.
            assert statuses[1] is Status.FABRIC_ERROR
            assert b"x" not in memory
            await peer.cut_off()
            assert endpoint.closed

    run(runner, scenario())


def test_lines_about_lost_streams_are_alike_whatever_numbers_the_peer_chose(
    runner: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was of a kind of its own, and none of them was held back."""

    async def scenario() -> None:
        for number in (77, 78):
            async with raw_session() as (endpoint, peer):
                _, ops = target(1_000)
                reading = asyncio.ensure_future(endpoint.read(ops, soon()))
                peer.say(framing.data(await peer.asked(), 0, number, 1) + b"x")
                await asyncio.wait_for(reading, 5)

    run(runner, scenario())
    told = [each for each in caplog.records if "event=data_stream_lost" in str(each.msg)]
    assert len(told) == 2
    assert "at 78 of" in told[1].getMessage()
    assert len({_kind_of(each) for each in told}) == 1


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (Status.BAD_REQUEST, Status.BAD_REQUEST),
        (Status.LEASE_EXPIRED, Status.LEASE_EXPIRED),
        (Status.BUSY, Status.BUSY),
        (Status.OK, Status.FABRIC_ERROR),
        (Status.MISS, Status.FABRIC_ERROR),
        (Status.DISCONNECTED, Status.FABRIC_ERROR),
        (200, Status.FABRIC_ERROR),
    ],
)
def test_a_peer_cannot_claim_any_status_it_likes(
    runner: object, number: int, status: Status
) -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            _, ops = target(10, 20, 30)
            reading = asyncio.ensure_future(endpoint.read(ops, soon()))
            request = await peer.asked()
            peer.say(framing.data(request, 1, 0, 20), b"y" * 20)
            peer.say(framing.error(request, 0, number), framing.error(request, EVERY_INDEX, number))
            assert await reading == [status, Status.OK, status]
            assert not endpoint.closed

    run(runner, scenario())


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_the_rest_of_a_half_received_span_lands_nowhere(runner: object, how: str) -> None:
    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            memory, ops = target(100_000)
            reading = asyncio.ensure_future(endpoint.read(ops, soon(0.2)))
            request = await peer.asked()
            peer.say(framing.data(request, 0, 0, 100_000), b"1" * 40_000)
            while memory.count(b"1") < 40_000:
                await asyncio.sleep(0.005)
            if how == "cancel":
                reading.cancel()
                await asyncio.wait([reading])
            else:
                assert await reading == [Status.DEADLINE]
            kind, _, _, cancelled, _, _ = await peer.hear()
            assert (kind, cancelled) == (Message.CANCEL, request)
            peer.say(b"2" * 60_000)
            # The stream is still in step, and the same memory can be the target of another read.
            again = asyncio.ensure_future(endpoint.read(ops, soon()))
            other = await peer.asked()
            assert other != request
            assert memory.count(b"1") == 40_000
            assert b"2" not in memory
            peer.say(framing.data(other, 0, 0, 100_000), b"3" * 100_000)
            assert await again == [Status.OK]
            assert memory.count(b"3") == 100_000

    run(runner, scenario())


def test_a_peer_that_never_answers_costs_deadlines_and_bounded_requests(
    runner: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "READS_PER_STREAM_MAX", 4)

    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            for _ in range(3):
                reads = [endpoint.read(target(10)[1], soon(0.05)) for _ in range(5)]
                for statuses in await asyncio.wait_for(asyncio.gather(*reads), 3):
                    assert statuses == [Status.DEADLINE]
            sent = [await peer.hear() for _ in range(8)]
            assert [kind for kind, *_ in sent] == [Message.READ] * 4 + [Message.CANCEL] * 4
            for _, _, _, request, _, _ in sent[:4]:
                peer.say(framing.error(request, EVERY_INDEX, Status.DEADLINE))
            _, ops = target(10)
            reading = asyncio.ensure_future(endpoint.read(ops, soon()))
            peer.say(framing.data(await peer.asked(), 0, 0, 10), b"k" * 10)
            assert await reading == [Status.OK]

    run(runner, scenario())


# -- a peer that asks badly -------------------------------------------------------------------


def ask(request: int, exposure: Exposure, length: int, count: int = 1) -> bytes:
    return framing.read(request, [exposure.span(0, length)] * count)


def test_a_reader_that_does_not_receive_costs_bounded_memory_and_ends_at_revoke(
    runner: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REVOKE_DEADLINE_NS", 100_000_000)

    async def scenario() -> None:
        content = memoryview(bytearray(b"\x11") * (4 * MIB))
        async with raw_session() as (endpoint, peer):
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            exposure = await endpoint.expose(content)
            for request in range(8):
                peer.say(ask(request, exposure, 4 * MIB, 16))
            await peer.writer.drain()
            transport = endpoint._streams[0].transport  # type: ignore[union-attr]
            assert transport is not None
            highest = 0
            for _ in range(30):
                await asyncio.sleep(0.005)
                highest = max(highest, transport.get_write_buffer_size())
            bound = limits.DATA_QUEUE_BYTES_MAX + limits.DATA_PIECE_BYTES_MAX + 64 * KIB
            assert 0 < highest <= bound
            begin = time.monotonic()
            await endpoint.revoke(exposure)
            assert time.monotonic() - begin < 3
            assert endpoint.closed  # bytes of the exposure were queued: the session had to go

    run(runner, scenario())


def test_a_slow_reader_does_not_end_the_session_at_revoke(runner: object) -> None:
    async def scenario() -> None:
        content = memoryview(bytearray(b"\x11") * (4 * MIB))
        async with raw_session() as (endpoint, peer):
            exposure = await endpoint.expose(content)
            peer.say(ask(1, exposure, 4 * MIB, 8))
            assert (await peer.hear())[0] == Message.DATA

            async def listen() -> list[tuple[int, int]]:
                last: list[tuple[int, int]] = []
                while len(last) < 1 or last[-1][0] != Message.ERROR or last[-1][1] != 7:
                    kind, _, index, _, _, body = await peer.hear()
                    assert b"\xee" not in body
                    last.append((kind, index))
                return last

            listening = asyncio.ensure_future(listen())
            await endpoint.revoke(exposure)
            content[:] = b"\xee" * len(content)
            heard = await asyncio.wait_for(listening, 10)
            assert heard[-1] == (Message.ERROR, 7)
            assert not endpoint.closed

    run(runner, scenario())


@pytest.mark.parametrize("how", ["reads", "spans", "same number"])
def test_more_requests_than_allowed_end_the_session(
    runner: object, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(limits, "READS_PER_STREAM_MAX", 6)
    monkeypatch.setattr(limits, "SPANS_PER_STREAM_MAX", 40)

    async def scenario() -> None:
        content = memoryview(bytearray(8 * MIB))
        async with raw_session() as (endpoint, peer):
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            exposure = await endpoint.expose(content)
            if how == "reads":
                allowed = [ask(n, exposure, 8 * MIB, 4) for n in range(6)]
                excess = ask(6, exposure, 1)
            elif how == "spans":
                allowed = [ask(0, exposure, 8 * MIB, 40)]
                excess = ask(1, exposure, 1)
            else:
                allowed = [ask(0, exposure, 8 * MIB, 4)]
                excess = ask(0, exposure, 1)
            peer.say(*allowed)
            await asyncio.sleep(0.05)
            assert not endpoint.closed
            peer.say(excess)
            for _ in range(300):
                if endpoint.closed:
                    break
                await asyncio.sleep(0.01)
            assert endpoint.closed

    run(runner, scenario())


def test_cancelled_requests_stay_counted_until_they_are_answered(
    runner: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise READ and CANCEL in a loop would queue answers without bound."""
    monkeypatch.setattr(limits, "READS_PER_STREAM_MAX", 4)

    async def scenario() -> None:
        content = memoryview(bytearray(8 * MIB))
        async with raw_session() as (endpoint, peer):
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            exposure = await endpoint.expose(content)
            peer.say(ask(0, exposure, 8 * MIB, 8))
            for number in range(1, 20):
                peer.say(ask(number, exposure, 8 * MIB), framing.cancel(number))
            for _ in range(300):
                if endpoint.closed:
                    break
                await asyncio.sleep(0.01)
            assert endpoint.closed

    run(runner, scenario())


def test_more_cancels_than_requests_end_the_session(runner: object) -> None:
    """Nothing answered them: one session's held the loop for 40 ms at a time, those of 60 1.3 s."""

    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            exposure = await endpoint.expose(memoryview(bytes(10)))
            for number in range(3):  # the answer and the cancel may cross
                peer.say(ask(number, exposure, 10))
                assert (await peer.hear())[0] == Message.DATA
                peer.say(framing.cancel(number))
            peer.say(ask(3, exposure, 10))
            assert (await peer.hear())[0] == Message.DATA
            peer.say(framing.cancel(3), framing.cancel(3))
            await peer.cut_off()
            assert endpoint.closed

    run(runner, scenario())


def test_cancels_are_not_saved_up(runner: object) -> None:
    """Those of a hundred thousand reads, all at once, held the loop as those of none had."""

    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            exposure = await endpoint.expose(memoryview(bytes(10)))
            most = limits.READS_PER_STREAM_MAX
            for begin in range(0, 3 * most, most):
                peer.say(*(ask(begin + number, exposure, 10) for number in range(most)))
                for _ in range(most):
                    assert (await peer.hear())[0] == Message.DATA
            peer.say(*(framing.cancel(number) for number in range(most)))  # had all been open
            peer.say(ask(0, exposure, 10), framing.cancel(0), ask(1, exposure, 10))
            assert (await peer.hear())[0] == Message.ERROR
            assert (await peer.hear())[0] == Message.DATA
            peer.say(framing.cancel(1), framing.cancel(2))
            await peer.cut_off()
            assert endpoint.closed

    run(runner, scenario())


def test_a_cancelled_request_is_answered_for_all_its_spans(runner: object) -> None:
    """Until then it counts for the reader, who may have only so many."""

    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            exposure = await endpoint.expose(memoryview(bytearray(MIB)))
            peer.say(ask(7, exposure, MIB, 8), framing.cancel(7), ask(8, exposure, 10))
            heard = [await peer.hear()]
            while heard[-1][3] == 7:
                heard.append(await peer.hear())
            (kind, status, index, *_), (_, _, _, request, _, body) = heard[-2:]
            assert (kind, status, index) == (Message.ERROR, Status.DEADLINE, EVERY_INDEX)
            assert (request, len(body)) == (8, 10)

    run(runner, scenario())


def test_spans_of_any_value_are_answered(runner: object) -> None:
    async def scenario() -> None:
        rng = random.Random(3)
        content = memoryview(bytes(range(256)))
        async with raw_session() as (endpoint, peer):
            exposure = await endpoint.expose(content)
            spans = [(exposure.rkey, 2**32 - 1, 2**64 - 1), (exposure.rkey, 256, 2**64 - 256)]
            spans += [(exposure.rkey, 0, 0), (exposure.rkey, 1, 2**63), (exposure.rkey, 256, 0)]
            spans += [
                (rng.getrandbits(32), rng.getrandbits(32), rng.getrandbits(64)) for _ in range(40)
            ]
            body = b"".join(SPAN.pack(*span) for span in spans)
            peer.say(HEADER.pack(Message.READ, 0, 0, 5, 0, len(body)), body)
            for number, span in enumerate(spans):
                kind, status, index, request, _, payload = await peer.hear()
                assert (index, request) == (number, 5)
                if number == 4:
                    assert kind == Message.DATA
                    assert payload == content
                else:
                    mine = span[0] == exposure.rkey
                    assert kind == Message.ERROR
                    assert status == (Status.BAD_REQUEST if mine else Status.LEASE_EXPIRED)

    run(runner, scenario())


@pytest.mark.parametrize("known", [True, False])
def test_many_short_answers_do_not_keep_the_loop(
    runner: object, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16,384 spans of nothing were answered in one go, which took 22 ms."""
    goes: list[int] = []
    answer = datastream.DataStream._answer_next
    serve = datastream.DataStream.serve

    def counted(self: Any, *args: Any) -> int:
        goes[-1] += 1
        return answer(self, *args)

    def began(self: Any, turn: Turn) -> bool:
        goes.append(0)
        return serve(self, turn)

    monkeypatch.setattr(datastream.DataStream, "_answer_next", counted)
    monkeypatch.setattr(datastream.DataStream, "serve", began)

    async def scenario() -> None:
        async with raw_session() as (endpoint, peer):
            exposure = await endpoint.expose(memoryview(bytes(10)))
            rkey = exposure.rkey if known else exposure.rkey ^ 1
            spans = [RemoteSpan(rkey, 0, 1)] * limits.SPANS_PER_READ_MAX
            peer.say(*(framing.read(number, spans) for number in range(2)))
            for _ in range(2 * limits.SPANS_PER_READ_MAX):
                assert (await peer.hear())[0] == (Message.DATA if known else Message.ERROR)
            assert sum(goes) == 2 * limits.SPANS_PER_READ_MAX
            assert max(goes) <= 256

    run(runner, scenario())


def test_random_bytes_on_an_open_stream_end_only_that_session(runner: object) -> None:
    async def scenario() -> None:
        rng = random.Random(11)
        for _ in range(10):
            async with raw_session() as (endpoint, peer):
                peer.say(bytes([rng.randrange(7, 256)]) + rng.randbytes(5_000))
                await peer.cut_off()
                assert endpoint.closed

    run(runner, scenario())


# -- connections that never become streams ------------------------------------------------------


def test_silent_connections_are_dropped_and_bounded(
    runner: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DATA_STREAMS_PENDING_MAX", 3)

    async def scenario() -> None:
        before = leaks.snapshot()
        server = TcpFabricServer("127.0.0.1", offer_lifetime_ns=300_000_000)
        await server.start()
        loop = asyncio.get_running_loop()
        socks = []
        for _ in range(5):
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", server.port))
            socks.append(sock)
        for sock in socks[:2]:  # there are later ones of this address: at once
            assert await asyncio.wait_for(loop.sock_recv(sock, 1), 0.25) == b""
        for sock in socks[2:]:  # within the bound: at the deadline
            assert await asyncio.wait_for(loop.sock_recv(sock, 1), 5) == b""
        for sock in socks:
            sock.close()
        assert server.refused == 5
        await server.close()
        await leaks.settle(before, ignore_threads=["asyncio_"])
        leaks.assert_no_leaks(before, ignore_threads=["asyncio_"])

    run(runner, scenario())


def test_silent_connections_keep_no_host_out(
    runner: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody who reaches the port could have all places there are before a ticket is shown."""
    monkeypatch.setattr(limits, "DATA_STREAMS_PENDING_MAX", 4)

    async def scenario() -> None:
        server = TcpFabricServer("127.0.0.1")
        await server.start()
        loop = asyncio.get_running_loop()
        silent = []
        for _ in range(8):
            silent.append(socket.socket())
            silent[-1].setblocking(False)
            await loop.sock_connect(silent[-1], ("127.0.0.1", server.port))
        offer = server.offer()
        endpoint, reply = await registry.connect(offer, soon())
        accepted = await server.accept(offer, reply, soon())
        assert not accepted.closed
        await endpoint.close()
        await server.close()
        for sock in silent:
            sock.close()

    run(runner, scenario())


@pytest.mark.parametrize("where", ["sock_accept", "_greet_one"])
def test_without_memory_for_a_stream_the_next_one_is_accepted(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    refused = 0

    async def scenario() -> None:
        owner: Any = TcpFabricServer if where == "_greet_one" else asyncio.get_running_loop()
        honest = getattr(owner, where)

        def sometimes(*args: Any) -> Any:
            nonlocal refused
            refused += 1
            if refused <= 2:
                raise MemoryError("no room for it")
            return honest(*args)

        monkeypatch.setattr(owner, where, sometimes)
        server = TcpFabricServer("127.0.0.1", streams=1)
        await server.start()
        while refused < 2:  # whoever comes meanwhile is sent away, or waits
            with socket.create_connection(("127.0.0.1", server.port)):
                await asyncio.sleep(0.05)
        offer = server.offer()
        endpoint, reply = await registry.connect(offer, soon())
        accepted = await server.accept(offer, reply, soon())
        assert not accepted.closed
        await endpoint.close()
        await server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("number", "streams"), [(2, 2), (65_535, 2), (0, 1), (0, 3), (0, 2**32 - 1)]
)
def test_stream_numbers_that_do_not_fit_are_refused(
    runner: object, number: int, streams: int
) -> None:
    async def scenario() -> None:
        server = TcpFabricServer("127.0.0.1", streams=2)
        await server.start()
        ticket = TcpParams.parse(server.offer().params).ticket
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(framing.hello(number, streams, ticket))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        await writer.wait_closed()
        await server.close()

    run(runner, scenario())


def test_a_stream_number_is_taken_once_and_half_a_session_is_cleaned_up(runner: object) -> None:
    async def scenario() -> None:
        server = TcpFabricServer("127.0.0.1", streams=2, offer_lifetime_ns=300_000_000)
        await server.start()
        offer = server.offer()
        hello = framing.hello(0, 2, TcpParams.parse(offer.params).ticket)
        connections = []
        for turn in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(hello)
            connections.append((reader, writer))
            if turn == 0:
                assert await reader.readexactly(HEADER.size) == framing.welcome()
        assert await asyncio.wait_for(connections[1][0].read(), 5) == b""
        with pytest.raises(FabricError):
            await server.accept(offer, b"", soon())
        assert await asyncio.wait_for(connections[0][0].read(), 5) == b""  # the first is cut too
        for _, writer in connections:
            writer.close()
            await writer.wait_closed()
        assert not server._endpoints
        await server.close()

    run(runner, scenario())


# -- TLS ----------------------------------------------------------------------------------------


async def _tls_server() -> tuple[TcpFabricServer, certs.TestCA, certs.CertPair]:
    ca = certs.make_ca()
    daemon = ca.issue("daemon")
    server = TcpFabricServer(
        "127.0.0.1", ssl=certs.server_context(daemon, ca), certificate_sha256=lambda: daemon.sha256
    )
    await server.start()
    return server, ca, daemon


def test_tls_connections_need_a_certificate_of_the_right_ca(runner: object) -> None:
    async def scenario() -> None:
        server, ca, _ = await _tls_server()
        host, other = ca.issue("host"), certs.make_ca()
        strange = certs.client_context(other.issue("host"), other)
        with pytest.raises(FabricError):  # does not trust the daemon
            await registry.connect(server.offer(), soon(), ssl=strange)
        strange.load_verify_locations(cadata=ca.pem.decode())
        with pytest.raises(FabricError):  # the daemon does not trust it
            await registry.connect(server.offer(), soon(), ssl=strange)
        with pytest.raises(FabricError, match="TLS"):
            await registry.connect(server.offer(), soon())
        params = replace(TcpParams.parse(server.offer().params), tls=False, pin=None)
        plain = Offer(server.kind, params.encode())
        with pytest.raises(FabricError):  # plain bytes to a TLS port
            await registry.connect(plain, soon(), ssl=certs.client_context(host, ca))
        endpoint, _ = await registry.connect(
            server.offer(), soon(), ssl=certs.client_context(host, ca)
        )
        assert endpoint.capabilities.private
        await endpoint.close()
        await server.close()

    run(runner, scenario())


def test_hands_are_shaken_in_the_turn_of_an_address(runner: object) -> None:
    """A handshake takes the loop 1.5 ms, for whoever connects and says two hundred bytes."""
    asked: list[str] = []

    async def scenario() -> None:
        server, ca, _ = await _tls_server()
        gate = asyncio.Event()

        async def turn(origin: str) -> None:
            asked.append(origin)
            await gate.wait()

        server.shake_hands = turn
        tls = certs.client_context(ca.issue("stranger"), ca)
        tls.check_hostname = False
        many = [
            asyncio.create_task(asyncio.open_connection("127.0.0.1", server.port, ssl=tls))
            for _ in range(20)
        ]
        async with asyncio.timeout(10):
            while len(asked) < 20:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert asked == ["127.0.0.1"] * 20
        assert not any(each.done() for each in many), "nobody's hand was shaken"
        gate.set()
        for each in many:
            _, writer = await each
            writer.close()
            await writer.wait_closed()
        endpoint, _ = await registry.connect(server.offer(), soon(), ssl=tls)
        await endpoint.close()
        await server.close()

    run(runner, scenario())


def test_an_address_that_is_refused_its_turn_is_cut_off(runner: object) -> None:
    async def scenario() -> None:
        server, _, _ = await _tls_server()

        async def turn(_: str) -> None:
            raise QuotaError("too many", status=Status.BUSY)

        server.shake_hands = turn
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert not await asyncio.wait_for(reader.read(1), 5)
        writer.close()
        await writer.wait_closed()
        assert server.refused == 1
        await server.close()

    run(runner, scenario())


def test_another_certificate_of_the_same_ca_is_refused_before_the_ticket_is_shown(
    runner: object,
) -> None:
    async def scenario() -> None:
        server, ca, daemon = await _tls_server()
        imposter_pair = ca.issue("tenant-that-listens")
        imposter = TcpFabricServer("127.0.0.1", ssl=certs.server_context(imposter_pair, ca))
        await imposter.start()
        offer = server.offer()
        moved = replace(TcpParams.parse(offer.params), port=imposter.port)
        assert moved.pin == daemon.sha256
        options = ConnectOptions(ssl=certs.client_context(ca.issue("host"), ca))
        with pytest.raises(FabricError, match="certificate"):
            await registry.connect(Offer(offer.kind, moved.encode()), soon(), options=options)
        endpoint, _ = await registry.connect(offer, soon(), options=options)  # ticket unspent
        await endpoint.close()
        await server.close()
        await imposter.close()

    run(runner, scenario())


def test_it_listens_where_it_is_told_only(runner: object, tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(FabricError):
            await TcpFabricServer("no-such-host.invalid").start()
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("not run here: no IPv6 loopback")
        server = TcpFabricServer("::1")
        await server.start()
        offer = server.offer()
        host, _ = await registry.connect(offer, soon())
        await server.accept(offer, b"", soon())
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port), 1)
        await host.close()
        await server.close()

    run(runner, scenario())


def test_an_opening_that_is_cancelled_is_over_at_once(
    runner: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the moment between the stream's opening and whoever waits for it: uvloop closes it then
    and never tells its protocol."""
    monkeypatch.setattr(tcp, "_ABORT_NS", 3_600_000_000_000)
    made = datastream.DataStream.connection_made

    async def scenario() -> None:
        before = leaks.snapshot()
        server = TcpFabricServer("127.0.0.1")
        await server.start()
        opening = asyncio.ensure_future(
            registry.connect(server.offer(), soon(), options=ConnectOptions())
        )

        def connection_made(self: datastream.DataStream, transport: asyncio.BaseTransport) -> None:
            made(self, transport)
            if self._owner is not None:  # not the server's
                opening.cancel()

        monkeypatch.setattr(datastream.DataStream, "connection_made", connection_made)
        done, _ = await asyncio.wait((opening,), timeout=5)
        assert done, "it waits for a stream that nobody ends"
        assert opening.cancelled()
        await server.close()
        await leaks.settle(before)

    run(runner, scenario())
