"""The daemon locks itself in: after this it writes nothing but its own files, starts no program and
calls nobody.

Linux's Landlock, without a helper: three system calls by number, the same on every architecture.
Rules name folders and files; everything handled and not named is refused with EACCES, also to root,
and there is no way back. Reading stays free (Python imports as it goes, certificates are reloaded).

Invariant: applied while the process has one thread, so that every later one inherits it; what
could not be had is said in the log, and with mode "on" the daemon does not start.

Source: Documentation/userspace-api/landlock.rst of Linux; uapi/linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import logging
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from entresol_daemon.config import Config
from entresol_proto.status import EntresolError, Status

log = logging.getLogger("entresol.sandbox")

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13  # rename or link between folders; ABI 2
TRUNCATE = 1 << 14  # ABI 3
_CONNECT_TCP = 1 << 1  # ABI 4
_SCOPE_SIGNAL = 1 << 1  # ABI 6: signals to processes outside

_WRITES = (
    EXECUTE | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_CHAR | MAKE_DIR | MAKE_REG | MAKE_SOCK
    | MAKE_FIFO | MAKE_BLOCK | MAKE_SYM
)  # fmt: skip
_FOLDER = WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_SYM
_OF_FILES = EXECUTE | WRITE_FILE | TRUNCATE  # what a rule about a file may grant
# Opened for writing by libraries; RDMA is driven by writing to its devices.
_DEVICES = (Path("/dev/null"), Path("/dev/infiniband"))


class SandboxError(EntresolError):
    """Landlock was asked for and cannot be had."""

    status = Status.UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Rule:
    """A folder (and all in it) or a file, and what may be done there."""

    path: Path
    allowed: int = _FOLDER | REFER | TRUNCATE


def rules_of(config: Config) -> list[Rule]:
    """What this configuration writes to: state, data file, checkpoint, sockets, a few devices.

    Makes the folders and the data file that are not there yet, because a rule needs them.
    Raises: SandboxError.
    """
    flash = config.flash_path
    folders = [config.shard.state_dir, config.listen.unix_dir, config.checkpoint_path.parent]
    if config.fabric.shm_dir is not None and "shm" in config.fabric.enabled:
        folders.append(config.fabric.shm_dir)
    folders += [Path(extra) for extra in config.sandbox.writable]
    try:
        for folder in folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SandboxError(
            f"cannot make the folder {folder}: {error.strerror}",
            hint="check owner and mount options; [shard], [listen], [fabric], [sandbox] name it",
            status=Status.IO_ERROR,
        ) from None
    rules = [Rule(folder) for folder in dict.fromkeys(folders)]
    if not flash.exists() and config.shard.state_dir not in flash.parents:
        # The device makes and fills it; its folder may hold other things.
        rules.append(Rule(flash.parent, WRITE_FILE | MAKE_REG | REMOVE_FILE | TRUNCATE))
    rules.append(Rule(flash, WRITE_FILE | TRUNCATE))
    return rules + [Rule(path, WRITE_FILE) for path in _DEVICES]


def abi() -> int:
    """Landlock's version in this kernel; 0 when it has none or does not let us."""
    found = _syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    return max(0, found)


@dataclass(frozen=True, slots=True)
class Entered:
    """What came of `enter`. The log begins a thread, so it is told afterwards: `say`.

    Attributes:
        version: of Landlock; 0: not locked in, for `reason`.
        outside: threads that were there before, which are not locked in.
        writable: what may still be written to.
    """

    version: int
    reason: str = ""
    outside: int = 0
    writable: tuple[str, ...] = ()

    def say(self) -> None:
        """Tell the log."""
        if not self.version:
            log.warning("event=sandbox_unavailable reason=%r", self.reason)
            return
        if self.outside:
            log.warning("event=sandbox_incomplete threads_outside=%d", self.outside)
        log.info(
            "event=sandboxed landlock=%d connects=%s writable=%r",
            self.version, "no" if self.version >= 4 else "yes", os.pathsep.join(self.writable),
        )  # fmt: skip


def enter(config: Config, extra: Iterable[Rule] = ()) -> Entered:
    """Lock this process in as `[sandbox]` says.

    Call it before the first thread is started. Raises: SandboxError when mode is "on" and this
    kernel cannot, or a rule cannot be made.
    """
    if config.sandbox.mode == "off":
        return Entered(0, "[sandbox] mode is off")
    found = abi()
    if not found:
        why = "this kernel has no Landlock, or a container forbids it"
        if config.sandbox.mode == "on":
            raise SandboxError(why, hint='Linux 5.13 or newer, or [sandbox] mode = "auto"')
        return Entered(0, why)
    rules = [rule for rule in (*rules_of(config), *extra) if rule.path.exists()]
    outside = len(os.listdir("/proc/self/task")) - 1
    restrict(rules, found)
    return Entered(found, "", outside, tuple(str(rule.path) for rule in rules))


def restrict(rules: Iterable[Rule], version: int) -> None:
    """Refuse to this thread, and to all it starts, every write, execution and TCP connection that
    no rule allows. Raises: SandboxError."""
    handled = _WRITES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("=Q", handled)
    if version >= 4:
        attributes += struct.pack("=Q", _CONNECT_TCP)
    if version >= 6:
        attributes += struct.pack("=Q", _SCOPE_SIGNAL)
    ruleset = _checked(_CREATE_RULESET, attributes, len(attributes), 0, what="make a rule set")
    try:
        for rule in rules:
            _allow(ruleset, rule, handled)
        if _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise SandboxError(f"cannot give up new privileges: {_last_error()}")
        _checked(_RESTRICT_SELF, ruleset, 0, what="lock the process in")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, rule: Rule, handled: int) -> None:
    try:
        fd = os.open(rule.path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxError(f"cannot open {rule.path}: {error.strerror}") from None
    try:
        allowed = rule.allowed & handled
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            allowed &= _OF_FILES
        raw = struct.pack("=Qi", allowed, fd)
        _checked(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, raw, 0, what=f"allow {rule.path}")
    finally:
        os.close(fd)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    """The result; -1 with errno set when the kernel refused."""
    call = _libc().syscall
    call.restype = ctypes.c_long
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return int(call(ctypes.c_long(number), *words))


def _checked(number: int, *arguments: int | bytes | None, what: str) -> int:
    found = _syscall(number, *arguments)
    if found < 0:
        raise SandboxError(f"cannot {what}: {_last_error()}", hint='[sandbox] mode = "off"')
    return found


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
