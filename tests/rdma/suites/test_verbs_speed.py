"""READ throughput beside perftest's, between the same two devices in the same run.

On an emulated machine of one processor, perftest's busy polling takes the processor away from the
device, which is software; so its waiting for events (`-e`) is printed beside it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import statistics
import time
from pathlib import Path

import pytest
from fabrics import FABRICS, filled, session, soon

from entresol_proto import limits
from entresol_proto.fabric.base import ReadOp
from entresol_proto.status import Status
from tests.rdma.evidence import figure

pytestmark = pytest.mark.timeout(400)

MIB = limits.MIB
RATIO_MIN = 0.9
CASES = [(MIB, limits.VERBS_WINDOW_BYTES // MIB, 32), (65_536, 64, 256)]  # size, depth, messages
_PORT = 18_515


async def perftest(size: int, depth: int, count: int, gid_index: int, *, events: bool) -> float:
    """MB/s of `ib_read_bw`, polling for completions or waiting for their events."""
    devices = os.environ["ENTRESOL_RDMA_DEVICE"].split(",")
    words = ["ib_read_bw", "-s", size, "-t", depth, "-n", count, "-x", gid_index, "-F", "-p", _PORT]
    command = [str(word) for word in words] + (["-e"] if events else [])
    quiet = asyncio.subprocess.DEVNULL
    server = await asyncio.create_subprocess_exec(
        *command, "-d", devices[-1], stdout=quiet, stderr=quiet
    )
    try:
        async with asyncio.timeout(120):
            while not _listening(_PORT):
                await asyncio.sleep(0.1)
            client = await asyncio.create_subprocess_exec(
                *command, "-d", devices[0], "127.0.0.1", stdout=asyncio.subprocess.PIPE
            )
            out, _ = await client.communicate()
            await server.wait()
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()
    for line in out.decode().splitlines():
        words_ = line.split()
        if words_[:2] == [str(size), str(count)]:
            return float(words_[3]) * MIB / 1e6
    raise AssertionError(f"ib_read_bw said: {out.decode()}")


def _listening(port: int) -> bool:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":
                return True
    return False


@pytest.mark.parametrize(("size", "depth", "count"), CASES)
async def test_reads_are_as_fast_as_perftest(
    tmp_path: Path, size: int, depth: int, count: int
) -> None:
    verbs = FABRICS["verbs"]
    memory = mmap.mmap(-1, 16 * MIB)
    into = memoryview(memory)
    async with session(verbs, tmp_path) as pair:
        with filled(os.urandom(MIB) * 16) as buffer:
            exposure = await pair.daemon.expose(buffer)
            registration = pair.host.register(into)  # type: ignore[attr-defined]
            places = [n * size % (16 * MIB) for n in range(count)]
            ops = [ReadOp(exposure.span(at, size), into[at : at + size]) for at in places]
            assert set(await pair.host.read(ops, soon(100))) == {Status.OK}  # registers
            gid_index = pair.host._links[0].port.gid.index  # type: ignore[attr-defined]
            found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
            for events in (False, True, False, False):
                theirs = await perftest(size, depth, count, gid_index, events=events)
                begin = time.perf_counter()
                assert set(await pair.host.read(ops, soon(100))) == {Status.OK}
                ours = size * count / (time.perf_counter() - begin) / 1e6
                found[events].append((ours / theirs, ours, theirs))
            assert into == buffer.view[: 16 * MIB]
            registration.close()
            del ops
    into.release()
    ratio, ours, theirs = statistics.median_low(found[False])
    figure(
        "read", size=size, depth=depth, ours_mb_per_s=round(ours, 1),
        theirs_mb_per_s=round(theirs, 1), ratio=round(ratio, 2), ratio_min=RATIO_MIN,
        ratio_events=round(statistics.fmean(one[0] for one in found[True]), 2),
    )  # fmt: skip
    assert ratio >= RATIO_MIN
