"""Run a command on a terminal and type, as a person does once something is read there.

    typed.py [--when TEXT --type TEXT]... -- COMMAND...

What appears goes to standard output, and the exit status is the command's. A text that does not
appear ends it with status 70.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time

SECONDS_MAX = 120.0
LINES, COLUMNS = 50, 120
WAITED_IN_VAIN = 70


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--when", action="append", default=[])
    options.add_argument("--type", action="append", default=[])
    options.add_argument("command", nargs="+")
    chosen = options.parse_args()
    pid, terminal = pty.fork()
    if not pid:
        os.environ["TERM"] = "dumb"  # no progress bars
        os.execvp(chosen.command[0], chosen.command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    held = talk(terminal, list(zip(chosen.when, chosen.type, strict=True)))
    os.close(terminal)  # hangs up on a command that still waits
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF if held else WAITED_IN_VAIN


def talk(terminal: int, turns: list[tuple[str, str]]) -> bool:
    """To the command's end; whether everything was read that was to be."""
    seen, until_s = b"", time.monotonic() + SECONDS_MAX
    while True:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until_s - time.monotonic()))
        if not ready:
            return False
        try:
            part = os.read(terminal, 65536)
        except OSError:  # nobody has it open any more
            part = b""
        if not part:
            return not turns
        seen += part
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
        if turns and turns[0][0].encode() in seen:
            seen, text = b"", turns.pop(0)[1]
            os.write(terminal, text.encode())


if __name__ == "__main__":
    raise SystemExit(main())
