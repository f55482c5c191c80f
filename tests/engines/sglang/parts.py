"""SGLang's storage classes without its engine, whose kernels need CUDA.

Importing this makes SGLang's modules importable one by one: the packages on the way do not run
their `__init__`, and modules of kernels are empty. Invariant: what tests use of SGLang (factory,
storage interface, failure injector, hashes, host pools and their layouts) is SGLang's own code;
nothing of `EMPTY` is ever called.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  (looks for triton itself; must not find ours)

PACKAGES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.layers",
    "sglang.srt.layers.dcp",
    "sglang.srt.mem_cache",
    "sglang.srt.mem_cache.storage",
)
EMPTY = (
    "triton",
    "triton.language",
    "sglang.kernels.ops.kvcache.hicache",
    "sglang.kernels.ops.kvcache.mla_buffer",
    "sglang.srt.disaggregation.utils",
    "sglang.srt.mem_cache.memory_pool",
)


class Empty(types.ModuleType):
    """Any name imported from it is a class nobody makes an object of."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _prepare() -> None:
    init = next(one for one in metadata.files("sglang") or () if str(one) == "sglang/__init__.py")
    root = Path(str(init.locate())).parent.parent
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    for name in EMPTY:
        sys.modules[name] = Empty(name)


_prepare()

storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
factory: Any = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")
hashes: Any = importlib.import_module("sglang.srt.mem_cache.utils")
device: Any = importlib.import_module("sglang.srt.mem_cache.device_pool_info")
mha: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
mla: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.mla")
