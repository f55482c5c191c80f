"""What R8's hosts saw of the load: how late they were served, how much was sent, what waited.

Invariant: a round in which the machine was somebody else's says nothing; where most were, nothing
is judged here, and the tally says so.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from entresol_daemon.config import LimitsConfig
from tests.proof.line import Tally

SAMPLES_MIN = 20_000  # for a 99th percentile of each round: of fewer, the 95th is judged
STOLEN_MAX = 0.2  # of the processors, by the hypervisor: such a round says nothing of times
RATIO_MAX = 2.0  # of the p99 under ten times the load to that under what is admitted
OVERLOAD = 10  # times what is admitted must have been sent
TENANTS_ASKING = 2  # for gets


@dataclass(slots=True)
class Window:
    """What the hosts saw in one stretch of load."""

    counts: Counter[str] = field(default_factory=Counter)
    times_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    stolen: float = 0.0  # the largest share of the processors that this machine asked for in vain

    def add(self, answers: Sequence[dict[str, Any]]) -> None:
        for answer in answers:
            self.counts.update(answer["counts"])
            self.times_ms += answer["times_ms"]
            self.refused_ms += answer["refused_ms"]
        self.seconds += max(answer["seconds"] for answer in answers)


Round = tuple[Window, Window]  # under what is admitted, and under ten times as much


def percentile(values: Sequence[float], percent: int) -> float:
    """0 of nothing."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0


def p99(values: Sequence[float]) -> float:
    """See `percentile`."""
    return percentile(values, 99)


def merge(into: Window, other: Window) -> None:
    """Take in another stretch."""
    into.counts.update(other.counts)
    into.times_ms += other.times_ms
    into.refused_ms += other.refused_ms
    into.seconds += other.seconds
    into.stolen = max(into.stolen, other.stolen)


def undisturbed(seen: Sequence[Round]) -> list[Round]:
    """The rounds in which this machine had its processors."""
    return [(one, ten) for one, ten in seen if max(one.stolen, ten.stolen) <= STOLEN_MAX]


def compared(seen: Sequence[Round]) -> tuple[int, float, float, float]:
    """Which percentile is judged, what it is of either load, in ms, and the ratio that is judged:
    the median of those of the rounds. Of few samples the 99th is one of the worst three: chance,
    and not the shard; so is a stretch in which the machine was somebody else's."""
    percent = 99 if sum(len(ten.times_ms) for _, ten in seen) >= SAMPLES_MIN else 95
    one = [percentile(one.times_ms, percent) for one, _ in seen]
    ten = [percentile(ten.times_ms, percent) for _, ten in seen]
    ratio = statistics.median(b / max(a, 1e-9) for a, b in zip(one, ten, strict=True))
    return percent, statistics.median(one), statistics.median(ten), ratio


def judged(seen: Sequence[Round]) -> bool:
    """Whether enough of the rounds can say something."""
    return 2 * len(undisturbed(seen)) >= len(seen)


def late(seen: Sequence[Round]) -> str:
    """What is wrong with the times of what is served under overload; empty if nothing is, or if
    most rounds can say nothing of it."""
    if not judged(seen):
        return ""
    percent, before, after, ratio = compared(undisturbed(seen))
    if ratio <= RATIO_MAX:
        return ""
    return f"p{percent} {ratio:.2f} times as long: {after:.0f} ms in overload, {before:.0f} before"


def judge_sent(tally: Tally, seen: Sequence[Round]) -> list[str]:
    """What was sent in overload, by the flood and by the hosts, to what was admitted of it."""
    over = Window()
    for _, ten in undisturbed(seen) or seen:
        merge(over, ten)
    counts = over.counts
    admitted = counts["served"] + counts["flooded"]
    sent = counts["served"] + counts["host_refused"] + counts["host_cut_off"] + counts["sent"]
    times = sent / max(1, admitted)
    tally.figure("min_sent_over_admitted", round(times, 1))
    findings = []
    if not counts["refused"]:
        findings.append("nothing was refused: it was no overload")
    if times < OVERLOAD and judged(seen):
        findings.append(
            f"{sent} gets were sent and {admitted} admitted: {times:.1f} times as many, not "
            f"{OVERLOAD}; {counts['not_asked']} were not sent after all"
        )
    return findings


def judge_waiting(worst: Mapping[str, int], limits: LimitsConfig) -> list[str]:
    """What waited at the worst of the moments that were looked at. Of each tenant's gets at most
    twice as many are here as are served at a time (daemon/entresol_daemon/shard/door.py)."""
    most = {
        "gets_waiting": (2 * TENANTS_ASKING - 1) * limits.gets_at_once_max,
        "puts_waiting": limits.put_queue_blocks_max,
    }
    return [
        f"{name}: {worst[name]} at the worst, {limit} by what is set"
        for name, limit in most.items() if worst[name] > limit
    ]  # fmt: skip


def say_disturbed(tally: Tally, seen: Sequence[Round]) -> None:
    """Tell of rounds that are not judged, and that nothing is where most are such."""
    disturbed = len(seen) - len(undisturbed(seen))
    if not disturbed:
        return
    name = f"rounds in which over {STOLEN_MAX:.0%} of the processors were stolen"
    tally.figure(name, disturbed)
    if not judged(seen):
        tally.lacks(f"times and load are not judged: {disturbed} of {len(seen)} {name}")
