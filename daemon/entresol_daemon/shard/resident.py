"""A get of some blocks that are all in memory: answered where it is read, without a task. So is one
that wants them opened, if they are, by a STAGE or for another lease of the session.

Whatever is not ready to be answered in this very moment goes the way of every get (`gets`), which
does the same and waits. What is counted is the same on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from entresol_daemon.core.residency import Resident, ResidentState
from entresol_daemon.shard.door import Door
from entresol_daemon.shard.granting import Granting, usable
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.sessions import OpenedNamespace, PlainBlock, Session
from entresol_daemon.shard.turns import BLOCK_COST, CARRY_COST_SHIFT, WINDOW_BLOCKS_IN_TURN
from entresol_proto import limits
from entresol_proto.fabric.base import Exposure
from entresol_proto.ids import TenantName
from entresol_proto.wire.data import Fetch, Grant, OpenAt
from entresol_proto.wire.frames import FrameType
from entresol_proto.wire.packed import PackedGrant

BLOCKS_MAX_ALONE = 64  # while no other tenant uses the loop
CARRY_BYTES_MAX = 144 * limits.KIB  # 128 KiB of blocks, sealed
assert CARRY_BYTES_MAX <= limits.CARRIED_BYTES_MAX
_KEY = limits.WIRE_KEY_BYTES


class ResidentGets:
    """See the module. All calls belong to one event loop."""

    def __init__(self, parts: Parts, granting: Granting, door: Door) -> None:
        self._parts = parts
        self._granting = granting
        self._door = door

    def fetch_now(
        self, session: Session, request: Fetch, *, carry: bool = False
    ) -> Grant | PackedGrant | None:
        """The whole answer, leased; None when something of it is to be waited for or missed. The
        turn that `costing.cost_of` tells has begun. `carry`: the blocks may be in it, and are if
        they are short; then nothing is leased.

        Raises: EntresolError as `GetPath.fetch`.
        """
        blocks = len(request.keys) // _KEY
        if blocks > self._blocks_max:
            return None
        parts = self._parts
        begun_ns = parts.now_ns()
        endpoint = session.data_path()
        namespace = session.namespace(request.handle)
        shown = session.exposures if request.open_at is OpenAt.HOST else None
        residents = self._residents(session, namespace, request.keys, shown)
        if residents is None or not self._may_hold(session, residents):
            return None
        plain: list[PlainBlock] | None = None
        if request.open_at is OpenAt.DAEMON:
            if not endpoint.capabilities.private or endpoint.capabilities.revokes:
                return None  # refused, or shown block by block
            plain = _opened(session, namespace, residents)
            if plain is None:
                return None
        if not self._door.passes(session.account):
            return None
        flash = len({resident.slot for resident in residents if resident.from_flash})
        grant: Grant | PackedGrant
        cost = (blocks - WINDOW_BLOCKS_IN_TURN) * BLOCK_COST
        sealed_bytes = sum([resident.sealed_bytes for resident in residents])
        if plain is not None:
            parts.turns.loop.count(session.account, cost)
            grant = self._granting.grant_opened_now(session, namespace, residents, plain)
            self._charge(session, residents)  # the sealed blocks may leave meanwhile
            parts.residency.use(residents)
        elif carry and sealed_bytes <= CARRY_BYTES_MAX:
            cost = max(0, cost) + (sealed_bytes >> CARRY_COST_SHIFT)
            parts.turns.loop.count(session.account, cost)
            grant = self._granting.carry_now(session, residents)
            parts.residency.use(residents)
            parts.metrics.grants_carried.inc()
        else:
            parts.turns.loop.count(session.account, cost)
            grant = self._granting.grant_now(session, namespace, residents)
            self._hold(session, residents)  # nothing has been awaited since the lease was made
        took_ns = parts.now_ns() - begun_ns
        # While the answer is on its way: it leaves before the loop's next turn.
        asyncio.get_running_loop().call_soon(
            self._count, session.account.name, request.open_at, residents, flash, took_ns
        )
        return grant

    def _hold(self, session: Session, residents: Sequence[Resident]) -> None:
        """They are the session's until a lease of them ends."""
        for resident in residents:
            self._parts.residency.pin(resident)
        self._charge(session, residents)

    def _charge(self, session: Session, residents: Sequence[Resident]) -> None:
        """What the lease is charged with, until it ends."""
        held_bytes = sum([resident.extent.length_bytes for resident in residents])
        session.held_bytes += held_bytes
        self._parts.held.hold(session.account, held_bytes)

    @property
    def _blocks_max(self) -> int:
        """Of a get that is answered without a break; WINDOW_BLOCKS_IN_TURN are paid already."""
        loop_turns = self._parts.turns.loop
        alone = not loop_turns.contended and not loop_turns.waiting
        return BLOCKS_MAX_ALONE if alone else WINDOW_BLOCKS_IN_TURN

    def _count(
        self,
        tenant: TenantName,
        open_at: OpenAt,
        residents: list[Resident],
        flash: int,
        took_ns: int,
    ) -> None:
        """What `gets` counts and learns of a get."""
        parts = self._parts
        plain = sum([resident.plain_bytes for resident in residents])
        wire = plain
        if open_at is OpenAt.HOST:
            wire = sum([resident.sealed_bytes for resident in residents])
        parts.meters.served(tenant, open_at, len(residents), flash, plain, wire)
        parts.metrics.first_grant_seconds.observe(took_ns / 1e9)
        parts.metrics.request_seconds[FrameType.FETCH].observe(took_ns / 1e9)
        here = parts.residency.holds
        slots = [resident.slot for resident in reversed(residents) if here(resident)]
        parts.meters.usefulness.served(slots)
        parts.engine.touch(slots)  # tail first: the prefix is most recent
        parts.valued.used(slots)

    def _residents(
        self,
        session: Session,
        namespace: OpenedNamespace,
        keys: bytes,
        shown: Mapping[int, Exposure] | None,
    ) -> list[Resident] | None:
        """All of them in memory, their keys at hand and, where `shown` tells which are, their slabs
        shown; or None. Where the first is not, the others are not looked up."""
        found: list[Resident] = []
        lookup, get = self._parts.engine.index.lookup, self._parts.residency.get
        for some in (keys[:_KEY], keys[_KEY:]) if len(keys) > _KEY else (keys,):
            for slot in lookup(namespace.namespace_id, some).tolist():
                resident = get(slot) if slot >= 0 else None
                if (
                    resident is None
                    or resident.state is not ResidentState.READY
                    or (shown is not None and resident.extent.slab.number not in shown)
                    or not usable(session, namespace, resident)
                ):
                    return None
                found.append(resident)
        return found

    def _may_hold(self, session: Session, residents: list[Resident]) -> bool:
        """Whether all of it fits into what its session and its tenant may hold."""
        parts, account = self._parts, session.account
        room = parts.config.limits.inflight_bytes_per_session_max - session.held_bytes
        room = min(room, parts.held.get_room(account, parts.accounts.of_free(account)))
        wanted = sum([resident.extent.length_bytes for resident in residents])
        return 0 < wanted <= room and self._granting.may_lease(session)


def _opened(
    session: Session, namespace: OpenedNamespace, residents: Sequence[Resident]
) -> list[PlainBlock] | None:
    """All of them as the session's memory has them opened and its host sees them; or None."""
    if namespace.host_sealed:
        return None
    blocks, exposures, found = session.plain_blocks, session.plain_exposures, []
    for resident in residents:
        block = blocks.get((resident.namespace_id, resident.wire_key, resident.salt))
        if block is None or block.extent.slab.number not in exposures:
            return None
        found.append(block)
    return found
