"""A signal handler that comes everywhere: at each line, as a tracer that is called there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

WHERE = ("entresol_client", "concurrent/futures", "threading.py")


def at_line(number: int, work: Callable[[], object], handler: Callable[[], object]) -> bool:
    """Do it, with `handler` called before its so many-th line of ours or of futures; False when it
    has fewer."""
    left = number + 1

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal left
        if not any(part in frame.f_code.co_filename for part in WHERE):
            return None
        if event == "line":
            left -= 1
            if not left:
                handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return left <= 0


def at_every_line(work: Callable[[], object], handler: Callable[[], object]) -> int:
    """Do it again and again, each time with `handler` before its next line; how many it has."""
    number = 0
    while at_line(number, work, handler):
        number += 1
    return number
