"""What a fetch costs the daemon: interpreter time per block and per fetch, and CPU of the process.

    python -m bench.daemon_cost [--fetches 1000] [--json]

Interpreter time is measured where nothing else can be mistaken for it: FETCH and RELEASE frames go
into a real session of a real shard as bytes and the GRANT comes out as bytes, without sockets and
TLS, whose time belongs to the kernel and OpenSSL. CPU is that of a daemon process serving a host
over shm, where it moves no block bytes: control stream, TLS and all. Batches of 1 and of 32
resident blocks give the cost of a block (the slope) and of a fetch (the rest of a batch of one).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import struct
import tempfile
import time
from pathlib import Path

import uvloop

from bench.gets import _get, _put, make_batch
from bench.processes import cpu_s
from entresol_client import AsyncClient
from entresol_daemon.shard.dispatch import SessionHandler
from entresol_proto import limits
from entresol_proto.ids import EngineKey, NamespaceDescriptor, wire_key
from entresol_proto.wire import data, opening
from entresol_proto.wire.frames import FrameType, encode_frame
from entresol_proto.wire.session import ClientSession
from tests.harness import DaemonProcess, Running, running_daemon

SMALL, LARGE = 1, 32
_LEASE_ID_AT = limits.FRAME_HEADER_BYTES + 8  # in a GRANT frame, see proto/FORMAT.md


class _Pipe:
    """Feeds a session handler of the daemon with bytes and takes its answers."""

    def __init__(self, running: Running) -> None:
        self._out: list[bytes] = []
        shard = running.daemon.shard
        real = next(iter(shard.sessions.values()))
        self._handler = SessionHandler(
            shard, real.account.name, write=self._out.append, close=lambda: None
        )
        self._client = ClientSession(now_ns=time.monotonic_ns())
        self._real = real

    async def _ask(self, message: object) -> object:
        _, raw = self._client.send(message)  # type: ignore[arg-type]
        answer = await self.send(raw)
        return self._client.receive(answer, time.monotonic_ns())[0].message

    async def send(self, raw: bytes) -> bytes:
        """One request's bytes in, its answer's bytes out."""
        self._handler.receive(raw)
        while not self._out:
            await asyncio.sleep(0)
        return self._out.pop()

    async def open(self, descriptor: NamespaceDescriptor) -> tuple[int, bytes]:
        """Open a session that uses the data path of the real one; (handle, secret)."""
        await self._ask(opening.Hello(1, 1, bytes(16), 2, "bench"))
        await self._ask(opening.Attach(opening.NO_FABRIC))
        session = self._handler.session
        assert session is not None
        session.endpoint = self._real.endpoint
        session.exposures = self._real.exposures
        opened = await self._ask(opening.OpenNamespace(descriptor.canonical()))
        assert isinstance(opened, opening.NamespaceOpened)
        return opened.handle, opened.secret

    async def close(self) -> None:
        """End the session, leaving the borrowed data path alone."""
        assert self._handler.session is not None
        self._handler.session.endpoint = None
        await self._handler.finish()

    async def fetch(self, frame: bytes) -> None:
        """One FETCH and the RELEASE of what it granted."""
        grant = await self.send(frame)
        (lease_id,) = struct.unpack_from("<Q", grant, _LEASE_ID_AT)
        assert lease_id, "nothing was granted"
        release = data.Release((lease_id,)).encode()
        self._handler.receive(encode_frame(FrameType.RELEASE, 0, release))


async def interpreter(*, fetches: int, rounds: int) -> dict[int, list[float]]:
    """Microseconds per fetch of SMALL and LARGE batches, one number per round."""
    descriptor = NamespaceDescriptor(model="bench")
    found: dict[int, list[float]] = {SMALL: [], LARGE: []}
    with tempfile.TemporaryDirectory(prefix="ent-bench-") as folder:
        async with running_daemon(Path(folder) / "d") as running:
            config = running.client_config(fabric="shm", fallback=False)
            async with await AsyncClient.open(config) as client:
                ns = await client.namespace(descriptor)
                batches = {n: make_batch(n, 64 * limits.KIB, seed=n) for n in found}
                for batch in batches.values():
                    await _put(ns, batch)
                    await _get(ns, batch, "host")()
                pipe = _Pipe(running)
                handle, secret = await pipe.open(descriptor)
                for round_ in range(rounds + 1):
                    for count, batch in batches.items():
                        keys = b"".join(wire_key(secret, EngineKey(k)) for k in batch.keys)
                        fetch = data.Fetch(handle, data.OpenAt.HOST, True, 10**9, keys)
                        frame = encode_frame(FrameType.FETCH, 1000, fetch.encode())
                        began = time.thread_time()
                        for _ in range(fetches):
                            await pipe.fetch(frame)
                        if round_:
                            found[count].append((time.thread_time() - began) / fetches * 1e6)
                await pipe.close()
    return found


def cpu_us(pid: int) -> float:
    """CPU microseconds of a process."""
    return cpu_s(pid) * 1e6


async def process(*, fetches: int, rounds: int) -> dict[int, list[float]]:
    """The same as CPU of a daemon process that serves a host over shm."""
    found: dict[int, list[float]] = {SMALL: [], LARGE: []}
    with (
        tempfile.TemporaryDirectory(prefix="ent-bench-") as folder,
        DaemonProcess(Path(folder) / "d") as daemon,
    ):
        assert daemon.process is not None
        pid = daemon.process.pid
        config = daemon.client_config(fabric="shm", fallback=False)
        async with await AsyncClient.open(config) as client:
            ns = await client.namespace(NamespaceDescriptor(model="bench"))
            gets = {}
            for count in found:
                batch = make_batch(count, 64 * limits.KIB, seed=count)
                await _put(ns, batch)
                gets[count] = _get(ns, batch, "host")
            for round_ in range(rounds + 1):
                for count, get in gets.items():
                    before = cpu_us(pid)
                    for _ in range(fetches):
                        await get()
                    if round_:
                        found[count].append((cpu_us(pid) - before) / fetches)
    return found


def split(found: dict[int, list[float]], prefix: str) -> dict[str, list[float]]:
    """Slope and intercept per round."""
    slopes = [
        (large - small) / (LARGE - SMALL)
        for small, large in zip(found[SMALL], found[LARGE], strict=True)
    ]
    rest = [small - SMALL * slope for small, slope in zip(found[SMALL], slopes, strict=True)]
    return {f"{prefix}per_block_us": slopes, f"{prefix}per_fetch_us": rest}


async def measure(*, fetches: int = 1000, rounds: int = 5) -> dict[str, list[float]]:
    """Microseconds per round: interpreter time, and `cpu_..` of the whole process."""
    return {
        **split(await interpreter(fetches=fetches, rounds=rounds), ""),
        **split(await process(fetches=fetches, rounds=rounds), "cpu_"),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fetches", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    results = uvloop.run(measure(fetches=asked.fetches, rounds=asked.rounds))
    if asked.json:
        print(json.dumps(results))
    for name, values in () if asked.json else results.items():
        print(f"{name:18} {statistics.median(values):7.1f}  {min(values):.1f}..{max(values):.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
