"""`entresold prepare`, `renew`, `certify` and `formats`, and the rest of what a package and its
operator need of a machine.

Invariant: what is there is never replaced, unless renewing it was asked for. A key-encryption key
is made only where nothing was sealed yet, because a new one would hide that the old one is missing;
certificates only where there are none at all. The certificate authority made here lies next to what
it signs: it is for one machine and for trying, as `control.devcerts` says.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import glob
import grp
import ipaddress
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entresol_proto.ids import check_tenant_name
from entresol_proto.status import ConfigError, EntresolError, KeyringError, Status

COMMANDS = ("prepare", "renew", "certify", "formats")
if TYPE_CHECKING:
    from entresol_daemon.config import Config
    from entresol_daemon.keys.providers import KekProvider

_FIXES = {
    errno.ENOSPC: "free some space there",
    errno.EROFS: "its file system is read-only: mount it for writing, or name another place",
}
_CA_KEY = "ca.key"  # of an authority that was made here


def add_parsers(commands: Any) -> None:
    """Register the four commands. Each wants the daemon's --config before it."""
    prepare = commands.add_parser(
        "prepare", help="before a first start: make the keys and certificates that are missing"
    )
    prepare.add_argument(
        "--kek",
        type=Path,
        metavar="FILE",
        help="where the key-encryption key belongs (default: [keys] kek_file)",
    )
    prepare.add_argument(
        "--beside", metavar="PATTERN", default="",
        help="state folders of shards that use the same key, such as '/var/lib/entresol*'",
    )  # fmt: skip
    prepare.add_argument(
        "--group", metavar="NAME", help="who may read the shard's private key beside its owner"
    )
    commands.add_parser(
        "renew", help="replace the shard's certificate by a new one, if `prepare` made it"
    )
    certify = commands.add_parser(
        "certify", help="issue a tenant's certificate by the authority that `prepare` made"
    )
    certify.add_argument("name", metavar="TENANT", help="a-z 0-9 . _ -")
    certify.add_argument(
        "folder", type=Path, metavar="DIR", help="where its files go, client.toml among them"
    )
    certify.add_argument("--host", help="the daemon's address as its hosts reach it")
    certify.add_argument(
        "--renew", action="store_true", help="a new certificate also where the old one still holds"
    )
    commands.add_parser("formats", help="the format versions of the data, and which this one reads")


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Run one of COMMANDS; returns its exit status. Raises: EntresolError."""
    try:
        if arguments.command == "prepare":
            return _prepare(config, arguments.kek, arguments.beside, arguments.group)
        if arguments.command == "renew":
            return _renew(config)
        if arguments.command == "certify":
            return _certify(config, arguments)
        from entresol_daemon import formats

        for found in formats.look(config):
            print(f"{found.kind} {found.version} {formats.READS[found.kind]} {found.path}")
        return 0 if all(found.readable for found in formats.look(config)) else 1
    except OSError as error:
        folder = getattr(arguments, "folder", config.shard.state_dir)
        raise EntresolError(
            f"{error.filename or folder}: {error.strerror}",
            hint=_FIXES.get(
                error.errno or 0, "run it as root, or as who owns the daemon's folders"
            ),
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


def check_surroundings(config: Config) -> None:
    """What else a start needs that may not be there yet. Raises: EntresolError."""
    from entresol_daemon import data_places, data_whole
    from entresol_daemon.control.identity import judge_files, server_ssl_context
    from entresol_proto.identity import ROLE_SHARD, SpiffeId

    for problem, hint in data_places.problems(config):
        raise ConfigError(problem, hint=hint)
    data_whole.check(config)
    _check_kek(config)
    cert, key, ca = _tls_files(config)
    if not any(path.exists() for path in (cert, key, ca)):
        print(f"note: {cert} and its key and CA are not there yet; `prepare` makes them")
        return
    context = server_ssl_context(cert, key, ca)
    shard = SpiffeId(config.tls.trust_domain, ROLE_SHARD, config.shard.name)
    error = judge_files(context, cert.read_bytes(), shard).problem(time.time())
    if error is not None:
        raise error


def _check_kek(config: Config) -> None:
    """Say what a start without the key-encryption key would come to. Raises: KeyringError."""
    from entresol_daemon.keys.providers import FileKek, KekMissingError, is_credential

    kek = config.keys.kek_file
    if kek is None:
        first = "" if config.flash_path.exists() else ", and a first start needs one"
        print(f"note: [keys] kek_file names no key-encryption key: the daemon starts locked{first}")
        return
    if is_credential(kek) and "CREDENTIALS_DIRECTORY" not in os.environ:
        return  # only the unit's process is shown it
    try:
        FileKek.open(kek)
    except KekMissingError:
        way = "bring it back" if _keyrings([config.shard.state_dir]) else "`prepare` makes it"
        print(f"note: there is no key-encryption key {kek}; {way}")


def _keyrings(folders: list[Path]) -> list[Path]:
    """Files of keyrings, whole or damaged: something was sealed there."""
    from entresol_daemon.formats import KEYRINGS

    places = [folder / name for folder in folders for name in KEYRINGS]
    return [place for place in places if place.exists()]


def rewrap(config: Config, old: KekProvider, new: KekProvider) -> None:
    """Wrap every key of a stopped daemon's keyring under another key-encryption key.

    As the owner of its folder when it is root who asks, so that the daemon can read what is
    written. Raises: KeyringError, also while a daemon runs there: `entresol change-kek` asks it.
    """
    from entresol_daemon.keys.keyring import Keyring

    folder = config.shard.state_dir
    try:
        if not _keyrings([folder]):
            raise KeyringError(f"there is no keyring in {folder}", hint="see [shard] state_dir")
        with _as_owner_of(folder):
            keyring = Keyring.open(folder, old)
            try:
                keyring.rewrap(new)
            finally:
                keyring.close()
    except OSError as error:
        raise KeyringError(
            f"{error.filename or folder}: {error.strerror}", hint="as root, or as its owner"
        ) from None


@contextlib.contextmanager
def _as_owner_of(folder: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    found = folder.stat()
    group = os.getegid()
    os.setegid(found.st_gid)
    os.seteuid(found.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def _tls_files(config: Config) -> tuple[Path, Path, Path]:
    tls = config.tls
    assert tls.cert is not None, "checked by Config.check"
    assert tls.key is not None, "checked by Config.check"
    assert tls.ca is not None, "checked by Config.check"
    return tls.cert, tls.key, tls.ca


def _prepare(config: Config, kek: Path | None, beside: str, group: str | None) -> int:
    from entresol_daemon.keys.providers import is_credential

    number = None if group is None else _group_number(group)  # before anything is made
    named = config.keys.kek_file
    if named is None:
        first = "" if config.flash_path.exists() else ", and a first start needs one"
        why = "[keys] kek_file names none"
        print(f"{kek or 'a KEK'}: not made, {why}: the daemon starts locked{first}")
    elif kek is None and is_credential(named):
        print(f"{named}: a credential of the unit; --kek FILE, as in its LoadCredential=, makes it")
    else:
        _make_kek(config, kek or named, beside)
    _make_certificates(config, number)
    return 0


def _make_kek(config: Config, path: Path, beside: str) -> None:
    from entresol_daemon.keys.providers import FileKek

    if path.exists():
        print(f"{path}: is there and stays as it is")
        return
    folders = [config.shard.state_dir, *(Path(one) for one in sorted(glob.glob(beside)))]
    if used := _keyrings(folders):
        raise KeyringError(
            f"there is no {path}, but {used[0]} holds keys that were wrapped under one",
            hint="bring back the key-encryption key from where you keep its copy; a new one opens "
            "none of the blocks",
        )
    made = FileKek.generate(path)
    print(f"{path}: a new key-encryption key, {made.kek_id().hex()}")
    print("  keep a copy where the flash is not: without it every block is lost")


def _make_certificates(config: Config, group: int | None) -> None:
    from entresol_daemon.control import devcerts

    cert, key, ca = _tls_files(config)
    folder, authority = ca.parent, (ca, ca.with_name(_CA_KEY))
    made_here = _made_here(config)
    if made_here and cert.exists() != key.exists():
        raise ConfigError(
            f"of {cert} and {key} only one is there",
            hint="a run before this one was cut short: `entresold --config FILE renew` makes both",
        )
    if made_here and key.exists() and group is not None and _left_unshared(folder, key):
        _share(folder, key, group)
    if cert.exists() or key.exists() or [one.exists() for one in authority] == [True, False]:
        print(f"{cert.parent}: certificates are there and stay as they are")
        return
    wanted = devcerts.DevPki(folder, config.tls.trust_domain).files(cert.stem)
    if wanted != devcerts.CertFiles(cert, key, ca):
        raise ConfigError(
            "[tls] names certificates that are not there, and places that are not made here",
            hint="bring your own, or name NAME.pem, NAME.key and ca.pem of one folder",
        )
    _issue(config, anew=False)
    if group is not None:
        _share(folder, key, group)
    print(f"{folder}: a certificate authority for this machine, and a certificate of the shard")
    print("  for a pod bring certificates of your own authority: its key does not belong here")


def _issue(config: Config, *, anew: bool) -> None:
    from entresol_daemon.control import devcerts

    cert, _, ca = _tls_files(config)
    devcerts.create(
        ca.parent,
        trust_domain=config.tls.trust_domain,
        shard=config.shard.name,
        stem=cert.stem,
        hosts=_names(config.listen.control_host),
        anew=anew,
    )


def _made_here(config: Config) -> bool:
    """Whether the shard's certificate is, or would be, of an authority that lies beside it."""
    from entresol_daemon.control import devcerts

    cert, key, ca = _tls_files(config)
    files = devcerts.DevPki(ca.parent, config.tls.trust_domain).files(cert.stem)
    return files == devcerts.CertFiles(cert, key, ca) and ca.with_name(_CA_KEY).exists()


