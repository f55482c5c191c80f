"""Real vLLM through a real LMCache server whose second level is Entresol.

Each server is a new one, so what it hits came from Entresol; each engine has an empty cache.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.lmcache.server import CHUNK_TOKENS, Server
from tests.engines.tier_daemon import TierDaemon
from tests.engines.vllm.engine import Engine, prompt

TOKENS = 1000
CHUNKS = TOKENS // CHUNK_TOKENS
LOGPROB_ABS = 1e-3  # a whole and a partial prefill were seen to differ by 4e-6
SITE = Path(__file__).parent / "site"
pytestmark = [pytest.mark.full_only, pytest.mark.timeout(2400)]


@pytest.fixture
def answer(tmp_path: Path, tiny_llama: Path) -> Callable[..., dict[str, Any]]:
    """`answer(name, server)`: what a fresh vLLM answers to one prompt; None: without LMCache."""

    def ask(name: str, server: Server | None) -> dict[str, Any]:
        more = {} if server is None else {"kv_transfer_config": server.kv_transfer_config()}
        path = os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])
        engine = Engine(name, tmp_path, tiny_llama, None, env={"PYTHONPATH": path}, **more)
        try:
            engine.wait_up()
            return engine.run(prompt(5, TOKENS))
        finally:
            # Its connector takes leave of the server at its own pace; that is not tested here.
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.stop()

    return ask


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal tokens, and log-probabilities as equal as two lengths of prefill compute them."""
    close = pytest.approx(other["logprobs"], abs=LOGPROB_ABS)
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == close)


def test_a_new_server_and_a_new_engine_hit_what_others_stored(
    tier: TierDaemon,
    tmp_path: Path,
    answer: Callable[..., dict[str, Any]],
    figure: Callable[[str, float, str], None],
) -> None:
    alone = answer("alone", None)
    with Server("first", tmp_path, tier.client_toml()) as first:
        cold = answer("cold", first.wait_up())
        first.wait_count("stored_blocks", CHUNKS)
    assert same(cold, alone)
    tier.restart()
    with Server("second", tmp_path, tier.client_toml()) as second:
        warm = answer("warm", second.wait_up())
        status = second.status()
    figure("vLLM through LMCache, prompt tokens hit", warm["cached_tokens"], "tokens")
    assert status["load_blocks"] == CHUNKS
    assert warm["cached_tokens"] >= CHUNKS * CHUNK_TOKENS
    assert same(warm, alone)

    tier.damage(lambda blocks: blocks[3:4])
    with Server("third", tmp_path, tier.client_toml()) as third:
        damaged = answer("damaged", third.wait_up())
        assert third.status()["load_corrupt_blocks"] == 1
    assert damaged["cached_tokens"] < CHUNKS * CHUNK_TOKENS
    assert same(damaged, alone)

    with Server("stranger", tmp_path, tier.client_toml("other")) as stranger:
        other = answer("other", stranger.wait_up())
        assert stranger.status()["lookup_hit_blocks"] == 0
    assert other["cached_tokens"] == 0
    assert same(other, alone)
