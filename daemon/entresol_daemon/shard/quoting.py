"""QUOTE: how long a FETCH would take as things are, from live queues; and how long those took.

Invariants: a quote moves, holds and touches nothing; an absent key and one of another tenant take
the same path; thousands of keys take the loop a tenant's turn at a time; what is learned from a
tenant's gets is used for its own quotes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from entresol_daemon.core.quote import Costs, Errors, Load, Times, Work, coarse, corrected, expect
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.shard.gets import WINDOW_BLOCKS_MAX, GetPath
from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.sessions import Session
from entresol_daemon.shard.turns import (
    BLOCK_COST,
    FRAME_COST,
    LOOP_TURN_COST,
    QUOTE_KEY_COST_SHIFT,
    REQUEST_COST,
    WINDOW_BLOCKS_IN_TURN,
    WINDOW_COST,
)
from entresol_proto import limits
from entresol_proto.ids import TenantName
from entresol_proto.wire.data import Fetch, Grant, OpenAt, Tier
from entresol_proto.wire.quote import Quote, Quoted

TENANTS_REMEMBERED_MAX = 1_024
ASKED_LATELY_NS = 60_000_000_000  # gets of a tenant that asked for no quote since are not timed
OPEN_BYTES_PER_NS = 4.0  # of one thread, before anything was seen
GETS_REMEMBERED = 16
Numbers = npt.NDArray[np.int64]
_US = 1_000
_COSTS = Costs(
    request_ns=(REQUEST_COST + WINDOW_COST) * _US,
    window_ns=(WINDOW_COST + FRAME_COST) * _US,
    block_ns=BLOCK_COST * _US,
    window_blocks=WINDOW_BLOCKS_MAX,
    window_blocks_contended=WINDOW_BLOCKS_IN_TURN,
)
_KEY = limits.WIRE_KEY_BYTES
_NONE, _MEMORY, _FLASH = (int(tier) for tier in (Tier.NONE, Tier.MEMORY, Tier.FLASH))
_TIERS = tuple(Tier)


@dataclass(slots=True)
class _Known:
    """What is known of one tenant: errors by (opened by the daemon, needed the flash)."""

    asked_ns: int
    get_ns: float = 0.0  # about how long its gets are inside the door
    errors: dict[tuple[bool, bool], Errors] = field(default_factory=dict)

    def of(self, opened: bool, flash: bool) -> Errors:
        return self.errors.setdefault((opened, flash), Errors())


class Quoting:
    """Quotes of one shard."""

    def __init__(self, parts: Parts, gets: GetPath) -> None:
        self._parts = parts
        self._gets = gets
        self._known: dict[TenantName, _Known] = {}

    async def quote(self, session: Session, request: Quote) -> Quoted:
        """The answer to a QUOTE. Raises: EntresolError (BAD_REQUEST), QuotaError (BUSY)."""
        parts, account = self._parts, session.account
        space, keys = session.namespace(request.handle).namespace_id, request.keys
        loop_turns = parts.turns.loop
        tiers = bytearray()
        sealed = flash = record = from_flash = 0
        at = 0
        while at < len(keys):
            if at:
                await loop_turns.take(account, LOOP_TURN_COST)
            wanted = -(-((len(keys) - at) // _KEY) >> QUOTE_KEY_COST_SHIFT)
            stretch = loop_turns.extend(account, wanted)
            end = at + (stretch << QUOTE_KEY_COST_SHIFT) * _KEY
            slots = parts.engine.index.lookup(space, keys[at:end])
            found = self._found(slots, stop=request.prefix)
            tiers += found.tiers
            sealed, flash = sealed + found.sealed_bytes, flash + found.flash_bytes
            record, from_flash = record + found.record_bytes, from_flash + found.read_bytes
            at = end
            if request.prefix and found.gap:  # the rest is a gap, whatever is there
                break
        tiers += bytes(len(keys) // _KEY - len(tiers))
        memory_blocks, flash_blocks = tiers.count(_MEMORY), tiers.count(_FLASH)
        opened = request.open_at is OpenAt.DAEMON
        work = Work(memory_blocks, flash_blocks, record, from_flash, self._open_ns(opened, sealed))
        times = self._times(session, work, opened)
        blocks = parts.metrics.quotes.blocks
        for tier in _TIERS:
            if count := tiers.count(int(tier)):
                blocks[tier].inc(count)
        most = limits.DEADLINE_NS_MAX
        return Quoted(
            sealed, flash, coarse(times.wait_ns, most), coarse(times.memory_ns, most),
            coarse(times.flash_ns, most), coarse(times.expected_ns, most),
            coarse(times.high_ns, most), bytes(tiers),
        )  # fmt: skip

    def times(self, session: Session) -> bool:
        """Whether the gets of this session are timed, to learn from."""
        known = self._known.get(session.account.name)
        return known is not None and self._parts.now_ns() - known.asked_ns <= ASKED_LATELY_NS

    def watch(
        self, session: Session, request: Fetch, emit: Callable[[Grant], None]
    ) -> Callable[[Grant], None]:
        """`emit`, which also learns how long the get took; as it is for who asks for no quotes."""
        now_ns = self._parts.now_ns()
        known = self._known.get(session.account.name)
        if known is None or now_ns - known.asked_ns > ASKED_LATELY_NS:
            return emit
        load, opened = self._load(session, known, now_ns), request.open_at is OpenAt.DAEMON
        blocks = [0, 0, 0]
        sizes = [0, 0, 0]

        def watching(grant: Grant) -> None:
            for item in grant.items:
                blocks[item.tier] += 1
                sizes[item.tier] += item.span.length_bytes
            emit(grant)
            if grant.final:
                self._learn(known, load, opened, now_ns, blocks, sizes)

        return watching

    def _learn(
        self, known: _Known, load: Load, opened: bool, begun_ns: int, blocks: list[int],
        sizes: list[int],
    ) -> None:  # fmt: skip
        actual_ns = self._parts.now_ns() - begun_ns
        known.get_ns += (actual_ns - known.get_ns) / GETS_REMEMBERED
        if not any(blocks):
            return
        work = Work(
            blocks[_MEMORY], blocks[_FLASH], sum(sizes), sizes[_FLASH],
            self._open_ns(opened, sum(sizes)),
        )  # fmt: skip
        times = expect(load, self._gets.reads.speed, _COSTS, work)
        errors = known.of(opened, work.flash_blocks > 0)
        told = corrected(times, known.of(opened, False), errors if work.flash_blocks else None)
        tier = Tier.FLASH if work.flash_blocks else Tier.MEMORY
        error = self._parts.metrics.quotes.error
        error[tier].observe(actual_ns / max(told.expected_ns, 1.0))
        errors.note(actual_ns, times.expected_ns)

    def _times(self, session: Session, work: Work, opened: bool) -> Times:
        now_ns = self._parts.now_ns()
        known = self._remember(session.account.name, now_ns)
        times = expect(self._load(session, known, now_ns), self._gets.reads.speed, _COSTS, work)
        flash = known.of(opened, True) if work.flash_blocks else None
        return corrected(times, known.of(opened, False), flash)

    def _load(self, session: Session, known: _Known, now_ns: int) -> Load:
        parts, account, door = self._parts, session.account, self._gets.door
        door_ns = 0.0
        if door.waiting or door.inside >= door.at_once:
            before = (door.waiting + 1) / door.at_once
            door_ns = min(known.get_ns * before, float(door.patience_ns))
        room = parts.config.limits.inflight_bytes_per_session_max - session.held_bytes
        room = min(room, parts.held.get_room(account, parts.accounts.of_free(account)))
        flash = self._gets.reads.load(account.name, account.weight, now_ns)
        return Load(flash, door_ns, parts.turns.loop.tenants_waiting, max(0, room))

    def _open_ns(self, opened: bool, sealed_bytes: int) -> float:
        threads = max(1, self._parts.config.sealing_threads)
        return sealed_bytes / OPEN_BYTES_PER_NS / threads if opened else 0.0

    def _remember(self, name: TenantName, now_ns: int) -> _Known:
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= TENANTS_REMEMBERED_MAX:
                del self._known[min(self._known, key=lambda each: self._known[each].asked_ns)]
            known = self._known[name] = _Known(now_ns)
        known.asked_ns = now_ns
        return known

    def _found(self, slots: Numbers, *, stop: bool) -> _Found:
        """What is known of these slots; with `stop` only up to the first that is absent."""
        absent = np.flatnonzero(slots < 0)
        gap = bool(absent.size)
        if stop and gap:
            slots = slots[: int(absent[0])]
        parts = self._parts
        tiers = np.where(slots < 0, _NONE, _FLASH).astype(np.uint8)
        tiers[parts.residency.have(slots)] = _MEMORY
        if self._gets.loading:  # what is on its way up comes from flash
            rising = self._gets.rising.intersection(slots.tolist())
            tiers[np.isin(slots, list(rising))] = _FLASH
        here = tiers != _NONE
        sizes = parts.engine.index.sealed_bytes[slots[here]].astype(np.int64)
        read = sizes[tiers[here] == _FLASH]
        return _Found(
            tiers.tobytes(), gap, int(sizes.sum()), int(read.sum()), _records_bytes(sizes),
            _records_bytes(read),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Found:
    """Of some keys: a byte per key, whether one is absent, and bytes: sealed, of these on flash,
    and the same with what surrounds them."""

    tiers: bytes
    gap: bool
    sealed_bytes: int
    flash_bytes: int
    record_bytes: int
    read_bytes: int


def _records_bytes(sealed_bytes: Numbers) -> int:
    """What so long blocks take together, with the headers and padding of their records."""
    pages = -(-(sealed_bytes + RECORD_HEADER_BYTES) // limits.ALIGN_BYTES)
    return int(pages.sum()) * limits.ALIGN_BYTES
