"""Fail the k-th I/O, in small, and what becomes of an engine whose device fails.

See `tests/kthlab.py` for how, `tests/proof/lines/kth_io.py` for how many.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from entresol_daemon.flash.device import aligned_buffer
from entresol_daemon.flash.engine import extent_bytes
from entresol_daemon.flash.index import ABSENT
from entresol_daemon.flash.sim import Fault, FaultPlan, SimDevice
from entresol_proto.status import DeviceError, Status
from tests import kthlab, simloop
from tests.flashlab import FORGOTTEN, NAMESPACES, device_bytes, key_of, open_engine, put
from tests.kthlab import KINDS
from tests.proof.lines import kth_io

SEGMENTS = 10


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-ever"])
@pytest.mark.parametrize("kind", KINDS)
def test_fail_the_kth_io_until_it_succeeds(kind: Fault | str, sticky: bool, tmp_path: Path) -> None:
    """The small workload; line R4 of the proof suite tries the others."""
    total = kth_io.one_loop("small", kind, sticky, 1, tmp_path)
    print(f"fault={kind} sticky={sticky} tried={total.tried} wrong=0 lost=0")
    assert not total.notes, total.notes
    assert total.wrong == total.lost == 0
    assert total.tried > 5


@pytest.mark.parametrize("k", [22, 23, 24, 25])
def test_reads_refused_while_opening_destroy_nothing(k: int, tmp_path: Path) -> None:
    """A segment that could not be read in full is neither freed nor given a footer."""
    outcome = kthlab.attempt("recover", 1, Fault.READ_EIO, k, True, tmp_path)
    assert outcome.injected > 0
    assert outcome.lost == 0, outcome.notes


def test_a_put_that_failed_does_not_come_back_after_a_forget(tmp_path: Path) -> None:
    """Its record may have reached the flash: nothing but a tombstone keeps it away."""
    outcome = kthlab.attempt("small", 1, Fault.WRITE_EIO, 22, False, tmp_path)
    assert outcome.injected == 1
    assert not outcome.notes, outcome.notes


def test_a_flush_that_only_seems_to_work_would_be_noticed() -> None:
    kth_io.canary()


def test_a_failed_flush_condemns_and_the_record_moves() -> None:
    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(SEGMENTS), plan=plan)
        engine = await open_engine(device)
        name = (NAMESPACES[0], key_of(1))
        plan.at = {Fault.FLUSH_FAIL: plan.occasions.get(Fault.FLUSH_FAIL, 0) + 1}
        slot, future = put(engine, name, b"payload")
        before = engine.index.m_segment[slot]
        assert await future is Status.OK
        assert engine.index.m_segment[slot] != before
        assert engine.segment_info(before).state.value == "condemned"
        assert engine.stats.condemned == engine.stats.failed_groups == 1
        await engine.evict(before)
        assert engine.segment_info(before).state.value == "free"
        await engine.close(clean=False)

    simloop.run(life())


def test_after_too_many_failures_writes_stop_and_reads_go_on() -> None:
    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(SEGMENTS), plan=plan)
        engine = await open_engine(device)
        first = (NAMESPACES[0], key_of(1))
        slot, future = put(engine, first, b"kept")
        assert await future is Status.OK
        plan.rates = {Fault.FLUSH_FAIL: 1.0}
        while not engine.failed:
            if engine.index.find(NAMESPACES[0], key_of(2)) == ABSENT:
                _, future = put(engine, (NAMESPACES[0], key_of(2)), b"lost")
            assert await future in (Status.IO_ERROR, Status.NO_SPACE)
        assert put(engine, (NAMESPACES[0], key_of(3)), b"late")[0] == -1
        assert not engine.room_for(bytes(16), 4096)
        extent = aligned_buffer(extent_bytes(4))
        assert await engine.read([(slot, extent)]) == [Status.OK]
        engine.remove(slot, FORGOTTEN)
        with pytest.raises(DeviceError, match="stopped writing"):
            await engine.barrier()
        assert await engine.evict(0) == []
        await engine.close(clean=True)

    simloop.run(life())


def test_a_put_that_failed_does_not_come_back_after_a_barrier() -> None:
    """Its bytes may be on flash all the same: a forget that found nothing must hold."""

    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(SEGMENTS), plan=plan)
        engine = await open_engine(device)
        name = (NAMESPACES[0], key_of(1))
        plan.rates = {Fault.FLUSH_FAIL: 1.0}
        assert await put(engine, name, b"payload")[1] is Status.IO_ERROR
        plan.rates = {}
        assert engine.index.find(*name) == ABSENT
        await engine.barrier()
        await engine.close(clean=False)
        engine = await open_engine(device)
        assert engine.index.find(*name) == ABSENT
        assert await put(engine, name, b"payload")[1] is Status.OK
        await engine.close(clean=False)
        engine = await open_engine(device)
        assert engine.index.find(*name) != ABSENT
        await engine.close(clean=False)

    simloop.run(life())


def test_writes_go_on_when_the_device_is_well_again() -> None:
    """What was forgotten while nothing could be written does not come back either."""

    async def life() -> None:
        plan = FaultPlan()
        device = SimDevice(device_bytes(SEGMENTS), plan=plan)
        engine = await open_engine(device)
        kept, doomed = (NAMESPACES[0], key_of(1)), (NAMESPACES[0], key_of(2))
        for name in (kept, doomed):
            assert await put(engine, name, b"payload")[1] is Status.OK
        plan.rates = {Fault.FLUSH_FAIL: 1.0}
        number = 10
        while not engine.failed:
            await put(engine, (NAMESPACES[0], key_of(number)), b"lost")[1]
            number += 1
        engine.remove(engine.index.find(*doomed), FORGOTTEN)
        with pytest.raises(DeviceError, match="stopped writing"):
            await engine.barrier()
        await asyncio.sleep(60)
        assert engine.failed, "the device is as bad as before"
        plan.rates = {}
        async with asyncio.timeout(6):
            while engine.failed:
                await asyncio.sleep(0.1)
        await engine.barrier()
        later = (NAMESPACES[0], key_of(3))
        assert await put(engine, later, b"payload")[1] is Status.OK
        await engine.close(clean=False)
        engine = await open_engine(device)
        found = [engine.index.find(*name) != ABSENT for name in (kept, doomed, later)]
        assert found == [True, False, True]
        await engine.close(clean=False)

    simloop.run(life())
