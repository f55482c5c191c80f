"""The real daemon for tests of engines, and what can go wrong with it.

Written for engine environments: imports nothing of the daemon, which runs as a process of the
interpreter that ENTRESOL_DAEMON_PYTHON names. Invariant: ports and client files are fixed before
the first start and stay for all of them, so that an engine finds the daemon again after a restart,
and so that "no daemon" is simply one that was not started.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.processes import free_ports
from entresol_proto.limits import ALIGN_BYTES, MIB
from entresol_proto.seal.header import HEADER_BYTES_MAX, MAGIC, SealedHeader
from entresol_proto.status import SealError

ROOT = Path(__file__).resolve().parents[2]
PYTHON_ENV = "ENTRESOL_DAEMON_PYTHON"
TENANTS = ("dev", "other")
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
ANSWER_SECONDS_MAX = 5.0
LOG_SHOWN_BYTES = 4000
RECORD_HEADER_BYTES_MAX = 256  # a sealed block begins at most this far into its record

# What a small machine can bear; a test that wants something else says so.
SETTINGS: dict[str, dict[str, Any]] = {
    "flash": {"size_bytes": 256 * MIB, "segment_bytes": 16 * MIB, "io_threads": 4},
    "memory": {"dram_bytes": 256 * MIB, "slab_bytes": 16 * MIB},
    "limits": {
        "block_bytes_max": 4 * MIB,
        "inflight_bytes_per_session_max": 128 * MIB,
        "put_queue_bytes_max": 64 * MIB,
    },
    "tenants": {"auto_add": True},
    "log": {"level": "info"},
}


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block in the data file: its engine key, how long it is, the middle of one of its chunks."""

    engine_key: bytes
    plain_bytes: int
    middle: int


