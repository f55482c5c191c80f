"""The keyring: nothing erased survives, nothing else is lost, whatever call fails or dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_daemon.keys import files, state
from entresol_daemon.keys.keyring import Keyring, Tenant, TenantQuota, verify_receipt
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.keys.receipts import Receipt, canonical
from entresol_daemon.keys.state import DamagedError, State, UnknownVersionError, decode, encode
from entresol_proto.ids import BadKeyError, NamespaceDescriptor, namespace_id, namespace_secret
from entresol_proto.status import KeyringError, QuotaError, Status

KEK = FileKek(random.Random(1).randbytes(32), "kek A")
KEK_B = FileKek(random.Random(2).randbytes(32), "kek B")
SALTY = NamespaceDescriptor(model="secret-model", cache_salt="salt-of-acme").canonical()


class Crash(BaseException):
    """The process dies here."""


class FaultyCalls(files.OsCalls):
    """Fails the k-th call. With `crash`, that call stops halfway and no later one does anything;
    otherwise it alone fails, with `error_number`."""

    def __init__(self, k: int = -1, *, crash: bool = True, error_number: int = errno.EIO) -> None:
        self.k, self.crash, self.error_number = k, crash, error_number
        self.count = 0
        self.trace: list[str] = []
        self.short_writes = False

    def _step(self, what: str) -> bool:
        """True when this is the call that fails."""
        self.count += 1
        self.trace.append(what)
        if self.count == self.k:
            return True
        if self.crash and 0 < self.k < self.count:
            raise Crash
        return False

    def _fail(self) -> None:
        raise Crash if self.crash else OSError(self.error_number, os.strerror(self.error_number))

    def open(self, path: Path, flags: int) -> int:
        if self._step(f"open {path.name}"):
            self._fail()
        return super().open(path, flags)

    def read(self, fd: int, length_bytes: int) -> bytes:
        if self._step("read"):
            self._fail()
        return super().read(fd, length_bytes)

    def write(self, fd: int, raw: bytes | memoryview) -> int:
        if self._step("write"):
            super().write(fd, raw[: len(raw) // 2])
            self._fail()
        return super().write(fd, raw[: max(1, len(raw) // 3)] if self.short_writes else raw)

    def fsync(self, fd: int) -> None:
        # Counted, not done: a killed process loses nothing it has written, and hundreds of cases
        # need not wait for a disk.
        if self._step("fsync"):
            self._fail()

    def close(self, fd: int) -> None:
        super().close(fd)  # a dying process closes everything, too

    def rename(self, old: Path, new: Path) -> None:
        if self._step(f"rename {new.name}"):
            self._fail()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        if self._step(f"unlink {path.name}"):
            self._fail()
        super().unlink(path)


def open_ring(folder: Path, kek: FileKek | None = KEK, **more: object) -> Keyring:
    more.setdefault("calls", FaultyCalls())
    return Keyring.open(folder, kek, **more)  # type: ignore[arg-type]


def everything(folder: Path) -> bytes:
    """All bytes of all files under a folder."""
    return b"\0".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


def wrapped_of(folder: Path, name: str) -> list[bytes]:
    """The hexadecimal wrapped keys of a tenant, as they stand in the file."""
    tenant = decode((folder / "keyring.json").read_bytes()).tenants[name]
    return [blob.hex().encode() for blob in (tenant.naming, *(d.wrapped for d in tenant.deks))]


def seeded(folder: Path) -> dict[str, Tenant]:
    """A keyring with two tenants, one of them with two key versions and a namespace; closed."""
    ring = open_ring(folder)
    ring.add_tenant("acme", TenantQuota(1 << 40, 1 << 30, 3), now_unix_s=100)
    ring.add_tenant("zeta", now_unix_s=101)
    ring.rotate("acme", now_unix_s=102)
    ring.remember_namespace("acme", SALTY)
    ring.remember_namespace("zeta", SALTY)
    found = {name: ring.get(name) for name in ("acme", "zeta")}
    ring.close()
    return found


def keys_of(ring: Keyring) -> dict[str, tuple[bytes, dict[int, bytes], int, TenantQuota]]:
    """What must not change by accident."""
    found = {}
    for info in ring.tenants():
        tenant = ring.get(info.name)
        found[str(info.name)] = (
            tenant.naming_secret,
            dict(tenant.deks),
            tenant.active_version,
            tenant.info.quota,
        )
    return found


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
    assert not [p for p in folder.rglob("*") if p.suffix == ".tmp"]


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
    calls.count, calls.k = 0, 12  # the last call of a change: the flush of the second rename
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


def test_content_is_flushed_before_and_the_folder_after_each_rename(tmp_path: Path) -> None:
    seeded(tmp_path)
    calls = FaultyCalls()
    ring = open_ring(tmp_path, calls=calls)
    calls.trace.clear()
    ring.rotate("acme", now_unix_s=9)
    ring.close()
    folder = tmp_path.name
    expected = []
    for name in ("keyring.json", "keyring.json.bak"):
        expected += [f"open {name}.tmp", "write", "fsync", f"rename {name}"]
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
    ring.remember_namespace("a", over)
    ring.close()
    ring = open_ring(tmp_path)
    assert len(ring.namespaces_of("a")) == 3
    assert ring.tenant_of(made[1]) == "a"
    ring.close()


@pytest.mark.parametrize("how", ["torn", "flip", "version", "swapped"])
def test_a_damaged_namespace_file_counts_as_empty(tmp_path: Path, how: str) -> None:
    before = seeded(tmp_path)
    folder = tmp_path / "namespaces"
    acme, zeta = (folder / f"{before[n].stream.hex()}.json" for n in ("acme", "zeta"))
    raw = acme.read_bytes()
    if how == "torn":
        acme.write_bytes(raw[:-9])
    elif how == "flip":
        acme.write_bytes(raw.replace(b"namespaces", b"nomespaces", 2))
    elif how == "version":
        acme.write_bytes(raw.replace(b'"version":1', b'"version":9'))
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