def _renew(config: Config) -> int:
    """A new key and certificate in place of those that `prepare` made, as readable as they were."""
    from entresol_daemon.control import devcerts

    cert, key, ca = _tls_files(config)
    if not _made_here(config):
        raise ConfigError(
            f"{cert} was not made here: there is no {ca.with_name(_CA_KEY)}",
            hint="ask whoever issued it, and put key and certificate in place; a running daemon "
            "takes them over",
        )
    before = key.stat() if cert.exists() and key.exists() else None
    _issue(config, anew=True)
    folder = ca.parent.stat()
    if before is not None:
        os.chown(key, before.st_uid, before.st_gid)
        os.chmod(key, stat.S_IMODE(before.st_mode))
    elif folder.st_mode & stat.S_IXGRP:  # shared before, as the key of a run cut short was to be
        _share(ca.parent, key, folder.st_gid)
    print(f"{cert}: a new certificate, for {devcerts.LEAF_DAYS} days")
    print("  a running daemon takes it over within [tls] reload_interval_ns, at HUP at once")
    return 0


def _names(control_host: str) -> list[str]:
    """Names that clients which check host names may use."""
    names = ["localhost", "127.0.0.1", "::1"]
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(control_host).is_unspecified:
            names.append(str(ipaddress.ip_address(control_host)))
    return list(dict.fromkeys([*names, socket.gethostname()]))


