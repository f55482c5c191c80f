"""`python -m bench.codec` on files of others: what is accepted, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bench import codec, codec_budget, kv
from entresol_proto.seal import codecs
from entresol_proto.seal.dtypes import DType

SHAPE = (2, 2, 70, 2, 64)  # 64 tokens and 6
QUICK = ("--repeats", "1", "--blocks-max", "2", "--dtypes", "bf16,fp16,fp8_e4m3", "--json")


@pytest.fixture(autouse=True)
def no_bypasses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_budget, "bypasses", lambda *_: [])


def bf16(*shape: int) -> npt.NDArray[np.uint16]:
    noise = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return np.asarray(noise.view(np.uint32) >> 16).astype(np.uint16)


def saved(folder: Path, array: npt.NDArray[np.generic], name: str = "one.npy") -> Path:
    np.save(folder / name, array)
    return folder / name


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict:  # type: ignore[type-arg]
    assert codec.main([*words, *QUICK]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


# What is accepted ------------------------------------------------------------------------------


def test_all_ways_to_store_bit_patterns_hold_the_same(tmp_path: Path) -> None:
    bits = bf16(*SHAPE)
    stored = (
        bits, bits.view(np.int16), bits.view("V2"), bits.astype(">u2"), np.asfortranarray(bits),
    )  # fmt: skip
    for array in stored:
        blocks = kv.Blocks(saved(tmp_path, array), 64)
        assert len(blocks) == 2
        for number, tokens in enumerate((slice(0, 64), slice(64, 70))):
            assert np.array_equal(blocks[number], bits[:, :, tokens].reshape(-1))
            assert blocks[number].dtype == np.uint16
        with pytest.raises(IndexError):
            blocks[2]


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        (SHAPE, [32768, 3072]), ((2, 2, 5, 2, 64), [2560]), ((2, 1, 64, 2, 64), [16384]),
        ((3, 1001), [3003]), ((2, 100, 2, 64), [8192, 8192, 8192, 1024]), ((1,), [1]), ((), [1]),
    ],
)  # fmt: skip
def test_every_element_of_any_shape_is_in_a_block(
    tmp_path: Path, shape: tuple[int, ...], elements: list[int]
) -> None:
    bits = bf16(*shape)
    found = kv.all_blocks([saved(tmp_path, bits)], 64)
    assert [one.size for one in kv.read(found)] == elements
    assert sum(elements) == bits.size


@pytest.mark.parametrize("shape", [SHAPE, (2, 2, 5, 2, 64), (3, 1001), (2, 1, 64, 2, 64), (1,)])
def test_tails_and_small_files_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: tuple[int, ...]
) -> None:
    found = report(capsys, str(saved(tmp_path, bf16(*shape))))
    size = 2 * int(np.prod(shape))
    assert {row["plain_bytes"] for row in found["codecs"] if row["dtype"] == "bf16"} == {size}
    assert [row["codec"] for row in found["sealing"]] == codecs.names()
    assert len(found["bounds_bf16"]) == (2 if len(shape) == 5 and shape[1] == 2 else 0)


@pytest.mark.parametrize("fill", ["nan", "any"])
def test_bits_that_no_kv_has_are_measured_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fill: str
) -> None:
    shape = (2, 2, 64, 2, 64)
    noise = np.random.default_rng(2).integers(0, 65536, shape, dtype=np.uint16)
    bits = np.full(shape, 0x7FC0, np.uint16) if fill == "nan" else noise
    found = report(capsys, str(saved(tmp_path, bits)))
    assert all(row["ratio"] > 0.99 for row in found["codecs"])
    assert found["choice_bf16_4_threads"]


def test_full_precision_keeps_what_bf16_knows(tmp_path: Path) -> None:
    bits = bf16(4096)
    made = codec.full_precision(bits, DType.FP32).view(np.uint32)
    assert np.array_equal(made >> 16, bits)
    assert len(np.unique(made & 0xFFFF)) > 3000
    half = codec.full_precision(bits, DType.FP16).view(np.float16).astype(np.float32)
    plain = (bits.astype(np.uint32) << 16).view(np.float32)
    assert np.allclose(half, plain, rtol=2**-7, atol=2**-23)
    assert not np.array_equal(half, plain)


# What is not -----------------------------------------------------------------------------------


def written(folder: Path, content: bytes) -> Path:
    path = folder / "one.npy"
    path.write_bytes(content)
    return path


def broken(folder: Path, what: str) -> Path:
    whole = saved(folder, bf16(*SHAPE), "whole.npy").read_bytes()
    noise = np.random.default_rng(3)
    if what in ("float16", "float32", "uint8", "uint32", "complex64", "bool"):
        return saved(folder, np.ones(SHAPE, what))
    if what == "objects":
        np.save(folder / "one.npy", np.array([{}, 1], object), allow_pickle=True)
    elif what == "structured":
        saved(folder, np.zeros(4, [("a", "u2")]))
    elif what == "no elements":
        saved(folder, bf16(2, 2, 0, 2, 64))
    elif what == "an archive":
        np.savez(folder / "one.npz", a=bf16(4))
        return folder / "one.npz"
    elif what == "truncated":
        written(folder, whole[: len(whole) // 2])
    elif what == "half a header":
        written(folder, whole[:40])
    elif what == "a wrong header":
        written(folder, whole[:10] + b'{"descr": ((((('.ljust(118) + whole[128:])
    elif what == "noise":
        written(folder, noise.bytes(500))
    elif what == "empty":
        written(folder, b"")
    elif what == "a folder":
        return folder
    return folder / "one.npy"


@pytest.mark.parametrize(
    "what",
    [
        "float16", "float32", "uint8", "uint32", "complex64", "bool", "objects", "structured",
        "no elements", "an archive", "truncated", "half a header", "a wrong header", "noise",
        "empty", "a folder", "nothing",
    ],
)  # fmt: skip
def test_what_is_no_kv_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    good, bad = saved(tmp_path, bf16(*SHAPE), "good.npy"), broken(tmp_path, what)
    assert codec.main([str(good), str(bad), *QUICK]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"bench.codec: {bad}: ")
    assert error.count("\n") == 1
    assert kv.ACCEPTED in error
    assert ("PyTorch" in error) == what.startswith("float")


@pytest.mark.parametrize(
    "words",
    [
        ("--dtypes", "bf17"), ("--block-tokens", "0"), ("--chunk-kib", "3"),
        ("--chunk-kib", "1025"), ("--repeats", "0"), ("--blocks-max", "none"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        codec.main([str(saved(tmp_path, bf16(*SHAPE))), *words])
    assert words[0] in capsys.readouterr().err


# Budgets ---------------------------------------------------------------------------------------


def test_rounds_take_all_blocks_and_the_worse_folder_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, sign in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        saved(tmp_path / name, np.full((1, 2, 3 * 64, 1, 8), sign, np.uint16))
    seen: list[int] = []

    def of_folder(bits: list[kv.Bits], repeats: int) -> dict[str, float]:
        seen.append(len(bits))
        return {"codec_x": float(bits[0][0])}

    monkeypatch.setattr(codec_budget, "_of_folder", of_folder)
    monkeypatch.setattr(codec_budget, "bypass_cost", lambda found: 0.5)
    found = codec_budget.canonical(tmp_path, rounds=2, repeats=1)
    assert found == {"codec_x": [1.0, 1.0], "codec_bypass_cost": [0.5, 0.5]}
    assert seen == [2, 2, 1, 1]
    with pytest.raises(kv.KvError, match=r"no \.npy files"):
        codec_budget.canonical(tmp_path / "none", rounds=2, repeats=1)


def test_bytes_of_kv_begin_again_where_there_are_too_few(tmp_path: Path) -> None:
    bits = bf16(1, 2, 64, 1, 8)
    saved(tmp_path, bits)
    once = bits.tobytes()
    assert kv.bytes_of(tmp_path, 2 * len(once) + 5) == 2 * once + once[:5]
    assert kv.bytes_of(tmp_path, 7) == once[:7]


def test_the_cost_of_a_bypass_is_the_worst() -> None:
    rows = [
        codec_budget.BypassCost("fast", "bf16", 1.001, 1.05, 1.004),
        codec_budget.BypassCost("dense", "bf16", 1.015, 1.05, 1.002),
    ]
    assert codec_budget.bypass_cost(rows) == pytest.approx(1.5)
    assert ("zstd", DType.OPAQUE) in codec_budget.automatic()
