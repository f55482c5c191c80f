"""The event loop's slice: what the kernel says of it, and what is left as it was."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from entresol_daemon import slices
from entresol_daemon.slices import SLICE_NS, shorten

_GET_ATTR = {"x86_64": 315, "aarch64": 275}  # sched_getattr(2)
_ATTR = struct.Struct("<IIQiIQQQ")

T = TypeVar("T")
Attributes = tuple[int, int, int]  # policy, niceness, slice in nanoseconds

linux_only = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in _GET_ATTR,
    reason="not run here: Linux on x86_64 or aarch64",
)
pytestmark = linux_only


def in_a_thread(work: Callable[[], T]) -> T:
    """What it returned; the test's own thread stays as it is."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(30)
    return found[0]


def attributes() -> Attributes:
    """Of the calling thread."""
    raw = ctypes.create_string_buffer(_ATTR.size)
    call = ctypes.CDLL(None, use_errno=True).syscall
    number = _GET_ATTR[platform.machine()]
    assert not call(ctypes.c_long(number), 0, raw, _ATTR.size, 0), ctypes.get_errno()
    _, policy, _, nice, _, slice_ns, _, _ = _ATTR.unpack(raw.raw)
    return policy, nice, slice_ns


def has_slices() -> bool:
    """Whether a thread may have a slice of its own here: a kernel before 6.12 takes no notice."""
    major, minor = (
        int("".join(filter(str.isdigit, part))) for part in os.uname().release.split(".")[:2]
    )
    return (major, minor) >= (6, 12)


def test_only_the_slice_is_changed() -> None:
    def work() -> tuple[Attributes, Attributes]:
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        before = attributes()
        assert shorten()
        return before, attributes()

    before, after = in_a_thread(work)
    assert after[:2] == before[:2] == (os.SCHED_OTHER, 3)
    if not has_slices():
        pytest.skip(f"not run here: Linux {os.uname().release} has no slice per thread")
    assert after[2] == SLICE_NS != before[2]


def test_threads_started_afterwards_have_it_too() -> None:
    def work() -> Attributes:
        assert shorten(400_000)
        return in_a_thread(attributes)

    policy, _, slice_ns = in_a_thread(work)
    assert policy == os.SCHED_OTHER
    if not has_slices():
        pytest.skip(f"not run here: Linux {os.uname().release} has no slice per thread")
    assert slice_ns == 400_000


def test_a_policy_that_somebody_chose_stays() -> None:
    def work() -> tuple[bool, bool]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        before = attributes()
        return shorten(), before == attributes()

    assert in_a_thread(work) == (False, True)


def test_a_sandbox_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(slices._SET_ATTR, platform.machine(), 9_999)  # ENOSYS
    assert in_a_thread(shorten) is False
    monkeypatch.setattr(slices, "_SET_ATTR", {})
    assert in_a_thread(shorten) is False


def test_the_daemons_loop_has_a_short_slice() -> None:
    """As the commands run it."""
    from entresol_daemon.__main__ import _loop_run

    seen: list[Attributes] = []

    async def main() -> None:
        seen.append(attributes())

    in_a_thread(lambda: _loop_run(main()))
    ((policy, _, slice_ns),) = seen
    assert policy == os.SCHED_OTHER
    if not has_slices():
        pytest.skip(f"not run here: Linux {os.uname().release} has no slice per thread")
    assert slice_ns == SLICE_NS
