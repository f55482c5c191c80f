"""The errors of the keyring's parts, each with what to do about it."""

from __future__ import annotations

import logging
from pathlib import Path

from entresol_proto.status import KeyringError, Status

log = logging.getLogger("entresol.keys")


def erased_error(name: str) -> KeyringError:
    """For everything that needs the keys of a tenant that has none any more."""
    return KeyringError(
        f"tenant {name} was erased",
        hint=f"`entresol tenant add {name}` begins anew with fresh keys",
        status=Status.ERASED,
    )


def erasing_error(name: str) -> KeyringError:
    """For changes of a tenant that is being erased, or whose erasure was given up on its way."""
    return KeyringError(
        f"tenant {name} is being erased",
        hint="wait until `entresol tenant erase` has returned; if it was interrupted, repeat it",
        status=Status.CONFLICT,
    )


def io_error(path: Path, error: OSError) -> KeyringError:
    """For a file operation that failed. Only the log names the file: a tenant may read the rest."""
    reason = error.strerror or str(error)
    log.error("event=state_file_failed file=%s reason=%r", path, reason)
    return KeyringError(
        f"the daemon cannot read or write its keyring: {reason}",
        hint="on the daemon's machine: check free space and owner of [shard] state_dir; its log "
        "names the file, event=state_file_failed",
        status=Status.IO_ERROR,
    )


def locked_error(what: str) -> KeyringError:
    """For everything that needs the KEK while there is none."""
    return KeyringError(
        f"{what}: the keyring is locked, there is no key-encryption key",
        hint="on the daemon's machine: put the file of [keys] kek_file in place and run "
        "`entresol unlock`",
        status=Status.LOCKED,
    )


def wrong_kek_error(path: Path, expected: bytes, source: str, found: bytes) -> KeyringError:
    """For a KEK that did not wrap this keyring."""
    return KeyringError(
        f"{path} is wrapped under KEK {expected.hex()}, but {source} is KEK {found.hex()}",
        hint="give the right file in [keys] kek_file; nothing was changed",
    )
