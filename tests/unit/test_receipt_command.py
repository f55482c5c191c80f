"""`entresold verify-receipt`: good, altered, of another daemon, and what is no receipt at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from keyring_lab import open_ring, seeded

from entresol_daemon.__main__ import main


@pytest.fixture
def erased(tmp_path: Path) -> tuple[Path, Path, bytes]:
    """(receipt file, state folder, receipt key) of a daemon that erased a tenant."""
    state = tmp_path / "state"
    seeded(state)
    ring = open_ring(state)
    receipt = tmp_path / "receipt.json"
    receipt.write_text(json.dumps(ring.erase("acme", now_unix_s=1_700_000_000)))
    key = ring.receipt_public_key
    ring.close()
    return receipt, state, key


def test_a_good_receipt_says_what_went(
    erased: tuple[Path, Path, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    receipt, state, key = erased
    for trusted in (["--key", key.hex()], ["--state-dir", str(state)]):
        assert main(["verify-receipt", str(receipt), *trusted]) == 0
        said = capsys.readouterr().out
        assert "good: tenant acme was erased 2023-11-14 22:13:20 UTC" in said
        assert "data key version 1" in said
        assert "data key version 2" in said
        assert key.hex() in said


def test_what_is_not_good_is_refused_with_a_reason(
    erased: tuple[Path, Path, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt, _, key = erased
    told = json.loads(receipt.read_text())
    altered, broken, other = (tmp_path / name for name in ("altered", "broken", "other"))
    altered.write_text(json.dumps(told | {"tenant": "zeta"}))
    broken.write_text("[1, 2")
    other.mkdir(mode=0o700)
    open_ring(other).close()
    cases = (
        (altered, ["--key", key.hex()], "does not verify"),
        (receipt, ["--key", bytes(32).hex()], "does not verify"),
        (receipt, ["--state-dir", str(other)], "does not verify"),
        (receipt, ["--key", "12"], "64 hexadecimal digits"),
        (receipt, ["--state-dir", str(tmp_path / "none")], "cannot read"),
        (broken, ["--key", key.hex()], "is not a receipt"),
        (tmp_path / "missing", ["--key", key.hex()], "cannot read"),
    )
    for path, trusted, reason in cases:
        assert main(["verify-receipt", str(path), *trusted]) == 1, reason
        said = capsys.readouterr()
        assert not said.out
        assert reason in said.err, said.err


def test_a_key_must_be_named(erased: tuple[Path, Path, bytes]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify-receipt", str(erased[0])])
    assert caught.value.code == 2
