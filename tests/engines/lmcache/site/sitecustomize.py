"""For vLLM on a processor together with LMCache: lets the two get past each other at the start.

vLLM 0.32 without triton looks at `__dict__` of everything in every module; numba, which LMCache
imports, has an object that answers any name at all, `__dict__` too, with a function of its library.
Python runs this first in every process that has the folder on its path.
"""

from __future__ import annotations

import contextlib
from typing import Any

with contextlib.suppress(ImportError):
    from llvmlite.binding import ffi

    _answer = ffi._lib_wrapper.__getattr__

    def _only_functions(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _answer(self, name)

    ffi._lib_wrapper.__getattr__ = _only_functions
