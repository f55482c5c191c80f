"""`entresol top` against the real daemon: its numbers are those of what was really done."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_lab import COMMAND, Cli, content, process, written
from harness import DaemonProcess

from entresol_client.config import ClientConfig
from entresol_proto.limits import MIB

pytestmark = pytest.mark.daemon

SECONDS_MAX = 30.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("t") / "d", "--flash", "256MiB") as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


def address(daemon: DaemonProcess) -> str:
    config = ClientConfig.load(daemon.directory / "client.toml")
    return config.shards[0].metrics


def overview(daemon: DaemonProcess) -> dict[str, Any]:
    host = address(daemon).removeprefix("http://")
    link = http.client.HTTPConnection(host, timeout=SECONDS_MAX)
    try:
        link.request("GET", "/overview.json")
        answer = link.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "application/json"
        return dict(json.loads(answer.read()))
    finally:
        link.close()


def test_what_was_done_is_what_is_shown(cli: Cli, daemon: DaemonProcess, tmp_path: Path) -> None:
    before = overview(daemon)
    source = written(tmp_path / "in", content("top", 4 * MIB))
    cli("put", source, "--name", "top", "--ack", "durable")
    cli("get", "--name", "top", "-o", str(tmp_path / "out"))
    cli("get", "--name", "absent", "-o", str(tmp_path / "none"), code=1)
    after = overview(daemon)
    assert after["put_bytes"]["plain"] - before["put_bytes"].get("plain", 0) >= 4 * MIB
    assert after["get_bytes"]["plain"] - before["get_bytes"].get("plain", 0) >= 4 * MIB
    assert after["first_grant"]["count"] > before["first_grant"]["count"]
    assert sum(after["missed"].values()) > sum(before["missed"].values())
    assert after["flash"]["live_bytes"] > before["flash"]["live_bytes"]
    assert any(cell != "f" for cell in after["flash"]["map"]["cells"][::2])
    assert after["events"][0]["kind"] == "stored"
    assert next(row["tenant"] for row in after["tenants"]["rows"]) == "dev"
    words = ("top", "--once", "--interval", "0.2")
    saved = ("--model", "llama-3.1-8b", "--prefill-rate", "10000")
    # A machine that is busy with other tests may well be called overloaded: that ends with 1.
    done = process(*words, *saved, config=cli.config)
    assert done.returncode in (0, 1), done.stderr
    shown = done.stdout.decode()
    assert re.match(r"dev  (HEALTHY|IDLE|OVERLOADED)  \d+ % of flash in use", shown)
    assert "prefill saved since start" in shown
    found = json.loads(process(*words, "--json", config=cli.config).stdout)
    assert found["overview"]["blocks"] == after["blocks"]
    assert found["rates"]["out_bytes"] == 0


def test_the_overview_names_no_block(cli: Cli, daemon: DaemonProcess, tmp_path: Path) -> None:
    """Keys, namespaces and content of tenants stay out of what any user of the machine may read."""
    cli("put", written(tmp_path / "in", content("secret", MIB)), "--name", "marker-name",
        "--model", "marker-model", "--salt", "marker-salt")  # fmt: skip
    raw = json.dumps(overview(daemon))
    assert "marker" not in raw
    assert not re.search(r'"[0-9a-f]{16,}"', raw), "something that looks like a key"


def test_a_terminal_is_left_as_it_was(daemon: DaemonProcess) -> None:
    """q ends it; echo, line mode, cursor and screen are back."""
    ours, theirs = pty.openpty()
    kept = termios.tcgetattr(theirs)
    command = [*COMMAND, "top", "--url", address(daemon), "--interval", "0.2"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    try:
        raw = read_until(ours, b"of flash in use", running)
        changed = termios.tcgetattr(theirs)
        assert changed[3] != kept[3], "keys come one by one while it runs"
        os.write(ours, b"q")
        raw += read_until(ours, b"\033[?1049l", running)
        assert running.wait(SECONDS_MAX) == 0
        assert termios.tcgetattr(theirs) == kept
    finally:
        running.kill()
        running.wait()
        os.close(ours)
        os.close(theirs)
    assert raw.count(b"\033[?25h") == raw.count(b"\033[?25l") == 1
    assert not re.search(rb"\033\[[0-9;]*m", raw), "NO_COLOR"


def read_until(terminal: int, words: bytes, running: subprocess.Popen[bytes]) -> bytes:
    raw, end = b"", time.monotonic() + SECONDS_MAX
    while words not in raw:
        assert time.monotonic() < end, raw[-500:]
        ready, _, _ = select.select([terminal], [], [], 0.1)
        if ready:
            raw += os.read(terminal, 65536)
        else:
            assert running.poll() is None, raw[-500:]
    return raw


def test_without_a_terminal_frames_are_text(daemon: DaemonProcess) -> None:
    command = [*COMMAND, "top", "--url", address(daemon), "--interval", "0.2", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        frames = [json.loads(running.stdout.readline()) for _ in range(12)]
        running.kill()
    # Five a second are more than a daemon makes: the same overview may come again, and is no step.
    assert "rates" not in frames[0]
    spans_s = [found["rates"]["seconds"] for found in frames if "rates" in found]
    assert spans_s
    assert min(spans_s) > 0
    for one, other in itertools.pairwise(frames):
        assert ("rates" in other) >= ("rates" in one), "rates went away again"
