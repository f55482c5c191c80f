"""One namespace of a client: every call on blocks, checked, fanned out over shards, put in order.

Invariant: what the shards are told of a block is decided here and nowhere else: its engine key as
it is, or, when the tenant keeps its keys, what stands for it, and neither parent nor tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from entresol_client.arguments import (
    ack_level,
    check_items,
    checked_descriptor,
    count_of,
    duration,
    engine_keys,
    flag,
    open_place,
    token_ids,
)
from entresol_client.buffers import UsageError, as_view, check_apart, lent
from entresol_client.fetching import GetTally, fetch_blocks
from entresol_client.opening import Wanted
from entresol_client.results import (
    AckLevel,
    CountResult,
    ExistsResult,
    Explanation,
    GetResult,
    OpenPlace,
    PutBlock,
    PutResult,
    QuoteResult,
    RequestFailedError,
    StageResult,
    cause_of,
    prefix_of,
    quote_of,
)
from entresol_client.shard_link import Session, ShardLink
from entresol_client.storing import PutTally, Storable, store_blocks
from entresol_client.tenant_key import HostSeal
from entresol_proto import limits
from entresol_proto.ids import (
    EngineKey,
    NamespaceDescriptor,
    WireKey,
    check_engine_key,
)
from entresol_proto.naming import wire_keys
from entresol_proto.seal.block import BlockMeta
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import Status
from entresol_proto.wire.data import (
    Done,
    Exists,
    ExistsReply,
    Explain,
    Explained,
    Forget,
    OpenAt,
    PutItem,
    Stage,
    Staged,
    Tier,
    Touch,
)
from entresol_proto.wire.opening import PROTOCOL_QUOTE, NamespaceOpened
from entresol_proto.wire.quote import Quote, Quoted

if TYPE_CHECKING:
    from entresol_client.client import AsyncClient

KEYS_PER_CALL_MAX = limits.KEYS_PER_FRAME_MAX
QUOTE_KEYS_MAX = limits.BLOCKS_PER_FETCH_MAX
log = logging.getLogger("entresol.client")


class Namespace:
    """Blocks of one descriptor. All `deadline_ns` arguments are durations from now, in ns; left
    out, the config's. Keys are engine keys of 8 to 64 bytes, in prefix order.

    Attributes:
        descriptor: what its blocks are; its dtype in our own word for it.
        canonical: what shards are told of that: the descriptor, or what stands for it.
    """

    def __init__(self, client: AsyncClient, descriptor: NamespaceDescriptor) -> None:
        """Raises: UsageError for what is no descriptor, or for a dtype that nobody knows."""
        descriptor = checked_descriptor(descriptor)
        self.descriptor = descriptor
        self._client = client
        self._warned = False
        self._seal = HostSeal(client._keys, descriptor) if client._keys else None
        self.canonical = self._seal.canonical if self._seal else descriptor.canonical()
        self._digest = self._seal.digest if self._seal else descriptor.digest()
        self._dtype = DType.from_name(descriptor.dtype)

    async def get_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        *,
        deadline_ns: int | None = None,
        prefix: bool = True,
        open_at: OpenPlace = "host",
    ) -> GetResult:
        """Read blocks into the caller's buffers.

        `buffers[i]` (see `buffers.as_view`) must be writable and exactly as long as block i; a
        block of another length is a miss (BAD_REQUEST). The buffers stay the caller's, must stay
        alive, unmoved and untouched until the call returns, and must not overlap. After it, each
        holds the exact block where the status is OK, and otherwise what it held before, or zeros.

        `prefix` stops at the first gap (per shard): later blocks are GAP. `open_at="daemon"` has
        the daemon open the blocks and needs a data path that nobody else can see.

        Raises: UsageError (also for buffers that share memory), BadKeyError.
        """
        keys = self._names(keys)
        if count_of("buffers", buffers) != len(keys):
            raise UsageError(f"{len(keys)} keys and {len(buffers)} buffers")
        until_ns = self._until(deadline_ns)
        place, prefix = self._place(open_at), flag("prefix", prefix)
        views = [as_view(buffer, writable=True) for buffer in buffers]
        tally = GetTally([None] * len(keys), [Tier.NONE] * len(keys))
        batch = _Batch(keys, views)

        async def one(link: ShardLink, positions: Sequence[int]) -> None:
            await fetch_blocks(
                link,
                self.canonical,
                batch,
                positions,
                open_at=place,
                prefix=prefix,
                deadline_ns=until_ns,
                tally=tally,
                key_of=self._seal.key_of if self._seal else None,
            )

        with lent(views):
            check_apart(views)
            await self._fan_out(keys, one)
        statuses = [Status.INTERNAL if s is None else s for s in tally.statuses]
        stats = self._client._stats
        stats.count_get(statuses, tally.tiers)
        stats.get_plain_bytes += tally.plain_bytes
        stats.get_wire_bytes += tally.wire_bytes
        return GetResult(
            statuses, tally.tiers, prefix_of(statuses), tally.plain_bytes, tally.wire_bytes
        )

    async def put(
        self,
        items: Sequence[PutBlock],
        *,
        ack: AckLevel = "accepted",
        deadline_ns: int | None = None,
    ) -> PutResult:
        """Store blocks; give them in prefix order. Only blocks that are wanted move any bytes.

        `ack="accepted"` waits until they are sealed and servable, `"durable"` until they are on
        flash and flushed; so does `"accepted"` of a block that was there before and may still be on
        flash: a crash must not bring back the older one. DEADLINE or DISCONNECTED for a block means
        that it is not known whether it was stored; putting it again is harmless.

        Raises: UsageError, BadKeyError.
        """
        items = check_items(items)
        keys = self._names([item.key for item in items])
        parents = [
            None if item.parent_key is None else check_engine_key(item.parent_key) for item in items
        ]
        tokens = [token_ids(item) for item in items]
        self._look_at_tokens(tokens)
        until_ns, level = self._until(deadline_ns), ack_level(ack)
        views = [as_view(item.buffer, writable=False) for item in items]
        tally = PutTally([None] * len(keys))

        def storable_of(positions: Sequence[int], namespace: NamespaceOpened) -> list[Storable]:
            blocks = []
            names = _each_wire_key(namespace.secret, keys, positions)
            told = self._seal is None  # of what the tenant keeps to itself, nothing
            for p, name in zip(positions, names, strict=True):
                position, parent = items[p].position, parents[p] or b""
                item = PutItem(
                    key=name,
                    engine_key=keys[p],
                    plain_bytes=len(views[p]),
                    position=position,
                    parent=parent if told else b"",
                    token_ids_u32le=tokens[p] if told else b"",
                )
                meta = BlockMeta(parent, position, self.descriptor.block_tokens, tokens[p])
                blocks.append(Storable(p, item, meta, views[p]))
            return blocks

        async def one(link: ShardLink, positions: Sequence[int]) -> None:
            await store_blocks(
                link,
                self.canonical,
                storable_of,
                positions,
                dtype=self._dtype,
                seal=self._seal,
                ack=level,
                deadline_ns=until_ns,
                tally=tally,
            )

        lengths = list(map(len, views))
        with lent(views):
            await self._fan_out(keys, one)
        statuses = [Status.INTERNAL if s is None else s for s in tally.statuses]
        plain = sum(n for n, s in zip(lengths, statuses, strict=True) if s is Status.OK)
        stats = self._client._stats
        stats.puts += 1
        stats.put_statuses.update(statuses)
        stats.put_plain_bytes += plain
        stats.put_wire_bytes += tally.wire_bytes
        stored, existed = statuses.count(Status.OK), statuses.count(Status.EXISTS)
        return PutResult(statuses, stored, existed, plain, tally.wire_bytes)

    async def exists(
        self, keys: Sequence[bytes], *, deadline_ns: int | None = None
    ) -> ExistsResult:
        """Which blocks could be read now, and how long the usable prefix is over all shards."""
        keys = self._names(keys)
        until_ns = self._until(deadline_ns)
        present = np.zeros(len(keys), np.bool_)

        async def ask(session: Session, ns: NamespaceOpened, positions: Sequence[int]) -> None:
            run = _wire_keys(ns.secret, keys, positions)
            reply: ExistsReply = await session.connection.request(Exists(ns.handle, run), until_ns)
            bits = np.unpackbits(np.frombuffer(reply.bitmap, np.uint8), bitorder="little")
            count = min(len(positions), len(bits))
            present[_chosen(positions[:count])] = bits[:count].astype(np.bool_)

        failed = await self._ask(keys, limits.KEYS_PER_FRAME_MAX, until_ns, ask)
        found = present.tolist()
        leading = found.index(False) if False in found else len(found)
        return ExistsResult(leading, found, complete=not failed)

    async def quote(
        self,
        keys: Sequence[bytes],
        *,
        deadline_ns: int | None = None,
        prefix: bool = True,
        open_at: OpenPlace = "host",
    ) -> QuoteResult:
        """How long a `get_into` of these keys would take as things are, at most QUOTE_KEYS_MAX.

        Raises: UsageError, BadKeyError. Never for a shard that gives no quote: see `complete`.
        """
        keys = self._names(keys)
        if len(keys) > QUOTE_KEYS_MAX:
            raise UsageError(f"{len(keys)} keys to quote, at most {QUOTE_KEYS_MAX}")
        until_ns = self._until(deadline_ns)
        place, prefix = self._place(open_at), flag("prefix", prefix)
        tiers = [Tier.NONE] * len(keys)
        replies: list[Quoted] = []

        async def ask(session: Session, ns: NamespaceOpened, positions: Sequence[int]) -> None:
            if session.welcome.protocol < PROTOCOL_QUOTE:
                raise RequestFailedError(Status.UNSUPPORTED, "the daemon gives no quotes")
            run = _wire_keys(ns.secret, keys, positions)
            message = Quote(ns.handle, place, prefix, run)
            reply: Quoted = await session.connection.request(message, until_ns)
            replies.append(reply)
            for position, tier in zip(positions, reply.tier_list(), strict=False):
                tiers[position] = tier

        failed = await self._ask(keys, limits.BLOCKS_PER_FETCH_MAX, until_ns, ask)
        return quote_of(tiers, replies, complete=not failed)

    async def stage(
        self,
        keys: Sequence[bytes],
        *,
        hold_ns: int = 10_000_000_000,
        open_at: OpenPlace = "host",
        deadline_ns: int | None = None,
    ) -> StageResult:
        """Have blocks brought up into the daemon's memory ahead of a get, held for `hold_ns`."""
        keys = self._names(keys)
        until_ns = self._until(deadline_ns)
        place = self._place(open_at)
        hold_ns = duration("hold_ns", hold_ns)
        statuses = [Status.MISS] * len(keys)

        async def ask(session: Session, ns: NamespaceOpened, positions: Sequence[int]) -> None:
            run = _wire_keys(ns.secret, keys, positions)
            left_ns = max(1, until_ns - time.monotonic_ns())
            reply: Staged = await session.connection.request(
                Stage(ns.handle, place, hold_ns, left_ns, run), until_ns
            )
            for position, status in zip(positions, reply.statuses, strict=False):
                statuses[position] = status

        failed = await self._ask(keys, limits.BLOCKS_PER_FETCH_MAX, until_ns, ask)
        for position, status in failed.items():
            statuses[position] = status
        return StageResult(statuses, prefix_of(statuses))

    async def touch(self, keys: Sequence[bytes], *, deadline_ns: int | None = None) -> CountResult:
        """Keep blocks recent that are used from elsewhere. Counts those that were found."""
        return await self._count(Touch, keys, deadline_ns)

    async def forget(self, keys: Sequence[bytes], *, deadline_ns: int | None = None) -> CountResult:
        """Drop blocks for good. Counts those that were found."""
        return await self._count(Forget, keys, deadline_ns)

    async def explain(
        self, keys: Sequence[bytes], *, deadline_ns: int | None = None
    ) -> list[Explanation]:
        """Why each key is, or is not, here."""
        keys = self._names(keys)
        until_ns = self._until(deadline_ns)
        names = [""] * len(keys)
        found: list[Explanation | None] = [None] * len(keys)
        links = self._client._links
        for number, positions in self._client._placement.split(self._digest, keys).items():
            for position in positions:
                names[position] = links[number].address.name

        async def ask(session: Session, ns: NamespaceOpened, positions: Sequence[int]) -> None:
            request = Explain(ns.handle, tuple(keys[p] for p in positions))
            reply: Explained = await session.connection.request(request, until_ns)
            for position, (reason, when) in zip(positions, reply.rows, strict=False):
                found[position] = Explanation(reason, when, names[position])

        failed = await self._ask(keys, limits.BLOCKS_PER_FETCH_MAX, until_ns, ask)
        return [
            row or Explanation(None, 0, names[p], failed.get(p, Status.MISS))
            for p, row in enumerate(found)
        ]

    # Inside ----------------------------------------------------------------------------------

    def _names(self, keys: Sequence[bytes]) -> list[EngineKey]:
        """The keys as shards know them. Raises: UsageError, BadKeyError."""
        checked = engine_keys(keys, KEYS_PER_CALL_MAX)
        return self._seal.mask_all(checked) if self._seal else checked

    def _look_at_tokens(self, tokens: Sequence[bytes]) -> None:
        """Warn once of blocks that are kept and found as any, and that no router will hear of."""
        count = self.descriptor.block_tokens
        odd = next((ids for ids in tokens if ids and len(ids) != 4 * count), None)
        if odd is not None and self._seal is None and not self._warned:
            self._warned = True
            log.warning(
                "event=token_ids_do_not_fit given=%d block_tokens=%d "
                "reason='routers hear only of blocks with block_tokens ids'", len(odd) // 4, count,
            )  # fmt: skip

    def _place(self, open_at: OpenPlace) -> OpenAt:
        """Raises: UsageError."""
        if self._seal is not None and open_at != "host":
            raise UsageError(
                "the tenant keeps its keys: its blocks are opened on the host only",
                hint='use open_at = "host", or a configuration without tenant_key',
            )
        return open_place(open_at)

    def _until(self, deadline_ns: int | None) -> int:
        """The deadline on the monotonic clock. Raises: UsageError."""
        self._client._check_open()
        span_ns = self._client.config.deadline_ns if deadline_ns is None else deadline_ns
        return time.monotonic_ns() + duration("deadline_ns", span_ns)

    async def _fan_out(
        self, keys: Sequence[EngineKey], one: Callable[[ShardLink, Sequence[int]], Awaitable[None]]
    ) -> None:
        """Run `one` for every shard that owns some of the keys; it raises for no outage."""
        links = self._client._links
        parts = self._client._placement.split(self._digest, keys)
        if len(parts) == 1:
            ((number, positions),) = parts.items()
            await one(links[number], positions)
            return
        async with asyncio.TaskGroup() as tasks:
            for number, positions in parts.items():
                tasks.create_task(_as_coroutine(one(links[number], positions)))

    async def _ask(
        self,
        keys: Sequence[EngineKey],
        step: int,
        until_ns: int,
        ask: Callable[[Session, NamespaceOpened, Sequence[int]], Awaitable[None]],
    ) -> dict[int, Status]:
        """One small request per shard and `step` keys; what failed, by position, with the cause."""
        failed: dict[int, Status] = {}

        async def one(link: ShardLink, positions: Sequence[int]) -> None:
            begun_ns = time.monotonic_ns()
            at = 0
            try:
                session = link.admit()
            except RequestFailedError as error:
                failed.update(dict.fromkeys(positions, error.status))
                await asyncio.sleep(0)  # see fetch_blocks
                return
            with session:
                try:
                    ns = await link.namespace(session, self.canonical, until_ns)
                    for at in range(0, len(positions), step):
                        await ask(session, ns, positions[at : at + step])
                except Exception as error:
                    status = cause_of(error, "question")
                    failed.update(dict.fromkeys(positions[at:], status))
                    await asyncio.sleep(0)  # see fetch_blocks
                    if status is Status.DEADLINE:
                        link.note_deadline(session, begun_ns)

        await self._fan_out(keys, one)
        return failed

    async def _count(
        self, message: type[Touch] | type[Forget], keys: Sequence[bytes], deadline_ns: int | None
    ) -> CountResult:
        checked = self._names(keys)
        until_ns = self._until(deadline_ns)
        total = 0

        async def ask(session: Session, ns: NamespaceOpened, positions: Sequence[int]) -> None:
            nonlocal total
            run = _wire_keys(ns.secret, checked, positions)
            reply: Done = await session.connection.request(message(ns.handle, run), until_ns)
            total += reply.count

        failed = await self._ask(checked, limits.KEYS_PER_FRAME_MAX, until_ns, ask)
        return CountResult(total, complete=not failed)


