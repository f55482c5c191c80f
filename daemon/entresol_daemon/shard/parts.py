"""What the paths of a shard share, wired once by `Shard`.

Invariant: the paths reach the world only through these parts, so a simulation that supplies its own
device, clock, compute and buffers runs the same code as production.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from entresol_daemon.compute import Compute
from entresol_daemon.config import Config
from entresol_daemon.core.accounts import Accounts, PutBudget
from entresol_daemon.core.admission import Admission
from entresol_daemon.core.census import VersionCensus
from entresol_daemon.core.history import History
from entresol_daemon.core.leases import LeaseTable
from entresol_daemon.core.residency import Residency
from entresol_daemon.events.log import EventLog
from entresol_daemon.flash.engine import Engine
from entresol_daemon.keys.keyring import Keyring
from entresol_daemon.memory.slabs import SlabBuffer, SlabPool
from entresol_daemon.metrics import Metrics
from entresol_daemon.shard.meters import Meters
from entresol_daemon.shard.sessions import Leased


class Signal:
    """Wakes everyone who waits for memory, a lease slot or flash to become free."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Something became free; every waiter looks again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, timeout_ns: int) -> bool:
        """True when notified, False when `timeout_ns` passed first (or is not positive)."""
        if timeout_ns <= 0:
            return False
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_ns / 1e9):
                await waiter
            return True
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)


@dataclass(slots=True)
class Parts:
    """See the module. All are owned by the `Shard`."""

    config: Config
    engine: Engine
    keyring: Keyring
    compute: Compute
    metrics: Metrics
    meters: Meters
    events: EventLog
    accounts: Accounts
    put_budget: PutBudget
    admission: Admission
    history: History
    census: VersionCensus
    residency: Residency
    scratch: SlabPool  # private plaintext on its way to being sealed; wiped after use
    leases: LeaseTable[Leased]
    room: Signal
    make_plain_buffer: Callable[[int], SlabBuffer]  # memory for one session's opened blocks
    dek_of: Callable[[bytes, int], bytes | None]  # (stream, version) -> DEK, None if there is none
    now_ns: Callable[[], int]
    unix_ns: Callable[[], int]
    sweep: Callable[[], Iterator[None]]  # overwrites freed memory, step by step
