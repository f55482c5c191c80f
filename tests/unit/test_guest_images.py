"""The guest harness's images, none of them built: keys, mirrors, packages, archives, cache."""

from __future__ import annotations

import lzma
import os
import shutil
import struct
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from tests.rdma import apt, cache, cpio, spec, tools, vmlinux

REQUEST = spec.Request("root", "x86", ("bookworm",), ("bash", "python3"))


# Keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, kind="site"),
        replace(REQUEST, arch="arm64"),
        replace(REQUEST, suites=("bookworm", "bookworm-security")),
        replace(REQUEST, packages=("bash",)),
        replace(REQUEST, packages=("bash python3",)),
        replace(REQUEST, packages=("python3", "bash")),
        replace(REQUEST, recipe=REQUEST.recipe + 1),
    ],
)
def test_everything_that_changes_an_image_changes_its_key(other: spec.Request) -> None:
    assert other.key() != REQUEST.key()
    assert replace(REQUEST).key() == REQUEST.key()


def test_all_images_of_all_guests_have_keys_of_their_own() -> None:
    keys = []
    for arch in spec.ARCHES.values():
        keys += [spec.kernel_request(arch, kernel).key() for kernel in spec.KERNELS.values()]
        keys += [spec.root_request(arch).key(), spec.site_request(arch).key()]
    assert len(set(keys)) == len(keys) == 8


def test_versions_name_an_image_in_any_order() -> None:
    assert spec.versions_digest(["a=1", "b=2"]) == spec.versions_digest(["b=2", "a=1"])
    assert spec.versions_digest(["a=1", "b=2"]) != spec.versions_digest(["a=1", "b=3"])


# Mirrors and packages -----------------------------------------------------------------------------


def test_the_public_mirror_is_the_default() -> None:
    assert apt.mirrors_of("") == apt.Mirrors(apt.MIRROR_DEFAULT, apt.SECURITY_DEFAULT)
    foreign = (
        "deb http://archive.ubuntu.com/ubuntu noble main\ndeb https://deb.example.org/node x main"
    )
    assert apt.mirrors_of(foreign).archive == apt.MIRROR_DEFAULT


def test_the_hosts_mirror_is_used_in_either_style_of_sources() -> None:
    lines = (
        "# deb http://old.example.net/debian bookworm main\n"
        "deb [signed-by=/usr/share/keyrings/x.gpg] http://near.example.net/debian/ bookworm main\n"
        "deb http://near.example.net/debian-security bookworm-security main\n"
        "deb http://other.example.net/debian trixie main\n"
    )
    near = apt.Mirrors("http://near.example.net/debian", "http://near.example.net/debian-security")
    assert apt.mirrors_of(lines) == near
    stanza = (
        "Types: deb\nURIs: http://near.example.net/debian\nSuites: bookworm\n\n"
        "Types: deb\nURIs: http://near.example.net/debian-security\nSuites: bookworm-security\n"
    )
    assert apt.mirrors_of(stanza) == near


def test_a_named_mirror_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(apt.MIRROR_ENV, "http://mine.example.net/debian/")
    assert apt.host_mirrors().security == "http://mine.example.net/debian-security"


def test_sources_are_signed_and_security_comes_from_its_own_place() -> None:
    lines = apt.source_lines(("bookworm", "bookworm-security"), apt.mirrors_of(""))
    assert all(f"signed-by={tools.KEYRING}" in line for line in lines)
    assert lines[0].endswith("/debian bookworm main")
    assert lines[1].endswith("/debian-security bookworm-security main")


def test_packages_are_read_from_what_apt_prints() -> None:
    text = (
        "'http://m/debian/pool/b/busybox-static_1.37.0-6%2bb9_amd64.deb' "
        "busybox-static_1%3a1.37.0-6+b9_amd64.deb 955316 MD5Sum:60\n"
        "'http://m/debian/pool/l/linux-base_4.17%7ebpo13_all.deb' "
        "linux-base_4.17~bpo13_all.deb 26836 \n"
        "Reading package lists...\n"
    )
    found = apt.parse_uris(text)
    assert [deb.pin for deb in found] == [
        "busybox-static:amd64=1:1.37.0-6+b9", "linux-base=4.17~bpo13",
    ]  # fmt: skip
    assert apt.parse_uris("E: Unable to locate package x") == []


