"""What a guest is made of: architectures, kernels, packages, and the key an image is cached under.

Owns one invariant: everything that changes the bytes of an image is part of its key, so that a
cached image can never be mistaken for another.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

# Exit codes of a guest's run that are ours and not its command's.
RC_TIMED_OUT = 124
RC_NO_RESULT = 125

RECIPE_VERSION = 3  # raise it when the build steps change what they put into an image


class HarnessError(Exception):
    """The harness cannot do what was asked; the message is one line for a person."""


class UsageError(HarnessError):
    """What was asked for makes no sense anywhere; a mistake of the caller, not of this machine."""


@dataclass(frozen=True, slots=True)
class Arch:
    """One guest architecture and how QEMU runs it."""

    name: str
    debian: str
    machine: str  # what uname -m says inside
    qemu: str
    qemu_package: str
    machine_args: tuple[str, ...]
    console: str
    wheel_platforms: tuple[str, ...]


ARCHES = {
    "x86": Arch(
        name="x86",
        debian="amd64",
        machine="x86_64",
        qemu="qemu-system-x86_64",
        qemu_package="qemu-system-x86",
        # One processor: patching of static keys in the kernel races with QEMU's parallel emulation.
        # Five levels of page tables are walked more slowly than four, and emulated for nobody.
        machine_args=("-M", "q35", "-cpu", "max,la57=off", "-smp", "1"),
        console="ttyS0",
        wheel_platforms=("manylinux_2_28_x86_64", "manylinux2014_x86_64"),
    ),
    "arm64": Arch(
        name="arm64",
        debian="arm64",
        machine="aarch64",
        qemu="qemu-system-aarch64",
        qemu_package="qemu-system-arm",
        machine_args=("-M", "virt", "-cpu", "max,pauth-impdef=on", "-smp", "2"),
        console="ttyAMA0",
        wheel_platforms=("manylinux_2_28_aarch64", "manylinux2014_aarch64"),
    ),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Debian kernel: where it comes from and what a guest with it can do."""

    name: str
    suites: tuple[str, ...]
    release: str  # apt's target release
    namespaces: bool  # whether each network namespace may have its own rxe


KERNELS = {
    # Backports roll forward: 7.2 is the least version that will do, not the one found.
    "7.2": Kernel("7.2", ("trixie", "trixie-backports"), "trixie-backports", namespaces=True),
    "6.1": Kernel("6.1", ("bookworm", "bookworm-security"), "bookworm", namespaces=False),
}

USERLAND_SUITES = ("bookworm", "bookworm-security")
USERLAND_RELEASE = "bookworm"
USERLAND_PYTHON = "3.11"
USERLAND_PACKAGES = (
    "base-files", "base-passwd", "bash", "busybox-static", "coreutils", "dash", "findutils",
    "gawk", "grep", "ibverbs-providers", "ibverbs-utils", "iproute2", "kmod", "libc-bin",
    "libstdc++6", "mount", "perftest", "procps", "python3", "python3-pyverbs", "rdma-core",
    "rdmacm-utils", "sed", "util-linux",
)  # fmt: skip

SITE_REQUIREMENTS = (
    "cryptography>=47", "grpcio>=1.62", "grpcio-health-checking>=1.62", "hypothesis>=6.100",
    "numpy>=1.26", "prometheus-client>=0.20", "protobuf>=5", "psutil>=5.9", "pyarrow>=15",
    "pytest>=8", "pytest-asyncio>=0.24", "pytest-timeout>=2.3", "uvloop>=0.20", "xxhash>=3.4",
    "zstandard>=0.23",
)  # fmt: skip

# Loaded from the initial file system, in this order, before there is a root to look on.
BOOT_MODULES = (
    "virtio_pci", "virtio_blk", "virtio_console", "virtio_rng", "virtio_net",
    "erofs", "overlay", "9p", "9pnet_virtio",
)  # fmt: skip
# Carried along for modprobe in the guest. Kernel 6.1 creates no rxe without crc32_generic.
GUEST_MODULES = (
    *BOOT_MODULES,
    "crc32_generic", "crc32c_generic", "crc32c-intel", "ib_core", "ib_uverbs", "rdma_rxe",
    "rdma_ucm", "ib_umad", "ib_cm", "rdma_cm", "iw_cm", "veth", "dummy", "tun", "bridge",
    "sch_netem", "sch_tbf", "sch_fq", "loop", "brd", "ext4", "null_blk", "ipv6",
    "dm-mod", "dm-flakey", "dm-log-writes", "dm-dust",
)  # fmt: skip

# Documentation, translations and perl are two thirds of the files and no test reads them.
ROOT_WITHOUT = (
    "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/zoneinfo",
    "usr/share/perl*", "usr/lib/*/perl*", "usr/share/i18n", "usr/lib/*/gconv",
    "usr/lib/*/perl-base", "usr/share/lintian", "usr/share/bash-completion",
)  # fmt: skip
MODULE_FOLDERS = (
    "arch", "crypto", "lib", "net", "fs/9p", "fs/netfs", "fs/fscache", "fs/erofs", "fs/overlayfs",
    "fs/ext4", "fs/jbd2", "fs/mbcache*", "drivers/virtio", "drivers/block", "drivers/char",
    "drivers/infiniband/core", "drivers/infiniband/sw", "fs/configfs", "drivers/net/*.ko*",
    "drivers/dax", "drivers/md",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """What an image is to be made from. Its key names the cache entry."""

    kind: str  # kernel, root or site
    arch: str
    suites: tuple[str, ...]
    packages: tuple[str, ...]
    recipe: int = RECIPE_VERSION

    def key(self) -> str:
        """A short stable name: kind, architecture and twelve digits of everything else."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.kind}-{self.arch}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def kernel_request(arch: Arch, kernel: Kernel) -> Request:
    """The kernel image and its modules."""
    packages = (f"linux-image-{arch.debian}", "busybox-static", *GUEST_MODULES, *MODULE_FOLDERS)
    return Request("kernel", arch.name, kernel.suites, packages)


def root_request(arch: Arch) -> Request:
    """The user space: Debian's packages, unpacked."""
    return Request("root", arch.name, USERLAND_SUITES, (*USERLAND_PACKAGES, *ROOT_WITHOUT))


def site_request(arch: Arch) -> Request:
    """The Python packages, from wheels."""
    return Request("site", arch.name, (USERLAND_PYTHON,), SITE_REQUIREMENTS)


def versions_digest(versions: list[str]) -> str:
    """Eight digits naming the exact versions an image was built from."""
    return hashlib.sha256("\n".join(sorted(versions)).encode()).hexdigest()[:8]
