"""Where an adapter's log lines go inside an engine's process.

Invariant: a process that decided about logging of its own is left as it is.
"""

from __future__ import annotations

import logging


def join_log(engine: str) -> None:
    """Our lines go where the logger named `engine` writes, unless somebody has decided already."""
    ours = logging.getLogger("entresol")
    if ours.handlers or logging.getLogger().handlers:
        return
    for handler in logging.getLogger(engine).handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
