"""Whether the system has the huge pages that `[memory] huge_pages = "on"` insists on.

Slabs come as they are needed, so that a daemon without enough of them would start, and fail to give
memory at some later hour. Counts are the kernel's (Documentation/admin-guide/mm/hugetlbpage.rst).
"""

from __future__ import annotations

from pathlib import Path

from entresol_daemon.config_memory import MemoryConfig
from entresol_proto.limits import MIB
from entresol_proto.status import ConfigError

PAGE_BYTES = 2 * MIB
_COUNTS = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


def pages_wanted(memory: MemoryConfig) -> int:
    """Huge pages that all slabs together take."""
    return -(-(memory.dram_bytes + memory.opened_bytes_max) // PAGE_BYTES)


def pages_free(folder: Path = _COUNTS) -> int:
    """Those nobody has, and nobody was promised; 0 where the kernel has none of this size."""
    try:
        free, reserved = (
            int((folder / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
        )
    except (OSError, ValueError):
        return 0
    return max(0, free - reserved)


def check_huge_pages(memory: MemoryConfig, *, folder: Path = _COUNTS) -> None:
    """Raises: ConfigError when huge pages are insisted on and there are too few of them."""
    if memory.huge_pages != "on":
        return
    wanted, free = pages_wanted(memory), pages_free(folder)
    if free < wanted:
        raise ConfigError(
            f'[memory] huge_pages = "on" wants {wanted} huge pages, and {free} are free',
            hint=f"sysctl vm.nr_hugepages={wanted} (more, if others use some), lower dram_bytes "
            'and opened_bytes, or huge_pages = "auto"',
        )
