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
from entresol_proto.eager import Eager
from entresol_proto.seal.block import SealedHeader, check_header
from entresol_proto.status import EntresolError, SealError, Status

log = logging.getLogger("entresol.get")


class Read:
    """Blocks that are read together, and how that ended for each."""

    __slots__ = ("ended", "statuses", "waiting")

    def __init__(self) -> None:
        self.ended = False
        self.statuses: dict[Resident, Status] = {}
        self.waiting: list[_Waiter] = []

    def end(self) -> None:
        """Whatever has no status by now will have none."""
        self.ended = True
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            one.ended()


class _Waiter:
    """Who waits for so many reads. Told by the last of them in one turn of the loop, where waiting
    for a future of each takes two."""

    __slots__ = ("_left", "future")

    def __init__(self, reads: Sequence[Read]) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = len(reads)
        for read in reads:
            read.waiting.append(self)

    def ended(self) -> None:
        """One of them."""
        self._left -= 1
        if not self._left:
            self.give_up()

    def give_up(self) -> None:
        """It waits no longer."""
        if not self.future.done():
            self.future.set_result(None)


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

    def begin(self, account: Account, window: Window) -> dict[Resident, Read]:
        """Read the loads of a window, pinned by whoever waits for them. The reads that it waits
        for, those of others among them; taken now: one that has ended is forgotten, and with it why
        it failed."""
        joined = (resident for _, resident in window.joins)
        reads = {each: self._loading[each] for each in joined if each in self._loading}
        residents = [resident for _, resident in window.loads]
        for portion in portions(residents, _record_bytes, self._parts.turns.read_bytes):
            read = Read()
            for resident in portion:
                self._parts.residency.pin(resident)  # the load's own pin
                self._loading[resident] = reads[resident] = read
            try:
                load = Eager(self._load(account, portion, read))
                self._spawn(load)
            except BaseException:
                self._lose(portion, read)
                for resident in residents:
                    if resident not in reads:  # nor will it be: who waits for it lets it go
                        self._parts.residency.kill(resident)
                raise
            load.begin()  # here and now: the drive need not wait until the loop comes round to it
        return reads

    async def _load(self, account: Account, residents: list[Resident], read: Read) -> None:
        try:
            await self._load_in_turn(account, residents)
        except (Exception, asyncio.CancelledError):  # whose reads have ended; and nothing else
            self._lose(residents, read)
            raise
        finally:
            read.end()

    def _lose(self, residents: Sequence[Resident], read: Read) -> None:
        """Something of ours went wrong: nobody knows what was read of those without a status, if
        anything. They are to be had by a new read."""
        for resident in residents:
            if self._loading.get(resident) is read:
                del self._loading[resident]
                read.statuses[resident] = Status.IO_ERROR
                self._parts.residency.kill(resident)
                self._parts.residency.unpin(resident)
        self._parts.room.notify()

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
        pending = [read for read in dict.fromkeys(reads) if not read.ended]
        left_ns = deadline_ns - self._parts.now_ns()
        if pending and left_ns > 0:
            waiter = _Waiter(pending)
            timer = asyncio.get_running_loop().call_later(left_ns / 1e9, waiter.give_up)
            try:
                await waiter.future
            finally:
                timer.cancel()

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
