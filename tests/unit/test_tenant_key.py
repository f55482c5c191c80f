"""The tenant's key file and what is derived from it: nothing shown, mixed up or lost."""

from __future__ import annotations

import json
import os
import random
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_client import tenant_key
from entresol_client.cli import output
from entresol_client.tenant_key import HostSeal, KeyFile, KeyVersion, TenantKey
from entresol_proto import ids, limits
from entresol_proto.ids import BadKeyError, EngineKey, HostSealedNamespace, NamespaceDescriptor
from entresol_proto.seal.block import (
    HOST_KEY_LABEL,
    BlockIdentity,
    BlockKey,
    SealedHeader,
    derive_block_key,
    open_into,
    open_meta,
    seal_into,
    sealed_bytes_max,
)
from entresol_proto.seal.dtypes import DType
from entresol_proto.status import KeyringError, Status

DESCRIPTOR = NamespaceDescriptor(model="a-secret-model", cache_salt="a-secret-salt", dtype="fp16")
ENGINE_KEY = EngineKey(b"k" * 32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "tenant.key"
    TenantKey.generate(1_000).save(found, new=True)
    return found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_key, "LOOK_NS", 0)


# The file.


def test_a_file_is_private_and_says_what_was_put_in(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    key = TenantKey.load(path)
    assert key.active == 1
    assert TenantKey.decode(key.encode()) == key
    later = key.rotated(2_000).rotated(3_000)
    assert list(later.versions) == [1, 2_000, 3_000]
    later.save(path)
    assert TenantKey.load(path) == later
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name], "something was left behind"
    gone = later.retired(1).retired(2_000)
    assert list(gone.versions) == [3_000]
    # A number is never given again, or an old block would meet another key.
    assert gone.rotated(3_000).active == gone.rotated(7).active == 3_001
    assert gone.rotated(2**40).active == 2**32 - 1
    with pytest.raises(KeyringError):
        gone.rotated(2**40).rotated(2**40)


def test_two_hosts_that_rotate_copies_call_no_two_keys_by_one_number(path: Path) -> None:
    key = TenantKey.load(path)
    one, two = key.rotated(1_700_000_000), key.rotated(1_700_000_060)
    assert one.versions.keys() & two.versions.keys() == {1}


def test_of_two_changes_at_once_none_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rotations that both loaded the same file: the second save threw the first key away."""
    within, go_on = threading.Event(), threading.Event()

    def slow(key: TenantKey) -> TenantKey:
        within.set()
        assert go_on.wait(30)
        return key.rotated(10)

    monkeypatch.setattr(tenant_key.time, "sleep", lambda _: go_on.set())  # the other one waits
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(TenantKey.change, path, slow)
        assert within.wait(30)
        second = pool.submit(TenantKey.change, path, lambda key: key.rotated(10))
        assert (first.result(30).active, second.result(30).active) == (10, 11)
    assert list(TenantKey.load(path).versions) == [1, 10, 11]


def test_a_file_is_durable_in_its_folder_and_leaves_nothing_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []  # of each: whether it was a folder, after the file has its name
    sync = os.fsync

    def fsync(fd: int) -> None:
        folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        synced.append(folder)
        assert [each.name for each in path.parent.iterdir()] == [path.name] or not folder
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    before = len(os.listdir("/proc/self/fd"))
    for now in (2_000, 3_000):
        TenantKey.change(path, lambda key, now=now: key.rotated(now))  # type: ignore[misc]
    assert synced == [False, True] * 2
    with pytest.raises(KeyringError):
        TenantKey.load(path).save(path, new=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_that_is_never_given_back_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_key, "LOCK_S_MAX", 0)
    before = path.read_bytes()
    with tenant_key._locked(path), pytest.raises(KeyringError, match="cannot lock"):
        TenantKey.change(path, lambda key: key.rotated(10))
    assert path.read_bytes() == before


def test_a_link_to_the_file_stays_one_and_its_owner_keeps_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotated by root, the file became root's, and engines could not read it any more."""
    link = tmp_path / "folder" / "link.key"
    link.parent.mkdir()
    link.symlink_to(path)
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(tenant_key.os, "fchown", lambda fd, uid, gid: given.append((uid, gid)))
    TenantKey.change(link, lambda key: key.rotated(10))
    assert link.is_symlink()
    assert TenantKey.load(path).active == 10
    assert given == [(path.stat().st_uid, path.stat().st_gid)]
    assert [one.name for one in link.parent.iterdir()] == [link.name]


