"""`entresol doctor`, `inspect` and `tenant` against the real daemon."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_lab import COMMAND, PROCESS_SECONDS_MAX, Cli, Said, content, process, variant, written
from harness import DaemonProcess

from entresol_client.cli.tenants import certificate_words
from entresol_daemon.control import devcerts
from entresol_daemon.keys.receipts import verify_receipt
from entresol_proto.limits import MIB
from entresol_proto.status import EntresolError

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("c") / "d", "--flash", "256MiB") as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


# -- doctor


def findings(said: Said) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in said.json["findings"]:
        found.setdefault(row["area"], []).append(row)
    return found


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
        check_parquet(data, tmp_path / "records.parquet", rows)
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


def check_parquet(data: Path, out: Path, rows: list[dict[str, Any]]) -> None:
    """The export has the rows of the list, with whole ids; a second one replaces nothing."""
    import pyarrow.parquet as pq

    said = inspected(data, "--parquet", str(out), "--json")
    assert (said.returncode, json.loads(said.stdout)["parquet"]) == (0, str(out)), said.stderr
    table = pq.read_table(out).to_pylist()
    assert len(table) == len(rows)
    for row, listed in zip(table, rows, strict=True):
        assert row["wire_key"].hex().startswith(listed["key"])
        assert row["namespace_id"].hex().startswith(listed["namespace"])
        for name in ("segment", "offset_bytes", "lsn", "sealed_bytes", "kind", "live", "verdict"):
            assert row[name] == listed[name], name
        if row["kind"] == "block":
            assert listed["sealed"].startswith(f"{row['codec']} {row['dtype']} chunks=")
    quick = out.with_name("quick.parquet")
    assert inspected(data, "--quick", "--parquet", str(quick)).returncode == 0
    told = {row["codec"] for row in pq.read_table(quick).to_pylist()}
    assert told == {None}, "what was not read is not told"
    again = inspected(data, "--parquet", str(out))
    assert (again.returncode, "exists" in again.stderr) == (2, True)


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


def test_whoever_adds_a_tenant_is_told_where_its_certificate_comes_from(cli: Cli) -> None:
    said = cli("tenant", "add", "late").out
    assert f"entresold --dev --dir {cli.folder} --flash 256MiB " in said
    assert "--tenant dev --tenant other --tenant late\n" in said
    assert f"{cli.folder}/client-late.toml" in said
    cli("tenant", "erase", "late", "--yes")
    for socket, file in (
        ("/run/entresol/admin.sock", "/etc/entresol/entresold.toml"),
        ("/run/entresol-5/admin.sock", "/etc/entresol/5.toml"),
    ):
        words = certificate_words(Path(socket), "acme")
        assert words[-1] == f"entresold --config {file} certify acme /etc/entresol/tenants/acme"
        assert "--dev" not in " ".join(words)
    words = certificate_words(Path("/srv/tier/admin.sock"), "acme")
    assert words[-1] == "entresold --config FILE certify acme FOLDER"


def test_the_life_of_a_tenant(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = cli("tenant", "add", "acme", "--flash", "64MiB", "--weight", "2", "--json").json
    assert added["spiffe_id"] == "spiffe://entresol.local/tenant/acme"
    given = {"flash_bytes": 64 * MIB, "weight": 2}
    assert {name: value for name, value in added["quota"].items() if value} == given
    cli.fails("tenant", "add", "acme", code=1, match="exists already")
    row = cli("tenant", "quota", "acme", "--dram", "32MiB", "--json").json
    given["dram_bytes"] = 32 * MIB
    assert {name: value for name, value in row["quota"].items() if value} == given
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
    kept = tmp_path / "receipt.json"
    said = cli("tenant", "erase", "acme", "--json", "--receipt", str(kept))
    receipt = said.json
    signed = json.loads(kept.read_bytes())
    assert signed == receipt["signed_receipt"]
    verify_receipt(signed, bytes.fromhex(signed["public_key"]))
    # Version 1 sealed nothing: it may have ended by itself since the rotation.
    assert [row["version"] for row in signed["erased"]] in ([2], [1, 2])
    signed["tenant"] = "other"
    with pytest.raises(EntresolError, match="does not verify"):
        verify_receipt(signed, bytes.fromhex(signed["public_key"]))
    assert receipt["tenant"] == "acme"
    assert receipt["dek_versions_destroyed"] in ([2], [1, 2])
    assert receipt["blocks_dropped"] == 3
    assert len(receipt["digest"]) == 64
    assert "can never be read again" in said.err
    cli.fails(
        "exists", "--name", "mine", code=1, match="refuses: tenant .* was erased", config=config
    )
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


def test_a_quota_leaves_what_another_operator_changed_meanwhile(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is asked whether blocks may go, and thinks about it."""
    path = written(tmp_path / "in", content("asked", 6 * MIB))
    cli("put", path, "--name", "asked", "--tenant", "other")

    class Thinking(Typed):
        def readline(self) -> str:
            said = process("tenant", "quota", "other", "--weight", "7", config=cli.config)
            assert said.returncode == 0, said.stderr
            return super().readline()

    monkeypatch.setattr("sys.stdin", Thinking("other\n"))
    row = cli("tenant", "quota", "other", "--flash", "4MiB", "--json").json
    assert {name: value for name, value in row["quota"].items() if value} == {
        "flash_bytes": 4 * MIB,
        "weight": 7,
    }
    row = cli("tenant", "quota", "other", "--flash", "none", "--weight", "1", "--json").json
    assert {name: value for name, value in row["quota"].items() if value} == {"weight": 1}


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


# -- scrub


def test_scrub_finds_what_went_bad_under_a_running_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaemonProcess(tmp_path / "d", "--flash", "256MiB") as running:
        cli = Cli(capsys, running.directory)
        cli("put", written(tmp_path / "in", content("scrub", 4 * MIB)), "--name", "bad")
        assert cli("scrub", "--json").json["was_running"] is False
        assert scrubbed(cli, 1)["scrub_found"] == 0
        assert damage_records(running.directory) >= 1
        cli("scrub")
        stat = scrubbed(cli, 2)
        assert stat["scrub_found"] == stat["blocks_corrupt"] >= 1
        assert stat["blocks"] == 0
        assert "bad dropped" in cli("stat").out
        rows = findings(cli("doctor", "--json"))["shard dev"]
        assert any(re.match(r"scrubber \w+, found \d+ bad block", row["text"]) for row in rows)
        cli("get", "--name", "bad", "-o", str(tmp_path / "out"), code=1)


def scrubbed(cli: Cli, cycles: int) -> dict[str, Any]:
    """The daemon's figures once that many cycles are done."""
    until = time.monotonic() + PROCESS_SECONDS_MAX
    while True:
        stat: dict[str, Any] = cli("stat", "--json").json["shards"][0]["stat"]
        if stat["scrub_cycles"] >= cycles:
            return stat
        assert time.monotonic() < until, stat
        time.sleep(0.1)


def damage_records(directory: Path) -> int:
    """Flip a payload bit of every block in the data file; how many there were."""
    (path,) = directory.rglob("flash.data")
    count = 0
    with path.open("r+b", buffering=0) as file:
        for at in range(64 * 1024, path.stat().st_size, 4096):
            file.seek(at)
            head = file.read(104)
            if head[:4] == b"ENTR" and head[5] == 1:
                file.seek(at + 100)
                file.write(bytes([head[100] ^ 1]))
                count += 1
        os.fsync(file.fileno())
    return count
