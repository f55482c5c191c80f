"""Makes `killed_v1/`: what a daemon of this version leaves on disk when it is killed.

    python tests/vectors/make_killed.py FOLDER

Beside what `make_state.py` keeps of a clean stop: segments without footers, removals, two tenants
with quotas of their own, and a data key of a second version, beside the checkpoint of the life
before. What is there once is never made again: a new format gets a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from entresol_client import Client, PutBlock
from entresol_proto.ids import NamespaceDescriptor
from tests.harness import DaemonProcess
from tests.vectors.make_state import FLASH, archive

DESCRIPTOR = {"model": "killed", "dtype": "bf16"}
QUOTAS = {
    "dev": ("--flash", "100MiB", "--index-blocks", "5000", "--weight", "3"),
    "other": ("--dram", "64MiB", "--sessions", "9", "--watchers", "5"),
}
FIRST, THEN = range(6), range(6, 12)  # blocks of either life
FORGOTTEN = (2, 8)  # both in the second


def content(tenant: str, number: int) -> bytes:
    """A block, of another length each."""
    return hashlib.shake_256(f"{tenant}/{number}".encode()).digest(3000 + 700 * number)


def key(tenant: str, number: int) -> bytes:
    """Its engine key."""
    return hashlib.sha256(f"key/{tenant}/{number}".encode()).digest()


def entresol(daemon: DaemonProcess, *arguments: str) -> Any:
    """What the command says as JSON."""
    program = "from entresol_client.cli.main import main; raise SystemExit(main())"
    config = ("--config", str(daemon.directory / "client.toml"), "--json")
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, *config], check=True, capture_output=True
    )
    return json.loads(done.stdout)


def tenants(daemon: DaemonProcess) -> dict[str, Any]:
    """Quota and key version of each, which no crash may change."""
    rows = entresol(daemon, "tenant", "list")["tenants"]
    return {row["name"]: {"quota": row["quota"], "key": row["dek_version"]} for row in rows}


def store(daemon: DaemonProcess, numbers: range) -> None:
    """Durable blocks of both tenants."""
    for tenant in QUOTAS:
        with Client(daemon.client_config(tenant)) as client:
            ns = client.namespace(NamespaceDescriptor(**DESCRIPTOR))
            puts = [PutBlock(key(tenant, n), content(tenant, n), n) for n in numbers]
            assert ns.put(puts, ack="durable").stored == len(puts)


def live(daemon: DaemonProcess) -> dict[str, Any]:
    """A life that ends well and one that is to be killed; what each tenant has then."""
    daemon.start()
    store(daemon, FIRST)
    for tenant, quota in QUOTAS.items():
        entresol(daemon, "tenant", "quota", tenant, *quota)
    daemon.stop()
    daemon.start()
    entresol(daemon, "tenant", "rotate", "other")
    store(daemon, THEN)
    for tenant in QUOTAS:
        with Client(daemon.client_config(tenant)) as client:
            ns = client.namespace(NamespaceDescriptor(**DESCRIPTOR))
            assert ns.forget([key(tenant, n) for n in FORGOTTEN]).count == len(FORGOTTEN)
    return tenants(daemon)


def main(out: Path) -> None:
    """Write archive and listing into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name) / "d"
        daemon = DaemonProcess(folder, "--flash", FLASH)
        try:
            found = live(daemon)
        finally:
            daemon.kill()
        whole = archive({"state": folder / "state", "kek": folder / "kek"})
    (out / "state.tar.xz").write_bytes(whole)
    text = json.dumps({"flash": FLASH, "tenants": found}, indent=1)
    (out / "listing.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
