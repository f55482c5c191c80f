"""Pictures of what the bench found: throughput by block size, latencies, flash, hit rates, costs.

    python -m bench.plots DIR       draws what bench/results.json and results.about.json have

Invariant: value axes begin at zero, every axis has its unit, and a picture says on what machine and
when its numbers were measured. matplotlib comes with the extra `bench` and is imported only here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import results
from bench.results import Curve

DPI = 130
WIDE = 500  # an axis of what grows that spans more than this is logarithmic
TITLES = {
    "scale_lookup_8192": "Look-up of 8,192 keys in the index",
    "scale_index_bytes": "Memory of the index",
    "scale_restart": "Opening a data file",
    "scale_sessions_memory": "Memory of the daemon",
    "scale_sessions_get_64k": "A get of 64 KiB beside idle sessions",
    "scale_exists": "One exists of many keys",
    "scale_shards": "Gets from several daemons on the same processors",
}
COST_COLORS = ("#c8431a", "#2a6f97", "#52796f")
INK, QUIET = "#1f2a33", "#6b7780"
YARDSTICKS = {"LRU, tail first": ("#2a6f97", "-"), "optimum": (INK, "--")}  # of `policy`
OURS = {"entresol_tcp": "#c8431a", "entresol_shm": "#e58a1f"}
CEILINGS = {"loopback_blocking": "#1f2a33", "loopback_uvloop": "#6b7780"}
OTHERS = ("#2a6f97", "#61a5c2", "#52796f", "#84a98c", "#7b5ea7", "#b39bc8", "#8d6e63", "#bcaaa4")
LATENCIES = (
    ("resident, 64 KiB", (
        ("bare exchange, tcp", "bare_64k_exchange"),
        ("get over tcp", "get_64k_resident"),
        ("get over shm", "get_64k_resident_shm"),
    )),
    ("from flash, 1 MiB", (
        ("device, by fio", "flash_device"),
        ("get, first byte", "first_byte_flash"),
    )),
)  # fmt: skip
FLASH = (
    ("get_flash_sealed_gbps", "Entresol, shm"), ("get_flash_tcp_gbps", "Entresol, tcp"),
    ("get_flash_fast_gbps", "Entresol, shm, fast*"),
    ("flash_fio_read_gbps", "fio, direct"), ("flash_files_gbps", "plain file, O_DIRECT"),
    ("flash_nixl_posix_gbps", "NIXL POSIX"), ("flash_lmcache_fs_gbps", "LMCache fs"),
)  # fmt: skip
PUTS = (
    ("put_durable_shm_gbps", "Entresol, shm"), ("put_durable_tcp_gbps", "Entresol, tcp"),
    ("flash_fio_write_gbps", "fio, direct"), ("flash_put_files_gbps", "plain file, O_DIRECT"),
    ("flash_put_nixl_posix_gbps", "NIXL POSIX"), ("flash_put_lmcache_fs_gbps", "LMCache fs*"),
)  # fmt: skip


def check() -> None:
    """Raises: SystemExit with what to install when there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SystemExit("pictures need matplotlib: pip install 'entresol[bench]'") from None


