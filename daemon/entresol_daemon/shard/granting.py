"""From pinned blocks to a lease, and the end of the lease.

What hosts are waited for here (to see a slab, to give back an exposure or a lease) is waited for
outside the door: only their own gets are late for it.

Invariants: a block is granted with its own key or none; every pin handed in is given to a lease or
undone, and what a lease keeps is let go once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from entresol_daemon.core.residency import Resident, ResidentState
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.shard.jobs import Job
from entresol_daemon.shard.opened import NO_COMMITMENT, OpenedBlocks
from entresol_daemon.shard.parts import Parts, Room
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.sessions import Leased, OpenedNamespace, PlainBlock, Session
from entresol_daemon.shard.turns import BLOCK_COST, FRAME_COST
from entresol_proto.fabric.base import Exposure, RemoteSpan
from entresol_proto.seal.block import COMMITMENT_BYTES, KEY_BYTES, derive_key_and_commitment
from entresol_proto.status import Status
from entresol_proto.wire.data import Grant, GrantItem, OpenAt, Tier
from entresol_proto.wire.packed import PackedGrant

NO_KEY = bytes(KEY_BYTES + COMMITMENT_BYTES)  # granted where only the tenant has it


class Granting:
    """Grants and leases of all sessions of a shard."""

    def __init__(self, parts: Parts, removal: Removal) -> None:
        self._parts = parts
        self._removal = removal
        self.opened = OpenedBlocks(parts)

    async def grant(self, job: Job, entries: list[tuple[int, Resident]], *, final: bool) -> None:
        """Turn pinned residents into one lease and emit it, with the misses known so far. Of blocks
        to be opened those for which there is no memory yet follow in further leases."""
        again = False
        while left := await self._grant_some(job, entries, final=final):
            if len(left) < len(entries) and self._parts.now_ns() < job.deadline_ns:
                again, entries = False, left
                continue  # there may be more by now
            try:
                entries = await self._until_room(job, left, again=again)
            except BaseException:
                self.undo(job, left)
                raise
            again = True

    async def _grant_some(
        self, job: Job, entries: list[tuple[int, Resident]], *, final: bool
    ) -> list[tuple[int, Resident]]:
        """See `grant`; returns those for which there is no memory, and then it was not final. If
        that are all, nothing was awaited or emitted."""
        parts, session = self._parts, job.session
        entries = self._openable(job, entries)
        leased = Leased(session, job.namespace)
        leased.sealed = dict(entries)
        leased.held_bytes = sum(resident.extent.length_bytes for _, resident in entries)
        items: list[GrantItem] = []
        left: list[tuple[int, Resident]] = []
        try:
            if job.open_at is OpenAt.DAEMON and entries:
                failed = await self.opened.open(leased, self._removal)
                job.misses += failed  # others may have told, and replaced, what there was before
                left = self._take_sealed(leased)
                if len(left) == len(entries):
                    return left
                items = await self.opened.items(leased, job)
                if not items:
                    job.misses += [(index, Status.BUSY) for index in leased.plain]
            elif entries:
                items = await self._sealed_items(job, entries)
            if items and not await self._lease_room(job):
                job.misses += [(item.index, Status.BUSY) for item in items]
                items = []
            expires_ns = parts.now_ns() + job.lease_ns
            lease_id = self._lease(leased, expires_ns) if items else 0
        except BaseException:
            self.let_go(leased)
            self.undo(job, left)
            raise
        if not items and entries:
            self.let_go(leased)
        later = {index for index, _ in left}
        job.hits += [resident.slot for index, resident in entries if index not in later]
        misses, job.misses = tuple(sorted(job.misses, key=itemgetter(0))), []
        final = final and not left
        job.ended |= final
        try:
            job.emit(Grant(final, lease_id, job.lease_ns, expires_ns, tuple(items), misses))
        except BaseException:
            self.undo(job, left)
            raise
        finally:  # once it is on its way
            parts.meters.granted(session.account.name, items, misses, job.open_at)
        return left

    def _take_sealed(self, leased: Leased) -> list[tuple[int, Resident]]:
        """What of a lease was not opened: its pins, and what is held for it, are the caller's."""
        left, leased.sealed = list(leased.sealed.items()), {}
        leased.held_bytes -= sum(resident.extent.length_bytes for _, resident in left)
        return left

    async def _until_room(
        self, job: Job, entries: list[tuple[int, Resident]], *, again: bool
    ) -> list[tuple[int, Resident]]:
        """Wait until there may be memory to open blocks into; those that are still wanted then. At
        the deadline they are BUSY. What is not wanted is undone."""
        session, left_ns = job.session, job.deadline_ns - self._parts.now_ns()
        own = self.opened.memory.is_full(session)
        waiting = self._parts.room.wait(
            session.account, left_ns, Room.OPENED, session=session.number if own else 0,
            again=again, cost=FRAME_COST + BLOCK_COST,
        )  # fmt: skip
        if not await job.visit.outside(waiting, own=own):
            job.misses += [(index, Status.BUSY) for index, _ in entries]
            self.undo(job, entries)
            return []
        gone = [entry for entry in entries if entry[1].state is ResidentState.DEAD]
        job.misses += [(index, Status.MISS) for index, _ in gone]
        self.undo(job, gone)
        return [entry for entry in entries if entry[1].state is not ResidentState.DEAD]

    def grant_now(
        self, session: Session, namespace: OpenedNamespace, residents: Sequence[Resident]
    ) -> PackedGrant:
        """Lease to their host blocks that are in memory, pinned, usable and shown to it; there is
        room for the lease. It is the caller that counts them."""
        leased = Leased(session, namespace)
        leased.sealed = dict(enumerate(residents))
        leased.held_bytes = sum(resident.extent.length_bytes for resident in residents)
        deks, exposures = session.tenant.deks, session.exposures
        grant = PackedGrant(len(residents))
        for index, resident in enumerate(residents):
            extent = resident.extent
            exposure = exposures[extent.slab.number]
            grant.add(
                index, _tier_of(resident), exposure.rkey,
                exposure.address + extent.offset_bytes + RECORD_HEADER_BYTES,
                resident.sealed_bytes, resident.plain_bytes, _key_of(resident, deks),
            )  # fmt: skip
        self._lease_now(leased, grant)
        return grant

    def grant_opened_now(
        self,
        session: Session,
        namespace: OpenedNamespace,
        residents: Sequence[Resident],
        blocks: Sequence[PlainBlock],
    ) -> PackedGrant:
        """The same of blocks as they lie opened in its session's memory. Nothing of it is pinned
        before: what is leased is the opened block, whatever becomes of the sealed one."""
        leased = Leased(session, namespace)
        leased.plain = dict(enumerate(blocks))
        leased.held_bytes = sum(resident.extent.length_bytes for resident in residents)
        grant = PackedGrant(len(blocks))
        for index, (resident, block) in enumerate(zip(residents, blocks, strict=True)):
            tier = _tier_of(resident)
            exposure = session.plain_exposures[block.extent.slab.number]
            grant.add(
                index, tier, exposure.rkey, exposure.address + block.extent.offset_bytes,
                block.plain_bytes, block.plain_bytes, block.engine_key_digest + NO_COMMITMENT,
            )  # fmt: skip
        self._lease_now(leased, grant)
        for block in blocks:
            block.pins += 1
        return grant

    def _lease_now(self, leased: Leased, grant: PackedGrant) -> None:
        lease_ns = self._parts.config.limits.lease_ns
        expires_ns = self._parts.now_ns() + lease_ns
        grant.lease(self._lease(leased, expires_ns), lease_ns, expires_ns)

    def carry_now(self, session: Session, residents: Sequence[Resident]) -> Grant:
        """Give their host blocks that are in memory and usable, in the grant itself: there is no
        lease, and nothing to be read. It is the caller that counts them."""
        deks, items, parts, at = session.tenant.deks, [], [], 0
        for index, resident in enumerate(residents):
            key, sealed_bytes = _key_of(resident, deks), resident.sealed_bytes
            items.append(
                GrantItem(
                    index, _tier_of(resident), RemoteSpan(0, at, sealed_bytes),
                    resident.plain_bytes, key[:KEY_BYTES], key[KEY_BYTES:],
                )
            )  # fmt: skip
            begin = RECORD_HEADER_BYTES
            parts.append(resident.extent.view[begin : begin + sealed_bytes])
            at += sealed_bytes
        return Grant(True, 0, 0, 0, tuple(items), (), b"".join(parts))

    def _lease(self, leased: Leased, expires_ns: int) -> int:
        """Enter a lease; its id."""
        session = leased.session
        lease_id = session.next_id()
        self._parts.leases.grant(session.number, lease_id, leased, expires_ns)
        leased.granted = True
        session.account.leases += 1
        self._parts.held.leases.take(1)
        return lease_id

    async def _lease_room(self, job: Job) -> bool:
        """Wait until the session may hold another lease: windows land several at a time."""
        again = False
        while not self.may_lease(job.session):
            left_ns, number = job.deadline_ns - self._parts.now_ns(), job.session.number
            # Its leases count here, and not what it holds: of that it will have no more.
            session = 0 if self._parts.leases.room(number) else number
            waiting = self._parts.room.wait(
                job.session.account, left_ns, Room.LEASE, session=session, again=again
            )
            if not await job.visit.outside(waiting, own=session > 0):
                return False
            again = True
        return True

    def _openable(
        self, job: Job, entries: list[tuple[int, Resident]]
    ) -> list[tuple[int, Resident]]:
        """Without the blocks whose key version was retired: those are gone for good."""
        session, namespace = job.session, job.namespace
        gone = [entry for entry in entries if not usable(session, namespace, entry[1])]
        if not gone:
            return entries
        kept = [entry for entry in entries if usable(session, namespace, entry[1])]
        for _, resident in gone:
            self._removal.without_key(resident)
        self.undo(job, gone)
        job.misses += [(index, Status.ERASED) for index, _ in gone]
        return kept

    async def _sealed_items(self, job: Job, entries: list[tuple[int, Resident]]) -> list[GrantItem]:
        items, session = [], job.session
        deks = session.tenant.deks
        # Copies, before anything is waited for: then a version may be destroyed, and wiped.
        keys = [bytes(bytearray(_key_of(resident, deks))) for _, resident in entries]
        for (index, resident), block_key in zip(entries, keys, strict=True):
            extent = resident.extent
            exposure = session.exposures.get(extent.slab.number)
            if exposure is None:
                exposing = session.expose_slab(extent.slab)
                exposure = await job.visit.outside(exposing, own=True)
            items.append(_item(index, resident, exposure, block_key))
        return items

    def let_go(self, leased: Leased) -> None:
        """A lease ended (release, expiry, session end): unpin everything it kept."""
        for resident in leased.sealed.values():
            self._parts.residency.unpin(resident)
        self.opened.let_go(leased)
        if leased.granted:
            leased.session.account.leases -= 1
            self._parts.held.leases.refund(1)
        self._unhold(leased.session, leased.held_bytes)
        self._parts.room.notify(leased.session.number)

    def _unhold(self, session: Session, length_bytes: int) -> None:
        session.held_bytes -= length_bytes
        assert session.held_bytes >= 0, "a lease was let go twice"
        self._parts.held.let_go(session.account, length_bytes)

    def undo(self, job: Job, entries: Sequence[tuple[int, Resident]]) -> None:
        """Blocks pinned for a window that are not granted: let them go."""
        for _, resident in entries:
            self._parts.residency.unpin(resident)
            self._unhold(job.session, resident.extent.length_bytes)
        if entries:
            self._parts.room.notify(job.session.number)

    def may_lease(self, session: Session) -> bool:
        """Whether the session, and its tenant, may hold one lease more."""
        parts, account = self._parts, session.account
        return parts.leases.room(session.number) and parts.held.may_lease(
            account, parts.accounts.of_free(account)
        )

    def full(self, session: Session) -> int:
        """The session's number when it holds as much as one session may, else 0."""
        bounds = self._parts.config.limits
        full = session.held_bytes >= bounds.inflight_bytes_per_session_max
        return session.number if full or not self._parts.leases.room(session.number) else 0


