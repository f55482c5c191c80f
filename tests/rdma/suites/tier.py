"""The real daemon at a size that fits a guest, for suites that use the whole tier over verbs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "daemon"))

from daemon_lab import shape

from entresol_proto.ids import NamespaceDescriptor
from tests.harness import Running, running_daemon

BLOCK = 256 * 1024
DEADLINE_NS = 60_000_000_000  # an emulated machine is slow


def change(**limits: Any) -> Any:
    """The dev configuration, with verbs, and small."""
    return shape(fabrics=("verbs", "tcp"), dram=32 << 20, slab=4 << 20, flash=128 << 20,
                 segment=8 << 20, block_max=2 << 20, **limits)  # fmt: skip


@contextlib.asynccontextmanager
async def daemon(folder: Path, **limits: Any) -> AsyncIterator[Running]:
    """It runs in this process, below `folder`."""
    async with running_daemon(folder / "d", change(**limits)) as running:
        yield running


def descriptor(salt: str = "s") -> NamespaceDescriptor:
    """A namespace; another salt is another one."""
    return NamespaceDescriptor(model="guest", cache_salt=salt)
