"""The index against a dict: scalar and batch calls must tell the same story."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from entresol_daemon.flash.index import ABSENT, LIVE, PENDING, SCALAR_KEYS_MAX, Index

NAMESPACES = [bytes([n]) * 16 for n in range(1, 4)]


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") + (number * 7).to_bytes(8, "big")


def add(index: Index, namespace: bytes, wire_key: bytes, value: int) -> int:
    return index.insert(
        namespace, wire_key, segment=value % 7, offset=value, sealed_bytes=value + 1,
        plain_bytes=value + 2, position=value + 3,
    )  # fmt: skip


def add_many(index: Index, namespace: bytes, keys: list[bytes], base: int) -> np.ndarray:
    pairs = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
    values = np.arange(base, base + len(keys), dtype=np.uint32)
    return index.insert_many(
        np.full(len(keys), index.intern(namespace), np.uint32),
        pairs[:, 0], pairs[:, 1], segment=values % 7, offset=values, sealed_bytes=values + 1,
        plain_bytes=values + 2, position=values + 3,
    )  # fmt: skip


class IndexMachine(RuleBasedStateMachine):
    """Insert, remove and look up, one by one and in bulk, against a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(40, seed=b"machine")
        self.model: dict[tuple[bytes, bytes], int] = {}
        self.looked = (self.index.changes, dict(self.model))

    @precondition(lambda self: self.index.free > 0)
    @rule(namespace=st.sampled_from(NAMESPACES), number=st.integers(0, 30))
    def insert(self, namespace: bytes, number: int) -> None:
        if (namespace, key(number)) not in self.model:
            self.model[namespace, key(number)] = add(self.index, namespace, key(number), number)

    @rule(namespace=st.sampled_from(NAMESPACES), numbers=st.sets(st.integers(0, 30)))
    def insert_many(self, namespace: bytes, numbers: set[int]) -> None:
        keys = [key(n) for n in sorted(numbers) if (namespace, key(n)) not in self.model]
        keys = keys[: self.index.free]
        if keys:
            slots = add_many(self.index, namespace, keys, 1000)
            self.model |= {(namespace, k): int(s) for k, s in zip(keys, slots, strict=True)}

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from(sorted(self.model)))
        self.index.remove(self.model.pop(found))

    @rule(data=st.data())
    def remove_many(self, data: st.DataObject) -> None:
        if self.model:
            chosen = data.draw(st.sets(st.sampled_from(sorted(self.model))))
            self.index.remove_many(np.array([self.model.pop(c) for c in sorted(chosen)], np.int64))

    @invariant()
    def what_was_looked_up_is_right_while_nothing_changes(self) -> None:
        if self.index.changes == self.looked[0]:
            assert self.model == self.looked[1]
        self.looked = (self.index.changes, dict(self.model))

    @invariant()
    def agrees(self) -> None:
        index = self.index
        assert len(index) == len(self.model)
        for namespace in NAMESPACES:
            expected = [self.model.get((namespace, key(n)), ABSENT) for n in range(31)]
            assert [index.find(namespace, key(n)) for n in range(31)] == expected
            joined = b"".join(key(n) for n in range(31))
            assert index.lookup(namespace, joined).tolist() == expected
            mine = sorted(s for (ns, _), s in self.model.items() if ns == namespace)
            assert index.slots_of(namespace).tolist() == mine
        for (namespace, wire_key), slot in self.model.items():
            assert index.namespace_of(slot) == namespace
            assert index.key_of(slot) == wire_key


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_properties_are_kept_per_block() -> None:
    index = Index(10)
    slot = add(index, NAMESPACES[0], key(1), 5)
    assert index.position[slot] == 8
    assert index.plain_bytes[slot] == 7
    assert index.sealed_bytes[slot] == 6
    assert (index.segment[slot], index.offset[slot]) == (5, 5)
    assert index.flags[slot] == LIVE
    index.m_flags[slot] |= PENDING
    assert index.is_live(slot)


def test_a_full_index_and_a_duplicate_are_loud() -> None:
    index = Index(2)
    add(index, NAMESPACES[0], key(1), 1)
    with pytest.raises(AssertionError, match="duplicate"):
        add(index, NAMESPACES[0], key(1), 1)
    add(index, NAMESPACES[0], key(2), 1)
    assert index.free == 0
    with pytest.raises(AssertionError, match="full"):
        add(index, NAMESPACES[0], key(3), 1)
    index.remove(0)
    with pytest.raises(AssertionError, match="not in use"):
        index.remove(0)


