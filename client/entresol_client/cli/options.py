"""Arguments that several commands share, and how their values are read.

Invariant: light: nothing here imports numpy, cryptography or grpc before a command runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entresol_client.cli.errors import UsageProblem
from entresol_proto import limits, units
from entresol_proto.seal.dtypes import DType, own_name

if TYPE_CHECKING:
    from entresol_client.config import ClientConfig, ShardAddress
    from entresol_proto.ids import NamespaceDescriptor

HELP_COLUMNS_MIN = 60
HELP_COLUMNS_MAX = 98
_TIMES_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "": 10**9}
_QUANTITY_CHARS_MAX = 32
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")

MODEL_DEFAULT = "entresol-cli"
DTYPE_DEFAULT = "opaque"


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help that fits beside an editor, whatever the terminal's width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=_columns())


def _columns() -> int:
    found = shutil.get_terminal_size().columns
    return max(HELP_COLUMNS_MIN, min(found, HELP_COLUMNS_MAX))


def _paragraphs(text: str) -> str:
    """Text, each paragraph filled anew for this terminal."""
    parts = (textwrap.fill(" ".join(part.split()), _columns()) for part in text.split("\n\n"))
    return "\n\n".join(parts)


def command(
    subparsers: Any,
    name: str,
    short: str,
    *,
    about: str = "",
    examples: str = "",
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """A subcommand's parser, in the form they all have. `usage`: where naming every option there
    would bury the ones that matter."""
    text = _paragraphs(f"{short[0].upper()}{short[1:]}.\n\n{about}".strip())
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=short,
        description=text,
        epilog=f"examples:\n{examples.rstrip()}" if examples else None,
        formatter_class=Formatter,
        usage=f"entresol {name} {usage}" if usage else None,
    )
    return parser


def add_common(parser: argparse.ArgumentParser, *, tenant: bool = True) -> None:
    """--config, --tenant, --json, --progress, --verbose."""
    group = parser.add_argument_group("common")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="client configuration (else $ENTRESOL_CONFIG, else the usual places)",
    )
    if tenant:
        group.add_argument(
            "--tenant",
            metavar="NAME",
            help="use client-NAME.toml beside the configuration that is found",
        )
    group.add_argument(
        "--json",
        action="store_true",
        help='answer in JSON, for scripts; a failure is {"error", "status", "fix"}',
    )
    group.add_argument(
        "--progress", action="store_true", help="show progress also when not on a terminal"
    )
    group.add_argument("--verbose", action="store_true", help="log what happens to standard error")


def add_admin(parser: argparse.ArgumentParser) -> None:
    """Where the operator's socket is."""
    parser.add_argument(
        "--admin-socket",
        type=Path,
        metavar="PATH",
        help="the daemon's admin socket (default: as the configuration says; without one, "
        "/run/entresol/admin.sock and those of further shards)",
    )
    add_shard(parser)


def add_shard(parser: argparse.ArgumentParser) -> None:
    """Which shard, where a command asks one."""
    parser.add_argument("--shard", metavar="NAME", help="which shard, when several are configured")


def add_namespace(parser: argparse.ArgumentParser, *, stored: bool = False) -> None:
    """Everything that names a namespace; it must agree between put and get.

    `stored`: also by its id, for commands that ask about what is stored already.
    """
    group = parser.add_argument_group(
        "namespace", "must be the same for put and get: any difference is another namespace"
    )
    if stored:
        group.add_argument(
            "--namespace",
            metavar="ID",
            help="instead of all below but --salt: its id, or how that begins, as "
            "`entresol namespaces` and `events` show it (needs gRPC)",
        )
    group.add_argument("--model", default=MODEL_DEFAULT, help="model id (default: %(default)s)")
    group.add_argument("--revision", default="main", help="model revision (default: %(default)s)")
    group.add_argument("--lora", help="LoRA adapter")
    group.add_argument("--salt", help="cache salt: separates users who must not share")
    group.add_argument(
        "--dtype",
        default=DTYPE_DEFAULT,
        help=f"{', '.join(dtype.label for dtype in DType)}; helps compression "
        "(default: %(default)s)",
    )
    for name, default, text in (
        ("block-tokens", 16, "tokens in one block"),
        ("layers", 0, "layers"),
        ("kv-heads", 0, "KV heads"),
        ("head-dim", 0, "size of a head"),
        ("tp-rank", 0, "tensor-parallel rank"),
        ("tp-world", 1, "tensor-parallel size"),
        ("pp-rank", 0, "pipeline-parallel rank"),
        ("pp-world", 1, "pipeline-parallel size"),
    ):
        group.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument("--kv-order", default="kv", help="order of K and V (default: %(default)s)")
    group.add_argument(
        "--page-layout", default="opaque", help="layout of a block (default: %(default)s)"
    )


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """How long one call to the daemon may take."""
    parser.add_argument(
        "--deadline",
        type=parse_span_ns,
        default=30 * 10**9,
        metavar="SPAN",
        help="for each call to the daemon, such as 500ms or 10s (default: 30s)",
    )


def descriptor(args: argparse.Namespace) -> NamespaceDescriptor:
    """The namespace the arguments name. Raises: BadKeyError, CliError."""
    from entresol_proto.ids import NamespaceDescriptor

    if getattr(args, "namespace", None) is not None:
        from entresol_client.cli import spaces

        return spaces.descriptor_of(args)

    return NamespaceDescriptor(
        model=args.model,
        model_revision=args.revision,
        lora=args.lora,
        cache_salt=args.salt,
        dtype=own_name(args.dtype),
        layers=args.layers,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        kv_order=args.kv_order,
        page_layout=args.page_layout,
        block_tokens=args.block_tokens,
        tp_rank=args.tp_rank,
        tp_world=args.tp_world,
        pp_rank=args.pp_rank,
        pp_world=args.pp_world,
    )


