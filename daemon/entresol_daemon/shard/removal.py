"""How blocks leave: eviction, quota, forget, corruption, lost writes, erased tenants.

Room on flash is made here, one eviction at a time. Whatever the reason, the engine tells `gone` in
the same moment in which the index lets go of the slots (they may be reused in the next): memory
copy dropped, usage refunded, history written, event published, counter moved.

Invariant: a block that left the index is never served again, from memory or from flash.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from entresol_daemon.core.accounts import Account
from entresol_daemon.core.departed import Departed
from entresol_daemon.core.eviction import (
    ReinsertBudget,
    SegmentRanking,
    Short,
    TenantShare,
    Victim,
    VictimReason,
    choose_victim,
    keep_blocks,
    median_touch,
)
from entresol_daemon.core.residency import Resident
from entresol_daemon.core.usefulness import Use
from entresol_daemon.events import types as events
from entresol_daemon.flash.evict import Keep
from entresol_daemon.flash.index import Slots
from entresol_daemon.flash.model import Removed, RemoveReason
from entresol_daemon.flash.tombstones import TOMBSTONE_BYTES
from entresol_daemon.metrics import OF_HOSTS
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.turns import (
    DROP_COST,
    LOOP_TURN_COST,
    NAMESPACE_COST,
    REMOVAL_COST,
    Stretches,
)
from entresol_proto import limits
from entresol_proto.ids import TenantName, short
from entresol_proto.status import DeviceError, QuotaError, Status
from entresol_proto.wire.data import Reason

BARRIER_EVICTIONS_MAX = 16  # for the room that removals take to be written down

_REASONS = {
    RemoveReason.EVICTED: (Reason.EVICTED, events.Reason.EVICTED),
    RemoveReason.FORGOTTEN: (Reason.FORGOTTEN, events.Reason.FORGOTTEN),
    RemoveReason.CORRUPT: (Reason.CORRUPT, events.Reason.FLASH),
    RemoveReason.NAMESPACE_DROPPED: (Reason.ERASED, events.Reason.ERASED),
    RemoveReason.UNREADABLE: (Reason.ERASED, events.Reason.ERASED),
    RemoveReason.IO_ERROR: (Reason.LOST, events.Reason.LOST),
    RemoveReason.NO_SPACE: (Reason.LOST, events.Reason.LOST),
}

_MAY_RETURN = frozenset({Reason.EVICTED, Reason.CORRUPT, Reason.LOST})  # perhaps no tombstone

HIDDEN_SHARE = 64  # one part in so many of flash, for removals of what may never have been there
SPARE_SEGMENTS_MAX = 4  # kept free ahead of need
SEGMENTS_PER_SPARE = 16  # of a small data file fewer

log = logging.getLogger("entresol.removal")


class Removal:
    """All removals of a shard."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._making_room = asyncio.Lock()
        self.departed = Departed()
        self._budget = ReinsertBudget()
        self._ranking = SegmentRanking(self._median_of)
        self._ranking.prepare(parts.engine.stock)
        self._found_at: str | None = None  # where what is dropped as corrupt was found to be so
        self._ahead: asyncio.Task[None] | None = None
        self._stopped = False
        segments = parts.engine.capacity_bytes // parts.engine.segment_bytes
        self._spare = min(SPARE_SEGMENTS_MAX, segments // SEGMENTS_PER_SPARE)
        parts.engine.listen(self.gone)

    @property
    def evicts(self) -> bool:
        """True while what is written makes others go."""
        return self._parts.engine.spare_segments <= self._spare

    def inserted(self, account: Account, record_bytes: int) -> None:
        """A new record was appended: reinsertion may follow in proportion, and room for the next
        is made ahead, so that nobody's put waits for what another one's fills up."""
        self._budget.inserted(record_bytes)
        if self._ahead is None and self._parts.engine.spare_segments < self._spare:
            self._ahead = asyncio.get_running_loop().create_task(self._evict_ahead(account))

    async def _evict_ahead(self, account: Account) -> None:
        engine = self._parts.engine
        try:
            while engine.spare_segments < self._spare and not self._stopped:
                async with self._making_room:
                    if not await self._evict_once(account, 0):
                        return
        except Exception:
            log.exception("event=evict_ahead_failed")
        finally:
            self._ahead = None

    async def stop(self) -> None:
        """Make no more room ahead; return when nothing of that is under way."""
        self._stopped = True
        if self._ahead is not None:
            await asyncio.wait({self._ahead})

    async def make_room(self, account: Account, record_bytes: int) -> bool:
        """Make a record of this tenant appendable now, evicting if needed.

        Returns False when nothing may be evicted. The caller must append before it awaits again.
        """
        while not self.has_room(account, record_bytes):
            async with self._making_room:
                if self.has_room(account, record_bytes):
                    return True
                if not await self._evict_once(account, record_bytes):
                    return self.has_room(account, record_bytes)
        return True

    async def barrier(self, account: Account) -> None:
        """Return when every removal so far is durable; this tenant asked for it. To write removals
        down takes room, too: where there is none left, blocks are evicted for it.

        Raises: DeviceError.
        """
        engine = self._parts.engine
        for _ in range(BARRIER_EVICTIONS_MAX):
            try:
                await engine.barrier()
                return
            except DeviceError as error:
                if error.status is not Status.NO_SPACE:
                    raise
            async with self._making_room:
                if not await self._evict_once(account, 0):
                    break
        await engine.barrier()

    async def shrink_to_quota(self, account: Account) -> None:
        """Evict a tenant's blocks until its (new) quota holds, or it is erased. Whoever needs room
        for a put comes in between."""
        books = self._parts.accounts.by_stream
        while not self.within_quota(account, 0) and books.get(account.stream) is account:
            async with self._making_room:
                if self.within_quota(account, 0) or not await self._evict_once(account, 0):
                    return

    def has_room(self, account: Account, record_bytes: int) -> bool:
        """Whether a record of this tenant can be appended now, and nothing has to go for it."""
        room = self._parts.engine.room_for(account.stream, record_bytes)
        return room and self.within_quota(account, record_bytes)

    def within_quota(self, account: Account, record_bytes: int) -> bool:
        """Whether one more record of so many bytes (0: none) is within a tenant's own quota."""
        quota, blocks = account.flash_quota_bytes, account.index_quota_blocks
        more = 1 if record_bytes else 0
        return not (quota and account.flash_bytes + record_bytes > quota) and not (
            blocks and account.flash_blocks + more > blocks
        )

    async def _evict_once(self, account: Account, record_bytes: int) -> bool:
        engine = self._parts.engine
        if engine.failed or engine.closing:
            return False  # it frees nothing any more: what is there is only read
        shares = [
            TenantShare(
                stream=each.stream,
                used_bytes=each.flash_bytes + (record_bytes if each is account else 0),
                quota_bytes=each.flash_quota_bytes,
                weight=each.weight,
                used_blocks=each.flash_blocks + (each is account and record_bytes > 0),
                quota_blocks=each.index_quota_blocks,
            )
            for each in self._parts.accounts.by_name.values()
        ]
        # Whatever its own segments look like: a quota costs nobody else anything.
        alone = not self.within_quota(account, record_bytes)
        victim = choose_victim(
            engine.stock, shares, capacity_bytes=engine.capacity_bytes,
            now_touch=engine.index.now_touch, ranking=self._ranking, budget=self._budget,
            short=self._short(), capacity_blocks=engine.index.capacity,
            choosers=self._parts.valued.choosers, only=account.stream if alone else None,
        )  # fmt: skip
        if victim is None:
            if alone:
                return await self._evict_unread(account.stream)
            return await self._evict_idle() or await self._evict_open(shares)
        keep: Keep = partial(self._keep, victim)
        if victim.reason is VictimReason.CONDEMNED:
            keep = _keep_all
        if victim.reason is VictimReason.OVER_SHARE_OPEN:
            keep = self._newer_half
        removed = await engine.evict(victim.segment, keep)
        log.info(
            "event=evicted segment=%d blocks=%d reason=%s",
            victim.segment, len(removed), victim.reason.value,
        )  # fmt: skip
        return True

    async def _evict_idle(self) -> bool:
        """Nothing is sealed: an open segment of which nothing is left goes first. False when there
        is none, or it only made room for the removals that were in it."""
        engine = self._parts.engine
        if not engine.stock.idle:
            return False
        free, number = engine.free_segments, next(iter(engine.stock.idle))
        await engine.evict(number)
        log.info("event=evicted segment=%d blocks=0 reason=idle", number)
        return engine.free_segments > free

    async def _evict_open(self, shares: Sequence[TenantShare]) -> bool:
        """Many tenants have a segment each, or tiny blocks filled the index.

        The tenant with the most gives its open segment; for want of index entries alone, only the
        older half of it. Where there is none, one that the opening could not read. False when
        there is none of those either.
        """
        engine = self._parts.engine
        weighed = {each.stream: each.used(self._short()) / each.weight for each in shares}
        shelves = [shelf for stream, shelf in engine.stock.opened.items() if stream in weighed]
        opened = [each for shelf in shelves for each in shelf.values()]
        if not opened:
            return await self._evict_unread(None)
        chosen = max(opened, key=lambda each: (weighed[each.stream], each.segment))
        removed = await engine.evict(chosen.segment, () if engine.index.free else self._newer_half)
        log.info("event=evicted segment=%d blocks=%d reason=open", chosen.segment, len(removed))
        return True

    async def _evict_unread(self, stream: bytes | None) -> bool:
        """Nothing else is left, of this stream or at all: one that the opening could not read."""
        engine = self._parts.engine
        unread = engine.stock.unread.values()
        found = [
            each.segment
            for each in unread
            if stream is None or (each.stream == stream and each.live_blocks)
        ]
        if not found:
            return False
        removed = await engine.evict(found[0], () if stream is not None else _keep_all)
        log.warning("event=evicted segment=%d blocks=%d reason=unread", found[0], len(removed))
        return True

    def _short(self) -> Short:
        return Short.BYTES if self._parts.engine.index.free else Short.BLOCKS

    def _newer_half(self, slots: Slots) -> Slots:
        touched = self._parts.engine.index.last_touch[slots]
        kept: Slots = slots[np.argsort(touched, kind="stable")[(len(slots) + 1) // 2 :]]
        return kept

    def _median_of(self, segment: int) -> int:
        engine = self._parts.engine
        return median_touch(engine.index.last_touch[engine.segment_slots(segment)])

    def _keep(self, victim: Victim, slots: Slots) -> Slots:
        index, valued, stream = self._parts.engine.index, self._parts.valued, victim.charged_stream
        sealed = index.sealed_bytes[slots]
        mask: npt.NDArray[np.bool_] | None = np.zeros(len(slots), np.bool_)
        if victim.reinsert:
            mask = valued.keep(stream, slots, self._budget.room_bytes)
        if mask is None:
            mask = keep_blocks(
                index.last_touch[slots], index.position[slots], sealed,
                now_touch=index.now_touch, budget_bytes=self._budget.room_bytes,
            )  # fmt: skip
        valued.evicted(stream, slots[~mask])
        kept_bytes = int(sealed[mask].sum())
        self._budget.spend(kept_bytes)
        weight = self._parts.accounts.weight_of(stream)
        self._parts.admission.charge(kept_bytes, owner=stream, weight=weight)
        return slots[mask]

    def forget(self, slots: Iterable[int]) -> int:
        """Drop blocks on request; a crash brings none back once `engine.barrier` returned."""
        count = 0
        for slot in slots:
            self._parts.engine.remove(slot, RemoveReason.FORGOTTEN)
            count += 1
        return count

    def forget_absent(
        self, account: Account, namespace_id: bytes, keys: bytes, slots: Slots
    ) -> None:
        """Of what is not here, what may be on flash all the same: what was evicted lately; where an
        opening did not find all there is, anything. A crash brings it back no more either, once
        `engine.barrier` returned. `slots` belong to the 16-byte keys; each key is told once."""
        history, size, doomed = self._parts.history, limits.WIRE_KEY_BYTES, []
        hidden = self._parts.engine.hides_blocks and not self._parts.engine.failed
        for at in np.flatnonzero(slots < 0).tolist():
            key = keys[size * at : size * (at + 1)]
            why = history.why(namespace_id, key)[0]
            known = why in _MAY_RETURN
            if known or (hidden and why is not Reason.FORGOTTEN and self._may_hide(account)):
                now = self._parts.unix_ns()
                history.record(namespace_id, key, Reason.FORGOTTEN, now, account.stream)
                doomed.append(key)
        self._parts.engine.bury_absent(namespace_id, doomed)

    def _may_hide(self, account: Account) -> bool:
        """Whether a tenant may have a removal written down of what perhaps never was: all of them
        together take HIDDEN_SHARE of flash for those at most."""
        parts = self._parts
        share = parts.engine.capacity_bytes // (HIDDEN_SHARE * TOMBSTONE_BYTES)
        account.hidden_forgets += 1
        if account.hidden_forgets <= share // max(1, len(parts.accounts.by_name)):
            return True
        parts.engine.stats.tombstones_lost += 1
        if not account.hidden_forgets & (account.hidden_forgets - 1):  # at every doubling
            log.error(
                "event=removals_not_written tenant=%s effect='blocks that the opening did not find "
                "may be back'", account.name,
            )  # fmt: skip
        return False

    def corrupt(self, resident: Resident, *, where: str) -> None:
        """Drop a block that failed verification; counted, published, never served again. Only what
        is of no host's making (`metrics.OF_HOSTS`) is an error of ours or of the drive."""
        parts = self._parts
        if not parts.residency.holds(resident):
            return  # removed meanwhile: its slot may belong to another block now
        place = short(resident.namespace_id), short(resident.wire_key)
        if where == "seal":
            account = parts.accounts.by_stream.get(resident.owner)
            name = "" if account is None else account.name
            log.warning("event=sealed_wrongly tenant=%s namespace=%s block=%s", name, *place)
        elif where not in OF_HOSTS:
            log.error("event=corrupt where=%s namespace=%s block=%s", where, *place)
        self._drop_corrupt(resident.slot, where)

    async def sealed_wrongly(self, account: Account, residents: Sequence[Resident]) -> None:
        """Drop blocks of a tenant that do not open, which is its hosts' doing: in its turns."""
        with contextlib.suppress(QuotaError):  # see `rest`
            await self._parts.turns.loop.take(account, LOOP_TURN_COST)
        stretches = self.stretches_of(account)
        for resident in residents:
            self.corrupt(resident, where="seal")
            await self.rest(stretches, REMOVAL_COST)

    def _drop_corrupt(self, slot: int, where: str) -> None:
        self._found_at = where
        try:
            self._parts.engine.remove(slot, RemoveReason.CORRUPT)
        finally:
            self._found_at = None

    def damaged(self, slot: int, status: Status) -> None:
        """Drop a live block that the scrubber found CORRUPT, or that flash refuses for good."""
        parts = self._parts
        index = parts.engine.index
        log.error(
            "event=%s where=scrub namespace=%s block=%s",
            status.label, short(index.namespace_of(slot)), short(index.key_of(slot)),
        )  # fmt: skip
        if status is Status.CORRUPT:
            self._drop_corrupt(slot, "scrub")
        else:
            parts.engine.remove(slot, RemoveReason.IO_ERROR)

    def without_key(self, resident: Resident) -> None:
        """Drop a block whose key version was destroyed: it could only stand in another's way."""
        if self._parts.residency.holds(resident):
            self._parts.engine.remove(resident.slot, RemoveReason.UNREADABLE)

    def namespaces_of(self, stream: bytes) -> list[bytes]:
        """Every namespace that has a block in a tenant's segments."""
        engine, index = self._parts.engine, self._parts.engine.index
        streams = map(engine.stream_of, range(engine.segment_count))
        mine = np.array([each == stream for each in streams], np.bool_)
        slots = index.live_slots()
        numbers, found = index.namespace_numbers()
        counts = np.bincount(numbers[slots[mine[index.segment[slots]]]])
        return [found[number] for number in np.flatnonzero(counts).tolist()]

    async def drop_stream(self, account: Account) -> int:
        """Drop every block of a tenant whose sessions have ended (erase), others' turns between;
        returns how many. A crash brings none back once `engine.barrier` returned."""
        engine, stretches = self._parts.engine, self.stretches_of(account)
        dropped = 0
        seen: set[bytes] = set()
        while namespaces := self.namespaces_of(account.stream):  # again: some were moved meanwhile
            seen.update(namespaces)
            for each in namespaces:
                for removed in engine.drop_namespace(each):
                    dropped += len(removed)
                    await self.rest(stretches, len(removed) * DROP_COST)
        for each in sorted(seen):
            engine.bury_namespace(each)
            await self.rest(stretches, NAMESPACE_COST)
        return dropped

    def stretches_of(self, account: Account) -> Stretches:
        """To be spent in `rest`."""
        return Stretches(self._parts.turns.loop, account)

    async def rest(self, stretches: Stretches, cost: int) -> None:
        """So much of a long removal was done: others come in between."""
        try:
            await stretches.spend(cost)
        except QuotaError:
            await asyncio.sleep(0)  # its own requests fill the line; this must end all the same

    def gone(self, removed: Sequence[Removed]) -> None:
        """The index let go of these in this very moment. Called by the engine."""
        parts = self._parts
        parts.valued.learn()  # while their slots tell of them
        now = parts.unix_ns()
        groups: dict[tuple[bytes, bytes, RemoveReason], list[bytes]] = {}
        evicted: dict[TenantName, list[tuple[Use, int]]] = {}
        for row in removed:
            parts.residency.drop_slot(row.slot)
            parts.census.gone(row.slot, row.stream)
            use = parts.meters.usefulness.gone(row.slot)
            reason = _REASONS[row.reason][0]
            parts.history.record(row.namespace_id, row.wire_key, reason, now, row.stream)
            place = (row.stream, row.namespace_id, row.reason)
            groups.setdefault(place, []).append(row.wire_key)
            account = parts.accounts.by_stream.get(row.stream)
            if account is not None:
                account.flash_bytes -= row.extent_bytes
                account.flash_blocks -= 1
                assert min(account.flash_bytes, account.flash_blocks) >= 0, "refunded twice"
                if row.reason is RemoveReason.EVICTED:
                    evicted.setdefault(account.name, []).append((use, row.extent_bytes))
        for name, uses in evicted.items():
            parts.meters.evicted(name, uses)
        for (stream, namespace_id, cause), keys in groups.items():
            self.departed.note(namespace_id)
            self._publish(stream, namespace_id, cause, tuple(keys), now)
        parts.room.notify()

    def _publish(
        self,
        stream: bytes,
        namespace_id: bytes,
        cause: RemoveReason,
        keys: tuple[bytes, ...],
        now: int,
    ) -> None:
        reason = _REASONS[cause][1]
        if cause is RemoveReason.CORRUPT:
            if self._found_at is None:  # by an eviction, which looks at what it keeps
                log.error(
                    "event=corrupt where=flash namespace=%s blocks=%d",
                    short(namespace_id), len(keys),
                )  # fmt: skip
            self._parts.meters.corrupt(self._found_at or reason.label, len(keys))
            if self._found_at in OF_HOSTS:
                reason = events.Reason.HOST_REPORT
        self._parts.meters.removed(reason.label, len(keys))
        account = self._parts.accounts.by_stream.get(stream)
        if account is None or cause is RemoveReason.NAMESPACE_DROPPED:
            return  # nobody to tell, or TENANT_ERASED says it all
        self._parts.events.publish(
            events.Kind.CORRUPT if cause is RemoveReason.CORRUPT else events.Kind.REMOVED,
            account.name,
            time_unix_ns=now,
            namespace_id=namespace_id,
            wire_keys=keys,
            reason=reason,
        )


def _keep_all(slots: Slots) -> Slots:
    """The device failed here, not the blocks: whatever can still be read moves elsewhere."""
    return slots
