"""FAULT_MODEL.md names the lines of the proof suite that show what it says, and every line."""

from __future__ import annotations

import re
from pathlib import Path

from tests.proof.line import find_lines

PAGE = Path(__file__).resolve().parents[2] / "daemon" / "FAULT_MODEL.md"
ID = re.compile(r"\b([RGFSKQ]\d{1,2})\b")
RANGE = re.compile(r"\b([RGFSKQ])(\d{1,2}) to \1(\d{1,2})\b")


def named_on_the_page() -> set[str]:
    text = PAGE.read_text(encoding="utf-8")
    found = set(ID.findall(text))
    for kind, first, last in RANGE.findall(text):
        found |= {f"{kind}{number}" for number in range(int(first), int(last) + 1)}
    return found


def test_every_line_named_exists() -> None:
    assert named_on_the_page() <= find_lines().keys()


def test_every_line_is_named() -> None:
    assert find_lines().keys() <= named_on_the_page()
