"""`entresol tenant`: who may use the daemon, and how much. The operator's, over the admin socket.

Invariant: erasing happens only after the tenant's name was typed once more (or --yes), because it
cannot be undone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from entresol_client.cli import options, output, rpc
from entresol_client.cli.errors import CliError, UsageProblem
from entresol_client.cli.overview import one_admin_socket
from entresol_proto import limits, units
from entresol_proto.ids import BadKeyError, check_tenant_name
from entresol_proto.status import Status

ERASE_DEADLINE_S = 120.0
_UNIT_SOCKET = re.compile(r"/run/entresol(?:-([^/]+))?/admin\.sock")  # of the units in systemd/
_DEV_MARKER = "dev.toml"  # of `entresold --dev`, in its folder while it runs
WEIGHT_MAX = 1_000_000

EXAMPLES = """\
  entresol tenant list
  entresol tenant add acme --flash 2TiB --dram 16GiB --weight 2
  entresol tenant quota acme --flash 4TiB        the rest of its quota stays as it is
  entresol tenant quota acme --dram none         no limit of its own
  entresol tenant quota acme --flash 1TiB --yes  also if blocks have to go; without it, asks first
  entresol tenant quota acme --sessions 64 --leases 4096 --watchers 4
  entresol tenant quota acme --index-blocks 2000000 --get-bytes 4GiB --put-bytes 512MiB
  entresol tenant rotate acme                    new data-encryption key from now on
  entresol tenant rotate acme --force            and drop what older ones sealed; asks first
  entresol tenant keys acme                      its key versions, and how many blocks need each
  entresol tenant erase acme                     destroys its keys; asks first
"""
ABOUT = """\
Runs on the daemon's machine as its user, over the admin socket. A tenant is whoever has a
certificate with its name; adding one here gives it keys and a quota.

