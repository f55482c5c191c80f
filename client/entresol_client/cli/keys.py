"""`entresol key`, `unlock`, `change-kek`: keys the tenant keeps, and the daemon's own way in.

Invariant: no secret is ever printed; a file that exists is never replaced by another key.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entresol_client.cli import options, output, rpc
from entresol_client.cli.errors import CliError
from entresol_client.cli.overview import admin_sockets
from entresol_proto.status import Status

if TYPE_CHECKING:
    from entresol_client.tenant_key import TenantKey

KEY_DEADLINE_S = 60.0

ABOUT = """\
A tenant that names a key file in its client configuration (tenant_key) seals and opens its blocks
on its own hosts: daemons store and serve what they cannot open, and know neither model, prompt nor
token ids. Every host of the tenant needs the same file. Who loses it loses the blocks.

exit status: 0 done, 1 refused, 2 wrong use.
"""
EXAMPLES = """\
  entresol key new /etc/entresol/tenant.key      then tenant_key = "tenant.key" in client.toml
  entresol key rotate /etc/entresol/tenant.key   new blocks under a new version; copy it again
  entresol key show /etc/entresol/tenant.key     versions and fingerprints, no secrets
  entresol key retire /etc/entresol/tenant.key 1 what version 1 sealed reads as a miss
"""
UNLOCK_ABOUT = """\
A daemon that starts without its key-encryption key is locked: it serves nothing, formats nothing
and drops nothing. This gives it the key, without a restart. SIGHUP does the same. The daemon reads
the file itself: its user must be able to, and nobody else.

exit status: 0 unlocked (or never locked), 1 refused, 2 wrong use, 3 no daemon.
"""
UNLOCK_EXAMPLES = """\
  install -o entresol -m 0600 /etc/entresol/kek /run/entresol/kek
  entresol unlock /run/entresol/kek
  rm /run/entresol/kek
"""
CHANGE_ABOUT = """\
Wraps every key of the daemon anew under the key-encryption key in the file, and destroys what was
wrapped under the old one. Blocks are not touched, and it serves on meanwhile. All shards that are
configured are asked, or all of the package that run on this machine: they share one key. Keep the
old file until each has it; then the new key belongs where the next start looks for it: what [keys]
kek_file names, or under systemd what LoadCredential= of the unit names. For one that is stopped,
`entresold --config FILE rewrap NEW-KEK-FILE` does the same.

The daemon reads the file itself, as its own user: /etc/entresol/kek of the package is root's, so a
key is shown to it under /run/entresol for as long as this takes.

exit status: 0 done, 1 refused, 2 wrong use, 3 no daemon.
"""
CHANGE_EXAMPLES = """\
  entresold keygen /etc/entresol/kek.new
  install -o entresol -m 0600 /etc/entresol/kek.new /run/entresol/kek.new
  entresol change-kek /run/entresol/kek.new
  rm /run/entresol/kek.new
  mv /etc/entresol/kek.new /etc/entresol/kek
