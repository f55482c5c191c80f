"""Writing again, at opening, what is only believed because it can be read.

Who died, or whose flush failed, may have left bytes that every read shows and no later flush saves:
a page cache drops its claim on them with the first failure. Recovery must not build on those: it
lists records in footers, forgets tombstones once segments are free, and answers that a block is
there for good. So what no flush is known to cover is written once more, at its place, before the
superblocks are written and flushed; nothing is served before that.

Invariant: only bytes that were verified a moment ago are written, where they were read.
(A failed fsync: Rebello et al., "Can Applications Recover from fsync Failures?", ATC 2020.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entresol_daemon.flash.device import BLOCK, Device, IoOp, aligned_buffer
from entresol_daemon.flash.looking import Looked
from entresol_daemon.flash.segment import ROW, Superblock, decode_header, extent_bytes
from entresol_proto import limits
from entresol_proto.status import DeviceError

TRIES_MAX = 3  # of a write that fails
OP_BYTES_MAX = limits.MIB
BATCH_BYTES_MAX = 16 * limits.MIB


async def renew_records(
    device: Device,
    superblock: Superblock,
    life: tuple[int, int],
    raw: memoryview,
    table: bytes | bytearray,
) -> bool:
    """Write a segment's header and the records that `table` lists (rows, as a scan of `raw` found
    them), from `raw`, the whole segment. `life`: its number and sequence; a header of another, as a
    read may give, is not written. False when the device does not take all of it."""
    number, sequence = life
    header = decode_header(superblock, number, bytes(raw[:BLOCK]))
    ends = [BLOCK if header is not None and header.sequence == sequence else 0]
    runs = [0]  # start, end, start, end...
    rows = np.frombuffer(bytes(table), dtype=ROW)
    for offset, sealed in zip(rows["offset"].tolist(), rows["sealed"].tolist(), strict=True):
        start = offset * BLOCK
        if start != ends[-1]:
            runs.append(start)
            ends.append(start)
        ends[-1] = start + extent_bytes(sealed)
    base = superblock.segment_at(number)
    ops = [
        IoOp(base + at, raw[at : min(end, at + OP_BYTES_MAX)])
        for start, end in zip(runs, ends, strict=True)
        for at in range(start, end, OP_BYTES_MAX)
    ]
    return await _write(device, ops)


async def renew_free(device: Device, superblock: Superblock, first: int, looked: Looked) -> bool:
    """Write FREE headers, as they were read, at both ends of the segments from `first` on that are
    free for certain. False when the device does not take all of it.

    At the end, too, where the trailer of the life that ended may be, by a crash, or be again after
    the next one: whoever found it without the next life's header would believe it. The trailer of
    a later life stays, and so does the header before it: somebody lies.
    """
    heads, tails, edges, certain = looked
    places: list[tuple[int, bytes]] = []
    for n in sorted(certain):
        raw, (header, trailer) = heads[n], edges[n]
        start = superblock.segment_at(first + n)
        assert raw is not None, "it was read twice"
        assert header is not None, "it says so"
        if trailer is not None and trailer.sequence > header.sequence:
            continue
        places.append((start, raw))
        if tails[n] is not None:
            places.append((start + superblock.segment_bytes - BLOCK, raw))
    buffer = aligned_buffer(BLOCK * len(places))
    ops = []
    for at, (offset, raw) in enumerate(places):
        view = buffer[BLOCK * at : BLOCK * (at + 1)]
        view[:] = raw
        ops.append(IoOp(offset, view))
    return await _write(device, ops)


async def _write(device: Device, ops: Sequence[IoOp]) -> bool:
    """In batches, each tried a few times."""
    batch: list[IoOp] = []
    length_bytes = 0
    for op in ops:
        if batch and length_bytes + op.view.nbytes > BATCH_BYTES_MAX:
            if not await _write_batch(device, batch):
                return False
            batch, length_bytes = [], 0
        batch.append(op)
        length_bytes += op.view.nbytes
    return not batch or await _write_batch(device, batch)


async def _write_batch(device: Device, batch: Sequence[IoOp]) -> bool:
    for _ in range(TRIES_MAX):
        try:
            await device.write(batch)
        except DeviceError:
            continue
        return True
    return False
