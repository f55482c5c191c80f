"""What the keyring tests share: faulty system calls, seeded rings, what a ring knows."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

from entresol_daemon.keys import files
from entresol_daemon.keys.keyring import Keyring, Tenant, TenantQuota
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.keys.state import decode
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import KeyringError

KEK = FileKek(random.Random(1).randbytes(32), "kek A")
KEK_B = FileKek(random.Random(2).randbytes(32), "kek B")
SALTY = NamespaceDescriptor(model="secret-model", cache_salt="salt-of-acme").canonical()


class Crash(BaseException):
    """The process dies here."""


class FaultyCalls(files.OsCalls):
    """Fails the k-th call. With `crash`, that call stops halfway and no later one does anything;
    otherwise it alone fails, with `error_number`."""

    def __init__(self, k: int = -1, *, crash: bool = True, error_number: int = errno.EIO) -> None:
        self.k, self.crash, self.error_number = k, crash, error_number
        self.count = 0
        self.trace: list[str] = []
        self.short_writes = False

    def _step(self, what: str) -> bool:
        """True when this is the call that fails."""
        self.count += 1
        self.trace.append(what)
        if self.count == self.k:
            return True
        if self.crash and 0 < self.k < self.count:
            raise Crash
        return False

    def _fail(self) -> None:
        raise Crash if self.crash else OSError(self.error_number, os.strerror(self.error_number))

    def open(self, path: Path, flags: int) -> int:
        if self._step(f"open {path.name}"):
            self._fail()
        return super().open(path, flags)

    def read(self, fd: int, length_bytes: int) -> bytes:
        if self._step("read"):
            self._fail()
        return super().read(fd, length_bytes)

    def write(self, fd: int, raw: bytes | memoryview) -> int:
        if self._step("write"):
            super().write(fd, raw[: len(raw) // 2])
            self._fail()
        return super().write(fd, raw[: max(1, len(raw) // 3)] if self.short_writes else raw)

    def fsync(self, fd: int) -> None:
        # Counted, not done: a killed process loses nothing it has written, and hundreds of cases
        # need not wait for a disk.
        if self._step("fsync"):
            self._fail()

    def close(self, fd: int) -> None:
        super().close(fd)  # a dying process closes everything, too

    def rename(self, old: Path, new: Path) -> None:
        if self._step(f"rename {new.name}"):
            self._fail()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        if self._step(f"unlink {path.name}"):
            self._fail()
        super().unlink(path)


def open_ring(folder: Path, kek: FileKek | None = KEK, **more: object) -> Keyring:
    more.setdefault("calls", FaultyCalls())
    return Keyring.open(folder, kek, **more)  # type: ignore[arg-type]


def everything(folder: Path) -> bytes:
    """All bytes of all files under a folder."""
    return b"\0".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


def wrapped_of(folder: Path, name: str) -> list[bytes]:
    """The hexadecimal wrapped keys of a tenant, as they stand in the file."""
    tenant = decode((folder / "keyring.json").read_bytes()).tenants[name]
    return [blob.hex().encode() for blob in (tenant.naming, *(d.wrapped for d in tenant.deks))]


def seeded(folder: Path) -> dict[str, Tenant]:
    """A keyring with two tenants, one of them with two key versions and a namespace; closed."""
    ring = open_ring(folder)
    ring.add_tenant("acme", TenantQuota(1 << 40, 1 << 30, 3), now_unix_s=100)
    ring.add_tenant("zeta", now_unix_s=101)
    ring.rotate("acme", now_unix_s=102)
    ring.remember_namespace("acme", SALTY)
    ring.remember_namespace("zeta", SALTY)
    found = {name: ring.get(name) for name in ("acme", "zeta")}
    ring.close()
    return found


def keys_of(ring: Keyring) -> dict[str, tuple[bytes, dict[int, bytes], int, TenantQuota]]:
    """What must not change by accident."""
    found = {}
    for info in ring.tenants():
        tenant = ring.get(info.name)
        found[str(info.name)] = (
            tenant.naming_secret,
            dict(tenant.deks),
            tenant.active_version,
            tenant.info.quota,
        )
    return found


def open_any_kek(folder: Path) -> Keyring:
    """After a crash while the KEK was being changed, one of the two opens it."""
    try:
        return open_ring(folder, KEK)
    except KeyringError:
        return open_ring(folder, KEK_B)
