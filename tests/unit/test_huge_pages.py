"""Huge pages that are insisted on, and are not there: refused at the start, with the number."""

from __future__ import annotations

from pathlib import Path

import pytest

from entresol_daemon.config_memory import MemoryConfig
from entresol_daemon.memory.huge_pages import check_huge_pages, pages_free, pages_wanted
from entresol_proto.limits import GIB, MIB
from entresol_proto.status import ConfigError

MEMORY = MemoryConfig(dram_bytes=4 * GIB, opened_bytes=1 * GIB, huge_pages="on")


def counts(folder: Path, free: int, reserved: int = 0) -> Path:
    (folder / "free_hugepages").write_text(f"{free}\n")
    (folder / "resv_hugepages").write_text(f"{reserved}\n")
    return folder


def test_all_slabs_are_counted() -> None:
    assert pages_wanted(MEMORY) == 2560
    assert pages_wanted(MemoryConfig(dram_bytes=64 * MIB)) == 64  # as much again to open blocks in


def test_enough_of_them_start_and_too_few_do_not(tmp_path: Path) -> None:
    check_huge_pages(MEMORY, folder=counts(tmp_path, 2560))
    with pytest.raises(ConfigError, match="wants 2560 huge pages, and 2559 are free") as caught:
        check_huge_pages(MEMORY, folder=counts(tmp_path, 2600, reserved=41))
    assert "vm.nr_hugepages=2560" in caught.value.hint


def test_who_does_not_insist_starts_without(tmp_path: Path) -> None:
    for word in ("auto", "off"):
        memory = MemoryConfig(dram_bytes=4 * GIB, huge_pages=word)
        check_huge_pages(memory, folder=tmp_path / "none")


def test_a_kernel_without_them_has_none(tmp_path: Path) -> None:
    assert pages_free(tmp_path / "none") == 0
    (tmp_path / "free_hugepages").write_text("many")
    assert pages_free(tmp_path) == 0
