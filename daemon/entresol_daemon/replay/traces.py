"""Request traces: reading them, and the little that is known of each request.

Invariant: a `Trace` is dense and checked: block ids count from 0, every request's are in the order
of its prefix, times do not run backwards.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entresol_proto.status import EntresolError, Status

Ints = npt.NDArray[np.int64]
Blocks = npt.NDArray[np.int32]

BLOCK_TOKENS_DEFAULT = 512  # of a jsonl file, which does not say (the Mooncake traces have 512)
REFS_MAX = 1 << 31  # block references of one trace
BLOCK_TOKENS_DIGITS_MAX = 9  # a file that says more tokens per block is not believed
# Ids closer together than this are made dense by a table, others by sorting; but by no table with
# so many times as many entries as the trace has references.
ID_SPAN_MAX, ENTRIES_PER_REF_MAX, ENTRIES_MIN = 1 << 28, 64, 1 << 16


class TraceError(EntresolError):
    """The file is no trace that can be read."""

    status = Status.BAD_REQUEST


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. Request n has blocks `ids[cuts[n] : cuts[n + 1]]`."""

    name: str
    ids: Blocks
    cuts: Ints
    arrivals_ms: list[int]
    tenants: list[int]
    distinct: int
    block_tokens: int

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def requests(self) -> Iterator[Blocks]:
        """The blocks of every request: views, in prefix order."""
        cuts = self.cuts.tolist()
        for start, end in itertools.pairwise(cuts):
            yield self.ids[start:end]

    @property
    def span_ms(self) -> int:
        """From the first arrival to the last."""
        return self.arrivals_ms[-1] - self.arrivals_ms[0]


def load(path: Path, *, rows: int | None = None, block_tokens: int = 0) -> Trace:
    """Read a trace: `.parquet` with columns ts_ms, run_start, run_len and optionally tenant, or
    `.jsonl` with timestamp and hash_ids (the Mooncake format).

    `rows` takes only the first requests. `block_tokens` 0 means as the file's metadata says.
    Raises: TraceError; OSError.
    """
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise TraceError(f"{path.name} is neither .parquet nor .jsonl")
    try:
        flat, cuts, arrivals, tenants, said = readers[path.suffix](path, rows)
    except UnicodeDecodeError:
        raise TraceError(f"{path.name} has text that is no UTF-8") from None
    if not len(flat):
        raise TraceError(f"{path.name} has no blocks in it")
    if len(flat) > REFS_MAX:
        raise TraceError(f"{path.name} has {len(flat):,} block references, more than {REFS_MAX:,}")
    if any(later < earlier for earlier, later in itertools.pairwise(arrivals)):
        raise TraceError(f"{path.name}: requests are not in order of arrival")
    ids, distinct = _dense(flat)
    tokens = block_tokens or said or BLOCK_TOKENS_DEFAULT
    return Trace(path.stem, ids, cuts, arrivals, tenants, distinct, tokens)


_Parts = tuple[Ints, Ints, list[int], list[int], int]


def _read_jsonl(path: Path, rows: int | None) -> _Parts:
    lists: list[Ints] = []
    arrivals: list[int] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if rows is not None and len(lists) >= rows:
                break
            try:
                row: Any = json.loads(line)
                ids = np.asarray(row["hash_ids"], np.int64)
                arrivals.append(int(row["timestamp"]))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise TraceError(f"{path.name}, line {number}: {error!r:.200}") from None
            if ids.ndim != 1:
                raise TraceError(f"{path.name}, line {number}: hash_ids is no list of numbers")
            lists.append(ids)
    flat = np.concatenate(lists) if lists else np.zeros(0, np.int64)
    cuts = np.cumsum([0, *(len(each) for each in lists)], dtype=np.int64)
    return flat, cuts, arrivals, [0] * len(lists), 0


def _read_parquet(path: Path, rows: int | None) -> _Parts:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        raise TraceError(
            "reading parquet needs pyarrow", hint="pip install 'entresol[daemon]'"
        ) from None
    try:
        table = parquet.read_table(path)
    except pa.ArrowException as error:
        raise TraceError(f"{path.name} is no parquet file: {error!s:.200}") from None
    missing = {"ts_ms", "run_start", "run_len"} - set(table.column_names)
    if missing:
        raise TraceError(f"{path.name} lacks the columns {', '.join(sorted(missing))}")
    for name in {"ts_ms", "run_start", "run_len", "tenant"} & set(table.column_names):
        _check_column(path.name, table, name)
    table = table.slice(0, rows).combine_chunks() if rows is not None else table.combine_chunks()
    starts, offsets = _lists(table["run_start"])
    lengths, again = _lists(table["run_len"])
    if not np.array_equal(offsets, again):
        raise TraceError(f"{path.name}: run_start and run_len differ in length")
    if len(lengths) and int(lengths.min()) < 0:
        raise TraceError(f"{path.name}: a run has a length below 0")
    # As numbers that do not wrap around: what follows needs memory for every reference.
    if (refs := float(lengths.sum(dtype=np.float64))) > REFS_MAX:
        raise TraceError(f"{path.name} has {refs:,.0f} block references, more than {REFS_MAX:,}")
    ends = np.concatenate([[0], np.cumsum(lengths)])
    # Of every reference: its run's start, and how far into the run it is.
    flat = np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])
    cuts = ends[offsets]
    arrivals = table["ts_ms"].to_pylist()
    named = "tenant" in table.column_names
    tenants = table["tenant"].to_pylist() if named else [0] * len(arrivals)
    said = (table.schema.metadata or {}).get(b"block_tokens", b"0")
    tokens = int(said) if said.isdigit() and len(said) <= BLOCK_TOKENS_DIGITS_MAX else 0
    return flat, cuts, arrivals, tenants, tokens


def _check_column(file: str, table: Any, name: str) -> None:
    """Whole numbers, or lists of them, and none that is left out. Raises: TraceError."""
    import pyarrow as pa

    column = table[name]
    kind, many = column.type, name.startswith("run_")
    inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    if (inner is not None) is not many or not pa.types.is_integer(inner if many else kind):
        wanted = "lists of whole numbers" if many else "whole numbers"
        raise TraceError(f"{file}: column {name} holds {kind!s:.80}, not {wanted}")
    if column.null_count or (many and any(chunk.values.null_count for chunk in column.chunks)):
        raise TraceError(f"{file}: column {name} leaves values out")


def _lists(column: Any) -> tuple[Ints, Ints]:
    """All values of a list column end to end, and where each row's begin (one more than rows)."""
    values: list[Ints] = [np.zeros(0, np.int64)]
    counts: list[Ints] = [np.zeros(0, np.int64)]
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        values.append(chunk.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]])
        counts.append(np.diff(offsets))
    lengths = np.concatenate(counts)
    found = np.concatenate([each.astype(np.int64) for each in values])
    return found, np.concatenate([[0], np.cumsum(lengths)])


def _dense(flat: Ints) -> tuple[Blocks, int]:
    """The same references with ids from 0, in the order of the given ids; and how many distinct."""
    low, high = int(flat.min()), int(flat.max())
    if high - low < min(ID_SPAN_MAX, ENTRIES_MIN + ENTRIES_PER_REF_MAX * len(flat)):
        there = np.zeros(high - low + 1, np.bool_)
        there[flat - low] = True
        number = np.cumsum(there, dtype=np.int64) - 1
        return number[flat - low].astype(np.int32), int(number[-1]) + 1
    ids, dense = np.unique(flat, return_inverse=True)
    return dense.astype(np.int32), len(ids)
