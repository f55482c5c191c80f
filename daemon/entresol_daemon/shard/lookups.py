"""EXISTS, TOUCH and FORGET, and the first step of a FETCH: what asks the index.

Invariant: an absent key and one of another tenant take the same path; thousands of keys take the
loop a tenant's turn at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.removal import Removal
from entresol_daemon.shard.sessions import OpenedNamespace, Session
from entresol_daemon.shard.turns import (
    KEY_COST_SHIFT,
    LOOP_ROUND_COST,
    LOOP_TURN_COST,
    REMOVAL_COST,
    TOUCH_KEY_COST_SHIFT,
)
from entresol_proto import limits
from entresol_proto.wire.data import Exists, ExistsReply, Forget, Touch

REMOVALS_QUEUED_MAX = 65_536  # before FORGET of what is not here waits for them
_KEY = limits.WIRE_KEY_BYTES


def at_once(parts: Parts, keys: bytes) -> bool:
    """Whether so many keys are looked up without a break."""
    return _cost_of(len(keys)) <= parts.turns.loop.stretch


def _cost_of(length_bytes: int) -> int:
    """What the loop takes to look up keys, so many bytes of them."""
    return -(-(length_bytes // _KEY) >> KEY_COST_SHIFT)


def exists_now(parts: Parts, session: Session, request: Exists) -> ExistsReply:
    """Which keys are stored, and the longest stored prefix. For keys that are looked up at once."""
    namespace = session.namespace(request.handle)
    parts.turns.loop.extend(session.account, _cost_of(len(request.keys)))
    slots = parts.engine.index.lookup(namespace.namespace_id, request.keys)
    return _existing(parts, session, slots)


async def exists(parts: Parts, session: Session, request: Exists) -> ExistsReply:
    """As `exists_now`, of any number of keys, in as many turns on the loop as they take."""
    slots, _ = await _look_up(parts, session, session.namespace(request.handle), request.keys)
    return _existing(parts, session, slots)


async def slots_of(
    parts: Parts, session: Session, namespace: OpenedNamespace, keys: bytes
) -> tuple[list[int], bool]:
    """The slots of all keys, -1 for absent ones; and whether that took one turn on the loop, so
    that all of them are so right now."""
    slots, fresh = await _look_up(parts, session, namespace, keys)
    return slots.tolist(), fresh


async def _look_up(
    parts: Parts, session: Session, namespace: OpenedNamespace, keys: bytes
) -> tuple[npt.NDArray[np.int64], bool]:
    lookup, space, loop_turns = parts.engine.index.lookup, namespace.namespace_id, parts.turns.loop
    if at_once(parts, keys):
        loop_turns.extend(session.account, _cost_of(len(keys)))
        return lookup(space, keys), True
    found = []
    at = 0
    while at < len(keys):
        if at:
            await loop_turns.take(session.account, LOOP_TURN_COST)
        stretch = loop_turns.extend(session.account, _cost_of(len(keys) - at))
        end = at + (stretch << KEY_COST_SHIFT) * _KEY
        found.append(lookup(space, keys[at:end]))
        at = end
    return np.concatenate(found), False


def touches_at_once(parts: Parts, request: Touch) -> bool:
    """Whether so many blocks are made recent without a break."""
    return _touch_cost_of(len(request.keys)) <= parts.turns.loop.stretch


def _touch_cost_of(length_bytes: int) -> int:
    return -(-(length_bytes // _KEY) >> TOUCH_KEY_COST_SHIFT)


def touch_now(parts: Parts, session: Session, request: Touch) -> int:
    """Make blocks recent, tail first; returns how many were found. For keys of one stretch."""
    parts.turns.loop.extend(session.account, _touch_cost_of(len(request.keys)))
    return _touch(parts, session.namespace(request.handle), request.keys)


async def touch(parts: Parts, session: Session, request: Touch) -> int:
    """As `touch_now`, of any number of keys, in as many turns on the loop as they take."""
    namespace, loop_turns = session.namespace(request.handle), parts.turns.loop
    found, end = 0, len(request.keys)
    while end > 0:
        if end < len(request.keys):
            await loop_turns.take(session.account, LOOP_TURN_COST)
        stretch = loop_turns.extend(session.account, _touch_cost_of(end))
        begin = max(0, end - (stretch << TOUCH_KEY_COST_SHIFT) * _KEY)
        found += _touch(parts, namespace, request.keys[begin:end])
        end = begin
    return found


def _touch(parts: Parts, namespace: OpenedNamespace, keys: bytes) -> int:
    slots = parts.engine.index.lookup(namespace.namespace_id, keys)
    found = [slot for slot in slots.tolist() if slot >= 0]
    parts.engine.touch(found[::-1])
    parts.valued.used(found[::-1])
    return len(found)


async def forget(parts: Parts, session: Session, request: Forget, removal: Removal) -> int:
    """Drop the blocks of these keys, some in each turn on the loop; returns how many. What was
    evicted lately does not come back with a crash either."""
    namespace, loop_turns = session.namespace(request.handle), parts.turns.loop
    keys = request.keys
    dropped = at = 0
    while at < len(keys):
        if at:
            await loop_turns.take(session.account, LOOP_TURN_COST)
        stretch = loop_turns.extend(session.account, LOOP_ROUND_COST)
        part = keys[at : at + (stretch << KEY_COST_SHIFT) * _KEY]
        if parts.engine.hides_blocks:  # removals of what is not here are written, too
            part = part[: max(1, stretch // REMOVAL_COST) * _KEY]
            if parts.engine.removals_queued >= REMOVALS_QUEUED_MAX:
                await removal.barrier(session.account)
        slots = parts.engine.index.lookup(namespace.namespace_id, part)
        found = np.flatnonzero(slots >= 0)[: max(1, stretch // REMOVAL_COST)]
        more = len(found) == max(1, stretch // REMOVAL_COST)  # behind them, looked up again
        count = int(found[-1]) + 1 if more else len(slots)
        dropped += removal.forget(dict.fromkeys(slots[found].tolist()))
        removal.forget_absent(
            session.account, namespace.namespace_id, part[: count * _KEY], slots[:count]
        )
        at += count * _KEY
    return dropped


def _existing(parts: Parts, session: Session, slots: npt.NDArray[np.int64]) -> ExistsReply:
    present = slots >= 0
    absent = np.flatnonzero(~present)
    prefix = int(absent[0]) if absent.size else len(present)
    here = len(present) - absent.size
    parts.meters.looked_up(session.account.name, len(present), here, prefix)
    return ExistsReply(prefix, np.packbits(present, bitorder="little").tobytes())
