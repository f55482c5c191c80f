"""The demo's processes: the daemon and the hosts, started, listened to, killed.

Invariants: a process is only ever ended through the handle it was started with; every one of them
has ended when `Processes.close` returns. They run in sessions of their own, so that a Ctrl-C in the
terminal reaches the demo alone, which then ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from entresol_client.config import ClientConfig
from entresol_client.programs import DAEMON_HINT, command_of, lacks_daemon
from entresol_proto.status import EntresolError

START_SECONDS_MAX = 60.0
SILENCE_SECONDS_MAX = 180.0  # of a host process, then the demo gives up
METRICS_SECONDS_MAX = 5.0
METRICS_BYTES_MAX = 16 * 1024 * 1024
LINE_BYTES_MAX = 1024 * 1024
POLL_SECONDS = 0.01
LOG_SHOWN_BYTES = 1_500
DAEMON_MODULE = "entresol_daemon"

Tick = Callable[[], None]


class StoryError(EntresolError):
    """A part of the demo could not run at all."""


def check_daemon_installed() -> None:
    """Raises: StoryError when the daemon's package is missing."""
    if lacks_daemon("grpc", "prometheus_client", "xxhash"):
        raise StoryError("the daemon is not installed here", hint=DAEMON_HINT)


class Daemon:
    """`entresold --dev` in a folder; `kill` is SIGKILL. Start and kill as often as wanted."""

    def __init__(
        self, directory: Path, log_path: Path, tenants: Sequence[str], arguments: Sequence[str]
    ) -> None:
        """The first tenant's configuration is `client.toml`. `directory` need not exist."""
        self.directory = directory
        self._log_path = log_path
        self._tenants = tuple(tenants)
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def data_file(self) -> Path:
        """Where the blocks are."""
        return self.directory / "state" / "flash.data"

    def client_toml(self, tenant: str) -> Path:
        """Client configuration of a tenant; rewritten at every start (the ports change)."""
        first = tenant == self._tenants[0]
        return self.directory / ("client.toml" if first else f"client-{tenant}.toml")

    def start(self, tick: Tick) -> None:
        """Start and return as soon as it serves. Raises: StoryError with the end of its log."""
        assert self._process is None, "started twice"
        for tenant in self._tenants:
            self.client_toml(tenant).unlink(missing_ok=True)
        command = command_of(DAEMON_MODULE, "--dev", "--dir", str(self.directory))
        for tenant in self._tenants:
            command += ["--tenant", tenant]
        # Its pointer for other terminals stays in the demo's folder: this daemon is not for them.
        runtime = self.directory.parent / "runtime"
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
        with open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, start_new_session=True,
            )  # fmt: skip
        until_s = time.monotonic() + START_SECONDS_MAX
        while not all(self.client_toml(tenant).exists() for tenant in self._tenants):
            if self._process.poll() is not None:
                self._process = None
                raise self._failure("the daemon did not start")
            if time.monotonic() > until_s:
                raise self._failure(f"the daemon did not serve within {START_SECONDS_MAX:.0f} s")
            tick()
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels. Raises: StoryError when it cannot be asked."""
        base = ClientConfig.load(self.client_toml(self._tenants[0])).shards[0].metrics
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{base}/metrics", timeout=METRICS_SECONDS_MAX) as reply:
                text = reply.read(METRICS_BYTES_MAX).decode()
        except (OSError, ValueError) as error:
            raise self._failure(f"the daemon's metrics cannot be read: {error}") from None
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((name + " ", name + "{"))
        ]
        if not values:
            raise StoryError(f"the daemon has no metric {name}")
        return sum(values)

    def _failure(self, message: str) -> StoryError:
        shown = log_tail(self._log_path)
        hint = DAEMON_HINT if "ModuleNotFoundError" in shown else ""
        return StoryError(f"{message}; the end of its log:\n{shown}", hint=hint)


class Host:
    """One host process of the demo, `entresol_client.demo.host`, and what it says.

    `until_done` gives its messages: `{"progress": ...}` while it works and `{"result": ...}`.
    """

    def __init__(self, role: str, arguments: Sequence[str], log_path: Path) -> None:
        self._role = role
        self._log_path = log_path
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                command_of("entresol_client.demo.host", role, *arguments),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def until_done(self, tick: Tick) -> Iterator[dict[str, Any]]:
        """Messages as they come, until the process has ended.

        Raises: StoryError when it fails, says nothing for SILENCE_SECONDS_MAX, or says nonsense.
        """
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        rest = b""
        heard_s = time.monotonic()
        while True:
            if not select.select((pipe,), (), (), 0.1)[0]:
                tick()
                if time.monotonic() - heard_s > SILENCE_SECONDS_MAX:
                    raise self._failure(f"{self._role}: silent for {SILENCE_SECONDS_MAX:.0f} s")
                continue
            part = os.read(pipe, 65_536)
            if not part:
                break
            heard_s = time.monotonic()
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                raise self._failure(f"{self._role}: endless line")
            for line in lines:
                yield self._message(line)
        status = self._process.wait()
        if status:
            raise self._failure(f"{self._role}: ended with status {status}")

    def end(self) -> None:
        """Kill it if it still runs. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _message(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise self._failure(f"{self._role}: not a message: {line[:80]!r}")
        if "error" in message:
            raise StoryError(f"{self._role}: {message['error']}", hint=message.get("hint", ""))
        return message

    def _failure(self, message: str) -> StoryError:
        return StoryError(f"{message}; the end of its log:\n{log_tail(self._log_path)}")


class Processes:
    """Everything that was started. Close it on every way out."""

    def __init__(self) -> None:
        self._daemons: list[Daemon] = []
        self._hosts: list[Host] = []

    def daemon(self, daemon: Daemon) -> Daemon:
        """Look after a daemon; it may be started and killed meanwhile."""
        self._daemons.append(daemon)
        return daemon

    @contextlib.contextmanager
    def host(self, role: str, arguments: Sequence[str], log_path: Path) -> Iterator[Host]:
        """Start a host process; it has ended afterwards."""
        host = Host(role, arguments, log_path)
        self._hosts.append(host)
        try:
            yield host
        finally:
            host.end()
            self._hosts.remove(host)

    def close(self) -> None:
        """End whatever runs. Idempotent."""
        for host in self._hosts:
            host.end()
        for daemon in self._daemons:
            daemon.kill()


def log_tail(path: Path) -> str:
    """The last lines of a log."""
    try:
        text = path.read_bytes()[-LOG_SHOWN_BYTES:].decode(errors="replace")
    except OSError:
        return "(no log)"
    return text.strip() or "(empty)"
