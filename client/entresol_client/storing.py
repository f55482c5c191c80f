"""A put on one shard: RESERVE, seal what is wanted, COMMIT, wait for the outcome.

Invariants:
- plaintext is exposed only over a data path that nobody else can see (`capabilities.private`), and
  never where the tenant keeps its keys, whatever the daemon says;
- every reservation is committed or given up, also when sealing fails, the deadline passes or the
  caller is cancelled;
- staging memory the daemon may still read is not reused before its answer came.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from entresol_client.buffers import copy
from entresol_client.results import RequestFailedError, cause_of
from entresol_client.shard_link import Session, ShardLink
from entresol_client.staging import Arena, Region
from entresol_client.tenant_key import HostSeal
from entresol_proto import limits
from entresol_proto.fabric.base import Exposure, RemoteSpan
from entresol_proto.seal import codecs
from entresol_proto.seal.block import (
    BlockIdentity,
    BlockKey,
    BlockMeta,
    seal_into,
    sealed_bytes_max,
)
from entresol_proto.seal.bypass import Bypass
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire.data import Ack, Commit, PutDone, PutItem, Reserve, Reserved
from entresol_proto.wire.opening import NamespaceOpened

log = logging.getLogger("entresol.client")

ROUND_BYTES_MAX = 16 * limits.MIB  # plain bytes reserved at once
GROUP_BYTES_MIN, GROUP_BYTES_MAX = 4 * limits.MIB, 8 * limits.MIB  # of them committed together
RESERVE_FRAME_BYTES_MAX = 1 * limits.MIB
_ITEM_BYTES = 160  # of a RESERVE item beside its token ids, rounded up


# Not frozen, because one is made per block: a frozen one takes several times as long.
@dataclass(slots=True)
class Storable:
    """One block of a put on its shard."""

    position: int  # in the caller's order
    item: PutItem = field(repr=False)  # what the daemon is told
    meta: BlockMeta = field(repr=False)  # what is sealed beside the block, here or there
    plain: memoryview = field(repr=False)


StorableOf = Callable[[Sequence[int], NamespaceOpened], list[Storable]]


@dataclass(slots=True)
class PutTally:
    """Filled by the shards of one put; positions are the caller's."""

    statuses: list[Status | None]
    wire_bytes: int = 0

    def settle(self, positions: Sequence[int], status: Status) -> None:
        """Everything at `positions` that has no outcome yet gets this one, which is a failure."""
        for position in positions:
            if self.statuses[position] is None:
                self.statuses[position] = status.as_failure


# Not frozen, because one is made per block: a frozen one takes several times as long.
@dataclass(slots=True)
class _Job:
    """A block the daemon wants, and under what it is to be sealed."""

    block: Storable
    grant: Reserved.Item


@dataclass(frozen=True, slots=True)
class _SealContext:
    """What all blocks of one put on one shard share."""

    namespace: NamespaceOpened
    dtype: DType
    seal: HostSeal | None  # of a tenant that keeps its keys
    bypass: Bypass
    deadline_ns: int

    @property
    def at_host(self) -> bool:
        """Blocks leave sealed."""
        return self.seal is not None or self.namespace.seal_at_host

    def room(self, job: _Job) -> int:
        """Staging bytes a block may need. Raises: SealError for one that cannot be sealed so."""
        plain_bytes = len(job.block.plain)
        if not self.at_host:
            return plain_bytes
        return sealed_bytes_max(
            plain_bytes,
            chunk_bytes=self.namespace.chunk_bytes,
            meta_tokens=len(job.block.meta.token_ids_u32le) // 4,
            engine_key_bytes=len(job.block.item.engine_key),
        )


def plan_rounds(blocks: Sequence[Storable], bytes_max: int) -> list[list[Storable]]:
    """Cut a put into RESERVEs, in order: bounded in blocks, bytes and length of the frame."""
    rounds: list[list[Storable]] = [[]]
    held = frame = 0
    for block in blocks:
        size = len(block.plain)
        entry = _ITEM_BYTES + len(block.item.token_ids_u32le)
        full = (
            len(rounds[-1]) >= limits.BLOCKS_PER_PUT_MAX
            or held + size > bytes_max
            or frame + entry > RESERVE_FRAME_BYTES_MAX
        )
        if rounds[-1] and full:
            rounds.append([])
            held = frame = 0
        rounds[-1].append(block)
        held += size
        frame += entry
    return rounds if rounds[0] else []


def seal_blocks(
    context: _SealContext, jobs: Sequence[_Job], region: memoryview, starts: Sequence[int]
) -> list[int | Status]:
    """Seal (or copy) blocks into staging, each at its start; runs on a worker thread.

    Returns the length of each, or why there is none. Nothing is begun after the deadline.
    """
    done: list[int | Status] = []
    for job, start in zip(jobs, starts, strict=True):
        if time.monotonic_ns() >= context.deadline_ns:
            done.append(Status.DEADLINE)
            continue
        room = region[start : start + context.room(job)]
        try:
            if context.at_host:
                done.append(_seal_one(context, job, room))
            else:
                copy(job.block.plain, room)
                done.append(len(room))
        except EntresolError as error:
            done.append(error.status.as_failure)
    return done


