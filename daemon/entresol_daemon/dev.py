"""`entresold --dev`: a daemon that needs nothing.

Makes a folder with a dev PKI, a key-encryption key and a client configuration, and leaves a pointer
where the client looks first, so that `entresol` in another terminal needs no flags.

Invariant: an existing folder is used as it is (a second start is a warm restart, at the same ports
where they are free); a temporary one is removed when the daemon stops. The pointer of a daemon that
runs stays its own: no other one replaces or removes it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import tempfile
import tomllib
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from entresol_daemon import ports, sandbox
from entresol_daemon.config import Config
from entresol_daemon.config_places import is_unspecified
from entresol_daemon.config_reference import quoted
from entresol_daemon.control import devcerts
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.server import Daemon
from entresol_proto.seal.meter import POLICIES
from entresol_proto.status import ConfigError

TENANTS_DEFAULT = ("dev", "other")
CLIENT_TOML = "client.toml"
MARKER_TOML = "dev.toml"  # while the daemon runs: `entresol tenant add` reads how it was started
ANSWER_S = 1.0  # for another daemon's socket
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class DevHome:
    """A prepared folder.

    Attributes:
        options: words of the command line that a later start wants too.
        written: this process has written the client files, and so removes what goes with its end.
        pointed: this process wrote the pointer.
    """

    directory: Path
    temporary: bool
    tenants: tuple[str, ...]
    options: tuple[str, ...] = ()
    written: bool = False
    pointed: bool = False

    @property
    def client_toml(self) -> Path:
        """Client configuration of the first tenant."""
        return self.directory / CLIENT_TOML

    def client_toml_of(self, tenant: str) -> Path:
        """Client configuration of one tenant."""
        if tenant == self.tenants[0]:
            return self.client_toml
        return self.directory / f"client-{tenant}.toml"

    def remove(self) -> None:
        """Delete what this process left for clients, and a temporary folder."""
        pointer = pointer_path() if self.pointed else None
        if pointer and pointer.is_symlink() and pointer.readlink() == self.client_toml:
            pointer.unlink()
        if self.written:
            (self.directory / MARKER_TOML).unlink(missing_ok=True)
        if self.temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


def prepare(
    directory: Path | None = None, *, tenants: Sequence[str] = TENANTS_DEFAULT
) -> tuple[Config, DevHome]:
    """Make or reuse a dev folder. Raises: EntresolError when it cannot be used."""
    temporary = directory is None
    root = directory or Path(tempfile.mkdtemp(prefix="entresol-dev-"))
    try:
        return _fill(root, tuple(tenants)), DevHome(root.resolve(), temporary, tuple(tenants))
    except BaseException:
        if temporary:
            shutil.rmtree(root, ignore_errors=True)
        raise


def _fill(root: Path, tenants: tuple[str, ...]) -> Config:
    """Make what is not there yet. Raises: EntresolError."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot use the folder {root}: {error.strerror}",
            hint="name another one with --dir, or leave it out for a temporary one",
        ) from None
    root = root.resolve()
    if len(str(root)) > 80:
        raise ConfigError(
            f"the path {root} is too long for the sockets in it",
            hint="choose a folder with a path of at most 80 characters",
        )
    config = Config.dev(root)
    pki = root / "pki"
    devcerts.create(pki, shard=config.shard.name)
    for name in tenants:
        devcerts.issue_tenant(pki, name)
    if not (root / "kek").exists():
        FileKek.generate(root / "kek")
    config.check(root)
    return config


def with_flash_bytes(config: Config, flash_bytes: int) -> Config:
    """The same with another flash size."""
    return replace(config, flash=replace(config.flash, size_bytes=flash_bytes))


def with_codec(config: Config, codec: str) -> Config:
    """The same with another codec policy. Raises: ConfigError for an unknown one."""
    if codec not in POLICIES:
        raise ConfigError(f"unknown codec {codec!r}", hint=f"use one of {', '.join(POLICIES)}")
    return replace(config, sealing=replace(config.sealing, codec=codec))


def with_ports_again(config: Config, home: DevHome) -> tuple[Config, str]:
    """The same at the ports of the folder's last life, so that clients that are open find it again;
    with a note about those that are taken by now, for people."""
    listen, taken = config.listen, []
    for name, port in _last_ports(home.client_toml).items():
        if not ports.problem(LOOPBACK, port):
            listen = replace(listen, **{name: port})  # type: ignore[arg-type]
        else:
            taken.append(str(port))
    if not taken:
        return replace(config, listen=listen), ""
    note = f"port {', '.join(taken)} of its last life is taken: "
    return replace(config, listen=listen), note + "clients that are open may not find it again"


def _last_ports(path: Path) -> dict[str, int]:
    """Of a client configuration that an earlier start wrote; empty when there is none."""
    shard = _first_shard(path)
    try:
        metrics = urllib.parse.urlsplit(str(shard.get("metrics", ""))).port
    except ValueError:
        metrics = None
    found = {
        "control_port": shard.get("port"), "grpc_port": shard.get("grpc_port"),
        "metrics_port": metrics,
    }  # fmt: skip
    good = {name: port for name, port in found.items() if type(port) is int and 0 < port < 65_536}
    return good if len(set(good.values())) == len(good) else {}


