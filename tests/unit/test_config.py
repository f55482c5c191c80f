"""The configuration: every refusal says what to write instead, and the page matches the code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_daemon.config import FABRICS, Config
from entresol_daemon.config_reference import reference_markdown, reference_path, to_toml
from entresol_daemon.config_values import (
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    settings_of,
)
from entresol_proto.status import ConfigError

TLS = '[tls]\ncert = "c.pem"\nkey = "k.pem"\nca = "ca.pem"\n'


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "entresold.toml"
    path.write_text(text)
    return Config.load(path)


def test_a_small_file_loads_and_relative_paths_belong_to_its_folder(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        TLS
        + """
[keys]
kek_file = "$CREDENTIALS_DIRECTORY/kek"
[flash]
path = "/dev/nvme0n1"
size_bytes = "1.5TiB"
group_commit_ns = "2500us"
[memory]
dram_bytes = 2147483648
[fabric]
enabled = ["tcp", "shm"]
[tenants]
auto_add = true
[admission]
drive_writes_per_day = 1
""",
    )
    assert config.tls.cert == tmp_path / "c.pem"
    assert str(config.keys.kek_file) == "$CREDENTIALS_DIRECTORY/kek"
    assert config.flash_path == Path("/dev/nvme0n1")
    assert config.flash.size_bytes == 3 * 2**39
    assert config.flash.group_commit_ns == 2_500_000
    assert config.memory.dram_bytes == 2**31
    assert config.fabric.enabled == ("tcp", "shm")
    assert config.tenants.auto_add is True
    assert config.admission.drive_writes_per_day == 1.0
    assert config.checkpoint_path == config.shard.state_dir / "index.arrow"
    assert config.blocks_max(2**40) == 2**22
    assert config.sealing_threads >= 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[flash]\nsize_byts = "1GiB"', ["'size_byts'", "[flash]", "did you mean 'size_bytes'?"]),
        ("[flsh]\n", ["section [flsh]", "did you mean 'flash'?"]),
        ("naem = 1", ["setting 'naem'"]),
        ("[log]\nqqqq = 1", ["'qqqq'", "known here: format, level"]),
        ("flash = 3", ["[flash] is not a section"]),
        ("[flash]\nsize_bytes = true", ["size_bytes", "true is not a number"]),
        ('[flash]\nsize_bytes = "64 MB/s"', ["size_bytes", "not a size", "64MiB"]),
        ('[flash]\nsize_bytes = "1mib"', ["not a size"]),
        ("[flash]\nsize_bytes = 1.5", ["1.5 is not a size"]),
        ("[flash]\nsize_bytes = -1", ["-1 is below the smallest allowed, 0"]),
        ('[flash]\nsegment_bytes = "1GiB"', ["1GiB is above the largest allowed, 256MiB"]),
        ('[limits]\nlease_ns = "10"', ["lease_ns", "not a duration", "250ms"]),
        ('[limits]\nlease_ns = "1h"', ["1h is above the largest allowed, 10min"]),
        ('[limits]\nsessions_max = "many"', ["'many' is not a number"]),
        ("[limits]\nsessions_max = 0", ["0 is below the smallest allowed, 1"]),
        ("[listen]\ncontrol_port = 65536", ["65536 is above the largest allowed, 65535"]),
        ("[listen]\ncontrol_host = 7", ["7 is not text in quotes"]),
        ("[flash]\ndirect = true", ["true is not text in quotes: auto, on, off"]),
        ('[flash]\ndirect = "yes"', ["'yes' is not one of auto, on, off"]),
        ('[fabric]\nenabled = ["rdma"]', ["'rdma' is not one of shm, verbs, tcp"]),
        ('[fabric]\nenabled = ["tcp", "tcp"]', ["names something twice"]),
        ('[fabric]\nenabled = "tcp"', ["not a list"]),
        ('[tenants]\nauto_add = "yes"', ["'yes' is not true or false"]),
        ("[admission]\ndrive_writes_per_day = nan", ["not a usable number"]),
        ("[admission]\ndrive_writes_per_day = inf", ["not a usable number"]),
        ('[tls]\ncert = ""', ["the path is empty"]),
        # Nobody expands these: they would be folders of that name, wherever the daemon starts.
        ('[flash]\npath = "$HOME/flash"', ["path", "begins with $"]),
        ('[keys]\nkek_file = "$HOME/kek"', ["kek_file", "begins with $"]),
        ('[sandbox]\nwritable = ["$HOME"]', ["writable", "begins with $"]),
        ('[shard]\nstate_dir = "~/state"', ["state_dir", "'~/state' begins with ~"]),
        ('[sandbox]\nwritable = ["~"]', ["writable", "begins with ~"]),
        ('[flash]\ncodec = "auto"', ["setting 'codec' in [flash]", "it belongs to [sealing]"]),
        ('size_bytes = "1GiB"', ["setting 'size_bytes'", "it belongs to [flash]"]),
        ('[sandbox]\nwritable = ["/x", ""]', ["writable", "the path is empty"]),
        ("[log", ["not valid TOML"]),
        # Found by fuzzing: each had ended in a traceback.
        ("[flash]\nblocks_max = " + "9" * 400, ["more than 64 bits"]),
        ("[admission]\ndrive_writes_per_day = " + "9" * 400, ["more than 64 bits"]),
        ('[flash]\nsize_bytes = "' + "9" * 400 + 'TiB"', ["more than 64 bits"]),
        ("[flash]\nblocks_max = " + "9" * 5_000, ["not valid TOML"]),
        ("[flash]\nblocks_max = " + "[" * 2_000, ["not valid TOML"]),
    ],
)
def test_refusals_name_file_key_and_fix(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    for part in ["entresold.toml", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "[tls] cert, key, ca are not set"),
        ('[tls]\ncert = "a"\nca = "b"', "[tls] key is not set"),
        (TLS + '[shard]\nname = "Not OK"', "[shard] name"),
        (TLS.replace("[tls]", '[tls]\ntrust_domain = "spiffe://x"'), "[tls] trust_domain"),
        (TLS + '[flash]\nsegment_bytes = 67108865\nsize_bytes = "1GiB"', "multiple of 4KiB"),
        (TLS + '[flash]\nsize_bytes = "319MiB"', "less than 5 segments of 64MiB (320MiB or more"),
        (TLS + '[memory]\nslab_bytes = "33MiB"', "multiple of 2MiB"),
        (TLS + '[memory]\ndram_bytes = "32MiB"', "less than two slabs"),
        (TLS + '[memory]\ndram_bytes = "17GiB"', "more than 512 slabs"),
        (TLS + '[memory]\nopened_bytes = "31MiB"', "opened_bytes is less than a slab"),
        (TLS + '[limits]\nblock_bytes_max = "17MiB"', "block_bytes_max is over half a slab"),
        (TLS + '[limits]\ninflight_bytes_per_session_max = "1MiB"', "below block_bytes_max"),
        (TLS + "[fabric]\nenabled = []", "enabled is empty"),
        (TLS + '[listen]\ncontrol_host = ""', "control_host is empty"),
        (TLS + '[listen]\ngrpc_host = ""', "grpc_host is empty"),
        (TLS + '[listen]\ndata_host = ""', "data_host is empty"),
        (TLS + '[listen]\nmetrics_host = ""', "metrics_host is empty"),
        (TLS + f'[listen]\ncontrol_host = "{"a" * 64}.com"', "no address and no host name"),
        (TLS + '[listen]\ncontrol_host = "10.0.0.256"', "no address and no host name"),
        (TLS + '[listen]\ndata_advertise = "not an address"', "no address and no host name"),
        (TLS + '[listen]\ndata_advertise = "10.0.0.1:7442"', "no address and no host name"),
        (TLS + '[listen]\ndata_advertise = "0.0.0.0"', "nobody can connect to 0.0.0.0"),
        (TLS + '[listen]\ndata_advertise = "::"', "nobody can connect to ::"),
        (TLS + "[listen]\ncontrol_port = 7441", "control_port and grpc_port are both 7441"),
        (
            TLS + '[listen]\nmetrics_host = "0.0.0.0"\nmetrics_port = 7440',
            "control_port and metrics_port are both 7440",
        ),
        (TLS + f'[listen]\nunix_dir = "/{"u" * 95}"', "too long for a socket"),
        (TLS + f'[fabric]\nshm_dir = "/{"u" * 96}"', "too long for a socket"),
        (TLS + '[sealing]\nchunk_bytes = "8KiB"', "block_bytes_max is over 1024 chunks"),
    ],
)
def test_contradictions_refuse_to_start(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        TLS + '[listen]\ncontrol_host = "::1"\ngrpc_host = "fe80::1%eth0"\ndata_host = "kv-1.pod"',
        TLS + '[listen]\ncontrol_host = "10.0.0.1"\ngrpc_host = "10.0.0.2"\ngrpc_port = 7440',
        TLS + "[listen]\ncontrol_port = 0\ngrpc_port = 0\ndata_port = 0\nmetrics_port = 0",
        TLS + '[fabric]\nenabled = ["shm"]\n[listen]\ndata_port = 7440',
        TLS + f'[listen]\nunix_dir = "/{"u" * 94}"',
        TLS + '[sealing]\nchunk_bytes = "16KiB"',
    ],
)
def test_what_is_just_inside_starts(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)


def test_writable_folders_belong_to_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, TLS + '[sandbox]\nwritable = ["traces", "/srv/x"]')
    assert config.sandbox.writable == (str(tmp_path / "traces"), "/srv/x")


def test_files_that_are_no_text_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        Config.load(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_bytes(b'[log]\nlevel = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8 text at byte 15"):
        Config.load(tmp_path / "x.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="longer than"):
        Config.load(tmp_path / "big.toml")
    (tmp_path / "deep.toml").write_text("x = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.load(tmp_path / "deep.toml")


def test_nothing_listens_on_all_interfaces_by_default() -> None:
    listen = Config().listen
    hosts = [value for name, value in dataclasses.asdict(listen).items() if name.endswith("_host")]
    assert hosts == ["127.0.0.1"] * 4


def test_dev_settings_can_start_and_stay_in_their_folder(tmp_path: Path) -> None:
    config = Config.dev(tmp_path)
    config.check()
    assert config.tenants.auto_add
    assert config.flash.size_bytes == 2**30
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for item in dataclasses.fields(values):
            value = getattr(values, item.name)
            if isinstance(value, Path):
                assert value.is_relative_to(tmp_path), (section.name, item.name)


@pytest.mark.parametrize("comments", [True, False])
def test_printed_configuration_reads_back_the_same(tmp_path: Path, comments: bool) -> None:
    for config in (Config(), Config.dev(tmp_path / 'a "quoted" \\ näme')):
        text = to_toml(config, comments=comments)
        assert Config.parse(text, tmp_path / "x.toml") == config


def test_defaults_are_inside_their_own_ranges() -> None:
    # Printing and reading back runs every default through the checks of its setting.
    config = Config()
    assert Config.parse(to_toml(config), Path("/x/y.toml")) == config


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ('[flash]\nsize_bytes = "1gib"', "did you mean '1GiB'?"),
        ('[flash]\nsize_bytes = "4gib"', "did you mean '4GiB'?"),
        ('[flash]\nsize_bytes = "1.5tb"', "did you mean '1.5TB'?"),
        ('[flash]\nsize_bytes = "100 MIB"', "did you mean '100MiB'?"),
        ('[limits]\nlease_ns = "10 sec"', "did you mean '10s'?"),
        ('[limits]\nlease_ns = "5m"', "did you mean '5min'?"),
        ('[limits]\nlease_ns = "250MS"', "did you mean '250ms'?"),
        ('[flash]\nsize_bytes = "many"', "what it is: "),
        ('[flash]\nsize_bytes = "3 apples"', "what it is: "),
        ("[flash]\nsize_bytes = -1", "what it is: "),
        ('[log]\nlevel = "loud"', "what it is: "),
    ],
)
def test_a_fix_is_one_or_says_what_the_setting_is(tmp_path: Path, setting: str, hint: str) -> None:
    """What a setting means was told as what to do."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, TLS + setting)
    assert caught.value.hint.startswith(hint), caught.value.hint


