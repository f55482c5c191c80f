"""One frame of `entresol top`: lines for a terminal of any width, with or without colour.

Invariant: pure, and readable without colour: colour only repeats what a word says (blue good,
yellow to be looked at, reversed bad: told apart also by people who do not see red and green). A
frame has at most as many lines and columns as the terminal; what matters most comes first.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entresol_client.cli import output
from entresol_client.cli.top_reading import (
    Price,
    Rates,
    fullness,
    number,
    numbers,
    part,
    rates,
    text_of,
    total,
    verdict,
    writes_per_day,
)

COLUMNS_MIN = 40
LINES_MIN = 4
TENANTS_SHOWN_MAX = 8
EVENTS_SHOWN_MAX = 6
HISTORY_MAX = 240
_COLOURS = {"good": "\033[34;1m", "look": "\033[33;1m", "bad": "\033[7;1m", "dim": "\033[2m",
            "head": "\033[1m"}  # fmt: skip
_NO_PRICE = Price()
_GRADES = ("good", "look", "bad")
_EXPECTED = ("missed: miss", "missed: gap", "missed: not_admitted")  # no fault of the daemon
_SPARKS = ("▁▂▃▄▅▆▇█", ".:-=+*#@")
_BARS = (("█", "░"), ("#", "."))
_CELLS = {"f": ("·", "."), "o": ("◆", "o"), "c": ("✖", "X")}
_SEALED = ("░░▒▒▒▓▓▓██", "0123456789")


@dataclass(frozen=True, slots=True)
class Screen:
    """What can be shown."""

    columns: int = 80
    lines: int = 10_000
    colour: bool = False
    unicode: bool = True

    def paint(self, kind: str, words: str) -> str:
        """With its colour, where there is any."""
        return f"{_COLOURS[kind]}{words}\033[0m" if self.colour and words else words


class Line:
    """Painted words of which the width is known."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._parts: list[tuple[str, str]] = []

    def add(self, words: str, kind: str = "") -> Line:
        """Append; `kind` is a colour."""
        self._parts.append((words, kind))
        return self

    def __str__(self) -> str:
        """As long as the screen is wide at most."""
        left, shown = self._screen.columns, []
        for words, kind in self._parts:
            words = words[:left]
            left -= len(words)
            shown.append(self._screen.paint(kind, words) if kind else words)
        return "".join(shown).rstrip()


def frame(
    now: Mapping[str, Any] | None,
    before: Mapping[str, Any] | None,
    screen: Screen,
    *,
    price: Price = _NO_PRICE,
    history: Sequence[tuple[float, float]] = (),
    problem: str = "",
) -> list[str]:
    """The lines. `history` has bytes per second (out, in), oldest first. `problem`: why there is no
    answer just now; totals from before are still shown, rates are not."""
    recent = rates(before, now) if now is not None and not problem else None
    lines = [_head(None if problem else now, recent, screen, price, problem)]
    if now is None:
        return lines
    for block in (
        _flow(now, recent, screen, price, history),
        _funnel(now, recent, screen),
        _room(now, recent, screen),
        _queues(now, recent, screen),
        _tenants(now, before, screen),
        _events(now, screen),
    ):
        if block:
            lines += ["", *block]
    return lines[: max(LINES_MIN, screen.lines)]


def per_second(value: float | None) -> str:
    """Decimal bytes per second."""
    if value is None:
        return "-"
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value / 1e3:.0f} kB/s" if value else "0"


def share(value: float | None) -> str:
    """A percentage, or a dash."""
    return "-" if value is None else f"{100 * value:.0f} %"


def _head(
    now: Mapping[str, Any] | None, recent: Rates | None, screen: Screen, price: Price, problem: str
) -> str:
    word, why = verdict(now, recent)
    line = Line(screen)
    if now is not None:
        line.add(f"{text_of(now.get('shard'))}  ", "head")
    line.add(f" {word.value} " if word.grade == 2 else word.value, _GRADES[word.grade])
    if now is None:
        return str(line.add(f"  {problem or why}"))
    line.add(f"  {share(fullness(now))} of flash in use")
    if recent is not None:
        line.add(f"  out {per_second(recent.out_bytes)}  in {per_second(recent.in_bytes)}")
        line.add(f"  hits {share(recent.hit_rate)}")
        saved = price.seconds(recent.out_bytes or 0.0)
        if saved is not None:
            line.add(f"  saves {saved:.3g} s of prefill a second", "good" if saved else "")
    if why:
        line.add(f"  {why}")
    return str(line)


