"""A host under load while its daemon comes and goes: run by the package's own Python, in there.

Puts fresh blocks with a durable acknowledgement, gets old ones, knocks at the listening sockets,
all until a file appears; then wants every block back that was ever acknowledged as durable. What a
block holds is a function of its key, so nothing has to be remembered to judge it.

Prints one JSON object per line: where it is, about once a second, and at the end what it found.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import hashlib
import json
import random
import socket
import threading
import time
from pathlib import Path

from entresol_client import AsyncClient, ClientConfig, Namespace, PutBlock
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import Status

BLOCK_BYTES = 64 * 1024
PUT_BLOCKS = 2
GET_BLOCKS = 16
BLOCKS_MAX = 12_000  # 750 MiB of a data file of 1 GiB: nothing is evicted
KNOCK_EVERY_S = 0.05
PAUSE_S = 0.05  # it is about what happens, not about speed
BACK_SECONDS_MAX = 60.0
DESCRIPTOR = NamespaceDescriptor(model="deploy", dtype="bf16", layers=2, kv_heads=2, head_dim=8)


def content(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


def key_of(run: str, number: int) -> bytes:
    return hashlib.sha256(f"{run}/{number}".encode()).digest()


class Knocker:
    """Connects to the listening ports again and again: refused connects are what must not be."""

    def __init__(self, ports: list[int]) -> None:
        self.connects = 0
        self.wrong: list[str] = []
        self._ports = ports
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._knock)
        self._thread.start()

    def _knock(self) -> None:
        while not self._done.wait(KNOCK_EVERY_S):
            for port in self._ports:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=60).close()
                    self.connects += 1
                except OSError as error:
                    self.wrong.append(f"{port}: {error!r}")

    def close(self) -> None:
        self._done.set()
        self._thread.join()


class Load:
    """One run."""

    def __init__(self, run: str, space: Namespace, client: AsyncClient) -> None:
        self.run = run
        self.durable: list[bytes] = []
        self.put_as: collections.Counter[str] = collections.Counter()
        self.got_as: collections.Counter[str] = collections.Counter()
        self.wrong_bytes = 0
        self.refused: list[str] = []
        self.longest_s = 0.0  # of any call
        self._numbers = 0
        self._space = space
        self._client = client
        self._random = random.Random(run)

    async def turn(self) -> None:
        """Put some, get some."""
        if self._numbers < BLOCKS_MAX:
            keys = [key_of(self.run, self._numbers + at) for at in range(PUT_BLOCKS)]
            self._numbers += PUT_BLOCKS
            began_s = time.monotonic()
            result = await self._space.put(
                [PutBlock(key, content(key), position=0) for key in keys], ack="durable"
            )
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            for key, status in zip(keys, result.statuses, strict=True):
                self.put_as[status.label] += 1
                if status is Status.OK:
                    self.durable.append(key)
        if self.durable:
            began_s = time.monotonic()
            await self.get(self._random.choices(self.durable, k=GET_BLOCKS))
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        error = self._client.shards()[0].last_error
        if "refused" in error.lower():
            self.refused.append(error)

    async def get(self, keys: list[bytes]) -> int:
        """Get and judge; how many were there."""
        buffers = [bytearray(BLOCK_BYTES) for _ in keys]
        result = await self._space.get_into(keys, buffers)
        hits = 0
        for key, buffer, status in zip(keys, buffers, result.statuses, strict=True):
            self.got_as[status.label] += 1
            if status is Status.OK:
                hits += 1
                self.wrong_bytes += bytes(buffer) != content(key)
            else:
                self.wrong_bytes += any(buffer)
        return hits

    async def all_back(self) -> list[bytes]:
        """Keys acknowledged as durable that are not there, after as long as a daemon may take."""
        until_s = time.monotonic() + BACK_SECONDS_MAX
        missing = list(dict.fromkeys(self.durable))
        while missing and time.monotonic() < until_s:
            again = []
            for at in range(0, len(missing), GET_BLOCKS):
                some = missing[at : at + GET_BLOCKS]
                if await self.get(some) < len(some):
                    again += some
            missing = again
            await asyncio.sleep(0.05 if missing else 0)
        return missing

    def report(self, **more: object) -> str:
        return json.dumps({
            "durable": len(self.durable), "put_as": dict(self.put_as), "got_as": dict(self.got_as),
            "wrong_bytes": self.wrong_bytes, "refused": self.refused[:5],
            "longest_call_ms": round(self.longest_s * 1e3), **more,
        })  # fmt: skip


async def run(arguments: argparse.Namespace) -> int:
    config = ClientConfig.load(arguments.config)
    config = dataclasses.replace(config, fabric=arguments.fabric, fallback=False)
    knocker = Knocker(arguments.knock)
    try:
        async with await AsyncClient.open(config) as client:
            load = Load(arguments.run, await client.namespace(DESCRIPTOR), client)
            print(load.report(), flush=True)
            said_s = time.monotonic()
            while not arguments.until.exists():
                await load.turn()
                if time.monotonic() - said_s > 1:
                    said_s = time.monotonic()
                    print(load.report(), flush=True)
                await asyncio.sleep(PAUSE_S)
            missing = await load.all_back()
            stats = client.stats()
            print(
                load.report(
                    final=True, missing=len(missing), connects=stats["connects"],
                    knocks=knocker.connects, knocks_wrong=knocker.wrong[:5],
                ),
                flush=True,
            )  # fmt: skip
    finally:
        knocker.close()
    return 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--config", type=Path, required=True)
    options.add_argument("--fabric", default="tcp")
    options.add_argument("--run", required=True, help="what makes this run's keys its own")
    options.add_argument("--until", type=Path, required=True, help="ends when this file is there")
    options.add_argument("--knock", type=int, nargs="*", default=[])
    return asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
