"""Slices and canaries in processes of their own: what dies there is counted, not suffered.

The parent starts `python -m tests.proof slice …`, which writes its tally as one JSON object into
its folder. A process that ends otherwise, or not within its deadline, is a crash of its seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.proof.line import Finding, Line, Size, Tally

ROOT = Path(__file__).resolve().parents[2]
MEMORY = "/dev/shm"
RESULT = "tally.json"
OUTPUT = "output.txt"
OUTPUT_SHOWN_MAX = 4_000  # characters of a dead slice's last words
CANARY_DEADLINE_S = 300.0


def write_tally(tally: Tally, folder: Path) -> None:
    """Leave the result where the parent looks for it."""
    path = folder / RESULT
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(tally)), encoding="utf-8")
    part.rename(path)


def tally_of(raw: dict[str, object]) -> Tally:
    """The tally that `asdict` made."""
    fields = dict(raw)
    fields["findings"] = [Finding(**each) for each in fields["findings"]]  # type: ignore[attr-defined]
    return Tally(**fields)  # type: ignore[arg-type]


@dataclass(slots=True)
class Child:
    """A slice, or a canary, under way in a process of its own."""

    line: Line
    seed: int
    units: int
    folder: Path
    process: subprocess.Popen[bytes]
    began_s: float
    deadline_s: float

    @classmethod
    def start(cls, line: Line, seed: int, units: int, size: Size) -> Child:
        """Units of a line; none for its canary."""
        memory = MEMORY if line.in_memory and os.access(MEMORY, os.W_OK) else None
        folder = Path(tempfile.mkdtemp(prefix=f"entresol-proof-{line.id}-", dir=memory))
        what = ["slice", line.id, "--seed", str(seed), "--units", str(units), "--size", size.value]
        words = what if units else ["canary", "--line", line.id, "--here"]
        words += ["--folder", str(folder)]
        with (folder / OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.proof", *words],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env=_environment(folder),
            )  # fmt: skip
        limit_s = line.slice_deadline_s if units else max(CANARY_DEADLINE_S, line.slice_deadline_s)
        return cls(line, seed, units, folder, process, time.monotonic(), limit_s)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began_s

    def poll(self) -> Tally | None:
        """The result once it has ended; its folder is gone then."""
        if self.process.poll() is None:
            if self.seconds < self.deadline_s:
                return None
            self.kill()
            return self._end(f"took longer than {self.deadline_s:.0f} s")
        return self._end("" if self.process.returncode == 0 else self._last_words())

    def kill(self) -> None:
        """End it and whatever it started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def discard(self) -> None:
        """End it without a result."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _last_words(self) -> str:
        said = (self.folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
        return f"exit status {self.process.returncode}: {said[-OUTPUT_SHOWN_MAX:].strip()}"

    def _end(self, failure: str) -> Tally:
        try:
            tally = tally_of(json.loads((self.folder / RESULT).read_text(encoding="utf-8")))
        except FileNotFoundError:
            failure = failure or "it ended without a result"
            tally = Tally(tried=1)
        if failure:
            tally.crashes += 1
            tally.found(self.seed, f"seeds from {self.seed}, {self.units} units: {failure}")
        with contextlib.suppress(ProcessLookupError):  # what it left running
            os.killpg(self.process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        return tally


def _environment(folder: Path) -> dict[str, str]:
    """The parent's, with temporary files in the slice's folder and one thread per library."""
    found = dict(os.environ)
    paths = [str(ROOT / part) for part in ("daemon", "client", "proto", "tests", "")]
    before = found.get("PYTHONPATH")
    found["PYTHONPATH"] = os.pathsep.join(paths + ([before] if before else []))
    found["TMPDIR"] = str(folder)
    found.setdefault("OMP_NUM_THREADS", "1")
    return found
