"""Starts the real daemon for tests: in this process (`running_daemon`) or as one (`DaemonProcess`).

Every daemon listens on loopback with ports of its own and lives in a folder of its own. Both ways
give the client's configuration for any of the prepared tenants.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from entresol_client.config import ClientConfig
from entresol_daemon import dev
from entresol_daemon.config import Config
from entresol_daemon.server import Daemon

TENANTS = ("dev", "other")
# An emulated machine takes its time; a daemon there that hangs is still found.
START_SECONDS_MAX = 300.0 if os.environ.get("ENTRESOL_RDMA_GUEST") else 60.0
STOP_SECONDS_MAX = 30.0


@dataclass(slots=True)
class Running:
    """A daemon in this process."""

    daemon: Daemon
    home: dev.DevHome

    def client_config(self, tenant: str = "dev", **overrides: object) -> ClientConfig:
        """How a tenant reaches it."""
        return replace(ClientConfig.load(self.home.client_toml_of(tenant)), **overrides)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running_daemon(
    directory: Path,
    change: Callable[[Config], Config] = lambda config: config,
    *,
    tenants: Sequence[str] = TENANTS,
) -> AsyncIterator[Running]:
    """The dev daemon on the running loop; `change` edits its configuration first."""
    config, home = dev.prepare(directory, tenants=tuple(tenants))
    config = change(config)
    config.check("test")
    daemon = Daemon(config)
    await daemon.start()
    try:
        dev.write_client_files(home, daemon, pointer=False)
        yield Running(daemon, home)
    finally:
        await daemon.stop(drain_ns=200_000_000)


class DaemonProcess:
    """`entresold --dev --dir DIR` as a process; `kill` is SIGKILL, `stop` is SIGTERM."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "entresol_daemon"),
    ) -> None:
        """`program`: what Python runs with `--dev ...`, for those that change something first."""
        self.directory = directory
        self._program = program
        self.log_path = directory.parent / f"{directory.name}.log"
        self._arguments = arguments
        self._env = env or {}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it serves. Raises: RuntimeError with its log when it does not."""
        pointer = self.directory / "client.toml"
        pointer.unlink(missing_ok=True)
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.directory.parent), **self._env}
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self._program, "--dev", "--dir", str(self.directory),
                 *self._arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip
        until = time.monotonic() + START_SECONDS_MAX
        while not pointer.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"daemon did not start:\n{self.log_path.read_text()[-4000:]}")
            time.sleep(0.01)

    def client_config(self, tenant: str = "dev", **overrides: object) -> ClientConfig:
        """How a tenant reaches it."""
        name = "client.toml" if tenant == "dev" else f"client-{tenant}.toml"
        return replace(ClientConfig.load(self.directory / name), **overrides)  # type: ignore[arg-type]

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """SIGTERM, and wait; returns the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS_MAX)
        finally:
            self.kill()

    def __enter__(self) -> DaemonProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


async def eventually(
    check: Callable[[], bool], *, seconds: float = 10.0, what: str = "condition"
) -> None:
    """Wait until `check()` holds. Raises: AssertionError after `seconds`."""
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, f"{what} did not come true in {seconds} s"
        await asyncio.sleep(0.01)
