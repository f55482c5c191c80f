"""`entresol explain`: why blocks are here or missing, one by one or as the prefix of a prompt.

Invariant: of a prompt only the leading run of blocks that are here counts as usable, as for an
engine; what lies behind the first missing one is told apart from it, because storing that one again
brings it back.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from entresol_client.cli import lookup, objects, options, output, prompts, session
from entresol_client.cli.errors import Unreachable
from entresol_client.cli.prompts import Asked

if TYPE_CHECKING:
    from entresol_client.results import Explanation
    from entresol_client.sync import SyncNamespace
    from entresol_proto.ids import NamespaceDescriptor

RUNS_SHOWN_MAX = 40

ABOUT = """\
Tells for every block whether it is here, and if not, why: never stored, evicted, forgotten,
damaged, erased, stored under another model, layout or salt, not admitted, or lost; and when, if
that is known.

Of a prompt (several KEYs, --hashes, --tokens) it also tells how many of the leading blocks an
engine could use, which missing block ends them, and what lies behind it, unused until that block is
stored again.

An engine's blocks are in a namespace of its own: `entresol namespaces` lists them, --namespace
takes the id of one.

exit status: 0 all there, 1 something is missing, 2 wrong use, 3 no daemon.
"""
EXAMPLES = """\
  entresol explain --name notes
  entresol explain 0011223344556677 --namespace 8f3a
  entresol explain --hashes prompt.txt --engine vllm --namespace 8f3a
  entresol explain --tokens ids.json --engine kvbm --namespace 8f3a --json
  entresol explain --tokens ids.json --engine sglang --namespace 8f3a
  entresol explain --hashes - --namespace 8f3a < hashes.txt
"""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What of a prompt's blocks can be used.

    Attributes:
        asked: all blocks.
        usable: leading blocks that are here.
        missing: blocks that are not here, or of which nothing is known.
        behind: blocks that are here, behind the first missing one.
    """

    asked: int
    usable: int
    missing: int
    behind: int