def _group_number(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"there is no group {name}", hint="see --group") from None


def _left_unshared(folder: Path, key: Path) -> bool:
    """Whether a run that was cut short left them as they are made."""
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, key)]
    return modes == [0o700, 0o600] and key.stat().st_uid == os.geteuid()


def _share(folder: Path, key: Path, group: int) -> None:
    for path, mode in ((folder, 0o750), (key, 0o640)):
        os.chown(path, -1, group)
        os.chmod(path, mode)


def _certify(config: Config, arguments: argparse.Namespace) -> int:
    from entresol_daemon.control import devcerts
    from entresol_daemon.dev import client_toml

    name, folder = check_tenant_name(arguments.name), Path(arguments.folder)
    _, _, ca = _tls_files(config)
    host = _host_for_clients(arguments.host, config.listen.control_host)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_ours(folder)
    issued = devcerts.issue_tenant(ca.parent, name, anew=arguments.renew)
    for source, target, mode in (
        (issued.cert, folder / "tenant.pem", 0o644),
        (issued.key, folder / "tenant.key", 0o600),
        (issued.ca, folder / "ca.pem", 0o644),
    ):
        _place(source.read_bytes(), target, mode)
    listen = config.listen
    text = client_toml(
        config,
        files=("tenant.pem", "tenant.key", "ca.pem"),
        host=host,
        ports=(listen.control_port, listen.grpc_port, listen.metrics_port),
    )
    target = folder / "client.toml"
    _place(text.encode(), target, 0o644)
    print(f"{target}: for hosts of tenant {name}; add it with: entresol tenant add {name}")
    return 0


def _host_for_clients(asked: str | None, control_host: str) -> str:
    """Raises: ConfigError when nobody can connect to it."""
    from entresol_daemon.config_places import host_is_usable, is_unspecified

    host = asked if asked is not None else control_host
    if is_unspecified(host) or not host_is_usable(host):
        raise ConfigError(
            f"nobody can connect to {host!r}",
            hint="--host: the address or name by which hosts reach this machine",
        )
    return host


def _check_ours(folder: Path) -> None:
    """Raises: ConfigError where another user could put a link in our way, or take the key."""
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise ConfigError(
            f"{folder} belongs to, or may be written by, other users",
            hint="name a folder of your own (chmod go-w), and copy the files from there",
        )


def _place(raw: bytes, target: Path, mode: int) -> None:
    """In one step, and never through what somebody else has put there."""
    scratch = target.with_name(target.name + ".tmp")
    scratch.unlink(missing_ok=True)
    with open(scratch, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
        file.write(raw)
    scratch.replace(target)
