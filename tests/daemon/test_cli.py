"""The `entresol` command against the real daemon: what it does, says, and how it fails.

Most commands run in this process through `main(argv)`; those that are about streams, signals and
imports run as processes. Every failure must be one line and a fix, with the documented exit code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import DaemonProcess

from entresol_client.cli import main as cli_main
from entresol_client.cli.main import main
from entresol_client.cli.objects import parse_key
from entresol_client.config import ClientConfig
from entresol_daemon.control import devcerts
from entresol_proto.limits import KIB, MIB

pytestmark = pytest.mark.daemon

COMMAND = [sys.executable, "-m", "entresol_client.cli.main"]
PROCESS_SECONDS_MAX = 60.0
COMMANDS = (
    "put", "get", "exists", "explain", "forget", "events", "stat", "version", "doctor", "inspect",
    "tenant",
)  # fmt: skip
VERBS = ("list", "add", "quota", "rotate", "erase")


@dataclass(frozen=True, slots=True)
class Said:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Cli:
    """Runs commands in this process, as one tenant of one daemon."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self.folder = folder
        self.config = folder / "client.toml"

    def __call__(self, *words: str, code: int = 0, config: Path | None = None) -> Said:
        """Run, and expect an exit code; failures must look as documented."""
        self._capsys.readouterr()
        argv = list(words)
        if words[0] != "version" and "--admin-socket" not in words:
            argv += ["--config", str(config or self.config)]
        got = main(argv)
        said = Said(got, *self._capsys.readouterr())
        assert got == code, f"{words}: {said}"
        assert "Traceback" not in said.err
        return said

    def fails(self, *words: str, code: int, match: str, config: Path | None = None) -> Said:
        """Run, and expect the error line to match."""
        said = self(*words, code=code, config=config)
        assert re.search(match, said.err), said.err
        assert said.err.splitlines()[-1].startswith(("entresol: ", "  fix: ")), said.err
        return said


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("c") / "d", "--flash", "256MiB") as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


