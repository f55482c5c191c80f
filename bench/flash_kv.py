"""Gets from flash of blocks that shrink: real bf16 KV under the codec `fast`, beside fio.

    python -m bench --only flash --kv FOLDER

As the gets of `bench.flash`: a daemon with little memory, batches of 1 MiB x 32 over shm, sealed on
flash, verified, decoded and opened on the host, fio in the same rounds over the same data file. But
blocks are cut of KV files, one after the other and from the start again (nothing of one block helps
with another), and the daemon is told to have them sealed with `fast`: by itself it takes raw for a
host of its own machine. Less is read than is delivered, so that the rate may pass fio's.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import uvloop

from bench import contract, daemon, kv, scratch
from bench.flash import BATCHES, SET_BATCHES, Found, Turns, data_runs
from bench.ours import Ours
from bench.region import Region
from bench.results import Line, Section, over
from entresol_proto.limits import MIB

VS_FIO = "get_flash_fast_vs_fio_read"
CODEC = "fast"
COUNT = 32  # blocks per batch
SHRINKS_MIN = 1.2  # of bf16 KV under `fast`; below it something else was measured


def written(path: Path) -> int:
    """Bytes of a file that were ever written."""
    return sum(length for _, length in data_runs(path))


async def measure(folder_of_kv: Path, *, rounds: int, download: bool = True) -> Found:
    """GB/s per round of `shm` and, where fio can be had, `fio_read`; once `stored`, plain bytes
    over those that their puts wrote.

    Raises: KvError for a folder without KV; AssertionError when a byte is wrong.
    """
    found = Found()
    content = kv.bytes_of(folder_of_kv, COUNT * MIB)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch.folder())
        region = stack.enter_context(scratch.region(folder, MIB, COUNT, content))
        settings: daemon.Settings = {
            "memory": {"dram_bytes": BATCHES * region.plain_bytes},
            "sealing": {"codec": CODEC},
        }
        room = 4 * SET_BATCHES * region.plain_bytes
        tier = stack.enter_context(daemon.process(folder / "d", settings, flash=room))
        ours = await Ours.open(tier.client_config(), region, "shm", "kv")
        stack.push_async_callback(ours.client.close)
        data_file = folder / "d" / "state" / "flash.data"
        before = written(data_file)
        for generation in range(SET_BATCHES):
            await ours.put(generation, "durable")
        stored = written(data_file) - before
        found.add("stored", SET_BATCHES * region.plain_bytes / stored)
        turns = Turns(found, region, data_file, download)
        await _check_all(region, ours)  # what was put last is in memory
        for round_ in range(rounds):
            turns.fio_read(round_)
            await turns.ours("shm", ours)
            turns.step()
        await _check_all(region, ours)
    return found


async def _check_all(region: Region, ours: Ours) -> None:
    """Every byte of the set."""
    for generation in range(SET_BATCHES):
        await ours.get(generation)
        region.check()


def lines(found: Found) -> list[Line]:
    """What was delivered, what fio read meanwhile, and one over the other."""
    values = found.values
    result = [
        Line("get_flash_fast_gbps", "GB/s", values["shm"]),
        Line("flash_fast_plain_over_stored", "ratio", values["stored"]),
    ]
    if "fio_read" in values:
        result.append(Line("flash_fast_fio_read_gbps", "GB/s", values["fio_read"]))
        result.append(contract.line(VS_FIO, "ratio", over(values["shm"], values["fio_read"])))
    return result


def section(folder_of_kv: Path | None, *, rounds: int, download: bool = True) -> Section:
    """The lines, or why there are none."""
    if folder_of_kv is None:
        return Section([], not_run=(f"{VS_FIO}: no KV ({kv.GIVE})",))
    try:
        found = uvloop.run(measure(folder_of_kv, rounds=rounds, download=download))
    except kv.KvError as error:
        return Section([], not_run=(f"{VS_FIO}: {error}",))
    if found.values["stored"][0] < SHRINKS_MIN:
        return Section([], not_run=(f"{VS_FIO}: blocks of {folder_of_kv} do not shrink",))
    return Section(lines(found), not_run=tuple(f"{n}: {why}" for n, why in found.not_run.items()))
