"""A deterministic event loop for simulation: virtual clock, no I/O, no threads.

Time stands still while callbacks run and jumps to the next timer when nothing is ready. If nothing
is ready and no timer is set, the simulated program can never go on: `SimDeadlockError`. Executors
and sockets are refused, so a run depends on its seed alone.
"""

from __future__ import annotations

import asyncio
import random
from asyncio import base_events
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

STEPS_MAX = 20_000_000  # loop iterations; a livelock ends here instead of never


class SimDeadlockError(RuntimeError):
    """No callback is ready and no timer is set."""


class SimLivelockError(RuntimeError):
    """The loop ran longer than its limit of steps or of virtual time."""


class _NoIoSelector:
    """Stands where a selector would: waiting advances the virtual clock."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.advance(timeout)
        return []

    def close(self) -> None:
        pass


class SimLoop(base_events.BaseEventLoop):
    """`rng` is seeded; `time()` is virtual and starts at 0."""

    def __init__(
        self, seed: int = 0, *, steps_max: int = STEPS_MAX, seconds_max: float = 1e9
    ) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.seed = seed
        self.steps = 0
        self._now = 0.0
        self._steps_max = steps_max
        self._seconds_max = seconds_max
        self._selector = _NoIoSelector(self)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now

    def now_ns(self) -> int:
        """Virtual nanoseconds, for code that takes a `now_ns` callable."""
        return int(self._now * 1e9)

    def advance(self, timeout: float | None) -> None:
        self.steps += 1
        if self.steps > self._steps_max or self._now > self._seconds_max:
            raise SimLivelockError(f"seed={self.seed} steps={self.steps} seconds={self._now}")
        if timeout is None:
            raise SimDeadlockError(f"seed={self.seed}: nothing can happen any more")
        if timeout > 0:
            # Land exactly on the next timer, so that no rounding keeps it one step away.
            scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
            self._now = max(self._now + timeout, scheduled[0].when() if scheduled else 0.0)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("a simulation has no threads")

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run(coroutine: Coroutine[Any, Any, T], seed: int = 0, *, loop: SimLoop | None = None) -> T:
    """Run `coroutine` to its end on a fresh SimLoop; tasks it leaves behind are cancelled."""
    sim = SimLoop(seed) if loop is None else loop
    asyncio.set_event_loop(sim)
    try:
        return sim.run_until_complete(coroutine)
    finally:
        left = asyncio.all_tasks(sim)
        for task in left:
            task.cancel()
        if left:
            sim.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        asyncio.set_event_loop(None)
        sim.close()
