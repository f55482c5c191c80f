"""Who holds the event loop up: a thread that looks while it hangs, and says where.

A host takes a daemon that is silent for a second for dead, so a loop that stops needs a name, and
the one time it happens is the time to take it. The thread also notices when it was itself kept from
running: then the machine, or whoever stopped the process, is the cause, and not a line of code.

Invariant: it costs a few wake-ups a second, never touches the loop's objects, and after `stop` its
thread has ended.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time

STALL_NS = 250_000_000  # a loop that is late by this much is looked at
LOOK_NS = 100_000_000
FRAMES_SHOWN_MAX = 6
WINDOW_NS = 60_000_000_000  # `longest_ns` is of the last one to two of these

log = logging.getLogger("entresol.stalls")


class StallWatch:
    """Beats on the loop, watches the beat from a thread. `start`, then `stop`."""

    def __init__(self, *, stall_ns: int = STALL_NS, look_ns: int = LOOK_NS) -> None:
        self.stalls = 0  # times the loop hung while this process could run
        self.starved = 0  # times the whole process could not run
        self._stall_ns = stall_ns
        self._look_ns = look_ns
        self._beat_ns = 0
        self._windows = [0, 0]  # longest delay of the last window and of this one
        self._window_ends_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def longest_ns(self) -> int:
        """The longest the loop was late in the last minute or two."""
        return max(*self._windows, self._late_ns(time.monotonic_ns()))

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; call on the loop's thread."""
        assert self._thread is None, "started twice"
        self._window_ends_ns = time.monotonic_ns() + WINDOW_NS
        self._schedule(loop)
        self._thread = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="entresol-stalls", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _late_ns(self, now_ns: int) -> int:
        return max(0, now_ns - self._beat_ns - self._look_ns) if self._beat_ns else 0

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat_ns = time.monotonic_ns()
        self._timer = loop.call_later(self._look_ns / 1e9, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._window_ends_ns:
            self._windows = [self._windows[1], 0]
            self._window_ends_ns = now_ns + WINDOW_NS
        self._windows[1] = max(self._windows[1], self._late_ns(now_ns))
        self._schedule(loop)

    def _watch(self, loop_thread: int) -> None:
        told_ns = 0  # the beat of which it was said already
        looked_ns = time.monotonic_ns()
        while not self._done.wait(self._look_ns / 1e9):
            now_ns = time.monotonic_ns()
            own_ns, looked_ns = now_ns - looked_ns - self._look_ns, now_ns
            beat_ns, late_ns = self._beat_ns, self._late_ns(now_ns)
            if own_ns > self._stall_ns:
                self.starved += 1
                log.warning(
                    "event=process_starved for_ms=%d hint='the machine is overloaded, or the "
                    "process was stopped'", own_ns // 1_000_000,
                )  # fmt: skip
            elif late_ns > self._stall_ns and beat_ns != told_ns:
                told_ns = beat_ns
                self.stalls += 1
                log.warning(
                    "event=loop_stalled late_ms=%d at=%s", late_ns // 1_000_000, _where(loop_thread)
                )


def _where(thread: int) -> str:
    """The innermost frames of a thread: file:line:function, the innermost first."""
    frame = sys._current_frames().get(thread)
    found: list[str] = []
    while frame is not None and len(found) < FRAMES_SHOWN_MAX:
        code = frame.f_code
        name = code.co_filename.rpartition("/")[2]
        found.append(f"{name}:{frame.f_lineno}:{code.co_name}")
        frame = frame.f_back
    return "<".join(found)
