"""A picture of what a replay found, over capacity: hit rate, drive life, time to first token saved.

Invariant: value axes begin at zero and have their units; what was assumed is written below. Only
this file needs matplotlib.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entresol_daemon.replay.run import Assumptions, Result
from entresol_daemon.replay.traces import TraceError

DPI = 130
INK, QUIET = "#1f2a33", "#6b7780"
OURS, WHOLE = "#c8431a", "#2a6f97"


def check() -> None:
    """Raises: TraceError when there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise TraceError("--plot needs matplotlib", hint="pip install matplotlib")


def draw(path: Path, rows: Sequence[Result], assumed: Assumptions) -> None:
    """Write the picture, in the format that the path's ending names.

    Raises: TraceError for an ending that matplotlib does not know; OSError.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(rows, key=lambda row: row.capacity_blocks)
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.9))
    figure.suptitle(
        f"{rows[0].trace}, policy {rows[0].policy}", x=0.02, ha="left", fontweight="bold", color=INK
    )
    shares = [row.capacity_bytes / 1e9 for row in rows]
    hits, life, saved = axes
    _line(hits, shares, [100 * row.usable_hit_second_half for row in rows], WHOLE, "second half")
    _line(hits, shares, [100 * row.usable_hit for row in rows], OURS, "all requests")
    hits.set_title("Usable hits, % of blocks asked for", fontsize=9)
    hits.legend(fontsize=7, frameon=False)
    known = [(at, row.drive_years) for at, row in zip(shares, rows, strict=True) if row.drive_years]
    _line(life, [at for at, _ in known], [years for _, years in known], OURS, "")
    life.set_title("Drive life, years", fontsize=9)
    _line(saved, shares, [row.ttft_saved_s for row in rows], OURS, "")
    saved.set_title("Time to first token saved, s per request (mean)", fontsize=9)
    for axis in axes:
        axis.set_xlabel("capacity, GB", fontsize=8, color=QUIET)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.text(0.02, 0.015, about(assumed), fontsize=6.5, color=QUIET)
    figure.tight_layout(rect=(0, 0.05, 1, 0.97))
    try:
        figure.savefig(path, dpi=DPI)
    except ValueError as error:
        raise TraceError(f"{path}: {error}", hint="--plot replay.png") from None
    finally:
        pyplot.close(figure)


def _line(axis: Any, x: Sequence[float], y: Sequence[float], color: str, label: str) -> None:
    axis.plot(x, y, color=color, marker="o", markersize=3.5, label=label)


def about(assumed: Assumptions) -> str:
    """What the figures rest on, in a line."""
    return (
        f"{assumed.token_bytes:,} bytes per token; prefill {assumed.prefill_tokens_per_s:,.0f} "
        f"tokens/s, a fetch takes {assumed.fetch_cost:.1%} of that time; drive as large as the "
        f"capacity, {assumed.drive_writes_per_day:g} drive writes a day for "
        f"{assumed.drive_warranty_years:g} years"
    )
