"""R11: golden files and transcripts of the first formats, whole, of a later version, and damaged.

One unit reads every golden file once (see `tests/golden.py`), and damaged copies of those that
guard themselves. The files themselves must be what `tests/vectors/HASHES` says.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.proof.line import Line, Size, Slice, Tally

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

DAMAGES = {"damaged_session": 40, "damaged_keyring": 40, "damaged_checkpoint": 2,
           "damaged_sealed_block": 40}  # fmt: skip


def run(slice_: Slice) -> Tally:
    """See the module."""
    import golden

    tally = Tally()
    for name in golden.unchanged():
        tally.found(slice_.seed, f"tests/vectors/{name} is not what HASHES says")
    for seed in slice_.seeds:
        folder = slice_.folder / str(seed)
        folder.mkdir()
        for name, check in golden.CHECKS.items():
            _one(tally, seed, name, partial(check, folder))
        for name, count in DAMAGES.items():
            for number in range(count):
                rng = random.Random(f"{seed}/{name}/{number}")
                _one(tally, seed, name, partial(golden.DAMAGES[name], folder, rng))
    return tally


def _one(tally: Tally, seed: int, name: str, check: Callable[[], None]) -> None:
    import golden

    tally.tried += 1
    try:
        check()
    except golden.GoldenError as error:
        tally.found(seed, f"{name}: {error}")
        return
    except Exception as error:
        tally.crashes += 1
        tally.found(seed, f"{name}: {type(error).__name__}: {error}")
        return
    tally.survived += 1


def canary() -> None:
    """A keyring whose checksum covers nothing, and a HELLO with its bytes the other way round."""
    from entresol_daemon.keys import state
    from entresol_proto.wire import opening

    canonical, encode = state.canonical_json, opening.Hello.encode
    bugs = (
        (state, "canonical_json", lambda value: b"" if "tenants" in value else canonical(value),
         "keyring"),
        (opening.Hello, "encode", lambda self: encode(self)[::-1], "session"),
    )  # fmt: skip
    for owner, name, bug, broken in bugs:
        honest = getattr(owner, name)
        setattr(owner, name, bug)
        try:
            with tempfile.TemporaryDirectory(prefix="entresol-r11-") as folder:
                tally = run(Slice(1, 1, Size.COMMIT, Path(folder)))
        finally:
            setattr(owner, name, honest)
        found = any(finding.text.startswith(broken) for finding in tally.findings)
        assert found, f"{name} changed, and no golden file showed it"


LINES = (
    Line(
        id="R11", name="golden files and transcripts", unit="readings of every golden file",
        units={Size.COMMIT: 8, Size.NIGHTLY: 100, Size.RELEASE: 600}, slice_units=100,
        run=run, canary=canary,
    ),
)  # fmt: skip
