"""What a process holds in memory, looked at from outside: copies of secrets, counted.

Invariant: every readable mapping is read, whatever it is for; a needle is found at any address. The
search compares all of a needle's bytes; the tables before that only say where it need not look.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 16 * 1024 * 1024
NEEDLE_BYTES_MIN = 8
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
NO_CORE = "the kernel wrote none"
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Region:
    """One mapping."""

    start: int
    end: int
    kind: str  # what /proc calls it


def regions_of(pid: int) -> list[Region]:
    """Readable mappings, but for code that is in a file and can hold nothing of ours."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        name = words[5] if len(words) > 5 else "anonymous"
        if "r" not in words[1] or name in ("[vvar]", "[vsyscall]", "[vvar_vclock]"):
            continue
        if "w" not in words[1] and name.startswith("/"):
            continue
        start, end = (int(part, 16) for part in words[0].split("-"))
        found.append(Region(start, end, name))
    return found


def memory_of(pid: int) -> Iterator[tuple[Region, int, bytes]]:
    """(region, address, bytes) in pieces that overlap, so that nothing falls between two."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for region in regions_of(pid):
            for start in range(region.start, region.end, PIECE_BYTES):
                length = min(PIECE_BYTES + _PAGE, region.end - start)
                try:
                    yield region, start, os.pread(memory.fileno(), length, start)
                except OSError:
                    continue  # unmapped meanwhile, or not memory


class Search:
    """Looks for many needles at once."""

    def __init__(self, needles: Mapping[bytes, str]) -> None:
        """`needles`: the bytes, each NEEDLE_BYTES_MIN at least -> what they are."""
        assert all(len(needle) >= NEEDLE_BYTES_MIN for needle in needles)
        self._needles = dict(needles)
        self._by_head: dict[int, list[bytes]] = {}
        for needle in needles:
            self._by_head.setdefault(int.from_bytes(needle[:8], "little"), []).append(needle)
        self._heads = np.array(sorted(self._by_head), np.uint64)
        self._table = np.zeros(1 << 16, bool)
        self._table[(self._heads & np.uint64(0xFFFF)).astype(np.int64)] = True

    def places(self, raw: bytes) -> Iterator[tuple[int, bytes]]:
        """(offset, needle) of everything in `raw`."""
        for shift in range(8):
            length = (len(raw) - shift) // 8
            if length <= 0:
                return
            words: npt.NDArray[np.uint64] = np.frombuffer(raw, np.uint64, length, shift)
            low = np.frombuffer(raw, np.uint16, 4 * length, shift)[::4]
            maybe = np.flatnonzero(self._table[low])
            hits = maybe[np.isin(words[maybe], self._heads)]
            for at in hits.tolist():
                start = shift + 8 * at
                for needle in self._by_head[int(words[at])]:
                    if raw[start : start + len(needle)] == needle:
                        yield start, needle

    def in_process(self, pid: int) -> dict[bytes, Counter[str]]:
        """For each needle found: in which kinds of mappings, and how often."""
        found: dict[bytes, Counter[str]] = {}
        seen: set[tuple[int, bytes]] = set()
        for region, start, raw in memory_of(pid):
            for offset, needle in self.places(raw):
                if (start + offset, needle) not in seen:  # pieces overlap
                    seen.add((start + offset, needle))
                    found.setdefault(needle, Counter())[region.kind] += 1
        return found

    def in_bytes(self, raw: bytes) -> Counter[bytes]:
        """How often each needle is in a text."""
        return Counter(needle for _, needle in self.places(raw))

    def in_file(self, path: Path) -> Counter[bytes]:
        """How often each needle is in a file."""
        found: Counter[bytes] = Counter()
        with path.open("rb") as file:
            tail = b""
            while piece := file.read(PIECE_BYTES):
                whole = tail + piece
                cut = len(tail)
                for offset, needle in self.places(whole):
                    if offset + len(needle) > cut:  # not wholly in what was looked at before
                        found[needle] += 1
                tail = whole[-128:]
        return found

    def label(self, needle: bytes) -> str:
        """What a needle is."""
        return self._needles[needle]

    def summary(self, found: Mapping[bytes, object]) -> dict[str, int]:
        """Distinct needles found, by what they are."""
        return dict(Counter(self._needles[needle] for needle in found))


def forms_of(secret: bytes, what: str) -> dict[bytes, str]:
    """A secret as it is, and as text would show it."""
    import base64

    return {
        secret: what,
        secret.hex().encode(): f"{what} in hex",
        secret.hex().upper().encode(): f"{what} in hex",
        base64.b64encode(secret)[:-2]: f"{what} in base64",
    }


def cores_of(child: subprocess.Popen[bytes], folder: Path) -> tuple[list[Path], str]:
    """End a process that runs in `folder` so that the kernel writes a core file, if it may: the
    whole image, shared memory and files too. The core files there, and why there is none.

    Where cores go to is the machine's choice (core(5)): there may be none to look at.
    """
    try:
        resource.prlimit(child.pid, resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
        Path(f"/proc/{child.pid}/coredump_filter").write_text("0x7f")
        pattern = CORE_PATTERN.read_text().strip()
    except OSError as error:
        return [], f"no core file can be asked for here: {error.strerror}"
    child.send_signal(signal.SIGABRT)
    child.wait(60)
    return list(folder.glob("core*")), why_no_core(pattern)


def why_no_core(pattern: str) -> str:
    """Why there may be no core file in the folder of whoever dies, by the kernel's pattern; what to
    say where there was to be one and is none."""
    if pattern.startswith("|"):
        return f"core files go to a program here (core_pattern is {pattern})"
    if "/" in pattern or not pattern.startswith("core"):
        return f"core files go elsewhere here (core_pattern is {pattern})"
    return NO_CORE


def no_core(cores: Sequence[Path], why: str, *, written: bool) -> str:
    """What is to be said of core files that were not looked at: nothing where there are some, and
    where none was to come out of a sandbox and the kernel would have put it here."""
    return "" if cores or not (written or why != NO_CORE) else f"no core file was searched: {why}"
