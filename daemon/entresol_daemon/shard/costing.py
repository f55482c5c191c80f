"""What a message of a host costs before it is served: the loop's time, and memory while it waits.

Pure. Costs are microseconds of the event loop, roughly (`turns`).
"""

from __future__ import annotations

from typing import Any

from entresol_daemon.core.fairness import GETS, PUTS
from entresol_daemon.shard.turns import (
    BLOCK_COST,
    COMMIT_COST,
    DECODE_ITEM_COST,
    ITEM_COST,
    KEY_COST_SHIFT,
    LOOP_TURN_COST,
    MESSAGE_COST,
    QUOTE_KEY_COST_SHIFT,
    REQUEST_COST,
    WHY_COST,
    WINDOW_BLOCKS_IN_TURN,
    WINDOW_COST,
)
from entresol_proto import limits
from entresol_proto.wire import data, opening, quote


def cost_of(message: Any) -> tuple[int, int]:
    """About how long a request takes the loop until it waits for the first time, and its rank.
    What it does beyond LOOP_TURN_COST it counts itself (`LoopTurns.extend`)."""
    if isinstance(message, data.Fetch | data.Stage | data.Exists | data.Touch | data.Forget):
        keys = len(message.keys) // limits.WIRE_KEY_BYTES
        cost = REQUEST_COST + min(LOOP_TURN_COST, keys >> KEY_COST_SHIFT)
        if isinstance(message, data.Fetch | data.Stage):  # the first window is in the same turn
            cost += WINDOW_COST + min(keys, WINDOW_BLOCKS_IN_TURN) * BLOCK_COST
        return cost, GETS
    if isinstance(message, quote.Quote):
        keys = len(message.keys) // limits.WIRE_KEY_BYTES
        return REQUEST_COST + min(LOOP_TURN_COST, keys >> QUOTE_KEY_COST_SHIFT), GETS
    if isinstance(message, data.Reserve):
        return REQUEST_COST + min(LOOP_TURN_COST, len(message.items) * ITEM_COST), PUTS
    if isinstance(message, data.Commit):
        return REQUEST_COST + COMMIT_COST * len(message.items), PUTS  # in one stretch
    if isinstance(message, data.Explain):
        return REQUEST_COST + min(LOOP_TURN_COST, len(message.engine_keys) * WHY_COST), GETS
    return REQUEST_COST, GETS


def reading_cost_of(message: Any) -> int:
    """About how long a message takes the loop that no turn is taken for: to decode it, where that
    is long, and to do what is done at once."""
    kind = type(message)
    if kind is data.Fetch:
        return 0
    if kind is data.Reserve:
        return len(message.items) * DECODE_ITEM_COST  # its tokens cost what any bytes read do
    if kind is data.Release:
        return MESSAGE_COST + len(message.lease_ids) + 2 * len(message.reports)
    if isinstance(message, opening.Ping | opening.Goodbye):
        return MESSAGE_COST
    return 0


def size_of(message: Any) -> int:
    """About how much memory a request takes while it waits."""
    keys, items = getattr(message, "keys", b""), getattr(message, "items", ())
    size = 512 + len(keys) + 512 * len(items) + 128 * len(getattr(message, "engine_keys", ()))
    if isinstance(message, data.Reserve):
        size += sum([len(item.token_ids_u32le) for item in message.items])
    return size
