"""What a package and its operator ask of `entresold` before a start: keys, certificates, formats.

The faults: a new key over old data, a certificate replaced behind somebody's back, a private key
that too many may read, an older version started on newer data.
"""

from __future__ import annotations

import datetime
import errno
import grp
import ipaddress
import os
import re
import shutil
import stat
import struct
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_client.config import ClientConfig
from entresol_daemon import formats, judge, setup_command
from entresol_daemon.__main__ import main
from entresol_daemon.config import Config
from entresol_daemon.control import devcerts
from entresol_daemon.dev import client_toml
from entresol_daemon.flash.device import BLOCK
from entresol_daemon.flash.segment import DATA_OFFSET
from entresol_daemon.flash.superblock import FORMAT_VERSION, Superblock, encode_superblock
from entresol_daemon.keys.keyring import Keyring
from entresol_daemon.keys.namespaces import NAMESPACES_FORMAT, NAMESPACES_VERSION
from entresol_daemon.keys.providers import FileKek
from entresol_daemon.keys.state import KEYRING_VERSION, envelope
from entresol_proto.status import FormatError

EVERY_INTERFACE = [str(ipaddress.IPv4Address(0)), str(ipaddress.IPv6Address(0))]
VERSION_AT = 8  # of a superblock, daemon/DATA_FILE.md


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "entresold.toml"
    path.write_text(
        f'[shard]\nname = "shard0"\nstate_dir = "{tmp_path}/state"\n'
        f'[listen]\nunix_dir = "{tmp_path}/run"\ncontrol_host = "127.0.0.2"\n'
        f'[tls]\ncert = "{tmp_path}/pki/shard.pem"\nkey = "{tmp_path}/pki/shard.key"\n'
        f'ca = "{tmp_path}/pki/ca.pem"\n'
        f'[keys]\nkek_file = "{tmp_path}/kek"\n'
    )
    return path


def run(toml: Path, *words: str | Path) -> int:
    return main(["--config", str(toml), *map(str, words)])


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def data_file(path: Path, version: int, *, only_mirror: bool = False) -> None:
    """A data file that says it is of `version`: both superblocks, or the second one."""
    segment_bytes, mirror = 8 * BLOCK, DATA_OFFSET + 4 * 8 * BLOCK
    superblock = Superblock(bytes(16), bytes(32), segment_bytes, 4, mirror)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for copy, offset in ((1, mirror), (0, 0))[: 1 if only_mirror else 2]:
            block = bytearray(encode_superblock(superblock, copy))
            assert struct.unpack_from("<I", block, VERSION_AT) == (FORMAT_VERSION,)
            if version != FORMAT_VERSION:
                struct.pack_into("<I", block, VERSION_AT, version)
            file.seek(offset)
            file.write(block)


def test_who_says_nothing_of_certificates_is_told_all_of_it_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a refusal for each of three settings, and none said what to write there."""
    toml, kek = tmp_path / "entresold.toml", tmp_path / "kek"
    FileKek.generate(kek)
    text = f'[shard]\nstate_dir = "state"\n[listen]\nunix_dir = "run"\n[keys]\nkek_file = "{kek}"\n'
    toml.write_text(text)
    assert run(toml, "prepare") == 1
    hint = capsys.readouterr().err.partition("fix: ")[2]
    lines = re.findall(r'[a-z]+ = "[^"]+"', hint)
    toml.write_text(text + "\n".join(["[tls]", *lines]))
    assert run(toml, "prepare") == 0
    assert (tmp_path / "pki" / "shard.pem").exists()


def test_prepare_makes_what_is_missing_and_only_once(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kek = toml.parent / "kek"
    assert run(toml, "prepare", "--kek", kek) == 0
    said = capsys.readouterr().out
    assert "keep a copy" in said
    assert FileKek.open(kek).kek_id().hex() in said
    made = files_of(toml.parent)
    assert set(made) >= {"kek", "pki/ca.pem", "pki/ca.key", "pki/shard.pem", "pki/shard.key"}
    for name in ("kek", "pki/ca.key", "pki/shard.key"):
        assert stat.S_IMODE((toml.parent / name).stat().st_mode) == 0o600, name
    assert run(toml, "prepare", "--kek", kek) == 0
    assert files_of(toml.parent) == made
    assert capsys.readouterr().out.count("stay") == 2


def test_prepare_makes_the_key_that_the_configuration_names(
    toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said nothing of the key, `--check` said good, and no first start was to be had."""
    assert run(toml, "--check") == 0
    assert f"no key-encryption key {toml.parent}/kek; `prepare`" in capsys.readouterr().out
    assert run(toml, "prepare") == 0
    assert FileKek.open(toml.parent / "kek").kek_id().hex() in capsys.readouterr().out
    assert run(toml, "--check") == 0
    assert "note: " not in capsys.readouterr().out
    Keyring.open(toml.parent / "state", FileKek.open(toml.parent / "kek")).close()
    (toml.parent / "kek").chmod(0o644)
    assert run(toml, "--check") == 1, "the daemon refuses a key that others may read"
    (toml.parent / "kek").unlink()
    assert run(toml, "--check") == 0
    assert "bring it back" in capsys.readouterr().out
    assert run(toml, "prepare") == 1
    assert "wrapped under" in capsys.readouterr().err
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    toml.write_text(toml.read_text().replace(f"{toml.parent}/kek", "$CREDENTIALS_DIRECTORY/kek"))
    assert run(toml, "prepare") == 0
    assert "a credential of the unit; --kek FILE" in capsys.readouterr().out
    assert run(toml, "--check") == 0


