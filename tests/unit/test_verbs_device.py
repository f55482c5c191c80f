"""Which device, port, GID and MTU: over a made-up sysfs, without any device."""

from __future__ import annotations

import ast
import ipaddress
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from entresol_proto import limits
from entresol_proto.fabric import verbs_api
from entresol_proto.fabric.base import VerbsSettings
from entresol_proto.fabric.verbs_api import Domain
from entresol_proto.fabric.verbs_device import (
    Gid,
    Neighbour,
    Port,
    choose_gid,
    find_ports,
    gids,
    pair_rails,
    path_mtu,
)
from entresol_proto.fabric.verbs_queue import QP_ACCESS, QueuePair, Route
from entresol_proto.fabric.verbs_rail import RailLink
from entresol_proto.fabric.verbs_wire import Rail
from entresol_proto.status import FabricError, Status

V1, V2 = "IB/RoCE v1", "RoCE v2"


def packed(address: str) -> bytes:
    found = ipaddress.ip_address(address)
    return found.packed if found.version == 6 else b"\0" * 10 + b"\xff\xff" + found.packed


def make_port(
    sysfs: Path, device: str, table: list[tuple[str, str]], *, port: int = 1,
    state: str = "4: ACTIVE", layer: str = "Ethernet", lid: str = "0x0",
) -> Path:  # fmt: skip
    """A port as the kernel shows it; an empty address is an unused entry."""
    folder = sysfs / device / "ports" / str(port)
    for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (folder / name).mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "link_layer").write_text(f"{layer}\n")
    (folder / "lid").write_text(f"{lid}\n")
    for index, (address, kind) in enumerate(table):
        raw = packed(address) if address else bytes(16)
        groups = ipaddress.IPv6Address(raw).exploded
        (folder / "gids" / str(index)).write_text(f"{groups}\n")
        if address:  # the kernel refuses to tell about unused ones
            (folder / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
            (folder / "gid_attrs/ndevs" / str(index)).write_text("eth0\n")
    return folder


TABLE = [("fe80::1", V1), ("fe80::1", V2), ("", ""), ("10.0.0.5", V1), ("10.0.0.5", V2),
         ("127.0.0.1", V2)]  # fmt: skip


def test_the_ipv4_gid_of_roce_v2_is_chosen_wherever_it_is(tmp_path: Path) -> None:
    table = gids(make_port(tmp_path, "mlx5_0", TABLE))
    assert [gid.index for gid in table] == [0, 1, 3, 4, 5]
    chosen = choose_gid(table, infiniband=False, is_here=lambda address: True)
    assert chosen is not None
    assert (chosen.index, chosen.ipv4) == (4, "10.0.0.5")
    here = choose_gid(table, infiniband=False, is_here=lambda address: address == "127.0.0.1")
    assert here is not None
    assert here.index == 5
    elsewhere = choose_gid(table, infiniband=False, is_here=lambda address: False)
    assert elsewhere is not None
    assert elsewhere.index == 4  # of another namespace, but still better than link-local


def test_gaps_in_the_table_are_passed_over(tmp_path: Path) -> None:
    gap = [("", "")] * 30
    folder = make_port(tmp_path, "mlx5_0", [("fe80::1", V2), *gap, ("10.0.0.5", V2), *gap, *gap])
    assert [gid.index for gid in gids(folder)] == [0, 31]


def test_without_ipv4_a_global_address_is_better_than_a_link_local_one() -> None:
    table = [Gid(1, packed("fe80::1"), V2, ""), Gid(2, packed("2001:db8::1"), V2, "")]
    chosen = choose_gid(table, infiniband=False)
    assert chosen is not None
    assert chosen.index == 2
    assert choose_gid(table[:1], infiniband=False) is table[0]
    assert choose_gid([Gid(0, packed("10.0.0.1"), V1, "")], infiniband=False) is None


def test_a_set_index_overrides_and_a_wrong_one_finds_nothing(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", [*TABLE, *[("", "")] * 200, ("10.0.0.9", V1)])
    for index, address in ((0, None), (4, "10.0.0.5"), (206, "10.0.0.9")):
        [port] = find_ports(VerbsSettings(devices=("mlx5_0",), gid_index=index), sysfs=tmp_path)
        assert (port.gid.index, port.gid.ipv4) == (index, address)
    for index in (2, 205, 5_000):
        with pytest.raises(FabricError):
            find_ports(VerbsSettings(devices=("mlx5_0",), gid_index=index), sysfs=tmp_path)


def test_ports_in_the_order_of_the_settings(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", [("127.0.0.1", V2)])
    make_port(tmp_path, "mlx5_1", [("127.0.0.2", V2)], port=1)
    make_port(tmp_path, "mlx5_1", [("127.0.0.3", V2)], port=2)
    assert [p.label for p in find_ports(VerbsSettings(), sysfs=tmp_path)] == [
        "mlx5_0:1", "mlx5_1:1", "mlx5_1:2",
    ]  # fmt: skip
    chosen = find_ports(VerbsSettings(devices=("mlx5_1:2", "mlx5_0")), sysfs=tmp_path)
    assert [p.label for p in chosen] == ["mlx5_1:2", "mlx5_0:1"]


def test_ports_of_this_namespace_push_out_the_others(tmp_path: Path) -> None:
    make_port(tmp_path, "rxe_far", [("192.0.2.77", V2)])  # TEST-NET-1: nobody has it
    assert [p.device for p in find_ports(VerbsSettings(), sysfs=tmp_path)] == ["rxe_far"]
    make_port(tmp_path, "rxe_here", [("127.0.0.1", V2)])
    assert [p.device for p in find_ports(VerbsSettings(), sysfs=tmp_path)] == ["rxe_here"]
    named = find_ports(VerbsSettings(devices=("rxe_far",)), sysfs=tmp_path)
    assert [p.device for p in named] == ["rxe_far"]


def test_there_are_never_more_rails_than_allowed(tmp_path: Path) -> None:
    for number in range(limits.VERBS_RAILS_MAX + 2):
        make_port(tmp_path, f"mlx5_{number}", [("127.0.0.1", V2)])
    assert len(find_ports(VerbsSettings(), sysfs=tmp_path)) == limits.VERBS_RAILS_MAX


def test_infiniband_needs_no_address(tmp_path: Path) -> None:
    make_port(tmp_path, "ib0", [("fe80::2", V1)], layer="InfiniBand", lid="0x1f")
    [port] = find_ports(VerbsSettings(), sysfs=tmp_path)
    assert (port.infiniband, port.lid, port.gid.index) == (True, 31, 0)


@pytest.mark.parametrize(
    ("state", "table", "text"),
    [
        ("1: DOWN", [("127.0.0.1", V2)], "no port is up"),
        ("4: ACTIVE", [("127.0.0.1", V1)], "no port has a RoCE v2 address"),
        ("4: ACTIVE", [], "no port has a RoCE v2 address"),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, state: str, table: list[tuple[str, str]], text: str
) -> None:
    make_port(tmp_path, "mlx5_0", table, state=state)
    with pytest.raises(FabricError, match=text) as caught:
        find_ports(VerbsSettings(), sysfs=tmp_path)
    assert caught.value.status is Status.UNSUPPORTED
    assert caught.value.hint


def test_a_system_without_devices_says_so(tmp_path: Path) -> None:
    for sysfs in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FabricError, match="no RDMA device"):
            find_ports(VerbsSettings(), sysfs=sysfs)
    make_port(tmp_path, "mlx5_0", TABLE)
    with pytest.raises(FabricError, match="mlx5_0"):
        find_ports(VerbsSettings(devices=("mlx5_9",)), sysfs=tmp_path)
    for name in ("mlx5_0:x", ":1", "../../etc"):
        with pytest.raises(FabricError):
            find_ports(VerbsSettings(devices=(name,)), sysfs=tmp_path)


def rail(number: int, address: str, *, infiniband: bool = False) -> Rail:
    return Rail(number, infiniband, 4096, 16, 0, 77, 1, packed(address))


def port(name: str, address: str, *, infiniband: bool = False) -> Port:
    return Port(name, 1, infiniband, True, 0, Gid(1, packed(address), V2, ""))


def labels(pairs: list[tuple[Rail, Port]]) -> list[tuple[int, str]]:
    return [(one.number, found.device) for one, found in pairs]


def test_rails_follow_the_routes() -> None:
    offered = [rail(0, "10.1.0.1"), rail(1, "10.2.0.1")]
    ports = [port("b", "10.2.0.9"), port("a", "10.1.0.9")]
    routes = {"10.1.0.1": "10.1.0.9", "10.2.0.1": "10.2.0.9"}
    assert labels(pair_rails(offered, ports, source_of=routes.get)) == [(0, "a"), (1, "b")]


def test_rails_of_one_network_get_a_port_each() -> None:
    """The system routes all of them through its first port."""
    offered = [rail(0, "10.1.0.1"), rail(1, "10.1.0.2")]
    ports = [port("a", "10.1.0.8"), port("b", "10.1.0.9")]
    found = pair_rails(offered, ports, source_of=lambda peer: "10.1.0.8")
    assert labels(found) == [(0, "a"), (1, "b")]
    one = pair_rails(offered, ports[:1], source_of=lambda peer: "10.1.0.8")
    assert labels(one) == [(0, "a"), (1, "a")]  # fewer ports than rails: shared


def test_unreachable_rails_are_left_out() -> None:
    offered = [rail(0, "10.1.0.1"), rail(1, "172.16.0.1"), rail(2, "fe80::7", infiniband=True)]
    found = pair_rails(offered, [port("a", "10.1.0.8")], source_of=lambda peer: None)
    assert labels(found) == [(0, "a")]
    routed = pair_rails(offered, [port("a", "10.1.0.8")], source_of=lambda peer: "10.1.0.8")
    assert labels(routed) == [(0, "a"), (1, "a")]
    ib = pair_rails(offered, [port("ib", "fe80::9", infiniband=True)], source_of=lambda peer: None)
    assert labels(ib) == [(2, "ib")]


@pytest.mark.parametrize(
    ("here", "there"),
    [("10.1.0.9", "fe80::dead"), ("10.1.0.9", "2001:db8::1"), ("2001:db8::9", "10.1.0.1")],
)
def test_a_peer_of_another_address_family_is_refused_before_the_system_looks_for_it(
    here: str, there: str
) -> None:
    """The kernel may wait a second for it, with the process stopped; a reply has four of them."""
    link, connected = joining(port("a", here))
    with pytest.raises(FabricError, match=r"IPv4 and IPv6") as caught:
        link.connect(rail(0, there))
    assert caught.value.status is Status.BAD_REQUEST
    assert not connected


@pytest.mark.parametrize(
    ("here", "there", "infiniband"),
    [
        ("10.1.0.9", "10.1.0.1", False),
        ("fe80::9", "2001:db8::1", False),
        ("fe80::9", "10.1.0.1", True),  # no IP address at all
    ],
)
def test_a_peer_of_the_same_family_is_connected(here: str, there: str, infiniband: bool) -> None:
    link, connected = joining(port("a", here, infiniband=infiniband))
    link.connect(rail(0, there, infiniband=infiniband))
    assert [route.peer_gid for route in connected] == [
        ipaddress.IPv6Address(packed(there)).exploded
    ]


def joining(port: Port) -> tuple[RailLink, list[Route]]:
    """A link without a device, and where it was connected to."""
    connected: list[Route] = []
    link = RailLink.__new__(RailLink)
    link.port, link._psn, link._rd_atomic = port, 1, 16
    link._mtu_bytes, link._mtu_setting = 4_096, None
    queue_pair = SimpleNamespace(connect=lambda route, _psn: connected.append(route))
    link.queue_pair = cast("QueuePair", queue_pair)
    return link, connected


def test_the_mtu_of_a_path() -> None:
    assert path_mtu(4096, 1024, None) == 1024
    assert path_mtu(4096, 4096, 2048) == 2048
    assert path_mtu(1024, 4096, 4096) == 1024
    for wrong in (0, 1500, 9000):
        with pytest.raises(FabricError, match="MTU"):
            path_mtu(4096, 4096, wrong)


ARP = """IP address       HW type     Flags       HW address            Mask     Device
10.0.0.7         0x1         0x2         aa:bb:cc:dd:ee:ff     *        eth0
10.0.0.8         0x1         0x0         00:00:00:00:00:00     *        eth0
"""


def test_a_neighbour_that_has_not_answered_is_waited_for(tmp_path: Path) -> None:
    table = tmp_path / "arp"
    table.write_text(ARP)
    assert Neighbour("10.0.0.7", arp=table).resolved()
    assert not Neighbour("10.0.0.8", arp=table).resolved()
    assert Neighbour("10.0.0.9", arp=table).resolved()  # behind a router, or this host
    assert not Neighbour("fe80::1", arp=table).prod()
    assert not Neighbour(None, arp=table).prod()
    assert Neighbour("127.0.0.1", arp=table).prod()


_WITHOUT = """
import logging, sys
sys.modules["pyverbs"] = None
from entresol_proto.fabric import registry, verbs_api
from entresol_proto.fabric.base import FabricKind, Offer
from entresol_proto.status import FabricError
before = list(logging.getLogger().handlers)
for attempt in (verbs_api.load, verbs_api.device_names):
    try:
        attempt()
    except FabricError as error:
        print(error.status.label, error)
assert logging.getLogger().handlers == before
"""


def test_without_pyverbs_the_error_names_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=False, timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().splitlines()
    assert first == second
    assert first.startswith("unsupported RDMA needs pyverbs")
    assert "python3-pyverbs" in first
    assert "--system-site-packages" in first


def test_remote_writing_cannot_even_be_asked_for() -> None:
    """REMOTE_WRITE is 2, REMOTE_ATOMIC 8 (infiniband/verbs.h)."""
    for access in (2, 8, 4 | 2, 1 | 2, 1 | 8, 31):
        with pytest.raises(AssertionError):
            Domain.register(object.__new__(Domain), 4096, 4096, access)
        with pytest.raises(AssertionError):
            Domain.register_dmabuf(object.__new__(Domain), 0, 0, 4096, access)
    assert QP_ACCESS == 4


def test_no_source_of_the_fabric_names_remote_write() -> None:
    folder = Path(verbs_api.__file__).parent
    sources = sorted(folder.glob("verbs*.py"))
    assert len(sources) > 8
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", getattr(node, "attr", "")) or ""
            assert "REMOTE_WRITE" not in name.upper(), f"{path.name}:{node.lineno}"  # type: ignore[attr-defined]
            assert "ATOMIC" not in name or name.startswith(("VERBS_RD_ATOMIC", "max_")), path.name
