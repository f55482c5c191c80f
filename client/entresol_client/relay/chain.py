"""What routers have been told: a mirror that turns a daemon's events into theirs.

Pure. Invariants:
- a block is announced only when every known rank of its layout has it, its tokens are known, and
  the block before it is announced: readers drop a block of an unknown parent, or misplace it;
- it is withdrawn as soon as any rank lost it; blocks behind it stay announced, as they are stored
  and a reader's walk ends at the hole by itself;
- telling the same twice changes nothing; what was told is known, so that after a gap, a restart of
  the daemon or an erasure only the difference is published;
- a removal names a block as often as it was told, in all rounds since: some readers count (llm-d's
  event_dedup_filter, Dynamo's EventDedupFilter) and forget at zero, none minds once more.

Memory: two dictionary entries per block; tokens are kept only while a block waits.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from entresol_client.relay import keys
from entresol_client.relay.keys import Hash
from entresol_client.relay.layouts import NamespaceInfo

WAITING_BYTES_MAX = 256 * 1024 * 1024
WAITING_OVERHEAD_BYTES = 400  # of one waiting block beside its tokens, measured roughly
COPIES_BITS = 16  # per rank: copies of one block on several shards, or in several cache groups
STORED_HASHES_MAX = 64  # in one change
STORED_TOKENS_MAX = 16 * 1024  # in one change, and of it the first block whatever it has
REMOVED_HASHES_MAX = 512

TELLINGS_MAX = 15  # of a block; before the next one they are taken back

_TOLD = 1  # in this round
_TELLING = 2  # one; how many readers may have counted
_TELLINGS = TELLINGS_MAX * _TELLING
_FLAGS = 5

SpaceName = tuple[str, bytes]
"""(shard, namespace id)."""


@dataclass(slots=True)
class Stored:
    """Announce a chain: each hash is the parent of the next, `tokens` are those of all of them."""

    hashes: list[Hash]
    parent: Hash | None
    tokens: array[int] = field(repr=False)
    block_tokens: int
    lora: str = ""


@dataclass(slots=True)
class Removed:
    """Withdraw blocks."""

    hashes: list[Hash]


Change = Stored | Removed


@dataclass(slots=True)
class _Waiting:
    """A block that is stored and cannot be announced yet."""

    parent: Hash | None
    tokens: array[int]

    @property
    def cost_bytes(self) -> int:
        return WAITING_OVERHEAD_BYTES + 4 * len(self.tokens)


class _Chain:
    """All blocks of one layout and LoRA adapter, over shards and ranks."""

    __slots__ = ("behind", "blocks", "lora", "masks", "parts", "waiting")

    def __init__(self, lora: str, parts: int) -> None:
        self.lora = lora
        self.masks: tuple[int, ...] = ()  # of each known rank's count in a block's state
        self.parts = parts  # readers' blocks in one stored block
        self.blocks: dict[Hash, int] = {}  # flags, then a count of copies per rank
        self.waiting: OrderedDict[Hash, _Waiting] = OrderedDict()
        self.behind: dict[Hash, dict[Hash, None]] = {}  # parent -> which waiting blocks follow it

    def complete(self, block_hash: Hash) -> bool:
        """True when every known rank has it."""
        state = self.blocks.get(block_hash, 0)
        return all(state & mask for mask in self.masks)

    def told(self, block_hash: Hash | None) -> bool:
        return block_hash is None or bool(self.blocks.get(block_hash, 0) & _TOLD)


@dataclass(slots=True)
class _Space:
    """One namespace of one shard: which block each of its keys names."""

    chain: _Chain
    maker: str  # of its keys
    copy: int  # what one copy on its rank adds to a block's state
    blocks: dict[bytes, Hash] = field(default_factory=dict)
    before: dict[bytes, Hash] | None = None  # while a snapshot runs: keys it did not list yet
    listed: bool = False  # by a whole snapshot: what a later one skips was counted


class Mirror:
    """See the module. Not thread-safe."""

    def __init__(
        self,
        *,
        as_bytes: bool = False,
        block_tokens: int = 0,
        with_salted: bool = False,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        """`block_tokens` is the readers' block size, 0 for the one that blocks are stored in."""
        self.counts: Counter[str] = Counter()
        self.told_blocks = 0  # announced to readers, in this round
        self.waiting_bytes = 0
        self.lost = False  # a waiting block was dropped: a new snapshot would bring it back
        self._as_bytes = as_bytes
        self._block_tokens = block_tokens
        self._with_salted = with_salted
        self._waiting_bytes_max = waiting_bytes_max
        self._spaces: dict[SpaceName, _Space] = {}
        self._chains: dict[str, _Chain] = {}
        self._changes: list[Change] = []

    # ------------------------------------------------------------------------------- state

    @property
    def stored_blocks(self) -> int:
        """Blocks stored by at least one rank."""
        return sum(len(chain.blocks) for chain in self._chains.values())

    @property
    def waiting_blocks(self) -> int:
        """Stored blocks that wait for a parent or a rank."""
        return sum(len(chain.waiting) for chain in self._chains.values())

    @property
    def changes_count(self) -> int:
        """How many changes `take` would give."""
        return len(self._changes)

    def knows(self, shard: str, namespace_id: bytes) -> bool:
        """True when this namespace was added."""
        return (shard, namespace_id) in self._spaces

    def take(self) -> list[Change]:
        """What to publish now, in order; the caller owns it."""
        changes, self._changes = self._changes, []
        return changes

    # ------------------------------------------------------------------------------ events

    def add_space(self, info: NamespaceInfo) -> None:
        """Follow a namespace of the layout that is published. Again is nothing.

        Its rank counts from now on: what it does not have is withdrawn. An engine whose blocks hold
        the parts of all ranks has one namespace, and one rank.
        """
        name = (info.shard, info.namespace_id)
        if name in self._spaces:
            return
        stored_tokens = int(info.value("block_tokens"))
        parts = max(1, stored_tokens // (self._block_tokens or stored_tokens))
        chain = self._chains.setdefault(info.lora, _Chain(info.lora, parts))
        assert chain.parts == parts, "a mirror has one layout"
        shift = _FLAGS + COPIES_BITS * info.rank
        mask = (1 << COPIES_BITS) - 1 << shift
        if mask not in chain.masks:
            chain.masks = (*chain.masks, mask)
            known = _TOLD | _TELLINGS
            for block_hash in [one for one, state in chain.blocks.items() if state & known]:
                if not chain.complete(block_hash):
                    self._withdraw(chain, block_hash)
        maker = keys.maker_of(str(info.value("page_layout")))
        self._spaces[name] = _Space(chain, maker, 1 << shift)

    def stored(
        self,
        shard: str,
        namespace_id: bytes,
        wire_keys: Sequence[bytes],
        engine_keys: Sequence[bytes],
        parent: bytes,
        position: int,
        block_tokens: int,
        token_ids: Sequence[int],
        live: bool = False,
    ) -> None:
        """A `stored` event, `live` or of a snapshot; keys of a namespace not added are ignored."""
        space = self._spaces.get((shard, namespace_id))
        if space is None:
            return
        if not engine_keys:
            self._nameless(space, wire_keys)
            return
        if len(wire_keys) != len(engine_keys):  # no event of ours: which is whose cannot be told
            self.counts["malformed_blocks"] += len(wire_keys)
            return
        fits = block_tokens > 0 and len(token_ids) == block_tokens * len(wire_keys)
        before, headless = self._before(space, parent, position)
        new = live or space.before is None or not space.listed
        for at, (wire_key, engine_key) in enumerate(zip(wire_keys, engine_keys, strict=True)):
            parts = keys.split(engine_key, space.maker)
            if parts.salted and not self._with_salted:
                self.counts["salted_blocks"] += new
                headless = True
                continue
            if parts.group and not fits:  # only one group's blocks are told of, with tokens
                self.counts["tokenless_blocks"] += new
                continue
            block_hash = parts.hash if self._as_bytes else keys.number(parts.hash)
            self._present(space, wire_key, block_hash)
            if not fits or headless or not self._cuts(block_tokens):
                why = "tokenless" if not fits else "parentless" if headless else "other_size"
                self.counts[f"{why}_blocks"] += new
            else:
                tokens = array("I", token_ids[at * block_tokens : (at + 1) * block_tokens])
                self._offer(space.chain, block_hash, before, tokens)
            before, headless = block_hash, False

    def removed(self, shard: str, namespace_id: bytes, wire_keys: Iterable[bytes]) -> None:
        """A `removed`, `expired` or `corrupt` event."""
        space = self._spaces.get((shard, namespace_id))
        if space is None:
            return
        for wire_key in wire_keys:
            block_hash = space.blocks.pop(wire_key, None)
            if block_hash is None and space.before is not None:
                block_hash = space.before.pop(wire_key, None)
            if block_hash is not None:
                self._absent(space, block_hash)

    def cleared(self, shard: str, namespace_id: bytes = b"") -> None:
        """Every block of a namespace is gone, or of all namespaces of the shard."""
        for name, space in self._spaces.items():
            if name[0] == shard and namespace_id in (b"", name[1]):
                gone = [*space.blocks.values(), *(space.before or {}).values()]
                space.blocks, space.before = {}, None
                for block_hash in gone:
                    self._absent(space, block_hash)

    def begin_snapshot(self, shard: str) -> None:
        """`stored` of everything on the shard follows, then `end_snapshot`."""
        for name, space in self._spaces.items():
            if name[0] == shard:
                space.before = {**(space.before or {}), **space.blocks}
                space.blocks = {}

    def end_snapshot(self, shard: str, *, complete: bool) -> None:
        """What a complete snapshot did not list is gone; after a broken one nothing is known."""
        for name, space in self._spaces.items():
            if name[0] == shard and space.before is not None:
                left, space.before = space.before, None
                if complete:
                    space.listed = True
                    for block_hash in left.values():
                        self._absent(space, block_hash)
                else:
                    space.blocks.update(left)

    def tell_again(self) -> None:
        """Begin a round for readers that know nothing: snapshots of all shards must follow.

        Every block counts as not announced, so that parents come first again; what is removed
        meanwhile is still withdrawn, for readers that know it.
        """
        self.lost = False
        self.told_blocks = 0
        for chain in self._chains.values():
            chain.waiting.clear()
            chain.behind.clear()
            for block_hash, state in chain.blocks.items():
                if state & _TOLD:
                    chain.blocks[block_hash] = state & ~_TOLD
        self.waiting_bytes = 0

    # ------------------------------------------------------------------------------ inside

    def _before(self, space: _Space, parent: bytes, position: int) -> tuple[Hash | None, bool]:
        """The hash of the block before, None at the root; and whether it is wanted and missing."""
        if not parent:
            return None, position > 0
        parts = keys.split(parent, space.maker)
        if parts.salted and not self._with_salted:
            return None, True
        return parts.hash if self._as_bytes else keys.number(parts.hash), False

    def _cuts(self, block_tokens: int) -> bool:
        """True when readers' blocks fit into stored ones."""
        return not self._block_tokens or block_tokens % self._block_tokens == 0

    def _present(self, space: _Space, wire_key: bytes, block_hash: Hash) -> None:
        """A rank has it; the second time is nothing."""
        if wire_key in space.blocks:
            return
        space.blocks[wire_key] = block_hash
        if space.before is not None and space.before.pop(wire_key, None) is not None:
            return
        chain = space.chain
        chain.blocks[block_hash] = chain.blocks.get(block_hash, 0) + space.copy
        if block_hash in chain.waiting:
            self._announce_from(chain, block_hash)

    def _nameless(self, space: _Space, wire_keys: Iterable[bytes]) -> None:
        """The shard has them, and could not read now what they are: those known before are kept."""
        for wire_key in wire_keys:
            if space.before is not None and wire_key in space.before:
                self._present(space, wire_key, space.before[wire_key])
            elif wire_key not in space.blocks:
                self.counts["nameless_blocks"] += 1

    def _absent(self, space: _Space, block_hash: Hash) -> None:
        """A rank lost a copy of it."""
        chain = space.chain
        state = chain.blocks[block_hash] - space.copy
        assert state >= 0, "more copies went than came"
        chain.blocks[block_hash] = state
        if not chain.complete(block_hash):
            if state & (_TOLD | _TELLINGS):
                self._withdraw(chain, block_hash)
            if not chain.blocks[block_hash]:
                del chain.blocks[block_hash]
                self._stop_waiting(chain, block_hash)

    def _offer(
        self, chain: _Chain, block_hash: Hash, parent: Hash | None, tokens: array[int]
    ) -> None:
        """Its tokens are known: announce it now, or when it can be."""
        if chain.blocks[block_hash] & _TOLD or block_hash in chain.waiting:
            return
        if chain.complete(block_hash) and chain.told(parent):
            self._announce(chain, block_hash, parent, tokens)
            for child in list(chain.behind.get(block_hash, ())):
                if child in chain.waiting:
                    self._announce_from(chain, child)
            return
        waiting = _Waiting(parent, tokens)
        chain.waiting[block_hash] = waiting
        self.waiting_bytes += waiting.cost_bytes
        if parent is not None:
            chain.behind.setdefault(parent, {})[block_hash] = None
        while self.waiting_bytes > self._waiting_bytes_max:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Forget the tokens of one that waits; it is found again with the next snapshot."""
        chain = max(self._chains.values(), key=lambda each: len(each.waiting))
        self._stop_waiting(chain, next(iter(chain.waiting)))
        self.counts["dropped_waiting_blocks"] += 1
        self.lost = True

    def _stop_waiting(self, chain: _Chain, block_hash: Hash) -> None:
        waiting = chain.waiting.pop(block_hash, None)
        if waiting is None:
            return
        self.waiting_bytes -= waiting.cost_bytes
        if waiting.parent is not None:
            siblings = chain.behind[waiting.parent]
            del siblings[block_hash]
            if not siblings:
                del chain.behind[waiting.parent]

    def _announce_from(self, chain: _Chain, block_hash: Hash) -> None:
        """Announce a waiting block if it can be, and whoever waited for it."""
        todo = deque([block_hash])
        while todo:
            found = todo.popleft()
            waiting = chain.waiting[found]
            if chain.complete(found) and chain.told(waiting.parent):
                self._stop_waiting(chain, found)
                self._announce(chain, found, waiting.parent, waiting.tokens)
                todo.extend(chain.behind.get(found, ()))

    def _announce(
        self, chain: _Chain, block_hash: Hash, parent: Hash | None, tokens: array[int]
    ) -> None:
        """Tell readers, in the last change where that goes on with this block."""
        if chain.blocks[block_hash] & _TELLINGS == _TELLINGS:
            self._take_back(chain, block_hash)
        chain.blocks[block_hash] = (chain.blocks[block_hash] | _TOLD) + _TELLING
        self.told_blocks += 1
        self.counts["announced_blocks"] += 1
        hashes = keys.names_in_chunk(block_hash, chain.parts)
        last = self._changes[-1] if self._changes else None
        if (
            isinstance(last, Stored)
            and last.hashes[-1] == parent
            and last.lora == chain.lora
            and len(last.hashes) < STORED_HASHES_MAX
            and len(last.tokens) + len(tokens) <= STORED_TOKENS_MAX
        ):
            last.hashes.extend(hashes)
            last.tokens.extend(tokens)
            return
        size = len(tokens) // chain.parts
        self._changes.append(Stored(list(hashes), parent, tokens, size, chain.lora))

    def _withdraw(self, chain: _Chain, block_hash: Hash) -> None:
        self.told_blocks -= chain.blocks[block_hash] & _TOLD
        self.counts["withdrawn_blocks"] += 1
        self._take_back(chain, block_hash)

    def _take_back(self, chain: _Chain, block_hash: Hash) -> None:
        """Tell readers to forget it, also those that count how often they were told."""
        tellings = (chain.blocks[block_hash] & _TELLINGS) // _TELLING
        chain.blocks[block_hash] &= ~(_TOLD | _TELLINGS)
        hashes = keys.names_in_chunk(block_hash, chain.parts)
        for _ in range(tellings):
            last = self._changes[-1] if self._changes else None
            if isinstance(last, Removed) and len(last.hashes) < REMOVED_HASHES_MAX:
                last.hashes.extend(hashes)
            else:
                self._changes.append(Removed(list(hashes)))
