"""The index: which blocks exist and where, in memory, in numpy columns with a chained hash.

Pure: no I/O, no clock. Invariants: a slot number is stable for a block's life; memory is fixed at
construction (columns are zero pages until used, so nothing ever grows and pauses); the bucket of a
key depends on random multipliers, so nobody who picks keys can build long chains.

`offset` is in device blocks (4 KiB) from the segment's start. `last_touch` is a logical clock that
only this file advances: a larger value is a later touch.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.ma  # np.unique and np.isin import it when first called: 50 ms, on the event loop
import numpy.typing as npt

ABSENT = -1
LIVE = 1
PENDING = 2  # visible, not durable yet
SCALAR_KEYS_MAX = 32  # up to here key by key: through numpy 25 us, 90 where its code is not cached
CHAIN_MAX = 4096  # a longer chain is a bug, not bad luck

Slots = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]

_MASK = (1 << 64) - 1
_PAIR = struct.Struct("<QQ")


def _heads_for(capacity: int) -> int:
    """Bits of the bucket number: at least one bucket per block."""
    return max(4, (max(1, capacity) - 1).bit_length())


class Index:
    """(namespace id, wire key) -> slot, and one column per property. Scalar calls cost 1-2 us.

    `seed` (any bytes) feeds the bucket multipliers.
    """

    def __init__(self, capacity: int, *, seed: bytes = b"") -> None:
        if not 0 < capacity < 2**31:
            raise ValueError(f"capacity is {capacity}, not 1..2^31-1")
        self.capacity = capacity
        # calloc: pages appear when they are first written.
        self._keys: U64 = np.zeros(2 * capacity, np.uint64)
        self._namespace: U32 = np.zeros(capacity, np.uint32)
        self._next: U32 = np.zeros(capacity, np.uint32)  # slot + 1 of the next in the bucket
        self._freed: U32 = np.zeros(capacity, np.uint32)  # stack of slots given back
        self.position: U32 = np.zeros(capacity, np.uint32)
        self.plain_bytes: U32 = np.zeros(capacity, np.uint32)
        self.sealed_bytes: U32 = np.zeros(capacity, np.uint32)
        self.segment: U32 = np.zeros(capacity, np.uint32)
        self.offset: U32 = np.zeros(capacity, np.uint32)
        self.last_touch: U64 = np.zeros(capacity, np.uint64)
        self.flags: npt.NDArray[np.uint8] = np.zeros(capacity, np.uint8)
        bits = _heads_for(capacity)
        self._heads: U32 = np.zeros(1 << bits, np.uint32)  # slot + 1
        self._shift = 64 - bits
        self._freed_count = 0
        self._high = 0  # slots below were used at least once
        self._tick = 0
        self.changes = 0  # while it stands, slots that were looked up are what they were
        self._multipliers = [m | 1 for m in _expand(seed)]
        self._ids: dict[bytes, int] = {}
        self._names: list[bytes] = []
        self._mixes: list[int] = []  # per namespace number: its share of the bucket hash
        self._mix_column: U64 = np.zeros(16, np.uint64)
        self._counts: list[int] = []  # live blocks per namespace number
        self._spare: list[int] = []  # namespace numbers given back
        # Scalar access: indexing an array costs 5-10 times as much as indexing a memoryview.
        self._m_keys = _scalars(self._keys)
        self._m_namespace = _scalars(self._namespace)
        self._m_next = _scalars(self._next)
        self._m_heads = _scalars(self._heads)
        self._m_freed = _scalars(self._freed)
        self.m_position = _scalars(self.position)
        self.m_plain_bytes = _scalars(self.plain_bytes)
        self.m_sealed_bytes = _scalars(self.sealed_bytes)
        self.m_segment = _scalars(self.segment)
        self.m_offset = _scalars(self.offset)
        self.m_last_touch = _scalars(self.last_touch)
        self.m_flags = _scalars(self.flags)

    # -- size

    def __len__(self) -> int:
        return self._high - self._freed_count

    @property
    def free(self) -> int:
        """Blocks that still fit."""
        return self.capacity - self._high + self._freed_count

    @property
    def high(self) -> int:
        """All slots in use are below this: `column[:high]` is the used part of a column."""
        return self._high

    @property
    def now_touch(self) -> int:
        """The newest tick of the touch clock."""
        return self._tick

    def memory_bytes(self) -> int:
        """Bytes of all columns and buckets at full capacity."""
        arrays = (
            self._keys, self._namespace, self._next, self._freed, self.position, self.plain_bytes,
            self.sealed_bytes, self.segment, self.offset, self.last_touch, self.flags, self._heads,
        )  # fmt: skip
        return sum(array.nbytes for array in arrays)

    # -- lookup

    def find(self, namespace_id: bytes, wire_key: bytes) -> int:
        """The slot of one key, or ABSENT."""
        number = self._ids.get(namespace_id)
        if number is None:
            return ABSENT
        k0, k1 = _PAIR.unpack(wire_key)
        return self._find(number, k0, k1)

    def lookup(self, namespace_id: bytes, keys: bytes | memoryview) -> Slots:
        """The slots of many keys (16 bytes each, end to end); ABSENT where there is none."""
        count, rest = divmod(len(keys), 16)
        if rest:
            raise ValueError("keys are not a multiple of 16 bytes")
        number = self._ids.get(namespace_id)
        if number is None:
            return np.full(count, ABSENT, np.int64)
        if count <= SCALAR_KEYS_MAX:
            found = [self._find(number, k0, k1) for k0, k1 in _PAIR.iter_unpack(keys)]
            return np.array(found, np.int64)
        pairs = np.frombuffer(keys, np.uint64).reshape(count, 2)
        return self._find_many(np.uint64(number), pairs[:, 0], pairs[:, 1])

    def _find(self, number: int, k0: int, k1: int) -> int:
        at = self._m_heads[self._bucket(number, k0, k1)]
        keys, namespaces, following = self._m_keys, self._m_namespace, self._m_next
        while at:
            slot: int = at - 1
            if keys[2 * slot] == k0 and keys[2 * slot + 1] == k1 and namespaces[slot] == number:
                return slot
            at = following[slot]
        return ABSENT

    def _find_many(self, number: np.uint64, k0: U64, k1: U64) -> Slots:
        result = np.full(len(k0), ABSENT, np.int64)
        at = self._heads[self._buckets(self._mix_column[number], k0, k1)].astype(np.int64)
        open_ = np.flatnonzero(at)
        for _ in range(CHAIN_MAX):
            if not len(open_):
                return result
            slots = at[open_] - 1
            match = (
                (self._keys[2 * slots] == k0[open_])
                & (self._keys[2 * slots + 1] == k1[open_])
                & (self._namespace[slots] == number)
            )
            result[open_[match]] = slots[match]
            following = self._next[slots].astype(np.int64)
            at[open_] = following
            open_ = open_[~match & (following != 0)]
        raise AssertionError("index chain does not end")

    def _bucket(self, number: int, k0: int, k1: int) -> int:
        m0, m1 = self._multipliers[:2]
        return ((k0 * m0 + k1 * m1 + self._mixes[number]) & _MASK) >> self._shift

    def _buckets(self, mix: np.uint64 | U64, k0: U64, k1: U64) -> U64:
        m0, m1 = np.uint64(self._multipliers[0]), np.uint64(self._multipliers[1])
        hashed: U64 = (k0 * m0 + k1 * m1 + mix) >> np.uint64(self._shift)
        return hashed

    # -- one block

    def insert(
        self,
        namespace_id: bytes,
        wire_key: bytes,
        *,
        segment: int,
        offset: int,
        sealed_bytes: int,
        plain_bytes: int,
        position: int,
        flags: int = 0,
    ) -> int:
        """Add a block that is not there yet (the caller looked), touched now; returns its slot."""
        self.changes += 1
        number = self.intern(namespace_id)
        k0, k1 = _PAIR.unpack(wire_key)
        assert self._find(number, k0, k1) == ABSENT, "duplicate key"
        if self._freed_count:
            self._freed_count -= 1
            slot: int = self._m_freed[self._freed_count]
        else:
            assert self._high < self.capacity, "index is full"
            slot = self._high
            self._high += 1
        bucket = self._bucket(number, k0, k1)
        self._m_keys[2 * slot] = k0
        self._m_keys[2 * slot + 1] = k1
        self._m_namespace[slot] = number
        self._m_next[slot] = self._m_heads[bucket]
        self._m_heads[bucket] = slot + 1
        self.m_segment[slot] = segment
        self.m_offset[slot] = offset
        self.m_sealed_bytes[slot] = sealed_bytes
        self.m_plain_bytes[slot] = plain_bytes
        self.m_position[slot] = position
        self.m_flags[slot] = LIVE | flags
        self._counts[number] += 1
        self._tick += 1
        self.m_last_touch[slot] = self._tick
        return slot

    def remove(self, slot: int) -> None:
        """Drop a live block; its slot may be used again at once."""
        assert self.m_flags[slot] & LIVE, "slot is not in use"
        self.changes += 1
        number = self._m_namespace[slot]
        bucket = self._bucket(number, self._m_keys[2 * slot], self._m_keys[2 * slot + 1])
        at = self._m_heads[bucket] - 1
        if at == slot:
            self._m_heads[bucket] = self._m_next[slot]
        else:
            while (following := self._m_next[at] - 1) != slot:
                assert following >= 0, "index chain is broken"
                at = following
            self._m_next[at] = self._m_next[slot]
        self.m_flags[slot] = 0
        self._m_freed[self._freed_count] = slot
        self._freed_count += 1
        self._drop_count(number, 1)

    def is_live(self, slot: int) -> bool:
        """True while the slot holds a block."""
        return 0 <= slot < self._high and bool(self.m_flags[slot] & LIVE)

    def key_of(self, slot: int) -> bytes:
        """The wire key in a live slot."""
        return _PAIR.pack(self._m_keys[2 * slot], self._m_keys[2 * slot + 1])

    def namespace_of(self, slot: int) -> bytes:
        """The namespace id in a live slot."""
        return self._names[self._m_namespace[slot]]

    def touch_one(self, slot: int) -> int:
        """Make a slot the most recent; returns its new tick."""
        self._tick += 1
        self.m_last_touch[slot] = self._tick
        return self._tick

    def touch(self, slots: Sequence[int] | Slots) -> Slots:
        """Make the slots the most recent, the last one most; returns their new ticks."""
        ticks = np.arange(self._tick + 1, self._tick + 1 + len(slots), dtype=np.int64)
        self.last_touch[np.asarray(slots, np.int64)] = ticks.astype(np.uint64)
        self._tick += len(slots)
        return ticks

    # -- namespaces

    def intern(self, namespace_id: bytes) -> int:
        """The small number of a namespace, made on first use, given back with its last block."""
        number = self._ids.get(namespace_id)
        if number is not None:
            return number
        if len(namespace_id) != 16:
            raise ValueError("namespace id is not 16 bytes")
        n0, n1 = _PAIR.unpack(namespace_id)
        mix = (n0 * self._multipliers[2] + n1 * self._multipliers[3]) & _MASK
        if self._spare:
            number = self._spare.pop()
            self._names[number], self._mixes[number] = namespace_id, mix
        else:
            number = len(self._names)
            self._names.append(namespace_id)
            self._mixes.append(mix)
            self._counts.append(0)
            if number >= len(self._mix_column):
                self._mix_column = np.resize(self._mix_column, 2 * number)
        self._mix_column[number] = mix
        self._ids[namespace_id] = number
        return number

    def namespaces(self) -> dict[bytes, int]:
        """Live blocks per namespace."""
        return {name: self._counts[number] for name, number in self._ids.items()}

    def count_of(self, namespace_id: bytes) -> int:
        """Live blocks of one namespace."""
        number = self._ids.get(namespace_id)
        return 0 if number is None else self._counts[number]

    def has_namespace(self, namespace_id: bytes) -> bool:
        """Whether a namespace has a live block."""
        return namespace_id in self._ids

    def namespace_numbers(self) -> tuple[U32, list[bytes]]:
        """The namespace column and the names its numbers stand for (for a checkpoint)."""
        return self._namespace, list(self._names)

    def slots_of(self, namespace_id: bytes, first: int = 0, end: int | None = None) -> Slots:
        """All blocks of a namespace, in slot order; of the slots from `first` to before `end`."""
        number = self._ids.get(namespace_id)
        if number is None:
            return np.zeros(0, np.int64)
        part = slice(first, self._high if end is None else min(end, self._high))
        used = self.flags[part] & LIVE != 0
        return np.flatnonzero(used & (self._namespace[part] == number)) + first

    def live_slots(self) -> Slots:
        """All blocks, in slot order."""
        return np.flatnonzero(self.flags[: self._high] & LIVE)

    def key_columns(self) -> tuple[U64, U64]:
        """First and second half of every key, as strided views."""
        return self._keys[0::2], self._keys[1::2]

    def _drop_count(self, number: int, count: int) -> None:
        self._counts[number] -= count
        assert self._counts[number] >= 0, "namespace count went below zero"
        if not self._counts[number]:
            del self._ids[self._names[number]]
            self._spare.append(number)

    # -- many blocks

    def insert_many(
        self,
        namespaces: U32,
        k0: U64,
        k1: U64,
        *,
        segment: U32,
        offset: U32,
        sealed_bytes: U32,
        plain_bytes: U32,
        position: U32,
        last_touch: U64 | None = None,
    ) -> Slots:
        """Add blocks with distinct new keys; `namespaces` holds interned numbers.

        Without `last_touch` they are touched in the order given. Returns their slots.
        """
        count = len(k0)
        assert count <= self.free, "index is full"
        reused = min(count, self._freed_count)
        slots = np.empty(count, np.int64)
        self._freed_count -= reused
        slots[:reused] = self._freed[self._freed_count : self._freed_count + reused]
        slots[reused:] = np.arange(self._high, self._high + count - reused)
        self._high += count - reused
        self._keys[2 * slots], self._keys[2 * slots + 1] = k0, k1
        self._namespace[slots] = namespaces
        self.segment[slots], self.offset[slots] = segment, offset
        self.sealed_bytes[slots], self.plain_bytes[slots] = sealed_bytes, plain_bytes
        self.position[slots] = position
        self.flags[slots] = LIVE
        self.changes += 1
        if last_touch is None:
            self.touch(slots)
        else:
            self.last_touch[slots] = last_touch
            self._tick = max(self._tick, int(last_touch.max(initial=0)))
        self._link(slots, self._buckets(self._mix_column[namespaces], k0, k1))
        numbers, counts = np.unique(namespaces, return_counts=True)
        for number, added in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._counts[number] += added
        return slots

    def _link(self, slots: Slots, buckets: U64) -> None:
        """Put slots in front of their buckets' chains, several per bucket included."""
        order = np.argsort(buckets, kind="stable")
        slots, buckets = slots[order], buckets[order]
        first = np.ones(len(slots), bool)
        first[1:] = buckets[1:] != buckets[:-1]
        last = np.roll(first, -1)
        if len(slots):
            last[-1] = True
        following = np.empty(len(slots), np.uint32)
        following[1:] = slots[:-1] + 1
        following[first] = self._heads[buckets[first]]
        self._next[slots] = following
        self._heads[buckets[last]] = slots[last] + 1

    def remove_many(self, slots: Slots) -> None:
        """Drop many distinct live blocks, chain level by chain level."""
        if not len(slots):
            return
        assert bool(np.all(self.flags[slots] & LIVE)), "slot is not in use"
        self.changes += 1
        numbers = self._namespace[slots]
        mixes = self._mix_column[numbers]
        k0, k1 = self._keys[2 * slots], self._keys[2 * slots + 1]
        self.flags[slots] = 0
        self._unlink(np.unique(self._buckets(mixes, k0, k1)))
        end = self._freed_count + len(slots)
        self._freed[self._freed_count : end] = slots
        self._freed_count = end
        distinct, counts = np.unique(numbers, return_counts=True)
        for number, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._drop_count(number, count)

    def _unlink(self, buckets: U64) -> None:
        """Cut the dead out of these buckets' chains."""
        at = self._heads[buckets].astype(np.int64)  # slot + 1 under inspection
        before = np.zeros(len(buckets), np.int64)  # slot + 1 of the last live one, 0 for the head
        for _ in range(CHAIN_MAX):
            busy = np.flatnonzero(at)
            if not len(busy):
                return
            slots = at[busy] - 1
            following = self._next[slots].astype(np.int64)
            alive = self.flags[slots] & LIVE != 0
            before[busy[alive]] = at[busy[alive]]
            dead = busy[~alive]
            in_head = dead[before[dead] == 0]
            in_chain = dead[before[dead] != 0]
            at[busy] = following
            self._heads[buckets[in_head]] = at[in_head]
            self._next[before[in_chain] - 1] = at[in_chain]
        raise AssertionError("index chain does not end")


def _scalars(column: npt.NDArray[np.generic]) -> memoryview:
    return memoryview(column)  # type: ignore[arg-type] # arrays are buffers; the stubs do not say so


def _expand(seed: bytes) -> list[int]:
    """Four 64-bit numbers from any seed."""
    raw = hashlib.blake2b(seed, digest_size=32, person=b"entresol-index").digest()
    return list(struct.unpack("<4Q", raw))
