"""The fabric: how bytes move between a host and the daemon, and nothing else.

A fabric has two verbs. `expose` makes a local buffer readable by the one peer of this session;
`read` copies a peer's exposed bytes into local memory. There is no remote write: on a get the host
reads from the daemon, on a put the daemon reads from the host.

Both sides of a session hold one `Endpoint`. Endpoints are used from one event loop. Every
implementation (tcp, shm, verbs) passes tests/contract/test_fabric_contract.py unchanged.

Set-up: the daemon makes an `Offer` (a one-time ticket and where to present it) and sends it inside
the authenticated control stream; the host answers with `registry.connect(offer)`, the daemon with
`FabricServer.accept(offer, reply)`. The two run in either order.

Invariants an implementation owns:
- `read` never writes outside the destination views, whatever the peer sends.
- After `revoke(exposure)` returned, the peer's later reads of it fail with LEASE_EXPIRED or
  FABRIC_ERROR where the fabric can enforce it (`Capabilities.revokes`); where it cannot (shm), the
  reader checks its lease deadline after the copy, and the owner does not reuse plaintext memory
  for anyone else.
- A span outside its exposure fails with BAD_REQUEST, as does an empty one; nothing is read. An
  rkey that is unknown or revoked fails with LEASE_EXPIRED.
- When the session is gone, pending reads finish with DISCONNECTED; no call hangs past its deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from entresol_proto import limits
from entresol_proto.status import FabricError, Status

if TYPE_CHECKING:
    import ssl as ssl_module


class FabricKind(enum.IntEnum):
    """Wire numbers of the fabrics."""

    TCP = 1
    SHM = 2
    VERBS = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class RemoteSpan(NamedTuple):  # one per block: a frozen dataclass takes three times as long
    """Peer memory: `length_bytes` at `address` inside what the peer exposed under `rkey`.

    For tcp and shm `address` is an offset into the exposure and `rkey` its number; for verbs they
    are the virtual address and the memory region's remote key.
    """

    rkey: int  # u32
    address: int  # u64
    length_bytes: int  # u32


@dataclass(frozen=True, slots=True)
class Exposure:
    """A local buffer that the peer may read until `revoke` or the end of the session."""

    rkey: int
    address: int  # of the first byte, in the peer's terms
    length_bytes: int

    def span(self, offset_bytes: int, length_bytes: int) -> RemoteSpan:
        """Name a part of the exposure for the peer. Raises: ValueError outside it."""
        if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > self.length_bytes:
            raise ValueError("span is outside its exposure")
        return RemoteSpan(self.rkey, self.address + offset_bytes, length_bytes)


# Not frozen, because one is made per block: a frozen one takes several times as long.
@dataclass(slots=True)
class ReadOp:
    """One item of a batched read. `into` is writable, contiguous, of `span.length_bytes` bytes,
    and stays owned by the caller, who must keep it alive and unread until the read returns."""

    span: RemoteSpan
    into: memoryview


def check_ops(ops: Sequence[ReadOp]) -> None:
    """The part of `Endpoint.read`'s contract that the caller owes. Raises: ValueError."""
    if len(ops) > limits.SPANS_PER_READ_MAX:
        raise ValueError(f"{len(ops)} spans in one read, {limits.SPANS_PER_READ_MAX} allowed")
    for op in ops:
        view = op.into
        if view.readonly or not view.c_contiguous or view.nbytes != op.span.length_bytes:
            raise ValueError("a read needs a writable, contiguous view of the span's length")


def may_be_span(span: RemoteSpan) -> bool:
    """Whether its numbers are such as go over a wire."""
    return 0 < span.length_bytes < 2**32 and 0 <= span.address < 2**63 and 0 <= span.rkey < 2**32


