"""Closes what came from a peer, in threads that may be lost.

A descriptor that a peer passed may be anything, and to close it may take as long as that peer
likes: a socket that lingers, a file of a file system of its own, memory of a hundred GiB. So may
closing a socket where such descriptors wait unreceived. On the event loop that would be everybody's
time, in a shared pool its threads.

Invariants: `give` never waits; no more than SHM_CLOSERS_MAX threads are ever at it, none of them
when there is nothing to close; a thread that hangs holds up nothing but what it closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import deque

from entresol_proto import limits

_log = logging.getLogger("entresol.fabric")

STUCK_NS = 1_000_000_000  # at one descriptor: such a thread is not counted on
_IDLE_S = 0.02  # a thread waits so long for more before it ends
_AT_ONCE = struct.pack("ii", 1, 0)  # linger: on, for no time


class Closer:
    """Closes descriptors in threads of its own, which are there while there is something to do."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[int] = deque()
        self._busy: dict[threading.Thread, int] = {}  # at a descriptor since, monotonic ns
        self._threads = 0
        self._idle = 0
        self._crowded_ns = 0  # since when, monotonic; 0: not now
        self._told = False  # that it is stuck

    @property
    def crowded(self) -> bool:
        """So many descriptors wait that no more should be received for now."""
        return len(self._waiting) >= limits.SHM_CLOSING_MAX

    @property
    def stuck(self) -> bool:
        """Every thread there may be hangs, or all of them are too slow: for a while, at least, what
        is given waits."""
        with self._changed:
            before_ns = time.monotonic_ns() - STUCK_NS
            stuck = 0 < self._crowded_ns <= before_ns or (
                len(self._busy) >= limits.SHM_CLOSERS_MAX and max(self._busy.values()) <= before_ns
            )
            told, self._told = self._told, stuck
            waiting = len(self._waiting)
        if stuck and not told:
            _log.error(
                "event=closing_stuck threads=%d waiting=%d reason='descriptors that peers "
                "passed cannot be closed; shm takes nobody new'", limits.SHM_CLOSERS_MAX, waiting,
            )  # fmt: skip
        elif told and not stuck:
            _log.info("event=closing_again waiting=%d", waiting)
        return stuck

    @property
    def full(self) -> bool:
        """Nobody new should be let in."""
        return self.crowded or self.stuck

    def give(self, *fds: int) -> None:
        """Close these some time soon. Takes them over. From any thread."""
        with self._changed:
            self._waiting.extend(fds)
            self._note_crowd()
            if self._idle:
                self._changed.notify()
                return
        self._add_thread()

    def _note_crowd(self) -> None:
        if not self.crowded:
            self._crowded_ns = 0
        elif not self._crowded_ns:
            self._crowded_ns = time.monotonic_ns()

    def _add_thread(self) -> None:
        with self._changed:
            if self._threads >= limits.SHM_CLOSERS_MAX or not self._waiting:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name="entresol-closer", daemon=True).start()
        except (RuntimeError, MemoryError) as error:  # the next one who gives tries again
            with self._changed:
                self._threads -= 1
            if threading.main_thread().is_alive():  # else the process ends, and closes them
                _log.warning("event=no_thread name=entresol-closer reason=%s", error)

    def _work(self) -> None:
        me = threading.current_thread()
        while (fd := self._next(me)) is not None:
            _close(fd)

    def _next(self, me: threading.Thread) -> int | None:
        """What to close now; None when this thread is not needed any more."""
        with self._changed:
            self._busy.pop(me, None)
            if not self._waiting:
                self._idle += 1
                self._changed.wait(_IDLE_S)
                self._idle -= 1
            if not self._waiting:
                self._threads -= 1
                return None
            fd = self._waiting.popleft()
            self._note_crowd()
            self._busy[me] = time.monotonic_ns()
            alone = bool(self._waiting) and not self._idle
        if alone:  # the others must not wait for this one
            self._add_thread()
        return fd


def _close(fd: int) -> None:
    """Here it may hang. A socket is told not to linger: whoever shares it may tell it otherwise."""
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=fd)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        finally:
            sock.detach()
    with contextlib.suppress(OSError):
        os.close(fd)


CLOSER = Closer()
os.register_at_fork(after_in_child=CLOSER.__init__)  # type: ignore[misc]  # no thread is there


def close_socket(sock: socket.socket) -> None:
    """End a connection at once, and close its socket wherever that may wait."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    fd = sock.detach()
    if fd >= 0:
        CLOSER.give(fd)
