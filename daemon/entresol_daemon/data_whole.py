"""Whether what a store has on disk can be started on: its superblocks and its keyring.

Asked by `entresold --check` and `python -m entresol_daemon.judge`, so that neither passes what the
start refuses: a data file that a copy cut short, a keyring of which both copies are damaged.
Invariant: files are opened for reading only, no lock is held, and what a start makes or heals is no
fault.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from entresol_daemon.config import Config
from entresol_daemon.examine import ReadOnlyFile
from entresol_daemon.flash.opening import read_superblock
from entresol_daemon.keys.files import OsCalls
from entresol_daemon.keys.store import KeyringStore
from entresol_proto.status import EntresolError, Status


def check(config: Config) -> None:
    """Raises: EntresolError for what a start would be refused for."""
    if config.flash_path.exists():
        asyncio.run(_check_data_file(config.flash_path))
    try:
        KeyringStore(config.shard.state_dir, OsCalls()).read()
    except OSError as error:
        raise EntresolError(
            f"cannot read {error.filename or 'the keyring'}: {error.strerror or error}",
            hint="check [shard] state_dir and who owns it; a keyring is no symbolic link",
            status=Status.IO_ERROR,
        ) from None


async def _check_data_file(path: Path) -> None:
    file = ReadOnlyFile(path)
    try:
        if file.size_bytes:  # else it is formatted
            await read_superblock(file)
    finally:
        await file.close()
