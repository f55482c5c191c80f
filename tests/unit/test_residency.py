"""Which blocks are in memory: pins, order of leaving, who gives way, each extent freed once."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from entresol_daemon.core import residency as residency_module
from entresol_daemon.core.history import FORGOTTEN_SHIFT, History
from entresol_daemon.core.residency import IN_VAIN, Residency, Resident, ResidentState
from entresol_daemon.memory import slabs as slabs_module
from entresol_daemon.memory.slabs import Extent, SlabPool
from entresol_proto.limits import ALIGN_BYTES, MIB
from entresol_proto.wire.data import Reason

PAGE = ALIGN_BYTES
SLAB = 4 * PAGE
A, B, C = b"owner-a".ljust(16), b"owner-b".ljust(16), b"owner-c".ljust(16)
NO_LIMIT = 1 << 60


class Buffer:
    """Plain memory."""

    def __init__(self, length_bytes: int) -> None:
        self.view = memoryview(bytearray(length_bytes))

    def close(self) -> None:
        pass


def residency(slabs: int = 2) -> Residency:
    return Residency(SlabPool(slabs * SLAB, SLAB, Buffer))


def put(
    table: Residency, slot: int, owner: bytes = A, *, length: int = PAGE, pins: int = 0,
    limit: int = NO_LIMIT, state: ResidentState = ResidentState.READY,
) -> Resident:  # fmt: skip
    extent = table.allocate(owner, length, limit)
    assert extent is not None
    resident = Resident(slot, bytes(16), slot.to_bytes(16, "big"), owner, extent, state, pins)
    table.add(resident)
    return resident


def test_least_recently_used_goes_first() -> None:
    table = residency(1)
    blocks = [put(table, slot) for slot in range(4)]
    table.pin(blocks[0])
    table.unpin(blocks[0])  # used: now the most recent
    put(table, 10)
    assert [slot for slot in range(4) if table.get(slot) is None] == [1]
    put(table, 11)
    assert [slot for slot in range(4) if table.get(slot) is None] == [1, 2]
    assert table.evictions == 2
    assert blocks[1].state is ResidentState.DEAD


def test_who_has_nothing_gets_no_slabs_from_pinned_blocks() -> None:
    table = residency(MIB // SLAB)
    for slot in range(MIB // PAGE):
        put(table, slot, pins=1)
    assert table.pool.may_fit(2 * SLAB)
    assert table.allocate(B, 2 * SLAB, NO_LIMIT) is None
    assert len(table) == MIB // PAGE


def test_pinned_blocks_stay() -> None:
    table = residency(1)
    for slot in range(4):
        put(table, slot, pins=1)
    assert table.allocate(A, PAGE, NO_LIMIT) is None
    assert table.allocate(B, PAGE, NO_LIMIT) is None
    assert table.evictions == 0
    assert len(table) == 4
    assert table.idle_bytes == 0


def test_a_block_with_two_pins_needs_two_unpins() -> None:
    table = residency(1)
    block = put(table, 0, pins=1, length=SLAB)
    table.pin(block)
    table.unpin(block)
    assert table.allocate(A, PAGE, NO_LIMIT) is None
    table.unpin(block)
    assert table.idle_bytes == SLAB
    assert table.allocate(A, PAGE, NO_LIMIT) is not None


def test_unpinning_what_is_not_pinned_is_asserted() -> None:
    table = residency()
    block = put(table, 0)
    with pytest.raises(AssertionError):
        table.unpin(block)


def test_one_resident_per_slot() -> None:
    table = residency()
    block = put(table, 0)
    extent = table.allocate(A, PAGE, NO_LIMIT)
    assert extent is not None
    with pytest.raises(AssertionError):
        table.add(Resident(0, bytes(16), bytes(16), A, extent, ResidentState.READY))
    assert table.get(0) is block


def test_the_block_that_goes_leaves_its_place_to_one_as_long() -> None:
    table = residency(1)
    blocks = [put(table, slot) for slot in range(4)]
    table.pin(blocks[0])
    blocks[1].block_key = key = random.Random(1).randbytes(48)
    before = (table.pool.allocated_bytes, table.idle_bytes, table.evictions)
    extent = table.allocate(A, PAGE, NO_LIMIT)
    assert extent is not None
    assert (extent.slab, extent.offset_bytes) == (
        blocks[1].extent.slab,
        blocks[1].extent.offset_bytes,
    )
    assert extent.view.nbytes == PAGE
    assert table.pool.allocated_bytes == before[0]
    assert (table.idle_bytes, table.evictions) == (before[1] - PAGE, before[2] + 1)
    assert table.get(1) is None
    assert blocks[1].state is ResidentState.DEAD
    assert blocks[1].block_key == b""
    assert key == bytes(48), "its key is wiped"
    with pytest.raises(ValueError, match="released"):
        bytes(blocks[1].extent.view)
    with pytest.raises(AssertionError, match="twice"):
        table.pool.free(blocks[1].extent)


@pytest.mark.parametrize("fails", ["wipe", "Extent"])
def test_a_block_that_cannot_leave_its_place_stays_whole(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    table = residency(1)
    blocks = [put(table, slot) for slot in range(4)]
    blocks[0].block_key = random.Random(1).randbytes(48)

    def no_memory(*_args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(residency_module if fails == "wipe" else slabs_module, fails, no_memory)
        with pytest.raises(MemoryError):
            table.allocate(A, PAGE, NO_LIMIT)
    assert [table.get(slot) for slot in range(4)] == blocks
    assert table.pool.allocated_bytes == table.idle_bytes == SLAB
    assert bytes(blocks[0].extent.view) == bytes(PAGE)
    assert table.allocate(A, PAGE, NO_LIMIT) is not None
    assert table.get(0) is None


def test_killing_an_idle_block_frees_it_at_once() -> None:
    table = residency()
    block = put(table, 0)
    table.kill(block)
    assert table.get(0) is None
    assert not table.holds(block)
    assert table.pool.allocated_bytes == table.idle_bytes == 0
    table.kill(block)
    assert table.pool.allocated_bytes == 0


def test_a_block_killed_while_pinned_is_freed_with_its_last_pin() -> None:
    table = residency()
    block = put(table, 0, pins=2)
    block.extent.view[:4] = b"read"
    table.kill(block)
    assert table.get(0) is None, "nobody finds it any more"
    assert bytes(block.extent.view[:4]) == b"read", "whoever reads it goes on reading"
    table.pin(block)  # a holder may hand it on
    for _ in range(2):
        table.unpin(block)
        assert table.pool.allocated_bytes == PAGE
    table.unpin(block)
    assert table.pool.allocated_bytes == 0
    with pytest.raises(AssertionError):
        table.unpin(block)
    with pytest.raises(AssertionError):
        table.pin(block)
    with pytest.raises(AssertionError):
        table.pool.free(block.extent)


def test_the_key_of_a_block_is_wiped_with_its_memory() -> None:
    table = residency()
    resting, read = put(table, 1), put(table, 2, pins=1)
    secrets = [bytes(bytearray(range(48))) for _ in (resting, read)]
    resting.block_key, read.block_key = secrets
    table.kill(resting)
    table.kill(read)
    assert secrets[0] == bytes(48)
    assert secrets[1] != bytes(48), "whoever reads it has its key"
    table.unpin(read)
    assert secrets[1] == bytes(48)
    assert (resting.block_key, read.block_key) == (b"", b"")


def test_an_owners_keys_are_wiped_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "KEYS_IN_TURN", 2)
    table = residency(slabs=4)
    blocks = [put(table, slot, owner) for slot, owner in enumerate((A, A, B, A, A, B, A, A))]
    secrets = [bytes(bytearray(range(48))) for _ in blocks]
    for resident, secret in zip(blocks, secrets, strict=True):
        resident.block_key = secret
    pauses = 0
    for _ in table.forget_keys(A):
        if not pauses:
            table.kill(blocks[-1])  # others have their turn
        pauses += 1
        assert sum(secret == bytes(48) for secret in secrets) <= 2 * pauses + 1
    assert pauses >= 3
    kept = [resident.slot for resident in blocks if resident.block_key]
    assert kept == [2, 5], "another owner's"
    assert [slot for slot, secret in enumerate(secrets) if secret != bytes(48)] == kept
    assert len(table) == 7, "the blocks stay"


def test_the_keys_of_blocks_that_only_a_lease_keeps_are_wiped_too() -> None:
    """An erasure drops the blocks first, and a lease over shm outlives its session."""
    table = residency()
    read = put(table, 1, pins=2)
    read.block_key = secret = bytes(bytearray(range(48)))
    table.kill(read)
    table.unpin(read)
    assert secret != bytes(48)
    for _ in table.forget_keys(B):
        pass
    assert secret != bytes(48), "another owner's"
    for _ in table.forget_keys(A):
        pass
    assert secret == bytes(48)
    table.unpin(read)
    assert not table._read_still


def test_a_slot_can_be_used_again_while_its_old_block_is_still_read() -> None:
    table = residency()
    old = put(table, 7, pins=1)
    table.drop_slot(7)
    new = put(table, 7)
    assert table.holds(new)
    assert not table.holds(old)
    table.kill(old)
    table.unpin(old)
    assert table.get(7) is new, "the old block's end does not touch the new one"
    table.drop_slot(7)
    table.drop_slot(7)
    assert len(table) == table.pool.allocated_bytes == 0


def test_an_owner_at_its_limit_displaces_only_its_own() -> None:
    table = residency(4)
    other = [put(table, slot, B) for slot in range(4)]
    mine = [put(table, 10 + n, A, limit=2 * PAGE) for n in range(2)]
    put(table, 12, A, limit=2 * PAGE)
    assert not table.holds(mine[0])
    assert table.holds(mine[1])
    assert all(table.holds(block) for block in other)
    assert table.pool.used_bytes(A) == 2 * PAGE


def test_an_owner_at_its_limit_with_everything_pinned_gets_nothing() -> None:
    table = residency(4)
    put(table, 0, B)
    for slot in (1, 2):
        put(table, slot, A, pins=1, limit=2 * PAGE)
    assert table.allocate(A, PAGE, 2 * PAGE) is None
    assert table.get(0) is not None


def test_limits_count_whole_pages() -> None:
    table = residency(4)
    put(table, 0, A, length=PAGE, pins=1)
    assert table.allocate(A, 1, 2 * PAGE - 1) is None
    assert table.allocate(A, 1, 2 * PAGE) is not None
    assert table.pool.used_bytes(A) == 2 * PAGE


@pytest.mark.parametrize(("small", "large"), [(A, B), (B, A)])
def test_the_largest_holder_gives_way_first(small: bytes, large: bytes) -> None:
    table = residency(4)
    few = [put(table, slot, small) for slot in range(2)]
    many = [put(table, 10 + n, large) for n in range(12)]
    for n in range(4):
        put(table, 30 + n, C)
    assert all(table.holds(block) for block in few)
    assert [table.holds(block) for block in many] == [False] * 4 + [True] * 8, "one slab, not more"


def test_the_largest_holder_is_passed_over_when_all_of_it_is_pinned() -> None:
    table = residency(3)
    few = put(table, 0, A)
    many = [put(table, 10 + n, B, pins=1) for n in range(8)]
    put(table, 20, C)
    assert not table.holds(few)
    assert all(table.holds(block) for block in many)


def test_a_long_run_is_made_within_one_slab() -> None:
    """Evicted in order, nearly all of a memory full of small blocks went before some 128 of them
    were neighbours, and every free range was looked at after each."""
    pages, asked, looked = 256, 128, 0
    table = Residency(SlabPool(4 * pages * PAGE, pages * PAGE, Buffer))
    blocks = [put(table, slot) for slot in range(4 * pages)]
    random.Random(1).shuffle(blocks)
    for block in blocks:
        table.pin(block)
        table.unpin(block)

    class Counted(dict[int, int]):
        def __getitem__(self, start: int) -> int:
            nonlocal looked
            looked += 1
            return super().__getitem__(start)

    for slab in table.pool.slabs(A):
        slab.ranges._sizes = Counted(slab.ranges._sizes)
    assert table.allocate(A, asked * PAGE, NO_LIMIT) is not None
    assert table.evictions <= (IN_VAIN + 1) * asked
    assert looked <= 10_000
    assert [table.holds(block) for block in blocks[: IN_VAIN * asked]] == [False] * IN_VAIN * asked


def test_a_long_run_goes_around_what_is_pinned() -> None:
    table = Residency(SlabPool(16 * PAGE, 16 * PAGE, Buffer))
    blocks = [put(table, slot) for slot in range(16)]
    for slot in (3, 12):
        table.pin(blocks[slot])
    for block in (blocks[n] for n in (0, 15, 2, 13, 1, 14, 4, 6, 8, 10)):
        if not block.pins:
            table.pin(block)
            table.unpin(block)
    extent = table.allocate(A, 8 * PAGE, NO_LIMIT)
    assert extent is not None
    assert extent.offset_bytes == 4 * PAGE
    assert table.holds(blocks[3])
    assert table.holds(blocks[12])


def test_who_gives_way_to_another_loses_one_slab() -> None:
    """In the order of use it lost nearly everything until one slab happened to be empty."""
    table = Residency(SlabPool(8 * 64 * PAGE, 64 * PAGE, Buffer))
    mine = [put(table, slot, B) for slot in range(8 * 64)]
    random.Random(1).shuffle(mine)
    for block in mine:
        table.pin(block)
        table.unpin(block)
    for slot in range(1000, 1064):
        put(table, slot, A)
    assert table.evictions == 64
    assert sum(table.holds(block) for block in mine) == 7 * 64


def test_who_has_something_pinned_everywhere_gives_a_slab_when_it_can() -> None:
    table = residency(3)
    mine = [put(table, slot, B) for slot in range(12)]
    for slot in (0, 1, 4, 5, 8):
        table.pin(mine[slot])
    for _ in range(3):
        assert table.allocate(A, PAGE, NO_LIMIT) is None, "something is pinned in every slab"
    gone = [block.slot for block in mine if not table.holds(block)]
    assert gone == [9, 10, 11], "of the slab with the least, and of no other however often"
    put(table, 20, B)
    assert table.holds(mine[8])
    assert not table.holds(mine[2]), "nothing new comes into a slab that is to become empty"
    table.unpin(mine[8])
    assert not table.holds(mine[8])
    put(table, 30, A)
    assert table.holds(mine[4])


def test_a_slab_that_can_go_at_once_is_taken_before_one_that_waits() -> None:
    table = residency(3)
    mine = [put(table, slot, B) for slot in range(12)]
    for slot in (0, 4, 8):
        table.pin(mine[slot])
    assert table.allocate(A, PAGE, NO_LIMIT) is None
    waits = next(slab for slab in table.pool.slabs(B) if slab.leaving)
    other = next(b for b in (mine[0], mine[4], mine[8]) if b.extent.slab is not waits)
    table.unpin(other)
    put(table, 30, A)
    assert not table.holds(other)
    assert not waits.leaving


def test_one_allocation_evicts_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "EVICTIONS_MAX", 3)
    table = residency(4)
    for slot in range(16):
        put(table, slot, B)
    assert table.allocate(B, PAGE, PAGE) is None, "its limit was lowered: not all at once"
    assert table.evictions == 3
    table = residency(4)
    for slot in range(16):
        put(table, slot, B)
    assert table.allocate(A, PAGE, NO_LIMIT) is None
    assert table.evictions == 3
    assert table.allocate(A, PAGE, NO_LIMIT) is not None, "it goes on where it was"
    assert table.evictions == 4


@pytest.mark.parametrize(
    ("length", "limit"), [(2 * SLAB + 1, NO_LIMIT), (SLAB + 1, NO_LIMIT), (2 * PAGE, PAGE)]
)
def test_what_can_never_fit_displaces_nothing(length: int, limit: int) -> None:
    table = residency(2)
    blocks = [put(table, slot, owner) for slot, owner in enumerate((A, A, B))]
    assert table.allocate(A, length, limit) is None
    assert all(table.holds(block) for block in blocks)
    assert table.evictions == 0


class Model(RuleBasedStateMachine):
    """Residents in a dict; recency in a list per owner; every extent freed exactly once."""

    @initialize(slabs=st.integers(1, 4))
    def begin(self, slabs: int) -> None:
        self.table = residency(slabs)
        self.pool = self.table.pool
        self.freed: Counter[int] = Counter()
        free, reuse = self.pool.free, self.pool.reuse

        def count(extent: Extent) -> None:
            self.freed[id(extent)] += 1
            free(extent)

        def count_reused(extent: Extent) -> Extent:
            self.freed[id(extent)] += 1
            return reuse(extent)

        self.pool.free = count  # type: ignore[method-assign]
        self.pool.reuse = count_reused  # type: ignore[method-assign]
        self.all: list[Resident] = []
        self.idle: dict[bytes, list[Resident]] = {A: [], B: [], C: []}
        self.next_slot = 0

    def living(self) -> list[Resident]:
        return [r for r in self.all if r.state is not ResidentState.DEAD]

    def note_evictions(self, asking: bytes, length: int) -> None:
        """Whatever left during an allocation was idle, and oldest first within its owner; but for
        what stood together in one slab where that order was in vain, or another owner gave way."""
        for owner, idle in self.idle.items():
            gone = [r for r in idle if r.state is ResidentState.DEAD]
            first = next((n for n, r in enumerate([*idle, None]) if r not in gone), 0)
            if gone != idle[:first]:
                assert len({r.extent.slab for r in gone if r not in idle[:first]}) == 1
            if owner != asking:
                assert len({r.extent.slab for r in gone}) <= 1, "one slab, not more"
            elif gone != idle[:first]:
                assert sum(r.extent.length_bytes for r in idle[:first]) >= IN_VAIN * length
            self.idle[owner] = [r for r in idle if r not in gone]

    @rule(owner=st.sampled_from([A, B, C]), pages=st.integers(1, 5), pins=st.integers(0, 2),
          limit=st.sampled_from([2 * PAGE, 6 * PAGE, NO_LIMIT]))  # fmt: skip
    def add(self, owner: bytes, pages: int, pins: int, limit: int) -> None:
        before = self.pool.used_bytes(owner)
        extent = self.table.allocate(owner, pages * PAGE, limit)
        others = [r for o in self.idle if o != owner for r in self.idle[o]]
        if before + pages * PAGE > limit and extent is not None:
            assert any(r.state is ResidentState.DEAD for r in self.idle[owner])
        if pages * PAGE > limit:
            assert all(r.state is not ResidentState.DEAD for r in others)
        self.note_evictions(owner, pages * PAGE)
        if extent is None:
            return
        assert self.pool.used_bytes(owner) <= max(limit, before)
        resident = Resident(
            self.next_slot, bytes(16), bytes(16), owner, extent, ResidentState.READY, pins
        )
        self.next_slot += 1
        self.table.add(resident)
        self.all.append(resident)
        if not pins:
            self.idle[owner].append(resident)

    @precondition(lambda self: self.living())
    @rule(pick=st.integers(0, 1000))
    def pin(self, pick: int) -> None:
        resident = self.living()[pick % len(self.living())]
        self.table.pin(resident)
        if resident in self.idle[resident.owner]:
            self.idle[resident.owner].remove(resident)

    @precondition(lambda self: any(r.pins for r in self.all))
    @rule(pick=st.integers(0, 1000))
    def unpin(self, pick: int) -> None:
        pinned = [r for r in self.all if r.pins]
        resident = pinned[pick % len(pinned)]
        self.table.unpin(resident)
        if not resident.pins and resident.state is not ResidentState.DEAD:
            self.idle[resident.owner].append(resident)

    @precondition(lambda self: self.all)
    @rule(pick=st.integers(0, 1000))
    def kill(self, pick: int) -> None:
        resident = self.all[pick % len(self.all)]
        self.table.kill(resident)
        if resident in self.idle[resident.owner]:
            self.idle[resident.owner].remove(resident)

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "table"):
            return
        assert len(self.table) == len(self.living())
        assert set(self.freed.values()) <= {1}, "an extent was freed twice"
        for resident in self.all:
            dead = resident.state is ResidentState.DEAD
            assert self.table.holds(resident) == (not dead)
            assert self.freed[id(resident.extent)] == (dead and not resident.pins)
        idle = [r for rows in self.idle.values() for r in rows]
        assert self.table.idle_bytes == sum(r.extent.length_bytes for r in idle)
        held = [r for r in self.all if r.pins or r.state is not ResidentState.DEAD]
        assert self.pool.allocated_bytes == sum(r.extent.length_bytes for r in held)
        slabs = {r.extent.slab for r in held}
        for slab in slabs:
            here = [r for r in idle if r.extent.slab is slab]
            assert slab.idle_bytes == sum(r.extent.length_bytes for r in here)
            assert not (slab.leaving and here), "what can leave has left"
        for owner, rows in self.idle.items():
            assert sum(slab.leaving for slab in slabs if slab.owner == owner) <= 1
            assert list(self.table._idle.get(owner, {}).values()) == rows


Model.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase


# The memory of what went away ---------------------------------------------------------------------


def test_history_remembers_the_newest_reason() -> None:
    history = History(10)
    ns, key = bytes(16), b"k" * 16
    assert history.why(ns, key) == (Reason.NEVER_STORED, 0)
    history.record(ns, key, Reason.EVICTED, 5, b"o")
    history.record(ns, key, Reason.CORRUPT, 6, b"o")
    assert history.why(ns, key) == (Reason.CORRUPT, 6)
    assert history.why(b"n" * 16, key) == (Reason.NEVER_STORED, 0)
    history.forget(ns, key)
    history.forget(ns, key)
    assert history.why(ns, key) == (Reason.NEVER_STORED, 0)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_history_forgets_the_oldest_at_its_limit(limit: int) -> None:
    history = History(limit)
    keys = [bytes([n]) * 16 for n in range(limit + 1)]
    for at, key in enumerate(keys[:limit]):
        history.record(bytes(16), key, Reason.EVICTED, at, b"o")
    assert len(history) == limit
    if limit > 1:
        history.record(bytes(16), keys[0], Reason.FORGOTTEN, 9, b"o")  # recorded again: newest now
    history.record(bytes(16), keys[limit], Reason.EVICTED, 10, b"o")
    assert len(history) == limit
    kept = [key for key in keys if history.why(bytes(16), key)[0] is not Reason.NEVER_STORED]
    assert kept == ([keys[0], *keys[2:]] if limit > 1 else keys[1:] if limit else [])


@pytest.mark.parametrize("limit", [1, 7, 200])
def test_any_history_is_what_a_plain_table_says(limit: int) -> None:
    """Of each owner the oldest rows go first, whatever was taken out between them."""
    rng, history, ns = random.Random(limit), History(limit), bytes(16)
    owners: dict[bytes, dict[bytes, tuple[Reason, int]]] = {}
    owner_of: dict[bytes, bytes] = {}

    def drop(key: bytes) -> tuple[Reason, int]:
        owner = owner_of.pop(key, None)
        if owner is None:
            return Reason.NEVER_STORED, 0
        before = owners[owner].pop(key)
        if not owners[owner]:
            del owners[owner]
        return before

    for now in range(4_000):
        key = rng.randrange(2 * limit + 2).to_bytes(16, "little")
        if rng.random() < 0.3:
            assert history.forget(ns, key) == drop(key)
        else:
            owner = rng.choice((b"a", b"a", b"b", b"c"))
            history.record(ns, key, Reason.EVICTED, now, owner)
            drop(key)
            owners.setdefault(owner, {})[key] = Reason.EVICTED, now
            owner_of[key] = owner
            if len(owner_of) > limit:
                most = max(owners.values(), key=len)
                for old in list(most)[: max(1, len(most) >> FORGOTTEN_SHIFT)]:
                    drop(old)
        told = {key: row for rows in owners.values() for key, row in rows.items()}
        assert len(history) == len(told)
        assert list(history._owners) == list(owners), "of who has nothing, nothing is kept"
        for each in {*told, key} if limit < 100 or not now % 100 else (key,):
            assert history.why(ns, each) == told.get(each, (Reason.NEVER_STORED, 0)), now


def test_an_owners_history_is_not_forgotten_for_anothers() -> None:
    """How much went away elsewhere showed in what one's own keys read as."""
    history, ns, few = History(1_000), b"n" * 16, 400
    for number in range(few):
        history.record(ns, b"few-%012d" % number, Reason.EVICTED, number, b"few")
    for number in range(5_000):
        history.record(b"m" * 16, b"many%012d" % number, Reason.EVICTED, number, b"many")
        assert len(history) <= 1_000
    assert all(history.why(ns, b"few-%012d" % n)[0] is Reason.EVICTED for n in range(few))
    assert history.why(b"m" * 16, b"many%012d" % 4_999) == (Reason.EVICTED, 4_999)
    assert history.why(b"m" * 16, b"many%012d" % 0) == (Reason.NEVER_STORED, 0)


