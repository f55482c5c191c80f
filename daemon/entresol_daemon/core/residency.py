"""Which blocks are in memory, who holds them, and which may go. Pure.

A resident block is one record in one extent. It is pinned while anybody needs it (a lease, a read
from flash, a write to flash) and evictable otherwise, least recently used first within its owner.
That order is left where it would be in vain: a run of bytes that is long beside the blocks would
come about only when nearly all of them are gone, and an owner gives way to another by whole slabs.
Then one slab is chosen, of those that hold the oldest, and what goes is in it.

Invariants: an extent is freed exactly once, when its resident has left the table and its last pin
is gone; a slot has at most one resident. One allocation evicts, and looks at, a bounded number. The
key of a block is wiped when its extent is freed.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from entresol_daemon.memory.ranges import align_up, cheapest_run
from entresol_daemon.memory.slabs import Extent, Slab, SlabPool
from entresol_proto.seal.wiping import wipe

IN_VAIN = 2  # times what is asked for is evicted in order before a run is looked for
IN_VAIN_MAX = 1024  # and so many blocks
EVICTIONS_MAX = 8192  # of one slab, or of an owner over its limit, in one allocation
OLDEST_SHIFT, OLDEST_MAX = 3, 256  # of an owner's blocks say which slab is the oldest: an eighth
KEYS_IN_TURN = 64  # are wiped at once: half a microsecond each
PIECES_MAX = 16_384  # of memory are looked at for a run, and the rest of a slab


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
    block_key: bytes = field(default=b"", repr=False)  # derived once, with its commitment behind

    def forget_key(self) -> None:
        """Wipe the key; whoever needs it derives it again, if there is what from."""
        secret, self.block_key = self.block_key, b""
        if secret:
            wipe(secret)


def _equal(_owner: bytes) -> int:
    return 1


class Residency:
    """The table of resident blocks, over a slab pool. `weight_of` is an owner's share of it."""

    def __init__(self, pool: SlabPool, weight_of: Callable[[bytes], int] = _equal) -> None:
        self.pool = pool
        self._weight_of = weight_of
        self._by_slot: dict[int, Resident] = {}
        self._here = bytearray()  # by slot: 1 while it is a key of the table
        self._read_still: set[Resident] = set()  # no longer of the table, and pinned
        self._idle: dict[bytes, OrderedDict[int, Resident]] = {}
        self._in_slab: dict[Slab, dict[int, Resident]] = {}  # of the table, by slot
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
        It gives one slab; where something of that is pinned, as soon as it no longer is, and until
        then this is None. A record that cannot fit in any case displaces nothing.
        """
        length = align_up(length_bytes)
        if length > owner_bytes_max or not self.pool.may_fit(length):
            return None
        if not self._come_within(owner, owner_bytes_max - length):
            return None
        extent = self.pool.allocate(owner, length)
        if extent is not None:
            return extent
        if length > self.pool.slab_bytes or self._giving_way(owner, ()) != owner:
            extent = self._displace_slabs(owner, length)
            if extent is not None or length > self.pool.slab_bytes:
                return extent
        return self._displace_own(owner, length)

    def add(self, resident: Resident) -> None:
        """Enter a block, pinned or not. The slot must be free."""
        assert resident.slot not in self._by_slot, resident.slot
        self._by_slot[resident.slot] = resident
        self._in_slab.setdefault(resident.extent.slab, {})[resident.slot] = resident
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
            self._free(resident)
        else:
            self._rest(resident)

    def use(self, residents: Iterable[Resident]) -> None:
        """They were found, and nothing keeps them: the last to leave of those that nobody pins."""
        for resident in residents:
            self.pin(resident)
            self.unpin(resident)

    def kill(self, resident: Resident) -> None:
        """Take a block out of the table; nobody can find it any more. Idempotent."""
        if resident.state is ResidentState.DEAD:
            return
        if resident.pins == 0 and resident.slot in self._idle.get(resident.owner, ()):
            self._wake(resident)
        self._take_out(resident)
        if resident.pins == 0:
            self._free(resident)
        else:
            self._read_still.add(resident)

    def _take_out(self, resident: Resident) -> None:
        """Of the table; it is dead from here on."""
        resident.state = ResidentState.DEAD
        if self._by_slot.get(resident.slot) is resident:
            del self._by_slot[resident.slot]
            self._here[resident.slot] = 0
            slab = resident.extent.slab
            here = self._in_slab[slab]
            del here[resident.slot]
            if not here:
                del self._in_slab[slab]

    def _free(self, resident: Resident) -> None:
        self._read_still.discard(resident)
        self.pool.free(resident.extent)
        resident.forget_key()

    def forget_keys(self, owner: bytes) -> Iterator[None]:
        """Wipe the keys of an owner's blocks, of those too that a lease alone keeps; pauses, for
        others to have a turn."""
        held = [[resident for resident in self._read_still if resident.owner == owner]]
        slabs = (self._in_slab.get(slab, {}) for slab in list(self.pool.slabs(owner)))
        for here in itertools.chain(held, (list(mine.values()) for mine in slabs)):
            for number, resident in enumerate(here, 1):
                resident.forget_key()
                if number % KEYS_IN_TURN == 0:
                    yield
            yield

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
        extent = resident.extent
        if extent.slab.leaving:
            self.kill(resident)
            self.evictions += 1
            return
        self._idle.setdefault(resident.owner, OrderedDict())[resident.slot] = resident
        self.idle_bytes += extent.length_bytes
        extent.slab.idle_bytes += extent.length_bytes

    def _wake(self, resident: Resident) -> None:
        mine = self._idle[resident.owner]
        del mine[resident.slot]
        if not mine:
            del self._idle[resident.owner]
        extent = resident.extent
        self.idle_bytes -= extent.length_bytes
        extent.slab.idle_bytes -= extent.length_bytes

    def _giving_way(self, asking: bytes, passed: Collection[bytes]) -> bytes:
        if not passed and len(self._idle) == 1 and asking in self._idle:
            return asking
        having = (owner for owner in self._idle if owner not in passed) if passed else self._idle
        most = max(having, key=lambda owner: (self._held(owner), owner), default=asking)
        return most if self._held(most) > self._held(asking) else asking

    def _held(self, owner: bytes) -> float:
        return self.pool.owned_bytes(owner) / self._weight_of(owner)

    def _come_within(self, owner: bytes, used_bytes_max: int) -> bool:
        """Evict what an owner has over its limit; False when that is too much, or pinned."""
        for _ in range(EVICTIONS_MAX):
            if self.pool.used_bytes(owner) <= used_bytes_max:
                return True
            if self._evict_oldest(owner) is None:
                return False
        return False

    def _displace_slabs(self, owner: bytes, length: int) -> Extent | None:
        """Memory from emptied slabs: one of whoever gives way; several for what needs a larger."""
        pool, passed = self.pool, set[bytes]()
        needed = -(-length // pool.slab_bytes)
        while needed:
            giving = self._giving_way(owner, passed)
            if giving == owner and length <= pool.slab_bytes:
                return None
            if self._empty_slab(giving):
                needed -= 1
                extent = pool.allocate(owner, length)
                if extent is not None:
                    return extent
            elif giving == owner:
                return None
            else:
                passed.add(giving)
        return None

    def _empty_slab(self, owner: bytes) -> bool:
        """Evict a slab of this owner, the oldest of those with nothing pinned; True if it is empty
        now. Else it will be: nothing new comes into it, and what is pinned goes with its last pin.
        """
        slab = self._choose_slab(owner)
        if slab is None:
            return False
        here = self._in_slab.get(slab, {}).values()
        idle = list(islice((resident for resident in here if not resident.pins), EVICTIONS_MAX))
        for resident in idle:
            self._evict(resident)
        return slab.ranges.is_empty

    def _choose_slab(self, owner: bytes) -> Slab | None:
        slabs = [slab for slab in self.pool.slabs(owner) if not slab.ranges.is_empty]
        if not slabs:
            return None
        idle = [slab for slab in slabs if slab.idle_bytes == slab.used_bytes]
        begun = next((slab for slab in slabs if slab.leaving), None)
        if begun is not None:
            if not idle or begun in idle:
                return begun
            begun.leaving = False  # another can go at once
        old = self._oldest(owner)
        chosen = max(
            idle or slabs, key=lambda s: (s.idle_bytes - s.used_bytes, old[s], -s.used_bytes)
        )
        chosen.leaving = True
        return chosen

    def _displace_own(self, owner: bytes, length: int) -> Extent | None:
        """Memory from an owner's own blocks: in order, then what stands together in one slab."""
        pool, in_vain = self.pool, 0
        extent = self._replace_oldest(owner, length)
        if extent is not None:
            return extent
        for _ in range(IN_VAIN_MAX):
            gone = self._evict_oldest(owner)
            if gone is None:
                return None
            slab = gone.extent.slab
            extent = pool.allocate(owner, length) if slab.closed else pool.allocate_in(slab, length)
            if extent is not None:
                return extent
            in_vain += gone.extent.length_bytes
            if in_vain >= IN_VAIN * length:
                break
        run = self._find_run(owner, length)
        for resident in run:
            self._evict(resident)
        return pool.allocate(owner, length) if run else None

    def _replace_oldest(self, owner: bytes, length: int) -> Extent | None:
        """The place of the block that goes first, if it is just as long: the same comes of it as of
        freeing that and looking for room, for a third of the time."""
        mine = self._idle.get(owner)
        if not mine:
            return None
        resident = next(iter(mine.values()))
        if resident.extent.length_bytes != length or resident.extent.slab.leaving:
            return None
        resident.forget_key()  # first what can fail: then it is still there, and can have another
        extent = self.pool.reuse(resident.extent)
        self._wake(resident)
        self._take_out(resident)
        self.evictions += 1
        return extent

    def _find_run(self, owner: bytes, length: int) -> list[Resident]:
        """Idle blocks of one slab that stand together, with what is free between them."""
        old = self._oldest(owner)
        slabs = [
            slab for slab in self.pool.slabs(owner)
            if slab.idle_bytes + slab.ranges.free_bytes >= length and not slab.leaving
        ]  # fmt: skip
        slabs.sort(key=lambda slab: (old[slab], slab.idle_bytes), reverse=True)
        looked = 0
        for slab in slabs:
            here = self._in_slab.get(slab, {}).values()
            idle = {r.extent.offset_bytes: r for r in here if not r.pins}
            pieces = [(at, r.extent.length_bytes, r.extent.length_bytes) for at, r in idle.items()]
            pieces += [(at, size, 0) for at, size in slab.ranges.free_ranges()]
            pieces.sort()
            run = [pieces[place][0] for place in cheapest_run(pieces, length)]
            if run:
                return [idle[at] for at in run if at in idle]
            looked += len(pieces)
            if looked > PIECES_MAX:
                break
        return []

    def _oldest(self, owner: bytes) -> Counter[Slab]:
        """In which slabs what would go first is, in bytes."""
        found: Counter[Slab] = Counter()
        mine = self._idle.get(owner, OrderedDict())
        for resident in islice(mine.values(), min(1 + (len(mine) >> OLDEST_SHIFT), OLDEST_MAX)):
            found[resident.extent.slab] += resident.extent.length_bytes
        return found

    def _evict_oldest(self, owner: bytes) -> Resident | None:
        mine = self._idle.get(owner)
        if not mine:
            return None
        resident = next(iter(mine.values()))
        self._evict(resident)
        return resident

    def _evict(self, resident: Resident) -> None:
        self.kill(resident)
        self.evictions += 1
