"""One tenant floods a real daemon while another measures its own gets: Q5, and its processes.

    python -m tests.proof.fair_daemon victim|flood|unfair ARGUMENTS    (the line starts these)

The host's processors are shared too, and what the flood's own process burns must not count against
the daemon: the daemon has one processor to itself, the victim another, and the flood takes of that
one what the victim leaves idle (SCHED_IDLE). Calm and storm alternate within one run, because two
busy cores are noisy.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from entresol_client.client import AsyncClient
from entresol_client.config import ClientConfig
from entresol_client.results import PutBlock
from entresol_daemon.__main__ import main as daemon_main
from entresol_daemon.core.fairness import FairQueue
from entresol_daemon.shard.turns import LoopTurns
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire.data import Exists
from tests.daemon import daemon_lab as lab
from tests.harness import DaemonProcess
from tests.proof.line import NotRunError

VICTIM, FLOODER = "dev", "other"
BLOCK_BYTES = 64 * 1024
BLOCKS = 64
GET_BLOCKS = 8
GAP_S = 0.01
ROUNDS, ROUND_S, WARM_S = 5, 1.5, 0.5
FLOOD_WARM_S = 3.0  # its processes start, and so do their sessions, when nothing else is to do
UNFAIR = ("-m", "tests.proof.fair_daemon", "unfair")
SESSIONS, AT_ONCE = 4, 8
SAMPLES_FOR_P99 = 3_000


@contextlib.contextmanager
def without_fairness() -> Iterator[None]:
    """The planted bug: queues that forget whose unit it is."""

    def forgetful(name: str) -> Callable[..., Any]:
        original = getattr(FairQueue, name)

        def first_come(self: Any, flow: Any, weight: int, *rest: Any, **more: Any) -> Any:
            return original(self, "everybody", 1, *rest, **more)

        return first_come

    with (
        patch.object(FairQueue, "push", forgetful("push")),
        patch.object(FairQueue, "charge", forgetful("charge")),
        patch.object(FairQueue, "add", forgetful("add")),
        patch.object(FairQueue, "has_credit", lambda *_: False),
    ):
        yield


async def victim(config: Any) -> None:
    """A get every GAP_S, for as long as stdin asks: one line of results per line of input."""
    loop = asyncio.get_running_loop()
    async with await AsyncClient.open(config) as client:
        space = await client.namespace(lab.DESCRIPTOR)
        keys = lab.keys_of(BLOCKS, "victim")
        await space.put(lab.blocks(keys, BLOCK_BYTES), ack="durable")
        buffers = [bytearray(BLOCK_BYTES) for _ in range(GET_BLOCKS)]
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            until = time.monotonic() + float(line)
            seconds: list[float] = []
            asked = got = at = 0
            while time.monotonic() < until:
                await asyncio.sleep(GAP_S)
                at = (at + GET_BLOCKS) % BLOCKS
                start = time.perf_counter()
                found = await space.get_into(keys[at : at + GET_BLOCKS], buffers)
                seconds.append(time.perf_counter() - start)
                asked += GET_BLOCKS
                got += sum(status is Status.OK for status in found.statuses)
            print(json.dumps({"seconds": seconds, "asked": asked, "got": got}), flush=True)


async def _puts(config: Any) -> None:
    async with await AsyncClient.open(config) as client:
        space = await client.namespace(lab.DESCRIPTOR)
        plain = os.urandom(BLOCK_BYTES)
        while True:
            blocks = [PutBlock(os.urandom(32), plain, position=at) for at in range(64)]
            await space.put(blocks)


async def _absent(config: Any) -> None:
    async with await AsyncClient.open(config) as client:
        space = await client.namespace(lab.DESCRIPTOR)
        buffers = [bytearray(64)] * 4_096
        while True:
            await space.get_into([os.urandom(32) for _ in range(4_096)], buffers)


async def _exists(config: Any) -> None:
    class Host:
        def client_config(self, *_: Any, **__: Any) -> Any:
            return config

    async with lab.raw_of(Host(), FLOODER, "shm", config) as raw:
        namespace = await raw.namespace()
        keys = os.urandom(16) * 65_536
        while True:
            await raw.ask(Exists(namespace.handle, keys))


async def _sessions(config: Any) -> None:
    while True:
        async with await AsyncClient.open(config) as client:
            await client.namespace(lab.DESCRIPTOR)


FLOODS: dict[str, Callable[[Any], Coroutine[Any, Any, None]]] = {
    "look-ups": _exists, "absent keys": _absent, "puts": _puts, "sessions": _sessions,
}  # fmt: skip


async def flood(config: Any, kind: str) -> None:
    """At full speed until killed."""

    async def go_on() -> None:
        while True:
            try:
                await FLOODS[kind](config)
            except EntresolError:
                await asyncio.sleep(0.01)

    await asyncio.gather(*(go_on() for _ in range(SESSIONS * AT_ONCE)))


def measure(
    folder: Path, kind: str, program: tuple[str, ...] = (), *, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """A row per round: seconds of each get, calm and in the storm, and the share of blocks got.

    Raises: NotRunError where there is one processor only.
    """
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        raise NotRunError("one processor: the flood's own work could not be kept off the daemon's")
    rows = []
    arguments = (folder / "d", "--tenant", VICTIM, "--tenant", FLOODER)
    daemon = DaemonProcess(*arguments, program=program) if program else DaemonProcess(*arguments)
    with daemon:
        assert daemon.process is not None
        os.sched_setaffinity(daemon.process.pid, {processors[0]})
        for thread in Path(f"/proc/{daemon.process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {processors[0]})
        with _role(folder, "victim", VICTIM, processors[1]) as calm:
            assert calm.stdout is not None
            assert calm.stdout.readline().strip() == "ready"
            _ask(calm, WARM_S)
            for _ in range(rounds):
                before = _ask(calm, ROUND_S)
                with _role(folder, "flood", FLOODER, processors[1], kind) as storm:
                    _ask(calm, FLOOD_WARM_S)
                    during = _ask(calm, ROUND_S)
                    storm.kill()
                rows.append(
                    {"calm_s": before["seconds"], "storm_s": during["seconds"],
                     "share": during["got"] / max(1, during["asked"]),
                     "pace": during["asked"] / max(1, before["asked"])}
                )  # fmt: skip
                time.sleep(0.3)
            calm.kill()
    return rows


def ratio_of(rows: list[dict[str, Any]]) -> float:
    """How much slower the slowest gets are in the storm: the 99th percentile of all rounds
    together, or the 95th where there are too few to say more."""
    slow = {}
    for name in ("calm_s", "storm_s"):
        ordered = sorted(itertools.chain.from_iterable(row[name] for row in rows))
        most = 0.99 if len(ordered) >= SAMPLES_FOR_P99 else 0.95
        slow[name] = ordered[int(len(ordered) * most)] if ordered else math.inf
    return slow["storm_s"] / slow["calm_s"]


def _role(folder: Path, role: str, tenant: str, processor: int, *more: str) -> Any:
    name = "client.toml" if tenant == "dev" else f"client-{tenant}.toml"

    def settle() -> None:
        os.sched_setaffinity(0, {processor})
        if role == "flood":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    return subprocess.Popen(
        [sys.executable, "-m", "tests.proof.fair_daemon", role, str(folder / "d" / name), *more],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=settle,
    )  # fmt: skip


def _ask(process: Any, seconds: float) -> dict[str, Any]:
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise AssertionError("the victim died")
    found: dict[str, Any] = json.loads(line)
    return found


def main(arguments: list[str]) -> int:
    """One of the line's processes."""
    if arguments[0] == "unfair":
        with without_fairness(), patch.object(LoopTurns, "stretch", 1 << 30):
            return daemon_main(arguments[1:])
    known = ClientConfig.load(Path(arguments[1]))
    asyncio.run(victim(known) if arguments[0] == "victim" else flood(known, arguments[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
