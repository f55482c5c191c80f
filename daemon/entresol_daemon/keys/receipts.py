"""Receipts: signed proof that a tenant's keys were destroyed, and which ones.

Invariant: a receipt's text is canonical (sorted keys, no spaces, ASCII), so the bytes that were
signed can be rebuilt from the parsed form. Signed with Ed25519 (RFC 8032) rather than HMAC: the
tenant, or an auditor, checks it with the public key alone and could not have written it. The
signing key is random, wrapped under the KEK like the others.
"""

from __future__ import annotations

import json
from typing import TypedDict

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from entresol_proto.status import KeyringError, Status

RECEIPT_FORMAT = "entresol-erase-receipt/1"
_LABEL = b"entresol/v1/erase-receipt\0"


class ErasedKey(TypedDict):
    """One destroyed DEK: its version and the fingerprint it had in listings and metrics."""

    version: int
    fingerprint: str


class Receipt(TypedDict):
    """What was destroyed, when. `signature` is empty when the keyring was locked at the time."""

    format: str
    number: int  # counts the receipts of this keyring, from 1
    tenant: str
    stream: str  # the opaque id of the tenant's segments on flash, hex
    erased: list[ErasedKey]
    time_unix_s: int
    kek_id: str
    public_key: str
    signature: str


def public_key_of(seed: bytes) -> bytes:
    """The 32-byte public key that belongs to a 32-byte signing seed."""
    key = Ed25519PrivateKey.from_private_bytes(seed).public_key()
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def canonical(receipt: Receipt) -> bytes:
    """The one byte form of a receipt."""
    return json.dumps(receipt, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _signed_bytes(receipt: Receipt) -> bytes:
    unsigned = receipt.copy()
    unsigned["signature"] = ""
    return _LABEL + canonical(unsigned)


def sign_receipt(receipt: Receipt, seed: bytes) -> Receipt:
    """A copy of `receipt` with its signature."""
    signed = receipt.copy()
    signed["public_key"] = public_key_of(seed).hex()
    signed["signature"] = (
        Ed25519PrivateKey.from_private_bytes(seed).sign(_signed_bytes(signed)).hex()
    )
    return signed


def verify_receipt(receipt: Receipt, public_key: bytes) -> None:
    """Check a receipt against the daemon's receipt key (`Keyring.receipt_public_key`).

    The key inside the receipt is not trusted; it only says which one to fetch.

    Raises: KeyringError (FORBIDDEN) for a receipt that is unsigned, altered, of another key, or
        not a receipt at all.
    """
    try:
        if receipt["format"] != RECEIPT_FORMAT:
            raise KeyringError(
                f"receipt format {receipt['format']!r} is unknown", status=Status.UNSUPPORTED
            )
        if not receipt["signature"]:
            raise KeyringError(
                "the receipt is not signed",
                hint="the keyring was locked when the tenant was erased",
                status=Status.FORBIDDEN,
            )
        signature = bytes.fromhex(receipt["signature"])
        signed = _signed_bytes(receipt)
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, signed)
    except (InvalidSignature, ValueError, KeyError, TypeError, AttributeError):
        raise KeyringError(
            "the receipt does not verify: altered, or signed by another daemon",
            status=Status.FORBIDDEN,
        ) from None
