"""Connections are accepted at once and shake hands when it is their address's turn."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from entresol_daemon.control import accepting
from entresol_daemon.control.accepting import TlsServer
from entresol_proto.origins import Crowd, origin_of
from entresol_proto.status import QuotaError, Status
from tests import certs

SOON_S = 10.0


class Echo(asyncio.Protocol):
    """Says back what it hears."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        assert transport.get_extra_info("ssl_object").getpeercert(True)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Place:
    """A server whose turns a test gives."""

    def __init__(self, ca: certs.TestCA) -> None:
        self.ca = ca
        self.pair = ca.issue("s", uris=["spiffe://test/shard/s"])
        self.refused: list[Status] = []
        self.asked: list[str] = []
        self.turn: Callable[[], object] = lambda: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.server = TlsServer(
            Echo, host="127.0.0.1", port=0, tls=certs.server_context(self.pair, ca),
            shake_hands=self._shake_hands, refused=self.refused.append,
        )  # fmt: skip
        self.port = 0

    async def _shake_hands(self, origin: str) -> None:
        self.asked.append(origin)
        self.turn()
        await self.gate.wait()

    async def says(self, what: bytes, tls: ssl.SSLContext | None = None) -> bytes:
        """Connect, say something, hear it."""
        pair = self.ca.issue("t", uris=["spiffe://test/tenant/t"])
        tls = tls or certs.client_context(pair, self.ca)
        tls.check_hostname = False
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        try:
            writer.write(what)
            return await reader.read(100)
        finally:
            writer.close()

    async def until_refused(self, count: int) -> None:
        async with asyncio.timeout(SOON_S):
            while len(self.refused) < count:
                await asyncio.sleep(0.005)


async def failure_of(work: Awaitable[object]) -> type[OSError] | None:
    """The kind of OSError it ends with."""
    async with asyncio.timeout(SOON_S):
        try:
            await work
        except OSError as error:
            return type(error)
    return None


@pytest.fixture(scope="module")
def ca() -> certs.TestCA:
    return certs.make_ca()


@pytest.fixture
async def place(ca: certs.TestCA) -> AsyncIterator[Place]:
    made = Place(ca)
    made.port = await made.server.start()
    yield made
    made.server.close()
    async with asyncio.timeout(SOON_S):
        await made.server.wait_closed()


async def test_a_connection_shakes_hands_in_its_turn_and_what_it_said_before_is_not_lost(
    place: Place,
) -> None:
    place.gate.clear()
    saying = asyncio.create_task(place.says(b"hello"))
    async with asyncio.timeout(SOON_S):
        while not place.asked:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert not saying.done()
    place.gate.set()
    async with asyncio.timeout(SOON_S):
        assert await saying == b"hello"
    assert place.asked == ["127.0.0.1"]
    assert not place.refused


async def test_a_kept_socket_leaves_who_comes_to_the_next_server(place: Place) -> None:
    """What connects after the first stopped accepting waits; what it had accepted goes on."""
    with socket.create_server(("127.0.0.1", 0)) as kept:
        kept.setblocking(False)
        port = place.port = kept.getsockname()[1]
        first, second = (
            TlsServer(
                Echo, host="127.0.0.1", port=port, tls=certs.server_context(place.pair, place.ca),
                shake_hands=place._shake_hands, refused=place.refused.append,
                sockets=[kept.dup()],
            )
            for _ in range(2)
        )  # fmt: skip
        place.gate.clear()
        assert await first.start() == port
        early = asyncio.create_task(place.says(b"early"))
        async with asyncio.timeout(SOON_S):
            while not place.asked:
                await asyncio.sleep(0.005)
        first.stop_accepting()
        late = asyncio.create_task(place.says(b"late"))
        await asyncio.sleep(0.05)
        assert len(place.asked) == 1
        place.gate.set()
        async with asyncio.timeout(SOON_S):
            assert await early == b"early"
            assert not late.done()
            await second.start()
            assert await late == b"late"
        for server in (first, second):
            server.close()
            await server.wait_closed()
        assert not place.refused
        assert kept.fileno() >= 0


