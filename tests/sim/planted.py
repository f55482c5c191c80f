"""Bugs that can be planted into the product, one line each, to see that the simulation finds them.

`ENTRESOL_SIM_PLANT=name` plants one for a whole run of the line; `planted(name)` for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from entresol_client.breaker import Breaker
from entresol_daemon.core.accounts import PutBudget
from entresol_daemon.core.leases import LeaseTable
from entresol_daemon.events.log import EventLog
from entresol_daemon.flash.engine import Engine
from entresol_daemon.shard.puts import PutPath
from entresol_proto.seal import block, codecs
from entresol_proto.seal.keys import Salts
from entresol_proto.status import Status

PLANT_ENV = "ENTRESOL_SIM_PLANT"
_NONCE = struct.Struct("<IBB6x")
_TAG_BYTES = 16


def _unverified(aead: Any, header: Any, index: int, stored: memoryview, into: memoryview) -> None:
    """What GCM decrypts to, whatever its tag says: AES-CTR from its second counter."""
    nonce = _NONCE.pack(index, 0, index == len(header.chunk_stored_bytes) - 1)
    cipher = Cipher(algorithms.AES(aead.key), modes.CTR(nonce + b"\0\0\0\2"))
    raw = cipher.decryptor().update(bytes(stored[:-_TAG_BYTES]))
    if len(raw) == len(into):
        into[:] = raw
    else:
        codecs.get(header.codec_id).decode_into(memoryview(raw), into, header.dtype)


async def _acknowledged(_self: Any, *_what: Any) -> Status:
    await asyncio.sleep(0)
    return Status.OK


def _short_lease(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, session, number, what, _expires_ns: real(self, session, number, what, 0)


async def _no_barrier(_self: Any) -> None:
    await asyncio.sleep(0)


# name: (what is wrong then, where, the attribute, what it becomes)
PLANTS: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {
    "tag": ("blocks are opened without checking the tag", block, "_open_chunk",
            lambda _real: _unverified),
    "ack": ("a put is acknowledged as durable before the flush", PutPath, "_await_durable",
            lambda _real: _acknowledged),
    "reuse": ("memory is reused before its lease ends", LeaseTable, "grant", _short_lease),
    "forget": ("a forget is acknowledged before its tombstone is flushed", Engine, "barrier",
               lambda _real: _no_barrier),
    "leak": ("a put that is given up keeps its budget", PutBudget, "refund",
             lambda _real: lambda _self, _account, _length: None),
    "events": ("every event of a kind gets lost", EventLog, "publish",
               lambda real: lambda self, kind, tenant, **rest: (
                   None if kind.ends_blocks else real(self, kind, tenant, **rest))),
    "breaker": ("an open breaker stays open whatever answers", Breaker, "success",
                lambda _real: lambda _self: None),
    "salt": ("every block is sealed under one salt", Salts, "new",
             lambda _real: lambda _self: bytes(32)),
}  # fmt: skip


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug is there until the end; no bug for an empty name."""
    if not name:
        yield
        return
    _, where, attribute, bent = PLANTS[name]
    real = getattr(where, attribute)
    setattr(where, attribute, bent(real))
    try:
        yield
    finally:
        setattr(where, attribute, real)