def content(seed: str, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def written(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    return str(path)


def process(*words: str, config: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *words, "--config", str(config)],
        input=stdin,
        capture_output=True,
        timeout=PROCESS_SECONDS_MAX,
        check=False,
    )


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
    assert again[2].startswith(" --model 'a model' --salt s")
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
            kinds = [next_row(running)["type"] for _ in range(5)]
            assert kinds == ["gap", "snapshot", "event", "event", "event"]
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


# -- doctor


def findings(said: Said) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in said.json["findings"]:
        found.setdefault(row["area"], []).append(row)
    return found


def variant(cli: Cli, folder: Path, **changes: str) -> Path:
    """The client's configuration with some lines replaced."""
    text = cli.config.read_text()
    for name, value in changes.items():
        text, count = re.subn(f"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert count == 1, name
    target = folder / "variant.toml"
    target.write_text(text)
    return target


def test_doctor_finds_a_healthy_setup(cli: Cli) -> None:
    said = cli("doctor")
    assert re.search(r"ok +shard dev +data path shm: same host", said.out)
    assert re.search(r"\d+ ok, \d+ warnings?, 0 failed", said.out)
    found = findings(cli("doctor", "--json"))
    assert set(found) >= {"config", "files", "certificate", "shard dev", "memlock", "cpu", "clock"}
    assert all(row["fix"] for rows in found.values() for row in rows if row["level"] != "ok")


@pytest.mark.parametrize(
    ("changes", "area", "text"),
    [
        ({"cert": '"/nowhere/x.pem"'}, "files", "no file /nowhere/x.pem"),
        ({"port": "1"}, "shard dev", "nobody answers"),
        ({"name": '"elsewhere"'}, "shard elsewhere", "is shard 'dev', not 'elsewhere'"),
        ({"trust_domain": '"other.example"'}, "certificate", "trust domain"),
        ({"grpc_port": "1"}, "shard dev", "no daemon answers gRPC"),
    ],
)
def test_doctor_names_what_is_wrong(
    cli: Cli, tmp_path: Path, changes: dict[str, str], area: str, text: str
) -> None:
    said = cli("doctor", "--json", code=1, config=variant(cli, tmp_path, **changes))
    bad = [row for row in findings(said)[area] if row["level"] == "fail"]
    assert any(text in row["text"] for row in bad), said.out
    assert all(row["fix"] for row in bad)


def test_doctor_judges_certificates(cli: Cli, tmp_path: Path) -> None:
    pki = devcerts.create(tmp_path / "pki")
    files = {}
    uri = "spiffe://entresol.local/tenant/dev"
    for stem, days, uris in (
        ("old", -1, [uri]), ("soon", 5, [uri]), ("nobody", 100, []), ("foreign", 100, [uri]),
    ):  # fmt: skip
        files[stem] = devcerts.issue(pki, stem, uris=uris, days=days)

    def judged(stem: str, ca: Path, code: int) -> list[dict[str, str]]:
        pem = files[stem]
        config = variant(cli, tmp_path, cert=f'"{pem.cert}"', key=f'"{pem.key}"', ca=f'"{ca}"')
        return cli("doctor", "--json", code=code, config=config).json["findings"]  # type: ignore[no-any-return]

    ours = cli.folder / "pki" / "ca.pem"
    assert any("expired on" in row["text"] for row in judged("old", ours, 1))
    soon = judged("soon", ours, 1)
    assert any(row["level"] == "warn" and "valid until" in row["text"] for row in soon)
    assert any("no URI name" in row["text"] for row in judged("nobody", ours, 1))
    refused = [row for row in judged("foreign", ours, 1) if row["level"] == "fail"]
    assert any("no session" in row["text"] for row in refused)
    refused = [row for row in judged("foreign", pki.ca, 1) if row["level"] == "fail"]
    assert any("TLS" in row["text"] for row in refused)
    files["foreign"].key.chmod(0o644)
    open_key = judged("foreign", ours, 1)
    assert any("is open to others" in row["text"] for row in open_key)


def test_doctor_without_a_configuration(cli: Cli, tmp_path: Path) -> None:
    said = cli("doctor", code=1, config=tmp_path / "none.toml")
    assert re.search(r"fail +config +cannot read", said.out)
    assert "memlock" in said.out  # the host is looked at all the same


# -- inspect


def test_inspect_a_running_daemon(cli: Cli, tmp_path: Path) -> None:
    cli("put", written(tmp_path / "in", content("inspect", MIB)), "--name", "i", "--ack", "durable")
    rows = cli("inspect", "--json").json["segments"]
    assert any(row["tenant"] == "dev" and row["live_records"] for row in rows)
    assert re.search(r"segments? in use, \d+ free", cli("inspect").out)
    cli.fails("inspect", "--quick", code=2, match="belong to a PATH")


def test_inspect_a_data_file(tmp_path: Path, capsys: Any) -> None:
    with DaemonProcess(tmp_path / "d", "--flash", "128MiB") as daemon:
        cli = Cli(capsys, daemon.directory)
        path = written(tmp_path / "in", content("file", 3 * MIB))
        cli("put", path, "--name", "kept", "--ack", "durable")
        cli("put", path, "--name", "dropped", "--ack", "durable")
        cli("forget", "--name", "dropped")
        data = next(p for p in (tmp_path / "d" / "state").iterdir() if p.stat().st_size > 64 * MIB)
        busy = inspected(data)
        assert busy.returncode == 1
        assert "a daemon uses" in busy.stderr
        live = inspected(data, "--force-read-only", "--json")
        assert json.loads(live.stdout)["in_use"] is True
        assert daemon.stop() == 0
        sound = inspected(data, "--json", "--records")
        assert sound.returncode == 0, sound.stderr
        found = json.loads(sound.stdout)
        assert (found["live_blocks"], found["damaged"], found["clean"]) == (5, 0, True)
        assert found["superblock_copies"] == 2
        rows = found["record_list"]
        dead = [row for row in rows if row["kind"] == "block" and not row["live"]]
        assert len(dead) == 1, "the head of the name that was forgotten"
        assert all(len(row["key"]) == 8 for row in rows)
        quick = json.loads(inspected(data, "--json", "--quick").stdout)
        assert (quick["live_blocks"], quick["payloads_read"]) == (5, False)
        assert "sound" in inspected(data, "--records").stdout
        whole = next(row for row in rows if row["sealed_bytes"] > MIB)
        start = found_offset(found, whole)
        with open(data, "r+b") as file:
            file.seek(start + 5_000)
            byte = file.read(1)
            file.seek(start + 5_000)
            file.write(bytes([byte[0] ^ 1]))
        damaged = inspected(data, "--json")
        assert damaged.returncode == 1
        assert json.loads(damaged.stdout)["records_by_verdict"]["bad payload"] == 1
        assert "1 DAMAGED" in inspected(data).stdout
        daemon.start()
        cli.fails("get", "--name", "kept", "-o", str(tmp_path / "out"), code=1, match="kept")
        cli("put", path, "--name", "kept")
        cli("get", "--name", "kept", "-o", str(tmp_path / "out"))
        assert (tmp_path / "out").read_bytes() == Path(path).read_bytes()


def found_offset(found: dict[str, Any], row: dict[str, Any]) -> int:
    from entresol_daemon.flash.superblock import DATA_OFFSET

    return int(DATA_OFFSET + row["segment"] * found["segment_bytes"] + row["offset_bytes"])


def inspected(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "inspect", str(path), *words],
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS_MAX,
        check=False,
    )


def test_inspect_what_is_no_data_file(tmp_path: Path) -> None:
    for name, raw, code, text in (
        ("zeros", bytes(MIB), 1, "blank"),
        ("noise", content("noise", MIB), 1, "not an Entresol data file"),
        ("short", b"abc", 1, "smaller than"),
    ):
        said = inspected(Path(written(tmp_path / name, raw)))
        assert (said.returncode, text in said.stderr) == (code, True), said.stderr
    assert inspected(tmp_path / "absent").returncode == 2
    assert inspected(tmp_path).returncode == 2


def test_inspect_without_the_daemon_package(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = cli.fails("inspect", str(tmp_path), code=1, match="not installed")
    assert "pip install 'entresol[daemon]'" in said.err


# -- tenants


def test_the_life_of_a_tenant(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = cli("tenant", "add", "acme", "--flash", "64MiB", "--weight", "2", "--json").json
    assert added["spiffe_id"] == "spiffe://entresol.local/tenant/acme"
    assert added["quota"] == {"flash_bytes": 64 * MIB, "dram_bytes": None, "weight": 2}
    cli.fails("tenant", "add", "acme", code=1, match="exists already")
    row = cli("tenant", "quota", "acme", "--dram", "32MiB", "--json").json
    assert row["quota"] == {"flash_bytes": 64 * MIB, "dram_bytes": 32 * MIB, "weight": 2}
    row = cli("tenant", "quota", "acme", "--flash", "none", "--json").json
    assert row["quota"]["flash_bytes"] is None
    assert cli("tenant", "rotate", "acme", "--json").json["dek_version"] == 2
    assert re.search(r"acme +0 .* 2 +0 +2\n", cli("tenant", "list").out)

    pki = cli.folder / "pki"
    pem = devcerts.issue_tenant(pki, "acme")
    config = variant(cli, tmp_path, cert=f'"{pem.cert}"', key=f'"{pem.key}"')
    path = written(tmp_path / "in", content("acme", 10_000))
    cli("put", path, "--name", "mine", config=config)

    for typed in ("", "acm\n", "ACME\n"):
        monkeypatch.setattr("sys.stdin", Typed(typed))
        cli.fails("tenant", "erase", "acme", code=1, match="not its name")
    cli("exists", "--name", "mine", config=config)
    monkeypatch.setattr("sys.stdin", Typed("acme\n"))
    said = cli("tenant", "erase", "acme", "--json")
    receipt = said.json
    assert receipt["tenant"] == "acme"
    assert receipt["dek_versions_destroyed"] == [1, 2]
    assert receipt["blocks_dropped"] == 3
    assert len(receipt["digest"]) == 64
    assert "can never be read again" in said.err
    cli.fails("exists", "--name", "mine", code=3, match="no daemon to talk to", config=config)
    cli.fails("tenant", "erase", "nobody", "--yes", code=1, match="nobody")


class Typed:
    """A person at standard input."""

    def __init__(self, text: str) -> None:
        self._text = text

    def readline(self) -> str:
        return self._text


def test_more_than_the_quota_is_not_called_stored(cli: Cli, tmp_path: Path) -> None:
    cli("exists", "--key", "text:x", "--tenant", "other", code=1)  # makes the tenant known
    cli("tenant", "quota", "other", "--flash", "4MiB")
    path = written(tmp_path / "in", content("quota", 48 * MIB))
    said = cli("put", path, "--name", "too big", "--tenant", "other", code=1)
    assert re.search("not stored|does not fit", said.err), said.err
    assert "fix: " in said.err
    cli("tenant", "quota", "other", "--flash", "none")
    cli("put", path, "--name", "too big", "--tenant", "other")
    cli("get", "--name", "too big", "-o", str(tmp_path / "out"), "--tenant", "other")
    assert (tmp_path / "out").read_bytes() == Path(path).read_bytes()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("add", "UPPER"), "is not allowed"),
        (("add", "../x"), "is not allowed"),
        (("quota", "dev"), "nothing to change"),
    ],
)
def test_tenant_mistakes(cli: Cli, words: Sequence[str], match: str) -> None:
    cli.fails("tenant", *words, code=2, match=match)
    cli.fails("tenant", "quota", "ghost", "--weight", "2", code=1, match="no tenant 'ghost'")


