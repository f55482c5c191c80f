"""How long a get would take as things are: the arithmetic of a quote, and what it learns. Pure.

What waits before a get at the flash is known to the byte: its tenant's own reads, and those of the
others, of which fair queueing lets through no more than their share while the tenant is served. How
fast the flash is, is measured while it is busy. What the arithmetic leaves out, it learns from how
long gets took (`Errors`), for each tenant by itself, so that nobody can spoil another's quotes.

Invariants: times grow with what waits and with what is asked for; of other tenants only sums are
looked at, and `coarse` leaves three bits of each time behind the leading one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

LATELY_NS = 50_000_000  # who asked the flash for something so lately will ask again
STRETCH_NS = 8_000_000  # the flash is measured over stretches of so much work, or less
SPEED_KEPT = 0.98  # of what was measured before, at each further stretch
LATENCY_NS_GUESS, BYTES_PER_NS_GUESS = 100_000.0, 1.0  # before anything was measured
BYTES_PER_NS_MAX = 1_000.0
ROOM_BYTES_PER_NS = 1.0  # how fast hosts are taken to give memory back
ERRORS_REMEMBERED = 32
ERRORS_GUESS = (0.7, 0.9, 1.0, 1.2, 2.0)  # actual over expected, before anything was seen
ERROR_MAX = 64.0
_MIB, _MS = float(1 << 20), 1e6


def coarse(time_ns: float, most_ns: int) -> int:
    """Rounded up to three bits behind the leading one, and at most `most_ns`."""
    whole = min(math.ceil(min(max(time_ns, 0.0), most_ns)), most_ns)
    shift = max(0, whole.bit_length() - 4)
    return min(((whole + (1 << shift) - 1) >> shift) << shift, most_ns)


class Speed:
    """Of the flash: what a stretch of work takes is `latency_ns`, once for each time that it begins
    with nothing in service, and its bytes over the rate. Least squares, the latest counting most.
    """

    def __init__(self) -> None:
        # A guess that weighs little keeps the sums solvable: starts, MiB and milliseconds.
        self._guess = 0.05
        self._aa = self._ab = self._bb = self._ay = self._by = 0.0
        self.latency_ns = LATENCY_NS_GUESS
        self.ns_per_byte = 1 / BYTES_PER_NS_GUESS

    def note(self, starts: int, length_bytes: int, elapsed_ns: int) -> None:
        """A stretch in which the flash was busy all the time has ended."""
        if length_bytes <= 0 or elapsed_ns <= 0:
            return
        a, b, y = float(starts), length_bytes / _MIB, elapsed_ns / _MS
        weight = 1 / max(y, 0.05)  # errors count relatively to what was seen
        self._aa = self._aa * SPEED_KEPT + weight * a * a
        self._ab = self._ab * SPEED_KEPT + weight * a * b
        self._bb = self._bb * SPEED_KEPT + weight * b * b
        self._ay = self._ay * SPEED_KEPT + weight * a * y
        self._by = self._by * SPEED_KEPT + weight * b * y
        self._solve()

    def _solve(self) -> None:
        per_mib = _MIB / BYTES_PER_NS_GUESS / _MS
        aa, bb, ab = self._aa + self._guess, self._bb + self._guess, self._ab
        ay, by = self._ay + self._guess * LATENCY_NS_GUESS / _MS, self._by + self._guess * per_mib
        determinant = aa * bb - ab * ab
        latency = (ay * bb - by * ab) / determinant
        slope = (by * aa - ay * ab) / determinant
        if latency < 0:
            latency, slope = 0.0, by / bb
        elif slope < 0:
            latency, slope = ay / aa, 0.0
        self.latency_ns = latency * _MS
        self.ns_per_byte = max(slope * _MS / _MIB, 1 / BYTES_PER_NS_MAX)


@dataclass(slots=True)
class _Lately:
    """Bytes, of which those of LATELY_NS ago count a third and older ones ever less."""

    amount: float = 0.0
    at_ns: int = 0

    def read(self, now_ns: int) -> float:
        return self.amount * math.exp(min(0, self.at_ns - now_ns) / LATELY_NS)

    def add(self, amount: int, now_ns: int) -> None:
        self.amount, self.at_ns = self.read(now_ns) + amount, max(self.at_ns, now_ns)


@dataclass(slots=True)
class _Reads:
    """One tenant's reads."""

    weight: int = 1
    waiting_bytes: int = 0
    arrived: _Lately = field(default_factory=_Lately)


