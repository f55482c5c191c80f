"""The command line: list environments, build them, run their suites."""

from __future__ import annotations

import argparse
import signal
import sys

from tests.engines import builder
from tests.engines.environments import ENVIRONMENTS, SIZES, UsageError, named

RC_USAGE = 2  # as argparse
RC_CANNOT = 77  # what automake calls a skipped test


def parser() -> argparse.ArgumentParser:
    """Every verb and option."""
    top = argparse.ArgumentParser(prog="python -m tests.engines", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="environments, and which are built")
    build = verbs.add_parser("build", help="build what is missing and print where it is")
    for verb in (build,):
        verb.add_argument("--size", choices=SIZES, default="full", help="whose environments")
        verb.add_argument("names", nargs="*", metavar="ENV", help="instead of all of the size")
    return top


def _list(options: argparse.Namespace) -> int:
    for one in ENVIRONMENTS.values():
        at = builder.find(one)
        print(f"{one.name:8} {one.about}\n         {at or 'not built'}")
    return 0


def _build(options: argparse.Namespace) -> int:
    for one in named(options.names, options.size):
        print(builder.ensure(one))
    return 0


VERBS = {"list": _list, "build": _build}


def main(arguments: list[str]) -> int:
    """Run one verb; returns its exit code."""
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return VERBS[options.verb](options)
    except UsageError as error:
        print(f"tests.engines: {error}", file=sys.stderr)
        return RC_USAGE
    except builder.NotHereError as cannot:
        print(f"NOT RUN HERE: {cannot}", file=sys.stderr)
        return RC_CANNOT
    except KeyboardInterrupt:
        print("tests.engines: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
