"""Gets from memory through the real daemon, against ceilings measured in the same rounds.

    python -m bench.gets [--rounds 9] [--json]

The daemon is a process of its own, this process is the host. One batch is 32 blocks of 1 MiB, put
once, resident, fetched into the same caller-owned buffers every round. Measured per round, in turn:

- `loopback`: what two plain processes move over one loopback connection (the better of blocking
  sockets and a minimal uvloop protocol), the ceiling of tcp;
- `aes`: what one core's AES-256-GCM opens, in the chunk size of a sealed block, the ceiling of shm;
- `memcpy`: one copy of the same bytes, the ceiling of daemon-opened reads over shm;
- the gets: sealed and host-opened over tcp and shm; daemon-opened over shm, opened ahead by STAGE
  (`shm_staged`) and opened on demand (`shm_daemon`).

A path's turn is of as many batches as fit into a quarter of a second, after a tenth that is not
counted, ceilings alike: a scheduler takes some ten milliseconds to spread threads that were idle
over the processors.

GB are 10^9 plain bytes delivered into the caller's memory, verified.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import uvloop
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench import fabric as ceilings
from bench import scratch
from entresol_client import AsyncClient, Namespace, PutBlock
from entresol_proto import limits
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import Status
from tests.harness import DaemonProcess

MIB = limits.MIB
LEAD_S, TURN_S = 0.1, 0.25
STAGE_HOLD_NS = 600_000_000
assert STAGE_HOLD_NS / 1e9 > LEAD_S + TURN_S, "what is staged lasts for a turn"
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Batch:
    """What is put and fetched."""

    keys: list[bytes]
    blocks: list[Bytes]
    into: list[Bytes]
    whole: Bytes  # `into` in one piece

    @property
    def plain_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def check(self) -> None:
        """Raises: AssertionError unless every byte arrived; wipes the destination."""
        for block, out in zip(self.blocks, self.into, strict=True):
            assert np.array_equal(block, out), "wrong bytes"
            out[:] = 0


def make_batch(count: int, block_bytes: int, seed: int = 1) -> Batch:
    """Incompressible blocks and touched destinations."""
    rng = np.random.default_rng(seed)
    blocks = [rng.integers(0, 256, block_bytes, dtype=np.uint8) for _ in range(count)]
    whole = np.full(count * block_bytes, 1, np.uint8)
    into = [whole[at : at + block_bytes] for at in range(0, len(whole), block_bytes)]
    return Batch([os.urandom(32) for _ in range(count)], blocks, into, whole)


async def _put(ns: Namespace, batch: Batch) -> None:
    items = [
        PutBlock(key, block, position, batch.keys[position - 1] if position else None)
        for position, (key, block) in enumerate(zip(batch.keys, batch.blocks, strict=True))
    ]
    done = await ns.put(items, ack="durable", deadline_ns=60_000_000_000)
    assert all(s in (Status.OK, Status.EXISTS) for s in done.statuses), done.statuses


def _get(ns: Namespace, batch: Batch, place: str) -> Callable[[], Awaitable[None]]:
    async def get() -> None:
        got = await ns.get_into(batch.keys, batch.into, open_at=place)  # type: ignore[arg-type]
        assert got.ok, got.statuses

    return get


@contextlib.contextmanager
def _aes(batch: Batch) -> Iterator[Callable[[], None]]:
    key, nonce, chunk = AESGCM(bytes(32)), bytes(12), limits.CHUNK_BYTES_DEFAULT

    def seal(block: Bytes) -> list[bytes]:
        starts = range(0, block.nbytes, chunk)
        return [key.encrypt(nonce, block[at : at + chunk].tobytes(), b"") for at in starts]

    sealed = [seal(block) for block in batch.blocks]

    def run() -> None:
        for chunks, out in zip(sealed, batch.into, strict=True):
            view = memoryview(out)
            for number, piece in enumerate(chunks):
                at = number * chunk
                key.decrypt_into(nonce, piece, b"", view[at : at + len(piece) - 16])

    yield run


def _memcpy(batch: Batch) -> Callable[[], None]:
    def run() -> None:
        for block, out in zip(batch.blocks, batch.into, strict=True):
            np.copyto(out, block)

    return run


async def measure(
    *, count: int = 32, block_bytes: int = MIB, rounds: int = 9
) -> dict[str, list[float]]:
    """GB/s of every path, one number per round."""
    batch = make_batch(count, block_bytes)
    results: dict[str, list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch.folder())
        program = ("-m", "bench.daemon", str(os.getpid()))  # the dev daemon, bound to this process
        daemon = stack.enter_context(DaemonProcess(folder / "d", program=program))
        paths: dict[str, Callable[[], object]] = {"memcpy": _memcpy(batch)}
        paths["aes"] = stack.enter_context(_aes(batch))
        flat = memoryview(batch.whole)  # the ceilings receive where the gets do
        paths["blocking"] = stack.enter_context(ceilings._blocking(flat))
        paths["minimal"] = await stack.enter_async_context(ceilings._minimal(flat))
        staged: Namespace | None = None
        for name in ("tcp", "shm"):
            config = daemon.client_config(fabric=name, fallback=False)
            client = await stack.enter_async_context(await AsyncClient.open(config))
            ns = await client.namespace(NamespaceDescriptor(model="bench", cache_salt=name))
            await _put(ns, batch)
            paths[name] = _get(ns, batch, "host")
            if name == "shm":
                paths["shm_daemon"] = _get(ns, batch, "daemon")
                paths["shm_staged"] = _get(ns, batch, "daemon")
                staged = ns
        assert staged is not None
        for round_ in range(rounds + 2):
            for name, path in paths.items():
                if name == "shm_staged":
                    held = await staged.stage(batch.keys, hold_ns=STAGE_HOLD_NS, open_at="daemon")
                    assert set(held.statuses) == {Status.OK}, held.statuses
                took = await _turn(path)
                if name in ("tcp", "shm", "shm_daemon", "shm_staged"):
                    batch.check()
                if round_ >= 2:  # two rounds to warm caches, maps and staging memory
                    results.setdefault(name, []).append(batch.plain_bytes / took / 1e9)
            await asyncio.sleep(STAGE_HOLD_NS / 1e9)  # the hold ends before the next one begins
    results["loopback"] = [
        max(pair) for pair in zip(results["blocking"], results["minimal"], strict=True)
    ]
    return results


async def _turn(path: Callable[[], object]) -> float:
    """Seconds per batch."""
    for least_s in (LEAD_S, TURN_S):
        began, batches = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < least_s:
            waiting = path()
            if isinstance(waiting, Awaitable):
                await waiting
            batches += 1
    return took / batches


RATIOS = (
    ("get_resident_tcp_vs_loopback", "tcp", "loopback"),
    ("get_resident_shm_sealed_vs_aes", "shm", "aes"),
    ("get_resident_shm_plain_vs_memcpy", "shm_staged", "memcpy"),
    ("get_resident_shm_opened_on_demand_vs_aes", "shm_daemon", "aes"),
)


def ratios(results: dict[str, list[float]]) -> dict[str, list[float]]:
    """Round by round, each path over its ceiling."""
    return {
        name: [a / b for a, b in zip(results[path], results[ceiling], strict=True)]
        for name, path, ceiling in RATIOS
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=float, default=1.0, help="block size")
    parser.add_argument("--count", type=int, default=32, help="blocks per batch")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    results = uvloop.run(
        measure(count=asked.count, block_bytes=int(asked.mib * MIB), rounds=asked.rounds)
    )
    if asked.json:
        print(json.dumps({"gbps": results, "ratios": ratios(results)}))
        return 0
    for name, values in results.items():
        print(
            f"{name:12} {statistics.median(values):6.2f} GB/s  {min(values):.2f}..{max(values):.2f}"
        )
    for name, values in ratios(results).items():
        print(f"{name:42} {statistics.median(values):5.2f}  {min(values):.2f}..{max(values):.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
