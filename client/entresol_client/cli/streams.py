"""What the command is started with: descriptors 0 to 2, and how text leaves by them.

Invariant: after `prepare` each of the three is open, so that no socket or file of ours is taken for
one of them, and any text can be written.
"""

from __future__ import annotations

import io
import os
import sys

_STREAMS = (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_WRONLY, "w"), ("stderr", os.O_WRONLY, "w"))


def prepare() -> None:
    """Open what the caller closed, on /dev/null: libuv aborts the process otherwise, and Python's
    own objects for them are None. What an encoding lacks is written as an escape."""
    for fd, (name, flags, mode) in enumerate(_STREAMS):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, flags)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_unwritten() -> None:
    """What cannot be written to standard output must not fail again when the interpreter ends."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
