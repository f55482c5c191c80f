"""What somebody does in the first hour: `entresold --dev` twice, in a folder that is kept, a tenant
more, a configuration beside its data that names everything relatively."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from daemon_lab import DESCRIPTOR, Site, all_are, client_of, free_ports, get, keys_of, put, raw_of
from harness import eventually, running_daemon

from entresol_client.cli.tenants import certificate_words
from entresol_client.client import AsyncClient
from entresol_client.config import ClientConfig
from entresol_proto.fabric.base import FabricKind
from entresol_proto.limits import KIB
from entresol_proto.status import Status

pytestmark = pytest.mark.daemon

START_SECONDS_MAX = 60.0
LIVES_MAX = 4


class Terminal:
    """Runs `entresold ...` as a user's terminal does; all of one user share the runtime folder."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self.pointer = runtime / "entresol/client.toml"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, cwd: Path | None = None) -> Start:
        log = self.runtime / f"{len(self._started)}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "entresol_daemon", *words],
                stdout=out, stderr=out, cwd=cwd,
                env={**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)},
            )  # fmt: skip
        self._started.append(process)
        return Start(process, log)

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


class Start:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def said(self) -> str:
        return self._log.read_text()

    def ready(self, sign: str = "stop with Ctrl-C") -> Start:
        until = time.monotonic() + START_SECONDS_MAX
        while sign not in self.said:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.02)
        return self

    @property
    def folder(self) -> Path:
        (line,) = [line for line in self.said.splitlines() if line.startswith("entresold ")]
        return Path(line.partition(" in ")[2])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0, self.said


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    found = Terminal(runtime)
    yield found
    found.close()


def dev(folder: Path) -> list[str]:
    return ["--dev", "--dir", str(folder), "--flash", "128MiB"]


# -- relative paths


async def test_a_daemon_started_from_its_own_folder_is_reached_over_shm(
    tmp_path: Path, terminal: Terminal
) -> None:
    """It served, and offered hosts a socket that was relative to its own working folder."""
    site = Site.prepare(tmp_path / "d")
    site.fix_port()
    listen = replace(site.config.listen, unix_dir=Path("run"))
    shard = replace(site.config.shard, state_dir=Path("state"))
    grpc, data, metrics = free_ports(3)
    listen = replace(listen, grpc_port=grpc, data_port=data, metrics_port=metrics)
    site.write(replace(site.config, listen=listen, shard=shard))
    terminal.start("--config", site.toml.name, cwd=site.directory).ready("event=serving")
    async with client_of(site) as client:  # over shm, with no other way
        space = await client.namespace(DESCRIPTOR)
        assert all_are(await put(space, keys_of(2), 64 * KIB), Status.OK)


async def test_an_offer_that_cannot_be_withdrawn_keeps_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_daemon(tmp_path / "d") as running:
        tcp = running.daemon.fabrics[FabricKind.TCP]
        asked: list[object] = []

        def broken(offer: object) -> None:
            asked.append(offer)
            raise ValueError("malformed")

        monkeypatch.setattr(tcp, "withdraw", broken)
        async with raw_of(running):  # over shm: the offer of tcp is left over
            assert running.daemon.shard.sessions
        await eventually(lambda: not running.daemon.shard.sessions, what="the end of the session")
        assert asked


# -- two of them


def test_a_second_start_in_a_folder_that_is_served_leaves_the_pointer(
    tmp_path: Path, terminal: Terminal
) -> None:
    first = terminal.start(*dev(tmp_path / "kept")).ready()
    assert terminal.pointer.readlink() == first.folder / "client.toml"
    second = terminal.start(*dev(tmp_path / "kept"))
    assert second.process.wait(60) == 1, second.said
    assert terminal.pointer.readlink() == first.folder / "client.toml"
    assert (first.folder / "dev.toml").exists()
    first.stop()
    assert not terminal.pointer.is_symlink()
    assert not (first.folder / "dev.toml").exists()


def test_the_pointer_stays_with_the_daemon_that_runs(terminal: Terminal) -> None:
    first = terminal.start("--dev", "--flash", "128MiB").ready()
    mine = first.folder / "client.toml"
    second = terminal.start("--dev", "--flash", "128MiB").ready()
    assert terminal.pointer.readlink() == mine, "taken over from one that answers"
    assert f"export ENTRESOL_CONFIG={second.folder}/client.toml" in second.said
    assert "ENTRESOL_CONFIG" not in first.said
    second.stop()
    assert terminal.pointer.readlink() == mine
    first.process.kill()  # and leaves its pointer behind
    first.process.wait()
    third = terminal.start("--dev", "--flash", "128MiB").ready()
    assert terminal.pointer.readlink() == third.folder / "client.toml"


