"""What callers may pass, checked and turned into the protocol's own words.

Invariant: a wrong argument raises here, before anything is sent.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence, Sized
from dataclasses import replace
from types import NoneType
from typing import cast

import numpy as np

from entresol_client.buffers import UsageError
from entresol_client.results import PutBlock
from entresol_proto import limits
from entresol_proto.ids import (
    BadKeyError,
    EngineKey,
    NamespaceDescriptor,
    check_engine_key,
    pack_token_ids,
)
from entresol_proto.seal.dtypes import own_name
from entresol_proto.wire.data import Ack, OpenAt


def checked_descriptor(descriptor: NamespaceDescriptor) -> NamespaceDescriptor:
    """The descriptor with our own word for its dtype. Raises: UsageError."""
    if not isinstance(descriptor, NamespaceDescriptor):
        raise UsageError(
            f"a namespace is named by a NamespaceDescriptor, not by a {type(descriptor).__name__}",
            hint='client.namespace(NamespaceDescriptor(model="llama-3.1-8b"))',
        )
    try:
        dtype = own_name(descriptor.dtype)
    except BadKeyError as error:
        raise UsageError(Exception.__str__(error), hint=error.hint) from None
    return descriptor if dtype == descriptor.dtype else replace(descriptor, dtype=dtype)


def count_of(name: str, values: Sized) -> int:
    """How many there are. Raises: UsageError for what has no number or no order."""
    try:
        found = len(values)
    except TypeError:
        found = -1
    if found < 0 or isinstance(values, (set, frozenset)):
        raise UsageError(f"{name} is a {type(values).__name__}, not a sequence")
    return found


def engine_keys(keys: Sequence[bytes], count_max: int) -> list[EngineKey]:
    """The keys, at most so many. Raises: UsageError, BadKeyError."""
    if isinstance(keys, (bytes, bytearray, str)):
        raise UsageError("keys is one key, not a sequence of keys")
    if isinstance(keys, np.ndarray):  # numpy drops the zeros at a key's end: another key's name
        raise UsageError(
            "keys is a numpy array, not a sequence of bytes",
            hint="pass a list of bytes that were in none: it drops zeros at their ends",
        )
    if count_of("keys", keys) > count_max:
        raise UsageError(f"{len(keys)} keys in one call, at most {count_max}")
    if keys and set(map(type, keys)) == {bytes}:  # of thousands: what is common is quick
        lengths = set(map(len, keys))
        if (
            limits.ENGINE_KEY_BYTES_MIN
            <= min(lengths)
            <= max(lengths)
            <= limits.ENGINE_KEY_BYTES_MAX
        ):
            return cast(list[EngineKey], list(keys))
    for key in keys:
        if not isinstance(key, bytes) or isinstance(key, np.bytes_):  # as above
            raise UsageError(f"a key is {type(key).__name__}, not bytes")
    return [check_engine_key(key) for key in keys]


def check_items(items: Sequence[PutBlock]) -> list[PutBlock]:
    """The items, whatever becomes of the caller's list. Raises: UsageError unless every one is a
    PutBlock with a parent key that may be one."""
    if isinstance(items, PutBlock):
        raise UsageError("items is one PutBlock, not a sequence of them", hint="put([block])")
    count_of("items", items)
    for item in items:
        if not isinstance(item, PutBlock):
            raise UsageError(
                f"an item of a put is a {type(item).__name__}, not a PutBlock",
                hint="put([PutBlock(key, buffer)])",
            )
        if not isinstance(item.parent_key, (bytes, NoneType)):
            raise UsageError(f"a parent key is {type(item.parent_key).__name__}, not bytes")
    return list(items)


def token_ids(item: PutBlock) -> bytes:
    """The block's token ids, packed. Raises: UsageError for too many, or one that is no u32."""
    try:
        tokens = tuple(map(operator.index, item.token_ids))
        position = operator.index(item.position)
    except TypeError as error:
        raise UsageError(f"position and token ids must be integers: {error}") from None
    if len(tokens) > limits.TOKENS_PER_BLOCK_MAX:
        raise UsageError(f"{len(tokens)} token ids, at most {limits.TOKENS_PER_BLOCK_MAX}")
    try:
        pack_token_ids((position,))
        return pack_token_ids(tokens)
    except struct.error:
        raise UsageError("position and token ids must be 0..2^32-1") from None


def duration(name: str, span_ns: int) -> int:
    """Nanoseconds from now. Raises: UsageError."""
    try:
        found = 0 if isinstance(span_ns, bool) else operator.index(span_ns)
    except TypeError:
        found = 0
    if not 0 < found <= limits.DEADLINE_NS_MAX:
        raise UsageError(
            f"{name} is {span_ns!r}, not an integer of 1..{limits.DEADLINE_NS_MAX}",
            hint="it is a duration from now, in nanoseconds",
        )
    return found


def flag(name: str, value: bool) -> bool:
    """True or False. Raises: UsageError for anything else, also for what is only as good as."""
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} is {value!r}", hint="use True or False")
    return bool(value)


def open_place(name: str) -> OpenAt:
    """Raises: UsageError unless it is "host" or "daemon"."""
    try:
        return OpenAt[name.upper()]
    except (KeyError, AttributeError):
        raise UsageError(f"open_at is {name!r}", hint='use "host" or "daemon"') from None


def ack_level(name: str) -> Ack:
    """Raises: UsageError unless it is "accepted" or "durable"."""
    try:
        return Ack[name.upper()]
    except (KeyError, AttributeError):
        raise UsageError(f"ack is {name!r}", hint='use "accepted" or "durable"') from None
