"""The loop: corpus and mutations into parsers, and what must never come out.

Input n of a run has the seed `seed + n`, which decides its target and its bytes. Findings are any
exception a target did not expect, and an allocation beyond what the target may make.
"""

from __future__ import annotations

import contextlib
import resource
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz.mutate import mutate, mutate_text
from tests.fuzz.target import Parser, Target

TRACED_EVERY = 16  # inputs whose allocations are measured
TRACES = 7  # of one input, as long as it seems too much
SETTLE_S = 0.02  # before the second of them, and twice as long before each that follows
SHARES = 1000
FIXED = 0.7  # of the inputs get their checksums made right
GENERATED = 0.3
NOISE = 0.01
ADDRESS_SPACE_BYTES = 3 << 30  # beyond what is mapped already: more is a MemoryError, a finding


class FuzzError(AssertionError):
    """A finding. `raw` is the input that showed it."""

    def __init__(self, target: str, seed: int, raw: bytes, problem: str) -> None:
        super().__init__(f"target {target}, seed {seed}, {len(raw)} bytes: {problem}")
        self.raw = raw


def input_of(target: Target, corpus: Sequence[bytes], rng: Random) -> bytes:
    """The next input of a target; `rng` is seeded for it."""
    chance = rng.random()
    if chance < NOISE:
        return rng.randbytes(int(rng.random() * 200))
    if target.generate is not None and rng.random() < GENERATED:
        raw = target.generate(rng)
        if rng.random() < 0.5:
            return raw
    else:
        raw = corpus[int(rng.random() * len(corpus))]
    change = mutate_text if target.words else mutate
    raw = change(rng, raw, corpus, target.words, target.bytes_max)
    if target.fix is not None and rng.random() < FIXED:
        raw = target.fix(rng, raw)
    return raw


@dataclass(slots=True)
class Fuzzer:
    """Targets ready to run in this process.

    Attributes:
        inputs: by target.
        outcomes: by (target, what came of an input).
        peak_bytes: the largest allocation of one input, by target.
    """

    targets: Sequence[Target]
    inputs: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    _table: list[Target] = field(default_factory=list)
    _ready: dict[str, tuple[Parser, list[bytes]]] = field(default_factory=dict)
    _rng: Random = field(default_factory=Random)

    def __post_init__(self) -> None:
        left = {target.name: target.share for target in self.targets}
        by_name = {target.name: target for target in self.targets}
        # Interleaved, so that any stretch of seeds has every target.
        while any(left.values()):
            for name in left:
                if left[name]:
                    left[name] -= 1
                    self._table.append(by_name[name])

    def target_of(self, seed: int) -> Target:
        """Whose input a seed is."""
        return self._table[seed % len(self._table)]

    def ready(self, target: Target) -> tuple[Parser, list[bytes]]:
        """Its parser and corpus. The whole corpus is run first, which also fills caches."""
        found = self._ready.get(target.name)
        if found is None:
            parser, corpus = found = target.make(), target.corpus()
            self._ready[target.name] = found  # from here on `close` knows of it
            for raw in corpus:
                self.outcomes[target.name, self._parse(target, parser, -1, raw)] += 1
                self.inputs[target.name] += 1
        return found

    def one(self, seed: int) -> None:
        """Run the input of a seed. Raises: FuzzError."""
        target = self._table[seed % len(self._table)]
        parser, corpus = self.ready(target)
        self._rng.seed(seed)
        raw = input_of(target, corpus, self._rng)
        if seed // len(self._table) % TRACED_EVERY == 0:
            outcome = self._traced(target, parser, seed, raw)
        else:
            outcome = self._parse(target, parser, seed, raw)
        self.outcomes[target.name, outcome] += 1
        self.inputs[target.name] += 1

    def close(self) -> None:
        """Let go of what parsers hold: daemons, sockets, folders. Idempotent."""
        ready, self._ready = self._ready, {}
        for parser, _ in ready.values():
            close = getattr(parser, "close", None)
            if close is not None:
                close()

    def _traced(self, target: Target, parser: Parser, seed: int, raw: bytes) -> str:
        """Read it and measure. The daemon of the gRPC target allocates in a thread of its own, also
        for the input before this one, so what is too much is measured again once that had time to
        end: what a parser allocates for an input stays the same."""
        outcome, peak = "", 0
        for trace in range(TRACES):
            if trace:
                time.sleep(SETTLE_S * 2 ** (trace - 1))
            tracemalloc.start(1)
            try:
                outcome = self._parse(target, parser, seed, raw)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            if peak <= target.alloc_bytes_max:
                break
        self.peak_bytes[target.name] = max(peak, self.peak_bytes.get(target.name, 0))
        if peak > target.alloc_bytes_max:
            limit = target.alloc_bytes_max
            raise FuzzError(target.name, seed, raw, f"{peak} bytes allocated, {limit} allowed")
        return outcome

    def _parse(self, target: Target, parser: Parser, seed: int, raw: bytes) -> str:
        try:
            return parser(raw)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise FuzzError(target.name, seed, raw, problem[:500]) from error


def fuzz(target: Target, inputs: int, seed: int) -> Fuzzer:
    """So many inputs of one target. Raises: FuzzError."""
    fuzzer = Fuzzer([target])
    try:
        for number in range(inputs):
            fuzzer.one(seed + number)
    finally:
        fuzzer.close()
    return fuzzer


def find_canaries(target: Target, seed: int = 1) -> None:
    """Plant each of a target's faults. Raises: AssertionError for one that the loop missed."""
    assert target.canaries, f"{target.name} has no canary"
    for number, broken in enumerate(target.canaries):
        try:
            with broken():
                fuzz(target, target.canary_inputs, seed)
        except FuzzError:
            continue
        raise AssertionError(f"canary {number} of {target.name} was not found")


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """No more address space than a parser may ever need: a declared size that is believed shows as
    a MemoryError instead of as a machine that swaps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
