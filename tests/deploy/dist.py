"""Judge what `make dist` left behind: `python -m tests.deploy.dist [DIR]`.

Two wheels and a Debian package for each of amd64 and arm64, of this version, each package with its
units, its one configuration file under dpkg's care, and nothing compiled for another machine.
Exit status: 0, or 1 with a line for each thing that is wrong.
"""

from __future__ import annotations

import argparse
import collections
import io
import struct
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINES = {"amd64": 62, "arm64": 183}  # e_machine of ELF: EM_X86_64, EM_AARCH64
WHEEL = "-py3-none-linux_x86_64.whl"  # the other is arm64's, or pure Python without a compiler
UNITS = tuple(
    f"usr/lib/systemd/system/{name}"
    for name in ("entresold.service", "entresold.socket", "entresold@.service", "entresold@.socket")
)
FILES = (
    "etc/entresol/entresold.toml", "usr/bin/entresold", "usr/bin/entresol",
    "usr/lib/sysusers.d/entresol.conf", "usr/lib/tmpfiles.d/entresol.conf", *UNITS,
)  # fmt: skip
COMPILED_MIN = 20  # uvloop, grpcio, pyarrow and others have more together


def judge(folder: Path) -> list[str]:
    """What is wrong with the packages in a folder, a line each; [] when nothing is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    wheels = sorted(path.name for path in folder.glob(f"entresol-{version}-*.whl"))
    wrong = []
    if len(wheels) != 2 or not any(name.endswith(WHEEL) for name in wheels):
        wrong.append(f"wheels: {wheels or 'none'}")
    for arch in MACHINES:
        found = sorted(folder.glob(f"entresol_{version}+py*_{arch}.deb"))
        if len(found) != 1:
            wrong.append(f"{arch}: {len(found)} packages of version {version}")
            continue
        wrong += [f"{found[0].name}: {problem}" for problem in judge_package(found[0], arch)]
    return wrong


def judge_package(package: Path, arch: str) -> list[str]:
    """What is wrong with one package."""
    wrong = []
    said = _dpkg("--field", str(package), "Architecture").decode().strip()
    if said != arch:
        wrong.append(f"says that it is for {said}")
    if _conffiles(package) != [b"/etc/entresol/entresold.toml"]:
        wrong.append("dpkg would not keep the operator's configuration")
    names, machines = contents(package)
    wrong += [f"{name} is missing" for name in FILES if name not in names]
    strange = {number: count for number, count in machines.items() if number != MACHINES[arch]}
    if strange:
        wrong.append(f"compiled for other machines (ELF machine: files): {strange}")
    if sum(machines.values()) < COMPILED_MIN:
        wrong.append(f"only {sum(machines.values())} compiled files")
    return wrong


def contents(package: Path) -> tuple[set[str], collections.Counter[int]]:
    """Names of all files, and how many ELF files there are for each machine."""
    names: set[str] = set()
    machines: collections.Counter[int] = collections.Counter()
    unpacking = subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE
    )
    with unpacking, tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
        for member in archive:
            names.add(member.name.removeprefix("./"))
            if not member.isfile():
                continue
            file = archive.extractfile(member)
            head = file.read(20) if file is not None else b""
            if head[:4] == b"\x7fELF":
                machines[struct.unpack_from("<H", head, 18)[0]] += 1
    return names, machines


def _conffiles(package: Path) -> list[bytes]:
    """What dpkg would keep; [] also when the package names nothing."""
    with tarfile.open(fileobj=io.BytesIO(_dpkg("--ctrl-tarfile", str(package)))) as archive:
        try:
            file = archive.extractfile("./conffiles")
        except KeyError:
            return []
        return file.read().split() if file is not None else []


def _dpkg(*words: str) -> bytes:
    return subprocess.run(["dpkg-deb", *words], capture_output=True, check=True).stdout


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Judge what `make dist` left behind.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", metavar="DIR")
    folder = parser.parse_args(argv).folder
    wrong = judge(folder)
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print(f"{folder}: two wheels, packages for {' and '.join(MACHINES)}, all as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
