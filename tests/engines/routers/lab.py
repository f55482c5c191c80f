"""What the routers' tests share: the relay as a process, Dynamo's indexer, an engine's blocks.

Blocks are stored with the client as the vLLM tier stores them: keys of 32 bytes of hash and 4 of
group, parents, positions, token ids. Nothing here speaks for a router: what it answers is judged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.processes import free_ports
from entresol_client import Client, ClientConfig, PutBlock
from entresol_proto.ids import NamespaceDescriptor
from tests.engines.tier_daemon import PYTHON_ENV, TierDaemon, _daemon_env

MODEL = "lab/model"
BLOCK_TOKENS = 16
BLOCK_BYTES = 64 * 1024
SECONDS_MAX = 30.0
DESCRIPTOR = NamespaceDescriptor(
    model=MODEL, model_revision="main", dtype="bf16", layers=2, page_layout="vllm:lab",
    block_tokens=BLOCK_TOKENS,
)  # fmt: skip


def eventually(holds: Callable[[], Any], what: str, seconds: float = SECONDS_MAX) -> Any:
    """The first true answer. Raises: AssertionError after `seconds`, with the last answer."""
    until = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < until, f"{what} did not come true in {seconds} s: {found!r}"
        time.sleep(0.05)
    return found


@dataclass(frozen=True)
class Prompt:
    """A prompt of full blocks and the keys an engine has for them."""

    tokens: tuple[int, ...]
    keys: tuple[bytes, ...]

    @property
    def hashes(self) -> list[int]:
        """The u64 that vLLM publishes for each."""
        return [int.from_bytes(key[24:32], "big") for key in self.keys]

    def block_tokens(self, at: int) -> tuple[int, ...]:
        return self.tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]


def prompt(blocks: int, name: int = 0, shared: Prompt | None = None, group: int = 0) -> Prompt:
    """A prompt of `blocks` blocks; begins with `shared`, if given."""
    tokens = list(shared.tokens) if shared else []
    keys = list(shared.keys) if shared else []
    for at in range(len(keys), blocks):
        mine = tuple(1000 * name + 100 * at + i for i in range(BLOCK_TOKENS))
        before = keys[-1][:32] if keys else b"root"
        digest = hashlib.sha256(before + repr(mine).encode()).digest()
        tokens.extend(mine)
        keys.append(digest + group.to_bytes(4, "big"))
    return Prompt(tuple(tokens), tuple(keys))


class Engine:
    """Stores blocks as an engine's tier does. Close it."""

    def __init__(self, tier: TierDaemon, descriptor: NamespaceDescriptor = DESCRIPTOR) -> None:
        config = replace(ClientConfig.load(tier.client_toml()), deadline_ns=30 * 10**9)
        self._client = Client(config)
        self._descriptor = descriptor
        self._spaces: dict[int, Any] = {}

    def space(self, rank: int = 0) -> Any:
        if rank not in self._spaces:
            self._spaces[rank] = self._client.namespace(replace(self._descriptor, tp_rank=rank))
        return self._spaces[rank]

    def store(
        self, one: Prompt, start: int = 0, stop: int | None = None, *, rank: int = 0,
        ack: str = "durable", length_bytes: int = BLOCK_BYTES,
    ) -> None:  # fmt: skip
        """Put blocks start..stop of a prompt."""
        stop = len(one.keys) if stop is None else stop
        done = self.space(rank).put(
            [
                PutBlock(
                    one.keys[at],
                    os.urandom(length_bytes),
                    position=at,
                    parent_key=one.keys[at - 1] if at else None,
                    token_ids=one.block_tokens(at),
                )
                for at in range(start, stop)
            ],
            ack=ack,
        )
        assert done.ok, done

    def stored(self, one: Prompt) -> list[bool]:
        """Which blocks the daemon has: the truth that routers are judged by."""
        return list(self.space().exists(list(one.keys)).present)

    def forget(self, one: Prompt, start: int, stop: int) -> None:
        assert self.space().forget(list(one.keys[start:stop])).count == stop - start

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


