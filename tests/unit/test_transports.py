"""Ending a connection whatever state its transport is in."""

from __future__ import annotations

import asyncio

import certs
import pytest

from entresol_proto.transports import abort


class Forgetful(asyncio.Transport):
    """As a TLS transport of CPython 3.11.2 that was closed twice."""

    def __init__(self, closing: bool) -> None:
        super().__init__()
        self._closing = closing

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        raise AttributeError("'NoneType' object has no attribute '_abort'")


def test_what_is_closing_already_is_not_ended_again() -> None:
    abort(None)
    abort(Forgetful(closing=True))
    with pytest.raises(AttributeError):
        abort(Forgetful(closing=False))


async def test_a_tls_stream_closed_twice_can_be_cut() -> None:
    ca = certs.make_ca()
    server_side = certs.server_context(ca.issue("daemon"), ca)
    client_side = certs.client_context(ca.issue("tenant"), ca)
    server = await asyncio.start_server(
        lambda _reader, _writer: None, "127.0.0.1", 0, ssl=server_side
    )
    port = server.sockets[0].getsockname()[1]
    transport, _ = await asyncio.get_running_loop().create_connection(
        asyncio.Protocol, "127.0.0.1", port, ssl=client_side, server_hostname="localhost"
    )
    transport.close()
    transport.close()
    abort(transport)
    server.close()
