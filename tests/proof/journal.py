"""Which slices are done, on disk, so that a long run can be stopped and gone on with.

Invariant: a slice counts only for the code that it ran: the product, the tests' shared parts, and
the module of its own line. A change in any of them forgets it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.proof.line import Line, Size, Tally
from tests.proof.record import stamp
from tests.proof.slices import ROOT, tally_of

PRODUCT = ("daemon", "client", "proto")
SUFFIXES = (".py", ".c", ".proto")


def _sources() -> Iterator[Path]:
    for tree in PRODUCT:
        for path in (ROOT / tree).rglob("*"):
            if path.suffix in SUFFIXES:
                yield path
    for path in (ROOT / "tests").rglob("*.py"):
        parts = path.relative_to(ROOT / "tests").parts
        if not path.name.startswith("test_") and parts[:2] != ("proof", "lines"):
            yield path


@functools.cache
def _code() -> bytes:
    digest = hashlib.blake2b(sys.version.encode(), digest_size=16)
    for path in sorted(_sources()):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.digest()


def code_of(line: Line) -> str:
    """A digest of all the code that a line's slices run."""
    own = sys.modules[line.run.__module__].__file__
    raw = Path(own).read_bytes() if own else b""
    return hashlib.blake2b(_code() + raw, digest_size=16).hexdigest()


class Journal:
    """A file of finished slices, one JSON object a line."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Keep what is there, or begin anew."""
        self._path = path
        self._done: dict[tuple[str, str, str, int, int], tuple[float, Tally]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self._load()
        else:
            path.write_text("", encoding="utf-8")

    def _load(self) -> None:
        written = self._path.read_text(encoding="utf-8")
        if written and not written.endswith("\n"):  # its writer was stopped in the middle
            self._path.write_text(written + "\n", encoding="utf-8")
        for text in written.splitlines():
            try:
                raw = json.loads(text)
                key = (raw["line"], raw["code"], raw["size"], raw["seed"], raw["units"])
                self._done[key] = (raw["seconds"], tally_of(raw["tally"]))
            except (ValueError, KeyError, TypeError):
                continue  # cut short by whatever ended that run

    def done(self, line: Line, size: Size, seed: int, units: int) -> tuple[float, Tally] | None:
        """(seconds, tally) of a slice that this very code has done."""
        return self._done.get((line.id, code_of(line), size.value, seed, units))

    def note(
        self, line: Line, size: Size, seed: int, units: int, seconds: float, tally: Tally
    ) -> None:
        """Remember a slice."""
        raw = {
            "line": line.id, "code": code_of(line), "size": size.value, "seed": seed,
            "units": units, "seconds": round(seconds, 3), "tally": asdict(tally), **stamp(),
        }  # fmt: skip
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(raw) + "\n")
