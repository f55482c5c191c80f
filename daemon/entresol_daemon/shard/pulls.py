"""The pieces of a put: a reservation, a block being pulled, a sealing job. Data and pure helpers.

Invariant: a `Sealing` is plain data, so that the thread that runs it touches no state of the shard.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from entresol_daemon.flash.segment import RECORD_HEADER_BYTES, sealed_hash
from entresol_daemon.memory.slabs import Extent
from entresol_daemon.shard.sessions import OpenedNamespace, Session
from entresol_proto import limits
from entresol_proto.fabric.base import MappedEndpoint, RemoteSpan
from entresol_proto.seal import codecs
from entresol_proto.seal.block import (
    BlockIdentity,
    BlockKey,
    BlockMeta,
    SealedHeader,
    check_header,
    seal_into,
)
from entresol_proto.seal.wiping import zero
from entresol_proto.status import SealError, Status
from entresol_proto.wire.data import Ack, PutItem

PUT_WINDOW_BYTES = 8 * limits.MIB  # read from a host, and sealed, in one turn
PUT_WINDOW_BLOCKS = 32  # of those


@dataclass(slots=True, eq=False)
class Reservation:
    """One wanted block between RESERVE and durability."""

    put_id: int
    session: Session
    namespace: OpenedNamespace
    item: PutItem
    ack: Ack
    deadline_ns: int
    record_bytes_max: int
    dek_version: int
    salt: bytes = field(repr=False)
    block_key: BlockKey | None = field(repr=False)  # None: only the tenant has it
    at_host: bool
    commit_by_ns: int
    appended: bool = False  # from here on the flush closes it
    closed: bool = False


@dataclass(slots=True, eq=False)
class Pull:
    """One reservation being read: its span, its memory, its outcome."""

    reservation: Reservation
    span: RemoteSpan
    place: int  # index in the COMMIT
    extent: Extent | None = None
    stays: bool = False  # the plaintext is sealed where it lies, in the host's memory
    in_place: memoryview | None = None  # there, while it is
    plain: Extent | None = None  # else where it lands
    header: SealedHeader | None = None
    codec_id: int = codecs.RAW  # to seal it with here
    sealed_bytes: int = 0
    payload_hash: int | None = None  # of the sealed bytes, where it is known
    wiped: bool = False  # no plaintext is left in `plain`
    entered_bytes: int = 0  # of its record, once that is in the index
    follows: bool = False  # another block of its name, which may still be on flash
    status: Status = Status.OK


@dataclass(slots=True)
class Sealing:
    """One block to seal off the loop: plain data, so that the thread touches no shard state.

    `wipe`: the plaintext is in memory of the shard. Otherwise it is the host's, who may write there
    meanwhile; so it is read once, which the raw codec does.
    """

    out: memoryview
    plain: memoryview
    wipe: bool
    identity: BlockIdentity
    block_key: BlockKey
    salt: bytes
    codec_id: int
    meta: BlockMeta
    chunk_bytes: int


def sealing(pull: Pull, chunk_bytes: int) -> Sealing:
    """The job of a block whose plaintext and record memory are there."""
    reservation, item = pull.reservation, pull.reservation.item
    assert pull.extent is not None
    if pull.in_place is not None:
        assert pull.codec_id == codecs.RAW, "other codecs look at a block more than once"
        plain = pull.in_place
    else:
        assert pull.plain is not None
        plain = pull.plain.view[: item.plain_bytes]
    assert reservation.block_key is not None, "the daemon seals no block of a host-sealed namespace"
    namespace = reservation.namespace
    meta = BlockMeta(
        parent=item.parent,
        position=item.position,
        block_tokens=namespace.block_tokens,
        token_ids_u32le=item.token_ids_u32le,
    )
    identity = BlockIdentity(
        namespace.namespace_id, item.key, item.engine_key, namespace.dtype,
        reservation.dek_version,
    )  # fmt: skip
    return Sealing(
        pull.extent.view[RECORD_HEADER_BYTES:], plain, pull.in_place is None, identity,
        reservation.block_key, reservation.salt,
        pull.codec_id, meta, chunk_bytes,
    )  # fmt: skip


@contextlib.contextmanager
def borrowed(session: Session, window: Sequence[Pull], now_ns: int) -> Iterator[None]:
    """The plaintext of these, in place. What the host took back meanwhile, by revoking or by
    leaving, is not kept: it may have written something else there."""
    if not window:
        yield
        return
    endpoint = cast(MappedEndpoint, session.data_path())
    lent = endpoint.borrow([pull.span for pull in window])
    try:
        for pull, view in zip(window, lent.views, strict=True):
            if isinstance(view, Status):
                pull.status = view
            elif now_ns >= pull.reservation.deadline_ns:
                pull.status = Status.DEADLINE
            else:
                pull.in_place = view
        yield
    finally:
        for pull in window:
            pull.in_place = None
        for pull, status in zip(window, lent.give_back(), strict=True):
            if pull.status is Status.OK:
                pull.status = status


def sealing_bytes(job: Sealing) -> int:
    """What a job costs."""
    return job.plain.nbytes


@dataclass(slots=True)
class Sealed:
    """What became of a `Sealing`."""

    header: SealedHeader
    payload_hash: int  # of the sealed bytes, for the record
    sealing_ns: int  # of the thread's time


def seal(job: Sealing) -> Sealed | None:
    """Seal one block, hash it while it is in the caches, and wipe its plaintext where it is
    the shard's. None when its fields do not fit a sealed block."""
    began_ns = time.thread_time_ns()
    try:
        header = seal_into(
            job.out, job.plain, identity=job.identity, block_key=job.block_key, salt=job.salt,
            codec_id=job.codec_id, meta=job.meta, chunk_bytes=job.chunk_bytes,
        )  # fmt: skip
        sealing_ns = time.thread_time_ns() - began_ns
        return Sealed(header, sealed_hash(job.out[: header.sealed_bytes]), sealing_ns)
    except SealError:
        return None
    finally:
        if job.wipe:
            zero(job.plain)


