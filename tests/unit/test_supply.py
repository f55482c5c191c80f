"""What our runs install, and what a wheel says is in it. Builds themselves are the line S10."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import supply

ROOT = Path(__file__).resolve().parents[2]


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_sbom", ROOT / "proto" / "build_sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = list(project["dependencies"])
    for more in project["optional-dependencies"].values():
        listed += more
    names = (re.split(r"[\s<>=!~;\[]", one, maxsplit=1)[0] for one in listed)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names} - {"entresol"}


def test_the_bill_of_materials_names_everything_and_is_always_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", supply.EPOCH)
    made = builder().sbom(ROOT)
    assert made == builder().sbom(ROOT)
    found = json.loads(made)
    assert supply.sbom_problems(found, sorted(declared())) == []
    assert found["metadata"]["timestamp"] == "2025-06-15T15:06:40+00:00"
    assert not supply.sbom_problems(found, ["numpy"])
    assert supply.sbom_problems(found, ["left-out"]) == ["left-out is missing"]


@pytest.mark.skipif(
    not (ROOT / ".ci").is_dir(), reason="not run here: no checkout, .ci is not in an sdist"
)
def test_the_lock_pins_everything_by_digest() -> None:
    assert supply.lock_problems(ROOT / ".ci" / "requirements.lock", declared()) == []
    assert "LOCK=.ci/requirements.lock" in (ROOT / ".ci" / "run").read_text()
    assert "--require-hashes" in (ROOT / "Makefile").read_text()


def test_a_bad_lock_is_noticed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    digest = "0" * 64
    lock.write_text(
        f"a==1 \\\n    --hash=sha256:{digest}\nb>=2 \\\n    --hash=sha256:{digest}\nc==3\n"
    )
    assert supply.lock_problems(lock, {"a", "d"}) == [
        "b is not pinned", "c has no digest", "d is missing",
    ]  # fmt: skip


def test_any_other_byte_is_a_difference() -> None:
    first = {"a.whl": b"1", "b.tar.gz": b"2"}
    assert supply.differences(first, dict(first)) == []
    assert len(supply.differences(first, {"a.whl": b"x", "c.tar.gz": b"2"})) == 3
