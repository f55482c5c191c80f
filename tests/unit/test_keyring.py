"""The keyring: nothing erased survives, nothing else is lost, whatever call fails or dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_daemon.keys import files
from entresol_daemon.keys.keyring import Keyring, TenantQuota, verify_receipt
from entresol_daemon.keys.receipts import Receipt, canonical
from entresol_daemon.keys.state import decode, encode
from entresol_proto.ids import BadKeyError, NamespaceDescriptor, namespace_id, namespace_secret
from entresol_proto.status import KeyringError, QuotaError, Status
from tests.unit.keyring_lab import (
    KEK,
    KEK_B,
    SALTY,
    everything,
    open_ring,
    seeded,
    wrapped_of,
)

# The plain life of a keyring.


def test_tenants_keys_and_quotas_survive_a_restart(tmp_path: Path) -> None:
    before = seeded(tmp_path)
    assert before["acme"].deks[1] != before["acme"].deks[2]
    assert before["acme"].naming_secret != before["zeta"].naming_secret
    assert before["acme"].stream != before["zeta"].stream
    ring = open_ring(tmp_path)
    assert {name: ring.get(name) for name in ("acme", "zeta")} == before
    assert [t.name for t in ring.tenants()] == ["acme", "zeta"]
    acme = ring.get("acme")
    assert acme.info.quota == TenantQuota(1 << 40, 1 << 30, 3)
    assert (acme.active_version, acme.active_dek) == (2, acme.dek(2))
    assert acme.dek(3) is None
    assert ring.by_stream(acme.stream) == acme.info
    assert ring.by_stream(bytes(16)) is None
    every = TenantQuota(1, 2, 3, index_blocks=4, get_bytes=5, put_bytes=6, sessions=7, leases=8,
                        watchers=9)  # fmt: skip
    ring.set_quota("acme", every)
    assert ring.info("acme").quota == every
    ring.set_quota("acme", TenantQuota(weight=9))
    assert ring.get("acme").info.quota.weight == 9
    ring.close()
    ring = open_ring(tmp_path)
    assert ring.get("acme").info.quota == TenantQuota(weight=9)
    assert ring.copies_recovered == 0
    ring.close()


def test_files_are_private_and_in_step(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    ring = Keyring.open(folder, KEK)  # with the real calls, fsync and all
    ring.add_tenant("acme", now_unix_s=1)
    ring.remember_namespace("acme", SALTY)
    ring.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(p.name for p in folder.iterdir()) == [
        "keyring.json",
        "keyring.json.bak",
        "keyring.lock",
        "namespaces",
    ]
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert (folder / "keyring.json").read_bytes() == (folder / "keyring.json.bak").read_bytes()


def test_errors_for_tenants_that_are_not_there_or_too_many(tmp_path: Path) -> None:
    ring = open_ring(tmp_path, tenants_max=2)
    for call in (ring.get, ring.namespaces_of, lambda n: ring.rotate(n, now_unix_s=1)):
        with pytest.raises(KeyringError, match="there is no tenant 'nobody'") as caught:
            call("nobody")
        assert caught.value.status is Status.FORBIDDEN
    ring.add_tenant("a", now_unix_s=1)
    with pytest.raises(KeyringError, match="exists already") as caught:
        ring.add_tenant("a", now_unix_s=1)
    assert caught.value.status is Status.CONFLICT
    with pytest.raises(BadKeyError):
        ring.add_tenant("../x", now_unix_s=1)
    ring.add_tenant("b", now_unix_s=1)
    with pytest.raises(QuotaError, match="2 tenants already"):
        ring.add_tenant("c", now_unix_s=1)
    for quota in ({"weight": 0}, {"flash_bytes": -1}, {"dram_bytes": 2**63}, {"weight": True}):
        with pytest.raises(KeyringError, match="quota"):
            TenantQuota(**quota)
    ring.close()


def test_key_versions_are_bounded_and_can_be_retired(tmp_path: Path) -> None:
    ring = open_ring(tmp_path)
    ring.add_tenant("a", now_unix_s=1)
    for version in range(2, 65):
        assert ring.rotate("a", now_unix_s=version) == version
    with pytest.raises(QuotaError, match="64 key versions"):
        ring.rotate("a", now_unix_s=70)
    gone = wrapped_of(tmp_path, "a")[1]
    ring.retire("a", 1)
    assert ring.get("a").dek(1) is None
    assert gone not in everything(tmp_path)
    assert ring.rotate("a", now_unix_s=71) == 65
    for version in (1, 65, 99):  # retired, active, never there
        with pytest.raises(KeyringError, match="no older key version"):
            ring.retire("a", version)
    ring.close()
    ring = open_ring(tmp_path)
    assert sorted(ring.get("a").deks) == list(range(2, 66))
    ring.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    ring = open_ring(tmp_path)
    with pytest.raises(KeyringError, match="another process") as caught:
        open_ring(tmp_path)
    assert caught.value.status is Status.BUSY
    ring.close()
    ring.close()
    open_ring(tmp_path).close()


def test_a_folder_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(KeyringError, match="chmod 700"):
        open_ring(folder)


# What must never be seen.


def test_no_plaintext_key_reaches_the_disk_or_a_repr(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    made: list[bytes] = []

    def recording(length_bytes: int) -> bytes:
        made.append(os.urandom(length_bytes))
        return made[-1]

    ring = open_ring(tmp_path, random=recording)
    ring.add_tenant("acme", now_unix_s=1)
    ring.rotate("acme", now_unix_s=2)
    namespace, _ = ring.remember_namespace("acme", SALTY)
    ring.erase("acme", now_unix_s=3)
    ring.add_tenant("acme", now_unix_s=4, after_erase=True)
    namespace, secret = ring.remember_namespace("acme", SALTY)
    ring.rewrap(KEK_B)
    tenant = ring.get("acme")
    seen = everything(tmp_path) + repr((ring, tenant, KEK, ring.tenants())).encode()
    seen += str(tenant).encode() + caplog.text.encode()
    secrets = [key for key in made if len(key) == 32] + [secret]
    assert len(secrets) == 7  # receipt seed, 2 naming secrets, 3 DEKs; 1 namespace secret
    for key in [*secrets, tenant.active_dek, tenant.naming_secret]:
        for form in (key, key.hex().encode(), repr(key).encode()[2:-1]):
            assert form not in seen
    for text in (b"secret-model", b"salt-of-acme", b"73656372657400"):
        assert text not in seen
    assert namespace.hex().encode() in seen  # the search does find what is there
    ring.close()


# Locked, and the wrong KEK.


def test_locked_lists_and_erases_and_does_nothing_else(tmp_path: Path) -> None:
    before = seeded(tmp_path)
    ring = open_ring(tmp_path, None)
    assert ring.locked
    assert [t.name for t in ring.tenants()] == ["acme", "zeta"]
    namespace = namespace_id(before["acme"].naming_secret, SALTY)
    assert ring.tenant_of(namespace) == "acme"
    assert ring.namespaces_of("acme") == [namespace]
    for call in (
        lambda: ring.get("acme"),
        lambda: ring.add_tenant("new", now_unix_s=1),
        lambda: ring.rotate("acme", now_unix_s=1),
        lambda: ring.rewrap(KEK_B),
        lambda: ring.remember_namespace("acme", SALTY),
        lambda: ring.descriptor_of(namespace),
    ):
        with pytest.raises(KeyringError, match="locked") as caught:
            call()
        assert caught.value.status is Status.LOCKED
    ring.set_quota("zeta", TenantQuota(weight=2))
    receipt = ring.erase("acme", now_unix_s=5)
    with pytest.raises(KeyringError, match="not signed"):
        verify_receipt(receipt, ring.receipt_public_key)
    ring.close()
    ring = open_ring(tmp_path)
    assert [t.name for t in ring.tenants()] == ["zeta"]
    assert ring.get("zeta").deks == before["zeta"].deks
    ring.close()


def test_a_keyring_begun_without_a_kek_takes_the_first_one(tmp_path: Path) -> None:
    ring = open_ring(tmp_path, None)
    assert ring.kek_id == b""
    ring.close()
    assert not (tmp_path / "keyring.json").exists()
    ring = open_ring(tmp_path, KEK)
    assert ring.kek_id == KEK.kek_id()
    ring.close()


def test_the_wrong_kek_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    seeded(tmp_path)
    before = everything(tmp_path)
    with pytest.raises(KeyringError) as caught:
        open_ring(tmp_path, KEK_B)
    text = str(caught.value)
    assert f"is wrapped under KEK {KEK.kek_id().hex()}" in text
    assert f"kek B is KEK {KEK_B.kek_id().hex()}" in text
    assert everything(tmp_path) == before
    open_ring(tmp_path, KEK).close()


def test_rewrap_changes_the_kek_and_no_key(tmp_path: Path) -> None:
    before = seeded(tmp_path)
    old_blobs = wrapped_of(tmp_path, "acme")
    ring = open_ring(tmp_path)
    public = ring.receipt_public_key
    ring.rewrap(KEK_B)
    ring.rotate("zeta", now_unix_s=7)  # goes on working, under the new one
    ring.close()
    assert not any(blob in everything(tmp_path) for blob in old_blobs)
    with pytest.raises(KeyringError, match=f"under KEK {KEK_B.kek_id().hex()}"):
        open_ring(tmp_path, KEK)
    ring = open_ring(tmp_path, KEK_B)
    assert ring.get("acme") == before["acme"]
    assert ring.get("zeta").dek(1) == before["zeta"].dek(1)
    receipt = ring.erase("acme", now_unix_s=8)
    assert receipt["kek_id"] == KEK_B.kek_id().hex()
    verify_receipt(receipt, public)
    ring.close()


@pytest.mark.parametrize("what", ["stream", "name", "version", "deks", "tenants"])
def test_wrapped_keys_do_not_open_in_anothers_place(tmp_path: Path, what: str) -> None:
    """Somebody who can write the folder moves wrapped keys around (and fixes the checksum)."""
    seeded(tmp_path)
    found = decode((tmp_path / "keyring.json").read_bytes())
    acme, zeta = found.tenants["acme"], found.tenants["zeta"]
    changed = {
        "stream": {"acme": replace(acme, stream=bytes(16)), "zeta": zeta},
        "name": {"acme": acme, "other": replace(zeta, name="other")},
        "version": {
            "acme": replace(acme, deks=(acme.deks[0], replace(acme.deks[0], version=2))),
            "zeta": zeta,
        },
        "deks": {"acme": acme, "zeta": replace(zeta, deks=(acme.deks[0],))},
        "tenants": {
            "acme": replace(acme, naming=zeta.naming, deks=zeta.deks, active=1),
            "zeta": zeta,
        },
    }[what]
    raw = encode(replace(found, tenants=changed))
    for name in ("keyring.json", "keyring.json.bak"):
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(KeyringError, match="do not open") as caught:
        open_ring(tmp_path)
    assert caught.value.status is Status.CORRUPT
    assert (tmp_path / "keyring.json").read_bytes() == raw


# Erasing.


def test_erase_destroys_in_both_places_and_gives_a_receipt(tmp_path: Path) -> None:
    before = seeded(tmp_path)
    blobs = wrapped_of(tmp_path, "acme")
    # Hard links hold on to the old files, as the free blocks of the disk would.
    links = [tmp_path.parent / f"link{i}" for i in range(3)]
    namespaces_file = tmp_path / "namespaces" / f"{before['acme'].stream.hex()}.json"
    for link, source in zip(
        links,
        (tmp_path / "keyring.json", tmp_path / "keyring.json.bak", namespaces_file),
        strict=True,
    ):
        os.link(source, link)
        assert any(byte for byte in link.read_bytes())
    assert len(blobs) == 3
    assert all(everything(tmp_path).count(blob) == 2 for blob in blobs)
    ring = open_ring(tmp_path)
    fingerprints = ring.get("acme").info.fingerprints
    receipt = ring.erase("acme", now_unix_s=777)
    assert not any(blob in everything(tmp_path) for blob in blobs)
    assert not namespaces_file.exists()
    for link in links:
        assert not any(link.read_bytes()), f"{link.name} still holds what was erased"
        link.unlink()
    assert receipt["tenant"] == "acme"
    assert receipt["stream"] == before["acme"].stream.hex()
    assert {k["version"]: k["fingerprint"] for k in receipt["erased"]} == fingerprints
    assert (receipt["number"], receipt["time_unix_s"]) == (1, 777)
    assert receipt["kek_id"] == KEK.kek_id().hex()
    verify_receipt(receipt, ring.receipt_public_key)
    # Again: the same receipt. Anything else: erased.
    assert ring.erase("acme", now_unix_s=999) == receipt
    for call in (ring.get, lambda n: ring.add_tenant(n, now_unix_s=1)):
        with pytest.raises(KeyringError, match="was erased") as caught:
            call("acme")
        assert caught.value.status is Status.ERASED
    assert ring.tenant_of(namespace_id(before["acme"].naming_secret, SALTY)) is None
    assert ring.tenant_of(namespace_id(before["zeta"].naming_secret, SALTY)) == "zeta"
    # Beginning anew gives new keys, and the receipt stays.
    anew = ring.add_tenant("acme", now_unix_s=800, after_erase=True)
    assert anew.stream != before["acme"].stream
    assert not set(anew.deks.values()) & set(before["acme"].deks.values())
    assert anew.naming_secret != before["acme"].naming_secret
    assert ring.erase("acme", now_unix_s=801)["number"] == 2
    ring.close()
    ring = open_ring(tmp_path)
    assert [r["number"] for r in ring.receipts()] == [1, 2]
    assert ring.was_erased("acme")
    assert not ring.was_erased("zeta")
    ring.close()


def test_receipts_that_were_altered_do_not_verify(tmp_path: Path) -> None:
    seeded(tmp_path)
    ring = open_ring(tmp_path)
    receipt = ring.erase("acme", now_unix_s=5)
    public = ring.receipt_public_key
    ring.close()
    verify_receipt(json.loads(canonical(receipt)), public)
    altered: list[Receipt] = []
    for field, value in (
        ("tenant", "zeta"),
        ("number", 2),
        ("time_unix_s", 6),
        ("kek_id", "00"),
        ("stream", "00"),
        ("erased", receipt["erased"][:1]),
        ("public_key", "00"),
        ("signature", "zz"),
        ("signature", f"{int(receipt['signature'], 16) ^ 1:0128x}"),
    ):
        changed = receipt.copy()
        changed[field] = value  # type: ignore[literal-required]
        altered.append(changed)
    short = receipt.copy()
    del short["tenant"]  # type: ignore[misc]
    for changed in [*altered, short, {}, {"format": 1}, None]:  # type: ignore[list-item]
        with pytest.raises(KeyringError):
            verify_receipt(changed, public)  # type: ignore[arg-type]
    with pytest.raises(KeyringError, match="another daemon"):
        verify_receipt(receipt, bytes(32))


# Namespaces.


def test_namespaces_are_remembered_per_tenant_and_across_restarts(tmp_path: Path) -> None:
    before = seeded(tmp_path)
    ring = open_ring(tmp_path)
    found = {}
    for name in ("acme", "zeta"):
        secret = before[name].naming_secret
        found[name], key = ring.derive_namespace(name, SALTY)
        assert found[name] == namespace_id(secret, SALTY)
        assert key == namespace_secret(secret, SALTY)
        assert ring.tenant_of(found[name]) == name
        assert ring.namespaces_of(name) == [found[name]]
        described = ring.descriptor_of(found[name])
        assert described is not None
        assert described.canonical() == SALTY
    assert found["acme"] != found["zeta"]  # one descriptor, two tenants, nothing in common
    assert ring.tenant_of(bytes(16)) is None
    assert ring.descriptor_of(bytes(16)) is None
    generation, files_before = ring.generation, everything(tmp_path)
    ring.remember_namespace("acme", SALTY)
    assert (ring.generation, everything(tmp_path)) == (generation, files_before)
    with pytest.raises(BadKeyError):
        ring.remember_namespace("acme", SALTY + b"x")
    ring.close()


def test_namespaces_are_bounded_and_can_be_forgotten(tmp_path: Path) -> None:
    ring = open_ring(tmp_path, namespaces_per_tenant_max=3)
    ring.add_tenant("a", now_unix_s=1)
    ring.add_tenant("b", now_unix_s=1)
    made = [
        ring.remember_namespace("a", NamespaceDescriptor(model=f"m{i}").canonical())[0]
        for i in range(3)
    ]
    over = NamespaceDescriptor(model="m3").canonical()
    with pytest.raises(QuotaError, match="3 namespaces already"):
        ring.remember_namespace("a", over)
    ring.remember_namespace("a", NamespaceDescriptor(model="m0").canonical())  # known: no new one
    ring.remember_namespace("b", over)  # the limit is each tenant's own
    assert ring.forget_namespaces("a", [made[0], bytes(16)]) == 1
    assert ring.forget_namespaces("a", [made[0]]) == 0
    assert ring.tenant_of(made[0]) is None
    assert ring.forget_namespaces("b", [made[1]]) == 0  # not b's to forget
    ring.close()
    ring = open_ring(tmp_path)
    assert ring.namespaces_of("a") == made[1:]
    fresh, _ = ring.remember_namespace("a", over)
    assert ring.was_found(made[1])
    assert not ring.was_found(fresh)
    ring.forget_namespaces("a", made[1:2])
    ring.remember_namespace("a", NamespaceDescriptor(model="m1").canonical())
    assert not ring.was_found(made[1])
    ring.close()
    ring = open_ring(tmp_path)
    assert len(ring.namespaces_of("a")) == 3
    assert ring.tenant_of(made[1]) == "a"
    ring.close()


def test_a_namespace_file_of_another_version_is_not_written_over(tmp_path: Path) -> None:
    before = seeded(tmp_path)
    path = tmp_path / "namespaces" / f"{before['acme'].stream.hex()}.json"
    newer = path.read_bytes().replace(b'"version":1', b'"version":9')
    path.write_bytes(newer)
    with pytest.raises(KeyringError, match=r"namespaces/[0-9a-f]+\.json: .* version 9"):
        open_ring(tmp_path)
    assert path.read_bytes() == newer


def test_a_namespace_file_that_cannot_be_read_does_not_stop_the_start(tmp_path: Path) -> None:
    before = seeded(tmp_path)
    path = tmp_path / "namespaces" / f"{before['acme'].stream.hex()}.json"
    raw = path.read_bytes()

    class Unreadable(files.OsCalls):
        def open(self, wanted: Path, flags: int) -> int:
            if wanted == path:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().open(wanted, flags)

    ring = open_ring(tmp_path, calls=Unreadable())
    assert ring.namespace_files_damaged == 1
    ring.close()
    assert path.read_bytes() == raw
    ring = open_ring(tmp_path)
    assert ring.namespace_files_damaged == 0
    assert ring.namespaces_of("acme")
    ring.close()


@pytest.mark.parametrize("what", ["rewrap", "rotate"])
def test_a_change_that_is_on_disk_has_happened(tmp_path: Path, what: str) -> None:
    """Both copies have their names already when the disk fails: the next start believes them."""

    class Folders(files.OsCalls):
        fails = False

        def fsync(self, fd: int) -> None:
            if self.fails and stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    calls = Folders()
    seeded(tmp_path)
    ring = open_ring(tmp_path, calls=calls)
    calls.fails = True
    if what == "rewrap":
        ring.rewrap(KEK_B)
    else:
        ring.rotate("acme", now_unix_s=9, force=True)
    calls.fails = False
    said = ring.kek_id, dict(ring.get("acme").deks)
    ring.close()
    ring = open_ring(tmp_path, KEK_B if what == "rewrap" else KEK)
    assert (ring.kek_id, dict(ring.get("acme").deks)) == said
    ring.close()


def test_erasing_beside_new_uses_of_keys_ends(tmp_path: Path) -> None:
    class Moving(dict[tuple[str, int], int]):
        def items(self) -> object:  # type: ignore[override]
            raise AssertionError("it may change while it is walked through")

    seeded(tmp_path)
    ring = open_ring(tmp_path)
    ring._used = Moving(ring._used)
    ring.erase("acme", now_unix_s=1)
    assert not [place for place in list(ring._used) if place[0] == "acme"]
    ring.close()


def test_the_folder_of_namespaces_is_ours_whatever_the_umask(tmp_path: Path) -> None:
    """The admin socket is made under one of the whole process."""
    ring = open_ring(tmp_path)
    ring.add_tenant("a", now_unix_s=1)
    before = os.umask(0o177)
    try:
        ring.remember_namespace("a", SALTY)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "namespaces").stat().st_mode) == 0o700
    ring.close()


def test_what_would_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    for put in (files.replace, files.replace_secret):
        put(files.OsCalls(), path, b"x" * 10)
        with monkeypatch.context() as patched:
            patched.setattr(files, "FILE_BYTES_MAX", 20)
            with pytest.raises(OSError, match="21 bytes, and 20 are read"):
                put(files.OsCalls(), path, b"y" * 21)
            assert files.read(files.OsCalls(), path) == b"x" * 10
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("how", ["torn", "flip", "swapped"])
def test_a_damaged_namespace_file_counts_as_empty(tmp_path: Path, how: str) -> None:
    before = seeded(tmp_path)
    folder = tmp_path / "namespaces"
    acme, zeta = (folder / f"{before[n].stream.hex()}.json" for n in ("acme", "zeta"))
    raw = acme.read_bytes()
    if how == "torn":
        acme.write_bytes(raw[:-9])
    elif how == "flip":
        acme.write_bytes(raw.replace(b"namespaces", b"nomespaces", 2))
    else:
        acme.write_bytes(zeta.read_bytes())
    ring = open_ring(tmp_path)
    namespace, _ = ring.derive_namespace("acme", SALTY)
    if how == "swapped":
        # One of the two files claims the other's namespace: it opens for nobody but its owner.
        assert ring.namespace_files_damaged == 1
        zetas, _ = ring.derive_namespace("zeta", SALTY)
        assert ring.descriptor_of(zetas) is None
    else:
        assert ring.namespace_files_damaged == 1
        assert ring.tenant_of(namespace) is None
    ring.remember_namespace("acme", SALTY)
    assert ring.tenant_of(namespace) == "acme"
    ring.close()


def test_reading_while_another_thread_writes(tmp_path: Path) -> None:
    ring = open_ring(tmp_path)
    ring.add_tenant("steady", now_unix_s=1)
    steady = ring.get("steady")
    failed: list[BaseException] = []
    seen: set[bytes] = set()
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                assert ring.get("steady").deks[1] == steady.deks[1]
                ring.tenants()
                ring.namespaces_of("steady")
                with contextlib.suppress(KeyringError):
                    seen.add(ring.get("other").deks[1])
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for i in range(10):
            ring.add_tenant("other", now_unix_s=i, after_erase=True)
            ring.rotate("steady", now_unix_s=i)
            ring.remember_namespace("steady", NamespaceDescriptor(model=f"m{i}").canonical())
            ring.erase("other", now_unix_s=i)
    finally:
        stop.set()
        thread.join()
        ring.close()
    assert not failed, failed
