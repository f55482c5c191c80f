"""Other programs of ours, run by the interpreter that runs this one."""

from __future__ import annotations

import importlib.util
import sys

DAEMON_HINT = "pip install 'entresol[daemon]'"


def command_of(module: str, *arguments: str) -> list[str]:
    """What runs a module of ours as a program: the very code this process would import.

    The folder that the caller happens to be in is not looked at (-P): whoever may write there would
    decide what an operator runs. What the packaged commands are started with holds for it as well
    (-I, -B): neither the caller's environment, nor byte code written beside the code.
    """
    flags = ["-P"]
    flags += ["-I"] * bool(sys.flags.isolated)
    flags += ["-B"] * bool(sys.dont_write_bytecode)
    return [sys.executable, *flags, "-m", module, *arguments]


def lacks_daemon(*needed: str) -> bool:
    """Whether the daemon's code cannot run here: every wheel of ours has it, but some packages that
    it imports, `needed` of them by what is asked of it, come with `entresol[daemon]` only."""
    return any(importlib.util.find_spec(name) is None for name in ("entresol_daemon", *needed))