# Tools --------------------------------------------------------------------------------------------


def empty_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *commands: str) -> None:
    for command in commands:
        (tmp_path / command).write_text("#!/bin/sh\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setattr(tools, "SEARCH_PATH", str(tmp_path))


def test_a_host_without_apt_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty_path(monkeypatch, tmp_path, "tar", "dpkg-deb")
    with pytest.raises(tools.NotHere, match="no apt-get"):
        tools.ensure_tools(["x86"])


def test_who_is_not_root_reads_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty_path(monkeypatch, tmp_path, "tar", "dpkg-deb", "apt-get", "xz")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(spec.HarnessError) as failure:
        tools.ensure_tools(["arm64"])
    assert "qemu-system-arm" in str(failure.value)
    assert "qemu-system-x86" not in str(failure.value)
    assert "xz-utils" not in str(failure.value)
    assert "\n" not in str(failure.value)


# Archives -----------------------------------------------------------------------------------------


def parse(data: bytes) -> dict[str, tuple[int, bytes]]:
    """An independent reading of the format, as the kernel does it."""
    found: dict[str, tuple[int, bytes]] = {}
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = data[at + 110 : at + 110 + name_size - 1].decode()
        begin = (at + 110 + name_size + 3) // 4 * 4
        if name == "TRAILER!!!":
            assert not data[begin:].strip(b"\0")
            return found
        found[name] = (mode, data[begin : begin + size])
        at = (begin + size + 3) // 4 * 4


def test_an_archive_reads_back(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").write_bytes(b"x" * 5)
    (tmp_path / "bin" / "tool").chmod(0o755)
    (tmp_path / "bin" / "link").symlink_to("tool")
    entries = cpio.entries_of(tmp_path)
    assert parse(cpio.archive(entries)) == entries
    assert entries["bin"] == (0o040755, b"")
    assert entries["bin/link"] == (0o120777, b"tool")
    assert entries["bin/tool"] == (0o100755, b"xxxxx")


def test_folders_come_before_their_files() -> None:
    assert list(cpio.files({"a/b/c": b"", "a/d": b""})) == ["a", "a/b", "a/b/c", "a/d"]


@pytest.mark.skipif(not shutil.which("cpio"), reason="not run here: no cpio to read archives with")
def test_a_second_archive_may_follow(tmp_path: Path) -> None:
    archive = cpio.archive(cpio.files({"guest/cmd": b"#!/bin/sh\n"}))
    assert len(archive) % 4 == 0
    done = subprocess.run(
        ["cpio", "-t", "--quiet"], input=archive, capture_output=True, check=True, timeout=30
    )
    assert done.stdout.split() == [b"guest", b"guest/cmd"]


# Kernels ------------------------------------------------------------------------------------------


def bzimage(packed: bytes) -> bytes:
    """An image of the boot protocol's layout around a payload."""
    head = bytearray(2 * 512)
    head[0x1F1] = 1  # setup sectors behind the boot sector
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 16, len(packed) + 4)
    return bytes(head) + b"\xcc" * 16 + packed + b"\0\0\1\0" + b"\xcc" * 32


def test_the_kernel_comes_out_of_its_image() -> None:
    kernel = b"\x7fELF" + os.urandom(5000)
    assert vmlinux.uncompressed(bzimage(lzma.compress(kernel))) == kernel
    assert vmlinux.uncompressed(bzimage(zstandard.compress(kernel))) == kernel


@pytest.mark.parametrize(
    "image",
    [
        b"", b"MZ" + bytes(4096), bzimage(b"\x89LZO" + bytes(64)),
        bzimage(lzma.compress(b"no ELF")), bzimage(lzma.compress(b"\x7fELF"))[:1050],
    ],
    ids=["empty", "other", "packing", "content", "cut"],
)  # fmt: skip
def test_what_is_no_kernel_of_that_kind_is_left_as_it_is(image: bytes) -> None:
    assert vmlinux.uncompressed(image) is None


# The cache ----------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "cache"))
    return cache.cache_root()


def builder(*versions: str) -> cache.Builder:
    def build(out: Path) -> list[str]:
        (out / "image").write_text(" ".join(versions))
        return list(versions)

    return build


def never(out: Path) -> list[str]:
    raise AssertionError("built although it was there")


def test_an_image_is_built_once(root: Path) -> None:
    made = cache.ensure(REQUEST, builder("a=1"))
    assert (made / "image").read_text() == "a=1"
    assert cache.ensure(REQUEST, never) == made
    with pytest.raises(AssertionError, match="although"):
        cache.ensure(replace(REQUEST, arch="arm64"), never)


def test_a_failed_build_leaves_nothing_and_hides_nothing(root: Path) -> None:
    def fails(out: Path) -> list[str]:
        (out / "half").write_text("half")
        raise spec.HarnessError("no network")

    with pytest.raises(spec.HarnessError, match="no network"):
        cache.ensure(REQUEST, fails)
    assert [path.name for path in root.iterdir() if path.is_dir()] == []
    made = cache.ensure(REQUEST, builder("a=1"))
    with pytest.raises(spec.HarnessError, match="no network"):
        cache.ensure(REQUEST, fails, refresh=True)
    assert cache.find(root, REQUEST) == made


def test_newer_versions_replace_but_the_last_stays_for_who_runs_it(root: Path) -> None:
    first = cache.ensure(REQUEST, builder("a=1"))
    assert cache.ensure(REQUEST, builder("a=1"), refresh=True) == first
    second = cache.ensure(REQUEST, builder("a=2"), refresh=True)
    assert second != first
    assert first.is_dir()
    third = cache.ensure(REQUEST, builder("a=3"), refresh=True)
    assert not first.exists()
    assert second.is_dir()
    assert cache.find(root, REQUEST) == third


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"image": 5}', '{"image": "gone"}'])
def test_a_damaged_pointer_is_a_miss(root: Path, damage: str) -> None:
    made = cache.ensure(REQUEST, builder("a=1"))
    (root / f"{REQUEST.key()}.json").write_text(damage)
    assert cache.find(root, REQUEST) is None
    assert cache.ensure(REQUEST, builder("a=1")) == made


