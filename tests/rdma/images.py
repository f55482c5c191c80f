"""Builds the three images of a guest: kernel with modules, user space, Python packages.

Nothing here needs root, and no package's maintainer scripts run: packages are only unpacked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.rdma import cpio
from tests.rdma.apt import PrivateApt
from tests.rdma.bytecode import compile_tree, keep_interpreter, needs_x86
from tests.rdma.cache import Builder, ensure
from tests.rdma.progress import say
from tests.rdma.spec import (
    ARCHES,
    BOOT_MODULES,
    GUEST_MODULES,
    MODULE_FOLDERS,
    ROOT_WITHOUT,
    SITE_REQUIREMENTS,
    USERLAND_PACKAGES,
    USERLAND_PYTHON,
    USERLAND_RELEASE,
    USERLAND_SUITES,
    Arch,
    HarnessError,
    Kernel,
    Request,
    kernel_request,
    root_request,
    site_request,
)
from tests.rdma.tools import tool
from tests.rdma.vmlinux import uncompressed

STEP_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Images:
    """Folders of one guest's images."""

    kernel: Path
    root: Path
    site: Path


def images(arch: Arch, kernel: Kernel, *, refresh: bool = False) -> Images:
    """The images of a guest, built when not cached.

    Raises: HarnessError with the step that failed.
    """

    def build(name: str, request: Request, builder: Builder) -> Path:
        def timed(out: Path) -> list[str]:
            begun = time.monotonic()
            versions = builder(out)
            say(f"{name} for {arch.name}: built in {time.monotonic() - begun:.1f} s")
            return versions

        return ensure(request, timed, refresh=refresh)

    if arch.name != "x86" and needs_x86():
        x86 = ARCHES["x86"]
        ensure(root_request(x86), lambda out: _build_root(x86, out))
    return Images(
        build(
            f"kernel {kernel.name}",
            kernel_request(arch, kernel),
            lambda out: _build_kernel(arch, kernel, out),
        ),
        build("user space", root_request(arch), lambda out: _build_root(arch, out)),
        build("Python packages", site_request(arch), lambda out: _build_site(arch, out)),
    )