def _first_shard(path: Path) -> dict[str, object]:
    """Of a client configuration; empty when nothing can be read there."""
    try:
        shard = tomllib.loads(path.read_text())["shards"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return {}
    return shard if isinstance(shard, dict) else {}


def write_client_files(home: DevHome, daemon: Daemon, *, pointer: bool = True) -> str:
    """Client configurations for every dev tenant, naming the ports the daemon got.

    Returns what `entresol` needs to be told to reach this daemon; empty when it finds it by itself.
    """
    pki = home.directory / "pki"
    home.written = True
    words = [f"temporary = {str(home.temporary).lower()}"]
    for name, values in (("tenants", home.tenants), ("options", home.options)):
        words.append(f"{name} = [{', '.join(map(quoted, values))}]")
    _replace_text(home.directory / MARKER_TOML, "\n".join(words) + "\n")
    for tenant in home.tenants:
        stem = pki / "tenants" / tenant
        text = client_toml(
            daemon.config,
            files=(f"{stem}.pem", f"{stem}.key", str(pki / "ca.pem")),
            host=daemon.control.host,
            ports=(daemon.control.port, daemon.grpc.port, daemon.http.port),
        )
        _replace_text(home.client_toml_of(tenant), text)
    if not pointer:
        return ""
    home.pointed = _point_to(home.client_toml)
    return "" if home.pointed else f"export ENTRESOL_CONFIG={shlex.quote(str(home.client_toml))}"


def _replace_text(target: Path, text: str) -> None:
    scratch = target.with_suffix(".tmp")
    scratch.write_text(text)
    scratch.replace(target)


def client_toml(
    config: Config, *, files: tuple[str, str, str], host: str, ports: tuple[int, int, int]
) -> str:
    """A client's configuration: certificate, key, CA; ports of control, gRPC and metrics."""
    control_port, grpc_port, metrics_port = ports
    metrics_host = config.listen.metrics_host
    if is_unspecified(metrics_host):  # every interface is one that it is reached by
        metrics_host = host
    metrics = f"[{metrics_host}]" if ":" in metrics_host else metrics_host
    return (
        f"trust_domain = {quoted(config.tls.trust_domain)}\n"
        f"cert = {quoted(files[0])}\n"
        f"key = {quoted(files[1])}\n"
        f"ca = {quoted(files[2])}\n\n"
        "[[shards]]\n"
        f"name = {quoted(config.shard.name)}\n"
        f"host = {quoted(host)}\n"
        f"port = {control_port}\n"
        f"grpc_port = {grpc_port}\n"
        f"admin_socket = {quoted(str(config.listen.unix_dir / 'admin.sock'))}\n"
        f"metrics = {quoted(f'http://{metrics}:{metrics_port}')}\n"
    )


def sandbox_rules(home: DevHome) -> list[sandbox.Rule]:
    """What the dev daemon writes beside its state: client files, the pointer, and its own end."""
    rules = [sandbox.Rule(home.directory)]
    pointer = pointer_path()
    if pointer is not None:
        with contextlib.suppress(OSError):
            pointer.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rules.append(sandbox.Rule(pointer.parent))
    if home.temporary:  # to remove the empty folder itself
        rules.append(sandbox.Rule(home.directory.parent, sandbox.REMOVE_DIR))
    return rules


def of_a_terminal() -> bool:
    """Whether SIGHUP means here that a terminal has closed, as nobody said to ignore that (nohup):
    who tries it would find it still running, and its folder still there."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return False
    return any(os.isatty(fd) for fd in range(3))


def pointer_path() -> Path | None:
    """Where clients look when nothing names a configuration; None for a user without a home."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "entresol" / CLIENT_TOML
    try:
        return Path.home() / ".config" / "entresol" / CLIENT_TOML
    except RuntimeError:  # in a container, as a user that nobody has named
        return None


def _point_to(target: Path) -> bool:
    """Make the pointer name `target`; False where it goes on naming another that is in use."""
    pointer = pointer_path()
    if pointer is None:
        return False
    try:
        pointer.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if pointer.exists() and not pointer.is_symlink():
            return False  # somebody's own configuration: not ours to replace
        if pointer.is_symlink() and pointer.readlink() != target and _answers(pointer):
            return False
        scratch = pointer.with_suffix(".new")
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(target)
        scratch.replace(pointer)
    except OSError:  # a convenience only; `entresol --config` names the file itself
        return False
    return True


def _answers(client_configuration: Path) -> bool:
    """Whether the daemon that it names runs on this machine. By its socket for operators: the
    sandbox lets no TCP connection out."""
    path = _first_shard(client_configuration).get("admin_socket")
    if not isinstance(path, str):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_S)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
