"""What data streams serve, and links of shm receive: a part of a turn of the loop, however many."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import shm_peer
import uvloop
from harness import eventually
from tcp_peer import RawPeer, run, soon

from entresol_proto import limits
from entresol_proto.fabric import datastream, framing, shmlink
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.fabric.framing import HEADER, Message
from entresol_proto.fabric.serving import SERVED_ANSWERS_MAX, ServingTurns, Turn
from entresol_proto.fabric.shmendpoint import ShmEndpoint
from entresol_proto.fabric.tcp import TcpEndpoint, TcpFabricServer
from entresol_proto.fabric.tcp_wire import TcpParams

STREAMS = 12


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> object:
    with asyncio.Runner(loop_factory=request.param) as one:
        yield one


async def _join(server: TcpFabricServer, tenant: str) -> tuple[TcpEndpoint, RawPeer]:
    offer = server.offer(peer=tenant)
    peer = RawPeer(*await asyncio.open_connection("127.0.0.1", server.port))
    peer.say(framing.hello(0, 1, TcpParams.parse(offer.params).ticket))
    assert (await peer.hear())[0] == Message.WELCOME
    return await server.accept(offer, b"", soon()), peer


def test_many_sessions_have_no_more_of_the_loop_than_one(
    runner: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream had its own 256 answers in a turn of the loop: 120 of one tenant made that last
    30 ms, and everybody wait so long."""
    goes = [0]
    answer = datastream.DataStream._answer_next

    def counted(self: Any, *args: Any) -> int:
        goes[-1] += 1
        return answer(self, *args)

    monkeypatch.setattr(datastream.DataStream, "_answer_next", counted)

    async def turns_of_the_loop() -> None:
        while True:
            goes.append(0)
            await asyncio.sleep(0)

    async def scenario() -> None:
        server = TcpFabricServer("127.0.0.1", streams=1)
        await server.start()
        peers = [(await _join(server, "alpha"))[1] for _ in range(STREAMS)]
        counting = asyncio.ensure_future(turns_of_the_loop())
        spans = [RemoteSpan(1, 0, 1)] * limits.SPANS_PER_READ_MAX
        for peer in peers:
            peer.say(framing.read(1, spans))
        for peer in peers:
            await peer.reader.readexactly(len(spans) * HEADER.size)
        counting.cancel()
        await server.close()
        for peer in peers:
            peer.writer.close()
        assert sum(goes) == STREAMS * len(spans)

    run(runner, scenario())
    # Turns of the loop and of the task that counts them are not quite the same.
    assert max(goes) <= 2 * SERVED_ANSWERS_MAX


def test_links_of_shm_share_a_turn_of_the_loop(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each handled 16 packets in a turn of the loop: 200 sessions of one tenant made others' EXISTS
    take 86 ms."""
    goes = [0]
    receive = shmlink._receive

    def counted(sock: socket.socket) -> tuple[bytes, list[int], bool]:
        goes[-1] += 1
        return receive(sock)

    async def turns_of_the_loop() -> None:
        while True:
            goes.append(0)
            await asyncio.sleep(0)

    async def scenario() -> None:
        async with shm_peer.raw_server(tmp_path) as join:
            peers = [(await join("alpha"))[1] for _ in range(STREAMS)]
            monkeypatch.setattr(shmlink, "_receive", counted)
            counting = asyncio.ensure_future(turns_of_the_loop())
            for peer in peers:
                for number in range(40):
                    peer.say(shmlink.Message(shmlink.Kind.REVOKE, number).encode())
            for peer in peers:
                assert [(await peer.hear()).rkey for _ in range(40)] == list(range(40))
            counting.cancel()
            assert sum(goes) >= STREAMS * 40

    run(runner, scenario())
    assert max(goes) <= 2 * SERVED_ANSWERS_MAX // shmlink._PACKET_ANSWERS


def test_a_link_of_shm_is_heard_after_a_message_that_failed_here(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looked any more, neither for what it says nor for its end."""
    honest, failures = ShmEndpoint._peer_revoked, list[Any]()

    def no_memory(endpoint: ShmEndpoint, rkey: int) -> None:
        monkeypatch.setattr(ShmEndpoint, "_peer_revoked", honest)
        raise MemoryError

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: failures.append(context["exception"]))
        async with shm_peer.raw_session(tmp_path) as (endpoint, peer):
            monkeypatch.setattr(ShmEndpoint, "_peer_revoked", no_memory)
            for rkey in (1, 2):
                peer.say(shmlink.Message(shmlink.Kind.REVOKE, rkey).encode())
            assert (await peer.hear()).rkey == 2
            peer.sock.close()
            await eventually(lambda: endpoint.closed)

    run(runner, scenario())
    assert [type(failure) for failure in failures] == [MemoryError]


class _Stream:
    """Has so many answers to give."""

    def __init__(self, name: str, answers: int, served: list[str]) -> None:
        self.name, self.left = name, answers
        self._served = served

    def serve(self, turn: Turn) -> bool:
        count = min(self.left, turn.answers)
        turn.answers -= count
        self.left -= count
        self._served.append(self.name)
        return self.left > 0


async def test_peers_go_round_and_within_a_peer_its_streams() -> None:
    served: list[str] = []
    turns = ServingTurns()
    many = [_Stream(f"a{n}", 2 * SERVED_ANSWERS_MAX, served) for n in range(3)]
    one = _Stream("b", 2 * SERVED_ANSWERS_MAX, served)
    for stream in many:
        turns.enter(stream, "alpha")
        turns.enter(stream, "alpha")  # again: it waits already
    turns.enter(one, "beta")
    assert not served, "not at once"
    await asyncio.sleep(0)
    assert served == ["a0"], "one had all of the turn"
    for _ in range(20):
        await asyncio.sleep(0)
    assert served == ["a0", "b", "a1", "b", "a2", "a0", "a1", "a2"]
    assert not any(stream.left for stream in (*many, one))


async def test_short_ones_share_a_turn() -> None:
    served: list[str] = []
    turns = ServingTurns()
    for number in range(5):
        turns.enter(_Stream(str(number), 1, served), number % 2)
    await asyncio.sleep(0)
    assert served == ["0", "1", "2", "3", "4"]


async def test_a_stream_that_fails_does_not_stop_the_others() -> None:
    class Broken(_Stream):
        def serve(self, turn: Turn) -> bool:
            raise MemoryError

    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: told.append(context))
    served: list[str] = []
    turns = ServingTurns()
    turns.enter(Broken("a", 1, served), "alpha")
    turns.enter(_Stream("b", 1, served), "beta")
    for _ in range(3):
        await asyncio.sleep(0)
    assert served == ["b"]
    assert [type(context["exception"]) for context in told] == [MemoryError]


def test_a_link_of_shm_goes_on_after_an_error_of_our_own(
    runner: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looked at its socket any more: where there was no memory for one message, a host's
    revocations were never heard of again, nor its end."""
    told: list[type] = []
    receive = shmlink._receive
    fails = [MemoryError()]

    def failing(sock: socket.socket) -> tuple[bytes, list[int], bool]:
        if fails:
            raise fails.pop()
        return receive(sock)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(type(context["exception"])))
        async with shm_peer.raw_session(tmp_path) as (endpoint, peer):
            monkeypatch.setattr(shmlink, "_receive", failing)
            peer.say(shmlink.Message(shmlink.Kind.REVOKE, 1).encode())
            assert (await peer.hear()).rkey == 1
            peer.sock.close()
            async with asyncio.timeout(5):
                while not endpoint.closed:
                    await asyncio.sleep(0.001)

    run(runner, scenario())
    assert told == [MemoryError]