class _Batch:
    """See `fetching.Batch`."""

    __slots__ = ("_keys", "_views")

    def __init__(self, keys: Sequence[EngineKey], views: Sequence[memoryview]) -> None:
        self._keys, self._views = keys, views

    def wire_keys(self, positions: Sequence[int], namespace: NamespaceOpened) -> bytes:
        return _wire_keys(namespace.secret, self._keys, positions)

    def wanted(self, positions: Sequence[int], wire_keys: bytes) -> list[Wanted]:
        keys, views, size = self._keys, self._views, limits.WIRE_KEY_BYTES
        return [
            Wanted(place, wire_keys[at : at + size], keys[place], views[place])
            for place, at in zip(positions, range(0, len(wire_keys), size), strict=True)
        ]

    def plain_bytes(self, positions: Sequence[int]) -> int:
        return sum([self._views[place].nbytes for place in positions])


async def _as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


def _wire_keys(secret: bytes, keys: Sequence[EngineKey], positions: Sequence[int]) -> bytes:
    chosen = _chosen(positions)
    return wire_keys(
        secret, keys[chosen] if isinstance(chosen, slice) else [keys[at] for at in chosen]
    )


def _chosen(positions: Sequence[int]) -> slice | Sequence[int]:
    """What to index with: a slice for the positions of a pod of one shard, which is quicker."""
    return slice(positions.start, positions.stop) if type(positions) is range else positions


def _each_wire_key(
    secret: bytes, keys: Sequence[EngineKey], positions: Sequence[int]
) -> list[WireKey]:
    run, size = _wire_keys(secret, keys, positions), limits.WIRE_KEY_BYTES
    return [WireKey(run[at : at + size]) for at in range(0, len(run), size)]
