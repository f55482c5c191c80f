"""Build hook: puts the bill of materials into the wheel, and compiles the native kernel into the
package where a C compiler is at hand.

Without one the package is built all the same, in pure Python, and says so. `CC` names another
compiler, `ENTRESOL_NATIVE=0` leaves the kernel out. For another machine than this one, `CC` names a
cross compiler and `ENTRESOL_TARGET_PLATFORM` the wheel's platform, such as `linux_aarch64`.

Invariant: the same tree, compiler and SOURCE_DATE_EPOCH give the same bytes, wherever the tree is.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall",
         "-Wextra")  # fmt: skip
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
            [*command, *FLAGS, "-o", str(part.resolve()), source.name],
            cwd=source.parent, check=True, capture_output=True, text=True, timeout=120,
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
        if version != "editable":
            self._add_sbom(build_data)
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

    def _add_sbom(self, build_data: dict[str, Any]) -> None:
        """Into `.dist-info/sboms`, where PEP 770 says that tools look."""
        made = runpy.run_path(str(Path(self.root, "proto", "build_sbom.py")))
        self._folder = tempfile.TemporaryDirectory(prefix="entresol-sbom-")  # as long as the hook
        path = Path(self._folder.name, made["NAME"])
        path.write_bytes(made["sbom"](Path(self.root)))
        build_data["sbom_files"].append(str(path))
