"""Which trace a request's work at the daemon is in: a name that both sides derive alike.

The control frames carry no trace context. So the daemon's span of a request is the root of a trace
of its own, whose ids follow from the session's id and the request's number, which both sides know;
the host's span links to them. Pure.

Invariant: ids follow from nothing but these two, and are never zero, which OpenTelemetry reserves.
"""

from __future__ import annotations

import hashlib

_PERSON = b"entresol-trace-1"
_SAMPLE_BITS = 64


def ids_of(session_id: bytes, request_id: int) -> tuple[int, int]:
    """(trace id, span id) of the daemon's span of one request."""
    raw = hashlib.blake2b(
        session_id + request_id.to_bytes(4, "little"), digest_size=24, person=_PERSON
    ).digest()
    return int.from_bytes(raw[:16], "big") or 1, int.from_bytes(raw[16:], "big") or 1


def sampled(trace_id: int, ratio: float) -> bool:
    """Whether a trace is among the share `ratio` of all: by its lower half, as OpenTelemetry's
    TraceIdRatioBased does."""
    return trace_id & ((1 << _SAMPLE_BITS) - 1) < round(ratio * (1 << _SAMPLE_BITS))
