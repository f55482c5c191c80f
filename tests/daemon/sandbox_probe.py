"""A daemon that is locked in, and everything it must not be able to do, tried from inside.

`python sandbox_probe.py ROOT OUTSIDE MODE` goes `entresold --dev`'s way up to serving, with the
sandbox in MODE, then tries each of `ATTEMPTS` on the loop's thread and on another, and prints what
came of them. `run` starts that, `judge` says what should not have been.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

DEADLINE_S = 240
THREAD = "thread: "
REFUSED = "PermissionError"

Attempt = Callable[[Path, Path, "socket.socket"], object]
ATTEMPTS: dict[str, Attempt] = {
    "write outside": lambda root, out, peer: (out / "new").write_text("x"),
    "append outside": lambda root, out, peer: os.close(os.open(out / "old", os.O_WRONLY)),
    "truncate outside": lambda root, out, peer: os.truncate(out / "old", 4),
    "mkdir outside": lambda root, out, peer: os.mkdir(out / "folder"),
    "socket outside": lambda root, out, peer: _unix_socket(out / "socket"),
    "symlink outside": lambda root, out, peer: os.symlink("x", out / "symlink"),
    "rename to outside": lambda root, out, peer: os.rename(root / "spare", out / "spare"),
    "link from outside": lambda root, out, peer: os.link(out / "old", root / "linked"),
    "unlink outside": lambda root, out, peer: os.unlink(out / "old"),
    "run a program": lambda root, out, peer: subprocess.run(["/bin/true"], check=True),
    "connect": lambda root, out, peer: socket.create_connection(peer.getsockname()).close(),
    "signal outside": lambda root, out, peer: os.kill(os.getppid(), 0),
    "read outside": lambda root, out, peer: (out / "read").read_text(),
    "write inside": lambda root, out, peer: (root / "state" / "probe").write_text("x"),
}
ALLOWED = ("read outside", "write inside")
# What older kernels cannot refuse: name -> the first version of Landlock that can.
SINCE = {"truncate outside": 3, "connect": 4, "signal outside": 6}


def _unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def run(folder: Path, *, mode: str) -> tuple[int, dict[str, str]]:
    """(version of Landlock in force, what came of each attempt). Raises: RuntimeError."""
    outside = folder / "outside"
    outside.mkdir()
    for name in ("old", "read"):
        (outside / name).write_text("kept")
    done = subprocess.run(
        [sys.executable, __file__, str(folder / "root"), str(outside), mode],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the probe ended with {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    outside_threads = int(found.pop("outside"))
    if outside_threads:
        raise RuntimeError(f"{outside_threads} threads began before the sandbox")
    return found.pop("version"), found


def judge(version: int, found: dict[str, str]) -> list[str]:
    """Each attempt that did not end as it must under this version."""
    wrong = []
    for name, outcome in found.items():
        bare = name.removeprefix(THREAD)
        allowed = bare in ALLOWED or version < SINCE.get(bare, 1)
        if (outcome == "done") is not allowed:
            wrong.append(f"{name}: {outcome}")
    return wrong


def _main(root: Path, outside: Path, mode: str) -> None:
    os.environ["GRPC_VERBOSITY"] = "NONE"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["XDG_RUNTIME_DIR"] = str(root.parent)
    from entresol_daemon import dev, sandbox

    config, home = dev.prepare(root)
    for name in ("spare", THREAD + "spare"):
        (root / name).write_text("x")
    config = replace(config, sandbox=replace(config.sandbox, mode=mode))
    entered = sandbox.enter(config, dev.sandbox_rules(home))
    found: dict[str, str] = {}
    asyncio.run(_live(config, home, root, outside, found))
    print(json.dumps({"version": entered.version, "outside": str(entered.outside), **found}))


async def _live(config: object, home: object, root: Path, out: Path, found: dict[str, str]) -> None:
    """A daemon's whole life, with the attempts in its middle."""
    from entresol_daemon import dev
    from entresol_daemon.control.admin import TenantQuota
    from entresol_daemon.server import Daemon
    from entresol_proto.ids import TenantName

    daemon = Daemon(config)  # type: ignore[arg-type]
    await daemon.start()
    try:
        dev.write_client_files(home, daemon)  # type: ignore[arg-type]
        await daemon.admin.tenant_add(TenantName("probe"), TenantQuota())  # writes the keyring
        _try_twice(root, out, found)
    finally:
        await daemon.stop(drain_ns=10**8)


def _try_twice(root: Path, out: Path, found: dict[str, str]) -> None:
    """On another thread first; with the sandbox off, the second attempts are spoiled by these."""
    with socket.create_server(("127.0.0.1", 0)) as peer:
        thread = threading.Thread(target=_try_all, args=(THREAD, root, out, peer, found))
        thread.start()
        thread.join()
        _try_all("", root, out, peer, found)


def _try_all(
    prefix: str, root: Path, out: Path, peer: socket.socket, found: dict[str, str]
) -> None:
    for name, attempt in ATTEMPTS.items():
        try:
            attempt(root, out, peer)
            found[prefix + name] = "done"
        except OSError as error:
            found[prefix + name] = type(error).__name__


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
