"""From granted spans to plaintext in the caller's buffers: the inner part of every get.

Invariants:
- a destination holds the exact block, or what it held before, or zeros;
- bytes are opened in place in the daemon's memory (shm) only if the lease still held afterwards:
  the cipher reads its input twice, so the check comes after the last read;
- when a function here returns, nobody writes into the destinations any more;
- a status is OK only where `open_into` said so, or the whole of a block that the daemon opened has
  been read: what was not begun, and what raised, has another.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from entresol_client.results import cause_of
from entresol_client.staging import Arena
from entresol_client.workers import Workers
from entresol_proto import limits
from entresol_proto.fabric.base import Endpoint, MappedEndpoint, ReadOp, RemoteSpan
from entresol_proto.fabric.landing import LandingEndpoint
from entresol_proto.seal.block import BlockKey, KeyOf, SealedHeader, check_header, open_into
from entresol_proto.seal.wiping import zero
from entresol_proto.status import EntresolError, SealError, Status
from entresol_proto.wire.data import GrantItem

log = logging.getLogger("entresol.client")

GROUP_BYTES_MIN = 2 * limits.MIB
GROUP_BYTES_MAX = 8 * limits.MIB
LANDING_BYTES_MIN = 1 * limits.MIB
SPREAD_BLOCK_BYTES_MIN = 256 * limits.KIB  # mean block length from which threads pay
BETWEEN_BYTES_MAX = 2 * limits.ALIGN_BYTES  # from one record's block to that of the next
JOINED_BYTES_MAX = 256 * limits.KIB  # of a processor's own caches: opened as one span lands
INLINE_BYTES_MAX = 128 * limits.KIB  # below this a hand-over to a thread costs more than opening
_SPAN_ALIGN = 64


# Not frozen, because one of each is made per block or get: a frozen one takes far longer.
@dataclass(slots=True)
class Wanted:
    """One block of a get: its names and where it goes."""

    position: int  # in the caller's order
    wire_key: bytes
    engine_key: bytes = field(repr=False)
    into: memoryview = field(repr=False)


@dataclass(slots=True)
class Granted:
    """A wanted block and its lease."""

    wanted: Wanted
    item: GrantItem
    lease_until_ns: int  # monotonic clock of this host
    doubtful_ns: int  # from then on the lease may have ended, if its grant was long on its way


@dataclass(slots=True)
class OpenContext:
    """What all groups of one get share."""

    endpoint: Endpoint
    workers: Workers
    staging: Arena
    namespace_id: bytes
    at_daemon: bool
    deadline_ns: int
    key_of: KeyOf | None = None  # of a tenant that keeps its keys; else grants carry them


def plan_groups(
    context: OpenContext, granted: Sequence[Granted], *, last: bool = True
) -> list[list[Granted]]:
    """Cut a batch so that reading, opening and several threads overlap, in order.

    A group takes its thread's share of half of what is left, at least 2 and at most 8 MiB, so that
    few hand-overs are made and yet all threads end at about the same time (guided self-scheduling,
    Polychronopoulos and Kuck, 1987); of a batch that is not the `last` its whole share, since more
    work follows. Several groups fit into the staging memory. A larger block is a group by itself.
    Small blocks are not spread over threads: opening one is mostly interpreter work, and threads
    would fight for the lock. Where the daemon opened the blocks there is nothing to overlap: an
    equal part for each thread. Where blocks are opened in the daemon's memory, or by the fabric as
    they land, threads share a batch by themselves.
    """
    if granted and (_maps(context) or _landing(context, granted)):
        return [list(granted)]
    threads, staging_bytes, at_daemon = (
        context.workers.threads,
        context.staging.length_bytes,
        context.at_daemon,
    )
    whole = left = sum(g.item.span.length_bytes for g in granted)
    spread = left >= SPREAD_BLOCK_BYTES_MIN * len(granted)
    equal = max(GROUP_BYTES_MAX, -(-left // threads))
    most = equal if at_daemon else min(GROUP_BYTES_MAX, staging_bytes // 4)
    groups: list[list[Granted]] = []
    held = goal = 0  # so that the first block opens a group
    for one in granted:
        size = one.item.span.length_bytes
        if held >= goal or held + size > most:
            share = left // (2 * threads) if last else whole // threads
            share = share if spread and not at_daemon else most
            goal = min(most, max(GROUP_BYTES_MIN, share))
            groups.append([])
            held = 0
        groups[-1].append(one)
        held += size
        left -= size
    return groups


def open_at_once(context: OpenContext, group: list[Granted]) -> list[Status] | None:
    """Open a small group where it is, if it needs nothing to be waited for; else None."""
    if not _maps(context):
        return None
    if sum(one.item.plain_bytes for one in group) > INLINE_BYTES_MAX:
        return None
    return open_blocks(context, group, _mapped(context, group), in_place=True)


def open_alone(context: OpenContext, group: list[Granted]) -> list[Status] | None:
    """Open the only block that is under way where it is, if that takes no longer than to wake a
    thread for it; else None."""
    if len(group) != 1 or not _maps(context):
        return None
    if not context.workers.is_short(group[0].item.plain_bytes):
        return None
    return [_open_timed(context, group[0], *_mapped(context, group))]


def _open_timed(context: OpenContext, one: Granted, source: memoryview | Status) -> Status:
    """Open one block in place, and remember how long that took."""
    began_ns = time.perf_counter_ns()
    status = _open_block(context, one, source, in_place=True)
    if status is Status.OK and one.item.plain_bytes > INLINE_BYTES_MAX:
        context.workers.took(one.item.plain_bytes, time.perf_counter_ns() - began_ns)
    return status


def _maps(context: OpenContext) -> bool:
    """Whether sealed blocks are opened where they lie in the daemon's memory."""
    return not context.at_daemon and context.endpoint.capabilities.maps


