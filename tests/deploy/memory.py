"""Huge pages under the unit: too few of them end the start, enough of them hold the slabs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.world import FIFTH, FIFTH_SOCKET, FIFTH_TOML, World, expect

WANTED = 64  # of 2 MiB, for dram_bytes of 64 MiB and as much to open blocks in
COUNTS = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
KEPT = Path("/proc/sys/vm/nr_hugepages")
TOOL = ("env", "ENTRESOL_CONFIG=/srv/five/client.toml", "entresol")


def huge_pages(world: World) -> str:
    """The second shard insists on them."""
    before = world.machine.run("cat", FIFTH_TOML).stdout
    expect('dram_bytes = "64MiB"' in before, "the second shard has another size")
    world.systemctl("stop", FIFTH_SOCKET, FIFTH)
    there = before.replace("[memory]\n", '[memory]\nhuge_pages = "on"\n')
    world.machine.write(Path(FIFTH_TOML), there)
    told, free = [], _free()
    if free < WANTED:
        refused = world.systemctl("start", FIFTH, check=False)
        expect(refused.returncode != 0, "it started without the pages it insists on")
        world.says(f"wants {WANTED} huge pages, and {free} are free", FIFTH)
        world.systemctl("stop", FIFTH_SOCKET, FIFTH)
        told.append(f"no start with {free} of {WANTED}")
    with _lent(world) as there_are_enough:
        if there_are_enough:
            free = _free()
            world.systemctl("start", FIFTH)
            world.machine.run(*TOOL, "put", "/srv/content", "--name", "huge")
            world.machine.run(*TOOL, "get", "--name", "huge", "--output", "/srv/huge")
            world.machine.run("cmp", "/srv/content", "/srv/huge")
            used = free - _free()
            expect(0 < used <= WANTED, f"{used} huge pages are used")
            told.append(f"{used} of them hold blocks")
            world.systemctl("stop", FIFTH_SOCKET, FIFTH)
        else:
            told.append("a start with enough of them NOT TRIED: this machine has too few")
    world.machine.write(Path(FIFTH_TOML), before)
    world.systemctl("start", FIFTH)
    return "; ".join(told)


def _free() -> int:
    """Pages that nobody has or was promised; this machine's are the ones in there."""
    free, promised = (
        int((COUNTS / name).read_text()) if (COUNTS / name).exists() else 0
        for name in ("free_hugepages", "resv_hugepages")
    )
    return free - promised


@contextlib.contextmanager
def _lent(world: World) -> Iterator[bool]:
    """Whether there are enough; where that was asked for, with some more of this machine's."""
    if not world.lends_huge_pages:
        yield _free() >= WANTED
        return
    kept = int(KEPT.read_text())
    try:
        KEPT.write_text(f"{kept + WANTED}\n")
        yield _free() >= WANTED
    finally:
        KEPT.write_text(f"{kept}\n")
