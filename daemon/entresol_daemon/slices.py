"""How long another thread of the daemon may keep its event loop from a processor.

The kernel lets a thread that runs have its slice whole, three milliseconds as a rule, whatever
priority it has, before one that wakes comes; a thread with a shorter slice of its own does not wait
for that (EEVDF; linux/kernel/sched/fair.c, `do_preempt_short`, Linux 6.12). So the loop's is short.

Invariant: nothing else of the thread's scheduling is changed, and where it cannot be, or where its
administrator chose another policy, everything stays as it is.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
import sys

SLICE_NS = 100_000  # the shortest there is
_SET_ATTR = {"x86_64": 314, "aarch64": 274}  # sched_setattr(2)
_ATTR = struct.Struct("<IIQiIQQQ")  # linux/sched/types.h: struct sched_attr, first version

log = logging.getLogger("entresol.daemon")


def shorten(slice_ns: int = SLICE_NS) -> bool:
    """Give the calling thread, and those that it starts from now on, a slice of so many
    nanoseconds; True if so. Kernels before 6.12 take no notice."""
    number = _SET_ATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attr = _ATTR.pack(_ATTR.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    if call(ctypes.c_long(number), ctypes.c_int(0), attr, ctypes.c_uint(0)):
        log.debug("event=slice_refused reason=%r", os.strerror(ctypes.get_errno()))
        return False
    return True
