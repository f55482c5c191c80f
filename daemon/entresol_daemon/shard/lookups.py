"""EXISTS and TOUCH, and the first step of a FETCH: what only asks the index.

Invariant: an absent key and one of another tenant take the same path; thousands of keys take the
loop a tenant's turn at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from entresol_daemon.shard.parts import Parts
from entresol_daemon.shard.sessions import OpenedNamespace, Session
from entresol_daemon.shard.turns import KEYS_PER_TURN_BYTES, LOOP_TURN_COST
from entresol_proto.wire.data import Exists, ExistsReply, Touch


def exists_now(parts: Parts, session: Session, request: Exists) -> ExistsReply:
    """Which keys are stored, and the longest stored prefix. For KEYS_PER_TURN keys at most."""
    namespace = session.namespace(request.handle)
    return _existing(parts.engine.index.lookup(namespace.namespace_id, request.keys) >= 0)


async def exists(parts: Parts, session: Session, request: Exists) -> ExistsReply:
    """As `exists_now`, of any number of keys, in as many turns on the loop as they take."""
    namespace = session.namespace(request.handle)
    lookup, keys = parts.engine.index.lookup, request.keys
    found = []
    for at in range(0, len(keys), KEYS_PER_TURN_BYTES):
        if at:
            await parts.turns.loop.take(session.account, LOOP_TURN_COST)
        found.append(lookup(namespace.namespace_id, keys[at : at + KEYS_PER_TURN_BYTES]) >= 0)
    return _existing(np.concatenate(found) if found else np.zeros(0, np.bool_))


async def slots_of(
    parts: Parts, session: Session, namespace: OpenedNamespace, keys: bytes
) -> tuple[list[int], bool]:
    """The slots of all keys, -1 for absent ones; and whether that took one turn on the loop, so
    that all of them are so right now."""
    lookup, space = parts.engine.index.lookup, namespace.namespace_id
    slots: list[int] = lookup(space, keys[:KEYS_PER_TURN_BYTES]).tolist()
    for at in range(KEYS_PER_TURN_BYTES, len(keys), KEYS_PER_TURN_BYTES):
        await parts.turns.loop.take(session.account, LOOP_TURN_COST)
        slots += lookup(space, keys[at : at + KEYS_PER_TURN_BYTES]).tolist()
    return slots, len(keys) <= KEYS_PER_TURN_BYTES


def touch(parts: Parts, session: Session, request: Touch) -> int:
    """Make blocks recent, tail first; returns how many were found."""
    namespace = session.namespace(request.handle)
    slots = parts.engine.index.lookup(namespace.namespace_id, request.keys)
    found = [slot for slot in slots.tolist() if slot >= 0]
    parts.engine.touch(found[::-1])
    return len(found)


def _existing(present: npt.NDArray[np.bool_]) -> ExistsReply:
    absent = np.flatnonzero(~present)
    prefix = int(absent[0]) if absent.size else len(present)
    return ExistsReply(prefix, np.packbits(present, bitorder="little").tobytes())
