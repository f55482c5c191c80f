"""A deterministic event loop for simulation: virtual clock, no I/O, no threads.

Time stands still while callbacks run and jumps to the next timer when nothing is ready. If nothing
is ready and no timer is set, the simulated program can never go on: `SimDeadlockError`. Executors
are refused, and sockets too, unless a simulated network is put in (`network`), so a run depends on
its seed alone. Futures and tasks hash by their number, not by their address: a set of them has the
same order on every machine.

`virtual_world` also takes the process's clocks and its random bytes, for code that asks the
operating system for them: the client does, as it should.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from asyncio import base_events
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn, Protocol, TypeVar

T = TypeVar("T")

STEPS_MAX = 20_000_000  # loop iterations; a livelock ends here instead of never
SECOND_NS = 1_000_000_000


class SimDeadlockError(RuntimeError):
    """No callback is ready and no timer is set."""


class SimLivelockError(RuntimeError):
    """The loop ran longer than its limit of steps or of virtual time."""


class Network(Protocol):
    """What a simulated program may connect through; see `tests.sim.simnet`."""

    async def connect(
        self, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[Any, Any]: ...

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> Any: ...


class _NoIoSelector:
    """Stands where a selector would: waiting advances the virtual clock."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.advance(timeout)
        return []

    def close(self) -> None:
        pass


class SimFuture(asyncio.Future[Any]):
    """A future whose place in a set is its number."""

    __slots__ = ("_number",)

    def __init__(self, loop: SimLoop) -> None:
        self._number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class SimTask(asyncio.Task[Any]):
    """A task whose place in a set is its number."""

    __slots__ = ("_number",)

    def __init__(self, loop: SimLoop, coroutine: Any, **options: Any) -> None:
        self._number = next(loop.numbers)
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _make_task(loop: Any, coroutine: Any, **options: Any) -> SimTask:
    return SimTask(loop, coroutine, **options)


class SimLoop(base_events.BaseEventLoop):
    """`rng` is seeded; `time()` is virtual and starts at 0."""

    def __init__(
        self, seed: int = 0, *, steps_max: int = STEPS_MAX, seconds_max: float = 1e9
    ) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.seed = seed
        self.steps = 0
        self.numbers = itertools.count(1)
        self.network: Network | None = None
        self._now = 0.0
        self._steps_max = steps_max
        self._seconds_max = seconds_max
        self._selector = _NoIoSelector(self)
        self._clock_resolution = 1e-9
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._now

    def now_ns(self) -> int:
        """Virtual nanoseconds, for code that takes a `now_ns` callable."""
        return int(self._now * 1e9)

    def create_future(self) -> SimFuture:
        return SimFuture(self)

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_options: Any
    ) -> tuple[Any, Any]:
        """Through the simulated network; TLS there is a certificate that is shown, no cipher."""
        if self.network is None:
            raise RuntimeError("a simulation has no sockets")
        return await self.network.connect(protocol_factory, host, port)

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_options: Any
    ) -> Any:
        """On the simulated network."""
        if self.network is None:
            raise RuntimeError("a simulation has no sockets")
        return self.network.listen(protocol_factory, host, port)

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


class WallClock:
    """What people call the time: it starts somewhere and jumps when it is told to."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.offset_ns = 1_800_000_000 * SECOND_NS
        self.jumps = 0

    def jump(self, by_ns: int) -> None:
        """Somebody set the clock. It stays within what a clock can show."""
        self.offset_ns = min(max(self.offset_ns + by_ns, 0), 2**62)
        self.jumps += 1

    def now_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return self.offset_ns + self._loop.now_ns()


@contextlib.contextmanager
def virtual_world(loop: SimLoop, wall: WallClock, seed: int) -> Iterator[None]:
    """The process's clocks are the loop's and its random bytes the seed's, until the end."""
    saved = (time.monotonic_ns, time.monotonic, time.time_ns, time.time, os.urandom)
    urandom = random._urandom  # type: ignore[attr-defined]
    source = random.Random(f"{seed} urandom")
    time.monotonic_ns = loop.now_ns
    time.monotonic = loop.time
    time.time_ns = wall.now_ns
    time.time = lambda: wall.now_ns() / 1e9
    os.urandom = source.randbytes
    random._urandom = source.randbytes  # type: ignore[attr-defined]
    try:
        yield
    finally:
        time.monotonic_ns, time.monotonic, time.time_ns, time.time, os.urandom = saved
        random._urandom = urandom  # type: ignore[attr-defined]


def run(coroutine: Coroutine[Any, Any, T], seed: int = 0, *, loop: SimLoop | None = None) -> T:
    """Run `coroutine` to its end on a fresh SimLoop; tasks it leaves behind are cancelled."""
    sim = SimLoop(seed) if loop is None else loop
    asyncio.set_event_loop(sim)
    try:
        return sim.run_until_complete(coroutine)
    finally:
        end(sim)


def end(sim: SimLoop) -> None:
    """Cancel the tasks that are left on a loop, and close it."""
    asyncio.set_event_loop(sim)
    while left := asyncio.all_tasks(sim):  # an ending task may begin another one
        for task in left:
            task.cancel()
        sim.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    asyncio.set_event_loop(None)
    sim.close()
