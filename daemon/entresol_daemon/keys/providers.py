"""The key-encryption key (KEK): where it comes from and how it wraps other keys.

Invariant: the KEK's bytes leave this module only as wrapped keys and as an 8-byte fingerprint; no
repr, error text or log line shows them. A provider is asked for little (name yourself, wrap,
unwrap), so that a PKCS#11 token, Vault or a cloud KMS can take the file's place.

Wrapping is AES-256-GCM with a random 96-bit nonce rather than AES key wrap (RFC 3394): GCM takes
associated data, which binds a wrapped key to its tenant, stream, kind and version, so that blobs
swapped between tenants do not open. The classic worry, nonces repeating, is far away: a KEK wraps a
few keys per tenant, against a bound of 2^32 messages (NIST SP 800-38D, 8.3).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from entresol_proto.status import KeyringError

KEK_BYTES = 32
KEK_ID_BYTES = 8
KEK_FILE_BYTES_MAX = 256
WRAPPED_BYTES_MAX = 256

_WRAP_FORMAT = 1  # u8 format ‖ 12-byte nonce ‖ ciphertext ‖ 16-byte tag
_NONCE_BYTES = 12
_TAG_BYTES = 16
_CREDENTIALS = "$CREDENTIALS_DIRECTORY/"
_WHENCE = (
    "what is sealed opens under its own key only: bring that back; `entresold keygen FILE` makes "
    "another, for a first start or for `entresol change-kek`"
)
_DAMAGED = "the keyring was altered: restore the state folder from a backup"


class KekMissingError(KeyringError):
    """The KEK is not where it should be: it may come yet. Anything else that is there is wrong."""


class KekProvider(Protocol):
    """Holds one KEK. Methods may block (a KMS call); the keyring calls them on a worker thread."""

    def kek_id(self) -> bytes:
        """8 bytes that name this KEK and say nothing about it."""
        ...

    def settle(self) -> None:
        """Called before anything is written down that only this KEK opens: when it returns, the
        KEK survives a power failure where it is kept. Raises: KeyringError."""
        ...

    def wrap(self, key: bytes, aad: bytes) -> bytes:
        """`key` encrypted and bound to `aad`. Raises: KeyringError."""
        ...

    def unwrap(self, blob: bytes, aad: bytes) -> bytes:
        """The key in `blob`. Raises: KeyringError when blob, `aad` or KEK do not fit together."""
        ...


class FileKek:
    """A KEK in a file: 32 raw bytes, or 64 hexadecimal digits.

    `$CREDENTIALS_DIRECTORY/kek` is where a unit's `LoadCredential=kek:...` puts it.
    """

    __slots__ = ("_aead", "_file", "_id", "source")

    def __init__(self, key: bytes, source: str = "memory") -> None:
        """`key` is the 32-byte KEK itself; `open` reads one from a file."""
        if len(key) != KEK_BYTES:
            raise KeyringError(f"a key-encryption key is {KEK_BYTES} bytes, this is {len(key)}")
        self._aead = AESGCM(key)
        self._id = hashlib.blake2b(
            b"", digest_size=KEK_ID_BYTES, key=key, person=b"entresol-kekid"
        ).digest()
        self._file: Path | None = None  # where `open` found it, until it is settled
        self.source = source

    def __repr__(self) -> str:
        return f"FileKek(id={self._id.hex()}, source={self.source!r})"

    @classmethod
    def open(cls, path: str | Path) -> FileKek:
        """Read the KEK from `path`.

        Raises: KeyringError for a missing or unreadable file, one that other users may read, or
            content of another form, each with what to do.
        """
        file = expand_credentials(path)
        try:
            raw = _read(file)
        except FileNotFoundError:
            raise KekMissingError(f"there is no KEK file {file}", hint=_WHENCE) from None
        except OSError as error:
            raise KeyringError(
                f"cannot read KEK file {file}: {error.strerror}",
                hint="the daemon reads it itself: let its user read it, and only that user",
            ) from None
        kek = cls(_parse_key(raw, file), str(file))
        kek._file = file
        return kek

    @staticmethod
    def generate(path: str | Path) -> FileKek:
        """Write a fresh random KEK to a new file, mode 0600, in one step, and return it.

        Raises: KeyringError when the file exists: overwriting a KEK loses every block.
        """
        file = expand_credentials(path)
        try:
            _write_new(file, secrets.token_hex(KEK_BYTES).encode() + b"\n")
        except FileExistsError:
            raise KeyringError(
                f"KEK file {file} exists and is not overwritten",
                hint="everything sealed under it would be lost; choose another path",
            ) from None
        except OSError as error:
            raise KeyringError(
                f"cannot write KEK file {file}: {error.strerror}",
                hint="free some space there"
                if error.errno == errno.ENOSPC
                else "name a file in a folder that this user may write",
            ) from None
        made = FileKek.open(file)
        made.settle()
        return made

    def settle(self) -> None:
        """Whoever put the file there may not have synced it; see `KekProvider.settle`. Does it
        once: who may read the file need not be who writes the keyring."""
        if self._file is None:
            return
        try:
            _sync(self._file)
            with contextlib.suppress(PermissionError):  # it may not read the folder's list
                _sync(self._file.parent)
        except OSError as error:
            raise KeyringError(
                f"cannot bring KEK file {self._file} to the disk: {error.strerror}",
                hint="everything would be sealed under it; put it on a file system that keeps it",
            ) from None
        self._file = None

    def kek_id(self) -> bytes:
        """See `KekProvider.kek_id`."""
        return self._id

    def wrap(self, key: bytes, aad: bytes) -> bytes:
        """See `KekProvider.wrap`."""
        nonce = os.urandom(_NONCE_BYTES)
        return bytes([_WRAP_FORMAT]) + nonce + self._aead.encrypt(nonce, key, aad)

    def unwrap(self, blob: bytes, aad: bytes) -> bytes:
        """See `KekProvider.unwrap`."""
        least = 1 + _NONCE_BYTES + _TAG_BYTES
        if not least < len(blob) <= WRAPPED_BYTES_MAX or blob[0] != _WRAP_FORMAT:
            raise KeyringError("a wrapped key has an unknown form", hint=_DAMAGED)
        try:
            return self._aead.decrypt(blob[1 : 1 + _NONCE_BYTES], blob[1 + _NONCE_BYTES :], aad)
        except InvalidTag:
            raise KeyringError(
                f"a wrapped key does not open under KEK {self._id.hex()}", hint=_DAMAGED
            ) from None


def _read(file: Path) -> bytes:
    # Not blocking: opening a pipe would wait for its writer.
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_mode(file, os.fstat(fd).st_mode)
        return os.read(fd, KEK_FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)


def _write_new(file: Path, raw: bytes) -> None:
    """Half a key under its name would be in the way of a whole one. Raises: OSError."""
    temporary = file.parent / f".entresol-kek-{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb", opener=lambda p, flags: os.open(p, flags, 0o600)) as opened:
            opened.write(raw)
            opened.flush()
            os.fsync(opened.fileno())
        os.link(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(place: Path) -> None:
    opened = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def is_credential(path: str | Path) -> bool:
    """True for a place that only a unit's process is shown."""
    return str(path).startswith(_CREDENTIALS)


