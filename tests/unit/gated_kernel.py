"""The native kernel with a gate in front of `preadv` (gated.c): a test lets reads go on."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import cast

import pytest

from entresol_daemon.flash.checking import Expected
from entresol_daemon.flash.segment import (
    RECORD_HEADER_BYTES,
    RecordHeader,
    RecordKind,
    encode_record_header,
    extent_bytes,
    sealed_hash,
)
from entresol_daemon.flash.space import Segment
from entresol_proto import native

KEY = bytes(range(32))  # of the checks of records


def build(folder: Path, name: str = "gated") -> Path:
    """The library of that source. Skips where there is no compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("not run here: no C compiler")
    made = folder / f"{name}.so"
    source, headers = Path(__file__).with_name(f"{name}.c"), native.SOURCE.parent
    flags = ["-std=c11", "-O1", "-g", "-fPIC", "-shared", "-pthread", f"-I{headers}"]
    subprocess.run([compiler, *flags, "-o", made, source], check=True, timeout=120)
    return made


class Gate:
    """Lets reads go on, and knows which have begun."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.begun_offset.restype = ctypes.c_uint64
        self._out, self._in = os.pipe()
        self._library.gate(self._out)

    def open(self, reads: int = 1) -> None:
        os.write(self._in, bytes(reads))

    @property
    def begun(self) -> list[int]:
        """Offsets, in order."""
        return [self._library.begun_offset(number) for number in range(self._library.begun())]

    def wait(self, count: int) -> None:
        """Until so many have begun."""
        deadline = time.monotonic() + 30
        while self._library.begun() < count:
            assert time.monotonic() < deadline, f"{self._library.begun()} of {count} have begun"
            time.sleep(0.001)

    def let_through(self, reads: int, at_once: int) -> None:
        """One read after the other, with never more than so many begun and not let through."""
        for number in range(reads):
            self.wait(min(reads, number + at_once))
            time.sleep(0.02)
            assert len(self.begun) <= number + at_once
            self.open()

    def close(self) -> None:
        self._library.gate(-1)
        os.close(self._in)
        os.close(self._out)


def record(sealed_bytes: int, seed: int = 1) -> tuple[Expected, bytearray]:
    """A record as it is on flash, and what the index would say of it."""
    rng = random.Random(seed)
    sealed = rng.randbytes(sealed_bytes)
    header = RecordHeader(
        RecordKind.BLOCK, rng.getrandbits(64), rng.getrandbits(64), rng.getrandbits(32),
        sealed_bytes, rng.randbytes(16), rng.randbytes(16), rng.getrandbits(32),
        rng.getrandbits(32), sealed_hash(memoryview(sealed)),
    )  # fmt: skip
    raw = bytearray(extent_bytes(sealed_bytes))
    raw[:RECORD_HEADER_BYTES] = encode_record_header(header, KEY)
    raw[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + sealed_bytes] = sealed
    expected = Expected(
        cast(Segment, None), header.sequence, header.offset, header.namespace_id, header.wire_key,
        sealed_bytes, header.plain_bytes, header.position,
    )  # fmt: skip
    return expected, raw
