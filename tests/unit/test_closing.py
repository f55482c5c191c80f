"""What a peer passes may take as long to close as it likes: nobody waits for that."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from shm_peer import RawPeer, mapped, raw_session, soon

from entresol_proto import limits
from entresol_proto.fabric import closing, shm, shmlink
from entresol_proto.fabric.base import ReadOp, RemoteSpan
from entresol_proto.fabric.closing import Closer
from entresol_proto.fabric.shm import ShmFabricServer, _Params
from entresol_proto.fabric.shmendpoint import ShmEndpoint
from entresol_proto.fabric.shmlink import Kind, Message
from entresol_proto.status import FabricError, Status

MIB = limits.MIB
LINGER_S = 4
LATE_S_MAX = 2.0  # of a loop that does anything else than wait for LINGER_S


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as one:
        yield one


def lingering() -> tuple[socket.socket, socket.socket]:
    """A TCP socket that lingers over what its other end does not read, and that end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lingers = socket.create_connection(listener.getsockname())
        silent, _ = listener.accept()
    lingers.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            lingers.send(bytes(65_536))
    lingers.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    return lingers, silent


class Armed:
    """A descriptor whose last close waits for LINGER_S, or until `let_go`.

    It is one end of a Unix socket where a TCP socket that lingers waits to be received: there
    nobody can tell it not to.
    """

    def __init__(self) -> None:
        lingers, self._silent = lingering()
        near, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lingers.fileno()]))
        self._far.sendmsg([b"x"], [rights])
        lingers.close()
        self.fd = near.detach()

    def say(self, sock: socket.socket, packet: bytes, times: int = 1) -> None:
        """Pass it, `times` over, and keep no other end of it."""
        RawPeer(sock).say(packet, *[self.fd] * times)
        os.close(self.fd)
        self._far.close()

    def let_go(self) -> None:
        self._silent.close()


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[None]:
    """Fails where the loop stands still for as long as an armed descriptor takes."""
    late_s = 0.0

    async def tick() -> None:
        nonlocal late_s
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            late_s = max(late_s, time.monotonic() - begun)

    task = asyncio.create_task(tick())
    try:
        yield
        await asyncio.sleep(0.05)
    finally:
        task.cancel()
    assert late_s < LATE_S_MAX, "the loop waited"


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def stranger(folder: Path) -> AsyncIterator[socket.socket]:
    """Somebody without a ticket, until it was cut off."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        path = str(folder / "run" / "fabric.sock")
        await asyncio.get_running_loop().sock_connect(sock, path)
        yield sock
        await RawPeer(sock).cut_off()


def exposing(rkey: int, length: int) -> bytes:
    return Message(Kind.EXPOSE, rkey, length_bytes=length).encode()


REVOKING = Message(Kind.REVOKE, 1).encode()


async def _greeting(folder: Path, _: ShmEndpoint, __: RawPeer, armed: Armed) -> None:
    async with stranger(folder) as sock:
        armed.say(sock, shmlink.hello(bytes(16)))


async def _behind_a_greeting(folder: Path, _: ShmEndpoint, __: RawPeer, armed: Armed) -> None:
    async with stranger(folder) as sock:
        sock.send(shmlink.hello(bytes(16)))
        armed.say(sock, b"more")


async def _revoke(_: Path, endpoint: ShmEndpoint, peer: RawPeer, armed: Armed) -> None:
    armed.say(peer.sock, REVOKING)
    await peer.cut_off()
    assert endpoint.closed


async def _many(_: Path, endpoint: ShmEndpoint, peer: RawPeer, armed: Armed) -> None:
    armed.say(peer.sock, REVOKING, 253)
    await peer.cut_off()
    assert endpoint.closed


async def _twice(_: Path, endpoint: ShmEndpoint, peer: RawPeer, armed: Armed) -> None:
    await mapped(peer, 1, 4_096)
    armed.say(peer.sock, exposing(1, 4_096))
    await peer.cut_off()
    assert endpoint.closed


async def _too_much(_: Path, endpoint: ShmEndpoint, peer: RawPeer, armed: Armed) -> None:
    armed.say(peer.sock, exposing(1, 2**40))
    assert (await peer.hear()).status == Status.BUSY
    assert not endpoint.closed


async def _unread(_: Path, endpoint: ShmEndpoint, peer: RawPeer, armed: Armed) -> None:
    armed.say(peer.sock, REVOKING)
    await endpoint.close()


async def _not_accepted(folder: Path, _: ShmEndpoint, __: RawPeer, armed: Armed) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(folder / "run" / "fabric.sock"))
        armed.say(sock, shmlink.hello(bytes(16)))
        # and the server closes before it looked


WAYS = [_greeting, _behind_a_greeting, _revoke, _many, _twice, _too_much, _unread, _not_accepted]


@pytest.mark.parametrize("way", WAYS)
def test_the_loop_does_not_wait_for_what_a_peer_passed(
    runner: asyncio.Runner,
    tmp_path: Path,
    way: Callable[[Path, ShmEndpoint, RawPeer, Armed], Awaitable[None]],
) -> None:
    armed = Armed()

    async def scenario() -> None:
        async with ticking(), raw_session(tmp_path) as (endpoint, peer):
            await way(tmp_path, endpoint, peer, armed)
            if way is not _not_accepted:
                await asyncio.sleep(0.05)
                armed.let_go()
            else:
                asyncio.get_running_loop().call_later(LINGER_S / 4, armed.let_go)

    runner.run(scenario())


def test_copies_do_not_wait_for_what_another_peer_passed(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    """Two descriptors took both threads that copy for all sessions."""

    async def scenario() -> None:
        async with raw_session(tmp_path / "a") as (endpoint, hostile):
            await mapped(hostile, 9, 4_096)
            async with raw_session(tmp_path / "b") as (other, peer):
                armed = [Armed() for _ in range(3)]
                for rkey, one in enumerate(armed):
                    one.say(hostile.sock, exposing(rkey, 4_096))
                await asyncio.sleep(0.05)
                async with asyncio.timeout(LATE_S_MAX):
                    await mapped(peer, 1, 2 * MIB)
                    op = ReadOp(RemoteSpan(1, 0, 2 * MIB), memoryview(bytearray(2 * MIB)))
                    assert await other.read([op], soon()) == [Status.OK]
                for one in armed:
                    one.let_go()
                    assert (await hostile.hear()).status == Status.BAD_REQUEST
            assert not endpoint.closed

    runner.run(scenario())


def test_a_lingering_socket_is_told_not_to(runner: asyncio.Runner, tmp_path: Path) -> None:
    """The simplest of such descriptors costs nothing but its close."""

    async def scenario() -> None:
        lingers, far = lingering()
        async with raw_session(tmp_path) as (_, peer):
            peer.say(exposing(1, 4_096), lingers.fileno())
            lingers.close()
            assert (await peer.hear()).status == Status.BAD_REQUEST
            begun = time.monotonic()
            while closers():
                await asyncio.sleep(0.005)
            assert time.monotonic() - begun < LATE_S_MAX
        far.close()

    runner.run(scenario())


# -- the threads ------------------------------------------------------------------------------


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Closing hangs until this is set."""
    go = threading.Event()

    def held(fd: int) -> None:
        assert go.wait(30)
        os.close(fd)

    monkeypatch.setattr(closing, "_close", held)
    yield go
    go.set()


