"""How a batch of granted blocks is cut for the threads that open it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from entresol_client.opening import (
    GROUP_BYTES_MAX,
    GROUP_BYTES_MIN,
    Granted,
    OpenContext,
    plan_groups,
)
from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.limits import MIB
from entresol_proto.wire.data import GrantItem, Tier


def context(threads: int) -> OpenContext:
    endpoint = SimpleNamespace(capabilities=SimpleNamespace(maps=True, lands=False))
    given: dict[str, Any] = {
        "endpoint": endpoint,
        "workers": SimpleNamespace(threads=threads),
        "staging": SimpleNamespace(length_bytes=64 * MIB),
    }
    return OpenContext(namespace_id=bytes(16), at_daemon=False, deadline_ns=1, **given)


def batch(count: int, size: int) -> list[Granted]:
    items = [
        GrantItem(at, Tier.MEMORY, RemoteSpan(1, at * size, size), size, bytes(32), bytes(16))
        for at in range(count)
    ]
    return [Granted(cast(Any, None), item, 1, 1) for item in items]


def sizes(groups: list[list[Granted]]) -> list[int]:
    return [sum(one.item.span.length_bytes for one in group) // MIB for group in groups]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("count", [1, 3, 29, 61])
def test_every_block_is_in_one_group_in_order(count: int, last: bool) -> None:
    granted = batch(count, MIB)
    groups = plan_groups(context(2), granted, last=last)
    assert [one for group in groups for one in group] == granted
    assert all(sum(o.item.span.length_bytes for o in g) <= GROUP_BYTES_MAX for g in groups)


def test_the_last_batch_ends_with_small_groups_and_others_do_not() -> None:
    granted = batch(61, MIB)
    ending = sizes(plan_groups(context(2), granted))
    going_on = sizes(plan_groups(context(2), granted, last=False))
    assert min(ending[:-1]) == GROUP_BYTES_MIN // MIB
    assert set(going_on[:-1]) == {GROUP_BYTES_MAX // MIB}
    assert len(going_on) < len(ending)


def test_a_first_part_gives_each_thread_work() -> None:
    assert sizes(plan_groups(context(2), batch(3, MIB), last=False)) == [2, 1]
    assert sizes(plan_groups(context(4), batch(16, MIB), last=False)) == [4, 4, 4, 4]
