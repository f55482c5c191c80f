#!/usr/bin/env python3
"""Builds Entresol for ARM64 (or amd64) machines on whichever machine this is: a wheel and a .deb.

Nothing here needs root, and the source tree is left as it is: a kernel for another processor must
never replace the one that this machine's checkout runs with, so everything is built in a copy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "daemon", "client", "proto")
NOT_SOURCES = ("__pycache__", "_kernel.so", "_kernel.part", "*.egg-info")
# What the package brings: the daemon, its commands, traces, and `entresol relay`.
EXTRAS = ("daemon", "otel", "relay")
PREFIX = "usr/lib/entresol"  # a virtual environment of the target's own Python
COMMANDS = {
    "entresold": "entresol_daemon.starting",
    "entresol": "entresol_client.cli.starting",
}
PYTHONS = ("3.11", "3.12", "3.13")
# No run needs these parts of other people's wheels, and they are a fifth of the bytes.
SITE_WITHOUT = (
    "pyarrow/include", "pyarrow/tests", "pyarrow/src", "numpy/tests", "numpy/*/tests", "bin",
)  # fmt: skip
LOCK = ROOT / ".ci/requirements.lock"  # versions and digests of other people's wheels
UNITS = "usr/lib/systemd/system"
# File or folder of the checkout -> where the package puts it. A folder's files go flat into it.
FILES = {
    "systemd/entresold.service": UNITS,
    "systemd/entresold.socket": UNITS,
    "systemd/entresold@.service": UNITS,
    "systemd/entresold@.socket": UNITS,
    "systemd/entresold-keys.service": UNITS,
    "systemd/entresold-keys@.service": UNITS,
    "systemd/entresol.sysusers": "usr/lib/sysusers.d/entresol.conf",
    "systemd/entresol.tmpfiles": "usr/lib/tmpfiles.d/entresol.conf",
    "systemd/entresold.toml": "etc/entresol",
    "systemd/hugepages.conf": "usr/share/entresol",
    "systemd/prometheus": "usr/share/entresol/prometheus",
    "systemd/grafana": "usr/share/entresol/grafana",
    "LICENSE": "usr/share/doc/entresol/copyright",
    "README.md": "usr/share/doc/entresol",
    "systemd/README.md": "usr/share/doc/entresol/systemd.md",
    "arm64/README.md": "usr/share/doc/entresol/arm64.md",
    "daemon/CONFIG.md": "usr/share/doc/entresol",
    "daemon/METRICS.md": "usr/share/doc/entresol",
    "daemon/EVENTS.md": "usr/share/doc/entresol",
    "daemon/FAULT_MODEL.md": "usr/share/doc/entresol",
    "daemon/TRACES.md": "usr/share/doc/entresol",
}
CONFFILES = ("/etc/entresol/entresold.toml",)  # dpkg keeps what an operator changed in these
SCRIPTS = ("preinst", "postinst", "prerm", "postrm")
# Which formats the daemon in the package reads: for preinst, which refuses to go back across one.
READS = {
    "@DATA_FILE@": ("daemon/entresol_daemon/flash/superblock.py", "FORMAT_VERSION"),
    "@KEYRING@": ("daemon/entresol_daemon/keys/state.py", "KEYRING_VERSION"),
    "@NAMESPACES@": ("daemon/entresol_daemon/keys/namespaces.py", "NAMESPACES_VERSION"),
}
ELF_MACHINE_AT = 18  # ELF specification, e_machine


class BuildError(Exception):
    """Said to the user, without a traceback."""


@dataclass(frozen=True, slots=True)
class Target:
    """A processor, in the words of everyone who names it."""

    debian: str
    machine: str  # uname -m, wheel tags
    elf_machine: int  # <elf.h>, EM_*
    compiler: str  # Debian's cross compiler

    def wheel_platforms(self) -> list[str]:
        """pip's names for it, our own wheel's first."""
        return [
            f"linux_{self.machine}", f"manylinux2014_{self.machine}",
            f"manylinux_2_28_{self.machine}",
        ]  # fmt: skip


TARGETS = {
    "arm64": Target("arm64", "aarch64", 183, "aarch64-linux-gnu-gcc"),
    "amd64": Target("amd64", "x86_64", 62, "x86_64-linux-gnu-gcc"),
}


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"arm64/build.py: {text}", file=sys.stderr, flush=True)


def run(command: Sequence[str], env: dict[str, str] | None = None) -> None:
    """Run one step. Raises: BuildError with the end of what it said."""
    try:
        subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BuildError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip()[-800:]
        if "No module named pip" in said:
            said = "this Python has no pip: use the one of `make test` (.venv/bin/python)"
        raise BuildError(f"{' '.join(command[:4])} ...: {said}") from error


def compiler_for(target: Target) -> str | None:
    """The C compiler for `target`: $CC, this machine's own, a cross compiler, or None."""
    if "CC" in os.environ:
        return os.environ["CC"]
    if platform.machine() == target.machine:
        return shutil.which("cc") or shutil.which("gcc")
    return shutil.which(target.compiler)