def expand_credentials(path: str | Path) -> Path:
    """Replace a leading `$CREDENTIALS_DIRECTORY`, and nothing else.

    Raises: KeyringError when systemd set no such folder.
    """
    text = str(path)
    if not text.startswith(_CREDENTIALS):
        return Path(text)
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not folder:
        raise KeyringError(
            "CREDENTIALS_DIRECTORY is not set, so the KEK cannot come from there",
            hint="the unit needs LoadCredential=kek:/path, or give a plain path in [keys] kek_file",
        )
    return Path(folder) / text[len(_CREDENTIALS) :]


def _check_mode(file: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise KeyringError(f"KEK file {file} is a folder", hint=_WHENCE)
    if not stat.S_ISREG(mode):
        raise KeyringError(f"KEK file {file} is not a regular file", hint=_WHENCE)
    forbidden = 0o077
    # systemd may grant the service's user access by an ACL, whose mask shows as group-read; the
    # credentials folder itself is closed to everybody else.
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    if folder and file.parent == Path(folder):
        forbidden = 0o037
    if stat.S_IMODE(mode) & forbidden:
        raise KeyringError(
            f"KEK file {file} may be read or written by other users "
            f"(mode {stat.S_IMODE(mode):04o})",
            hint=f"chmod 600 {file}",
        )


def _parse_key(raw: bytes, file: Path) -> bytes:
    stripped = raw.strip()
    key = raw
    if len(stripped) == 2 * KEK_BYTES:
        try:
            key = bytes.fromhex(stripped.decode("ascii"))
        except ValueError:
            raise KeyringError(
                f"KEK file {file} has 64 characters that are not all hexadecimal",
                hint=_WHENCE,
            ) from None
    if len(key) != KEK_BYTES:
        size = f"over {KEK_FILE_BYTES_MAX}" if len(raw) > KEK_FILE_BYTES_MAX else f"{len(raw)}"
        raise KeyringError(
            f"KEK file {file} has {size} bytes; it must hold 32 raw bytes or 64 hexadecimal digits",
            hint=_WHENCE,
        )
    if key is raw and all(byte in b"0123456789abcdefABCDEF" for byte in raw):
        raise KeyringError(
            f"KEK file {file} holds 32 hexadecimal digits, which is only half a key",
            hint=_WHENCE,
        )
    if len(set(key)) < 8:
        raise KeyringError(f"KEK file {file} does not hold a random key", hint=_WHENCE)
    return key
