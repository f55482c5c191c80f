"""`entresol namespaces`, and a namespace by its id for the commands that ask about stored blocks.

Invariant: a descriptor is rebuilt exactly as the host gave it or not at all: a daemon never tells a
salt, and of a host-sealed namespace nothing, so both have to be given here.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from entresol_client.cli import options, output, rpc
from entresol_client.cli.errors import CliError, UsageProblem
from entresol_proto.status import Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from entresol_client.config import ClientConfig, ShardAddress
    from entresol_proto.ids import NamespaceDescriptor

ID_BYTES = 16
SHORT_CHARS = 8
# Fields of a descriptor that the daemon tells as they are.
_TOLD = (
    "model", "model_revision", "dtype", "layers", "kv_heads", "head_dim", "kv_order",
    "page_layout", "block_tokens", "tp_rank", "tp_world", "pp_rank", "pp_world",
)  # fmt: skip

ABOUT = """\
Blocks of one model, layout and salt are a namespace; a get under another one is a miss. This lists
what a shard knows of the tenant: how many blocks are stored now, what the blocks are, which codec
was chosen last for a session that opened it and what decided, and what blocks stored since the
daemon started became of it (plain over sealed bytes).

Ids differ from shard to shard. --namespace of explain, exists and quote takes one.
"""
EXAMPLES = """\
  entresol namespaces
  entresol namespaces --tenant other --json
  entresol namespaces --admin-socket /run/entresol/admin.sock --tenant other
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "namespaces", "list what models and layouts blocks are stored of",
        about=ABOUT, examples=EXAMPLES,
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="also those without a block")
    options.add_admin(parser)
    options.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command."""
    rows = _of_socket(args) if args.admin_socket is not None else _of_shards(args)
    shown = [(shard, row) for shard, row in rows if row.blocks or args.all]
    data = {"namespaces": [_as_dict(shard, row) for shard, row in shown]}
    several = len({shard for shard, _ in shown}) > 1
    grid = [_cells(shard, row, several=several) for shard, row in shown]
    columns = ["SHARD"] if several else []
    columns += ["ID", "BLOCKS", "MODEL", "REVISION", "DTYPE", "TOKENS", "RANK", "SALT", "CODEC"]
    columns += ["RATIO"]
    lines = (
        output.table(columns, grid, right=("l" if several else "") + "lrlllrlllr") if grid else []
    )
    left = len(rows) - len(shown)
    note = f", {left:,} more without a block: --all" if left else ""
    lines.append(f"{output.plural(len(shown), 'namespace')}{note}")
    output.answer(args.json, data, lines)
    return 0


def _of_socket(args: argparse.Namespace) -> list[tuple[str, Any]]:
    if not args.tenant:
        raise UsageProblem("--admin-socket needs --tenant: namespaces are of one tenant")
    with rpc.operator_channel(args.admin_socket) as channel:
        return [("", row) for row in _ask(channel, args.tenant)]


def _of_shards(args: argparse.Namespace) -> list[tuple[str, Any]]:
    config = options.load_config(args)
    shards = [options.pick_shard(config.shards, args.shard)] if args.shard else config.shards
    return [(shard.name, row) for shard in shards for row in of_shard(config, shard)]


def of_shard(config: ClientConfig, shard: ShardAddress) -> list[Any]:
    """The tenant's namespaces on one shard. Raises: CliError."""
    with rpc.tenant_channel(config, shard) as channel:
        return _ask(channel, "")


def _ask(channel: Any, tenant: str) -> list[Any]:
    _, pb, stubs = rpc.modules()
    request = pb.NamespacesRequest(tenant=tenant)
    return list(rpc.call(stubs.EventsStub(channel).Namespaces, request).namespaces)


def _as_dict(shard: str, row: Any) -> dict[str, Any]:
    names = {field.name for field in row.DESCRIPTOR.fields} - {"namespace_id"}
    told = {name: getattr(row, name) for name in sorted(names)}
    for name in ("lora", "codec", "codec_why"):
        told[name] = told[name] or None
    return {"shard": shard or None, "namespace_id": row.namespace_id.hex(), **told}


def _cells(shard: str, row: Any, *, several: bool) -> tuple[str, ...]:
    name = row.namespace_id.hex()[:SHORT_CHARS]
    ratio = f"{row.plain_bytes / row.sealed_bytes:.2f}" if row.sealed_bytes else "-"
    codec = f"{row.codec} ({row.codec_why.replace('_', ' ')})" if row.codec else "-"
    ranks = row.tp_world * row.pp_world
    rank = f"{row.pp_rank * row.tp_world + row.tp_rank} of {ranks}" if ranks > 1 else "-"
    if row.host_sealed:
        what: tuple[str, ...] = ("sealed by its hosts", "-", "-", f"{row.block_tokens}", "-", "-")
    else:
        model = f"{row.model} + {row.lora}" if row.lora else row.model
        salt = "yes" if row.salted else "-"
        tokens = f"{row.block_tokens}"
        what = (_cut(model, 40), _cut(row.model_revision, 24), row.dtype, tokens, rank, salt)
    cells = (name, f"{row.blocks:,}", *what, codec, ratio)
    return (shard, *cells) if several else cells


def _cut(text: str, most: int) -> str:
    """Printable, and not endless: a model's name comes from a host."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= most else clean[: most - 1] + "…"


# -- by id


def descriptor_of(args: argparse.Namespace) -> NamespaceDescriptor:
    """The descriptor behind --namespace, with --salt where it has one. Raises: CliError."""
    wanted = args.namespace.lower().removesuffix("…")
    if not wanted or len(wanted) > 2 * ID_BYTES or set(wanted) - set("0123456789abcdef"):
        raise UsageProblem(
            f"--namespace {args.namespace!r} is no id",
            hint="`entresol namespaces` lists them: hex digits, as many as make it unique",
        )
    others = options.namespace_words(args, beside=("salt", "tenant", "config"))
    if others:
        raise UsageProblem(f"--namespace says all of{others}", hint="leave one of them out")
    config = options.load_config(args)
    found = [
        row
        for shard in config.shards
        for row in of_shard(config, shard)
        if row.namespace_id.hex().startswith(wanted)
    ]
    if any(row.host_sealed for row in found):
        raise UsageProblem(
            f"namespace {wanted} is sealed by its hosts: the daemon does not know what it is",
            hint="give the namespace options its blocks are stored with, and tenant_key",
        )
    kinds = _kinds(found)
    if len(kinds) != 1:
        raise CliError(
            f"no namespace of this tenant begins with {wanted}"
            if not kinds
            else f"{len(kinds)} namespaces of this tenant begin with {wanted}",
            hint="`entresol namespaces --all` lists them; give more digits",
            status=Status.MISS,
        )
    ((descriptor, salted),) = kinds
    if salted and not args.salt:
        raise UsageProblem(
            f"namespace {wanted} has a cache salt, which daemons never tell", hint="add --salt"
        )
    if args.salt and not salted:
        raise UsageProblem(f"namespace {wanted} has no cache salt", hint="leave --salt out")
    return replace(descriptor, cache_salt=args.salt or None)


def _kinds(found: Iterable[Any]) -> set[tuple[NamespaceDescriptor, bool]]:
    from entresol_proto.ids import NamespaceDescriptor

    return {
        (
            NamespaceDescriptor(
                **{name: getattr(row, name) for name in _TOLD}, lora=row.lora or None
            ),
            row.salted,
        )
        for row in found
    }
