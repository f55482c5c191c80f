"""The real daemon starts on what a killed one of an earlier version left, and has all of it.

`tests/vectors/killed_v1/` (`make_killed.py`) has what no clean stop leaves: segments without
footers, removals whose blocks are still on flash, a checkpoint of the life before; and two tenants
with quotas, one with a second version of its data key.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import DaemonProcess
from vectors.make_killed import DESCRIPTOR, FIRST, FORGOTTEN, QUOTAS, THEN, content, key, tenants

from entresol_client import Client
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import Status

VECTORS = Path(__file__).parent.parent / "vectors"
LEFT = sorted(VECTORS.glob("killed_v*"))

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(120)]


@pytest.fixture(params=LEFT, ids=[path.name for path in LEFT])
def left(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def listing(left: Path) -> Any:
    return json.loads((left / "listing.json").read_text(encoding="utf-8"))


@pytest.fixture
def daemon(left: Path, listing: Any, tmp_path: Path) -> Iterator[DaemonProcess]:
    folder = tmp_path / "d"
    folder.mkdir()
    with tarfile.open(left / "state.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    (folder / "kek").chmod(0o600)
    running = DaemonProcess(folder, "--flash", listing["flash"])
    running.start()
    try:
        yield running
    finally:
        running.stop()


def check(daemon: DaemonProcess, tenant: str) -> None:
    """Every durable block byte for byte, and none that was forgotten."""
    numbers = [*FIRST, *THEN]
    with Client(daemon.client_config(tenant)) as client:
        ns = client.namespace(NamespaceDescriptor(**DESCRIPTOR))
        for number in numbers:
            into = bytearray(len(content(tenant, number)))
            (status,) = ns.get_into([key(tenant, number)], [into]).statuses
            if number in FORGOTTEN:
                assert status is Status.MISS, (tenant, number)
            else:
                assert status is Status.OK, (tenant, number)
                assert into == content(tenant, number), (tenant, number)


def test_all_that_a_killed_daemon_of_an_earlier_version_had_is_there(
    daemon: DaemonProcess, listing: Any
) -> None:
    log = daemon.log_path.read_text()
    assert "recovery=footers" in log, "the checkpoint of the life before was believed"
    assert "event=segment_scanned" in log, "nothing was left without a footer"
    assert tenants(daemon) == listing["tenants"]
    for tenant in QUOTAS:
        check(daemon, tenant)
    daemon.kill()
    daemon.start()
    assert tenants(daemon) == listing["tenants"]
    for tenant in QUOTAS:
        check(daemon, tenant)