async def test_who_gets_no_turn_is_closed_and_counted(place: Place) -> None:
    def never() -> None:
        raise QuotaError("too many", status=Status.BUSY)

    place.turn = never
    assert await failure_of(place.says(b"hello"))
    await place.until_refused(1)
    assert place.refused == [Status.BUSY]
    place.turn = lambda: None
    assert await place.says(b"again") == b"again"


async def test_rubbish_and_a_foreign_certificate_are_refused(place: Place) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    async with asyncio.timeout(SOON_S):
        await reader.read()
    writer.close()
    await place.until_refused(1)
    foreign = certs.make_ca("another")
    tls = certs.client_context(foreign.issue("t", uris=["spiffe://test/tenant/t"]), place.ca)
    assert await failure_of(place.says(b"hello", tls)) or place.refused
    await place.until_refused(2)
    assert place.refused == [Status.FORBIDDEN, Status.FORBIDDEN]


async def test_a_host_that_goes_away_is_counted_and_nothing_is_left(place: Place) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", place.port)
    writer.close()
    await place.until_refused(1)
    assert place.refused == [Status.DISCONNECTED]


async def test_a_port_check_is_not_logged_and_strangers_once_a_minute(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "entresol.control")
    for number in range(3):
        _, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.close()
        await place.until_refused(number + 1)
    assert not caplog.messages
    for number in range(3, 6):
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(SOON_S):
            await reader.read()
        writer.close()
        await place.until_refused(number + 1)
    (said,) = caplog.messages
    assert said.startswith("event=handshake_failed address=127.0.0.1 unsaid=0 reason=")


def test_what_was_not_logged_is_told_later_and_few_addresses_are_remembered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "TOLD_MAX", 4)
    caplog.set_level(logging.INFO, "entresol.control")
    failed, wrong = accepting.FailedHandshakes(), ssl.SSLError(1, "no certificate")
    for now_s in (0.0, 1.0, accepting.TOLD_AGAIN_S - 0.1):
        failed.tell("10.0.0.1", wrong, now_s)
    failed.tell("10.0.0.2", wrong, 2.0)
    failed.tell("10.0.0.1", wrong, accepting.TOLD_AGAIN_S)
    words = [line.split()[1:3] for line in caplog.messages]
    assert words == [
        ["address=10.0.0.1", "unsaid=0"],
        ["address=10.0.0.2", "unsaid=0"],
        ["address=10.0.0.1", "unsaid=2"],
    ]
    for last in range(3, 9):
        failed.tell(f"10.0.0.{last}", wrong, 61.0)
    assert len(failed._told) == 4
    failed.tell("2001:db8::1", wrong, 61.0)
    failed.tell("2001:db8::2", wrong, 62.0)  # of one network
    assert [line for line in caplog.messages if "2001" in line] == [
        line for line in caplog.messages if "2001:db8::1 " in line
    ]


async def test_a_peer_that_vanishes_without_a_word_is_noticed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system is asked for; that it does it takes a network that loses packets."""
    got: list[dict[int, int]] = []
    taken = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)

    def made(self: Echo, transport: asyncio.Transport) -> None:
        self.transport = transport
        link = transport.get_extra_info("socket")
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        got.append({one: link.getsockopt(socket.IPPROTO_TCP, one) for one in taken})

    monkeypatch.setattr(Echo, "connection_made", made)
    assert await place.says(b"hello") == b"hello"
    idle, every, count, most = got[0].values()
    assert idle + every * count == accepting.PEER_GONE_S == most / 1000


async def test_no_more_wait_than_may(ca: certs.TestCA, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who came first have kept silent the longest: they give way."""
    monkeypatch.setattr(accepting, "WAITING_MAX", 3)
    place = Place(ca)
    place.port = await place.server.start()
    place.gate.clear()
    waiting = []
    for count in range(1, 6):
        waiting.append(await asyncio.open_connection("127.0.0.1", place.port))
        async with asyncio.timeout(SOON_S):
            while len(place.asked) < count:
                await asyncio.sleep(0.005)
    assert place.refused == [Status.BUSY, Status.BUSY]
    async with asyncio.timeout(SOON_S):
        assert [await reader.read() for reader, _ in waiting[:2]] == [b"", b""]
    place.gate.set()
    for _, writer in waiting[2:]:
        writer.close()
    await place.until_refused(5)
    for _, writer in waiting:
        writer.close()
    assert await place.says(b"hello") == b"hello"
    place.server.close()
    await place.server.wait_closed()