def test_prepare_makes_no_key_over_a_keyring_whose_key_is_missing(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kek = toml.parent / "kek"
    Keyring.open(toml.parent / "state", FileKek.generate(kek)).close()
    kek.unlink()
    for name in ("keyring.json", "keyring.json.bak"):  # then with both damaged
        assert run(toml, "prepare", "--kek", kek) == 1
        assert "wrapped under" in capsys.readouterr().err
        assert not kek.exists()
        (toml.parent / "state" / name).write_bytes(b"{")
    assert run(toml, "prepare", "--kek", kek) == 1


def test_prepare_makes_no_key_over_another_shards_keyring(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards of a machine share the key: a new one would be of no use to the others."""
    kek = toml.parent / "kek"
    Keyring.open(toml.parent / "state-5", FileKek.generate(kek)).close()
    kek.unlink()
    assert run(toml, "prepare", "--kek", kek, "--beside", f"{toml.parent}/state*") == 1
    assert "state-5" in capsys.readouterr().err
    assert not kek.exists()
    assert run(toml, "prepare", "--kek", kek, "--beside", f"{toml.parent}/other*") == 0


def test_prepare_makes_no_key_that_nothing_names(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml.write_text(toml.read_text().replace("kek_file", "# kek_file"))
    Keyring.open(toml.parent / "state", FileKek.generate(toml.parent / "elsewhere")).close()
    assert run(toml, "prepare", "--kek", toml.parent / "kek") == 0
    assert "starts locked" in capsys.readouterr().out
    assert not (toml.parent / "kek").exists()
    assert (toml.parent / "pki/shard.pem").exists()


def test_renew_replaces_what_prepare_made_and_nothing_else(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(toml, "prepare") == 0
    folder = toml.parent / "pki"
    (folder / "shard.key").chmod(0o640)
    before = files_of(folder)
    assert run(toml, "renew") == 0
    after = files_of(folder)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"shard.pem", "shard.key"}
    assert stat.S_IMODE((folder / "shard.key").stat().st_mode) == 0o640
    assert run(toml, "--check") == 0
    assert run(toml, "certify", "acme", toml.parent / "acme") == 0
    first = files_of(toml.parent / "acme")
    assert run(toml, "certify", "acme", toml.parent / "acme") == 0
    assert files_of(toml.parent / "acme") == first
    assert run(toml, "certify", "acme", toml.parent / "acme", "--renew") == 0
    assert files_of(toml.parent / "acme")["tenant.pem"] != first["tenant.pem"]
    (folder / "ca.key").unlink()  # an authority elsewhere
    capsys.readouterr()
    assert run(toml, "renew") == 1
    assert "was not made here" in capsys.readouterr().err
    assert files_of(folder) == {n: raw for n, raw in after.items() if n != "ca.key"} | {
        name: raw for name, raw in files_of(folder).items() if name.startswith("tenants/")
    }


def test_check_looks_at_certificates_that_are_there(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(toml, "--check") == 0
    assert "not there yet" in capsys.readouterr().out
    assert run(toml, "prepare") == 0
    assert run(toml, "--check") == 0
    (toml.parent / "pki/shard.key").write_text("rubbish")
    assert run(toml, "--check") == 1
    assert "shard.key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("uri", "days", "why"),
    [
        ("spiffe://entresol.local/shard/shard0", -1, "expired"),
        ("spiffe://entresol.local/shard/shard1", 1, "not of shard shard0"),
        ("spiffe://entresol.local/tenant/shard0", 1, "of tenant shard0"),
        ("spiffe://other.pod/shard/shard0", 1, "trust domain"),
    ],
)
def test_check_calls_no_certificate_good_that_hosts_refuse(
    toml: Path, capsys: pytest.CaptureFixture[str], uri: str, days: int, why: str
) -> None:
    assert run(toml, "prepare") == 0
    pki = devcerts.load(toml.parent / "pki")
    devcerts.issue(pki, "shard", uris=[uri], server=True, days=days, anew=True)
    assert run(toml, "--check") == 1
    err = capsys.readouterr().err
    assert why in err
    assert "fix: " in err


def test_check_calls_no_ca_good_that_has_expired(
    toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(toml, "prepare") == 0
    long_ago = datetime.datetime(2010, 1, 1, tzinfo=datetime.UTC)
    old = devcerts.create(tmp_path / "old", now=long_ago)
    shutil.copy(old.ca, toml.parent / "pki" / "ca.pem")
    assert run(toml, "--check") == 1
    err = capsys.readouterr().err
    assert "the CA in [tls] ca expired on 2019-12-30" in err
    assert "fix: " in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as somebody else")
def test_root_rewraps_as_the_keyrings_owner(
    toml: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old, new = FileKek.generate(tmp_path / "kek"), FileKek.generate(tmp_path / "new")
    state = toml.parent / "state"
    Keyring.open(state, old).close()
    for path in (state, *state.iterdir()):
        os.chown(path, 54_321, 54_322)
    for parent in state.parents:  # pytest's folders are root's alone
        if parent != Path(parent.anchor) and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    assert run(toml, "rewrap", tmp_path / "new") == 0
    found = {(path.stat().st_uid, path.stat().st_gid) for path in state.iterdir()}
    assert found == {(54_321, 54_322)}
    assert os.geteuid() == 0
    Keyring.open(state, new).close()
    # A key that the unit alone is shown wants its file named.
    toml.write_text(toml.read_text().replace(f'"{tmp_path}/kek"', '"$CREDENTIALS_DIRECTORY/kek"'))
    assert run(toml, "rewrap", tmp_path / "kek") == 1
    assert "--old" in capsys.readouterr().err
    assert run(toml, "rewrap", "--old", tmp_path / "new", tmp_path / "kek") == 0
    Keyring.open(state, old).close()


def test_rewrap_makes_no_keyring(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FileKek.generate(toml.parent / "kek")
    FileKek.generate(toml.parent / "new")
    assert run(toml, "rewrap", toml.parent / "new") == 1
    assert "no keyring" in capsys.readouterr().err
    assert not (toml.parent / "state").exists()


def test_prepare_leaves_half_a_set_of_certificates_alone(toml: Path) -> None:
    (toml.parent / "pki").mkdir()
    (toml.parent / "pki/ca.pem").write_text("the site's\n")
    assert run(toml, "prepare") == 0
    assert files_of(toml.parent / "pki") == {"ca.pem": b"the site's\n"}


def test_prepare_makes_nothing_in_other_places(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml.write_text(toml.read_text().replace("pki/shard.pem", "pki/mine.crt"))
    assert run(toml, "prepare") == 1
    assert "bring your own" in capsys.readouterr().err
    assert not (toml.parent / "pki").exists()


def test_the_shards_key_is_shared_with_its_group_and_the_authoritys_is_not(toml: Path) -> None:
    group = grp.getgrgid(os.getegid()).gr_name
    assert run(toml, "prepare", "--group", group) == 0
    modes = {
        name: stat.S_IMODE((toml.parent / "pki" / name).stat().st_mode)
        for name in ("", "shard.key", "ca.key")
    }
    assert modes == {"": 0o750, "shard.key": 0o640, "ca.key": 0o600}


def test_the_next_shard_of_a_machine_gets_its_certificate_from_the_same_authority(
    toml: Path,
) -> None:
    assert run(toml, "prepare") == 0
    before = files_of(toml.parent / "pki")
    other = toml.with_name("5.toml")
    other.write_text(toml.read_text().replace("pki/shard.", "pki/5.").replace("shard0", "shard5"))
    assert run(other, "prepare") == 0
    after = files_of(toml.parent / "pki")
    assert set(after) - set(before) == {"5.pem", "5.key"}
    assert {name: after[name] for name in before} == before


def test_prepare_says_which_group_is_missing(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(toml, "prepare", "--group", "no-such-group-here") == 1
    assert "no-such-group-here" in capsys.readouterr().err


def test_a_tenants_folder_is_all_that_its_host_needs(toml: Path, tmp_path: Path) -> None:
    assert run(toml, "prepare") == 0
    for _ in range(2):
        assert run(toml, "certify", "acme", tmp_path / "out") == 0
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere")
    config = ClientConfig.load(moved / "client.toml")
    assert config.tls.cert.read_bytes() == (tmp_path / "pki/tenants/acme.pem").read_bytes()
    assert stat.S_IMODE(config.tls.key.stat().st_mode) == 0o600
    assert (config.shards[0].host, config.shards[0].port) == ("127.0.0.2", 7440)
    assert run(toml, "certify", "acme", tmp_path / "out", "--host", "10.0.0.7") == 0
    assert ClientConfig.load(tmp_path / "out/client.toml").shards[0].host == "10.0.0.7"


def test_a_bad_name_gets_no_certificate(toml: Path, tmp_path: Path) -> None:
    assert run(toml, "prepare") == 0
    assert run(toml, "certify", "../acme", tmp_path / "out") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["prepare", "formats"])
def test_they_need_the_daemons_configuration(command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command])
    assert caught.value.code == 2


def test_nothing_there_is_nothing_to_refuse(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(toml, "formats") == 0
    assert capsys.readouterr().out == ""
    assert run(toml, "--check") == 0


@pytest.mark.parametrize("only_mirror", [False, True])
@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 77])
def test_data_of_another_version_is_refused_with_the_way_back(
    toml: Path, capsys: pytest.CaptureFixture[str], version: int, only_mirror: bool
) -> None:
    data_file(toml.parent / "state/flash.data", version, only_mirror=only_mirror)
    assert run(toml, "formats") == 1
    out = capsys.readouterr().out.split()
    assert out[:3] == ["data-file", str(version), str(FORMAT_VERSION)]
    assert run(toml, "--check") == 1
    said = capsys.readouterr().err
    assert f"format version {version}" in said
    assert "install that one again" in said


def test_a_keyring_of_another_version_is_refused(toml: Path) -> None:
    kek = FileKek.generate(toml.parent / "kek")
    Keyring.open(toml.parent / "state", kek).close()
    config = Config.load(toml)
    assert {(one.kind, one.version) for one in formats.look(config)} == {
        ("keyring", KEYRING_VERSION)
    }
    copy = toml.parent / "state/keyring.json.bak"
    copy.write_text(
        copy.read_text().replace(f'"version":{KEYRING_VERSION}', f'"version":{KEYRING_VERSION + 1}')
    )
    with pytest.raises(FormatError, match=r"keyring\.json\.bak has keyring format version"):
        formats.check(config)


def test_namespaces_of_another_version_are_refused_before_a_start(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The daemon does not start on them (they would be written over), so `--check` and a package
    that goes back must not say that it does."""
    path = toml.parent / "state/namespaces" / f"{'0f' * 16}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(envelope(NAMESPACES_FORMAT, NAMESPACES_VERSION, {"namespaces": []}))
    assert [one.kind for one in formats.look(Config.load(toml))] == ["namespaces"]
    path.write_bytes(envelope(NAMESPACES_FORMAT, NAMESPACES_VERSION + 1, {"namespaces": []}))
    assert run(toml, "formats") == 1
    assert f"namespaces 2 1 {path}" in capsys.readouterr().out
    assert run(toml, "--check") == 1
    assert "namespaces format version 2, this build reads version 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": "1"}', b"[" * 100_000, b"\xff"]
)
def test_what_is_damaged_is_the_daemons_to_judge(toml: Path, content: bytes) -> None:
    (toml.parent / "state/namespaces").mkdir(parents=True)
    (toml.parent / "state/namespaces/00.json").write_bytes(content)
    (toml.parent / "state/keyring.json").write_bytes(content)
    (toml.parent / "state/flash.data").write_bytes(content)
    assert formats.look(Config.load(toml)) == []


