"""The tenant's own keys, for namespaces that no daemon can open: the file, and what is made of it.

Invariants: the secrets leave this module only as block keys, masked names and the file itself (mode
0600, replaced in one step); no repr, error text or log line shows them; a version number never
names two keys in one file, and in two files only if they were rotated in the same second: a host
that has another key misses, and never opens wrongly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from entresol_proto import ids, naming
from entresol_proto.ids import EngineKey, NamespaceDescriptor
from entresol_proto.seal.block import (
    DEK_BYTES,
    HOST_KEY_LABEL,
    BlockKey,
    SealedHeader,
    derive_block_key,
    new_salt,
)
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import KeyringError, Status

FORMAT = "entresol-tenant-key/1"
FILE_BYTES_MAX = 64 * 1024
VERSIONS_MAX = 64
LOOK_NS = 2_000_000_000  # how often the file is looked at for a newer content
LOCK_S_MAX = 10.0  # somebody else's change of a file in the same folder takes milliseconds
LOCK_LOOK_S = 0.05
_U32 = 2**32
_HOW_TO_MAKE = "make one with `entresol key new FILE`, and copy it to every host of the tenant"

log = logging.getLogger("entresol.client")


@dataclass(frozen=True, slots=True)
class KeyVersion:
    """One data key of the tenant. `created_unix_s` is for people."""

    created_unix_s: int
    secret: bytes = field(repr=False)  # 32 bytes

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that name the key and say nothing about it."""
        return hashlib.blake2b(
            b"", digest_size=8, key=self.secret, person=b"entresol-hskfp"
        ).hexdigest()


