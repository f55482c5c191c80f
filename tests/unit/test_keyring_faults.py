"""Damage, failing calls and crashes of the keyring: no key lost, no erased key left."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from entresol_daemon.keys import state
from entresol_daemon.keys.keyring import Keyring, TenantQuota, verify_receipt
from entresol_daemon.keys.state import DamagedError, UnknownVersionError, decode, encode
from entresol_proto.ids import NamespaceDescriptor
from entresol_proto.status import KeyringError, Status
from tests.unit.keyring_lab import (
    KEK,
    KEK_B,
    Crash,
    FaultyCalls,
    everything,
    keys_of,
    open_ring,
    seeded,
    wrapped_of,
)

# Damage and crashes.


@pytest.mark.parametrize("which", ["keyring.json", "keyring.json.bak"])
@pytest.mark.parametrize("how", ["torn", "empty", "zeros", "flip", "missing", "rubbish"])
def test_one_bad_copy_is_recovered_from_the_other(tmp_path: Path, which: str, how: str) -> None:
    before = seeded(tmp_path)
    path = tmp_path / which
    raw = path.read_bytes()
    at = raw.index(b"acme")
    bad = {
        "torn": raw[: len(raw) // 2],
        "empty": b"",
        "zeros": bytes(len(raw)),
        "flip": raw[:at] + b"b" + raw[at + 1 :],
        "rubbish": b"[" * 100_000,
    }
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(bad[how])
    ring = open_ring(tmp_path)
    assert ring.get("acme") == before["acme"]
    assert ring.copies_recovered == 1
    ring.close()
    assert path.read_bytes() == raw


def test_every_truncation_and_flip_of_the_file_is_noticed(tmp_path: Path) -> None:
    seeded(tmp_path)
    raw = (tmp_path / "keyring.json").read_bytes()
    assert encode(decode(raw)) == raw
    for at in range(len(raw)):
        with pytest.raises(DamagedError):
            decode(raw[:at])
        flipped = bytearray(raw)
        flipped[at] ^= 1 << (at % 7)
        with pytest.raises((DamagedError, UnknownVersionError)):
            decode(bytes(flipped))


def test_impossible_contents_are_damage_even_with_a_fitting_checksum(tmp_path: Path) -> None:
    seeded(tmp_path)
    good = json.loads((tmp_path / "keyring.json").read_bytes())["body"]

    def edited(change: Callable[[dict], object]) -> bytes:  # type: ignore[type-arg]
        body = json.loads(json.dumps(good))
        change(body)
        return state.envelope(state.KEYRING_FORMAT, state.KEYRING_VERSION, body)

    tenant = "tenants"
    for change in (
        lambda b: b.pop("generation"),
        lambda b: b.update(generation=-1),
        lambda b: b.update(generation=True),
        lambda b: b.update(generation="1"),
        lambda b: b.update(tenants={}),
        lambda b: b.update(tenants=[1]),
        lambda b: b.update(more=1),
        lambda b: b[tenant][0].update(name="../x"),
        lambda b: b[tenant][0].update(stream="00"),
        lambda b: b[tenant][0].update(stream=7),
        lambda b: b[tenant][0].update(active=9),
        lambda b: b[tenant][0].update(weight=0),
        lambda b: b[tenant][0].update(deks=[]),
        lambda b: b[tenant][0]["deks"].reverse(),
        lambda b: b[tenant][0]["deks"][0].update(version=0),
        lambda b: b[tenant][0]["deks"][0].update(wrapped="00" * 1025),
        lambda b: b[tenant].reverse(),
        lambda b: b.update(erased=[{"format": "x"}]),
        lambda b: b.update(erased=[{}]),
    ):
        with pytest.raises(DamagedError):
            decode(edited(change))


def test_two_bad_copies_are_refused_and_left_alone(tmp_path: Path) -> None:
    seeded(tmp_path)
    (tmp_path / "keyring.json").write_bytes(b"{")
    (tmp_path / "keyring.json.bak").write_bytes(b"")
    with pytest.raises(KeyringError, match=r"both unusable; neither was changed.*restore"):
        open_ring(tmp_path)
    (tmp_path / "keyring.json.bak").unlink()
    with pytest.raises(KeyringError, match="both unusable"):
        open_ring(tmp_path)
    assert (tmp_path / "keyring.json").read_bytes() == b"{"


@pytest.mark.parametrize("which", ["keyring.json", "keyring.json.bak"])
def test_another_version_is_refused_and_left_alone(tmp_path: Path, which: str) -> None:
    seeded(tmp_path)
    raw = (tmp_path / which).read_bytes()
    newer = raw.replace(b'"version":1,"body"', b'"version":2,"body"')
    assert newer != raw
    (tmp_path / which).write_bytes(newer)
    with pytest.raises(KeyringError, match="version 2, this daemon knows version 1") as caught:
        open_ring(tmp_path)
    assert caught.value.status is Status.UNSUPPORTED
    assert (tmp_path / which).read_bytes() == newer


def test_the_newer_copy_wins_and_the_stale_one_is_overwritten(tmp_path: Path) -> None:
    """A crash between the two renames of an erasure, by hand."""
    seeded(tmp_path)
    stale = (tmp_path / "keyring.json.bak").read_bytes()
    blobs = wrapped_of(tmp_path, "acme")
    ring = open_ring(tmp_path)
    ring.erase("acme", now_unix_s=5)
    ring.close()
    (tmp_path / "keyring.json.bak").write_bytes(stale)
    link = tmp_path.parent / "stale-link"
    os.link(tmp_path / "keyring.json.bak", link)
    ring = open_ring(tmp_path)
    assert ring.was_erased("acme")
    ring.close()
    assert not any(blob in everything(tmp_path) for blob in blobs)
    assert not any(link.read_bytes())
    link.unlink()


Operation = Callable[[Keyring], object]
OPERATIONS: dict[str, Operation] = {
    "add": lambda ring: ring.add_tenant("new", now_unix_s=7),
    "quota": lambda ring: ring.set_quota("acme", TenantQuota(weight=7)),
    "rotate": lambda ring: ring.rotate("acme", now_unix_s=7),
    "retire": lambda ring: ring.retire("acme", 1),
    "erase": lambda ring: ring.erase("acme", now_unix_s=7),
    "rewrap": lambda ring: ring.rewrap(KEK_B),
    "namespace": lambda ring: ring.remember_namespace(
        "acme", NamespaceDescriptor(model="m2").canonical()
    ),
    "forget": lambda ring: ring.forget_namespaces("acme", ring.namespaces_of("acme")),
}


def open_any_kek(folder: Path) -> Keyring:
    """After a crash while the KEK was being changed, one of the two opens it."""
    try:
        return open_ring(folder, KEK)
    except KeyringError:
        return open_ring(folder, KEK_B)


def check_erased_for_good(folder: Path, name: str, blobs: list[bytes]) -> None:
    """If the tenant is gone, so is every trace of its keys; if not, erasing now removes them."""
    ring = open_any_kek(folder)
    ring.erase(name, now_unix_s=8)
    assert ring.was_erased(name)
    verify_receipt(ring.receipts()[-1], ring.receipt_public_key)
    ring.close()
    left = everything(folder)
    assert not any(blob in left for blob in blobs)
    assert not [p for p in folder.rglob("*") if p.suffix in (".tmp", ".old")]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_crash_at_every_call_of_every_operation(tmp_path: Path, name: str) -> None:
    """Kill the process at the k-th system call, for all k: the old state or the new one, no key
    lost, no erased key anywhere, and the keyring works on."""
    k = 0
    outcomes = set()
    while True:
        k += 1
        folder = tmp_path / str(k)
        seeded(folder)
        blobs = wrapped_of(folder, "acme")
        calls = FaultyCalls()
        ring = open_ring(folder, calls=calls)
        before = keys_of(ring)
        calls.count, calls.k = 0, k
        try:
            OPERATIONS[name](ring)
            finished = calls.count < k
        except Crash:
            finished = False
        after_if_done = keys_of(ring) if finished else None
        ring.close()
        ring = open_any_kek(folder)
        now = keys_of(ring)
        changed = now != before
        # Every key that is there is a right one, and tenants not concerned are as they were.
        assert now["zeta"] == before["zeta"], (name, k)
        for tenant, (naming, deks, _, _) in now.items():
            if tenant in before:
                assert naming == before[tenant][0], (name, k)
                shared = deks.keys() & before[tenant][1].keys()
                assert all(deks[v] == before[tenant][1][v] for v in shared), (name, k)
        if "acme" not in now:
            assert name == "erase"
            assert not any(blob in everything(folder) for blob in blobs), k
        outcomes.add(changed)
        if finished:
            assert now == after_if_done
        ring.close()
        check_erased_for_good(folder, "acme", blobs)
        if finished:
            break
    assert k > 6, "the operation made too few calls for this test to mean anything"
    if name not in ("rewrap", "namespace", "forget"):
        assert outcomes == {True, False}, "crashes must have fallen on both sides of the change"


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("error_number", [errno.EIO, errno.ENOSPC])
def test_every_call_failing_once(tmp_path: Path, name: str, error_number: int) -> None:
    """The k-th call returns an error, for all k: a clear error or success; trying again works."""
    fds_before = len(os.listdir("/proc/self/fd"))
    k = 0
    while True:
        k += 1
        folder = tmp_path / str(k)
        seeded(folder)
        blobs = wrapped_of(folder, "acme")
        calls = FaultyCalls(crash=False, error_number=error_number)
        ring = open_ring(folder, calls=calls)
        calls.count, calls.k = 0, k
        failure: KeyringError | None = None
        try:
            OPERATIONS[name](ring)
        except KeyringError as error:
            failure = error
        finished = calls.count < k
        if failure is not None:
            assert failure.status is Status.IO_ERROR, (name, k)
            assert os.strerror(error_number) in str(failure)
            assert not ring.was_erased("acme"), "erase failed but says it is done"
            OPERATIONS[name](ring)
        now = keys_of(ring)
        ring.close()
        ring = open_any_kek(folder)
        assert keys_of(ring) == now, (name, k)
        assert ring.copies_recovered == 0, (name, k)
        ring.close()
        check_erased_for_good(folder, "acme", blobs)
        if finished:
            break
    assert len(os.listdir("/proc/self/fd")) == fds_before


@pytest.mark.parametrize("crash", [True, False])
def test_open_survives_a_fault_at_every_call(tmp_path: Path, crash: bool) -> None:
    """Beginning a keyring, and healing one, can be interrupted anywhere and done again."""
    for healing in (False, True):
        k = 0
        while True:
            k += 1
            folder = tmp_path / f"{healing}-{k}"
            if healing:
                before = seeded(folder)
                (folder / "keyring.json").write_bytes(b"torn")
                (folder / "keyring.json.tmp").write_bytes(b"left over")
                (folder / "namespaces" / "orphan.json").write_bytes(b"of an erased tenant")
            calls = FaultyCalls(k, crash=crash)
            with contextlib.suppress(Crash, KeyringError):
                open_ring(folder, calls=calls).close()
            ring = open_ring(folder)
            if healing:
                assert ring.get("acme") == before["acme"], k
                assert not (folder / "namespaces" / "orphan.json").exists()
                assert not (folder / "keyring.json.tmp").exists()
            else:
                ring.add_tenant("acme", now_unix_s=1)
            ring.close()
            if calls.count < k:
                break
        assert k > 8


def test_two_different_contents_never_share_a_generation(tmp_path: Path) -> None:
    """A write that failed after its renames is on disk; the next one must be newer than it."""
    seeded(tmp_path)
    calls = FaultyCalls(crash=False)
    ring = open_ring(tmp_path, calls=calls)
    calls.trace.clear()
    ring.set_quota("acme", TenantQuota(weight=2))
    # The flush of the last rename; what follows destroys the former content of the second copy.
    last = len(calls.trace) - calls.trace[::-1].index("rename keyring.json.bak")
    calls.count, calls.k = 0, last + 2
    with pytest.raises(KeyringError):
        ring.rotate("acme", now_unix_s=7)
    failed = decode((tmp_path / "keyring.json.bak").read_bytes())
    assert failed.tenants["acme"].active == 3
    calls.k = -1
    ring.set_quota("acme", TenantQuota(weight=5))
    ring.close()
    after = decode((tmp_path / "keyring.json").read_bytes())
    assert after.tenants["acme"].active == 2
    assert after.generation > failed.generation


def test_content_is_flushed_before_and_the_folder_after_each_change_of_names(
    tmp_path: Path,
) -> None:
    seeded(tmp_path)
    calls = FaultyCalls()
    ring = open_ring(tmp_path, calls=calls)
    calls.trace.clear()
    ring.rotate("acme", now_unix_s=9)
    ring.close()
    folder = tmp_path.name
    expected = []
    for name in ("keyring.json", "keyring.json.bak"):
        expected += [f"open {name}.tmp", "write", "fsync", f"open {name}.old"]
        expected += [f"rename {name}.old", f"rename {name}", f"open {folder}", "fsync"]
        # The former content: overwritten for good before its name goes.
        expected += [f"open {name}.old", "write", "fsync", f"unlink {name}.old"]
        expected += [f"open {folder}", "fsync"]
    assert calls.trace == expected


def test_short_writes_are_continued(tmp_path: Path) -> None:
    calls = FaultyCalls()
    calls.short_writes = True
    ring = open_ring(tmp_path, calls=calls)
    tenant = ring.add_tenant("acme", now_unix_s=1)
    ring.close()
    ring = open_ring(tmp_path)
    assert ring.get("acme") == tenant
    assert ring.copies_recovered == 0
    ring.close()


def test_an_unusable_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KeyringError, match="cannot read or write") as caught:
        open_ring(tmp_path / "file" / "state")
    assert caught.value.status is Status.IO_ERROR
    (tmp_path / "keyring.json").mkdir()
    with pytest.raises(KeyringError, match="cannot read or write"):
        open_ring(tmp_path)
