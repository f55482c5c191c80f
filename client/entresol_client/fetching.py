"""A get on one shard: FETCH, grants as they come, groups in flight, leases given back.

Invariants: every granted lease is released exactly once, also when the caller is cancelled or the
deadline passed; when `fetch_blocks` returns, no thread and no fabric writes into the buffers; a
block that came within a grant and does not open is fetched again under a lease, which can be
reported; only `GetTally.opened` makes a block OK, and it is told of what `opening` opened, of
nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from entresol_client.connection import Report
from entresol_client.opening import (
    INLINE_BYTES_MAX,
    Granted,
    OpenContext,
    Wanted,
    open_alone,
    open_at_once,
    open_blocks,
    open_group,
    plan_groups,
)
from entresol_client.results import RequestFailedError, cause_of
from entresol_client.shard_link import Session, ShardLink
from entresol_proto import limits
from entresol_proto.fabric.base import FabricKind
from entresol_proto.ids import engine_key_digest
from entresol_proto.seal.block import HEADER_BYTES_MAX, META_BYTES_MAX, TAG_BYTES, KeyOf
from entresol_proto.status import Status
from entresol_proto.wire.data import Fetch, Grant, GrantItem, OpenAt, Tier
from entresol_proto.wire.opening import PROTOCOL_CARRY, NamespaceOpened

log = logging.getLogger("entresol.client")


class Batch(Protocol):
    """The blocks of one get, by their place in it."""

    def wire_keys(self, positions: Sequence[int], namespace: NamespaceOpened) -> bytes:
        """End to end: they depend on the shard's namespace secret."""
        ...

    def wanted(self, positions: Sequence[int], wire_keys: bytes) -> list[Wanted]:
        """Those blocks, in order; `wire_keys` are theirs."""
        ...

    def plain_bytes(self, positions: Sequence[int]) -> int:
        """Of those together."""
        ...


# What the daemon wants to hear of; other causes (deadline, expired lease) it can see itself.
_REPORTED = frozenset({Status.CORRUPT, Status.CONFLICT, Status.FABRIC_ERROR, Status.BAD_REQUEST})
# A sealed block is at most this much longer than its plaintext, whatever its chunks; with padding.
SEALED_OVERHEAD_BYTES_MAX = (
    HEADER_BYTES_MAX
    + META_BYTES_MAX
    + TAG_BYTES * (limits.CHUNKS_PER_BLOCK_MAX + 1)
    + limits.ALIGN_BYTES
)


@dataclass(slots=True)
class GetTally:
    """Filled by the shards of one get; positions are the caller's."""

    statuses: list[Status | None]
    tiers: list[Tier]
    plain_bytes: int = 0
    wire_bytes: int = 0

    def settle(self, positions: Sequence[int], status: Status) -> None:
        """Everything at `positions` that has no outcome yet gets this one, which is a failure."""
        for position in positions:
            if self.statuses[position] is None:
                self.statuses[position] = status.as_failure

    def missed(self, position: int, status: Status) -> None:
        """The daemon grants no such block, and says why."""
        self.statuses[position] = status if status.is_failure else Status.MISS

    def opened(self, position: int, item: GrantItem, status: Status) -> None:
        """What became of a granted block: OK when it was verified and is whole in its buffer."""
        self.statuses[position] = status
        if status is Status.OK:
            self.tiers[position] = item.tier
            self.plain_bytes += item.plain_bytes
            self.wire_bytes += item.span.length_bytes


class _Lease:
    """A GRANT frame's lease: released when its last block is done with."""

    __slots__ = ("held_bytes", "lease_id", "left", "reports")

    def __init__(self, grant: Grant) -> None:
        self.lease_id = grant.lease_id
        self.held_bytes = grant.span_bytes
        self.left = len(grant.items)
        self.reports: list[Report] = []


