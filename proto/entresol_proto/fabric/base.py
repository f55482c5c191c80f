"""The fabric: how bytes move between a host and the daemon, and nothing else.

A fabric has two verbs. `expose` makes a local buffer readable by the one peer of this session;
`read` copies a peer's exposed bytes into local memory. There is no remote write: on a get the host
reads from the daemon, on a put the daemon reads from the host.

Both sides of a session hold one `Endpoint`. Endpoints are used from one event loop. Every
implementation (tcp, shm, verbs) passes tests/contract/test_fabric_contract.py unchanged.

Invariants an implementation owns:
- `read` never writes outside the destination views, whatever the peer sends.
- After `revoke(exposure)` returned, the peer's later reads of it fail with LEASE_EXPIRED or
  FABRIC_ERROR where the fabric can enforce it (`Capabilities.revokes`); where it cannot (shm), the
  reader checks its lease deadline after the copy, and the owner does not reuse plaintext memory
  for anyone else.
- A span outside its exposure fails with BAD_REQUEST; nothing is read.
- When the session is gone, pending reads finish with DISCONNECTED; no call hangs past its deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from entresol_proto.status import Status


class FabricKind(enum.IntEnum):
    """Wire numbers of the fabrics."""

    TCP = 1
    SHM = 2
    VERBS = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class RemoteSpan:
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


@dataclass(frozen=True, slots=True)
class ReadOp:
    """One item of a batched read. `into` is writable, contiguous, of `span.length_bytes` bytes,
    and stays owned by the caller, who must keep it alive and unread until the read returns."""

    span: RemoteSpan
    into: memoryview


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What callers may rely on, beyond the two verbs."""

    revokes: bool  # revoke() is enforced against the peer (tcp, verbs), not only by its honesty
    private: bool  # nobody but the two peers can see the bytes in flight (shm, verbs on its fabric)
    same_host: bool  # both ends run under one kernel: the link is memory
    maps: bool  # `map_span` gives a zero-copy view (shm)


@runtime_checkable
class SharedBuffer(Protocol):
    """Memory backed by a file descriptor, which shm can pass to the peer without a copy."""

    @property
    def fd(self) -> int: ...
    @property
    def view(self) -> memoryview: ...


class Endpoint(Protocol):
    """One side of one session's data path."""

    kind: FabricKind
    capabilities: Capabilities

    async def expose(self, buffer: memoryview | SharedBuffer) -> Exposure:
        """Let the peer read `buffer`, which must stay alive and mapped until revoked.

        Raises: FabricError when the fabric cannot register it (shm needs a SharedBuffer).
        """
        ...

    async def revoke(self, exposure: Exposure) -> None:
        """End an exposure. Idempotent. Ongoing reads of it finish or fail; new ones fail."""
        ...

    async def read(self, ops: Sequence[ReadOp], deadline_ns: int) -> list[Status]:
        """Copy every op's remote span into its view; statuses are in the order of `ops`.

        `deadline_ns` is on the monotonic clock (`time.monotonic_ns`). A failed op leaves its view's
        content undefined. Never raises for a peer's fault. After a deadline, no later byte lands in
        any of the views.
        """
        ...

    async def close(self) -> None:
        """Release everything; pending reads finish with DISCONNECTED. Idempotent."""
        ...