exit status: 0 done, 1 refused or not confirmed, 2 wrong use, 3 no daemon.
"""
_ERASE = """\
Destroys every version of the tenant's keys, in every copy. What is on flash becomes noise; sessions
end, leases are revoked, the blocks leave the index. It cannot be undone. Keep the receipt.
"""


_ROTATE = """\
Blocks of older versions stay readable until they are evicted; the last of them takes its version
with it. With --force the older versions are destroyed at once, and their blocks dropped.
"""


def add_parser(subparsers: Any) -> None:
    """Register the command and its verbs."""
    parser = options.command(
        subparsers, "tenant", "add, list, limit, rotate and erase tenants",
        about=ABOUT, examples=EXAMPLES,
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, help="what to do")
    table: tuple[tuple[str, str, str, Callable[[argparse.Namespace], int]], ...] = (
        ("list", "show all tenants, what they use and may use", "", run_list),
        ("add", "make a tenant known and give it keys", "", run_add),
        ("quota", "change what a tenant may use; what is not named stays", "", run_quota),
        ("keys", "show the versions of a tenant's data-encryption key", "", run_keys),
        ("rotate", "start a new version of a tenant's data-encryption key", _ROTATE, run_rotate),
        ("erase", "destroy a tenant's keys, for good", _ERASE, run_erase),
    )
    for name, short, about, run in table:
        given = "" if name == "list" else " acme"
        extra = " --flash 2TiB" if name in ("add", "quota") else ""
        verb = options.command(
            verbs, name, short, about=about, examples=f"  entresol tenant {name}{given}{extra}\n"
        )
        if name != "list":
            verb.add_argument("name", metavar="NAME", help="the tenant: a-z 0-9 . _ -")
        if name in ("add", "quota"):
            _add_quota(verb)
        if name == "rotate":
            verb.add_argument(
                "--force", action="store_true", help="drop what older versions sealed, for good"
            )
        if name in ("rotate", "erase", "quota"):
            verb.add_argument("--yes", action="store_true", help="do not ask")
        if name == "erase":
            verb.add_argument(
                "--receipt", type=Path, metavar="FILE", help="keep the signed receipt here"
            )
        options.add_admin(verb)
        options.add_common(verb, tenant=False)
        verb.set_defaults(run=run)


SIZES = (
    ("flash", "flash_bytes", "flash it may use"),
    ("dram", "dram_bytes", "of the daemon's memory it may use"),
    ("get-bytes", "get_bytes", "memory its hosts may have leased or being staged for them"),
    ("put-bytes", "put_bytes", "its puts may have reserved and not yet on flash"),
)
COUNTS = (
    ("index-blocks", "index_blocks", "blocks it may have in the index"),
    ("sessions", "sessions", "sessions it may have open"),
    ("leases", "leases", "leases its hosts may hold"),
    ("watchers", "watchers", "consumers may follow its events"),
)
_COUNT_MAX = 2**32 - 1
SEGMENT_BYTES = 64 * limits.MIB  # as daemons have it unless told otherwise


def _add_quota(parser: argparse.ArgumentParser) -> None:
    for name, _, what in SIZES:
        parser.add_argument(
            f"--{name}",
            type=_flash_limit if name == "flash" else _limit,
            metavar="SIZE|none",
            help=f"how much {what}, such as 64GiB; none: no limit of its own",
        )
    for name, _, what in COUNTS:
        parser.add_argument(
            f"--{name}",
            type=_count,
            metavar="N|none",
            help=f"how many {what}; none: no limit of its own",
        )
    parser.add_argument(
        "--weight",
        type=_weight,
        metavar="N",
        help="share of contended work relative to the others (default: 1)",
    )


def _given(args: argparse.Namespace) -> dict[str, int]:
    """The fields of the quota that were named."""
    named = [(name.replace("-", "_"), field) for name, field, _ in (*SIZES, *COUNTS)]
    found = {field: getattr(args, name) for name, field in (*named, ("weight", "weight"))}
    return {field: value for field, value in found.items() if value is not None}


def _count(text: str) -> int:
    if text == "none":
        return 0
    if not text.isdigit() or not 0 < int(text) <= _COUNT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1, or none")
    return int(text)


def _limit(text: str) -> int:
    if text == "none":
        return 0
    found = options.parse_size(text)
    if not found:
        raise argparse.ArgumentTypeError("a limit of 0 would mean none; write none")
    return found


def _flash_limit(text: str) -> int:
    found = _limit(text)
    if 0 < found < SEGMENT_BYTES and units.is_bare(text):
        raise argparse.ArgumentTypeError(
            f"{text} would be bytes, less than one segment of flash; write its unit, "
            f"such as {text if len(text) < 5 else 4}GiB, or {text}B"
        )
    return found


def _weight(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= WEIGHT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 to {WEIGHT_MAX}")
    return int(text)


@contextlib.contextmanager
def _admin(args: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """(stub, messages) of the operator's service."""
    _, pb, stubs = rpc.modules()
    with rpc.operator_channel(one_admin_socket(args)) as channel:
        yield stubs.AdminStub(channel), pb


def _row(info: Any) -> dict[str, Any]:
    quota = info.quota
    return {
        "name": info.name,
        "dek_version": info.dek_version,
        "blocks": info.blocks,
        "flash_bytes": info.flash_bytes,
        "dram_bytes": info.dram_bytes,
        "sessions": info.sessions,
        "leases": info.leases,
        "get_bytes": info.get_bytes,
        "put_bytes": info.put_bytes,
        "watchers": info.watchers,
        "quota": {
            **{field: getattr(quota, field) or None for _, field, _ in (*SIZES, *COUNTS)},
            "weight": quota.weight or 1,
        },
    }


def _of(limit_bytes: int | None) -> str:
    return output.size(limit_bytes) if limit_bytes else "no limit"


