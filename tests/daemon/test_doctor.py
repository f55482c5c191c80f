"""`entresol doctor` where something is wrong with host, daemon, clock or configuration.

What is wrong is really so: limits are set on the process, certificates are issued with those dates,
the daemon is stopped, ports are taken. Each finding that is not `ok` must name a fix.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_lab import COMMAND, PROCESS_SECONDS_MAX, Cli, variant
from harness import DaemonProcess

from bench.processes import free_ports
from entresol_client.cli import doctor
from entresol_client.cli.top import Source
from entresol_daemon import judge
from entresol_daemon.control import devcerts
from entresol_daemon.keys.providers import FileKek
from entresol_proto.limits import GIB, MIB

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("y") / "d", "--flash", "128MiB") as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


def judged(
    *words: str, prepare: Callable[[], None] | None = None
) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The findings of a doctor that is a process of its own, by area."""
    done = subprocess.run(
        [*COMMAND, "doctor", "--json", *words],
        capture_output=True, timeout=PROCESS_SECONDS_MAX, check=False, preexec_fn=prepare,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found: dict[str, list[dict[str, str]]] = {}
    for row in json.loads(done.stdout)["findings"]:
        assert row["level"] == "ok" or row["fix"], row
        assert "entresol doctor" not in row["fix"], "it is the doctor who says so"
        found.setdefault(row["area"], []).append(row)
    return done.returncode, found


def levels(found: dict[str, list[dict[str, str]]], area: str, text: str) -> set[str]:
    return {row["level"] for row in found[area] if text in row["text"]}


def test_few_open_files_are_told(cli: Cli) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))

    code, found = judged("--config", str(cli.config), prepare=few)
    assert levels(found, "files open", "48 at once; the client may need 64") == {"warn"}
    assert code == 0


def test_memory_that_cannot_be_shared_is_told(cli: Cli) -> None:
    def none() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # of a memfd too
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    _, found = judged("--config", str(cli.config), prepare=none)
    assert levels(found, "memory", "cannot be shared (memfd): File too large") == {"fail"}


