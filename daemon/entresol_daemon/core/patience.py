"""How long a request may wait for its turn before it is better refused. Pure.

A queue that is empty now and then only smooths bursts: whoever waits there will soon be served. A
queue that has not been empty for a while is a standing one: whatever enters it waits for all the
others, and so will the next. Then waiting is cut short: what is served is served in time, and the
rest hears at once that it should go elsewhere. Source: Maurer, "Fail at Scale" (ACM Queue, 2015),
after Nichols and Jacobson, "Controlling Queue Delay" (2012).

Invariant: the patience is LONG or SHORT, and SHORT only after STANDING_NS without an empty queue.
"""

from __future__ import annotations

LONG_NS = 500_000_000  # while the queue is empty now and then
SHORT_NS = 20_000_000  # while it is not
STANDING_NS = 250_000_000  # this long without being empty


class Patience:
    """Of one queue. Times are monotonic nanoseconds."""

    def __init__(self) -> None:
        self._empty_ns: int | None = None  # when it was seen empty last

    def seen_empty(self, now_ns: int) -> None:
        """Nobody waits now."""
        self._empty_ns = now_ns

    def wait_ns(self, now_ns: int) -> int:
        """How long a request that begins to wait now may wait."""
        if self._empty_ns is None:
            self._empty_ns = now_ns
        return SHORT_NS if now_ns - self._empty_ns > STANDING_NS else LONG_NS
