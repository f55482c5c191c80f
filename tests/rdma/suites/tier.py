"""The real daemon at a size that fits a guest, for suites that use the whole tier over verbs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from daemon_lab import Starter, shape

from entresol_proto.ids import NamespaceDescriptor
from tests.harness import START_SECONDS_MAX, DaemonProcess, Running, running_daemon

BLOCK = 256 * 1024
DEADLINE_NS = 60_000_000_000  # an emulated machine is slow
CONNECT_S = 240.0  # and on a busy host, several times that


def change(**limits: Any) -> Any:
    """The dev configuration, with verbs, and small."""
    return shape(fabrics=("verbs", "tcp"), dram=32 << 20, slab=4 << 20, flash=128 << 20,
                 segment=8 << 20, block_max=2 << 20, **limits)  # fmt: skip


@contextlib.asynccontextmanager
async def daemon(folder: Path, **limits: Any) -> AsyncIterator[Running]:
    """It runs in this process, below `folder`."""
    async with running_daemon(folder / "d", change(**limits)) as running:
        yield running


def descriptor(salt: str = "s") -> NamespaceDescriptor:
    """A namespace; another salt is another one."""
    return NamespaceDescriptor(model="guest", cache_salt=salt)


@functools.cache
def starter() -> Starter:
    """Starts daemons for the rest of this process: importing one takes half a minute in a guest."""
    folder = Path(tempfile.mkdtemp(prefix="starter-"))
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    found = Starter(folder)
    atexit.register(found.close)
    return found


class ForkedDaemon(DaemonProcess):
    """A daemon's process, forked from one that has imported everything; then `main` runs in it."""

    pid = 0

    def start(self) -> None:
        """See `DaemonProcess.start`."""
        pointer = self.directory / "client.toml"
        pointer.unlink(missing_ok=True)
        words = ("--dev", "--dir", str(self.directory), *self._arguments)
        self.pid = starter().start(self.log_path, *words)
        until = time.monotonic() + START_SECONDS_MAX
        while not pointer.exists():
            if not Path(f"/proc/{self.pid}/fd/0").exists() or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"daemon did not start:\n{self.log_path.read_text()[-4000:]}")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        pid, self.pid = self.pid, 0
        if pid:
            os.kill(pid, signal.SIGKILL)
            starter().wait(pid)