def test_what_a_killed_builder_left_goes_with_the_next_build(root: Path) -> None:
    left = root / f".{REQUEST.key()}-killed"
    left.mkdir()
    other = root / f".{replace(REQUEST, arch='arm64').key()}-at-work"
    other.mkdir()
    cache.ensure(REQUEST, builder("a=1"))
    assert not left.exists()
    assert other.exists()


def test_images_nobody_asks_for_go_in_the_end(root: Path) -> None:
    old = cache.ensure(replace(REQUEST, recipe=0), builder("a=1"))
    used = cache.ensure(replace(REQUEST, arch="arm64"), builder("a=1"))
    for pointer in root.glob("*.json"):
        os.utime(pointer, (0, 0))
    assert cache.find(root, replace(REQUEST, arch="arm64")) == used
    cache.ensure(REQUEST, builder("a=1"))
    assert not old.exists()
    assert cache.find(root, replace(REQUEST, recipe=0)) is None
    assert used.exists()


def test_two_builders_build_once(root: Path) -> None:
    built, go, waits = [], threading.Event(), threading.Event()

    def slow(out: Path) -> list[str]:
        waits.set()
        assert go.wait(30)
        built.append(out)
        return ["a=1"]

    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(cache.ensure(REQUEST, slow)))
    first.start()
    assert waits.wait(30)
    second = threading.Thread(target=lambda: found.append(cache.ensure(REQUEST, slow)))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "it did not wait for the first"
    go.set()
    for thread in (first, second):
        thread.join(30)
    assert len(built) == 1
    assert found[0] == found[1]
