"""Writes a tiny Llama checkpoint and its tokenizer, from random numbers and without a network.

Runs in the vllm environment: `python -m tests.engines.tiny_model FOLDER`. Invariant: the same
files for the same arguments, so that two engines, or an engine and a stored block, mean one model;
another seed gives other weights under the same shape.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

VOCABULARY = 512
POSITIONS_MAX = 16_384
# Larger than usual: with small weights every prompt ends in the same tokens, and a wrong block of
# KV would go unnoticed. With this, one wrong block changes the output.
SPREAD = 0.12
SPECIAL = ("<s>", "</s>", "<pad>")
WORDS = "pack my box with five dozen liquor jugs while two judges vex a quiet zebra and hum "


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of VOCABULARY tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS * 40], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos, pad = SPECIAL
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos,
        "pad_token": pad, "model_max_length": POSITIONS_MAX,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_weights(folder: Path, seed: int, layers: int) -> int:
    """Random bfloat16 weights; the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=POSITIONS_MAX, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        tie_word_embeddings=False, dtype="bfloat16", initializer_range=SPREAD,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, safe_serialization=True)
    return sum(one.numel() for one in model.parameters())


def main() -> None:
    """Write it and say what it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(options.folder)
    parameters = write_weights(options.folder, options.seed, options.layers)
    print(f"{options.folder}: {parameters} parameters, seed {options.seed}")


if __name__ == "__main__":
    main()
