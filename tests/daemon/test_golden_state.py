"""The real daemon starts on what every released version left on disk, and serves all of it.

`tests/vectors/state_v1/` is the whole state of a daemon: data file, checkpoint, keyring,
namespaces, its KEK, and the key file of a tenant that keeps its own (`make_state.py`). Other golden
tests read parts of such files in one process; here a daemon comes up on them, as after an upgrade.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import DaemonProcess

from entresol_client import Client, ClientConfig, PutBlock
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import Status

VECTORS = Path(__file__).parent.parent / "vectors"
LEFT = sorted(VECTORS.glob("state_v*"))

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(300)]


def unpacked(left: Path, folder: Path) -> Path:
    """The state of a released version, as a daemon of that version left it."""
    folder.mkdir()
    with tarfile.open(left / "state.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    for path in (folder / "kek", folder / "tenant.key"):
        path.chmod(0o600)
    return folder


@pytest.fixture(params=["checkpoint", "crash"])
def recovery(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=LEFT, ids=[path.name for path in LEFT])
def left(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def listing(left: Path) -> Any:
    return json.loads((left / "listing.json").read_text(encoding="utf-8"))


@pytest.fixture
def daemon(left: Path, listing: Any, recovery: str, tmp_path: Path) -> Iterator[DaemonProcess]:
    folder = unpacked(left, tmp_path / "d")
    if recovery == "crash":  # its last minute was not written down
        (folder / "state" / "index.arrow").unlink()
    running = DaemonProcess(folder, "--flash", listing["flash"])
    running.start()
    try:
        yield running
    finally:
        running.stop()


def config_of(daemon: DaemonProcess, *, own_key: bool) -> ClientConfig:
    config = daemon.client_config()
    return replace(config, tenant_key=daemon.directory / "tenant.key") if own_key else config


def read_all(daemon: DaemonProcess, listing: Any) -> int:
    """Every block that was ever durable, byte for byte; how many there were."""
    found = 0
    for name, space in listing["spaces"].items():
        rows = [row for row in listing["blocks"] if row["space"] == name]
        with Client(config_of(daemon, own_key=space["own_key"])) as client:
            ns = client.namespace(NamespaceDescriptor(**space["descriptor"]))
            into = [bytearray(row["bytes"]) for row in rows]
            got = ns.get_into([bytes.fromhex(row["key"]) for row in rows], into)
            assert got.statuses == [Status.OK] * len(rows), (name, got.statuses)
            for row, data in zip(rows, into, strict=True):
                assert hashlib.sha256(data).hexdigest() == row["sha256"], row
        found += len(rows)
    return found


def test_every_block_of_a_released_version_is_served(
    daemon: DaemonProcess, listing: Any, recovery: str
) -> None:
    log = daemon.log_path.read_text()
    assert ("recovery=checkpoint" in log) is (recovery == "checkpoint"), log[-2000:]
    assert read_all(daemon, listing) == len(listing["blocks"]) == 15


def test_it_lives_on_there(daemon: DaemonProcess, listing: Any, recovery: str) -> None:
    """What is stored now and what was stored then survive the next start, side by side."""
    with Client(daemon.client_config()) as client:
        ns = client.namespace(NamespaceDescriptor(model="new"))
        done = ns.put([PutBlock(b"sixteen byte key", b"new" * 1000)], ack="durable")
        assert done.ok, done.statuses
    daemon.kill()
    daemon.start()
    assert read_all(daemon, listing) == len(listing["blocks"])
    with Client(daemon.client_config()) as client:
        ns = client.namespace(NamespaceDescriptor(model="new"))
        into = bytearray(3000)
        assert ns.get_into([b"sixteen byte key"], [into]).ok
        assert into == b"new" * 1000


def test_another_kek_opens_nothing_of_it(left: Path, listing: Any, tmp_path: Path) -> None:
    folder = unpacked(left, tmp_path / "d")
    (folder / "kek").unlink()  # the dev daemon makes a new one where there is none
    before = (folder / "state" / "keyring.json").read_bytes()
    running = DaemonProcess(folder, "--flash", listing["flash"])
    with pytest.raises(RuntimeError, match=r"KEK|key-encryption key"):
        running.start()
    assert (folder / "state" / "keyring.json").read_bytes() == before
    shutil.rmtree(folder)
