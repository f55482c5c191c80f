"""Whether the data file and the checkpoint can be where a configuration says they are.

Asked by `entresold --check` and `python -m entresol_daemon.judge`, so that neither passes what the
start refuses. Invariant: looks at names and kinds only; opens nothing, makes nothing.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from entresol_daemon.config import Config


def problems(config: Config) -> list[tuple[str, str]]:
    """What is wrong, and how it is put right. Raises: OSError where it may not look."""
    found: list[tuple[str, str]] = []
    path, sized = config.flash_path, config.flash.size_bytes > 0
    try:
        info: os.stat_result | None = os.stat(path)
    except FileNotFoundError:
        info = None
    if info is None and not sized:
        found.append(
            (f"there is no {path}, and [flash] size_bytes is 0", "say how large it is to be")
        )
    elif info is not None and not (stat.S_ISREG(info.st_mode) or stat.S_ISBLK(info.st_mode)):
        text = f"{path} is not a regular file or block device"
        found.append((text, "name one in [flash] path"))
    elif info is not None and stat.S_ISREG(info.st_mode) and not info.st_size and not sized:
        text = f"{path} is empty, and [flash] size_bytes is 0"
        found.append((text, "say how large it is to be"))
    if config.checkpoint_path.is_dir():
        text = f"{config.checkpoint_path} is a folder, and the index checkpoint is a file"
        found.append((text, "name a file in [flash] checkpoint, or leave it out"))
    return found
