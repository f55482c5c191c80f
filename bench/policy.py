"""The section `policy`: what admission and eviction find on traces, beside LRU and the optimum.

    python -m bench --only policy --traces FOLDER

The policy that daemons have by default, through the code of `entresol replay`, on the folder's
traces: chat, agents, RAG. What tail-first LRU per block finds ("LRU-r") and what could be found by
who knows the future ("MIN") is in reference_results.csv there, for the same capacities. Hits are
usable ones, of the longest prefix, over the second half of the requests. Nothing here is timed: the
numbers are the same on every machine, at every run.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import contract
from bench.results import Curve, Line, Section
from entresol_daemon.replay.run import Assumptions, Result, measure
from entresol_daemon.replay.store import POLICY_DEFAULT, Options, segment_blocks_of
from entresol_daemon.replay.traces import TraceError, load

REFERENCE = "reference_results.csv"
LRU, OPTIMUM = "LRU-r", "MIN"
SECOND_HALF = "usable_hit_w"
TRACES = {
    "chat": "mooncake_conv_first35min",
    "rag": "ragpulse_days1_4",
    "agents": "weka_agentic_a",
}
CAPACITIES = (0.02, 0.05, 0.1, 0.2)
Asked = Mapping[str, Sequence[float]]
# A minute for chat, as much for one capacity of the agents, where it is nearest to LRU's limits.
COMMIT: Asked = {"chat": CAPACITIES, "rag": (0.02, 0.1), "agents": (0.02,)}
FULL: Asked = dict.fromkeys(TRACES, CAPACITIES)
AMPLIFIED_FROM = 0.1  # of capacities below this the writes are not judged
GIVE = "--traces DIR with the traces and their reference_results.csv"

Yardsticks = dict[tuple[str, str, float], float]  # by trace, policy and capacity


@dataclass(slots=True)
class Found:
    """Rows of `entresol replay` by kind of trace; and what did not run."""

    rows: dict[str, list[Result]] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)


def yardsticks(folder: Path) -> Yardsticks:
    """Hit rates of LRU and of the optimum. Raises: OSError; ValueError, KeyError for no table."""
    with (folder / REFERENCE).open(newline="", encoding="utf-8") as file:
        return {
            (row["trace"], row["policy"], float(row["size"])): float(row[SECOND_HALF])
            for row in csv.DictReader(file)
            if row["policy"] in (LRU, OPTIMUM)
        }


def replay(folder: Path, asked: Asked) -> Found:
    """Every trace that is there, at the capacities asked for."""
    found = Found()
    for kind, capacities in asked.items():
        try:
            trace = load(folder / f"{TRACES[kind]}.parquet")
            blocks = segment_blocks_of(trace.block_tokens * Assumptions().token_bytes)
            options = Options(segment_blocks=blocks)
            found.rows[kind] = [measure(trace, capacity, options) for capacity in capacities]
        except (OSError, TraceError) as error:
            found.not_run.append(f"policy on {kind}: {error}")
    return found


def lines(rows: Mapping[str, Sequence[Result]], known: Yardsticks) -> list[Line]:
    """The numbers that have budgets; each is one number, because chance has no part in it."""

    def of(row: Result, policy: str) -> float:
        return known[row.trace, policy, row.capacity]

    result = []
    if chat := rows.get("chat"):
        shares = [row.usable_hit_second_half / of(row, OPTIMUM) for row in chat]
        mean = sum(shares) / len(shares)
        result.append(contract.line("policy_chat_share_of_optimum", "ratio", [mean]))
    for kind in ("agents", "rag"):
        if some := rows.get(kind):
            below = max(100 * (of(row, LRU) - row.usable_hit_second_half) for row in some)
            result.append(contract.line(f"policy_{kind}_below_lru_points", "points", [below]))
    written = [
        row.write_amplification
        for some in rows.values()
        for row in some
        if row.capacity >= AMPLIFIED_FROM
    ]
    if written:
        result.append(contract.line("policy_write_amplification", "ratio", [max(written)]))
    return result


def curves(rows: Mapping[str, Sequence[Result]], known: Yardsticks) -> list[Curve]:
    """Hit rate over capacity, both in percent, with the yardsticks beside."""
    result = []
    for kind, some in rows.items():
        points = {
            POLICY_DEFAULT: [(100 * row.capacity, 100 * row.usable_hit_second_half) for row in some]
        }
        for label, policy in (("LRU, tail first", LRU), ("optimum", OPTIMUM)):
            points[label] = [
                (100 * size, 100 * known[TRACES[kind], policy, size]) for size in CAPACITIES
            ]
        of, unit = "capacity, % of the distinct blocks", "% usable hits"
        result.append(Curve(f"policy_{kind}", of, unit, points))
    return result


def section(folder: Path | None, asked: Asked) -> Section:
    """Lines and curves; what is missing is said with what to give."""
    if folder is None:
        return Section([], not_run=(f"policy: no traces ({GIVE})",))
    try:
        known = yardsticks(folder)
    except (OSError, ValueError, KeyError) as error:
        return Section([], not_run=(f"policy: no optimum to compare with: {error!r} ({GIVE})",))
    lacking = [
        f"{TRACES[kind]} at {size:g}"
        for kind in asked
        for size in CAPACITIES
        if not {(TRACES[kind], LRU, size), (TRACES[kind], OPTIMUM, size)} <= known.keys()
    ]
    if lacking:
        return Section([], not_run=(f"policy: {REFERENCE} lacks {', '.join(lacking)}",))
    found = replay(folder, asked)
    told = tuple(found.not_run)
    return Section(lines(found.rows, known), tuple(curves(found.rows, known)), told)