class RelayProcess:
    """`entresol relay ... --json`, in the interpreter that has gRPC and ZeroMQ."""

    def __init__(
        self, tier: TierDaemon, *words: str, pods: Sequence[str] = ("pod0",), model: str = MODEL
    ) -> None:
        """Every pod gets two loopback ports, kept over restarts."""
        ports = free_ports(2 * len(pods))
        self.live = {pod: f"tcp://127.0.0.1:{ports[2 * n]}" for n, pod in enumerate(pods)}
        self.replay = {pod: f"tcp://127.0.0.1:{ports[2 * n + 1]}" for n, pod in enumerate(pods)}
        self._words = [
            "relay", "--model", model, "--json", "--status", "100ms", "--config",
            str(tier.client_toml()), *words,
        ]  # fmt: skip
        for pod in pods:
            self._words += ["--worker", f"{pod}={self.live[pod]},replay={self.replay[pod]}"]
        self.log_path = tier.home / f"relay-{ports[0]}.log"
        self.out_path = tier.home / f"relay-{ports[0]}.out"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until its sockets are there."""
        command = [os.environ.get(PYTHON_ENV) or sys.executable, "-m", "entresol_client.cli.main"]
        self.out_path.unlink(missing_ok=True)
        with open(self.log_path, "ab") as log, open(self.out_path, "ab") as out:
            self._process = subprocess.Popen(
                [*command, *self._words], stdin=subprocess.DEVNULL, stdout=out, stderr=log,
                env=_daemon_env(),
            )  # fmt: skip
        eventually(lambda: self.lines() or self._ended(), "the relay's start")

    def _ended(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log_path.read_text()
        return False

    def lines(self) -> list[dict[str, Any]]:
        """What it printed so far."""
        raw = self.out_path.read_bytes() if self.out_path.exists() else b""
        return [json.loads(line) for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]

    def status(self) -> dict[str, Any]:
        return self.lines()[-1]

    def announces(self, blocks: int) -> None:
        """Wait until so many blocks are announced."""
        eventually(lambda: self.status()["blocks"]["announced"] == blocks, f"{blocks} announced")

    def counts(self, name: str, least: int = 1) -> int:
        """Wait until a counter is at least so high; what it is."""
        what = f"{name} of at least {least}"
        return int(
            eventually(
                lambda: (found := self.status()["counts"].get(name, 0)) >= least and found, what
            )
        )

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> int:
        """TERM; its exit code."""
        self.signal(signal.SIGTERM)
        assert self._process is not None
        return self._process.wait(SECONDS_MAX)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> RelayProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Indexer:
    """Dynamo's own indexer, as a process, over its HTTP interface."""

    def __init__(self, folder: Path) -> None:
        (self._port,) = free_ports(1)
        self.log_path = folder / f"indexer-{self._port}.log"
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        eventually(self._answers, "the indexer's start")

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log_path.read_text()
        with contextlib.suppress(OSError):
            self.get("/health", raw=True)
            return True
        return False

    def get(self, path: str, raw: bool = False) -> Any:
        return self._ask(urllib.request.Request(self._url(path)), raw)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self._url(path), data, head), False)

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"

    def _ask(self, request: urllib.request.Request, raw: bool) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=10) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{request.full_url}: {error.code} {error.read()!r}") from None
        return text if raw else json.loads(text)

    def register(self, worker: int, relay: RelayProcess, pod: str, *, replay: bool = True) -> None:
        """Follow one pod's endpoint as one worker."""
        body = {
            "instance_id": worker, "endpoint": relay.live[pod], "model_name": MODEL,
            "block_size": BLOCK_TOKENS,
        }  # fmt: skip
        if replay:
            body["replay_endpoint"] = relay.replay[pod]
        self.post("/register", body)

    def query(self, tokens: Sequence[int]) -> Any:
        """The whole answer for a prompt."""
        return self.post("/query", {"model_name": MODEL, "token_ids": list(tokens)})

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Indexer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
