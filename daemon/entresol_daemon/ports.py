"""Whether the ports of a configuration can be had, before anything else is begun.

A start that finds out only when it listens has opened its flash by then, or formatted it.
Invariant: a look; nothing is kept, and a port that another process takes a moment later is told of
by whoever listens.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING

from entresol_proto.status import ConfigError

if TYPE_CHECKING:
    from entresol_daemon.config import Config

_NOT_TO_BE_HAD = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)


def problem(host: str, port: int) -> str:
    """Why nobody can listen there now; empty when nothing is known against it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    family, kind, protocol, _, address = found[0]
    with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return str(error.strerror) if error.errno in _NOT_TO_BE_HAD else ""
    return ""


def check(config: Config) -> None:
    """Raises: ConfigError naming the setting of the first port that cannot be had."""
    listen = config.listen
    names = ["control", "grpc", "metrics", *(["data"] if "tcp" in config.fabric.enabled else [])]
    for name in names:
        host, port = getattr(listen, f"{name}_host"), getattr(listen, f"{name}_port")
        why = problem(host, port) if port else ""
        if why:
            raise ConfigError(f"cannot listen at {host}:{port}: {why}", hint=_hint(name, why))


def _hint(name: str, why: str) -> str:
    if why == os.strerror(errno.EADDRNOTAVAIL):
        return f"[listen] {name}_host is no address of this host: `ip address` lists them"
    if why == os.strerror(errno.EACCES):
        return f"only root has ports this low: another [listen] {name}_port, 1024 or higher"
    if why != os.strerror(errno.EADDRINUSE):
        return f"[listen] {name}_host is an address of this host, or a name that resolves to one"
    return f"is another daemon running? see [listen] {name}_host and {name}_port"
