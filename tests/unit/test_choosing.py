"""The codec of a namespace: constants first, then what its blocks became; no flapping, bounded."""

from __future__ import annotations

import pytest

from entresol_daemon.logs import FloodFilter
from entresol_daemon.shard import choosing, pressure
from entresol_daemon.shard.choosing import Choice, CodecChooser, decide
from entresol_daemon.shard.pressure import Pressure, Waiting
from entresol_proto import native
from entresol_proto.seal import codecs
from entresol_proto.seal.dtypes import DType
from entresol_proto.seal.meter import Load, PlainRate, plain_rates
from entresol_proto.status import ConfigError

ALPHA, BETA = "alpha", "beta"
SPACE, OTHER = b"a" * 16, b"b" * 16
MIB = 1024 * 1024

pytestmark = pytest.mark.skipif(
    native.KERNEL is None, reason="not run here: the package was built without a C compiler"
)


def chooser(link_bytes_per_s: int = 1_000_000_000, policy: str = "auto") -> CodecChooser:
    return CodecChooser(policy=policy, link_bytes_per_s=link_bytes_per_s)


def choose(
    of: CodecChooser, namespace_id: bytes = SPACE, *, threads: int = 4, tenant: str = ALPHA
) -> int:
    return of.choose(
        tenant, namespace_id, DType.BF16, same_host=False, open_threads=threads
    ).codec_id


def store(
    of: CodecChooser,
    codec_id: int,
    ratio: float,
    plain_bytes: int = 8 * MIB,
    *,
    tenant: str = ALPHA,
    namespace_id: bytes = SPACE,
) -> None:
    choice = Choice(codec_id, "link")
    of.learn(tenant, namespace_id, DType.BF16, choice, plain_bytes, int(plain_bytes / ratio))


def test_constants_decide_until_enough_was_stored() -> None:
    of = chooser()
    assert choose(of) == codecs.DENSE
    store(of, codecs.DENSE, 1.0, choosing.LEARN_BYTES_MIN - 1)
    assert choose(of) == codecs.DENSE
    store(of, codecs.DENSE, 1.0, 8 * MIB)
    assert choose(of) == codecs.FAST
    store(of, codecs.FAST, 1.0)
    assert choose(of) == codecs.RAW  # nothing shrinks here
    assert choose(of, OTHER) == codecs.DENSE  # another namespace is another matter


def test_a_small_difference_changes_nothing() -> None:
    of = chooser()
    assert choose(of) == codecs.DENSE
    store(of, codecs.DENSE, 1.43)  # a little less than `fast` promises
    assert choose(of) == codecs.DENSE
    store(of, codecs.DENSE, 1.2, 900 * MIB)
    assert choose(of) == codecs.FAST


def test_what_was_learned_is_forgotten_after_a_while() -> None:
    of = chooser()
    store(of, codecs.DENSE, 1.0)
    store(of, codecs.FAST, 1.0)
    found = [choose(of) for _ in range(choosing.RETRY_CHOICES + 1)]
    assert set(found[:-2]) == {codecs.RAW}
    assert found[-1] == codecs.DENSE


def test_a_fast_link_or_few_cores_take_less_of_a_codec() -> None:
    assert choose(chooser(25_000_000_000), threads=2) == codecs.RAW
    assert choose(chooser(5_000_000_000), threads=3) == codecs.FAST
    assert choose(chooser(5_000_000_000), threads=32) == codecs.DENSE


def test_on_one_host_the_link_is_nothing_and_the_rest_counts() -> None:
    def choose_here(of: CodecChooser) -> int:
        choice = of.choose(ALPHA, SPACE, DType.BF16, same_host=True, open_threads=4)
        return choice.codec_id

    assert choose_here(chooser(1_000_000)) == codecs.RAW
    reads, full = chooser(), chooser()
    for _ in range(200):
        short = Waiting(flash_reads=True)
        reads.pressure.sample(short, read_bytes_per_s=2 * GB, write_bytes_per_s=0)
        full.pressure.sample(Waiting(room=True), read_bytes_per_s=0, write_bytes_per_s=0)
    assert choose_here(reads) == codecs.DENSE
    assert choose_here(full) == codecs.FAST