def _flow(
    now: Mapping[str, Any],
    recent: Rates | None,
    screen: Screen,
    price: Price,
    history: Sequence[tuple[float, float]],
) -> list[str]:
    lines = []
    ways = (("out", "get_bytes", 0), ("in", "put_bytes", 1))
    width = max(0, min(60, screen.columns - 52))
    for word, key, column in ways:
        rate = None if recent is None else (recent.out_bytes, recent.in_bytes)[column]
        spark = _spark([pair[column] for pair in history][-width:] if width else [], screen)
        since = output.size(number(part(now, key, "plain")))
        line = Line(screen).add(f"{word:<9}", "head").add(f"{per_second(rate):>13}  ")
        lines.append(str(line.add(f"{since:>10} since start  ").add(spark, "good")))
    told = []
    if recent is not None and recent.first_grant_s is not None:
        told.append(f"first grant {output.duration(recent.first_grant_s * 1e9)} on average")
    ratio = now.get("compression_ratio")
    if ratio is not None:
        told.append(f"stored {number(ratio):.2f}:1{_codecs(now)}")
    saved = price.seconds(number(part(now, "get_bytes", "plain")))
    told.append(
        f"prefill saved since start: {output.duration(saved * 1e9)} of GPU time"
        if saved is not None
        else "prefill saved: --model, --prefill-rate"
    )
    return [*lines, str(Line(screen).add(f"{'':<11}").add(", ".join(told), "dim"))]


def _codecs(now: Mapping[str, Any]) -> str:
    """With which codecs: how many namespaces each was chosen for last."""
    found = numbers(part(now, "codecs", "namespaces"))
    shown = [f"{name} {count:,.0f}" for name, count in sorted(found.items()) if count]
    return f" (namespaces by codec: {', '.join(shown)})" if shown else ""


def _spark(values: Sequence[float], screen: Screen) -> str:
    most = max(values, default=0.0)
    marks = _SPARKS[0 if screen.unicode else 1]
    if not most:
        return ""
    return "".join(" " if not value else marks[min(7, int(8 * value / most))] for value in values)


def _bar(value: float, width: int, screen: Screen) -> str:
    full, empty = _BARS[0 if screen.unicode else 1]
    count = min(width, max(0, round(value * width)))
    if value > 0 and not count:
        count = 1
    return full * count + empty * (width - count)


def _funnel(now: Mapping[str, Any], recent: Rates | None, screen: Screen) -> list[str]:
    """Of what was asked, what each tier gave and what was left, in this interval and ever."""
    ever = {**_tiers(now), **{f"missed: {key}": n for key, n in _causes(now).items()}}
    asked_ever = sum(ever.values())
    live = {} if recent is None else _live(recent)
    asked = sum(live.values())
    head = Line(screen).add(f"{'asked':<18}", "head")
    head.add(f"{asked:>9,.0f}/s {asked_ever:>14,.0f} blocks since start")
    lines = [str(head)]
    width = max(0, min(30, screen.columns - 52))
    for name, count in ever.items():
        of_now = live.get(name, 0.0) / asked if asked else None
        of_ever = count / asked_ever if asked_ever else None
        kind = "look" if name.startswith("missed") and name not in _EXPECTED else ""
        line = Line(screen).add(f"  {name:<18}", kind)
        line.add(f"{share(of_now):>7} {share(of_ever):>8} ever  ")
        shown = of_ever if of_now is None else of_now
        lines.append(str(line.add(_bar(shown or 0.0, width, screen))))
    return lines


def _tiers(now: Mapping[str, Any]) -> dict[str, float]:
    served = numbers(now.get("served"))
    return {f"from {tier}": served.get(tier, 0.0) for tier in ("memory", "flash")}


