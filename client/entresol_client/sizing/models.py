"""Shapes of well-known models, each with where its numbers were read.

Invariant: nothing here is guessed. Copies of Hugging Face `config.json` files were read from the
repositories named, at the commit named; where only a builder of a library could be read, that is
the source. What is not here is sized from its own `config.json` (`--model-config`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from entresol_client.sizing.shapes import KvShape, SizingError, latent, plain, windowed

_AIC = "config.json of {}, as in ai-dynamo/aiconfigurator at 095f58a"
_TUNE = "pytorch/torchtune, torchtune/models/{}/_model_builders.py at {}"
_GEMMA_2 = "google/gemma_pytorch, gemma/config.py at 03e6575"
_GEMMA_3 = "google/gemma_pytorch, gemma/config.py at 014acb7"
_LLAMA_4 = "; which layers are whole: huggingface/transformers, configuration_llama4.py at 008e574"


def _aic(model: str) -> str:
    return _AIC.format(model)


def _tune(room: str, commit: str) -> str:
    return _TUNE.format(room, commit)


_QWEN_2_5 = _tune("qwen2_5", "47a9e19")

_SHAPES = (
    plain("llama-3.1-8b", 32, 8, 128, 131_072, _aic("meta-llama/Meta-Llama-3.1-8B")),
    plain("llama-3.1-70b", 80, 8, 128, 131_072, _aic("meta-llama/Meta-Llama-3.1-70B")),
    plain("llama-3.1-405b", 126, 8, 128, 131_072, _aic("meta-llama/Meta-Llama-3.1-405B")),
    plain(
        "llama-3.3-70b", 80, 8, 128, 131_072,
        _AIC.format("meta-llama/Llama-3.3-70B-Instruct").replace("095f58a", "f577ab8"),
    ),
    windowed(
        "llama-4-scout", 48, 12, 8, 128, 8_192, 10_485_760,
        _aic("meta-llama/Llama-4-Scout-17B-16E-Instruct") + _LLAMA_4,
    ),
    windowed(
        "llama-4-maverick", 48, 12, 8, 128, 8_192, 1_048_576,
        _aic("meta-llama/Llama-4-Maverick-17B-128E-Instruct") + _LLAMA_4,
    ),
    plain("qwen2.5-7b", 28, 4, 128, 131_072, _QWEN_2_5),
    plain("qwen2.5-14b", 48, 8, 128, 131_072, _QWEN_2_5),
    plain("qwen2.5-32b", 64, 8, 128, 131_072, _QWEN_2_5),
    plain("qwen2.5-72b", 80, 8, 128, 131_072, _QWEN_2_5),
    plain("qwen3-0.6b", 28, 8, 128, 40_960, _aic("Qwen/Qwen3-0.6B")),
    plain("qwen3-1.7b", 28, 8, 128, 40_960, _aic("Qwen/Qwen3-1.7B")),
    plain("qwen3-8b", 36, 8, 128, 40_960, _aic("Qwen/Qwen3-8B")),
    plain("qwen3-32b", 64, 8, 128, 40_960, _aic("Qwen/Qwen3-32B")),
    plain("qwen3-30b-a3b", 48, 4, 128, 40_960, _aic("Qwen/Qwen3-30B-A3B")),
    plain("qwen3-235b-a22b", 94, 4, 128, 40_960, _aic("Qwen/Qwen3-235B-A22B")),
    plain(
        "qwen3-coder-480b-a35b", 62, 8, 128, 262_144, _aic("Qwen/Qwen3-Coder-480B-A35B-Instruct")
    ),
    latent("deepseek-v3", 61, 512 + 64, 163_840, _aic("deepseek-ai/DeepSeek-V3")),
    latent("deepseek-r1", 61, 512 + 64, 163_840, _aic("deepseek-ai/DeepSeek-R1")),
    latent("kimi-k2", 61, 512 + 64, 131_072, _aic("moonshotai/Kimi-K2-Instruct")),
    plain("mistral-7b", 32, 8, 128, 32_768, _tune("mistral", "0432b3a")),
    plain(
        "mistral-nemo-12b", 40, 8, 128, 128_000,
        "config.json of mistralai/Mistral-Nemo-Base-2407, as in kevinstephano/thunder_model_blocks",
    ),
    plain("mixtral-8x7b", 32, 8, 128, 32_768, _aic("mistralai/Mixtral-8x7B-v0.1")),
    plain("mixtral-8x22b", 56, 8, 128, 65_536, _aic("mistralai/Mixtral-8x22B-v0.1")),
    windowed("gemma-2-9b", 42, 21, 8, 256, 4_096, 8_192, _GEMMA_2),
    windowed("gemma-2-27b", 46, 23, 16, 128, 4_096, 8_192, _GEMMA_2),
    windowed("gemma-3-4b", 34, 5, 4, 256, 1_024, 0, _GEMMA_3),
    windowed("gemma-3-12b", 48, 8, 8, 256, 1_024, 131_072, _GEMMA_3),
    windowed("gemma-3-27b", 62, 10, 16, 128, 1_024, 131_072, _GEMMA_3),
    plain("phi-4", 40, 10, 128, 16_384, _tune("phi4", "235c0fe")),
    windowed("gpt-oss-20b", 24, 12, 8, 64, 128, 131_072, _aic("openai/gpt-oss-20b")),
    windowed("gpt-oss-120b", 36, 18, 8, 64, 128, 131_072, _aic("openai/gpt-oss-120b")),
    plain("minimax-m2.5", 62, 8, 128, 196_608, _aic("MiniMaxAI/MiniMax-M2.5")),
)  # fmt: skip

_BY_NAME = {shape.name: shape for shape in _SHAPES}


def known() -> Iterator[KvShape]:
    """All of them, family by family."""
    return iter(_SHAPES)


def named(name: str) -> KvShape:
    """The model of that name; upper case, a publisher in front and `-instruct` behind do not
    matter. Raises: SizingError naming the nearest ones."""
    wanted = name.strip().lower().rpartition("/")[2].removeprefix("meta-")
    for tail in ("", "-instruct", "-it", "-base", "-chat"):
        found = _BY_NAME.get(wanted.removesuffix(tail) if tail else wanted)
        if found is not None:
            return found
    near = difflib.get_close_matches(wanted, _BY_NAME, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise SizingError(
        f"no model is called {name!r}",
        hint=f"{hint}--models lists all; any other: --model-config FILE, its config.json",
    )
