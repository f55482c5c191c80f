"""The scrubber of a whole shard in virtual time; line R9 of the proof suite plants many more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entresol_daemon.core.scrubbing import REFUSED_PAUSE_NS, START_NS
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.sim import Fault
from entresol_daemon.shard.scrubber import Scrubber
from entresol_proto.status import EntresolError, Status
from entresol_proto.wire.data import Ack, OpenAt
from tests import simloop
from tests.proof.lines import scrubber as line
from tests.scrublab import TENANT, Report, ScrubWorld
from tests.sim.shardlab import Host


def play(story: Coroutine[Any, Any, None]) -> None:
    simloop.run(story, 1, loop=simloop.SimLoop(1, seconds_max=1_000_000))


def rated(place: ScrubWorld, bytes_per_s: int) -> None:
    config = place.world.config
    place.world.config = replace(config, flash=replace(config.flash, scrub_bytes_per_s=bytes_per_s))


@pytest.mark.parametrize("locked", [False, True], ids=["serving", "locked"])
def test_every_planted_error_is_found_in_a_cycle_and_nothing_else(
    tmp_path: Path, locked: bool
) -> None:
    report = line.one_shard(1, tmp_path, 80, 50, locked=locked)
    assert (report.found, report.planted, report.false, report.wrong) == (50, 50, 0, 0), report


def test_blocks_that_are_not_looked_at_would_be_noticed() -> None:
    line.canary()


def test_nothing_is_found_among_blocks_that_move_and_go(tmp_path: Path) -> None:
    report = line.busy_shard(1, tmp_path)
    assert not report.notes, report.notes
    assert report.wrong == 0
    assert report.scrubbed > 1_000_000


@pytest.mark.parametrize("where", ["_segment", "_second_chances"])
def test_without_memory_for_a_while_it_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    honest, refused = getattr(Scrubber, where), 0

    async def sometimes(self: Scrubber, *args: Any, **named: Any) -> None:
        nonlocal refused
        refused += 1
        if refused <= 3:
            raise MemoryError("no room for it")
        await honest(self, *args, **named)

    async def story() -> None:
        place = ScrubWorld(tmp_path, 1, 64)
        await place.fill()
        monkeypatch.setattr(Scrubber, where, sometimes)
        await place.cycle()
        assert refused > 3
        assert place.world.shard.scrubber.begin_now() is False, "it is at rest, not gone"
        await place.cycle()
        await place.world.stop()

    play(story())


def test_a_device_that_is_away_for_a_while_costs_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        place = ScrubWorld(tmp_path, 1, 64)
        await place.fill()
        plan = place.world.device.plan
        plan.rates = {Fault.READ_EIO: 1.0}
        await place.cycle()
        assert place.world.shard.scrubber.found == 0
        plan.rates = {Fault.READ_EIO: 0.05}  # and one that stutters loses no more than it must
        place.world.shard.scrubber.begin_now()
        await place.cycle()
        plan.rates = {}
        report = Report()
        await place.read_back({}, report)
        assert report.false <= 1, report
        await place.world.stop()

    play(story())


def test_the_rate_is_kept_and_one_cycle_is_enough(tmp_path: Path) -> None:
    async def story() -> None:
        place = ScrubWorld(tmp_path, 1, 64)
        rated(place, 10_000)
        await place.fill()
        loop, scrubber = asyncio.get_running_loop(), place.world.shard.scrubber
        await asyncio.sleep(START_NS / 1e9)
        began = loop.time()
        while scrubber.progress.cycles == 0:
            await asyncio.sleep(1.0)
            assert scrubber.scrubbed_bytes <= 10_000 * (loop.time() - began) + 1_100_000
        assert loop.time() - began > 0.5 * scrubber.scrubbed_bytes / 10_000
        done = scrubber.scrubbed_bytes
        await asyncio.sleep(600)
        assert scrubber.scrubbed_bytes == done, "the next one comes tomorrow"
        await place.world.stop()

    play(story())


def test_a_restart_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    async def story() -> None:
        place = ScrubWorld(tmp_path / "keys", 1, 120)
        world = place.world
        world.scrub_file = tmp_path / "scrub.json"
        rated(place, 20_000)
        (tmp_path / "keys").mkdir(mode=0o700)
        await place.fill()
        while world.shard.scrubber.progress.segment < 1:
            await asyncio.sleep(1.0)
        first = world.shard.scrubber.scrubbed_bytes
        await world.stop()
        saved = json.loads(world.scrub_file.read_bytes())
        assert saved["segment"] >= 1
        await world.open((TENANT,))
        await place.cycle()
        total = sum(place_.sealed_bytes for place_ in place.places)
        assert world.shard.scrubber.scrubbed_bytes < total
        assert first + world.shard.scrubber.scrubbed_bytes >= total
        assert world.shard.scrubber.progress.cycles == 1
        await world.stop()
        for rubbish in (b"", b"{", b"[1]", b'{"version": 1, "segment": -4}', b"\xff" * 99):
            world.scrub_file.write_bytes(rubbish)
            await world.open((TENANT,))
            await asyncio.sleep(1.0)
            assert world.shard.scrubber.progress.segment == 0
            await world.stop()

    play(story())


def test_gets_are_served_while_it_runs(tmp_path: Path) -> None:
    async def story() -> None:
        place = ScrubWorld(tmp_path, 1, 64)
        rated(place, 100_000)
        await place.fill()
        place.world.shard.scrubber.begin_now()
        host = Host(place.world, TENANT, careful=True)
        await host.open()
        for _ in range(40):
            place.world.shard.parts.residency.clear()
            statuses = await host.get(place.keys[:16], OpenAt.HOST)
            assert set(statuses) == {Status.OK}
        assert place.world.shard.scrubber.running
        await host.gone()
        place.world.hosts.clear()
        await place.world.stop()

    play(story())


@pytest.mark.parametrize("bytes_per_s", [1 << 25, 0], ids=["resting", "off"])
def test_a_block_that_a_get_was_refused_is_dropped_a_minute_later(
    tmp_path: Path, bytes_per_s: int
) -> None:
    async def story() -> None:
        place = ScrubWorld(tmp_path, 1, 16)
        rated(place, bytes_per_s)
        await place.fill()
        await asyncio.sleep(4 * START_NS / 1e9)  # the first cycle is over
        shard = place.world.shard
        bad, key = place.places[3], place.keys[3]
        place.world.device._latent.add(bad.at // BLOCK)
        host = Host(place.world, TENANT, careful=True)
        await host.open()
        shard.parts.residency.clear()
        statuses = await host.get(place.keys, OpenAt.HOST)
        assert [number for number, s in enumerate(statuses) if s is not Status.OK] == [3]
        assert await host.put([key], Ack.DURABLE) == [Status.EXISTS]
        assert statuses[3] is Status.IO_ERROR
        await asyncio.sleep(2.5 * REFUSED_PAUSE_NS / 1e9)
        assert shard.parts.engine.index.find(*bad.name) < 0
        assert shard.scrubber.found == 1
        assert shard.parts.metrics.scrub_found[Status.IO_ERROR]._value.get() == 1
        assert await host.put([key], Ack.DURABLE) == [Status.OK]
        await host.gone()
        place.world.hosts.clear()
        await place.world.stop()

    play(story())


def test_a_get_that_a_device_refuses_once_costs_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        place = ScrubWorld(tmp_path, 1, 16)
        await place.fill()
        await asyncio.sleep(4 * START_NS / 1e9)
        shard, plan = place.world.shard, place.world.device.plan
        host = Host(place.world, TENANT, careful=True)
        await host.open()
        for away_s in (1.0, 10 * REFUSED_PAUSE_NS / 1e9):
            shard.parts.residency.clear()
            plan.rates = {Fault.READ_EIO: 1.0}
            assert set(await host.get(place.keys, OpenAt.HOST)) == {Status.IO_ERROR}
            await asyncio.sleep(away_s)
            plan.rates = {}
            await asyncio.sleep(3 * REFUSED_PAUSE_NS / 1e9)
            assert set(await host.get(place.keys, OpenAt.HOST)) == {Status.OK}
        assert shard.scrubber.found == 0
        await host.gone()
        place.world.hosts.clear()
        await place.world.stop()

    play(story())


def test_off_is_off_and_says_so(tmp_path: Path) -> None:
    async def story() -> None:
        place = ScrubWorld(tmp_path, 1, 8)
        rated(place, 0)
        await place.fill()
        scrubber = place.world.shard.scrubber
        await asyncio.sleep(2 * START_NS / 1e9)
        assert (scrubber.scrubbed_bytes, scrubber.state) == (0, "off")
        with pytest.raises(EntresolError, match="scrub_bytes_per_s"):
            scrubber.begin_now()
        await place.world.stop()

    play(story())
