"""Which formats the data of a configuration has, and whether this build reads them.

Asked before a daemon starts (`entresold --check`) and by a package before it replaces a newer one
(`entresold formats`), so that going back across a change of format is refused with the reason while
the version that can read the data is still installed.

Invariant: nothing is opened for writing, no key is needed, and what is damaged is left to the
daemon to judge: only a version that was read, and is another one, is a refusal.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from entresol_daemon.config import Config
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.superblock import FORMAT_VERSION, version_of
from entresol_daemon.keys.namespaces import NAMESPACES_VERSION
from entresol_daemon.keys.state import KEYRING_VERSION
from entresol_proto.status import FormatError

KEYRING_BYTES_MAX = 1 << 30
HEAD_BYTES_MAX = 512  # of a namespaces file: its version comes before its body
READS = {
    "data-file": FORMAT_VERSION, "keyring": KEYRING_VERSION, "namespaces": NAMESPACES_VERSION,
}  # fmt: skip
KEYRINGS = ("keyring.json", "keyring.json.bak")


@dataclass(frozen=True, slots=True)
class Found:
    """One thing on disk, the format version it says it has, and the one this build reads."""

    kind: str  # a key of READS
    path: Path
    version: int

    @property
    def readable(self) -> bool:
        """Whether this build reads it."""
        return self.version == READS[self.kind]


def look(config: Config) -> list[Found]:
    """What is there; things that are missing, blank or damaged are left out. Raises: OSError."""
    folder = config.shard.state_dir
    return [*_data_file(config.flash_path), *_keyring(folder), *_namespaces(folder / "namespaces")]


def check(config: Config) -> None:
    """Raises: FormatError for data that another version wrote, OSError when it cannot be read."""
    for found in look(config):
        if not found.readable:
            newer = found.version > READS[found.kind]
            raise FormatError(
                f"{found.path} has {found.kind} format version {found.version}, this build reads "
                f"version {READS[found.kind]}",
                hint="a newer version wrote it: install that one again, nothing was changed"
                if newer
                else "start the version that wrote it, or give an empty place",
            )


def _open(path: Path) -> int:
    """Without waiting for anybody, as opening a pipe would. Raises: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file or block device", str(path))
    return fd


def _data_file(path: Path) -> Iterator[Found]:
    """The newer of the two superblocks' versions."""
    try:
        fd = _open(path)
    except FileNotFoundError:
        return
    try:
        last = (os.lseek(fd, 0, os.SEEK_END) & -BLOCK) - BLOCK
        blocks = [os.pread(fd, BLOCK, offset) for offset in {0, max(0, last)}]
    finally:
        os.close(fd)
    versions = [version_of(block) for block in blocks if len(block) == BLOCK]
    known = [version for version in versions if version is not None]
    if known:
        yield Found("data-file", path, max(known))


def _keyring(folder: Path) -> Iterator[Found]:
    for name in KEYRINGS:
        try:
            with open(_open(folder / name), "rb") as file:
                version = json.loads(file.read(KEYRING_BYTES_MAX))["version"]
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, RecursionError):  # damaged: the daemon says how
            continue
        if type(version) is int:
            yield Found("keyring", folder / name, version)


def _namespaces(folder: Path) -> Iterator[Found]:
    """The newest of the tenants' files: there may be thousands."""
    newest: Found | None = None
    for path in sorted(folder.glob("*.json")):
        try:
            with open(_open(path), "rb") as file:
                head, body, _ = file.read(HEAD_BYTES_MAX).partition(b',"body":')
            version = json.loads(head + b"}" if body else head)["version"]
        except FileNotFoundError:  # a daemon that runs forgot a tenant
            continue
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(version) is int and (newest is None or version > newest.version):
            newest = Found("namespaces", path, version)
    if newest is not None:
        yield newest
