"""What to do with a batch of keys: serve, load, or miss. Pure.

Invariant: every key of a request ends in exactly one of the lists of a plan, and in prefix mode no
key after the first gap is served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from entresol_daemon.core.residency import Residency, Resident, ResidentState
from entresol_proto import limits
from entresol_proto.status import Status

FIRST_GRANT_BYTES = 4 * limits.MIB  # granted ahead, so that the host moves them while we go on


@dataclass(slots=True)
class Wanted:
    """The keys of a FETCH that are stored, in order, and the answers for those that are not."""

    pending: deque[int]  # indices into the request
    misses: list[tuple[int, Status]] = field(default_factory=list)


def plan_fetch(slots: Sequence[int], *, prefix: bool) -> Wanted:
    """Split a request by presence. `slots[i]` is -1 for an absent key.

    In prefix mode the first absent key is a MISS and everything after it a GAP.
    """
    gap = next((at for at, slot in enumerate(slots) if slot < 0), -1) if prefix else -1
    if gap >= 0:
        misses = [(gap, Status.MISS)] + [(at, Status.GAP) for at in range(gap + 1, len(slots))]
        return Wanted(deque(range(gap)), misses)
    miss = Status.MISS
    misses = [(at, miss) for at, slot in enumerate(slots) if slot < 0]
    return Wanted(deque(at for at, slot in enumerate(slots) if slot >= 0), misses)


@dataclass(slots=True)
class Window:
    """The next part of a request that fits into memory and the session's budget.

    All residents in it are pinned once for this window. `loads` were created by it and must be
    read from flash; `joins` are being read by someone else.
    """

    ready: list[tuple[int, Resident]] = field(default_factory=list)
    loads: list[tuple[int, Resident]] = field(default_factory=list)
    joins: list[tuple[int, Resident]] = field(default_factory=list)
    misses: list[tuple[int, Status]] = field(default_factory=list)
    taken_bytes: int = 0

    @property
    def waits(self) -> bool:
        return bool(self.loads or self.joins)

    def take_waits(self) -> list[tuple[int, Resident]]:
        """What has to be waited for, with its pins; once, then it is somebody else's."""
        taken = self.loads + self.joins
        self.loads, self.joins = [], []
        return taken

    def __len__(self) -> int:
        return len(self.ready) + len(self.loads) + len(self.joins) + len(self.misses)


# Not frozen, because one is made per block: a frozen one takes three times as long.
@dataclass(slots=True)
class Shape:
    """What the index knows of a stored block."""

    slot: int  # -1 when it went away meanwhile
    wire_key: bytes
    record_bytes: int  # whole extent
    sealed_bytes: int
    plain_bytes: int


def take_window(
    pending: deque[int],
    shapes: Iterable[Shape],
    residency: Residency,
    *,
    namespace_id: bytes,
    owner: bytes,
    owner_bytes_max: int,
    budget_bytes: int,
    load_bytes_max: int,
    prefix: bool = False,
) -> Window:
    """Pop what can be served or loaded now off `pending`; pins every resident it returns.

    `shapes` belong to `pending`, in order. Stops at the first block that does not fit; an empty
    window means: wait for memory. The first block is taken even if it exceeds the byte budgets, so
    that a block larger than a budget can be served alone. Of what is to be loaded the longer of
    record and plaintext counts: it is read, then opened. With `prefix`, a block that went away
    since `plan_fetch` is a gap like any other: the rest of `pending` is answered GAP.
    """
    window = Window()
    loading = 0
    for shape in shapes:
        index = pending[0]
        if shape.slot < 0:
            window.misses.append((index, Status.MISS))
            pending.popleft()
            if prefix:
                window.misses += [(later, Status.GAP) for later in pending]
                pending.clear()
                break
            continue
        if window.taken_bytes and window.taken_bytes + shape.record_bytes > budget_bytes:
            break
        resident = residency.get(shape.slot)
        if resident is None:
            size = max(shape.record_bytes, shape.plain_bytes)  # what takes the longer for it
            if loading and loading + size > load_bytes_max:
                break
            extent = residency.allocate(owner, shape.record_bytes, owner_bytes_max)
            if extent is None:
                break
            resident = Resident(
                shape.slot, namespace_id, shape.wire_key, owner, extent, ResidentState.LOADING,
                1, shape.sealed_bytes, shape.plain_bytes, from_flash=True,
            )  # fmt: skip
            residency.add(resident)
            window.loads.append((index, resident))
            loading += size
        else:
            residency.pin(resident)
            if resident.state is ResidentState.READY:
                window.ready.append((index, resident))
            else:
                window.joins.append((index, resident))
        window.taken_bytes += shape.record_bytes
        pending.popleft()
    return window


def granted_ahead(entries: Sequence[tuple[int, Resident]]) -> int:
    """How many blocks in memory to grant before the others; 0 if all are granted together."""
    total = first = 0
    for count, (_, resident) in enumerate(entries, 1):
        total += resident.extent.length_bytes
        if total <= FIRST_GRANT_BYTES:
            first = count
    return first if total >= 2 * FIRST_GRANT_BYTES else 0
