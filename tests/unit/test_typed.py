"""Users' code is checked against our types: each package says that it has some (PEP 561)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import entresol_client
import entresol_daemon
import entresol_proto

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (entresol_client, entresol_daemon, entresol_proto)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_package_says_that_it_is_typed(package: object) -> None:
    (folder,) = package.__path__  # type: ignore[attr-defined]
    assert (Path(folder) / "py.typed").is_file()


@pytest.mark.slow
def test_the_example_of_the_readme_is_accepted_by_a_strict_checker(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir=c", "example.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": ""}, capture_output=True, text=True,
        timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
