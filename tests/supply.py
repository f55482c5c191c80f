"""Builds of this tree, twice, as two people would make them; and what must be inside.

Both copies hold the tracked files only. They lie in folders of different names and depth, their
files have other times and modes, and the builds run under another umask, time zone, locale and hash
seed: whatever of that gets into the result makes the two differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD_DEADLINE_S = 600
EPOCH = "1750000000"
SBOM = "sboms/entresol.cdx.json"


@dataclass(frozen=True, slots=True)
class Person:
    """Where and how somebody builds."""

    folder: str
    umask: int
    file_time_s: int
    environment: dict[str, str]


PEOPLE = (
    Person("a", 0o022, 1_600_000_000, {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1"}),
    Person(
        "deep/er/another name", 0o077, 1_700_000_123,
        {"TZ": "Pacific/Auckland", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "77"},
    ),
)  # fmt: skip


def tracked() -> list[str]:
    """Paths of the files that git knows, or of all files of an unpacked sdist."""
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode == 0 and done.stdout:
        names = [name for name in done.stdout.split("\0") if name]
        return [name for name in names if (ROOT / name).is_file()]
    parts = ("daemon", "client", "proto", "tests", "bench", "arm64", "systemd")
    found = [path for part in parts for path in (ROOT / part).rglob("*") if path.is_file()]
    found += [path for path in ROOT.iterdir() if path.is_file()]
    return [path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts]


def snapshot(base: Path) -> Path:
    """A copy of the tracked files as they are now, for all builds to start from."""
    tree = base / "snapshot"
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    return tree


def build(
    person: Person, source: Path, base: Path, epoch: str = EPOCH, *, only: str = ""
) -> dict[str, bytes]:
    """Wheel and sdist by name, or one of them (`only`: "wheel" or "sdist").

    Raises: RuntimeError with the builder's last words.
    """
    tree, out = base / person.folder / "tree", base / person.folder / "out"
    shutil.copytree(source, tree)
    for path in tree.rglob("*"):
        allowed = 0o777 if path.is_dir() or os.access(path, os.X_OK) else 0o666
        path.chmod(allowed & ~person.umask)
        os.utime(path, (person.file_time_s, person.file_time_s))
    script = (
        f"import os, sys; os.umask({person.umask}); sys.argv[0] = 'hatchling'; "
        "from hatchling.cli import hatchling; sys.exit(hatchling())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "build", "-d", str(out), *(["-t", only] if only else [])],
        cwd=tree, capture_output=True, text=True, timeout=BUILD_DEADLINE_S, check=False,
        env={**os.environ, **person.environment, "SOURCE_DATE_EPOCH": epoch},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the build failed: {(done.stderr or done.stdout)[-2000:]}")
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def differences(first: dict[str, bytes], second: dict[str, bytes]) -> list[str]:
    """What is not the same, in words; empty when every byte is."""
    wrong = [f"only one build made {name}" for name in first.keys() ^ second.keys()]
    for name in sorted(first.keys() & second.keys()):
        if first[name] != second[name]:
            digests = [hashlib.sha256(one[name]).hexdigest()[:16] for one in (first, second)]
            wrong.append(f"{name} differs: {digests[0]}, {digests[1]}")
    return wrong


def sbom_of(wheel: Path) -> dict[str, Any]:
    """The bill of materials in a wheel. Raises: KeyError, ValueError."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(f".dist-info/{SBOM}")]
        found: dict[str, Any] = json.loads(archive.read(name))
    return found


def sbom_problems(sbom: dict[str, Any], requires: list[str]) -> list[str]:
    """What a bill of materials leaves out of the wheel's own requirements, or has wrong."""
    wrong = []
    if (sbom.get("bomFormat"), sbom.get("specVersion")) != ("CycloneDX", "1.6"):
        wrong.append("not CycloneDX 1.6")
    if not str(sbom.get("serialNumber")).startswith("urn:uuid:"):
        wrong.append("no serial number")
    component = sbom["metadata"]["component"]
    if component["name"] != "entresol" or not component["licenses"]:
        wrong.append("it is about something else")
    named = {one["name"] for one in sbom["components"]}
    wrong += [f"{name} is missing" for name in requires if name not in named | {"entresol"}]
    files = [one for one in sbom["components"] if one["type"] != "library"]
    wrong += [f"{one['name']} has no hash" for one in files if not one.get("hashes")]
    if not files:
        wrong.append("no file that is not Python")
    return wrong


def requirements_of(wheel: Path) -> list[str]:
    """Names of all packages in Requires-Dist, in the form that the SBOM uses."""
    import re

    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
    names = (re.split(r"[\s<>=!~;\[(]", one, maxsplit=1)[0] for one in found)
    return sorted({re.sub(r"[-_.]+", "-", one).lower() for one in names})


def lock_problems(lock: Path, names: set[str]) -> list[str]:
    """What a lock file leaves open: packages that are missing, not pinned, or without a digest."""
    import re

    text = re.sub(r"#.*", "", lock.read_text()).replace("\\\n", " ")
    wrong, pinned = [], set()
    for line in filter(None, (line.strip() for line in text.splitlines())):
        name = re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0].lower()
        pinned.add(name)
        if not re.match(r"[a-z0-9-]+==[^\s;]+", line):
            wrong.append(f"{name} is not pinned")
        if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", line):
            wrong.append(f"{name} has no digest")
    return wrong + [f"{name} is missing" for name in sorted(names - pinned)]
