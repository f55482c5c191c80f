"""What data streams serve, and links of shm receive, and whose turn it is: so much in a turn of the
loop, however many there are. Each of them once had as much for itself.

Peers go round, and within a peer its streams: who has more of them is served no more.

Invariant: in one turn of the loop no more than SERVED_BYTES_MAX (and what one write goes beyond it)
or SERVED_ANSWERS_MAX are served; a stream that has more waits for a later turn, in its order.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Protocol

from entresol_proto import limits
from entresol_proto.fabric import framing

SERVED_BYTES_MAX = 8 * limits.MIB  # in one go before other work of the loop gets its turn
SERVED_ANSWERS_MAX = 256  # likewise: short ones, and errors, take the time and not the bytes


class Serving:
    """A READ of the peer and how far it is answered."""

    __slots__ = ("cancelled", "count", "index", "offset", "request", "spans")

    def __init__(self, request: int, spans: memoryview) -> None:
        self.request = request
        self.spans = spans
        self.count = len(spans) // framing.SPAN.size
        self.index = 0
        self.offset = 0
        self.cancelled = False


class Turn:
    """What may still be served in this turn of the loop."""

    __slots__ = ("answers", "bytes_left")

    def __init__(self) -> None:
        self.bytes_left = SERVED_BYTES_MAX
        self.answers = SERVED_ANSWERS_MAX

    @property
    def is_over(self) -> bool:
        return self.bytes_left <= 0 or self.answers <= 0


class Server(Protocol):
    """A stream or link that has something to do."""

    def serve(self, turn: Turn) -> bool:
        """Serve some, and take it off the turn; whether more could be served at once."""
        ...


class ServingTurns:
    """Of the streams of one daemon, or of one host's session. For one loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[Server]] = OrderedDict()  # by peer
        self._entered: set[Server] = set()
        self._scheduled = False

    def enter(self, stream: Server, peer: Hashable) -> None:
        """It has something to serve: it will be its turn; not at once, so that requests of one
        packet queue up together."""
        if stream not in self._entered:
            self._entered.add(stream)
            self._waiting.setdefault(peer, deque()).append(stream)
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            asyncio.get_running_loop().call_soon(self._serve)
            self._scheduled = True

    def _serve(self) -> None:
        self._scheduled = False
        turn = Turn()
        try:
            while self._waiting and not turn.is_over:
                peer, streams = self._waiting.popitem(last=False)
                stream = streams.popleft()
                self._entered.discard(stream)
                if streams:
                    self._waiting[peer] = streams
                if stream.serve(turn):
                    self.enter(stream, peer)
        finally:
            if self._waiting:
                self._schedule()
