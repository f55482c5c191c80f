"""`entresol inspect`: what is in a data file, or in the segments of a running daemon.

Invariant: the client knows nothing of the data file's format: reading one is the daemon package's
`entresol_daemon.inspect`, run as a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

from entresol_client.cli import options, output, rpc
from entresol_client.cli.errors import EXIT_INTERRUPTED, CliError, UsageProblem
from entresol_client.cli.overview import one_admin_socket
from entresol_client.programs import DAEMON_HINT, command_of, lacks_daemon
from entresol_proto.status import Status

READER = "entresol_daemon.inspect"

EXAMPLES = """\
  entresol inspect                                    segments of the running daemon
  entresol inspect /var/lib/entresol/flash.data       a data file or drive that no daemon uses
  entresol inspect flash.data --records               every record
  entresol inspect flash.data --parquet out.parquet   the same as a table, for analysis
  entresol inspect flash.data --quick                 headers and footers only, no payload is read
"""
ABOUT = """\
With a path: reads a data file without keys and without writing: superblock, segments, records,
every header's check and every payload's hash. What is sealed stays sealed. --parquet writes a row
per record; the columns are in daemon/DATA_FILE.md.

Without one: asks the running daemon, over the admin socket.

exit status: 0 sound, 1 damage found or not a data file, 2 wrong use, 3 no daemon.
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "inspect", "look into a data file, or the daemon's segments",
        about=ABOUT, examples=EXAMPLES,
    )  # fmt: skip
    parser.add_argument("path", nargs="?", metavar="PATH", help="data file or block device")
    parser.add_argument("--records", action="store_true", help="with PATH: list every record")
    parser.add_argument(
        "--parquet",
        metavar="OUT",
        help="with PATH: write every record to a new Parquet file, with whole ids",
    )
    parser.add_argument("--quick", action="store_true", help="with PATH: do not read payloads")
    parser.add_argument(
        "--force-read-only",
        action="store_true",
        help="with PATH: read it although a daemon uses it; figures may be mixed",
    )
    options.add_admin(parser)
    options.add_common(parser, tenant=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command."""
    if args.path is not None:
        return _run_reader(args)
    if args.records or args.parquet or args.quick or args.force_read_only:
        raise UsageProblem("--records, --parquet, --quick and --force-read-only belong to a PATH")
    return _segments(args)


def _run_reader(args: argparse.Namespace) -> int:
    if lacks_daemon("pyarrow", "xxhash"):
        raise CliError(
            "reading data files is part of the daemon's package, which is not installed",
            hint=DAEMON_HINT,
            status=Status.UNSUPPORTED,
        )
    words = command_of(READER, args.path)
    for name in ("json", "records", "quick", "progress", "force_read_only"):
        if getattr(args, name):
            words.append(f"--{name.replace('_', '-')}")
    if args.parquet:
        words += ["--parquet", args.parquet]
    sys.stdout.flush()
    # Its output is ours: same streams, same exit status.
    status = subprocess.run(words, check=False).returncode
    return status if status >= 0 else EXIT_INTERRUPTED


def _segments(args: argparse.Namespace) -> int:
    _, pb, stubs = rpc.modules()
    rows: list[Any] = []
    with rpc.operator_channel(one_admin_socket(args)) as channel:
        admin = stubs.AdminStub(channel)
        first = 0
        while True:
            page = rpc.call(admin.Segments, pb.SegmentsRequest(first_segment=first))
            rows += page.segments
            first = page.next_segment
            if not first:
                break
    data = [
        {field.name: getattr(row, field.name) for field in row.DESCRIPTOR.fields} for row in rows
    ]
    used = [row for row in rows if row.state != "free"]
    free = len(rows) - len(used)
    grid = [
        (
            str(row.segment), row.state, row.tenant or "-", f"{row.records:,}",
            f"{row.live_records:,}", output.size(row.live_bytes), output.size(row.used_bytes),
            output.size(row.size_bytes), str(row.sequence),
        )
        for row in used
    ]  # fmt: skip
    head = (
        "SEGMENT",
        "STATE",
        "TENANT",
        "RECORDS",
        "LIVE",
        "LIVE BYTES",
        "WRITTEN",
        "SIZE",
        "SEQUENCE",
    )
    lines = output.table(head, grid, right="r  rrrrrr") if used else []
    lines.append(f"{output.plural(len(used), 'segment')} in use, {free:,} free")
    output.answer(args.json, {"segments": data}, lines)
    return 0