def span_error(span: RemoteSpan, length_bytes: int | None) -> Status:
    """How an exposure of `length_bytes` (None: there is none) at address 0 answers a span."""
    if length_bytes is None:
        return Status.LEASE_EXPIRED
    if not 0 < span.length_bytes <= length_bytes or span.address < 0:
        return Status.BAD_REQUEST
    return Status.OK if span.address + span.length_bytes <= length_bytes else Status.BAD_REQUEST


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What callers may rely on, beyond the two verbs. Ask here what an endpoint is, not by its
    class: to find that a protocol is met takes as long as reading a small block."""

    revokes: bool  # revoke() is enforced against the peer (tcp, verbs), not only by its honesty
    private: bool  # nobody but the two peers can see the bytes in flight (shm, verbs on its fabric)
    same_host: bool  # both ends run under one kernel: the link is memory
    maps: bool  # a `MappedEndpoint`: `map_span` gives a zero-copy view (shm)
    lands: bool = False  # a `landing.LandingEndpoint`: hands spans on as they land (tcp)
    registers: bool = False  # a `RegisteringEndpoint` (verbs)


@runtime_checkable
class SharedBuffer(Protocol):
    """Memory backed by a file descriptor, which shm can pass to the peer without a copy.

    `view` is the writable mapping of the file from its first byte; `fd` is a memfd that can no
    longer be written, shrunk or grown by whoever receives it (`memory.MemfdBuffer`).
    """

    @property
    def fd(self) -> int: ...
    @property
    def view(self) -> memoryview: ...


class Endpoint(Protocol):
    """One side of one session's data path."""

    kind: FabricKind
    capabilities: Capabilities

    @property
    def closed(self) -> bool:
        """True once the data path is gone, by `close` or because the peer went."""
        ...

    async def expose(self, buffer: memoryview | SharedBuffer) -> Exposure:
        """Let the peer read `buffer`, which must stay alive and mapped until revoked.

        Raises: FabricError when the fabric cannot register it (shm needs a SharedBuffer), status
        BUSY at REGIONS_PER_SESSION_MAX, DISCONNECTED when the peer is gone.
        """
        ...

    async def revoke(self, exposure: Exposure) -> None:
        """End an exposure. Idempotent. Ongoing reads of it finish or fail; new ones fail.

        Once it returned, the fabric holds no reference to the buffer: not one byte of what is
        written there afterwards reaches the peer (tcp waits for what is queued and ends the session
        if that takes longer than REVOKE_DEADLINE_NS). Where `capabilities.revokes` is false the
        peer was told to unmap and has done so if it is honest.
        """
        ...

    async def read(self, ops: Sequence[ReadOp], deadline_ns: int) -> list[Status]:
        """Copy every op's remote span into its view; statuses are in the order of `ops`.

        `deadline_ns` is on the monotonic clock (`time.monotonic_ns`). A failed op leaves its view's
        content undefined. Never raises for a peer's fault. Once it returned, or was cancelled, no
        later byte lands in any of the views.

        Raises: ValueError for ops that break the rules of `ReadOp` or exceed SPANS_PER_READ_MAX.
        """
        ...

    async def close(self) -> None:
        """Release everything; pending reads finish with DISCONNECTED. Idempotent."""
        ...


@runtime_checkable
class MappedEndpoint(Protocol):
    """An endpoint whose `capabilities.maps` is true (shm): peer memory can be seen in place."""

    def map_span(self, span: RemoteSpan) -> memoryview | Status:
        """A read-only view of the peer's bytes without a copy, or why there is none.

        The view stays mapped as long as it is referenced, whatever the peer or `close` does, but
        its content belongs to the peer: it may change at any time, so parse copies, authenticate
        what you use, and check the lease afterwards.
        """
        ...

    def borrow(self, spans: Sequence[RemoteSpan]) -> Borrowed:
        """As `read`, without the copy: what lies there is used in place, then given back.

        What `map_span` says of the content holds here, too.
        """
        ...


