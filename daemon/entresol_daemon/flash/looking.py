"""How an opening looks at a device: both ends of segments, and what was refused or is hard to
believe a second time.

Invariant: a segment counts as free only where two reads of its first block say the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from entresol_daemon.compute import Compute
from entresol_daemon.flash.device import BLOCK, Device, IoOp, aligned_buffer
from entresol_daemon.flash.model import RECOVERY_BATCH_BYTES
from entresol_daemon.flash.segment import (
    HeaderState,
    SegmentHeader,
    Superblock,
    Trailer,
    decode_header,
    decode_trailer,
)
from entresol_proto.status import Status

BATCH_OPS = RECOVERY_BATCH_BYTES // BLOCK
Edges = tuple[SegmentHeader | None, Trailer | None]
Looked = tuple[list[bytes | None], list[bytes | None], list[Edges], set[int]]
"""Of some segments: first blocks, last blocks, what they say, and which are FREE for certain."""


def decode_edges(
    superblock: Superblock, first: int, headers: list[bytes | None], trailers: list[bytes | None]
) -> list[Edges]:
    """Header and trailer of segments from `first` on; None for what is none or was not read."""
    return [
        (
            None if head is None else decode_header(superblock, first + n, head),
            None if tail is None else decode_trailer(superblock, first + n, tail),
        )
        for n, (head, tail) in enumerate(zip(headers, trailers, strict=True))
    ]


class Looking:
    """Reads of one opening."""

    def __init__(
        self, device: Device, compute: Compute, superblock: Superblock, log: logging.Logger
    ) -> None:
        self._device = device
        self._compute = compute
        self._superblock = superblock
        self._log = log

    async def edges(self, first: int, last: int) -> Looked:
        """First and last blocks of the segments first..last-1, what they say, and which of them,
        counted from `first`, are FREE for certain.

        One read that went wrong must not free a segment: a first block of zeros, or one that says
        FREE, is read once more, and what is then found there is what counts.
        """
        superblock = self._superblock
        starts = [superblock.segment_at(n) for n in range(first, last)]
        end = superblock.segment_bytes - BLOCK
        heads = await self.blocks(starts)
        tails = await self.blocks([start + end for start in starts])
        edges = await self._compute.run(decode_edges, superblock, first, heads, tails)
        doubtful = [n for n, head in enumerate(heads) if _frees(head, edges[n][0])]
        free: set[int] = set()
        again = await self.blocks([starts[n] for n in doubtful])
        for n, block in zip(doubtful, again, strict=True):
            header = edges[n][0]
            if block == heads[n]:
                if header is not None:
                    free.add(n)
                continue
            self._log.warning("event=read_differs segment=%d what=header", first + n)
            heads[n] = block
            edges[n] = decode_edges(superblock, first + n, [block], [tails[n]])[0]
        return heads, tails, edges, free

    async def blocks(self, offsets: Sequence[int]) -> list[bytes | None]:
        """One block at each offset; None where the device refuses twice."""
        found: list[bytes | None] = []
        for first in range(0, len(offsets), BATCH_OPS):
            part = offsets[first : first + BATCH_OPS]
            buffer = aligned_buffer(BLOCK * len(part))
            ops = [
                IoOp(offset, buffer[BLOCK * n : BLOCK * (n + 1)]) for n, offset in enumerate(part)
            ]
            good = await self.read(ops)
            found += [bytes(op.view) if ok else None for op, ok in zip(ops, good, strict=True)]
        return found

    async def read(self, ops: Sequence[IoOp]) -> list[bool]:
        """Read; refused ops are tried again block by block, lost blocks become zeros.

        Returns per op whether all of it was read.
        """
        statuses = await self._device.read(ops)
        for number, op in enumerate(ops):
            if statuses[number] is Status.OK:
                continue
            pieces = [
                IoOp(op.offset_bytes + at, op.view[at : at + BLOCK])
                for at in range(0, op.view.nbytes, BLOCK)
            ]
            again = await self._device.read(pieces)
            for piece, second in zip(pieces, again, strict=True):
                if second is not Status.OK:
                    piece.view[:] = bytes(BLOCK)
                    self._log.warning("event=unreadable_block offset=%d", piece.offset_bytes)
            if all(second is Status.OK for second in again):
                statuses[number] = Status.OK
        return [status is Status.OK for status in statuses]


def _frees(head: bytes | None, header: SegmentHeader | None) -> bool:
    """Whether a first block, if it is believed, makes its segment a free one."""
    if header is not None:
        return header.state is HeaderState.FREE
    return head is not None and not any(head)
