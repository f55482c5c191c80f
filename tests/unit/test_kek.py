"""The KEK file and what is wrapped under it."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from entresol_daemon.keys.providers import FileKek
from entresol_daemon.keys.state import State, decode, encode
from entresol_proto.status import KeyringError
from tests.unit.keyring_lab import (
    KEK,
    KEK_B,
)

# The KEK file.


def test_a_generated_kek_file_opens_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "kek"
    kek = FileKek.generate(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_bytes()) == 65
    assert FileKek.open(path).kek_id() == kek.kek_id()
    raw = path.read_bytes()
    with pytest.raises(KeyringError, match="exists and is not overwritten"):
        FileKek.generate(path)
    assert path.read_bytes() == raw
    raw_key = tmp_path / "raw"
    raw_key.write_bytes(bytes.fromhex(raw.decode()))
    raw_key.chmod(0o400)
    assert FileKek.open(raw_key).kek_id() == kek.kek_id()
    with pytest.raises(KeyringError, match="cannot write"):
        FileKek.generate(tmp_path / "none" / "kek")


def test_a_folder_is_no_place_for_a_new_kek(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`entresold keygen .` ended in a traceback."""
    monkeypatch.chdir(tmp_path)
    for place in (".", "..", str(tmp_path)):
        with pytest.raises(KeyringError, match=r"exists and is not overwritten|cannot write"):
            FileKek.generate(place)
    assert not list(tmp_path.iterdir())


def test_a_missing_kek_is_to_be_brought_back(tmp_path: Path) -> None:
    """It was advised to make another, under which nothing that is stored opens."""
    with pytest.raises(KeyringError, match="there is no KEK file") as caught:
        FileKek.open(tmp_path / "kek")
    assert "bring that back" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "has 0 bytes; it must hold 32 raw bytes or 64 hexadecimal.*keygen"),
        (b"x" * 31, "has 31 bytes"),
        (bytes(range(33)), "has 33 bytes"),
        (b"g" * 64, "64 characters that are not all hexadecimal"),
        ("é".encode() * 32, "not all hexadecimal"),
        (b"0123456789abcdef" * 2, "only half a key"),
        (bytes(32), "not hold a random key"),
        (b"0" * 64, "not hold a random key"),
        (b"-----BEGIN PRIVATE KEY-----\n" * 40, "over 256 bytes"),
    ],
)
def test_kek_files_of_another_form_are_refused(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "kek"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyringError, match=match) as caught:
        FileKek.open(path)
    assert content.decode("latin-1") not in str(caught.value) or not content


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620])
def test_a_kek_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    FileKek.generate(tmp_path / "kek")
    (tmp_path / "kek").chmod(mode)
    with pytest.raises(KeyringError, match="chmod 600"):
        FileKek.open(tmp_path / "kek")


def test_a_kek_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyringError, match="no KEK file"):
        FileKek.open(tmp_path / "none")
    with pytest.raises(KeyringError, match="is a folder"):
        FileKek.open(tmp_path)
    with pytest.raises(KeyringError, match="not a regular file"):
        FileKek.open("/dev/null")


def test_a_pipe_in_a_keks_place_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Nobody will ever write to it: who opens it would wait, and a daemon could not even stop."""
    os.mkfifo(tmp_path / "kek", 0o600)
    found: list[str] = []

    def open_it() -> None:
        with pytest.raises(KeyringError) as caught:
            FileKek.open(tmp_path / "kek")
        found.append(str(caught.value))

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join(10)
    if thread.is_alive():  # let it go
        os.close(os.open(tmp_path / "kek", os.O_WRONLY | os.O_NONBLOCK))
        thread.join()
        pytest.fail("it waited for a writer")
    assert "is not a regular file" in found[0]


def test_half_a_kek_never_lies_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or an end in the middle: `prepare` would keep it for good, and the start refuse
    it."""
    path = tmp_path / "kek"
    dying = "import os, sys; from entresol_daemon.keys.providers import FileKek; "
    dying += "os.fsync = lambda fd: os._exit(9); FileKek.generate(sys.argv[1])"
    assert subprocess.run([sys.executable, "-c", dying, str(path)], check=False).returncode == 9
    assert not path.exists()

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    left = set(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(KeyringError, match=r"cannot write KEK file .*No space left") as caught:
            FileKek.generate(path)
        assert caught.value.hint == "free some space there"
    assert set(tmp_path.iterdir()) == left
    FileKek.open(FileKek.generate(path).source)


def test_the_kek_may_come_from_the_credentials_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(KeyringError, match="LoadCredential"):
        FileKek.open("$CREDENTIALS_DIRECTORY/kek")
    kek = FileKek.generate(tmp_path / "kek")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    for mode in (0o400, 0o440):  # 0440: the mask of an access list that systemd sets
        (tmp_path / "kek").chmod(mode)
        assert FileKek.open("$CREDENTIALS_DIRECTORY/kek").kek_id() == kek.kek_id()
    for mode in (0o444, 0o460):
        (tmp_path / "kek").chmod(mode)
        with pytest.raises(KeyringError, match="chmod 600"):
            FileKek.open("$CREDENTIALS_DIRECTORY/kek")


def test_wrapped_keys_are_bound_to_their_use_and_any_flip_is_noticed() -> None:
    blob = KEK.wrap(b"k" * 32, b"for this")
    assert blob != KEK.wrap(b"k" * 32, b"for this")
    assert KEK.unwrap(blob, b"for this") == b"k" * 32
    with pytest.raises(KeyringError, match=f"does not open under KEK {KEK.kek_id().hex()}"):
        KEK.unwrap(blob, b"for that")
    with pytest.raises(KeyringError):
        KEK_B.unwrap(blob, b"for this")
    for bit in range(len(blob) * 8):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(KeyringError):
            KEK.unwrap(bytes(flipped), b"for this")
    for length in range(len(blob)):
        with pytest.raises(KeyringError):
            KEK.unwrap(blob[:length], b"for this")
    with pytest.raises(KeyringError, match="is 32 bytes, this is 31"):
        FileKek(b"x" * 31)


def test_an_empty_state_round_trips() -> None:
    assert decode(encode(State())) == State()
