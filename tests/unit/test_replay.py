"""`entresol replay`: reading traces, the report's arithmetic, the picture, and what goes wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from entresol_client.cli.main import main as entresol
from entresol_daemon.replay import __main__ as command
from entresol_daemon.replay.run import Assumptions, measure
from entresol_daemon.replay.store import Options
from entresol_daemon.replay.traces import TraceError, load

ROOT = Path(__file__).resolve().parents[2]
TRACES = Path(os.environ.get("ENTRESOL_SHARED", ROOT.parent / "shared")) / "data" / "traces"
ASKED = {
    "capacity", "usable_hit", "usable_hit_second_half", "block_hit", "write_amplification",
    "bytes_written",
}  # fmt: skip


def jsonl(path: Path, rows: list[tuple[int, list[int]]]) -> Path:
    path.write_text(
        "".join(json.dumps({"timestamp": at, "hash_ids": ids}) + "\n" for at, ids in rows)
    )
    return path


def parquet(path: Path, *, tokens: int = 64, starts: str = "run_start") -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "ts_ms": [0, 10, 20],
            "tenant": [1, 2, 1],
            starts: pa.array([[100, 7], [], [100]], pa.list_(pa.uint32())),
            "run_len": pa.array([[2, 3], [], [1]], pa.list_(pa.uint32())),
        }
    ).replace_schema_metadata({"block_tokens": str(tokens)})
    pq.write_table(table, path)
    return path


def requests(path: Path, **more: int) -> list[list[int]]:
    return [each.tolist() for each in load(path, **more).requests()]


# -- reading


def test_runs_are_expanded_and_ids_made_dense(tmp_path: Path) -> None:
    found = load(parquet(tmp_path / "t.parquet"))
    assert [each.tolist() for each in found.requests()] == [[3, 4, 0, 1, 2], [], [3]]
    assert (found.distinct, len(found), found.block_tokens, found.span_ms) == (5, 3, 64, 20)
    assert found.tenants == [1, 2, 1]
    assert len(load(tmp_path / "t.parquet", rows=1)) == 1


def test_far_apart_ids_are_made_dense_too(tmp_path: Path) -> None:
    rows = [(0, [5, 1 << 60, -3]), (4, [1 << 60])]
    assert requests(jsonl(tmp_path / "t.jsonl", rows)) == [[1, 2, 0], [2]]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no blocks"),
        ('{"timestamp": 1}\n', "line 1.*hash_ids"),
        ('{"timestamp": 1, "hash_ids": [1]}\n{"timestamp"', "line 2"),
        ('{"timestamp": 1, "hash_ids": ["x"]}\n', "line 1"),
        ('{"timestamp": 2, "hash_ids": [1]}\n{"timestamp": 1, "hash_ids": [1]}\n', "order"),
    ],
)
def test_what_is_no_jsonl_trace(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=match):
        load(path)


def test_what_is_no_parquet_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="lacks the columns run_start"):
        load(parquet(tmp_path / "other.parquet", starts="begin"))
    (tmp_path / "noise.parquet").write_bytes(b"noise" * 100)
    with pytest.raises(TraceError, match="no parquet file"):
        load(tmp_path / "noise.parquet")
    with pytest.raises(TraceError, match="neither"):
        load(tmp_path / "t.csv")


# -- the report


def test_a_report_by_hand(tmp_path: Path) -> None:
    # 40 blocks, asked for twice within a year: all new, then all found.
    year_ms = 365 * 86_400_000
    ids = list(range(40))
    found = load(jsonl(tmp_path / "t.jsonl", [(0, ids), (year_ms, ids)]), block_tokens=10)
    assumed = Assumptions(
        token_bytes=100, prefill_tokens_per_s=50, fetch_cost=0.25, drive_writes_per_day=2,
        drive_warranty_years=3,
    )  # fmt: skip
    row = measure(found, 1, Options(segment_blocks=8), assumed)
    assert (row.usable_hit, row.usable_hit_second_half, row.block_hit) == (0.5, 1.0, 0.5)
    assert (row.capacity_blocks, row.capacity_bytes, row.bytes_written) == (40, 40_000, 40_000)
    assert row.write_amplification == 1
    assert row.drive_years == 2 * 365 * 3  # a drive that is written once a year
    assert row.ttft_saved_s == (200 / 50) * 0.75  # of two requests, one with 400 tokens


def test_json_has_what_scripts_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "t.jsonl", [(0, list(range(40)))] * 2)
    assert command.main([str(path), "--capacity", "64,1", "--segment-blocks", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(set(row) >= ASKED for row in rows)
    assert [each["capacity_blocks"] for each in rows] == [64, 40]
    assert [each["usable_hit"] for each in rows] == [0.5, 0.5]
    assert [each["write_amplification"] for each in rows] == [1, 1]
    assert [each["drive_years"] for each in rows] == [None, None], "no time passed"


def test_a_capacity_below_two_segments_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path / "t.jsonl", [(0, list(range(40)))])
    assert command.main([str(path), "--capacity", "0.1"]) == 2
    said = capsys.readouterr().err
    assert "fewer than two segments" in said
    assert "fix: " in said


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="not run here: no matplotlib"
)
def test_the_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "t.jsonl", [(at, list(range(at, at + 40))) for at in range(9)])
    words = [str(path), "--capacity", "0.5,1", "--segment-blocks", "8"]
    assert command.main([*words, "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert command.main([*words, "--plot", str(tmp_path / "p.nothing")]) == 2
    assert "--plot replay.png" in capsys.readouterr().err


def test_without_matplotlib_only_the_picture_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path / "t.jsonl", [(0, list(range(40)))])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert command.main([str(path), "--plot", str(tmp_path / "p.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert command.main([str(path), "--capacity", "1", "--segment-blocks", "8"]) == 0


# -- the command


def test_the_command_hands_its_words_on(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "-t.jsonl", [(0, list(range(40)))] * 3)
    done = subprocess.run(
        [
            sys.executable, "-m", "entresol_client.cli.main", "replay", "--capacity=64",
            "--segment-blocks=8", "--json", "--rows=2", "--policy=lru", "--per-tenant",
            "--token-bytes=1", "--", path.name,
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = json.loads(done.stdout)
    assert (row["policy"], row["usable_hit"], row["bytes_written"]) == ("lru", 0.5, 40 * 512)


def test_the_command_has_every_option_of_the_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert entresol(["replay", "--help"]) == 0
    said = capsys.readouterr().out
    for action in command.arguments()._actions:
        for option in action.option_strings:
            assert option in said, option


def test_the_command_without_the_daemons_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert entresol(["replay", "t.jsonl"]) == 1
    assert "pip install 'entresol[daemon]'" in capsys.readouterr().err


def test_a_missing_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["/nowhere/t.jsonl"]) == 2
    assert capsys.readouterr().err == "entresol: /nowhere/t.jsonl: No such file or directory\n"


# -- the traces that the policy is judged on


def test_the_development_traces_read_as_their_reference_says() -> None:
    name = "mooncake_conv_first35min.parquet"
    if not (TRACES / name).exists():
        pytest.skip(f"not run here: {name} is not in the shared data")
    found = load(TRACES / name)
    assert (len(found), len(found.ids), found.distinct) == (6_758, 169_404, 110_841)
    assert found.block_tokens == 512
    first = np.unique(found.ids, return_index=True)[1]
    assert len(first) == found.distinct
