"""A complete record becomes a block: in the index, the books and the event log, then on flash.

Records are entered in prefix order, so that nobody hears of a block before its parent, a tenant's
turn of the loop at a time. Then they are made recent tail first, so that what many sequences share
is evicted last.

Invariants: a record enters the index only whole, and only while its key exists; from then on the
flush ends its put, and until then its memory is pinned.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence

from entresol_daemon.core.accounts import Account
from entresol_daemon.core.census import HOST_SEALED, code_of
from entresol_daemon.core.fairness import PUTS
from entresol_daemon.core.residency import Resident, ResidentState
from entresol_daemon.events import types as events
from entresol_daemon.flash.engine import Record
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.memory.slabs import Extent
from entresol_daemon.shard import turns
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.pulls import Pull, Reservation, zero_tail
from entresol_daemon.shard.removal import Removal
from entresol_proto.ids import short
from entresol_proto.seal.block import SealedHeader
from entresol_proto.status import Status
from entresol_proto.wire.data import Reason

Entered = tuple[Pull, asyncio.Future[Status]]
"""A block that is in the index, and how its flush will have ended."""

log = logging.getLogger("entresol.put")


class Entering:
    """Of all puts of a shard. `ended` is told when a reservation's flush is over."""

    def __init__(
        self, parts: Parts, removal: Removal, ended: Callable[[Reservation], None]
    ) -> None:
        self._parts = parts
        self._removal = removal
        self._ended = ended
        self.durable: dict[int, asyncio.Future[Status]] = {}  # by slot, until flushed
        self.following: set[int] = set()  # of those that no put is told of before: `Pull.follows`

    async def enter(self, account: Account, pulls: Sequence[Pull]) -> list[Entered]:
        """Enter those that are complete, and say of the others why not; what was entered."""
        parts = self._parts
        entered: list[Entered] = []
        ready = [pull for pull in pulls if pull.status is Status.OK]
        ready.sort(key=lambda pull: pull.reservation.item.position)
        try:
            begun = 0
            while begun < len(ready):
                left = len(ready) - begun
                await parts.turns.loop.take(account, turns.APPEND_COST, PUTS)
                more = parts.turns.loop.extend(account, left * turns.APPEND_COST)
                count = max(1, more // turns.APPEND_COST)
                await self._enter_some(account, ready[begun : begun + count], entered)
                begun += count
        finally:
            done = [pull for pull in ready if pull.entered_bytes]
            headers = [pull.header for pull in done if pull.header is not None]
            parts.meters.stored(account.name, headers, sum([p.entered_bytes for p in done]))
        self._make_recent(entered)
        return entered

    async def drain(self) -> None:
        """Wait until everything accepted is durable or failed."""
        while self.durable:
            await asyncio.wait(list(self.durable.values()))
            await asyncio.sleep(0)

    async def _enter_some(
        self, account: Account, pulls: Sequence[Pull], entered: list[Entered]
    ) -> None:
        """In one turn of the loop, but where others have to go first."""
        for pull in pulls:
            assert pull.extent is not None, "a record without memory"
            if not await self._has_room(account, pull, pull.extent):
                continue
            flushed = self._append(pull, pull.extent)
            if flushed is not None:
                entered.append((pull, flushed))

    async def _has_room(self, account: Account, pull: Pull, extent: Extent) -> bool:
        """Whether a record can be appended now, with nothing else awaited before."""
        length_bytes = extent.length_bytes
        if self._removal.has_room(account, length_bytes):
            return True
        if await self._removal.make_room(account, length_bytes):
            return True
        within = self._removal.within_quota(account, length_bytes)
        pull.status = Status.NO_SPACE if within else Status.QUOTA
        return False

    def _append(self, pull: Pull, extent: Extent) -> asyncio.Future[Status] | None:
        """Enter one record into the index and the open segment; None, and its status says why."""
        parts, reservation, header = self._parts, pull.reservation, pull.header
        item, account = reservation.item, reservation.session.account
        namespace_id = reservation.namespace.namespace_id
        assert header is not None, "a record without its header"
        if parts.engine.index.find(namespace_id, item.key) >= 0:
            pull.status = Status.EXISTS
            return None
        if not header.host_sealed and header.dek_version not in reservation.session.tenant.deks:
            pull.status = Status.ERASED  # its key was destroyed since: nobody could ever open it
            return None
        zero_tail(extent, RECORD_HEADER_BYTES + pull.sealed_bytes)
        record = Record(
            namespace_id, item.key, extent.view, pull.sealed_bytes, item.plain_bytes,
            item.position, pull.payload_hash,
        )  # fmt: skip
        resident = Resident(
            -1, namespace_id, item.key, account.stream, extent, ResidentState.READY, 1,
            pull.sealed_bytes, item.plain_bytes, header.salt, header.dek_version,
            header.host_sealed,
        )  # fmt: skip
        slot, flushed = parts.engine.append(account.stream, record)
        if slot < 0:
            pull.status = flushed.result()
            return None
        # First what others rely on: whatever fails below, the block is there, and is let go.
        account.flash_bytes += extent.length_bytes
        account.flash_blocks += 1
        pull.extent, pull.entered_bytes = None, extent.length_bytes  # the resident's now
        resident.slot = slot
        parts.residency.add(resident)
        flushed.add_done_callback(functools.partial(self._flushed, reservation, resident))
        self.durable[slot] = flushed
        reservation.appended = True
        self._note(pull, header, slot)
        self._publish(reservation, pull.sealed_bytes)
        return flushed

    def _note(self, pull: Pull, header: SealedHeader, slot: int) -> None:
        """Whoever keeps books of names, keys, codecs, use and room learns of a new block."""
        parts, item, account = self._parts, pull.reservation.item, pull.reservation.session.account
        namespace = pull.reservation.namespace
        code = HOST_SEALED if header.host_sealed else code_of(header.dek_version)
        parts.census.note(slot, account.stream, code)
        why, when_unix_ns = parts.history.forget(namespace.namespace_id, item.key)
        was_here = why is not Reason.NEVER_STORED or parts.engine.hides_blocks
        if was_here and parts.engine.is_haunted:
            pull.follows = True
            self.following.add(slot)
        if why is Reason.EVICTED:
            parts.meters.restored(account.name, parts.unix_ns() - when_unix_ns)
        parts.meters.usefulness.stored(slot)
        self._removal.inserted(account, pull.entered_bytes)
        parts.codecs.learn(
            account.name, namespace.namespace_id, namespace.dtype, namespace.choice,
            item.plain_bytes, pull.sealed_bytes,
        )  # fmt: skip

    def _publish(self, reservation: Reservation, sealed_bytes: int) -> None:
        item, namespace = reservation.item, reservation.namespace
        self._parts.events.publish(
            events.Kind.STORED,
            reservation.session.account.name,
            time_unix_ns=self._parts.unix_ns(),
            namespace_id=namespace.namespace_id,
            wire_keys=(item.key,),
            engine_keys=(item.engine_key,),
            parent=item.parent,
            position=item.position,
            block_tokens=namespace.block_tokens,
            token_ids_u32le=item.token_ids_u32le,
            medium=events.Medium.MEMORY,
            size_bytes=sealed_bytes,
        )

    def _make_recent(self, entered: Sequence[Entered]) -> None:
        find, slots = self._parts.engine.index.find, []
        for pull, _ in reversed(entered):
            slot = find(pull.reservation.namespace.namespace_id, pull.reservation.item.key)
            if slot >= 0:  # not removed meanwhile
                slots.append(slot)
        self._parts.engine.touch(slots)
        self._parts.valued.stored(slots)

    def _flushed(
        self, reservation: Reservation, resident: Resident, done: asyncio.Future[Status]
    ) -> None:
        if self.durable.get(resident.slot) is done:
            del self.durable[resident.slot]
            self.following.discard(resident.slot)
        status = outcome(done)
        if status is not Status.OK:
            log.error("event=put_lost status=%s block=%s", status.label, short(resident.wire_key))
        self._parts.residency.unpin(resident)
        self._ended(reservation)  # which wakes those who wait for room


def outcome(flushed: asyncio.Future[Status]) -> Status:
    """Of a block's flush that is over."""
    return Status.IO_ERROR if flushed.cancelled() else flushed.result()
