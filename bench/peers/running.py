"""A peer that runs: its servers and its client, started here, told what to do, and ended.

Invariant: when the `with` block is over, however it ends, none of the peer's processes is left; and
while it is not its turn, none of them runs. Some of them poll, and would take a processor from
whoever is being measured.
"""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar

from bench.peers import install
from bench.peers.base import Peer, Server, Work
from bench.peers.drive import WORK_ENV, load
from bench.processes import NEW_NETWORK, ROOT, SAME_NETWORK, Child, NotRunError, cpu_s, free_ports

NAMES = (
    "redis", "hiredis", "mooncake", "lmcache_server", "flight", "nixl_ucx", "infinistore",
    "files", "nixl_posix", "lmcache_fs",
)  # fmt: skip
ANSWER_SECONDS_MAX = 120.0
SERVER_ENDS_SECONDS = 0.5


def peers(names: Sequence[str] = NAMES) -> list[Peer]:
    """The peers of these names."""
    return [load(name) for name in names]


class RunningPeer:
    """The client process of one peer. Times are the client's own, around the call alone."""

    def __init__(self, peer: Peer, child: Child, servers: Sequence[Child]) -> None:
        self.peer = peer
        self._child = child
        self._all = (*servers, child)
        self._answer()
        self._freeze()

    def put(self, generation: int, times: int = 1) -> float:
        """Seconds for storing a generation. Raises: NotRunError with the client's error."""
        return self._tell(f"put {generation} {times}")

    def get(self, generation: int, times: int = 1) -> float:
        """Seconds for getting a generation `times` times over. Raises: NotRunError."""
        return self._tell(f"get {generation} {times}")

    def forget(self, generation: int) -> None:
        """Raises: NotRunError."""
        self._tell(f"forget {generation}")

    def cpu_s(self) -> float:
        """CPU seconds of its client and servers so far."""
        return sum(cpu_s(child.process.pid) for child in self._all)

    def _tell(self, line: str) -> float:
        pipe = self._child.process.stdin
        assert pipe is not None
        for child in self._all:
            child.thaw()
        try:
            pipe.write(line.encode() + b"\n")
            pipe.flush()
            return self._answer()
        except BrokenPipeError:
            raise NotRunError(f"its client ended: {self._child.last_words()}") from None
        finally:
            self._freeze()

    def _freeze(self) -> None:
        for child in self._all:
            child.freeze()

    def _answer(self) -> float:
        pipe = self._child.process.stdout
        assert pipe is not None
        if not _readable(pipe.fileno(), ANSWER_SECONDS_MAX):
            raise NotRunError(f"its client did not answer in {ANSWER_SECONDS_MAX:.0f} s")
        line = pipe.readline()
        if not line:
            raise NotRunError(f"its client ended: {self._child.last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise NotRunError(answer["error"])
        return float(answer["seconds"])


@contextlib.contextmanager
def running(peer: Peer, work: Work, *, may_build_engines: bool = False) -> Iterator[RunningPeer]:
    """Install when needed, start servers and client. Raises: NotRunError with the reason."""
    python = install.interpreter(peer, may_build_engines=may_build_engines)
    unpacked = install.debian(peer.debs) if peer.debs else None
    folder = Path(work.folder) / peer.name
    folder.mkdir(parents=True, exist_ok=True)
    ports = dict(zip(peer.ports, free_ports(len(peer.ports)), strict=True))
    work = replace(work, folder=str(folder), ports=ports, programs=str(unpacked or ""))
    environment: ClassVar[Mapping[str, str]] = {
        "PYTHONPATH": str(ROOT), WORK_ENV: json.dumps(asdict(work)), "PYTHONUNBUFFERED": "1",
        **peer.environment,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        network = SAME_NETWORK
        if peer.own_network:
            holder = Child(f"{peer.name}-network", ["sleep", "86400"], folder, network=NEW_NETWORK)
            stack.enter_context(holder)
            holder.wait_for(lambda: _runs(holder, "sleep"))
            network = holder.process.pid
        servers: list[Child] = []
        for server in peer.servers(work):
            command = _command(server.command, python, unpacked)
            child = Child(
                f"{peer.name}-{server.name}", command, folder,
                environment={**environment, **_libraries(server, unpacked), **server.environment},
                network=network,
            )  # fmt: skip
            servers.append(stack.enter_context(child))
            child.wait_for_port(server.port)
        command = _command(peer.driver("client"), python, unpacked)
        client = Child(
            f"{peer.name}-client", command, folder,
            environment=environment, talks=True, network=network,
        )  # fmt: skip
        stack.enter_context(client)
        try:
            ready = RunningPeer(peer, client, servers)
        except NotRunError as error:
            raise NotRunError(_cause(error, servers)) from None
        yield ready


def _cause(error: NotRunError, servers: Sequence[Child]) -> str:
    """A client that cannot connect says less than the server that has ended."""
    for child in servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.process.wait(SERVER_ENDS_SECONDS)
            return f"{child.name} ended with {status}: {child.last_words()}"
    return str(error)


def _command(words: Sequence[str], python: Path, unpacked: Path | None) -> list[str]:
    """With the path of its program: the peer's interpreter, its scripts, or its packages."""
    first, *rest = words
    if first == "python":
        return [str(python), *rest]
    if unpacked is not None:
        return [str(install.program(unpacked, first)), *rest]
    return [str(python.parent / first), *rest]


def _libraries(server: Server, unpacked: Path | None) -> dict[str, str]:
    if unpacked is None or server.command[0] == "python":
        return {}
    return {"LD_LIBRARY_PATH": install.library_path(unpacked)}


def _runs(child: Child, name: str) -> bool:
    """Whether a child has come to be the program of that name."""
    return Path(f"/proc/{child.process.pid}/comm").read_text().strip() == name


def _readable(fd: int, seconds: float) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])
