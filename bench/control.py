"""The section `control`: questions and small gets, where no bytes hide what a message costs.

    python -m bench.control [--rounds 5]

A daemon on loopback with 8,192 small blocks: `exists` of all of them in one call, half present and
half absent, and a single resident block of 64 KiB, over tcp and shm. Times are the caller's, from
call to answer, one call at a time; beside them a bare exchange of the same bytes between two
processes, which is what the loopback and the scheduler take.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import time
from collections.abc import Awaitable, Callable

import numpy as np
import uvloop

from bench import contract, daemon, fabric, scratch
from bench.ours import DEADLINE_NS
from bench.processes import NotRunError
from bench.region import Region
from bench.results import Line, Section
from entresol_client import AsyncClient, Namespace, PutBlock
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.limits import KIB
from entresol_proto.wire.data import Tier

KEYS = 8192
STORED_BYTES = 4 * KIB
BLOCK_BYTES = 64 * KIB
PUT_KEYS = 512
BLOCKS_MAX = 65_536  # the default is one per 256 KiB of flash, and these blocks are small


def keys_of(count: int, salt: str) -> list[bytes]:
    """Engine keys of 32 bytes."""
    return [hashlib.sha256(f"{salt}/{n}".encode()).digest() for n in range(count)]


async def fill(ns: Namespace, keys: list[bytes], block_bytes: int = STORED_BYTES) -> None:
    """Store a small block under each key. Raises: NotRunError when some was refused."""
    block = np.random.default_rng(1).integers(0, 256, block_bytes, np.uint8)
    for at in range(0, len(keys), PUT_KEYS):
        items = [PutBlock(key, block, at + n) for n, key in enumerate(keys[at : at + PUT_KEYS])]
        done = await ns.put(items, deadline_ns=DEADLINE_NS)
        if not done.ok:
            raise NotRunError(f"a put was refused: {set(done.statuses)}")


async def timed(call: Callable[[], object], times: int) -> list[float]:
    """Microseconds of each of so many calls, one after the other."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        pending = call()
        if isinstance(pending, Awaitable):
            await pending
        taken.append((time.perf_counter() - began) * 1e6)
    return taken


async def measure(*, rounds: int, times: int) -> dict[str, list[float]]:
    """Per round: p50 and p99 in microseconds, by name."""
    found: dict[str, list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch.folder())
        region = stack.enter_context(scratch.region(folder, BLOCK_BYTES, 1))
        tier = stack.enter_context(
            daemon.process(folder / "d", {"flash": {"blocks_max": BLOCKS_MAX}})
        )
        calls: dict[str, tuple[Callable[[], object], int]] = {}
        for name in ("tcp", "shm"):
            config = tier.client_config(fabric=name, fallback=False)
            client = await stack.enter_async_context(await AsyncClient.open(config))
            ns = await client.namespace(NamespaceDescriptor(model="bench", cache_salt=name))
            calls |= await _calls(ns, region, name, times)
        bare = await stack.enter_async_context(fabric._minimal(region.into))
        calls["bare_64k"] = (bare, 4 * times)
        for round_ in range(rounds + 1):
            for name, (call, count) in calls.items():
                taken = await timed(call, count)
                if round_:
                    found.setdefault(f"{name}_p50", []).append(float(np.percentile(taken, 50)))
                    found.setdefault(f"{name}_p99", []).append(float(np.percentile(taken, 99)))
    return found


async def _calls(
    ns: Namespace, region: Region, name: str, times: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """What is timed over one fabric, by name, and how often in a round."""
    (one,) = keys_of(1, "one")
    put = await ns.put([PutBlock(one, region.source)], deadline_ns=DEADLINE_NS)
    assert put.ok, put.statuses

    async def get() -> None:
        got = await ns.get_into([one], [region.into])
        assert got.tiers == [Tier.MEMORY], (got.statuses, got.tiers)

    await get()
    region.check()
    calls: dict[str, tuple[Callable[[], object], int]] = {f"get_64k_{name}": (get, 4 * times)}
    if name == "tcp":
        stored = keys_of(KEYS // 2, "there")
        await fill(ns, stored)
        asked = [*stored, *keys_of(KEYS // 2, "absent")]

        async def exists() -> None:
            answer = await ns.exists(asked, deadline_ns=DEADLINE_NS)
            assert answer.prefix_blocks == KEYS // 2, answer.prefix_blocks
            assert not any(answer.present[KEYS // 2 :])

        calls["exists_8192"] = (exists, times)
    return calls


def section(*, rounds: int, times: int) -> Section:
    """Lines with their budgets."""
    found = uvloop.run(measure(rounds=rounds, times=times))
    exists = [us / 1e3 for us in found["exists_8192_p50"]]
    lines = [
        contract.line("exists_8192_p50_ms", "ms", exists),
        Line("exists_8192_p99_ms", "ms", [us / 1e3 for us in found["exists_8192_p99"]]),
        contract.line("get_64k_resident_p50_us", "us", found["get_64k_tcp_p50"]),
        Line("get_64k_resident_p99_us", "us", found["get_64k_tcp_p99"]),
        Line("get_64k_resident_shm_p50_us", "us", found["get_64k_shm_p50"]),
        Line("get_64k_resident_shm_p99_us", "us", found["get_64k_shm_p99"]),
        Line("bare_64k_exchange_p50_us", "us", found["bare_64k_p50"]),
        Line("bare_64k_exchange_p99_us", "us", found["bare_64k_p99"]),
    ]
    return Section(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=50)
    asked = parser.parse_args(argv)
    for line in section(rounds=asked.rounds, times=asked.times).lines:
        print(line.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