def test_more_staging_than_memory_is_told(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "greedy.toml"
    greedy = 'staging_bytes_max = "64GiB"\n'
    config.write_text(greedy + cli.config.read_text())
    left, _ = judge.memory_left()
    if left > 64 * GIB:
        pytest.skip("not run here: this machine has more than 64 GiB free")
    _, found = judged("--config", str(config))
    assert levels(found, "memory", "the data paths take up to 64.0 GiB") == {"warn"}


def test_without_a_configuration_it_does_not_say_what_the_data_paths_take(tmp_path: Path) -> None:
    _, found = judged("--config", str(tmp_path / "none.toml"))
    assert levels(found, "memory", " left of ") == {"ok"}
    assert levels(found, "memory", "the data paths take") == set()


@pytest.mark.parametrize("text", ["garbage =", "[tls", 'cert = "a"\ncert = "b"', "\0"])
def test_a_configuration_that_is_none_has_a_fix(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    code, found = judged("--config", str(path))
    assert code == 1
    assert found["config"][0]["level"] == "fail"
    assert "memlock" in found  # the host is looked at all the same


def test_a_certificate_of_tomorrow_speaks_of_clocks(cli: Cli, tmp_path: Path) -> None:
    pki = devcerts.create(tmp_path / "pki")
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=2)
    made = devcerts.issue(
        pki, "late", uris=["spiffe://entresol.local/tenant/dev"], days=30, now=later
    )
    config = variant(cli, tmp_path, cert=f'"{made.cert}"', key=f'"{made.key}"', ca=f'"{pki.ca}"')
    code, found = judged("--config", str(config))
    assert code == 1
    (row,) = [row for row in found["certificate"] if row["level"] == "fail"]
    assert "is valid only from" in row["text"]
    assert "clock" in row["fix"]


def test_a_daemon_that_hangs_is_told_from_one_that_is_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaemonProcess(tmp_path / "d", "--flash", "128MiB") as daemon:
        config = str(daemon.directory / "client.toml")
        daemon.signal(signal.SIGSTOP)
        try:
            code, found = judged("--config", config)
        finally:
            daemon.signal(signal.SIGCONT)
        assert code == 1
        (row,) = [row for row in found["shard dev"] if "no session" in row["text"]]
        assert "stopped, starved or hung" in row["fix"]
        daemon.stop()
        _, found = judged("--config", config)
        assert levels(found, "shard dev", "nobody answers at") == {"fail"}


def test_clocks_that_are_apart(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's answer is real; only what this side takes for the time is another."""
    before = cli("doctor", "--json").json["findings"]
    assert not any("clock and ours" in row["text"] for row in before)
    real = Source.read

    def an_hour_ago(self: Source) -> dict[str, Any]:
        told = real(self)
        told["time_unix_ns"] -= 3600 * 10**9
        return told

    monkeypatch.setattr(Source, "read", an_hour_ago)
    (row,) = [r for r in cli("doctor", "--json").json["findings"] if "clock and" in r["text"]]
    assert row["level"] == "warn"
    assert "1 h 0 min apart" in row["text"] or "59 min" in row["text"]
    assert doctor.SKEW_WARN_NS < 3600 * 10**9
    assert time.time_ns() > 0


# -- a daemon's configuration


class DaemonSite:
    """A configuration that is good, to be spoiled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pki = devcerts.create(folder / "pki")
        self.shard = devcerts.issue(
            self.pki, "shard", uris=["spiffe://entresol.local/shard/shard0"], days=100
        )
        self.kek = folder / "kek"
        FileKek.generate(self.kek)
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        self.values: dict[tuple[str, str], object] = {
            ("shard", "state_dir"): str(self.state), ("tls", "cert"): str(self.shard.cert),
            ("tls", "key"): str(self.shard.key), ("tls", "ca"): str(self.pki.ca),
            ("keys", "kek_file"): str(self.kek), ("flash", "size_bytes"): "128MiB",
            ("flash", "segment_bytes"): "16MiB", ("limits", "block_bytes_max"): "1MiB",
            ("memory", "dram_bytes"): "64MiB", ("listen", "unix_dir"): str(folder / "run"),
        }  # fmt: skip
        names = ("control", "grpc", "data", "metrics")
        for name, port in zip(names, free_ports(4), strict=True):
            self.values["listen", f"{name}_port"] = port

    def judged(self) -> tuple[int, list[dict[str, str]]]:
        path = self.folder / "entresold.toml"
        sections: dict[str, list[str]] = {}
        for (section, name), value in self.values.items():
            text = json.dumps(value) if not isinstance(value, str) else f'"{value}"'
            sections.setdefault(section, []).append(f"{name} = {text}")
        path.write_text(
            "".join(f"[{name}]\n" + "\n".join(rows) + "\n" for name, rows in sections.items())
        )
        before = sorted(self.folder.rglob("*"))
        code, found = judged("--daemon-config", str(path))
        assert sorted(self.folder.rglob("*")) == before, "a look leaves nothing behind"
        return code, found["daemon"]


@pytest.fixture
def site(tmp_path: Path) -> DaemonSite:
    return DaemonSite(tmp_path)


def test_a_good_daemon_configuration(site: DaemonSite) -> None:
    code, rows = site.judged()
    assert code == 0, rows
    assert {row["level"] for row in rows} == {"ok"}, rows
    assert len(rows) >= 7


def _wrong_shard(site: DaemonSite) -> None:
    site.values["shard", "name"] = "another"


def _expired(site: DaemonSite) -> None:
    made = devcerts.issue(site.pki, "old", uris=["spiffe://entresol.local/shard/shard0"], days=-1)
    site.values["tls", "cert"], site.values["tls", "key"] = str(made.cert), str(made.key)


def _other_key(site: DaemonSite) -> None:
    made = devcerts.issue(site.pki, "x", uris=["spiffe://entresol.local/shard/shard0"], days=9)
    site.values["tls", "key"] = str(made.key)


def _no_kek(site: DaemonSite) -> None:
    site.kek.unlink()


def _open_kek(site: DaemonSite) -> None:
    site.kek.chmod(0o644)


def _no_state(site: DaemonSite) -> None:
    site.values["shard", "state_dir"] = str(site.folder / "nowhere")


def _no_state_to_make(site: DaemonSite) -> None:
    site.values["shard", "state_dir"] = str(site.folder / "entresold.toml/nowhere")


def _open_state(site: DaemonSite) -> None:
    site.state.chmod(0o755)


def _no_room(site: DaemonSite) -> None:
    site.values["flash", "size_bytes"] = "4000TiB"


def _no_memory(site: DaemonSite) -> None:
    site.values["memory", "slab_bytes"] = "1GiB"
    site.values["memory", "dram_bytes"] = "512GiB"
    if judge.memory_left()[0] > 512 * GIB:
        pytest.skip("not run here: this machine has more than 512 GiB free")


def _far_address(site: DaemonSite) -> None:
    site.values["listen", "control_host"] = "192.0.2.1"


def _another_size(site: DaemonSite) -> None:
    (site.state / "flash.data").write_bytes(bytes(3 * MIB))


def _no_huge_pages(site: DaemonSite) -> None:
    site.values["memory", "dram_bytes"] = "512GiB"
    site.values["memory", "slab_bytes"] = "1GiB"
    site.values["memory", "opened_bytes"] = "1GiB"
    site.values["memory", "huge_pages"] = "on"


def _unknown_setting(site: DaemonSite) -> None:
    site.values["flash", "size_byte"] = 1


@pytest.mark.parametrize(
    ("spoil", "level", "text"),
    [
        (_wrong_shard, "fail", "is of shard shard0, not of shard another"),
        (_expired, "fail", "expired on"),
        (_other_key, "fail", "key"),
        (_no_kek, "fail", "there is no KEK file"),
        (_open_kek, "fail", "KEK file"),
        (_no_state, "warn", "nowhere ([shard] state_dir): a start makes it"),
        (_no_state_to_make, "fail", "entresold.toml/nowhere ([shard] state_dir)"),
        (_open_state, "warn", "open to other users"),
        (_no_room, "fail", "is to have 4096000.0 GiB"),
        (_no_memory, "warn", "of memory is used"),
        (_another_size, "warn", "size_bytes"),
        (_no_huge_pages, "warn", "wants 262656 huge pages"),
        (_far_address, "fail", "control_host '192.0.2.1'"),
        (_unknown_setting, "fail", "size_byte"),
    ],
)
def test_what_is_wrong_with_a_daemon_is_named(
    site: DaemonSite, spoil: Callable[[DaemonSite], None], level: str, text: str
) -> None:
    spoil(site)
    code, rows = site.judged()
    assert any(row["level"] == level and text in row["text"] for row in rows), rows
    assert code == (level == "fail")
    unknown = [row for row in rows if "look as the daemon's user" in row["fix"]]
    assert level == "fail" or not unknown


def test_a_key_that_only_the_unit_is_shown_is_no_fault(
    site: DaemonSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    site.values["keys", "kek_file"] = "$CREDENTIALS_DIRECTORY/kek"
    code, rows = site.judged()
    assert code == 0, rows
    assert any("credential of the unit" in row["text"] for row in rows)


def test_the_folder_of_shm_is_judged(site: DaemonSite, tmp_path: Path) -> None:
    folder = tmp_path / "hosts"
    site.values["fabric", "shm_dir"] = str(folder)
    code, rows = site.judged()
    assert code == 1
    assert any("there is no folder" in row["text"] for row in rows)
    folder.mkdir(mode=0o700)
    code, rows = site.judged()
    assert code == 0
    assert any(row["level"] == "warn" and "lets no group in" in row["text"] for row in rows)
    folder.chmod(0o2750)
    code, rows = site.judged()
    assert code == 0
    assert any("may use shm" in row["text"] for row in rows)


def test_ports_that_are_taken_are_told(site: DaemonSite) -> None:
    port = int(str(site.values["listen", "grpc_port"]))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        code, rows = site.judged()
    assert (code, [row["text"] for row in rows if row["level"] == "warn"]) == (
        0, [f"ports in use: grpc {port}"],
    )  # fmt: skip


def test_without_the_daemon_package(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rows = cli("doctor", "--daemon-config", "x", "--json", code=1).json["findings"]
    assert "not installed" in rows[0]["text"]
    assert rows[0]["fix"]


def test_the_judge_alone(site: DaemonSite) -> None:
    site.judged()
    words = [sys.executable, "-m", "entresol_daemon.judge"]
    done = subprocess.run(words, capture_output=True, check=False, env=dict(os.environ))
    assert done.returncode == 2
    assert judge.RUNTIME_BYTES > 64 * MIB
