"""A core file that was to be searched and is not there is said, whatever the machine's reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.proof import memory_scan
from tests.proof.memory_scan import NO_CORE, cores_of, no_core, why_no_core


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("|/usr/share/apport %p", "to a program here (core_pattern is |/usr/share/apport %p)"),
     ("/var/crash/core.%p", "elsewhere"), ("%e.core", "elsewhere"), ("core", NO_CORE),
     ("core.%p", NO_CORE)],
)  # fmt: skip
def test_a_machine_without_core_files_says_so(pattern: str, said: str) -> None:
    why = why_no_core(pattern)
    assert said in why
    assert no_core([], why, written=True) == f"no core file was searched: {why}"
    assert no_core([Path("core")], why, written=True) == ""
    # Out of the sandbox none was to come: that says something only where it would be seen.
    assert bool(no_core([], why, written=False)) == (why != NO_CORE)


def test_a_process_ends_with_its_core_or_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleeper() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                                cwd=tmp_path)  # fmt: skip

    with sleeper() as child:
        cores, why = cores_of(child, tmp_path)
        assert child.returncode == -6
        assert cores or why
    monkeypatch.setattr(memory_scan, "CORE_PATTERN", tmp_path / "none")
    with sleeper() as child:
        assert cores_of(child, tmp_path) == (
            [], "no core file can be asked for here: No such file or directory"
        )  # fmt: skip
        child.kill()
