"""`entresol doctor`: every step from the configuration to a working data path, one line each.

Invariant: a check reports, it never raises; each line that is not `ok` says what to do. Checks of
the path to a shard stop at the first that fails, because the later ones could only fail too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from entresol_client.cli import options, output
from entresol_client.cli.errors import CliError
from entresol_proto.status import EntresolError

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

    from entresol_client.config import ClientConfig, ShardAddress
    from entresol_client.handshake import OpenSession

OK, WARN, FAIL = "ok", "warn", "fail"
EXPIRY_WARN_DAYS = 14
RTT_TRIES = 5
RTT_SLOW_NS = 20_000_000
SKEW_WARN_NS = 5_000_000_000

EXAMPLES = """\
  entresol doctor
  entresol doctor --tenant other
  entresol doctor --daemon-config /etc/entresol/entresold.toml
  entresol doctor --json | jq '.findings[] | select(.level != "ok")'
"""
ABOUT = """\
Checks the configuration, the certificate, every shard (address, TLS, identity, session, data path
and why that one, round trip), the operator's socket, and what this host brings for speed.
--daemon-config looks at a daemon's configuration on its own machine instead, running or not.

exit status: 0 nothing failed (warnings do not count), 1 something failed, 2 wrong use.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    area: str
    level: str
    text: str
    fix: str = ""


