"""Lets the corpus grow: keeps inputs that reach lines of the parser, in an order, not seen before.

Coverage is traced with `sys.settrace`, in the parser's own modules only, so this is slow and meant
for a few minutes at a time: `python -m tests.fuzz grow --target NAME --seconds 60`. What it keeps
is made shorter first, as long as it still reaches the same.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tests.fuzz.loop import FuzzError, input_of
from tests.fuzz.target import CORPUS, Parser, Target

Edges = frozenset[tuple[str, int, int]]
ENTRIES_MAX = 200  # of one target's folder
ENTRY_BYTES_MAX = 4096


class Tracer:
    """Runs a parser and tells which pairs of lines followed each other in the target's modules."""

    def __init__(self, target: Target, parser: Parser) -> None:
        self._parser = parser
        self._files = {str(importlib.import_module(name).__file__) for name in target.modules}
        self._seen: set[tuple[str, int, int]] = set()

    def edges(self, raw: bytes) -> tuple[str, Edges]:
        """What came of an input, and the edges it took."""
        self._seen = set()
        sys.settrace(self._call)
        try:
            outcome = self._parser(raw)
        finally:
            sys.settrace(None)
        return outcome, frozenset(self._seen)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if name not in self._files:
            return None
        seen, before = self._seen, [frame.f_lineno]

        def line(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
            seen.add((name, before[0], frame.f_lineno))
            before[0] = frame.f_lineno
            return line

        return line


def grow(target: Target, *, seconds: float, seed: int) -> str:
    """Search for so long and write what was new; a line that says what came of it."""
    parser = target.make()
    tracer = Tracer(target, parser)
    corpus = target.corpus()
    known: set[Any] = set()
    for raw in corpus:
        outcome, edges = tracer.edges(raw)
        known |= {outcome, *edges}
    began, rng, tried, kept = len(known), Random(), 0, 0
    last_new = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        rng.seed(seed + tried)
        raw = input_of(target, corpus, rng)
        tried += 1
        outcome, edges = _look(target, tracer, seed + tried - 1, raw)
        if not {outcome, *edges} - known:
            continue
        raw = shorter(tracer, raw, {outcome, *edges} - known)
        known |= {outcome, *edges}
        last_new = tried
        corpus.append(raw)
        kept += keep(target.name, raw)
    close = getattr(parser, "close", None)
    if close is not None:
        close()
    return (
        f"grow target={target.name} seed={seed} inputs={tried} known={began} now={len(known)} "
        f"kept={kept} last_new_at={last_new}"
    )


def _look(target: Target, tracer: Tracer, seed: int, raw: bytes) -> tuple[str, Edges]:
    try:
        return tracer.edges(raw)
    except Exception as error:
        raise FuzzError(target.name, seed, raw, f"{type(error).__name__}: {error}") from error


def shorter(tracer: Tracer, raw: bytes, wanted: set[Any]) -> bytes:
    """The input with what can be left out left out."""
    step = len(raw) // 2
    while step:
        at = 0
        while at < len(raw):
            less = raw[:at] + raw[at + step :]
            try:
                outcome, edges = tracer.edges(less)
            except Exception:  # the search will find it by itself
                outcome, edges = "", frozenset()
            if wanted <= {outcome, *edges}:
                raw = less
            else:
                at += step
        step //= 2
    return raw


def keep(name: str, raw: bytes) -> int:
    """Write an entry; 1 if there was room for it."""
    folder: Path = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    if len(raw) > ENTRY_BYTES_MAX or len(list(folder.iterdir())) >= ENTRIES_MAX:
        return 0
    path = folder / hashlib.sha256(raw).hexdigest()[:16]
    if path.exists():
        return 0
    path.write_bytes(raw)
    return 1
