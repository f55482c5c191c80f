"""A grant that is bytes from the start has the bytes of the grant it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_proto.fabric.base import RemoteSpan
from entresol_proto.wire.data import Grant, GrantItem, Tier
from entresol_proto.wire.frames import FrameType
from entresol_proto.wire.packed import PackedGrant
from entresol_proto.wire.session import ServerSession, State

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
KEY = st.binary(min_size=48, max_size=48)
BLOCKS = st.lists(st.tuples(U32, st.sampled_from(list(Tier)), U32, U64, U32, U32, KEY), max_size=40)


@given(BLOCKS, U64, U64, U64)
def test_it_has_the_bytes_of_the_grant(
    blocks: list[tuple[int, Tier, int, int, int, int, bytes]], lease: int, lasts: int, ends: int
) -> None:
    packed = PackedGrant(len(blocks))
    items = []
    for index, tier, rkey, address, length, plain, key in blocks:
        packed.add(index, tier, rkey, address, length, plain, key)
        span = RemoteSpan(rkey, address, length)
        items.append(GrantItem(index, tier, span, plain, key[:32], key[32:]))
    packed.lease(lease, lasts, ends)
    grant = Grant(True, lease, lasts, ends, tuple(items), ())
    assert packed.encode() == grant.encode()
    assert Grant.decode(packed.encode()) == grant
    assert (packed.TYPE, packed.final) == (grant.TYPE, grant.final)


def test_a_block_less_than_announced_is_a_bug() -> None:
    packed = PackedGrant(2)
    packed.add(0, Tier.MEMORY, 1, 2, 3, 4, bytes(48))
    with pytest.raises(AssertionError, match="announced"):
        packed.lease(1, 2, 3)


def test_it_ends_its_request() -> None:
    session = ServerSession(now_ns=0)
    session.state = State.OPEN
    session.in_flight[7] = FrameType.FETCH
    packed = PackedGrant(0)
    packed.lease(0, 0, 0)
    assert session.send(packed, 7)
    assert not session.in_flight