async def test_silent_connections_keep_nobody_out(
    ca: certs.TestCA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as may wait, before a word of any: who speaks is served all the same."""
    monkeypatch.setattr(accepting, "WAITING_MAX", 3)
    place = Place(ca)
    place.port = await place.server.start()
    silent = [await asyncio.open_connection("127.0.0.1", place.port) for _ in range(3)]
    async with asyncio.timeout(SOON_S):
        while len(place.asked) < 3:
            await asyncio.sleep(0.005)
    assert await place.says(b"hello") == b"hello"
    for _, writer in silent:
        writer.close()
    place.server.close()
    await place.server.wait_closed()


def test_a_crowd_of_many_origins_displaces_nobody() -> None:
    crowd: Crowd[int] = Crowd(3)
    assert [crowd.add(one, str(one)) for one in range(5)] == [None, None, None, 3, 4]
    assert list(crowd) == [0, 1, 2]
    crowd.discard(1)
    crowd.discard(1)
    assert crowd.add(5, "0") is None
    assert crowd.add(6, "new") == 0, "the oldest of whoever has most"
    assert crowd.add(7, "2") == 7
    assert list(crowd) == [2, 5, 6]


def test_any_crowd_is_what_a_plain_list_says() -> None:
    """Of the origins that have most, the newcomer's own gives way before another."""
    rng, crowd, inside = random.Random(7), Crowd[int](9), dict[int, str]()
    for one in range(3_000):
        if inside and rng.random() < 0.3:
            gone = rng.choice((one, *inside))
            crowd.discard(gone)
            inside.pop(gone, None)
            continue
        origin = rng.choice("aaabbbcdefgh")
        counts = Counter(inside.values())
        leaves = crowd.add(one, origin)
        if len(inside) < 9:
            assert leaves is None
        elif counts.total() == len(counts):
            assert leaves == one
            continue
        else:
            assert leaves is not None
            most = max(counts.values())
            whose = inside[leaves]
            assert whose == origin if counts[origin] == most else counts[whose] == most
            assert leaves == next(each for each, of in inside.items() if of == whose)
            del inside[leaves]
        inside[one] = origin
        assert (list(crowd), len(crowd)) == (list(inside), len(inside))
        assert crowd._counts == Counter(inside.values())
        assert set(crowd._counts) == set(inside.values()), "of who has left, nothing is kept"


async def test_close_gives_up_those_who_wait(ca: certs.TestCA) -> None:
    place = Place(ca)
    place.port = await place.server.start()
    place.gate.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
    while not place.asked:
        await asyncio.sleep(0.005)
    place.server.close()
    async with asyncio.timeout(SOON_S):
        await place.server.wait_closed()
        assert await reader.read() == b""
    writer.close()
    assert await failure_of(asyncio.open_connection("127.0.0.1", place.port))
    place.server.close()  # again


async def test_out_of_descriptors_it_looks_away_for_a_while(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One try each time, not a loop that does nothing else; then it accepts again."""
    monkeypatch.setattr(accepting, "OUT_OF_DESCRIPTORS_S", 0.05)
    (listening,) = place.server._sockets
    tries = 0

    class Full:
        def fileno(self) -> int:
            return listening.fileno()

        def accept(self) -> object:
            nonlocal tries
            tries += 1
            raise OSError(24, "Too many open files")

        def close(self) -> None:
            listening.close()

    asyncio.get_running_loop().remove_reader(listening.fileno())
    place.server._sockets[:] = [Full()]  # type: ignore[list-item]
    place.server._accept_all()
    saying = asyncio.create_task(place.says(b"hello"))
    await asyncio.sleep(0.3)
    assert 1 <= tries <= 8
    asyncio.get_running_loop().remove_reader(listening.fileno())
    place.server._sockets[:] = [listening]
    async with asyncio.timeout(SOON_S):
        assert await saying == b"hello"


async def test_a_taken_port_is_an_error_and_leaves_nothing_open(place: Place) -> None:
    second = Place(place.ca)
    second.server._port = place.port
    assert await failure_of(second.server.start()) is OSError
    assert not second.server._sockets


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_who_has_one_address_of_a_network_has_them_all(host: str, origin: str) -> None:
    assert origin_of(host) == origin
