"""Huge pages that are insisted on, and are not there: refused at the start, with the number."""

from __future__ import annotations

from pathlib import Path

import pytest

from entresol_daemon.config_memory import MemoryConfig
from entresol_daemon.memory.huge_pages import (
    check_huge_pages,
    pages_free,
    pages_wanted,
    told,
)
from entresol_proto.fabric.memory import huge_pages_are_made
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


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise [never] deny force", False),
        ("always within_size advise never [deny] force", False),
        ("", False),
    ],
)
def test_whether_the_kernel_makes_them_is_what_it_says(
    tmp_path: Path, words: str, made: bool
) -> None:
    setting = tmp_path / "shmem_enabled"
    assert not huge_pages_are_made(setting)
    setting.write_text(words)
    assert huge_pages_are_made(setting) is made


def test_the_pages_slabs_will_lie_in_are_told_with_what_to_do(tmp_path: Path) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text("always within_size advise [never] deny force")
    memory = MemoryConfig(dram_bytes=4 * GIB, opened_bytes=1 * GIB)
    ordinary = told(memory, folder=counts(tmp_path, 2559), setting=setting)
    assert f"echo advise > {setting}" in ordinary
    assert "vm.nr_hugepages=2560" in ordinary
    assert "2560 of 2 MiB are free" in told(memory, folder=counts(tmp_path, 2560), setting=setting)
    setting.write_text("always within_size [advise] never deny force")
    assert "made as they are touched" in told(memory, folder=tmp_path / "none", setting=setting)
    off = MemoryConfig(dram_bytes=4 * GIB, huge_pages="off")
    assert "ordinary" in told(off, folder=tmp_path / "none", setting=setting)