def test_touch_orders_by_the_order_given() -> None:
    index = Index(10)
    slots = [add(index, NAMESPACES[0], key(n), n) for n in range(4)]
    index.touch([slots[3], slots[1], slots[3], slots[0]])
    order = sorted(slots, key=lambda s: int(index.last_touch[s]))
    assert order == [slots[2], slots[1], slots[3], slots[0]]


def test_short_and_long_lookups_agree_at_the_border() -> None:
    index = Index(100)
    for n in range(0, 40, 2):
        add(index, NAMESPACES[0], key(n), n)
    for count in (0, 1, SCALAR_KEYS_MAX, SCALAR_KEYS_MAX + 1, 40):
        keys = b"".join(key(n) for n in range(count))
        expected = [index.find(NAMESPACES[0], key(n)) for n in range(count)]
        assert index.lookup(NAMESPACES[0], keys).tolist() == expected
    assert index.lookup(NAMESPACES[1], key(0) * 20).tolist() == [ABSENT] * 20
    with pytest.raises(ValueError, match="multiple of 16"):
        index.lookup(NAMESPACES[0], b"short")


def test_namespace_numbers_are_given_back() -> None:
    index = Index(4)
    for round_ in range(1000):
        slot = add(index, round_.to_bytes(16, "little"), key(1), 1)
        index.remove(slot)
    assert index.namespaces() == {}
    assert len(index.namespace_numbers()[1]) == 1


def test_one_key_in_many_namespaces_is_a_block_of_each() -> None:
    """Some of them share a bucket: there the namespace alone tells them apart."""
    rng = random.Random(7)
    names = [rng.randbytes(16) for _ in range(200)]
    index, many = Index(2 * len(names)), SCALAR_KEYS_MAX + 1
    slots = [add(index, name, key(1), n) for n, name in enumerate(names)]
    for n, name in enumerate(names):
        add(index, name, key(2), n)  # so that it is known although the other goes
    for gone in (None, *slots[::2]):
        if gone is not None:
            index.remove(gone)
            slots[slots.index(gone)] = ABSENT
    for name, slot in zip(names, slots, strict=True):
        assert index.find(name, key(1)) == slot
        assert index.lookup(name, key(1) * many).tolist() == [slot] * many


def test_many_namespaces_look_up_in_batches() -> None:
    index = Index(200)
    names = [n.to_bytes(16, "little") for n in range(100)]
    slots = [add(index, name, key(1), n) for n, name in enumerate(names)]
    for name, slot in zip(names, slots, strict=True):
        assert index.lookup(name, key(1) * 10).tolist() == [slot] * 10


def test_keys_that_agree_in_every_low_bit_do_not_share_buckets() -> None:
    index = Index(4096, seed=b"secret")
    keys = [bytes(8) + (n << 40).to_bytes(8, "little") for n in range(4096)]
    add_many(index, NAMESPACES[0], keys, 0)
    longest = 0
    heads = index._heads.tolist()
    following = index._next.tolist()
    for head in heads:
        length = 0
        while head:
            length, head = length + 1, following[head - 1]
        longest = max(longest, length)
    assert longest <= 16


def test_random_bulk_against_dict() -> None:
    seed = 20
    rng = random.Random(seed)
    index = Index(3000, seed=b"bulk")
    model: dict[bytes, int] = {}
    for step in range(60):
        keys = list({rng.randbytes(16) for _ in range(rng.randrange(1, 200))})[: index.free]
        if keys:
            slots = add_many(index, NAMESPACES[0], keys, step)
            model |= dict(zip(keys, slots.tolist(), strict=True))
        gone = rng.sample(sorted(model), rng.randrange(0, len(model) // 2 + 1))
        index.remove_many(np.array([model.pop(k) for k in gone], np.int64))
        asked = [*model, *gone, rng.randbytes(16)]
        expected = [model.get(k, ABSENT) for k in asked]
        assert index.lookup(NAMESPACES[0], b"".join(asked)).tolist() == expected, f"seed={seed}"


def test_memory_stays_below_the_promise() -> None:
    assert Index(5_000_000).memory_bytes() / 5_000_000 <= 128 - 4  # 4: the segment's slot list
