"""The operator's commands on a machine with the package's daemons: nothing is configured there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_lab import Said
from harness import DaemonProcess

from entresol_client.cli import overview, top
from entresol_client.cli.main import main
from entresol_client.config import CONFIG_ENV, ClientConfig
from entresol_daemon.keys.providers import FileKek

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DaemonProcess]]:
    folder = tmp_path_factory.mktemp("o")
    with (
        DaemonProcess(folder / "a", "--flash", "128MiB") as first,
        DaemonProcess(folder / "b", "--flash", "128MiB") as second,
    ):
        yield [first, second]


@pytest.fixture
def run_folder(
    daemons: list[DaemonProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """As /run has it, of two units; and a user without any configuration."""
    for name, daemon in zip(("entresol", "entresol-5"), daemons, strict=True):
        (tmp_path / name).symlink_to(daemon.directory / "run")
    (tmp_path / "entresol-hosts").mkdir()
    monkeypatch.setattr(overview, "RUN", tmp_path)
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    if Path("/etc/entresol/client.toml").exists():
        pytest.skip("not run here: this machine has a client configuration")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> Said:
    capsys.readouterr()
    code = main(list(words))
    return Said(code, *capsys.readouterr())


def test_every_daemon_of_the_machine_is_shown(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(capsys, "stat", "--json").json["shards"]
    assert [row["state"] for row in rows] == ["serving", "serving"]
    assert all("blocks" in row["stat"] for row in rows)


def test_one_of_several_must_be_named(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "tenant", "list")
    assert said.code == 2
    assert f"{run_folder}/entresol-5/admin.sock" in said.err
    only = run_folder / "entresol" / "admin.sock"
    assert run(capsys, "tenant", "list", "--admin-socket", str(only)).code == 0
    (run_folder / "entresol-5").unlink()
    assert run(capsys, "tenant", "add", "acme").code == 0
    assert "acme" in run(capsys, "tenant", "list").out
    assert run(capsys, "scrub").code == 0


def test_a_new_kek_is_given_to_every_shard(
    run_folder: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    new = FileKek.generate(run_folder / "kek.new")
    said = run(capsys, "change-kek", str(run_folder / "kek.new"), "--json")
    assert said.code == 0, said
    rows = said.json["shards"]
    assert [row["shard"] for row in rows] == ["entresold", "entresold@5"]
    assert {row["new_kek_id"] for row in rows} == {new.kek_id().hex()}
    assert run(capsys, "unlock", str(run_folder / "kek.new")).code == 0
    # One that is down is named, and the other has the next key all the same.
    later = FileKek.generate(run_folder / "kek.later")
    daemons[1].stop()
    (run_folder / "entresol-5").unlink()
    (run_folder / "entresol-5").mkdir()
    os.mkfifo(run_folder / "entresol-5" / "admin.sock")  # no socket: nothing runs there
    assert len(list(overview.packaged_sockets())) == 1
    (run_folder / "entresol-5" / "admin.sock").unlink()
    _dead_socket(run_folder / "entresol-5" / "admin.sock")
    said = run(capsys, "change-kek", str(run_folder / "kek.later"))
    assert said.code == 1
    assert later.kek_id().hex() in said.out
    assert "1 of 2 shards" in said.err
    assert "entresold@5" in said.err
    assert "keep both keys" in said.err
    assert "destroy" not in said.out


def _dead_socket(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))


def test_a_machine_without_daemons_is_told(
    tmp_path: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("entresol", "entresol-5"):
        (run_folder / name).unlink()
    said = run(capsys, "tenant", "list")
    assert said.code == 2
    assert "--admin-socket PATH" in said.err


def test_top_looks_at_the_packages_address(
    run_folder: Path,
    daemons: list[DaemonProcess],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = ClientConfig.load(daemons[0].directory / "client.toml").shards[0].metrics
    assert url
    monkeypatch.setattr(top, "PACKAGED", url)
    said = run(capsys, "top", "--once", "--interval", "0.2")
    assert said.code == 0, said
    assert "IDLE" in said.out or "HEALTHY" in said.out
