"""Golden files of the first formats are read as they were written, and never change.

In volume, with damage: `make proof`, line R11.
"""

from __future__ import annotations

import random
from pathlib import Path

import golden
import pytest


def test_no_golden_file_has_changed() -> None:
    """What is on file was written once: make a new one instead of changing it.

    A new one is listed by `python tests/vectors/make_v1.py hashes`.
    """
    assert golden.unchanged() == []


@pytest.mark.parametrize("name", list(golden.CHECKS))
def test_golden(name: str, tmp_path: Path) -> None:
    golden.CHECKS[name](tmp_path)


@pytest.mark.parametrize("name", list(golden.DAMAGES))
def test_damaged(name: str, tmp_path: Path) -> None:
    for seed in range(20):
        golden.DAMAGES[name](tmp_path, random.Random(seed))
