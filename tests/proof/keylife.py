"""What the lines of key life share: the operator's hand, and eyes for a daemon's memory and files.

Invariant: `Spy` looks at the whole address space of the daemon (every readable mapping, slabs
included) and at every file it has; what it does not find is not there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from entresol_client.cli import rpc
from entresol_daemon.config import Config
from entresol_daemon.flash.segment import RECORD_HEADER_BYTES
from entresol_daemon.keys.keyring import Keyring
from entresol_daemon.keys.providers import FileKek
from entresol_proto.limits import ALIGN_BYTES
from entresol_proto.seal.block import SealedHeader, derive_block_key
from entresol_proto.seal.keys import HOST_KEY_LABEL, KEY_LABEL
from entresol_proto.status import SealError
from tests.daemon.life_lab import Lab
from tests.proof.memory_scan import Search

PATIENCE_S = 60.0


def configure(lab: Lab, change: Callable[[Config], Config]) -> None:
    """Change the configuration of a lab's site for good."""
    lab.site.config = change(lab.site.config)
    lab.site.write(lab.site.config)


def with_keys(**values: Any) -> Callable[[Config], Config]:
    """A change of [keys]."""
    return lambda config: replace(config, keys=replace(config.keys, **values))


def kek_of(lab: Lab) -> Path:
    """The KEK file the site's configuration names."""
    path = lab.site.config.keys.kek_file
    assert path is not None
    return path


@contextlib.contextmanager
def operator(lab: Lab) -> Iterator[tuple[Any, Any]]:
    """(stub, messages) of the operator's service."""
    _, pb, stubs = rpc.modules()
    with rpc.operator_channel(lab.site.directory / "run" / "admin.sock") as channel:
        yield stubs.AdminStub(channel), pb


def ask(lab: Lab, method: str, **fields: Any) -> Any:
    """One call of the operator. Raises: CliError with what the daemon answered."""
    request = "TenantListRequest" if method == "TenantList" else f"{method}Request"
    with operator(lab) as (stub, pb):
        return rpc.call(getattr(stub, method), getattr(pb, request)(**fields), timeout_s=PATIENCE_S)


def tenant(lab: Lab, name: str = "dev") -> Any:
    """The operator's row of a tenant."""
    return next(info for info in ask(lab, "TenantList").tenants if info.name == name)


def until(check: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
    """Wait for it; False when it did not come."""
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


class Spy:
    """Someone with root on the daemon's machine."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def in_memory(self, needles: dict[str, bytes]) -> dict[str, int]:
        """How often each is in the daemon's memory, which stands still meanwhile."""
        search = Search({needle: name for name, needle in needles.items()})
        os.kill(self._lab.pid, signal.SIGSTOP)
        try:
            found = search.in_process(self._lab.pid)
        finally:
            os.kill(self._lab.pid, signal.SIGCONT)
        return {name: found.get(needle, Counter()).total() for name, needle in needles.items()}

    def in_files(self, needles: dict[str, bytes]) -> dict[str, int]:
        """How often each is in the daemon's files: flash, state, logs. Certificates are the
        tenants'."""
        search = Search({needle: name for name, needle in needles.items()})
        root = self._lab.site.directory
        paths = [p for p in root.rglob("*") if p.is_file() and "pki" not in p.parts]
        found: Counter[bytes] = Counter()
        for path in [*paths, self._lab.log]:
            found += search.in_file(path)
        return {name: found[needle] for name, needle in needles.items()}

    def headers(self, plain_bytes: int) -> list[SealedHeader]:
        """Of every sealed block of this length on flash, dropped ones too."""
        found = []
        with open(self._lab.site.config.flash_path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for at in range(0, size, ALIGN_BYTES):
                if os.pread(file.fileno(), 4, at + RECORD_HEADER_BYTES) != b"ENTS":
                    continue
                with contextlib.suppress(SealError):
                    raw = os.pread(file.fileno(), 8192, at + RECORD_HEADER_BYTES)
                    found.append(SealedHeader.parse(raw))
        return [header for header in found if header.plain_bytes == plain_bytes]

    def opened(self, headers: Iterable[SealedHeader]) -> int:
        """How many of these some key of a stopped daemon opens. Its KEK is at hand."""
        keyring = Keyring.open(
            self._lab.site.config.shard.state_dir, FileKek.open(kek_of(self._lab))
        )
        try:
            deks = [
                dek for info in keyring.tenants() for dek in keyring.get(info.name).deks.values()
            ]
        finally:
            keyring.close()
        return sum(
            any(
                derive_block_key(dek, header.salt, label).commitment == header.commitment
                for dek in deks
                for label in (KEY_LABEL, HOST_KEY_LABEL)
            )
            for header in headers
        )