def test_a_file_that_cannot_be_given_to_its_owner_is_left_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(fd: int, uid: int, gid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(tenant_key.os, "fchown", refused)
    TenantKey.change(path, lambda key: key.rotated(10))  # ours: only the group would change
    before, fstat = path.read_bytes(), os.fstat
    real = fstat(0)
    others = os.stat_result([*real[:4], real.st_uid + 1, *real[5:]])
    monkeypatch.setattr(tenant_key.os, "fstat", lambda _: others)
    with pytest.raises(KeyringError, match="not permitted"):
        TenantKey.decode(before).rotated(20).save(path)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_what_a_key_of_a_killed_process_left_is_in_nobodys_way(path: Path) -> None:
    path.with_name(f".{path.name}.{os.getpid()}.tmp").write_bytes(b"")
    TenantKey.change(path, lambda key: key.rotated(10))


@pytest.mark.parametrize("name", [".", "/", "a\0b"])
def test_what_is_no_path_of_a_file_is_refused(name: str) -> None:
    for at in (lambda: TenantKey.generate(1).save(Path(name), new=True),
               lambda: TenantKey.load(Path(name)), lambda: KeyFile(Path(name))):  # fmt: skip
        with pytest.raises(KeyringError):
            at()


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyringError, match="no key file"):
        TenantKey.load(tmp_path / "pipe")


def test_a_time_that_no_calendar_has_is_shown_as_a_number() -> None:
    assert output.local_time(10**40) == f"{10**31} s"
    assert output.local_time(-(10**40)) == f"-{10**31} s"


def test_a_key_is_never_overwritten_and_the_newest_never_retired(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(KeyringError, match="exists"):
        TenantKey.generate(1).save(path, new=True)
    assert path.read_bytes() == before
    key = TenantKey.load(path)
    for version in (1, 2, 0, -1):
        with pytest.raises(KeyringError):
            key.retired(version)
    while len(key.versions) < tenant_key.VERSIONS_MAX:
        key = key.rotated(1)
    with pytest.raises(KeyringError) as caught:
        key.rotated(1)
    assert caught.value.status is Status.QUOTA


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o620])
def test_a_file_that_others_may_read_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(KeyringError, match="chmod 600"):
        TenantKey.load(path)


def test_what_is_no_key_file_is_refused_and_its_content_not_told(path: Path) -> None:
    secret = TenantKey.load(path).versions[1].secret.hex()
    good = path.read_text()
    bad = [
        "", "x", "format = 1", good.replace("tenant-key/1", "tenant-key/2"),
        good.replace(secret, secret[:-1]), good.replace(secret, "zz" + secret[2:]),
        good.replace(secret, secret[:62]), good.replace(secret, "00" * 32),
        good.replace("version = 1", "version = 0"), good.replace("version = 1", "version = true"),
        good.replace("version = 1", f"version = {2**32}"), good + "extra = 1\n",
        good.replace("[[versions]]", "[versions]"), good + good[good.index("[[versions]]") :],
        good[: good.index("[[versions]]")], "x = 1\n" + good, "\xff", good + "\n# " + "x" * 70_000,
    ]  # fmt: skip
    for text in bad:
        path.write_text(text, encoding="latin-1")
        with pytest.raises(KeyringError) as caught:
            TenantKey.load(path)
        assert str(path) in str(caught.value)
        assert secret[:16] not in str(caught.value)
        assert caught.value.hint
    path.unlink()
    with pytest.raises(KeyringError, match="entresol key new"):
        TenantKey.load(path)
    path.mkdir(mode=0o700)
    with pytest.raises(KeyringError):
        TenantKey.load(path)


def test_no_repr_shows_a_secret(path: Path) -> None:
    key = TenantKey.load(path)
    seal = HostSeal(KeyFile(path), DESCRIPTOR)
    for shown in (repr(key), repr(key.versions), repr(KeyFile(path)), repr(seal)):
        for secret in (key.naming, key.versions[1].secret):
            assert secret.hex() not in shown
            assert repr(secret)[2:-1] not in shown


