"""A daemon's end of a verbs session in a process of its own, for tests that stop or kill it.

Usage: remote_peer.py DEVICE BYTES. Prints the offer (hex), reads the reply (hex), prints
"rkey address" of an exposure filled with "k", then obeys lines: revoke, wipe, memlock, quit.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time

from entresol_proto.fabric.base import VerbsSettings
from entresol_proto.fabric.memory import MemfdBuffer
from entresol_proto.fabric.verbs import VerbsFabricServer
from entresol_proto.status import FabricError

FILL = b"k"


async def main(device: str, length_bytes: int) -> None:
    server = VerbsFabricServer(VerbsSettings(devices=(device,)), offer_lifetime_ns=60 * 10**9)
    await server.start()
    offer = server.offer()
    print(offer.params.hex(), flush=True)
    loop = asyncio.get_running_loop()
    reply = bytes.fromhex((await loop.run_in_executor(None, sys.stdin.readline)).strip())
    endpoint = await server.accept(offer, reply, time.monotonic_ns() + 30 * 10**9)
    with MemfdBuffer(length_bytes) as buffer:
        buffer.view[:] = FILL * length_bytes
        try:
            exposure = await endpoint.expose(buffer)
        except FabricError as error:
            print(f"refused {error.status.label} {error}", flush=True)
            exposure = await endpoint.expose(buffer.view[:4096])
        print(exposure.rkey, exposure.address, flush=True)
        while True:
            line = (await loop.run_in_executor(None, sys.stdin.readline)).strip()
            if line == "revoke":
                begin = time.monotonic()
                await endpoint.revoke(exposure)
                buffer.view[:] = b"\xee" * length_bytes
                print(f"revoked {time.monotonic() - begin:.3f}", flush=True)
            elif line == "closed":
                print(endpoint.closed, flush=True)
            else:
                break
        await server.close()


if __name__ == "__main__":
    if len(sys.argv) > 3:  # as an ordinary user with so much memory to lock
        limit = int(sys.argv[3])
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        os.setgid(65534)
        os.setuid(65534)
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