def _figure(title: str, about: str, *, height: float = 4.2, panels: int = 1) -> tuple[Any, Any]:
    """A figure and its axes, in the bench's manner."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(8.4, height), squeeze=False)
    figure.suptitle(
        title, x=0.02, y=0.985, ha="left", va="top", fontsize=12, fontweight="bold", color=INK
    )
    figure.text(0.02, 0.012, about, fontsize=6.5, color=QUIET)
    for one in axes[0]:
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
        one.tick_params(labelsize=8, colors=INK)
        one.grid(axis="y", color="#e3e7ea", linewidth=0.8)
        one.set_axisbelow(True)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout(rect=(0, 0.035, 1, 1.0))
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
    return path


def plain(value: float) -> str:
    """A number for a label or a tick: 1,000 as 1k, three digits at most."""
    for limit, sign in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{sign}"
    return f"{value:.3g}"


def size_label(kib: float) -> str:
    """A block size."""
    return f"{kib:g} KiB" if kib < 1024 else f"{kib / 1024:g} MiB"


def color_of(name: str, number: int) -> str:
    """Ours stands out, ceilings are dark, the others are told apart."""
    return OURS.get(name) or CEILINGS.get(name) or OTHERS[number % len(OTHERS)]


def by_block_size(curve: Curve, about: str, folder: Path) -> Path:
    """Lines of every variant over the block size; names at the right, so that none needs a key."""
    figure, (axis,) = _figure("Resident gets by block size", about, height=5.0)
    axis.set_xscale("log", base=2)
    ends = []
    for number, (name, points) in enumerate(curve.points.items()):
        xs, ys = zip(*sorted(points), strict=True)
        ours, ceiling = name in OURS, name in CEILINGS
        color = color_of(name, number)
        axis.plot(
            xs, ys, color=color, marker="o", markersize=3.5,
            linewidth=2.4 if ours else 1.4, linestyle="--" if ceiling else "-",
        )  # fmt: skip
        ends.append((ys[-1], name, color, ours))
    top = max(y for points in curve.points.values() for _, y in points)
    axis.set_ylim(0, top * 1.08)
    last = max(x for points in curve.points.values() for x, _ in points)
    for y, (value, name, color, ours) in spread(ends, top * 1.08 / 22):
        axis.annotate(
            f"{name.replace('_', ' ')} {value:.2f}", (last, y), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=7.5, color=color,
            fontweight="bold" if ours else "normal", annotation_clip=False,
        )  # fmt: skip
    ticks = sorted({x for points in curve.points.values() for x, _ in points})
    axis.set_xticks(ticks, [size_label(x) for x in ticks])
    axis.minorticks_off()
    axis.set_xlabel("block size", fontsize=9)
    axis.set_ylabel("GB/s of plain bytes, into the caller's memory", fontsize=9)
    figure.subplots_adjust(right=0.72, bottom=0.14)
    figure.savefig(folder / "throughput_by_block_size.png", dpi=DPI, bbox_inches="tight")
    from matplotlib import pyplot

    pyplot.close(figure)
    return folder / "throughput_by_block_size.png"


def spread(ends: Sequence[tuple[Any, ...]], gap: float) -> list[tuple[float, tuple[Any, ...]]]:
    """Where to write labels that would lie on each other: in order, at least `gap` apart."""
    placed: list[tuple[float, tuple[Any, ...]]] = []
    at = -math.inf
    for end in sorted(ends, key=lambda one: one[0]):
        at = max(end[0], at + gap)
        placed.append((at, end))
    return placed


def latencies(rows: Mapping[str, Any], about: str, folder: Path) -> Path | None:
    """p50 and p99 beside each other, a panel for what is resident and one for flash."""
    shown = [
        (title, [(label, name) for label, name in bars if f"{name}_p50_us" in rows])
        for title, bars in LATENCIES
    ]
    shown = [(title, bars) for title, bars in shown if bars]
    if not shown:
        return None
    figure, axes = _figure("Latency, one request at a time", about, panels=len(shown))
    for axis, (title, bars) in zip(axes, shown, strict=True):
        for number, (_, name) in enumerate(bars):
            for shift, part, color in ((-0.2, "p50", "#2a6f97"), (0.2, "p99", "#c8431a")):
                row = rows[f"{name}_{part}_us"]
                axis.bar(
                    number + shift, row["value"], 0.36, color=color,
                    label=part if number == 0 else None,
                    yerr=[[row["value"] - row["low"]], [row["high"] - row["value"]]],
                    error_kw={"elinewidth": 0.8, "capsize": 2, "ecolor": INK},
                )  # fmt: skip
                axis.annotate(
                    plain(row["value"]), (number + shift, row["high"]), xytext=(0, 3),
                    textcoords="offset points", ha="center", fontsize=7.5, color=INK,
                )  # fmt: skip
        axis.set_xticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
        axis.set_ylim(bottom=0)
        axis.set_xlim(-0.7, max(len(bars), 2) - 0.3)
        axis.set_title(title, fontsize=9, loc="left", color=QUIET)
        axis.legend(frameon=False, fontsize=8, loc="upper left")
    axes[0].set_ylabel("microseconds: median, lowest, highest round", fontsize=8)
    return _save(figure, folder / "latency_percentiles.png")


def flash(rows: Mapping[str, Any], about: str, folder: Path) -> Path | None:
    """Gets from flash and durable puts, everybody in the same rounds."""
    panels = [
        ("get", [(label, rows[name]) for name, label in FLASH if name in rows]),
        ("put", [(label, rows[name]) for name, label in PUTS if name in rows]),
    ]
    panels = [(title, bars) for title, bars in panels if bars]
    if not panels:
        return None
    figure, axes = _figure("Flash, blocks of 1 MiB", about, panels=len(panels))
    titles = {"get": "get from flash (* real KV)", "put": "put, until durable (* not flushed)"}
    for axis, (title, bars) in zip(axes, panels, strict=True):
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", color="#e3e7ea", linewidth=0.8)
        for number, (label, row) in enumerate(bars):
            ours = label.startswith("Entresol")
            color = "#c8431a" if ours else INK if label.startswith("fio") else "#61a5c2"
            axis.barh(
                number, row["value"], 0.62, color=color,
                xerr=[[row["value"] - row["low"]], [row["high"] - row["value"]]],
                error_kw={"elinewidth": 0.8, "capsize": 2, "ecolor": QUIET},
            )  # fmt: skip
            axis.annotate(
                f"{row['value']:.2f}", (row["high"], number), xytext=(4, 0),
                textcoords="offset points", va="center", fontsize=7.5, color=INK,
            )  # fmt: skip
        axis.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
        axis.set_ylim(max(len(bars), 4) - 0.5, -0.5)
        axis.set_xlim(0, max(row["high"] for _, row in bars) * 1.18)
        axis.set_title(titles[title], fontsize=9, loc="left", color=QUIET)
        axis.set_xlabel("GB/s of plain bytes", fontsize=8)
    return _save(figure, folder / "flash.png")


def hit_rates(curves: Sequence[Curve], about: str, folder: Path) -> Path:
    """Usable hits over capacity, a panel per trace: the daemon's policy, LRU, the optimum."""
    figure, axes = _figure("Hit rate by capacity", about, height=4.4, panels=len(curves))
    for axis, curve in zip(axes, curves, strict=True):
        for name, points in sorted(curve.points.items(), key=lambda one: one[0] in YARDSTICKS):
            xs, ys = zip(*sorted(points), strict=True)
            color, style = YARDSTICKS.get(name, (COST_COLORS[0], "-"))
            axis.plot(
                xs, ys, color=color, linestyle=style, marker="o", markersize=4, linewidth=1.8,
                label=name, zorder=3 if name not in YARDSTICKS else 2,
            )  # fmt: skip
            for x, y in zip(xs, ys, strict=True) if name not in YARDSTICKS else ():
                axis.annotate(
                    f"{y:.1f}", (x, y), xytext=(-3, 5), textcoords="offset points", ha="right",
                    fontsize=7, color=color,
                )  # fmt: skip
        axis.set_title(curve.name.removeprefix("policy_"), fontsize=9, loc="left", color=QUIET)
        axis.set_xlabel(curve.of, fontsize=7.5)
        axis.set_xlim(left=0)
        axis.set_ylim(0, 1.15 * max(y for points in curve.points.values() for _, y in points))
        axis.legend(frameon=False, fontsize=7.5, loc="lower right")
    axes[0].set_ylabel(f"{curves[0].unit}, second half of the requests", fontsize=8)
    return _save(figure, folder / "hit_rate_by_capacity.png")


