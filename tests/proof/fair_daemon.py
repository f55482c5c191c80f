"""One tenant floods a real daemon while another measures its own gets: Q5, and its processes.

    python -m tests.proof.fair_daemon victim|flood|unfair ARGUMENTS    (the line starts these)

A storm is one only if the flood did something: its process says how many of its requests the daemon
answered. No storm is measured before it was answered something; a flood that does nothing, or is
gone at the end of a storm, raises, and so do rounds of which no storm brought an answer. (A put of
4 MiB beside 31 others may take longer than one.)

The host's processors are shared too, and what the flood's own process burns must not count against
the daemon: the daemon has one processor to itself, the victim another, and the flood takes of that
one what the victim leaves idle (SCHED_IDLE). Where the user may, the victim is SCHED_FIFO: a kernel
that does not preempt itself, or only at a tick, let a flood's system calls go on for up to 4 ms
while an answer of the daemon lay there (look-ups: p99 5.4 ms so, and 2.5 without). Calm and storm
alternate within one run, because two busy cores are noisy.
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
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from entresol_client.client import AsyncClient
from entresol_client.config import ClientConfig
from entresol_client.results import PutBlock, RequestFailedError
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
FLOOD_START_S_MAX = 30.0  # and no storm is measured before the daemon answered it something
UNFAIR = ("-m", "tests.proof.fair_daemon", "unfair")
SESSIONS, AT_ONCE = 4, 8
SAMPLES_FOR_P99 = 3_000
WORDS_SHOWN_MAX = 1_500  # characters of a dead process's last words
# What a call comes to that the daemon has said nothing to: no work of a flood.
UNANSWERED = frozenset({Status.DISCONNECTED, Status.BREAKER_OPEN, Status.DEADLINE})


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


def _count(done: Counter[str], statuses: Iterable[Status]) -> None:
    """Count a call by what became of it: answered, as far as the daemon said anything to it."""
    done["unanswered" if UNANSWERED.issuperset(statuses) else "answered"] += 1


async def _puts(config: Any, done: Counter[str]) -> None:
    async with await AsyncClient.open(config) as client:
        space = await client.namespace(lab.DESCRIPTOR)
        plain = os.urandom(BLOCK_BYTES)
        while True:
            blocks = [PutBlock(os.urandom(32), plain, position=at) for at in range(64)]
            _count(done, (await space.put(blocks)).statuses)


async def _absent(config: Any, done: Counter[str]) -> None:
    async with await AsyncClient.open(config) as client:
        space = await client.namespace(lab.DESCRIPTOR)
        buffers = [bytearray(64) for _ in range(4_096)]
        while True:
            found = await space.get_into([os.urandom(32) for _ in range(4_096)], buffers)
            _count(done, found.statuses)


async def _exists(config: Any, done: Counter[str]) -> None:
    class Host:
        def client_config(self, *_: Any, **__: Any) -> Any:
            return config

    async with lab.raw_of(Host(), FLOODER, "shm", config) as raw:
        namespace = await raw.namespace()
        keys = os.urandom(16) * 65_536
        while True:
            await raw.ask(Exists(namespace.handle, keys))
            done["answered"] += 1


async def _sessions(config: Any, done: Counter[str]) -> None:
    while True:
        async with await AsyncClient.open(config) as client:
            await client.namespace(lab.DESCRIPTOR)
            done["answered" if client.shards()[0].connected else "unanswered"] += 1


FLOODS: dict[str, Callable[[Any, Counter[str]], Coroutine[Any, Any, None]]] = {
    "look-ups": _exists, "absent keys": _absent, "puts": _puts, "sessions": _sessions,
}  # fmt: skip


async def flood(config: Any, kind: str) -> None:
    """At full speed until stdin ends; what came of it so far for each line of input."""
    done: Counter[str] = Counter()

    async def go_on() -> None:
        while True:
            try:
                await FLOODS[kind](config, done)
            except (EntresolError, RequestFailedError) as error:
                done["unanswered" if error.status in UNANSWERED else "refused"] += 1
                await asyncio.sleep(0.01)

    async def tell() -> None:
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(done), flush=True)
        raise EOFError

    with contextlib.suppress(EOFError):
        await asyncio.gather(tell(), *(go_on() for _ in range(SESSIONS * AT_ONCE)))


class Flood:
    """A flood's process, and what it says of itself."""

    def __init__(self, process: Any, kind: str, said: Path) -> None:
        """`said` is where its stderr goes."""
        self._process, self._kind, self._said = process, kind, said
        self._counts: dict[str, int] = {}
        self._before = 0

    def begin(self) -> None:
        """The storm begins, once the daemon has answered something. Raises: AssertionError for a
        flood that has ended, or that has no answer in time."""
        until = time.monotonic() + FLOOD_START_S_MAX
        while not (answered := self._asked()):
            assert time.monotonic() < until, (
                f"the flood of {self._kind} did nothing: {self._last_words()}"
            )
            time.sleep(0.05)
        self._before = answered

    def end(self) -> int:
        """How many requests the daemon answered in the storm. Raises: AssertionError for a flood
        that has ended."""
        return self._asked() - self._before

    def _asked(self) -> int:
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line or self._process.poll() is not None:
            raise AssertionError(f"the flood of {self._kind} ended: {self._last_words()}")
        self._counts = json.loads(line)
        return self._counts.get("answered", 0)

    def _last_words(self) -> str:
        return f"{self._counts} {self._said.read_text(errors='replace')[-WORDS_SHOWN_MAX:].strip()}"