Findings = Iterator[Finding]


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = options.command(
        subparsers, "doctor", "check everything, and say how to fix it",
        about=ABOUT, examples=EXAMPLES,
    )  # fmt: skip
    parser.add_argument(
        "--daemon-config",
        metavar="FILE",
        help="would a daemon with this configuration start? certificates, keys, folders, room, "
        "memory, ports; run it as the daemon's user (as root it also asks NVMe drives how worn "
        "they are)",
    )
    options.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command: prints each finding as it is made."""
    from entresol_client.cli import hostchecks

    found: list[Finding] = []

    def take(findings: Findings) -> None:
        for finding in findings:
            found.append(finding)
            if not args.json:
                _print(finding)

    config = None
    if args.daemon_config is not None:
        take(hostchecks.check_daemon_config(args.daemon_config))
    else:
        config = _config(args, take)
    if config is not None:
        take(check_files(config))
        context = _tls(config, take)
        if context is not None:
            for shard in config.shards:
                take(check_shard(config, shard, context))
                take(check_surfaces(config, shard))
    take(hostchecks.check_host(config))
    counts = {level: sum(f.level == level for f in found) for level in (OK, WARN, FAIL)}
    data = {"counts": counts, "findings": [asdict(finding) for finding in found]}
    summary = f"{counts[OK]} ok, {output.plural(counts[WARN], 'warning')}, {counts[FAIL]} failed"
    output.answer(args.json, data, ["", summary])
    return 1 if counts[FAIL] else 0


def _print(finding: Finding) -> None:
    print(f"{finding.level:<4}  {finding.area:<12}  {finding.text}", flush=True)
    if finding.fix:
        print(f"{'':<4}  {'':<12}  fix: {finding.fix}", flush=True)


def _problem(area: str, error: EntresolError, level: str = FAIL, fix: str = "") -> Finding:
    """`fix` where the error has none, or sends whoever reads it here."""
    hint = error.hint if "entresol doctor" not in error.hint else ""
    return Finding(area, level, Exception.__str__(error), hint or fix)


def _config(args: argparse.Namespace, take: Any) -> ClientConfig | None:
    from entresol_client.config import ClientConfig

    try:
        path = options.config_path(args)
        config = ClientConfig.load(path)
    except EntresolError as error:
        take(iter([_problem("config", error)]))
        return None
    shards = output.plural(len(config.shards), "shard")
    real = path.resolve()
    where = f"{path} → {real}" if path.is_symlink() else str(path)
    take(iter([Finding("config", OK, f"{where}, {shards}, fabric {config.fabric}")]))
    return config


# -- our own files


def check_files(config: ClientConfig) -> Findings:
    """The PEM files, and what the certificate says."""
    import stat

    files = config.tls
    for name, path in (("cert", files.cert), ("key", files.key), ("ca", files.ca)):
        try:
            found = path.is_file()
        except OSError as error:
            yield Finding(
                "files", FAIL, f"{name}: cannot read {path}: {error.strerror}",
                "run this as a user who may, or let this one into the folder",
            )  # fmt: skip
            return
        if not found:
            yield Finding(
                "files", FAIL, f"{name}: there is no file {path}",
                "name the PEM files in the configuration; `entresold --dev` makes its own",
            )  # fmt: skip
            return
        if not os.access(path, os.R_OK):
            yield Finding(
                "files", FAIL, f"{name}: {path} is not readable", "chown or chmod it for this user"
            )
            return
    if files.key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield Finding(
            "files", WARN, f"the private key {files.key} is open to others",
            f"chmod 600 {files.key}",
        )  # fmt: skip
    else:
        yield Finding("files", OK, "certificate, key and CA are there; the key is private")
    if config.tenant_key is not None:
        yield _check_tenant_key(config.tenant_key)
    yield from _check_certificate(config)


def _check_tenant_key(path: Path) -> Finding:
    from entresol_client.tenant_key import TenantKey

    try:
        key = TenantKey.load(path)
    except EntresolError as error:
        return _problem("tenant key", error)
    fingerprint = key.versions[key.active].fingerprint
    text = f"{path}: version {key.active} ({fingerprint}) seals; no daemon can open our blocks"
    return Finding("tenant key", OK, text)


def _check_certificate(config: ClientConfig) -> Findings:
    import datetime

    from entresol_client.certificates import dates_problem
    from entresol_proto.identity import IdentityError, load_certificate, tenant_from_cert

    raw = config.tls.cert.read_bytes()
    try:
        tenant = tenant_from_cert(raw, config.tls.trust_domain)
        certificate = load_certificate(raw)
    except IdentityError as error:
        yield _problem("certificate", error)
        return
    yield Finding(
        "certificate", OK, f"spiffe://{config.tls.trust_domain}/tenant/{tenant}, tenant {tenant}"
    )
    problem = dates_problem(raw)
    if problem is not None:
        yield Finding("certificate", FAIL, *problem)
    else:
        last = certificate.not_valid_after_utc
        days = (last - datetime.datetime.now(datetime.UTC)).days
        level = WARN if days < EXPIRY_WARN_DAYS else OK
        fix = "have it renewed" if level is WARN else ""
        text = f"valid until {last:%Y-%m-%d} ({output.plural(days, 'day')})"
        yield Finding("certificate", level, text, fix)


def _tls(config: ClientConfig, take: Any) -> ssl.SSLContext | None:
    from entresol_proto.identity import IdentityError, client_ssl_context

    try:
        return client_ssl_context(config.tls.cert, config.tls.key, config.tls.ca)
    except IdentityError as error:
        take(iter([_problem("tls files", error)]))
        return None


# -- a shard


def check_shard(config: ClientConfig, shard: ShardAddress, context: ssl.SSLContext) -> Findings:
    """Address, TLS, identity, session, data path, round trip."""
    import asyncio

    area = f"shard {shard.name}"
    where = f"{shard.host}:{shard.port}"
    began_ns = time.monotonic_ns()
    try:
        socket.create_connection((shard.host, shard.port), config.connect_deadline_ns / 1e9).close()
    except OSError as error:
        yield Finding(
            area, FAIL, f"nobody answers at {where}: {error.strerror or error}",
            "start the daemon, or correct host and port in [[shards]]; a firewall hangs instead",
        )  # fmt: skip
        return
    took = output.duration(time.monotonic_ns() - began_ns)
    yield Finding(area, OK, f"{where} accepts connections ({took})")
    yield from asyncio.run(_session(config, shard, context, area))


async def _session(
    config: ClientConfig, shard: ShardAddress, context: ssl.SSLContext, area: str
) -> Findings:
    from entresol_client.handshake import connect
    from entresol_client.results import RequestFailedError

    try:
        opened = await connect(shard, config, context)
    except RequestFailedError as error:
        fix = error.hint or _session_fix(str(error))
        return iter([Finding(area, FAIL, f"no session: {error}", fix)])
    try:
        return iter(await _of_session(config, opened, area))
    finally:
        await opened.connection.close()
        if opened.endpoint is not None:
            await opened.endpoint.close()


def _reason_of(error: Exception) -> object:
    """What went wrong, without the wrapping of urllib and the number of the errno."""
    inner = getattr(error, "reason", None) or error
    return getattr(inner, "strerror", None) or inner


def _session_fix(text: str) -> str:
    lowered = text.lower()
    if "in time" in lowered:
        return (
            "it takes connections and does not answer: stopped, starved or hung; its log says "
            "event=process_starved or event=loop_stall, `entresol stat` there asks it"
        )
    return "the daemon's log names the reason (event=request_refused, event=session_refused)"


async def _of_session(config: ClientConfig, opened: OpenSession, area: str) -> list[Finding]:
    from entresol_client.results import RequestFailedError
    from entresol_client.surroundings import this_host

    tls = opened.connection.ssl_object
    welcome = opened.welcome
    version = tls.version() if tls is not None else "no TLS"
    cipher = (tls.cipher() or ("?",))[0] if tls is not None else ""
    found = [
        Finding(
            area, OK,
            f"{version} {cipher}; it is shard {welcome.shard} and takes us for tenant "
            f"{welcome.tenant}",
        )
    ]  # fmt: skip
    same = welcome.host_id == this_host()
    found.append(Finding(area, OK, "on this host" if same else "on another host"))
    found += _fabrics(config, opened, area, same_host=same)
    try:
        times = [
            await opened.connection.ping(time.monotonic_ns() + config.ping_deadline_ns)
            for _ in range(RTT_TRIES)
        ]
    except RequestFailedError as error:
        found.append(Finding(area, FAIL, f"no answer to a ping: {error}", "see the daemon's log"))
        return found
    best = min(times)
    slow = best > RTT_SLOW_NS
    fix = "is the daemon overloaded, or far away? see event_loop_lag in its metrics" if slow else ""
    text = f"round trip {output.duration(best)} (best of {RTT_TRIES})"
    found.append(Finding(area, WARN if slow else OK, text, fix))
    return found


def _fabrics(
    config: ClientConfig, opened: OpenSession, area: str, *, same_host: bool
) -> list[Finding]:
    """The data path that was chosen, and what became of the others."""
    from entresol_proto.fabric import registry
    from entresol_proto.fabric.base import Offer

    prefer = None if config.fabric == "auto" else config.fabric
    offers = [Offer(offer.kind, offer.params) for offer in opened.welcome.offers]
    ranked = registry.rank(offers, same_host=same_host, prefer=prefer)
    offered = ", ".join(choice.offer.kind.label for choice in ranked) or "none"
    if opened.endpoint is None:
        return [
            Finding(
                area, FAIL, f"no data path; offered: {offered}; {opened.fabric_reason}",
                "see [fabric] of the daemon, and fabric and fallback of the client",
            )
        ]  # fmt: skip
    text = f"data path {opened.fabric}: {opened.fabric_reason} (offered: {offered})"
    wanted = prefer or next((c.offer.kind.label for c in ranked if c.usable), opened.fabric)
    fell_back = opened.fabric != wanted
    how = "configured" if prefer else "offered and faster"
    fix = f"{wanted} is {how} but could not be used, for the reason given" if fell_back else ""
    found = [Finding(area, WARN if fell_back else OK, text, fix)]
    if not opened.endpoint.capabilities.private:
        found.append(
            Finding(area, OK, "others could see this path: blocks travel sealed, opened here only")
        )
    return found


# -- the other surfaces of a shard


def check_surfaces(config: ClientConfig, shard: ShardAddress) -> Findings:
    """gRPC for events, the admin socket, metrics."""
    from entresol_client.cli import rpc

    area = f"shard {shard.name}"
    try:
        rpc.modules()
    except CliError as error:
        yield Finding("grpc", WARN, "gRPC is not installed: no events, tenant, stat", error.hint)
    else:
        yield from _check_grpc(config, shard, area)
        yield from _check_admin(shard, area)
    if shard.metrics:
        yield from _check_metrics(shard, area)


def _check_grpc(config: ClientConfig, shard: ShardAddress, area: str) -> Findings:
    from entresol_client.cli import rpc

    _, pb, stubs = rpc.modules()
    if not shard.grpc_port:
        yield Finding(
            area, WARN, "no grpc_port configured: no `entresol events`",
            "add grpc_port to its [[shards]] table",
        )  # fmt: skip
        return
    try:
        with rpc.tenant_channel(config, shard) as channel:
            found = rpc.call(stubs.DescribeStub(channel).Describe, pb.DescribeRequest())
    except EntresolError as error:
        yield _problem(area, error, fix="see [listen] grpc_port of the daemon, and its log")
        return
    state = pb.State.Name(found.state).removeprefix("STATE_").lower()
    level = OK if state == "serving" else WARN
    fix = "" if level is OK else "`entresol stat` on the daemon's machine tells why"
    yield Finding(area, level, f"gRPC at port {shard.grpc_port}: {found.version}, {state}", fix)


def _scrub_finding(stat: Any, area: str) -> Finding:
    if stat.scrub_state == "off":
        return Finding(
            area, WARN, "the scrubber is off: damage on flash is found when it is read",
            "set [flash] scrub_bytes_per_s",
        )  # fmt: skip
    found = output.plural(stat.scrub_found, "bad block") if stat.scrub_found else "nothing"
    text = f"scrubber {stat.scrub_state}, found {found}"
    if stat.scrub_found > stat.blocks_corrupt:  # those the device refuses; damage is told below
        return Finding(area, WARN, text, "look at the drive (smartctl, dmesg)")
    return Finding(area, OK, text)


def _check_admin(shard: ShardAddress, area: str) -> Findings:
    from entresol_client.cli import rpc

    if shard.admin_socket is None:
        return
    if not os.path.exists(shard.admin_socket):  # or nothing that this user is let near to
        yield Finding(
            area, OK, "the admin socket is not on this machine: operator commands run over there"
        )
        return
    _, pb, stubs = rpc.modules()
    try:
        with rpc.operator_channel(shard.admin_socket) as channel:
            stat = rpc.call(stubs.AdminStub(channel).Stat, pb.StatRequest())
    except EntresolError as error:
        yield _problem(area, error, WARN, "is the daemon overloaded or hung? see its log")
        return
    for reason in stat.reasons_not_ready:
        fix = "`entresol unlock`" if reason.startswith("locked") else "see the daemon's log"
        yield Finding(area, FAIL, f"not ready: {reason}", fix)
    full = stat.flash_live_bytes / stat.flash_capacity_bytes if stat.flash_capacity_bytes else 0.0
    yield Finding(
        area, OK, f"admin socket open; {stat.blocks:,} blocks, flash {100 * full:.0f} % live"
    )
    yield _scrub_finding(stat, area)
    if stat.flash_direct:
        yield Finding(area, OK, "flash with O_DIRECT")
    else:
        yield Finding(
            area, WARN, "flash goes through the page cache: slower, and memory is used twice",
            "put the data file on ext4, xfs or a raw drive; see [flash] direct of the daemon",
        )  # fmt: skip
    corrupt = stat.blocks_corrupt
    if corrupt:
        yield Finding(
            area, WARN, f"{output.plural(corrupt, 'damaged block')} dropped since its start",
            "look at the drive (smartctl, dmesg) and `entresol inspect`",
        )  # fmt: skip


def _check_metrics(shard: ShardAddress, area: str) -> Findings:
    import http.client
    import urllib.error
    import urllib.request

    from entresol_client.cli.top_reading import text_of

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"{shard.metrics.rstrip('/')}/metrics"
    try:
        with contextlib.closing(opener.open(url, timeout=3.0)) as reply:
            reply.read(1)
    except (OSError, ValueError, urllib.error.URLError, http.client.HTTPException) as error:
        yield Finding(
            area,
            WARN,
            f"no metrics at {url}: {text_of(_reason_of(error))}",
            "see [listen] metrics_host of the daemon",
        )
        return
    yield Finding(area, OK, f"metrics at {url}")
    yield from _check_skew(shard, area)


def _check_skew(shard: ShardAddress, area: str) -> Findings:
    """Whether its clock and ours agree: certificates and the times of events depend on it."""
    from entresol_client.cli.top import Source

    began_ns = time.time_ns()
    try:
        told_ns = int(Source(shard.metrics).read()["time_unix_ns"])
    except (EntresolError, KeyError, TypeError, ValueError, OverflowError):
        return  # of an older daemon; `entresol top` says what is wrong
    ended_ns = time.time_ns()
    skew_ns = max(began_ns - told_ns, told_ns - ended_ns, 0)
    if skew_ns > SKEW_WARN_NS:
        yield Finding(
            area, WARN, f"its clock and ours are {output.duration(skew_ns)} apart",
            "run a time service on both: systemd-timesyncd, chrony",
        )  # fmt: skip
