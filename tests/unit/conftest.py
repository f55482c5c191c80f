"""Fixtures that several modules of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from entresol_proto import native
from tests.unit.gated_kernel import Gate, build


@pytest.fixture(scope="session")
def gated_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native kernel with a gate in front of its reads."""
    return build(tmp_path_factory.mktemp("gated"))


@pytest.fixture
def gate(gated_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """That kernel in use, and its gate."""
    monkeypatch.setattr(native, "KERNEL", native.Kernel(gated_library))
    one = Gate(gated_library)
    yield one
    one.close()