# Following it.


def test_a_newer_file_is_taken_over_and_a_bad_one_is_not(path: Path) -> None:
    follower = KeyFile(path)
    first = TenantKey.load(path)
    second = first.rotated(2)
    assert follower.find(2) is None
    second.save(path)
    assert follower.find(2) == second.versions[2].secret
    assert follower.active() == (2, second.versions[2].secret)
    assert follower.find(1) == first.versions[1].secret
    path.write_text("rubbish")
    assert follower.active()[0] == 2
    path.unlink()
    assert follower.active()[0] == 2
    second.retired(1).save(path)
    follower.active()
    assert follower.find(1) is None


def test_what_is_wrong_with_a_file_is_told_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever copied it made it readable for all: the log said so every two seconds."""
    follower, newer = KeyFile(path), TenantKey.load(path).rotated(2)
    newer.save(path)
    path.chmod(0o644)
    for _ in range(3):
        assert follower.active()[0] == 1
    path.unlink()
    for _ in range(3):
        assert follower.active()[0] == 1
    newer.save(path)
    path.chmod(0o644)
    assert follower.active()[0] == 1
    said = [record.getMessage() for record in caplog.records]
    assert ["chmod 600" in line for line in said] == [True, False, True], said
    path.chmod(0o600)
    assert follower.active()[0] == 2  # and again, when it is mended and breaks once more
    newer.rotated(3).save(path)
    path.chmod(0o644)
    assert follower.active()[0] == 2
    assert sum("chmod 600" in record.getMessage() for record in caplog.records) == 3


def test_who_comes_while_the_file_is_read_waits_for_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by K4, seed 1, on a busy machine: one of many blocks opened at once was LOCKED."""
    monkeypatch.setattr(tenant_key, "LOOK_NS", 50_000_000)
    keys = KeyFile(path)
    newer = TenantKey.load(path).rotated(2_000)
    newer.save(path)
    reading, go_on, load = threading.Event(), threading.Event(), tenant_key._load

    def slow(of: Path) -> tuple[TenantKey, tuple[int, int, int]]:
        reading.set()
        assert go_on.wait(30)
        return load(of)

    monkeypatch.setattr(tenant_key, "_load", slow)
    time.sleep(0.06)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(keys.find, newer.active)
        assert reading.wait(30)
        second = pool.submit(keys.find, newer.active)
        time.sleep(0.05)
        go_on.set()
        assert first.result(30) == second.result(30) == newer.versions[newer.active].secret


def test_a_host_that_only_reads_lets_a_retired_version_go(path: Path) -> None:
    follower = KeyFile(path)
    newer = TenantKey.load(path).rotated(2_000)
    newer.save(path)
    assert follower.find(1) == newer.versions[1].secret
    newer.retired(1).save(path)
    assert follower.find(1) is None
    assert follower.find(2_000) == newer.versions[2_000].secret


def test_another_key_under_the_same_name_is_not_taken_over(path: Path) -> None:
    """A running client would mix two keys under one version number, or two names for one block."""
    follower, mine = KeyFile(path), TenantKey.load(path)
    stranger = TenantKey.generate(5).rotated(6)
    other_secret = replace(mine, versions={1: KeyVersion(1, os.urandom(32))})
    for key in (stranger, other_secret):
        key.save(path)
        assert follower.active() == (1, mine.versions[1].secret)
        assert follower.naming == mine.naming


# What is derived.


def test_the_daemon_is_told_no_names(path: Path) -> None:
    seal = HostSeal(KeyFile(path), DESCRIPTOR)
    raw = seal.canonical
    assert b"secret" not in raw
    told = ids.parse_namespace(raw)
    assert isinstance(told, HostSealedNamespace)
    assert told.canonical() == raw
    assert (told.dtype, told.block_tokens) == (DType.FP16, DESCRIPTOR.block_tokens)
    masked = seal.mask(ENGINE_KEY)
    assert len(masked) == 32
    assert masked != ENGINE_KEY
    # Same file, same names on every host; another file, another namespace: other names.
    again = HostSeal(KeyFile(path), DESCRIPTOR)
    assert (again.canonical, again.mask(ENGINE_KEY)) == (raw, masked)
    other_file = path.with_name("other.key")
    TenantKey.generate(1_000).save(other_file, new=True)
    others = [
        HostSeal(KeyFile(other_file), DESCRIPTOR),
        HostSeal(KeyFile(path), replace(DESCRIPTOR, cache_salt="another")),
        HostSeal(KeyFile(path), replace(DESCRIPTOR, tp_rank=1, tp_world=2)),
    ]
    for other in others:
        assert other.canonical != raw
        assert other.mask(ENGINE_KEY) != masked