def wait_until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def closers() -> int:
    return sum(each.name == "entresol-closer" for each in threading.enumerate())


def test_what_is_given_is_closed_and_no_thread_stays() -> None:
    closer = Closer()
    fds = [fd for _ in range(50) for fd in os.pipe()]
    for fd in fds[:20]:
        closer.give(fd)
    closer.give(*fds[20:])
    closer.give()
    wait_until(lambda: not any(is_open(fd) for fd in fds))
    wait_until(lambda: not closers())
    assert not closer.full
    closer.give(*os.pipe())
    assert closers(), "and one comes again"
    wait_until(lambda: not closers())


def test_a_thread_that_hangs_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    go, hangs = threading.Event(), os.pipe()
    close = closing._close

    def held(fd: int) -> None:
        assert fd not in hangs or go.wait(30)
        close(fd)

    monkeypatch.setattr(closing, "_close", held)
    closer = Closer()
    others = [fd for _ in range(20) for fd in os.pipe()]
    closer.give(hangs[0], *others[:20], hangs[1])
    for fd in others[20:]:
        closer.give(fd)
    wait_until(lambda: not any(is_open(fd) for fd in others))
    assert all(is_open(fd) for fd in hangs)
    assert not closer.full
    go.set()
    wait_until(lambda: not closers())
    assert not any(is_open(fd) for fd in hangs)


