"""`entresol demo`: the options of the command, and its exit status.

Invariant: exit 0 means that every promise of `report.broken_promises` held in this very run. With
`--json` standard output holds one JSON object and nothing else; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from entresol_proto.status import EntresolError

CONTEXT_TOKENS_DEFAULT = 8_192
CONTEXT_TOKENS_QUICK = 2_048
CONTEXT_TOKENS_MIN = 256
CONTEXT_TOKENS_MAX = 16_320  # what the document that ships with the demo holds, in whole blocks
DECODE_TOKENS_DEFAULT = 24
DECODE_TOKENS_MAX = 1_024
BLOCK_TOKENS = 64

_DESCRIPTION = """\
The whole story on real KV, in about a minute and in real processes:

  1  a daemon starts in a temporary folder
  2  host A prefills a context and puts its KV blocks, acknowledged durable
  3  the daemon is killed with SIGKILL and started again
  4  host B finds the prefix, fetches it, decodes on, and recomputes it to compare
  5  another tenant asks for the same keys
  6  one bit of the data file is flipped; host B fetches once more
"""
_EPILOG = """\
exit status: 0 every promise held, 1 one did not (it is named) or the demo could not run,
2 wrong use of this command, 130 interrupted.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `demo` command to a group of subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="the whole story on real KV, in about a minute",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser)
    return parser


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--tokens",
        type=_context_tokens,
        metavar="N",
        help=f"tokens of context, a multiple of {BLOCK_TOKENS} (default: {CONTEXT_TOKENS_DEFAULT})",
    )
    size.add_argument(
        "--quick", action="store_true", help=f"{CONTEXT_TOKENS_QUICK} tokens of context"
    )
    parser.add_argument(
        "--decode",
        type=_decode_tokens,
        default=DECODE_TOKENS_DEFAULT,
        metavar="N",
        help=f"tokens to decode and compare (default: {DECODE_TOKENS_DEFAULT})",
    )
    parser.add_argument(
        "--fabric",
        choices=("auto", "shm", "tcp"),
        default="auto",
        help="data path between the hosts and the daemon (default: auto, which is shm here)",
    )
    parser.add_argument(
        "--codec",
        choices=("plane", "fast", "dense", "zstd", "raw", "auto"),
        default="plane",
        help="how blocks are compressed (default: plane; auto would be raw on one host)",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="work in DIR, which must be new or empty, and stay"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")


def run(args: argparse.Namespace) -> int:
    """Tell the story; returns the exit status."""
    from entresol_client.demo import report
    from entresol_client.demo.progress import Progress
    from entresol_client.demo.story import Options, Story

    options = Options(
        context_tokens=args.tokens or (CONTEXT_TOKENS_QUICK if args.quick else 0)
        or CONTEXT_TOKENS_DEFAULT,
        decode_tokens=args.decode,
        block_tokens=BLOCK_TOKENS,
        fabric=args.fabric,
        codec=args.codec,
        keep=args.keep,
    )  # fmt: skip
    progress = Progress(sys.stderr)
    try:
        with Story(options, progress) as story:
            findings = story.tell()
    except KeyboardInterrupt:
        progress.leave()
        print("entresol demo: interrupted; nothing is left behind", file=sys.stderr)
        return 130
    except EntresolError as error:
        progress.leave()
        print(f"entresol demo: {Exception.__str__(error)}", file=sys.stderr)
        if error.hint:
            print(f"  fix: {error.hint}", file=sys.stderr)
        return 1
    broken = report.broken_promises(findings)
    if args.json:
        print(json.dumps(report.as_dict(findings, broken), indent=2))
        for promise in broken:
            print(f"entresol demo: broken promise: {promise}", file=sys.stderr)
    else:
        print(report.table(findings, broken))
        if args.keep:
            print(f"kept in {args.keep}")
    return 1 if broken else 0


def main(argv: list[str] | None = None) -> int:
    """`python -m entresol_client.demo`."""
    parser = argparse.ArgumentParser(
        prog="entresol demo",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser)
    return run(parser.parse_args(argv))


def _context_tokens(text: str) -> int:
    count = _whole(text, CONTEXT_TOKENS_MIN, CONTEXT_TOKENS_MAX)
    if count % BLOCK_TOKENS:
        raise argparse.ArgumentTypeError(f"{count} is not a multiple of {BLOCK_TOKENS}")
    return count


def _decode_tokens(text: str) -> int:
    return _whole(text, 1, DECODE_TOKENS_MAX)


def _whole(text: str, low: int, high: int) -> int:
    try:
        count = int(text.replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not low <= count <= high:
        raise argparse.ArgumentTypeError(f"{count} is not {low} to {high}")
    return count
