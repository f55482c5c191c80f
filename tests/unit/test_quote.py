"""The arithmetic of quotes: it grows with what waits, is fair, learns, and tells only sums."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_daemon.core.quote import (
    ERROR_MAX,
    LATELY_NS,
    STRETCH_NS,
    Costs,
    Errors,
    FlashLoad,
    FlashReads,
    Load,
    Speed,
    Work,
    coarse,
    corrected,
    expect,
    flash_ns,
)
from entresol_proto import limits
from entresol_proto.status import ProtocolError
from entresol_proto.wire.data import Tier
from entresol_proto.wire.quote import Quoted

MIB = 1 << 20
COSTS = Costs(150_000, 90_000, 20_000, 64, 8)
MOST = limits.DEADLINE_NS_MAX

sizes = st.integers(0, 1 << 34)
loads = st.builds(
    FlashLoad, st.integers(1, 16), sizes, sizes, sizes, st.integers(0, 64),
    st.floats(0, 4, allow_nan=False),
)  # fmt: skip


def works(blocks: int = 200) -> st.SearchStrategy[Work]:
    def make(memory: int, flash: int, block_bytes: int) -> Work:
        return Work(memory, flash, (memory + flash) * block_bytes, flash * block_bytes)

    return st.builds(
        make, st.integers(0, blocks), st.integers(0, blocks), st.integers(4096, 8 * MIB)
    )


def fast(bytes_per_ns: float = 1.0, latency_ns: float = 100_000) -> Speed:
    """A speed as it was measured on such a flash."""
    speed = Speed()
    for round_ in range(400):
        length = (round_ % 7 + 1) * MIB
        speed.note(1, length, int(latency_ns + length / bytes_per_ns))
    return speed


# What waits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    ["own_bytes", "in_service_bytes", "others_bytes", "others_weight", "others_bytes_per_ns"],
)
def test_time_grows_with_whatever_waits(field: str) -> None:
    speed = fast()

    @settings(max_examples=100, deadline=None)
    @given(loads, sizes, st.integers(1, 1 << 30))
    def check(load: FlashLoad, length: int, more: int) -> None:
        step = more / (1 << 30) if field == "others_bytes_per_ns" else more
        worse = replace(load, **{field: getattr(load, field) + step})
        before, after = flash_ns(load, speed, length), flash_ns(worse, speed, length)
        assert after >= before * (1 - 1e-9)

    check()


@settings(max_examples=200, deadline=None)
@given(loads, works(), st.integers(0, 40), st.floats(0, 1e9), st.integers(0, 1 << 30))
def test_times_grow_with_what_is_asked_and_stay_in_order(
    flash: FlashLoad, work: Work, tenants: int, door_ns: float, room: int
) -> None:
    speed, load = fast(), Load(flash, door_ns, tenants, room)
    errors = Errors()
    for ratio in (3.0, 0.2, 5.0, 4.0):
        errors.note(ratio, 1.0)
    times = corrected(expect(load, speed, COSTS, work), Errors(), errors)
    assert times.wait_ns <= min(times.memory_ns, times.flash_ns)
    assert max(times.memory_ns, times.flash_ns) <= times.expected_ns <= times.high_ns
    block = max(4096, work.record_bytes // max(1, work.memory_blocks + work.flash_blocks))
    more_memory = replace(
        work, memory_blocks=work.memory_blocks + 1, record_bytes=work.record_bytes + block
    )
    more_flash = replace(
        work, flash_blocks=work.flash_blocks + 1, record_bytes=work.record_bytes + block,
        flash_bytes=work.flash_bytes + block,
    )  # fmt: skip
    for more in (more_memory, more_flash):
        after = corrected(expect(load, speed, COSTS, more), Errors(), errors)
        assert after.expected_ns >= times.expected_ns * (1 - 1e-9) or not work.flash_blocks
        plain = expect(load, speed, COSTS, more).expected_ns
        assert plain >= expect(load, speed, COSTS, work).expected_ns * (1 - 1e-9)


def test_a_crowd_costs_a_share_and_no_more() -> None:
    """However much others have waiting, with equal weights two of them cost twice as much again."""
    speed = fast()
    alone = flash_ns(FlashLoad(), speed, 64 * MIB)
    crowded = FlashLoad(1, 0, 0, 1 << 40, 2, 1.0)
    assert flash_ns(crowded, speed, 64 * MIB) == pytest.approx(3 * alone, rel=0.02)
    heavy = replace(crowded, weight=2)
    assert flash_ns(heavy, speed, 64 * MIB) == pytest.approx(2 * alone, rel=0.02)
    few = FlashLoad(1, 0, 0, 8 * MIB, 2, 0.0)
    assert flash_ns(few, speed, 64 * MIB) == pytest.approx(alone * 72 / 64, rel=0.02)


def test_the_flash_is_measured_while_it_is_busy() -> None:
    """Reads of 2 MiB, four at once, at 2 GB/s, with pauses between them that must not count."""
    rng, reads, now = random.Random(5), FlashReads(), 0
    for _ in range(200):
        now += rng.randrange(50_000_000)
        count = rng.randint(1, 6)
        for _ in range(count):
            reads.arrive("a", 1, 2 * MIB, now)
            reads.begin("a", 2 * MIB, now)
        now += 80_000
        for _ in range(count):
            now += MIB  # 2 MiB at 2 bytes a nanosecond
            reads.end(2 * MIB, 2 * MIB, now)
    assert reads.speed.ns_per_byte == pytest.approx(0.5, rel=0.05)
    assert reads.speed.latency_ns == pytest.approx(80_000, rel=0.5)


def test_a_stretch_that_does_not_end_is_measured_all_the_same() -> None:
    reads, now = FlashReads(), 0
    reads.arrive("a", 1, MIB, now)
    reads.begin("a", MIB, now)
    for _ in range(300):
        reads.arrive("a", 1, MIB, now)
        reads.begin("a", MIB, now)
        now += MIB // 4  # 4 GB/s
        reads.end(MIB, MIB, now)
    assert now > STRETCH_NS
    assert reads.speed.ns_per_byte == pytest.approx(0.25, rel=0.1)


def test_what_was_given_up_or_not_read_says_nothing_of_the_flash() -> None:
    reads = FlashReads()
    before = (reads.speed.latency_ns, reads.speed.ns_per_byte)
    for at in range(100):
        reads.arrive("a", 1, MIB, at)
        reads.arrive("a", 1, MIB, at)
        reads.give_up("a", MIB)
        reads.begin("a", MIB, at)
        reads.end(MIB, 0, at + 1)
    assert (reads.speed.latency_ns, reads.speed.ns_per_byte) == before
    assert reads.load("a", 1, 10**12).own_bytes == 0


def test_a_load_counts_the_others_in_sum_and_only_while_they_come() -> None:
    reads = FlashReads()
    for tenant, weight in (("a", 1), ("b", 2), ("c", 3)):
        reads.arrive(tenant, weight, MIB, 0)
    found = reads.load("a", 1, 0)
    assert (found.own_bytes, found.others_bytes, found.others_weight) == (MIB, 2 * MIB, 5)
    assert found.others_bytes_per_ns == pytest.approx(2 * MIB / LATELY_NS)
    for tenant in "abc":
        reads.begin(tenant, MIB, 0)
        reads.end(MIB, MIB, 1000)
    assert reads.load("a", 1, 1000).others_weight == 5, "they will come again"
    later = reads.load("a", 1, LATELY_NS * 2)
    assert (later.others_bytes, later.others_weight, later.others_bytes_per_ns) == (0, 0, 0.0)


def test_tenants_that_are_gone_are_forgotten() -> None:
    reads = FlashReads()
    for number in range(1000):
        now = number * LATELY_NS // 8
        reads.arrive(number, 1, 1, now)
        reads.begin(number, 1, now)
        reads.end(1, 1, now + 1)
    assert len(reads._flows) <= 17, "those of twice the time that counts"


# What is learned ----------------------------------------------------------------------------------


def test_errors_come_to_be_what_is_seen_and_forget_what_was() -> None:
    errors, rng = Errors(), random.Random(2)
    for level in (4.0, 0.5):
        for _ in range(60):
            errors.note(level * rng.uniform(0.8, 1.2), 1.0)
        assert errors.middle == pytest.approx(level, rel=0.15)
        assert level < errors.high <= level * 1.2
    assert errors.note(1e9, 1.0) == ERROR_MAX


def test_a_quote_says_three_bits_behind_the_leading_one() -> None:
    for value in (0, 1, 7, 15, 16, 17, 1000, 123_456_789, MOST - 1, MOST, MOST * 10):
        told = coarse(value, MOST)
        assert told <= MOST
        assert value <= told <= value * 1.125 + 1 or told == MOST
        assert told == MOST or told.bit_length() <= 4 or told % (1 << (told.bit_length() - 4)) == 0
    rising = [coarse(value, MOST) for value in range(0, 100_000, 7)]
    assert rising == sorted(rising)
    assert len(set(rising)) < 130, "no more steps than that"


# On the wire --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "times",
    [(2, 1, 2, 3, 4), (1, 5, 1, 4, 6), (1, 1, 5, 4, 6), (1, 1, 1, 3, 2), (5, 6, 4, 7, 8),
     (0, 0, 0, 0, MOST + 1)],
)  # fmt: skip
def test_times_out_of_order_are_refused(times: tuple[int, ...]) -> None:
    assert Quoted.decode(Quoted(8, 8, 1, 2, 1, 3, 4, bytes((Tier.FLASH,))).encode()).flash_ns == 1
    with pytest.raises(ProtocolError, match="order"):
        Quoted.decode(Quoted(8, 8, *times, bytes((Tier.FLASH,))).encode())
    with pytest.raises(ProtocolError, match="tier"):
        Quoted.decode(Quoted(0, 0, 0, 0, 0, 0, 0, bytes((0, 1, 2, 3))).encode())
    with pytest.raises(ProtocolError, match="come from flash"):
        Quoted.decode(Quoted(8, 9, 0, 0, 0, 0, 0, b"").encode())
