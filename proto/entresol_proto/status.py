"""One vocabulary for outcomes: on the wire, in metric labels, in exceptions.

Invariant: a `Status` has one number for ever (it is on the wire) and one lower-case label (it is in
metrics and docs). Everything that can go wrong with one block is a Status; everything that stops a
call is an `EntresolError` carrying one.
"""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """The outcome of one operation on one block, or of a whole request.

    Numbers are stable wire values (one byte). `label` is the stable text form.
    """

    OK = 0  # done; for a get: the bytes are exact and in place
    MISS = 1  # not stored here (or not for this namespace: the two are indistinguishable)
    GAP = 2  # prefix mode: an earlier key missed, this one was not tried
    EXISTS = 3  # put: already stored, no bytes were moved
    CORRUPT = 4  # stored bytes failed verification: counted, dropped, served as a miss
    DEADLINE = 5  # the caller's deadline passed first
    BUSY = 6  # shed: a bounded queue, lease table or memory budget is full right now
    QUOTA = 7  # the tenant's quota does not admit it
    TOO_LARGE = 8  # longer than the negotiated maximum
    BAD_REQUEST = 9  # malformed: wrong key length, impossible sizes, unknown handle
    FORBIDDEN = 10  # the identity may not do this
    UNSUPPORTED = 11  # this build, device or fabric cannot do it
    LEASE_EXPIRED = 12  # the lease ended before the read did
    LOCKED = 13  # no key-encryption key: the daemon can seal and open nothing
    DRAINING = 14  # the daemon is going away; ask another shard
    NO_SPACE = 15  # flash is full and nothing may be evicted
    IO_ERROR = 16  # the flash device failed
    FABRIC_ERROR = 17  # the data path failed: reset, retry exceeded, remote access
    DISCONNECTED = 18  # the session is gone
    BREAKER_OPEN = 19  # the client's breaker answered at once, nothing was sent
    CONFLICT = 20  # same wire key, another engine key: a collision, served as a miss
    ERASED = 21  # the tenant's keys were destroyed
    INTERNAL = 22  # a bug; the log has it
    NOT_ADMITTED = 23  # put: the admission policy spares the flash; not an error

    @property
    def label(self) -> str:
        """Lower-case text for metrics, logs and JSON."""
        return self.name.lower()

    @property
    def is_miss(self) -> bool:
        """True when a reader must treat the block as absent (everything except OK)."""
        return self is not Status.OK

    @property
    def is_failure(self) -> bool:
        """False for what says that all is well: OK, and EXISTS of a put."""
        return self is not Status.OK and self is not Status.EXISTS

    @property
    def as_failure(self) -> Status:
        """Why something failed: this, or INTERNAL where this says that nothing did."""
        return self if self.is_failure else Status.INTERNAL


class EntresolError(Exception):
    """Root of every exception this project raises on purpose.

    Attributes:
        status: the outcome, as on the wire.
        hint: what the reader can do about it; empty when there is nothing to do.
    """

    status: Status = Status.INTERNAL

    def __init__(self, message: str, *, hint: str = "", status: Status | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if status is not None:
            self.status = status

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text} ({self.hint})" if self.hint else text


class ProtocolError(EntresolError):
    """The peer broke the protocol; the session ends."""

    status = Status.BAD_REQUEST


class SealError(EntresolError):
    """A sealed block is malformed or fails authentication. Readers turn it into a miss."""

    status = Status.CORRUPT


class CodecError(SealError):
    """Authenticated bytes do not decode: written by a broken encoder."""


class FabricError(EntresolError):
    """A data path cannot be set up or has failed as a whole."""

    status = Status.FABRIC_ERROR


class ConfigError(EntresolError):
    """A setting is unknown, malformed or contradicts another; the daemon does not start."""

    status = Status.BAD_REQUEST


class KeyringError(EntresolError):
    """Keys are missing, of the wrong kind, or wrapped under another key-encryption key."""

    status = Status.LOCKED


class DeviceError(EntresolError):
    """The flash device refused or failed an operation."""

    status = Status.IO_ERROR


class FormatError(EntresolError):
    """A data file is not ours, is of another version, or is damaged beyond use."""

    status = Status.UNSUPPORTED


class QuotaError(EntresolError):
    """A tenant's quota or a named limit refuses the request."""

    status = Status.QUOTA
