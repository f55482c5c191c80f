"""What this host brings: RDMA, locked and shared memory, descriptors, huge pages, AES, clock; and
what the daemon's package says of a daemon's configuration here.

Invariant: read-only; a host without RDMA is a fine host, so its absence is told, not warned of.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import platform
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

from entresol_client.cli import output
from entresol_client.cli.doctor import FAIL, OK, WARN, Finding
from entresol_client.config import ClientConfig
from entresol_client.programs import command_of
from entresol_proto import limits, native
from entresol_proto.fabric.base import VerbsSettings
from entresol_proto.fabric.verbs_device import find_ports
from entresol_proto.status import FabricError

RDMA_PATH = Path("/sys/class/infiniband")
CGROUP_PATH = Path("/sys/fs/cgroup")
JUDGE = "entresol_daemon.judge"
MEMLOCK_WANTED_BYTES = 1 * limits.GIB
PROBE_BYTES = 1 * limits.MIB
FILES_PER_SHARD = 64  # streams, regions and sockets of a session, generously
_TIMEX_BYTES = 512  # more than struct timex of any Linux
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


def check_host(config: ClientConfig | None = None) -> Iterator[Finding]:
    """All of them; `config` is the client's, where there is one."""
    devices = _rdma_devices()
    yield from _rdma(devices, config.verbs if config is not None else VerbsSettings())
    yield _memlock(rdma=bool(devices))
    yield _shared_memory(config)
    yield _descriptors(config)
    yield _huge_pages()
    yield _aes()
    yield _kernel()
    yield _clock()
    yield Finding(
        "host", OK,
        f"{platform.machine()}, {output.plural(os.cpu_count() or 1, 'core')}, "
        f"Python {platform.python_version()}",
    )  # fmt: skip


def _rdma_devices() -> list[str]:
    try:
        return sorted(path.name for path in RDMA_PATH.iterdir())
    except OSError:
        return []


def _rdma(devices: list[str], settings: VerbsSettings) -> Iterator[Finding]:
    """Devices, their ports, and what using them needs."""
    if not devices:
        yield Finding(
            "rdma", OK,
            "no RDMA device here: tcp or shm it is (for trying it: apt install rdma-core "
            "iproute2, then rdma link add rxe0 type rxe netdev IFACE)",
        )  # fmt: skip
        return
    for device in devices:
        for port in sorted((RDMA_PATH / device / "ports").glob("*")):
            state = _read(port / "state").partition(":")[2].strip() or "unknown"
            rate = _read(port / "rate")
            level = OK if state == "ACTIVE" else WARN
            fix = (
                ""
                if level is OK
                else f"ip link set up its interface; see `rdma link show {device}`"
            )
            yield Finding("rdma", level, f"{device} port {port.name}: {state}, {rate}", fix)
    if importlib.util.find_spec("pyverbs") is None:
        yield Finding(
            "rdma", WARN, "pyverbs is not installed: the verbs fabric cannot be used",
            "apt install python3-pyverbs ibverbs-providers (DOCA: python3-pyverbs)",
        )  # fmt: skip
    else:
        yield Finding("rdma", OK, "pyverbs is installed")
    try:
        for found in find_ports(settings):
            gid = found.gid
            yield Finding(
                "rdma", OK,
                f"{found.label} is used, with GID {gid.index} ({gid.ipv4 or gid.raw.hex()}, "
                f"{gid.kind or 'InfiniBand'}{f', {gid.netdev}' if gid.netdev else ''})",
            )  # fmt: skip
    except FabricError as error:
        yield Finding("rdma", WARN, Exception.__str__(error), error.hint)