def _mapped(context: OpenContext, group: list[Granted]) -> list[memoryview | Status]:
    """Shared memory: open from the daemon's slab, no copy of the sealed bytes."""
    endpoint = cast(MappedEndpoint, context.endpoint)
    return [endpoint.map_span(one.item.span) for one in group]


async def open_group(context: OpenContext, group: list[Granted]) -> list[Status]:
    """Read and open one group; a status per block, in order. Never raises for anything a peer can
    cause."""
    if context.at_daemon:
        return await _read_plain(context, group)
    if _maps(context):
        return await _open_shared(context, group, _mapped(context, group))
    if joined := _landing(context, group):
        return await _open_landing(context, group, joined)
    if sum(one.item.span.length_bytes for one in group) <= GROUP_BYTES_MAX or len(group) == 1:
        return await _open_copied(context, group)
    statuses: list[Status] = []  # it was to land, and another read came first
    for part in plan_groups(context, group):
        try:
            statuses += await _open_copied(context, part)
        except Exception as error:  # no thread takes it; what was opened before stays so
            statuses += [cause_of(error, "open_group")] * len(part)
    return statuses


def _landing(context: OpenContext, group: Sequence[Granted]) -> list[_Joined]:
    """The spans that a fabric's threads can open as they land, if they can and it is worth waking
    them; else none."""
    endpoint = context.endpoint
    if context.at_daemon or not endpoint.capabilities.lands:
        return []
    if sum(one.item.span.length_bytes for one in group) < LANDING_BYTES_MIN:
        return []
    joined = _join(group)
    can = cast(LandingEndpoint, endpoint).can_land([one.span for one in joined])
    return joined if can else []


class _Joined(NamedTuple):
    """Blocks of a group, `first` to before `end`, and the span that holds them."""

    first: int
    end: int
    span: RemoteSpan

    def part(self, whole: memoryview, span: RemoteSpan) -> memoryview:
        """One block's bytes in those of all."""
        begin = span.address - self.span.address
        return whole[begin : begin + span.length_bytes]


