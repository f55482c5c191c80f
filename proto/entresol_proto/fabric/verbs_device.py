"""Which RDMA devices, ports and GIDs to use, and with which MTU: read from sysfs, no verbs calls.

Invariant: a RoCE port is used only with a GID of RoCE v2, by preference an IPv4-mapped one whose
address belongs to this network namespace (devices of other namespaces are visible, too). GID
indexes are looked up, never assumed: they move when addresses do.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from entresol_proto import limits
from entresol_proto.fabric.base import VerbsSettings
from entresol_proto.fabric.verbs_wire import Rail
from entresol_proto.status import FabricError, Status

SYSFS = Path("/sys/class/infiniband")
ROCE_PORT = 4791  # UDP destination port of RoCE v2 (InfiniBand specification, annex A17)
MTUS = (256, 512, 1024, 2048, 4096)
_GIDS_EMPTY_MAX = 32
_SAME_NETWORK_BITS = 16  # addresses that share so much may be on one network


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    raw: bytes
    kind: str  # "RoCE v2", "IB/RoCE v1"
    netdev: str

    @property
    def ipv4(self) -> str | None:
        mapped = ipaddress.IPv6Address(self.raw).ipv4_mapped
        return None if mapped is None else str(mapped)


@dataclass(frozen=True, slots=True)
class Port:
    """A port that can carry a rail, with the GID it is used with."""

    device: str
    port: int
    infiniband: bool
    active: bool
    lid: int
    gid: Gid

    @property
    def label(self) -> str:
        """For logs: mlx5_0:1."""
        return f"{self.device}:{self.port}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def gid_at(port_folder: Path, index: int) -> Gid | None:
    """One entry of a port's GID table; None for an empty one."""
    try:
        raw = bytes.fromhex(_text(port_folder / "gids" / str(index)).replace(":", ""))
    except ValueError:
        return None
    if len(raw) != 16 or not any(raw):
        return None
    # Unused entries refuse to tell their type.
    kind = _text(port_folder / "gid_attrs" / "types" / str(index))
    netdev = _text(port_folder / "gid_attrs" / "ndevs" / str(index))
    return Gid(index, raw, kind, netdev)


def gids(port_folder: Path) -> list[Gid]:
    """The filled entries of a port's GID table, by index.

    The table may have a thousand places, of which the first few are in use; it ends for us where
    _GIDS_EMPTY_MAX of them in a row are empty.
    """
    found: list[Gid] = []
    index = empty = 0
    while empty < _GIDS_EMPTY_MAX:
        gid = gid_at(port_folder, index)
        empty = empty + 1 if gid is None else 0
        if gid is not None:
            found.append(gid)
        index += 1
    return found


def address_is_here(address: str) -> bool:
    """Whether an IP address belongs to this network namespace."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def source_address(peer: str) -> str | None:
    """The local address this host would use towards `peer`; None without a route."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, ROCE_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def choose_gid(
    table: Sequence[Gid],
    *,
    infiniband: bool,
    is_here: Callable[[str], bool] = address_is_here,
) -> Gid | None:
    """The GID to use: RoCE v2 over IPv4 (here first), then over IPv6 (global first).

    On InfiniBand the first one.
    """
    if infiniband:
        return table[0] if table else None

    def rank(gid: Gid) -> tuple[int, int]:
        address = ipaddress.IPv6Address(gid.raw)
        if gid.ipv4 is not None:
            return (0 if is_here(gid.ipv4) else 1, gid.index)
        return (3 if address.is_link_local else 2, gid.index)

    usable = [gid for gid in table if gid.kind == "RoCE v2"]
    return min(usable, key=rank, default=None)


def _parse_name(text: str) -> tuple[str, int | None]:
    name, _, port = text.partition(":")
    if not name or "/" in name or (port and not port.isdecimal()):
        raise FabricError(
            f"{text!r} is no RDMA device",
            hint="write mlx5_0 or mlx5_0:1 (device and port)",
            status=Status.BAD_REQUEST,
        )
    return name, int(port) if port else None


def _port_at(folder: Path, device: str, gid_index: int | None) -> Port | None:
    infiniband = _text(folder / "link_layer") == "InfiniBand"
    if gid_index is not None:
        gid = gid_at(folder, gid_index)
    else:
        gid = choose_gid(gids(folder), infiniband=infiniband)
    if gid is None:
        return None
    lid = _text(folder / "lid")
    return Port(
        device=device,
        port=int(folder.name),
        infiniband=infiniband,
        active="ACTIVE" in _text(folder / "state"),
        lid=int(lid, 16) if lid.startswith("0x") else 0,
        gid=gid,
    )


def _is_ours(port: Port) -> bool:
    """Whether a port belongs to this network namespace, as far as its address tells."""
    return port.infiniband or (port.gid.ipv4 is not None and address_is_here(port.gid.ipv4))


