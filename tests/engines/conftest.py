"""What every suite of real engines may ask for: the daemon, a model, a place for its figures.

Runs in the environments' interpreters. Invariant: a test ends with no daemon of its own running.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import tiny_model
from tests.engines.runner import FIGURES_ENV, RECORD_ENV, SIZE_ENV, WORK_ENV
from tests.engines.tier_daemon import TierDaemon
from tests.rdma.record import Recorder

MODEL_SECONDS_MAX = 180.0


def pytest_configure(config: pytest.Config) -> None:
    """Write down each outcome as it comes, where the runner asked for it."""
    if record := os.environ.get(RECORD_ENV):
        config.pluginmanager.register(Recorder(open(record, "a", buffering=1)))  # noqa: SIM115


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that are too slow for every commit are skipped there, and the reports say so."""
    if os.environ.get(SIZE_ENV, "full") == "full":
        return
    mark = pytest.mark.skip(reason="not run here: commit size, `--size full` runs it")
    for item in items:
        if item.get_closest_marker("full_only"):
            item.add_marker(mark)


@pytest.fixture
def make_tier() -> Iterator[Callable[..., TierDaemon]]:
    """`make_tier(**TierDaemon arguments)`: daemons not started yet, removed after the test."""
    made: list[TierDaemon] = []

    def make(**arguments: Any) -> TierDaemon:
        made.append(TierDaemon(**arguments))
        return made[-1]

    yield make
    for one in made:
        one.remove()


@pytest.fixture
def tier(make_tier: Callable[..., TierDaemon]) -> TierDaemon:
    """A running daemon with the tenants `dev` and `other`."""
    daemon = make_tier()
    daemon.start()
    return daemon


def _model(name: str, *arguments: str) -> Path:
    """A tiny model, written once for all runs; named by the code that writes it."""
    source = Path(tiny_model.__file__).read_bytes()
    digest = hashlib.blake2b(source + repr(arguments).encode(), digest_size=6).hexdigest()
    root = Path(os.environ.get(WORK_ENV) or tempfile.gettempdir())
    at = root / f"{name}-{digest}"
    if not at.exists():
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        try:
            command = [sys.executable, "-m", "tests.engines.tiny_model", str(scratch), *arguments]
            subprocess.run(command, check=True, timeout=MODEL_SECONDS_MAX)
            with contextlib.suppress(OSError):  # another run was first
                scratch.rename(at)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return at


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A checkpoint of 4 layers that vLLM loads; the same bytes in every run."""
    return _model("tiny-llama")


@pytest.fixture(scope="session")
def other_llama() -> Path:
    """The same shape with other weights: must never share a block with `tiny_llama`."""
    return _model("other-llama", "--seed", "1")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, float, str], None]:
    """`figure(name, value, unit)`: something measured, for the report and the printed table."""

    def note(name: str, value: float, unit: str) -> None:
        print(f"figure {name} = {value:.6g} {unit}")
        if path := os.environ.get(FIGURES_ENV):
            line = {"test": request.node.nodeid, "name": name, "value": value, "unit": unit}
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    return note
