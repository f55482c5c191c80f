"""Builds and steers `faults.c`: which system calls of a daemon fail, how, how often, from when on.

The layout of the shared file is that of `struct control` there. Rules are written while nothing
strikes, then switched on; `heal` switches everything off at once, in every process that maps it.
"""

from __future__ import annotations

import enum
import errno
import mmap
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("faults.c")
MAGIC = 0x464C5431
RULES_MAX = 8
_HEAD = struct.Struct("=IIIIQQ")
_RULE = struct.Struct("=IIiiIIQQ")


class Call(enum.IntEnum):
    """System calls that move bytes, by what they do."""

    READ = 0  # read, readv, pread, preadv, recv, recvmsg
    WRITE = 1  # write, writev, pwrite, pwritev, send, sendmsg
    SYNC = 2  # fsync, fdatasync
    OPEN = 3  # open, openat
    RENAME = 4


class Kind(enum.IntEnum):
    """What a descriptor is."""

    DATA = 1  # the data file
    STATE = 2  # keyring, namespaces, checkpoint
    SOCKET = 3


class Act(enum.IntEnum):
    """What happens to a call that is struck."""

    ERROR = 0  # nothing is moved, errno is set
    SHORT = 1  # a part is moved and its length returned; calls without a length: EINTR
    TORN = 2  # a part is moved, and errno is set


_CALLS, _KINDS = len(Call), len(Kind) + 2
CONTROL_BYTES = _HEAD.size + RULES_MAX * _RULE.size + 2 * _CALLS * _KINDS * 8


@dataclass(frozen=True, slots=True)
class Rule:
    """Strikes these calls on these kinds: at `rate` (0..1), or exactly the `kth` one."""

    calls: tuple[Call, ...]
    kinds: tuple[Kind, ...]
    act: Act
    error: int = errno.EIO
    rate: float = 0.0
    kth: int = 0

    def pack(self) -> bytes:
        """As `struct rule`."""
        calls = sum(1 << call for call in self.calls)
        kinds = sum(1 << kind for kind in self.kinds)
        return _RULE.pack(calls, kinds, self.act, self.error, int(self.rate * 1e6), 0, self.kth, 0)


def compiler() -> str:
    """The system's C compiler, or ""."""
    return next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")


def build(folder: Path) -> Path:
    """Compile the interposer. Raises: CalledProcessError."""
    made = folder / "faults.so"
    subprocess.run(
        [compiler(), "-O2", "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl"], check=True
    )
    return made


class Faults:
    """The shared file of one lab."""

    def __init__(self, folder: Path, data_part: str, state_part: str) -> None:
        """`data_part` and `state_part` are what the paths of those files contain."""
        library = build(folder)
        path = folder / "faults.control"
        path.write_bytes(bytes(CONTROL_BYTES))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), CONTROL_BYTES)
        self._head(on=False, rules=0, seed=0)
        self.env = {
            "LD_PRELOAD": str(library),
            "ENTRESOL_FAULTS": str(path),
            "ENTRESOL_FAULTS_DATA": data_part,
            "ENTRESOL_FAULTS_STATE": state_part,
        }

    def _head(self, *, on: bool, rules: int, seed: int) -> None:
        self._map[: _HEAD.size] = _HEAD.pack(MAGIC, int(on), rules, 0, seed, 0)

    def strike(self, rules: Sequence[Rule], seed: int) -> None:
        """These rules hold from now on, and no others."""
        assert len(rules) <= RULES_MAX
        self._head(on=False, rules=0, seed=seed)
        raw = b"".join(rule.pack() for rule in rules)
        self._map[_HEAD.size : _HEAD.size + len(raw)] = raw
        self._head(on=True, rules=len(rules), seed=seed)

    def heal(self) -> None:
        """Nothing fails any more."""
        self._head(on=False, rules=0, seed=0)

    def injected(self) -> dict[tuple[Call, Kind], int]:
        """How often each call was struck since the beginning."""
        at = _HEAD.size + RULES_MAX * _RULE.size + _CALLS * _KINDS * 8
        counts = struct.unpack_from(f"={_CALLS * _KINDS}Q", self._map, at)
        return {
            (call, kind): counts[call * _KINDS + kind]
            for call in Call for kind in Kind if counts[call * _KINDS + kind]
        }  # fmt: skip

    def close(self) -> None:
        self._map.close()
