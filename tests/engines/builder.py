"""Builds environments and keeps them: one builder at a time, nothing half-built ever used.

Invariant: a folder with the file `.ready` is complete and not changed any more. A folder is built
where it will stay, because the scripts of an environment name its path; one that failed, or whose
builder was killed, has no `.ready` and goes before the next build. What nobody asked for in
UNUSED_DAYS goes too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

from tests.engines.environments import TORCH_ARGS_ENV, Environment
from tests.engines.progress import say

CACHE_ENV = "ENTRESOL_ENGINES_CACHE"
INSTALLER_ENV = "ENTRESOL_ENGINES_INSTALLER"  # "uv" or "pip"; unset: uv where it can be had
UNUSED_DAYS = 14
READY = ".ready"
UV = "uv==0.13.9"
INSTALL_SECONDS_MAX = 1500.0
PROBE_SECONDS_MAX = 300.0
FREE_GIB_MIN = 4
REASON_CHARS_MAX = 400


class NotHereError(Exception):
    """This machine cannot build an environment: no index in reach, no wheel for it, no room."""


def cache_root() -> Path:
    """Where environments are kept; created when missing."""
    at = os.environ.get(CACHE_ENV)
    root = Path(at) if at else Path.home() / ".cache" / "entresol" / "engines"
    root.mkdir(parents=True, exist_ok=True)
    return root.resolve()


def folder(environment: Environment) -> Path:
    """Where an environment is, or will be."""
    return cache_root() / f"{environment.name}-{environment.key()}"


def python(environment: Environment) -> Path:
    """Its interpreter."""
    return folder(environment) / "bin" / "python"


def find(environment: Environment) -> Path | None:
    """The folder of a built environment, or None. Finding it counts as use."""
    at = folder(environment)
    try:
        for layer in environment.layers():
            os.utime(folder(layer) / READY)
    except FileNotFoundError:
        return None
    return at


def ensure(environment: Environment) -> Path:
    """The folder of an environment, built when there is none, as are those under it.

    Raises: NotHereError when it cannot be built here; then nothing of it is left.
    """
    for layer in environment.layers():
        if find(layer):
            continue
        name = folder(layer).name
        if name in _failed:  # a base of several is not tried again for each
            raise NotHereError(_failed[name])
        with _locked(name):
            if not find(layer):
                try:
                    _build(layer)
                except NotHereError as error:
                    _failed[name] = f"environment {layer.name}: {error}"
                    raise NotHereError(_failed[name]) from None
                _forget_unused()
    return folder(environment)


_failed: dict[str, str] = {}  # by folder: why this process could not build it


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    with open(cache_root() / f".{name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: another process is building it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(environment: Environment) -> None:
    at, begun = folder(environment), time.monotonic()
    free_gib = shutil.disk_usage(at.parent).free / 2**30
    if free_gib < FREE_GIB_MIN:
        raise NotHereError(f"{free_gib:.1f} GiB free for {at.parent}, {FREE_GIB_MIN} wanted")
    shutil.rmtree(at, ignore_errors=True)  # by a builder that was killed
    say(f"building {environment.name}: {len(environment.pins)} packages, into {at}")
    try:
        venv.create(at, with_pip=False, symlinks=True)
        _lay_over(environment, at)
        if environment.first:
            extra = shlex.split(os.environ.get(TORCH_ARGS_ENV, ""))
            _pip(at, ["--no-deps", *extra, *environment.first])
            say(f"{environment.name}: {' '.join(environment.first)} is in")
        _install(environment, at)
        _borrow(environment, at)
        _probe(environment, at)
        (at / READY).write_text(f"{environment.key()}\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(at, ignore_errors=True)
        raise
    seconds, mib = time.monotonic() - begun, _mib(at)
    say(f"built {environment.name} in {seconds:.0f} s, {mib} MiB")


def _lay_over(environment: Environment, at: Path) -> None:
    """Let the packages of the base be found behind the environment's own."""
    if not environment.base:
        return
    base = _site(folder(environment.layers()[-2]))
    line = f"import site; site.addsitedir({str(base)!r})\n"
    (_site(at) / "entresol_base.pth").write_text(line, encoding="utf-8")


