"""Folders that the daemon keeps for itself."""

from __future__ import annotations

import os
from pathlib import Path

from entresol_proto.status import EntresolError, Status


def private_folder(path: Path) -> None:
    """Make the state folder, if it is not there. Raises: EntresolError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "read-only for this user")
    except OSError as error:
        raise EntresolError(
            f"cannot use the state folder {path}: {error.strerror}",
            hint="check [shard] state_dir, its owner and its mount options",
            status=Status.IO_ERROR,
        ) from None