def namespace_words(args: argparse.Namespace, *, beside: Sequence[str] = ()) -> str:
    """The namespace options that are not at their default, to be repeated in a printed command;
    those in `beside` are left out.

    A salt is not repeated: what a command prints ends in logs of others.
    """
    import shlex

    words = []
    for name, default in (
        ("model", MODEL_DEFAULT), ("revision", "main"), ("lora", None), ("salt", None),
        ("dtype", DTYPE_DEFAULT), ("block_tokens", 16), ("layers", 0), ("kv_heads", 0),
        ("head_dim", 0), ("kv_order", "kv"), ("page_layout", "opaque"), ("tp_rank", 0),
        ("tp_world", 1), ("pp_rank", 0), ("pp_world", 1), ("tenant", None), ("config", None),
    ):  # fmt: skip
        value = getattr(args, name)
        if value != default and name not in beside:
            value = "SALT" if name == "salt" else value
            words.append(f" --{name.replace('_', '-')} {shlex.quote(str(value))}")
    return "".join(words)


# -- values


def parse_size(text: str) -> int:
    """ "4GiB", "4G", "100GB" or plain bytes. Raises: ArgumentTypeError."""
    try:
        return units.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole(number: str, unit: int) -> int:
    """Raises: ArgumentTypeError for more digits than any quantity has."""
    if len(number) > _QUANTITY_CHARS_MAX:
        raise argparse.ArgumentTypeError(f"{number[:20]}... has {len(number)} digits")
    return int(float(number) * unit)


def parse_block_size(text: str) -> int:
    """A size that a block may have. Raises: ArgumentTypeError."""
    found = parse_size(text)
    if not limits.BLOCK_BYTES_MIN <= found <= limits.BLOCK_BYTES_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a block size; blocks are "
            f"{limits.BLOCK_BYTES_MIN} B to {limits.BLOCK_BYTES_MAX // limits.MIB} MiB"
        )
    return found


def parse_span_ns(text: str, *, most_s: int = limits.DEADLINE_NS_MAX // 10**9) -> int:
    """ "500ms", "10s", "2min" or seconds, in ns. Raises: ArgumentTypeError."""
    match = _QUANTITY.fullmatch(text.strip())
    if not match or match[2] not in _TIMES_NS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 500ms, 10s, 2min")
    found = _whole(match[1], _TIMES_NS[match[2]])
    if not 0 < found <= most_s * 10**9:
        raise argparse.ArgumentTypeError(
            f"{text!r} is out of range; more than 0, at most {most_s} s"
        )
    return found


# -- configuration


def load_config(args: argparse.Namespace) -> ClientConfig:
    """The client configuration for these arguments. Raises: ConfigError, UsageProblem."""
    from entresol_client.config import ClientConfig

    return ClientConfig.load(config_path(args))


def is_configured(args: argparse.Namespace) -> bool:
    """True when a client configuration was named, or lies in one of the usual places. An operator
    on the daemon's machine needs none."""
    from entresol_client.config import CONFIG_ENV, default_path

    return bool(args.config or os.environ.get(CONFIG_ENV) or default_path())


def config_path(args: argparse.Namespace) -> Path:
    """Which file is the configuration. Raises: ConfigError when there is none, UsageProblem."""
    from entresol_client.config import CONFIG_ENV, ClientConfig, default_path

    named = args.config or os.environ.get(CONFIG_ENV)
    found = Path(named) if named else default_path()
    if found is None:
        ClientConfig.find()  # raises, naming every place
        raise AssertionError("a configuration appeared meanwhile")
    tenant = getattr(args, "tenant", None)
    return _for_tenant(found, tenant) if tenant else found


def _for_tenant(found: Path, tenant: str) -> Path:
    from entresol_proto.ids import check_tenant_name

    folder = found.resolve().parent
    beside = folder / f"client-{check_tenant_name(tenant)}.toml"
    if beside.is_file():
        return beside
    own = _tenant_of(found)
    if own == tenant:
        return found
    known = sorted({path.stem[len("client-") :] for path in folder.glob("client-*.toml")} | {own})
    raise UsageProblem(
        f"there is no {beside.name} beside {found}",
        hint=f"tenants with a configuration there: {', '.join(name for name in known if name)}",
    )


def _tenant_of(path: Path) -> str:
    """The tenant that a configuration's certificate names; empty when it names none."""
    from entresol_client.config import ClientConfig
    from entresol_proto.identity import tenant_from_cert
    from entresol_proto.status import EntresolError

    config = ClientConfig.load(path)
    try:
        return tenant_from_cert(config.tls.cert.read_bytes(), config.tls.trust_domain)
    except (OSError, EntresolError):
        return ""


def pick_shard(shards: Sequence[ShardAddress], name: str | None) -> ShardAddress:
    """The shard called `name`, or the only one. Raises: UsageProblem."""
    names = ", ".join(shard.name for shard in shards)
    if name is None:
        if len(shards) > 1:
            raise UsageProblem(f"{len(shards)} shards are configured", hint=f"--shard: {names}")
        return shards[0]
    for shard in shards:
        if shard.name == name:
            return shard
    raise UsageProblem(f"no shard is called {name!r}", hint=f"configured are {names}")
