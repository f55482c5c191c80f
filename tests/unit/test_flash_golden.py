"""Data files of every released format version must open and give back exactly what was in them.

`tests/vectors/datafile_v1/` holds a small file and its listing: sealed segments, one that a crash
left open, removed blocks, a dropped namespace, a freed segment. Run this module as a script to make
the vectors of a *new* version; the ones of a released version are never made again.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simloop
from flashlab import (
    FORGOTTEN,
    NAMESPACES,
    OPTIONS,
    device_bytes,
    drop_namespace,
    get_all,
    key_of,
    open_engine,
    put,
    stream_of,
)

from entresol_daemon.flash.engine import EngineOptions, RecoveryKind
from entresol_daemon.flash.segment import FORMAT_VERSION
from entresol_daemon.flash.sim import SimDevice
from entresol_proto.status import FormatError, Status

VECTORS = Path(__file__).parent.parent / "vectors" / "datafile_v1"
SEGMENT = 32 * 1024
SEGMENTS = 14
SMALL: EngineOptions = replace(OPTIONS, segment_bytes=SEGMENT, blocks_max=128)


async def build() -> tuple[bytes, dict[str, Any]]:
    """A life on a fresh device; returns its image after a crash and what must be found in it."""
    device = SimDevice(device_bytes(SEGMENTS, SEGMENT), seed=1)
    engine = await open_engine(device, SMALL, seed=1)
    rng = random.Random(1)
    for number in range(14):
        name = (NAMESPACES[number % 3], key_of(number))
        _, future = put(engine, name, rng.randbytes(rng.randrange(10, 9000)))
        assert await future is Status.OK
    await engine.evict(0, lambda slots: slots[:1])
    engine.remove(int(engine.index.live_slots()[3]), FORGOTTEN)
    drop_namespace(engine, NAMESPACES[2])
    _, future = put(engine, (NAMESPACES[2], key_of(50)), b"after the drop")
    await future
    await engine.barrier()
    blocks = []
    for (namespace, key), (status, data) in sorted((await get_all(engine)).items()):
        assert status is Status.OK
        slot = engine.index.find(namespace, key)
        blocks.append(
            {
                "namespace": namespace.hex(),
                "key": key.hex(),
                "stream": stream_of(namespace).hex(),
                "sealed_bytes": len(data),
                "plain_bytes": engine.index.m_plain_bytes[slot],
                "position": engine.index.m_position[slot],
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        )
    listing = {
        "version": FORMAT_VERSION,
        "segment_bytes": SEGMENT,
        "segments": SEGMENTS,
        "uuid": engine._superblock.uuid.hex(),
        "blocks": blocks,
    }
    await engine._writer.drain()
    await engine.close(clean=False)
    return device.image(), listing


def load() -> tuple[bytearray, dict[str, Any]]:
    image = bytearray(gzip.decompress((VECTORS / "data.gz").read_bytes()))
    return image, json.loads((VECTORS / "expected.json").read_text())


def test_the_golden_file_opens_and_is_what_its_listing_says() -> None:
    image, listing = load()

    async def life() -> None:
        engine = await open_engine(SimDevice(len(image), image=image), SMALL)
        assert engine.recovery.kind is RecoveryKind.FOOTERS
        assert engine.recovery.segments == listing["segments"]
        assert engine.recovery.segments_scanned >= 1
        assert engine.recovery.segments_from_footer >= 1
        assert engine.recovery.tombstones >= 2
        assert engine.segment_bytes == listing["segment_bytes"]
        assert engine._superblock.uuid.hex() == listing["uuid"]
        found = await get_all(engine)
        assert len(found) == len(listing["blocks"])
        for block in listing["blocks"]:
            name = (bytes.fromhex(block["namespace"]), bytes.fromhex(block["key"]))
            status, data = found[name]
            assert status is Status.OK
            assert len(data) == block["sealed_bytes"]
            assert hashlib.sha256(data).hexdigest() == block["sha256"]
            slot = engine.index.find(*name)
            assert engine.index.m_plain_bytes[slot] == block["plain_bytes"]
            assert engine.index.m_position[slot] == block["position"]
            where = engine.segment_info(engine.index.m_segment[slot])
            assert where.stream.hex() == block["stream"]
        await engine.close()

    simloop.run(life())


def test_a_golden_file_of_a_later_version_is_refused() -> None:
    image, _ = load()
    for offset in (0, len(image) - 4096):
        image[offset + 8] = FORMAT_VERSION + 1
    device = SimDevice(len(image), image=image)
    with pytest.raises(FormatError, match=f"version {FORMAT_VERSION + 1}, this build reads"):
        simloop.run(open_engine(device, SMALL))
    assert device.image() == bytes(image), "a file of another version is never written"


if __name__ == "__main__":
    asyncio.set_event_loop(None)
    made, about = simloop.run(build())
    VECTORS.mkdir(parents=True, exist_ok=True)
    (VECTORS / "data.gz").write_bytes(gzip.compress(made, 9, mtime=0))
    (VECTORS / "expected.json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"{len(made)} bytes, {len(about['blocks'])} blocks")
