"""The packages of a life: built from the checkout, and the version after it.

The next version is the same package with another number in it and one file more: what an upgrade
replaces, without a second build. Other people's wheels are kept between runs.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.cache import cache_root
from tests.rdma.spec import HarnessError

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "3.11"  # Debian 12's
SITE = f"usr/lib/entresol/lib/python{PYTHON}/site-packages"
BUILD_TIMEOUT_S = 900
NEXT = "0.9.9"


@dataclass(frozen=True, slots=True)
class Packages:
    """Two .deb files and their versions, as `entresold --version` says them."""

    first: Path
    first_version: str
    next: Path
    next_version: str = NEXT


def build(arch: str, work: Path) -> Packages:
    """Both packages in `work`, built when they are not there.

    Raises: HarnessError with the last words of the step that failed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = "entresol_{}+py" + f"{PYTHON}_{arch}.deb"
    first, later = (work / name.format(version) for version in (project["version"], NEXT))
    if first.exists() and later.exists():
        return Packages(first, project["version"], later)
    needs = [*project["dependencies"], *project["optional-dependencies"]["daemon"]]
    digest = hashlib.sha256("\n".join((arch, PYTHON, *needs)).encode()).hexdigest()[:12]
    kept = cache_root() / f"wheels-{arch}-{digest}"
    for older in cache_root().glob(f"wheels-{arch}-*"):
        if older != kept:
            shutil.rmtree(older)
    _step(
        sys.executable, str(ROOT / "arm64/build.py"), "--arch", arch, "--python", PYTHON,
        "--compression", "none", "--dependencies", str(kept), "--out", str(work),
    )  # fmt: skip
    _next(first, later, work, project["version"])
    return Packages(first, project["version"], later)


def _next(first: Path, later: Path, work: Path, version: str) -> None:
    """`first` as a later version."""
    tree = work / "next"
    _step("dpkg-deb", "-R", str(first), str(tree))
    control = tree / "DEBIAN/control"
    control.write_text(control.read_text().replace(f"Version: {version}+", f"Version: {NEXT}+"))
    module = tree / SITE / "entresol_proto/__init__.py"
    text = module.read_text()
    if f'"{version}"' not in text:
        raise HarnessError(f"{module.name} does not say version {version}")
    module.write_text(text.replace(f'"{version}"', f'"{NEXT}"'))
    for stale in (module.parent / "__pycache__").glob("__init__.*.pyc"):
        stale.unlink()  # unchecked byte code: it would be believed
    (tree / "usr/share/entresol/of-the-next-version").write_text("")
    _step("dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(later))
    shutil.rmtree(tree)


def _step(*command: str) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=BUILD_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise HarnessError(f"{' '.join(command[:3])} failed: {(done.stderr or done.stdout)[-600:]}")