def cost_curve(curve: Curve, about: str, folder: Path) -> Path:
    """What a thing costs as it grows; beside it, where that can be said, the cost of one."""
    panels = 2 if curve.per else 1
    figure, axes = _figure(TITLES.get(curve.name, curve.name), about, height=3.8, panels=panels)
    xs = sorted({x for points in curve.points.values() for x, _ in points})
    wide = xs[-1] / xs[0] > WIDE
    _cost(axes[0], curve.points, curve.of, curve.unit)
    if wide and not curve.per:
        axes[0].set_xscale("log")
    if curve.per:
        scale, unit = (1e6, "us") if curve.unit == "s" else (1.0, curve.unit)
        each = {n: [(x, y / x * scale) for x, y in ps] for n, ps in curve.points.items()}
        _cost(axes[1], each, curve.of, f"{unit} per {curve.per}")
        axes[1].set_xscale("log")
        axes[1].set_xticks(xs, [plain(x) for x in xs])
        axes[1].minorticks_off()
    elif wide or len(xs) <= 3:
        axes[0].set_xticks(xs, [plain(x) for x in xs])
        axes[0].minorticks_off()
    return _save(figure, folder / f"{curve.name}.png")


def _cost(axis: Any, points: Mapping[str, list[tuple[float, float]]], of: str, unit: str) -> None:
    """Lines over a value axis from zero; the last value of each is written beside it."""
    from matplotlib.ticker import FuncFormatter

    top = max(y for line in points.values() for _, y in line) * 1.15
    ends = []
    for number, (name, line) in enumerate(points.items()):
        color = COST_COLORS[number % len(COST_COLORS)]
        xs, ys = zip(*sorted(line), strict=True)
        axis.plot(xs, ys, color=color, marker="o", markersize=4, linewidth=1.8, label=name)
        ends.append((ys[-1], xs[-1], color))
    for y, (value, x, color) in spread(ends, top / 16):
        axis.annotate(
            plain(value), (x, y), xytext=(6, 0), textcoords="offset points", va="center",
            fontsize=8, color=color, annotation_clip=False,
        )  # fmt: skip
    axis.set_ylim(0, top)
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_xlabel(of, fontsize=9)
    axis.set_ylabel(unit, fontsize=9)
    axis.legend(frameon=False, fontsize=8, loc="best")


