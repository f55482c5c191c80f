"""`python -m entresol_daemon.replay TRACE`, which is what `entresol replay TRACE` runs.

Invariant: standard output holds the answer and nothing else; progress and errors go to standard
error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from entresol_daemon.core.eviction import REINSERT_RATIO
from entresol_daemon.replay import plot
from entresol_daemon.replay.run import Assumptions, Result, measure
from entresol_daemon.replay.store import POLICIES, POLICY_DEFAULT, Options, segment_blocks_of
from entresol_daemon.replay.traces import TraceError, load
from entresol_proto.status import EntresolError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
CAPACITIES_DEFAULT = "0.02,0.05,0.1,0.2,0.5"
PROGRESS_AFTER_S = 2.0


class Progress:
    """A line on standard error, once it takes longer than two seconds."""

    def __init__(self, *, forced: bool) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = self._terminal or forced
        self._due_s = time.monotonic() + PROGRESS_AFTER_S
        self.label = ""

    def update(self, done: int, total: int) -> None:
        """So many requests are done; cheap to call for every one."""
        if self._shown and time.monotonic() >= self._due_s:
            start, end = ("\r\033[K", "") if self._terminal else ("", "\n")
            print(
                f"{start}replay: {self.label}, request {done:,} of {total:,}",
                end=end, file=sys.stderr, flush=True,
            )  # fmt: skip
            self._due_s = time.monotonic() + PROGRESS_AFTER_S

    def close(self) -> None:
        """Clear the line."""
        if self._terminal and self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _capacities(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
    if not all(0 < each < 2**40 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: capacities are above 0")
    return found


def _whole(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _above(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return found


def arguments() -> argparse.ArgumentParser:
    """The options; `entresol replay` hands its own on as they are."""
    parser = argparse.ArgumentParser(prog="entresol replay")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", type=_capacities, default=_capacities(CAPACITIES_DEFAULT))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--rows", type=_whole)
    parser.add_argument("--policy", choices=POLICIES, default=POLICY_DEFAULT)
    parser.add_argument("--segment-blocks", type=_whole, default=0)
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--per-tenant", action="store_true")
    parser.add_argument("--reinsert-ratio", type=_share, default=REINSERT_RATIO)
    parser.add_argument("--write-blocks-per-s", type=_above, default=0.0)
    parser.add_argument("--admission", choices=("auto", "all", "second_touch"), default="auto")
    parser.add_argument("--block-tokens", type=_whole, default=0)
    assumed = Assumptions()
    parser.add_argument("--token-bytes", type=_whole, default=assumed.token_bytes)
    parser.add_argument("--prefill-rate", type=_above, default=assumed.prefill_tokens_per_s)
    parser.add_argument("--fetch-cost", type=_share, default=assumed.fetch_cost)
    parser.add_argument("--dwpd", type=_above, default=assumed.drive_writes_per_day)
    parser.add_argument("--warranty", type=_above, default=assumed.drive_warranty_years)
    return parser


def lines(rows: Sequence[Result], assumed: Assumptions) -> list[str]:
    """The report for a person."""
    head = (
        "CAPACITY   BLOCKS      USABLE  2ND HALF  ANY     WRITTEN     AMPLIFIED  DRIVE LIFE  SAVED"
    )
    kind = f"policy {rows[0].policy}, segments of {rows[0].segment_blocks} blocks"
    said = [f"{rows[0].trace}, {kind}", head]
    for row in rows:
        capacity = f"{row.capacity:.1%}" if row.capacity <= 1 else "-"
        years = "-" if row.drive_years is None else f"{row.drive_years:.3g} years"
        said.append(
            f"{capacity:9}  {row.capacity_blocks:<10,}  {row.usable_hit:.4f}  "
            f"{row.usable_hit_second_half:.4f}    {row.block_hit:.4f}  "
            f"{row.bytes_written / 1e12:7.3f} TB  {row.write_amplification:<9.3f}  {years:10}  "
            f"{row.ttft_saved_s:.3g} s"
        )
    return [*said, plot.about(assumed)]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = arguments().parse_args(argv)
    try:
        return _run(args)
    except EntresolError as error:
        print(f"entresol: {Exception.__str__(error)}", file=sys.stderr)
        if error.hint:
            print(f"  fix: {error.hint}", file=sys.stderr)
        if args.json:  # where the answer would have been
            said = {"error": Exception.__str__(error), "status": error.status.label}
            print(json.dumps(said | {"fix": error.hint}))
        return EXIT_USAGE if isinstance(error, TraceError) else EXIT_FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""  # pyarrow has it in its text
        print(f"entresol: {where}{error.strerror}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("entresol: interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        plot.check()
    trace = load(args.trace, rows=args.rows, block_tokens=args.block_tokens)
    block_bytes = trace.block_tokens * args.token_bytes
    options = Options(
        segment_blocks=args.segment_blocks or segment_blocks_of(block_bytes),
        policy=args.policy,
        forward=args.forward,
        per_tenant=args.per_tenant,
        reinsert_ratio=args.reinsert_ratio,
        write_blocks_per_s=args.write_blocks_per_s,
        admission=args.admission,
    )
    assumed = Assumptions(
        args.token_bytes, args.prefill_rate, args.fetch_cost, args.dwpd, args.warranty
    )
    progress = Progress(forced=args.progress)
    rows = []
    for capacity in args.capacity:
        progress.label = f"capacity {capacity:g}"
        rows.append(measure(trace, capacity, options, assumed, progress.update))
    progress.close()
    if args.plot is not None:
        plot.draw(args.plot, rows, assumed)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print("\n".join(lines(rows, assumed)))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
