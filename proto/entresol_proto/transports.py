"""What transports of asyncio need help with."""

from __future__ import annotations

import asyncio
import os

_PARTS_MAX = 512  # of one call; below IOV_MAX (1024)


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


def write_now(fd: int, parts: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """Write what a socket that does not block takes at once; what is left, in order.

    For a plain socket whose transport has nothing waiting: uvloop's writes while it holds the
    interpreter's lock, which a kernel that copies megabytes would keep from every thread. What
    fails is left to the transport, which meets the same and tells it.
    """
    try:
        done = os.writev(fd, parts[:_PARTS_MAX])
    except OSError:
        return parts
    for at, part in enumerate(parts):
        if done < len(part):
            return [memoryview(part)[done:], *parts[at + 1 :]]
        done -= len(part)
    return []
