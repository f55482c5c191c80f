"""Every command of the runbook is one that tests/deploy runs, or is named with the reason why not.

The faults: a command that is added to the page and never tried, one that is changed on the page or
in the test alone, one that is declared as tried and that no step runs.
"""

from __future__ import annotations

import argparse
import ast
import re
from functools import cache
from pathlib import Path

import pytest

from entresol_client.cli.main import parser_of
from entresol_daemon.__main__ import _parser
from tests.deploy.runbook import NOT_TRIED, UDEV_RULE, UDEV_RULES, Do

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = ROOT / "systemd" / "README.md"
STEPS = ROOT / "tests" / "deploy"
# Single words in code that are no command: users, groups, settings, programs that are only named.
NAMES = {
    "entresol", "entresol-hosts", "disk", "name", "no", "gap", "localhost", "preinst", "prometheus",
    "ptrace",
}  # fmt: skip
_BLOCK = re.compile(r"^```\w*\n(.*?)^```\n", re.M | re.S)
_PROGRAM = re.compile(r"[a-z][a-z-]*")
_SETTING = re.compile(r"[a-z_]+ = ")


def lines_of_blocks(text: str) -> set[str]:
    """Commands of the fenced blocks: without comments, lines of settings, and lines that go on."""
    found = set()
    for block in _BLOCK.findall(text):
        lines = [re.split(r"(?:^|\s)#", line)[0].strip() for line in block.splitlines()]
        found |= {line for line in lines if line and not line.startswith("[")}
    return found


@cache
def verbs() -> dict[str, set[str]]:
    """Program -> what may stand behind it."""
    found = {}
    for program, parser in (("entresol", parser_of([])), ("entresold", _parser())):
        found[program] = {
            choice
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
            for choice in action.choices
        }
    return found


def mentions(text: str) -> set[str]:
    """Commands, parts of commands and options in the text between the blocks."""
    found = set()
    for code in re.findall(r"`([^`]+)`", _BLOCK.sub("", text)):
        for part in " ".join(code.split()).split("; "):
            first, _, rest = part.partition(" ")
            if part.startswith("--"):
                found.add(part)
            elif not _PROGRAM.fullmatch(first) or _SETTING.match(part):
                continue
            elif not rest and first in verbs()["entresol"]:
                found.add(f"entresol {first}")
            elif rest or first not in NAMES:
                found.add(part)
    return found


def untold(text: str) -> set[str]:
    """What the page has, and neither table."""
    whole = [str(command) for command in Do] + list(NOT_TRIED)
    never = {line for line in lines_of_blocks(text) if line not in whole}
    for part in mentions(text):
        inside = f" {part} "
        if part.startswith("--"):
            known = any(inside in f" {command} " for command in whole)
        else:  # as it is tried, or how that begins
            known = any(f" {command} ".startswith(inside) for command in whole)
        never |= set() if known else {part}
    return never


def bare(text: str) -> set[str]:
    """Commands of ours that stand in the text as words: no other test here would see them."""
    plain = re.sub(r"`[^`]+`", "", _BLOCK.sub("", text))
    return {
        match[0]
        for match in re.finditer(r"\b(entresold?) (--\w|[a-z-]+)", plain)
        if match[2].startswith("--") or match[2] in verbs()[match[1]]
    }


def test_every_command_of_the_page_is_in_a_table() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    assert len(lines_of_blocks(text)) > 15
    assert len(mentions(text)) > 30
    assert untold(text) == set()
    assert bare(text) == set()


def test_both_tables_have_only_what_the_page_has() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    told = lines_of_blocks(text) | mentions(text)
    assert {str(command) for command in Do} - told == set()
    assert set(NOT_TRIED) - told == set()
    assert not set(NOT_TRIED) & set(Do)
    assert all(len(reason) > 8 for reason in NOT_TRIED.values())
    assert f"`{UDEV_RULE}`" in text
    assert f"`{UDEV_RULES}`" in text


def test_every_command_of_the_table_is_run_by_a_step() -> None:
    """By name, in what is handed to `follow` or `edit`, or in a table that is; that each was run
    is the last step of a life."""
    used = {
        node.attr
        for path in STEPS.glob("*.py")
        if path.name != "runbook.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == Do.__name__
    }
    assert set(Do.__members__) - used == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```\nentresol frobnicate  # and more\n```\n", "entresol frobnicate"),
        ("```\nentresol tenant\n```\n", "entresol tenant"),  # of a block, the whole of it
        ("as `entresol frobnicate` does", "entresol frobnicate"),
        ("as `entresol\nfrobnicate` does", "entresol frobnicate"),
        ("`systemctl daemon-reload; systemctl halt`", "systemctl halt"),
        ("then `reboot`", "reboot"),
        ("with `--frobnicate`", "--frobnicate"),
        ("or `demo`", "entresol demo"),
    ],
)
def test_a_command_that_nobody_tries_is_found(text: str, found: str) -> None:
    assert untold(text) == {found}


@pytest.mark.parametrize(
    "text",
    [
        "```\n[listen] control_host  # in a file\nentresol top\n```\n",
        "`entresol tenant`, `top`, `--renew`",
        'settings: `path = "/x"`, `ReadWritePaths=/x y`, `[flash] path`, `/etc/entresol`',
    ],
)
def test_what_is_tried_or_is_no_command_is_not_found(text: str) -> None:
    assert untold(text) == set()


def test_a_command_without_its_marks_is_found() -> None:
    assert bare("see entresol unlock FILE, or entresold --check") == {
        "entresol unlock", "entresold --c"
    }  # fmt: skip
    assert bare("see `entresol unlock FILE`; Entresol keys; as entresol does") == set()
