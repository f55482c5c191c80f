"""The published sizes of KV caches, and the arithmetic from a model to drives, wear and money."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_client.cli.main import main
from entresol_client.sizing import hf_config, models, shapes, tier, worth
from entresol_client.sizing.shapes import SizingError

ROOT = Path(__file__).resolve().parents[2]
GB, GIB, TB, PB = 10**9, 2**30, 10**12, 10**15

CONTEXT = tier.Context(
    shape=models.named("llama-3.1-405b"), element_bytes=2, tokens=127_188, ranks=1,
    every_rank=False, windows_only=False, block_tokens=16, user_bytes=0, block_bytes=0,
)  # fmt: skip
USE = tier.Use(
    users=1, retention=1, ratio=1, turns_per_hour=0, active_share=1, hit_rate=0.5,
    answer_tokens=0, peak=1,
)  # fmt: skip
HARDWARE = tier.Hardware(
    drive_bytes=15_360 * GB, drive_writes_per_day=1, drive_warranty_years=5, drives_per_shard=8,
    shards=0, link_gbit_per_s=400, link_share=0.9, headroom=0.1,
)  # fmt: skip


# The published cases ------------------------------------------------------------------------------


def test_405b_leaves_516096_bytes_per_token() -> None:
    shape = models.named("llama-3.1-405b")
    assert shape.token_bytes(2) == 516_096 == 504 * 1024
    # A block of 16 tokens is about 8 MB, and about 1 MB on each of 8 GPUs.
    assert 16 * shape.token_bytes(2) == 8_257_536
    assert 16 * shape.rank_token_bytes(2, 8) == 1_032_192


def test_405b_at_127188_tokens_is_61_gib_not_gb() -> None:
    """The vendor writes 61 GB; only binary gigabytes make that true."""
    length = CONTEXT.whole_bytes
    assert length == 516_096 * 127_188 == 65_641_218_048
    assert round(length / GIB) == 61
    assert round(length / GB) == 66


def test_70b_at_128k_is_42_decimal_gb() -> None:
    """About 42 GB: decimal, with K for a thousand. With 131,072 tokens it is 43 GB or 40 GiB."""
    token = models.named("llama-3.1-70b").token_bytes(2)
    assert round(128_000 * token / GB) == 42
    assert 131_072 * token == 40 * GIB


def test_qwen_72b_is_327_kb_per_token() -> None:
    assert models.named("qwen2.5-72b").token_bytes(2) == 327_680


@pytest.mark.parametrize(
    ("users", "per_user", "retention", "total"),
    [(100_000, 30 * GB, 15, 45 * PB), (10_000, 32 * GB, 1, 320 * TB)],
)
def test_users_times_kv_times_retention(
    users: int, per_user: int, retention: int, total: int
) -> None:
    context = replace(CONTEXT, shape=None, user_bytes=per_user, block_bytes=2**20)
    held = tier.footprint(context, replace(USE, users=users, retention=retention), HARDWARE)
    assert held.plain_bytes == held.stored_bytes == total


def test_the_vendors_range_of_tokens_per_dollar() -> None:
    """40 to 60 % of hits are said to give 60 to 130 % more: 61 and 133 by the inferred formula."""
    for hit_rate, told in ((0.4, 0.6), (0.6, 1.3)):
        got = worth.more_tokens_per_dollar(
            hit_rate, worth.VENDOR_PREFILL_SHARE, worth.VENDOR_FETCH_COST
        )
        assert got == pytest.approx(told, abs=0.04)


# Shapes -------------------------------------------------------------------------------------------


def test_a_latent_is_one_per_layer_and_whole_on_every_rank() -> None:
    shape = models.named("deepseek-ai/DeepSeek-V3")
    assert shape.token_bytes(2) == 61 * (512 + 64) * 2 == 70_272
    assert shape.rank_token_bytes(2, 8) == 70_272
    assert shape.stored_token_bytes(2, 8, every_rank=False) == 70_272
    assert shape.stored_token_bytes(2, 8, every_rank=True) == 8 * 70_272


def test_ranks_beyond_the_heads_store_copies() -> None:
    shape = models.named("qwen3-30b-a3b")  # 4 KV heads
    assert shape.stored_token_bytes(2, 4, every_rank=False) == shape.token_bytes(2)
    assert shape.stored_token_bytes(2, 8, every_rank=False) == 2 * shape.token_bytes(2)
    with pytest.raises(SizingError, match="cannot be shared out"):
        shape.rank_token_bytes(2, 3)
    with pytest.raises(SizingError, match="0 tensor-parallel"):
        shape.rank_token_bytes(2, 0)


def test_a_window_bounds_what_going_on_needs_but_not_what_is_stored() -> None:
    shape = models.named("gemma-3-27b")
    token = shape.token_bytes(2)
    assert token == 62 * 2 * 16 * 128 * 2
    assert shape.needed_bytes(1_000, 2) == 1_000 * token, "inside the window all is needed"
    per_layer = 2 * 16 * 128 * 2
    assert shape.needed_bytes(100_000, 2) == per_layer * (10 * 100_000 + 52 * 1_024)
    stored, needed = (
        replace(CONTEXT, shape=shape, tokens=100_000, windows_only=only) for only in (False, True)
    )
    assert stored.kept_bytes == 100_000 * token
    assert needed.kept_bytes == shape.needed_bytes(100_000, 2)


def test_every_model_has_a_source_and_a_row_in_the_page() -> None:
    page = (ROOT / "client" / "SIZING.md").read_text(encoding="utf-8")
    rows = {
        tuple(cell.strip() for cell in line.strip("|").split("|"))[:2]: line
        for line in page.splitlines()
        if line.startswith("| `")
    }
    for shape in models.known():
        assert shape.source
        line = rows.pop((f"`{shape.name}`", f"{shape.token_bytes(2):,}"), "")
        assert shape.source in line, shape.name
        assert shape.name == shape.name.lower()
        assert models.named(shape.name.upper() + "-Instruct") is shape
    assert not [row for row in rows if row[1].replace(",", "").isdigit()], "rows of nothing"


def test_a_name_that_is_not_known_names_the_nearest() -> None:
    with pytest.raises(SizingError) as caught:
        models.named("llama3.1-8b")
    assert "llama-3.1-8b" in caught.value.hint


# config.json --------------------------------------------------------------------------------------

DENSE = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "max_position_embeddings": 131_072,
}  # fmt: skip


def groups(**changes: object) -> list[tuple[int, int, int, int]]:
    shape = hf_config.shape_of(DENSE | changes, "m")
    return [(g.layers, g.heads, g.head_values, g.window_tokens) for g in shape.groups]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(32, 8, 256, 0)]),
        ({"num_key_value_heads": None}, [(32, 32, 256, 0)]),
        ({"head_dim": 64}, [(32, 8, 128, 0)]),
        ({"sliding_window": None}, [(32, 8, 256, 0)]),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, [(32, 0, 576, 0)]),
        ({"layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 128},
         [(16, 8, 256, 0), (16, 8, 256, 128)]),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 28},
         [(1, 8, 256, 0)]),
        ({"full_attention_interval": 4}, [(8, 8, 256, 0)]),
        ({"model_type": "gemma2", "sliding_window": 4096}, [(16, 8, 256, 0), (16, 8, 256, 4096)]),
        ({"model_type": "gemma3_text", "sliding_window": 1024},
         [(5, 8, 256, 0), (27, 8, 256, 1024)]),
        ({"model_type": "cohere2", "sliding_window": 4096, "sliding_window_pattern": 8},
         [(4, 8, 256, 0), (28, 8, 256, 4096)]),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192},
         [(8, 8, 256, 0), (24, 8, 256, 8192)]),
        ({"model_type": "mistral", "sliding_window": 4096}, [(32, 8, 256, 4096)]),
        ({"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28},
         [(32, 8, 256, 0)]),
        ({"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28,
          "use_sliding_window": True}, [(28, 8, 256, 0), (4, 8, 256, 4096)]),
    ],
)  # fmt: skip
def test_a_config_is_read(changes: dict[str, object], expected: list[tuple[int, ...]]) -> None:
    assert groups(**changes) == expected


def test_the_text_part_of_a_config_is_read() -> None:
    shape = hf_config.shape_of({"model_type": "x", "text_config": DENSE}, "folder")
    assert (shape.name, shape.token_bytes(2)) == ("folder", 131_072)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": -8}, "num_key_value_heads"),
        ({"hidden_size": 4097}, "no multiple"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 32 layers"),
        ({"layer_types": ["telepathy"] * 32}, "telepathy"),
        ({"layer_types": ["linear_attention"] * 32}, "keeps nothing"),
        ({"layer_types": ["sliding_attention"] * 32}, "attention_chunk_size"),
        ({"model_type": "new", "sliding_window": 4096}, "which layers have a window"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is not known"),
        ({"linear_attn_config": {"a": 1}}, "linear_attn_config is not known"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(changes: dict[str, object], match: str) -> None:
    with pytest.raises(SizingError, match=match) as caught:
        hf_config.shape_of(DENSE | changes, "m")
    assert caught.value.hint


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"{}"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(SizingError):
        hf_config.read(path)
    with pytest.raises(SizingError, match="cannot be read"):
        hf_config.read(tmp_path / "absent")


# The tier -----------------------------------------------------------------------------------------


def test_drives_shards_and_the_index_follow_from_bytes() -> None:
    held = tier.footprint(CONTEXT, replace(USE, users=1_000, ratio=1.5), HARDWARE)
    assert held.plain_bytes == 1_000 * 65_641_218_048
    assert held.stored_bytes == math.ceil(held.plain_bytes / 1.5)
    assert held.drives == math.ceil(held.raw_bytes / HARDWARE.drive_bytes) == 4
    assert held.shards == 1
    assert held.blocks == -(-held.plain_bytes // (16 * 516_096))
    assert held.index_bytes == 79 * held.blocks
    many = tier.footprint(CONTEXT, USE, replace(HARDWARE, shards=3))
    assert (many.shards, many.drives) == (3, 3), "no shard without a drive"


def test_blocks_are_a_ranks() -> None:
    ranks = tier.footprint(replace(CONTEXT, ranks=8), USE, HARDWARE)
    one = tier.footprint(CONTEXT, USE, HARDWARE)
    assert ranks.plain_bytes == one.plain_bytes
    assert ranks.block_bytes * 8 == one.block_bytes
    assert ranks.blocks == pytest.approx(8 * one.blocks, abs=8)


def test_traffic_and_wear() -> None:
    use = replace(USE, users=3_600, turns_per_hour=1, ratio=2.0, hit_rate=0.75)
    held = tier.footprint(CONTEXT, use, HARDWARE)
    moved = tier.flow(CONTEXT, use, HARDWARE, held)
    assert moved is not None
    assert moved.turns_per_s == 1
    assert moved.read_bytes_per_s == pytest.approx(0.75 * CONTEXT.whole_bytes / 2)
    assert moved.write_bytes_per_s == pytest.approx(0.25 * CONTEXT.whole_bytes / 2)
    assert moved.tokens_from_tier_per_s == pytest.approx(0.75 * 127_188)
    per_day = moved.write_bytes_per_s * 1.15 * 86_400
    assert moved.flash_bytes_per_day == pytest.approx(per_day)
    drive_writes = per_day / held.drives / HARDWARE.drive_bytes
    assert moved.drive_years == pytest.approx(5 / drive_writes)
    assert moved.stays_days == pytest.approx(held.stored_bytes / moved.write_bytes_per_s / 86_400)
    assert moved.links == 1
    busy = tier.flow(CONTEXT, replace(use, peak=10), HARDWARE, held)
    assert busy is not None
    assert busy.links == math.ceil(10 * moved.read_bytes_per_s / 45e9)
    assert tier.flow(CONTEXT, USE, HARDWARE, held) is None, "no turns, no traffic"


def test_nothing_written_wears_nothing() -> None:
    use = replace(USE, turns_per_hour=1, hit_rate=1.0)
    moved = tier.flow(CONTEXT, use, HARDWARE, tier.footprint(CONTEXT, use, HARDWARE))
    assert moved is not None
    assert math.isinf(moved.drive_years)
    assert math.isinf(moved.stays_days)


# Worth --------------------------------------------------------------------------------------------


def test_a_tier_that_costs_more_than_it_saves_is_said_to() -> None:
    assert worth.more_tokens_per_dollar(0.5, 0.5, 0.0) == pytest.approx(1 / 3)
    assert worth.more_tokens_per_dollar(0.5, 0.5, 0.0, 0.25) == pytest.approx(0)
    assert worth.more_tokens_per_dollar(0.5, 0.5, 0.0, 0.5) < 0
    assert worth.more_tokens_per_dollar(0.0, 1.0, 0.0) == 0
    with pytest.raises(SizingError):
        worth.more_tokens_per_dollar(1.0, 1.0, 0.0)
    with pytest.raises(SizingError):
        worth.more_tokens_per_dollar(1.1, 1.0, 0.0)


def test_costs_per_million_tokens() -> None:
    prices = worth.Prices(drive=1_200, shard=600, gpu_hour=3.6, prefill_tokens_per_s=1_000, years=5)
    got = worth.worth(prices, drives=2, shards=1, drive_years=math.inf, tokens_from_tier_per_s=1e6)
    assert got.tier_per_month == pytest.approx(50)
    assert got.tier_per_million_tokens == pytest.approx(50 / worth.SECONDS_PER_MONTH)
    assert got.compute_per_million_tokens == pytest.approx(1.0)
    worn = worth.worth(prices, drives=2, shards=1, drive_years=1, tokens_from_tier_per_s=1e6)
    assert worn.tier_per_month == pytest.approx(210), "drives worn out in a year are paid in one"
    nothing = worth.worth(worth.Prices(0, 0, 0, 0, 5), 2, 1, 5, 0)
    assert nothing == worth.Worth(None, None, None)


# The command --------------------------------------------------------------------------------------

EXAMPLE = ("size", "--model", "llama-3.1-405b", "--context", "128000", "--users", "100000",
           "--retention", "15")  # fmt: skip


def test_the_command_tells_people_and_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXAMPLE, "--dtype", "fp16"]) == 0
    out = capsys.readouterr().out
    assert "516,096 bytes (504.0 KiB)" in out
    assert "100,000 users x 15 = 99.1 PB" in out
    assert "--prefill-share" in out, "assumptions are told with their option"
    assert main([*EXAMPLE, "--ratio", "1", "--turns-per-hour", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["footprint"]["stored_bytes"] == 100_000 * 15 * 128_000 * 516_096
    assert found["flow"]["turns_per_s"] == pytest.approx(100_000 / 3_600)
    assert found["assumed"]["headroom"] == 0.1
    assert "ratio" not in found["assumed"]


def test_what_was_not_measured_is_not_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    for model, dtype, ratio in (("phi-4", "bf16", 1.44), ("phi-4", "int8", 1.0),
                                ("deepseek-v3", "bf16", 1.0)):  # fmt: skip
        assert main(["size", "--model", model, "--dtype", dtype, "--context", "9", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["use"]["ratio"] == ratio
    assert main(["size", "--model", "deepseek-v3", "--context", "9"]) == 0
    assert "no codec was measured on latents" in capsys.readouterr().out


def test_prices_change_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["size", "--model", "llama-3.1-8b", "--context", "8000", "--users", "1000",
             "--turns-per-hour", "10", "--gpu-hour", "3", "--prefill-rate", "10000"]  # fmt: skip
    gains = []
    for price in ("1", "100000000"):
        assert main([*words, "--drive-price", price, "--json"]) == 0
        gains.append(json.loads(capsys.readouterr().out)["more_tokens_per_dollar"]["yours"])
    assert gains[0] > 0 > gains[1]


def test_the_own_config_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DENSE | {"num_nextn_predict_layers": 1}))
    assert main(["size", "--model-config", str(path), "--context", "200000"]) == 0
    out = capsys.readouterr().out
    assert "131,072 bytes" in out
    assert "made for 131,072 tokens at most" in re.sub(r"\s+", " ", out)
    assert "predicting several tokens" in re.sub(r"\s+", " ", out)
    assert main(["size", "--config", str(path), "--context", "200000"]) == 0, "its old name"
    assert capsys.readouterr().out == out
    shape = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--context", "1"]
    assert main(["size", *shape]) == 0
    assert "131,072 bytes" in capsys.readouterr().out


def test_all_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert [row["name"] for row in found] == [shape.name for shape in models.known()]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "nothing says what is to be sized"),
        (["--model", "phi-4"], "--context"),
        (["--model", "phi-4", "--per-user", "1GB"], "--model and --per-user"),
        (["--model", "phi-5", "--context", "1"], "did you mean phi-4"),
        (["--model", "phi-4", "--context", "128K"], "128000 or 131072"),
        (["--model", "phi-4", "--context", "0"], "tokens"),
        (["--model", "phi-4", "--context", "1", "--dtype", "bf17"], "bf16, fp16"),
        (["--model", "phi-4", "--context", "1", "--tp", "3"], "--tp"),
        (["--model", "phi-4", "--context", "1", "--hit-rate", "60"], "0.6 or 60%"),
        (["--model", "phi-4", "--context", "1", "--drive", "big"], "15.36TB"),
        (["--model", "phi-4", "--context", "1", "--users", "0"], "--users from 1"),
        (["--model", "phi-4", "--context", "1", "--headroom", "1"], "--headroom 10%"),
        (["--layers", "3", "--context", "1"], "--kv-heads and --head-dim"),
        (["--layers", "3", "--latent", "8", "--window", "8", "--context", "1"], "--window-layers"),
        (["--per-user", "1GB", "--answer-tokens", "5"], "needs a model"),
        (["--model-config", "/nowhere/config.json"], "cannot be read"),
        (["--config", "/dev/null"], "the client's file is not needed"),
    ],
)
def test_a_mistake_names_its_fix(
    words: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *words]) == 2
    said = capsys.readouterr()
    assert match in said.err
    assert not said.out


def test_a_shape_of_one_kind_is_one_group() -> None:
    assert len(shapes.windowed("m", 4, 4, 1, 8, 128).groups) == 1
    assert shapes.windowed("m", 4, 0, 1, 8, 128).groups == (shapes.LayerGroup(4, 1, 16, 128),)