def _seal_one(context: _SealContext, job: _Job, room: memoryview) -> int:
    item, grant = job.block.item, job.grant
    if context.seal is not None:  # whatever key the daemon grants is not used
        version, salt, key = context.seal.new_key()
    else:
        version, salt = grant.dek_version, grant.salt
        key = BlockKey(grant.key, grant.commitment)
    namespace_id = context.namespace.namespace_id
    wanted = codecs.writable_here(context.namespace.codec_id)
    codec_id = context.bypass.codec(namespace_id, context.dtype, wanted)
    header = seal_into(
        room,
        job.block.plain,
        identity=BlockIdentity(
            namespace_id,
            item.key,
            item.engine_key,
            context.dtype,
            version,
            host_sealed=context.seal is not None,
        ),
        block_key=key,
        salt=salt,
        codec_id=codec_id,
        meta=job.block.meta,
        chunk_bytes=context.namespace.chunk_bytes,
    )
    context.bypass.learn(namespace_id, context.dtype, codec_id, header.codec_id)
    return header.sealed_bytes


class _Put:
    """One put on one shard."""

    def __init__(
        self, link: ShardLink, session: Session, context: _SealContext, ack: Ack, tally: PutTally
    ) -> None:
        self._link = link
        self._session = session
        self._context = context
        self._ack = ack
        self._tally = tally

    async def round(self, blocks: Sequence[Storable]) -> None:
        """Reserve, seal, commit some blocks. Outcomes go into the tally.

        Raises: RequestFailedError when the RESERVE failed.
        """
        connection, deadline_ns = self._session.connection, self._context.deadline_ns
        async with asyncio.timeout(_left_s(deadline_ns)):
            await self._link.put_rounds.acquire()
        try:
            while blocks:
                left_ns = deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    raise RequestFailedError(Status.DEADLINE)
                items = tuple(block.item for block in blocks)
                reserve = Reserve(self._context.namespace.handle, self._ack, left_ns, items)
                reserved: Reserved = await connection.request(reserve, deadline_ns)
                if len(reserved.items) != len(blocks):
                    connection.drop("RESERVED of another length than its RESERVE")
                    raise RequestFailedError(Status.DISCONNECTED)
                await self._store(blocks, reserved)
                # The daemon takes what its queue has room for: offer the rest while it takes some.
                statuses = self._tally.statuses
                busy = [b for b in blocks if statuses[b.position] is Status.BUSY]
                blocks = busy if len(busy) < len(blocks) else []
        finally:
            self._link.put_rounds.release()

    async def _store(self, blocks: Sequence[Storable], reserved: Reserved) -> None:
        jobs: list[_Job] = []
        uncommitted = {one.put_id for one in reserved.items if one.status is Status.OK}
        most, at_host = self._link.staging_bytes // 4, self._context.at_host
        try:
            for block, grant in zip(blocks, reserved.items, strict=True):
                wanted = grant.status is Status.OK
                # It may have been BUSY a round ago: from here on its outcome is what COMMIT says.
                self._tally.statuses[block.position] = None if wanted else grant.status
                if not wanted:
                    continue
                job = _Job(block, grant)
                try:
                    self._context.room(job)
                except EntresolError as error:  # the daemon's chunks are too short for it
                    self._tally.statuses[block.position] = error.status.as_failure
                    continue
                jobs.append(job)
            async with asyncio.TaskGroup() as tasks:
                for group in _groups(jobs, _group_bytes(jobs, most, at_host=at_host)):
                    tasks.create_task(self._group(group, uncommitted))
        finally:
            self._session.connection.give_up(sorted(uncommitted))

    async def _group(self, jobs: list[_Job], uncommitted: set[int]) -> None:
        """Seal and commit some blocks; sets the status of each. Raises nothing: other groups of the
        round go on."""
        try:
            await self._seal_and_commit(jobs, uncommitted)
        except Exception as error:
            positions = [job.block.position for job in jobs]
            self._tally.settle(positions, cause_of(error, "put_group"))

    async def _seal_and_commit(self, jobs: list[_Job], uncommitted: set[int]) -> None:
        """Raises: RequestFailedError."""
        region, starts, exposure = await self._room(jobs)
        pairs: list[tuple[int, RemoteSpan]] = []
        sealed: list[_Job] = []
        try:
            lengths = await self._link.workers.run_later(
                seal_blocks, self._context, jobs, region.view, starts,
                until_ns=self._context.deadline_ns,
            )  # fmt: skip
            for job, start, length in zip(jobs, starts, lengths, strict=True):
                if isinstance(length, Status):
                    self._tally.statuses[job.block.position] = length
                    continue
                pairs.append((job.grant.put_id, exposure.span(region.offset + start, length)))
                sealed.append(job)
            if time.monotonic_ns() >= self._context.deadline_ns:  # nothing is reserved any more
                raise RequestFailedError(Status.DEADLINE)
        except BaseException:
            region.give_back()
            raise
        if pairs:
            await self._commit(region, sealed, pairs, uncommitted)
        else:
            region.give_back()

    async def _room(self, jobs: Sequence[_Job]) -> tuple[Region, list[int], Exposure]:
        """Staging for the jobs, where each begins in it, and what the daemon knows it by.

        Raises: RequestFailedError.
        """
        starts: list[int] = []
        need = 0
        for job in jobs:
            starts.append(need)
            need += -(-self._context.room(job) // 64) * 64
        arena, exposure = await self._session.put_staging(self._context.deadline_ns)
        region = await arena.take(need, self._context.deadline_ns)
        if region is None:
            raise RequestFailedError(_why_no_room(arena, need))
        return region, starts, exposure

    async def _commit(
        self,
        region: Region,
        jobs: Sequence[_Job],
        pairs: list[tuple[int, RemoteSpan]],
        uncommitted: set[int],
    ) -> None:
        """Raises: RequestFailedError; if the COMMIT was sent, the outcome is unknown then."""

        def sent() -> None:
            uncommitted.difference_update(put_id for put_id, _ in pairs)

        connection = self._session.connection
        done: PutDone = await connection.request(
            Commit(tuple(pairs)), self._context.deadline_ns, sent=sent, settled=region.give_back
        )
        if len(done.statuses) != len(pairs):
            connection.drop("PUT_DONE of another length than its COMMIT")
            raise RequestFailedError(Status.DISCONNECTED)
        for job, (_, span), status in zip(jobs, pairs, done.statuses, strict=True):
            self._tally.statuses[job.block.position] = status
            if status is Status.OK:
                self._tally.wire_bytes += span.length_bytes


def _group_bytes(jobs: Sequence[_Job], bytes_max: int, *, at_host: bool) -> int:
    """Two groups, where they are not too long or too short: one is prepared here while the daemon
    has the other. Each costs both sides the same, however much is in it. Where blocks are sealed
    here they are short: nothing of one is on its way before all of it is sealed."""
    sizes = [len(job.block.plain) for job in jobs]
    middle = -(-len(sizes) // 2)
    half = 0 if at_host else max(sum(sizes[:middle]), sum(sizes[middle:]))
    return min(max(half, GROUP_BYTES_MIN), GROUP_BYTES_MAX, bytes_max)


def _groups(jobs: Sequence[_Job], bytes_max: int) -> list[list[_Job]]:
    groups: list[list[_Job]] = []
    held = bytes_max
    for job in jobs:
        size = len(job.block.plain)
        if held + size > bytes_max:
            groups.append([])
            held = 0
        groups[-1].append(job)
        held += size
    return groups


def _why_no_room(arena: Arena, need: int) -> Status:
    if not arena.fits(need):
        return Status.TOO_LARGE
    return Status.DISCONNECTED if arena.closed else Status.DEADLINE


def _left_s(deadline_ns: int) -> float:
    return max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)


async def store_blocks(
    link: ShardLink,
    canonical: bytes,
    storable_of: StorableOf,
    positions: Sequence[int],
    *,
    dtype: DType,
    seal: HostSeal | None,
    ack: Ack,
    deadline_ns: int,
    tally: PutTally,
) -> None:
    """Store the blocks at `positions` on their shard. Outcomes go into `tally`; an outage does not
    raise. With `seal` the blocks leave sealed under the tenant's own key."""
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
            context = _SealContext(namespace, dtype, seal, link.bypass, deadline_ns)
            if not context.at_host and not session.endpoint.capabilities.private:
                raise RequestFailedError(
                    Status.UNSUPPORTED, "plaintext does not leave over a data path others can see"
                )
            put = _Put(link, session, context, ack, tally)
            bytes_max = min(ROUND_BYTES_MAX, link.staging_bytes)
            rounds = plan_rounds(storable_of(positions, namespace), bytes_max)
            await _all_rounds(put, rounds, tally)
        except Exception as error:
            tally.settle(positions, cause_of(error, "put"))
            await asyncio.sleep(0)  # as above
        tally.settle(positions, Status.DISCONNECTED)
        session.check_data_path()
        if any(tally.statuses[position] is Status.DEADLINE for position in positions):
            link.note_deadline(session, begun_ns)


async def _all_rounds(put: _Put, rounds: list[list[Storable]], tally: PutTally) -> None:
    """Run the rounds, some at a time (a limit of the link), each failing for itself."""

    async def one(blocks: list[Storable]) -> None:
        positions = [block.position for block in blocks]
        try:
            await put.round(blocks)
        except TimeoutError:
            tally.settle(positions, Status.DEADLINE)
        except Exception as error:
            tally.settle(positions, cause_of(error, "put_round"))
        else:
            return
        await asyncio.sleep(0)  # see `store_blocks`

    if len(rounds) == 1:
        await one(rounds[0])
        return
    async with asyncio.TaskGroup() as tasks:
        for blocks in rounds:
            tasks.create_task(one(blocks))