@dataclass(frozen=True, slots=True)
class FlashLoad:
    """What is before a read of one tenant at one moment. `others_*` are sums over all others."""

    weight: int = 1
    own_bytes: int = 0  # that wait
    in_service_bytes: int = 0
    others_bytes: int = 0  # that wait
    others_weight: int = 0  # of those that wait, or came lately
    others_bytes_per_ns: float = 0.0  # that come


class FlashReads:
    """The books of the reads that wait for the flash or are made there.

    Each read arrives once, and is then either begun and ended, or given up.
    """

    def __init__(self) -> None:
        self.speed = Speed()
        self._flows: dict[Hashable, _Reads] = {}
        self._waiting_bytes = 0
        self._arrived = _Lately()
        self._in_service = self._in_service_bytes = 0
        self._since_ns = self._starts = self._done_bytes = 0
        self._tidied_ns = 0

    def arrive(self, flow: Hashable, weight: int, length_bytes: int, now_ns: int) -> None:
        """A read waits for its turn."""
        if now_ns - self._tidied_ns >= LATELY_NS:
            self._tidied_ns = now_ns
            self._forget_idle(now_ns)
        mine = self._flows.setdefault(flow, _Reads())
        mine.weight = weight
        mine.waiting_bytes += length_bytes
        mine.arrived.add(length_bytes, now_ns)
        self._arrived.add(length_bytes, now_ns)
        self._waiting_bytes += length_bytes

    def give_up(self, flow: Hashable, length_bytes: int) -> None:
        """It will not be made."""
        mine = self._flows[flow]
        mine.waiting_bytes -= length_bytes
        self._waiting_bytes -= length_bytes
        assert min(mine.waiting_bytes, self._waiting_bytes) >= 0, "a read left twice"

    def begin(self, flow: Hashable, length_bytes: int, now_ns: int) -> None:
        """Its turn has come."""
        self.give_up(flow, length_bytes)
        if not self._in_service:
            self._since_ns, self._starts, self._done_bytes = now_ns, 1, 0
        self._in_service += 1
        self._in_service_bytes += length_bytes

    def end(self, length_bytes: int, read_bytes: int, now_ns: int) -> None:
        """It is over, and so much of it was really read."""
        self._in_service -= 1
        self._in_service_bytes -= length_bytes
        self._done_bytes += read_bytes
        assert min(self._in_service, self._in_service_bytes) >= 0, "a read ended twice"
        if not self._in_service or now_ns - self._since_ns >= STRETCH_NS:
            self.speed.note(self._starts, self._done_bytes, now_ns - self._since_ns)
            self._since_ns, self._starts, self._done_bytes = now_ns, 0, 0

    def load(self, flow: Hashable, weight: int, now_ns: int) -> FlashLoad:
        """What a further read of this tenant would find before it."""
        mine = self._flows.get(flow)
        own_bytes = mine.waiting_bytes if mine is not None else 0
        own_lately = mine.arrived.read(now_ns) if mine is not None else 0.0
        others = [
            reads.weight
            for other, reads in self._flows.items()
            if other != flow and (reads.waiting_bytes or now_ns - reads.arrived.at_ns < LATELY_NS)
        ]
        lately = max(0.0, self._arrived.read(now_ns) - own_lately) if others else 0.0
        return FlashLoad(
            weight, own_bytes, self._in_service_bytes, self._waiting_bytes - own_bytes,
            sum(others), lately / LATELY_NS,
        )  # fmt: skip

    def _forget_idle(self, now_ns: int) -> None:
        """Tenants that neither wait nor came lately; of none of them anything is missed."""
        self._flows = {
            flow: reads
            for flow, reads in self._flows.items()
            if reads.waiting_bytes or now_ns - reads.arrived.at_ns < LATELY_NS
        }