def test_a_policy_decides_alone() -> None:
    of = chooser(policy="fast")
    store(of, codecs.FAST, 0.99)
    assert choose(of) == codecs.FAST
    with pytest.raises(ConfigError):
        choose(chooser(policy="best"))


def spaces(count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(count)]


def test_places_are_bounded_and_the_oldest_go() -> None:
    of = chooser()
    store(of, codecs.DENSE, 1.0)
    for space in spaces(choosing.PLACES_MAX):
        store(of, codecs.DENSE, 1.5, namespace_id=space)
    assert len(of._places) == len(of.latest(ALPHA)) == choosing.PLACES_MAX
    assert choose(of) == codecs.DENSE  # what was learned of it is gone
    assert SPACE not in of.latest(ALPHA)


def test_who_only_asks_leaves_no_trace() -> None:
    of = chooser()
    for space in spaces(100):
        choose(of, space)
    assert len(of._places) == 0
    store(of, codecs.DENSE, 1.5)
    assert of.latest(ALPHA) == {SPACE: Choice(codecs.DENSE, "link")}
    assert of.latest(BETA) == {}


def test_a_tenant_with_many_namespaces_costs_another_nothing() -> None:
    """Whatever alpha opens and stores, beta's sessions choose by what beta's blocks became."""
    of = chooser()
    store(of, codecs.DENSE, 1.0, tenant=BETA, namespace_id=OTHER)
    for space in spaces(3 * choosing.PLACES_MAX):
        choose(of, space)
        store(of, codecs.DENSE, 1.5, namespace_id=space)
    assert len(of._places) == choosing.PLACES_MAX
    assert choose(of, OTHER, tenant=BETA) == codecs.FAST
    assert of.latest(BETA) == {OTHER: Choice(codecs.FAST, "link")}
    of.forget(ALPHA)  # erased
    assert (len(of._places), of.latest(ALPHA)) == (1, {})


def test_old_blocks_count_less_and_less() -> None:
    of = chooser()
    for _ in range(300):
        store(of, codecs.DENSE, 1.0, 64 * MIB)
    for _ in range(300):
        store(of, codecs.DENSE, 1.5, 64 * MIB)
    assert choose(of) == codecs.DENSE


GB = 1_000_000_000
LINK, CORES = 25 * GB, 4  # where raw is best while nothing else is short

# (link, reader's cores, what is short) -> codec, and what bounds it
SITUATIONS = [
    (LINK, CORES, Load(), "raw", "opening"),
    (100 * GB, 64, Load(), "fast", "link"),
    (10 * GB, CORES, Load(), "fast", "opening"),
    (1 * GB, CORES, Load(), "dense", "link"),
    (LINK, CORES, Load(flash_read_bytes_per_s=2.5 * GB), "dense", "flash reads"),
    (LINK, CORES, Load(flash_read_bytes_per_s=8 * GB), "fast", "flash reads"),
    (LINK, CORES, Load(flash_write_bytes_per_s=2.0 * GB), "dense", "flash writes"),
    (LINK, CORES, Load(flash_write_bytes_per_s=2.0 * GB, seal_threads=4), "fast", "flash writes"),
    (1 * GB, CORES, Load(seal_threads=1), "fast", "link"),
    (1 * GB, CORES, Load(seal_threads=4), "dense", "link"),
    (LINK, CORES, Load(seal_threads=2), "raw", "sealing"),
    (LINK, CORES, Load(full=True), "fast", "opening"),
    (1 * GB, CORES, Load(full=True), "dense", "link"),
    (LINK, CORES, Load(seal_threads=1, full=True), "fast", "sealing"),
]


