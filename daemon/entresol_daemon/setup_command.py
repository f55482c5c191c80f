"""`entresold prepare`, `certify` and `formats`: what a package and its operator need of a machine.

Invariant: what is there is never replaced. A key-encryption key is made only where nothing was
sealed yet, because a new one would hide that the old one is missing; certificates only where there
are none at all. The certificate authority made here lies next to what it signs: it is for one
machine and for trying, as `control.devcerts` says.
"""

from __future__ import annotations

import argparse
import contextlib
import grp
import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entresol_proto.ids import check_tenant_name
from entresol_proto.status import ConfigError, EntresolError, KeyringError, Status

COMMANDS = ("prepare", "certify", "formats")
if TYPE_CHECKING:
    from entresol_daemon.config import Config

_CA_KEY = "ca.key"  # of an authority that was made here


def add_parsers(commands: Any) -> None:
    """Register the three commands. Each wants the daemon's --config before it."""
    prepare = commands.add_parser(
        "prepare", help="before a first start: make the keys and certificates that are missing"
    )
    prepare.add_argument(
        "--kek", type=Path, metavar="FILE", help="where the key-encryption key belongs"
    )
    prepare.add_argument(
        "--group", metavar="NAME", help="who may read the shard's private key beside its owner"
    )
    certify = commands.add_parser(
        "certify", help="issue a tenant's certificate by the authority that `prepare` made"
    )
    certify.add_argument("name", metavar="TENANT", help="a-z 0-9 . _ -")
    certify.add_argument("folder", type=Path, help="where its files go, client.toml among them")
    certify.add_argument("--host", help="the daemon's address as its hosts reach it")
    commands.add_parser("formats", help="the format versions of the data, and which this one reads")


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Run one of COMMANDS; returns its exit status. Raises: EntresolError."""
    try:
        if arguments.command == "prepare":
            return _prepare(config, arguments.kek, arguments.group)
        if arguments.command == "certify":
            return _certify(config, arguments.name, arguments.folder, arguments.host)
        from entresol_daemon import formats

        for found in formats.look(config):
            print(f"{found.kind} {found.version} {formats.READS[found.kind]} {found.path}")
        return 0 if all(found.readable for found in formats.look(config)) else 1
    except OSError as error:
        raise EntresolError(
            f"{error.filename or config.shard.state_dir}: {error.strerror}",
            hint="run it as root, or as who owns the daemon's folders",
            status=Status.IO_ERROR,
        ) from None


def check_data(config: Config) -> None:
    """Raises: EntresolError when this build cannot read the data, or may not look at it."""
    from entresol_daemon import formats

    try:
        formats.check(config)
    except OSError as error:
        raise EntresolError(
            f"cannot read {error.filename}: {error.strerror}",
            hint="check [shard] state_dir and [flash] path, and who owns them",
            status=Status.IO_ERROR,
        ) from None


def _prepare(config: Config, kek: Path | None, group: str | None) -> int:
    if kek is not None:
        _make_kek(config, kek)
    _make_certificates(config, group)
    return 0


def _make_kek(config: Config, path: Path) -> None:
    from entresol_daemon.formats import KEYRINGS
    from entresol_daemon.keys.providers import FileKek

    if path.exists():
        print(f"{path}: is there and stays as it is")
        return
    state_dir = config.shard.state_dir
    used = [state_dir / name for name in KEYRINGS if (state_dir / name).exists()]
    if used:  # whole or damaged
        raise KeyringError(
            f"there is no {path}, but {used[0]} holds keys that were wrapped under one",
            hint="bring back the key-encryption key from where you keep its copy; a new one opens "
            "none of the blocks",
        )
    made = FileKek.generate(path)
    print(f"{path}: a new key-encryption key, {made.kek_id().hex()}")
    print("  keep a copy where the flash is not: without it every block is lost")


def _make_certificates(config: Config, group: str | None) -> None:
    from entresol_daemon.control import devcerts

    tls = config.tls
    assert tls.cert is not None, "checked by Config.check"
    assert tls.key is not None, "checked by Config.check"
    assert tls.ca is not None, "checked by Config.check"
    folder, authority = tls.ca.parent, (tls.ca, tls.ca.with_name(_CA_KEY))
    if (
        tls.cert.exists()
        or tls.key.exists()
        or [one.exists() for one in authority] == [True, False]
    ):
        print(f"{tls.cert.parent}: certificates are there and stay as they are")
        return
    wanted = devcerts.DevPki(folder, tls.trust_domain).files(tls.cert.stem)
    if wanted != devcerts.CertFiles(tls.cert, tls.key, tls.ca):
        raise ConfigError(
            "[tls] names certificates that are not there, and places that are not made here",
            hint="bring your own, or name NAME.pem, NAME.key and ca.pem of one folder",
        )
    devcerts.create(
        folder,
        trust_domain=tls.trust_domain,
        shard=config.shard.name,
        stem=tls.cert.stem,
        hosts=_names(config.listen.control_host),
    )
    if group is not None:
        _share(folder, tls.key, group)
    print(f"{folder}: a certificate authority for this machine, and a certificate of the shard")
    print("  for a pod bring certificates of your own authority: its key does not belong here")


def _names(control_host: str) -> list[str]:
    """Names that clients which check host names may use."""
    names = ["localhost", "127.0.0.1", "::1"]
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(control_host).is_unspecified:
            names.append(str(ipaddress.ip_address(control_host)))
    return list(dict.fromkeys([*names, socket.gethostname()]))


def _share(folder: Path, key: Path, group: str) -> None:
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"there is no group {group}", hint="see --group") from None
    for path, mode in ((folder, 0o750), (key, 0o640)):
        os.chown(path, -1, number)
        os.chmod(path, mode)


def _certify(config: Config, name: str, folder: Path, host: str | None) -> int:
    from entresol_daemon.control import devcerts
    from entresol_daemon.dev import client_toml

    assert config.tls.ca is not None, "checked by Config.check"
    issued = devcerts.issue_tenant(config.tls.ca.parent, check_tenant_name(name))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for source, target, mode in (
        (issued.cert, folder / "tenant.pem", 0o644),
        (issued.key, folder / "tenant.key", 0o600),
        (issued.ca, folder / "ca.pem", 0o644),
    ):
        _copy(source, target, mode)
    listen = config.listen
    text = client_toml(
        config,
        files=("tenant.pem", "tenant.key", "ca.pem"),
        host=host or listen.control_host,
        ports=(listen.control_port, listen.grpc_port, listen.metrics_port),
    )
    target = folder / "client.toml"
    scratch = target.with_suffix(".tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(target)
    print(f"{target}: for hosts of tenant {name}; add it with: entresol tenant add {name}")
    return 0


def _copy(source: Path, target: Path, mode: int) -> None:
    scratch = target.with_name(target.name + ".tmp")
    scratch.unlink(missing_ok=True)
    with open(scratch, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
        file.write(source.read_bytes())
    scratch.replace(target)