_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["record", "forget", "why"]), st.integers(0, 11), st.integers(0, 2),
        st.sampled_from([Reason.EVICTED, Reason.CORRUPT]),
    ),
    max_size=150,
)  # fmt: skip


@given(_CALLS, st.integers(1, 8), st.integers(0, 3))
def test_history_is_what_a_list_of_rows_would_be(
    calls: list[tuple[str, int, int, Reason]], limit: int, bits: int
) -> None:
    """`bits`: of the hash that count, so that many rows want one place."""

    class Crowded(History):
        def _mark(self, namespace_id: bytes, key: bytes) -> int:
            number = int.from_bytes(key, "big")
            return number << 32 | number % (1 << bits)

    history = Crowded(limit)
    rows: dict[int, tuple[Reason, int, int]] = {}  # in order of age
    for now, (what, key, owner, reason) in enumerate(calls):
        place = (bytes(16), key.to_bytes(16, "big"))
        expected = rows[key][:2] if key in rows else (Reason.NEVER_STORED, 0)
        if what == "why":
            assert history.why(*place) == expected
        elif what == "forget":
            assert history.forget(*place) == expected
            rows.pop(key, None)
        else:
            history.record(*place, reason, now, b"%d" % owner)
            rows.pop(key, None)
            rows[key] = (reason, now, owner)
            if len(rows) > limit:
                count = Counter(row[2] for row in rows.values())
                there = {k: history.why(bytes(16), k.to_bytes(16, "big")) for k in rows}
                gone = [k for k, found in there.items() if found != rows[k][:2]]
                assert len(gone) == 1, "one at a time: there are few"
                assert count[rows[gone[0]][2]] == max(count.values())
                assert gone[0] == next(k for k, row in rows.items() if row[2] == rows[gone[0]][2])
                del rows[gone[0]]
        assert len(history) == len(rows)


def test_history_takes_its_memory_at_the_start() -> None:
    """What fills up for weeks looks like a leak: rows were 400 bytes each, in time."""
    tracemalloc.start()
    try:
        history = History(4_096)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20_000):
            history.record(bytes(32), b"%016d" % number, Reason.EVICTED, 10**18 + number, b"owner")
        assert len(history) > 4_000
        assert tracemalloc.get_traced_memory()[0] - before < 2_000
    finally:
        tracemalloc.stop()
    assert history.memory_bytes < 60 * 4_096
