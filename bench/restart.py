"""Restart: how long `Engine.open` takes for a million blocks, from footers and from the checkpoint.

    PYTHONPATH=daemon:proto python bench/restart.py --folder /var/tmp

Builds a sparse data file of 256 MiB segments with real headers, footer tables and trailers for
blocks of 1 MiB (payloads are holes: opening does not read them), opens it from the footers, closes
it cleanly, and opens it from the checkpoint. Needs about 100 MB in the folder; removes them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from entresol_daemon.compute import ThreadCompute
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.engine import Engine, EngineOptions, extent_bytes
from entresol_daemon.flash.file_device import FileDevice
from entresol_daemon.flash.segment import (
    DATA_OFFSET,
    ROW,
    HeaderState,
    RecordKind,
    SegmentHeader,
    Superblock,
    encode_footer,
    encode_header,
    encode_superblock,
    footer_bytes,
)

SEGMENT = 256 << 20
SEALED = (1 << 20) - 96
NAMESPACES = 64
FREE = 4


def build(path: Path, blocks: int) -> int:
    """Write the sparse file; returns its segments."""
    per_segment = (SEGMENT - BLOCK - footer_bytes(256)) // extent_bytes(SEALED)
    used = -(-blocks // per_segment)
    count = used + FREE
    mirror = DATA_OFFSET + count * SEGMENT
    superblock = Superblock(os.urandom(16), os.urandom(32), SEGMENT, count, mirror, generation=1)
    rng = np.random.default_rng(2)
    spaces = rng.integers(0, 2**64, (NAMESPACES, 2), dtype=np.uint64)
    with path.open("wb") as file:
        file.truncate(mirror + BLOCK)
        for copy, offset in ((0, 0), (1, mirror)):
            os.pwrite(file.fileno(), encode_superblock(superblock, copy), offset)
        for segment in range(used):
            rows = min(per_segment, blocks - segment * per_segment)
            table = np.zeros(rows, ROW)
            space = spaces[rng.integers(0, NAMESPACES, rows)]
            table["ns0"], table["ns1"] = space[:, 0], space[:, 1]
            keys = rng.integers(0, 2**64, (rows, 2), dtype=np.uint64)
            table["key0"], table["key1"] = keys[:, 0], keys[:, 1]
            table["lsn"] = (1 << 40) + segment * per_segment + np.arange(rows)
            table["offset"] = 1 + np.arange(rows) * (extent_bytes(SEALED) // BLOCK)
            table["sealed"] = table["plain"] = SEALED
            table["kind"] = RecordKind.BLOCK
            sequence = (1 << 32) + segment + 1
            stream = bytes(15) + bytes([segment % 8])
            used_bytes = BLOCK + rows * extent_bytes(SEALED)
            at, footer = encode_footer(
                superblock, segment, sequence, stream, used_bytes, table.tobytes()
            )
            header = SegmentHeader(HeaderState.OPEN, segment, sequence, stream)
            start = superblock.segment_at(segment)
            os.pwrite(file.fileno(), encode_header(superblock, header), start)
            os.pwrite(file.fileno(), footer, start + at)
    return count


async def reopen(path: Path, options: EngineOptions, *, clean: bool) -> dict[str, object]:
    compute = ThreadCompute(2)
    device = await FileDevice.open(path, None, io_threads=8)
    began = time.perf_counter()
    engine = await Engine.open(device, options, compute=compute, now_ns=time.monotonic_ns)
    opened = time.perf_counter() - began
    report = engine.recovery
    began = time.perf_counter()
    await engine.close(clean=clean)
    closed = time.perf_counter() - began
    await device.close()
    await compute.close()
    return {
        "kind": report.kind.value,
        "blocks": report.blocks,
        "segments": report.segments,
        "open_s": round(opened, 2),
        "close_s": round(closed, 2),
        "direct": device.direct,
    }


def reopen_here(path: Path, options: EngineOptions, clean: bool) -> dict[str, object]:
    found = asyncio.run(reopen(path, options, clean=clean))
    found["resident_max_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def in_new_process(path: Path, options: EngineOptions, clean: bool) -> dict[str, object]:
    """As after a restart: nothing is imported or warm."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(reopen_here, path, options, clean).result()


def measure(blocks: int, folder: Path | None = None) -> dict[str, float]:
    """Seconds of `Engine.open` in a fresh process: `crash_s` from footers, `warm_s` from the
    checkpoint of the clean close in between."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "data"
        build(path, blocks)
        options = EngineOptions(
            segment_bytes=SEGMENT,
            blocks_max=blocks + 1024,
            checkpoint_path=Path(name) / "index.arrow",
        )
        crash, warm = (in_new_process(path, options, clean) for clean in (True, False))
    assert (crash["kind"], warm["kind"]) == ("footers", "checkpoint"), (crash, warm)
    assert crash["blocks"] == warm["blocks"] == blocks, (crash, warm)
    return {"crash_s": float(str(crash["open_s"])), "warm_s": float(str(warm["open_s"]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "data"
        build(path, given.blocks)
        options = EngineOptions(
            segment_bytes=SEGMENT,
            blocks_max=given.blocks + 1024,
            checkpoint_path=Path(folder) / "index.arrow",
        )
        results = [in_new_process(path, options, clean) for clean in (True, False)]
        results.append(
            {
                "checkpoint_bytes": (Path(folder) / "index.arrow").stat().st_size,
                "data_file_bytes_allocated": path.stat().st_blocks * 512,
            }
        )
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
