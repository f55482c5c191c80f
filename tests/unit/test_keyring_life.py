"""The keyring's part in the life of keys: unlocking, forced rotation, how much a key has sealed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entresol_daemon.keys import state
from entresol_daemon.keys.keyring import USAGE_STEP_BLOCKS
from entresol_proto.status import KeyringError, Status
from tests.unit.keyring_lab import KEK, KEK_B, everything, keys_of, open_ring, seeded, wrapped_of


def test_a_locked_ring_opens_with_its_own_kek_only(tmp_path: Path) -> None:
    seeded(tmp_path)
    ring = open_ring(tmp_path)
    before = keys_of(ring)
    ring.close()
    files = everything(tmp_path)
    ring = open_ring(tmp_path, None)
    with pytest.raises(KeyringError, match="is wrapped under KEK"):
        ring.unlock(KEK_B)
    assert ring.locked
    with pytest.raises(KeyringError) as caught:
        ring.get("acme")
    assert caught.value.status is Status.LOCKED
    assert "entresol unlock" in caught.value.hint
    assert ring.unlock(KEK)
    assert not ring.locked
    assert keys_of(ring) == before
    assert not ring.unlock(KEK), "it had it already"
    with pytest.raises(KeyringError):
        ring.unlock(KEK_B)
    ring.close()
    assert everything(tmp_path) == files, "unlocking writes nothing"


def test_a_ring_whose_keys_do_not_open_stays_locked(tmp_path: Path) -> None:
    """All keys or none: half of the tenants would look erased."""
    seeded(tmp_path)
    for name in ("keyring.json", "keyring.json.bak"):
        body = state.open_envelope((tmp_path / name).read_bytes(), "entresol-keyring", 1)
        wrapped = body["tenants"][1]["deks"][0]["wrapped"]
        body["tenants"][1]["deks"][0]["wrapped"] = wrapped[:-2] + f"{int(wrapped[-2:], 16) ^ 1:02x}"
        (tmp_path / name).write_bytes(state.envelope("entresol-keyring", 1, body))
    ring = open_ring(tmp_path, None)
    with pytest.raises(KeyringError) as caught:
        ring.unlock(KEK)
    assert caught.value.status is Status.CORRUPT
    assert ring.locked
    with pytest.raises(KeyringError):
        ring.get("acme")
    ring.close()


def test_the_first_kek_may_come_late(tmp_path: Path) -> None:
    ring = open_ring(tmp_path, None)
    assert ring.unlock(KEK)
    ring.add_tenant("acme", now_unix_s=1)
    ring.close()
    assert open_ring(tmp_path).get("acme").active_version == 1


def test_forced_rotation_destroys_the_older_keys_everywhere(tmp_path: Path) -> None:
    seeded(tmp_path)
    doomed = wrapped_of(tmp_path, "acme")[1:]
    ring = open_ring(tmp_path)
    zeta = ring.get("zeta")
    assert ring.rotate("acme", now_unix_s=5, force=True) == 3
    assert list(ring.get("acme").deks) == [3]
    assert ring.get("zeta") == zeta
    ring.close()
    assert not any(blob in everything(tmp_path) for blob in doomed)
    ring = open_ring(tmp_path)
    assert list(ring.get("acme").deks) == [3]
    # The number goes on: no later version is mistaken for a destroyed one.
    assert ring.rotate("acme", now_unix_s=6) == 4
    ring.close()


def test_usage_is_written_ahead_and_never_counted_down(tmp_path: Path) -> None:
    seeded(tmp_path)
    ring = open_ring(tmp_path)
    version = ring.get("acme").active_version
    stored = state.decode((tmp_path / "keyring.json").read_bytes()).tenants["acme"].deks[0]
    assert stored.sealed_blocks > 0, "the first blocks are written down with the key"
    assert ring.note_sealed("acme", version, stored.sealed_blocks), "before more are given out"
    ring.keep_usage("acme")
    assert not any(ring.note_sealed("acme", version) for _ in range(100))
    assert ring.note_sealed("acme", version, USAGE_STEP_BLOCKS)
    ring.keep_usage("acme")
    used = ring.sealed_blocks("acme", version)
    assert used == 2 * stored.sealed_blocks + 100 + USAGE_STEP_BLOCKS, "a restart rounds up"
    ring.close()
    ring = open_ring(tmp_path)
    after = ring.sealed_blocks("acme", version)
    assert used <= after <= used + USAGE_STEP_BLOCKS
    # Each version counts for itself; a tenant that comes back begins at nothing.
    new = ring.rotate("acme", now_unix_s=9)
    assert ring.sealed_blocks("acme", new) == 0
    ring.note_sealed("acme", new, 5)
    assert ring.sealed_blocks("acme", version) == after
    assert not ring.note_sealed("acme", version), "an older version's count has ended"
    ring.erase("acme", now_unix_s=10)
    ring.add_tenant("acme", now_unix_s=11, after_erase=True)
    assert ring.sealed_blocks("acme", 1) == 0
    ring.close()


def test_a_file_of_a_daemon_that_did_not_count_reads_and_stays(tmp_path: Path) -> None:
    seeded(tmp_path)
    found = state.decode((tmp_path / "keyring.json").read_bytes())
    tenant = found.tenants["acme"]
    deks = tuple(replace(dek, sealed_blocks=0) for dek in tenant.deks)
    found = replace(found, tenants={"acme": replace(tenant, deks=deks)})
    raw = state.encode(found)
    assert b"sealed_blocks" not in raw
    found = state.decode(raw)
    assert state.encode(found) == raw
    assert all(dek.sealed_blocks == 0 for dek in found.tenants["acme"].deks)