def draw(
    folder: Path, *, of: Path = results.RESULTS, about_path: Path = results.ABOUT
) -> list[Path]:
    """Draw all there are numbers for; the files. Raises: SystemExit without matplotlib."""
    check()
    folder.mkdir(parents=True, exist_ok=True)
    rows = results.load(of)
    told = results.load(about_path)

    def about(*names: str) -> str:
        known = [told[name] for name in names if name in told]
        one = known[0] if known else {}
        mixed = len({row.get("date") for row in known}) > 1
        return (
            f"{one.get('machine', '?')}; {one.get('date', '?')}; commit {one.get('commit', '?')}; "
            f"size {one.get('size', '?')}; load when it began {one.get('load', '?')}"
            + ("; some from other runs" if mixed else "")
        )

    drawn: list[Path | None] = []
    kept = results.curves_of(about_path)
    hits = [curve for curve in kept if curve.name.startswith("policy_")]
    if hits:
        drawn.append(hit_rates(hits, about(*(curve.name for curve in hits)), folder))
    for curve in kept:
        if curve in hits:
            continue
        if curve.name == "get_resident_by_block":
            drawn.append(by_block_size(curve, about(curve.name), folder))
        else:
            drawn.append(cost_curve(curve, about(curve.name), folder))
    timed = [f"{name}_p50_us" for _, bars in LATENCIES for _, name in bars]
    drawn.append(latencies(rows, about(*timed), folder))
    flashed = [name for name, _ in FLASH + PUTS]
    drawn.append(flash(rows, about(*flashed), folder))
    return [path for path in drawn if path is not None]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print the files as JSON")
    asked = parser.parse_args(argv)
    drawn = [str(path) for path in draw(asked.folder)]
    print(json.dumps(drawn) if asked.json else "\n".join(drawn))
    return 0


if __name__ == "__main__":
    sys.exit(main())
