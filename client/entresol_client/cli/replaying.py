"""`entresol replay`: what the daemon's admission and eviction would make of a request trace.

Invariant: the client knows no policy: the replay is the daemon package's `entresol_daemon.replay`,
run as a process of its own, so that what is judged is the code that daemons run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

from entresol_client.cli import options
from entresol_client.cli.errors import EXIT_INTERRUPTED, CliError, UsageProblem
from entresol_client.programs import DAEMON_HINT, command_of, lacks_daemon
from entresol_proto.status import Status

REPLAYER = "entresol_daemon.replay"

_ABOUT = """\
Replays a trace of requests through the admission and eviction that daemons run, at one capacity
after the other, and tells hit rate, bytes written, drive life and time to first token saved. No
daemon is asked.

TRACE is a Parquet file with a row per request: ts_ms, run_start and run_len (lists: the request's
block ids in prefix order, as runs of consecutive ids), tenant if --per-tenant; or a .jsonl file
with timestamp (ms) and hash_ids, which is the Mooncake format. Blocks are equal; what a request
misses is put at once and visible at once. Usable hits are those of the longest prefix found; only
they save work. A drive as large as the capacity is assumed; what else is assumed is told with the
answer.

exit status: 0 done, 1 the daemon's package is missing, 2 wrong use or not a trace.
"""
_EXAMPLES = """\
  entresol replay trace.parquet
  entresol replay trace.parquet --capacity 0.02,0.05,0.1,0.2,0.5 --json
  entresol replay trace.jsonl --plot hits.png --token-bytes 163840
  entresol replay trace.parquet --policy lru       the yardstick: LRU per block
"""
_USAGE = "TRACE [--capacity LIST] [--json] [--plot FILE] [options]"


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "replay", "a request trace through admission and eviction: hits, writes, worth",
        about=_ABOUT, examples=_EXAMPLES, usage=_USAGE,
    )  # fmt: skip
    parser.add_argument("trace", metavar="TRACE", help="a .parquet or .jsonl file")
    for name, metavar, text in (
        ("capacity", "LIST", "shares of the distinct blocks, or blocks when above 1 "
         "(default: 0.02,0.05,0.1,0.2,0.5)"),
        ("plot", "FILE", "draw hit rate, drive life and time saved over capacity (matplotlib)"),
        ("rows", "N", "only the first requests"),
        ("policy", "NAME", "median or worth, as [flash] eviction (default: as daemons have by "
         "default), segment-lru, or lru: per block, the yardstick"),
        ("segment-blocks", "N", "blocks of a segment (default: what 64 MiB hold, at least 4)"),
        ("reinsert-ratio", "SHARE", "of what is put, that may be written again (default: 0.15)"),
        ("write-blocks-per-s", "N", "a write budget, beyond which the second touch is admitted"),
        ("admission", "NAME", "auto (default), all or second_touch"),
        ("block-tokens", "N", "tokens of a block (default: as the file says, else 512)"),
        ("token-bytes", "N", "bytes of a token (default: 131072, Llama-3.1-8B in bf16)"),
        ("prefill-rate", "N", "tokens per second that are computed of a prompt (default: 2051)"),
        ("fetch-cost", "SHARE", "of that time, that a fetch takes (default: 3/62)"),
        ("dwpd", "N", "drive writes per day the drive is warranted for (default: 1)"),
        ("warranty", "YEARS", "of that warranty (default: 5)"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    for name, text in (
        ("forward", "touch head first, to see what tail first is worth"),
        ("per-tenant", "a stream per tenant, as daemons have it, instead of one"),
        ("json", "answer in JSON, for scripts"),
        ("progress", "show progress also when not on a terminal"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command."""
    if lacks_daemon("xxhash"):
        raise CliError(
            "replaying is part of the daemon's package, which is not installed",
            hint=DAEMON_HINT,
            status=Status.UNSUPPORTED,
        )
    if not os.path.exists(args.trace):
        raise UsageProblem(f"there is no file {args.trace!r}")
    words = command_of(REPLAYER)
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        if name in ("run", "command", "trace") or value is None or value is False:
            continue
        words += [option] if value is True else [f"{option}={value}"]
    sys.stdout.flush()
    # Its output is ours: same streams, same exit status.
    status = subprocess.run([*words, "--", args.trace], check=False).returncode
    return status if status >= 0 else EXIT_INTERRUPTED
