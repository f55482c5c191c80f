"""`entresol demo` told for real at a small context, and its parts: promises, bit flip, clean-up."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entresol_client.demo import command, report
from entresol_client.demo.hosts import wrong_bytes_in
from entresol_client.demo.media import flip_bit
from entresol_client.demo.progress import Progress
from entresol_client.programs import DAEMON_HINT
from entresol_proto.limits import ALIGN_BYTES
from entresol_proto.seal.header import SealedHeader
from entresol_proto.status import EntresolError, Status

CONTEXT_TOKENS = 1_024
DECODE_TOKENS = 8
BLOCKS = CONTEXT_TOKENS // command.BLOCK_TOKENS
BLOCK_BYTES = 196_608
SECONDS_MAX = 170
VECTORS = Path(__file__).resolve().parents[1] / "vectors"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path: the sockets of the daemon lie in it."""
    with tempfile.TemporaryDirectory(prefix="ent-") as name:
        yield Path(name)


def start(scratch: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "entresol_client.demo", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip


def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that name `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it has ended meanwhile
            if str(folder) in line:
                found.append(line)
    return found


@pytest.mark.daemon
@pytest.mark.slow
def test_the_whole_story_keeps_every_promise(scratch: Path) -> None:
    size = ("--tokens", str(CONTEXT_TOKENS), "--decode", str(DECODE_TOKENS))
    demo = start(scratch, *size, "--json")
    out, err = demo.communicate(timeout=SECONDS_MAX)
    assert demo.returncode == 0, err
    found: dict[str, Any] = json.loads(out)  # one object and nothing else
    assert found["broken_promises"] == []
    assert found["blocks"] == BLOCKS
    assert found["wrong_bytes"] == 0
    assert found["tokens_identical"] is True
    assert found["logits_identical"] is True
    assert found["durable_blocks_put"] == found["warm_restart_hits"] == BLOCKS
    assert found["hits"] == {"flash": BLOCKS, "memory": BLOCKS}
    assert found["other_tenant_hits"] == 0
    assert found["other_tenant_asked"] == BLOCKS
    assert found["corrupt_blocks_detected"] == 1
    assert found["corrupt_misses"]["corrupt"] == 1
    assert found["corrupt_used_blocks"] == found["corrupt_block_index"] == BLOCKS * 3 // 4
    assert found["corrupt_stored_again"] == 1
    assert found["plain_bytes"] == BLOCKS * BLOCK_BYTES
    assert 0 < found["wire_bytes"] < found["plain_bytes"]
    assert found["ratio"] == pytest.approx(found["plain_bytes"] / found["wire_bytes"], abs=1e-3)
    assert found["ratio"] > 1.4  # the same bytes everywhere: real KV, plane codec
    assert found["ttft_fetch_ms"] > 0
    assert found["ttft_recompute_ms"] > 0
    gain = found["ttft_recompute_ms"] / found["ttft_fetch_ms"]
    assert found["ttft_gain"] == pytest.approx(gain, rel=1e-3)
    parts_ms = sum(found["ttft_fetch_parts_ms"].values())
    assert found["ttft_fetch_ms"] == pytest.approx(parts_ms, abs=0.1)
    steps = [line.split("/")[0] for line in err.splitlines() if line.startswith("[")]
    assert sorted(set(steps)) == [f"[{n}" for n in range(1, 7)]
    assert list(scratch.iterdir()) == []
    assert processes_of(scratch) == []


@pytest.mark.daemon
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(scratch: Path, number: signal.Signals) -> None:
    demo = start(scratch)
    assert demo.stderr is not None
    for line in demo.stderr:
        if line.startswith("[2/6"):
            break  # the daemon serves and host A prefills
    assert len(processes_of(scratch)) == 2
    demo.send_signal(number)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 130, err
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    assert list(scratch.iterdir()) == []
    assert processes_of(scratch) == []


@pytest.mark.daemon
def test_a_daemon_that_cannot_start_is_shown_with_its_log(scratch: Path) -> None:
    deep = scratch / ("x" * 90)  # too long for the sockets in it
    deep.mkdir()
    demo = start(deep)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert out == ""
    assert "too long for the sockets" in err
    assert list(deep.iterdir()) == []


def test_a_missing_daemon_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "entresol_daemon", None)
    assert command.main(["--quick"]) == 1
    assert DAEMON_HINT in capsys.readouterr().err


def test_keep_refuses_a_folder_that_is_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    assert command.main(["--keep", str(tmp_path)]) == 1
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", str(command.CONTEXT_TOKENS_MIN - 1)],
        ["--tokens", str(command.CONTEXT_TOKENS_MIN + 1)],
        ["--tokens", str(command.CONTEXT_TOKENS_MAX + command.BLOCK_TOKENS)],
        ["--tokens", "many"],
        ["--decode", "0"],
        ["--decode", str(command.DECODE_TOKENS_MAX + 1)],
        ["--quick", "--tokens", "1024"],
        ["--fabric", "carrier-pigeon"],
    ],
)
def test_wrong_use_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


# Promises: each can be broken, and is named then.

GOOD = report.Findings(
    context_tokens=8_192,
    decode_tokens=24,
    blocks=128,
    block_bytes=BLOCK_BYTES,
    fabric="shm",
    codec="plane",
    durable_blocks_put=128,
    put_ms=200.0,
    restart_ms=900.0,
    recovery_ms=30.0,
    warm_restart_hits=128,
    hits={"flash": 128, "memory": 128},
    tokens_identical=True,
    logits_identical=True,
    ttft_recompute_ms=10_000.0,
    ttft_host_a_ms=10_000.0,
    ttft_fetch_ms=125.0,
    ttft_fetch_parts_ms={"hash": 1.0, "exists": 1.0, "fetch": 80.0, "load": 13.0, "tail": 30.0},
    ttft_fetch_memory_ms=100.0,
    plain_bytes=128 * BLOCK_BYTES,
    wire_bytes=128 * BLOCK_BYTES * 2 // 3,
    other_tenant_asked=128,
    other_tenant_hits=0,
    corrupt_blocks_detected=1,
    corrupt_block_index=96,
    corrupt_used_blocks=96,
    corrupt_misses={"corrupt": 1},
    corrupt_stored_again=1,
    corrupt_prefix_after_put=128,
    wrong_bytes=0,
    load_ms=300.0,
    connect_ms=20.0,
    seconds=45.0,
)


def test_a_good_run_breaks_no_promise() -> None:
    assert report.broken_promises(GOOD) == []
    assert "all promises held" in report.table(GOOD, [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wrong_bytes": 1}, "wrong_bytes"),
        ({"tokens_identical": False}, "tokens"),
        ({"durable_blocks_put": 127, "warm_restart_hits": 127}, "127 of 128 blocks"),
        ({"warm_restart_hits": 127}, "127 of 128 durable"),
        ({"other_tenant_hits": 1}, "another tenant"),
        ({"corrupt_blocks_detected": 0}, "0 corrupt"),
        ({"corrupt_blocks_detected": 2}, "2 corrupt"),
        ({"corrupt_used_blocks": 97}, "97 blocks were used"),
        ({"corrupt_stored_again": 0}, "stored 0 blocks"),
        ({"corrupt_prefix_after_put": 96}, "96 of 128"),
        ({"ttft_recompute_ms": 19.99 * 125.0}, "20.0x sooner, not 20x"),
    ],
)
def test_each_broken_promise_is_named(change: dict[str, Any], said: str) -> None:
    found = replace(GOOD, **change)
    broken = report.broken_promises(found)
    assert len(broken) == 1
    assert said in broken[0]
    shown = report.table(found, broken)
    assert "1 broken" in shown
    assert broken[0] in shown
    assert report.as_dict(found, broken)["broken_promises"] == broken


def test_the_gain_is_promised_for_a_full_context_only() -> None:
    short = replace(GOOD, context_tokens=2_048, ttft_recompute_ms=500.0)
    assert report.broken_promises(short) == []
    assert report.broken_promises(replace(GOOD, ttft_recompute_ms=20 * 125.0)) == []


def test_the_table_fits_80_columns() -> None:
    wide = replace(GOOD, ttft_fetch_parts_ms=dict.fromkeys(GOOD.ttft_fetch_parts_ms, 999.4))
    assert max(len(line) for line in report.table(wide, []).splitlines()) <= 80


# Wrong bytes and the bit.


def test_wrong_bytes_counts_whole_blocks_and_leftovers() -> None:
    good = np.arange(8, dtype=np.uint16)
    digest = hashlib.sha256(good.tobytes()).digest()
    bad, leftover, empty = good.copy(), np.zeros(8, np.uint16), np.zeros(8, np.uint16)
    bad[3] ^= 1
    leftover[5] = 0x0100
    blocks = [good, bad, leftover, empty]
    statuses = [Status.OK, Status.OK, Status.CORRUPT, Status.GAP]
    assert wrong_bytes_in(blocks, statuses, [digest] * 4) == bad.nbytes + 1
    assert wrong_bytes_in([good, empty], [Status.OK, Status.MISS], [digest] * 2) == 0


def test_flip_changes_one_bit_of_the_content_only(tmp_path: Path) -> None:
    sealed = (VECTORS / "sealed_plane.bin").read_bytes()
    header = SealedHeader.parse(sealed)
    at = 3 * ALIGN_BYTES + 96
    before = bytearray(16 * ALIGN_BYTES + len(sealed) // ALIGN_BYTES * ALIGN_BYTES)
    before[ALIGN_BYTES + 96 : ALIGN_BYTES + 100] = b"ENTS"  # a magic, and no header
    before[at : at + len(sealed)] = sealed
    path = tmp_path / "flash.data"
    path.write_bytes(before)
    flipped = flip_bit(path, header.engine_key, bit=7)
    after = path.read_bytes()
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == [flipped.offset]
    assert before[flipped.offset] ^ after[flipped.offset] == 1 << 7
    assert at + header.header_bytes + header.meta_bytes <= flipped.offset < at + len(sealed)
    assert SealedHeader.parse(after[at:]) == header


def test_flip_refuses_a_file_without_the_block(tmp_path: Path) -> None:
    path = tmp_path / "flash.data"
    path.write_bytes(bytes(4 * ALIGN_BYTES))
    with pytest.raises(EntresolError, match="does not hold the block"):
        flip_bit(path, b"k" * 32)
    with pytest.raises(EntresolError, match="cannot damage"):
        flip_bit(tmp_path / "absent", b"k" * 32)


# Progress.


class Screen:
    """A text stream that remembers what was written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("live", [False, True])
def test_progress_keeps_each_outcome_on_a_line_of_its_own(live: bool) -> None:
    screen = Screen()
    progress = Progress(screen, live=live)  # type: ignore[arg-type]
    progress.begin(2, "headline")
    for title in ("one", "two"):
        progress.step(title)
        for count in range(50):
            progress.update(f"at {count}")
        if live:
            time.sleep(0.11)
            progress.update("late")
        progress.done(f"done {title}")
    kept = [line.rsplit("\x1b[K", 1)[-1] for line in screen.text.split("\n")]
    assert kept[0] == "headline"
    assert kept[-1] == ""
    assert [line.partition("] ")[2] for line in kept[1:-1]] == ["one: done one", "two: done two"]
    assert ("late" in screen.text) == live
    assert ("\x1b" in screen.text) == live
