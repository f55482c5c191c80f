"""`entresol`: the command, its help and its exit codes.

Invariant: nothing heavy is imported to show help; expected failures are one line and a fix on
standard error, never a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from entresol_client.cli import (
    doctor,
    errors,
    events,
    explaining,
    fetching,
    inspecting,
    keys,
    lookup,
    options,
    output,
    overview,
    quoting,
    replaying,
    sizing,
    spaces,
    storing,
    streams,
    tenants,
    top,
)
from entresol_client.cli.errors import CliError
from entresol_client.relay import command as relay
from entresol_proto import __version__
from entresol_proto.status import EntresolError, Status

_ABOUT = "Talk to Entresol, the pod-shared, sealed KV block store."
_EPILOG = """\
start here:
  entresold --dev                             in one terminal: a daemon that needs nothing
  entresol put notes.bin --name notes         in another
  entresol get --name notes -o copy.bin
  entresol doctor                             when something does not work

The configuration is --config FILE, else $ENTRESOL_CONFIG, else entresol/client.toml in
$XDG_RUNTIME_DIR, $XDG_CONFIG_HOME (or ~/.config) or /etc. `entresold --dev` writes one.

exit status: 0 done, 1 missing, refused or failed, 2 wrong use, configuration or identity,
3 no daemon answers, 130 Ctrl-C.
`entresol COMMAND --help` explains each command.
"""
_DEMO = "entresol_client.demo.command"
_DEMO_SHORT = "the whole story on real KV data, in about a minute"


class _WrongUseError(SystemExit):
    """The arguments make no sense; argparse has said so."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(errors.EXIT_USAGE)
        self.problem, self.fix = problem, fix


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        fix = f"`{self.prog} --help` explains each option"
        print(f"{self.prog}: error: {message}\n  fix: {fix}", file=sys.stderr)
        raise _WrongUseError(message, fix)


def parser_of(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The command line; the demo's own options are loaded only when it is asked for."""
    return _parsers(argv)[0]


def _parsers(argv: Sequence[str]) -> tuple[_Parser, Mapping[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="entresol",
        description=_ABOUT,
        epilog=_EPILOG,
        formatter_class=options.Formatter,
    )
    parser.add_argument("--version", action="version", version=f"entresol {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", help="what to do"
    )
    _add_demo(subparsers, wanted="demo" in argv[:1])
    for module in (
        storing,
        fetching,
        lookup,
        explaining,
        quoting,
        sizing,
        replaying,
        events,
        spaces,
        relay,
        overview,
        doctor,
        inspecting,
        top,
        tenants,
        keys,
    ):
        module.add_parser(subparsers)
    return parser, subparsers.choices


def _add_demo(subparsers: Any, *, wanted: bool) -> None:
    if wanted:
        try:
            module = importlib.import_module(_DEMO)
        except ModuleNotFoundError as error:
            if error.name != _DEMO:
                raise
        else:
            module.add_parser(subparsers)
            subparsers.choices["demo"].set_defaults(run=module.run)
            return
    parser = options.command(subparsers, "demo", _DEMO_SHORT)
    parser.set_defaults(run=_no_demo)


def _no_demo(args: argparse.Namespace) -> int:
    raise CliError("the demo is not part of this build", status=Status.UNSUPPORTED)


def _behind(words: list[str]) -> list[str]:
    """`--config FILE` before the command, where many programs want it, goes behind it."""
    count = 2 if words[:1] == ["--config"] else 1
    if not words or words[0].partition("=")[0] != "--config" or len(words) <= count:
        return words
    option, rest = words[:count], words[count:]
    at = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:at], *option, *rest[at:]]


def _refuse(
    unknown: Sequence[str],
    parser: argparse.ArgumentParser,
    command: argparse.ArgumentParser | None,
    *,
    first: str,
) -> NoReturn:
    """Whose usage helps is the command's, but for what comes before it."""
    if command is not None and first.startswith("-"):
        parser.error(f"options go behind the command: {' '.join(unknown)}")
    (command or parser).error(f"unrecognized arguments: {' '.join(unknown)}")


def _is_for_bytes(words: Sequence[str]) -> bool:
    """Whether standard output is to hold what `get` reads, so that nothing else may."""
    return words[0] == "get" and any(word in ("-", "-o-", "--output=-") for word in words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    streams.prepare()
    words = _behind(list(sys.argv[1:] if argv is None else argv))
    try:
        parser, commands = _parsers(words)
        args, unknown = parser.parse_known_args(words)
        if unknown:
            _refuse(unknown, parser, commands.get(args.command), first=words[0])
    except SystemExit as stop:  # argparse has said why
        if isinstance(stop, _WrongUseError) and "--json" in words:
            said = {"error": stop.problem, "status": Status.BAD_REQUEST.label, "fix": stop.fix}
            with contextlib.suppress(OSError):
                output.json_line(said, to_stderr=_is_for_bytes(words))
        streams.drop_unwritten()
        return stop.code if isinstance(stop.code, int) else errors.EXIT_USAGE
    if args.command is None:
        parser.print_help()
        return errors.EXIT_USAGE
    with _logging(verbose=getattr(args, "verbose", False)):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except EntresolError as error:
        for line in errors.describe(error):
            print(line, file=sys.stderr)
        if getattr(args, "json", False):
            _failed_as_json(args, error)
        return errors.exit_code_of(error)
    except KeyboardInterrupt:
        print("entresol: interrupted", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    except BrokenPipeError:
        streams.drop_unwritten()  # whoever read our output has enough
        return errors.EXIT_FAILED
    except PermissionError as error:
        print(f"entresol: not allowed to use {error.filename!r}", file=sys.stderr)
        print("  fix: run this as a user who may, or let this one into the folder", file=sys.stderr)
        return errors.EXIT_FAILED
    except OSError as error:  # most often a full disk below our output
        where = f"{error.filename!r}: " if error.filename else ""
        print(f"entresol: {where}{error.strerror or error}", file=sys.stderr)
        streams.drop_unwritten()
        return errors.EXIT_FAILED


def _failed_as_json(args: argparse.Namespace, error: EntresolError) -> None:
    """Where the answer would have been: a script reads one thing, whatever comes of it."""
    to_stderr = getattr(args, "output", None) == "-"  # standard output holds the bytes
    said = {"error": Exception.__str__(error), "status": error.status.label, "fix": error.hint}
    try:
        output.json_line(said, to_stderr=to_stderr)
    except OSError:  # whoever reads our output has gone, or its disk is full; it was said already
        streams.drop_unwritten()


@contextlib.contextmanager
def _logging(*, verbose: bool) -> Iterator[None]:
    """Log lines only when they are asked for; failures are reported by the command itself."""
    logger = logging.getLogger("entresol")
    handler: logging.Handler = logging.NullHandler()
    level = logger.level
    if verbose:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
