"""What transports of asyncio need help with."""

from __future__ import annotations

import asyncio


def abort(transport: asyncio.Transport | None) -> None:
    """End a connection now, if there is one.

    A TLS transport of CPython up to 3.11.3 that was closed twice, by us and because the peer ended
    it, has forgotten its protocol and raises (asyncio/sslproto.py, `close` and `abort`): it is
    being closed already.
    """
    if transport is None:
        return
    try:
        transport.abort()
    except AttributeError:
        if not transport.is_closing():
            raise
