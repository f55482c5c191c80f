"""From granted spans to plaintext in the caller's buffers: the inner part of every get.

Invariants:
- a destination holds the exact block, or what it held before, or zeros;
- bytes are opened in place in the daemon's memory (shm) only if the lease still held afterwards:
  the cipher reads its input twice, so the check comes after the last read;
- when a function here returns, nobody writes into the destinations any more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from entresol_client.buffers import zero
from entresol_client.staging import Arena
from entresol_client.workers import Workers
from entresol_proto import limits
from entresol_proto.fabric.base import Endpoint, MappedEndpoint, ReadOp
from entresol_proto.seal.block import BlockKey, open_into
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire.data import GrantItem, Tier

GROUP_BYTES_MIN = 1 * limits.MIB
GROUP_BYTES_MAX = 8 * limits.MIB
INLINE_BYTES_MAX = 128 * limits.KIB  # below this a hand-over to a thread costs more than opening
_SPAN_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """One block of a get: its names and where it goes."""

    position: int  # in the caller's order
    wire_key: bytes
    engine_key: bytes = field(repr=False)
    into: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class Granted:
    """A wanted block and its lease."""

    wanted: Wanted
    item: GrantItem
    lease_until_ns: int  # monotonic clock of this host


@dataclass(frozen=True, slots=True)
class Opened:
    """Outcome for one block."""

    granted: Granted
    status: Status


@dataclass(frozen=True, slots=True)
class OpenContext:
    """What all groups of one get share."""

    endpoint: Endpoint
    workers: Workers
    staging: Arena
    namespace_id: bytes
    at_daemon: bool
    deadline_ns: int


def plan_groups(
    granted: Sequence[Granted], threads: int, staging_bytes: int
) -> list[list[Granted]]:
    """Cut a batch so that reading, opening and several threads overlap, in order.

    Groups of 1 to 8 MiB of sealed bytes, at least two per thread if the batch is large enough, and
    several to the staging memory. A larger block is a group by itself.
    """
    total = sum(g.item.span.length_bytes for g in granted)
    most = min(GROUP_BYTES_MAX, staging_bytes // 4)
    goal = min(most, max(GROUP_BYTES_MIN, total // (2 * threads)))
    groups: list[list[Granted]] = []
    held = goal  # so that the first block opens a group
    for one in granted:
        size = one.item.span.length_bytes
        if held >= goal or held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(one)
        held += size
    return groups


async def open_group(context: OpenContext, group: list[Granted]) -> list[Opened]:
    """Read and open one group; every block of it is in the answer, in order. Never raises for
    anything a peer can cause."""
    if context.at_daemon:
        return await _read_plain(context, group)
    if context.endpoint.capabilities.maps and isinstance(context.endpoint, MappedEndpoint):
        return await _open_mapped(context, context.endpoint, group)
    return await _open_copied(context, group)


async def _read_plain(context: OpenContext, group: list[Granted]) -> list[Opened]:
    """The daemon opened them: read straight into the caller's memory, then look at the lease."""
    opened = [Opened(one, Status.CORRUPT) for one in group]
    ops = [ReadOp(one.item.span, one.wanted.into) for one in group]
    statuses: Sequence[Status] = [Status.INTERNAL] * len(group)
    now_ns = 0
    try:
        statuses = await context.endpoint.read(ops, context.deadline_ns)
        now_ns = time.monotonic_ns()
    finally:
        for index, (one, status) in enumerate(zip(group, statuses, strict=True)):
            if status is Status.OK and now_ns >= one.lease_until_ns:
                status = Status.LEASE_EXPIRED
            if status is not Status.OK:
                zero(one.wanted.into)
            opened[index] = Opened(one, status)
    return opened


async def _open_mapped(
    context: OpenContext, endpoint: MappedEndpoint, group: list[Granted]
) -> list[Opened]:
    """Shared memory: open from the daemon's slab, no copy of the sealed bytes."""
    sources: list[memoryview | Status] = [endpoint.map_span(one.item.span) for one in group]
    return await _open(context, group, sources, in_place=True)


async def _open_copied(context: OpenContext, group: list[Granted]) -> list[Opened]:
    """Other fabrics: read the sealed bytes into staging, open from there."""
    starts: list[int] = []
    need = 0
    for one in group:
        starts.append(need)
        need += -(-one.item.span.length_bytes // _SPAN_ALIGN) * _SPAN_ALIGN
    region = await context.staging.take(need, context.deadline_ns)
    if region is None:
        fits = context.staging.fits(need)
        status = Status.DEADLINE if fits else Status.TOO_LARGE
        return [Opened(one, status) for one in group]
    try:
        views = [
            region.view[start : start + one.item.span.length_bytes]
            for start, one in zip(starts, group, strict=True)
        ]
        ops = [ReadOp(one.item.span, view) for one, view in zip(group, views, strict=True)]
        statuses = await context.endpoint.read(ops, context.deadline_ns)
        sources = [
            view if status is Status.OK else status
            for view, status in zip(views, statuses, strict=True)
        ]
        return await _open(context, group, sources, in_place=False)
    finally:
        region.give_back()


async def _open(
    context: OpenContext,
    group: list[Granted],
    sources: Sequence[memoryview | Status],
    *,
    in_place: bool,
) -> list[Opened]:
    args = (group, sources, context.namespace_id, context.deadline_ns, in_place)
    if sum(one.item.plain_bytes for one in group) <= INLINE_BYTES_MAX:
        return open_blocks(*args)
    return await context.workers.run(open_blocks, *args)


def open_blocks(
    group: Sequence[Granted],
    sources: Sequence[memoryview | Status],
    namespace_id: bytes,
    deadline_ns: int,
    in_place: bool,
) -> list[Opened]:
    """Open sealed blocks into their destinations; runs on a worker thread.

    A block not begun by the deadline is left alone. The lease is looked at after each opening: it
    voids blocks opened in place, and explains damage of copied ones.
    """
    opened = []
    for one, source in zip(group, sources, strict=True):
        if isinstance(source, Status):
            opened.append(Opened(one, source))
            continue
        if time.monotonic_ns() >= deadline_ns:
            opened.append(Opened(one, Status.DEADLINE))
            continue
        wanted, item = one.wanted, one.item
        try:
            status = open_into(
                source,
                wanted.into,
                namespace_id=namespace_id,
                wire_key=wanted.wire_key,
                engine_key=wanted.engine_key,
                block_key=BlockKey(item.key, item.commitment),
            )
        except EntresolError as error:  # open_into has zeroed
            status = error.status
        if (in_place or status is not Status.OK) and time.monotonic_ns() >= one.lease_until_ns:
            status = Status.LEASE_EXPIRED
            zero(wanted.into)
        opened.append(Opened(one, status))
    return opened


def usable_tier(opened: Opened) -> Tier:
    """Where a block came from; NONE unless it is in place."""
    return opened.granted.item.tier if opened.status is Status.OK else Tier.NONE
