"""The index checkpoint of a clean close: an Arrow IPC file that any Arrow reader opens.

Invariant: a checkpoint is believed only if the superblock says that the close was clean and names
this file's length and keyed digest. So a stale, foreign or damaged one is never parsed, and the
parser sees only bytes that we wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.index import U32, U64, Index
from entresol_daemon.flash.model import SegmentState
from entresol_daemon.flash.segment import FORMAT_VERSION, Superblock
from entresol_daemon.flash.space import SegmentTable
from entresol_proto.status import FormatError

CHECKPOINT_BYTES_MAX = 64 << 30
_COLUMNS = ("segment", "offset", "sealed_bytes", "plain_bytes", "position")
_LABEL = b"entresol"


@dataclass(frozen=True, slots=True)
class SegmentNote:
    """What a checkpoint says of one used segment."""

    segment: int
    sequence: int
    stream: bytes
    condemned: bool
    shadows: bool
    blocks: int
    tombstone_offsets: list[int]
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint's content. `namespace` holds indices into `names`."""

    segments: list[SegmentNote]
    names: list[bytes]
    namespace: U32
    key0: U64
    key1: U64
    columns: dict[str, U32]
    last_touch: U64


def _digest(superblock: Superblock, raw: bytes) -> bytes:
    key = superblock.check_key
    return hashlib.blake2b(raw, digest_size=32, key=key, person=b"entresol-ckpt").digest()


def encode(superblock: Superblock, index: Index, table: SegmentTable) -> bytes:
    """The file's bytes; the index must not change meanwhile."""
    import pyarrow as pa

    slots = index.live_slots()
    namespaces, names = index.namespace_numbers()
    used, codes = np.unique(namespaces[slots], return_inverse=True)
    key0, key1 = index.key_columns()
    keys = np.empty((len(slots), 2), np.uint64)
    keys[:, 0], keys[:, 1] = key0[slots], key1[slots]
    dictionary = pa.array([names[number] for number in used.tolist()], pa.binary(16))
    arrays: dict[str, Any] = {
        "namespace": pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), dictionary),
        "key": pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), len(slots), [None, pa.py_buffer(keys.tobytes())]
        ),
    }
    for name in _COLUMNS:
        arrays[name] = pa.array(getattr(index, name)[slots])
    arrays["last_touch"] = pa.array(index.last_touch[slots])
    about = {
        "version": FORMAT_VERSION,
        "uuid": superblock.uuid.hex(),
        "generation": superblock.generation,
        "segments": [
            [
                s.index, s.sequence, s.stream.hex(), int(s.state is SegmentState.CONDEMNED),
                int(s.shadows), s.blocks, s.tombstone_offsets,
            ]
            for s in table.used()
        ],
        "used_bytes": [s.used_bytes for s in table.used()],
    }  # fmt: skip
    schema = pa.schema(
        [(name, array.type) for name, array in arrays.items()],
        metadata={_LABEL: json.dumps(about).encode()},
    )
    batch = pa.record_batch(list(arrays.values()), schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def decode(raw: bytes) -> Checkpoint:
    """Parse bytes whose digest was checked. Raises: FormatError when they are not a checkpoint."""
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.BufferReader(raw))
        about = json.loads(reader.schema.metadata[_LABEL])
        if about["version"] != FORMAT_VERSION:
            raise FormatError(f"checkpoint has version {about['version']}")
        content = reader.read_all().combine_chunks()
        rows = content.num_rows
        # An empty table has no chunks; its columns are made of nothing.
        parts = {name: content.column(name).chunks for name in content.schema.names}
        numbers: dict[str, Any] = {
            name: parts[name][0].to_numpy() if rows else np.zeros(0, np.uint32)
            for name in (*_COLUMNS, "last_touch")
        }
        keys = np.zeros((0, 2), np.uint64)
        namespace = np.zeros(0, np.uint32)
        names: list[bytes] = []
        if rows:
            key, space = parts["key"][0], parts["namespace"][0]
            keys = np.frombuffer(key.buffers()[1], np.uint64, 2 * rows, 16 * key.offset)
            keys = keys.reshape(rows, 2)
            namespace = space.indices.to_numpy().astype(np.uint32)
            names = space.dictionary.to_pylist()
        segments = about["segments"]
        used = about.get("used_bytes", [BLOCK] * len(segments))  # the first ones did not say
        return Checkpoint(
            segments=[
                SegmentNote(
                    n, sequence, bytes.fromhex(stream), bool(bad), bool(shadows), count, at, end
                )
                for (n, sequence, stream, bad, shadows, count, at), end in zip(
                    segments, used, strict=True
                )
            ],
            names=names,
            namespace=namespace,
            key0=keys[:, 0],
            key1=keys[:, 1],
            columns={name: numbers[name] for name in _COLUMNS},
            last_touch=numbers["last_touch"].astype(np.uint64),
        )
    except (
        pa.ArrowException, AttributeError, LookupError, RecursionError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise FormatError(f"checkpoint is malformed: {error}") from error


def save(path: Path, superblock: Superblock, raw: bytes) -> bytes:
    """Replace the file atomically and durably; returns the digest for the superblock.

    Raises: OSError.
    """
    part = path.with_name(path.name + ".part")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return _digest(superblock, raw)


def load(path: Path, superblock: Superblock) -> Checkpoint:
    """Read, verify and parse. Raises: FormatError with the reason when it is not the one."""
    try:
        size = path.stat().st_size
        if size != superblock.checkpoint_bytes or size > CHECKPOINT_BYTES_MAX:
            raise FormatError("checkpoint is not the one of the last clean close")
        raw = path.read_bytes()
    except OSError as error:
        raise FormatError(f"checkpoint cannot be read: {error.strerror}") from error
    if _digest(superblock, raw) != superblock.checkpoint_digest:
        raise FormatError("checkpoint is not the one of the last clean close")
    return decode(raw)
