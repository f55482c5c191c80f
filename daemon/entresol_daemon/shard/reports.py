"""What hosts say about blocks they could not open, and what the daemon makes of it.

Invariant: a report names a block by a lease of the reporting session, so it can only be about a
block of that session's own tenant. A block the daemon can open is dropped on its own evidence
alone. One it cannot open (host-sealed) is dropped on the tenant's word, which is no more than the
FORGET the tenant may say anyway: kept, it would stand in the way of a good copy for ever. That
costs the tenant's turns, as FORGET does, and the log one line per frame.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from entresol_daemon.compute import ComputeError
from entresol_daemon.core.fairness import PUTS
from entresol_daemon.core.residency import Resident, ResidentState
from entresol_daemon.shard.opened import OpenedBlocks
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.sessions import Session
from entresol_daemon.shard.turns import LOOP_TURN_COST, REMOVAL_COST, Stretches
from entresol_proto.ids import short
from entresol_proto.status import QuotaError, Status
from entresol_proto.wire.data import Release

REPORTED_MAX = 64  # blocks that wait for it, of all tenants; a report beyond is lost and counted,
# and its block reads again. One tenant has as many as are free besides: others' reports are heard.

log = logging.getLogger("entresol.get")


class HostReports:
    """The reports in RELEASE frames."""

    def __init__(
        self,
        parts: Parts,
        removal: Removal,
        opened: OpenedBlocks,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._parts = parts
        self._removal = removal
        self._opened = opened
        self._spawn = spawn
        self._waiting: dict[bytes, deque[Resident]] = {}  # by owner; one at a time is examined
        self._reported: set[Resident] = set()  # those: pinned, so none of them comes twice

    def take(self, session: Session, release: Release) -> None:
        """Look into what the host could not verify. Unknown leases and other causes say nothing."""
        suspects: dict[Resident, Status] = {}  # each once, however often it is reported
        for lease_id, index, status in release.reports:
            lease = self._parts.leases.get(session.number, lease_id)
            if lease is None or status not in (Status.CORRUPT, Status.CONFLICT):
                continue
            resident = lease.payload.sealed.get(index)
            if resident is not None:
                suspects[resident] = status
        new = [
            resident
            for resident, status in suspects.items()
            if resident not in self._reported
            and resident.state is ResidentState.READY
            and (status is Status.CORRUPT or not resident.host_sealed)
        ]
        if not new:
            return
        lost = sum([not self._enter(resident) for resident in new])
        tenant = session.account.name
        log.warning("event=host_report tenant=%s blocks=%d lost=%d", tenant, len(new), lost)
        if lost:
            self._parts.metrics.host_reports_lost[tenant].inc(lost)

    def _enter(self, resident: Resident) -> bool:
        """False when as many wait as may."""
        waiting = self._waiting.get(resident.owner)
        mine = 0 if waiting is None else len(waiting)
        if mine >= REPORTED_MAX - len(self._reported):
            return False
        self._parts.residency.pin(resident)
        self._reported.add(resident)
        if waiting is None:
            waiting = self._waiting[resident.owner] = deque()
            self._spawn(self._examine_all(resident.owner, waiting))
        waiting.append(resident)
        return True

    async def _examine_all(self, owner: bytes, waiting: deque[Resident]) -> None:
        """One after the other: they share threads and scratch memory with what others wait for."""
        stretches: Stretches | None = None  # of the tenant's turns on the loop
        try:
            while waiting:
                if not waiting[0].host_sealed:
                    await self._examine(waiting[0])
                else:
                    stretches = stretches or await self._first_turn(owner)
                    if stretches is not None:
                        await self._believe(waiting[0], stretches)
                self._done(waiting.popleft())
        finally:
            del self._waiting[owner]
            for resident in waiting:
                self._done(resident)

    def _done(self, resident: Resident) -> None:
        self._reported.discard(resident)
        self._parts.residency.unpin(resident)
        self._parts.room.notify()

    async def _first_turn(self, owner: bytes) -> Stretches | None:
        account = self._parts.accounts.by_stream.get(owner)
        if account is None:
            return None  # erased, and its blocks with it
        with contextlib.suppress(QuotaError):  # its own requests fill the line; see `Removal.rest`
            await self._parts.turns.loop.take(account, LOOP_TURN_COST, PUTS)
        return self._removal.stretches_of(account)

    async def _believe(self, resident: Resident, stretches: Stretches) -> None:
        """A block only its tenant can open does not open: the tenant's own loss."""
        if resident.state is ResidentState.READY:
            self._removal.corrupt(resident, where="host_report")
            await self._removal.rest(stretches, REMOVAL_COST)

    async def _examine(self, resident: Resident) -> None:
        """A host could not open a block: believe our own eyes, then drop it or keep it."""
        if resident.state is not ResidentState.READY:
            return
        resident.forget_key()  # it may be what is damaged: the next grant derives it anew
        try:
            status = await self._opened.verify(resident)
        except (ComputeError, QuotaError):
            return  # no thread to look closer: in doubt, the host's miss was enough
        account = self._parts.accounts.by_stream.get(resident.owner)
        log.warning(
            "event=report_examined tenant=%s namespace=%s block=%s verdict=%s",
            "" if account is None else account.name, short(resident.namespace_id),
            short(resident.wire_key), status.label,
        )  # fmt: skip
        if status is Status.CORRUPT:  # and not that its key version is gone
            self._removal.corrupt(resident, where="host_report")