class Borrowed(Protocol):
    """Spans of the peer's memory in use in place."""

    @property
    def views(self) -> Sequence[memoryview | Status]:
        """Of each span a read-only view, which is no longer used after `give_back`; or a status."""
        ...

    def give_back(self) -> list[Status]:
        """End the use; a status per span, as a read of them would have answered at this moment."""
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """An invitation to one peer to open the data path, sent inside the control stream.

    `params` is opaque to everyone but the fabric and holds a secret one-time ticket: it is neither
    logged nor part of the repr.

    Raises: FabricError when `params` is longer than OFFER_PARAMS_BYTES_MAX.
    """

    kind: FabricKind
    params: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.params) > limits.OFFER_PARAMS_BYTES_MAX:
            raise FabricError(
                f"fabric offer of {len(self.params)} bytes", status=Status.BAD_REQUEST
            )


@dataclass(frozen=True, slots=True)
class VerbsSettings:
    """verbs: overrides of what is found by itself."""

    devices: tuple[str, ...] = ()  # "mlx5_0" or "mlx5_0:1" (port); empty: every usable port
    gid_index: int | None = None  # into every port's GID table
    mtu_bytes: int | None = None  # RDMA's: 256 to 4096


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """What the host's side may add to an offer. Every fabric takes what it needs."""

    ssl: ssl_module.SSLContext | None = (
        None  # tcp: the context of the control stream, for TLS offers
    )
    server_hostname: str | None = None  # tcp: the name to check, if the context checks names
    host: str | None = None  # tcp: where to connect when the offer names no address
    # tcp: a name's addresses, in the order to try them; raises OSError, ValueError.
    resolve: Callable[[str, int], Awaitable[Sequence[str]]] | None = None  # None: the loop asks
    mapped_bytes_max: int = limits.MAPPED_BYTES_PER_SESSION_MAX  # shm: peer memory to map
    verbs: VerbsSettings = VerbsSettings()


class Registration(Protocol):
    """Memory that was made ready for reads into it. Ends with `close` or its endpoint."""

    def close(self) -> None:
        """Give the memory back: nothing refers to it once reads into it are over. Idempotent."""
        ...


@runtime_checkable
class RegisteringEndpoint(Protocol):
    """An endpoint that reads faster into memory it was told about (verbs)."""

    def register(self, buffer: memoryview | SharedBuffer) -> Registration:
        """Name long-lived memory (an arena, a slab) that reads will land in.

        Reads into any part of it then need no set-up and no copy. The memory must stay mapped until
        the registration is closed. Pages are pinned when first used, not now.

        Raises: FabricError; status BUSY at VERBS_REGISTRATIONS_MAX, DISCONNECTED when closed.
        """
        ...


class FabricServer(Protocol):
    """The daemon's side of one fabric: makes offers and turns answered ones into endpoints."""

    kind: FabricKind

    async def start(self) -> None:
        """Open what peers connect to. Raises: FabricError with a hint."""
        ...

    def offer(self, *, peer: object | None = None) -> Offer:
        """A new offer with its own ticket, good for one endpoint and HANDSHAKE_DEADLINE_NS.

        `peer` is what the control stream knows of the peer (hashable): to shm whose share of its
        budget is used, to tcp whose turn it is to be served, and to the log its name.
        Raises: FabricError; status BUSY when OFFERS_OPEN_MAX offers are unanswered.
        """
        ...

    async def accept(self, offer: Offer, reply: bytes, deadline_ns: int) -> Endpoint:
        """The endpoint for an offer the peer took; may be called before or after the peer connects.

        `reply` is what the peer's `connect` returned (tcp, shm: empty). The offer is spent whatever
        the outcome. Raises: FabricError; status DEADLINE when the peer did not come.
        """
        ...

    def withdraw(self, offer: Offer) -> None:
        """Forget an offer; a peer that is connecting on it is cut off. Idempotent."""
        ...

    async def close(self) -> None:
        """Stop listening and close every endpoint this server made. Idempotent."""
        ...
