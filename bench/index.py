"""Index: memory per block and look-up rates at 5 million blocks (or --blocks).

    python -m bench.index

Memory is the growth of the process's resident set, so bucket heads, free list and the per-segment
slot lists are in it; whoever measures it more than once does so in processes of their own, because
freed memory is used again. Rates are of one thread; the keys are random and looked up in random
order.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from array import array
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt

from entresol_daemon.flash.index import Index

SEGMENT_BLOCKS = 64  # 64 MiB segments of 1 MiB blocks
NAMESPACE = b"namespace-bench-"


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_per_block(blocks: int) -> float:
    """Resident bytes per block, measured in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return float(pool.submit(measure, blocks, rates=False).result()["bytes_per_block_resident"])


def measure(blocks: int, *, rates: bool = True) -> dict[str, float]:
    """Memory of an index of so many blocks; with `rates` look-ups, insertions, removals too."""
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, (blocks, 2), dtype=np.uint64)
    zeros = np.zeros(blocks, np.uint32)
    segments = np.arange(blocks, dtype=np.uint32) // SEGMENT_BLOCKS
    gc.collect()
    before = resident_bytes()
    index = Index(blocks, seed=b"bench")
    began = time.perf_counter()
    slots = index.insert_many(
        zeros + index.intern(NAMESPACE), keys[:, 0], keys[:, 1], segment=segments, offset=zeros,
        sealed_bytes=zeros, plain_bytes=zeros, position=zeros,
    )  # fmt: skip
    bulk = time.perf_counter() - began
    per_segment = [
        array("I", slots[at : at + SEGMENT_BLOCKS].astype(np.uint32).tobytes())
        for at in range(0, blocks, SEGMENT_BLOCKS)
    ]
    index._freed[:] = 0  # touch the free list's pages too: the worst case
    del slots
    gc.collect()
    grown = resident_bytes() - before
    assert len(per_segment) == -(-blocks // SEGMENT_BLOCKS)
    result = {
        "blocks": blocks,
        "bytes_per_block_resident": round(grown / blocks, 1),
        "bytes_per_block_columns": round(index.memory_bytes() / blocks, 1),
        "bulk_insert_per_s": round(blocks / bulk),
    }
    return result | _rates(index, keys, rng.permutation(blocks)) if rates else result


def _rates(
    index: Index, keys: npt.NDArray[np.uint64], order: npt.NDArray[np.int64]
) -> dict[str, float]:
    """Per second: look-ups by batch, insertions and removals one by one, removals in bulk."""
    result: dict[str, float] = {}
    blocks = len(keys)
    for batch in (1, 8, 32, 512, 4096):
        asked = [
            keys[order[at : at + batch]].tobytes()
            for at in range(0, min(blocks - batch, 400_000), batch)
        ]
        began = time.perf_counter()
        for raw in asked:
            index.lookup(NAMESPACE, raw)
        seconds = time.perf_counter() - began
        result[f"lookup_batch_{batch}_keys_per_s"] = round(len(asked) * batch / seconds)
    victims = order[:100_000]
    raw_keys = [keys[n].tobytes() for n in victims.tolist()]
    began = time.perf_counter()
    for slot in victims.tolist():
        index.remove(slot)
    result["remove_per_s"] = round(len(victims) / (time.perf_counter() - began))
    began = time.perf_counter()
    for raw in raw_keys:
        index.insert(NAMESPACE, raw, segment=0, offset=0, sealed_bytes=0, plain_bytes=0, position=0)
    result["insert_per_s"] = round(len(victims) / (time.perf_counter() - began))
    began = time.perf_counter()
    index.remove_many(np.sort(order[100_000:200_000]))
    result["bulk_remove_per_s"] = round(100_000 / (time.perf_counter() - began))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=5_000_000)
    print(json.dumps(measure(parser.parse_args().blocks), indent=1))


if __name__ == "__main__":
    main()