@dataclass(frozen=True, slots=True)
class TenantKey:
    """The content of one key file. New blocks are sealed under the highest version."""

    naming: bytes = field(repr=False)  # 32 bytes: masks names
    versions: Mapping[int, KeyVersion]

    def __post_init__(self) -> None:
        if not 1 <= len(self.versions) <= VERSIONS_MAX:
            raise KeyringError(f"a tenant key file holds 1 to {VERSIONS_MAX} versions")
        keys = [self.naming, *(version.secret for version in self.versions.values())]
        if any(len(key) != DEK_BYTES or len(set(key)) < 8 for key in keys):
            raise KeyringError("a key in it is not 32 random bytes", hint=_HOW_TO_MAKE)
        if len(set(keys)) != len(keys):
            raise KeyringError("two keys in it are the same", hint=_HOW_TO_MAKE)
        if not all(0 < number < _U32 for number in self.versions):
            raise KeyringError(f"a version in it is not 1 to {_U32 - 1}")

    @property
    def active(self) -> int:
        """The version of new blocks."""
        return max(self.versions)

    @classmethod
    def generate(cls, now_unix_s: int) -> TenantKey:
        """Fresh random keys, version 1."""
        first = KeyVersion(now_unix_s, secrets.token_bytes(DEK_BYTES))
        return cls(secrets.token_bytes(DEK_BYTES), {1: first})

    def rotated(self, now_unix_s: int) -> TenantKey:
        """With one version more; older ones still open their blocks. Its number is the time, so
        that copies of one file, rotated on two hosts, do not call two keys by one number.

        Raises: KeyringError.
        """
        if len(self.versions) >= VERSIONS_MAX:
            raise KeyringError(
                f"there are {VERSIONS_MAX} versions",
                hint="retire the oldest with `entresol key retire`: its blocks read as misses then",
                status=Status.QUOTA,
            )
        number = max(self.active + 1, min(now_unix_s, _U32 - 1))
        added = KeyVersion(now_unix_s, secrets.token_bytes(DEK_BYTES))
        return replace(self, versions={**self.versions, number: added})

    def retired(self, version: int) -> TenantKey:
        """Without an older version. Raises: KeyringError for the active or an unknown one."""
        if version == self.active or version not in self.versions:
            raise KeyringError(
                f"there is no older version {version}",
                hint="rotate first; the newest version cannot be retired",
                status=Status.BAD_REQUEST,
            )
        kept = {number: key for number, key in self.versions.items() if number != version}
        return replace(self, versions=kept)

    # -- the file

    def encode(self) -> bytes:
        """The text of the file (TOML)."""
        lines = [
            "# An Entresol tenant key. Who has it reads the tenant's host-sealed blocks; who loses",
            "# it loses them. Keep it private (mode 0600), and the same on all the tenant's hosts.",
            f'format = "{FORMAT}"',
            f'naming = "{self.naming.hex()}"',
        ]
        for number, version in sorted(self.versions.items()):
            lines += [
                "",
                "[[versions]]",
                f"version = {number}",
                f"created_unix_s = {version.created_unix_s}",
                f'secret = "{version.secret.hex()}"',
            ]
        return "\n".join([*lines, ""]).encode()

    @classmethod
    def decode(cls, raw: bytes) -> TenantKey:
        """Read `encode`'s text; comments and order may differ. Raises: KeyringError."""
        try:
            table = tomllib.loads(raw.decode())
            if table.pop("format", None) != FORMAT:
                raise KeyringError(f"it is not of format {FORMAT}", hint=_HOW_TO_MAKE)
            naming = bytes.fromhex(table.pop("naming"))
            rows: list[dict[str, Any]] = table.pop("versions")
            versions: dict[int, KeyVersion] = {}
            for row in rows:
                number, created = row.pop("version"), row.pop("created_unix_s")
                secret = bytes.fromhex(row.pop("secret"))
                if row or type(number) is not int or type(created) is not int:
                    raise ValueError("a version has another field")
                if number in versions:
                    raise KeyringError(f"version {number} is in it twice", hint=_HOW_TO_MAKE)
                versions[number] = KeyVersion(created, secret)
            if table:
                raise ValueError("another field")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            # Not `from` the cause: its text may quote a secret.
            raise KeyringError("it is damaged or was edited", hint=_HOW_TO_MAKE) from None
        return cls(naming, versions)

    @classmethod
    def load(cls, path: Path) -> TenantKey:
        """Read a key file.

        Raises: KeyringError, naming the file and what to do, when it is missing, unreadable, open
            to other users, or no key file.
        """
        return _load(path)[0]

    def save(self, path: Path, *, new: bool = False) -> None:
        """Write the file, mode 0600: in one step, durable on return, and never half of it.

        `new` refuses to replace a file; else its owner stays, and a link still points to it.
        Raises: KeyringError.
        """
        try:
            place = path if new else Path(os.path.realpath(path))
            temporary = place.parent / f".entresol-key-{secrets.token_hex(8)}.tmp"
            fd = os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
            try:
                with os.fdopen(fd, "wb") as file:
                    if not new:
                        _keep_owner(fd, place)
                    file.write(self.encode())
                    file.flush()
                    os.fsync(file.fileno())
                if new:
                    os.link(temporary, place)
                else:
                    os.rename(temporary, place)
            finally:
                temporary.unlink(missing_ok=True)
            folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except FileExistsError:
            raise KeyringError(
                f"tenant key file {path} exists and is not overwritten",
                hint="everything sealed under it would be lost; choose another path, or `rotate`",
            ) from None
        except OSError as error:
            raise KeyringError(
                f"cannot write tenant key file {path}: {error.strerror}",
                hint="free some space there"
                if error.errno == errno.ENOSPC
                else "name a file in a folder that this user may write",
            ) from None
        except ValueError:
            raise _no_path(path) from None

    @classmethod
    def change(cls, path: Path, how: Callable[[TenantKey], TenantKey]) -> TenantKey:
        """Load, change and save a file; of two at once, the later sees what the earlier did.

        Raises: KeyringError as `load`, `how` and `save`.
        """
        cls.load(path)  # what is no key file is told before a lock is waited for
        with _locked(path):
            key = how(cls.load(path))
            key.save(path)
        return key


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the changers of key files in this folder: the file itself is replaced, and a
    lock on it would be one on the old file. Raises: KeyringError."""
    until_s = time.monotonic() + LOCK_S_MAX
    try:
        folder = os.open(os.path.dirname(os.path.realpath(path)), os.O_RDONLY | os.O_CLOEXEC)
        try:
            while True:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until_s:
                        raise
                time.sleep(LOCK_LOOK_S)
            yield
        finally:
            os.close(folder)
    except OSError as error:
        raise KeyringError(
            f"cannot lock the folder of tenant key file {path}: {error.strerror}",
            hint="somebody else changes a key there: try again",
        ) from None


def _keep_owner(fd: int, place: Path) -> None:
    """Give the new file to who has the old one: the engine's user must still be able to read it,
    also when root rotates. Raises: OSError where we may not."""
    try:
        old = os.stat(place)
    except FileNotFoundError:
        return
    try:
        os.fchown(fd, old.st_uid, old.st_gid)
    except PermissionError:
        if os.fstat(fd).st_uid != old.st_uid:  # the group alone opens nothing: mode 0600
            raise


def _no_path(path: Path) -> KeyringError:
    return KeyringError(f"{str(path)!r} is no path of a tenant key file", hint=_HOW_TO_MAKE)


_Stamp = tuple[int, int, int]  # inode, size, mtime: another one, another content


def _load(path: Path) -> tuple[TenantKey, _Stamp]:
    try:
        # Not blocking: opening a pipe would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found, raw = os.fstat(fd), b""
            regular = stat.S_ISREG(found.st_mode)
            if regular:
                with open(fd, "rb", closefd=False) as file:
                    raw = file.read(FILE_BYTES_MAX + 1)
        finally:
            os.close(fd)
    except ValueError:
        raise _no_path(path) from None
    except FileNotFoundError:
        raise KeyringError(f"there is no tenant key file {path}", hint=_HOW_TO_MAKE) from None
    except OSError as error:
        raise KeyringError(
            f"cannot read tenant key file {path}: {error.strerror}",
            hint="let the engine's user read it, and only that user",
        ) from None
    if not regular or len(raw) > FILE_BYTES_MAX:
        raise KeyringError(f"tenant key file {path} is no key file", hint=_HOW_TO_MAKE)
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise KeyringError(
            f"tenant key file {path} may be read or written by other users "
            f"(mode {stat.S_IMODE(found.st_mode):04o})",
            hint=f"chmod 600 {path}",
        )
    try:
        key = TenantKey.decode(raw)
    except KeyringError as error:
        raise KeyringError(
            f"tenant key file {path}: {Exception.__str__(error)}", hint=error.hint or _HOW_TO_MAKE
        ) from None
    return key, (found.st_ino, found.st_size, found.st_mtime_ns)


class KeyFile:
    """A key file as a client uses it: followed while running. Any thread."""

    def __init__(self, path: Path) -> None:
        """Raises: KeyringError as `TenantKey.load`."""
        self.path = path
        self._lock = threading.Lock()
        self._key, self._stamp = _load(path)
        self._looked_ns = time.monotonic_ns()
        self._told = ""  # why the file was not taken over, last

    def __repr__(self) -> str:
        return f"KeyFile({str(self.path)!r})"

    @property
    def naming(self) -> bytes:
        """The naming secret; it never changes in the life of a client."""
        return self._key.naming

    def active(self) -> tuple[int, bytes]:
        """The version and data key of a new block."""
        self._look()
        key = self._key
        return key.active, key.versions[key.active].secret

    def find(self, version: int) -> bytes | None:
        """The data key of a block's version; None when this host does not have it."""
        self._look()  # also where it is there: it may be retired meanwhile
        found = self._key.versions.get(version)
        return None if found is None else found.secret

    def _look(self) -> None:
        """Take over a file that was replaced; a bad one changes nothing and is told once."""
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns < LOOK_NS:
            return
        with self._lock:
            if now_ns - self._looked_ns < LOOK_NS:
                return
            try:
                found = os.stat(self.path)
                if (found.st_ino, found.st_size, found.st_mtime_ns) == self._stamp:
                    self._told = ""
                    return
                key, stamp = _load(self.path)
                self._check_successor(key)
                self._key, self._stamp = key, stamp
                self._told = ""
            except (KeyringError, OSError) as error:
                if str(error) != self._told:
                    self._told = str(error)
                    log.warning("event=tenant_key_not_reloaded reason=%r", self._told)
                return
            finally:  # last: who comes meanwhile waits for what is found
                self._looked_ns = now_ns
            log.info("event=tenant_key_reloaded version=%d", key.active)

    def _check_successor(self, key: TenantKey) -> None:
        """Raises: KeyringError unless it is this key with other versions."""
        mine = self._key.versions
        same = all(key.versions[v] == mine[v] for v in key.versions.keys() & mine.keys())
        if key.naming != self._key.naming or not same:
            raise KeyringError(
                f"tenant key file {self.path} holds another key than before",
                hint="restart the engine to use another key",
            )