def prefix_of(here: Sequence[bool]) -> Prefix:
    """Of what is here, in prefix order. Pure."""
    usable = here.index(False) if False in here else len(here)
    present = sum(here)
    return Prefix(len(here), usable, len(here) - present, present - usable)


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "explain", "tell why blocks are here or missing", about=ABOUT,
        examples=EXAMPLES,
        usage="(KEY ... | --key K | --name NAME | --hashes FILE | --tokens FILE) [options]",
    )  # fmt: skip
    prompts.add_options(parser)
    options.add_deadline(parser)
    options.add_namespace(parser, stored=True)
    options.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command."""
    prompts.check(args)
    descriptor = options.descriptor(args)
    if args.name is not None:
        asked = Asked([f"the name {args.name!r}"], [objects.name_key(args.name)], prefix=False)
    else:
        asked = prompts.read(args, descriptor.block_tokens)
    with session.open_client(args) as client:
        ns = client.namespace(descriptor)
        rows = ns.explain(asked.keys, deadline_ns=args.deadline)
        if args.name is not None and session.is_here(rows[0]):
            asked, rows = _whole_file(ns, asked, rows, args)
    here = [session.is_here(row) for row in rows]
    data, lines = _answer(args, descriptor, asked, rows, here)
    output.answer(args.json, data, lines)
    if any(row.reason is None and row.status in session.OUTAGES for row in rows):
        raise Unreachable("a shard did not answer", hint="`entresol doctor` tells which and why")
    return 0 if all(here) else 1


def _whole_file(
    ns: SyncNamespace, asked: Asked, rows: list[Explanation], args: argparse.Namespace
) -> tuple[Asked, list[Explanation]]:
    """The blocks behind a name, after its head."""
    blocks = lookup.file_keys(ns, args)
    if blocks:
        rows = rows + ns.explain(blocks, deadline_ns=args.deadline)
    labels = [f"block {number}" for number in range(len(blocks))]
    return Asked(asked.labels + labels, asked.keys + blocks, prefix=False), rows


def _answer(
    args: argparse.Namespace,
    descriptor: NamespaceDescriptor,
    asked: Asked,
    rows: list[Explanation],
    here: list[bool],
) -> tuple[dict[str, Any], list[str]]:
    """For scripts, and for people."""
    prefix = prefix_of(here) if asked.prefix else None
    usable = prefix.usable if prefix is not None else 0
    known = args.namespace is not None or any(here)  # else block_tokens is only a default
    tokens = asked.block_tokens or (descriptor.block_tokens if known else 0)
    data: dict[str, Any] = {
        "exists": all(here),
        "reasons": dict(Counter(_label(row) for row in rows)),
        "prefix": prefix and _prefix_data(prefix, tokens, asked, rows),
        "keys": [
            {
                "what": label,
                "key": key.hex(),
                "reason": row.reason.label if row.reason is not None else None,
                "when_unix_ns": row.when_unix_ns or None,
                "shard": row.shard,
                "status": row.status.label,
                "text": session.sentence(row)[0],
                **({"usable": number < usable} if prefix is not None else {}),
            }
            for number, (label, key, row) in enumerate(
                zip(asked.labels, asked.keys, rows, strict=True)
            )
        ],
    }
    lines = _explained(asked, rows, usable if prefix is not None else None)
    if prefix is not None:
        lines = [*_prefix_lines(prefix, tokens, asked, rows), *lines]
    return data, lines


def _label(row: Explanation) -> str:
    return row.reason.label if row.reason is not None else row.status.label


def _prefix_data(
    prefix: Prefix, tokens: int, asked: Asked, rows: list[Explanation]
) -> dict[str, Any]:
    data: dict[str, Any] = {
        "asked_blocks": prefix.asked,
        "usable_blocks": prefix.usable,
        "missing_blocks": prefix.missing,
        "unused_blocks": prefix.behind,
        "block_tokens": tokens or None,
        "usable_tokens": prefix.usable * tokens if tokens else None,
        "ends_at": None,
    }
    if prefix.missing:
        row = rows[prefix.usable]
        data["ends_at"] = {
            "block": prefix.usable,
            "key": asked.keys[prefix.usable].hex(),
            "reason": _label(row),
            "when_unix_ns": row.when_unix_ns or None,
        }
    return data


def _prefix_lines(prefix: Prefix, tokens: int, asked: Asked, rows: list[Explanation]) -> list[str]:
    def words(blocks: int) -> str:
        return f" ({blocks * tokens:,} tokens)" if tokens else ""

    line = f"usable prefix: {prefix.usable:,} of {output.plural(prefix.asked, 'block')}"
    lines = [line + words(prefix.usable)]
    if prefix.missing:
        key = output.short_key(asked.keys[prefix.usable])
        why = session.sentence(rows[prefix.usable])[0]
        begin = "it ends before" if prefix.usable else "an engine would begin anew at"
        lines.append(f"{begin} block {prefix.usable} ({key}), which {why}")
    if prefix.behind:
        lines.append(
            f"behind it {output.plural(prefix.behind, 'block')}{words(prefix.behind)} "
            f"{'is' if prefix.behind == 1 else 'are'} here and of no use without it"
        )
    return lines


def _run(first: str, last: str) -> str:
    """ "block 3" and "block 7" in one."""
    word, _, number = last.rpartition(" ")
    if word and first.startswith(f"{word} "):
        return f"{word}s {first[len(word) + 1 :]} to {number}"
    return f"{first} to {last}"


def _explained(asked: Asked, rows: list[Explanation], usable: int | None) -> list[str]:
    """A sentence per block, or per run of blocks of which the same is true."""
    lines: list[str] = []
    fixes: list[str] = []
    at = runs = 0
    while at < len(rows):
        end = at + 1
        if asked.prefix or at:  # the head of a name stands for itself
            while end < len(rows) and end != usable and _label(rows[end]) == _label(rows[at]):
                end += 1
        text, fix = session.sentence_of_run(rows[at:end])
        labels = asked.labels
        subject = labels[at] if end == at + 1 else _run(labels[at], labels[end - 1])
        unused = usable is not None and at >= usable and session.is_here(rows[at])
        runs += 1
        if runs <= RUNS_SHOWN_MAX:
            lines.append(f"{subject} {text}{', unused' if unused else ''}")
        if fix and fix not in fixes:
            fixes.append(fix)
        at = end
    if runs > RUNS_SHOWN_MAX:
        lines.append(f"and {runs - RUNS_SHOWN_MAX:,} more runs of blocks; --json has all")
    return lines + [f"  fix: {fix}" for fix in fixes]
