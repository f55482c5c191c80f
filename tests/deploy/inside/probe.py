"""What a process may do under the unit's restrictions, tried: `NAME yes|no DETAIL`, a line each.

Run twice by `tests.deploy.locks`, with and without the restrictions, as the same user. What can be
done without and cannot with them is applied; what can be done both times is not.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, ADDR_NO_RANDOMIZE = 0x10000000, 0x0040000
TIMEX_BYTES = 208  # struct timex; all zero: only tell
MARK = "entresol-probe-mark"  # a file of this name lies in /tmp, /dev and /usr/lib/modules
STATE = Path(os.environ.get("STATE_DIRECTORY", "/tmp"))


def called(result: int) -> bool:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True


def writable(*folders: str) -> bool:
    """Whether some of them is on a file system that is mounted for writing."""
    return any(not os.statvfs(folder).f_flag & os.ST_RDONLY for folder in folders)


def bind(port: int) -> bool:
    with socket.socket() as made:
        made.bind(("127.0.0.1", port))
    return True


def talk_to(host: str) -> bool:
    """Connect to itself at `host`, and leave no connection in TIME_WAIT: it would keep the address
    from a daemon for a minute."""
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, 7441 if host == "127.0.0.1" else 7440))
        server.listen()
        server.settimeout(2)
        client.settimeout(2)
        client.connect(server.getsockname())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted, _ = server.accept()
        with accepted:
            client.close()  # a reset
    return True


def setuid_file() -> bool:
    path = STATE / "probe-setuid"
    path.write_bytes(b"")
    try:
        path.chmod(0o4755)
        return bool(path.stat().st_mode & 0o4000)
    finally:
        path.unlink()


def swap_limited() -> bool:
    """Whether it may be swapped out: no limit of zero is in force."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next(line for line in lines if line.startswith("0:")).split(":", 2)[2]
    limit = Path(f"/sys/fs/cgroup{own}/memory.swap.max")
    return not (limit.exists() and limit.read_text().strip() == "0")


def realtime() -> bool:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return True


def status(name: str) -> str:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    return ""


PROBES: dict[str, Callable[[], bool]] = {
    "ProtectSystem": lambda: writable("/usr", "/etc", "/var"),
    "ProtectHome": lambda: bool(os.listdir("/home") or True),
    "PrivateTmp": lambda: Path("/tmp", MARK).exists(),
    "PrivateDevices": lambda: Path("/dev", MARK).exists(),
    "ProtectProc": lambda: Path("/proc/1/comm").exists(),
    "ProtectKernelTunables": lambda: writable("/proc/sys"),
    "ProtectKernelModules": lambda: Path("/usr/lib/modules", MARK).exists(),
    "ProtectKernelLogs": lambda: Path("/proc/kmsg").stat().st_mode & 0o777 != 0,
    "ProtectClock": lambda: called(LIBC.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))),
    "RestrictRealtime": realtime,
    "ProtectControlGroups": lambda: writable("/sys/fs/cgroup"),
    "PrivateUsers": lambda: len(Path("/proc/self/uid_map").read_text().split()[2]) > 6,
    "PrivateMounts": lambda: os.readlink("/proc/self/ns/mnt") == sys.argv[1],
    "ProtectHostname": lambda: os.readlink("/proc/self/ns/uts") == sys.argv[2],
    "NoNewPrivileges": lambda: status("NoNewPrivs") != "1",
    "CapabilityBoundingSet": lambda: int(status("CapBnd"), 16) != 0,
    "SystemCallFilter": lambda: called(LIBC.ptrace(0, 0, None, None)),
    "RestrictNamespaces": lambda: called(LIBC.unshare(CLONE_NEWUSER)),
    "LockPersonality": lambda: called(LIBC.personality(ADDR_NO_RANDOMIZE)),
    "RestrictSUIDSGID": setuid_file,
    "RestrictAddressFamilies": lambda: bool(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "MemoryDenyWriteExecute": lambda: bool(
        mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    ),
    "SocketBindDeny": lambda: bind(9_999),
    "IPAddressDeny": lambda: talk_to("10.77.0.1"),
    "MemorySwapMax": swap_limited,
    "LimitCORE": lambda: resource.getrlimit(resource.RLIMIT_CORE)[1] != 0,
    "LimitMEMLOCK": lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != -1,
    "LimitNOFILE": lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 65_536,
    "UMask": lambda: bool(os.umask(0o077) != 0o077),
}


def main() -> None:
    for name, probe in PROBES.items():
        pid = os.fork()  # some probes change the process that tries them
        if pid:
            os.waitpid(pid, 0)
            continue
        try:
            print(f"{name} {'yes' if probe() else 'no'}", flush=True)
        except (OSError, ValueError) as error:
            print(f"{name} no {type(error).__name__}: {error}", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