class _Get:
    """One FETCH under way."""

    def __init__(
        self,
        link: ShardLink,
        session: Session,
        namespace: NamespaceOpened,
        wire_keys: bytes,
        open_at: OpenAt,
        deadline_ns: int,
        tally: GetTally,
        key_of: KeyOf | None,
    ) -> None:
        assert session.endpoint is not None, "a get without a data path"
        self._link = link
        self._session = session
        self._handle = namespace.handle
        self._wire_keys = wire_keys
        self._open_at = open_at
        self._deadline_ns = deadline_ns
        self._tally = tally
        self._unanswered: dict[int, Wanted] = {}
        self._carry = False
        self.again: list[Wanted] = []  # came within a grant and did not open
        self._asked_ns = 0
        self._digests: list[bytes] = []  # of the engine keys, for what the daemon opened
        self._groups: set[asyncio.Task[list[Status]]] = set()
        self._last: tuple[_Lease, list[Granted]] | None = None
        self._context = OpenContext(
            endpoint=session.endpoint,
            workers=link.workers,
            staging=link.read_staging,
            namespace_id=namespace.namespace_id,
            at_daemon=open_at is OpenAt.DAEMON,
            deadline_ns=deadline_ns,
            key_of=key_of,
        )

    async def run(self, wanted_of: Callable[[], list[Wanted]], prefix: bool, carry: bool) -> None:
        """`wanted_of`: the blocks, to be made while the daemon is at work. `carry`: blocks may come
        within the grant. Raises: RequestFailedError after whatever came has been finished."""
        connection = self._session.connection
        now_ns = time.monotonic_ns()
        if now_ns >= self._deadline_ns:
            raise RequestFailedError(Status.DEADLINE)
        fetch = Fetch(
            self._handle,
            self._open_at,
            prefix,
            min(self._deadline_ns - now_ns, limits.DEADLINE_NS_MAX),
            self._wire_keys,
            carry,
        )
        self._carry = carry
        self._asked_ns = now_ns  # no lease of this request began before
        request_id, sink = await connection.fetch(fetch, self._deadline_ns)
        try:
            self._unanswered = dict(enumerate(wanted_of()))
            if self._context.at_daemon:
                self._digest_keys()
            while grants := await sink.next(self._deadline_ns):
                for grant, received_ns in grants:
                    self._accept(grant, received_ns)
                if self._last is not None:
                    await self._open_last(*self._last)
        finally:
            connection.end_fetch(request_id, sink)
            await self._finish_groups()

    def _digest_keys(self) -> None:
        wanted = self._unanswered.values()
        self._digests = [engine_key_digest(one.engine_key) for one in wanted]

    def _accept(self, grant: Grant, received_ns: int) -> None:
        """Note misses, start groups for what is leased."""
        tally, session = self._tally, self._session
        for index, status in grant.misses:
            wanted = self._answer(index)
            tally.missed(wanted.position, status)
        if not grant.items:
            return
        if grant.carried:
            self._open_carried(grant)
            return
        until_ns = received_ns + grant.lease_ns
        assert session.endpoint is not None
        if session.endpoint.capabilities.same_host:
            until_ns = min(until_ns, grant.expires_ns)  # one kernel, one monotonic clock
        doubtful_ns = min(until_ns, self._asked_ns + grant.lease_ns)
        lease = _Lease(grant)
        session.connection.held_bytes += lease.held_bytes
        usable: list[Granted] = []
        at_daemon = self._context.at_daemon
        for item in grant.items:
            wanted = self._answer(item.index)
            room, span_bytes = len(wanted.into), item.span.length_bytes
            if at_daemon:
                possible = span_bytes == room == item.plain_bytes
                if possible and item.key != self._digests[item.index]:
                    # Two engine keys met in one wire key: the other one's bytes are not read.
                    one = Granted(wanted, item, until_ns, doubtful_ns)
                    self._done(lease, [one], [Status.CONFLICT])
                    continue
            else:
                most = room + SEALED_OVERHEAD_BYTES_MAX
                possible = item.plain_bytes == room and 0 < span_bytes <= most
            one = Granted(wanted, item, until_ns, doubtful_ns)
            if possible:
                usable.append(one)
            else:  # nothing is read or written
                self._done(lease, [one], [Status.BAD_REQUEST])
        groups = plan_groups(self._context, usable, last=grant.final)
        for group in groups:
            statuses = open_at_once(self._context, group)
            if statuses is not None:
                self._done(lease, group, statuses)
                continue
            if grant.final and len(groups) == 1:
                self._last = lease, group
                return
            task = asyncio.get_running_loop().create_task(open_group(self._context, group))
            self._groups.add(task)
            task.add_done_callback(functools.partial(self._group_done, lease, group))

    def _open_carried(self, grant: Grant) -> None:
        """Open what came within a grant: a few small blocks, here."""
        if not self._carry:
            self._session.connection.drop("a grant carries blocks, which was not asked for")
            raise RequestFailedError(Status.DISCONNECTED)
        carried, never_ns = memoryview(grant.carried), self._deadline_ns + limits.DEADLINE_NS_MAX
        for item in grant.items:
            wanted, span = self._answer(item.index), item.span
            status = Status.BAD_REQUEST
            if item.plain_bytes == len(wanted.into):
                one = Granted(wanted, item, never_ns, never_ns)
                source = carried[span.address : span.address + span.length_bytes]
                try:
                    (status,) = open_blocks(self._context, [one], [source], in_place=False)
                except Exception:  # it has been zeroed
                    log.exception("event=bug where=open_carried")
                    status = Status.INTERNAL
            if status in _REPORTED:
                self.again.append(wanted)
            else:
                self._tally.opened(wanted.position, item, status)

    async def _open_last(self, lease: _Lease, group: list[Granted]) -> None:
        """Open the only group of the last grant here: nothing comes beside which a task would."""
        self._last = None
        statuses = [Status.DISCONNECTED] * len(group)
        try:
            alone = self._session.connection.held_bytes == lease.held_bytes  # no other get is on
            done = open_alone(self._context, group) if alone else None
            statuses = await open_group(self._context, group) if done is None else done
        except RequestFailedError as error:  # no thread takes it
            statuses = [error.status] * len(group)
        except Exception:
            log.exception("event=bug where=open_group")
            statuses = [Status.INTERNAL] * len(group)
        finally:
            self._done(lease, group, statuses)

    def _answer(self, index: int) -> Wanted:
        """The block an answer is about; an answer nobody asked for ends the session."""
        wanted = self._unanswered.pop(index, None)
        if wanted is None:
            self._session.connection.drop(f"grant for block {index}, not asked or answered twice")
            raise RequestFailedError(Status.DISCONNECTED)
        return wanted

    def _group_done(
        self, lease: _Lease, group: list[Granted], task: asyncio.Task[list[Status]]
    ) -> None:
        """A group ended, in whatever way: account for each of its blocks."""
        self._groups.discard(task)
        if task.cancelled():
            self._done(lease, group, [Status.DISCONNECTED] * len(group))
        elif isinstance(error := task.exception(), RequestFailedError):  # no thread takes it
            self._done(lease, group, [error.status] * len(group))
        elif error is not None:
            log.error("event=bug where=open_group", exc_info=error)
            self._done(lease, group, [Status.INTERNAL] * len(group))
        else:
            self._done(lease, group, task.result())

    def _done(self, lease: _Lease, group: list[Granted], statuses: list[Status]) -> None:
        for one, status in zip(group, statuses, strict=True):
            self._tally.opened(one.wanted.position, one.item, status)
            if status in _REPORTED:
                lease.reports.append((lease.lease_id, one.item.index, status))
        lease.left -= len(group)
        assert lease.left >= 0, "a block was finished twice"
        if lease.left == 0:
            connection = self._session.connection
            connection.release(lease.lease_id, lease.reports, held_bytes=lease.held_bytes)

    async def _finish_groups(self) -> None:
        """Wait for the groups; they mind the deadline themselves. Cancellation waits too."""
        cancelled: asyncio.CancelledError | None = None
        while self._groups:
            try:
                await asyncio.wait(self._groups)
            except asyncio.CancelledError as error:
                cancelled = error
                for task in self._groups:
                    task.cancel()
        try:
            if cancelled is not None:
                raise cancelled
        finally:
            cancelled = None  # which has this frame


