"""Progress for a person waiting, on stderr, with seconds: stdout belongs to the guest's command."""

from __future__ import annotations

import sys
import time

_START = time.monotonic()


def say(text: str) -> None:
    """One progress line."""
    print(f"[rdma {time.monotonic() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)
