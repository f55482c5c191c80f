"""R8 judges what was really sent, what waited by what is set, and says when it judges nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from entresol_daemon.config import LimitsConfig
from tests.proof.line import Tally
from tests.proof.soak_load import (
    OVERLOAD,
    STOLEN_MAX,
    Round,
    Window,
    judge_sent,
    judge_waiting,
    late,
    say_disturbed,
)

ADMITTED = {"served": 60, "flooded": 40}


def a_round(
    sent: int = 1_000, refused: int = 900, stolen: float = 0.0, slower: float = 1.0
) -> Round:
    one = Window(Counter(served=60), [10.0] * 60, seconds=1.0)
    counts = Counter(ADMITTED, refused=refused, sent=sent, offered=sent + 500, not_asked=500)
    return one, Window(counts, [10.0 * slower] * 60, seconds=1.0, stolen=stolen)


def test_what_was_only_meant_to_be_sent_does_not_count() -> None:
    tally = Tally()
    assert judge_sent(tally, [a_round()] * 3) == []
    assert tally.figures["min_sent_over_admitted"] >= OVERLOAD
    (finding,) = judge_sent(Tally(), [a_round(sent=600)] * 3)
    assert "6.6 times as many, not 10; 1500 were not sent after all" in finding


def test_what_hosts_were_refused_was_sent_as_well() -> None:
    one, ten = a_round(sent=600)
    ten.counts["host_refused"] = 400
    assert judge_sent(Tally(), [(one, ten)]) == []


def test_an_overload_without_refusals_is_none() -> None:
    assert judge_sent(Tally(), [a_round(refused=0)]) == ["nothing was refused: it was no overload"]


@pytest.mark.parametrize(
    ("name", "limit"), [("gets_waiting", 3 * 8), ("puts_waiting", 128)]
)  # of each tenant's gets, twice what is served at a time, less what is
def test_what_waits_is_judged_by_what_is_set(name: str, limit: int) -> None:
    limits = LimitsConfig(gets_at_once_max=8, put_queue_blocks_max=128)
    assert judge_waiting(Counter({name: limit}), limits) == []
    (finding,) = judge_waiting(Counter({name: limit + 1}), limits)
    assert finding == f"{name}: {limit + 1} at the worst, {limit} by what is set"


def test_a_row_says_when_times_and_load_are_not_judged() -> None:
    stolen = a_round(sent=1, stolen=STOLEN_MAX + 0.1, slower=9.0)
    tally = Tally()
    say_disturbed(tally, [stolen, a_round(), a_round()])
    assert not tally.not_run
    assert judge_sent(tally, [stolen, a_round(), a_round()]) == []
    assert late([stolen, a_round(slower=3.0), a_round(slower=3.0)])
    seen = [stolen, stolen, a_round(slower=3.0)]
    say_disturbed(tally, seen)
    assert tally.not_run.startswith(
        "times and load are not judged: 2 of 3 rounds in which over 20%"
    )
    assert not late(seen)
    assert judge_sent(tally, [stolen, stolen]) == []
