"""What hosts say about blocks they could not open, and what the daemon makes of it.

Invariant: a report names a block by a lease of the reporting session, so it can only be about a
block of that session's own tenant. A block the daemon can open is dropped on its own evidence
alone. One it cannot open (host-sealed) is dropped on the tenant's word, which is no more than the
FORGET the tenant may say anyway: kept, it would stand in the way of a good copy for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from entresol_daemon.compute import ComputeError
from entresol_daemon.core.residency import Resident, ResidentState
from entresol_daemon.shard.opened import OpenedBlocks
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.sessions import Session
from entresol_proto.ids import short
from entresol_proto.status import Status
from entresol_proto.wire.data import Release

EXAMINED_AT_ONCE_MAX = 64  # blocks hosts reported; a report beyond is lost, its block reads again

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
        self._examining: set[Resident] = set()  # pinned, so none of them comes twice

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
            elif resident not in self._examining and len(self._examining) < EXAMINED_AT_ONCE_MAX:
                self._parts.residency.pin(resident)
                self._examining.add(resident)
                self._spawn(self._examine(resident))

    def _believe(self, resident: Resident, status: Status) -> None:
        """A block only its tenant can open does not open: the tenant's own loss."""
        if resident.state is ResidentState.READY and status is Status.CORRUPT:
            self._told(resident, status)
            self._removal.corrupt(resident, where="host_report")

    async def _examine(self, resident: Resident) -> None:
        """A host could not open a block: believe our own eyes, then drop it or keep it."""
        try:
            if resident.state is not ResidentState.READY:
                return
            status = await self._opened.verify(resident)
            self._told(resident, status)
            if status is Status.CORRUPT:  # and not that its key version is gone
                self._removal.corrupt(resident, where="host_report")
        except ComputeError:
            return  # no thread to look closer: in doubt, the host's miss was enough
        finally:
            self._examining.discard(resident)
            self._parts.residency.unpin(resident)

    def _told(self, resident: Resident, status: Status) -> None:
        log.warning(
            "event=host_report namespace=%s block=%s host_sealed=%s verdict=%s",
            short(resident.namespace_id), short(resident.wire_key), resident.host_sealed,
            status.label,
        )  # fmt: skip
