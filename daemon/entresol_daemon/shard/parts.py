"""What the paths of a shard share, wired once by `Shard`.

Invariant: the paths reach the world only through these parts, so a simulation that supplies its own
device, clock, compute and buffers runs the same code as production.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from entresol_daemon.compute import Compute
from entresol_daemon.config import Config
from entresol_daemon.core.accounts import Account, Accounts, Held, PutBudget
from entresol_daemon.core.admission import Admission
from entresol_daemon.core.census import VersionCensus
from entresol_daemon.core.history import History
from entresol_daemon.core.leases import LeaseTable
from entresol_daemon.core.residency import Residency
from entresol_daemon.core.scrubbing import Refused
from entresol_daemon.events.log import EventLog
from entresol_daemon.flash.engine import Engine
from entresol_daemon.keys.keyring import Keyring
from entresol_daemon.memory.slabs import SlabBuffer, SlabPool
from entresol_daemon.metrics import Metrics
from entresol_daemon.shard.choosing import CodecChooser
from entresol_daemon.shard.meters import Meters
from entresol_daemon.shard.sessions import Leased
from entresol_daemon.shard.turns import LoopTurns, SharedTurns
from entresol_daemon.shard.valued import Valued
from entresol_proto.ids import TenantName

RETRY_COST = 20  # of the loop: one who waits looks again
RETRIES_IN_VAIN_MAX = 4  # of one line, then the others wait for the next notice


class Room(enum.Enum):
    """For what. Who waits for one thing does not look in vain for those who wait for another."""

    GET = enum.auto()  # memory that its hosts may hold, or any
    LEASE = enum.auto()
    OPENED = enum.auto()  # memory for opened blocks
    EXPOSURE = enum.auto()
    COMMIT = enum.auto()  # memory for a block that is pulled
    RESERVE = enum.auto()  # the put budget


class _Line:
    """Those who wait for the same, in order, and how many of them are still to look again."""

    __slots__ = ("in_vain", "looking", "to_look", "waiters")

    def __init__(self) -> None:
        self.waiters: dict[asyncio.Future[None], None] = {}
        self.to_look = 0
        self.in_vain = 0
        self.looking = False

    def notice(self) -> None:
        """Something became free."""
        self.to_look, self.in_vain = len(self.waiters), 0
        if not self.looking:
            self.wake_next()

    def wake_next(self) -> None:
        """Let the next one look, if there is one and it makes sense."""
        self.looking = False
        if self.in_vain >= RETRIES_IN_VAIN_MAX:
            self.to_look = 0
        while self.to_look and self.waiters and not self.looking:
            self.to_look -= 1
            waiter = next(iter(self.waiters))
            del self.waiters[waiter]
            if not waiter.done():
                waiter.set_result(None)
                self.looking = True


class Signal:
    """Wakes those who wait for memory, a lease slot or flash to become free.

    A tenant's waiters for the same look again one after the other, each in a turn of its tenant on
    the loop, and not many of them in vain: a crowd that one tenant makes wait costs the others
    nothing. Who waits for its own session to hold less is only told of that.
    """

    def __init__(self, loop_turns: LoopTurns) -> None:
        self._turns = loop_turns
        self._tenants: dict[tuple[TenantName, Room], _Line] = {}
        self._sessions: dict[tuple[int, Room], _Line] = {}

    def notify(self, session: int = 0) -> None:
        """Something became free, for everybody and for this session."""
        for line in self._tenants.values():
            line.notice()
        if session and self._sessions:
            for what in Room:
                if (own := self._sessions.get((session, what))) is not None:
                    own.notice()

    async def wait(
        self,
        account: Account,
        timeout_ns: int,
        what: Room,
        *,
        session: int = 0,
        again: bool = False,
        cost: int = RETRY_COST,
    ) -> bool:
        """True when it is time to look again, at once; False when `timeout_ns` passed first.

        `session` waits for what that session holds. `again`: the last look was in vain. Looking
        costs the loop `cost`. Raises: QuotaError (BUSY) when too much work waits for the loop.
        """
        if timeout_ns <= 0:
            return False
        lines: dict[Any, _Line] = self._sessions if session else self._tenants
        place = (session or account.name, what)
        line = lines.setdefault(place, _Line())
        line.in_vain += again
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        line.waiters[waiter] = None
        try:
            async with asyncio.timeout(timeout_ns / 1e9):
                await waiter
                await self._turns.take(account, cost)
            return True
        except TimeoutError:
            return False
        finally:
            line.waiters.pop(waiter, None)
            if waiter.done() and not waiter.cancelled():
                loop.call_soon(line.wake_next)  # after this one has looked
            if not line.waiters and lines.get(place) is line:
                del lines[place]


@dataclass(slots=True)
class Parts:
    """See the module. All are owned by the `Shard`."""

    config: Config
    engine: Engine
    keyring: Keyring
    compute: Compute
    keys: Compute  # for what the keyring writes: it waits for a disk, one call after the other
    metrics: Metrics
    meters: Meters
    events: EventLog
    accounts: Accounts
    put_budget: PutBudget
    held: Held
    turns: SharedTurns
    admission: Admission
    history: History
    census: VersionCensus
    codecs: CodecChooser
    residency: Residency
    refused: Refused  # blocks the device would not give, until they have had their second chance
    scratch: SlabPool  # private plaintext on its way to being sealed; wiped after use
    leases: LeaseTable[Leased]
    room: Signal
    make_plain_buffer: Callable[[int], SlabBuffer]  # memory for one session's opened blocks
    dek_of: Callable[[bytes, int], bytes | None]  # (stream, version) -> DEK, None if there is none
    now_ns: Callable[[], int]
    unix_ns: Callable[[], int]
    sweep: Callable[[], Iterator[None]]  # overwrites freed memory, step by step
    valued: Valued = field(init=False)

    def __post_init__(self) -> None:
        self.valued = Valued(self.engine, self.config.flash.eviction)
