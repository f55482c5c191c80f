"""When the scrubber may read, and when a block that the device refuses is given up.

Invariants: never more than `bytes_per_s` on average from any moment on, whatever the load; a get
that waits for flash goes first, but not for ever, so that every cycle ends; a refused block is
given up only when it was refused twice with a long pause between, and the device gave another one
with the second refusal: a controller that is away for a while costs nothing. Pure: time comes in as
an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEP_BYTES_MAX = 1 << 20  # of one read; a longer block is a step of its own
YIELD_NS_MAX = 1_000_000_000  # gets hold a step back so long, then it goes between them
YIELD_POLL_NS = 10_000_000
INTERVAL_NS = 86_400_000_000_000  # least time from one cycle's start to the next's
START_NS = 60_000_000_000  # after opening: a daemon that starts has better things to do
REFUSED_PAUSE_NS = 60_000_000_000  # before a refused block is asked for again
REFUSED_MAX = 1024  # blocks refused and not judged; with more the device is away, not a sector

Name = tuple[bytes, bytes]  # namespace id, wire key


class Pace:
    """A rate without bursts: what was not used is not saved up."""

    def __init__(self, bytes_per_s: int) -> None:
        assert bytes_per_s > 0, "a scrubber that is off has no pace"
        self._bytes_per_s = bytes_per_s
        self._next_ns = 0
        self._held_since_ns: int | None = None

    def wait_ns(self, now_ns: int, *, busy: bool) -> int:
        """How long to wait before asking again; 0 when a step may be taken now."""
        if now_ns < self._next_ns:
            return self._next_ns - now_ns
        if busy:
            if self._held_since_ns is None:
                self._held_since_ns = now_ns
            if now_ns - self._held_since_ns < YIELD_NS_MAX:
                return YIELD_POLL_NS
        self._held_since_ns = None
        return 0

    def took(self, now_ns: int, size_bytes: int) -> None:
        """A step of this size begins."""
        self._next_ns = now_ns + size_bytes * 1_000_000_000 // self._bytes_per_s


def steps(sizes: Sequence[int]) -> list[int]:
    """How many of the blocks, in order, make up each step."""
    found: list[int] = []
    count = total = 0
    for size in sizes:
        if count and total + size > STEP_BYTES_MAX:
            found.append(count)
            count = total = 0
        count += 1
        total += size
    if count:
        found.append(count)
    return found


class Refused:
    """Blocks that the device refused once and that wait for their second chance.

    Attributes:
        witness: the block it gave last, None when it gave none. Asked for with one that waits, it
            tells whether the device is away or the block is lost.
    """

    def __init__(self) -> None:
        self.witness: Name | None = None
        self._since_ns: dict[Name, int] = {}

    def __len__(self) -> int:
        return len(self._since_ns)

    @property
    def full(self) -> bool:
        """True when the device refuses so much that it must be the device."""
        return len(self._since_ns) >= REFUSED_MAX

    def refused(self, name: Name, now_ns: int) -> None:
        """A block was refused for the first time."""
        self._since_ns.setdefault(name, now_ns)
        if name == self.witness:
            self.witness = None

    def gave(self, name: Name) -> None:
        """The device gave this block."""
        self.witness = name

    def due(self, now_ns: int) -> list[Name]:
        """Blocks to ask for again now, oldest first. They are no longer waiting."""
        found = [
            name for name, since in self._since_ns.items() if now_ns - since >= REFUSED_PAUSE_NS
        ]
        for name in found:
            del self._since_ns[name]
        return found

    def next_due_ns(self) -> int | None:
        """When the next one is due, None when nothing waits."""
        return min(self._since_ns.values()) + REFUSED_PAUSE_NS if self._since_ns else None

    def forget(self) -> None:
        """Nothing waits any more: the device is away, and a later cycle asks again."""
        self._since_ns.clear()


@dataclass(slots=True)
class Progress:
    """Where the scrubber is, and what survives a restart.

    Attributes:
        segment: the next one to read.
        cycles: finished ones.
        began_unix_ns: of the present cycle, or of the last one when `resting`.
        resting: everything was read, and the next cycle has not begun.
        last_cycle_ns: how long the last finished cycle took, restarts and pauses included.
    """

    segment: int = 0
    cycles: int = 0
    began_unix_ns: int = 0
    resting: bool = True
    last_cycle_ns: int = 0

    def begin(self, now_unix_ns: int) -> None:
        """A cycle from the first segment on."""
        self.segment, self.began_unix_ns, self.resting = 0, now_unix_ns, False

    def end(self, now_unix_ns: int) -> None:
        """The last segment was read."""
        self.cycles += 1
        self.last_cycle_ns = max(0, now_unix_ns - self.began_unix_ns)
        self.segment, self.resting = 0, True

    def due_in_ns(self, now_unix_ns: int) -> int:
        """How long until the next cycle may begin; 0 when one is under way or due."""
        if not self.resting or not self.cycles:
            return 0
        past = now_unix_ns - self.began_unix_ns
        return max(0, INTERVAL_NS - past) if past >= 0 else 0  # the clock was set back
