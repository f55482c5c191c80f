"""`lmcache server` as a process, with Entresol as its second level."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.processes import free_ports
from tests.engines.lmcache.objects import adapter_json
from tests.engines.tier_daemon import ROOT

CHUNK_TOKENS = 64
UP_SECONDS_MAX = 240.0
STOP_SECONDS_MAX = 60.0
ANSWER_SECONDS_MAX = 20.0


class Server:
    """One LMCache server. Invariant: it is gone when the `with` block is over."""

    def __init__(self, name: str, folder: Path, client_toml: Path, **params: Any) -> None:
        self.log_path = folder / f"{name}.log"
        self.port, self._http = free_ports(2)
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.cli.main", "server",
                 "--host", "127.0.0.1", "--port", str(self.port),
                 "--http-host", "127.0.0.1", "--http-port", str(self._http),
                 "--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", "0.25",
                 "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
                 "--l2-adapter", adapter_json(client_toml, **params)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"},
            )  # fmt: skip

    def kv_transfer_config(self) -> dict[str, Any]:
        """What vLLM needs to use it."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
            },
        }

    def status(self) -> Mapping[str, Any]:
        """The adapter's own report, from the server's status page. Raises: OSError."""
        url = f"http://127.0.0.1:{self._http}/status"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=ANSWER_SECONDS_MAX) as reply:
            (one,) = json.load(reply)["storage_manager"]["l2_adapters"]
        return dict(one)

    def wait_up(self) -> Server:
        """Wait until it serves. Raises: AssertionError with its log."""
        until = time.monotonic() + UP_SECONDS_MAX
        while True:
            try:
                self.status()
            except OSError:
                log = self.log_path.read_text(errors="replace")[-4000:]
                assert self._process.poll() is None, log
                assert time.monotonic() < until, log
                time.sleep(0.2)
            else:
                return self

    def wait_count(self, name: str, at_least: int, seconds: float = 60.0) -> None:
        """Wait until a counter of the adapter has come so far."""
        until = time.monotonic() + seconds
        while self.status().get(name, 0) < at_least:
            assert time.monotonic() < until, dict(self.status())
            time.sleep(0.1)

    def stop(self) -> None:
        """End it in order, or else."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS_MAX)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