def _step(command: list[str], what: str) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=STEP_TIMEOUT_S, env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode:
        raise HarnessError(f"{what} failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


def _unpack(deb: Path, into: Path, *options: str) -> None:
    """A package's files, without its scripts."""
    with subprocess.Popen(
        [tool("dpkg-deb"), "--fsys-tarfile", str(deb)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as reader:  # fmt: skip
        done = subprocess.run(
            [tool("tar"), "-C", str(into), "-x", "--no-same-owner", "--keep-directory-symlink",
             *options],
            stdin=reader.stdout, capture_output=True, text=True, timeout=STEP_TIMEOUT_S,
            check=False,
        )  # fmt: skip
        assert reader.stdout is not None
        while reader.stdout.read(1 << 20):  # tar stops early when nothing more can match
            pass
    # With --wildcards tar complains about patterns that one package does not have.
    if reader.returncode or (done.returncode and "--wildcards" not in options):
        raise HarnessError(f"unpacking {deb.name} failed: {done.stderr.strip()[-200:]}")


def _erofs(folder: Path, image: Path) -> None:
    _step(
        [tool("mkfs.erofs"), "--all-root", "-zlz4", "-T0", str(image), str(folder)],
        f"packing {image.name}",
    )


# Kernel -------------------------------------------------------------------------------------------


def _build_kernel(arch: Arch, kernel: Kernel, out: Path) -> list[str]:
    """Fills `out` with kernel and initrd; the guest's own init is added at each boot."""
    apt = PrivateApt(out / "apt", arch.debian, kernel.suites, kernel.release)
    say(f"kernel {kernel.name} for {arch.name}: asking {' '.join(kernel.suites)}")
    apt.update()
    wanted = [
        deb
        for deb in apt.resolve(f"linux-image-{arch.debian}", "busybox-static")
        if deb.name.startswith(("linux-image-", "linux-binary-", "linux-modules-", "busybox-"))
    ]
    say(f"kernel {kernel.name} for {arch.name}: fetching {wanted[-1].version}")
    debs = apt.download(wanted, out / "debs")
    tree = out / "tree"
    tree.mkdir()
    patterns = [f"*/kernel/{folder}" for folder in MODULE_FOLDERS]
    patterns += [f"{pattern}/*" for pattern in patterns]
    patterns += ["*vmlinuz*", "*/modules.*", "*/bin/busybox"]
    for deb in debs:
        _unpack(
            deb, tree, "--wildcards", "--exclude=*/drivers/net/ethernet",
            "--exclude=*/net/wireless", "--exclude=*/net/bluetooth", *patterns,
        )  # fmt: skip
    _stage_kernel(tree, out)
    for part in ("apt", "debs", "tree", "stage"):
        shutil.rmtree(out / part)
    return [deb.pin for deb in wanted]


def _first(what: str, *found: Path) -> Path:
    for path in found:
        if path.is_file():
            return path
    raise HarnessError(f"the kernel packages hold no {what}")


def _stage_kernel(tree: Path, out: Path) -> None:
    modules = next(
        (path for base in ("lib", "usr/lib") for path in (tree / base / "modules").glob("*")), None
    )
    if modules is None:
        raise HarnessError("the kernel packages hold no modules")
    version = modules.name
    vmlinuz = _first(
        "vmlinuz", *(tree / "boot").glob("vmlinuz-*"), modules / "vmlinuz",
        *(tree / "usr/lib/modules").glob("*/vmlinuz"),
    )  # fmt: skip
    image = vmlinuz.read_bytes()
    (out / "kernel").write_bytes(uncompressed(image) or image)
    if not (tree / "lib").exists():
        (tree / "lib").symlink_to("usr/lib")
    for name in ("modules.builtin", "modules.order"):
        (tree / "lib/modules" / version / name).touch()
    _step([tool("depmod"), "-b", str(tree), version], "reading module dependencies")
    stage = out / "stage"
    target = stage / "lib/modules" / version
    target.mkdir(parents=True)
    boot = _needed(tree, version, BOOT_MODULES)
    for relative in dict.fromkeys(boot + _needed(tree, version, GUEST_MODULES)):
        _copy_module(tree / "lib/modules" / version / relative, target / _plain(relative))
    for path in (tree / "lib/modules" / version).glob("modules.builtin*"):
        shutil.copyfile(path, target / path.name)
    (target / "modules.order").touch()
    _step([tool("depmod"), "-b", str(stage), version], "writing module dependencies")
    (stage / "bin").mkdir()
    busybox = _first("busybox", tree / "bin/busybox", tree / "usr/bin/busybox")
    shutil.copy(busybox, stage / "bin/busybox")
    (stage / "modlist").write_text(
        "".join(f"/lib/modules/{version}/{_plain(relative)}\n" for relative in boot)
    )
    (stage / "kver").write_text(f"{version}\n")
    (out / "initrd").write_bytes(cpio.archive(cpio.entries_of(stage)))


def _plain(relative: str) -> str:
    return relative.removesuffix(".xz").removesuffix(".zst")


def _copy_module(source: Path, target: Path) -> None:
    """Decompressed: the initial file system's insmod reads plain modules only."""
    target.parent.mkdir(parents=True, exist_ok=True)
    opener = {".xz": ["xz", "-dc"], ".zst": ["zstd", "-dc"]}.get(source.suffix)
    if opener is None:
        shutil.copyfile(source, target)
        return
    with open(target, "wb") as file:
        subprocess.run(
            [tool(opener[0]), *opener[1:], str(source)],
            stdout=file, check=True, timeout=STEP_TIMEOUT_S,
        )  # fmt: skip


def _needed(tree: Path, version: str, names: tuple[str, ...]) -> list[str]:
    """Module files, dependencies first. A name this kernel does not have is built in or gone."""
    found: dict[str, None] = {}
    for name in names:
        done = subprocess.run(
            [tool("modprobe"), "-d", str(tree), "-S", version, "--show-depends", name],
            capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            verb, _, path = line.strip().partition(" ")
            if verb == "insmod":
                found[path.split()[0].rpartition(f"/modules/{version}/")[2]] = None
    return list(found)


# User space ---------------------------------------------------------------------------------------


def _build_root(arch: Arch, out: Path) -> list[str]:
    """Fills `out` with root.erofs ."""
    apt = PrivateApt(out / "apt", arch.debian, USERLAND_SUITES, USERLAND_RELEASE)
    say(f"user space for {arch.name}: asking {' '.join(USERLAND_SUITES)}")
    apt.update()
    wanted = apt.resolve(*USERLAND_PACKAGES)
    say(f"user space for {arch.name}: fetching {len(wanted)} packages")
    debs = apt.download(wanted, out / "debs")
    say(f"user space for {arch.name}: unpacking")
    tree = out / "tree"
    for name in ("bin", "sbin", "lib", "lib64"):  # one /usr, whatever a package's paths say
        (tree / "usr" / name).mkdir(parents=True)
        (tree / name).symlink_to(f"usr/{name}")
    for name in ("proc", "sys", "dev", "run", "tmp", "root", "etc", "mnt", "var/tmp",
                 "repo", "site", "share", "out"):  # fmt: skip
        (tree / name).mkdir(parents=True, exist_ok=True)
    excludes = [f"--exclude=./{path}" for path in ROOT_WITHOUT]
    for deb in debs:
        _unpack(deb, tree, *excludes)
    _settle_root(tree)
    for part in (f"python{USERLAND_PYTHON}", "python3"):
        compile_tree(tree, f"usr/lib/{part}", f"/usr/lib/{part}")
    if arch.name == "x86":
        keep_interpreter(tree, out)
    _erofs(tree, out / "root.erofs")
    for part in ("apt", "debs", "tree"):
        shutil.rmtree(out / part)
    return [deb.pin for deb in wanted]


def _settle_root(tree: Path) -> None:
    """The little that maintainer scripts would have done and a test could miss."""
    for name in ("passwd", "group"):
        text = (tree / f"usr/share/base-passwd/{name}.master").read_text()
        (tree / "etc" / name).write_text(text.replace("root:*:", "root:x:", 1))
    shell = tree / "usr/bin/sh"
    if not os.path.lexists(shell):
        shell.symlink_to("dash")
    python = tree / "usr/bin/python3"
    if not os.path.lexists(python):
        python.symlink_to(f"python{USERLAND_PYTHON}")
    (tree / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (tree / "etc/hostname").write_text("guest\n")
    (tree / "etc/fstab").touch()
    (tree / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")


# Python packages ----------------------------------------------------------------------------------


def _build_site(arch: Arch, out: Path) -> list[str]:
    """Fills `out` with site.erofs from wheels."""
    say(f"Python packages for {arch.name}: fetching wheels")
    tree = out / "tree"
    command = [
        sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile",
        "--no-warn-conflicts", "--target", str(tree), "--only-binary=:all:",
        "--implementation", "cp", "--python-version", USERLAND_PYTHON,
    ]  # fmt: skip
    for platform in arch.wheel_platforms:
        command += ["--platform", platform]
    _step([*command, *SITE_REQUIREMENTS], "fetching wheels")
    for path in (*tree.glob("*/tests"), *tree.glob("pyarrow/include"), tree / "bin"):
        shutil.rmtree(path, ignore_errors=True)
    versions = sorted(path.name.removesuffix(".dist-info") for path in tree.glob("*.dist-info"))
    compile_tree(tree, "", "/site")
    _erofs(tree, out / "site.erofs")
    shutil.rmtree(tree)
    return versions
