"""What a fetch costs the daemon: CPU seconds of its process, by block count.

    python -m bench.daemon_cost [--fetches 400] [--json]

Over shm with host-opened blocks the daemon moves no bytes: what it spends is interpreter time (and
the syscalls of its control stream, TLS included). Batches of 1 and of 32 resident blocks give the
cost of a block (the slope) and of a fetch (the rest), release and metrics included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import uvloop

from bench.gets import _get, _put, make_batch
from entresol_client import AsyncClient
from entresol_proto import limits
from entresol_proto.ids import NamespaceDescriptor
from tests.harness import DaemonProcess

SMALL, LARGE = 1, 32


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process (proc(5): first field of schedstat)."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
        except FileNotFoundError:
            continue  # a thread that just ended
    return total


async def measure(*, fetches: int = 400, rounds: int = 5) -> dict[str, list[float]]:
    """Microseconds of daemon CPU per round: `per_block_us`, `per_fetch_us`, `idle_us_per_s`."""
    results: dict[str, list[float]] = {"per_block_us": [], "per_fetch_us": []}
    with (
        tempfile.TemporaryDirectory(prefix="ent-bench-") as folder,
        DaemonProcess(Path(folder) / "d") as daemon,
    ):
        assert daemon.process is not None
        pid = daemon.process.pid
        config = daemon.client_config(fabric="shm", fallback=False)
        async with await AsyncClient.open(config) as client:
            ns = await client.namespace(NamespaceDescriptor(model="bench"))
            gets = {}
            for count in (SMALL, LARGE):
                batch = make_batch(count, 64 * limits.KIB, seed=count)
                await _put(ns, batch)
                gets[count] = _get(ns, batch, "host")
            for round_ in range(rounds + 1):
                cost = {}
                for count, get in gets.items():
                    before = cpu_ns(pid)
                    for _ in range(fetches):
                        await get()
                    cost[count] = (cpu_ns(pid) - before) / fetches / 1000
                if round_:
                    slope = (cost[LARGE] - cost[SMALL]) / (LARGE - SMALL)
                    results["per_block_us"].append(slope)
                    results["per_fetch_us"].append(cost[SMALL] - SMALL * slope)
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fetches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    results = uvloop.run(measure(fetches=asked.fetches, rounds=asked.rounds))
    if asked.json:
        print(json.dumps(results))
    for name, values in () if asked.json else results.items():
        print(f"{name:14} {statistics.median(values):7.1f}  {min(values):.1f}..{max(values):.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
