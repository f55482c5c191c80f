"""The engine's vocabulary: what callers give it and get from it. Data only.

Invariant: everything here is opaque about tenants and policy. A stream is 16 bytes that share
segments, a namespace id is 16 bytes, a reason is one of a few words.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN
from entresol_proto.status import ConfigError

APPEND_TRIES_MAX = 3  # groups a record may fail in before its future says IO_ERROR
GROUP_FAILURES_MAX = 5  # consecutive failed groups after which the engine pauses writing
GROUP_BYTES_MAX = 64 << 20  # one group writes at most about this much
GROUP_RECORDS_MAX = 2_048  # and so many records, each of which costs some microseconds of the loop
SHARED_GROUP_BYTES_MIN = 1 << 19  # while several streams write, a group is as long as is written
SHARED_GROUP_BYTES_MAX = 16 << 20  # in SHARED_GROUP_S, within these bounds,
SHARED_GROUP_RECORDS_MAX = 128  # and no more than so many records
SHARED_GROUP_S = 0.0025  # or as long as a flush takes, if that is longer
SHARED_FOR_S = 0.5  # so long after records of two streams came
HURRY_S = 0.001  # others may join a group that somebody waits for, and has nothing to add to
TOMBSTONE_RECORDS_PER_GROUP_MAX = 64
EVICT_TRIES_MAX = 8  # then a segment is freed although not all it held could be carried on
UNREAD_KEEP_NS = 24 * 3_600_000_000_000  # what an opening could not read is freed last
EVICT_REST_NS = 250_000_000  # after a first refused read, then doubled: half a minute in all
COPY_BYTES_MAX = 16 << 20  # memory that eviction uses to copy kept blocks
DROP_BLOCKS_AT_ONCE = 32  # of a namespace that is dropped, between two chances for others to run
RECOVERY_BATCH_BYTES = 16 << 20  # memory that recovery reads into, besides one segment


class RemoveReason(enum.StrEnum):
    """Why a block is gone."""

    FORGOTTEN = "forgotten"
    NAMESPACE_DROPPED = "namespace_dropped"
    UNREADABLE = "unreadable"  # nobody can open it any more, says the caller
    EVICTED = "evicted"
    CORRUPT = "corrupt"
    IO_ERROR = "io_error"
    NO_SPACE = "no_space"


class SegmentState(enum.Enum):
    """Life of a segment. FREEING: evicted, its FREE header is not durable yet."""

    FREE = "free"
    OPEN = "open"
    SEALED = "sealed"
    CONDEMNED = "condemned"
    FREEING = "freeing"


@dataclass(slots=True)
class Record:
    """One block to append.

    `extent` is writable, starts at a 4 KiB boundary and is `segment.extent_bytes(sealed_bytes)`
    long: RECORD_HEADER_BYTES for the engine, the sealed bytes, zeros. It belongs to the caller and
    stays alive and unchanged until the append's future is done; the engine writes its header into
    it and wipes it again.
    """

    namespace_id: bytes
    wire_key: bytes
    extent: memoryview
    sealed_bytes: int
    plain_bytes: int
    position: int
    payload_hash: int | None = None  # of the sealed bytes (`segment.sealed_hash`); None: not known


@dataclass(frozen=True, slots=True)
class Removed:
    """A block that was in `slot` and is not any more."""

    namespace_id: bytes
    wire_key: bytes
    slot: int
    reason: RemoveReason
    extent_bytes: int  # what its record took on flash
    stream: bytes  # whose segment it was in


RemovedHook = Callable[[Sequence[Removed]], None]


def ignore_removed(_removed: Sequence[Removed]) -> None:
    """The hook of an engine nobody listens to."""


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment as policies see it. Touches are ticks of the index (larger is later).

    `oldest_touch` is a lower bound of the least recent touch of its live blocks, refreshed a few
    segments at a time by `Engine.segments`. `live_bytes` counts extents; `used_bytes` is how far it
    is written, with what died since and the removals in it.
    """

    segment: int
    stream: bytes
    sequence: int
    state: SegmentState
    blocks: int  # appended, dead or alive
    live_blocks: int
    live_bytes: int
    last_touch: int
    oldest_touch: int
    used_bytes: int = 0
    unread: bool = False  # condemned, and another opening may find more in it


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes and limits. Raises ConfigError where they contradict each other."""

    segment_bytes: int = 64 << 20  # of a new data file; an existing one keeps its own
    blocks_max: int = 65_536  # the index never holds more
    group_commit_bytes: int = 8 << 20  # appended bytes that start a group at once
    group_commit_ns: int = 5_000_000  # longest wait of an append for its group
    open_segments_max: int = 64  # streams written at a time; more close each other's segments
    free_segments_min: int = 2  # kept for the engine's own copies and tombstones
    verify_reads: bool = True  # hash payloads; headers are always checked
    checkpoint_path: Path | None = None  # index checkpoint of a clean close
    may_format: bool = True  # False: a blank device is refused

    def __post_init__(self) -> None:
        if not SEGMENT_BYTES_MIN <= self.segment_bytes <= SEGMENT_BYTES_MAX:
            raise ConfigError(
                f"segment_bytes is {self.segment_bytes}",
                hint=f"use {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}",
            )
        if self.segment_bytes % BLOCK:
            raise ConfigError(f"segment_bytes is {self.segment_bytes}, not a multiple of {BLOCK}")
        if self.blocks_max < 1 or self.open_segments_max < 1 or self.free_segments_min < 1:
            raise ConfigError("blocks_max, open_segments_max and free_segments_min start at 1")
        if self.group_commit_bytes < BLOCK or self.group_commit_ns < 0:
            raise ConfigError(f"group_commit_bytes starts at {BLOCK}, group_commit_ns at 0")


@dataclass(slots=True)
class EngineStats:
    """Counters since opening; they only grow."""

    appends: int = 0
    appended_bytes: int = 0  # extents given by callers
    append_failures: int = 0  # futures that ended in anything but OK
    reads: int = 0
    read_bytes: int = 0
    read_retries: int = 0  # read again because the first answer did not verify
    corrupt_reads: int = 0
    io_error_reads: int = 0
    groups: int = 0
    flushes: int = 0
    refused_reads: int = 0  # by the device: transfers, however often each is asked again
    refused_writes: int = 0  # by the device: batches
    refused_flushes: int = 0  # by the device
    failed_groups: int = 0
    condemned: int = 0  # segments
    written_bytes: int = 0  # everything that the device took, what opening writes included
    tombstones: int = 0
    tombstones_carried: int = 0
    tombstones_lost: int = 0  # unreadable when their segment was freed
    unread_freed: int = 0  # segments that the opening could not read, and no later one ever will
    evicted_segments: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    copied_bytes: int = 0
    opened_segments: int = 0
    sealed_segments: int = 0


class RecoveryKind(enum.StrEnum):
    """Which way the index was found at opening."""

    FORMATTED = "formatted"
    CHECKPOINT = "checkpoint"
    FOOTERS = "footers"


@dataclass(slots=True)
class RecoveryReport:
    """What opening found. `elapsed_ns` is by the engine's clock."""

    kind: RecoveryKind = RecoveryKind.FORMATTED
    segments: int = 0
    segments_from_footer: int = 0
    segments_scanned: int = 0
    segments_damaged: int = 0  # no usable header and trailer: their blocks are gone
    segments_unreadable: int = 0  # the device refused; not touched until evicted
    blocks: int = 0
    blocks_dropped: int = 0  # more than blocks_max: the oldest were left out
    duplicates: int = 0  # older copies that lost against newer ones
    tombstones: int = 0
    records_damaged: int = 0
    tombstones_lost: int = 0  # records of removals that cannot be read
    superblock_copies: int = 2
    checkpoint_refused: str = ""  # why a checkpoint was not used, empty when it was or none is set
    elapsed_ns: int = 0


RandomBytes = Callable[[int], bytes]
default_random_bytes: RandomBytes = os.urandom
