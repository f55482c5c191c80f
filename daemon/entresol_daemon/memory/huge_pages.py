"""Huge pages for slabs: which the system has, reserved or made as they are touched.

`[memory] huge_pages = "on"` insists on reserved ones. Slabs come as they are needed, so that a
daemon without enough of them would start, and fail to give memory at some later hour. "auto" takes
what there is. Counts are the kernel's (Documentation/admin-guide/mm/hugetlbpage.rst).
"""

from __future__ import annotations

from pathlib import Path

from entresol_daemon.config_memory import MemoryConfig
from entresol_proto.fabric.memory import HUGE_PAGE_BYTES, SHARED_MADE, huge_pages_are_made
from entresol_proto.status import ConfigError

_COUNTS = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


def pages_wanted(memory: MemoryConfig) -> int:
    """Huge pages that all slabs together take."""
    return -(-(memory.dram_bytes + memory.opened_bytes_max) // HUGE_PAGE_BYTES)


def pages_free(folder: Path = _COUNTS) -> int:
    """Those nobody has, and nobody was promised; 0 where the kernel has none of this size."""
    try:
        free, reserved = (
            int((folder / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
        )
    except (OSError, ValueError):
        return 0
    return max(0, free - reserved)


def told(memory: MemoryConfig, *, folder: Path = _COUNTS, setting: Path = SHARED_MADE) -> str:
    """What pages slabs will lie in, and what to do for larger ones; for a person."""
    wanted = pages_wanted(memory)
    if memory.huge_pages == "off":
        return 'slabs lie in ordinary pages ([memory] huge_pages = "off")'
    if pages_free(folder) >= wanted:
        return f"slabs lie in huge pages: {wanted} of 2 MiB are free"
    if huge_pages_are_made(setting):
        return "slabs lie in huge pages, made as they are touched"
    return (
        "slabs lie in ordinary pages, of which a drive may be read more slowly; for huge ones: "
        f"echo advise > {setting}, or sysctl vm.nr_hugepages={wanted}"
    )


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
