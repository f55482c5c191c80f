"""How the command talks: human sizes and times, tables, JSON, progress.

Invariant: standard output holds the answer and nothing else (with --json: JSON and nothing else);
progress, notes and errors go to standard error.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

PROGRESS_AFTER_S = 1.0
PROGRESS_INTERVAL_S = 0.2  # on a terminal
PROGRESS_LINE_INTERVAL_S = 1.0  # elsewhere, where every state is a line of its own

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(length_bytes: float) -> str:
    """1536 → "1.5 KiB"."""
    value = float(length_bytes)
    for unit in _UNITS[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def rate(length_bytes: int, seconds: float) -> str:
    """Decimal gigabytes per second, as networks and drives are sold."""
    return f"{gigabytes_per_second(length_bytes, seconds):.2f} GB/s"


def gigabytes_per_second(length_bytes: int, seconds: float) -> float:
    """0 when nothing was measured."""
    return round(length_bytes / seconds / 1e9, 3) if seconds > 0 else 0.0


def duration(span_ns: float) -> str:
    """A span of time in the two largest units that say something."""
    for unit, unit_ns in (("µs", 1e3), ("ms", 1e6)):
        if span_ns < 1000 * unit_ns:
            return f"{span_ns / unit_ns:.0f} {unit}"
    seconds = span_ns / 1e9
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def local_time(unix_ns: int) -> str:
    """Date and time where the reader is; a time that no calendar has, as a number."""
    try:
        moment = datetime.datetime.fromtimestamp(unix_ns / 1e9).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{unix_ns // 10**9} s"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def plural(count: int, noun: str) -> str:
    """1 block, 2 blocks."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def short_key(key: bytes) -> str:
    """The form of a key that fits a line."""
    return key.hex() if len(key) <= 8 else key.hex()[:16] + "…"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> list[str]:
    """Columns under their heads; `right` holds an "r" for every column that holds numbers."""
    grid = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[n]) for row in grid) for n in range(len(head))]
    lines = []
    for row in grid:
        cells = [
            cell.rjust(width) if right[n : n + 1] == "r" else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def pairs(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Labels and values, aligned."""
    kept = list(rows)
    width = max((len(label) for label, _ in kept), default=0)
    return [f"{label.ljust(width)}  {value}".rstrip() for label, value in kept]


def finite(data: Any) -> Any:
    """The same with None for each number that JSON does not know."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return data


def _json(data: Mapping[str, Any], **how: Any) -> str:
    try:
        return json.dumps(data, allow_nan=False, **how)
    except ValueError:
        return json.dumps(finite(data), allow_nan=False, **how)


def answer(
    as_json: bool, data: Mapping[str, Any], lines: Iterable[str], *, to_stderr: bool = False
) -> None:
    """The command's result: one JSON object, or lines for a person."""
    text = _json(data, indent=2) if as_json else "\n".join(lines)
    print(text, file=sys.stderr if to_stderr else sys.stdout)


def json_line(data: Mapping[str, Any], *, to_stderr: bool = False) -> None:
    """One object on one line, for streams."""
    file = sys.stderr if to_stderr else sys.stdout
    print(_json(data, separators=(",", ":")), flush=True, file=file)


def note(text: str) -> None:
    """A remark beside the answer."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """What is going on, on standard error, once it takes longer than a second.

    Shown when standard error is a terminal or `forced`; each state then is a line of its own where
    it is not a terminal.
    """

    def __init__(self, label: str, *, total_bytes: int = 0, forced: bool = False) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._terminal = sys.stderr.isatty()
        self._shown = self._terminal or forced
        self._began_s = time.monotonic()
        self._due_s = self._began_s + PROGRESS_AFTER_S
        self._open_line = False

    def update(self, done_bytes: int, text: str = "") -> None:
        """Tell how far it is; cheap to call often."""
        now_s = time.monotonic()
        if not self._shown or now_s < self._due_s:
            return
        seconds = now_s - self._began_s
        parts = [f"{self._label}: {text or size(done_bytes)}"]
        if self._total_bytes:
            parts.append(f"of {size(self._total_bytes)}")
            parts.append(f"({100 * done_bytes // self._total_bytes} %)")
        if done_bytes:
            parts.append(rate(done_bytes, seconds))
        self._write(" ".join(parts))
        self._due_s = now_s + (PROGRESS_INTERVAL_S if self._terminal else PROGRESS_LINE_INTERVAL_S)

    def _write(self, text: str) -> None:
        if self._terminal:
            print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
            self._open_line = True
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line."""
        if self._open_line:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._open_line = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
