"""How both ends of a control stream take what comes: into a buffer that is there already.

For a plain `asyncio.Protocol`, asyncio and uvloop read TLS into a new object of 256 KiB each time,
and cut it down to the 100 bytes that came (`sslproto`, `_do_read__copied`). In the daemon, where
freed memory is overwritten, each message cost the filling of that memory twice.

Invariant: a buffer belongs to one thread, and holds something only while one connection is read.
"""

from __future__ import annotations

import asyncio
import threading

RECEIVE_BYTES = 256 * 1024


class _Buffers(threading.local):
    """One for each thread that runs a loop."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(RECEIVE_BYTES))


_buffers = _Buffers()


class Receiver(asyncio.BufferedProtocol):
    """A protocol whose `received` is called with each piece that came, which is its own."""

    def received(self, data: bytes) -> None:
        """What came next."""
        raise NotImplementedError

    def get_buffer(self, _sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol: where to put it. Nothing else runs before
        `buffer_updated`."""
        return _buffers.view

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol. Keys come this way: the buffer does not keep them."""
        view = _buffers.view
        data = bytes(view[:nbytes])
        view[:nbytes] = bytes(nbytes)
        self.received(data)
