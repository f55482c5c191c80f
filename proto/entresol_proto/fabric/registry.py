"""Which fabric two peers use, and why: the one place that knows all of them.

Invariant: the order of preference is shm (same host), verbs, tcp; every decision carries the reason
that logs and `entresol doctor` show. A new fabric is one new module and one line in `_MODULES`; the
modules are imported when first used, because some (verbs) are not present everywhere.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from entresol_proto.fabric.base import ConnectOptions, Endpoint, FabricKind, Offer
from entresol_proto.status import FabricError, Status

if TYPE_CHECKING:
    import ssl as ssl_module

HOST_ID_BYTES = 16
# In order of preference. Each module has `async connect(offer, deadline_ns, options)`.
_MODULES = {
    FabricKind.SHM: "entresol_proto.fabric.shm",
    FabricKind.VERBS: "entresol_proto.fabric.verbs",
    FabricKind.TCP: "entresol_proto.fabric.tcp",
}
_WHY = {
    FabricKind.SHM: "same host: one copy or none",
    FabricKind.VERBS: "both sides have a device",
    FabricKind.TCP: "works everywhere",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One offer's place in the order: usable ones first, each with its reason."""

    offer: Offer
    usable: bool
    reason: str


def rank(
    offers: Sequence[Offer],
    *,
    same_host: bool,
    prefer: str | None = None,
    unusable: Mapping[FabricKind, str] | None = None,
) -> list[Choice]:
    """Every offer with its verdict, best first; unusable ones at the end.

    `prefer` is a fabric's label and comes first if usable; the others stay as what to fall back to.
    `unusable` gives the fabrics this side cannot do, with the reason (no device, no pyverbs).
    Raises: FabricError when `prefer` names no fabric.
    """
    wanted = None if prefer is None else parse_kind(prefer)
    order = list(_MODULES)
    choices = []
    for offer in offers:
        reason = (unusable or {}).get(offer.kind)
        if reason is None and offer.kind is FabricKind.SHM and not same_host:
            reason = "the peer is on another host (or in another container)"
        if reason is not None:
            choices.append(Choice(offer, False, reason))
        else:
            why = "chosen by setting" if offer.kind is wanted else _WHY[offer.kind]
            choices.append(Choice(offer, True, why))
    return sorted(
        choices,
        key=lambda c: (not c.usable, c.offer.kind is not wanted, order.index(c.offer.kind)),
    )


def choose(offers: Sequence[Offer], *, same_host: bool, prefer: str | None = None) -> list[Offer]:
    """The usable offers, best first: try them in order until one connects."""
    return [c.offer for c in rank(offers, same_host=same_host, prefer=prefer) if c.usable]


def parse_kind(label: str) -> FabricKind:
    """The fabric a setting names. Raises: FabricError with the known ones as hint."""
    for kind in _MODULES:
        if kind.label == label:
            return kind
    known = ", ".join(kind.label for kind in _MODULES)
    raise FabricError(
        f"no fabric is called {label!r}", hint=f"use one of {known}", status=Status.BAD_REQUEST
    )


async def connect(
    offer: Offer,
    deadline_ns: int,
    *,
    ssl: ssl_module.SSLContext | None = None,
    options: ConnectOptions | None = None,
) -> tuple[Endpoint, bytes]:
    """Take an offer: the host's endpoint, and the reply to send back over the control stream.

    `ssl` is short for `ConnectOptions(ssl=...)`: required when the offer asks for TLS.
    Raises: FabricError (status DEADLINE after `deadline_ns`, UNSUPPORTED when this build lacks the
    fabric); nothing stays open then.
    """
    options = options or ConnectOptions(ssl=ssl)
    try:
        module = importlib.import_module(_MODULES[offer.kind])
    except ImportError as error:
        raise FabricError(
            f"fabric {offer.kind.label} is not in this build: {error}", status=Status.UNSUPPORTED
        ) from None
    endpoint: Endpoint
    endpoint, reply = await module.connect(offer, deadline_ns, options)
    return endpoint, reply


def same_host_id() -> bytes:
    """16 bytes that two processes share only if they may be able to share memory.

    A digest of the boot id and the network namespace. The mount namespace is left out on purpose:
    every hardened systemd service has its own and still shares /run with its clients. Equal ids are
    a hint, not a proof: where the socket cannot be reached, the next offer is tried. Random when
    the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        net = os.stat("/proc/self/ns/net")
    except OSError:
        return secrets.token_bytes(HOST_ID_BYTES)
    text = boot + b"|%d:%d" % (net.st_dev, net.st_ino)
    return hashlib.blake2b(text, digest_size=HOST_ID_BYTES, person=b"entresol-host").digest()
