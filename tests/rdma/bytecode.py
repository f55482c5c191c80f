"""Compiles Python for the guest on the host: in emulation the same takes tens of seconds per boot.

Byte code depends on the minor version of Python only, not on the architecture.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

from tests.rdma.progress import say
from tests.rdma.spec import USERLAND_PYTHON

COMPILE_TIMEOUT_S = 600


@functools.cache
def guest_python() -> str | None:
    """An interpreter on this host of the guest's version, if there is one."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == USERLAND_PYTHON:
        return sys.executable
    found = shutil.which(f"python{USERLAND_PYTHON}")
    if found is None:
        say(f"no Python {USERLAND_PYTHON} on this host: guests compile for themselves, slowly")
    return found


def compile_tree(tree: Path, inside: str, *, checked: bool = False) -> None:
    """Compile every module under `tree`, which the guest will see as `inside`.

    `checked` lets the guest notice a source that has changed since. Files that are no valid Python
    (templates, test data) are left as they are.
    """
    python = guest_python()
    if python is None:
        return
    mode = "checked-hash" if checked else "unchecked-hash"
    subprocess.run(
        [python, "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", mode,
         "-s", str(tree), "-p", inside, str(tree)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        timeout=COMPILE_TIMEOUT_S, check=False,
    )  # fmt: skip
