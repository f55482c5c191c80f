"""Compiles Python for the guest on the host: in emulation the same takes tens of seconds per boot.

Byte code depends on the minor version of Python only, not on the architecture. A host without that
version runs the x86 guest's own interpreter, straight from its unpacked packages.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tests.rdma.cache import cache_root, find
from tests.rdma.spec import ARCHES, USERLAND_PYTHON, root_request

COMPILE_TIMEOUT_S = 600
_LOADER = "usr/lib64/ld-linux-x86-64.so.2"
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
# What the interpreter itself needs of the packages; `keep_interpreter` copies it.
_PARTS = (_LIBRARIES, "usr/lib64", f"usr/lib/python{USERLAND_PYTHON}")
_BINARY = f"usr/bin/python{USERLAND_PYTHON}"
_KEPT = "interpreter"


@functools.cache
def host_python() -> str | None:
    """An interpreter on this host of the guest's version, if there is one."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == USERLAND_PYTHON:
        return sys.executable
    return shutil.which(f"python{USERLAND_PYTHON}")


def _unpacked_python(tree: Path) -> tuple[list[str], dict[str, str]] | None:
    """Command and environment of the interpreter in an unpacked x86 tree, if it can run here."""
    if platform.machine() != ARCHES["x86"].machine:
        return None
    if not ((tree / _LOADER).exists() and (tree / _BINARY).is_file()):
        return None
    loader = [str(tree / _LOADER), "--library-path", str(tree / _LIBRARIES), str(tree / _BINARY)]
    return loader, {"PYTHONHOME": str(tree / "usr")}


def keep_interpreter(tree: Path, out: Path) -> None:
    """Keep the x86 interpreter beside the image built from `tree`, where the host has none."""
    if host_python() is not None or _unpacked_python(tree) is None:
        return
    for part in _PARTS:
        shutil.copytree(tree / part, out / _KEPT / part, symlinks=True)
    (out / _KEPT / _BINARY).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(tree / _BINARY, out / _KEPT / _BINARY)


def needs_x86() -> bool:
    """Whether guests of another architecture need the x86 user space built first, to compile."""
    return host_python() is None


def _interpreter(tree: Path) -> tuple[list[str], dict[str, str]] | None:
    python = host_python()
    if python is not None:
        return [python], {}
    image = find(cache_root(), root_request(ARCHES["x86"]))
    return _unpacked_python(tree) or (_unpacked_python(image / _KEPT) if image else None)


def compile_tree(tree: Path, part: str, inside: str, *, checked: bool = False) -> None:
    """Compile every module under `part` of `tree`, which the guest will see as `inside`.

    `checked` lets the guest notice a source that has changed since. Files that are no valid Python
    (templates, test data) are left as they are, and so is everything where nothing can compile: a
    guest then compiles for itself, which is slow but the same.
    """
    found = _interpreter(tree)
    if found is None:
        return
    command, env = found
    mode = "checked-hash" if checked else "unchecked-hash"
    subprocess.run(
        [*command, "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", mode,
         "-s", str(tree / part), "-p", inside, str(tree / part)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | env, timeout=COMPILE_TIMEOUT_S, check=False,
    )  # fmt: skip