def without_kernel(target: Target) -> str:
    """What it means that there is no compiler for `target`, and what helps."""
    package = "gcc-" + target.compiler.removesuffix("-gcc").replace("_", "-")
    return (
        f"no {target.compiler}: for {target.debian} it is pure Python, slower where it copies, "
        f"receives and compresses (Debian: apt-get install {package}, and once more)"
    )


def elf_machine(path: Path) -> int:
    """Which processor a shared library is for."""
    head = path.read_bytes()[:20]
    if head[:4] != b"\x7fELF":
        raise BuildError(f"{path.name} is no ELF file")
    return int(struct.unpack_from("<H", head, ELF_MACHINE_AT)[0])


def build_wheel(target: Target, scratch: Path, out: Path) -> Path:
    """Our wheel for `target`, in `out`: with the native kernel, or pure without a compiler."""
    copy = scratch / "source"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(*NOT_SOURCES))
        else:
            shutil.copy2(ROOT / name, copy / name)
    env = dict(os.environ)
    compiler = compiler_for(target)
    if compiler is None:
        say(without_kernel(target))
        env["ENTRESOL_NATIVE"] = "0"
    else:
        env |= {"CC": compiler, "ENTRESOL_TARGET_PLATFORM": f"linux_{target.machine}"}
    made = scratch / "wheel"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "-q", "--no-deps", "--wheel-dir", str(made), str(copy)], env)
    (wheel,) = made.glob("*.whl")
    wanted = "py3-none-any" if compiler is None else f"py3-none-linux_{target.machine}"
    if wanted not in wheel.name:
        raise BuildError(f"the wheel became {wheel.name}, not {wanted}: does {compiler} work?")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(wheel, out / wheel.name))


def dependencies() -> list[str]:
    """What the package's parts of ours need, as pyproject.toml says it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for name in EXTRAS for one in extras[name])]
    assert set(extras["cli"]) <= set(extras["daemon"]), "relay asks for the extra cli by its name"
    return [one for one in dict.fromkeys(wanted) if one != "entresol[cli]"]


def locked(python: str) -> dict[str, list[str]]:
    """Lines of the lock by package, as they are for this Python: the version, then its digests."""
    try:
        from packaging.markers import Marker
    except ImportError as error:
        raise BuildError("no packaging here: use the Python of `make test`") from error
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if line.startswith((" ", "\t")):
            lines.append(line.strip().removesuffix("\\").strip())
            continue
        pinned, _, marker = line.removesuffix("\\").partition(";")
        lines = [pinned.strip()]
        if not marker.strip() or Marker(marker).evaluate(environment):
            found[normal(pinned.partition("==")[0])] = lines
    return found


def normal(name: str) -> str:
    """A package's name as indexes compare them (PyPA specifications, name normalization)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def fetch_dependencies(target: Target, python: str, site: Path, scratch: Path) -> None:
    """What ours needs, in the versions of the lock and with no file that it has no digest of."""
    pins = locked(python)
    constraints = scratch / "constraints.txt"
    constraints.write_text("".join(f"{lines[0]}\n" for lines in pins.values()))
    report = scratch / "report.json"
    run(
        [
            *_pip_install(target, python), "--dry-run", "--target", str(scratch / "nowhere"),
            "--report", str(report), "--constraint", str(constraints), *dependencies(),
        ]
    )  # fmt: skip
    rows = []
    for one in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name = normal(one["metadata"]["name"])
        if name not in pins:
            raise BuildError(f"{name} is not in {LOCK.name}: make it anew, its first lines say how")
        rows.append(" \\\n    ".join(pins[name]))
    requirements = scratch / "requirements.txt"
    requirements.write_text("\n".join([*rows, ""]))
    _install(target, python, site, "--no-deps", "--require-hashes", "-r", str(requirements))


