"""The ARM64 build, as far as it needs no network: targets, layout, launchers, the hook."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def loaded() -> ModuleType:
    """arm64/build.py, which is a script and not in a package."""
    spec = importlib.util.spec_from_file_location("arm64_build", ROOT / "arm64" / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = loaded()


def elf(path: Path, machine: int) -> Path:
    """The head of a little-endian 64-bit shared library."""
    path.write_bytes(b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HH", 3, machine))
    return path


def test_help_names_every_choice() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "arm64/build.py"), "--help"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    for word in ("--arch", "--python", "--wheel-only", "--out", "3.12", "arm64", "amd64"):
        assert word in done.stdout


def test_a_library_for_another_processor_is_told_apart(tmp_path: Path) -> None:
    ours, theirs = build.TARGETS["arm64"].elf_machine, build.TARGETS["amd64"].elf_machine
    assert build.elf_machine(elf(tmp_path / "a.so", ours)) == ours != theirs
    assert build.elf_machine(elf(tmp_path / "b.so", theirs)) == theirs
    (tmp_path / "c.so").write_bytes(b"#!/bin/sh\n")
    with pytest.raises(build.BuildError, match=r"c\.so"):
        build.elf_machine(tmp_path / "c.so")


def test_the_compiler_is_the_targets_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    arm64 = build.TARGETS["arm64"]
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert build.compiler_for(arm64) == "/usr/bin/aarch64-linux-gnu-gcc"
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.compiler_for(arm64) is None
    monkeypatch.setenv("CC", "clang --target=aarch64-linux-gnu")
    assert build.compiler_for(arm64) == "clang --target=aarch64-linux-gnu"


def test_the_environment_is_the_distributions_python_and_ours(tmp_path: Path) -> None:
    site = build.environment("3.12", tmp_path)
    prefix = tmp_path / build.PREFIX
    assert site == prefix / "lib/python3.12/site-packages"
    config = (prefix / "pyvenv.cfg").read_text()
    assert "include-system-site-packages = true" in config  # pyverbs is the distribution's
    assert os.readlink(prefix / "bin/python3") == "/usr/bin/python3.12"
    for command in build.COMMANDS:
        link = tmp_path / "usr/bin" / command
        assert link.resolve() == prefix / "bin" / command
        assert link.read_text().startswith(f"#!/{build.PREFIX}/bin/python3 -I")
        assert os.access(link, os.X_OK)


def test_launchers_start_what_pyproject_names() -> None:
    scripts = build.tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {name: f"{module}:main" for name, module in build.COMMANDS.items()} == scripts


def test_the_package_asks_for_the_python_it_carries_wheels_for() -> None:
    text = build.control(build.TARGETS["arm64"], "3.12", "1.0+py3.12", 7)
    fields = dict(line.split(": ", 1) for line in text.splitlines() if line[:1].isalpha())
    assert fields["Architecture"] == "arm64"
    assert fields["Depends"].startswith("python3.12,")
    assert "python3-pyverbs" in fields["Recommends"]


def test_the_package_holds_every_unit_and_what_the_units_name(tmp_path: Path) -> None:
    build.copy_files(tmp_path)
    found = {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    }
    systemd = ROOT / "systemd"
    for path in systemd.iterdir():
        if path.suffix in (".service", ".socket"):
            assert f"{build.UNITS}/{path.name}" in found
            for name in re.findall(r"file:/(\S+)", path.read_text()):
                assert name in found
    assert {name.lstrip("/") for name in build.CONFFILES} <= found
    assert {name for name in found if name.startswith("etc/")} == {
        name.lstrip("/") for name in build.CONFFILES
    }
    assert "usr/lib/sysusers.d/entresol.conf" in found
    assert "usr/share/entresol/prometheus/entresol.rules.yml" in found
    assert "usr/share/entresol/grafana/entresol.json" in found


def test_the_scripts_know_the_formats_that_the_daemon_reads(tmp_path: Path) -> None:
    from entresol_daemon.formats import READS

    build.maintainer_scripts(tmp_path)
    text = (tmp_path / "preinst").read_text()
    for kind, version in READS.items():
        assert f" {kind}) reads={version} ;;" in text
    assert not re.search("@[A-Z_]+@", "".join(p.read_text() for p in tmp_path.iterdir()))
    assert all(os.access(tmp_path / name, os.X_OK) for name in build.SCRIPTS)


def test_dpkg_accepts_the_package(tmp_path: Path) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("not run here: no dpkg-deb")
    tree = tmp_path / "tree"
    build.environment("3.11", tree)
    (tree / "DEBIAN").mkdir()
    text = build.control(build.TARGETS["arm64"], "3.11", "1.0+py3.11", 7)
    (tree / "DEBIAN/control").write_text(text)
    package = tmp_path / "out.deb"
    build.run(["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", str(tree), str(package)])
    listed = subprocess.run(
        ["dpkg-deb", "--contents", str(package)], check=True, capture_output=True, text=True
    ).stdout
    assert "./usr/bin/entresold -> ../lib/entresol/bin/entresold" in listed
    assert all("root/root" in line for line in listed.splitlines())


def container_lines() -> list[str]:
    """Instructions of the Containerfile, continued lines joined."""
    text = (ROOT / "arm64/Containerfile").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_containers_file_copies_what_is_there_and_runs_as_nobody_special() -> None:
    """What can be checked of it without an engine to build it with."""
    lines = container_lines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    ours = [name for words in copies for name in words if "--from=build" not in words]
    assert ours
    assert all((ROOT / name).exists() for name in ours), ours
    needed = {"pyproject.toml", "README.md", "LICENSE", "daemon", "client", "proto"}
    assert needed == set(build.SOURCES)
    assert needed <= set(ours)
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["entresol"]
    assert lines.index("USER entresol") < next(
        at for at, line in enumerate(lines) if line.startswith("ENTRYPOINT ")
    )
    for line in lines:
        if line.startswith("RUN "):
            subprocess.run(["sh", "-n", "-c", line.removeprefix("RUN ")], check=True)


def test_the_containers_health_check_asks_where_the_daemon_answers() -> None:
    from entresol_daemon.config import ListenConfig

    (check,) = [line for line in container_lines() if line.startswith("HEALTHCHECK ")]
    command = json.loads(check.partition(" CMD ")[2])
    listen = ListenConfig()
    assert f"http://{listen.metrics_host}:{listen.metrics_port}/healthz" in command[-1]
    compile(command[-1], "health check", "exec")


def test_a_failing_step_says_why_without_a_traceback() -> None:
    with pytest.raises(build.BuildError, match="is not installed"):
        build.run(["entresol-no-such-tool"])
    with pytest.raises(build.BuildError, match="the reason"):
        build.run([sys.executable, "-c", "import sys; sys.exit('the reason')"])


def hook(library: Path, **env: str) -> str:
    """What the build hook answers to `env`; no kernel is compiled where it refuses."""
    pytest.importorskip("hatchling", reason="not run here: hatchling is not installed")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import build_kernel\n"
        "from pathlib import Path\n"
        "print(build_kernel.compile_kernel(Path(sys.argv[2]), Path(sys.argv[3])))"
    )
    source = ROOT / "proto/entresol_proto/native/kernel.c"
    clean = {name: value for name, value in os.environ.items() if name != "CC"}
    return subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "proto"), str(source), str(library)],
        env=clean | env, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


def test_whoever_has_no_compiler_is_told_the_package_that_has_it() -> None:
    assert "apt-get install gcc-aarch64-linux-gnu," in build.without_kernel(build.TARGETS["arm64"])
    assert "apt-get install gcc-x86-64-linux-gnu," in build.without_kernel(build.TARGETS["amd64"])


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="not run here: no dpkg-deb")
def test_a_package_is_whole_or_not_there(tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    (tree / "DEBIAN").mkdir(parents=True)
    tree.chmod(0o755)
    (tree / "DEBIAN").chmod(0o755)
    out.mkdir()
    package = out / "entresol_1_arm64.deb"
    with pytest.raises(build.BuildError, match="dpkg-deb"):  # it has no description
        build.pack(tree, package, ["-Znone"])
    assert not list(out.iterdir())
    text = build.control(build.TARGETS["arm64"], "3.11", "1", 1)
    (tree / "DEBIAN/control").write_text(text)
    build.pack(tree, package, ["-Znone"])
    assert list(out.iterdir()) == [package]
    found = subprocess.run(
        ["dpkg-deb", "-f", str(package), "Architecture"], capture_output=True, check=True
    )
    assert found.stdout == b"arm64\n"


def test_no_native_compiler_for_a_foreign_platform(tmp_path: Path) -> None:
    said = hook(tmp_path / "k.so", ENTRESOL_TARGET_PLATFORM="linux_aarch64")
    assert "CC does not name" in said
    assert not (tmp_path / "k.so").exists()


def test_the_kernel_is_for_the_target_and_for_pages_of_64_kib(tmp_path: Path) -> None:
    """BlueField's kernels come with 4 and with 64 KiB pages; a library must load on both."""
    arm64 = build.TARGETS["arm64"]
    if shutil.which(arm64.compiler) is None:
        pytest.skip(f"not run here: no {arm64.compiler}")
    library = tmp_path / "k.so"
    said = hook(library, ENTRESOL_TARGET_PLATFORM="linux_aarch64", CC=arm64.compiler)
    assert said.strip() == "None"
    assert build.elf_machine(library) == arm64.elf_machine
    data = library.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 32)  # e_phoff
    size, count = struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", data, table + size * n) for n in range(count)]
    alignments = [row[7] for row in headers if row[0] == 1]  # PT_LOAD
    assert alignments
    assert all(alignment % 65536 == 0 for alignment in alignments)