class HostSeal:
    """What one namespace of a client needs to be sealed and opened here and nowhere else.

    Attributes:
        canonical: what OPEN_NAMESPACE carries.
        digest: for placement.
    """

    def __init__(self, keys: KeyFile, descriptor: NamespaceDescriptor) -> None:
        """Raises: BadKeyError for an unknown dtype."""
        dtype = DType.from_name(descriptor.dtype)
        namespace, self._mask = ids.host_sealed_namespace(keys.naming, descriptor, dtype)
        self._keys = keys
        self.canonical = namespace.canonical()
        self.digest = ids.descriptor_digest(self.canonical)

    def mask(self, engine_key: EngineKey) -> EngineKey:
        """What stands for an engine key outside this host."""
        return ids.masked_engine_key(self._mask, engine_key)

    def mask_all(self, engine_keys: Sequence[EngineKey]) -> list[EngineKey]:
        """`mask` of each."""
        return naming.masked_engine_keys(self._mask, engine_keys)

    def new_key(self) -> tuple[int, bytes, BlockKey]:
        """(version, salt, key) for one write."""
        version, secret = self._keys.active()
        salt = new_salt()
        return version, salt, derive_block_key(secret, salt, HOST_KEY_LABEL)

    def key_of(self, header: SealedHeader) -> BlockKey | Status:
        """`KeyOf` of `open_into`. LOCKED: this host does not have that version of the key."""
        if not header.host_sealed:
            return Status.CORRUPT  # nobody but us seals here
        secret = self._keys.find(header.dek_version)
        if secret is None:
            return Status.LOCKED
        return derive_block_key(secret, header.salt, HOST_KEY_LABEL)
