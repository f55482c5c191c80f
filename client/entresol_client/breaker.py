"""When a shard is left alone: a circuit breaker as a pure state machine.

Invariants: every state but CLOSED is left by itself, within `cooldown_ns_max` plus the time of one
probe, whether or not there is traffic; callers are never the probe, so no caller waits for a shard
that is known to be out. No clock, no randomness of its own: `now_ns` and `jitter` are passed in.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from entresol_client.config import BreakerSettings


class BreakerState(enum.Enum):
    """What the breaker lets through."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing, until the cool-down ends
    HALF_OPEN = "half_open"  # one probe is under way, nothing else


class Breaker:
    """Counts consecutive outages of one shard.

    `jitter` returns 0..1 and spreads the cool-downs of many hosts: a cool-down is between half and
    all of its nominal length, which doubles with every failed probe up to the maximum.
    """

    __slots__ = (
        "_cooldown_ns", "_jitter", "_settings", "failures", "openings", "retry_at_ns", "state",
    )  # fmt: skip

    def __init__(self, settings: BreakerSettings, jitter: Callable[[], float]) -> None:
        self._settings = settings
        self._jitter = jitter
        self.state = BreakerState.CLOSED
        self.failures = 0  # in a row
        self.openings = 0  # since the start
        self.retry_at_ns = 0  # when OPEN: the end of the cool-down
        self._cooldown_ns = settings.cooldown_ns_min

    @property
    def admits(self) -> bool:
        """True when callers may use the shard."""
        return self.state is BreakerState.CLOSED

    def success(self) -> None:
        """The shard answered something, anything: it is alive."""
        self.state = BreakerState.CLOSED
        self.failures = 0
        self._cooldown_ns = self._settings.cooldown_ns_min

    def failure(self, now_ns: int) -> None:
        """The shard refused, vanished, or stayed silent past a deadline."""
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._cooldown_ns = min(self._cooldown_ns * 2, self._settings.cooldown_ns_max)
            self._open(now_ns)
        elif self.failures >= self._settings.failures_to_open:
            self.trip(now_ns)

    def trip(self, now_ns: int) -> None:
        """The shard is known to be out (it hangs): open at once. Nothing new when open already."""
        if self.state is BreakerState.CLOSED:
            self.openings += 1
            self._open(now_ns)

    def probe(self, now_ns: int) -> bool:
        """True when the caller shall probe now; it must then tell `success` or `failure`."""
        if self.state is BreakerState.OPEN and now_ns >= self.retry_at_ns:
            self.state = BreakerState.HALF_OPEN
            return True
        return False

    def wait_ns(self, now_ns: int) -> int:
        """Time until the next probe; 0 unless OPEN."""
        return max(0, self.retry_at_ns - now_ns) if self.state is BreakerState.OPEN else 0

    def _open(self, now_ns: int) -> None:
        self.state = BreakerState.OPEN
        spread = 0.5 + 0.5 * min(1.0, max(0.0, self._jitter()))
        self.retry_at_ns = now_ns + int(self._cooldown_ns * spread)
