"""`entresol stat`, `scrub` and `version`: what runs here, and how its flash is.

Invariant: operator's figures come over the admin socket only; without it, a tenant learns what
every tenant may know (describe), and is told where the rest is.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entresol_client.cli import options, output, rpc
from entresol_client.cli.errors import CliError, Unreachable, UsageProblem
from entresol_proto import __version__

if TYPE_CHECKING:
    from entresol_client.config import ShardAddress

RUN = Path("/run")  # where the package's units have their sockets
EXAMPLES = """\
  entresol stat
  entresol stat --json | jq .shards[0].stat.blocks
  entresol stat --admin-socket /run/entresol/admin.sock
"""
ABOUT = """\
With the admin socket (on the daemon's machine, as its user or root; the package's is found without
any configuration): sessions, blocks, memory, flash and
counters since its start. Elsewhere, over the tenant's certificate: version, state, data paths and
limits.

exit status: 0 ready, 1 not ready or refused, 2 wrong use, 3 no daemon.
"""
SCRUB_ABOUT = """\
The daemon reads all it has on flash once a day, at [flash] scrub_bytes_per_s, and drops blocks that
are damaged: each is counted, and told to whoever follows events. This begins at once, at the same
rate; `entresol stat` shows how far it is and what was found.

exit status: 0 begun or under way, 1 refused, 2 wrong use, 3 no daemon.
"""
PACKAGES = ("numpy", "cryptography", "uvloop", "zstandard", "grpcio", "protobuf", "pyarrow")


def add_parser(subparsers: Any) -> None:
    """Register the commands."""
    parser = options.command(
        subparsers, "stat", "show how the daemon is doing", about=ABOUT, examples=EXAMPLES
    )
    options.add_admin(parser)
    options.add_common(parser)
    parser.set_defaults(run=run)
    parser = options.command(
        subparsers, "scrub", "verify everything on flash now",
        about=SCRUB_ABOUT, examples="  entresol scrub\n",
    )  # fmt: skip
    options.add_admin(parser)
    options.add_common(parser)
    parser.set_defaults(run=run_scrub)
    parser = options.command(subparsers, "version", "show versions, of this side and its parts")
    parser.add_argument("--json", action="store_true", help="answer in JSON, for scripts")
    parser.set_defaults(run=run_version)


def packaged_sockets() -> Iterator[tuple[str, Path]]:
    """(unit, admin socket) of the package's daemons that run on this machine."""
    folders = [RUN / "entresol", *sorted(RUN.glob("entresol-[0-9]*"))]
    for folder in folders:
        path = folder / "admin.sock"
        try:
            found = path.is_socket()
        except PermissionError:
            found = True  # there is a daemon; that this user may not ask it is said on connecting
        if found:
            yield folder.name.replace("entresol", "entresold").replace("-", "@"), path


