"""`entresold --dev`: a daemon that needs nothing.

Makes a folder with a dev PKI, a key-encryption key and a client configuration, and leaves a pointer
where the client looks first, so that `entresol` in another terminal needs no flags.

Invariant: an existing folder is used as it is (a second start is a warm restart); a temporary one
is removed when the daemon stops.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from entresol_daemon import sandbox
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


@dataclass(frozen=True, slots=True)
class DevHome:
    """A prepared folder."""

    directory: Path
    temporary: bool
    tenants: tuple[str, ...]

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
        """Delete a temporary folder, and the pointer if it names this one."""
        pointer = pointer_path()
        if pointer and pointer.is_symlink() and pointer.readlink() == self.client_toml:
            pointer.unlink()
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


def write_client_files(home: DevHome, daemon: Daemon, *, pointer: bool = True) -> None:
    """Client configurations for every dev tenant, naming the ports the daemon got."""
    pki = home.directory / "pki"
    for tenant in home.tenants:
        stem = pki / "tenants" / tenant
        text = client_toml(
            daemon.config,
            files=(f"{stem}.pem", f"{stem}.key", str(pki / "ca.pem")),
            host=daemon.control.host,
            ports=(daemon.control.port, daemon.grpc.port, daemon.http.port),
        )
        target = home.client_toml_of(tenant)
        scratch = target.with_suffix(".tmp")
        scratch.write_text(text)
        scratch.replace(target)
    if pointer:
        _point_to(home.client_toml)


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


def pointer_path() -> Path | None:
    """Where clients look when nothing names a configuration; None for a user without a home."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "entresol" / CLIENT_TOML
    try:
        return Path.home() / ".config" / "entresol" / CLIENT_TOML
    except RuntimeError:  # in a container, as a user that nobody has named
        return None


def _point_to(target: Path) -> None:
    pointer = pointer_path()
    if pointer is None:
        return
    try:
        pointer.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if pointer.exists() and not pointer.is_symlink():
            return  # somebody's own configuration: not ours to replace
        scratch = pointer.with_suffix(".new")
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(target)
        scratch.replace(pointer)
    except OSError:
        return  # a convenience only; `entresol --config` names the file itself
