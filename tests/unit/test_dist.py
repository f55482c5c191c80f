"""What `tests/deploy/dist.py` says of packages that are not as they should be."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.deploy import dist

CONTROL = (
    "Package: entresol\nVersion: 1\nArchitecture: {}\nMaintainer: x <x@localhost>\nDescription: x\n"
)


def packed(folder: Path, *, says: str, machine: int, without: str = "", kept: bool = True) -> Path:
    """A small package of all that is looked for; its compiled files are headers alone."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("not run here: no dpkg-deb")
    tree = folder / "tree"
    elf = b"\x7fELF" + bytes(14) + struct.pack("<H", machine)
    files = {name: b"x\n" for name in dist.FILES if name != without}
    files |= {f"usr/lib/entresol/{n}.so": elf for n in range(dist.COMPILED_MIN)}
    files["DEBIAN/control"] = CONTROL.format(says).encode()
    if kept:
        files["DEBIAN/conffiles"] = b"/etc/entresol/entresold.toml\n"
    for name, content in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    package = folder / "one.deb"
    subprocess.run(["dpkg-deb", "-Znone", "--build", str(tree), str(package)], check=True)
    return package


def test_a_sound_package_is_sound(tmp_path: Path) -> None:
    package = packed(tmp_path, says="arm64", machine=dist.MACHINES["arm64"])
    assert dist.judge_package(package, "arm64") == []


def test_code_for_another_machine_is_found(tmp_path: Path) -> None:
    package = packed(tmp_path, says="arm64", machine=dist.MACHINES["amd64"])
    (problem,) = dist.judge_package(package, "arm64")
    assert "other machines" in problem


def test_a_missing_unit_another_name_and_a_lost_conffile_are_found(tmp_path: Path) -> None:
    unit = dist.UNITS[1]
    package = packed(
        tmp_path, says="amd64", machine=dist.MACHINES["arm64"], without=unit, kept=False
    )
    text = "\n".join(dist.judge_package(package, "arm64"))
    assert f"{unit} is missing" in text
    assert "it is for amd64" in text
    assert "configuration" in text


def test_an_empty_folder_has_all_of_it_missing(tmp_path: Path) -> None:
    assert len(dist.judge(tmp_path)) == 3
