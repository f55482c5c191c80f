"""Ids of traces that both sides derive: the same for the same request, another for any other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_proto.tracing import ids_of, sampled

SESSION = bytes(range(16))
TRACE, SPAN = "4834fd70ef47b6626f7b34fcf324adb3", "42a2c53eb52a7693"


def test_the_ids_stay_what_they_are() -> None:
    """A host and a daemon of different versions derive the same: this may not change."""
    trace_id, span_id = ids_of(SESSION, 7)
    assert (f"{trace_id:032x}", f"{span_id:016x}") == (TRACE, SPAN)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1))
def test_ids_fit_and_are_never_zero(session: bytes, request_id: int) -> None:
    trace_id, span_id = ids_of(session, request_id)
    assert 0 < trace_id < 2**128
    assert 0 < span_id < 2**64


def test_requests_and_sessions_have_ids_of_their_own() -> None:
    found = {ids_of(bytes([s]) * 16, r) for s in range(20) for r in range(200)}
    assert len({trace for trace, _ in found}) == len({span for _, span in found}) == 4000


@pytest.mark.parametrize(("ratio", "low"), [(0.0, False), (1e-9, True), (0.5, True), (1.0, True)])
def test_the_share_is_of_the_lower_half(ratio: float, low: bool) -> None:
    assert sampled(0xFFFF << 64, ratio) is low  # the lower half is 0
    assert sampled((1 << 64) - 1, ratio) is (ratio == 1.0)


def test_about_so_many_are_sampled() -> None:
    count = sum(sampled(ids_of(SESSION, number)[0], 0.1) for number in range(20_000))
    assert 1_700 < count < 2_300
