"""What of a get has landed, and how much of it one grant takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from entresol_daemon.shard.jobs import Job
from entresol_proto.wire.data import OpenAt


def landed(*windows: list[tuple[int, int]]) -> Job:
    """A job with these windows, as (record, plaintext) lengths of their blocks."""
    session: Any = None
    job = Job(session, session, OpenAt.HOST, b"", 0, 0, lambda _: None, owed=len(windows))
    for number, window in enumerate(windows):
        blocks: list[Any] = [
            SimpleNamespace(extent=SimpleNamespace(length_bytes=record), plain_bytes=plain)
            for record, plain in window
        ]
        job.landed.append([(number, block) for block in blocks])
    return job


def taken(job: Job, *, blocks_max: int = 100, bytes_max: int = 100) -> list[int]:
    """The windows that are granted together."""
    return sorted({number for number, _ in job.take_landed(blocks_max, bytes_max)})


@pytest.mark.parametrize("block", [(20, 10), (10, 20)])
def test_the_longer_of_record_and_plaintext_counts(block: tuple[int, int]) -> None:
    job = landed([block] * 2, [block] * 2, [block] * 2)
    assert taken(job, bytes_max=80) == [0, 1]
    assert job.owed == 1
    assert taken(job, bytes_max=80) == [2]
    assert (job.owed, taken(job)) == (0, [])


def test_the_first_window_is_taken_whatever_its_length() -> None:
    job = landed([(10, 10)] * 20, [(10, 10)])
    assert taken(job, bytes_max=80) == [0]
    assert taken(job, bytes_max=80) == [1]


def test_so_many_blocks_at_the_most() -> None:
    job = landed([(1, 1)] * 3, [(1, 1)] * 3, [(1, 1)] * 3)
    assert taken(job, blocks_max=8) == [0, 1]
    assert taken(job, blocks_max=2) == [2]
