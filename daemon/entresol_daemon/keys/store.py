"""keyring.json and its second copy: reading, healing, replacing.

Invariant: both copies hold the same generation whenever `save` has returned, and after a crash at
any system call the newer whole copy is the truth. What a copy held before is overwritten, never
just unlinked: it has the wrapped keys of tenants that may be erased later. One process at a time (a
lock on the folder).
"""

from __future__ import annotations

import fcntl
import logging
import os
from dataclasses import replace
from pathlib import Path

from entresol_daemon.keys import files
from entresol_daemon.keys.state import (
    DamagedError,
    State,
    StrangeError,
    UnknownVersionError,
    decode,
    encode,
)
from entresol_proto.status import KeyringError, Status

log = logging.getLogger("entresol.keys")


class KeyringStore:
    """The two files. Every method blocks.

    Attributes:
        copies_recovered: copies that `heal` found missing, stale or damaged and rewrote.
    """

    def __init__(self, folder: Path, calls: files.OsCalls) -> None:
        self.path = folder / "keyring.json"
        self.backup_path = folder / "keyring.json.bak"
        self.copies_recovered = 0
        self._folder = folder
        self._calls = calls
        self._generation = 0  # the highest that may be on disk, also from a failed write
        self._found: dict[Path, bytes | None] = {}
        self._lock_fd = -1

    def lock(self) -> None:
        """Take the folder, making it if need be.

        Raises: KeyringError when another process has it or others may write to it; OSError.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._folder.stat().st_mode & 0o022:
            raise KeyringError(
                f"other users may write to the state folder {self._folder}",
                hint=f"chmod 700 {self._folder}",
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock_fd = os.open(self._folder / "keyring.lock", flags, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KeyringError(
                f"another process has the keyring in {self._folder} open",
                hint="one daemon per state folder; ask the running one instead",
                status=Status.BUSY,
            ) from None

    def unlock(self) -> None:
        """Let go of the folder. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def read(self) -> State:
        """The present state; an empty one when there is no file yet. Changes nothing.

        Raises: DamagedError when copies exist and none is whole; UnknownVersionError when any was
            written by another version; OSError.
        """
        states: list[State] = []
        strange = False
        copies = (self.path, self.backup_path)
        for path in (*copies, *map(files.old_of, copies)):
            raw = files.read(self._calls, path)
            if path in copies:
                self._found[path] = raw
            if raw is None or not any(raw):  # a former content that was overwritten already
                continue
            try:
                states.append(decode(raw))
            except UnknownVersionError as error:
                raise UnknownVersionError(f"{path}: {error}") from None
            except DamagedError as error:
                strange |= isinstance(error, StrangeError)
                log.warning("event=keyring_copy_damaged file=%s reason=%r", path.name, str(error))
        if not states and any(raw is not None for raw in self._found.values()):
            raise DamagedError(
                f"{self.path} and {self.backup_path} are both unusable; neither was changed",
                hint="they are whole, but not as this version writes them: start the one that did"
                if strange
                else "restore one from a backup, or move both away to begin with no tenants",
            )
        state = max(states, key=lambda copy: copy.generation, default=State())
        self._generation = state.generation
        return state

    def heal(self, state: State) -> None:
        """After `read`: destroy left-over temporaries and make both copies hold `state`. One that
        cannot be written (a full disk) keeps nobody from starting by the other.

        Raises: OSError.
        """
        for path in (self.path, self.backup_path):
            files.destroy(self._calls, files.temporary_of(path))
        good = encode(state)
        bad = [path for path, raw in self._found.items() if state.generation and raw != good]
        whole = len(self._found) - len(bad)
        failed: OSError | None = None
        for path in bad:
            try:
                self._write(path, good)
            except OSError as error:
                failed = error
                continue
            whole += 1
            self.copies_recovered += 1
            log.warning("event=keyring_copy_recovered file=%s", path.name)
        if failed is not None and not whole:
            raise failed
        if failed is not None:
            _tell_stale(failed)
        for path in (self.path, self.backup_path):
            files.destroy(self._calls, files.old_of(path))

    def save(self, state: State, *, both: bool = False) -> State:
        """Write the next generation to both copies, overwrite what they held, return it as written.

        Where one copy took it and the other did not, it is what the next start believes, and so
        what holds from now on; unless `both`, for what is destroyed, must have it. The other copy
        is made right by the next save, or the next start.

        Raises: OSError; then each copy holds either generation, and the next save wins over both.
        """
        # Counted up before writing: a failed attempt may have reached the disk, and the next one
        # must be newer than that.
        self._generation += 1
        state = replace(state, generation=self._generation)
        raw = encode(state)
        failed: OSError | None = None
        written = 0
        for path in (self.path, self.backup_path):
            try:
                self._write(path, raw)
                written += 1
            except OSError as error:
                if both:
                    raise
                failed = error
                written += self._holds(path, raw)
        if failed is not None and not written:
            raise failed
        if failed is not None:
            _tell_stale(failed)
        return state

    def _holds(self, path: Path, raw: bytes) -> bool:
        """Whether a copy is this although writing it failed, after it had its name: then it is what
        the next start believes."""
        try:
            return files.read(self._calls, path) == raw
        except OSError:
            return False

    def _write(self, path: Path, raw: bytes) -> None:
        try:
            files.replace_secret(self._calls, path, raw)
        except OSError:
            # What was prepared may hold a wrapped key that is to be erased later.
            files.destroy(self._calls, files.temporary_of(path))
            raise


def _tell_stale(error: OSError) -> None:
    log.error(
        "event=keyring_copy_stale reason=%r hint='it holds the state before; the next "
        "change or start makes it right'", error.strerror,
    )  # fmt: skip
