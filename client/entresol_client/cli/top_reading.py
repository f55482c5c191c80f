"""What two overviews of a daemon, one after the other, say: rates, shares, and a verdict.

Invariant: pure. Numbers come from the daemon and are never made up: what cannot be told (no time
has passed, the daemon was started anew, nothing was asked) is None, and shown as such. Source of
the document: `entresol_daemon.overview`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = 1
SECONDS_PER_DAY = 86_400
FULL_FROM = 0.9  # of the flash's size; segments that are partly dead take the rest
LAG_WORRIES_S = 0.1
MEAN_FROM_S = 600.0  # a shorter life says nothing of a day
_STRANGE = re.compile(r"[^\x20-\x7e\xa0-\uffff]")


class Verdict(enum.Enum):
    """How it is, the worst first. `value` is the word that is shown."""

    DOWN = "DOWN"
    FAILING = "FAILING"
    NOT_READY = "NOT READY"
    OVERLOADED = "OVERLOADED"
    FULL = "FULL"
    HEALTHY = "HEALTHY"
    IDLE = "IDLE"

    @property
    def grade(self) -> int:
        """2 bad, 1 to be looked at, 0 good."""
        if self in (Verdict.DOWN, Verdict.FAILING):
            return 2
        return 1 if self in (Verdict.NOT_READY, Verdict.OVERLOADED) else 0


@dataclass(frozen=True, slots=True)
class Price:
    """What a token weighs and what computing it takes; 0 where nobody said."""

    token_bytes: int = 0
    prefill_tokens_per_s: float = 0.0

    def seconds(self, plain_bytes: float) -> float | None:
        """GPU seconds that computing so much KV would have taken."""
        if not self.token_bytes or not self.prefill_tokens_per_s:
            return None
        return plain_bytes / self.token_bytes / self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class Rates:
    """Between two overviews, per second, or as shares; None where it cannot be told."""

    seconds: float
    out_bytes: float | None  # plain, as engines got it
    out_wire_bytes: float | None
    in_bytes: float | None
    flash_read_bytes: float | None
    flash_written_bytes: float | None
    served: dict[str, float]  # by tier
    missed: dict[str, float]  # by cause
    shed: float
    evicted: float
    trouble: float  # corrupt blocks, refusals of the device, found by the scrubber; a count
    first_grant_s: float | None

    @property
    def asked(self) -> float:
        """Blocks asked for, per second."""
        return sum(self.served.values()) + sum(self.missed.values())

    @property
    def hit_rate(self) -> float | None:
        """Share of the blocks asked for that were served."""
        return sum(self.served.values()) / self.asked if self.asked else None


def text_of(value: Any) -> str:
    """What a daemon calls something, safe for a terminal: no control characters, not endless."""
    return _STRANGE.sub("?", str(value))[:120]


def number(value: Any) -> float:
    """A number of a document, 0 for what is none."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    return float(value) if good else 0.0


def numbers(value: Any) -> dict[str, float]:
    """An object of numbers."""
    if not isinstance(value, Mapping):
        return {}
    return {text_of(key): number(one) for key, one in value.items()}


def part(document: Mapping[str, Any], *path: str) -> Any:
    """Something inside, or None."""
    found: Any = document
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def total(value: Any) -> float:
    """Sum of an object of numbers."""
    return sum(numbers(value).values())


