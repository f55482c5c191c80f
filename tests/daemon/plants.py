"""Bugs that canaries plant in a real daemon process: each must be found by its line.

Called by name before the daemon starts, in its own process only.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from entresol_daemon.flash import runs
from entresol_daemon.flash import writer as flash_writer
from entresol_daemon.flash.device import Check
from entresol_daemon.flash.group import Group, Pending
from entresol_daemon.flash.segment import RecordKind
from entresol_daemon.keys import keyring
from entresol_daemon.shard import granting, tenancy
from entresol_daemon.shard.sessions import Leased
from entresol_proto.status import Status

EARLY_S = 0.05  # so long after its answer a write begins: longer than any answer takes to be read


def early_ack() -> None:
    """`durable` is said before anything was written."""
    submit = flash_writer.Writer.submit

    def eager(self: flash_writer.Writer, pending: Pending) -> None:
        if pending.future is not None and not pending.future.done():
            pending.future.set_result(Status.OK)
        asyncio.get_running_loop().call_later(EARLY_S, submit, self, pending)

    flash_writer.Writer.submit = eager  # type: ignore[method-assign]


def rotation_destroys() -> None:
    """Every rotation destroys the older key versions, as only a forced one may."""
    rotate = keyring.Keyring.rotate

    def eager(self: keyring.Keyring, name: str, *, now_unix_s: int, force: bool = False) -> int:
        return rotate(self, name, now_unix_s=now_unix_s, force=True)

    keyring.Keyring.rotate = eager  # type: ignore[method-assign]


def locked_drops() -> None:
    """A daemon without its KEK drops what it cannot open."""
    find = tenancy.Tenancy.find

    def careless(self: tenancy.Tenancy) -> None:
        find(self)
        engine = self._parts.engine
        if self._parts.keyring.locked:
            for namespace in engine.index.namespaces():
                list(engine.drop_namespace(namespace))

    tenancy.Tenancy.find = careless  # type: ignore[method-assign]


def keeps_leases() -> None:
    """Every hundredth lease that ends is forgotten instead."""
    let_go = granting.Granting.let_go
    ended = 0

    def careless(self: granting.Granting, leased: Leased) -> None:
        nonlocal ended
        ended += 1
        if ended % 100:
            let_go(self, leased)

    granting.Granting.let_go = careless  # type: ignore[method-assign]


def breaks_in_writing() -> None:
    """The writer fails in a way that nobody foresaw, once its third group is durable."""
    succeed = flash_writer.Writer._succeed
    groups = 0

    def brittle(self: flash_writer.Writer, group: Group) -> None:
        nonlocal groups
        groups += any(p.kind is RecordKind.BLOCK for p in group.records)
        if groups == 3:
            raise RuntimeError("planted")
        succeed(self, group)

    flash_writer.Writer._succeed = brittle  # type: ignore[method-assign]


def dies_of_reads() -> None:
    """A failed read of flash ends the process."""
    read_job = runs.read_job

    def brittle(fd: int, mine: runs.Run, got: int, check: Check | None = None) -> Any:
        failed = read_job(fd, mine, got, check)
        if any(status is Status.IO_ERROR for _, status in failed):
            os._exit(1)
        return failed

    runs.read_job = brittle
