"""The smallest proof that two machines share a wire: perftest's READ between them, and a cut wire.

`python3 -m tests.rdma.podsmoke dpu` in one guest, `... host` in the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.rdma import wire

POD = Path("/pod")
OUT = Path("/out")
PORT = 18515
SIZES_BYTES = (65536, 1048576)
ITERATIONS = {65536: 400, 1048576: 60}
WAIT_S = 180.0
RUN_TIMEOUT_S = 180.0


def _listening(port: int) -> bool:
    """Whether something listens on a TCP port here, without connecting to it."""
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    return re.search(rf":{port:04X} [0-9A-F]+:0000 0A ", lines) is not None


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{path.name} did not come within {WAIT_S:.0f} s")
        time.sleep(0.1)


def _perftest(size: int, *peer: str) -> list[str]:
    return [
        "ib_read_bw", "-d", "rxe0", "-F", "-p", str(PORT), "-s", str(size),
        "-n", str(ITERATIONS[size]), *peer,
    ]  # fmt: skip


def dpu() -> int:
    """Serve one perftest run per size, saying when each may begin."""
    print(f"{platform.machine()} {platform.release()} serves", flush=True)
    for size in SIZES_BYTES:
        with subprocess.Popen(
            _perftest(size), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            while not _listening(PORT):
                if server.poll() is not None:
                    return 1
                time.sleep(0.1)
            (POD / f"ready-{size}").touch()
            if server.wait(WAIT_S + RUN_TIMEOUT_S):
                return 1
    return 0


def _reaches(address: str) -> bool:
    """Whether the peer's stack answers, if only by refusing: port 9 has no service."""
    with contextlib.closing(socket.socket()) as probe:
        probe.settimeout(5)
        try:
            probe.connect((address, 9))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return True


def host() -> int:
    """Read from the DPU; then cut our end of the wire, see it, and heal it."""
    peer = os.environ["ENTRESOL_RDMA_PEER"]
    results: dict[str, object] = {"machine": platform.machine(), "kernel": platform.release()}
    for size in SIZES_BYTES:
        _wait_for(POD / f"ready-{size}")
        done = subprocess.run(
            _perftest(size, peer),
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        found = re.search(rf"^\s*{size}\s+\d+\s+\S+\s+([\d.]+)", done.stdout, re.M)
        if done.returncode or not found:
            print(done.stdout[-500:], done.stderr[-500:])
            return 1
        results[f"read_{size}_mib_per_s"] = float(found[1])
        print(f"READ of {size} bytes: {found[1]} MiB/s", flush=True)
    with wire.whole_afterwards("rxe0"):
        wire.cut("rxe0")
        results["reached_while_cut"] = _reaches(peer)
    results["reached_when_healed"] = _reaches(peer)
    (OUT / "podsmoke.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))
    return 0 if results["reached_when_healed"] and not results["reached_while_cut"] else 1


if __name__ == "__main__":
    sys.exit({"dpu": dpu, "host": host}[sys.argv[1]]())
