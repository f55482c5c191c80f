"""When the scrubber may read, and when a refused block is given up: pure decisions."""

from __future__ import annotations

import random

from entresol_daemon.core.scrubbing import (
    INTERVAL_NS,
    REFUSED_MAX,
    REFUSED_PAUSE_NS,
    STEP_BYTES_MAX,
    YIELD_NS_MAX,
    Pace,
    Progress,
    Refused,
    steps,
)

SECOND = 1_000_000_000
A, B = (b"n" * 16, b"a" * 16), (b"n" * 16, b"b" * 16)


def test_the_rate_holds_from_any_moment_on() -> None:
    """Idle time is not saved up: after an hour without a step there is no burst."""
    rate, rng = 10_000_000, random.Random(1)
    pace, now, taken = Pace(rate), 3600 * SECOND, []
    for _ in range(500):
        if rng.random() < 0.1:
            now += rng.randrange(20 * SECOND)
        now += pace.wait_ns(now, busy=False)
        size = rng.randrange(1, STEP_BYTES_MAX)
        pace.took(now, size)
        taken.append((now, size))
    for first in range(0, 450, 7):
        for last in range(first + 1, first + 40):
            span = taken[last][0] - taken[first][0]
            moved = sum(size for _, size in taken[first:last])
            assert moved <= rate * span / SECOND + 1


def test_gets_go_first_but_not_for_ever() -> None:
    pace, now = Pace(1 << 40), 0
    began = now
    while wait := pace.wait_ns(now, busy=True):
        now += wait
    assert now - began == YIELD_NS_MAX
    pace.took(now, 1)
    now += SECOND
    assert pace.wait_ns(now, busy=True) > 0, "the next step yields anew"
    assert pace.wait_ns(now, busy=False) == 0


def test_steps_cover_all_blocks_once_and_stay_small() -> None:
    rng = random.Random(2)
    for _ in range(100):
        sizes = [rng.choice((4096, 100_000, STEP_BYTES_MAX, 3 * STEP_BYTES_MAX)) for _ in range(30)]
        counts = steps(sizes)
        assert sum(counts) == len(sizes)
        at = 0
        for count in counts:
            assert count == 1 or sum(sizes[at : at + count]) <= STEP_BYTES_MAX
            at += count
    assert steps([]) == []


def test_a_refused_block_is_asked_for_once_more_after_the_pause() -> None:
    refused = Refused()
    refused.refused(A, 5)
    refused.refused(A, 100)  # asked again by a cycle: the first refusal counts
    refused.refused(B, 50)
    assert refused.next_due_ns() == 5 + REFUSED_PAUSE_NS
    assert refused.due(4 + REFUSED_PAUSE_NS) == []
    assert refused.due(5 + REFUSED_PAUSE_NS) == [A]
    assert refused.due(50 + REFUSED_PAUSE_NS) == [B]
    assert len(refused) == 0
    assert refused.next_due_ns() is None


def test_the_witness_is_the_block_given_last_and_never_one_that_was_refused_since() -> None:
    refused = Refused()
    assert refused.witness is None
    refused.gave(A)
    refused.refused(B, 5)
    assert refused.witness == A
    refused.refused(A, 6)
    assert refused.witness is None


def test_too_many_refusals_mean_the_device() -> None:
    refused = Refused()
    for number in range(REFUSED_MAX):
        assert not refused.full
        refused.refused((b"n" * 16, number.to_bytes(16, "big")), 0)
    assert refused.full
    refused.forget()
    assert not refused.full


def test_a_cycle_a_day_and_one_at_once_at_first() -> None:
    progress = Progress()
    assert progress.due_in_ns(123) == 0, "never scrubbed"
    progress.begin(1000)
    assert not progress.resting
    assert progress.due_in_ns(2000) == 0, "one that was interrupted goes on"
    progress.end(5000)
    assert (progress.cycles, progress.last_cycle_ns, progress.segment) == (1, 4000, 0)
    assert progress.due_in_ns(5000) == INTERVAL_NS - 4000
    assert progress.due_in_ns(1000 + INTERVAL_NS) == 0
    assert progress.due_in_ns(999) == 0, "a clock that was set back is no reason to wait"
