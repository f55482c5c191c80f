"""Two or more trees of the source, the same work in turns: which is faster, on a busy machine too.

    python -m bench.paired OLD NEW [--what put|flash|first|resident|opened] [--fabric shm|tcp]
                                   [--at-once GETS] [--starts STARTS]

Each tree runs a daemon and a host of its own all the while; in each round every tree has its turn,
the order reversed every other round. So both see the same machine, whatever else it does, and the
ratio round by round says more than two medians of two runs. CPU is that of daemon and host.
A tree is a checkout with its native kernel built where that is wanted; a number of a tree against
itself shows what is noise. What its memory and its file happen to be lasts as long as a process,
and moves a tree's speed by up to a twentieth: so all of them are started several times.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BATCHES, SET_BATCHES, BLOCKS = 4, 12, 32  # as bench.flash
WARM_ROUNDS = 2
WORKER = "--worker"
WORK = ("put", "flash", "first", "resident", "opened")


@dataclass(frozen=True, slots=True)
class Asked:
    """What every tree does: `rounds` of each start, `at_once` gets under way together."""

    what: str
    fabric: str
    rounds: int
    starts: int = 1
    at_once: int = 1


@dataclass(slots=True)
class Took:
    """What the turns of a tree took, of all its starts."""

    path: Path
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Tree:
    """A tree under way in a process of its own."""

    took: Took
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, took: Took, asked: Asked) -> Tree:
        """Raises: RuntimeError when it does not come up; its own words are on stderr."""
        path = took.path
        work = (asked.what, asked.fabric, str(asked.at_once))
        parts = [str(path / part) for part in ("daemon", "client", "proto", "")]
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), WORKER, *work], cwd=path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(parts)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        tree = cls(took, process)
        if tree._heard() != "ready":
            tree.end()
            raise RuntimeError(f"{path} cannot do this work; see above")
        return tree

    def _heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def turn(self, *, counts: bool) -> None:
        """One turn. Raises: RuntimeError when the tree failed."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        said = self._heard()
        if not said:
            raise RuntimeError(f"{self.took.path} failed; see above")
        if counts:
            seconds, cpu = json.loads(said)
            self.took.seconds.append(seconds)
            self.took.cpu.append(cpu)

    def end(self) -> None:
        """Its daemon and files go with it."""
        with contextlib.suppress(BrokenPipeError), self.process:  # closes its pipes, then waits
            pass


def compare(paths: Sequence[Path], asked: Asked) -> list[Took]:
    """All rounds of all trees, with those of one start side by side."""
    all_took = [Took(path.resolve()) for path in paths]
    for start in range(asked.starts):
        with contextlib.ExitStack() as stack:
            trees = []
            for took in all_took:
                trees.append(Tree.start(took, asked))
                stack.callback(trees[-1].end)
            for round_ in range(WARM_ROUNDS + asked.rounds):
                for tree in trees if (round_ + start) % 2 else reversed(trees):
                    tree.turn(counts=round_ >= WARM_ROUNDS)
    return all_took


def report(trees: Sequence[Took], batch_bytes: int) -> list[str]:
    """A line per tree: its median and its speed and CPU over the first tree's, round by round."""
    first, lines = trees[0], []
    gb = batch_bytes / 1e9
    for tree in trees:
        ratios = [a / b for a, b in zip(first.seconds, tree.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cpu = statistics.median(b / a for a, b in zip(first.cpu, tree.cpu, strict=True))
        lines.append(
            f"{tree.path}: {gb / statistics.median(tree.seconds):.2f} GB/s, "
            f"{statistics.median(tree.cpu) / gb:.2f} CPU s/GB; speed over the first tree's "
            f"{middle:.3f} (quartiles {low:.3f} to {high:.3f}), CPU {cpu:.3f}"
        )
    return lines


async def worker(what: str, fabric: str, at_once: int) -> None:
    """What a tree's process does: its own code, up to that of its bench. `at_once` gets are under
    way at a time, each into memory of its own."""
    from bench import daemon, scratch
    from bench.ours import Ours
    from bench.processes import cpu_s
    from entresol_client.results import OpenPlace
    from entresol_proto.limits import MIB

    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch.folder(None))
        region = stack.enter_context(scratch.region(folder, MIB, BLOCKS))
        here = what in ("resident", "opened")
        memory = {"dram_bytes": (SET_BATCHES if here else BATCHES) * BLOCKS * MIB}
        flash = 4 * SET_BATCHES * BLOCKS * MIB
        tier = stack.enter_context(daemon.process(folder / "d", {"memory": memory}, flash=flash))
        ours = await Ours.open(tier.client_config(), region, fabric, "paired")
        stack.push_async_callback(ours.client.close)
        content, all_ = bytes(region.source), [ours]
        while len(all_) < at_once:
            more = stack.enter_context(scratch.region(folder, MIB, BLOCKS, content))
            all_.append(Ours(ours.client, ours.ns, more, "paired"))
        assert tier.process is not None
        pid, next_ = tier.process.pid, 0
        sets = BATCHES if here else SET_BATCHES
        open_at: OpenPlace = "daemon" if what == "opened" else "host"
        if what != "put":
            for generation in range(sets):
                await ours.put(generation, "durable")
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            turn = range(next_, next_ + BATCHES)
            next_ += BATCHES
            cpu, began = time.process_time() + cpu_s(pid), time.perf_counter()
            if what == "put":
                await asyncio.gather(*(ours.put(one, "durable") for one in turn))
            elif what == "first":
                for one in turn:
                    for block in range(BLOCKS):
                        await ours.get_one(one % sets, block)
            else:
                left = iter(turn)

                async def some(
                    mine: Ours, left: Iterator[int] = left, open_at: OpenPlace = open_at
                ) -> None:
                    for one in left:
                        await mine.get(one % sets, open_at=open_at)

                await asyncio.gather(*map(some, all_))
            took, cpu = time.perf_counter() - began, time.process_time() + cpu_s(pid) - cpu
            if what == "put":
                for one in turn:
                    await ours.forget(one)
            print(json.dumps([took, cpu]), flush=True)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == [WORKER]:
        asyncio.run(worker(words[1], words[2], int(words[3])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trees", nargs="+", type=Path, metavar="TREE")
    parser.add_argument("--what", choices=WORK, default=WORK[0])
    parser.add_argument("--fabric", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--at-once", type=int, default=1, metavar="GETS", help="under way together")
    parser.add_argument("--rounds", type=int, default=12, help="of each start")
    parser.add_argument("--starts", type=int, default=4, help="of every tree")
    asked = parser.parse_args(words)
    if asked.rounds < 2 or asked.starts < 1:
        parser.error("quartiles need two rounds, and rounds a start")
    for path in asked.trees:
        if not (path / "bench" / "ours.py").is_file():
            parser.error(f"{path} is no tree with a bench of its own")
    try:
        work = Asked(asked.what, asked.fabric, asked.rounds, asked.starts, asked.at_once)
        trees = compare(asked.trees, work)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(report(trees, BATCHES * BLOCKS << 20)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