"""


def add_parser(subparsers: Any) -> None:
    """Register the commands."""
    parser = options.command(
        subparsers, "key", "make and rotate keys that the tenant keeps to itself",
        about=ABOUT, examples=EXAMPLES,
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, help="what to do")
    for name, short, run in (
        ("new", "make a key file, mode 0600", run_new),
        ("rotate", "add a version, under which new blocks are sealed", run_rotate),
        ("retire", "take an older version out, for good", run_retire),
        ("show", "list the versions in a key file", run_show),
    ):
        more = " 1" if name == "retire" else ""
        verb = options.command(
            verbs, name, short, examples=f"  entresol key {name} tenant.key{more}\n"
        )
        verb.add_argument("file", type=Path, metavar="FILE", help="the key file")
        if name == "retire":
            verb.add_argument("version", type=int, metavar="VERSION", help="which one")
        verb.add_argument("--json", action="store_true", help="answer in JSON, for scripts")
        verb.set_defaults(run=run)
    for name, short, about, examples, run in (
        ("unlock", "give a locked daemon its key-encryption key", UNLOCK_ABOUT, UNLOCK_EXAMPLES,
         run_unlock),
        ("change-kek", "wrap the daemon's keys under another key", CHANGE_ABOUT, CHANGE_EXAMPLES,
         run_change_kek),
    ):  # fmt: skip
        optional = name == "unlock"
        command = options.command(subparsers, name, short, about=about, examples=examples)
        where = "on the daemon's machine" + ("; default: its [keys] kek_file" if optional else "")
        command.add_argument(
            "file", metavar="FILE", nargs="?" if optional else None, help=f"KEK file {where}"
        )
        options.add_admin(command)
        options.add_common(command, tenant=False)
        command.set_defaults(run=run)


def _told(key: TenantKey, path: Path) -> dict[str, Any]:
    return {
        "file": str(path),
        "active": key.active,
        "versions": [
            {
                "version": number,
                "fingerprint": version.fingerprint,
                "created_unix_s": version.created_unix_s,
            }
            for number, version in sorted(key.versions.items())
        ],
    }


def run_new(args: argparse.Namespace) -> int:
    """The verb."""
    from entresol_client.tenant_key import TenantKey

    key = TenantKey.generate(int(time.time()))
    key.save(args.file, new=True)
    lines = [
        f"wrote tenant key {key.versions[1].fingerprint} to {args.file} (mode 0600)",
        "  copy it to every host of the tenant and name it in its client.toml: tenant_key = ...",
        "  keep a copy elsewhere: without it the blocks sealed under it are lost",
    ]
    output.answer(args.json, _told(key, args.file), lines)
    return 0


def run_rotate(args: argparse.Namespace) -> int:
    """The verb."""
    from entresol_client.tenant_key import TenantKey

    key = TenantKey.change(args.file, lambda old: old.rotated(int(time.time())))
    lines = [
        f"version {key.active} ({key.versions[key.active].fingerprint}) seals from now on",
        "  copy the file to every host: one that has only the old file misses the new blocks",
    ]
    output.answer(args.json, _told(key, args.file), lines)
    return 0


def run_retire(args: argparse.Namespace) -> int:
    """The verb."""
    from entresol_client.tenant_key import TenantKey

    key = TenantKey.change(args.file, lambda old: old.retired(args.version))
    lines = [f"version {args.version} is out: what it sealed reads as a miss, until it is evicted"]
    output.answer(args.json, _told(key, args.file), lines)
    return 0


def run_show(args: argparse.Namespace) -> int:
    """The verb."""
    from entresol_client.tenant_key import TenantKey

    data = _told(TenantKey.load(args.file), args.file)
    grid = [
        (
            str(row["version"]), row["fingerprint"],
            output.local_time(row["created_unix_s"] * 10**9),
            "seals" if row["version"] == data["active"] else "opens",
        )
        for row in data["versions"]
    ]  # fmt: skip
    output.answer(
        args.json, data, output.table(("VERSION", "FINGERPRINT", "CREATED", ""), grid, right="r   ")
    )
    return 0


def run_unlock(args: argparse.Namespace) -> int:
    """The command."""
    _, pb, stubs = rpc.modules()
    request = pb.UnlockRequest(kek_file=_absolute(args.file))

    def unlock(channel: Any) -> tuple[dict[str, Any], str]:
        reply = rpc.call(stubs.AdminStub(channel).Unlock, request, timeout_s=KEY_DEADLINE_S)
        state = pb.State.Name(reply.state).removeprefix("STATE_").lower()
        if state == "locked":
            raise CliError("it is still locked", hint="see the daemon's log", status=Status.LOCKED)
        told = f"unlocked with KEK {reply.kek_id}; it is {state}"
        return {"state": state, "kek_id": reply.kek_id}, told

    _at_every_shard(args, unlock)
    return 0


def run_change_kek(args: argparse.Namespace) -> int:
    """The command."""
    _, pb, stubs = rpc.modules()
    request = pb.ChangeKekRequest(kek_file=_absolute(args.file))

    def change(channel: Any) -> tuple[dict[str, Any], str]:
        reply = rpc.call(stubs.AdminStub(channel).ChangeKek, request, timeout_s=KEY_DEADLINE_S)
        told = f"every key is wrapped under KEK {reply.new_kek_id} now (it was {reply.old_kek_id})"
        return {"old_kek_id": reply.old_kek_id, "new_kek_id": reply.new_kek_id}, told

    _at_every_shard(
        args,
        change,
        "  before a daemon starts again this key must be what [keys] kek_file names, or under",
        "  systemd what the unit loads (/etc/entresol/kek); destroy the old one when every shard",
        "  of the machine has the new one",
    )
    return 0


def _at_every_shard(
    args: argparse.Namespace, ask: Callable[[Any], tuple[dict[str, Any], str]], *after: str
) -> None:
    """Ask each shard that is meant, one after the other, and answer with what each said. One that
    fails keeps no other from its turn. Raises: CliError when one failed, UsageProblem."""
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    failed: list[tuple[str, CliError]] = []
    meant = list(admin_sockets(args))
    for name, path in meant:
        try:
            with rpc.operator_channel(path) as channel:
                row, told = ask(channel)
        except CliError as error:
            failed.append((name, error))
            continue
        rows.append({"shard": name, **row})
        lines.append(f"{name}: {told}" if len(meant) > 1 else told)
    if failed and len(meant) == 1:
        raise failed[0][1]
    output.answer(args.json, {"shards": rows}, [*lines, *(after if rows and not failed else ())])
    if failed:
        why = "; ".join(f"{name}: {Exception.__str__(error)}" for name, error in failed)
        raise CliError(
            f"{len(failed)} of {len(meant)} shards were not reached or refused: {why}",
            hint="keep both keys, and ask these again: --admin-socket PATH, or --shard NAME",
            status=failed[0][1].status,
        )


def _absolute(file: str | None) -> str:
    """As the daemon, in another folder, would find it. `$CREDENTIALS_DIRECTORY/...` stays."""
    return "" if file is None else file if file.startswith("$") else str(Path(file).absolute())
