"""Starts and commands the engine processes of these tests (see serve.py)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.processes import free_ports
from tests.engines.tier_daemon import ROOT

START_SECONDS_MAX = 600.0
ANSWER_SECONDS_MAX = 300.0
BLOCK_TOKENS = 32
HERE = Path(__file__).resolve().parent


def build_fake_cuda(folder: Path) -> Path:
    """Compile fake_cuda.c into `folder`; the folder, for LD_LIBRARY_PATH."""
    target = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", str(target), str(HERE / "fake_cuda.c")], check=True)
    return folder


def tier_config(client_toml: Path, **settings: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`, as client/KVBM.md says."""
    return {
        "kv_connector": "EntresolDynamoConnector",
        "kv_connector_module_path": "entresol_client.engines.kvbm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"entresol": {"config": str(client_toml), **settings}},
    }


PLAIN_KVBM = {
    "kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
}


def kvbm_env(cuda: Path, kvbm_blocks: int) -> dict[str, str]:
    """What KVBM reads: its sizes, its ports, and where its CUDA is."""
    published, acknowledged = free_ports(2)
    return {
        "LD_LIBRARY_PATH": f"{cuda}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "LD_PRELOAD": str(cuda / "libcuda.so.1"),
        "PYTHONPATH": os.pathsep.join(str(ROOT / one) for one in ("client", "proto", ".")),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DYN_LOG": os.environ.get("DYN_LOG", "warn"),
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(kvbm_blocks),
        "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS": "120",
        "DYN_KVBM_LEADER_ZMQ_PUB_PORT": str(published),
        "DYN_KVBM_LEADER_ZMQ_ACK_PORT": str(acknowledged),
    }


class Engine:
    """One engine process. `ask` waits for the answer; `close` ends it."""

    def __init__(
        self,
        model: Path,
        cuda: Path,
        transfer: Mapping[str, Any] | None,
        *,
        kvbm_blocks: int = 256,
        **options: Any,
    ) -> None:
        read_fd, write_fd = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the engine)
        engine = {
            "model": str(model), "max_model_len": 2048, "block_size": BLOCK_TOKENS,
            "max_num_seqs": 4, "num_gpu_blocks_override": 256, "seed": 0,
            "answers_fd": write_fd, **options,
        }  # fmt: skip
        if transfer is not None:
            engine["kv_transfer_config"] = dict(transfer)
            engine["disable_hybrid_kv_cache_manager"] = True
        env = {
            **os.environ,
            **kvbm_env(cuda, kvbm_blocks),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.kvbm.serve", json.dumps(engine)],
            stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, env=env, cwd=ROOT,
            pass_fds=(write_fd,), text=False,
        )  # fmt: skip
        os.close(write_fd)
        self._answers = os.fdopen(read_fd, "rb", buffering=0)
        self._buffer = b""
        try:
            self.start_answer = self._read(START_SECONDS_MAX)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def log(self) -> str:
        """Everything it has said so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def ask(
        self, what: str, seconds_max: float = ANSWER_SECONDS_MAX, **more: Any
    ) -> dict[str, Any]:
        """Send a command, wait for its answer. Raises: AssertionError with the engine's log."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(seconds_max)

    def generate(self, *prompts: Sequence[int], **more: Any) -> list[dict[str, Any]]:
        """Tokens, log-probabilities and hits of each prompt, one after the other."""
        rows = [{"tokens": list(one), **more} for one in prompts]
        answer = self.ask("generate", prompts=rows)["rows"]
        assert self.ask("idle")["idle"], f"blocks are held for ever:\n{self.log()[-6000:]}"
        return list(answer)

    def counts(self) -> dict[str, dict[str, int]]:
        """The counters of both sides of the connector."""
        return dict(self.ask("counts")["counts"])

    def reset(self, *, kvbm: bool) -> None:
        """Forget the prefix cache; with `kvbm`, what KVBM holds too."""
        assert self.ask("reset", kvbm=kvbm)["reset"]

    def close(self) -> None:
        """End it: first by asking, then by its pid. Idempotent."""
        if self._answers.closed:
            return
        if self._process.poll() is None:
            with contextlib.suppress(Exception):
                self.ask("stop", seconds_max=40.0)
                self._process.wait(20)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._answers.close()
        self._log.close()

    def _read(self, seconds_max: float) -> dict[str, Any]:
        until_s = time.monotonic() + seconds_max
        while b"\n" not in self._buffer:
            left_s = until_s - time.monotonic()
            ready, _, _ = select.select([self._answers], [], [], max(0.0, left_s))
            got = self._answers.read(65536) if ready else b""
            assert got, f"no answer from the engine:\n{self.log()[-6000:]}"
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))
