"""A tcp peer that says whatever a test wants, and the session it talks to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import leaks

from entresol_proto import limits
from entresol_proto.fabric import framing
from entresol_proto.fabric.base import ReadOp, RemoteSpan
from entresol_proto.fabric.framing import EVERY_INDEX, HEADER, Message
from entresol_proto.fabric.tcp import TcpEndpoint, TcpFabricServer
from entresol_proto.fabric.tcp_wire import TcpParams


def soon(seconds: float = 5.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


class RawPeer:
    """A host made of a plain socket, which says whatever a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, *messages: bytes) -> None:
        self.writer.write(b"".join(messages))

    async def hear(self) -> tuple[int, int, int, int, int, bytes]:
        """One message: type, status, index, request, offset and its payload."""
        raw = await asyncio.wait_for(self.reader.readexactly(HEADER.size), 5)
        kind, status, index, request, offset, length = HEADER.unpack(raw)
        body = await asyncio.wait_for(self.reader.readexactly(length), 5)
        return kind, status, index, request, offset, body

    async def asked(self) -> int:
        """The number of the next read request."""
        kind, _, _, request, _, _ = await self.hear()
        assert kind == Message.READ
        return request

    async def cut_off(self) -> None:
        """Wait until the daemon ends the connection."""
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(self.reader.read(1 << 20), 5):
                pass


@contextlib.asynccontextmanager
async def raw_session() -> AsyncIterator[tuple[TcpEndpoint, RawPeer]]:
    """A daemon endpoint with one stream, whose peer is raw. Fails for anything that leaks."""
    before = leaks.snapshot()
    server = TcpFabricServer("127.0.0.1", streams=1)
    await server.start()
    offer = server.offer()
    ticket = TcpParams.parse(offer.params).ticket
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    peer = RawPeer(reader, writer)
    peer.say(framing.hello(0, 1, ticket))
    assert (await peer.hear())[0] == Message.WELCOME
    try:
        yield await server.accept(offer, b"", soon()), peer
    finally:
        await server.close()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    await leaks.settle(before, ignore_threads=["asyncio_"])
    leaks.assert_no_leaks(before, ignore_threads=["asyncio_"])


def run(runner: object, scenario: object) -> None:
    assert isinstance(runner, asyncio.Runner)
    runner.run(scenario)  # type: ignore[arg-type]


def target(*sizes: int) -> tuple[bytearray, list[ReadOp]]:
    """One buffer of canaries and reads of the given sizes into it, 100 bytes apart."""
    memory = bytearray(b"\xa5" * (sum(sizes) + 100 * (len(sizes) + 1)))
    view, at, ops = memoryview(memory), 100, []
    for size in sizes:
        ops.append(ReadOp(RemoteSpan(1, 0, size), view[at : at + size]))
        at += size + 100
    return memory, ops


# -- a peer that answers badly ----------------------------------------------------------------

BAD_ANSWERS = {
    "another request": lambda n: framing.data(n + 1, 0, 0, 10) + b"x" * 10,
    "an index past the end": lambda n: framing.data(n, 2, 0, 10) + b"x" * 10,
    "the index for all": lambda n: framing.data(n, EVERY_INDEX, 0, 10) + b"x" * 10,
    "longer than the span": lambda n: framing.data(n, 0, 0, 1_001) + b"x" * 1_001,
    "much longer": lambda n: framing.data(n, 0, 0, limits.BLOCK_BYTES_MAX) + b"x" * 5_000,
    "past the span": lambda n: framing.data(n, 0, 1_000, 1) + b"x",
    "not from the start": lambda n: framing.data(n, 0, 1, 999) + b"x" * 999,
    "an offset that wraps": lambda n: framing.data(n, 0, 2**32 - 1, 2) + b"xx",
    "the same bytes twice": lambda n: (framing.data(n, 0, 0, 600) + b"\xa5" * 600) * 2,
    "more after the end": lambda n: (framing.data(n, 0, 0, 1_000) + b"\xa5" * 1_000) * 2,
    "data after an error": lambda n: framing.error(n, 0, 9) + framing.data(n, 0, 0, 1) + b"x",
    "two errors": lambda n: framing.error(n, 0, 9) * 2,
    "an error for another request": lambda n: framing.error(n + 7, 0, 9),
    "an error for all of another": lambda n: framing.error(n + 7, EVERY_INDEX, 9),
    "an error past the end": lambda n: framing.error(n, 3, 9),
    "a message of no type": lambda n: HEADER.pack(9, 0, 0, n, 0, 0),
    "a second greeting": lambda n: framing.welcome(),
}
