"""What the tests of the `entresol` command share: running it, and what it said.

Every failure must be one line and a fix, with the documented exit code: `Cli` checks that.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from entresol_client.cli.main import main

COMMAND = [sys.executable, "-m", "entresol_client.cli.main"]
PROCESS_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Said:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Cli:
    """Runs commands in this process, as one tenant of one daemon."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self.folder = folder
        self.config = folder / "client.toml"

    def __call__(self, *words: str, code: int = 0, config: Path | None = None) -> Said:
        """Run, and expect an exit code; failures must look as documented."""
        self._capsys.readouterr()
        argv = list(words)
        if words[0] != "version" and "--admin-socket" not in words:
            argv += ["--config", str(config or self.config)]
        got = main(argv)
        said = Said(got, *self._capsys.readouterr())
        assert got == code, f"{words}: {said}"
        assert "Traceback" not in said.err
        return said

    def fails(self, *words: str, code: int, match: str, config: Path | None = None) -> Said:
        """Run, and expect the error line to match."""
        said = self(*words, code=code, config=config)
        assert re.search(match, said.err), said.err
        assert said.err.splitlines()[-1].startswith(("entresol: ", "  fix: ")), said.err
        return said


def content(seed: str, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def written(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    return str(path)


def process(*words: str, config: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *words, "--config", str(config)],
        input=stdin,
        capture_output=True,
        timeout=PROCESS_SECONDS_MAX,
        check=False,
    )


def variant(cli: Cli, folder: Path, **changes: str) -> Path:
    """The client's configuration with some lines replaced."""
    text = cli.config.read_text()
    for name, value in changes.items():
        text, count = re.subn(f"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert count == 1, name
    target = folder / "variant.toml"
    target.write_text(text)
    return target