def usable(session: Session, namespace: OpenedNamespace, resident: Resident) -> bool:
    """Whether a block can be opened: its key version was not retired."""
    if resident.host_sealed is not namespace.host_sealed:
        return False  # ids of the two kinds never meet, unless somebody made them
    return namespace.host_sealed or resident.dek_version in session.tenant.deks


def _key_of(resident: Resident, deks: Mapping[int, bytes]) -> bytes:
    """Its key and, behind it, the commitment; to be copied before anything is waited for."""
    if resident.host_sealed:
        return NO_KEY
    if not resident.block_key:
        # Wiped with its block.
        resident.block_key = derive_key_and_commitment(deks[resident.dek_version], resident.salt)
    return resident.block_key


def _item(index: int, resident: Resident, exposure: Exposure, block_key: bytes) -> GrantItem:
    """A block as its host is told of it."""
    address = exposure.address + resident.extent.offset_bytes + RECORD_HEADER_BYTES
    return GrantItem(
        index, _tier_of(resident), RemoteSpan(exposure.rkey, address, resident.sealed_bytes),
        resident.plain_bytes, block_key[:KEY_BYTES], block_key[KEY_BYTES:],
    )  # fmt: skip


def _tier_of(resident: Resident) -> Tier:
    """Where it was found, which is flash once for each time that it was read from there."""
    tier = Tier.FLASH if resident.from_flash else Tier.MEMORY
    resident.from_flash = False
    return tier