def _told(row: dict[str, Any]) -> str:
    quota = row["quota"]
    more = [
        f"{name.replace('-', ' ')} {output.size(value) if field.endswith('bytes') else value}"
        for name, field, _ in (*SIZES[2:], *COUNTS)
        if (value := quota[field])
    ]
    return ", ".join(
        [
            f"tenant {row['name']}: flash {_of(quota['flash_bytes'])}",
            f"memory {_of(quota['dram_bytes'])}",
            *more,
            f"weight {quota['weight']}",
            f"key version {row['dek_version']}",
        ]
    )


def run_list(args: argparse.Namespace) -> int:
    """The verb."""
    with _admin(args) as (stub, pb):
        found = rpc.call(stub.TenantList, pb.TenantListRequest())
    rows = [_row(info) for info in found.tenants]
    grid = [
        (
            row["name"], f"{row['blocks']:,}",
            f"{output.size(row['flash_bytes'])} / {_of(row['quota']['flash_bytes'])}",
            f"{output.size(row['dram_bytes'])} / {_of(row['quota']['dram_bytes'])}",
            str(row["quota"]["weight"]), str(row["sessions"]), str(row["dek_version"]),
        )
        for row in rows
    ]  # fmt: skip
    head = ("TENANT", "BLOCKS", "FLASH", "MEMORY", "WEIGHT", "SESSIONS", "KEY")
    output.answer(args.json, {"tenants": rows}, output.table(head, grid, right=" rrrrrr"))
    return 0


def run_add(args: argparse.Namespace) -> int:
    """The verb."""
    name = check_tenant_name(args.name)
    with _admin(args) as (stub, pb):
        quota = pb.Quota(**_given(args))
        row = _row(rpc.call(stub.TenantAdd, pb.TenantAddRequest(name=name, quota=quota)))
    uri = f"spiffe://{_trust_domain(args)}/tenant/{name}"
    row["spiffe_id"] = uri
    lines = [
        f"added {_told(row)[len('tenant ') :]}",
        f"it signs in with a certificate whose only URI name is {uri}",
        *(f"  {line}" for line in certificate_words(one_admin_socket(args), name)),
    ]
    output.answer(args.json, row, lines)
    return 0


def certificate_words(admin_socket: Path, name: str) -> list[str]:
    """How a tenant of the daemon with this socket gets its certificate: one of `entresold --dev`,
    one of the package's units, or another."""
    home = admin_socket.parent.parent
    if started := _dev_start(home):
        return _dev_words(home, *started, name)
    unit = _UNIT_SOCKET.fullmatch(str(admin_socket))
    file = f"/etc/entresol/{unit[1] or 'entresold'}.toml" if unit else "FILE"
    folder = f"/etc/entresol/tenants/{name}" if unit else "FOLDER"
    return [
        "from SPIRE, cert-manager or your CA; or from this machine's own authority:",
        f"entresold --config {file} certify {name} {folder}",
    ]


def _dev_start(home: Path) -> tuple[bool, list[str], list[str]] | None:
    """How `entresold --dev` was started that runs in this folder: whether the folder is temporary,
    its tenants in their order, further options. None where none runs."""
    try:
        said = tomllib.loads((home / _DEV_MARKER).read_text())
        tenants = [check_tenant_name(str(one)) for one in said["tenants"]]
        return bool(said["temporary"]), list(tenants), [str(one) for one in said["options"]]
    except (OSError, ValueError, KeyError, TypeError, BadKeyError):
        return None


def _dev_words(
    home: Path, temporary: bool, tenants: list[str], further: list[str], name: str
) -> list[str]:
    if name in tenants:
        file = "client.toml" if name == tenants[0] else f"client-{name}.toml"
        return [f"which is there: use {home / file}"]
    named = [word for one in (*tenants, name) for word in ("--tenant", one)]
    if temporary:
        words = shlex.join([*further, *named])
        return [
            "this daemon's folder is temporary: blocks and certificates go when it stops. To keep "
            "them, and with this tenant from the start:",
            f"entresold --dev --dir FOLDER {words}",
            f"and use FOLDER/client-{name}.toml",
        ]
    words = shlex.join(["--dir", str(home), *further, *named])
    return [
        f"stop the daemon, then: entresold --dev {words}",
        f"and use {home}/client-{name}.toml",
    ]