def admin_sockets(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """(shard, admin socket) as given, configured, or, where nothing is configured, of the package's
    daemons on this machine. Raises: UsageProblem when there is none."""
    if args.admin_socket is not None:
        yield args.shard or "", args.admin_socket
        return
    if not options.is_configured(args):
        found = list(packaged_sockets())
        if not found or args.shard:
            raise UsageProblem(
                f"no client configuration names an admin socket, and {RUN}/entresol has "
                + ("no shard names" if found else "none"),
                hint="--admin-socket PATH or --config FILE, on the daemon's machine",
            )
        yield from found
        return
    config = options.load_config(args)
    shards = [options.pick_shard(config.shards, args.shard)] if args.shard else config.shards
    found = [(shard.name, shard.admin_socket) for shard in shards if shard.admin_socket]
    if not found:
        raise UsageProblem(
            "the configuration names no admin socket",
            hint="--admin-socket PATH, on the daemon's machine; see its [listen] unix_dir",
        )
    for name, path in found:
        assert path is not None, "filtered above"
        yield name, path


def one_admin_socket(args: argparse.Namespace) -> Path:
    """The admin socket of the shard that is meant. Raises: UsageProblem."""
    found = list(admin_sockets(args))
    if len(found) > 1:
        if options.is_configured(args):
            hint = "--shard: " + ", ".join(name for name, _ in found)
        else:
            hint = "--admin-socket: " + ", ".join(str(path) for _, path in found)
        raise UsageProblem(f"{len(found)} shards have an admin socket", hint=hint)
    return found[0][1]


def run(args: argparse.Namespace) -> int:
    """The command."""
    rpc.modules()
    rows: list[dict[str, Any]] = []
    asked = _asked(args)
    for name, ask in asked:
        try:
            rows.append(ask())
        except CliError as error:  # one that does not answer hides no other
            if len(asked) == 1:
                raise
            rows.append({"shard": name, "error": Exception.__str__(error)})
    lines: list[str] = []
    for row in rows:
        lines += [*([""] if lines else []), *_lines(row)]
    output.answer(args.json, {"shards": rows}, lines)
    if all("error" in row for row in rows):
        raise Unreachable("no shard answers", hint="`entresol doctor` checks every step")
    return 0 if all(row.get("state") == "serving" for row in rows) else 1


def _asked(args: argparse.Namespace) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names and how each is asked. Raises: UsageProblem, ConfigError."""
    if args.admin_socket is not None or not options.is_configured(args):
        return [(name, partial(_over_socket, path)) for name, path in admin_sockets(args)]
    config = options.load_config(args)
    shards = [options.pick_shard(config.shards, args.shard)] if args.shard else config.shards
    return [(shard.name, partial(_of_shard, config, shard)) for shard in shards]


def _of_shard(config: Any, shard: ShardAddress) -> dict[str, Any]:
    if shard.admin_socket is not None and _may_open(shard.admin_socket):
        return _over_socket(shard.admin_socket)
    _, pb, stubs = rpc.modules()
    with rpc.tenant_channel(config, shard) as channel:
        found = rpc.call(stubs.DescribeStub(channel).Describe, pb.DescribeRequest())
    return _description(found)


def _may_open(path: Path) -> bool:
    import os

    try:
        return path.exists() and os.access(path, os.W_OK)
    except OSError:
        return False


def _over_socket(path: Path) -> dict[str, Any]:
    _, pb, stubs = rpc.modules()
    with rpc.operator_channel(path) as channel:
        found = rpc.call(stubs.DescribeStub(channel).Describe, pb.DescribeRequest())
        stat = rpc.call(stubs.AdminStub(channel).Stat, pb.StatRequest())
    row = _description(found)
    row["stat"] = {
        field.name: getattr(stat, field.name)
        for field in stat.DESCRIPTOR.fields
        if field.name not in ("state", "reasons_not_ready")
    }
    row["reasons_not_ready"] = list(stat.reasons_not_ready)
    return row


def _description(found: Any) -> dict[str, Any]:
    _, pb, _ = rpc.modules()
    return {
        "shard": found.shard,
        "version": found.version,
        "state": pb.State.Name(found.state).removeprefix("STATE_").lower(),
        "incarnation": f"{found.incarnation:016x}",
        "control_address": found.control_address,
        "data_addresses": list(found.data_addresses),
        "fabrics": list(found.fabrics),
        "tenant": found.tenant or None,
        "limits": {limit.name: limit.value for limit in found.limits},
    }


def _lines(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [f"shard {row['shard']}: {row['error']}"]
    stat = row.get("stat")
    head = f"shard {row['shard']}  {row['state']}  entresol {row['version']}"
    if stat is not None:
        head += f"  up {output.duration(stat['uptime_ns'])}"
    lines = [head, *(f"  not ready: {reason}" for reason in row.get("reasons_not_ready", ()))]
    rows = [("control", row["control_address"]), ("data paths", ", ".join(row["fabrics"]))]
    if stat is None:
        size_max = row["limits"].get("block_bytes_max", 0)
        rows.append(("tenant", row["tenant"] or "(operator)"))
        rows.append(("block size", f"up to {output.size(size_max)}"))
        lines += [f"  {line}" for line in output.pairs(rows)]
        lines.append("  memory, flash and counters: on the daemon's machine, see --admin-socket")
        return lines
    rows += _stat_rows(stat)
    return lines + [f"  {line}" for line in output.pairs(rows)]


def _stat_rows(stat: dict[str, Any]) -> list[tuple[str, str]]:
    def used(of: str, what: str) -> str:
        have, most = stat[f"{of}_{what}_bytes"], stat[f"{of}_capacity_bytes"]
        share = f" ({100 * have / most:.1f} %)" if most else ""
        return f"{output.size(have)} of {output.size(most)}{share}"

    asked = stat["blocks_served"] + stat["blocks_missed"]
    hits = f", {100 * stat['blocks_served'] / asked:.1f} % hits" if asked else ""
    ratio = stat["plain_bytes"] / stat["stored_bytes"] if stat["stored_bytes"] else 0.0
    sealed = f"; {output.size(stat['plain_bytes'])} sealed into {output.size(stat['stored_bytes'])}"
    corrupt = stat["blocks_corrupt"]
    return [
        ("hosts", f"{output.plural(stat['sessions'], 'session')}, "
                  f"{output.plural(stat['leases'], 'lease')}"),
        ("blocks", f"{stat['blocks']:,}"),
        ("memory", used("dram", "used")),
        ("flash", used("flash", "live") + f", {output.size(stat['flash_written_bytes'])} written"
                  + (", O_DIRECT" if stat["flash_direct"] else ", through the page cache")),
        ("read", f"{stat['blocks_served']:,} served, {stat['blocks_missed']:,} missed{hits}"),
        ("stored", output.plural(stat["blocks_stored"], "block")
                   + (f"{sealed} ({ratio:.2f}:1)" if ratio else "")),
        ("corrupt", f"{corrupt:,}" + ("  (dropped, never served)" if corrupt else "")),
        ("scrub", _scrub_words(stat)),
    ]  # fmt: skip


def _scrub_words(stat: dict[str, Any]) -> str:
    if stat["scrub_state"] == "off":
        return "off"
    words = [output.plural(stat["scrub_cycles"], "cycle") + " done"]
    if stat["scrub_cycles"]:
        words.append(f"the last one took {output.duration(stat['scrub_cycle_ns'])}")
    if stat["scrub_state"] == "running":
        words.append(f"{100 * stat['scrub_share']:.0f} % of the next")
    found = stat["scrub_found"]
    words.append(f"{found:,} bad dropped" if found else "nothing found")
    return ", ".join(words)


def run_scrub(args: argparse.Namespace) -> int:
    """The command."""
    _, pb, stubs = rpc.modules()
    with rpc.operator_channel(one_admin_socket(args)) as channel:
        admin = stubs.AdminStub(channel)
        reply = rpc.call(admin.Scrub, pb.ScrubRequest())
        stat = rpc.call(admin.Stat, pb.StatRequest())
    data = {"was_running": reply.was_running, "share": stat.scrub_share}
    told = f"it was under way, {100 * stat.scrub_share:.0f} % done"
    output.answer(args.json, data, [told if reply.was_running else "it begins"])
    return 0


def run_version(args: argparse.Namespace) -> int:
    """The command."""
    import importlib.metadata

    from entresol_proto.wire.opening import PROTOCOL_MAX, PROTOCOL_MIN

    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    data = {
        "entresol": __version__,
        "protocol_min": PROTOCOL_MIN,
        "protocol_max": PROTOCOL_MAX,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "packages": versions,
    }
    spoken = f"{PROTOCOL_MIN} to {PROTOCOL_MAX}" if PROTOCOL_MIN != PROTOCOL_MAX else PROTOCOL_MAX
    rows = [
        ("entresol", __version__),
        ("protocol", str(spoken)),
        ("python", f"{data['python']} on {data['platform']}"),
        *((name, found or "not installed") for name, found in versions.items()),
    ]
    output.answer(args.json, data, output.pairs(rows))
    return 0