def test_the_two_kinds_of_namespaces_never_meet(path: Path) -> None:
    raw = HostSeal(KeyFile(path), DESCRIPTOR).canonical
    naming = bytes(range(32))
    assert ids.namespace_id(naming, raw) != ids.namespace_id(naming, DESCRIPTOR.canonical())
    with pytest.raises(BadKeyError):
        NamespaceDescriptor.parse(raw)
    with pytest.raises(BadKeyError):
        HostSealedNamespace.parse(DESCRIPTOR.canonical())


def test_every_change_of_what_is_told_is_refused_or_another_namespace(path: Path) -> None:
    raw = HostSeal(KeyFile(path), DESCRIPTOR).canonical
    for at in range(len(raw)):
        with pytest.raises(BadKeyError):
            ids.parse_namespace(raw[:at])
        for bit in range(8):
            changed = raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]
            try:
                found = ids.parse_namespace(changed)
            except BadKeyError:
                continue
            assert found.canonical() == changed
    with pytest.raises(BadKeyError):
        ids.parse_namespace(raw + b"\0")
    for tokens in (0, limits.TOKENS_PER_BLOCK_MAX + 1):
        with pytest.raises(BadKeyError):
            HostSealedNamespace(bytes(32), 0, tokens)
    for tag, dtype in ((bytes(31), 0), (bytes(33), 0), (bytes(32), -1), (bytes(32), 256)):
        with pytest.raises(BadKeyError):
            HostSealedNamespace(tag, dtype, 16)
    for dtype in (0, 255):
        told = HostSealedNamespace(bytes(32), dtype, limits.TOKENS_PER_BLOCK_MAX)
        assert ids.parse_namespace(told.canonical()) == told


def sealed_block(seal: HostSeal, plain: bytes, **change: object) -> bytes:
    version, salt, key = seal.new_key()
    identity = BlockIdentity(
        b"n" * 16, b"w" * 16, seal.mask(ENGINE_KEY), DType.FP16, version, host_sealed=True
    )
    out = bytearray(sealed_bytes_max(len(plain)))
    header = seal_into(
        memoryview(out), memoryview(plain), identity=replace(identity, **change),  # type: ignore[arg-type]
        block_key=key, salt=salt, codec_id=0, meta=None,
    )  # fmt: skip
    return bytes(out[: header.sealed_bytes])


def opened(seal: HostSeal, raw: bytes, length: int) -> tuple[Status, bytes]:
    into = bytearray(length)
    status = open_into(
        memoryview(raw), memoryview(into), namespace_id=b"n" * 16, wire_key=b"w" * 16,
        engine_key=seal.mask(ENGINE_KEY), block_key=seal.key_of,
    )  # fmt: skip
    return status, bytes(into)


def test_a_block_opens_for_who_has_the_file_and_nobody_else(path: Path) -> None:
    seal = HostSeal(KeyFile(path), DESCRIPTOR)
    plain = random.Random(3).randbytes(10_000)
    raw = sealed_block(seal, plain)
    assert opened(seal, raw, len(plain)) == (Status.OK, plain)
    nothing = bytes(len(plain))
    # A version this host does not have: a miss that is not reported as damage.
    assert opened(seal, sealed_block(seal, plain, dek_version=7), len(plain))[0] is Status.LOCKED
    # Without the flag it is somebody else's, whatever key it is under.
    unflagged = sealed_block(seal, plain, host_sealed=False)
    assert opened(seal, unflagged, len(plain)) == (Status.CORRUPT, nothing)
    for at in range(0, len(raw), 97):
        broken = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        assert opened(seal, broken, len(plain))[1] in (nothing,), at
    stranger = path.with_name("stranger.key")
    TenantKey.generate(1).save(stranger, new=True)
    assert opened(HostSeal(KeyFile(stranger), DESCRIPTOR), raw, len(plain))[1] == nothing