def measure(
    folder: Path, kind: str, program: tuple[str, ...] = (), *, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """A row per round: seconds of each get, calm and in the storm, the share of blocks got, and how
    many requests of the flood were answered.

    Raises: NotRunError where there is one processor only. AssertionError for a flood that is none.
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
        with _role(folder, "victim", VICTIM, processors[1]) as calm, _ending(calm):
            assert calm.stdout is not None
            assert calm.stdout.readline().strip() == "ready"
            _ask(calm, WARM_S)
            for _ in range(rounds):
                before = _ask(calm, ROUND_S)
                with (
                    _role(folder, "flood", FLOODER, processors[1], kind) as storm, _ending(storm)
                ):  # fmt: skip
                    _ask(calm, FLOOD_WARM_S)
                    other = Flood(storm, kind, _said(folder, "flood"))
                    other.begin()
                    during = _ask(calm, ROUND_S)
                    flooded = other.end()
                rows.append(
                    {"calm_s": before["seconds"], "storm_s": during["seconds"],
                     "share": during["got"] / max(1, during["asked"]),
                     "pace": during["asked"] / max(1, before["asked"]), "flooded": flooded}
                )  # fmt: skip
                time.sleep(0.3)
    assert any(row["flooded"] for row in rows), f"no storm of {kind} brought an answer: no flood"
    return rows


@contextlib.contextmanager
def _ending(process: Any) -> Iterator[None]:
    """It is killed in the end, whatever came before."""
    try:
        yield
    finally:
        process.kill()


def ratio_of(rows: list[dict[str, Any]]) -> float:
    """How much slower the slowest gets are in the storm: the 99th percentile of all rounds
    together, or the 95th where there are too few to say more, calm or in the storm. The storm
    makes fewer of them: both are judged by the same percentile."""
    calm, storm = (
        sorted(itertools.chain.from_iterable(row[name] for row in rows))
        for name in ("calm_s", "storm_s")
    )
    fewest = min(len(calm), len(storm))
    if not fewest:
        return math.inf
    most = 0.99 if fewest >= SAMPLES_FOR_P99 else 0.95
    return float(storm[int(len(storm) * most)] / calm[int(len(calm) * most)])


def _said(folder: Path, role: str) -> Path:
    """What a process says on stderr."""
    return folder / f"{role}.stderr"


def _role(folder: Path, role: str, tenant: str, processor: int, *more: str) -> Any:
    name = "client.toml" if tenant == "dev" else f"client-{tenant}.toml"

    def settle() -> None:
        os.sched_setaffinity(0, {processor})
        if role == "flood":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            return
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))

    words = (role, str(folder / "d" / name), *more)
    with _said(folder, role).open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.proof.fair_daemon", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
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
