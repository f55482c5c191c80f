"""What is known of the use of blocks, per slot and per tenant, for eviction by worth. Pure.

The owner tells of every block that is stored, used and goes; `ranking` then chooses for a tenant,
or is None while LRU rules: too little is known, worth fell behind, or there are too many tenants.

Invariants: memory is what `memory_bytes` says from the start, and `TENANT_BYTES` for each of at
most TENANTS_MAX tenants; nothing of it is persistent, so after a start every block is as new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from entresol_daemon.core.trial import Bools
from entresol_daemon.core.worth import (
    CLASSES,
    HOLES,
    LEDGER_BYTES,
    U8,
    U64,
    Ghosts,
    Ints,
    Ledger,
    repeats,
)
from entresol_daemon.core.worth_ranking import Columns, Slots, WorthRanking

TENANTS_MAX = 16  # the others' blocks leave by LRU
TENANT_BYTES = LEDGER_BYTES + 16 * HOLES
GHOSTS_PER_SLOT = 4  # of 2 bytes


@dataclass(frozen=True, slots=True)
class Standing:
    """How a tenant's blocks are chosen: whether worth rules, and what was really found, and what
    worth alone would find, beyond LRU's, in hits per reference."""

    stream: bytes
    rules: bool
    gain: float
    promise: float


class Values:
    """Of a shard. `slots_of` gives a segment's live blocks, `columns_of` what is known of them;
    `slots_max` is the index's size; `ghosts` is for how many evicted blocks their use is remembered
    (0: GHOSTS_PER_SLOT for each slot)."""

    def __init__(
        self, slots_max: int, slots_of: Callable[[int], Slots],
        columns_of: Callable[[Slots], Columns], *, ghosts: int = 0,
    ) -> None:  # fmt: skip
        self.uses: U8 = np.zeros(slots_max, np.uint8)
        self.uses.fill(0)  # pages are taken now, so that memory does not grow later
        self._ghosts = Ghosts(ghosts or GHOSTS_PER_SLOT * slots_max)
        self._slots_of = slots_of
        self._columns_of = columns_of
        self._tenants: dict[bytes, WorthRanking] = {}

    @property
    def memory_bytes(self) -> int:
        """Without the tenants'."""
        return self.uses.nbytes + self._ghosts.memory_bytes

    def _of(self, stream: bytes) -> WorthRanking | None:
        found = self._tenants.get(stream)
        if found is None and len(self._tenants) < TENANTS_MAX:
            found = self._tenants[stream] = WorthRanking(Ledger(), self._slots_of, self._columns_of)
        return found

    def told(
        self, stream: bytes, slots: Slots, keys: U64, touch: Ints, put: Bools, found: Bools
    ) -> None:
        """Blocks of a tenant in these slots were `put`, or `found` and given to a host, or neither:
        stored in vain, behind a gap. At these ticks, in order. `keys`: 64 random bits of each one's
        name."""
        uses = self.uses[slots] + np.uint8(1)
        if put.any():
            uses[put] = self._ghosts.uses(keys[put])
        again, before = repeats(slots)
        for place, earlier in zip(again.tolist(), before.tolist(), strict=True):  # in order
            if not put[place]:
                uses[place] = min(uses[earlier], CLASSES - 1) + 1
        uses = np.minimum(uses, CLASSES - 1).astype(np.uint8)
        self.uses[slots] = uses
        tenant = self._of(stream)
        if tenant is not None:
            tenant.ledger.note(keys, uses, touch, found)

    def evicted(self, stream: bytes, slots: Slots, keys: U64, columns: Columns) -> None:
        """These are about to go; `columns` are theirs."""
        self._ghosts.gone(keys, self.uses[slots])
        tenant = self._tenants.get(stream)
        if tenant is not None:
            tenant.holes.cut(columns.last_touch, columns.position)

    def ranking(self, stream: bytes, live_blocks: int) -> WorthRanking | None:
        """Who chooses among the tenant's segments; it has so many blocks. None: LRU."""
        tenant = self._tenants.get(stream)
        if tenant is not None:
            tenant.ledger.fit(live_blocks)
        return self.keeper(stream)

    def keeper(self, stream: bytes) -> WorthRanking | None:
        """Who says what of a chosen segment is kept. None: LRU."""
        tenant = self._tenants.get(stream)
        if tenant is None or not (tenant.ledger.ready and tenant.ledger.trial.rules):
            return None
        return tenant

    def report(self) -> list[Standing]:
        """Of each tenant."""
        return [
            Standing(
                stream, self.keeper(stream) is not None, tenant.ledger.trial.gain,
                tenant.ledger.trial.promise,
            )
            for stream, tenant in self._tenants.items()
        ]  # fmt: skip

    def forget(self, stream: bytes) -> None:
        """A tenant is gone, and all that was learned of it."""
        self._tenants.pop(stream, None)
