"""The real daemon as a process with a driver beside it: start, load, kill, look, judge.

`Lab` owns a site, the process that forks daemons without paying for the imports again, the driver
(`driver.py`) and the judge of its journal. Every lab listens on a loopback address of its own, so
that ports are the same in every life and never somebody else's.

Invariant: whatever a lab started has ended when `close` returned.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from entresol_daemon import dev
from entresol_daemon.config import Config
from entresol_daemon.control import devcerts
from entresol_proto.limits import MIB
from tests.daemon.daemon_lab import Site, Starter, shape
from tests.daemon.oracle_lab import Judge

GUEST = "guest"  # a tenant that comes and goes
TENANTS = ("dev", "other", GUEST)
HERE = Path(__file__).resolve().parent
# What children import from: the root and `tests`, as pytest and the proof suite have it.
PATHS = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
READY_SECONDS_MAX = 60.0
BLOCKS_MAX = 16_384  # of the index: the blocks here are smaller than it is made for
# What no daemon may write, whatever is done to it.
BUGS = re.compile(
    r"Traceback|event=(?:bug|tick_failed|task_failed|request_failed|writer_broke)|AssertionError"
)


def own_address(number: int) -> str:
    """A loopback address that no other lab uses at this time: the `number`-th of this process."""
    pid = os.getpid()
    return f"127.{(16 * number + pid // 64_000) % 250 + 1}.{pid // 250 % 256}.{1 + pid % 250}"


def small(**options: Any) -> dict[str, Any]:
    """Memory and segments of a small site."""
    return {"segment": 4 * MIB, "block_max": 1 * MIB, "dram": 32 * MIB, "slab": 4 * MIB, **options}


class Died(Exception):
    """The daemon ended by itself."""


class Notices:
    """Where the daemon says READY=1 (sd_notify)."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"entresol-lab-{os.getpid()}-{id(self):x}"
        self._socket.bind("\0" + name)
        self.address = "@" + name

    def clear(self) -> None:
        """Forget what earlier lives said."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(4096)

    def hear(self, seconds: float) -> str:
        """The next message, whoever it is from. Raises: TimeoutError."""
        self._socket.settimeout(seconds)
        return self._socket.recv(4096).decode()

    def wait(self, pid: int) -> None:
        """Return when the process `pid` is ready. Raises: Died."""
        self._socket.settimeout(0.2)
        until = time.monotonic() + READY_SECONDS_MAX
        while time.monotonic() < until:
            try:
                if b"READY=1" in self._socket.recv(4096):
                    return
            except TimeoutError:
                if not alive(pid):
                    raise Died(f"process {pid} ended while it started") from None
        raise Died(f"process {pid} was not ready in {READY_SECONDS_MAX:.0f} s")

    def close(self) -> None:
        self._socket.close()


def alive(pid: int) -> bool:
    """True while the process runs: not gone, not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Process:
    """A helper process that takes commands as lines and answers each with one."""

    def __init__(self, script: Path, words: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(words)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": PATHS},
        )  # fmt: skip

    def tell(self, command: str, /, **words: Any) -> None:
        """Give a command; its answer is read by `answer`, in order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **words}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The answer of the oldest command without one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process died"
        return json.loads(line)["answer"]

    def ask(self, command: str, /, **words: Any) -> Any:
        """Command and answer."""
        self.tell(command, **words)
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.tell("quit")
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class Lab:
    """See the module.

    `plant` is called in the daemon before it starts; `env` is that of the process that forks
    daemons; labs of one process need different `address`es; `shape_options` are
    `daemon_lab.shape`'s.
    """

    def __init__(
        self,
        folder: Path,
        *,
        evicts: bool = False,
        fabric: str = "shm",
        plant: str = "",
        env: dict[str, str] | None = None,
        client: dict[str, Any] | None = None,
        state_dir: Path | None = None,
        address: int = 1,
        events_max: int = 65_536,
        **shape_options: Any,
    ) -> None:
        self.folder = folder
        own = own_address(address)
        self.site = Site(folder / "d", self._config(folder / "d", state_dir, own, shape_options))
        events = replace(self.site.config.events, history_events_max=events_max)
        self.site.config = replace(self.site.config, events=events)
        self.site.write(self.site.config)
        self.log = folder / "daemon.log"
        self.log.touch()
        self.journal = folder / "journal.jsonl"
        self.judge = Judge(evicts=evicts)
        self.plant = plant
        self.pid = 0
        self.restarts_ms: list[float] = []
        self._log_read = 0
        self._notices = Notices()
        self._starter = Starter(folder, {"PYTHONPATH": PATHS, **(env or {})})
        words = {
            "folder": str(self.site.directory), "journal": str(self.journal), "fabric": fabric,
            "options": client or {},
        }  # fmt: skip
        self.driver = Process(HERE / "driver.py", words)

    @staticmethod
    def _config(
        root: Path, state_dir: Path | None, own: str, shape_options: dict[str, Any]
    ) -> Config:
        config, home = dev.prepare(root, tenants=TENANTS)
        config = shape(**small(**shape_options))(config)
        listen = replace(
            config.listen, control_port=7440, grpc_port=7441, data_port=7442, metrics_port=7443,
            control_host=own, grpc_host=own, data_host=own, metrics_host=own,
        )  # fmt: skip
        config = replace(
            config, listen=listen, tenants=replace(config.tenants, auto_add=False),
            flash=replace(config.flash, blocks_max=BLOCKS_MAX),
        )  # fmt: skip
        if state_dir is not None:
            config = replace(config, shard=replace(config.shard, state_dir=state_dir))
        for tenant in TENANTS:
            home.client_toml_of(tenant).write_text(
                f'cert = "pki/tenants/{tenant}.pem"\nkey = "pki/tenants/{tenant}.key"\n'
                f'ca = "pki/ca.pem"\n[[shards]]\nname = "{config.shard.name}"\n'
                f'host = "{listen.control_host}"\nport = {listen.control_port}\n'
            )
        assert (root / "pki" / "tenants" / f"{GUEST}.pem").exists(), devcerts.__name__
        return config

    def client_toml(self, tenant: str) -> Path:
        """The client's configuration of a tenant."""
        name = "client.toml" if tenant == TENANTS[0] else f"client-{tenant}.toml"
        return self.site.directory / name

    # The daemon.

    def begin(self) -> int:
        """Start the daemon and do not wait for it."""
        self._notices.clear()
        env = {"NOTIFY_SOCKET": self._notices.address}
        self.pid = self._starter.start(
            self.log, "--config", str(self.site.toml), env=env, plant=self.plant
        )
        return self.pid

    def start(self) -> float:
        """Start the daemon; milliseconds until it serves. Raises: Died."""
        began = time.monotonic()
        self.begin()
        try:
            self._notices.wait(self.pid)
        except Died as error:
            raise Died(f"{error}: {self.last_words()}") from None
        took_ms = (time.monotonic() - began) * 1e3
        self.restarts_ms.append(took_ms)
        return took_ms

    def cold_start_ms(self) -> float:
        """How long a process of its own takes, imports and all; it is killed then."""
        env = {**os.environ, "NOTIFY_SOCKET": self._notices.address}
        self._notices.clear()
        began = time.monotonic()
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "entresol_daemon", "--config", str(self.site.toml)],
                stdout=log, stderr=log, env=env,
            )  # fmt: skip
        try:
            self._notices.wait(process.pid)
            return (time.monotonic() - began) * 1e3
        finally:
            process.kill()
            process.wait()

    def first_life(self) -> None:
        """Start, add the tenant "dev", connect its driver."""
        self.start()
        self.driver.ask("admin", what="add", tenant="dev", wait=True)
        assert self.driver.ask("connect"), self.last_words()

    def kill(self) -> bool:
        """SIGKILL; True if it was still running."""
        pid, self.pid = self.pid, 0
        was = alive(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._starter.wait(pid)
        return was

    def signal(self, number: int) -> None:
        """A signal for the daemon."""
        os.kill(self.pid, number)

    def stop(self) -> int | str:
        """SIGTERM; the exit status."""
        pid, self.pid = self.pid, 0
        os.kill(pid, signal.SIGTERM)
        return self._starter.wait(pid)

    # Looking.

    def look(self, when: str, tenant: str = "dev") -> None:
        """Get everything and judge it, and all that was written down before."""
        self.driver.ask("check", when=when, tenant=tenant)
        self.judge.read(self.journal)

    def look_after_restart(self) -> None:
        """Tenants, then blocks, of all tenants that are there."""
        assert self.driver.ask("connect"), self.last_words()
        for tenant in self.driver.ask("tenants"):
            if self.driver.ask("connect", tenant=tenant, seconds=10):
                self.look("restart", tenant)
            else:
                self.judge.found(f"tenant {tenant} is listed and cannot connect")

    def new_log(self) -> str:
        """What the daemons wrote since the last look."""
        with open(self.log, "rb") as file:
            file.seek(self._log_read)
            raw = file.read()
        self._log_read += len(raw)
        return raw.decode(errors="replace")

    def log_since(self, at: int) -> str:
        """The log from byte `at` on."""
        with open(self.log, "rb") as file:
            file.seek(at)
            return file.read().decode(errors="replace")

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-2_000:]

    def metrics(self) -> dict[str, float]:
        """The daemon's metrics page, by series."""
        listen = self.site.config.listen
        url = f"http://{listen.metrics_host}:{listen.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=20) as reply:
            lines = reply.read().decode().splitlines()
        rows = (line.rpartition(" ") for line in lines if line and line[0] != "#")
        return {name: float(value) for name, _, value in rows}

    def close(self) -> None:
        """End everything this lab started."""
        self.driver.close()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            self.kill()
        self._starter.close()
        self._notices.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
