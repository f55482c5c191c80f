"""A record of lines that held whole, each on its day, at its commit: what README.md here has.

Release size takes longer than one sitting on a small machine. So each line is recorded by itself,
from the journal of finished slices, and says which commit it ran at. Invariant: a recorded line
had every one of its slices done by the same code, and every one was clean; a line that failed or
was cut short is not recorded, and keeps what an earlier commit earned, with that commit's name.
What of a line a machine could not do is recorded with it, in words.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.proof.line import Line, Size, order
from tests.proof.slices import ROOT, tally_of
from tests.proof.table import Row, machine, named

FIELDS = (
    "id", "name", "seed", "tried", "survived", "wrong_bytes", "durable_lost", "crashes", "seconds",
    "not_run", "canary_found", "day", "commit", "machine",
)  # fmt: skip


@functools.cache
def commit() -> str:
    """The short name of the commit that this tree is at, with a + when it differs; "" outside."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def stamp() -> dict[str, str]:
    """Where and when a slice ends: noted in the journal beside what came of it."""
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"day": day, "commit": commit(), "machine": machine()}


@dataclass(frozen=True, slots=True)
class Done:
    """A slice as a journal has it; a canary has no units."""

    line: str
    code: str
    size: str
    seed: int
    units: int
    raw: dict[str, Any]


def read_journal(path: Path) -> list[Done]:
    """The slices of a journal, oldest first; lines cut short are passed over. Raises: OSError."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            raw = json.loads(text)
            tally_of(raw["tally"])
            found.append(
                Done(raw["line"], raw["code"], raw["size"], raw["seed"], raw["units"], raw)
            )
        except (ValueError, KeyError, TypeError):
            continue
    return found


def rows_of(
    lines: Sequence[Line], size: Size, seed: int, done: Iterable[Done]
) -> list[dict[str, Any]]:
    """A row for each line that one code did whole, and whether that code found its canary."""
    of_line: dict[tuple[str, str], dict[tuple[int, int], Done]] = {}
    for each in done:
        if each.size == size.value:
            of_line.setdefault((each.line, each.code), {})[each.seed, each.units] = each
    rows = []
    for line in lines:
        wanted = list(line.slices(size, seed))
        whole = [slices for (name, _), slices in of_line.items()
                 if name == line.id and all(key in slices for key in wanted)]  # fmt: skip
        if not whole:
            continue
        row = Row(line.id, line.name, seed)
        for key in wanted:
            row.tally.add(tally_of(whole[-1][key].raw["tally"]))
            row.seconds += whole[-1][key].raw["seconds"]
        newest = whole[-1][wanted[-1]].raw
        where = {field: newest.get(field, "") for field in stamp()}
        rows.append({**row.record(), "canary_found": (0, 0) in whole[-1], **where})
    return rows


def merge(before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The record with newer rows in the place of older ones, in the scorecard's order."""
    by_id = {row["id"]: row for row in [*before, *rows]}
    return sorted(by_id.values(), key=lambda row: order(row["id"]))


def load(path: Path) -> list[dict[str, Any]]:
    """A record; none if there is no such file. Raises: ValueError for a file that is none."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list) or any(set(row) != set(FIELDS) for row in rows):
        raise ValueError(f"{path} is no record of the proof; remove it to begin anew")
    return rows


def save(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a record, a row a line, so that changes are read easily."""
    body = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{body}\n]\n", encoding="utf-8")


def markdown(size: Size, rows: Sequence[dict[str, Any]], lines: Sequence[Line]) -> str:
    """The table for README.md here, with what was not done at this size, and why, if known."""
    machines = sorted({row["machine"] for row in rows})
    tried = sum(row["tried"] for row in rows)
    planted = sum(row["canary_found"] for row in rows)
    out = [
        f"{size.value.capitalize()} size on {'; '.join(machines)}, two slices at a time. "
        f"{tried:,} attempts in all; {planted} of these {len(rows)} lines found the bug planted "
        "for them first; each ran whole at the commit it names:",
        "",
        "| | Line | Tried | Survived | Wrong bytes | Durable lost | Crashes | Minutes | At |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        out.append(
            f"| {row['id']} | {named(row['name'], row['not_run'])} | {row['tried']:,} | "
            f"{row['survived']:,} | {row['wrong_bytes']} | {row['durable_lost']} | "
            f"{row['crashes']} | {row['seconds'] / 60:.1f} | {row['day']}, {row['commit']} |"
        )
    recorded = {row["id"] for row in rows}
    for line in lines:
        if line.id not in recorded:
            reason = line.not_run() or "no whole run yet"
            out.append(f"| {line.id} | {line.name} | not run: {reason} | | | | | | |")
    return "\n".join(out) + "\n"
