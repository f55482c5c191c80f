"""`entresol exists`, `forget`: questions about blocks that move none of them.

Invariant: a name is looked at whole: its head, its key list and every block.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from entresol_client.cli import fetching, objects, options, output, session
from entresol_client.cli.errors import CliError, Unreachable, UsageProblem
from entresol_proto import limits

if TYPE_CHECKING:
    from entresol_client.sync import SyncNamespace

KEYS_PER_COMMAND_MAX = limits.BLOCKS_PER_FETCH_MAX

_EXISTS = """\
Asks which blocks could be read now. For a name: its head, and every block of the file.

exit status: 0 all there, 1 something is missing, 2 wrong use, 3 no daemon.
"""
_FORGET = """\
Drops blocks for good; they do not come back after a restart. A name's blocks may be shared with
other names that begin with the same bytes: --blocks drops them too, else only the name goes.

exit status: 0 dropped, 1 nothing was there, 2 wrong use, 3 no daemon.
"""


def add_parser(subparsers: Any) -> None:
    """Register the two commands."""
    for name, short, about, run in (
        ("exists", "tell whether something is stored", _EXISTS, run_exists),
        ("forget", "drop something for good", _FORGET, run_forget),
    ):
        examples = (
            f"  entresol {name} --name notes\n"
            f"  entresol {name} --key text:session-42 --key 0011223344556677 --json\n"
        )
        parser = options.command(
            subparsers, name, short, about=about, examples=examples,
            usage="(--name NAME | --key KEY ...) [options]",
        )  # fmt: skip
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--name", help="name it was put under")
        which.add_argument(
            "--key",
            action="append",
            metavar="HEX|text:WORDS",
            help="engine key of a block (repeatable)",
        )
        if name == "forget":
            parser.add_argument("--blocks", action="store_true", help="with --name: the blocks too")
        options.add_deadline(parser)
        options.add_namespace(parser, stored=True)
        options.add_common(parser)
        parser.set_defaults(run=run)


def keys_of(args: argparse.Namespace) -> list[bytes]:
    """The keys that were given, checked before anything is opened. Raises: UsageProblem."""
    if args.name is not None:
        return [objects.name_key(args.name)]
    if len(args.key) > KEYS_PER_COMMAND_MAX:
        raise UsageProblem(f"{len(args.key)} keys in one command, at most {KEYS_PER_COMMAND_MAX}")
    return [objects.parse_key(text) for text in args.key]


def _present(ns: SyncNamespace, keys: list[bytes], deadline_ns: int) -> list[bool]:
    """Raises: Unreachable when a shard did not answer."""
    found = ns.exists(keys, deadline_ns=deadline_ns) if keys else None
    if found is not None and not found.complete:
        raise Unreachable("a shard did not answer", hint="`entresol doctor` tells which and why")
    return found.present if found is not None else []


def file_keys(ns: SyncNamespace, args: argparse.Namespace) -> list[bytes]:
    """The blocks of the name. Raises: CliError when its head or key list is not there."""
    head = fetching.read_head(ns, args.name, args.deadline)
    return fetching.read_keys(ns, head, args.name, args.deadline)


def run_exists(args: argparse.Namespace) -> int:
    """The command."""
    keys = keys_of(args)
    with session.open_namespace(args) as (_, ns):
        if args.name is not None:
            return _exists_name(ns, keys[0], args)
        present = _present(ns, keys, args.deadline)
    rows = [{"key": key.hex(), "exists": here} for key, here in zip(keys, present, strict=True)]
    data = {"exists": all(present), "present": sum(present), "asked": len(keys), "keys": rows}
    lines = [
        f"{text}: {'stored' if here else 'not stored'}"
        for text, here in zip(args.key, present, strict=True)
    ]
    output.answer(args.json, data, lines)
    return 0 if all(present) else 1


def _exists_name(ns: SyncNamespace, key: bytes, args: argparse.Namespace) -> int:
    data: dict[str, Any] = {"name": args.name, "exists": False, "blocks": None, "present": 0}
    if not _present(ns, [key], args.deadline)[0]:
        output.answer(args.json, data, [f"{args.name}: not stored"])
        return 1
    head = fetching.read_head(ns, args.name, args.deadline)
    try:
        keys = fetching.read_keys(ns, head, args.name, args.deadline)
    except CliError as error:
        if isinstance(error, Unreachable):
            raise
        keys = []
    present = _present(ns, keys, args.deadline)
    data |= {
        "exists": len(keys) == head.blocks and all(present),
        "blocks": head.blocks,
        "present": sum(present),
        "bytes": head.length_bytes,
        "sha256": head.sha256.hex(),
    }
    whole = "stored" if data["exists"] else "incomplete"
    line = (
        f"{args.name}: {whole}, {sum(present):,} of {output.plural(head.blocks, 'block')}, "
        f"{output.size(head.length_bytes)}"
    )
    output.answer(args.json, data, [line])
    return 0 if data["exists"] else 1


def run_forget(args: argparse.Namespace) -> int:
    """The command."""
    keys = keys_of(args)
    if args.blocks and args.name is None:
        raise UsageProblem("--blocks belongs to --name")
    with session.open_namespace(args) as (_, ns):
        if args.blocks:
            head = fetching.read_head(ns, args.name, args.deadline)
            keys = [
                *fetching.read_keys(ns, head, args.name, args.deadline),
                *head.list_keys(),
                *keys,
            ]
        result = ns.forget(keys, deadline_ns=args.deadline)
    if not result.complete:
        raise Unreachable("a shard did not answer", hint="`entresol doctor` tells which and why")
    data = {"forgotten": result.count, "asked": len(keys)}
    text = f"dropped {output.plural(result.count, 'block')}"
    output.answer(args.json, data, [text if result.count else "nothing was there"])
    return 0 if result.count else 1
