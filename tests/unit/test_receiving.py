"""What both ends of a control stream read into: nothing of one connection is another's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from entresol_daemon.control import devcerts
from entresol_daemon.control.identity import client_ssl_context, server_ssl_context
from entresol_proto.receiving import RECEIVE_BYTES, Receiver

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


class Kept(Receiver):
    """Keeps what came."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def received(self, data: bytes) -> None:
        self.pieces.append(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self.over.set_result(None)


@LOOPS
def test_streams_over_tls_come_whole_and_apart(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Several at once, more than a buffer of each, in pieces of any size."""
    pki = devcerts.create(tmp_path / "pki", shard="s", tenants=["t"])
    mine = pki.tenant("t")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        kept: list[Kept] = []

        def make() -> Kept:
            kept.append(Kept())
            return kept[-1]

        tls = server_ssl_context(pki.shard.cert, pki.shard.key, pki.ca)
        server = await loop.create_server(make, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        sent = [bytes([n]) * (RECEIVE_BYTES * 2 + 7 * n) for n in range(1, 5)]

        async def send(raw: bytes) -> None:
            context = client_ssl_context(mine.cert, mine.key, mine.ca)
            context.check_hostname = False
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            for at in range(0, len(raw), 99_991):
                writer.write(raw[at : at + 99_991])
                await writer.drain()
            writer.close()
            await writer.wait_closed()

        await asyncio.gather(*(send(raw) for raw in sent))
        await asyncio.gather(*(each.over for each in kept))
        server.close()
        found = sorted(b"".join(each.pieces) for each in kept)
        assert found == sorted(sent)
        assert all(len(piece) <= RECEIVE_BYTES for each in kept for piece in each.pieces)

    loop = new_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


async def test_a_piece_is_its_own_and_the_buffer_forgets_it() -> None:
    one = Kept()
    view = one.get_buffer(-1)
    view[:3] = b"key"
    one.buffer_updated(3)
    assert one.pieces == [b"key"]
    assert not any(view), "what came is still in the buffer"
    view[:3] = b"two"
    assert one.pieces == [b"key"]
    view[:3] = bytes(3)


async def test_a_thread_has_a_buffer_of_its_own() -> None:
    one, seen = Kept(), []
    thread = threading.Thread(target=lambda: seen.append(one.get_buffer(-1)))
    thread.start()
    thread.join()
    assert seen[0].obj is not one.get_buffer(-1).obj
    assert one.get_buffer(-1).obj is Kept().get_buffer(-1).obj