# -- the same again


async def test_an_open_client_finds_a_kept_folders_daemon_again(
    tmp_path: Path, terminal: Terminal
) -> None:
    for attempt in range(LIVES_MAX):  # somebody else of this machine may take a port in between
        if await found_again(dev(tmp_path / f"kept-{attempt}"), terminal):
            return
    raise AssertionError("the ports of a last life were never free")


async def found_again(words: list[str], terminal: Terminal) -> bool:
    """False where one of the ports was somebody else's, and told to be."""
    first = terminal.start(*words).ready()
    config = replace(ClientConfig.load(first.folder / "client.toml"), deadline_ns=20 * 10**9)
    async with await AsyncClient.open(config) as client:
        await eventually(lambda: client.shards()[0].connected, seconds=30)
        space = await client.namespace(DESCRIPTOR)
        assert all_are(await put(space, keys_of(4), 64 * KIB, ack="durable"), Status.OK)
        first.process.kill()
        first.process.wait()
        await eventually(lambda: not client.shards()[0].connected, seconds=30)
        second = terminal.start(*words).ready()
        if "note:" in second.said:
            assert "of its last life is taken" in second.said
            second.stop()
            return False
        await eventually(lambda: client.shards()[0].connected, seconds=60)
        assert all_are(await get(space, keys_of(4), 64 * KIB), Status.OK)
    return True


def test_a_port_that_is_taken_meanwhile_is_told(tmp_path: Path, terminal: Terminal) -> None:
    words = dev(tmp_path / "kept")
    first = terminal.start(*words).ready()
    before = ClientConfig.load(first.folder / "client.toml").shards[0]
    first.stop()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", before.port))
        other.listen()
        second = terminal.start(*words).ready()
        (told,) = re.findall(r"note: port ([0-9, ]+) of its last life is taken", second.said)
    after = ClientConfig.load(second.folder / "client.toml").shards[0]
    taken = told.split(", ")  # others of this machine may have had one meanwhile
    assert str(before.port) in taken
    assert after.port != before.port
    assert after.grpc_port == before.grpc_port or str(before.grpc_port) in taken


# -- a tenant more


def test_advice_for_a_tenant_more_fits_how_the_daemon_was_started(
    tmp_path: Path, terminal: Terminal
) -> None:
    """It named the temporary folder that goes with the stop, and tenants in another order."""
    kept = terminal.start(*dev(tmp_path / "kept"), "--tenant", "zeta", "--tenant", "beta").ready()
    words = certificate_words(kept.folder / "run/admin.sock", "acme")
    assert words == [
        f"stop the daemon, then: entresold --dev --dir {kept.folder} --flash 128MiB "
        "--tenant zeta --tenant beta --tenant acme",
        f"and use {kept.folder}/client-acme.toml",
    ]
    again = certificate_words(kept.folder / "run/admin.sock", "zeta")
    assert again == [f"which is there: use {kept.folder}/client.toml"]
    kept.stop()
    first = terminal.start(*words[0].partition("entresold ")[2].split()).ready()
    assert (first.folder / "client-acme.toml").exists()
    default = ClientConfig.load(first.folder / "client.toml")
    assert default.tls.cert.name == "zeta.pem", "another tenant became the default"
    temporary = terminal.start("--dev", "--flash", "128MiB").ready()
    said = " ".join(certificate_words(temporary.folder / "run/admin.sock", "acme"))
    assert "goes when it stops" in said or "go when it stops" in said
    assert str(temporary.folder) not in said
    assert "--dir FOLDER --flash 128MiB --tenant dev --tenant other --tenant acme" in said


@pytest.mark.parametrize("marker", [None, "", "tenants = 3", 'tenants = ["A/B"]', "\xff"], ids=repr)
def test_a_daemon_with_a_configuration_is_told_of_certify(
    tmp_path: Path, marker: str | None
) -> None:
    """A `pki` folder beside `run` was taken for one of --dev."""
    (tmp_path / "pki/tenants").mkdir(parents=True)
    (tmp_path / "pki/tenants/other.pem").touch()
    if marker is not None:
        (tmp_path / "dev.toml").write_bytes(marker.encode("latin-1"))
    words = certificate_words(tmp_path / "run/admin.sock", "acme")
    assert words[-1] == "entresold --config FILE certify acme FOLDER"
    assert "--dev" not in " ".join(words)
