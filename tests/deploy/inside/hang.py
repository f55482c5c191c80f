"""Stop the main thread of a process, and no other: what a hung event loop looks like from outside.

With ptrace, which stops single threads. Signals to the process go on to be handled by its other
threads, and death ends this program as well. Sources: ptrace(2), PTRACE_SEIZE and PTRACE_INTERRUPT.
"""

from __future__ import annotations

import ctypes
import os
import sys

PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000


def main() -> int:
    pid = int(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if libc.ptrace(request, pid, None, None):
            sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")
    os.waitpid(pid, WALL)
    print("stopped", flush=True)
    while True:
        try:
            _, status = os.waitpid(pid, WALL)
        except ChildProcessError:
            return 0
        if os.WIFSIGNALED(status) or os.WIFEXITED(status):
            return 0
        # Anything else is a stop on the way to its end: it stays stopped.


if __name__ == "__main__":
    raise SystemExit(main())
