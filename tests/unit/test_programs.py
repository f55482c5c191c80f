"""Programs of ours that a command starts: whose code they run, and as what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from entresol_client.programs import command_of


def test_the_folder_one_is_in_does_not_decide_what_runs(tmp_path: Path) -> None:
    planted = tmp_path / "entresol_daemon"
    planted.mkdir()
    (planted / "__init__.py").write_text("")
    (planted / "judge.py").write_text("print('planted')\n")
    folders = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        command_of("entresol_daemon.judge", str(tmp_path / "none.toml")),
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": folders}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "planted" not in done.stdout
    assert "none.toml" in done.stdout


@pytest.mark.parametrize(("flags", "wanted"), [([], set()), (["-B"], {"-B"}), (["-I"], {"-I"})])
def test_what_this_process_is_started_with_holds_for_it(flags: list[str], wanted: set[str]) -> None:
    folders = [path for path in sys.path if path]
    code = (
        f"import sys; sys.path[:0] = {folders!r}\n"
        "from entresol_client.programs import command_of; print(command_of('m', 'x'))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    words = done.stdout
    assert "'-P'" in words
    assert {flag for flag in ("-I", "-B") if f"'{flag}'" in words} == wanted
    assert words.strip().endswith("'-m', 'm', 'x']")