class TierDaemon:
    """`entresold` in a folder of its own, with one client file per tenant.

    Not started by the constructor. `remove` ends it and deletes the folder.
    """

    def __init__(
        self,
        *,
        tenants: Sequence[str] = TENANTS,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        client: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings` are daemon settings by section, `client` go into every client file."""
        self.home = Path(tempfile.mkdtemp(prefix="ent-tier-"))  # short: there are sockets in it
        self.log_path = self.home / "daemon.log"
        self._tenants = tuple(tenants)
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen = False
        self._ports = dict(zip(("control", "grpc", "data", "metrics"), free_ports(4), strict=True))
        self._make_pki()
        (self.home / "entresold.toml").write_text(self._daemon_toml(settings or {}))
        for tenant in self._tenants:
            self.client_toml(tenant).write_text(self._client_toml_text(tenant, client or {}))

    # Files -------------------------------------------------------------------------------------

    def client_toml(self, tenant: str = TENANTS[0]) -> Path:
        """A tenant's client configuration; good before, during and after every start."""
        return self.home / f"client-{tenant}.toml"

    @property
    def data_file(self) -> Path:
        """Where the blocks are."""
        return self.home / "state" / "flash.data"

    def log(self) -> str:
        """The end of its log."""
        return self.log_path.read_text(errors="replace")[-LOG_SHOWN_BYTES:]

    def _make_pki(self) -> None:
        """Keys and certificates, as `entresold --dev` makes them; the same for all of a process.

        Other tests' daemons have the same, which saves each of them an interpreter's start.
        """
        made = _PKIS.get(self._tenants)
        if made is None:
            names = [word for tenant in self._tenants for word in ("--tenant", tenant)]
            made = Path(tempfile.mkdtemp(prefix="ent-pki-"))
            atexit.register(shutil.rmtree, made, ignore_errors=True)
            _entresold("--dev", "--dir", str(made), *names, "--check")
            _PKIS[self._tenants] = made
        shutil.copytree(made, self.home, dirs_exist_ok=True)

    def _daemon_toml(self, settings: Mapping[str, Mapping[str, Any]]) -> str:
        pki, ports = self.home / "pki", self._ports
        tables: dict[str, dict[str, Any]] = {
            "shard": {"name": "dev", "state_dir": str(self.home / "state")},
            "listen": {f"{name}_port": port for name, port in ports.items()}
            | {"unix_dir": str(self.home / "run")},
            "tls": {
                "cert": str(pki / "shard.pem"), "key": str(pki / "shard.key"),
                "ca": str(pki / "ca.pem"),
            },
            "keys": {"kek_file": str(self.home / "kek")},
        }  # fmt: skip
        for section, values in [*SETTINGS.items(), *settings.items()]:
            tables.setdefault(section, {}).update(values)
        return "\n".join(_toml(f"[{name}]", values) for name, values in tables.items())

    def _client_toml_text(self, tenant: str, more: Mapping[str, Any]) -> str:
        pki, ports = self.home / "pki", self._ports
        top = {
            "cert": str(pki / "tenants" / f"{tenant}.pem"),
            "key": str(pki / "tenants" / f"{tenant}.key"),
            "ca": str(pki / "ca.pem"),
            **more,
        }
        shard = {
            "name": "dev", "host": "127.0.0.1", "port": ports["control"],
            "grpc_port": ports["grpc"], "metrics": f"http://127.0.0.1:{ports['metrics']}",
            "admin_socket": str(self.home / "run" / "admin.sock"),
        }  # fmt: skip
        return _toml("", top) + "\n" + _toml("[[shards]]", shard)

    # Life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it; it serves when this returns. Raises: RuntimeError with the end of its log."""
        assert self._process is None, "started twice"
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [*_daemon_command(), "--config", str(self.home / "entresold.toml")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_daemon_env(),
            )  # fmt: skip
        until = time.monotonic() + START_SECONDS_MAX
        while not self.serves():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"the daemon did not start:\n{self.log()}")
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        """Of the running daemon."""
        assert self._process is not None, "not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        """True between `start` and `stop` or `kill`, frozen or not."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """SIGTERM: it drains, writes what is in memory only, and ends. Raises: RuntimeError."""
        assert self._process is not None, "not running"
        self.thaw()
        self._process.send_signal(signal.SIGTERM)
        try:
            rc = self._process.wait(STOP_SECONDS_MAX)
        finally:
            self.kill()
        if rc:
            raise RuntimeError(f"the daemon ended with {rc}:\n{self.log()}")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        process, self._process, self._frozen = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        """Stop and start: afterwards blocks are on flash only."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers, as when a machine hangs."""
        os.kill(self.pid, signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        """SIGCONT. Does nothing when it is not frozen."""
        if self._frozen:
            os.kill(self.pid, signal.SIGCONT)
            self._frozen = False

    def remove(self) -> None:
        """End it and delete its folder."""
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> TierDaemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # What it says ------------------------------------------------------------------------------

    def serves(self) -> bool:
        """True when it says that it is ready."""
        try:
            self._http("/readyz")
        except OSError:
            return False
        return True

    def metrics(self) -> dict[str, float]:
        """Every series as Prometheus writes it (`name{label="value"}`) and its value.

        Raises: OSError when it does not answer.
        """
        found: dict[str, float] = {}
        for line in self._http("/metrics").splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                found[series] = float(value)
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of a name that have these labels; 0 when there are none yet."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value
            for series, value in self.metrics().items()
            if series.partition("{")[0] == name and all(one in series for one in wanted)
        )

    def wait_for(
        self, holds: Callable[[TierDaemon], bool], *, seconds: float = 20.0, what: str = "it"
    ) -> None:
        """Poll until `holds(self)`. Raises: AssertionError after `seconds`."""
        until = time.monotonic() + seconds
        while not holds(self):
            assert time.monotonic() < until, f"{what} did not come true in {seconds} s"
            time.sleep(0.02)

    def cli(self, *arguments: str, tenant: str = TENANTS[0]) -> Any:
        """What `entresol ... --json` prints, parsed. Raises: RuntimeError when it fails."""
        command = [_daemon_command()[0], "-m", "entresol_client.cli.main", *arguments]
        done = subprocess.run(
            [*command, "--config", str(self.client_toml(tenant)), "--json"],
            capture_output=True, text=True, check=False, env=_daemon_env(),
            timeout=START_SECONDS_MAX, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"entresol {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return json.loads(done.stdout)

    def _http(self, path: str) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        url = f"http://127.0.0.1:{self._ports['metrics']}{path}"
        with opener.open(url, timeout=ANSWER_SECONDS_MAX) as reply:
            return str(reply.read().decode())

    # Bad media ---------------------------------------------------------------------------------

    def stored_blocks(self) -> list[StoredBlock]:
        """The sealed blocks in the data file, in the order they lie there. It must not run."""
        assert not self.running, "stop it first: what is in memory is not in the file"
        raw = np.memmap(self.data_file, np.uint8, mode="r")
        pages = raw[: len(raw) // ALIGN_BYTES * ALIGN_BYTES].reshape(-1, ALIGN_BYTES)
        words = pages[:, :RECORD_HEADER_BYTES_MAX].view("<u4")
        found = []
        for page, word in np.argwhere(words == np.frombuffer(MAGIC, "<u4")[0]).tolist():
            start = page * ALIGN_BYTES + word * 4
            try:
                header = SealedHeader.parse(raw[start : start + HEADER_BYTES_MAX].tobytes())
            except SealError:
                continue
            at, stored_bytes = header.chunk_span(header.chunk_count // 2)
            middle = int(start + at + stored_bytes // 2)
            found.append(StoredBlock(header.engine_key, header.plain_bytes, middle))
        return found

    def flip_bit(self, block: StoredBlock, *, bit: int = 3) -> None:
        """Flip one bit inside a block's sealed bytes, as a bad drive would. It must not run."""
        assert not self.running, "stop it first"
        with open(self.data_file, "r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, block.middle)[0]
            os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), block.middle)
            os.fsync(file.fileno())

    def damage(
        self, choose: Callable[[list[StoredBlock]], Sequence[StoredBlock]]
    ) -> list[StoredBlock]:
        """Stop it, flip a bit in each of the chosen blocks, start it; the damaged blocks.

        Raises: AssertionError when none was chosen: a test that damages nothing shows nothing.
        """
        if self.running:
            self.stop()
        chosen = list(choose(self.stored_blocks()))
        assert chosen, "no block to damage"
        for block in chosen:
            self.flip_bit(block)
        self.start()
        return chosen


_PKIS: dict[tuple[str, ...], Path] = {}  # by tenants


def _entresold(*arguments: str) -> None:
    done = subprocess.run(
        [*_daemon_command(), *arguments], capture_output=True, text=True, check=False,
        env=_daemon_env(), timeout=START_SECONDS_MAX, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"entresold {' '.join(arguments)}: {done.stdout}{done.stderr}")


def _daemon_command() -> list[str]:
    return [os.environ.get(PYTHON_ENV) or sys.executable, "-m", "entresol_daemon"]


def _daemon_env() -> dict[str, str]:
    """The tree's packages, and none of the engine's environment."""
    path = os.pathsep.join(str(ROOT / part) for part in ("daemon", "client", "proto"))
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")}
    return {**env, "PYTHONPATH": path}


def _toml(head: str, values: Mapping[str, Any]) -> str:
    """A flat TOML table: JSON's texts, numbers, booleans and lists are TOML's too."""
    lines = [head] if head else []
    return "\n".join([*lines, *(f"{name} = {json.dumps(v)}" for name, v in values.items()), ""])
