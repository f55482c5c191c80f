"""Makes `state_v1/`: what a daemon of this version leaves on disk, and what was put into it.

    python tests/vectors/make_state.py FOLDER

A later version must start on it and give every block back (`tests/daemon/test_golden_state.py`).
What is there once is never made again: a new format gets a folder of its own.

In the archive: the state folder with data file, checkpoint and keyring after a clean stop, the KEK,
and the key file of a tenant that keeps its own. Certificates are left out, because they end.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from entresol_client import Client, PutBlock
from entresol_client.tenant_key import TenantKey
from entresol_proto.ids import NamespaceDescriptor
from tests.harness import DaemonProcess

FLASH = "192MiB"  # room for a segment of each life: nothing is evicted
KIB = 1024
# Namespaces by name: descriptor, whether the tenant keeps its key, and the codec of the daemon.
SPACES = {
    "raw": ({"model": "golden", "cache_salt": "raw"}, False, "raw"),
    "fast": ({"model": "golden", "dtype": "bf16", "cache_salt": "fast"}, False, "fast"),
    "dense": ({"model": "golden", "dtype": "bf16", "cache_salt": "dense"}, False, "dense"),
    "zstd": ({"model": "golden", "dtype": "fp16", "cache_salt": "zstd"}, False, "zstd"),
    "host": ({"model": "golden", "dtype": "bf16", "cache_salt": "host"}, True, "fast"),
}
BLOCKS = 3  # of each
LENGTHS = (4 * KIB, 20 * KIB, 33 * KIB)


def content(space: str, number: int) -> bytes:
    """A block: values as KV has them, so that codecs have something to do."""
    seed = int.from_bytes(hashlib.sha256(f"{space}/{number}".encode()).digest()[:8], "big")
    values = np.random.default_rng(seed).standard_normal(LENGTHS[number] // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def key(space: str, number: int) -> bytes:
    """Engine keys of 8, 16 and 32 bytes."""
    return hashlib.sha256(f"key/{space}/{number}".encode()).digest()[: (8, 16, 32)[number]]


def fill(folder: Path, tenant_key: Path) -> list[dict[str, Any]]:
    """Live once for every codec, as the version that is running does; what was stored."""
    stored = []
    for codec in ("raw", "fast", "dense", "zstd"):
        daemon = DaemonProcess(folder, "--flash", FLASH, "--codec", codec)
        daemon.start()
        try:
            for space, (descriptor, own_key, wanted) in SPACES.items():
                if wanted != codec:
                    continue
                config = daemon.client_config()
                if own_key:
                    config = replace(config, tenant_key=tenant_key)
                with Client(config) as client:
                    ns = client.namespace(NamespaceDescriptor(**descriptor))
                    for number in range(BLOCKS):
                        data = content(space, number)
                        parent = key(space, number - 1) if number else None
                        put = PutBlock(key(space, number), data, number, parent, (number, 7))
                        done = ns.put([put], ack="durable")
                        assert done.stored == 1, done.statuses
                        stored.append(
                            {
                                "space": space,
                                "key": key(space, number).hex(),
                                "bytes": len(data),
                                "sha256": hashlib.sha256(data).hexdigest(),
                            }
                        )
        finally:
            daemon.stop()
    return stored


def archive(members: dict[str, Path]) -> bytes:
    """A tar file of these files and folders, without what tells of this machine."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        return info if info.isfile() or info.isdir() else None

    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:xz", preset=9) as tar:
        for name, path in members.items():
            tar.add(path, name, filter=plain)
    return raw.getvalue()


def main(out: Path) -> None:
    """Write archive and listing into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder, own = Path(name) / "d", Path(name) / "tenant.key"
        TenantKey.generate(1_000).save(own, new=True)
        stored = fill(folder, own)
        whole = archive({"state": folder / "state", "kek": folder / "kek", "tenant.key": own})
    (out / "state.tar.xz").write_bytes(whole)
    spaces = {
        name: {"descriptor": descriptor, "own_key": own_key}
        for name, (descriptor, own_key, _) in SPACES.items()
    }
    text = json.dumps({"flash": FLASH, "spaces": spaces, "blocks": stored}, indent=1)
    (out / "listing.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