def find_ports(settings: VerbsSettings, *, sysfs: Path = SYSFS) -> list[Port]:
    """The ports to use, in the order of the settings, at most VERBS_RAILS_MAX.

    Without settings: every active port, those first whose address is of this network namespace; if
    there are such, only those.

    Raises: FabricError (UNSUPPORTED) when there is none, with what is missing.
    """
    known = sorted(entry.name for entry in sysfs.iterdir()) if sysfs.is_dir() else []
    if not known:
        raise FabricError(
            "this system has no RDMA device",
            hint="load the driver of the network card, or rdma_rxe",
            status=Status.UNSUPPORTED,
        )
    wanted = [_parse_name(text) for text in settings.devices] or [(name, None) for name in known]
    found: list[Port] = []
    for name, number in wanted:
        if name not in known:
            raise FabricError(
                f"there is no RDMA device {name}",
                hint=f"there is {', '.join(known)}",
                status=Status.UNSUPPORTED,
            )
        for folder in sorted((sysfs / name / "ports").iterdir(), key=lambda f: int(f.name)):
            if number is None or int(folder.name) == number:
                port = _port_at(folder, name, settings.gid_index)
                if port is not None:
                    found.append(port)
    usable = [port for port in found if port.active]
    if not settings.devices:
        usable = [port for port in usable if _is_ours(port)] or usable
    if not usable:
        reason = "no port is up" if found else "no port has a RoCE v2 address"
        raise FabricError(
            f"{reason}: {', '.join(name for name, _ in wanted)}",
            hint="give the network interface under it an IPv4 address and set it up",
            status=Status.UNSUPPORTED,
        )
    return usable[: limits.VERBS_RAILS_MAX]


def _shared_bits(first: str, second: str) -> int:
    """Length of the common prefix of two IPv4 addresses."""
    difference = int(ipaddress.IPv4Address(first)) ^ int(ipaddress.IPv4Address(second))
    return 32 - difference.bit_length()


def pair_rails(
    offered: Sequence[Rail],
    ports: Sequence[Port],
    *,
    source_of: Callable[[str], str | None] = source_address,
) -> list[tuple[Rail, Port]]:
    """Which local port to use for which of the peer's rails; unreachable rails are left out.

    Each rail gets an unused port if one fits: the one the system routes through, else the one whose
    address is nearest. Ports are shared only when there are fewer of them than rails.
    """
    pairs: list[tuple[Rail, Port]] = []
    used: set[str] = set()
    for rail in offered:
        same_kind = [port for port in ports if port.infiniband == rail.infiniband]
        if not same_kind:
            continue
        peer = rail.ipv4
        source = source_of(peer) if peer is not None and not rail.infiniband else None

        def fit(
            port: Port,
            peer: str | None = peer,
            source: str | None = source,
            infiniband: bool = rail.infiniband,
        ) -> tuple[int, int]:
            if port.gid.ipv4 is None or peer is None:
                return (1 if infiniband or (port.gid.ipv4 is None and peer is None) else 0, 0)
            if port.gid.ipv4 == source:
                return (2, 32)
            bits = _shared_bits(port.gid.ipv4, peer)
            return (1 if bits >= _SAME_NETWORK_BITS else 0, bits)

        free = [port for port in same_kind if port.label not in used and fit(port)[0]]
        candidates = free or [port for port in same_kind if fit(port)[0]]
        if not candidates:
            continue
        best = max(candidates, key=fit)
        used.add(best.label)
        pairs.append((rail, best))
    return pairs


def path_mtu(mine_bytes: int, peer_bytes: int, setting_bytes: int | None) -> int:
    """The RDMA MTU of a path: what both ends have, or less by setting.

    Raises: FabricError for a setting that is no RDMA MTU.
    """
    if setting_bytes is not None and setting_bytes not in MTUS:
        raise FabricError(
            f"{setting_bytes} is no RDMA MTU",
            hint="use one of 256, 512, 1024, 2048, 4096",
            status=Status.BAD_REQUEST,
        )
    return min(mine_bytes, peer_bytes, setting_bytes or MTUS[-1])


class Neighbour:
    """Asks the system for a peer's link address before a verbs call would wait for it.

    The kernel resolves the peer inside the call that connects a queue pair and waits up to a second
    for it, with the whole process stopped. So: send it a datagram, look into the neighbour table,
    and connect only once it answered, in a loop that looks again every few ms. That is for IPv4:
    an IPv6 peer is resolved by the call (only where our GID is IPv6 too, see `RailLink.connect`).
    """

    def __init__(self, peer: str | None, *, arp: Path = Path("/proc/net/arp")) -> None:
        self._peer = peer if peer is not None and ":" not in peer else None
        self._arp = arp

    def prod(self) -> bool:
        """Make the system resolve the peer; False when it has no route (nothing to wait for)."""
        if self._peer is None:
            return False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setblocking(False)
            try:
                probe.sendto(b"", (self._peer, 9))  # discard
            except OSError as error:
                return error.errno in (errno.ECONNREFUSED, errno.EAGAIN)
        return True

    def resolved(self) -> bool:
        """False while the answer is outstanding. True also when the table does not know the peer:
        then it is this host or behind a router."""
        for line in _text(self._arp).splitlines()[1:]:
            fields = line.split()
            if len(fields) >= 3 and fields[0] == self._peer:
                return int(fields[2], 16) & 0x2 != 0  # ATF_COM
        return True


def memory_lock_bytes() -> int | None:
    """The limit of locked memory; None when there is none. Root with CAP_IPC_LOCK has none."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft
