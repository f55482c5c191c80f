"""How fast the fabrics move bytes between two processes, against ceilings measured beside them.

    python bench/fabric.py [--rounds 7] [--mib 1] [--count 32] [--json] [--only tcp,shm]

Each path has a server process of its own; the paths take turns within a round, so that a change of
the machine's mood hits all of them. The ceilings are what two plain processes reach over one TCP
connection: `blocking` with sendall and recv_into, `minimal` with the least uvloop protocol that
does it; `memcpy` is one process. The number that matters is the ratio to the ceiling of the same
round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import uvloop

from entresol_proto import limits
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import Endpoint, Exposure, FabricKind, FabricServer, Offer, ReadOp
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.shm import ShmFabricServer
from entresol_proto.fabric.tcp import TcpFabricServer

_DEADLINE_NS = 60_000_000_000
_CEILING = {"tcp": "minimal", "minimal": "blocking", "shm": "memcpy"}


def measure(
    *, block_bytes: int, count: int, rounds: int, only: list[str] | None = None, streams: int = 2
) -> dict[str, list[float]]:
    """GB/s (10^9) of one batch of `count` blocks, per path and round."""

    async def run() -> dict[str, list[float]]:
        destination = MemfdBuffer(block_bytes * count)
        destination.view[:] = bytes(len(destination.view))  # touch every page
        results: dict[str, list[float]] = {}
        try:
            async with contextlib.AsyncExitStack() as stack:
                paths: dict[str, Callable[[], object]] = {
                    "memcpy": stack.enter_context(_memcpy(destination.view)),
                    "blocking": stack.enter_context(_blocking(destination.view)),
                }
                paths["minimal"] = await stack.enter_async_context(_minimal(destination.view))
                for name in ("tcp", "shm"):
                    if only is None or name in only:
                        paths[name] = await stack.enter_async_context(
                            _fabric(name, block_bytes, count, destination.view, streams)
                        )
                for turn in range(rounds + 1):
                    for name, call in paths.items():
                        begin = time.perf_counter()
                        pending = call()
                        if asyncio.iscoroutine(pending):
                            await pending
                        seconds = time.perf_counter() - begin
                        if turn:  # the first round warms up
                            rate = block_bytes * count / seconds / 1e9
                            results.setdefault(name, []).append(rate)
        finally:
            destination.close()
        return results

    return uvloop.run(run())


@contextlib.contextmanager
def _memcpy(view: memoryview) -> Iterator[Callable[[], object]]:
    into = np.frombuffer(view, np.uint8)
    source = np.random.default_rng(1).integers(0, 256, len(into), np.uint8)
    yield lambda: np.copyto(into, source)


@contextlib.contextmanager
def _blocking(view: memoryview) -> Iterator[Callable[[], object]]:
    """A plain process that answers one byte with the whole batch."""
    with _child("blocking", str(len(view))) as (child, line):
        sock = socket.create_connection(("127.0.0.1", int(line)))

        def call() -> None:
            sock.sendall(b"g")
            at = 0
            while at < len(view):
                at += sock.recv_into(view[at:])

        try:
            yield call
        finally:
            sock.close()
        child.wait(10)


class _MinimalReceiver(asyncio.BufferedProtocol):
    """Receives into one view until it is full."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = len(view)
        self._spare = memoryview(bytearray(1))
        self.full: asyncio.Future[None] | None = None

    def begin(self) -> asyncio.Future[None]:
        self._at = 0
        self.full = asyncio.get_running_loop().create_future()
        return self.full

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._at :] or self._spare  # libuv asks once more when it is full

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at == len(self._view) and self.full is not None:
            self.full.set_result(None)


class _MinimalSender(asyncio.Protocol):
    """Answers one byte with everything, a block per write."""

    def __init__(self, payload: memoryview, block_bytes: int) -> None:
        self._payload = payload
        self._block_bytes = block_bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(self._payload), self._block_bytes):
            self._transport.write(self._payload[at : at + self._block_bytes])


@contextlib.asynccontextmanager
async def _minimal(view: memoryview) -> AsyncIterator[Callable[[], object]]:
    with _child("minimal", str(len(view)), str(limits.MIB)) as (_, line):
        loop = asyncio.get_running_loop()
        transport, receiver = await loop.create_connection(
            lambda: _MinimalReceiver(view), "127.0.0.1", int(line)
        )

        async def call() -> None:
            full = receiver.begin()
            transport.write(b"g")
            await full

        try:
            yield call
        finally:
            transport.abort()


@contextlib.asynccontextmanager
async def _fabric(
    name: str, block_bytes: int, count: int, view: memoryview, streams: int
) -> AsyncIterator[Callable[[], object]]:
    """A process that exposes one buffer over a fabric; a call reads it in one batch."""
    with _child("fabric", name, str(block_bytes * count), str(streams)) as (child, line):
        offer = Offer(FabricKind[name.upper()], bytes.fromhex(line))
        endpoint, _ = await registry.connect(offer, time.monotonic_ns() + _DEADLINE_NS)
        assert child.stdout is not None
        loop = asyncio.get_running_loop()
        second = await loop.run_in_executor(None, child.stdout.readline)
        rkey, address, length = map(int, second.split())
        exposure = Exposure(rkey, address, length)
        ops = [
            ReadOp(exposure.span(at, block_bytes), view[at : at + block_bytes])
            for at in range(0, length, block_bytes)
        ]
        check = bytes(range(251)) * 4

        async def call() -> None:
            statuses = await endpoint.read(ops, time.monotonic_ns() + _DEADLINE_NS)
            assert not any(statuses), statuses

        view[:1004] = bytes(1004)
        await call()
        assert bytes(view[: len(check)]) == check, "wrong bytes"
        try:
            yield call
        finally:
            await endpoint.close()


@contextlib.contextmanager
def _child(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, __file__, "--serve", *args]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            yield child, child.stdout.readline().strip()
        finally:
            child.terminate()


def _serve_blocking(length: int) -> None:
    payload = _pattern_memory(length)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        with sock:
            while sock.recv(1):
                sock.sendall(payload)


async def _serve_minimal(length: int, block_bytes: int) -> None:
    payload = _pattern_memory(length)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _MinimalSender(payload, block_bytes), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()  # until the parent ends us


async def _serve_fabric(name: str, length: int, streams: int) -> None:
    with tempfile.TemporaryDirectory() as folder, MemfdBuffer(length) as buffer:
        buffer.view[:] = _pattern(length)
        buffer.seal_for_readers()
        server = _server(name, Path(folder), streams)
        await server.start()
        offer = server.offer()
        print(offer.params.hex(), flush=True)
        endpoint: Endpoint = await server.accept(offer, b"", time.monotonic_ns() + _DEADLINE_NS)
        exposure = await endpoint.expose(buffer)
        print(exposure.rkey, exposure.address, exposure.length_bytes, flush=True)
        while not endpoint.closed:
            await asyncio.sleep(0.05)
        await server.close()


def _server(name: str, folder: Path, streams: int) -> FabricServer:
    if name == "tcp":
        return TcpFabricServer("127.0.0.1", streams=streams)
    return ShmFabricServer(folder)


def _pattern_memory(length: int) -> memoryview:
    """The pattern in memory of the same kind the fabrics send from (small shared pages)."""
    memory = mmap.mmap(-1, length)
    memory[:] = _pattern(length)
    return memoryview(memory)


def _pattern(length: int) -> bytes:
    unit = bytes(range(251))
    return (unit * (length // len(unit) + 1))[:length]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=float, default=1.0, help="block size")
    parser.add_argument("--count", type=int, default=32, help="blocks per batch")
    parser.add_argument("--streams", type=int, default=limits.DATA_STREAMS_DEFAULT)
    parser.add_argument("--only", help="fabrics, comma-separated")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        if args.serve[0] == "blocking":
            _serve_blocking(int(args.serve[1]))
        elif args.serve[0] == "minimal":
            uvloop.run(_serve_minimal(int(args.serve[1]), int(args.serve[2])))
        else:
            uvloop.run(_serve_fabric(args.serve[1], int(args.serve[2]), int(args.serve[3])))
        return
    results = measure(
        block_bytes=int(args.mib * limits.MIB),
        count=args.count,
        rounds=args.rounds,
        only=args.only.split(",") if args.only else None,
        streams=args.streams,
    )
    summary = {}
    for name, rates in results.items():
        ceiling = results.get(_CEILING.get(name, ""), rates)
        ratios = [rate / top for rate, top in zip(rates, ceiling, strict=True)]
        summary[name] = {
            "gb_per_s": round(statistics.median(rates), 2),
            "ratio": round(statistics.median(ratios), 2),
            "to": _CEILING.get(name, "itself"),
        }
    if args.json:
        print(json.dumps({"cpus": os.cpu_count(), "rounds": args.rounds, "paths": summary}))
        return
    for name, row in summary.items():
        print(f"{name:9} {row['gb_per_s']:7.2f} GB/s   {row['ratio']:.2f} of {row['to']}")


if __name__ == "__main__":
    main()
