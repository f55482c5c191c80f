"""F1: malformed inputs to every parser. A unit is one input; its seed decides parser and bytes.

Targets, corpora and how to look at one by hand: tests/fuzz (`python -m tests.fuzz`). Only
documented rejections may come out, nothing may be accepted that was not there, and no input may
make a parser allocate more than its target allows.
"""

from __future__ import annotations

from tests.fuzz.loop import Fuzzer, FuzzError, bounded_memory, find_canaries
from tests.fuzz.target import find_targets
from tests.proof.line import Line, Size, Slice, Tally


def run(work: Slice) -> Tally:
    """The inputs of a slice, over all targets in their shares."""
    tally = Tally()
    fuzzer = Fuzzer(list(find_targets().values()))
    try:
        for seed in work.seeds:
            fuzzer.ready(fuzzer.target_of(seed))  # outside of the bound: a daemon maps its memory
        fuzzer.inputs.clear()
        with bounded_memory():
            for seed in work.seeds:
                _one(fuzzer, seed, tally)
    finally:
        fuzzer.close()
    for name, inputs in fuzzer.inputs.items():
        tally.figure(f"inputs {name}", inputs)
    for name, peak in fuzzer.peak_bytes.items():
        tally.figure(f"max_bytes {name}", peak)
    return tally


def _one(fuzzer: Fuzzer, seed: int, tally: Tally) -> None:
    tally.tried += 1
    try:
        fuzzer.one(seed)
    except FuzzError as error:
        tally.crashes += 1
        tally.found(seed, f"{error}; input {error.raw[:400].hex()}")
    else:
        tally.survived += 1


def canary() -> None:
    """Every planted fault of every target is found."""
    for target in find_targets().values():
        find_canaries(target)


LINES = (
    Line(
        id="F1",
        name="malformed inputs to every parser",
        unit="inputs",
        units={Size.COMMIT: 300_000, Size.NIGHTLY: 4_000_000, Size.RELEASE: 20_000_000},
        slice_units=100_000,
        run=run,
        canary=canary,
        slice_deadline_s=900.0,
    ),
)
