"""What addresses, ports, socket paths and sizes of a configuration say that cannot be so.

Invariant: no file, name or port is looked at. An empty host would mean every interface, so none is
taken; whatever is refused here could not start, or would publish or promise what it must not.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from entresol_proto import limits as proto_limits

if TYPE_CHECKING:
    from entresol_daemon.config import Config

SOCKET_PATH_BYTES_MAX = 107  # of a UNIX socket, sun_path less its zero byte
HOST_CHARS_MAX = 253
SOCKET_NAMES = ("admin.sock", "fabric.sock")  # of [listen] unix_dir
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")

Problems = list[tuple[str, str]]


def host_is_usable(host: str) -> bool:
    """Whether it is an IP address or can be a host name."""
    if address_of(host) is not None:
        return True
    labels = host.removesuffix(".").split(".")
    numeric = labels[-1].isdigit()  # 10.0.0.256 and 127.1 are misspelled addresses
    return (
        len(host) <= HOST_CHARS_MAX
        and not numeric
        and all(_LABEL.fullmatch(label) for label in labels)
    )


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that `host` is, if it is one."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_unspecified(host: str) -> bool:
    """Whether it means every interface, and so nobody can connect to it."""
    address = address_of(host)
    return address is not None and address.is_unspecified


def problems(config: Config) -> Problems:
    """What contradicts itself, and what to write instead."""
    return [*_hosts(config), *_ports(config), *_sockets(config), *_chunks(config)]


def _hosts(config: Config) -> Problems:
    found: Problems = []
    listen = config.listen
    for name in ("control_host", "grpc_host", "data_host", "metrics_host"):
        host = getattr(listen, name)
        if not host:
            hint = '"127.0.0.1" for this machine, or an address of it; empty would mean every one'
            found.append((f"[listen] {name} is empty", hint))
        elif not host_is_usable(host):
            hint = "an address of this host, as `ip address` lists them"
            found.append((f"[listen] {name}: {host!r} is no address and no host name", hint))
    told = listen.data_advertise
    if told and not host_is_usable(told):
        hint = "an address or a name that hosts reach this machine by, without a port; or empty"
        found.append((f"[listen] data_advertise: {told!r} is no address and no host name", hint))
    elif told and is_unspecified(told):
        hint = "the address that hosts reach this machine by, or empty"
        found.append((f"[listen] data_advertise: nobody can connect to {told}", hint))
    return found


def _ports(config: Config) -> Problems:
    listen = config.listen
    places = {"control": (listen.control_host, listen.control_port)}
    places["grpc"] = (listen.grpc_host, listen.grpc_port)
    if "tcp" in config.fabric.enabled:
        places["data"] = (listen.data_host, listen.data_port)
    places["metrics"] = (listen.metrics_host, listen.metrics_port)
    names = list(places)
    return [
        (f"[listen] {one}_port and {other}_port are both {places[one][1]}", "give each its own")
        for n, one in enumerate(names)
        for other in names[n + 1 :]
        if places[one][1] and places[one][1] == places[other][1]
        and _collide(places[one][0], places[other][0])
    ]  # fmt: skip


def _collide(one: str, other: str) -> bool:
    first, second = address_of(one), address_of(other)
    if first is None or second is None or first.version != second.version:
        return one == other
    return first == second or first.is_unspecified or second.is_unspecified


def _sockets(config: Config) -> Problems:
    unix_dir, shm_dir = config.listen.unix_dir, config.fabric.shm_dir
    paths: list[tuple[str, Path]] = [("[listen] unix_dir", unix_dir / n) for n in SOCKET_NAMES]
    if shm_dir is not None:
        paths.append(("[fabric] shm_dir", shm_dir / f"{config.shard.name}.sock"))
    if config.traces.socket is not None:
        paths.append(("[traces] socket", config.traces.socket))
    for name, path in paths:
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            text = f"{name}: {path} is over {SOCKET_PATH_BYTES_MAX} bytes, too long for a socket"
            return [(text, "choose a shorter path")]
    return []


def _chunks(config: Config) -> Problems:
    chunk, most = config.sealing.chunk_bytes, proto_limits.CHUNKS_PER_BLOCK_MAX
    if chunk * most >= config.limits.block_bytes_max:
        return []
    hint = "raise [sealing] chunk_bytes, or lower [limits] block_bytes_max"
    return [(f"[limits] block_bytes_max is over {most} chunks of [sealing] chunk_bytes", hint)]