# -- mistakes and outages


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("put", "/nowhere/x"), "cannot read"),
        (("put", "/"), "is a directory"),
        (("put", __file__, "--key", "0011"), "has 2 bytes"),
        (("put", __file__, "--key", "ab" * 65), "has 65 bytes"),
        (("put", __file__, "--key", "hello"), "is not hex"),
        (("put", __file__, "--name", ""), "1 to 512 bytes"),
        (("put", __file__, "--name", "n" * 513), "1 to 512 bytes"),
        (("put", __file__, "--model", ""), "field model"),
        (("put", __file__, "--block-tokens", "0"), "block_tokens"),
        (("put", "/dev/null", "--key", "text:x"), "nothing to store"),
        (("get", "--key", "text:x", "-o", "x"), "needs --length"),
        (("get", "--name", "x", "--length", "5", "-o", "x"), "belongs to --key"),
        (("get", "--key", "zz", "--length", "5", "-o", "x"), "is not hex"),
        (("exists", "--key", "1234"), "has 2 bytes"),
        (("forget", "--key", "text:x", "--blocks"), "belongs to --name"),
        (("events", "--tokens"), "belongs to --json"),
        (("exists", "--name", "x", "--tenant", "nobody"), "no client-nobody.toml"),
        (("exists", "--name", "x", "--tenant", "../dev"), "is not allowed"),
        (("stat", "--shard", "zz"), "no shard is called"),
    ],
)
def test_wrong_use_is_refused_before_anything_happens(
    cli: Cli, words: Sequence[str], match: str
) -> None:
    cli.fails(*words, code=2, match=f"(?i){match}")


