"""What a tcp session has asked its peer for: batches of ops, their parts, requests on a stream.

Invariant: every part is answered once, or given up with its batch; then nothing lands for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.fabric.landing import Landing
from entresol_proto.status import Status


class Asker(Protocol):
    """What a batch needs of a stream."""

    def give_up(self, request: int) -> None:
        """Nobody waits for a request any more: none of its bytes lands from here on."""
        ...


class Batch:
    """One `read` call: its statuses, and a future that is done when every op is settled."""

    __slots__ = ("_open", "_parts", "done", "requests", "statuses")

    def __init__(self, loop: asyncio.AbstractEventLoop, ops: int) -> None:
        self.statuses = [Status.OK] * ops
        self.done: asyncio.Future[None] = loop.create_future()
        self.requests: list[tuple[Asker, int]] = []
        self._parts = [0] * ops  # still open, per op
        self._open = 0  # their sum

    def add_part(self, op: int) -> None:
        self._parts[op] += 1
        self._open += 1

    def answer(self, op: int, status: Status) -> None:
        """One part of `op` ended. The first failure of an op is its status."""
        if status is not Status.OK and self.statuses[op] is Status.OK:
            self.statuses[op] = status
        self._parts[op] -= 1
        self._open -= 1
        if not self._open and not self.done.done():
            self.done.set_result(None)

    def end(self, status: Status) -> None:
        """Nobody waits any longer: what is open ends with `status` and its bytes land nowhere."""
        for stream, request in self.requests:
            stream.give_up(request)
        self.requests.clear()
        for op, parts in enumerate(self._parts):
            if parts and self.statuses[op] is Status.OK:
                self.statuses[op] = status
        if not self.done.done():
            self.done.set_result(None)


class Part:
    """A piece of an op that one stream fetches: `view` until it is answered or given up."""

    __slots__ = ("op", "received", "span", "view")

    def __init__(self, op: int, span: RemoteSpan, view: memoryview | None) -> None:
        self.op = op
        self.span = span
        self.view = view
        self.received = 0


class Asked:
    """A READ we sent: `batch` is None once its caller no longer waits."""

    __slots__ = ("batch", "landing", "open", "parts")

    def __init__(self, batch: Batch, parts: Sequence[Part], landing: Landing | None) -> None:
        self.batch: Batch | None = batch
        self.parts: list[Part | None] = list(parts)
        self.open = len(parts)
        self.landing = landing  # then a thread receives it, and no part has a view
