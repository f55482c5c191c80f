"""How worn a drive is: the health page, the way from a path to its drives, and what refuses.

The command itself needs an NVMe drive; a machine with one, and root, runs the last test.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from entresol_daemon import drives, judge
from entresol_daemon.drives import SMART_BYTES, Wear, drives_below, parse_smart, read_wear
from entresol_proto.status import DeviceError, Status

WORN = Wear(
    used_percent=93, spare_percent=8, spare_least_percent=10, written_bytes=2 * 10**18,
    media_errors=7, warnings=("little spare is left", "read-only"),
)  # fmt: skip


def page_of(wear: Wear, flags: int = 0) -> bytes:
    """A health page as the specification lays it out."""
    page = bytearray(SMART_BYTES)
    page[0] = flags
    page[1:3] = (310).to_bytes(2, "little")  # kelvin
    page[3], page[4], page[5] = wear.spare_percent, wear.spare_least_percent, wear.used_percent
    page[48:64] = (wear.written_bytes // 512_000).to_bytes(16, "little")
    page[128:144] = (9000).to_bytes(16, "little")  # hours
    page[160:176] = wear.media_errors.to_bytes(16, "little")
    return bytes(page)


def test_a_health_page_is_read_as_specified() -> None:
    assert parse_smart(page_of(WORN, flags=0b1001)) == WORN
    past = parse_smart(page_of(Wear(255, 0, 10, 0, 2**100, ())))
    assert (past.used_percent, past.media_errors) == (255, 2**100)


@pytest.mark.parametrize("page", [b"", bytes(SMART_BYTES), bytes(511), b"\1" * 513])
def test_a_page_that_is_none_is_refused(page: bytes) -> None:
    with pytest.raises(DeviceError, match="empty"):
        parse_smart(page)


def test_the_question_is_72_bytes_as_the_kernel_has_it() -> None:
    assert drives._COMMAND.size == 72 == drives._ADMIN_CMD >> 16 & 0x3FFF
    assert (3 << 30) | (72 << 16) | (ord("N") << 8) | 0x41 == drives._ADMIN_CMD


class Tree:
    """A /sys with devices over each other, and a /proc with mounts."""

    def __init__(self, root: Path, under: Path) -> None:
        self.root = root
        found = under.stat().st_dev
        self.number = f"{os.major(found)}:{os.minor(found)}"
        (root / "sys/dev/block").mkdir(parents=True)
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/mountinfo").write_text("")

    def device(self, name: str, *below: str) -> Path:
        folder = self.root / "sys/devices" / name
        (folder / "slaves").mkdir(parents=True)
        for one in below:
            target = next((self.root / "sys/devices").glob(f"**/{one}"))
            (folder / "slaves" / one).symlink_to(target)
        return folder

    def partition(self, disk: str, name: str) -> Path:
        folder = self.root / "sys/devices" / disk / name
        folder.mkdir()
        (folder / "partition").write_text("1\n")
        return folder

    def holds(self, folder: Path) -> None:
        (self.root / "sys/dev/block" / self.number).symlink_to(folder)


def test_a_file_is_on_the_drives_below_partitions_mirrors_and_mappings(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "root", tmp_path)
    if tree.number.startswith("0:"):
        pytest.skip("not run here: the temporary folder is on no block device")
    for disk in ("nvme0n1", "nvme1n1", "sda"):
        tree.device(disk)
    for number in range(2):
        tree.partition(f"nvme{number}n1", f"nvme{number}n1p2")
    tree.device("md0", "nvme0n1p2", "nvme1n1p2")
    tree.holds(tree.device("dm-0", "md0", "sda"))
    file = tmp_path / "flash.data"
    file.touch()
    found = drives_below(file, tmp_path / "root")
    assert sorted(found) == ["nvme0n1", "nvme1n1", "sda"]


def test_devices_over_each_other_without_end_are_left_at_some_depth(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "root", tmp_path)
    folder = tree.device("dm-0")
    (folder / "slaves/dm-0").symlink_to(folder)
    if tree.number.startswith("0:"):
        pytest.skip("not run here: the temporary folder is on no block device")
    tree.holds(folder)
    assert drives_below(tmp_path, tmp_path / "root") == []


def test_a_file_system_in_memory_has_no_drive() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or os.major(shm.stat().st_dev):
        pytest.skip("not run here: /dev/shm is not in memory")
    assert drives_below(shm) == []


def test_the_drive_of_this_machine_is_found() -> None:
    """Whatever it is: it is one that the kernel lists."""
    for name in drives_below(Path(__file__)):
        assert (Path("/sys/block") / name).exists()


def test_what_is_no_nvme_drive_or_not_there_is_said(tmp_path: Path) -> None:
    for name in ("sda", "vda", "loop0", "nvme0", "../nvme0n1", "nvme0n1p1"):
        with pytest.raises(DeviceError, match="no NVMe") as caught:
            read_wear(name)
        assert caught.value.status is Status.UNSUPPORTED
    with pytest.raises(DeviceError, match="No such file") as caught:
        read_wear("nvme0n1", tmp_path)
    assert caught.value.status is Status.UNSUPPORTED
    (tmp_path / "nvme0n1").write_bytes(b"a file, not a drive")
    with pytest.raises(DeviceError) as caught:
        read_wear("nvme0n1", tmp_path)
    assert caught.value.status is Status.UNSUPPORTED


def test_the_doctor_says_how_worn_and_worries_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Wear | DeviceError] = []

    def asked(name: str) -> Wear:
        answer = said.pop()
        if isinstance(answer, DeviceError):
            raise answer
        return answer

    monkeypatch.setattr(judge, "read_wear", asked)
    young = Wear(3, 100, 10, 12_340_000_000_000, 0, ())
    said.append(young)
    words = "drive nvme0n1: 3 % of its warranted life used, 100 % spare left, 12.3 TB written"
    assert judge._wear("nvme0n1") == ("ok", words, "")
    for change in (
        Wear(90, 100, 10, 0, 0, ()), Wear(3, 100, 10, 0, 1, ()), Wear(3, 9, 10, 0, 0, ("hot",)),
    ):  # fmt: skip
        said.append(change)
        level, _, fix = judge._wear("nvme0n1")
        assert (level, "drive_writes_per_day" in fix) == ("warn", True), change
    said.append(WORN)
    assert judge._wear("nvme0n1")[1].endswith(
        "little spare is left, read-only, 7 media errors so far"
    )
    for status, level, match in (
        (Status.FORBIDDEN, "ok", "only root"),
        (Status.UNSUPPORTED, "ok", "cannot be read here"),
        (Status.IO_ERROR, "warn", "does not tell"),
    ):
        said.append(DeviceError("why", status=status))
        found = judge._wear("sda")
        assert found[0] == level
        assert re.search(match, found[1])


def test_a_real_drive_answers() -> None:
    names = sorted(path.name for path in Path("/sys/block").glob("nvme*n*"))
    if not names:
        pytest.skip("not run here: no NVMe drive")
    try:
        wear = read_wear(names[0])
    except DeviceError as error:
        if error.status is Status.FORBIDDEN:
            pytest.skip("not run here: only root may ask an NVMe drive")
        raise
    assert wear.spare_percent <= 100
