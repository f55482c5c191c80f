"""What suites inside a guest share: the contract's helpers, and a check that nothing is left."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

for _part in ("contract", "daemon"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / _part))

_COUNTED = ("pd", "cq", "qp", "mr")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Two rails need no second kind of event loop: an emulated machine has better things to do."""
    spare = [
        item for item in items if "[verbs-2-rails-" in item.name and item.name.endswith("asyncio]")
    ]
    config.hook.pytest_deselected(items=spare)
    items[:] = [item for item in items if item not in spare]


def pytest_collection_finish() -> None:
    """What was imported stays for good: the leak checks need not go through it after every test,
    which costs a second each in emulation."""
    gc.collect()
    gc.freeze()


def resources() -> dict[str, dict[str, int]]:
    """What this kernel holds for user space, per RDMA device, as `rdma resource` counts it."""
    done = subprocess.run(
        ["rdma", "-j", "resource", "show"], capture_output=True, text=True, check=True
    )
    return {
        device["ifname"]: {name: int(device.get(name, 0)) for name in _COUNTED}
        for device in json.loads(done.stdout)
    }


class _Held:
    """What there was at the end of the last test."""

    found: ClassVar[dict[str, dict[str, int]] | None] = None


@pytest.fixture(autouse=True)
def _in_a_guest() -> Iterator[None]:
    """Skip outside of a guest; inside, what a test made in the kernel is gone when it ends."""
    if os.environ.get("ENTRESOL_RDMA_GUEST") != "1":
        pytest.skip("not run here: no soft-RoCE guest (make test-rdma)")
    before = _Held.found if _Held.found is not None else resources()
    yield
    _Held.found = resources()  # for the next test: to ask takes a process
    assert _Held.found == before