def _borrow(environment: Environment, at: Path) -> None:
    """Put the base's files in place of the environment's own, as kernels for this processor in
    place of those for a GPU, which cannot be loaded here."""
    for pattern in environment.borrows:
        own, base = _site(at), _site(folder(environment.layers()[-2]))
        for path in own.glob(pattern):
            path.unlink()
        for path in base.glob(pattern):
            to = own / path.relative_to(base)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)


def _site(at: Path) -> Path:
    return at / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _install(environment: Environment, at: Path) -> None:
    """The pins, as they are: nothing is resolved, so nothing that was left out comes back."""
    pins = [word for pin in environment.pins for word in pin.split()]
    tool = _uv()
    if tool is None:
        _pip(at, ["--no-deps", *pins])
        return
    arguments = ["--python", str(at / "bin" / "python"), "--no-deps", "--no-config"]
    arguments += ["--system-certs", *_index_arguments()]
    try:
        _run([str(tool), "pip", "install", "-q", *arguments, *pins], INSTALL_SECONDS_MAX)
    except NotHereError as error:
        say(f"{environment.name}: uv could not ({error}); trying pip")
        _pip(at, ["--no-deps", *pins])


def _pip(at: Path, arguments: list[str]) -> None:
    """Install with the pip of the interpreter that runs us, configured as on this machine."""
    target = ["--python", str(at / "bin" / "python"), "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *target, "install", "-q", "--no-compile", *arguments]
    _run(command, INSTALL_SECONDS_MAX)


def _uv() -> Path | None:
    """uv in a small environment of its own, or None: it installs in parallel, pip does not."""
    if os.environ.get(INSTALLER_ENV) == "pip":
        return None
    at = cache_root() / UV.replace("==", "-")
    with _locked(at.name):
        if not (at / READY).exists():
            shutil.rmtree(at, ignore_errors=True)
            try:
                venv.create(at, with_pip=False, symlinks=True)
                _pip(at, [UV])
                (at / READY).touch()
            except NotHereError as error:
                shutil.rmtree(at, ignore_errors=True)
                say(f"no {UV} here ({error}); pip takes longer")
                return None
        os.utime(at / READY)
    return at / "bin" / "uv"


def _index_arguments() -> list[str]:
    """pip's index, if one is configured, for uv, which does not read pip's configuration."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        if name.endswith(".index-url"):
            return ["--index-url", value.strip().strip("'\"")]
    return []


def _probe(environment: Environment, at: Path) -> None:
    try:
        _run([str(at / "bin" / "python"), "-c", environment.probe], PROBE_SECONDS_MAX)
    except NotHereError as error:
        hint = ""
        if environment.first:
            hint = f"; set {TORCH_ARGS_ENV}='--index-url https://download.pytorch.org/whl/cpu'?"
        raise NotHereError(f"built, but `{environment.probe}` fails: {error}{hint}") from None


def _run(command: list[str], seconds_max: float) -> None:
    """Raises: NotHereError with the last words of a command that failed or did not end."""
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # the probe compiles what suites import
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds_max, env=env,
            stdin=subprocess.DEVNULL, cwd=cache_root(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotHereError(f"{command[0]} did not end within {seconds_max:.0f} s") from None
    if done.returncode:
        raise NotHereError(last_words(done.stderr or done.stdout, done.returncode))


def last_words(text: str, rc: int) -> str:
    """Why a command failed, in one line: its last errors, without warnings."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and "warning" not in line.lower()]
    told = " / ".join((errors or lines)[-2:])[-REASON_CHARS_MAX:]
    return told or f"exit code {rc}, nothing said"


def _mib(at: Path) -> int:
    total = 0
    for parent, _, names in os.walk(at):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total >> 20


def _forget_unused() -> None:
    """Environments of keys that nobody asked for lately: older pins, mostly."""
    oldest = time.time() - UNUSED_DAYS * 86400
    for ready in cache_root().glob(f"*/{READY}"):
        with contextlib.suppress(FileNotFoundError):
            if ready.stat().st_mtime < oldest:
                ready.unlink()
                shutil.rmtree(ready.parent, ignore_errors=True)