# What --check passes can start -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flash", "says"),
    [
        ("size_bytes = 0", "size_bytes is 0"),
        ('path = "/dev/null"', "regular file or block device"),
        ('path = "FOLDER"', "regular file or block device"),
        ('path = "FOLDER/empty"\nsize_bytes = 0', "FOLDER/empty is empty, and"),
        ('path = "FOLDER/pipe"', "regular file or block device"),
        ('checkpoint = "FOLDER"', "FOLDER is a folder"),
    ],
)
def test_check_and_doctor_pass_nothing_that_cannot_start(
    toml: Path, capsys: pytest.CaptureFixture[str], flash: str, says: str
) -> None:
    """A pipe also kept them waiting for ever, for its writer."""
    assert run(toml, "prepare", "--kek", toml.parent / "kek") == 0
    folder = toml.parent / "places"
    folder.mkdir()
    (folder / "empty").touch()
    os.mkfifo(folder / "pipe")
    with toml.open("a") as file:
        file.write("[flash]\n" + flash.replace("FOLDER", str(folder)) + "\n")
    says = says.replace("FOLDER", str(folder))
    capsys.readouterr()
    assert run(toml, "--check") == 1
    assert says in capsys.readouterr().err
    rows = list(judge.judge(toml))
    assert any(level == judge.FAIL and says in text for level, text, _ in rows)


