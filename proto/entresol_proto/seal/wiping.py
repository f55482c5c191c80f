"""Overwriting a secret when its use has ended, although Python calls it immutable.

Invariant: after `wipe` the object that held the secret holds zeros. CPython does not clear memory
it frees: a key that was only dropped stays readable, in a core file for instance, until something
else happens to lie there. Copies that others made are not reached (OpenSSL clears its own).
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

SECRET_BYTES_MIN = 16  # shorter objects may be shared by the interpreter
_DATA_OFFSET = bytes.__basicsize__ - 1  # the last field of a bytes object, with its final zero
_IS_CPYTHON = sys.implementation.name == "cpython"
_memset = ctypes.PyDLL(None).memset  # it keeps the interpreter's lock: to get it back takes longer
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memset.restype = ctypes.c_void_p


def zero(view: memoryview) -> None:
    """Overwrite writable, contiguous bytes with zeros, without making as many zeros first."""
    np.frombuffer(view, dtype=np.uint8).fill(0)


def wipe(secret: bytes) -> None:
    """Put zeros over the bytes of an object that nobody will use again; it keeps its length.

    The caller knows every holder of the object. It must have been made at run time (random, derived
    or decrypted): a literal belongs to its module.
    """
    assert len(secret) >= SECRET_BYTES_MIN, "not a secret: such an object may be shared"
    if _IS_CPYTHON:
        _memset(id(secret) + _DATA_OFFSET, 0, len(secret))
