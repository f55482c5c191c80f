"""`entresol put`, `get`, `exists`, `explain`, `forget`, `stat`, `events` against the real daemon.

Most commands run in this process through `main(argv)`; those that are about streams and signals run
as processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_lab import COMMAND, PROCESS_SECONDS_MAX, Cli, content, process, written
from harness import DaemonProcess

from entresol_client.cli.objects import parse_key
from entresol_proto.limits import KIB, MIB

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("c") / "d", "--flash", "256MiB") as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


# -- put and get


@pytest.mark.parametrize(
    ("length", "block"),
    [(1, "1MiB"), (MIB, "1MiB"), (5 * MIB + 1, "1MiB"), (10_000, "512"), (3 * MIB, "64MiB")],
)
@pytest.mark.parametrize("place", ["host", "daemon"])
def test_what_was_put_comes_back(
    cli: Cli, tmp_path: Path, length: int, block: str, place: str
) -> None:
    raw = content(f"round trip {length} {block}", length)
    name = f"trip-{length}-{block}"
    stored = cli("put", written(tmp_path / "in", raw), "--name", name, "--block", block, "--json")
    assert stored.json["sha256"] == hashlib.sha256(raw).hexdigest()
    assert stored.json["stored_blocks"] + stored.json["existed_blocks"] == stored.json["blocks"]
    out = tmp_path / "out"
    got = cli("get", "--name", name, "-o", str(out), "--open-at", place, "--json").json
    assert out.read_bytes() == raw
    assert got["sha256"] == stored.json["sha256"]
    assert got["statuses"] == {"ok": got["blocks"]}
    assert sum(got["tiers"].values()) == got["blocks"]
    assert got["wire_bytes"] > 0
    assert list(tmp_path.glob("*.part")) == []


def test_words_for_people_name_the_way_back(cli: Cli, tmp_path: Path) -> None:
    raw = content("words", 100_000)
    said = cli("put", written(tmp_path / "in", raw), "--model", "a model", "--salt", "s")
    assert hashlib.sha256(raw).hexdigest() in said.out
    again = re.search(r"get it back: entresol (.*) -o FILE(.*)", said.out)
    assert again, said.out
    assert again[2].startswith(" --model 'a model' --salt SALT")
    name = again[1].split()[-1]
    out = tmp_path / "out"
    said = cli("get", "--name", name, "-o", str(out), "--model", "a model", "--salt", "s")
    assert out.read_bytes() == raw
    assert "GB/s" in said.out
    assert "as it was stored" in said.out


def test_a_second_put_moves_nothing_and_beginnings_are_shared(cli: Cli, tmp_path: Path) -> None:
    start = content("shared", 3 * MIB)
    one = written(tmp_path / "one", start + b"tail one")
    two = written(tmp_path / "two", start + b"another tail")
    assert cli("put", one, "--name", "one", "--json").json["stored_blocks"] == 4
    again = cli("put", one, "--name", "one", "--json").json
    assert (again["stored_blocks"], again["existed_blocks"], again["wire_bytes"]) == (0, 4, 0)
    assert "nothing had to be moved" in cli("put", one, "--name", "one").out
    other = cli("put", two, "--name", "two", "--json").json
    assert (other["stored_blocks"], other["existed_blocks"]) == (1, 3)
    for name, path in (("one", one), ("two", two)):
        cli("get", "--name", name, "-o", str(tmp_path / "out"))
        assert (tmp_path / "out").read_bytes() == Path(path).read_bytes()


def test_a_name_keeps_its_content_until_told_otherwise(cli: Cli, tmp_path: Path) -> None:
    one = written(tmp_path / "one", content("v1", 9_000))
    two = written(tmp_path / "two", content("v2", 8_000))
    out = tmp_path / "out"
    cli("put", one, "--name", "versions")
    cli.fails("put", two, "--name", "versions", code=1, match="stands for other content")
    cli("get", "--name", "versions", "-o", str(out))
    assert out.read_bytes() == Path(one).read_bytes()
    cli("put", two, "--name", "versions", "--replace", "--ack", "durable")
    cli("get", "--name", "versions", "-o", str(out))
    assert out.read_bytes() == Path(two).read_bytes()


def test_one_block_under_ones_own_key(cli: Cli, tmp_path: Path) -> None:
    raw = content("own key", 70_000)
    path, out = written(tmp_path / "in", raw), tmp_path / "out"
    for key in ("text:session-42", "00112233445566778899aabbccddeeff"):
        stored = cli("put", path, "--key", key, "--json").json
        assert stored["key"] == parse_key(key).hex()
        cli("put", path, "--key", key)  # the same again is no conflict
        cli("get", "--key", key, "--length", "70000", "-o", str(out))
        assert out.read_bytes() == raw
        cli.fails(
            "get", "--key", key, "--length", "7", "-o", str(out), code=1, match="another length"
        )
        other = written(tmp_path / "other", raw[::-1])
        cli.fails("put", other, "--key", key, code=1, match="with other bytes")
        cli("put", other, "--key", key, "--replace")
        cli("get", "--key", key, "--length", "70000", "-o", str(out))
        assert out.read_bytes() == raw[::-1]


@pytest.mark.parametrize("raw", [b"", b"x", content("streams", 2 * MIB + 5)])
def test_standard_streams(daemon: DaemonProcess, raw: bytes) -> None:
    config = daemon.directory / "client.toml"
    name = f"stream-{len(raw)}"
    put = process("put", "-", "--name", name, config=config, stdin=raw)
    assert put.returncode == 0, put.stderr
    got = process("get", "--name", name, "-o", "-", config=config)
    assert (got.returncode, got.stdout) == (0, raw)
    assert hashlib.sha256(raw).hexdigest().encode() in got.stderr
    told = process("get", "--name", name, "-o", "-", "--json", config=config)
    assert told.stdout == raw
    assert json.loads(told.stderr)["bytes"] == len(raw)


def test_a_miss_leaves_the_output_alone(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"before")
    cli.fails("get", "--name", "nowhere", "-o", str(out), code=1, match="was never stored")
    path = written(tmp_path / "in", content("gone", 3 * MIB))
    cli("put", path, "--name", "gone")
    cli("forget", "--name", "gone", "--blocks")
    cli("put", written(tmp_path / "b", b"b"), "--name", "other")
    cli.fails("get", "--name", "gone", "-o", str(out), code=1, match=r"was dropped at 20\d\d-")
    assert out.read_bytes() == b"before"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["b", "in", "out"]


def test_a_missing_block_in_the_middle_is_named(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "in", content("middle", 3 * MIB))
    cli("put", path, "--name", "middle")
    rows = cli("explain", "--name", "middle", "--json").json["keys"]
    assert [row["what"] for row in rows] == ["the name 'middle'", "block 0", "block 1", "block 2"]
    cli("forget", "--key", rows[2]["key"])
    out = tmp_path / "out"
    cli.fails("get", "--name", "middle", "-o", str(out), code=1, match="block 1 of 3 of 'middle'")
    assert not out.exists()
    said = cli("exists", "--name", "middle", code=1)
    assert "incomplete, 2 of 3 blocks" in said.out
    said = cli("explain", "--name", "middle", code=1)
    assert re.search(r"block 1 was dropped at .* because the tenant asked", said.out)
    cli("put", path, "--name", "middle")
    cli("get", "--name", "middle", "-o", str(out))


def test_other_namespaces_and_tenants_see_nothing(cli: Cli, tmp_path: Path) -> None:
    cli("put", written(tmp_path / "in", content("private", 5_000)), "--name", "private")
    out = str(tmp_path / "out")
    salted = ("get", "--name", "private", "-o", out, "--salt", "other")
    cli.fails(*salted, code=1, match="under another model, layout or salt")
    foreign = ("get", "--name", "private", "-o", out, "--tenant", "other")
    cli.fails(*foreign, code=1, match="was never stored")
    cli("exists", "--name", "private")
    cli("exists", "--name", "private", "--tenant", "dev")
    cli("exists", "--name", "private", "--tenant", "other", code=1)


# -- questions


def test_exists_explain_forget_by_key(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "in", content("by key", 4 * KIB))
    cli("put", path, "--key", "text:here")
    words = ("--key", "text:here", "--key", "text:absent")
    said = cli("exists", *words, code=1)
    assert said.out.splitlines() == ["text:here: stored", "text:absent: not stored"]
    found = cli("exists", *words, "--json", code=1).json
    assert (found["present"], found["asked"], found["exists"]) == (1, 2, False)
    reasons = cli("explain", *words, "--json", code=1).json["reasons"]
    assert reasons == {"in_memory": 1, "never_stored": 1}
    assert cli("forget", *words, "--json").json == {"forgotten": 1, "asked": 2}
    assert "nothing was there" in cli("forget", *words, code=1).out
    said = cli("explain", "--key", "text:here", "--json", code=1)
    assert said.json["reasons"] == {"forgotten": 1}
    assert abs(said.json["keys"][0]["when_unix_ns"] - time.time_ns()) < 120e9


def test_quote_for_people_and_scripts(cli: Cli, tmp_path: Path) -> None:
    cli("put", written(tmp_path / "in", content("quoted", 3 * MIB)), "--name", "quoted")
    said = cli("quote", "--name", "quoted")
    assert "3 of 3 blocks would be granted: 3 from memory, 0 from flash" in said.out
    assert re.search(r"expected in \S+ \S+, nine of ten within", said.out)
    found = cli("quote", "--name", "quoted", "--json").json
    assert (found["asked"], found["prefix_blocks"], found["missing"]) == (3, 3, 0)
    assert 0 < found["wait_ns"] <= found["expected_ns"] <= found["high_ns"]
    assert found["sealed_bytes"] >= 3 * MIB
    absent = cli("quote", "--key", "text:nobody", "--json", code=1).json
    assert (absent["missing"], absent["sealed_bytes"]) == (1, 0)
    cli.fails("quote", "--name", "nowhere", code=1, match="was never stored")


def test_stat_for_people_scripts_operators_and_tenants(cli: Cli, tmp_path: Path) -> None:
    cli("put", written(tmp_path / "in", content("stat", 2 * MIB)), "--name", "stat")
    said = cli("stat")
    assert re.search(r"shard dev +serving", said.out)
    assert re.search(r"flash +\S+ MiB of ", said.out)
    row = cli("stat", "--json").json["shards"][0]
    assert row["stat"]["blocks"] >= 3
    assert row["stat"]["blocks_stored"] >= 3
    assert isinstance(row["stat"]["flash_direct"], bool)
    socket_path = str(cli.folder / "run" / "admin.sock")
    bare = cli("stat", "--admin-socket", socket_path, "--json").json["shards"][0]
    assert bare["incarnation"] == row["incarnation"]
    remote = tmp_path / "remote.toml"
    remote.write_text(re.sub("admin_socket.*\n", "", cli.config.read_text()))
    described = cli("stat", "--json", config=remote).json["shards"][0]
    assert (described["tenant"], described["state"]) == ("dev", "serving")
    assert "stat" not in described
    assert "see --admin-socket" in cli("stat", config=remote).out


def test_version(cli: Cli) -> None:
    assert cli("version", "--json").json["packages"]["cryptography"]
    assert cli("version").out.startswith("entresol ")


# -- events


def test_events_replay_since_and_snapshot(cli: Cli, tmp_path: Path) -> None:
    cli("put", written(tmp_path / "in", content("events", 2 * MIB)), "--name", "events")
    cli("forget", "--name", "events")
    rows = cli("events", "--json").lines
    events = [row for row in rows if row["type"] == "event"]
    assert [row["seq"] for row in events] == list(range(1, len(events) + 1))
    assert events[-1]["kind"] == "removed"
    assert events[-1]["reason"] == "forgotten"
    assert rows[-1]["type"] == "position"
    position = rows[-1]["position"]
    assert cli("events", "--since", position, "--json").lines == rows[-1:]
    last = cli("events", "--since", str(len(events) - 1), "--json").lines
    assert last == rows[-2:]
    said = cli("events", "--since", str(len(events) - 1))
    assert re.search(r"removed +forgotten +1 block", said.out)
    snapshot = cli("events", "--snapshot", "--json").lines
    assert snapshot[0] == {"type": "snapshot", "position": position}
    stored = {row["wire_keys"][0] for row in snapshot if row["type"] == "event"}
    assert events[-1]["wire_keys"][0] not in stored
    assert len(cli("events", "--count", "2").out.splitlines()) == 2
    assert "token_ids" in cli("events", "--json", "--tokens", "--count", "1").lines[0]


def test_a_tenant_that_was_never_seen_has_no_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaemonProcess(tmp_path / "d", "--flash", "128MiB") as daemon:
        cli = Cli(capsys, daemon.directory)
        for words in (("events",), ("events", "--snapshot")):
            rows = cli(*words, "--json").lines
            assert [row["type"] for row in rows if row["type"] != "snapshot"] == ["position"]
        assert cli("stat", "--json").json["shards"][0]["stat"]["blocks"] == 0
        assert cli("tenant", "list", "--json").json["tenants"] == []


def test_events_that_are_not_held_are_a_gap(cli: Cli) -> None:
    cli.fails("events", "--since", "999999", code=1, match="999999 was not given out yet")
    foreign = "0000000000000001:5"
    said = cli.fails("events", "--since", foreign, "--json", code=1, match="was restarted")
    assert said.lines[0]["type"] == "gap"
    assert said.lines[0]["reason"] == "incarnation"
    rows = cli("events", "--since", foreign, "--follow", "--json", "--count", "1").lines
    assert [row["type"] for row in rows] == ["gap", "snapshot", "event"]


@pytest.mark.parametrize("since", ["-1", "x", "1:2", "zzzzzzzzzzzzzzzz:1", "1.5"])
def test_events_since_nonsense(cli: Cli, since: str) -> None:
    cli.fails("events", f"--since={since}", code=2, match="no position")


@contextlib.contextmanager
def following(config: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`entresol events --follow --json` as a process; it is gone afterwards."""
    running = subprocess.Popen(
        [*COMMAND, "events", "--follow", "--json", *words, "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def next_row(running: subprocess.Popen[str]) -> Any:
    """The next line it prints."""
    assert running.stdout is not None
    line = running.stdout.readline()
    if not line:
        assert running.stderr is not None
        raise AssertionError(f"it ended: {running.stderr.read()}")
    return json.loads(line)


def test_following_sees_what_happens_and_ends_on_interrupt(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "in", content("following", 10_000))
    cli("put", path, "--name", "following")
    with following(cli.config, "--since", "0") as running:
        assert next_row(running)["seq"] == 1  # it is connected: what comes now is seen live
        key = cli("put", path, "--key", "text:following", "--json").json["key"]
        while next_row(running)["engine_keys"] != [key]:
            pass
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=PROCESS_SECONDS_MAX)
    assert running.returncode == 130
    assert err.splitlines()[-1] == "entresol: interrupted"
    assert "Traceback" not in err


def test_following_goes_on_after_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaemonProcess(tmp_path / "d", "--flash", "128MiB") as daemon:
        cli = Cli(capsys, daemon.directory)
        path = written(tmp_path / "in", content("restart", 10_000))
        cli("put", path, "--name", "before", "--ack", "durable")
        with following(cli.config, "--since", "0") as running:
            assert [next_row(running)["seq"] for _ in range(3)] == [1, 2, 3]
            daemon.kill()
            daemon.start()
            kinds = [next_row(running)["type"] for _ in range(6)]
            assert kinds == ["gap", "snapshot", "event", "event", "event", "complete"]
            cli("put", path, "--key", "text:after")
            assert next_row(running)["kind"] == "stored"
            running.send_signal(signal.SIGINT)
            _, err = running.communicate(timeout=PROCESS_SECONDS_MAX)
        assert "trying again in" in err
        # What was durable is there after kill -9, by its name.
        cli("get", "--name", "before", "-o", str(tmp_path / "out"))
        assert (tmp_path / "out").read_bytes() == Path(path).read_bytes()


def test_the_operator_follows_all_tenants(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "in", content("all", 100))
    with following(cli.config, "--all-tenants", "--count", "1") as running:
        for attempt in range(200):  # it follows from when it is connected on
            cli("put", path, "--key", f"text:all-{attempt}", "--tenant", "other")
            if running.poll() is not None:
                break
            time.sleep(0.05)
        row = next_row(running)
        assert running.wait(PROCESS_SECONDS_MAX) == 0
    assert (row["tenant"], row["kind"]) == ("other", "stored")


def test_the_operator_is_told_what_was_missed_while_the_daemon_was_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaemonProcess(tmp_path / "d", "--flash", "128MiB") as daemon:
        cli = Cli(capsys, daemon.directory)
        path = written(tmp_path / "in", content("missed", 100))
        with following(cli.config, "--all-tenants") as running:
            for attempt in range(200):  # until it is connected
                cli("put", path, "--key", f"text:before-{attempt}")
                assert running.stdout is not None
                if select.select([running.stdout], [], [], 0.2)[0]:
                    break
            assert next_row(running)["kind"] == "stored"
            daemon.kill()
            daemon.start()
            for attempt in range(200):
                cli("put", path, "--key", f"text:after-{attempt}")
                if select.select([running.stdout], [], [], 0.2)[0]:
                    break
            rows = [next_row(running)]
            while rows[-1]["type"] != "gap":
                rows.append(next_row(running))
            gap = rows[-1]
            assert (gap["tenant"], gap["reason"]) == ("dev", "incarnation")
            assert next_row(running)["seq"] == gap["last_missed_seq"] + 1


def test_events_of_a_tenant_whose_certificate_is_elsewhere(cli: Cli, tmp_path: Path) -> None:
    """On the daemon's machine the operator asks; elsewhere it is a mistake, as before."""
    cli.fails("exists", "--key", "text:x", "--tenant", "acme", code=2, match="no client-acme.toml")
    cli("tenant", "add", "acme")
    rows = cli("events", "--tenant", "acme", "--json").lines
    assert [row["type"] for row in rows] == ["position"]
    remote = tmp_path / "remote.toml"
    remote.write_text(re.sub("admin_socket.*\n", "", cli.config.read_text()))
    cli.fails(
        "events", "--tenant", "acme", code=2, match="there is no client-acme.toml", config=remote
    )


def test_a_reader_that_has_enough_is_no_error(daemon: DaemonProcess) -> None:
    config = daemon.directory / "client.toml"
    with subprocess.Popen(
        [*COMMAND, "events", "--follow", "--since", "0", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline()
        running.stdout.close()
        until = time.monotonic() + PROCESS_SECONDS_MAX
        while running.poll() is None and time.monotonic() < until:
            process("put", "-", config=config, stdin=os.urandom(64))
        assert running.returncode == 1
        assert "Traceback" not in running.stderr.read()


def test_a_put_is_interrupted_cleanly(daemon: DaemonProcess) -> None:
    config = daemon.directory / "client.toml"
    with subprocess.Popen(
        [*COMMAND, "put", "-", "--name", "interrupted", "--config", str(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdin is not None
        running.stdin.write(content("interrupted", 40 * MIB))  # it is past its first window now
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=PROCESS_SECONDS_MAX)
    assert (running.returncode, out) == (130, b"")
    assert err.splitlines()[-1] == b"entresol: interrupted"
    assert process("exists", "--name", "interrupted", config=config).returncode == 1