async def fetch_blocks(
    link: ShardLink,
    canonical: bytes,
    batch: Batch,
    positions: Sequence[int],
    *,
    open_at: OpenAt,
    prefix: bool,
    deadline_ns: int,
    tally: GetTally,
    key_of: KeyOf | None = None,
) -> None:
    """Get the blocks at `positions` of the batch from their shard into the caller's buffers.

    `key_of` is given by a tenant that keeps its keys: then keys in grants are not looked at.
    Outcomes go into `tally`; nothing is raised for an outage.
    """
    begun_ns = time.monotonic_ns()
    try:
        session = link.admit()
    except RequestFailedError as error:
        tally.settle(positions, error.status)
        await asyncio.sleep(0)  # a caller that asks in a loop must not keep the loop from healing
        return
    with session:
        try:
            if session.endpoint is None:
                raise RequestFailedError(Status.FABRIC_ERROR, "no data path")
            namespace = await link.namespace(session, canonical, deadline_ns)
            names, size = batch.wire_keys(positions, namespace), limits.WIRE_KEY_BYTES
            step = min(limits.BLOCKS_PER_FETCH_MAX, max(1, session.welcome.blocks_per_fetch_max))
            for at in range(0, len(positions), step):
                part, run = positions[at : at + step], names[at * size : (at + step) * size]
                carry = _may_carry(session, open_at) and batch.plain_bytes(part) <= INLINE_BYTES_MAX
                wanted_of = functools.partial(batch.wanted, part, run)
                while run:  # a second time without `carry`, if at all
                    get = _Get(link, session, namespace, run, open_at, deadline_ns, tally, key_of)
                    await get.run(wanted_of, prefix, carry)
                    run = b"".join([one.wire_key for one in get.again])
                    wanted_of, carry = functools.partial(list, get.again), False
                if prefix and any(tally.statuses[place] is not Status.OK for place in part):
                    tally.settle(positions, Status.GAP)
                    break
        except Exception as error:
            status = cause_of(error, "get")
            tally.settle(positions, status)
            await asyncio.sleep(0)  # as above
            if status is Status.DEADLINE:
                link.note_deadline(session, begun_ns)
        tally.settle(positions, Status.MISS)
        session.check_data_path()


def _may_carry(session: Session, open_at: OpenAt) -> bool:
    """Whether blocks should come within the grant, where they are in memory: for few bytes a second
    exchange, over the data path, takes longer. Not where the data path reads without the daemon."""
    return (
        open_at is OpenAt.HOST
        and session.endpoint is not None
        and session.endpoint.kind is FabricKind.TCP
        and session.welcome.protocol >= PROTOCOL_CARRY
    )
