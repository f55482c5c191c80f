"""Daemon-opened reads: plaintext for one session, in memory only that session can reach.

Each session that asks for it gets a slab pool of its own. Opened blocks live there while a lease or
a STAGE hold keeps them, then they are wiped and freed. On fabrics that can fence, an exposure
covers exactly one lease's blocks and is revoked when it ends; on shm the whole pool is the
session's, and nobody else ever maps it.

Invariant: plaintext is never placed in a slab that another session, even of the same tenant, can
read, and never outlives its last pin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from entresol_daemon.core.fairness import PUTS
from entresol_daemon.core.residency import Resident
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.shard.jobs import Job
from entresol_daemon.shard.parts import Parts, Room
from entresol_daemon.shard.plaintext import PLAIN_OWNER, PlainMemory
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.sessions import Leased, PlainBlock, Session
from entresol_daemon.shard.turns import COMPUTE_ITEM_BYTES, compute_in_turns
from entresol_proto import limits
from entresol_proto.ids import engine_key_digest
from entresol_proto.seal.block import BlockKey, SealedHeader, derive_block_key, open_into
from entresol_proto.seal.wiping import zero
from entresol_proto.status import Status
from entresol_proto.wire.data import GrantItem, Tier

NO_COMMITMENT = bytes(16)
EXPOSED_BLOCKS_MAX = limits.REGIONS_PER_SESSION_MAX // 2  # the rest is for slabs


@dataclass(frozen=True, slots=True)
class _Opening:
    """One block to open off the loop: plain data, so that the thread touches no shard state."""

    sealed: memoryview
    into: memoryview
    namespace_id: bytes
    wire_key: bytes
    block_key: BlockKey


def _opening_bytes(job: _Opening) -> int:
    return job.into.nbytes


def _open(job: _Opening) -> tuple[Status, bytes]:
    """The status and, if it opened, what stands for the engine key in its (proven) header."""
    status = open_into(
        job.sealed,
        job.into,
        namespace_id=job.namespace_id,
        wire_key=job.wire_key,
        engine_key=None,
        block_key=job.block_key,
    )
    if status is not Status.OK:
        return status, b""
    return status, engine_key_digest(SealedHeader.parse(job.sealed).engine_key)


def _look(job: _Opening) -> Status:
    """Whether a block opens; what came of it is wiped."""
    try:
        return _open(job)[0]
    finally:
        zero(job.into)
        job.into.release()


class OpenedBlocks:
    """Opens blocks into sessions' private memory and lets them go again."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._revoking: dict[asyncio.Task[None], Session] = {}
        self.memory = PlainMemory(parts)

    async def open(self, leased: Leased, removal: Removal) -> list[tuple[int, Status]]:
        """Replace a lease's sealed blocks by opened ones; returns what failed.

        The sealed residents are unpinned here; `leased.held_bytes` follows. From the first on that
        finds no memory, those that are not open yet stay as they were; nothing is awaited where
        that are all.
        """
        parts, session = self._parts, leased.session
        failed: list[tuple[int, Status]] = []
        jobs: list[tuple[int, Resident, PlainBlock]] = []
        short: dict[int, Resident] = {}
        for index, resident in leased.sealed.items():
            # The salt, too: a block that was removed and stored again is another block.
            place = (resident.namespace_id, resident.wire_key, resident.salt)
            ready = session.plain_blocks.get(place)
            extent = None
            if not (short or ready):
                extent = self.memory.pool(session).allocate(PLAIN_OWNER, resident.plain_bytes)
            if ready is not None:
                ready.pins += 1
                leased.plain[index] = ready
            elif extent is not None:
                jobs.append((index, resident, PlainBlock(place, extent, resident.plain_bytes)))
            else:
                short[index] = resident
                continue
            if resident.from_flash:
                resident.from_flash = False
                leased.staged.add(index)
        if jobs:
            failed = await self._open_all(leased, jobs, removal)
        for index, resident in leased.sealed.items():
            if index not in short:
                parts.residency.unpin(resident)
        leased.sealed = short
        return failed

    async def _open_all(
        self, leased: Leased, jobs: Sequence[tuple[int, Resident, PlainBlock]], removal: Removal
    ) -> list[tuple[int, Status]]:
        """Open blocks into the memory they have; returns what failed, which is dropped."""
        parts, session = self._parts, leased.session
        failed: list[tuple[int, Status]] = []
        try:
            opened = await compute_in_turns(
                parts.turns.compute,
                parts.compute,
                session.account,
                _open,
                [self._opening(session, resident, block) for _, resident, block in jobs],
                _opening_bytes,
            )
        except BaseException:
            for _, _, block in jobs:
                self._wipe(session, block)
            raise
        wrong: list[Resident] = []
        for (index, resident, block), (status, digest) in zip(jobs, opened, strict=True):
            if status is Status.OK:
                block.engine_key_digest = digest
                block.pins = 1
                leased.plain[index] = block
                session.plain_blocks.setdefault(block.place, block)
            else:
                self._wipe(session, block)
                wrong.append(resident)
                failed.append((index, Status.CORRUPT))
        if wrong:  # their bytes are those that were hashed for flash, or never left memory
            parts.room.notify(session.number)
            await removal.sealed_wrongly(session.account, wrong)
        return failed

    async def items(self, leased: Leased, job: Job) -> list[GrantItem]:
        """Grant items of a lease's opened blocks, exposing them as the fabric allows.

        None of them when the session has no exposures left by the job's deadline: those of earlier
        leases come back as the host gives them up. Raises: FabricError, EntresolError.
        """
        session = leased.session
        endpoint = session.data_path()
        if endpoint.capabilities.revokes:  # one each, taken for all at once or not at all
            while self._crowded(leased):  # also where others of the session were quicker
                left = self._exposures_left(leased, job.deadline_ns)
                if not await job.visit.outside(left, own=True):
                    return []
            leased.exposed_blocks = len(leased.plain)
            session.exposed_blocks += leased.exposed_blocks
        items = []
        for index, block in sorted(leased.plain.items()):
            offset = block.extent.offset_bytes
            if endpoint.capabilities.revokes:
                exposure = await endpoint.expose(block.extent.view[: block.plain_bytes])
                leased.exposures.append(exposure)
                offset = 0
            else:
                shown = session.plain_exposures.get(block.extent.slab.number)
                if shown is None:
                    exposing = session.expose_plain(block.extent.slab)
                    shown = await job.visit.outside(exposing, own=True)
                exposure = shown
            span = exposure.span(offset, block.plain_bytes)
            tier = Tier.FLASH if index in leased.staged else Tier.MEMORY
            digest = block.engine_key_digest
            items.append(GrantItem(index, tier, span, block.plain_bytes, digest, NO_COMMITMENT))
        return items

    def _crowded(self, leased: Leased) -> bool:
        """Whether its session has no exposures left for this lease."""
        return leased.session.exposed_blocks + len(leased.plain) > EXPOSED_BLOCKS_MAX

    async def _exposures_left(self, leased: Leased, deadline_ns: int) -> bool:
        """Wait for them; False when the deadline comes first."""
        session, again = leased.session, False
        while self._crowded(leased):
            left_ns = deadline_ns - self._parts.now_ns()
            if not await self._parts.room.wait(
                session.account, left_ns, Room.EXPOSURE, session=session.number, again=again
            ):
                return False
            again = True
        return True

    def let_go(self, leased: Leased) -> None:
        """End of a lease: revoke first, wipe and free what no other lease keeps after that."""
        if leased.exposures and not leased.session.fenced:
            task = asyncio.get_running_loop().create_task(self._revoke(leased))
            self._revoking[task] = leased.session
            task.add_done_callback(self._revoking.pop)
        else:
            self._unpin(leased)

    async def verify(self, resident: Resident) -> Status:
        """Open a resident into private scratch memory, only to see whether it opens: in a turn of
        its owner, after what waits for an answer. Raises: ComputeError, QuotaError (BUSY)."""
        parts, cost = self._parts, resident.plain_bytes + COMPUTE_ITEM_BYTES
        account = parts.accounts.by_stream.get(resident.owner)
        if account is None:
            return Status.ERASED
        await parts.turns.compute.take(account, cost, PUTS)
        try:
            return await self._verify(resident)
        finally:
            parts.turns.compute.give(cost)

    async def _verify(self, resident: Resident) -> Status:
        parts = self._parts
        extent = parts.scratch.allocate(resident.owner, resident.plain_bytes)
        if extent is None:
            return Status.OK  # no memory to look closer: in doubt, the host's miss was enough
        try:
            dek = parts.dek_of(resident.owner, resident.dek_version)
            if dek is None:
                return Status.ERASED
            job = _Opening(
                _sealed(resident),
                extent.view[: resident.plain_bytes],
                resident.namespace_id,
                resident.wire_key,
                derive_block_key(dek, resident.salt),
            )
            return await parts.compute.run(_look, job)
        finally:
            parts.scratch.free(extent)
            parts.room.notify()  # puts may wait for it

    async def close_session(self, session: Session) -> None:
        """Give up all plaintext of a session; its leases have ended."""
        while mine := [task for task, owner in self._revoking.items() if owner is session]:
            await asyncio.wait(mine)  # not those of other sessions: they never cease
        # Leases that last longer (shm) are the host's, which has a mapping of its own: what is left
        # of them here would keep the memory beyond the budget.
        for lease in self._parts.leases.of_session(session.number):
            lease.payload.plain.clear()
        session.plain_blocks.clear()
        self.memory.close(session)

    def _opening(self, session: Session, resident: Resident, block: PlainBlock) -> _Opening:
        block_key = derive_block_key(session.tenant.deks[resident.dek_version], resident.salt)
        into = block.extent.view[: block.plain_bytes]
        return _Opening(
            _sealed(resident), into, resident.namespace_id, resident.wire_key, block_key
        )

    async def _revoke(self, leased: Leased) -> None:
        endpoint = leased.session.endpoint
        for exposure in leased.exposures:
            if endpoint is not None:
                await endpoint.revoke(exposure)
        self._unpin(leased)
        self._parts.room.notify(leased.session.number)

    def _unpin(self, leased: Leased) -> None:
        for block in leased.plain.values():
            block.pins -= 1
            if block.pins == 0:
                if leased.session.plain_blocks.get(block.place) is block:
                    del leased.session.plain_blocks[block.place]
                self._wipe(leased.session, block)
        leased.plain.clear()
        leased.session.exposed_blocks -= leased.exposed_blocks
        leased.exposed_blocks = 0

    def _wipe(self, session: Session, block: PlainBlock) -> None:
        if session.plain_pool is None:
            return  # the session's memory is gone as a whole
        zero(block.extent.view)
        session.plain_pool.free(block.extent)


def _sealed(resident: Resident) -> memoryview:
    return resident.extent.view[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + resident.sealed_bytes]
