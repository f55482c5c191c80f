"""What an examined data file holds, as a Parquet file: a row per record, columns with their units.

DATA_FILE.md describes the columns, and a test compares the two. Ids are whole here, unlike in what
is printed, so that rows can be joined with events; the file is for its owner only (0600).

Invariant: the file appears only when it is whole, and never in the place of another. It is written
in groups of `ROWS_PER_GROUP`, so the memory it needs does not grow with the data file; what the
examination itself keeps is some bytes per record.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from entresol_daemon.examine import SEAL, VERDICTS, Findings, seals_of
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import FORMAT_VERSION, RecordKind, Rows
from entresol_proto import __version__
from entresol_proto.seal import codecs
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import EntresolError, Status

ROWS_PER_GROUP = 65_536
PARQUET_VERSION = 1  # of the columns: raised when one changes its meaning
_WORD = pa.dictionary(pa.int8(), pa.string())
_ID = pa.binary(16)
SCHEMA = pa.schema(
    [
        pa.field("segment", pa.uint32(), nullable=False),
        pa.field("segment_sequence", pa.uint64(), nullable=False),
        pa.field("segment_state", _WORD, nullable=False),
        pa.field("found_by", _WORD, nullable=False),
        pa.field("offset_bytes", pa.uint64(), nullable=False),
        pa.field("kind", _WORD, nullable=False),
        pa.field("lsn", pa.uint64(), nullable=False),
        pa.field("namespace_id", _ID, nullable=False),
        pa.field("wire_key", _ID, nullable=False),
        pa.field("sealed_bytes", pa.uint32(), nullable=False),
        pa.field("plain_bytes", pa.uint32(), nullable=False),
        pa.field("position", pa.uint32(), nullable=False),
        pa.field("live", pa.bool_(), nullable=False),
        pa.field("verdict", _WORD, nullable=False),
        pa.field("codec", _WORD),
        pa.field("dtype", _WORD),
        pa.field("chunk_count", pa.uint32()),
        pa.field("dek_version", pa.uint32()),
        pa.field("host_sealed", pa.bool_()),
    ]
)


def check_target(out: Path) -> None:
    """Refuse a target before hours of reading. Raises: EntresolError."""
    try:
        there = _is_there(out)
        _is_there(_part_of(out))  # its name may be too long where the other is not
    except OSError as error:
        raise EntresolError(
            f"cannot write {out}: {error.strerror}", hint="name another file",
            status=Status.BAD_REQUEST,
        ) from None  # fmt: skip
    if there:
        raise EntresolError(
            f"{out} exists", hint="name a file that does not", status=Status.BAD_REQUEST
        )
    if not out.parent.is_dir():
        raise EntresolError(
            f"there is no folder {out.parent}", hint="make it first", status=Status.BAD_REQUEST
        )


def _part_of(out: Path) -> Path:
    """Where it is written, until it is whole."""
    return out.with_name(f".{out.name}.part")


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def export(found: Findings, out: Path) -> int:
    """Write every record of an examination that listed them; returns how many.

    Raises: EntresolError when the file cannot be written; nothing is left of it then.
    """
    assert len(found.seals) == len(found.verdicts) * SEAL.itemsize, "records were not listed"
    part = _part_of(out)
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                _write(found, file)
                file.flush()
                os.fsync(file.fileno())
            _publish(part, out)
        finally:
            part.unlink(missing_ok=True)
    except FileExistsError as error:
        raise EntresolError(
            f"{error.filename2 or error.filename} exists", hint="remove it, or name another file",
            status=Status.BAD_REQUEST,
        ) from None  # fmt: skip
    except OSError as error:
        raise EntresolError(
            f"cannot write {out}: {error.strerror or error}", status=Status.IO_ERROR
        ) from None
    return len(found.verdicts)


def _publish(part: Path, out: Path) -> None:
    """Give the finished file its name; never that of a file which appeared meanwhile."""
    try:
        os.link(part, out)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if out.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(out)) from None
        os.rename(part, out)


def _write(found: Findings, file: Any) -> None:
    s = found.superblock
    told = {
        "entresol.parquet_version": str(PARQUET_VERSION),
        "entresol.version": __version__,
        "entresol.data_file": found.path,
        "entresol.format_version": str(FORMAT_VERSION),
        "entresol.uuid": s.uuid.hex(),
        "entresol.segment_bytes": str(s.segment_bytes),
        "entresol.payloads_read": str(not found.quick).lower(),
        "entresol.in_use": str(found.in_use).lower(),
    }
    with pq.ParquetWriter(file, SCHEMA.with_metadata(told), compression="zstd") as writer:
        for batch in batches(found):
            writer.write_table(batch, row_group_size=ROWS_PER_GROUP)


def batches(found: Findings) -> Iterator[pa.Table]:
    """The records, at most `ROWS_PER_GROUP` at a time, in the order of the file."""
    seals, start = seals_of(found), 0
    segments = np.frombuffer(found.row_segments, np.uint32)
    for rows in _grouped(found.rows):
        end = start + len(rows)
        yield _table(
            found, rows, segments[start:end], seals[start:end],
            np.frombuffer(bytes(found.verdicts[start:end]), np.uint8), found.alive[start:end],
        )  # fmt: skip
        start = end


def _grouped(parts: list[Rows]) -> Iterator[Rows]:
    """The same rows, in arrays of `ROWS_PER_GROUP`, the last one shorter."""
    held: list[Rows] = []
    count = 0
    for rows in parts:
        while len(rows):
            take = rows[: ROWS_PER_GROUP - count]
            held.append(take)
            count += len(take)
            rows = rows[len(take) :]
            if count == ROWS_PER_GROUP:
                yield np.concatenate(held)
                held, count = [], 0
    if held:
        yield np.concatenate(held)


def _table(
    found: Findings,
    rows: Rows,
    segments: npt.NDArray[np.uint32],
    seals: npt.NDArray[np.void],
    verdicts: npt.NDArray[np.uint8],
    alive: npt.NDArray[np.bool_],
) -> pa.Table:
    places, where = np.unique(segments, return_inverse=True)
    facts = [found.segments[number] for number in places.tolist()]
    unknown = seals["known"] == 0
    columns = [
        pa.array(segments),
        pa.array(np.array([f.sequence for f in facts], np.uint64)[where]),
        _words([f.state for f in facts], where),
        _words([f.source for f in facts], where),
        pa.array(rows["offset"].astype(np.uint64) * BLOCK),
        _words({kind: kind.name.lower() for kind in RecordKind}, rows["kind"]),
        pa.array(np.ascontiguousarray(rows["lsn"])),
        _ids(rows, "ns"),
        _ids(rows, "key"),
        pa.array(np.ascontiguousarray(rows["sealed"])),
        pa.array(np.ascontiguousarray(rows["plain"])),
        pa.array(np.ascontiguousarray(rows["position"])),
        pa.array(alive),
        _words(dict(enumerate(VERDICTS)), verdicts),
        _words({codecs.by_name(n).codec_id: n for n in codecs.names()}, seals["codec"], unknown),
        _words({dtype: dtype.label for dtype in DType}, seals["dtype"], unknown),
        pa.array(np.ascontiguousarray(seals["chunks"]), mask=unknown),
        pa.array(np.ascontiguousarray(seals["dek"]), mask=unknown),
        pa.array(seals["host_sealed"] != 0, mask=unknown),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _ids(rows: Rows, name: str) -> pa.Array:
    """16-byte ids that rows hold as two little-endian integers."""
    halves = np.empty((len(rows), 2), "<u8")
    halves[:, 0], halves[:, 1] = rows[f"{name}0"], rows[f"{name}1"]
    return pa.Array.from_buffers(_ID, len(rows), [None, pa.py_buffer(halves.tobytes())])


def _words(
    names: dict[Any, str] | list[str],
    values: npt.NDArray[Any],
    unknown: npt.NDArray[np.bool_] | None = None,
) -> pa.Array:
    """Numbers as words of a dictionary. `unknown` ones are null."""
    known = dict(enumerate(names)) if isinstance(names, list) else names
    words = sorted(set(known.values()))
    lookup = np.full(int(max(known)) + 1, 0, np.int8)
    for number, word in known.items():
        lookup[int(number)] = words.index(word)
    taken = lookup[np.where(unknown, min(known), values) if unknown is not None else values]
    return pa.DictionaryArray.from_arrays(pa.array(taken, mask=unknown), words)