def _trust_domain(args: argparse.Namespace) -> str:
    from entresol_proto.status import ConfigError

    try:
        return options.load_config(args).tls.trust_domain
    except ConfigError:  # an operator needs no client configuration
        return "TRUST-DOMAIN"


def run_quota(args: argparse.Namespace) -> int:
    """The verb."""
    name = check_tenant_name(args.name)
    given = _given(args)
    if not given:
        raise UsageProblem("nothing to change", hint="--flash SIZE, --sessions N or --weight N")
    with _admin(args) as (stub, pb):
        tenants = rpc.call(stub.TenantList, pb.TenantListRequest()).tenants
        now = next((info for info in tenants if info.name == name), None)
        if now is None:
            known = ", ".join(info.name for info in tenants)
            raise CliError(f"there is no tenant {name!r}", hint=f"known are {known or 'none'}")
        quota = pb.Quota()
        _confirm_drop(args, now, given)
        quota.CopyFrom(now.quota)
        for field, value in given.items():
            setattr(quota, field, value)
        # Only what was named: another operator may have changed the rest meanwhile. A daemon that
        # does not know of this takes the whole quota as it was read.
        request = pb.TenantSetQuotaRequest(name=name, quota=quota, fields=given)
        row = _row(rpc.call(stub.TenantSetQuota, request, timeout_s=ERASE_DEADLINE_S))
    output.answer(args.json, row, [_told(row)])
    return 0


def _confirm_drop(args: argparse.Namespace, now: Any, given: dict[str, int]) -> None:
    """Ask before a quota drops what is stored already. Raises: CliError unless that is meant."""
    flash_bytes, blocks = given.get("flash_bytes", 0), given.get("index_blocks", 0)
    if args.yes or not (0 < flash_bytes < now.flash_bytes or 0 < blocks < now.blocks):
        return
    text = f"Tenant {now.name!r} has {now.blocks:,} blocks, {output.size(now.flash_bytes)} of flash"
    _confirm(now.name, f"{text}: what is over its new quota is dropped at once.")


def run_rotate(args: argparse.Namespace) -> int:
    """The verb."""
    name = check_tenant_name(args.name)
    with _admin(args) as (stub, pb):
        if args.force and not args.yes:
            _confirm(name, f"This drops every block that tenant {name!r} has stored so far.")
        request = pb.TenantRotateRequest(name=name, force=args.force)
        row = _row(rpc.call(stub.TenantRotate, request, timeout_s=ERASE_DEADLINE_S))
    fate = "older versions are destroyed, and what they sealed is dropped"
    if not args.force:
        fate = "blocks of older versions stay readable until they are evicted"
    lines = [f"tenant {name} seals with key version {row['dek_version']} from now on", f"  {fate}"]
    output.answer(args.json, row, lines)
    return 0


