"""What a session held is gone with it, without the garbage collector.

The daemon lets the collector look at what is old once in millions of objects: a session in a cycle
of references would keep its buffers, and its tenant's secrets, for hours.
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from daemon_lab import DESCRIPTOR, client_of, disconnected, get, keys_of, put
from harness import Running, running_daemon

from entresol_proto.limits import KIB

pytestmark = pytest.mark.daemon


async def use(running: Running, fabric: str) -> None:
    async with client_of(running, fabric=fabric) as client:
        space = await client.namespace(DESCRIPTOR)
        keys = keys_of(4)
        await put(space, keys, 64 * KIB)
        await get(space, keys, 64 * KIB)
    await disconnected(running)
    await asyncio.sleep(0.05)  # the last callbacks of its connections


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
async def test_no_session_waits_for_the_collector(fabric: str, tmp_path: Path) -> None:
    async with running_daemon(tmp_path) as running:
        await use(running, fabric)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                await use(running, fabric)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left, gc.garbage[:] = list(gc.garbage), []
        finally:
            gc.set_debug(0)
            gc.enable()
        kinds = {type(each).__name__ for each in left}
        assert not kinds & {"_Connection", "SessionHandler", "Session", "SSLProtocol", "SSLObject"}
        large = [v for v in left if isinstance(v, memoryview) and v.nbytes >= 4 * KIB]
        assert not large
        del left
