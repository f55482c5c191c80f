"""What reading costs the daemon: its CPU time while hosts get blocks that are in its memory.

What it takes when nobody asks for anything is subtracted: in emulation that is no trifle, and the
more of it the longer a read lasts. Over verbs it hands out leases and moves no byte, so that a
block of four times the size may not cost much more; over tcp it sends every byte.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FIGURE = "daemon cpu"
BLOCK_SIZES = (256 * 1024, 1024 * 1024)
BLOCKS_PER_GET = 4  # so few that either size takes the same messages
ROUNDS = 9  # the least disturbed counts
SERIES_MAX = 3  # of rounds, before the daemon's CPU is believed to grow with the bytes
IDLE_S = 2.0
GROWTH_MAX = 2.0  # of the CPU time per block, where the bytes grow fourfold
_PROCESS_CPU = 2  # CPUCLOCK_SCHED, linux/posix-timers.h


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads, those that ended too: to the nanosecond."""
    return time.clock_gettime_ns((~pid << 3) | _PROCESS_CPU) / 1e9


async def idle_cpu_per_s(pid: int) -> float:
    """CPU seconds per second of a process that nobody asks for anything."""
    cpu, began = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (cpu_seconds(pid) - cpu) / (time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class Cost:
    """Gets of blocks of one size over one fabric."""

    fabric: str
    block_bytes: int
    blocks: int
    seconds: float
    daemon_cpu_s: float  # all of it
    idle_cpu_per_s: float = 0.0  # of the daemon, shortly before

    @property
    def mb_per_s(self) -> float:
        """As the host sees it."""
        return self.blocks * self.block_bytes / 1e6 / self.seconds

    @property
    def reading_cpu_s(self) -> float:
        """Of the daemon, beyond what it takes anyway."""
        return max(1e-9, self.daemon_cpu_s - self.idle_cpu_per_s * self.seconds)

    @property
    def cpu_s_per_gb(self) -> float:
        """Of the daemon, for reading."""
        return self.reading_cpu_s / (self.blocks * self.block_bytes / 1e9)

    @property
    def cpu_ms_per_block(self) -> float:
        """Of the daemon, for reading."""
        return self.reading_cpu_s * 1e3 / self.blocks

    def values(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)


def least(costs: Sequence[Cost]) -> list[Cost]:
    """Of several rounds of the same, the cheapest: a busy host only adds. Sorted for a table."""
    rounds: dict[tuple[str, int], list[Cost]] = {}
    for one in costs:
        rounds.setdefault((one.fabric, one.block_bytes), []).append(one)
    order = sorted(rounds, key=lambda key: (key[0] != "verbs", *key))
    return [min(rounds[key], key=lambda one: one.reading_cpu_s) for key in order]


def growth(costs: Sequence[Cost], fabric: str) -> float:
    """CPU time per block: that of the largest size over that of the smallest."""
    of = sorted(
        (one for one in least(costs) if one.fabric == fabric), key=lambda one: one.block_bytes
    )
    return of[-1].cpu_ms_per_block / of[0].cpu_ms_per_block


def lines(costs: Sequence[Cost]) -> list[str]:
    """The table for a person; nothing without costs."""
    if not costs:
        return []
    found = [f"  {'reads of resident blocks':24}   MB/s  daemon CPU s/GB  ms/block"]
    found += [
        f"  {one.fabric:>8} {one.block_bytes >> 10:5} KiB x {one.blocks:<6} {one.mb_per_s:6.1f}"
        f"  {one.cpu_s_per_gb:15.2f}  {one.cpu_ms_per_block:8.3f}"
        for one in least(costs)
    ]
    for fabric in sorted({one.fabric for one in costs}, reverse=True):
        if len({one.block_bytes for one in costs if one.fabric == fabric}) > 1:
            bound = f" (at most {GROWTH_MAX})" if fabric == "verbs" else ""
            found.append(
                f"  {fabric}: a block of {BLOCK_SIZES[-1] // BLOCK_SIZES[0]} times the bytes costs "
                f"the daemon {growth(costs, fabric):.2f} times the CPU{bound}"
            )
    return found
