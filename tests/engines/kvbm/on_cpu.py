"""Lets KVBM's real worker register caches that lie in ordinary memory.

KVBM's Python makes CUDA events with torch and reads the device's number off a tensor; neither is
there in a torch for processors. `install` puts both before it calls KVBM's own (Rust) worker, which
then talks to the driver of fake_cuda.c. Nothing of Entresol is touched.
"""

from __future__ import annotations

import ctypes
import types
from typing import Any


class Event:
    """A CUDA event as far as KVBM looks at one; done when recorded, as all work is."""

    def __init__(self, **_: Any) -> None:
        self._memory = ctypes.create_string_buffer(8)
        self.cuda_event = ctypes.addressof(self._memory)

    def record(self, stream: Any = None) -> None:
        """Nothing is ever outstanding."""


class _Device:
    type = "cuda"
    index = 0


class OnDevice:
    """A tensor that says it is on device 0."""

    device = _Device()

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.shape = list(tensor.shape)
        self.nbytes = tensor.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        return int(self._tensor.data_ptr())

    def stride(self) -> list[int]:
        return list(self._tensor.stride())


def install() -> None:
    """Patch KVBM's Python worker of this process."""
    from kvbm.vllm_integration import connector_worker

    real = connector_worker.RustKvConnectorWorker

    class Worker:
        """KVBM's own worker, given tensors that it can register."""

        def __init__(self, *arguments: Any) -> None:
            self._real = real(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def register_kv_caches(
            self,
            blocks: int,
            page: int,
            device: Any,
            width: int,
            caches: Any,
            *rest: Any,
            **more: Any,
        ) -> None:
            moved = [(name, OnDevice(tensor)) for name, tensor in caches]
            self._real.register_kv_caches(blocks, page, 0, width, moved, *rest, **more)

    connector_worker.RustKvConnectorWorker = Worker
    cuda = types.SimpleNamespace(Event=Event, current_stream=lambda *_: None)
    connector_worker.torch = types.SimpleNamespace(cuda=cuda)