def test_paths_are_absolute_wherever_it_was_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts are told of the socket's place, and are in folders of their own."""
    load(tmp_path, TLS + '[listen]\nunix_dir = "run"\n[shard]\nstate_dir = "state"\n')
    monkeypatch.chdir(tmp_path)
    config = Config.load("entresold.toml")
    assert config.listen.unix_dir == tmp_path / "run"
    assert config.shard.state_dir == tmp_path / "state"
    assert config.tls.cert == tmp_path / "c.pem"


def test_every_setting_is_documented_and_the_page_is_current() -> None:
    for section in dataclasses.fields(Config):
        values = getattr(Config(), section.name)
        assert (type(values).__doc__ or "").strip()
        for item, about in settings_of(values):
            assert about.doc.endswith("."), (section.name, item.name)
            assert len(about.doc) < 120, (section.name, item.name)
    assert reference_path().read_text() == reference_markdown(), (
        "run: python -m entresol_daemon.config_reference"
    )


def test_the_tree_is_frozen() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.flash.size_bytes = 1  # type: ignore[misc]
    assert config.fabric.enabled == FABRICS


@given(st.integers(min_value=0, max_value=2**62))
def test_sizes_and_durations_round_trip(value: int) -> None:
    shown = format_size(value)
    assert (int(shown) if shown.isdigit() else parse_size(shown)) == value
    assert parse_duration(format_duration(value)) == value


@pytest.mark.parametrize("text", ["", "1", "ns", "1 fortnight", "-1s", "1.0000000001s", "1e3s"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|whole number"):
        parse_duration(text)
