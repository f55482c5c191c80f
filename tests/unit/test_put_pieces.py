"""The pieces of a put: how a COMMIT is cut, and what is read where it lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from entresol_daemon.shard.pulls import (
    PUT_WINDOW_BLOCKS,
    PUT_WINDOW_BYTES,
    Pull,
    borrowed,
    windows,
)
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.limits import MIB
from entresol_proto.status import Status


def pull(length_bytes: int, deadline_ns: int = 10) -> Pull:
    reservation = cast(Any, SimpleNamespace(deadline_ns=deadline_ns))
    return Pull(reservation, RemoteSpan(1, 0, length_bytes), 0)


def test_windows_are_bounded_in_bytes_and_blocks() -> None:
    def cut(sizes: list[int]) -> list[list[int]]:
        runs = windows([pull(size) for size in sizes])
        return [[each.span.length_bytes for each in run] for run in runs]

    assert cut([]) == []
    assert cut([3 * MIB] * 5) == [[3 * MIB] * 2, [3 * MIB] * 2, [3 * MIB]]
    assert cut([PUT_WINDOW_BYTES] * 2) == [[PUT_WINDOW_BYTES]] * 2
    assert cut([1, 2 * PUT_WINDOW_BYTES, 1]) == [[1], [2 * PUT_WINDOW_BYTES], [1]]
    assert cut([1] * (PUT_WINDOW_BLOCKS + 1)) == [[1] * PUT_WINDOW_BLOCKS, [1]]


def test_only_what_is_there_and_in_time_is_sealed_where_it_lies() -> None:
    here = memoryview(b"plain")
    ends = {0: Status.OK, 1: Status.OK, 2: Status.OK, 3: Status.LEASE_EXPIRED}
    lent = SimpleNamespace(
        views=[here, here, Status.BAD_REQUEST, here], give_back=lambda: list(ends.values())
    )
    endpoint = SimpleNamespace(borrow=lambda spans: lent)
    session = cast(Any, SimpleNamespace(data_path=lambda: endpoint))
    pulls = [pull(5), pull(5, deadline_ns=7), pull(5), pull(5)]
    with borrowed(session, pulls, now_ns=7):
        assert [each.in_place for each in pulls] == [here, None, None, here]
    assert [each.status for each in pulls] == [
        Status.OK,
        Status.DEADLINE,
        Status.BAD_REQUEST,
        Status.LEASE_EXPIRED,  # the host took it back meanwhile
    ]
    assert not any(each.in_place for each in pulls)
