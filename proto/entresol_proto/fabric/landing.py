"""Spans that are handed on as they land: received by a thread of their own, without the loop.

A thread takes over the receiving side of one tcp data stream while requests of this kind are open.
It receives one span at a time into its own memory, in native code, and hands it to the caller's
function while the bytes are still in the caches. Other messages of the peer go to the loop.

Invariants:
- the loop and the thread never receive from one stream at the same time: the transport is paused
  from the first request to the last answer, and what is left of a header changes hands with it;
- once a request was given up, its function is not called again, and no call of it is running;
- a request that is over, answered or given up, has let go of its function, and of the caller's
  memory with it: the thread keeps the latest one until the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from entresol_proto import limits, native
from entresol_proto.fabric import framing
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.native import Received, Receiving
from entresol_proto.status import ProtocolError, Status

_log = logging.getLogger("entresol.fabric")

SPAN_BYTES_MAX = 16 * limits.MIB  # longer ones are read the other way
_MEMORY_STEP_BYTES = 1 * limits.MIB

# Given the number of a span and its bytes, which are the fabric's and valid until it returns.
OnLanded = Callable[[int, memoryview], Status]


@runtime_checkable
class LandingEndpoint(Protocol):
    """An endpoint that can hand on spans from where they land, without a copy for the caller."""

    def can_land(self, spans: Sequence[RemoteSpan]) -> bool:
        """Whether `land` can be called with these, without an await in between."""
        ...

    async def land(
        self, spans: Sequence[RemoteSpan], on_landed: OnLanded, deadline_ns: int
    ) -> list[Status]:
        """Bring spans here; `on_landed` sees each whole one once, on one of several threads.

        Statuses are what `on_landed` returned, or why a span did not come. Once it returned, or was
        cancelled, `on_landed` neither runs nor is called again.
        """
        ...


class Landing:
    """One request for spans that a `Lander` receives."""

    __slots__ = ("_lock", "_numbers", "_on_landed", "lengths", "request", "statuses")

    def __init__(
        self, request: int, lengths: Sequence[int], numbers: Sequence[int], on_landed: OnLanded
    ) -> None:
        self.request = request
        self.lengths = lengths
        self.statuses: list[Status | None] = [None] * len(lengths)
        self._numbers = numbers
        self._on_landed: OnLanded | None = on_landed  # until it is over
        self._lock = threading.Lock()  # held while `on_landed` runs

    def give_up(self) -> list[Status | None]:
        """It is over: what is known of each span, None where nothing landed.

        Waits for a call of `on_landed` that is running.
        """
        with self._lock:
            self._on_landed = None
            return list(self.statuses)

    def hand_over(self, index: int, view: memoryview) -> None:
        """A whole span is here."""
        status = Status.DISCONNECTED
        with self._lock:
            if self._on_landed is not None:
                try:
                    status = self._on_landed(self._numbers[index], view)
                except Exception:
                    _log.exception("event=bug where=on_landed")
                    status = Status.INTERNAL
            self.statuses[index] = status


class LanderOwner(Protocol):
    """What a lander says to its stream, always on the loop."""

    def peer_reads(self, request: int, spans: memoryview) -> None: ...
    def peer_cancels(self, request: int) -> None: ...
    def landed(self, landing: Landing) -> None:
        """A request is answered; its statuses are complete."""
        ...

    def lander_lost(self, error: ProtocolError | None) -> None:
        """The stream ended, or the peer broke the protocol."""
        ...


class Lander:
    """The thread of one stream. Lives from the first request on until `close`."""

    def __init__(self, kernel: native.Kernel, sock: socket.socket, owner: LanderOwner) -> None:
        self._kernel = kernel
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Landing | None] = queue.SimpleQueue()
        self._state = Receiving()
        self._memory = mmap.mmap(-1, _MEMORY_STEP_BYTES)
        self._lock = threading.Lock()  # of closing
        self._closed = False
        self._fd = os.dup(sock.fileno())  # so that its number means this socket until the end
        try:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            os.close(self._fd)
            raise
        # One that nobody closed must not keep its process from ending.
        self._thread = threading.Thread(target=self._run, name="entresol-land", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError):
            os.close(self._fd)
            os.close(self._wake_fd)
            self._memory.close()
            raise

    def begin(self, header: bytes) -> None:
        """The stream is ours from now on; `header` is what came of the next message already."""
        ctypes.memmove(self._state.header, header, len(header))
        self._state.header_bytes = len(header)

    def submit(self, landing: Landing) -> None:
        """Receive this after what was submitted before; its READ was sent in the same order."""
        self._queue.put(landing)

    def end(self) -> bytes:
        """All that was submitted has landed: what came of the next message already."""
        size, self._state.header_bytes = self._state.header_bytes, 0
        return bytes(self._state.header[:size])

    def close(self) -> None:
        """Let go of the stream and end the thread; does not wait for it. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._state.stop = 1
                os.eventfd_write(self._wake_fd, 1)
                self._queue.put(None)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        lost = False
        while (landing := self._queue.get()) is not None:
            if lost:
                continue  # the loop ends it with the stream
            try:
                lost = not self._receive_all(landing)
                error = None
            except ProtocolError as problem:
                lost, error = True, problem
            except (OSError, MemoryError) as problem:  # none for a span longer than those before
                _log.warning("event=landing_failed effect=stream_ends reason=%s", problem)
                lost, error = True, None
            if lost:
                self._say(self._owner.lander_lost, error)
            else:
                landing.give_up()  # before the loop hears: then the caller's memory is its own
                self._say(self._owner.landed, landing)
        with self._lock:
            os.close(self._fd)
            os.close(self._wake_fd)

    def _say(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(call, *args)

    def _receive_all(self, landing: Landing) -> bool:
        """False when the stream ended or this was closed. Raises: ProtocolError."""
        for index, length in enumerate(landing.lengths):
            if landing.statuses[index] is not None:
                continue
            view = self._aim(landing.request, index, length)
            try:
                while landing.statuses[index] is None:
                    ended = self._kernel.receive(self._fd, self._wake_fd, self._state)
                    if ended == Received.DONE:
                        landing.hand_over(index, view)
                    elif ended != Received.OTHER or not self._other(landing):
                        return False
            finally:
                view.release()
        return True

    def _aim(self, request: int, index: int, length: int) -> memoryview:
        """Receive this span next; the view is where it goes."""
        if len(self._memory) < length:
            self._memory = mmap.mmap(-1, -(-length // _MEMORY_STEP_BYTES) * _MEMORY_STEP_BYTES)
        state = self._state
        state.into = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        state.length_bytes, state.received_bytes = length, 0
        state.request, state.index = request, index
        return memoryview(self._memory)[:length]

    def _other(self, landing: Landing) -> bool:
        """A message that is no data of the span we wait for; false when the stream ended.

        Raises: ProtocolError.
        """
        kind, status, index, request, _, length = framing.HEADER.unpack(bytes(self._state.header))
        self._state.header_bytes = 0
        if kind == framing.Message.ERROR and not length and request == landing.request:
            return self._failed(landing, index, status)
        if kind == framing.Message.CANCEL and not length:
            self._say(self._owner.peer_cancels, request)
            return True
        if kind == framing.Message.READ and framing.is_read_length(length):
            body = self._receive_body(length)
            if body is not None:
                self._say(self._owner.peer_reads, request, body)
            return body is not None
        raise ProtocolError(f"message {kind} is not allowed here")

    def _failed(self, landing: Landing, index: int, status: int) -> bool:
        known = framing.answered_status(status)
        if index == framing.EVERY_INDEX:
            landing.statuses[:] = [known if one is None else one for one in landing.statuses]
        elif index < len(landing.statuses) and landing.statuses[index] is None:
            landing.statuses[index] = known
        else:
            raise ProtocolError("an answer to a span that is not open")
        return True

    def _receive_body(self, length: int) -> memoryview | None:
        """The spans of a READ of the peer; None when the stream ended."""
        state = self._state
        saved = state.into, state.length_bytes, state.received_bytes
        body = bytearray(length)
        holder = ctypes.c_char.from_buffer(body)
        state.into, state.received_bytes = ctypes.addressof(holder), 0
        state.length_bytes = state.piece_bytes = length
        ended = self._kernel.receive(self._fd, self._wake_fd, state)
        state.into, state.length_bytes, state.received_bytes = saved
        del holder
        return memoryview(body) if ended == Received.DONE else None
