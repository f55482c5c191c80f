"""Which blocks are in memory, who holds them, and which may go. Pure.

A resident block is one record in one extent. It is pinned while anybody needs it (a lease, a read
from flash, a write to flash) and evictable otherwise, least recently used first within its owner.

Invariants: an extent is freed exactly once, when its resident has left the table and its last pin
is gone; a slot has at most one resident.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from entresol_daemon.memory.ranges import align_up
from entresol_daemon.memory.slabs import Extent, SlabPool


class ResidentState(enum.Enum):
    LOADING = "loading"  # being read from flash or pulled from a host
    READY = "ready"  # sealed bytes are complete and verified
    DEAD = "dead"  # removed or failed; goes when the last pin does


@dataclass(slots=True, eq=False)
class Resident:
    """One block in memory. `sealed_bytes` counts from the end of the engine's record header."""

    slot: int
    namespace_id: bytes
    wire_key: bytes
    owner: bytes
    extent: Extent
    state: ResidentState
    pins: int = 0
    sealed_bytes: int = 0
    plain_bytes: int = 0
    salt: bytes = field(default=b"", repr=False)
    dek_version: int = 0  # of the tenant's keys here, or of its own where it is host-sealed
    host_sealed: bool = False
    from_flash: bool = False  # for the tier of the first answer


def _equal(_owner: bytes) -> int:
    return 1


class Residency:
    """The table of resident blocks, over a slab pool. `weight_of` is an owner's share of it."""

    def __init__(self, pool: SlabPool, weight_of: Callable[[bytes], int] = _equal) -> None:
        self.pool = pool
        self._weight_of = weight_of
        self._by_slot: dict[int, Resident] = {}
        self._here = bytearray()  # by slot: 1 while it is a key of the table
        self._idle: dict[bytes, OrderedDict[int, Resident]] = {}
        self.idle_bytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._by_slot)

    def get(self, slot: int) -> Resident | None:
        return self._by_slot.get(slot)

    def have(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Of each slot, whether its block is in memory or on its way there. For thousands at once:
        slots that were never in memory may be beyond the end of what is kept of that."""
        kept = len(self._here)
        if not kept:
            return np.zeros(len(slots), np.bool_)
        here = np.frombuffer(self._here, np.bool_)[np.minimum(slots, kept - 1)]
        return here & (slots >= 0) & (slots < kept)

    def allocate(self, owner: bytes, length_bytes: int, owner_bytes_max: int) -> Extent | None:
        """Memory for a record, evicting idle residents if needed; None when all is pinned.

        An owner at its own limit only displaces its own; otherwise the owner that holds the most
        memory for its weight gives way first, of those with anything idle, and only to one that
        holds less: whoever is within its fair share loses nothing to one that pins more than that.
        A record that cannot fit in any case displaces nothing.
        """
        length = align_up(length_bytes)
        if length > min(owner_bytes_max, self.pool.budget_bytes):
            return None
        while True:
            own = self.pool.used_bytes(owner)
            over = own + length > owner_bytes_max
            if not over:
                extent = self.pool.allocate(owner, length)
                if extent is not None:
                    return extent
            if not self._evict_one(owner if over else self._giving_way(owner)):
                return None

    def add(self, resident: Resident) -> None:
        """Enter a block, pinned or not. The slot must be free."""
        assert resident.slot not in self._by_slot, resident.slot
        self._by_slot[resident.slot] = resident
        if resident.slot >= len(self._here):
            self._here.extend(bytes(resident.slot + 1))  # at least doubled
        self._here[resident.slot] = 1
        if resident.pins == 0:
            self._rest(resident)

    def pin(self, resident: Resident) -> None:
        """Keep it until `unpin`. Its memory must not have been freed yet."""
        assert resident.pins or resident.state is not ResidentState.DEAD, resident.slot
        if resident.pins == 0:
            self._wake(resident)
        resident.pins += 1

    def unpin(self, resident: Resident) -> None:
        """Let go; a dead block's memory is freed with its last pin."""
        assert resident.pins > 0, resident.slot
        resident.pins -= 1
        if resident.pins:
            return
        if resident.state is ResidentState.DEAD:
            self.pool.free(resident.extent)
        else:
            self._rest(resident)

    def kill(self, resident: Resident) -> None:
        """Take a block out of the table; nobody can find it any more. Idempotent."""
        if resident.state is ResidentState.DEAD:
            return
        if resident.pins == 0 and resident.slot in self._idle.get(resident.owner, ()):
            self._wake(resident)
        resident.state = ResidentState.DEAD
        if self._by_slot.get(resident.slot) is resident:
            del self._by_slot[resident.slot]
            self._here[resident.slot] = 0
        if resident.pins == 0:
            self.pool.free(resident.extent)

    def holds(self, resident: Resident) -> bool:
        """True while this very block is the one in memory for its slot (slots are reused)."""
        return self._by_slot.get(resident.slot) is resident

    def drop_slot(self, slot: int) -> None:
        """The index entry is gone: so is the memory copy."""
        resident = self._by_slot.get(slot)
        if resident is not None:
            self.kill(resident)

    def clear(self) -> None:
        """Forget every block; memory that is still pinned is freed with its last pin."""
        for resident in list(self._by_slot.values()):
            self.kill(resident)

    def _rest(self, resident: Resident) -> None:
        self._idle.setdefault(resident.owner, OrderedDict())[resident.slot] = resident
        self.idle_bytes += resident.extent.length_bytes

    def _wake(self, resident: Resident) -> None:
        mine = self._idle[resident.owner]
        del mine[resident.slot]
        if not mine:
            del self._idle[resident.owner]
        self.idle_bytes -= resident.extent.length_bytes

    def _giving_way(self, asking: bytes) -> bytes:
        most = max(self._idle, key=lambda owner: (self._held(owner), owner), default=asking)
        return most if self._held(most) > self._held(asking) else asking

    def _held(self, owner: bytes) -> float:
        return self.pool.owned_bytes(owner) / self._weight_of(owner)

    def _evict_one(self, owner: bytes) -> bool:
        mine = self._idle.get(owner)
        if not mine:
            return False
        self.kill(next(iter(mine.values())))
        self.evictions += 1
        return True
