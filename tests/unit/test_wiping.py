"""Secrets that are wiped are zeros, and freed memory that was swept holds none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from keyring_lab import open_ring, seeded

from entresol_daemon.keys import sweeping
from entresol_proto.seal.keys import derive_block_key
from entresol_proto.seal.wiping import wipe
from entresol_proto.status import SealError, Status
from tests.proof.memory_scan import Search


def test_a_wiped_object_is_zeros_and_keeps_its_length() -> None:
    secret = os.urandom(32)
    held = secret
    wipe(secret)
    assert held == bytes(32)


def test_short_objects_are_not_wiped() -> None:
    with pytest.raises(AssertionError):
        wipe(b"a")


def test_nothing_is_derived_from_a_wiped_key() -> None:
    secret = os.urandom(32)
    derive_block_key(secret, bytes(32))
    wipe(secret)
    with pytest.raises(SealError) as caught:
        derive_block_key(secret, bytes(32))
    assert caught.value.status is Status.ERASED


def test_erased_and_retired_keys_are_wiped_and_the_others_stay(tmp_path: Path) -> None:
    seeded(tmp_path)
    ring = open_ring(tmp_path)
    acme, zeta = ring.get("acme"), ring.get("zeta")
    old, active = acme.deks[1], acme.deks[2]
    ring.retire("acme", 1)
    assert any(old), "sessions may still hold it"
    assert ring.wipe_destroyed("acme") == 1
    assert not any(old)
    assert any(active)
    ring.erase("acme", now_unix_s=1)
    assert ring.wipe_destroyed("zeta") == 0, "of another tenant"
    assert ring.wipe_destroyed("acme") == 2
    assert not any(active)
    assert not any(acme.naming_secret)
    assert any(zeta.deks[1])
    assert ring.wipe_destroyed("acme") == 0
    ring.close()


def test_a_forced_rotation_wipes_the_older_versions(tmp_path: Path) -> None:
    seeded(tmp_path)
    ring = open_ring(tmp_path)
    older = list(ring.get("acme").deks.values())
    ring.rotate("acme", now_unix_s=1, force=True)
    assert ring.wipe_destroyed("acme") == len(older) == 2
    assert not any(map(any, older))
    assert any(ring.get("acme").active_dek)
    ring.close()


def test_a_sweep_overwrites_what_was_freed() -> None:
    """The secrets are made, copied and dropped; before the sweep some are still there."""
    masks = [os.urandom(32) for _ in range(2_000)]
    mask = int.from_bytes(os.urandom(32))

    def secret(at: int) -> bytes:
        return (int.from_bytes(masks[at]) ^ mask).to_bytes(32)

    copies = [secret(at) + bytes(at % 300) for at in range(len(masks))]
    copies.append(b"".join(copies))
    copies.clear()
    for _ in sweeping.sweep():
        pass
    search = Search({secret(at): "secret" for at in range(len(masks))})
    found = search.in_process(os.getpid())
    for needle in list(search._needles):
        assert found[needle].total() <= 3, "more than what the search itself holds"


def test_a_sweep_ends_where_the_process_cannot_see_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeping, "_resident_bytes", lambda: 0)
    monkeypatch.setattr(sweeping, "BLIND_BYTES", 1 << 20)
    assert sum(1 for _ in sweeping.sweep()) == 1 + 28 + len(sweeping.LARGE_BYTES)