def test_no_key_of_a_daemon_is_ever_one_of_these() -> None:
    """Even the same 32 bytes and the same salt give other block keys and commitments."""
    secret, salt = random.Random(4).randbytes(32), bytes(32)
    daemons, hosts = derive_block_key(secret, salt), derive_block_key(secret, salt, HOST_KEY_LABEL)
    assert daemons.key != hosts.key
    assert daemons.commitment != hosts.commitment


def test_the_flag_is_authenticated(path: Path) -> None:
    seal = HostSeal(KeyFile(path), DESCRIPTOR)
    header = SealedHeader.parse(sealed_block(seal, b"x" * 5_000))
    assert header.host_sealed
    assert header.aad[8] == 1


# Against numbers that other code computed.


def test_the_golden_names_keys_and_block(tmp_path: Path) -> None:
    """What is stored opens for ever, on every host that has the file."""
    vectors = Path(__file__).parents[1] / "vectors"
    case = json.loads((vectors / "host_sealed.json").read_text())
    raw = {name: bytes.fromhex(v) for name, v in case.items() if isinstance(v, str)}
    versions = {case["version"]: KeyVersion(1, raw["secret"])}
    path = tmp_path / "golden.key"
    TenantKey(raw["naming"], versions).save(path, new=True)
    descriptor = NamespaceDescriptor.parse(raw["descriptor"])
    seal = HostSeal(KeyFile(path), descriptor)
    assert seal.canonical == raw["canonical"]
    assert seal.mask(EngineKey(raw["engine_key"])) == raw["masked_engine_key"]
    namespace_id = ids.namespace_id(raw["daemons_naming"], seal.canonical)
    secret = ids.namespace_secret(raw["daemons_naming"], seal.canonical)
    assert namespace_id == raw["namespace_id"]
    assert ids.wire_key(secret, EngineKey(raw["masked_engine_key"])) == raw["wire_key"]
    header = SealedHeader.parse(raw["sealed"])
    assert header.host_sealed
    key = seal.key_of(header)
    assert isinstance(key, BlockKey)
    assert (key.key, key.commitment) == (raw["block_key"], raw["commitment"])
    into = bytearray(len(raw["plain"]))
    status = open_into(
        memoryview(raw["sealed"]), memoryview(into), namespace_id=namespace_id,
        wire_key=raw["wire_key"], engine_key=raw["masked_engine_key"], block_key=seal.key_of,
    )  # fmt: skip
    assert status is Status.OK
    assert into == raw["plain"]
    meta = open_meta(memoryview(raw["sealed"]), header, key)
    assert (meta.parent, meta.position) == (raw["parent"], case["position"])
    assert list(meta.token_ids) == case["token_ids"]
    identity = BlockIdentity(
        namespace_id, raw["wire_key"], raw["masked_engine_key"], DType.BF16, case["version"],
        host_sealed=True,
    )  # fmt: skip
    out = bytearray(sealed_bytes_max(len(into), meta_tokens=3))
    again = seal_into(
        memoryview(out), memoryview(into), identity=identity, block_key=key, salt=raw["salt"],
        codec_id=0, meta=meta, chunk_bytes=header.chunk_bytes,
    )  # fmt: skip
    assert bytes(out[: again.sealed_bytes]) == raw["sealed"], "not byte for byte the same"


def test_no_content_of_the_file_does_anything_but_be_refused(path: Path) -> None:
    """Bytes changed, cut and spliced: a key that encodes to itself, or a KeyringError."""
    seed = 7_041
    rng = random.Random(seed)
    good = TenantKey.load(path).rotated(5).encode()
    words = (b'"', b"[[versions]]", b"version = ", b"=", b"\n", b"0", b"-1", b"1e9", b"\xff", b"{}")
    accepted = 0
    for trial in range(3_000):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(raw) + 1)
            raw[at : at + rng.randrange(3)] = rng.choice((rng.choice(words), rng.randbytes(1), b""))
        try:
            found = TenantKey.decode(bytes(raw))
        except KeyringError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed} trial {trial}: {error!r}") from error
        accepted += 1
        assert TenantKey.decode(found.encode()) == found
    assert 0 < accepted < 3_000
