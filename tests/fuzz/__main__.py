"""`python -m tests.fuzz`: the targets by hand.

    list                                       targets, their shares, how large their corpus is
    run --target NAME --inputs N --seed S      fuzz one target (or all of them, in their shares)
    replay --target NAME FILE...               inputs from files
    grow --target NAME --seconds S             search with coverage, keep what is new

A finding ends with the input in hexadecimal, so that it can be kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.grow import grow
from tests.fuzz.loop import Fuzzer, FuzzError, bounded_memory
from tests.fuzz.target import find_targets


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument("verb", choices=("list", "run", "replay", "grow"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--target", action="append")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    targets = find_targets()
    chosen = [targets[name] for name in args.target or targets]
    try:
        if args.verb == "list":
            for target in chosen:
                print(f"{target.name:18} share={target.share:3} corpus={len(target.corpus())}")
        elif args.verb == "grow":
            for target in chosen:
                print(grow(target, seconds=args.seconds, seed=args.seed), flush=True)
        elif args.verb == "replay":
            for path in args.files:
                print(f"{path}: {chosen[0].make()(path.read_bytes())}")
        else:
            _run(Fuzzer(chosen), args.inputs, args.seed)
    except FuzzError as error:
        print(f"FOUND {error}\n  input {error.raw[:4000].hex()}", file=sys.stderr)
        return 1
    return 0


def _run(fuzzer: Fuzzer, inputs: int, seed: int) -> None:
    try:
        for target in fuzzer.targets:
            fuzzer.ready(target)
        began_s = time.monotonic()
        with bounded_memory():
            for number in range(inputs):
                fuzzer.one(seed + number)
        seconds = time.monotonic() - began_s
        print(f"fuzz seed={seed} inputs={inputs} seconds={seconds:.1f} "
              f"per_second={inputs / seconds:.0f}")  # fmt: skip
    finally:
        fuzzer.close()
    for target in fuzzer.targets:
        outcomes = sorted(
            f"{what}={n}" for (name, what), n in fuzzer.outcomes.items() if name == target.name
        )
        peak = fuzzer.peak_bytes.get(target.name, 0)
        print(f"  {target.name}: inputs={fuzzer.inputs[target.name]} peak_bytes={peak}")
        print("    " + " | ".join(outcomes))


if __name__ == "__main__":
    sys.exit(main())
