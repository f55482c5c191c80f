"""The native kernel against damaged input, built with AddressSanitizer and UBSan (hostile.c): it
reads and writes nothing that is not its own, and its ways agree on what they refuse."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from entresol_proto import native

FLAGS = (
    "-std=c11", "-O0", "-g1", "-fno-omit-frame-pointer", "-pthread",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
)  # fmt: skip
ROUNDS, SECONDS_MAX = 600, 6
# What the kernel must not do without: a file, and what it asks there. The program is built so that
# it can be told to leave one of them out.
CHECKS = {
    "literals": ("ladder_chunk.h", "(size_t)(end - from) < left[LEVELS]"),
    "codes": ("ladder_chunk.h", "(size_t)(end - from) < packed_bytes(bits[level], left[level])"),
    "rows": ("ladder_chunk.h", "(size_t)(end - from) < asked"),
    "period": ("ladder_chunk.h", "model.period > PERIOD_MAX"),
    "room": ("ladder_chunk.h", "(size_t)(at - out) + tables + (rows + 7) / 8 + resets > room"),
    "record": ("record.h", "length_bytes < RECORD_HEAD_BYTES"),
    "span": ("kernel.c", "length > r->length_bytes - r->received_bytes"),
}


def build(source: Path, made: Path, headers: Path) -> subprocess.CompletedProcess[str]:
    compiler = shlex.split(os.environ.get("CC") or shutil.which("cc") or "")
    if not compiler:
        pytest.skip("not run here: no C compiler")
    return subprocess.run(
        [*compiler, *FLAGS, f"-I{headers}", "-o", str(made), str(source)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def run(made: Path, *arguments: int) -> subprocess.CompletedProcess[str]:
    # Leaks are looked for by ptrace(2), which not every machine allows.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    environment.pop("LD_PRELOAD", None)
    return subprocess.run(
        [str(made), *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program. Skips where the compiler has no sanitizers."""
    folder = tmp_path_factory.mktemp("hostile")
    nothing = folder / "nothing.c"
    nothing.write_text("int main(void) { return 0; }\n")
    built = build(nothing, folder / "nothing", folder)
    if built.returncode != 0 or run(folder / "nothing").returncode != 0:
        pytest.skip("not run here: the C compiler has no AddressSanitizer (Debian: libasan8)")
    headers = folder / "kernel"
    shutil.copytree(native.SOURCE.parent, headers, ignore=shutil.ignore_patterns("*.so", "*.py"))
    for number, (name, check) in enumerate(CHECKS.values(), 1):
        source = (headers / name).read_text()
        assert source.count(check) == 1, f"{name} asks this once: {check}"
        source = source.replace(check, f"(left_out != {number} && ({check}))")
        (headers / name).write_text(source)
    made = folder / "hostile"
    built = build(Path(__file__).with_name("hostile.c"), made, headers)
    assert built.returncode == 0, built.stderr
    return made


def test_nothing_damaged_leads_the_kernel_out_of_its_memory(hostile: Path) -> None:
    ended = run(hostile, ROUNDS, SECONDS_MAX)
    assert ended.returncode == 0, ended.stdout + ended.stderr[:4000]
    counts = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", ended.stdout)}
    assert len(counts) == 6, ended.stdout
    assert all(counts.values()), "some of it was never tried"


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_that_is_left_out_is_noticed(hostile: Path, name: str) -> None:
    ended = run(hostile, ROUNDS, SECONDS_MAX, 1 + list(CHECKS).index(name))
    assert ended.returncode != 0
    assert "ERROR: AddressSanitizer" in ended.stderr, ended.stdout + ended.stderr[:4000]