def _causes(now: Mapping[str, Any]) -> dict[str, float]:
    missed = numbers(now.get("missed")) or {"miss": 0.0}
    return dict(sorted(missed.items(), key=lambda row: -row[1])[:4])


def _live(recent: Rates) -> dict[str, float]:
    return {
        **{f"from {tier}": value for tier, value in recent.served.items()},
        **{f"missed: {cause}": value for cause, value in recent.missed.items()},
    }


def _room(now: Mapping[str, Any], recent: Rates | None, screen: Screen) -> list[str]:
    memory = numbers(now.get("memory"))
    used, budget = memory.get("ready", 0.0) + memory.get("loading", 0.0), sum(memory.values())
    capacity = number(part(now, "flash", "capacity_bytes"))
    live = number(part(now, "flash", "live_bytes"))
    width = max(0, min(30, screen.columns - 52))
    lines = []
    for name, have, most in (("memory", used, budget), ("flash", live, capacity)):
        of_it = have / most if most else 0.0
        sizes = f"{output.size(have)} of {output.size(most)}"
        line = Line(screen).add(f"{name:<9}", "head").add(f"{share(of_it):>6}  {sizes:<25} ")
        lines.append(str(line.add(_bar(of_it, width, screen))))
    lines += _map(now, screen)
    lines.append(_wear(now, recent, screen))
    return lines + _evictions(now, screen)


def _map(now: Mapping[str, Any], screen: Screen) -> list[str]:
    """The flash from begin to end: free, being written, how much of a segment is alive, bad."""
    cells = text_cells(part(now, "flash", "map", "cells"))
    each = int(number(part(now, "flash", "map", "segments_per_cell"))) or 1
    which = 0 if screen.unicode else 1
    marks = [
        _CELLS[state][which] if state in _CELLS else _SEALED[which][live] for state, live in cells
    ]
    width = max(16, screen.columns - 11)
    rows = ["".join(marks[at : at + width]) for at in range(0, len(marks), width)][:4]
    segments = numbers(part(now, "flash", "segments"))
    counts = ", ".join(f"{count:,.0f} {state}" for state, count in segments.items() if count)
    legend = f"{_CELLS['f'][which]} free {_CELLS['o'][which]} open "
    legend += f"{_SEALED[which][1]}..{_SEALED[which][9]} live {_CELLS['c'][which]} bad"
    told = f"{counts} segments ({each} a cell)  {legend}"
    return [
        *(str(Line(screen).add(f"{'map' if not n else '':<9}  ", "head").add(row))
          for n, row in enumerate(rows)),
        str(Line(screen).add(f"{'':<11}").add(told, "dim")),
    ]  # fmt: skip


def text_cells(value: Any) -> list[tuple[str, int]]:
    """Pairs of state and live ninths; what is not one is left out."""
    if not isinstance(value, str):
        return []
    pairs = [value[at : at + 2] for at in range(0, min(len(value), 4096), 2)]
    return [(one[0], int(one[1])) for one in pairs if len(one) == 2 and one[1] in "0123456789"]


def _wear(now: Mapping[str, Any], recent: Rates | None, screen: Screen) -> str:
    at_present, mean = writes_per_day(now, recent)
    line = Line(screen).add(f"{'wear':<9}  ", "head")
    line.add("-" if at_present is None else f"{at_present:,.2f}")
    line.add(" drive writes a day now")
    line.add(", too early for a mean" if mean is None else f", {mean:,.2f} since start")
    allowed = number(part(now, "budget", "drive_writes_per_day"))
    if not allowed:
        return str(line.add(", no budget set"))
    room = number(part(now, "budget", "room_bytes"))
    line.add(f", budget {allowed:g} a day: ")
    if room > 0:
        return str(line.add(f"{output.size(room)} saved up"))
    words = f"used up, {output.size(-room)} owed: most are stored when offered twice"
    return str(line.add(words, "look"))