@pytest.mark.parametrize(("link", "cores", "load", "codec", "bound"), SITUATIONS)
def test_what_is_short_decides(link: int, cores: int, load: Load, codec: str, bound: str) -> None:
    found = plain_rates(link_bytes_per_s=link, open_threads=cores, dtype=DType.BF16, load=load)
    decided = decide(found, None, full=load.full)
    assert (codecs.get(decided).name, found[decided].bound) == (codec, bound)
    assert decide(found, decided, full=load.full) == decided  # it stays


def rates(**plain_per_s: float) -> dict[int, PlainRate]:
    ratios = {"raw": 1.0, "fast": 1.43, "dense": 1.5}
    return {
        codecs.by_name(name).codec_id: PlainRate(speed, ratios[name], "link")
        for name, speed in plain_per_s.items()
    }


def test_a_decision_holds_until_another_is_clearly_better() -> None:
    for kept, speeds, expected in (
        (codecs.RAW, {"raw": 100, "fast": 109, "dense": 50}, codecs.FAST),  # it saves as well
        (codecs.FAST, {"raw": 109, "fast": 100, "dense": 50}, codecs.FAST),
        (codecs.FAST, {"raw": 111, "fast": 100, "dense": 50}, codecs.RAW),
        (codecs.FAST, {"raw": 50, "fast": 100, "dense": 109}, codecs.FAST),
        (codecs.DENSE, {"raw": 50, "fast": 109, "dense": 100}, codecs.DENSE),
        (codecs.DENSE, {"raw": 50, "fast": 111, "dense": 100}, codecs.FAST),
    ):
        assert decide(rates(**speeds), kept, full=False) == expected, (kept, speeds)


def test_measured_sealing_speeds_count_once_there_is_enough() -> None:
    of = chooser(1 * GB)
    of.pressure = Pressure(4)
    for _ in range(100):
        of.pressure.sample(Waiting(sealing=True), read_bytes_per_s=GB, write_bytes_per_s=GB)
    assert choose(of) == codecs.DENSE
    seconds = 1_000_000_000
    place, dense = (ALPHA, SPACE, DType.BF16), codecs.DENSE
    of.sealed(*place, dense, dense, choosing.LEARN_BYTES_MIN - 1, seconds)
    assert choose(of) == codecs.DENSE
    of.sealed(*place, dense, codecs.RAW, 100 * MIB, 60 * seconds)  # bypassed
    assert choose(of) == codecs.DENSE
    of.sealed(*place, dense, dense, 100 * MIB, 5 * seconds)
    assert choose(of) == codecs.FAST  # 20 MB/s from one thread: this machine is not that one


def test_a_burst_is_not_short_and_a_pause_does_not_end_it() -> None:
    of = Pressure(2)

    def look(times: int, **waits: bool) -> Load:
        for _ in range(times):
            of.sample(Waiting(**waits), read_bytes_per_s=2.0 * GB, write_bytes_per_s=1.0 * GB)
        return of.load()

    assert look(10, sealing=True, flash_reads=True, flash_writes=True, room=True) == Load()
    assert look(100) == Load()
    busy = Load(2.0 * GB, 1.0 * GB, 2, True)
    assert look(100, sealing=True, flash_reads=True, flash_writes=True, room=True) == busy
    assert look(20) == busy
    assert look(20) == Load()
    assert 0 < pressure.SHORT_UNTIL < pressure.SHORT_FROM < 1


def test_a_changed_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    of = chooser()
    store(of, codecs.RAW, 1.0)
    with caplog.at_level("INFO", logger="entresol.codec"):
        for _ in range(5):
            choose(of)
    assert [record.getMessage() for record in caplog.records] == [
        "event=codec tenant=alpha namespace=61616161 dtype=bf16 codec=dense bound=link "
        "mib_per_s=1431 full=False"
    ]


def test_new_namespaces_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each line was of a kind of its own, so that none was ever held back."""
    of, held = chooser(), FloodFilter()
    with caplog.at_level("DEBUG", logger="entresol.codec"):
        for space in spaces(2_520):
            choose(of, space)
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]
    assert sum(map(held.filter, caplog.records)) < 300
