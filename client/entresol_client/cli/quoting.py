"""`entresol quote`: how long a get would take just now, without making it.

Invariant: a daemon that gives no quotes is told apart from one that has nothing.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from entresol_client.cli import fetching, lookup, options, output, session
from entresol_client.cli.errors import CliError, Unreachable
from entresol_proto import limits
from entresol_proto.status import Status
from entresol_proto.wire.data import Tier

if TYPE_CHECKING:
    from entresol_client.results import QuoteResult
    from entresol_client.sync import SyncNamespace

_ABOUT = """\
Asks how long a get would take with the queues as they are: what waits, what is in memory and what
has to come from flash. It promises nothing. Engines ask the same before they decide whether to
fetch blocks or to compute them.

exit status: 0 all there, 1 something is missing or there is no quote, 2 wrong use, 3 no daemon.
"""
_EXAMPLES = (
    "  entresol quote --name notes\n"
    "  entresol quote --key text:session-42 --key 0011223344556677 --json\n"
)


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "quote", "tell how long a get would take", about=_ABOUT, examples=_EXAMPLES,
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
    options.add_deadline(parser)
    options.add_namespace(parser, stored=True)
    options.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command."""
    keys = lookup.keys_of(args)
    with session.open_namespace(args) as (_, ns):
        if args.name is not None:
            head = fetching.read_head(ns, args.name, args.deadline)
            keys = fetching.read_keys(ns, head, args.name, args.deadline)
        quotes = [
            _quote(ns, keys[at : at + limits.BLOCKS_PER_FETCH_MAX], args.deadline)
            for at in range(0, len(keys), limits.BLOCKS_PER_FETCH_MAX)
        ]
    tiers = [tier for quote in quotes for tier in quote.tiers]
    here = len(tiers) - tiers.count(Tier.NONE)
    data: dict[str, Any] = {
        "asked": len(keys),
        "prefix_blocks": _prefix(tiers),
        "in_memory": tiers.count(Tier.MEMORY),
        "on_flash": tiers.count(Tier.FLASH),
        "missing": tiers.count(Tier.NONE),
        "sealed_bytes": sum(quote.sealed_bytes for quote in quotes),
        "flash_bytes": sum(quote.flash_bytes for quote in quotes),
        "wait_ns": quotes[0].wait_ns if quotes else 0,
        "expected_ns": sum(quote.expected_ns for quote in quotes),
        "high_ns": sum(quote.high_ns for quote in quotes),
        "parts": [
            {"wait_ns": q.wait_ns, "memory_ns": q.memory_ns, "flash_ns": q.flash_ns,
             "expected_ns": q.expected_ns, "high_ns": q.high_ns, "blocks": len(q.tiers)}
            for q in quotes
        ],
    }  # fmt: skip
    lines = [
        f"{here:,} of {output.plural(len(keys), 'block')} would be granted: "
        f"{data['in_memory']:,} from memory, {data['on_flash']:,} from flash, "
        f"{output.size(data['sealed_bytes'])}"
    ]
    if here:
        first, all_of_it, most = (
            output.duration(data[name]) for name in ("wait_ns", "expected_ns", "high_ns")
        )
        lines.append(
            f"expected in {all_of_it}, nine of ten within {most}; the first after {first} at least"
        )
    output.answer(args.json, data, lines)
    return 0 if here == len(keys) else 1


def _quote(ns: SyncNamespace, keys: list[bytes], deadline_ns: int) -> QuoteResult:
    """Raises: Unreachable, CliError where there is no quote."""
    quote = ns.quote(keys, prefix=False, deadline_ns=deadline_ns)
    if quote.complete:
        return quote
    if not ns.exists(keys[:1], deadline_ns=deadline_ns).complete:
        raise Unreachable("a shard did not answer", hint="`entresol doctor` tells which and why")
    raise CliError(
        "a shard gave no quote",
        hint="its daemon is older than quotes, or too busy: try again",
        status=Status.UNSUPPORTED,
    )


def _prefix(tiers: list[Tier]) -> int:
    return tiers.index(Tier.NONE) if Tier.NONE in tiers else len(tiers)