@pytest.mark.parametrize(
    "words",
    [
        ("frobnicate",), (), ("put",), ("get", "--name", "x"), ("get", "-o", "x"),
        ("put", "x", "--block", "65MiB"), ("put", "x", "--deadline", "0"),
        ("put", "x", "--name", "a", "--key", "b"), ("events", "--count", "0"), ("tenant",),
        ("tenant", "add", "x", "--flash", "0"), ("tenant", "add", "x", "--weight", "0"),
        ("put", "x", "--ack", "maybe"), ("events", "--since", "1", "--snapshot"),
    ],
)  # fmt: skip
def test_wrong_arguments_exit_with_2(words: Sequence[str], capsys: Any) -> None:
    assert main(words) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_get_into_nowhere(cli: Cli, tmp_path: Path) -> None:
    cli("put", written(tmp_path / "in", b"something"), "--name", "somewhere")
    target = str(tmp_path / "no" / "such" / "folder")
    cli.fails("get", "--name", "somewhere", "-o", target, code=2, match="cannot write")


def test_an_unknown_setting_is_refused_with_the_nearest(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "typo.toml"
    config.write_text('fabrik = "auto"\n' + cli.config.read_text())
    said = cli.fails("exists", "--name", "x", code=2, match="unknown setting", config=config)
    assert "did you mean 'fabric'?" in said.err
    config.write_text("not toml [")
    cli.fails("stat", code=2, match="not TOML", config=config)


@pytest.mark.parametrize("words", [("exists", "--name", "x"), ("events",), ("stat",)])
def test_a_missing_certificate(cli: Cli, tmp_path: Path, words: Sequence[str]) -> None:
    text = variant(cli, tmp_path, cert='"/nowhere/x.pem"').read_text()
    config = tmp_path / "c.toml"
    config.write_text(re.sub("admin_socket.*\n", "", text))
    cli.fails(*words, code=2, match="no file '/nowhere/x.pem'", config=config)


@pytest.mark.parametrize(
    "words",
    [
        ("put", __file__, "--name", "x"), ("get", "--name", "x", "-o", "never"),
        ("exists", "--name", "x"), ("explain", "--key", "text:x"), ("forget", "--name", "x"),
        ("stat",), ("events",), ("events", "--follow"), ("inspect",), ("tenant", "list"),
    ],
)  # fmt: skip
def test_nobody_there_is_exit_3(cli: Cli, tmp_path: Path, words: Sequence[str]) -> None:
    config = variant(
        cli, tmp_path, port="1", grpc_port="1", admin_socket=f'"{tmp_path / "none.sock"}"'
    )
    cli.fails(*words, code=3, match="no daemon|nobody", config=config)
    assert not Path("never").exists()


def test_no_configuration_at_all(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("ENTRESOL_CONFIG", raising=False)
    if Path("/etc/entresol/client.toml").exists():
        pytest.skip("not run here: this machine has a client configuration of its own")
    assert main(["exists", "--name", "x"]) == 2
    err = capsys.readouterr().err
    assert "no client config found" in err
    assert "fix: start `entresold --dev`" in err


def test_the_configuration_is_found_where_the_environment_says(
    cli: Cli, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENTRESOL_CONFIG", str(cli.config))
    assert main(["exists", "--key", "text:not there"]) == 1
    assert main(["exists", "--key", "text:not there", "--tenant", "other"]) == 1
    assert capsys.readouterr().out.count("not stored") == 2


def test_without_grpc_the_package_is_named(daemon: DaemonProcess) -> None:
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "from entresol_client.cli.main import main\n"
        f"config = ['--config', {str(daemon.directory / 'client.toml')!r}]\n"
        "codes = [main([*words.split(), *config]) for words in\n"
        "         ('stat', 'events', 'tenant list', 'inspect', 'exists --key text:a', 'doctor')]\n"
        "print(codes, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.splitlines()[-1] == "[1, 1, 1, 1, 1, 0]", done.stderr
    assert done.stderr.count("fix: pip install 'entresol[cli]'") == 4
    assert "gRPC is not installed" in done.stdout


# -- help


def helps() -> list[tuple[str, ...]]:
    return [(), *((name,) for name in COMMANDS), *(("tenant", verb) for verb in VERBS)]


@pytest.mark.parametrize("words", helps(), ids=lambda words: " ".join(words) or "entresol")
@pytest.mark.parametrize("columns", ["80", "300"])
def test_help_fits_and_names_every_option(
    words: tuple[str, ...], columns: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) < 100
    parser: Any = cli_main.parser_of([])
    for word in words:
        parser = next(a for a in parser._actions if hasattr(a, "choices") and a.nargs == "A...")
        parser = parser.choices[word]
    body = text[text.index("\n\n") :]
    for action in parser._actions:
        for option in action.option_strings:
            assert option in body, option
        assert action.help, action
    if words and words != ("version",):
        assert "examples:" in text
        assert f"entresol {' '.join(words)}" in text[text.index("examples:") :]


def test_help_is_light() -> None:
    heavy = ("numpy", "grpc", "cryptography", "uvloop", "zstandard", "asyncio", "entresol_daemon")
    code = (
        "import sys\n"
        "from entresol_client.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['put', '--help']) == 0\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "[]"


def test_the_demo_is_reached_from_here(capsys: Any) -> None:
    assert main(["demo", "--help"]) == 0
    assert "entresol demo" in capsys.readouterr().out


def test_progress_and_log_go_to_standard_error(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "in", content("verbose", 1_000))
    said = cli("put", path, "--name", "verbose", "--verbose", "--progress", "--json")
    assert "event=connected" in said.err
    assert said.json["name"] == "verbose"
    assert "event=" not in cli("exists", "--name", "verbose").err


def test_configuration_of_this_suite_is_the_documented_one(daemon: DaemonProcess) -> None:
    config = ClientConfig.load(daemon.directory / "client.toml")
    assert config.shards[0].admin_socket is not None