def same_start(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Both are of one start of the daemon, `now` the later."""
    if before is None:
        return False
    span_ns = number(now.get("uptime_ns")) - number(before.get("uptime_ns"))
    return span_ns > 0 and before.get("shard") == now.get("shard")


class Pair:
    """The latest overview and the one before it, which rates are counted between.

    A daemon that is asked often gives the same overview again: that is no step in time, and what
    went on is told from the two that differ.
    """

    def __init__(self) -> None:
        self.before: dict[str, Any] | None = None
        self.now: dict[str, Any] | None = None

    def add(self, found: dict[str, Any]) -> bool:
        """Take the next one; whether it is another than the last."""
        last = self.now
        identity = ("shard", "uptime_ns")
        if last is not None and all(last.get(key) == found.get(key) for key in identity):
            return False
        self.before, self.now = last, found
        return True


def rates(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Rates | None:
    """What went on between; None where `before` is not of the same start."""
    if before is None or not same_start(before, now):
        return None
    earlier = before
    seconds = (number(now.get("uptime_ns")) - number(earlier.get("uptime_ns"))) / 1e9

    def grown(*path: str) -> float:
        return max(0.0, number(part(now, *path)) - number(part(earlier, *path)))

    def parts(*path: str) -> dict[str, float]:
        old = numbers(part(earlier, *path))
        new = numbers(part(now, *path))
        return {key: max(0.0, new[key] - old.get(key, 0.0)) for key in new}

    grants = grown("first_grant", "count")
    troubles = (("corrupt",), ("flash", "refusals"), ("scrub_found",))
    return Rates(
        seconds=seconds,
        out_bytes=grown("get_bytes", "plain") / seconds,
        out_wire_bytes=grown("get_bytes", "wire") / seconds,
        in_bytes=grown("put_bytes", "plain") / seconds,
        flash_read_bytes=grown("flash", "read_bytes") / seconds,
        flash_written_bytes=grown("flash", "written_bytes") / seconds,
        served={key: value / seconds for key, value in parts("served").items()},
        missed={key: value / seconds for key, value in parts("missed").items()},
        shed=sum(parts("shed").values()) / seconds,
        evicted=grown("removed", "evicted") / seconds,
        trouble=sum(sum(parts(*path).values()) for path in troubles),
        first_grant_s=grown("first_grant", "seconds") / grants if grants else None,
    )


def fullness(now: Mapping[str, Any]) -> float | None:
    """Live bytes over the size of the flash."""
    capacity = number(part(now, "flash", "capacity_bytes"))
    return number(part(now, "flash", "live_bytes")) / capacity if capacity else None


def writes_per_day(
    now: Mapping[str, Any], recent: Rates | None
) -> tuple[float | None, float | None]:
    """Flash sizes written per day: at the present rate, and on average since the start (None for
    the first MEAN_FROM_S, in which filling an empty tier would look like that every day)."""
    capacity = number(part(now, "flash", "capacity_bytes"))
    if not capacity:
        return None, None
    uptime_s = number(now.get("uptime_ns")) / 1e9
    known = uptime_s >= MEAN_FROM_S
    mean = number(part(now, "flash", "written_bytes")) / uptime_s if known else None
    at_present = recent.flash_written_bytes if recent is not None else None
    share = SECONDS_PER_DAY / capacity
    return (
        None if at_present is None else at_present * share,
        None if mean is None else mean * share,
    )


def verdict(now: Mapping[str, Any] | None, recent: Rates | None) -> tuple[Verdict, str]:
    """One word, and why. What began before we looked is told from the totals."""
    if now is None:
        return Verdict.DOWN, "no answer"
    condemned = number(part(now, "flash", "segments", "condemned"))
    if recent is not None and recent.trouble:
        return Verdict.FAILING, f"{recent.trouble:,.0f} blocks damaged or refused by the device"
    if condemned:
        return Verdict.FAILING, f"{condemned:,.0f} segments condemned"
    unread = number(part(now, "flash", "segments", "unread"))
    if unread:
        return Verdict.FAILING, f"{unread:,.0f} segments not read at the start: restart it"
    reasons = now.get("not_ready")
    if isinstance(reasons, list) and reasons:
        first = text_of(reasons[0])
        failed = "failed" in first
        return (Verdict.FAILING if failed else Verdict.NOT_READY), first
    if now.get("state") != "serving":
        return Verdict.NOT_READY, text_of(now.get("state"))
    if recent is not None and recent.shed:
        return Verdict.OVERLOADED, f"{recent.shed:,.1f} requests refused per second"
    lag_s = number(now.get("loop_lag_max_s"))
    if lag_s > LAG_WORRIES_S:
        return Verdict.OVERLOADED, f"the event loop was {lag_s:.1f} s late within two minutes"
    full = fullness(now)
    evicted = recent.evicted if recent is not None else 0.0
    if evicted or (full is not None and full >= FULL_FROM):
        return Verdict.FULL, f"{evicted:,.0f} blocks a second give way" if evicted else ""
    if recent is not None and not recent.asked and not recent.in_bytes:
        return Verdict.IDLE, "nothing asked, nothing stored"
    return Verdict.HEALTHY, ""