def check_sealed(pull: Pull) -> Status:
    """Every field of a header sealed at the host must be what the reservation says.

    In a host-sealed namespace salt, version and commitment are the tenant's own affair.
    """
    reservation, extent = pull.reservation, pull.extent
    assert extent is not None
    item, key = reservation.item, reservation.block_key
    sealed = extent.view[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + pull.sealed_bytes]
    try:
        header = SealedHeader.parse(sealed)
    except SealError:
        return Status.CORRUPT
    status = check_header(
        header,
        namespace_id=reservation.namespace.namespace_id,
        wire_key=item.key,
        plain_bytes=item.plain_bytes,
        commitment=None if key is None else key.commitment,
        engine_key=item.engine_key,
        host_sealed=key is None,
    )
    same = header.sealed_bytes == pull.sealed_bytes
    if key is not None:
        same &= header.salt == reservation.salt
        same &= header.dek_version == reservation.dek_version
    pull.header = header
    return status if same else Status.CORRUPT


def windows(pulls: Sequence[Pull]) -> list[list[Pull]]:
    """Runs of at most PUT_WINDOW_BYTES and PUT_WINDOW_BLOCKS (a longer block is its own run)."""
    windows: list[list[Pull]] = []
    size = 0
    for pull in pulls:
        if (
            not windows
            or size + pull.span.length_bytes > PUT_WINDOW_BYTES
            or len(windows[-1]) >= PUT_WINDOW_BLOCKS
        ):
            windows.append([])
            size = 0
        windows[-1].append(pull)
        size += pull.span.length_bytes
    return windows


def zero_tail(extent: Extent, used_bytes: int) -> None:
    rest = extent.length_bytes - used_bytes
    if rest:
        extent.view[used_bytes:] = bytes(rest)
