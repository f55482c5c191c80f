"""What the harness promises suites in its guests: devices, addresses, limits, a wire to cut."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from pathlib import Path

import pytest

from tests.rdma import wire

pytestmark = pytest.mark.skipif(
    not wire.in_guest(), reason="not run here: needs the soft-RoCE guest of `make test-rdma`"
)

SYSFS = Path("/sys/class/infiniband")


def devices() -> list[str]:
    return os.environ.get("ENTRESOL_RDMA_DEVICE", "").split(",")


def gids(device: str) -> list[str]:
    folder = SYSFS / device / "ports/1"
    found = []
    for path in sorted((folder / "gids").iterdir(), key=lambda path: int(path.name))[:8]:
        gid = path.read_text().strip()
        if gid.replace(":", "").strip("0"):
            found.append(f"{(folder / 'gid_attrs/types' / path.name).read_text().strip()} {gid}")
    return found


def refused(namespace: str, address: str) -> bool:
    """Whether the address answers from there, if only to refuse: port 9 has no service."""
    done = subprocess.run(
        [*wire.inside(namespace), "timeout", "3", "bash", "-c", f"exec 3<> /dev/tcp/{address}/9"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode, "somebody listens on the discard port"
    return "refused" in done.stderr


def test_each_device_has_a_rocev2_gid_of_its_address() -> None:
    for device in devices():
        a, b, c, d = socket.inet_aton(wire.end(device).address)
        assert any(
            gid.startswith("RoCE v2") and gid.endswith(f"ffff:{a:02x}{b:02x}:{c:02x}{d:02x}")
            for gid in gids(device)
        ), gids(device)


def test_pyverbs_sees_the_devices() -> None:
    device_module = pytest.importorskip("pyverbs.device")
    assert sorted(device.name.decode() for device in device_module.get_device_list()) == sorted(
        devices()
    )


def test_a_process_may_lock_all_the_memory_it_likes() -> None:
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY


def test_results_go_home() -> None:
    (Path("/out") / "test_guest.txt").write_text("from the guest\n")


def test_a_wire_that_was_cut_or_lossy_heals() -> None:
    if sorted(devices()) != ["rxe_dpu", "rxe_host"]:
        pytest.skip("not run here: a loopback device has no wire")
    there = wire.PAIR["rxe_dpu"].address
    assert refused("host", there)
    with wire.whole_afterwards("rxe_dpu"):
        wire.cut("rxe_dpu")
        assert not refused("host", there)
    assert refused("host", there)
    with wire.whole_afterwards("rxe_dpu", "rxe_host"):
        wire.loss("rxe_dpu", 100)
        assert not refused("host", there)
        wire.loss("rxe_dpu", 0)
        assert refused("host", there)
    wire.heal("rxe_dpu")
    assert refused("host", there)


def test_mistakes_are_said_not_ignored() -> None:
    with pytest.raises(KeyError):
        wire.cut("no_such_device")
    with pytest.raises(ValueError, match="percent"):
        wire.loss(devices()[0], 101)
