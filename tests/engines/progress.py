"""Progress for a person waiting, on stderr, with seconds: stdout is for results."""

from __future__ import annotations

import sys
import time

_START = time.monotonic()


def say(text: str) -> None:
    """One progress line."""
    print(f"[engines {time.monotonic() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)