def _join(group: Sequence[Granted]) -> list[_Joined]:
    """Blocks that lie one behind the other in the daemon's memory are read together, with what is
    between them: a span costs the same however short it is. What was put, or read from flash,
    together usually lies so."""
    joined: list[_Joined] = []
    first = begin = end = rkey = 0
    for at, one in enumerate(group):
        span = one.item.span
        until = span.address + span.length_bytes
        if (
            at == first
            or span.rkey != rkey
            or not 0 <= span.address - end <= BETWEEN_BYTES_MAX
            or until - begin > JOINED_BYTES_MAX
        ):
            if at > first:
                joined.append(_Joined(first, at, RemoteSpan(rkey, begin, end - begin)))
            first, begin, rkey = at, span.address, span.rkey
        end = until
    joined.append(_Joined(first, len(group), RemoteSpan(rkey, begin, end - begin)))
    return joined


async def _open_landing(
    context: OpenContext, group: list[Granted], joined: Sequence[_Joined]
) -> list[Status]:
    """Open each block where it lands, on the fabric's threads, before the caches forget it."""
    statuses: list[Status | None] = [None] * len(group)

    def on_landed(number: int, sealed: memoryview) -> Status:
        whole = joined[number]
        for at in range(whole.first, whole.end):
            source = whole.part(sealed, group[at].item.span)
            statuses[at] = _open_block(context, group[at], source, in_place=False)
        return Status.OK

    endpoint = cast(LandingEndpoint, context.endpoint)
    spans = [one.span for one in joined]
    outcomes = await endpoint.land(spans, on_landed, context.deadline_ns)
    for (first, end, _), outcome in zip(joined, outcomes, strict=True):
        for at in range(first, end):
            if statuses[at] is None:  # it did not land
                statuses[at] = Status.INTERNAL if outcome is Status.OK else outcome
    return cast(list[Status], statuses)


async def _read_plain(context: OpenContext, group: list[Granted]) -> list[Status]:
    """The daemon opened them: read straight into the caller's memory, then look at the lease."""
    statuses = [Status.INTERNAL] * len(group)
    now_ns = 0
    try:
        ops = [ReadOp(one.item.span, one.wanted.into) for one in group]
        statuses = await context.endpoint.read(ops, context.deadline_ns)
        now_ns = time.monotonic_ns()
    finally:
        for index, one in enumerate(group):
            if statuses[index] is Status.OK and now_ns >= one.lease_until_ns:
                statuses[index] = Status.LEASE_EXPIRED
            if statuses[index] is not Status.OK:
                zero(one.wanted.into)
    return statuses