def test_threads_that_hang_are_bounded_and_then_nobody_new_is_let_in(
    hold: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(closing, "STUCK_NS", 50_000_000)
    closer = Closer()
    for module in (shm, shmlink, closing):
        monkeypatch.setattr(module, "CLOSER", closer)

    async def scenario() -> None:
        server = ShmFabricServer(tmp_path / "run")
        await server.start()
        for _ in range(limits.SHM_CLOSERS_MAX - 1):
            closer.give(*os.pipe())
        await asyncio.sleep(0.1)
        assert closers() == limits.SHM_CLOSERS_MAX
        await until(lambda: closer.stuck)
        with pytest.raises(FabricError) as caught:
            server.offer()
        assert caught.value.status is Status.BUSY
        assert "event=closing_stuck" in caplog.text
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            path = str(tmp_path / "run" / "fabric.sock")
            await asyncio.sleep(0.01)
            await asyncio.get_running_loop().sock_connect(sock, path)
            await asyncio.sleep(0.05)
            hold.set()
            await until(lambda: not closer.full)
            offer = server.offer()
            sock.send(shmlink.hello(_Params.parse(offer.params).ticket))
            endpoint = await server.accept(offer, b"", soon())
            await endpoint.close()
        await server.close()
        await until(lambda: not closers())

    asyncio.run(scenario())


def test_a_session_ends_where_it_cannot_be_heard_for_long(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: threading.Event
) -> None:
    """Its host has other ways to the daemon. No thread has to hang for that: slow ones will do."""
    monkeypatch.setattr(closing, "STUCK_NS", 200_000_000)

    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            monkeypatch.setattr(limits, "SHM_CLOSING_MAX", 8)
            monkeypatch.setattr(limits, "SHM_CLOSERS_MAX", 24)
            closer = closing.CLOSER
            closer.give(*[fd for _ in range(16) for fd in os.pipe()])
            assert not closer.stuck
            peer.say(REVOKING)
            await peer.cut_off()
            assert endpoint.closed
            assert closer.stuck
            hold.set()
            await until(lambda: not closer.full)

    runner.run(scenario())


def test_nothing_is_received_while_too_much_waits_to_be_closed(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: threading.Event
) -> None:
    async def scenario() -> None:
        async with raw_session(tmp_path) as (endpoint, peer):
            monkeypatch.setattr(limits, "SHM_CLOSING_MAX", 8)
            closing.CLOSER.give(*[fd for _ in range(16) for fd in os.pipe()])
            await until(lambda: closers() == limits.SHM_CLOSERS_MAX)
            assert closing.CLOSER.crowded
            peer.say(REVOKING)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(peer.hear(), 0.1)
            assert not endpoint.closed
            hold.set()
            assert (await peer.hear()).kind is Kind.REVOKED

    runner.run(scenario())


def test_a_crowd_that_stays_is_stuck_whatever_the_threads_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SHM_CLOSING_MAX", 2)
    monkeypatch.setattr(closing, "STUCK_NS", 0)
    closer = Closer()
    closer._threads = limits.SHM_CLOSERS_MAX  # all of them are somewhere
    fds = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(3)]
    closer.give(fds[0])
    assert not closer.full
    closer.give(fds[1])
    assert closer.crowded
    assert closer.stuck
    assert closer.full
    since_ns = closer._crowded_ns
    closer.give(fds[2])
    assert closer._crowded_ns == since_ns, "it has been one all the time"
    closer._threads = 0
    closer.give()
    until = time.monotonic() + 10
    while closer.full and time.monotonic() < until:
        time.sleep(0.001)
    assert not closer.full
