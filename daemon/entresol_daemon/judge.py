"""`python -m entresol_daemon.judge CONFIG`: would a daemon with this configuration start and serve?

`entresol doctor --daemon-config` runs it and shows what it says. It prints a JSON object per line:
`level` (ok, warn, fail), `text`, and `fix` where the level is not ok.

Invariant: it looks and changes nothing: no file is made, no port taken for longer than a look, no
key kept.
"""

from __future__ import annotations

import datetime
import grp
import json
import os
import resource
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from entresol_daemon import data_places, data_whole, open_files, setup_command
from entresol_daemon.config import Config
from entresol_daemon.control.identity import (
    ROLE_SHARD,
    SpiffeId,
    judge_files,
    server_ssl_context,
)
from entresol_daemon.drives import drives_below, read_wear
from entresol_daemon.keys.providers import FileKek, is_credential
from entresol_daemon.memory import huge_pages
from entresol_proto.limits import GIB, MIB
from entresol_proto.status import DeviceError, EntresolError, Status

OK, WARN, FAIL = "ok", "warn", "fail"
EXPIRY_WARN_DAYS = 14
RUNTIME_BYTES = 256 * MIB  # of the process besides its slabs
INDEX_BYTES_PER_BLOCK = 128  # bound; `make bench` measures
FILES_ENOUGH = 4096
_CLOSED = "chown it to the daemon's user; or its file system is mounted read-only"
USED_WARN_PERCENT = 90  # of what the drive is warranted for
_CGROUP = Path("/sys/fs/cgroup")

Row = tuple[str, str, str]
Rows = Iterator[Row]


def judge(path: Path) -> Rows:
    """Everything about one configuration; the first row is about the file itself."""
    try:
        config = Config.load(path)
    except EntresolError as error:
        yield _problem(error)
        return
    yield OK, f"{path} is a good configuration of shard {config.shard.name}", ""
    for look in (_tls, _kek, _state, _flash, _data, _drives, _memory, _shm, _listen, _files):
        yield from _guarded(look, config)


def _guarded(look: Callable[[Config], Rows], config: Config) -> Rows:
    try:
        yield from look(config)
    except EntresolError as error:
        yield _problem(error)
    except OSError as error:
        where = error.filename or "the system"
        yield FAIL, f"{where}: {error.strerror}", "look as the daemon's user: sudo -u"


def _problem(error: EntresolError) -> Row:
    return FAIL, Exception.__str__(error), error.hint or "`entresold --print-config` explains each"


def _tls(config: Config) -> Rows:
    tls = config.tls
    if tls.cert is None or tls.key is None or tls.ca is None:
        yield FAIL, "no certificate: [tls] cert, key and ca are not all set", "name the PEM files"
        return
    context = server_ssl_context(tls.cert, tls.key, tls.ca)
    shard = SpiffeId(tls.trust_domain, ROLE_SHARD, config.shard.name)
    dates, now_s = judge_files(context, tls.cert.read_bytes(), shard), time.time()
    error = dates.problem(now_s)
    if error is not None:
        raise error
    last = datetime.datetime.fromtimestamp(dates.not_after_s, datetime.UTC)
    if dates.not_after_s - now_s < EXPIRY_WARN_DAYS * 86_400:
        ends = "certificate" if dates.not_after_s == dates.certificate.not_after_s else "last CA"
        yield WARN, f"the {ends} ends on {last:%Y-%m-%d}", "renew it; it is taken over running"
    else:
        yield OK, f"certificate of shard {config.shard.name}, valid until {last:%Y-%m-%d}", ""


def _kek(config: Config) -> Rows:
    if config.keys.kek_file is None:
        fix = "`entresold keygen FILE`, and name it there"
        yield WARN, "no [keys] kek_file: the daemon starts locked", fix
        return
    if is_credential(config.keys.kek_file) and "CREDENTIALS_DIRECTORY" not in os.environ:
        text = "the key-encryption key is a credential of the unit: only the daemon is shown it"
        yield OK, f"{text} (systemctl cat entresold, LoadCredential=)", ""
        return
    kek = FileKek.open(config.keys.kek_file)
    yield OK, f"key-encryption key {kek.kek_id().hex()}", ""