def run_keys(args: argparse.Namespace) -> int:
    """The verb."""
    name = check_tenant_name(args.name)
    with _admin(args) as (stub, pb):
        tenants = rpc.call(stub.TenantList, pb.TenantListRequest()).tenants
    info = next((info for info in tenants if info.name == name), None)
    if info is None:
        known = ", ".join(info.name for info in tenants)
        raise CliError(f"there is no tenant {name!r}", hint=f"known are {known or 'none'}")
    versions = [
        {
            "version": one.version,
            "fingerprint": one.fingerprint,
            "created_unix_s": one.created_unix_s,
            "blocks": one.blocks,
            "sealed_blocks": one.sealed_blocks,
        }
        for one in info.key_versions
    ]
    data = {
        "name": name,
        "versions": versions,
        "blocks_not_counted": info.blocks_not_counted,
        "blocks_host_sealed": info.blocks_host_sealed,
    }
    grid = [
        (
            str(one.version), one.fingerprint, output.local_time(one.created_unix_s * 10**9),
            f"{one.blocks:,}", f"{one.sealed_blocks:,}",
            "seals" if one.version == info.dek_version else "opens",
        )
        for one in info.key_versions
    ]  # fmt: skip
    head = ("VERSION", "FINGERPRINT", "CREATED", "BLOCKS", "SEALED EVER", "")
    lines = list(output.table(head, grid, right="r  rr "))
    if info.blocks_not_counted:
        lines.append(f"{info.blocks_not_counted:,} blocks found at start are not counted yet")
    if info.blocks_host_sealed:
        lines.append(f"{info.blocks_host_sealed:,} blocks are sealed under the tenant's own key")
    output.answer(args.json, data, lines)
    return 0


def run_erase(args: argparse.Namespace) -> int:
    """The verb."""
    name = check_tenant_name(args.name)
    with _admin(args) as (stub, pb):
        if not args.yes:
            _confirm(
                name,
                f"This destroys the keys of tenant {name!r}. Its blocks can never be read again.",
            )
        request = pb.TenantEraseRequest(name=name, confirm=name)
        receipt = rpc.call(stub.TenantErase, request, timeout_s=ERASE_DEADLINE_S)
    data = {
        "tenant": receipt.tenant,
        "erased_unix_ns": receipt.erased_unix_ns,
        "dek_versions_destroyed": list(receipt.dek_versions_destroyed),
        "blocks_dropped": receipt.blocks_dropped,
        "leases_revoked": receipt.leases_revoked,
        "sessions_closed": receipt.sessions_closed,
        "shard": receipt.shard,
        "incarnation": f"{receipt.incarnation:016x}",
        "digest": receipt.digest.hex(),
        "signed_receipt": json.loads(receipt.signed_receipt or b"null"),
    }
    if args.receipt is not None:
        _keep(args.receipt, receipt.signed_receipt)
    signed = data["signed_receipt"] or {}
    versions = ", ".join(str(version) for version in receipt.dek_versions_destroyed)
    rows = [
        ("tenant", receipt.tenant),
        ("erased", output.local_time(receipt.erased_unix_ns)),
        ("keys destroyed", f"version {versions}" if versions else "none were left"),
        ("blocks dropped", f"{receipt.blocks_dropped:,}"),
        ("sessions closed", f"{receipt.sessions_closed:,}"),
        ("leases revoked", f"{receipt.leases_revoked:,}"),
        ("shard", f"{receipt.shard}, incarnation {receipt.incarnation:016x}"),
        ("receipt sha256", receipt.digest.hex()),
        ("signed by", signed.get("public_key") or "nobody: the keyring was locked"),
    ]
    if args.receipt is not None:
        rows.append(("signed receipt", str(args.receipt)))
    output.answer(args.json, data, output.pairs(rows))
    return 0


def _keep(path: Path, receipt: bytes) -> None:
    """Write the receipt where it was asked for. The daemon keeps a copy: a failure loses none."""
    try:
        path.write_bytes(receipt + b"\n")
    except OSError as error:
        output.note(f"cannot write the receipt to {path}: {error.strerror}; it is printed instead")
        output.note(receipt.decode())


def _confirm(name: str, what: str) -> None:
    """Raises: CliError unless the name is typed."""
    output.note(what)
    print("Type the tenant's name to go on: ", end="", file=sys.stderr, flush=True)
    try:
        line = sys.stdin.readline()
    except UnicodeError:
        line = ""
    if not line.endswith("\n"):
        output.note("")  # nobody typed the end of the line
    if line.strip() != name:
        raise CliError(
            f"nothing was done to tenant {name!r}: that was not its name",
            hint="type it exactly, or give --yes",
            status=Status.BAD_REQUEST,
        )
