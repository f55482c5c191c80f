"""What a fuzz target is: one parser, valid inputs of it, and how to see that it did wrong.

Invariant: an input is one run of bytes, and what a parser does with it depends on those bytes
alone, so that every input can be kept in a file and run again.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random

CORPUS = Path(__file__).resolve().parent / "corpus"

Parser = Callable[[bytes], str]
"""Reads one input and says in a word what came of it; raises on anything but a documented
rejection, and when what was accepted is not what was there."""

Canary = Callable[[], AbstractContextManager[object]]
"""Breaks the parser while it is entered."""


class Scratch:
    """A file for parsers that read files; it and its folder go with the parser."""

    def __init__(self, name: str) -> None:
        # In memory where there is such a folder: a disk makes an input cost milliseconds.
        memory = Path("/dev/shm")
        folder = tempfile.mkdtemp(
            prefix="entresol-fuzz-", dir=memory if os.access(memory, os.W_OK) else None
        )
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder) / name

    def holds(self, raw: bytes) -> Path:
        """The file with this content."""
        self.path.write_bytes(raw)
        return self.path


@dataclass(frozen=True, slots=True)
class Target:
    """One parser under fuzz.

    Attributes:
        name: also the name of its folder in the corpus.
        share: of a thousand inputs.
        seeds: valid inputs, from the product's own encoders.
        make: a parser; what it holds lives as long as the process.
        canaries: faults that the loop must notice within `canary_inputs`.
        fix: makes checksums right again after a mutation, to get past the door.
        generate: an input that bytes alone would hardly become; used for some of them.
        words: what the format is made of; a target that has some is a text.
        bytes_max: mutations make nothing longer.
        alloc_bytes_max: the most that reading one input may allocate.
        modules: whose lines count as coverage when the corpus grows.
    """

    name: str
    share: int
    seeds: Callable[[], Sequence[bytes]]
    make: Callable[[], Parser]
    canaries: tuple[Canary, ...]
    modules: tuple[str, ...]
    fix: Callable[[Random, bytes], bytes] | None = None
    generate: Callable[[Random], bytes] | None = None
    words: tuple[bytes, ...] = ()
    bytes_max: int = 8192
    alloc_bytes_max: int = 256 * 1024
    canary_inputs: int = 20_000

    def corpus(self) -> list[bytes]:
        """The committed inputs in the order of their names, then the seeds that are not among
        them."""
        found = [path.read_bytes() for path in sorted((CORPUS / self.name).glob("*"))]
        return found + [raw for raw in self.seeds() if raw not in found]


def find_targets() -> dict[str, Target]:
    """Every target of `tests.fuzz.targets`, by name."""
    from tests.fuzz import targets

    found: dict[str, Target] = {}
    for module in pkgutil.iter_modules(targets.__path__):
        for target in importlib.import_module(f"{targets.__name__}.{module.name}").TARGETS:
            assert target.name not in found, f"two targets are called {target.name}"
            found[target.name] = target
    return dict(sorted(found.items()))
