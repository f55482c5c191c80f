"""Finds one stored block in a daemon's data file and flips one bit of it: what a bad drive does.

Knows of the data file only that records begin at multiples of 4 KiB with a short header, and of a
record only the sealed block (proto/FORMAT.md), whose plain header carries the engine key.
Invariant: the bit lies inside a sealed chunk, so the block's header stays intact and the damage can
be noticed by checks of the content alone. The daemon must not be running.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from entresol_proto.limits import ALIGN_BYTES
from entresol_proto.seal.header import HEADER_BYTES_MAX, MAGIC, SealedHeader
from entresol_proto.status import EntresolError, SealError

RECORD_HEADER_BYTES_MAX = 256  # the sealed block begins at most this far into its record


@dataclass(frozen=True, slots=True)
class Flipped:
    """Where the bit is: offset in the file, bit 0 to 7 of that byte."""

    offset: int
    bit: int


def flip_bit(data_file: Path, engine_key: bytes, *, bit: int = 3) -> Flipped:
    """Flip one bit in the middle of the stored block of `engine_key`, and flush.

    Raises: EntresolError when the file cannot be used or does not hold the block.
    """
    try:
        offset = _find_middle(data_file, engine_key)
        if offset is None:
            raise EntresolError(f"{data_file} does not hold the block to damage")
        with open(data_file, "r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), offset)
            os.fsync(file.fileno())
    except OSError as error:
        raise EntresolError(f"cannot damage {data_file}: {error.strerror}") from None
    return Flipped(offset, bit)


def _find_middle(data_file: Path, engine_key: bytes) -> int | None:
    """Offset of the middle byte of the block's middle chunk."""
    raw = np.memmap(data_file, np.uint8, mode="r")
    pages = raw[: len(raw) // ALIGN_BYTES * ALIGN_BYTES].reshape(-1, ALIGN_BYTES)
    words = pages[:, :RECORD_HEADER_BYTES_MAX].view("<u4")
    magic = np.frombuffer(MAGIC, "<u4")[0]
    for page, word in np.argwhere(words == magic).tolist():
        start = page * ALIGN_BYTES + word * 4
        try:
            header = SealedHeader.parse(raw[start : start + HEADER_BYTES_MAX].tobytes())
        except SealError:
            continue
        if header.engine_key == engine_key:
            at, stored_bytes = header.chunk_span(header.chunk_count // 2)
            return int(start + at + stored_bytes // 2)
    return None
