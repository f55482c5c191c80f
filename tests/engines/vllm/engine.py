"""Starts vLLM as processes of their own and talks to them: `serve.py` is the other side.

Invariant: an engine that does not answer within its time is an error, never a hang, and none
outlives its `Engine`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.tier_daemon import PYTHON_ENV, ROOT, TierDaemon

UP_SECONDS_MAX = 600.0
ANSWER_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 30.0
LOG_SHOWN_BYTES = 6000
BLOCK_TOKENS = 32
CONTEXT_TOKENS = 8704
POOL_BYTES = 256 * 1024 * 1024
WORD_MIN, WORD_MAX = 3, 500  # token ids that the tiny model has


def prompt(seed: int, length: int) -> list[int]:
    """Token ids, other ones for another seed."""
    rng = random.Random(seed)
    return [rng.randint(WORD_MIN, WORD_MAX) for _ in range(length)]


def events(daemon: TierDaemon, tenant: str = "dev") -> list[dict[str, Any]]:
    """Every event the daemon still has of a tenant, with token ids, as the CLI prints them."""
    done = subprocess.run(
        [os.environ[PYTHON_ENV], "-m", "entresol_client.cli.main", "events", "--since", "0",
         "--tokens", "--json", "--config", str(daemon.client_toml(tenant))],
        capture_output=True, text=True, check=True, timeout=60.0,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/client:{ROOT}/proto"},
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [row for row in rows if row.get("type") == "event"]


class EngineRefusedError(Exception):
    """vLLM did not start; with what it said."""


class Engine:
    """One vLLM with the tier. The constructor returns at once; `wait_up` waits for it."""

    def __init__(
        self,
        name: str,
        folder: Path,
        model: Path,
        tier: Mapping[str, Any] | None,
        *,
        connector: str = "OffloadingConnector",
        offload: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`tier` is the object in `secondary_tiers`; None: vLLM without offloading."""
        self.name = name
        self.log_path = folder / f"{name}.log"
        settings: dict[str, Any] = {
            "model": str(model), "max_model_len": CONTEXT_TOKENS, "block_size": BLOCK_TOKENS,
            "max_num_seqs": 4, "max_num_batched_tokens": 2048, "dtype": "float32", **options,
        }  # fmt: skip
        if tier is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "CpuTieringSpec",
                    "spec_module_path": "tests.engines.vllm.cpu_spec",
                    "cpu_bytes_to_use": POOL_BYTES,
                    "secondary_tiers": [dict(tier)],
                    **(offload or {}),
                },
            }
        reading, writing = os.pipe()
        settings["answers_fd"] = writing
        cpu = len(name) % (os.cpu_count() or 1)
        environment = {
            **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(cpu), "TOKENIZERS_PARALLELISM": "false",
            **(env or {}),
        }  # fmt: skip
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.vllm.serve", json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(writing,), cwd=ROOT,
                env=environment,
            )  # fmt: skip
        os.close(writing)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def _read(self, reading: int) -> None:
        with os.fdopen(reading) as answers:
            for line in answers:
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def log(self) -> str:
        """The end of what it wrote."""
        return self.log_path.read_text(errors="replace")[-LOG_SHOWN_BYTES:]

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            found = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(
                f"{self.name} did not answer in {seconds} s:\n{self.log()}"
            ) from None
        if found is None:
            raise AssertionError(f"{self.name} has ended:\n{self.log()}")
        return found

    def wait_up(self) -> Engine:
        """Wait until it serves. Raises: EngineRefusedError when it does not start."""
        found = self._next(UP_SECONDS_MAX)
        if "refused" in found:
            raise EngineRefusedError(found["refused"])
        return self

    def ask(self, do: str, *, seconds: float = ANSWER_SECONDS_MAX, **more: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        self._process.stdin.flush()
        return self._next(seconds)

    def run(self, tokens: Sequence[int], **more: Any) -> dict[str, Any]:
        """One prompt: {"tokens", "logprobs", "cached_tokens", "seconds"}."""
        rows = self.ask("generate", prompts=[{"tokens": list(tokens), **more}])["rows"]
        return dict(rows[0])

    def settle(self) -> None:
        """Wait until its stores are over."""
        assert self.ask("idle")["idle"], "stores did not end"

    def forget(self) -> None:
        """Empty what vLLM itself caches: device and host pool."""
        assert self.ask("reset")["reset"]

    def counts(self) -> dict[str, int]:
        """The tier's counters."""
        return dict(self.ask("counts")["counts"])

    def wait_connected(self, tenants: int, seconds: float = 30.0) -> None:
        """Wait until the tier has a connection (again) for each of its tenants."""
        until = time.monotonic() + seconds
        while self.counts()["connected"] < tenants:
            assert time.monotonic() < until, f"no connection\n{self.log()}"
            time.sleep(0.05)

    def stop(self) -> int:
        """End it in order; its exit code."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b'{"do": "stop"}\n')
            self._process.stdin.close()
        try:
            return self._process.wait(STOP_SECONDS_MAX)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it now. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._reader.join(5.0)
