"""Other programs of ours, run by the interpreter that runs this one."""

from __future__ import annotations

import sys


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