def flash_ns(load: FlashLoad, speed: Speed, length_bytes: int) -> float:
    """Until the last of so many bytes is read.

    Before it come what is in service and what the tenant has waiting. Of the others comes what
    waits and what arrives meanwhile, but no more than their share: while the tenant is served so
    much for each unit of its weight, they are served as much for each of theirs.
    """
    mine = load.own_bytes + length_bytes
    served = load.in_service_bytes + mine
    share = load.others_weight * mine / load.weight
    at_most = (served + share) * speed.ns_per_byte
    left = 1 - load.others_bytes_per_ns * speed.ns_per_byte  # of the flash, besides what they ask
    most = at_most
    if left > 0:
        most = min(at_most, (served + load.others_bytes) * speed.ns_per_byte / left)
    return speed.latency_ns + most


@dataclass(frozen=True, slots=True)
class Costs:
    """What a get takes of the event loop."""

    request_ns: int
    window_ns: int
    block_ns: int
    window_blocks: int
    window_blocks_contended: int  # while others wait for the loop


@dataclass(frozen=True, slots=True)
class Work:
    """What a get asks for. `open_ns`: opening, where the daemon does that."""

    memory_blocks: int
    flash_blocks: int
    record_bytes: int
    flash_bytes: int
    open_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is before a get of one tenant at one moment."""

    flash: FlashLoad
    door_ns: float = 0.0  # gets that wait to be served at all
    loop_tenants: int = 0  # that wait for the event loop
    room_bytes: int = 1 << 62  # of memory that this session may hold beside what it holds


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds from the receipt of a get; see `wire.quote.Quoted`."""

    wait_ns: float
    memory_ns: float
    flash_ns: float
    expected_ns: float
    high_ns: float


def expect(load: Load, speed: Speed, costs: Costs, work: Work) -> Times:
    """What the arithmetic says; `high_ns` is the same as `expected_ns`."""
    slow = 1 + load.loop_tenants  # turns on the loop go round
    windows = costs.window_blocks_contended if load.loop_tenants else costs.window_blocks

    def loop_ns(blocks: int) -> float:
        return slow * (blocks * costs.block_ns + -(-blocks // windows) * costs.window_ns)

    wait = load.door_ns + slow * costs.request_ns
    memory = wait + loop_ns(work.memory_blocks)
    first, total = wait, wait + loop_ns(work.memory_blocks + work.flash_blocks)
    if work.flash_blocks:
        block_bytes = -(-work.flash_bytes // work.flash_blocks)
        first = wait + flash_ns(load.flash, speed, block_bytes) + loop_ns(1)
        landed = wait + flash_ns(load.flash, speed, work.flash_bytes)
        total = max(total, landed + loop_ns(min(work.flash_blocks, windows)))
    short_bytes = max(0, work.record_bytes - load.room_bytes)
    total += work.open_ns + short_bytes / ROOM_BYTES_PER_NS
    return Times(wait, memory, first, total, total)


class Errors:
    """How long a tenant's latest gets took, over what was expected of them."""

    __slots__ = ("_ratios", "high", "middle")

    def __init__(self) -> None:
        self._ratios = deque(ERRORS_GUESS, maxlen=ERRORS_REMEMBERED)
        self._read()

    def note(self, actual_ns: float, expected_ns: float) -> float:
        """A get is over. Returns the ratio."""
        ratio = min(max(actual_ns / max(expected_ns, 1.0), 1 / ERROR_MAX), ERROR_MAX)
        self._ratios.append(ratio)
        self._read()
        return ratio

    def _read(self) -> None:
        ordered = sorted(self._ratios)
        self.middle = ordered[(len(ordered) - 1) // 2]
        self.high = max(self.middle, ordered[-(-9 * (len(ordered) - 1) // 10)])


def corrected(times: Times, memory: Errors, flash: Errors | None) -> Times:
    """With what was learned: of gets from memory alone, and of such as this one where it is none.

    What comes from memory is never later than all of it, whatever was learned of each.
    """
    memory_ns = times.memory_ns * memory.middle
    if flash is None:
        expected = max(memory_ns, times.expected_ns * memory.middle)
        high = times.expected_ns * memory.high
        return Times(min(times.wait_ns, memory_ns), memory_ns, min(times.wait_ns, memory_ns),
                     expected, max(expected, high))  # fmt: skip
    expected = max(memory_ns, times.expected_ns * flash.middle)
    high = max(expected, times.expected_ns * flash.high)
    first = min(times.flash_ns * flash.middle, expected)
    return Times(min(times.wait_ns, memory_ns, first), memory_ns, first, expected, high)
