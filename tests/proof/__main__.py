"""`python -m tests.proof`: list, run, replay and check the lines of the scorecard."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tests.proof import record, slices
from tests.proof.journal import Journal
from tests.proof.line import Line, NotRunError, Size, Slice, Tally, find_lines
from tests.proof.runner import Run
from tests.proof.slices import ROOT, write_tally

RC_USAGE = 2
RC_STOPPED = 130


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 all held, 1 something did not, 2 wrong words."""
    args = _parser().parse_args(words)
    lines = find_lines()
    wanted = getattr(args, "line", None) or []
    wanted = [wanted] if isinstance(wanted, str) else wanted
    left_out = getattr(args, "without", None) or []
    unknown = [name for name in [*wanted, *left_out] if name not in lines]
    if unknown:
        print(f"no line {', '.join(unknown)}; there are: {' '.join(lines)}", file=sys.stderr)
        return RC_USAGE
    chosen = [lines[name] for name in lines if not wanted or name in wanted]
    try:
        return int(args.verb(args, chosen))
    except KeyboardInterrupt:
        print("stopped; go on with --resume", file=sys.stderr)
        return RC_STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proof",
        description="The scorecard: wrong bytes 0, durable lost 0, crashes 0, tried and counted.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run: object, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(verb=run)
        return sub

    sizes = [size.value for size in Size]
    verb("list", _list, "the lines, and how much each tries at each size")
    run = verb("run", _run, "run lines, print the table, write it as JSON")
    run.add_argument("--size", choices=sizes, default=Size.COMMIT.value)
    run.add_argument("--line", action="append", metavar="ID", help="only this one; repeatable")
    run.add_argument("--without", action="append", metavar="ID", help="not this one; it is said")
    run.add_argument("--seed", type=int, default=1, help="of the first unit (default 1)")
    run.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N",
        help="processes at a time (default: two)",
    )  # fmt: skip
    run.add_argument("--json", type=Path, default=ROOT / "tests/proof.json", metavar="FILE",
                     help="where the table goes (default tests/proof.json)")  # fmt: skip
    run.add_argument("--markdown", type=Path, metavar="FILE", help="and as a table in Markdown")
    run.add_argument("--resume", action="store_true", help="go on with the last run of this code")
    run.add_argument("--no-canaries", action="store_true", help="plant no bugs")
    kept = verb("record", _record, "keep what the last run's lines came to, whole ones only")
    kept.add_argument("--size", choices=sizes, default=Size.RELEASE.value)
    kept.add_argument("--seed", type=int, default=1, help="of the first unit (default 1)")
    kept.add_argument("--journal", type=Path, metavar="FILE", help="default .proof/SIZE.jsonl")
    kept.add_argument("--into", type=Path, metavar="FILE",
                      help="default tests/proof/SIZE.json; rows of other lines stay")  # fmt: skip
    kept.add_argument(
        "--markdown", type=Path, metavar="FILE", help="the table of tests/proof/README.md"
    )
    replay = verb("replay", _replay, "run units of one line again, here, with their trace")
    replay.add_argument("line", metavar="ID")
    replay.add_argument("--seed", type=int, required=True)
    replay.add_argument("--units", type=int, default=1)
    replay.add_argument("--size", choices=sizes, default=Size.COMMIT.value)
    replay.add_argument(
        "--minimise", action="store_true", help="shrink it while it fails, where the line can"
    )
    canary = verb("canary", _canary, "plant each line's bug and see that the line finds it")
    canary.add_argument("--line", action="append", metavar="ID")
    canary.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    canary.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    one = verbs.add_parser("slice")
    one.set_defaults(verb=_slice)
    one.add_argument("line")
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--units", type=int, required=True)
    one.add_argument("--size", choices=sizes, required=True)
    one.add_argument("--folder", type=Path, required=True)
    return parser


def _list(args: argparse.Namespace, lines: Sequence[Line]) -> int:
    for line in lines:
        sizes = ", ".join(f"{size.value} {line.units[size]:,}" for size in Size)
        alone = "; alone" if line.alone else ""
        reason = line.not_run()
        print(f"{line.id:4} {line.name} [{line.unit}: {sizes}{alone}]")
        if reason:
            print(f"     cannot run here: {reason}")
    return 0


def _run(args: argparse.Namespace, lines: Sequence[Line]) -> int:
    size = Size(args.size)
    journal = Journal(_journal(size), resume=args.resume)
    lines = [
        replace(line, not_run=lambda: "left out by --without") if line.id in (args.without or [])
        else line for line in lines
    ]  # fmt: skip
    card = Run(
        lines, size, args.seed, max(1, args.jobs), journal, canaries=not args.no_canaries
    ).scorecard()
    args.json.write_text(card.json(), encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(card.markdown(), encoding="utf-8")
    print(card.text(), flush=True)
    return card.rc


def _journal(size: Size) -> Path:
    return Path(os.environ.get("ENTRESOL_PROOF_JOURNALS", ROOT / ".proof")) / f"{size.value}.jsonl"


def _record(args: argparse.Namespace, lines: Sequence[Line]) -> int:
    size = Size(args.size)
    into = args.into or ROOT / "tests/proof" / f"{size.value}.json"
    try:
        done = record.read_journal(args.journal or _journal(size))
        rows = record.rows_of(lines, size, args.seed, done)
        merged = record.merge(record.load(into), rows)
    except (OSError, ValueError) as error:
        print(f"nothing recorded: {error}", file=sys.stderr)
        return 1
    record.save(into, merged)
    if args.markdown:
        args.markdown.write_text(record.markdown(size, merged, lines), encoding="utf-8")
    new = " ".join(row["id"] for row in rows) or "none"
    left = [line.id for line in lines if line.id not in {row["id"] for row in merged}]
    print(f"recorded in {into}: {new}; no whole run yet: {' '.join(left) or 'none'}")
    return 0


def _replay(args: argparse.Namespace, lines: Sequence[Line]) -> int:
    with tempfile.TemporaryDirectory(prefix="entresol-proof-") as name:
        wanted = Slice(args.seed, args.units, Size(args.size), Path(name), True, args.minimise)
        tally = lines[0].run(wanted)
    for field, value in asdict(tally).items():
        print(f"{field}: {value}")
    return 0 if tally.clean else 1


def _slice(args: argparse.Namespace, lines: Sequence[Line]) -> int:
    work = args.folder / "work"
    work.mkdir()
    try:
        tally = lines[0].run(Slice(args.seed, args.units, Size(args.size), work))
    except NotRunError as error:
        tally = Tally(not_run=str(error))
    write_tally(tally, args.folder)
    return 0


def _canary(args: argparse.Namespace, lines: Sequence[Line]) -> int:
    missed = 0
    for line in lines:
        tally = Tally(tried=1)
        try:
            if line.canary is None:
                continue
            if args.here:
                line.canary()
            else:
                child = slices.Child.start(line, 0, 0, Size.COMMIT)
                while (found := child.poll()) is None:
                    time.sleep(0.05)
                if found.not_run:
                    raise NotRunError(found.not_run)
                assert found.clean, found.findings
            tally.survived = 1
        except NotRunError as error:
            tally = Tally(not_run=str(error))
        except AssertionError as error:
            if args.here:
                traceback.print_exc()
            tally.found(0, f"the planted bug was not found: {error}")
            missed += 1
        if args.folder is not None:
            write_tally(tally, args.folder)
        else:
            text = f"not run: {tally.not_run}" if tally.not_run else "NOT FOUND"
            print(f"{line.id:4} {'found' if tally.survived else text}", flush=True)
    return 0 if args.here else min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
