"""What hosts say about blocks they could not open, and what the daemon makes of it.

Invariant: a report names a block by a lease of the reporting session, so it can only be about a
block of that session's own tenant. A block the daemon can open is dropped on its own evidence
alone. One it cannot open (host-sealed) is dropped on the tenant's word, which is no more than the
FORGET the tenant may say anyway: kept, it would stand in the way of a good copy for ever.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from entresol_daemon.compute import ComputeError
from entresol_daemon.core.residency import Resident, ResidentState
from entresol_daemon.shard.opened import OpenedBlocks
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.sessions import Session
from entresol_proto.ids import short
from entresol_proto.status import QuotaError, Status
from entresol_proto.wire.data import Release

REPORTED_MAX = 64  # blocks that wait to be examined, of all tenants; a report beyond is lost, and
# its block reads again. One tenant has as many as are free besides: others' reports are heard.

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
        for resident, status in suspects.items():
            if resident.host_sealed:
                self._believe(resident, status)
            elif resident not in self._reported:
                self._enter(resident)

    def _enter(self, resident: Resident) -> None:
        waiting = self._waiting.get(resident.owner)
        mine = 0 if waiting is None else len(waiting)
        if mine >= REPORTED_MAX - len(self._reported):
            return
        self._parts.residency.pin(resident)
        self._reported.add(resident)
        if waiting is None:
            waiting = self._waiting[resident.owner] = deque()
            self._spawn(self._examine_all(resident.owner, waiting))
        waiting.append(resident)

    async def _examine_all(self, owner: bytes, waiting: deque[Resident]) -> None:
        """One after the other: they share threads and scratch memory with what others wait for."""
        try:
            while waiting:
                await self._examine(waiting[0])
                self._done(waiting.popleft())
        finally:
            del self._waiting[owner]
            for resident in waiting:
                self._done(resident)

    def _done(self, resident: Resident) -> None:
        self._reported.discard(resident)
        self._parts.residency.unpin(resident)

    def _believe(self, resident: Resident, status: Status) -> None:
        """A block only its tenant can open does not open: the tenant's own loss."""
        if resident.state is ResidentState.READY and status is Status.CORRUPT:
            self._told(resident, status)
            self._removal.corrupt(resident, where="host_report")

    async def _examine(self, resident: Resident) -> None:
        """A host could not open a block: believe our own eyes, then drop it or keep it."""
        if resident.state is not ResidentState.READY:
            return
        resident.forget_key()  # it may be what is damaged: the next grant derives it anew
        try:
            status = await self._opened.verify(resident)
        except (ComputeError, QuotaError):
            return  # no thread to look closer: in doubt, the host's miss was enough
        self._told(resident, status)
        if status is Status.CORRUPT:  # and not that its key version is gone
            self._removal.corrupt(resident, where="host_report")

    def _told(self, resident: Resident, status: Status) -> None:
        log.warning(
            "event=host_report namespace=%s block=%s host_sealed=%s verdict=%s",
            short(resident.namespace_id), short(resident.wire_key), resident.host_sealed,
            status.label,
        )  # fmt: skip
