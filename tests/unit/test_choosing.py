"""The codec of a namespace: constants first, then what its blocks became; no flapping, bounded."""

from __future__ import annotations

import pytest

from entresol_daemon.shard import choosing
from entresol_daemon.shard.choosing import CodecChooser
from entresol_proto import native
from entresol_proto.seal import codecs
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import ConfigError

SPACE, OTHER = b"a" * 16, b"b" * 16
MIB = 1024 * 1024

pytestmark = pytest.mark.skipif(
    native.KERNEL is None, reason="not run here: the package was built without a C compiler"
)


def chooser(link_bytes_per_s: int = 1_000_000_000, policy: str = "auto") -> CodecChooser:
    return CodecChooser(policy=policy, link_bytes_per_s=link_bytes_per_s)


def choose(of: CodecChooser, namespace_id: bytes = SPACE, *, threads: int = 4) -> int:
    return of.choose(namespace_id, DType.BF16, same_host=False, open_threads=threads)


def store(of: CodecChooser, codec_id: int, ratio: float, plain_bytes: int = 8 * MIB) -> None:
    of.learn(SPACE, DType.BF16, codec_id, plain_bytes, int(plain_bytes / ratio))


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
    same = chooser().choose(SPACE, DType.BF16, same_host=True, open_threads=4)
    assert same == codecs.RAW


def test_a_policy_decides_alone() -> None:
    of = chooser(policy="fast")
    store(of, codecs.FAST, 0.99)
    assert choose(of) == codecs.FAST
    with pytest.raises(ConfigError):
        choose(chooser(policy="best"))


def test_places_are_bounded_and_the_oldest_go() -> None:
    of = chooser()
    store(of, codecs.DENSE, 1.0)
    for number in range(choosing.PLACES_MAX):
        choose(of, number.to_bytes(16, "big"))
    assert len(of._places) == choosing.PLACES_MAX
    assert choose(of) == codecs.DENSE  # what was learned of it is gone


def test_old_blocks_count_less_and_less() -> None:
    of = chooser()
    for _ in range(300):
        store(of, codecs.DENSE, 1.0, 64 * MIB)
    for _ in range(300):
        store(of, codecs.DENSE, 1.5, 64 * MIB)
    assert choose(of) == codecs.DENSE
