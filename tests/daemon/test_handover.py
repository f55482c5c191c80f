"""The manager keeps the listening sockets while daemons come and go, and wants signs of life.

A small manager of the test's own stands where systemd would: it binds, hands over descriptors 3 and
up, and listens to what is told it. Whoever connects between two daemons waits; nobody is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from daemon_lab import DESCRIPTOR, Site, get, keys_of, put
from harness import START_SECONDS_MAX, STOP_SECONDS_MAX, eventually
from life_lab import Notices

from entresol_client.client import AsyncClient
from entresol_client.config import TlsFiles
from entresol_proto.identity import client_ssl_context
from entresol_proto.limits import KIB

pytestmark = pytest.mark.daemon

SIZE = 64 * KIB
SURFACES = ("control", "data", "metrics")
# Descriptors to 3, 4, ... and the process id of who will use them: what systemd does after fork.
_EXEC = """\
import os, sys
fds = [int(fd) for fd in sys.argv[1].split(",")]
for at, fd in enumerate(fds):
    os.dup2(fd, 3 + at)
os.environ["LISTEN_PID"] = str(os.getpid())
os.environ["LISTEN_FDS"] = str(len(fds))
os.execv(sys.executable, [sys.executable, "-m", "entresol_daemon", *sys.argv[2:]])
"""


class Manager:
    """Keeps one socket per surface, starts and stops daemons on them."""

    def __init__(self, site: Site, watchdog_us: int = 0) -> None:
        self.site = site
        self.notices = Notices()
        self.process: subprocess.Popen[bytes] | None = None
        self.log = site.toml.parent / "handover.log"
        self._watchdog_us = watchdog_us
        self.sockets: list[socket.socket] = []
        for _ in SURFACES:
            made = socket.socket()
            # Above what the child moves them to, so that no move closes what another needs.
            high = os.dup2(made.fileno(), 200 + len(self.sockets))
            made.close()
            self.sockets.append(socket.socket(fileno=high))
            self.sockets[-1].bind(("127.0.0.1", 0))
            self.sockets[-1].listen(1024)
        ports = dict(zip(SURFACES, map(self.port_of, self.sockets), strict=True))
        named = {f"{name}_port": port for name, port in ports.items()}
        site.config = replace(site.config, listen=replace(site.config.listen, **named))
        site.write(site.config)
        self.ports = ports

    @staticmethod
    def port_of(one: socket.socket) -> int:
        return int(one.getsockname()[1])

    def start(self, *, wait: bool = True) -> None:
        """A daemon that is ready, or will be."""
        assert self.process is None
        fds = [one.fileno() for one in self.sockets]
        env = os.environ | {"NOTIFY_SOCKET": self.notices.address, "LISTEN_FDNAMES": "a:b:c"}
        if self._watchdog_us:
            env |= {"WATCHDOG_USEC": str(self._watchdog_us)}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _EXEC, ",".join(map(str, fds)),
                 "--config", str(self.site.toml)],
                pass_fds=fds, env=env, stdout=log, stderr=log,
            )  # fmt: skip
        if wait:
            self.notices.wait(self.process.pid)

    def stop(self) -> int:
        """TERM; returns its exit status."""
        assert self.process is not None
        process, self.process = self.process, None
        process.terminate()
        return process.wait(STOP_SECONDS_MAX)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for one in self.sockets:
            one.close()
        self.notices.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    site = Site.prepare(tmp_path / "d", dram=64 * 1024 * KIB)
    made = Manager(site)
    yield made
    made.close()


@contextlib.contextmanager
def knocking(port: int) -> Iterator[list[str]]:
    """Connect again and again in a thread; what went wrong, in words."""
    wrong: list[str] = []
    done = threading.Event()
    count = 0

    def knock() -> None:
        nonlocal count
        while not done.wait(0.02):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=30).close()
                count += 1
            except OSError as error:
                wrong.append(repr(error))

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield wrong
    finally:
        done.set()
        thread.join()
    assert count > 10


def _start_and_shake_hands(manager: Manager, tls: TlsFiles) -> None:
    """Connect while nobody is there: the next daemon serves it."""
    place = ("127.0.0.1", manager.ports["control"])
    with socket.create_connection(place, timeout=START_SECONDS_MAX) as early:
        manager.start()
        context = client_ssl_context(tls.cert, tls.key, tls.ca)
        with context.wrap_socket(early, server_hostname="localhost") as shaken:
            assert shaken.version() == "TLSv1.3"


async def test_between_two_daemons_nobody_is_refused(manager: Manager) -> None:
    keys = keys_of(32)
    manager.start()
    config = manager.site.client_config(fabric="tcp", fallback=False)
    with knocking(manager.ports["control"]) as wrong:
        async with await AsyncClient.open(config) as client:
            await eventually(lambda: client.shards()[0].connected, seconds=60, what="it")
            space = await client.namespace(DESCRIPTOR)
            assert (await put(space, keys, SIZE, ack="durable")).ok
            for _ in range(3):
                assert await asyncio.to_thread(manager.stop) == 0
                await asyncio.to_thread(_start_and_shake_hands, manager, config.tls)
                async with asyncio.timeout(60):  # a miss until the client is back, never wrong
                    while not (await get(space, keys, SIZE)).ok:
                        await asyncio.sleep(0.02)
    assert not wrong
    url = f"http://127.0.0.1:{manager.ports['metrics']}/readyz"
    answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=30)
    with answer:
        assert answer.status == 200
    assert manager.stop() == 0
    said = manager.log.read_text()
    assert "recovery=checkpoint" in said


async def test_sockets_that_the_configuration_does_not_name_end_the_start(
    manager: Manager,
) -> None:
    manager.site.change("listen", control_port=manager.ports["control"] % 65_000 + 1)
    with pytest.raises(Exception, match="ended while it started"):
        manager.start()
    assert manager.process is not None
    assert manager.process.wait(STOP_SECONDS_MAX) == 1
    said = manager.log.read_text()
    assert f"127.0.0.1:{manager.ports['control']}" in said
    assert "systemctl edit" in said


async def test_signs_of_life_follow_readiness_and_come_again_and_again(tmp_path: Path) -> None:
    """A manager begins to count when the daemon is ready: what came before would be lost on it."""
    manager = Manager(Site.prepare(tmp_path / "d"), watchdog_us=600_000)
    try:
        manager.start(wait=False)
        heard: list[str] = []
        while heard.count("WATCHDOG=1") < 3:
            heard += manager.notices.hear(START_SECONDS_MAX).splitlines()
        before = heard[: heard.index("WATCHDOG=1")]
        assert [one for one in before if not one.startswith("STATUS=")] == ["READY=1"]
        assert any("opening the flash" in one for one in before)
        assert manager.stop() == 0
        while "STOPPING=1" not in heard:
            heard += manager.notices.hear(STOP_SECONDS_MAX).splitlines()
    finally:
        manager.close()