def _memlock(*, rdma: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", OK, "unlimited")
    text = output.size(soft)
    if soft >= MEMLOCK_WANTED_BYTES:
        return Finding("memlock", OK, text)
    if not rdma:
        return Finding("memlock", OK, f"{text}; enough without RDMA")
    return Finding(
        "memlock", WARN, f"{text}: registering memory for RDMA will fail",
        "ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, or /etc/security/limits.conf",
    )  # fmt: skip


def _shared_memory(config: ClientConfig | None) -> Finding:
    """Whether memory can be shared as shm and staging do it (memfd), and as much as they take."""
    wanted = config.staging_bytes_max * len(config.shards) if config is not None else limits.MIB
    left, bound = _memory_left()
    try:
        descriptor = os.memfd_create("entresol-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, PROBE_BYTES)
            mmap.mmap(descriptor, PROBE_BYTES).close()
        finally:
            os.close(descriptor)
    except OSError as error:
        return Finding(
            "memory", FAIL, f"memory cannot be shared (memfd): {error.strerror}",
            "let the container or unit have memfd_create, and memory: MemoryMax, --memory",
        )  # fmt: skip
    text = f"{output.size(left)} left of {bound}"
    if config is not None:
        text += f"; the data paths take up to {output.size(wanted)}"
    if left < wanted:
        return Finding(
            "memory", WARN, text, "a smaller staging_bytes_max, or more memory for this host"
        )
    return Finding("memory", OK, text)


def _memory_left() -> tuple[int, str]:
    """Bytes that can still be had, and of what."""
    left, bound = 0, "this host"
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            left = int(line.split()[1]) * limits.KIB
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        folder = CGROUP_PATH / line.rpartition(":")[2].lstrip("/")
        most, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if most.isdigit() and used.isdigit() and int(most) - int(used) < left:
            left, bound = max(0, int(most) - int(used)), "the control group"
    return left, bound


def _descriptors(config: ClientConfig | None) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_PER_SHARD * (len(config.shards) if config is not None else 1)
    if soft < wanted:
        return Finding(
            "files open", WARN, f"{soft} at once; the client may need {wanted} beside the engine's",
            "ulimit -n 65536, LimitNOFILE= in the unit, --ulimit nofile= of a container",
        )  # fmt: skip
    return Finding("files open", OK, f"{soft:,} at once ({hard:,} on request)")


def check_daemon_config(path: str) -> Iterator[Finding]:
    """What the daemon's own package says of a configuration, on this machine."""
    if importlib.util.find_spec(JUDGE.partition(".")[0]) is None:
        yield Finding(
            "daemon", FAIL, "the daemon's package is not installed here",
            "run this on the daemon's machine, or pip install 'entresol[daemon]'",
        )  # fmt: skip
        return
    done = subprocess.run(command_of(JUDGE, path), capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        row = json.loads(line)
        yield Finding("daemon", row["level"], row["text"], row["fix"])
    if done.returncode not in (0, 1):
        text = f"it could not be judged: {done.stderr.strip()[-200:] or done.returncode}"
        yield Finding("daemon", FAIL, text, "this is a mistake of ours: report it")


def _huge_pages() -> Finding:
    fields = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        fields[name] = value.split()[0] if value.split() else "0"
    total, free = int(fields.get("HugePages_Total", 0)), int(fields.get("HugePages_Free", 0))
    page = int(fields.get("Hugepagesize", 0)) * limits.KIB
    if total:
        return Finding("huge pages", OK, f"{free:,} of {total:,} free, {output.size(page)} each")
    return Finding(
        "huge pages", OK,
        "none reserved; a daemon here uses ordinary pages (sysctl vm.nr_hugepages reserves some)",
    )  # fmt: skip


def _aes() -> Finding:
    words = _read(Path("/proc/cpuinfo")).split()
    if "aes" in words:
        return Finding("cpu", OK, "AES instructions")
    return Finding(
        "cpu", WARN, "no AES instructions: sealing and opening will be slow",
        "in a guest, pass the host's CPU features through (-cpu host)",
    )  # fmt: skip


def _kernel() -> Finding:
    if native.KERNEL is not None:
        return Finding("kernel", OK, "the native kernel is loaded")
    if os.environ.get("ENTRESOL_NATIVE") == "0":
        return Finding("kernel", WARN, "the native kernel is off", "unset ENTRESOL_NATIVE")
    return Finding(
        "kernel", WARN, "no native kernel: large copies take about 1.6 times as long",
        "install gcc and libc6-dev, then install entresol again",
    )  # fmt: skip


def _clock() -> Finding:
    """adjtimex(2) with modes 0 only reads."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        state = -1
    if state == _TIME_ERROR:
        return Finding(
            "clock", WARN, "not synchronised: certificates may seem expired, times are off",
            "run a time service: systemd-timesyncd, chrony",
        )  # fmt: skip
    if state < 0:
        return Finding("clock", OK, "its state cannot be read here")
    return Finding("clock", OK, "synchronised")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