def _state(config: Config) -> Rows:
    folder = config.shard.state_dir
    if not folder.is_dir():
        above = _nearest(folder)
        made = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
        text = f"there is no folder {folder} ([shard] state_dir)"
        yield (
            WARN if made else FAIL, f"{text}: a start makes it" if made else text,
            f"install -d -m 700 -o USER {folder}, as the daemon's user",
        )  # fmt: skip
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield FAIL, f"{folder} is not open to this user", _CLOSED
    elif stat.S_IMODE(folder.stat().st_mode) & 0o077:
        yield WARN, f"{folder} is open to other users", f"chmod 700 {folder}"
    else:
        yield OK, f"state folder {folder}", ""


def _flash(config: Config) -> Rows:
    path = config.flash_path
    wanted = config.flash.size_bytes
    wrong = data_places.problems(config)
    yield from ((FAIL, *problem) for problem in wrong)
    if wrong:
        return
    if path.exists():
        found = path.stat()
        if not os.access(path, os.R_OK | os.W_OK):
            yield FAIL, f"{path} is not open to this user", _CLOSED
            return
        if stat.S_ISREG(found.st_mode) and not found.st_size:
            left = _room(path.parent)
            if left < wanted:
                yield _no_room(path, wanted, left)
                return
        if stat.S_ISREG(found.st_mode) and wanted and found.st_size not in (0, wanted & -4096):
            yield (
                WARN, f"data file {path} has {_gib(found.st_size)} and keeps them: [flash] "
                f"size_bytes, {_gib(wanted)}, counts when it is made",
                "write there what it has; or stop the daemon, remove the file (its blocks become "
                "misses, tenants and keys stay) and start it",
            )  # fmt: skip
            return
        yield OK, f"data file {path}, {_gib(found.st_size or wanted)}", ""
        return
    folder = path.parent
    if folder == config.shard.state_dir:  # which a start makes
        folder = _nearest(folder)
    if not folder.is_dir():
        fix = "make it, or correct [flash] path"
        yield FAIL, f"there is no folder {folder} for the data file", fix
        return
    left = _room(folder)
    if left < wanted:
        yield _no_room(path, wanted, left)
    else:
        yield OK, f"data file {path} will be made, {_gib(wanted)} of {_gib(left)} free", ""


def _data(config: Config) -> Rows:
    """What is in the files that are there."""
    if data_places.problems(config):
        return
    setup_command.check_data(config)
    data_whole.check(config)
    yield OK, "what is on disk already is whole, and of versions that this one reads", ""


def _drives(config: Config) -> Rows:
    """How worn the drives are."""
    path = config.flash_path
    names = drives_below(_nearest(path))
    if not names:
        yield OK, f"no drive is known below {path}: nothing tells of its wear", ""
    for name in names:
        yield _wear(name)


def _wear(name: str) -> Row:
    try:
        wear = read_wear(name)
    except DeviceError as error:
        why = Exception.__str__(error)
        if error.status is Status.FORBIDDEN:
            return (
                OK,
                f"drive {name}: how worn it is only root may ask (sudo, or nvme smart-log)",
                "",
            )
        if error.status is Status.UNSUPPORTED:
            return OK, f"drive {name}: how worn it is cannot be read here: {why}", ""
        return WARN, f"drive {name} does not tell how worn it is: {why}", "look at dmesg"
    text = f"drive {name}: {wear.used_percent} % of its warranted life used, "
    text += f"{wear.spare_percent} % spare left, {wear.written_bytes / 1e12:,.1f} TB written"
    worries = list(wear.warnings)
    if wear.media_errors:
        worries.append(f"{wear.media_errors:,} media errors so far")
    if wear.used_percent >= USED_WARN_PERCENT or worries:
        fix = "plan its replacement; [admission] drive_writes_per_day slows its wear"
        return WARN, ", ".join([text, *worries]), fix
    return OK, text, ""


def _no_room(path: Path, wanted: int, left: int) -> Row:
    text = f"{path} is to have {_gib(wanted)}, and {path.parent} has {_gib(left)} left"
    return FAIL, text, "make room, or set a smaller [flash] size_bytes"


def _nearest(path: Path) -> Path:
    """It, or the first folder above it that is there."""
    return next(each for each in (path, *path.parents) if each.exists())