async def _open_copied(context: OpenContext, group: list[Granted]) -> list[Status]:
    """Other fabrics: read the sealed bytes into staging, open from there."""
    joined, starts = _join(group), list[int]()
    need = 0
    for each in joined:
        starts.append(need)
        need += -(-each.span.length_bytes // _SPAN_ALIGN) * _SPAN_ALIGN
    region = await context.staging.take(need, context.deadline_ns)
    if region is None:
        status = Status.DEADLINE if context.staging.fits(need) else Status.TOO_LARGE
        return [status] * len(group)
    try:
        views = [
            region.view[start : start + each.span.length_bytes]
            for start, each in zip(starts, joined, strict=True)
        ]
        ops = [ReadOp(each.span, view) for each, view in zip(joined, views, strict=True)]
        statuses = await context.endpoint.read(ops, context.deadline_ns)
        sources: list[memoryview | Status] = []
        for each, view, status in zip(joined, views, statuses, strict=True):
            for one in group[each.first : each.end]:
                sources.append(each.part(view, one.item.span) if status is Status.OK else status)
        return await _open(context, group, sources, in_place=False)
    finally:
        region.give_back()


async def _open(
    context: OpenContext,
    group: list[Granted],
    sources: Sequence[memoryview | Status],
    *,
    in_place: bool,
) -> list[Status]:
    if sum(one.item.plain_bytes for one in group) <= INLINE_BYTES_MAX:
        return open_blocks(context, group, sources, in_place)
    return await context.workers.run(
        open_blocks, context, group, sources, in_place, until_ns=context.deadline_ns
    )


def open_blocks(
    context: OpenContext,
    group: Sequence[Granted],
    sources: Sequence[memoryview | Status],
    in_place: bool,
) -> list[Status]:
    """Open sealed blocks into their destinations; runs on a worker thread.

    A block not begun by the deadline is left alone. The lease is looked at after each opening: it
    voids blocks opened in place, and explains damage of copied ones. A grant that was long on its
    way explains it too: the lease began with it, at the daemon.
    """
    return [_open_block(context, *pair, in_place) for pair in zip(group, sources, strict=True)]


def _open_block(
    context: OpenContext, one: Granted, source: memoryview | Status, in_place: bool
) -> Status:
    now_ns = time.monotonic_ns
    if type(source) is Status:
        return source
    assert type(source) is memoryview
    if now_ns() >= context.deadline_ns:
        return Status.DEADLINE
    wanted, item = one.wanted, one.item
    try:
        status = open_into(
            source,
            wanted.into,
            namespace_id=context.namespace_id,
            wire_key=wanted.wire_key,
            engine_key=wanted.engine_key,
            block_key=context.key_of or BlockKey(item.key, item.commitment),
        )
    except EntresolError as error:  # open_into has zeroed
        status = error.status.as_failure
    except Exception as error:  # the same; those before it in its group stay opened
        status = cause_of(error, "open_block")
    if status is Status.CORRUPT and _under_another_key(context, wanted, source):
        status = Status.LOCKED
    if in_place or status is not Status.OK:
        until_ns = one.lease_until_ns if status is Status.OK else one.doubtful_ns
        if now_ns() >= until_ns:
            status = Status.LEASE_EXPIRED
            zero(wanted.into)
    return status


class _Sharing:
    """A group that threads open together, each taking the next block: all end at about the same
    time, whatever each had to wait for, and the loop hears once."""

    __slots__ = ("_context", "_group", "_left", "_sources", "statuses")

    def __init__(
        self, context: OpenContext, group: list[Granted], sources: list[memoryview | Status]
    ) -> None:
        self._context, self._group, self._sources = context, group, sources
        self._left = deque(range(len(group)))
        self.statuses = [Status.DISCONNECTED] * len(group)  # where the client was closed

    def open_some(self) -> bool:
        """On a worker thread: open blocks, at most a turn's worth; whether there are more."""
        opened_bytes = 0
        while opened_bytes < GROUP_BYTES_MAX:
            try:
                at = self._left.popleft()
            except IndexError:
                return False
            one = self._group[at]
            try:
                status = _open_timed(self._context, one, self._sources[at])
            except Exception:  # it has been zeroed
                log.exception("event=bug where=open_block")
                status = Status.INTERNAL
            self.statuses[at] = status
            opened_bytes += one.item.plain_bytes
        return bool(self._left)

    def end(self, *, late: bool) -> list[Status]:
        """No thread is in it any more, nor will be; `late`: because of the deadline."""
        for at in self._left if late else ():
            self.statuses[at] = Status.DEADLINE
        return self.statuses


async def _open_shared(
    context: OpenContext, group: list[Granted], sources: list[memoryview | Status]
) -> list[Status]:
    """Open in the daemon's memory, on as many threads as the bytes are worth waking."""
    held = sum(one.item.span.length_bytes for one in group)
    spread = held >= SPREAD_BLOCK_BYTES_MIN * len(group)
    threads = round(held / (GROUP_BYTES_MIN if spread else GROUP_BYTES_MAX))
    threads = max(1, min(threads, len(group), context.workers.threads))
    sharing = _Sharing(context, group, sources)
    until_ns = context.deadline_ns
    late = await context.workers.share(sharing.open_some, threads=threads, until_ns=until_ns)
    return sharing.end(late=late)


def _under_another_key(context: OpenContext, wanted: Wanted, sealed: memoryview) -> bool:
    """Whether a host-sealed block that did not open is all right, for who has its key: then it must
    not be reported, or the daemon would drop what other hosts of the tenant read.

    Its header must be the one asked for in all but the commitment; nothing is opened here.
    """
    if context.key_of is None:
        return False
    try:
        header = SealedHeader.parse(sealed)
    except SealError:
        return False
    key = context.key_of(header)
    if not isinstance(key, BlockKey) or key.commitment == header.commitment:
        return False
    found = check_header(
        header,
        namespace_id=context.namespace_id,
        wire_key=wanted.wire_key,
        plain_bytes=wanted.into.nbytes,
        engine_key=wanted.engine_key,
    )
    return found is Status.OK
