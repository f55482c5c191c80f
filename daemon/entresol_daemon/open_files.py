"""How many files the daemon may have open: a few for each host, and most systems begin with 1,024.

Invariant: it starts with as many as its system gives on request, up to FILES_WANTED, or says that
they are too few: gRPC ends a process that runs out of them while it starts.
"""

from __future__ import annotations

import contextlib
import resource

from entresol_proto.status import ConfigError

FILES_MIN = 64  # about 32 are open before the first host comes
FILES_WANTED = 65_536  # as LimitNOFILE= of the unit
FIX = f"LimitNOFILE={FILES_WANTED} in the unit (ulimit -n by hand)"


def take() -> None:
    """Ask for what this process may have on request. Raises: ConfigError when that is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft != resource.RLIM_INFINITY and soft < FILES_MIN:
        raise ConfigError(f"only {soft} files may be open, a start takes {FILES_MIN}", hint=FIX)