def install_site(
    target: Target, python: str, wheel: Path, site: Path, kept: Path | None = None
) -> None:
    """Our wheel and its dependencies' wheels for `target`, unpacked into `site`.

    With `kept`, the dependencies are those of that folder; the first build fills it.
    """
    with tempfile.TemporaryDirectory(prefix="entresol-build-") as name:
        if kept is None:
            fetch_dependencies(target, python, site, Path(name))
        else:
            if not kept.exists():
                part = kept.with_name(kept.name + ".part")
                shutil.rmtree(part, ignore_errors=True)
                fetch_dependencies(target, python, part, Path(name))
                part.rename(kept)
            shutil.copytree(kept, site, symlinks=True, dirs_exist_ok=True)
    ours = site.with_name("ours")
    _install(target, python, ours, "--no-deps", str(wheel))
    shutil.copytree(ours, site, dirs_exist_ok=True)
    shutil.rmtree(ours)


def _install(target: Target, python: str, site: Path, *what: str) -> None:
    """Wheels for `target`, without what no run needs, with byte code where that can be had."""
    run([*_pip_install(target, python), "--target", str(site), *what])
    for pattern in SITE_WITHOUT:
        for path in site.glob(pattern):
            shutil.rmtree(path)
    for path in site.rglob("*.so*"):
        if path.is_file() and elf_machine(path) != target.elf_machine:
            raise BuildError(f"{path.relative_to(site)} is not for {target.debian}")
    interpreter = shutil.which(f"python{python}")
    if interpreter is None:
        say(f"no python{python} here: the package comes without byte code and starts slower")
        return
    # By hash, unchecked: what a package manager installs does not change behind its back.
    run(
        [
            interpreter, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash",
            "-s", str(site), "-p", f"/{PREFIX}/lib/python{python}/site-packages", str(site),
        ]
    )  # fmt: skip


def _pip_install(target: Target, python: str) -> list[str]:
    """Only wheels, and those for `target`."""
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile",
        "--no-warn-conflicts", "--only-binary=:all:", "--implementation", "cp", "--python-version",
        python,
    ]  # fmt: skip
    for name in target.wheel_platforms():
        command += ["--platform", name]
    return command


def environment(python: str, tree: Path) -> Path:
    """Lay out a virtual environment of the target's /usr/bin/python3.x; returns its site folder.

    It sees the distribution's packages too, for pyverbs, which no wheel has.
    """
    prefix = tree / PREFIX
    site = prefix / f"lib/python{python}/site-packages"
    site.mkdir(parents=True)
    (prefix / "bin").mkdir()
    for name in ("python3", f"python{python}"):
        (prefix / "bin" / name).symlink_to(f"/usr/bin/python{python}")
    (prefix / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = true\nversion = {python}\n"
    )
    (tree / "usr/bin").mkdir(parents=True)
    for command, module in COMMANDS.items():
        script = prefix / "bin" / command
        # Isolated: neither the caller's PYTHONPATH nor folder decides which code a daemon runs.
        script.write_text(
            f"#!/{PREFIX}/bin/python3 -IB\n"
            f"import sys\n\nfrom {module} import main\n\nsys.exit(main())\n"
        )
        script.chmod(0o755)
        (tree / "usr/bin" / command).symlink_to(f"../lib/entresol/bin/{command}")
    return site


def control(target: Target, python: str, version: str, size_kib: int) -> str:
    """The package's description for dpkg."""
    return f"""\
Package: entresol
Version: {version}
Architecture: {target.debian}
Maintainer: Entresol contributors <entresol@localhost>
Installed-Size: {size_kib}
Depends: python{python}, libc6 (>= 2.28), libgcc-s1, libstdc++6
Recommends: python3-pyverbs, ibverbs-providers, systemd
Section: net
Priority: optional
Description: pod-shared, sealed KV block store for LLM inference
 The daemon entresold keeps KV-cache blocks of a pod on flash, encrypted per
 tenant, and serves them to GPU hosts by one-sided reads. The command entresol
 puts, gets and explains blocks.
 .
 Python packages that it needs come with it, below /{PREFIX}, for Python {python}.
"""


