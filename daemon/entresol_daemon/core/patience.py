"""How long a request may wait for its turn before it is better refused. Pure.

A queue that is empty now and then only smooths bursts: whoever waits there will soon be served. A
queue that has not been empty for a while is a standing one: whatever enters it waits for all the
others, and so will the next. Then waiting is cut short: what is served is served in time, and the
rest hears at once that it should go elsewhere. Source: Maurer, "Fail at Scale" (ACM Queue, 2015),
after Nichols and Jacobson, "Controlling Queue Delay" (2012).

A queue that is empty because all of it lost patience does not count: what counts is that somebody
found a free place.

Invariant: the patience is LONG or SHORT, and SHORT only after STANDING_NS without a free place.
"""

from __future__ import annotations

LONG_NS = 250_000_000  # while nobody has to wait now and then
SHORT_NS = 20_000_000  # while everybody has to
STANDING_NS = 100_000_000  # this long without anybody who had not to wait


class Patience:
    """Of one queue. Times are monotonic nanoseconds."""

    def __init__(self) -> None:
        self._free_ns: int | None = None  # when there was a free place last

    def seen_free(self, now_ns: int) -> None:
        """There is a free place, and nobody waits."""
        self._free_ns = now_ns

    def wait_ns(self, now_ns: int) -> int:
        """How long a request that begins to wait now may wait."""
        if self._free_ns is None:
            self._free_ns = now_ns
        return SHORT_NS if now_ns - self._free_ns > STANDING_NS else LONG_NS
