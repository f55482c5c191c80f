"""Build hook: compiles the native kernel into the package where a C compiler is at hand.

Without one the package is built all the same, in pure Python, and says so. `CC` names another
compiler, `ENTRESOL_NATIVE=0` leaves the kernel out. For another machine than this one, `CC` names a
cross compiler and `ENTRESOL_TARGET_PLATFORM` the wheel's platform, such as `linux_aarch64`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
FOLDER = "proto/entresol_proto/native"


def compiler() -> list[str] | None:
    """The C compiler to use, or None."""
    if "CC" in os.environ:
        return shlex.split(os.environ["CC"])
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return None if found is None else [found]


def compile_kernel(source: Path, library: Path) -> str | None:
    """Compile; returns why there is no library, or None. A library that exists is replaced."""
    if os.environ.get("ENTRESOL_NATIVE") == "0":
        return "ENTRESOL_NATIVE=0"
    command = compiler()
    if os.environ.get("ENTRESOL_TARGET_PLATFORM") and "CC" not in os.environ:
        return "ENTRESOL_TARGET_PLATFORM is set, but CC does not name its compiler"
    if command is None:
        return "no C compiler found (Debian: apt-get install gcc libc6-dev)"
    part = library.with_suffix(".part")
    try:
        subprocess.run(
            [*command, *FLAGS, "-o", str(part), str(source)],
            check=True, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        part.unlink(missing_ok=True)
        return f"{command[0]} failed: {getattr(error, 'stderr', None) or error}"
    part.replace(library)
    return None


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Named in pyproject.toml; runs for wheels and editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the library beside its source and into the wheel."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root, FOLDER)
        library = folder / "_kernel.so"
        problem = compile_kernel(folder / "kernel.c", library)
        if problem is not None:
            library.unlink(missing_ok=True)
            self.app.display_warning(f"entresol is built without its native kernel: {problem}")
            return
        platform = os.environ.get("ENTRESOL_TARGET_PLATFORM") or sysconfig.get_platform()
        platform = platform.replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"{FOLDER}/_kernel.so")