def copy_files(tree: Path) -> None:
    """Units, configuration, documents, rules: what FILES names."""
    for name, place in FILES.items():
        source, target = ROOT / name, tree / place
        if source.is_dir():
            for path in sorted(source.iterdir()):
                _copy(path, target / path.name)
        else:
            _copy(source, target if target.suffix or target.name == "copyright" else
                  target / source.name)  # fmt: skip


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def maintainer_scripts(folder: Path) -> None:
    """dpkg's four scripts and the list of conffiles, in DEBIAN."""
    for name in SCRIPTS:
        text = (ROOT / "systemd/debian" / name).read_text(encoding="utf-8")
        for mark, (module, constant) in READS.items():
            found = re.search(
                rf"^{constant} = (\d+)$", (ROOT / module).read_text(encoding="utf-8"), re.MULTILINE
            )
            if found is None:
                raise BuildError(f"{module} does not say its {constant}")
            text = text.replace(mark, found[1])
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "conffiles").write_text("".join(f"{name}\n" for name in CONFFILES))


def build_deb(target: Target, wheel: Path, scratch: Path, options: argparse.Namespace) -> Path:
    """The .deb, in the folder for what was made."""
    tree, python = scratch / "deb", options.python
    site = environment(python, tree)
    say(f"fetching wheels for {target.machine}, Python {python}")
    install_site(target, python, wheel, site, options.dependencies)
    copy_files(tree)
    size = sum(path.lstat().st_size for path in tree.rglob("*") if not path.is_dir())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = f"{project['version']}+py{python}"  # of different Pythons, the newer is the upgrade
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(control(target, python, version, -(-size // 1024)))
    maintainer_scripts(tree / "DEBIAN")
    for path in (tree, *tree.rglob("*")):  # whatever this user's umask is
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    package: Path = options.out.resolve() / f"entresol_{version}_{target.debian}.deb"
    say(f"packing {size / 1e6:.0f} MB")
    packing = ["-Zxz", "-z1"] if options.compression == "xz" else [f"-Z{options.compression}"]
    pack(tree, package, packing)
    return package


def pack(tree: Path, package: Path, packing: Sequence[str]) -> None:
    """`tree` as a .deb, whole or not there: one that was interrupted must not look like a package.

    Raises: BuildError.
    """
    part = package.with_name(package.name + ".part")
    try:
        run(["dpkg-deb", "--root-owner-group", *packing, "--build", str(tree), str(part)])
        part.replace(package)
    finally:
        part.unlink(missing_ok=True)


def parser() -> argparse.ArgumentParser:
    """Every option."""
    options = argparse.ArgumentParser(prog="arm64/build.py", description=__doc__)
    options.add_argument("--arch", choices=sorted(TARGETS), default="arm64")
    options.add_argument(
        "--python", choices=PYTHONS, default="3.11", metavar="|".join(PYTHONS),
        help="the target's Python: 3.11 for Debian 12 (default), 3.12 for Ubuntu 24.04 and "
        "BlueField's image of it, 3.13 for Debian 13",
    )  # fmt: skip
    options.add_argument("--wheel-only", action="store_true", help="no .deb")
    options.add_argument(
        "--compression", choices=("xz", "none"), default="xz", help="of the .deb (default: xz)"
    )
    options.add_argument(
        "--dependencies",
        type=Path,
        metavar="DIR",
        help="keep other people's wheels here, unpacked, and take them from here next time",
    )
    options.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what was asked for and print its paths; returns the exit status."""
    options = parser().parse_args(arguments)
    target, out = TARGETS[options.arch], options.out.resolve()
    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="entresol-build-") as name:
            scratch = Path(name)
            made = [build_wheel(target, scratch, out)]
            if not options.wheel_only:
                made.append(build_deb(target, made[0], scratch, options))
    except (BuildError, OSError) as error:
        say(str(error))
        return 1
    for path in made:
        print(path)
    say(f"{time.monotonic() - began_s:.0f} s")
    if compiler_for(target) is None:
        say(without_kernel(target))
    return 0


if __name__ == "__main__":
    sys.exit(main())