def _room(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def memory_left() -> tuple[int, str]:
    """Bytes this process could still get, and what bounds them."""
    left, bound = 0, "this machine"
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            left = int(line.split()[1]) * 1024
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        folder = _CGROUP / line.rpartition(":")[2].lstrip("/")
        try:
            most = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if most.isdigit() and int(most) - used < left:
            left, bound = max(0, int(most) - used), f"its control group ({folder})"
    return left, bound


def _memory(config: Config) -> Rows:
    if config.memory.huge_pages == "on":
        try:
            huge_pages.check_huge_pages(config.memory)
        except EntresolError as error:
            fix = f"right if the daemon runs and has them; else: {error.hint}"
            yield WARN, Exception.__str__(error), fix
    else:
        yield OK, huge_pages.told(config.memory), ""
    blocks = config.blocks_max(config.flash.size_bytes)
    slabs = config.memory.dram_bytes + config.memory.opened_bytes_max
    wanted = slabs + blocks * INDEX_BYTES_PER_BLOCK + RUNTIME_BYTES
    left, bound = memory_left()
    text = f"up to {_gib(wanted)} of memory is used; {_gib(left)} is there"
    if wanted > left:
        yield (
            WARN, f"{text}, says {bound}: slabs come as they are needed, and then it is killed",
            "a smaller [memory] dram_bytes or opened_bytes, or more memory (MemoryMax of the "
            "unit); a daemon that runs already has its part of it",
        )  # fmt: skip
    else:
        yield OK, text, ""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rdma = Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())
    if "verbs" in config.fabric.enabled and rdma and soft not in (resource.RLIM_INFINITY,):
        yield (
            WARN, f"only {soft // 1024} KiB of memory may be locked: verbs cannot register slabs",
            "LimitMEMLOCK=infinity in the unit (ulimit -l unlimited by hand)",
        )  # fmt: skip


def _shm(config: Config) -> Rows:
    folder = config.fabric.shm_dir
    if folder is None or "shm" not in config.fabric.enabled:
        return
    fix = f"install -d -m 2750 -o USER -g GROUP {folder}, as the daemon's user and its hosts' group"
    if not folder.is_dir():
        yield FAIL, f"there is no folder {folder} ([fabric] shm_dir)", fix
        return
    found = folder.stat()
    if not found.st_mode & stat.S_ISGID or not found.st_mode & stat.S_IXGRP:
        yield WARN, f"{folder} lets no group in: engines of other users get no shm", fix
    else:
        yield OK, f"engines whose user is of group {_group(found.st_gid)} may use shm", ""


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _listen(config: Config) -> Rows:
    listen = config.listen
    places = {
        "control": (listen.control_host, listen.control_port),
        "grpc": (listen.grpc_host, listen.grpc_port),
        "data": (listen.data_host, listen.data_port),
        "metrics": (listen.metrics_host, listen.metrics_port),
    }
    taken = []
    for name, (host, port) in places.items():
        problem = _try_port(host, port) if port else ""
        if problem == "taken":
            taken.append(f"{name} {port}")
        elif problem:
            yield (
                FAIL, f"[listen] {name}_host {host!r}: {problem}",
                "an address of this host, as `ip address` lists them",
            )  # fmt: skip
    if taken:
        yield (
            WARN, f"ports in use: {', '.join(taken)}",
            "right if the daemon runs; else find who has them: ss -ltnp",
        )  # fmt: skip
    else:
        yield OK, "its ports are free", ""


def _try_port(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "taken" if error.errno == 98 else str(error.strerror or error)
    return ""


def _files(config: Config) -> Rows:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < open_files.FILES_MIN:
        yield FAIL, f"only {hard} files may be open", open_files.FIX
    elif hard < FILES_ENOUGH:
        text = f"{hard} files may be open: enough for about {hard // 8} sessions"
        yield WARN, text, open_files.FIX
    else:
        yield OK, f"{soft:,} files may be open, {hard:,} on request", ""


def _gib(length_bytes: int) -> str:
    return f"{length_bytes / GIB:.1f} GiB"


def main(argv: list[str] | None = None) -> int:
    """Print the rows; 1 when one of them failed."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1:
        print("usage: python -m entresol_daemon.judge CONFIG", file=sys.stderr)
        return 2
    worst = 0
    for level, text, fix in judge(Path(words[0])):
        print(json.dumps({"level": level, "text": text, "fix": fix}), flush=True)
        worst |= level == FAIL
    return worst


if __name__ == "__main__":
    sys.exit(main())
