"""The Parquet export of an examined data file: columns as documented, rows as examined."""

from __future__ import annotations

import re
from array import array
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from entresol_daemon import inspect_parquet as ip
from entresol_daemon.examine import NO_SEAL, SEAL, Findings, SegmentFacts
from entresol_daemon.flash.segment import ROW, RecordKind, Superblock
from entresol_proto.seal import codecs
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import EntresolError

ROOT = Path(__file__).resolve().parents[2]
TYPES = {
    "uint32": pa.uint32(), "uint64": pa.uint64(), "bool": pa.bool_(), "16 bytes": pa.binary(16),
    "word": pa.dictionary(pa.int8(), pa.string()),
}  # fmt: skip


def findings(segments: int, per_segment: int) -> Findings:
    """As an examination of so many records would leave them; every fifth one is no block."""
    superblock = Superblock(
        uuid=bytes(range(16)), generation=1, clean=True, segment_bytes=1 << 20,
        segment_count=segments, checkpoint_bytes=0, checkpoint_digest=bytes(32),
        check_key=bytes(32), mirror_offset=0,
    )  # fmt: skip
    found = Findings("/data/file", superblock, 2, False, False)
    number = 0
    for segment in range(segments):
        facts = SegmentFacts(segment, "sealed", 100 + segment, source="footer")
        found.segments.append(facts)
        rows = np.zeros(per_segment, ROW)
        for row in rows:
            block = number % 5 != 4
            row["ns0"], row["ns1"] = 7, 8
            row["key0"], row["key1"] = number, 2**63 + number
            row["lsn"], row["offset"], row["sealed"] = number, number, 1_000 + number
            row["plain"], row["position"] = 2_000, number % 9
            row["kind"] = RecordKind.BLOCK if block else RecordKind.TOMBSTONES
            seal = np.zeros(1, SEAL)
            seal["codec"], seal["dtype"] = codecs.FAST, DType.BF16
            seal["known"], seal["chunks"], seal["dek"] = 1, 4, 3
            found.seals += seal.tobytes() if block else NO_SEAL
            found.verdicts.append(number % 6)
            number += 1
        found.rows.append(rows)
        found.row_segments.extend([segment] * per_segment)
    found.row_segments = array("I", found.row_segments)
    found.alive = np.arange(number) % 2 == 0
    return found


def test_the_document_has_the_columns_of_the_code() -> None:
    text = (ROOT / "daemon" / "DATA_FILE.md").read_text()
    text = text[text.index("## Looking into a file") :].partition("## Versions")[0]
    told = re.findall(r"^\| `(\w+)` \| ([^|]+) \| \S[^|]* \|$", text, re.M)
    assert [(name, TYPES[kind]) for name, kind in told] == [
        (field.name, field.type) for field in ip.SCHEMA
    ]
    assert f"{ip.ROWS_PER_GROUP:,}" in text


def test_rows_come_out_as_they_were_examined_in_small_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ip, "ROWS_PER_GROUP", 64)
    found = findings(3, 100)
    out = tmp_path / "out.parquet"
    assert ip.export(found, out) == 300
    assert out.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
    file = pq.ParquetFile(out)
    groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    assert groups == [64, 64, 64, 64, 44]
    told = file.schema_arrow.metadata
    assert told[b"entresol.uuid"] == bytes(range(16)).hex().encode()
    assert told[b"entresol.payloads_read"] == b"true"
    rows = file.read().to_pylist()
    for number, row in enumerate(rows):
        assert row["segment"] == number // 100
        assert row["segment_sequence"] == 100 + number // 100
        assert row["offset_bytes"] == 4096 * number
        assert row["namespace_id"] == (7).to_bytes(8, "little") + (8).to_bytes(8, "little")
        assert int.from_bytes(row["wire_key"][8:], "little") == 2**63 + number
        assert row["live"] is (number % 2 == 0)
        assert row["sealed_bytes"] == 1_000 + number
        block = number % 5 != 4
        assert row["kind"] == ("block" if block else "tombstones")
        words = (row["codec"], row["dtype"], row["chunk_count"], row["dek_version"])
        assert words == (("fast", "bf16", 4, 3) if block else (None,) * 4)
        assert row["host_sealed"] is (False if block else None)
    assert {row["verdict"] for row in rows} == set(ip.VERDICTS)
    assert {(row["segment_state"], row["found_by"]) for row in rows} == {("sealed", "footer")}


def test_an_empty_file_is_a_table_without_rows(tmp_path: Path) -> None:
    assert ip.export(findings(2, 0), tmp_path / "out") == 0
    assert pq.read_table(tmp_path / "out").schema.names == ip.SCHEMA.names


def test_nothing_is_replaced_and_nothing_left_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"mine")
    with pytest.raises(EntresolError, match="exists"):
        ip.check_target(out)
    with pytest.raises(EntresolError, match="exists"):
        ip.export(findings(1, 3), out)
    assert out.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(EntresolError, match="no folder"):
        ip.check_target(tmp_path / "absent" / "out")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ip, "_write", full)
    with pytest.raises(EntresolError, match="No space left"):
        ip.export(findings(1, 3), tmp_path / "other")
    assert list(tmp_path.iterdir()) == [out]
