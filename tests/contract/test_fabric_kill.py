"""kill -9 of the process at the other end, in the middle of a read, on real processes."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest
from fabrics import on_loops, soon

from entresol_proto import limits
from entresol_proto.fabric import registry
from entresol_proto.fabric.base import Exposure, FabricKind, Offer, ReadOp
from entresol_proto.status import Status

_DAEMON = """
import asyncio, sys, time
from pathlib import Path
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.shm import ShmFabricServer
from entresol_proto.fabric.tcp import TcpFabricServer

async def main():
    tcp = sys.argv[1] == "tcp"
    server = TcpFabricServer("127.0.0.1") if tcp else ShmFabricServer(Path(sys.argv[2]))
    await server.start()
    offer = server.offer()
    print(offer.params.hex(), flush=True)
    endpoint = await server.accept(offer, b"", time.monotonic_ns() + 10**10)
    buffer = MemfdBuffer(int(sys.argv[3]))
    buffer.view[:] = b"k" * buffer.length_bytes
    buffer.seal_for_readers()
    exposure = await endpoint.expose(buffer)
    print(exposure.rkey, exposure.address, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@on_loops
@pytest.mark.parametrize("kind", [FabricKind.TCP, FabricKind.SHM])
async def test_a_killed_daemon_is_an_error_and_nothing_worse(
    tmp_path: Path, kind: FabricKind
) -> None:
    size = 16 * limits.MIB
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _DAEMON,
        kind.label,
        str(tmp_path / "run"),
        str(size),
        stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert child.stdout is not None
    offer = Offer(kind, bytes.fromhex((await child.stdout.readline()).decode()))
    host, _ = await registry.connect(offer, soon())
    rkey, address = map(int, (await child.stdout.readline()).split())
    exposure = Exposure(rkey, address, size)
    view = memoryview(bytearray(size))

    async def read_until_it_fails() -> list[Status]:
        while True:
            ops = [
                ReadOp(exposure.span(at, limits.MIB), view[at : at + limits.MIB])
                for at in range(0, size, limits.MIB)
            ]
            statuses = await host.read(ops, soon())
            assert view[:: 64 * 1024] == b"k" * (size // (64 * 1024)) or any(statuses)
            if any(statuses):
                return statuses

    reading = asyncio.ensure_future(read_until_it_fails())
    await asyncio.sleep(0.05)
    assert not reading.done()
    child.send_signal(signal.SIGKILL)
    begin = time.monotonic()
    statuses = await asyncio.wait_for(reading, 5)
    assert set(statuses) <= {Status.OK, Status.DISCONNECTED, Status.FABRIC_ERROR}
    assert time.monotonic() - begin < 5
    assert host.closed
    await child.wait()
    await host.close()
    await asyncio.sleep(0.05)  # the child watcher's thread
