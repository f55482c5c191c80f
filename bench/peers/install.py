"""Where peers live: environments and unpacked packages in a cache folder, made when first needed.

Invariant: nothing is installed into the system or into the bench's own environment; a folder with
`.ready` in it is complete, one without is made anew. What cannot be had is a `NotRunError` with the
reason in one line.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.peers.base import Peer
from bench.processes import LOG_CHARS_SHOWN, ROOT, NotRunError

CACHE_ENV = "ENTRESOL_BENCH_CACHE"
READY = ".ready"
RECIPE = 1  # raise it when the same pins are made into something else
INSTALL_SECONDS_MAX = 900.0
FREE_BYTES_MIN = 2 << 30
LIBRARIES = ("usr/lib", "lib")


def cache_root() -> Path:
    """The folder; made when missing."""
    named = os.environ.get(CACHE_ENV)
    root = Path(named) if named else Path.home() / ".cache" / "entresol" / "bench"
    root.mkdir(parents=True, exist_ok=True)
    return root.resolve()


def interpreter(peer: Peer, *, may_build_engines: bool = False) -> Path:
    """Python of the peer's environment, made when there is none. Raises: NotRunError."""
    if peer.engine:
        return _engine(peer.engine, may_build=may_build_engines)
    if not peer.wheels:
        return Path(sys.executable)
    return environment(peer.wheels) / "bin" / "python"


def environment(wheels: Sequence[str]) -> Path:
    """A virtual environment with exactly these wheels. Raises: NotRunError."""

    def build(at: Path) -> None:
        venv.create(at, with_pip=False, symlinks=True)
        command = [sys.executable, "-m", "pip", "--python", str(at / "bin" / "python"),
                   "--disable-pip-version-check", "install", "-q", "--no-deps",
                   "--only-binary=:all:", *wheels]  # fmt: skip
        _run(command, f"pip install {' '.join(wheels)}")

    return _made(f"python{sys.version_info[0]}.{sys.version_info[1]}", wheels, build)


def debian(packages: Sequence[str]) -> Path:
    """A folder with the files of these packages and of what they need and the system lacks.

    Nothing is installed, so that no service starts and no right is needed. Raises: NotRunError.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NotRunError(f"no apt-get here to get {' '.join(packages)} with")

    def build(at: Path) -> None:
        archives = at / "archives"
        (archives / "partial").mkdir(parents=True)
        options = [f"Dir::Cache::archives={archives}", "Debug::NoLocking=1"]
        if os.geteuid() == 0:
            options.append("APT::Sandbox::User=root")
        given = [word for option in options for word in ("-o", option)]
        command = ["apt-get", "install", "-y", "-q", "--reinstall", "--download-only",
                   "--no-install-recommends", *given, *packages]  # fmt: skip
        _run(command, f"apt-get install --download-only {' '.join(packages)}")
        for package in sorted(archives.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(at)], package.name)
        shutil.rmtree(archives)

    return _made("debian", packages, build)


def library_path(root: Path) -> str:
    """LD_LIBRARY_PATH for the programs of an unpacked folder."""
    folders = {path.parent for top in LIBRARIES for path in (root / top).rglob("*.so*")}
    return ":".join(sorted(str(folder) for folder in folders))


def program(root: Path, name: str) -> Path:
    """A program of an unpacked folder. Raises: NotRunError."""
    for folder in ("usr/bin", "usr/sbin", "bin"):
        if (root / folder / name).exists():
            return root / folder / name
    raise NotRunError(f"{name} is not in its package")


def _engine(name: str, *, may_build: bool) -> Path:
    """An environment of tests/engines: gigabytes, so only built when asked. Raises: NotRunError."""
    from tests.engines import builder, environments

    one = environments.ENVIRONMENTS[name]
    if builder.find(one) is None:
        if not may_build:
            raise NotRunError(f"its environment is not there: python -m tests.engines build {name}")
        try:
            builder.ensure(one)
        except builder.NotHereError as error:
            raise NotRunError(str(error)) from None
    return builder.python(one)


def _made(kind: str, parts: Sequence[str], build: Callable[[Path], None]) -> Path:
    """The folder of these parts, built in place (an environment's scripts name their path)."""
    digest = hashlib.sha256(repr((RECIPE, kind, tuple(parts))).encode()).hexdigest()[:12]
    at = cache_root() / f"{kind}-{digest}"
    with _locked(at):
        if not (at / READY).exists():
            shutil.rmtree(at, ignore_errors=True)
            free = shutil.disk_usage(at.parent).free
            if free < FREE_BYTES_MIN:
                raise NotRunError(f"{free >> 20} MiB free in {at.parent}, 2048 wanted")
            try:
                at.mkdir()
                build(at)
                (at / READY).write_text(" ".join(parts) + "\n")
            except BaseException:
                shutil.rmtree(at, ignore_errors=True)
                raise
    return at


@contextlib.contextmanager
def _locked(at: Path) -> Iterator[None]:
    with open(at.with_name(f".{at.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str], what: str) -> None:
    """Raises: NotRunError with the last words of a command that failed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=env, cwd=ROOT,
            timeout=INSTALL_SECONDS_MAX, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotRunError(f"{what}: {error}"[:LOG_CHARS_SHOWN]) from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines()]
        errors = [line for line in lines if line.lower().startswith(("error", "e:"))] or lines
        raise NotRunError(f"{what}: {' / '.join(errors[-2:])}"[:LOG_CHARS_SHOWN])
