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
from entresol_daemon.keys.keyring import Keyring, TenantQuota
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.keys.state import DamagedError, UnknownVersionError, decode, encode
from entresol_proto.status import KeyringError, Status
from tests.kthlab import FILE_KINDS
from tests.proof.lines import kth_io
from tests.unit.keyring_lab import (
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


def test_a_flip_in_what_is_remembered_of_namespaces_is_noticed(tmp_path: Path) -> None:
    before = seeded(tmp_path)
    path = tmp_path / "namespaces" / f"{before['acme'].stream.hex()}.json"
    raw = path.read_bytes()
    for at in range(raw.index(b'"body"'), len(raw) - 1, 5):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << (at % 7)
        path.write_bytes(flipped)
        ring = open_ring(tmp_path)
        assert ring.namespaces_of("acme") == [], at
        ring.close()
        path.write_bytes(raw)
    ring = open_ring(tmp_path)
    assert len(ring.namespaces_of("acme")) == 1
    ring.close()


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


def test_a_whole_keyring_of_an_unknown_form_is_not_called_damaged(tmp_path: Path) -> None:
    """Whoever followed the advice for damaged ones moved every tenant's keys away."""
    seeded(tmp_path)
    body = json.loads((tmp_path / "keyring.json").read_bytes())["body"]
    body["tenants"][0]["later"] = 1
    raw = state.envelope(state.KEYRING_FORMAT, state.KEYRING_VERSION, body)
    for name in ("keyring.json", "keyring.json.bak"):
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(KeyringError, match="both unusable; neither was changed") as caught:
        open_ring(tmp_path)
    assert "start the one that did" in caught.value.hint
    assert "move both away" not in caught.value.hint
    assert (tmp_path / "keyring.json").read_bytes() == raw


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


@pytest.mark.parametrize("operation", ["rotate", "erase"])
@pytest.mark.parametrize("kind", FILE_KINDS)
def test_every_call_of_an_operation_fails_in_turn(
    operation: str, kind: str, tmp_path: Path
) -> None:
    """Killed at the k-th system call, or refused by it, for all k: the old state or the new one, no
    key lost, no erased key anywhere. Line R4 of the proof suite does it for every operation."""
    fds_before = len(os.listdir("/proc/self/fd"))
    total = kth_io.one_loop(f"keys {operation}", kind, False, 1, tmp_path)
    assert not total.notes, total.notes
    assert total.tried > 15, "the operation made too few calls for this test to mean anything"
    assert len(os.listdir("/proc/self/fd")) == fds_before


def test_what_a_change_replaces_is_overwritten_even_when_the_process_dies(tmp_path: Path) -> None:
    """A rotation killed anywhere, a restart, an erasure: no old content kept the tenant's keys."""
    k = 0
    while True:
        k += 1
        folder, links = tmp_path / str(k), tmp_path / f"{k}-links"
        seeded(folder)
        links.mkdir()
        for name in ("keyring.json", "keyring.json.bak"):  # names for what will lose its own
            os.link(folder / name, links / name)
        blobs = wrapped_of(folder, "acme")
        calls = FaultyCalls()
        ring = open_ring(folder, calls=calls)
        calls.count, calls.k = 0, k
        with contextlib.suppress(Crash):
            ring.rotate("acme", now_unix_s=7)
        ring.close()
        ring = open_ring(folder)
        ring.erase("acme", now_unix_s=8)
        ring.close()
        left = everything(folder) + everything(links)
        assert not any(blob in left for blob in blobs), k
        if calls.count < k:
            break
    assert k > 15


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


def test_the_only_copy_outlives_a_start_that_is_killed(tmp_path: Path) -> None:
    """One copy could not be written, and a kill came between the renames of the other's next."""
    k = 0
    while True:
        k += 1
        folder = tmp_path / str(k)
        before = seeded(folder)
        stale = (folder / "keyring.json").read_bytes()
        ring = open_ring(folder)
        version = ring.rotate("acme", now_unix_s=7)
        dek = ring.get("acme").active_dek
        ring.close()
        (folder / "keyring.json.bak").write_bytes(stale)
        (folder / "keyring.json").rename(folder / "keyring.json.old")
        calls = FaultyCalls(k)
        with contextlib.suppress(Crash):
            open_ring(folder, calls=calls).close()
        ring = open_ring(folder)
        assert ring.get("acme").deks == {**before["acme"].deks, version: dek}, k
        ring.close()
        if calls.count < k:
            break
    assert k > 20


@pytest.mark.parametrize("which", ["keyring.json", "keyring.json.bak"])
def test_a_start_on_a_full_disk_goes_by_the_good_copy(tmp_path: Path, which: str) -> None:
    seeded(tmp_path)
    stale = (tmp_path / which).read_bytes()
    ring = open_ring(tmp_path)
    version = ring.rotate("acme", now_unix_s=7)
    ring.close()
    (tmp_path / which).write_bytes(stale)

    class Full(FaultyCalls):
        full = True

        def open(self, path: Path, flags: int) -> int:
            if self.full and flags & os.O_CREAT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().open(path, flags)

    calls = Full()
    ring = open_ring(tmp_path, calls=calls)
    assert ring.get("acme").active_version == version
    assert ring.copies_recovered == 0
    assert (tmp_path / which).read_bytes() == stale
    calls.full = False
    ring.set_quota("acme", TenantQuota(weight=2))
    ring.close()
    copies = [(tmp_path / name).read_bytes() for name in ("keyring.json", "keyring.json.bak")]
    assert copies[0] == copies[1] != stale


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
        ring.retire("acme", 1)
    failed = decode((tmp_path / "keyring.json.bak").read_bytes())
    assert len(failed.tenants["acme"].deks) == 1
    calls.k = -1
    ring.set_quota("acme", TenantQuota(weight=5))
    ring.close()
    after = decode((tmp_path / "keyring.json").read_bytes())
    assert len(after.tenants["acme"].deks) == 2
    assert after.generation > failed.generation


@pytest.mark.parametrize("name", ["keyring.json", "keyring.json.bak"])
@pytest.mark.parametrize("suffix", [".tmp", ".old"])
def test_a_start_destroys_what_an_interrupted_write_left(
    tmp_path: Path, name: str, suffix: str
) -> None:
    """A wrapped key that was erased since may be in it."""
    before = seeded(tmp_path)
    left = tmp_path / (name + suffix)
    left.write_bytes(b"wrapped")
    with left.open("rb") as held:
        ring = open_ring(tmp_path)
        assert ring.get("acme") == before["acme"]
        ring.close()
        assert not left.exists()
        assert not any(held.read()), "it was not overwritten"


CHANGES: dict[str, Callable[[Keyring], object]] = {
    "add": lambda ring: ring.add_tenant("new", now_unix_s=7),
    "quota": lambda ring: ring.set_quota("acme", TenantQuota(weight=7)),
    "rotate": lambda ring: ring.rotate("acme", now_unix_s=7),
    "rotate by force": lambda ring: ring.rotate("acme", now_unix_s=7, force=True),
    "rewrap": lambda ring: ring.rewrap(KEK_B),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_start_believes_what_the_running_keyring_does(
    tmp_path: Path, change: str, number: int
) -> None:
    """A copy that was not written must not leave keys in use that no start will find: what is
    sealed under them, or put under the KEK that is thrown away, would be lost."""
    for k in range(1, 200):
        folder = tmp_path / str(k)
        seeded(folder)
        calls = FaultyCalls(crash=False, error_number=number)
        ring = open_ring(folder, calls=calls)
        calls.count, calls.k = 0, k
        refused = False
        try:
            CHANGES[change](ring)
        except KeyringError:
            refused = True
        reached = calls.count >= k
        calls.k = -1
        running, kek = keys_of(ring), ring._kek
        ring.close()
        assert kek is not None
        again = open_ring(folder, kek)
        assert keys_of(again) == running, (k, refused)
        again.close()
        again = open_ring(folder, kek)
        assert again.copies_recovered == 0, "the start before made both right"
        again.close()
        if not reached:
            assert not refused
            break
    assert k > 8


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_neither_copy_took_did_not_happen(tmp_path: Path, change: str) -> None:
    class Full(FaultyCalls):
        full = False

        def open(self, path: Path, flags: int) -> int:
            if self.full and flags & os.O_CREAT:
                raise OSError(errno.ENOSPC, "no space")
            return super().open(path, flags)

    before, calls = seeded(tmp_path), Full()
    ring = open_ring(tmp_path, calls=calls)
    calls.full = True
    with pytest.raises(KeyringError):
        CHANGES[change](ring)
    assert ring.get("acme") == before["acme"], "nothing is sealed under what no start will find"
    calls.full = False
    ring.close()
    again = open_ring(tmp_path)
    assert again.get("acme") == before["acme"]
    again.close()


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
        expected += [f"open {name}.tmp", "write", "fsync", f"open {name}", f"open {name}.old"]
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


def test_an_unusable_folder_is_a_clear_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KeyringError, match="cannot read or write") as caught:
        open_ring(tmp_path / "file" / "state")
    assert caught.value.status is Status.IO_ERROR
    assert str(tmp_path) not in str(caught.value)  # a tenant may read it; the log names the file
    assert str(tmp_path) in caplog.text
    (tmp_path / "keyring.json").mkdir()
    with pytest.raises(KeyringError, match="cannot read or write"):
        open_ring(tmp_path)


def test_an_erasure_asked_for_again_ends_what_was_left_of_the_first(tmp_path: Path) -> None:
    seeded(tmp_path)
    trace = FaultyCalls()
    ring = open_ring(tmp_path, calls=trace)
    namespaces = tmp_path / "namespaces" / f"{ring.get('acme').stream.hex()}.json"

    def fails(path: Path) -> None:
        raise OSError(errno.EIO, "bad sector")

    unlink = trace.unlink
    trace.unlink = lambda path: fails(path) if path == namespaces else unlink(path)  # type: ignore[method-assign]
    first = ring.erase("acme", now_unix_s=5)
    assert namespaces.exists(), "the test has failed no call"
    trace.unlink = unlink  # type: ignore[method-assign]
    assert ring.erase("acme", now_unix_s=6) == first
    assert not namespaces.exists()
    ring.close()


def test_a_kek_is_on_the_disk_before_anything_is_wrapped_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made the file may not have synced it, and the power may go."""
    steps: list[str] = []
    refused: list[str] = []

    def fsync(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        steps.append(name)
        if name in refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    class Calls(FaultyCalls):
        def _step(self, what: str) -> bool:
            steps.append("write") if what == "write" else None
            return super()._step(what)

    monkeypatch.setattr(os, "fsync", fsync)
    keks = tmp_path / "keks"
    keks.mkdir()
    for name in ("old", "new"):
        FileKek.generate(keks / name)
        assert steps[0].endswith(".tmp")  # before it has its name
        assert steps[1:] == [name, "keks"]
        steps.clear()
    ring = open_ring(tmp_path / "state", FileKek.open(keks / "old"), calls=Calls())
    assert steps[:3] == ["old", "keks", "write"]
    ring.add_tenant("acme", now_unix_s=1)
    steps.clear()
    refused.append("new")
    with pytest.raises(KeyringError, match="cannot bring KEK file"):
        ring.rewrap(FileKek.open(keks / "new"))
    assert steps == ["new"], "it was used all the same"
    refused.clear()
    steps.clear()
    ring.rewrap(FileKek.open(keks / "new"))
    assert steps[:3] == ["new", "keks", "write"]
    ring.close()
    open_ring(tmp_path / "state", FileKek.open(keks / "new")).close()
