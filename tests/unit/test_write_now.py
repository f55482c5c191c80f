"""Writing to a socket without its transport: all that it takes, in order, and nothing twice."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from entresol_proto.fabric.datastream import DataStream
from entresol_proto.transports import write_now


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def received(theirs: socket.socket) -> bytes:
    """All that is there now."""
    theirs.setblocking(False)
    found = bytearray()
    while True:
        try:
            some = theirs.recv(1 << 20)
        except BlockingIOError:
            return bytes(found)
        if not some:
            return bytes(found)
        found += some


def test_what_the_socket_takes_is_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    parts: list[bytes | memoryview] = [b"ab", b"", memoryview(b"cde"), b"f"]
    assert write_now(ours.fileno(), parts) == []
    assert received(theirs) == b"abcdef"


def test_what_it_does_not_take_is_left_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    """Whichever part it stops in."""
    ours, theirs = pair
    rng = random.Random(1)
    parts: list[bytes | memoryview] = [
        memoryview(rng.randbytes(rng.randrange(1, 90_000))) for _ in range(60)
    ]
    wanted, found = b"".join(parts), b""
    stops = 0
    while parts:
        parts = write_now(ours.fileno(), parts)
        stops += bool(parts)
        found += received(theirs)
    assert found == wanted
    assert stops > 2


def test_a_socket_that_takes_nothing_leaves_all(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    while not write_now(ours.fileno(), [bytes(4_096)]):
        pass
    parts: list[bytes | memoryview] = [b"x" * 10, b"y"]
    assert write_now(ours.fileno(), parts) == parts


def test_thousands_of_parts_are_no_error(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    parts: list[bytes | memoryview] = [bytes([at % 251]) for at in range(3_000)]
    wanted = b"".join(parts)
    while parts:
        parts = write_now(ours.fileno(), parts)
    assert received(theirs) == wanted


def test_a_peer_that_is_gone_is_the_transports_to_tell(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.close()
    parts: list[bytes | memoryview] = [b"left"]
    assert write_now(ours.fileno(), parts) == parts
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    assert write_now(closed, parts) == parts


class Transport:
    """Has `queued` bytes that its socket has not taken yet."""

    def __init__(self, sock: socket.socket, queued: int) -> None:
        self.sock, self.queued = sock, queued
        self.written: list[bytes] = []

    def get_extra_info(self, name: str) -> object:
        return self.sock if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return self.queued

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int, low: int) -> None: ...

    def writelines(self, parts: list[bytes]) -> None:
        self.written += parts


@pytest.mark.parametrize("queued", [0, 1])
async def test_nothing_overtakes_what_the_transport_has(queued: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        with theirs:
            ours.setblocking(False)
            stream = DataStream(owner=cast(Any, None), greeter=cast(Any, "unused"))
            transport = Transport(ours, queued)
            stream.connection_made(cast(Any, transport))
            parts = [b"head", bytes(range(256)) * 1024]
            assert stream._write_all(list(parts)) == sum(map(len, parts))
            taken = received(theirs) if not queued else b""
            if queued:
                assert transport.written == parts, "behind what was there before"
            else:
                assert taken, "written without the transport"
            assert (taken + b"".join(transport.written))[:4] == b"head"
