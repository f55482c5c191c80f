"""CUDA memory as something a network card can reach: its dma-buf, by the CUDA driver's library.

Invariant: nothing here touches the memory; it only asks the driver, in a process that uses CUDA
already. Without the library, a current context or the driver's consent there is one clear error.

Source: CUDA driver API, cuMemGetHandleForAddressRange (CUDA 11.7). Not run on a machine that has
both a GPU and an RDMA device yet.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

from entresol_proto.status import FabricError, Status

_LIBRARY = "libcuda.so.1"
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_HINT = "without dma-buf, load nvidia-peermem and register the address alone"


@dataclass(frozen=True, slots=True)
class DmaBuf:
    """A descriptor, owned by the caller (close it after registering), and where the memory is."""

    fd: int
    offset: int


def dmabuf_of(address: int, length_bytes: int, *, library: str = _LIBRARY) -> DmaBuf:
    """The dma-buf of CUDA memory at a device address (`tensor.data_ptr()`).

    Needs a current CUDA context in this thread, which a framework that allocated the memory has.

    Raises: FabricError (UNSUPPORTED) when there is no CUDA driver or it refuses.
    """
    try:
        call = ctypes.CDLL(library).cuMemGetHandleForAddressRange
    except (OSError, AttributeError) as problem:
        raise FabricError(
            f"no CUDA driver that exports memory: {problem}", hint=_HINT, status=Status.UNSUPPORTED
        ) from None
    call.argtypes = (
        ctypes.POINTER(ctypes.c_int), ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int,
        ctypes.c_ulonglong,
    )  # fmt: skip
    call.restype = ctypes.c_int
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(address + length_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = ctypes.c_int(-1)
    result = call(ctypes.byref(fd), start, end - start, _DMA_BUF_FD, 0)
    if result != 0:
        raise FabricError(
            f"the CUDA driver exports no dma-buf for this memory (CUresult {result})",
            hint=_HINT,
            status=Status.UNSUPPORTED,
        )
    return DmaBuf(fd.value, address - start)
