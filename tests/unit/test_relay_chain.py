"""What readers are told against what is stored: parents first, all ranks, no more and no less."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from entresol_client.engines.naming import salted
from entresol_client.relay import chain
from entresol_client.relay.chain import Change, Mirror, Removed, Stored
from entresol_client.relay.keys import Hash, names_in_chunk, number
from entresol_client.relay.layouts import MATCH_FIELDS, NamespaceInfo
from entresol_proto.ids import NamespaceDescriptor

TOKENS = 4
ROOT = b""


def space(rank: int = 0, shard: str = "s", lora: str = "", **fields: int | str) -> NamespaceInfo:
    given = NamespaceDescriptor(
        **{"model": "m", "block_tokens": TOKENS, "tp_world": 4, **fields}  # type: ignore[arg-type]
    )
    layout = tuple(getattr(given, name) for name in MATCH_FIELDS)
    namespace = hashlib.md5(f"{rank}/{shard}/{lora}".encode()).digest()
    return NamespaceInfo(shard, namespace, layout, lora, False, rank, 0)


def key_of(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def wire_of(shard: str, rank: int, key: bytes) -> bytes:
    return hashlib.md5(f"{shard}/{rank}".encode() + key).digest()


def tokens_of(key: bytes, count: int = TOKENS) -> list[int]:
    return list(key[:count])


def put(
    mirror: Mirror, info: NamespaceInfo, keys: Sequence[bytes], parent: bytes = ROOT,
    position: int = 0, tokens: Sequence[int] | None = None,
) -> None:  # fmt: skip
    told = [token for key in keys for token in tokens_of(key)] if tokens is None else tokens
    wires = [wire_of(info.shard, info.rank, key) for key in keys]
    mirror.stored(
        info.shard, info.namespace_id, wires, keys, parent, position, TOKENS, told
    )  # fmt: skip


def drop(mirror: Mirror, info: NamespaceInfo, keys: Iterable[bytes]) -> None:
    wires = [wire_of(info.shard, info.rank, key) for key in keys]
    mirror.removed(info.shard, info.namespace_id, wires)


class Reader:
    """A router that takes nothing on trust: a block of an unknown parent is an error."""

    def __init__(self, *, lenient: bool = False, counting: bool = False) -> None:
        """`counting`: as llm-d's event_dedup_filter and Dynamo's EventDedupFilter do, it forgets a
        block when it was removed as often as it was stored."""
        self.blocks: dict[Hash, tuple[Hash | None, tuple[int, ...]]] = {}
        self.counts: Counter[Hash] = Counter()
        self._counting = counting
        self._lenient = lenient  # it joined late: what it cannot place it drops, as routers do

    def read(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if isinstance(change, Removed):
                for block_hash in change.hashes:
                    self.counts[block_hash] = max(0, self.counts[block_hash] - 1)
                    if not self._counting or not self.counts[block_hash]:
                        self.blocks.pop(block_hash, None)
                continue
            parent = change.parent
            size = change.block_tokens
            assert len(change.tokens) == size * len(change.hashes)
            for at, block_hash in enumerate(change.hashes):
                if parent is not None and parent not in self.blocks:
                    assert self._lenient, f"{block_hash!r} before its parent"
                    break
                self.blocks[block_hash] = (parent, tuple(change.tokens[at * size :][:size]))
                self.counts[block_hash] += 1
                parent = block_hash


def told(mirror: Mirror) -> list[Change]:
    return mirror.take()


@pytest.fixture
def mirror() -> Mirror:
    one = Mirror()
    one.add_space(space())
    return one


KEYS = [key_of(at) for at in range(6)]
HASHES = [number(key) for key in KEYS]


def test_a_chain_is_one_change_with_tokens_and_parents(mirror: Mirror) -> None:
    put(mirror, space(), KEYS)
    (change,) = told(mirror)
    assert isinstance(change, Stored)
    assert (change.hashes, change.parent, change.block_tokens) == (HASHES, None, TOKENS)
    assert list(change.tokens) == [token for key in KEYS for token in tokens_of(key)]
    for at, key in enumerate(KEYS):  # the same again, one by one: nothing is told twice
        put(mirror, space(), [key], KEYS[at - 1] if at else ROOT, at)
    assert told(mirror) == []


def test_a_chain_is_cut_where_a_message_would_grow_too_long(mirror: Mirror) -> None:
    many = [key_of(f"long{at}") for at in range(2 * chain.STORED_HASHES_MAX + 1)]
    put(mirror, space(), many)
    changes = told(mirror)
    assert [len(change.hashes) for change in changes] == [chain.STORED_HASHES_MAX] * 2 + [1]
    Reader().read(changes)
    drop(mirror, space(), many)
    assert sum(len(change.hashes) for change in told(mirror)) == len(many)


def test_children_wait_for_their_parent_whatever_the_order(mirror: Mirror) -> None:
    for at in reversed(range(1, len(KEYS))):
        put(mirror, space(), [KEYS[at]], KEYS[at - 1], at)
    assert told(mirror) == []
    assert mirror.waiting_blocks == len(KEYS) - 1
    put(mirror, space(), [KEYS[0]])
    reader = Reader()
    reader.read(told(mirror))
    assert list(reader.blocks) == HASHES
    assert (mirror.waiting_blocks, mirror.waiting_bytes) == (0, 0)


def test_a_block_is_told_when_all_ranks_have_it_and_withdrawn_when_one_lost_it() -> None:
    mirror = Mirror()
    for rank in range(2):
        mirror.add_space(space(rank))
    put(mirror, space(0), KEYS[:2])
    assert told(mirror) == []
    put(mirror, space(1), KEYS[:2], tokens=[])  # tokens of any rank will do
    reader = Reader()
    reader.read(told(mirror))
    assert list(reader.blocks) == HASHES[:2]
    drop(mirror, space(1), [KEYS[1]])
    (change,) = told(mirror)
    assert change == Removed([HASHES[1]])
    put(mirror, space(1), [KEYS[1]], KEYS[0], 1)
    (again,) = told(mirror)
    assert isinstance(again, Stored)
    assert (again.hashes, again.parent) == ([HASHES[1]], HASHES[0])


def test_a_rank_that_appears_later_takes_back_what_it_does_not_have(mirror: Mirror) -> None:
    put(mirror, space(), KEYS[:2])
    told(mirror)
    mirror.add_space(space(1))
    (change,) = told(mirror)
    assert isinstance(change, Removed)
    assert change.hashes == HASHES[:2]
    put(mirror, space(1), KEYS[:1])
    (change,) = told(mirror)
    assert change.hashes == HASHES[:1]


def test_blocks_that_a_reader_could_not_place_are_counted_and_not_told(mirror: Mirror) -> None:
    put(mirror, space(), [KEYS[0]], tokens=[])
    put(mirror, space(), [KEYS[1]], tokens=[1, 2, 3])
    put(mirror, space(), [KEYS[2]], position=7)
    assert told(mirror) == []
    assert mirror.counts["tokenless_blocks"] == 2
    assert mirror.counts["parentless_blocks"] == 1
    for _ in range(2):  # the first whole snapshot counts them, later ones do not again
        mirror.begin_snapshot("s")
        put(mirror, space(), [KEYS[0]], tokens=[])
        put(mirror, space(), [KEYS[1]], tokens=[1, 2, 3])
        put(mirror, space(), [KEYS[2]], position=7)
        mirror.end_snapshot("s", complete=True)
        assert (mirror.counts["tokenless_blocks"], mirror.counts["parentless_blocks"]) == (4, 2)
    drop(mirror, space(), KEYS[:3])
    assert told(mirror) == []
    assert mirror.stored_blocks == 0


@pytest.mark.parametrize("with_salted", [False, True])
def test_salted_blocks_are_told_only_on_request(with_salted: bool) -> None:
    mirror = Mirror(with_salted=with_salted)
    mirror.add_space(space())
    keys = [salted(key, "grain") for key in KEYS]
    put(mirror, space(), keys)
    put(mirror, space(), [KEYS[1]], keys[0], 1)  # an unsalted one behind a salted one
    changes = told(mirror)
    if with_salted:
        assert [change.hashes for change in changes] == [HASHES]
        drop(mirror, space(), [keys[1]])
        assert told(mirror) == [], "the unsalted copy is still there"
        drop(mirror, space(), [KEYS[1]])
        assert told(mirror) == [Removed([HASHES[1]])]
    else:
        assert changes == []
        assert mirror.counts["salted_blocks"] == len(keys)
        assert mirror.counts["parentless_blocks"] == 1


def test_only_the_group_that_has_tokens_counts(mirror: Mirror) -> None:
    first, second = (key_of("x") + n.to_bytes(4, "big") for n in range(2))
    put(mirror, space(), [first])
    put(mirror, space(), [second], tokens=[])
    assert len(told(mirror)) == 1
    drop(mirror, space(), [second])
    assert told(mirror) == []
    drop(mirror, space(), [first])
    assert told(mirror) == [Removed([number(key_of("x"))])]


def test_adapters_are_told_apart() -> None:
    mirror = Mirror()
    mirror.add_space(space())
    mirror.add_space(space(lora="tuned"))
    put(mirror, space(), KEYS[:1])
    put(mirror, space(lora="tuned"), KEYS[1:2])
    assert [change.lora for change in told(mirror) if isinstance(change, Stored)] == ["", "tuned"]


def test_stored_blocks_are_cut_into_the_readers_blocks() -> None:
    mirror = Mirror(block_tokens=2)
    mirror.add_space(space())
    put(mirror, space(), KEYS[:2])
    (change,) = told(mirror)
    assert isinstance(change, Stored)
    assert change.block_tokens == 2
    expected = [*names_in_chunk(HASHES[0], 2), *names_in_chunk(HASHES[1], 2)]
    assert change.hashes == expected
    drop(mirror, space(), [KEYS[1]])
    (gone,) = told(mirror)
    assert gone.hashes == expected[2:]
    odd = Mirror(block_tokens=3)
    odd.add_space(space())
    put(odd, space(), KEYS[:1])
    assert told(odd) == []
    assert odd.counts["other_size_blocks"] == 1


def test_hashes_can_be_bytes() -> None:
    mirror = Mirror(as_bytes=True)
    mirror.add_space(space())
    put(mirror, space(), KEYS[:2])
    (change,) = told(mirror)
    assert change.hashes == KEYS[:2]


def test_a_snapshot_tells_only_the_difference(mirror: Mirror) -> None:
    put(mirror, space(), KEYS[:4])
    told(mirror)
    mirror.begin_snapshot("s")
    put(mirror, space(), KEYS[:2])
    put(mirror, space(), [KEYS[3]], KEYS[2], 3)
    put(mirror, space(), [KEYS[4]], KEYS[3], 4)
    mirror.end_snapshot("s", complete=True)
    stored, gone = told(mirror)
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.parent) == ([HASHES[4]], HASHES[3])
    assert gone == Removed([HASHES[2]])


def test_a_broken_snapshot_takes_nothing_back(mirror: Mirror) -> None:
    put(mirror, space(), KEYS[:4])
    told(mirror)
    mirror.begin_snapshot("s")
    put(mirror, space(), KEYS[:1])
    mirror.end_snapshot("s", complete=False)
    assert told(mirror) == []
    mirror.begin_snapshot("s")
    mirror.begin_snapshot("s")  # begun again without an end
    put(mirror, space(), KEYS[:3])
    mirror.end_snapshot("s", complete=True)
    assert told(mirror) == [Removed([HASHES[3]])]


def test_a_shard_that_is_cleared_takes_back_only_what_no_other_has() -> None:
    mirror = Mirror()
    for shard in ("s", "t"):
        mirror.add_space(space(shard=shard))
    put(mirror, space(), KEYS[:3])
    put(mirror, space(shard="t"), [KEYS[1]], KEYS[0], 1)
    told(mirror)
    mirror.cleared("s")
    (change,) = told(mirror)
    assert isinstance(change, Removed)
    assert sorted(change.hashes) == sorted([HASHES[0], HASHES[2]])
    mirror.cleared("t", space().namespace_id)  # another shard's namespace: nothing of this one
    assert told(mirror) == []
    mirror.cleared("t", space(shard="t").namespace_id)
    assert told(mirror) == [Removed([HASHES[1]])]
    assert mirror.stored_blocks == 0


def test_what_waits_is_bounded_and_found_again() -> None:
    limit = 3 * (chain.WAITING_OVERHEAD_BYTES + 4 * TOKENS)
    mirror = Mirror(waiting_bytes_max=limit)
    mirror.add_space(space())
    for at in range(1, 5):  # one more than fits
        put(mirror, space(), [KEYS[at]], KEYS[at - 1], at)
        assert mirror.lost is (at == 4)
    assert mirror.waiting_bytes == limit
    put(mirror, space(), [KEYS[0]])
    told(mirror)
    assert mirror.told_blocks == 1, "the first to wait was forgotten, the others wait for it"
    mirror.begin_snapshot("s")
    put(mirror, space(), KEYS[:5])
    mirror.end_snapshot("s", complete=True)
    told(mirror)
    assert mirror.told_blocks == 5


def test_telling_again_reaches_a_reader_that_knows_nothing(mirror: Mirror) -> None:
    old, new = Reader(), Reader()
    put(mirror, space(), KEYS[:4])
    old.read(told(mirror))
    mirror.tell_again()
    mirror.begin_snapshot("s")
    put(mirror, space(), [KEYS[0]])
    drop(mirror, space(), [KEYS[3]])  # goes while the round is under way
    put(mirror, space(), KEYS[1:3], KEYS[0], 1)
    mirror.end_snapshot("s", complete=True)
    changes = told(mirror)
    old.read(changes)
    new.read(changes)
    assert list(new.blocks) == HASHES[:3]
    assert old.blocks == new.blocks, "what went meanwhile was taken back"
    assert mirror.told_blocks == 3


@pytest.mark.parametrize("block_tokens", [0, 2])
@pytest.mark.parametrize("rounds", [0, 1, 3, 2 * chain.TELLINGS_MAX + 1])
def test_a_reader_that_counts_forgets_what_was_told_in_many_rounds(
    rounds: int, block_tokens: int
) -> None:
    """Rounds tell everything again, and one removal would leave such a reader with it for ever."""
    mirror = Mirror(block_tokens=block_tokens)
    mirror.add_space(space())
    readers = [Reader(counting=True), Reader()]
    put(mirror, space(), KEYS[:4])
    for at in range(rounds + 1):
        if at:
            mirror.tell_again()
            mirror.begin_snapshot("s")
            put(mirror, space(), KEYS[:4])
            mirror.end_snapshot("s", complete=True)
        readers.append(Reader(counting=True))  # one that joins with this round
        changes = told(mirror)
        for one in readers:
            one.read(changes)
            assert one.blocks == readers[0].blocks
        assert max(readers[0].counts.values()) <= chain.TELLINGS_MAX
    assert mirror.told_blocks == 4
    drop(mirror, space(), KEYS[1:4])
    changes = told(mirror)
    names = [one for change in changes for one in change.hashes]
    assert max(Counter(names).values()) <= chain.TELLINGS_MAX
    for one in readers:
        one.read(changes)
        assert list(one.blocks) == [*names_in_chunk(HASHES[0], 2 if block_tokens else 1)]
    put(mirror, space(), KEYS[1:2], KEYS[0], 1)
    drop(mirror, space(), KEYS[1:2])
    again, gone = told(mirror)
    assert gone.hashes == again.hashes, "told once since, taken back once"
    assert mirror.counts["withdrawn_blocks"] == 4


def test_a_rank_that_appears_in_a_round_takes_back_what_earlier_ones_told(mirror: Mirror) -> None:
    reader = Reader(counting=True)
    put(mirror, space(), KEYS[:2])
    reader.read(told(mirror))
    mirror.tell_again()
    mirror.add_space(space(1))
    reader.read(told(mirror))
    assert reader.blocks == {}


def test_events_of_namespaces_that_are_not_ours_are_ignored(mirror: Mirror) -> None:
    other = replace(space(), namespace_id=b"another........!")
    put(mirror, other, KEYS)
    drop(mirror, other, KEYS)
    mirror.cleared("nowhere")
    assert told(mirror) == []
    assert not mirror.knows("s", other.namespace_id)


# Against a model ----------------------------------------------------------------------------------

TREE = {0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: None, 7: 6}  # block -> the block before it
PLACES = [(shard, rank) for shard in ("s", "t") for rank in (0, 1)]
blocks = st.sampled_from(sorted(TREE))
places = st.sampled_from(PLACES)


class Relaying(RuleBasedStateMachine):
    """Any order of stores, losses, snapshots and rounds over two shards and two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[tuple[str, int], set[int]] = {place: set() for place in PLACES}
        self.mirror = Mirror()
        self.reader = Reader()
        self.counting = Reader(counting=True)

    @initialize()
    def spaces(self) -> None:
        for shard, rank in PLACES:
            self.mirror.add_space(space(rank, shard))

    def _put(self, place: tuple[str, int], block: int) -> None:
        parent, depth, at = TREE[block], 0, TREE[block]
        while at is not None:
            depth, at = depth + 1, TREE[at]
        info = space(place[1], place[0])
        put(self.mirror, info, [key_of(block)], ROOT if parent is None else key_of(parent), depth)

    def _read(self) -> None:
        changes = self.mirror.take()
        self.reader.read(changes)
        self.counting.read(changes)

    def _complete(self) -> set[int]:
        return {
            block for block in TREE
            if all(any(block in self.stored[s, rank] for s in "st") for rank in (0, 1))
        }  # fmt: skip

    @rule(place=places, block=blocks)
    def store(self, place: tuple[str, int], block: int) -> None:
        self.stored[place].add(block)
        self._put(place, block)

    @rule(place=places, block=blocks)
    def lose(self, place: tuple[str, int], block: int) -> None:
        self.stored[place].discard(block)
        drop(self.mirror, space(place[1], place[0]), [key_of(block)])

    @rule(shard=st.sampled_from(["s", "t"]), lost=st.sets(blocks), new=st.sets(blocks))
    def restart(self, shard: str, lost: set[int], new: set[int]) -> None:
        """The shard comes back with less, and with what the relay has not seen."""
        for place in PLACES:
            if place[0] == shard:
                self.stored[place] = (self.stored[place] - lost) | new
        self._snapshot(shard, complete=True)

    @rule(shard=st.sampled_from(["s", "t"]))
    def broken_snapshot(self, shard: str) -> None:
        self._snapshot(shard, complete=False)

    def _snapshot(self, shard: str, *, complete: bool) -> None:
        self.mirror.begin_snapshot(shard)
        for place in PLACES:
            if place[0] == shard:
                listed = sorted(self.stored[place])
                for block in listed if complete else listed[: len(listed) // 2]:
                    self._put(place, block)
        self.mirror.end_snapshot(shard, complete=complete)

    @rule(joins=st.booleans())
    def round(self, joins: bool) -> None:
        """Everything is told again; a reader that knows nothing may begin with it."""
        self._read()
        if joins:
            self.reader, self.counting = Reader(), Reader(counting=True)
        self.mirror.tell_again()
        for shard in ("t", "s"):
            self._snapshot(shard, complete=True)

    @invariant()
    def readers_know_what_they_can_use_and_nothing_else(self) -> None:
        self._read()
        assert self.counting.blocks == self.reader.blocks
        assert max(self.counting.counts.values(), default=0) <= chain.TELLINGS_MAX
        complete = self._complete()
        usable = set()
        for block in sorted(TREE):
            if block in complete and (TREE[block] is None or TREE[block] in usable):
                usable.add(block)
        names = {number(key_of(block)): block for block in TREE}
        known = {names[block_hash] for block_hash in self.reader.blocks}  # type: ignore[index]
        assert usable <= known <= complete
        for block_hash, (parent, tokens) in self.reader.blocks.items():
            block = names[block_hash]  # type: ignore[index]
            assert tokens == tuple(tokens_of(key_of(block)))
            assert parent == (None if TREE[block] is None else number(key_of(TREE[block])))

    @invariant()
    def books_add_up(self) -> None:
        anywhere = set().union(*self.stored.values())
        assert self.mirror.stored_blocks == len(anywhere)
        waiting = self.mirror.waiting_blocks
        each_bytes = chain.WAITING_OVERHEAD_BYTES + 4 * TOKENS
        assert self.mirror.waiting_bytes == waiting * each_bytes
        assert self.mirror.told_blocks + waiting <= len(anywhere)


TestRelaying = Relaying.TestCase
TestRelaying.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_event_whose_keys_do_not_match_is_counted_and_left() -> None:
    """Found by fuzzing (target events, seed 20261496): it had ended the relay."""
    mirror = Mirror()
    mirror.add_space(space())
    name = space().namespace_id
    mirror.stored("s", name, [b"w" * 16], [b"e" * 32, b"f" * 32], b"", 0, 0, [])
    assert mirror.counts["malformed_blocks"] == 1
    assert mirror.take() == []


def test_a_block_that_a_snapshot_cannot_name_stays_what_it_was(mirror: Mirror) -> None:
    """Flash may not give its head for a moment; nothing would have brought it back."""
    info = space()
    put(mirror, info, KEYS[:3])
    told(mirror)
    mirror.begin_snapshot("s")
    put(mirror, info, KEYS[:1])
    for key in (KEYS[1], KEYS[5]):  # the second was put meanwhile
        wire_key = wire_of(info.shard, info.rank, key)
        mirror.stored("s", info.namespace_id, [wire_key], [], b"", 1, 0, [])
    mirror.end_snapshot("s", complete=True)
    assert told(mirror) == [Removed([HASHES[2]])]
    assert mirror.counts["nameless_blocks"] == 1
    drop(mirror, info, [KEYS[1], KEYS[5]])
    assert told(mirror) == [Removed([HASHES[1]])]