@pytest.mark.parametrize("what", ["version", "cut", "damaged", "keyring", "link", "pipe"])
def test_check_and_doctor_pass_no_data_that_a_start_refuses(
    toml: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Doctor looked at no data at all; a copy that was cut short passed both."""
    assert run(toml, "prepare", "--kek", toml.parent / "kek") == 0
    state = toml.parent / "state"
    path, copies = state / "flash.data", [state / "keyring.json", state / "keyring.json.bak"]
    data_file(path, FORMAT_VERSION + (what == "version"))
    with toml.open("a") as file:
        file.write("[flash]\nsize_bytes = 0\n")
    Keyring.open(state, FileKek.open(toml.parent / "kek")).close()
    if what == "cut":
        os.truncate(path, path.stat().st_size - BLOCK)
    elif what == "damaged":
        path.write_bytes(b"x" * path.stat().st_size)
    elif what in ("keyring", "link", "pipe"):
        for copy in copies:
            copy.unlink()
            if what == "keyring":
                copy.write_bytes(b"{")
        if what == "link":
            copies[0].symlink_to(state / "elsewhere")
        elif what == "pipe":
            os.mkfifo(copies[0])
    says = {
        "version": "format version", "cut": "its superblock says", "keyring": "both unusable",
        "damaged": "not an Entresol data file", "link": "keyring.json: Too many levels",
        "pipe": "keyring.json: no regular file",
    }[what]  # fmt: skip
    before = {each: each.lstat() for each in sorted(state.iterdir())}
    capsys.readouterr()
    assert run(toml, "--check") == 1
    assert says in capsys.readouterr().err
    rows = list(judge.judge(toml))
    assert any(level == judge.FAIL and says in text for level, text, _ in rows), rows
    after = {each: each.lstat() for each in sorted(state.iterdir())}
    assert {p: (i.st_ino, i.st_size, i.st_mtime_ns) for p, i in after.items()} == {
        p: (i.st_ino, i.st_size, i.st_mtime_ns) for p, i in before.items()
    }


def test_data_that_is_there_or_will_be_made_passes(toml: Path) -> None:
    assert run(toml, "prepare", "--kek", toml.parent / "kek") == 0
    assert run(toml, "--check") == 0
    data_file(toml.parent / "state" / "flash.data", FORMAT_VERSION)
    with toml.open("a") as file:
        file.write("[flash]\nsize_bytes = 0\n")
    assert run(toml, "--check") == 0


def test_a_pipe_in_place_of_the_keyring_is_refused_at_once(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (toml.parent / "state").mkdir()
    os.mkfifo(toml.parent / "state" / "keyring.json")
    assert run(toml, "formats") == 1
    assert "keyring.json: no regular file" in capsys.readouterr().err


# Half of it ---------------------------------------------------------------------------------------


def test_a_missing_group_is_found_before_anything_is_made(toml: Path) -> None:
    """Otherwise the next run, with the right one, found certificates and shared nothing."""
    before = files_of(toml.parent)
    kek = toml.parent / "kek"
    assert run(toml, "prepare", "--kek", kek, "--group", "no-such-group-here") == 1
    assert files_of(toml.parent) == before


@pytest.mark.parametrize("missing", ["shard.pem", "shard.key"])
def test_half_a_certificate_is_not_called_good(
    toml: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    group = grp.getgrgid(os.getegid()).gr_name
    assert run(toml, "prepare", "--group", group) == 0
    (toml.parent / "pki" / missing).unlink()
    assert run(toml, "prepare") == 1
    assert "renew" in capsys.readouterr().err
    assert run(toml, "renew") == 0
    assert stat.S_IMODE((toml.parent / "pki/shard.key").stat().st_mode) == 0o640
    assert run(toml, "prepare") == 0
    assert run(toml, "--check") == 0


def test_a_run_that_was_cut_short_before_it_shared_the_key_is_made_good(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = toml.parent / "pki/shard.key"
    group = grp.getgrgid(os.getegid()).gr_name
    with monkeypatch.context() as patched:
        patched.setattr(setup_command, "_share", lambda *_: None)
        assert run(toml, "prepare", "--group", group) == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert run(toml, "prepare", "--group", group) == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o640
    key.chmod(0o600)
    assert run(toml, "prepare", "--group", group) == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600, "what somebody tightened stays so"


def test_keys_and_certificates_survive_a_loss_of_power(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1]
    )
    assert run(toml, "prepare") == 0
    folder = str(toml.parent / "pki")
    assert {f"{folder}/shard.key.tmp", f"{folder}/shard.pem.tmp", folder} <= set(synced)


# What a client is given ---------------------------------------------------------------------------


def test_certify_follows_no_link_that_somebody_put_there(toml: Path, tmp_path: Path) -> None:
    assert run(toml, "prepare") == 0
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir(mode=0o755)
    victim.write_text("precious")
    for name in ("client.toml", "client.tmp", "client.toml.tmp", "tenant.pem.tmp"):
        (out / name).symlink_to(victim)
    assert run(toml, "certify", "acme", out) == 0
    assert victim.read_text() == "precious"
    assert not (out / "client.toml").is_symlink()


def test_certify_writes_to_no_folder_that_others_may_write(
    toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(toml, "prepare") == 0
    out = tmp_path / "out"
    for mode in (0o777, 0o775, 0o1777):
        out.mkdir()
        out.chmod(mode)
        assert run(toml, "certify", "acme", out) == 1
        assert "may be written by, other users" in capsys.readouterr().err
        assert list(out.iterdir()) == []
        out.rmdir()


@pytest.mark.parametrize("control_host", EVERY_INTERFACE)
def test_certify_asks_for_a_host_that_can_be_reached(
    toml: Path, tmp_path: Path, control_host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    toml.write_text(
        toml.read_text()
        .replace("127.0.0.2", control_host)
        .replace("[tls]", f'metrics_host = "{control_host}"\n[tls]')
    )
    assert run(toml, "prepare") == 0
    for words in ((), ("--host", EVERY_INTERFACE[0]), ("--host", ""), ("--host", 'a"\nx = "b')):
        assert run(toml, "certify", "acme", tmp_path / "out", *words) == 1
        assert "--host" in capsys.readouterr().err
    assert run(toml, "certify", "acme", tmp_path / "out", "--host", "fd00::7") == 0
    shard = ClientConfig.load(tmp_path / "out" / "client.toml").shards[0]
    assert (shard.host, shard.metrics) == ("fd00::7", "http://[fd00::7]:7443")


def test_client_configurations_have_brackets_and_quotes(toml: Path) -> None:
    config = Config.load(toml)
    listen = replace(config.listen, metrics_host="::1", unix_dir=Path('/run/a"b\\c'))
    text = client_toml(
        replace(config, listen=listen), files=('c"', "k\\", "ca\t"), host="h", ports=(1, 2, 3)
    )
    found = tomllib.loads(text)
    assert (found["cert"], found["key"], found["ca"]) == ('c"', "k\\", "ca\t")
    assert found["shards"][0]["metrics"] == "http://[::1]:3"
    assert found["shards"][0]["admin_socket"] == '/run/a"b\\c/admin.sock'


@pytest.mark.parametrize(
    ("number", "fix"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only"), (13, "root")]
)
def test_a_disk_that_takes_nothing_is_told_from_a_wrong_user(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    number: int, fix: str,
) -> None:  # fmt: skip
    def refused(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(setup_command, "_certify", refused)
    assert run(toml, "certify", "acme", toml.parent / "acme") == 1
    err = capsys.readouterr().err
    assert err.startswith(f"entresold: {toml.parent / 'acme'}: {os.strerror(number)}")
    assert fix in err.splitlines()[-1]
