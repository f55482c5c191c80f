"""Flash → slab: the reads that gets wait for.

Reads belong to the shard, not to the request: a session that goes away never cancels a read into
memory others wait for. They are made in turns of their tenants; what nobody waits for any more when
its turn comes is not read.

Invariant: a block is READY only after its record and header were verified; every read ends with one
status for all who wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from entresol_daemon.core.accounts import Account
from entresol_daemon.core.census import HOST_SEALED, code_of
from entresol_daemon.core.planning import Window
from entresol_daemon.core.quote import FlashReads
from entresol_daemon.core.residency import Resident, ResidentState
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.turns import FLASH_ITEM_BYTES, portions
from entresol_proto.seal.block import SealedHeader, check_header
from entresol_proto.status import EntresolError, SealError, Status

log = logging.getLogger("entresol.get")


class Read:
    """Blocks that are read together, and how that ended for each."""

    __slots__ = ("ended", "statuses")

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.statuses: dict[Resident, Status] = {}


class Staging:
    """All reads from flash of a shard's gets."""

    def __init__(
        self,
        parts: Parts,
        removal: Removal,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._parts = parts
        self._removal = removal
        self._spawn = spawn
        self._loading: dict[Resident, Read] = {}
        self.reads = FlashReads()  # what waits and what is in service, for quotes

    def __len__(self) -> int:
        """Blocks being read, or waiting for it."""
        return len(self._loading)

    def slots(self) -> set[int]:
        """Where those belong."""
        return {resident.slot for resident in self._loading}

    def start(self, account: Account, residents: Sequence[Resident]) -> None:
        """Read these, as they are pinned by whoever waits for them."""
        for portion in portions(residents, _record_bytes, self._parts.turns.read_bytes):
            read = Read()
            for resident in portion:
                self._parts.residency.pin(resident)  # the load's own pin
                self._loading[resident] = read
            self._spawn(self._load(account, portion, read))

    def reads_of(self, window: Window) -> dict[Resident, Read]:
        """The reads a window waits for. Taken before the first await: a read that has ended is
        forgotten, and with it why it failed."""
        waited = (resident for _, resident in window.loads + window.joins)
        return {each: self._loading[each] for each in waited if each in self._loading}

    async def _load(self, account: Account, residents: list[Resident], read: Read) -> None:
        try:
            await self._load_in_turn(account, residents)
        finally:
            read.ended.set_result(None)

    async def _load_in_turn(self, account: Account, residents: list[Resident]) -> None:
        cost, length_bytes = sum(map(_cost_of, residents)), sum(map(_record_bytes, residents))
        turns, started_ns = self._parts.turns.flash, self._parts.now_ns()
        reads, name = self.reads, account.name
        reads.arrive(name, account.weight, length_bytes, started_ns)
        try:
            turn_ns = await turns.take(account, cost)
        except BaseException as error:
            reads.give_up(name, length_bytes)
            if not isinstance(error, EntresolError):
                raise
            self._end(residents, [error.status] * len(residents), started_ns)
            return
        reads.begin(name, length_bytes, self._parts.now_ns())
        read_bytes = 0
        try:
            waited = [r for r in residents if r.pins > 1 and r.state is ResidentState.LOADING]
            if len(waited) < len(residents):
                rest = [r for r in residents if r not in waited]
                self._end(rest, [Status.MISS] * len(rest), started_ns)
            if waited:
                statuses = await self._read(waited)
                read_bytes = sum(map(_record_bytes, waited))
                self._end(waited, statuses, started_ns)
        finally:
            turns.give(cost, turn_ns if read_bytes == length_bytes else 0)
            reads.end(length_bytes, read_bytes, self._parts.now_ns())

    async def _read(self, residents: list[Resident]) -> list[Status]:
        try:
            return await self._parts.engine.read([(r.slot, r.extent.view) for r in residents])
        except Exception:
            log.exception("event=flash_read_failed blocks=%d", len(residents))
            return [Status.IO_ERROR] * len(residents)

    def _end(self, residents: list[Resident], statuses: list[Status], started_ns: int) -> None:
        parts = self._parts
        outcomes = []
        freed = False
        given: Resident | None = None
        for resident, status in zip(residents, statuses, strict=True):
            if resident.state is ResidentState.DEAD:
                status = Status.MISS  # removed while it was read; what was read says nothing
            elif status is Status.OK:
                status = self._admit(resident)
            self._loading.pop(resident).statuses[resident] = status
            if status in (Status.CORRUPT, Status.CONFLICT):
                self._removal.corrupt(resident, where="flash")
            if status is not Status.OK:
                parts.residency.kill(resident)
            if status is Status.OK:
                given = resident
            elif status is Status.IO_ERROR and not parts.refused.full:
                parts.refused.refused((resident.namespace_id, resident.wire_key), parts.now_ns())
            outcomes.append(status)
            parts.residency.unpin(resident)
            freed |= resident.pins == 0
        if given is not None:
            parts.refused.gave((given.namespace_id, given.wire_key))
        parts.meters.staged(outcomes, parts.now_ns() - started_ns)
        if freed:
            parts.room.notify()

    def _admit(self, resident: Resident) -> Status:
        """Believe a record read from flash only if its header says what the index says."""
        sealed = sealed_view(resident)
        try:
            header = SealedHeader.parse(sealed)
        except SealError:
            return Status.CORRUPT
        status = check_header(
            header,
            namespace_id=resident.namespace_id,
            wire_key=resident.wire_key,
            plain_bytes=resident.plain_bytes,
        )
        if status is Status.OK and header.sealed_bytes != resident.sealed_bytes:
            status = Status.CORRUPT
        if status is Status.OK:
            resident.salt = header.salt
            resident.dek_version = header.dek_version
            resident.host_sealed = header.host_sealed
            code = HOST_SEALED if header.host_sealed else code_of(header.dek_version)
            self._parts.census.note(resident.slot, resident.owner, code)
            resident.state = ResidentState.READY
        return status

    async def until_read(self, reads: Iterable[Read], deadline_ns: int) -> None:
        """Return when all of these have ended, or at `deadline_ns`."""
        ended = {read.ended for read in reads if not read.ended.done()}
        left_ns = deadline_ns - self._parts.now_ns()
        if ended and left_ns > 0:
            await asyncio.wait(ended, timeout=left_ns / 1e9)

    def arrival(self, resident: Resident, read: Read | None) -> Status:
        """How the read of a block ended, for one who waited as long as he would."""
        if resident.state is ResidentState.READY:
            return Status.OK
        status = Status.MISS if read is None else read.statuses.get(resident)
        if status is None and resident.state is not ResidentState.DEAD:
            return Status.DEADLINE
        # What was found and is no longer there was removed, and so was what is still being read.
        return Status.MISS if status is None or status is Status.OK else status


def sealed_view(resident: Resident) -> memoryview:
    """The sealed block inside its record."""
    return resident.extent.view[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + resident.sealed_bytes]


def _cost_of(resident: Resident) -> int:
    return _record_bytes(resident) + FLASH_ITEM_BYTES


def _record_bytes(resident: Resident) -> int:
    return resident.extent.length_bytes
