"""Memory in use by the C library's own count."""

from __future__ import annotations

import pytest

from entresol_daemon.memory.allocator import malloc_bytes
from entresol_proto.limits import MIB

if not malloc_bytes():
    pytest.skip("this C library does not tell what is in use", allow_module_level=True)


def test_what_is_taken_is_counted_until_it_is_given_back() -> None:
    before = malloc_bytes()
    taken = [bytes(8 * MIB), *(bytes(4000) for _ in range(1000))]
    grown = malloc_bytes() - before
    assert 11 * MIB < grown < 14 * MIB
    del taken
    assert malloc_bytes() - before < MIB
