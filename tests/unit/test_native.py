"""The native kernel and its Python twin give the same bytes."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from entresol_proto import native

GUARD = 0xA5
Copy = Callable[[Sequence[memoryview], Sequence[native.Bytes]], None]


def kernel() -> native.Kernel:
    """The loaded kernel."""
    if native.KERNEL is None:
        pytest.skip("not run here: the package was built without a C compiler")
    return native.KERNEL


def check(copy: Copy, seed: int) -> None:
    """Odd lengths, every alignment, guards before and behind each destination."""
    rng = random.Random(seed)
    pool = np.random.default_rng(seed).integers(0, 256, 1 << 20, dtype=np.uint8)
    lengths = [rng.choice((0, 1, 15, 16, 17, 63, 64, 65, 4096, 70_001)) for _ in range(20)]
    starts = [rng.randrange(len(pool) - 70_001) for _ in lengths]
    sources = [pool[at : at + size] for at, size in zip(starts, lengths, strict=True)]
    for source in sources:
        source.flags.writeable = False  # as a peer's memory is
    margins = [64 + rng.randrange(64) for _ in lengths]
    outs = [
        bytearray([GUARD]) * (size + 2 * margin)
        for size, margin in zip(lengths, margins, strict=True)
    ]
    views = [
        memoryview(out)[margin : margin + size]
        for out, margin, size in zip(outs, margins, lengths, strict=True)
    ]
    filled = [number for number, size in enumerate(lengths) if size]
    copy([views[n] for n in filled], [sources[n] for n in filled])
    for out, margin, source in zip(outs, margins, sources, strict=True):
        guard = bytes([GUARD]) * margin
        assert bytes(out) == guard + source.tobytes() + guard, f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_the_kernel_copies_exactly(seed: int) -> None:
    check(kernel().copy, seed)


@pytest.mark.parametrize("seed", range(5))
def test_the_twin_copies_exactly(seed: int) -> None:
    check(native.copy, seed)  # below STREAM_BYTES_MIN


def test_a_large_batch_is_copied_exactly() -> None:
    rng = np.random.default_rng(7)
    sources = [rng.integers(0, 256, native.STREAM_BYTES_MIN + n, dtype=np.uint8) for n in (1, 2)]
    outs = [np.zeros(len(source), np.uint8) for source in sources]
    native.copy([memoryview(out).cast("B") for out in outs], sources)
    for source, out in zip(sources, outs, strict=True):
        assert np.array_equal(source, out)


def test_a_read_only_destination_is_refused() -> None:
    source = np.ones(native.STREAM_BYTES_MIN, np.uint8)
    with pytest.raises((TypeError, ValueError)):
        native.copy([memoryview(bytes(len(source)))], [source])


def test_it_can_be_turned_off() -> None:
    code = "from entresol_proto import native; raise SystemExit(native.KERNEL is not None)"
    environment = {
        **os.environ, "ENTRESOL_NATIVE": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert done.returncode == 0


def test_the_processor_is_asked_for_all_that_the_vectors_take() -> None:
    """An instruction that a hypervisor leaves out ends the process."""
    source = native.SOURCE.with_name("ladder.h").read_text()
    targets = re.findall(r'target\("([a-z0-9,]+)"\)', source)
    asked = re.findall(r'__builtin_cpu_supports\("([a-z0-9]+)"\)', source)
    assert len(targets) == 2, "GCC's way to say it, and Clang's"
    for target in targets:
        assert sorted(target.split(",")) == sorted(asked)


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    kernel()
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("not run here: no C compiler")
    stale = tmp_path / "stale.c"
    stale.write_text("int entresol_kernel_version(void) { return 9999; }\n")
    library = tmp_path / "stale.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, stale], check=True, timeout=60)
    with pytest.raises(ValueError, match="version 9999"):
        native.Kernel(library)
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(OSError, match="broken"):
        native.Kernel(broken)


@pytest.mark.parametrize("with_kernel", [True, False])
@pytest.mark.parametrize("length", [1, 8, 16, 32, 33, 64, 127, 128])
def test_blake2b_of_many_is_what_hashlib_gives_of_each(
    length: int, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_kernel:
        kernel()
    else:
        monkeypatch.setattr(native, "KERNEL", None)
    rng = random.Random(length)
    for digest_bytes, key_bytes, person in ((16, 32, b"p"), (8, 1, b""), (64, 64, bytes(16))):
        key = rng.randbytes(key_bytes)
        for count in (1, 2, 4, 33, 64):
            run = rng.randbytes(count * length)
            found = native.blake2b_many(
                run, count, digest_bytes=digest_bytes, key=key, person=person
            )
            assert found == b"".join(
                hashlib.blake2b(
                    run[at : at + length], digest_size=digest_bytes, key=key, person=person
                ).digest()
                for at in range(0, len(run), length)
            )
    assert native.blake2b_many(b"", 0, digest_bytes=16, key=b"k", person=b"") == b""


@pytest.mark.parametrize(
    ("run", "count", "digest_bytes", "key", "person"),
    [
        (bytes(33), 2, 16, b"k", b""),
        (bytes(129), 1, 16, b"k", b""),
        (b"", 1, 16, b"k", b""),
        (bytes(32), 1, 16, b"", b""),
        (bytes(32), 1, 16, bytes(65), b""),
        (bytes(32), 1, 65, b"k", b""),
        (bytes(32), 1, 0, b"k", b""),
        (bytes(32), 1, 16, b"k", bytes(17)),
    ],
)
def test_the_kernel_hashes_nothing_that_does_not_fit(
    run: bytes, count: int, digest_bytes: int, key: bytes, person: bytes
) -> None:
    kernel()
    with pytest.raises(AssertionError):
        native.blake2b_many(run, count, digest_bytes=digest_bytes, key=key, person=person)