def _evictions(now: Mapping[str, Any], screen: Screen) -> list[str]:
    """Whether what is kept is worth it: blocks evicted unread, and those that had to come back."""
    uses = numbers(part(now, "evicted_use"))
    evicted = total(uses)
    if not evicted:
        return []
    line = Line(screen).add(f"{'evicted':<9}  ", "head")
    line.add(f"{evicted:,.0f} blocks since start, {share(uses.get('unused', 0) / evicted)} unread")
    again = number(now.get("thrashed"))
    line.add(f", {again:,.0f} stored again within 10 min", "look" if again > evicted / 10 else "")
    return [str(line)]


def _queues(now: Mapping[str, Any], recent: Rates | None, screen: Screen) -> list[str]:
    waiting = {name: depth for name, depth in numbers(now.get("queues")).items() if depth}
    told = ", ".join(f"{name} {depth:,.0f}" for name, depth in waiting.items()) or "nothing waits"
    line = Line(screen).add(f"{'queues':<9}  ", "head").add(told)
    if recent is not None and recent.shed:
        line.add(f", {recent.shed:,.1f}/s refused", "look")
    sessions = numbers(now.get("sessions"))
    hosts = ", ".join(f"{count:,.0f} {fabric}" for fabric, count in sessions.items() if count)
    held = output.plural(int(total(sessions)), "session") + (f" ({hosts})" if hosts else "")
    leases = f", {output.plural(int(number(now.get('leases'))), 'lease')}"
    return [str(line), str(Line(screen).add(f"{'hosts':<9}  ", "head").add(held + leases))]


def _tenants(now: Mapping[str, Any], before: Mapping[str, Any] | None, screen: Screen) -> list[str]:
    rows = _rows(now)
    if not rows:
        return []
    earlier = {text_of(row.get("tenant")): row for row in _rows(before or {})}
    grid = []
    for row in rows[:TENANTS_SHOWN_MAX]:
        name = text_of(row.get("tenant"))
        old = earlier.get(name, row)
        served, missed = (number(row.get(k)) - number(old.get(k)) for k in ("served", "missed"))
        asked = served + missed
        grid.append(
            (name[:24], output.size(number(row.get("flash_bytes"))),
             output.size(number(row.get("dram_bytes"))), f"{number(row.get('blocks')):,.0f}",
             f"{number(row.get('sessions')):.0f}", f"{number(row.get('leases')):,.0f}",
             f"{asked:,.0f}", share(served / asked if asked > 0 else None))
        )  # fmt: skip
    head = ("tenant", "flash", "memory", "blocks", "hosts", "leases", "asked", "hits")
    shown = output.table(head, grid, right="lrrrrrrr")
    more = int(number(part(now, "tenants", "count"))) - len(grid)
    lines = [
        str(Line(screen).add(shown[0], "head")),
        *(str(Line(screen).add(x)) for x in shown[1:]),
    ]
    return [*lines, str(Line(screen).add(f"and {more:,} more", "dim"))] if more > 0 else lines


def _rows(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = part(document, "tenants", "rows")
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []


def _events(now: Mapping[str, Any], screen: Screen) -> list[str]:
    """The newest, those of one kind and tenant that follow each other as one."""
    found = now.get("events")
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
    lines: list[str] = []
    for (kind, reason, tenant), group in itertools.groupby(rows, key=_sort_of_event):
        if len(lines) >= EVENTS_SHOWN_MAX:
            break
        same = list(group)
        why = f" ({reason})" if reason != "none" else ""
        blocks = output.plural(int(sum(number(row.get("blocks")) for row in same)), "block")
        size = sum(number(row.get("bytes")) for row in same)
        line = Line(screen).add(f"{_clock(number(same[0].get('time_unix_ns')))}  ", "dim")
        line.add(f"{kind}{why}", "bad" if kind == "corrupt" else "")
        line.add(f"  {tenant}  {blocks}{f', {output.size(size)}' if size else ''}")
        lines.append(str(line))
    return [str(Line(screen).add("events", "head")), *lines] if lines else []


def _sort_of_event(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return text_of(row.get("kind")), text_of(row.get("reason")), text_of(row.get("tenant"))


def _clock(unix_ns: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(unix_ns / 1e9).astimezone().strftime("%H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "--:--:--"
