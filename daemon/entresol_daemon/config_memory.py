"""The settings of memory: what hosts read from, sealed and opened."""

from __future__ import annotations

from dataclasses import dataclass

from entresol_daemon.config_values import setting
from entresol_proto import limits as proto_limits
from entresol_proto.limits import GIB, MIB

TIB = 1024 * GIB
SLABS_MAX = proto_limits.REGIONS_PER_SESSION_MAX // 2  # a session may be shown every one of them


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Slabs: the registered memory that hosts read from."""

    dram_bytes: int = setting(
        1 * GIB, "Memory for slabs of sealed blocks.", low=8 * MIB, high=64 * TIB
    )
    opened_bytes: int = setting(
        0,
        "Beside it, at most, for blocks the daemon opens for hosts; 0 means as much again.",
        low=0,
        high=64 * TIB,
    )
    slab_bytes: int = setting(
        32 * MIB, "Size of one slab, a multiple of 2MiB.", low=2 * MIB, high=1 * GIB
    )
    huge_pages: str = setting(
        "auto",
        "Huge pages for slabs: auto tries, on insists on reserved ones.",
        choices=("auto", "off", "on"),
    )

    @property
    def opened_bytes_max(self) -> int:
        """What `opened_bytes` comes to."""
        return self.opened_bytes or self.dram_bytes

    def problems(self) -> list[tuple[str, str]]:
        """What does not fit together, and what to write instead."""
        found = []
        slab = self.slab_bytes
        if slab % (2 * MIB):
            found.append(("[memory] slab_bytes is not a multiple of 2MiB", "try 32MiB"))
        if self.dram_bytes < 2 * slab:
            found.append(("[memory] dram_bytes is less than two slabs", "use smaller slabs"))
        if self.dram_bytes > slab * SLABS_MAX:
            hint = f"a host is shown {SLABS_MAX} slabs at most; raise [memory] slab_bytes"
            found.append((f"[memory] dram_bytes is more than {SLABS_MAX} slabs", hint))
        if 0 < self.opened_bytes < slab:
            found.append(("[memory] opened_bytes is less than a slab", "0, or use smaller slabs"))
        return found
