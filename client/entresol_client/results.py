"""What calls take and give: one vocabulary for the async client, the facade and the adapters.

Invariant: an outage never raises; it is a status per block. Every status but OK means for a reader:
treat the block as absent. Its buffer then holds what it held before, or zeros: never part of a
block, never unverified bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from entresol_proto.status import EntresolError, Status
from entresol_proto.wire.data import Reason, Tier
from entresol_proto.wire.opening import ErrorReply
from entresol_proto.wire.quote import Quoted

log = logging.getLogger("entresol.client")

OpenPlace = Literal["host", "daemon"]
AckLevel = Literal["accepted", "durable"]


def prefix_of(statuses: Sequence[Status]) -> int:
    """Number of leading OKs."""
    for count, status in enumerate(statuses):
        if status is not Status.OK:
            return count
    return len(statuses)


@dataclass(frozen=True, slots=True)
class GetResult:
    """Outcome of a get, in the order of its keys.

    Attributes:
        statuses: OK where the exact bytes are in the caller's buffer.
        tiers: where the daemon found each block (NONE for misses).
        prefix_blocks: leading blocks that are OK; what an engine may use. Blocks behind a gap can
            be OK too, when another shard had them or an earlier one failed while it was read: they
            are in place, only not part of the prefix.
        plain_bytes: bytes put into the caller's buffers.
        wire_bytes: bytes that crossed the fabric for them (sealed, when opened on the host).
    """

    statuses: list[Status]
    tiers: list[Tier]
    prefix_blocks: int
    plain_bytes: int
    wire_bytes: int

    @property
    def ok(self) -> bool:
        """True when every block is in place."""
        return self.prefix_blocks == len(self.statuses)


@dataclass(frozen=True, slots=True)
class PutBlock:
    """One block to store.

    `buffer` (see `buffers.as_view`; it is only read) must stay unchanged until the put returned.
    `position` is the block's index in its sequence, `parent_key` the engine key of the block before
    it (None at the root); routers need both, and the token ids, as many as the descriptor's
    `block_tokens`.
    """

    key: bytes
    buffer: Any = field(repr=False)
    position: int = 0
    parent_key: bytes | None = None
    token_ids: Sequence[int] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class PutResult:
    """Outcome of a put, in the order of its items.

    OK: stored by this put. EXISTS: was there already, no bytes moved; as good as OK.
    """

    statuses: list[Status]
    stored: int
    existed: int
    plain_bytes: int  # of the blocks that were stored
    wire_bytes: int  # bytes offered to the daemon for them

    @property
    def ok(self) -> bool:
        """True when every block is stored now."""
        return self.stored + self.existed == len(self.statuses)


@dataclass(frozen=True, slots=True)
class ExistsResult:
    """`present[i]` tells whether block i could be read now; `prefix_blocks` counts leading ones.

    `complete` is False when a shard did not answer: its blocks read as absent.
    """

    prefix_blocks: int
    present: list[bool]
    complete: bool = True


@dataclass(frozen=True, slots=True)
class QuoteResult:
    """How long a get of these keys would take as things are; it promises nothing.

    Attributes:
        prefix_blocks: leading blocks that would be granted.
        tiers: where each block would come from (NONE: it would miss).
        sealed_bytes: of the blocks that would be granted; what crosses the fabric.
        flash_bytes: of these, what has to be read from flash.
        wait_ns: until the first block in memory would be granted.
        memory_ns: until all that is in memory would be.
        flash_ns: until the first block from flash would be.
        expected_ns: until all would be; half of such gets take less. Reading them into the host
            and opening them comes on top of all these times.
        high_ns: what nine of ten such gets take at most.
        complete: False when a shard gave no quote (it is too old for it, absent or late): its
            blocks are NONE here, and nothing follows from that.
    """

    prefix_blocks: int
    tiers: list[Tier]
    sealed_bytes: int
    flash_bytes: int
    wait_ns: int
    memory_ns: int
    flash_ns: int
    expected_ns: int
    high_ns: int
    complete: bool = True

    def first(self, blocks: int) -> tuple[int, int]:
        """(nanoseconds, bytes) of the first so many of the blocks, in proportion."""
        here = [tier for tier in self.tiers if tier is not Tier.NONE]
        part = here[:blocks]
        if not part:
            return 0, 0
        memory, flash = part.count(Tier.MEMORY), part.count(Tier.FLASH)
        expected_ns = 0
        if memory:
            more_ns = self.memory_ns - self.wait_ns
            expected_ns = self.wait_ns + more_ns * memory // here.count(Tier.MEMORY)
        if flash:
            more_ns = self.expected_ns - self.flash_ns
            landed_ns = self.flash_ns + more_ns * flash // here.count(Tier.FLASH)
            expected_ns = max(expected_ns, landed_ns)
        if len(part) == len(here):
            expected_ns = self.expected_ns
        return expected_ns, self.sealed_bytes * len(part) // len(here)


def quote_of(tiers: list[Tier], replies: Sequence[Quoted], *, complete: bool) -> QuoteResult:
    """Of what the shards said: they serve at the same time, so the slowest counts."""
    gap = tiers.index(Tier.NONE) if Tier.NONE in tiers else len(tiers)

    def most(times: Iterable[int]) -> int:
        return max(times, default=0)

    return QuoteResult(
        gap, tiers, sum(each.sealed_bytes for each in replies),
        sum(each.flash_bytes for each in replies), most(each.wait_ns for each in replies),
        most(each.memory_ns for each in replies), most(each.flash_ns for each in replies),
        most(each.expected_ns for each in replies), most(each.high_ns for each in replies),
        complete=complete,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageResult:
    """OK per block that is, or is being brought, in memory and held there."""

    statuses: list[Status]
    prefix_blocks: int


@dataclass(frozen=True, slots=True)
class CountResult:
    """How many blocks a touch or forget found; `complete` is False when a shard did not answer."""

    count: int
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a key is or is not here. `when_unix_ns` is 0 when unknown.

    `status` is not OK when its shard could not be asked; `reason` is None then.
    """

    reason: Reason | None
    when_unix_ns: int
    shard: str
    status: Status = Status.OK


_NO_ANSWER = frozenset({Status.OK, Status.DISCONNECTED, Status.DEADLINE})


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What `doctor` shows of one shard."""

    name: str
    address: str
    connected: bool
    draining: bool
    breaker: str
    fabric: str  # label, "none" for control only, "" when not connected
    fabric_reason: str
    incarnation: int  # of the daemon's process; 0 when not connected
    tenant: str  # who the daemon takes us for
    rtt_ns: int | None  # of the latest ping
    last_error: str
    connects: int
    last_status: Status = Status.OK  # of that error; OK without one
    last_hint: str = ""  # what to do about it, where that is known
    block_bytes_max: int = 0  # what it takes; 0 when not connected

    @property
    def refused(self) -> bool:
        """True when a running shard said no, or is none of ours; False also when none answers."""
        return not self.connected and self.last_status not in _NO_ANSWER


class RequestFailedError(Exception):
    """Inside the client: a request got no answer of its kind. Never reaches the API's caller.

    Its status is a failure, whatever it was made with: it becomes the outcome of blocks.
    """

    def __init__(self, status: Status, message: str = "", *, hint: str = "") -> None:
        super().__init__(message or status.label)
        self.status = status.as_failure
        self.hint = hint  # the daemon's, or ours of what it did

    def anew(self) -> RequestFailedError:
        """The same, to be raised where this one is kept: with what it was raised through, and so
        in a cycle with whoever keeps it."""
        return RequestFailedError(self.status, str(self), hint=self.hint)


def cause_of(error: Exception, where: str) -> Status:
    """What became of blocks whose call ended so: a failure. A bug is logged, and costs the call."""
    if isinstance(error, (RequestFailedError, EntresolError)):
        return error.status.as_failure
    if isinstance(error, MemoryError):
        log.error("event=out_of_memory where=%s", where)
        return Status.BUSY
    log.error("event=bug where=%s", where, exc_info=error)
    return Status.INTERNAL


def refusal(reply: ErrorReply) -> RequestFailedError:
    """What the daemon answered."""
    return RequestFailedError(reply.status, reply.message, hint=reply.hint)
