"""The command line: list environments, build them, run their suites."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.engines import builder, runner
from tests.engines.environments import ENVIRONMENTS, SIZES, UsageError, named
from tests.engines.report import RC_CANNOT, RESULTS

RC_USAGE = 2  # as argparse


def parser() -> argparse.ArgumentParser:
    """Every verb and option."""
    top = argparse.ArgumentParser(prog="python -m tests.engines", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="environments, and which are built")
    build = verbs.add_parser("build", help="build what is missing and print where it is")
    run = verbs.add_parser("run", help="run suites; words after -- are pytest's")
    run.add_argument("--skip", action="append", default=[], metavar="ENV", help="leave one out")
    run.add_argument(
        "--jobs", type=int, default=1, choices=range(1, 5), metavar="N",
        help="suites at a time; more than one blurs what they measure",
    )  # fmt: skip
    run.add_argument("--out", type=Path, metavar="DIR", help="where results and logs go")
    exec_verb = verbs.add_parser("exec", help="run the words after -- as a suite would run")
    exec_verb.add_argument("name", metavar="ENV")
    for verb in (build, run):
        verb.add_argument("--size", choices=SIZES, default="full", help="whose environments")
        verb.add_argument("names", nargs="*", metavar="ENV", help="instead of all of the size")
    return top


def _list(options: argparse.Namespace) -> int:
    for one in ENVIRONMENTS.values():
        at = builder.find(one)
        print(f"{one.name:9} {one.about}\n          {at or 'not built'}")
    return 0


def _build(options: argparse.Namespace) -> int:
    for one in named(options.names, options.size):
        print(builder.ensure(one))
    return 0


def _run(options: argparse.Namespace) -> int:
    environments = named(options.names, options.size)
    named(options.skip, options.size)
    out = options.out or Path(tempfile.mkdtemp(prefix="entresol-engines-"))
    out.mkdir(parents=True, exist_ok=True)
    came_to = runner.run(
        runner.Plan(
            environments, options.size, options.words, out.resolve(),
            frozenset(options.skip), options.jobs,
        )
    )  # fmt: skip
    (out / RESULTS).write_text(came_to.json(), encoding="utf-8")
    print("\n".join([*came_to.lines(), f"  details: {out / RESULTS}"]))
    return came_to.rc


def _exec(options: argparse.Namespace) -> int:
    (environment,) = named([options.name], SIZES[-1])
    builder.ensure(environment)
    if not options.words:
        raise UsageError("exec wants a command after --")
    return runner.execute(environment, options.words)


VERBS = {"list": _list, "build": _build, "run": _run, "exec": _exec}


def main(arguments: list[str]) -> int:
    """Run one verb; returns its exit code."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser().parse_args(arguments[:cut])
    options.words = arguments[cut + 1 :]
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
