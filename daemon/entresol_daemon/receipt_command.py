"""`entresold verify-receipt`: checks an erasure receipt without a daemon, its keys or its network.

Invariant: the public key inside a receipt is never believed; it is compared with the one the caller
trusts, from its own records (`--key`) or from the daemon's state folder (`--state-dir`).
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from entresol_proto.status import KeyringError, Status

RECEIPT_BYTES_MAX = 1024 * 1024


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "verify-receipt", help="check an erasure receipt, offline; exit status 1 if it is not good"
    )
    parser.add_argument(
        "path", type=Path, metavar="FILE", help="what `entresol tenant erase --receipt` wrote"
    )
    trusted = parser.add_mutually_exclusive_group(required=True)
    trusted.add_argument("--key", metavar="HEX", help="the daemon's receipt key, 64 digits")
    trusted.add_argument("--state-dir", type=Path, metavar="DIR", help="or where its keyring is")


def run(arguments: argparse.Namespace) -> int:
    """Check and tell. Raises: KeyringError when the receipt is not good."""
    from entresol_daemon.keys.receipts import verify_receipt

    key = _key(arguments.key) if arguments.key is not None else _key_of(arguments.state_dir)
    receipt = _read(arguments.path)
    verify_receipt(receipt, key)
    when = datetime.datetime.fromtimestamp(receipt["time_unix_s"], datetime.UTC)
    print(f"good: tenant {receipt['tenant']} was erased {when:%Y-%m-%d %H:%M:%S} UTC")
    for row in receipt["erased"]:
        print(f"  destroyed: data key version {row['version']}, fingerprint {row['fingerprint']}")
    print(f"  receipt {receipt['number']}, signed by {key.hex()}")
    return 0


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise KeyringError(
            "a receipt key is 64 hexadecimal digits",
            hint="`public_key` of any receipt you trust, or give --state-dir",
            status=Status.BAD_REQUEST,
        )
    return key


def _key_of(state_dir: Path) -> bytes:
    """The key of the daemon whose state is there; the keyring is read, not opened."""
    from entresol_daemon.keys.state import decode

    path = state_dir / "keyring.json"
    try:
        return decode(path.read_bytes()).receipt_public
    except OSError as error:
        raise KeyringError(
            f"cannot read {path}: {error.strerror}",
            hint="--state-dir is [shard] state_dir of the daemon's configuration",
            status=Status.IO_ERROR,
        ) from None


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(RECEIPT_BYTES_MAX))
    except OSError as error:
        raise KeyringError(
            f"cannot read {path}: {error.strerror}", status=Status.IO_ERROR
        ) from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise KeyringError(
            f"{path} is not a receipt",
            hint="it is the JSON that `entresol tenant erase --receipt FILE` writes",
            status=Status.BAD_REQUEST,
        )
    return found
