"""What a fetch costs the daemon: CPU time of its process, by block count.

    python -m bench.daemon_cost [--fetches 1000] [--json]

Over shm with host-opened blocks the daemon moves no bytes: its user time is the interpreter and the
native code of TLS and key derivation, the rest is the kernel's part of the control stream. Batches
of 1 and of 32 resident blocks give the cost of a block (the slope) and of a fetch (what is left of
a batch of one), release, metrics and answer included.
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


def cpu_us(pid: int) -> tuple[float, float]:
    """(user, total) CPU microseconds of a process (proc(5): utime and stime of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick_us = 1e6 / os.sysconf("SC_CLK_TCK")
    user, system = int(fields[11]) * tick_us, int(fields[12]) * tick_us
    return user, user + system


async def measure(*, fetches: int = 1000, rounds: int = 5) -> dict[str, list[float]]:
    """Microseconds per round: user time `per_block_us` and `per_fetch_us`, and `cpu_..` with the
    kernel's part."""
    results: dict[str, list[float]] = {
        name: []
        for name in ("per_block_us", "per_fetch_us", "cpu_per_block_us", "cpu_per_fetch_us")
    }
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
                cost: dict[int, tuple[float, float]] = {}
                for count, get in gets.items():
                    before = cpu_us(pid)
                    for _ in range(fetches):
                        await get()
                    after = cpu_us(pid)
                    cost[count] = (
                        (after[0] - before[0]) / fetches,
                        (after[1] - before[1]) / fetches,
                    )
                if not round_:
                    continue
                for at, prefix in ((0, ""), (1, "cpu_")):
                    slope = (cost[LARGE][at] - cost[SMALL][at]) / (LARGE - SMALL)
                    results[f"{prefix}per_block_us"].append(slope)
                    results[f"{prefix}per_fetch_us"].append(cost[SMALL][at] - SMALL * slope)
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fetches", type=int, default=1000)
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
