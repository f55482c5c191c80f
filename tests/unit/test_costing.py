"""What a message costs before it is served."""

from __future__ import annotations

from entresol_daemon.shard.costing import size_of
from entresol_proto import limits
from entresol_proto.wire import data


def test_a_long_reserve_waits_as_what_it_is() -> None:
    """Of 512 bytes an item, whatever its tokens: a session had 16 times as much read ahead."""
    tokens = bytes(4 * limits.TOKENS_PER_BLOCK_MAX)
    items = (data.PutItem(bytes(16), bytes(32), 1, 0, bytes(32), tokens),) * 500
    reserve = data.Reserve(1, data.Ack.ACCEPTED, 1, items)
    assert len(reserve.encode()) <= size_of(reserve) < 1.2 * len(reserve.encode())
