"""`python -m entresol_daemon.inspect PATH`, which is what `entresol inspect PATH` runs.

Invariant: prints what `examine` found, with shortened ids; exit status 0 only when all of it is
sound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from entresol_daemon.examine import VERDICTS, Findings, examine, pair, seal_words, seals_of
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import FORMAT_VERSION, RecordKind
from entresol_daemon.inspect_parquet import check_target, export
from entresol_proto.ids import short
from entresol_proto.status import EntresolError, Status

EXIT_SOUND = 0
EXIT_DAMAGED = 1
EXIT_USAGE = 2
PROGRESS_AFTER_S = 1.0


class Progress:
    """A line on standard error, once it takes longer than a second."""

    def __init__(self, *, forced: bool) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = self._terminal or forced
        self._due_s = time.monotonic() + PROGRESS_AFTER_S

    def update(self, done: int, total: int) -> None:
        """So many segments are done."""
        now_s = time.monotonic()
        if self._shown and now_s >= self._due_s:
            start, end = ("\r\033[K", "") if self._terminal else ("", "\n")
            print(
                f"{start}inspect: segment {done} of {total}", end=end, file=sys.stderr, flush=True
            )
            self._due_s = now_s + PROGRESS_AFTER_S

    def close(self) -> None:
        """Clear the line."""
        if self._terminal and self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def as_dict(found: Findings) -> dict[str, Any]:
    """What --json prints, without the records."""
    s = found.superblock
    verdicts = {name: found.verdicts.count(n) for n, name in enumerate(VERDICTS)}
    return {
        "path": found.path,
        "format_version": FORMAT_VERSION,
        "uuid": s.uuid.hex(),
        "generation": s.generation,
        "clean": s.clean,
        "superblock_copies": found.copies,
        "segment_bytes": s.segment_bytes,
        "segment_count": s.segment_count,
        "checkpoint_bytes": s.checkpoint_bytes,
        "in_use": found.in_use,
        "payloads_read": not found.quick,
        "records": len(found.verdicts),
        "records_by_verdict": {name: count for name, count in verdicts.items() if count},
        "live_blocks": int(np.count_nonzero(found.alive)),
        "live_bytes": sum(facts.live_bytes for facts in found.segments),
        "duplicates": found.duplicates,
        "tombstones": sum(map(len, found.tombstones)),
        "damaged": found.damaged,
        "segments": [asdict(facts) for facts in found.segments if facts.state != "never used"],
    }


def records(found: Findings) -> Iterator[dict[str, Any]]:
    """Every record, ids shortened."""
    number, seals = 0, seals_of(found)
    for rows in found.rows:
        for row in rows:
            yield {
                "segment": found.row_segments[number],
                "offset_bytes": int(row["offset"]) * BLOCK,
                "kind": RecordKind(int(row["kind"])).name.lower(),
                "lsn": int(row["lsn"]),
                "namespace": short(pair(row, "ns")),
                "key": short(pair(row, "key")),
                "sealed_bytes": int(row["sealed"]),
                "plain_bytes": int(row["plain"]),
                "position": int(row["position"]),
                "live": bool(found.alive[number]),
                "verdict": VERDICTS[found.verdicts[number]],
                "sealed": seal_words(seals[number]) if len(seals) else "",
            }
            number += 1


def _size(length_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if length_bytes < 1024:
            return f"{length_bytes:.0f} {unit}" if unit == "B" else f"{length_bytes:.1f} {unit}"
        length_bytes /= 1024
    return f"{length_bytes:.1f} TiB"


def _print_text(found: Findings, *, list_records: bool) -> None:
    data = as_dict(found)
    closed = "closed cleanly" if data["clean"] else "not closed cleanly (recovery reads footers)"
    print(f"{found.path}: format {FORMAT_VERSION}, file {short(found.superblock.uuid)}…")
    print(f"  opened {data['generation']} times, {closed}, {found.copies} of 2 superblock copies")
    print(f"  {data['segment_count']} segments of {_size(data['segment_bytes'])}")
    if found.in_use:
        print("  a daemon is using it: figures may mix what was with what is")
    rows = [
        (
            str(facts.segment), facts.state, facts.stream or "-", str(facts.sequence),
            f"{facts.records:,}", facts.source or "-", f"{facts.live_blocks:,}",
            _size(facts.live_bytes), f"{facts.damaged} DAMAGED" if facts.damaged else "",
            facts.note,
        )
        for facts in found.segments
        if facts.state not in ("free", "never used")
    ]  # fmt: skip
    head = (
        "SEGMENT", "STATE", "STREAM", "SEQUENCE", "RECORDS", "BY", "LIVE", "LIVE BYTES", "", ""
    )  # fmt: skip
    _print_table(head, rows, right="r  rr rr")
    if list_records:
        _print_records(found)
    unused = sum(facts.state in ("free", "never used") for facts in found.segments)
    verdicts = ", ".join(f"{n:,} {name}" for name, n in data["records_by_verdict"].items())
    print(f"  {unused} segments free or never used")
    print(f"  {data['records']:,} records ({verdicts or 'none'}), {data['tombstones']:,} removals")
    print(f"  {data['live_blocks']:,} live blocks, {_size(data['live_bytes'])} sealed")
    print("  sound" if not found.damaged else f"  {found.damaged} damaged: they read as misses")


def _print_records(found: Findings) -> None:
    head = ("SEGMENT", "OFFSET", "KIND", "LSN", "NAMESPACE", "KEY", "SEALED", "LIVE", "VERDICT", "")
    rows = [
        (
            str(row["segment"]), str(row["offset_bytes"]), row["kind"], str(row["lsn"]),
            row["namespace"], row["key"], _size(row["sealed_bytes"]),
            "yes" if row["live"] else "no", row["verdict"], row["sealed"],
        )
        for row in records(found)
    ]  # fmt: skip
    _print_table(head, rows, right="rr r  r")


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: str) -> None:
    """Columns under their heads; `right` holds an "r" for every column that holds numbers."""
    if not rows:
        return
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if right[n : n + 1] == "r" else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m entresol_daemon.inspect",
        description="Look into an Entresol data file, without keys and without writing.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="data file or block device")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--records", action="store_true", help="list every record")
    parser.add_argument("--parquet", type=Path, metavar="OUT", help="write every record to OUT")
    parser.add_argument("--quick", action="store_true", help="headers and footers only")
    parser.add_argument("--progress", action="store_true", help="also when not on a terminal")
    parser.add_argument(
        "--force-read-only", action="store_true", help="read although a daemon uses it"
    )
    args = parser.parse_args(argv)
    progress = Progress(forced=args.progress)
    try:
        if args.parquet is not None:
            check_target(args.parquet)
        found = examine(
            args.path,
            quick=args.quick,
            list_records=args.records or args.parquet is not None,
            force=args.force_read_only,
            progress=progress.update,
        )
        if args.parquet is not None:
            export(found, args.parquet)
    except EntresolError as error:
        print(f"entresol: {Exception.__str__(error)}", file=sys.stderr)
        if error.hint:
            print(f"  fix: {error.hint}", file=sys.stderr)
        if args.json:  # where the answer would have been
            said = {"error": Exception.__str__(error), "status": error.status.label}
            print(json.dumps(said | {"fix": error.hint}))
        return EXIT_USAGE if error.status is Status.BAD_REQUEST else EXIT_DAMAGED
    except KeyboardInterrupt:
        print("entresol: interrupted", file=sys.stderr)
        return 130
    finally:
        progress.close()
    try:
        _show(found, args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: what was found is told by the exit status all the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DAMAGED if found.damaged else EXIT_SOUND


def _show(found: Findings, args: argparse.Namespace) -> None:
    if args.json:
        extra: dict[str, Any] = {}
        if args.records:
            extra["record_list"] = list(records(found))
        if args.parquet is not None:
            extra["parquet"] = str(args.parquet)
        print(json.dumps(as_dict(found) | extra, indent=2))
        return
    _print_text(found, list_records=args.records)
    if args.parquet is not None:
        print(f"  {len(found.verdicts):,} records written to {args.parquet}")


if __name__ == "__main__":
    sys.exit(main())
