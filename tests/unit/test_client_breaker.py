"""The breaker: a table of its transitions, and its promise to recover under any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_client.breaker import Breaker, BreakerState
from entresol_client.config import BreakerSettings

SETTINGS = BreakerSettings(failures_to_open=3, cooldown_ns_min=1_000_000, cooldown_ns_max=8_000_000)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def breaker(jitter: float = 1.0) -> Breaker:
    return Breaker(SETTINGS, lambda: jitter)


def in_state(state: BreakerState) -> Breaker:
    made = breaker()
    if state is not CLOSED:
        made.trip(0)
    if state is HALF_OPEN:
        assert made.probe(made.retry_at_ns)
    return made


@pytest.mark.parametrize(
    ("before", "event", "after"),
    [
        (CLOSED, "success", CLOSED),
        (CLOSED, "failure", CLOSED),
        (CLOSED, "trip", OPEN),
        (CLOSED, "probe", CLOSED),
        (OPEN, "success", CLOSED),
        (OPEN, "failure", OPEN),
        (OPEN, "trip", OPEN),
        (OPEN, "probe", HALF_OPEN),
        (HALF_OPEN, "success", CLOSED),
        (HALF_OPEN, "failure", OPEN),
        (HALF_OPEN, "trip", HALF_OPEN),
        (HALF_OPEN, "probe", HALF_OPEN),
    ],
)
def test_every_state_and_event(before: BreakerState, event: str, after: BreakerState) -> None:
    made = in_state(before)
    now_ns = 10**12
    if event == "success":
        made.success()
    else:
        getattr(made, event)(now_ns)
    assert made.state is after
    assert made.admits == (after is CLOSED)


def test_opens_at_the_third_failure_in_a_row_only() -> None:
    made = breaker()
    for _ in range(2):
        made.failure(5)
        made.failure(5)
        assert made.admits
        made.success()
    made.failure(5)
    made.failure(5)
    made.failure(5)
    assert made.state is OPEN
    assert made.openings == 1


def test_cooldown_doubles_up_to_the_maximum_and_starts_small_again() -> None:
    made = breaker()
    made.trip(0)
    lengths = [made.retry_at_ns]
    for _ in range(5):
        now_ns = made.retry_at_ns
        assert not made.probe(now_ns - 1)
        assert made.probe(now_ns)
        made.failure(now_ns)
        lengths.append(made.retry_at_ns - now_ns)
    assert lengths == [1_000_000, 2_000_000, 4_000_000, 8_000_000, 8_000_000, 8_000_000]
    made.success()
    made.trip(0)
    assert made.retry_at_ns == 1_000_000


@pytest.mark.parametrize(("jitter", "expected"), [(0.0, 500_000), (0.5, 750_000), (1.0, 1_000_000)])
def test_jitter_spreads_the_cooldown(jitter: float, expected: int) -> None:
    made = breaker(jitter)
    made.trip(0)
    assert made.retry_at_ns == expected
    assert made.wait_ns(100_000) == expected - 100_000
    assert made.wait_ns(expected) == made.wait_ns(expected + 1) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["success", "failure", "trip", "probe"]),
            st.integers(0, 20_000_000),
            st.floats(0, 1),
        ),
        max_size=60,
    )
)
def test_any_history_ends_in_a_probe_within_the_bound(
    history: list[tuple[str, int, float]],
) -> None:
    now_ns = 0
    drawn = [0.0]
    made = Breaker(SETTINGS, lambda: drawn[0])
    openings = 0
    for event, step_ns, drawn[0] in history:
        now_ns += step_ns
        if event == "success":
            made.success()
        else:
            getattr(made, event)(now_ns)
        assert made.openings >= openings
        openings = made.openings
        if made.state is OPEN:
            assert made.retry_at_ns <= now_ns + SETTINGS.cooldown_ns_max
        if made.state is CLOSED:
            assert made.failures < SETTINGS.failures_to_open
    # No traffic from here on: the owner only waits and probes.
    if made.state is OPEN:
        assert made.probe(now_ns + made.wait_ns(now_ns))
    if made.state is HALF_OPEN:
        made.success()
    assert made.admits
