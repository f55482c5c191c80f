"""Client configuration: what is read, what is refused and how it says so, where it is found."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from entresol_client.config import (
    CONFIG_ENV,
    CONFIG_FILE_BYTES_MAX,
    BreakerSettings,
    ClientConfig,
    ShardAddress,
    TlsFiles,
    default_paths,
)
from entresol_proto.status import ConfigError

MINIMAL = """
cert = "tenant.pem"
key = "/keys/tenant.key"
ca = "ca.pem"
[[shards]]
name = "shard0"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "client.toml"
    path.write_text(text)
    return path


def test_minimal_file_and_defaults(tmp_path: Path) -> None:
    config = ClientConfig.load(write(tmp_path, MINIMAL))
    assert config.shards == (ShardAddress("shard0", "127.0.0.1", 7440),)
    assert config.tls == TlsFiles(
        tmp_path / "tenant.pem", Path("/keys/tenant.key"), tmp_path / "ca.pem", "entresol.local"
    )
    assert config.fabric == "auto"
    assert config.deadline_ns == 5_000_000_000
    assert config.breaker == BreakerSettings()


def test_every_setting_with_units(tmp_path: Path) -> None:
    text = """
    cert = "c"
    key = "k"
    ca = "a"
    trust_domain = "pod.example"
    fabric = "tcp"
    fallback = false
    deadline_ns = "250ms"
    connect_deadline_ns = "2 s"
    ping_interval_ns = 500000000
    ping_deadline_ns = "300ms"
    open_threads = 8
    staging_bytes_max = "1GiB"
    [breaker]
    failures_to_open = 5
    cooldown_ns_min = "100ms"
    cooldown_ns_max = "1min"
    [[shards]]
    name = "a"
    host = "10.0.0.1"
    port = 7000
    weight = 2
    grpc_port = 7001
    admin_socket = "/run/entresol/admin.sock"
    metrics = "http://10.0.0.1:7003"
    [[shards]]
    name = "b"
    """
    config = ClientConfig.load(write(tmp_path, text))
    assert config == ClientConfig(
        shards=(
            ShardAddress(
                "a", "10.0.0.1", 7000, 2.0, 7001, Path("/run/entresol/admin.sock"),
                "http://10.0.0.1:7003",
            ),
            ShardAddress("b"),
        ),
        tls=TlsFiles(tmp_path / "c", tmp_path / "k", tmp_path / "a", "pod.example"),
        fabric="tcp",
        fallback=False,
        deadline_ns=250_000_000,
        connect_deadline_ns=2_000_000_000,
        ping_interval_ns=500_000_000,
        ping_deadline_ns=300_000_000,
        open_threads=8,
        staging_bytes_max=1 << 30,
        breaker=BreakerSettings(5, 100_000_000, 60_000_000_000),
    )  # fmt: skip
    assert type(config.shards[0].weight) is float


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("fabrik = 'shm'", "did you mean 'fabric'"),
        ("deadline = 5", "did you mean 'deadline_ns'"),
        ("zzz = 1", "known are"),
        ("fabric = 'ship'", "did you mean 'shm'"),
        ("fabric = 5", "not text in quotes"),
        ("fallback = 'no'", "not true or false"),
        ("deadline_ns = '5 parsecs'", "a number with one of"),
        ("deadline_ns = 0", "allowed are"),
        ("deadline_ns = 1.5", "not a whole number"),
        ("deadline_ns = true", "not a number"),
        ("staging_bytes_max = '10s'", "is not a size"),
        ("staging_bytes_max = '1KiB'", "allowed are"),
        ("open_threads = 65", "open_threads is 65"),
        ("open_threads = '2s'", "is not a number"),
        ("trust_domain = 'A B'", "trust domain"),
        ("cert = ''", "not text in quotes"),
        ("tenant_key = '~/tenant.key'", "begins with ~"),
        ("tenant_key = '$HOME/tenant.key'", "begins with $"),
        ("breaker = 3", "is not a table"),
        ("[breaker]\nfailures = 3", "did you mean 'failures_to_open'"),
        ("[breaker]\ncooldown_ns_min = '20s'", "above cooldown_ns_max"),
        ("[[shards]]\nname = 'shard0'", "same name"),
        ("[[shards]]\nname = 'Bad Name'", "shard name 'Bad Name' is not allowed (use 1"),
        ("[[shards]]\nhost = 'h'", "name must be given in"),
        ("[[shards]]\nname = 'x'\nprot = 1", "did you mean 'port'"),
        ("[[shards]]\nname = 'x'\nport = 65536", "port is 65536"),
        ("[[shards]]\nname = 'x'\nweight = 0", "weight is 0"),
        ("[[shards]]\nname = 'x'\nhost = 'a..b'", "no host name, one of"),
        ("this is not toml", "not TOML"),
    ],
)
def test_mistakes_are_refused_with_a_hint(tmp_path: Path, extra: str, expected: str) -> None:
    text = MINIMAL + extra if extra.startswith("[") else extra + MINIMAL
    if extra.startswith("cert"):
        text = extra + MINIMAL.replace('cert = "tenant.pem"', "")
    with pytest.raises(ConfigError, match=r"client\.toml") as e:
        ClientConfig.load(write(tmp_path, text))
    assert expected in str(e.value)


@pytest.mark.parametrize(
    "text", ["", "cert='c'\nkey='k'\nca='a'", "cert='c'\n[[shards]]\nname='x'"]
)
def test_what_must_be_given(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"client\.toml: .*(must be given|0 shards)") as caught:
        ClientConfig.load(write(tmp_path, text))
    assert any(way in caught.value.hint for way in ("certify", "[[shards]]"))


def test_the_file_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read") as caught:
        ClientConfig.load(tmp_path / "absent.toml")
    assert "`entresold --dev` writes one" in caught.value.hint
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(ConfigError, match="larger than"):
        ClientConfig.load(huge)


def test_where_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "config", "named"):
        (tmp_path / name / "entresol").mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    paths = default_paths()
    assert [path.parent.parent for path in paths] == [
        tmp_path / "run", tmp_path / "config", Path("/etc"),
    ]  # fmt: skip
    if not paths[2].exists():
        with pytest.raises(ConfigError, match="no client config found") as error:
            ClientConfig.find()
        assert str(paths[0]) in str(error.value)
    for number in (1, 0):  # the runtime folder goes before the user's
        paths[number].write_text(MINIMAL.replace("shard0", f"found{number}"))
        assert ClientConfig.find().shards[0].name == f"found{number}"
    monkeypatch.setenv(CONFIG_ENV, str(write(tmp_path / "named", MINIMAL)))
    assert ClientConfig.find().shards[0].name == "shard0"
    assert ClientConfig.find(paths[1]).shards[0].name == "found1"


def test_who_has_no_home_or_may_not_look_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Had ended in tracebacks: a container's user without a home, another's folder after `su`."""
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("n" * 300)))  # what stat() refuses

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    paths = default_paths()
    assert [path.parent.parent for path in paths] == [tmp_path / ("n" * 300), Path("/etc")]
    if not paths[1].exists():
        with pytest.raises(ConfigError, match="no client config found"):
            ClientConfig.find()


def test_a_pointer_leads_to_files_beside_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    target = write(tmp_path / "dev", MINIMAL)
    pointer = tmp_path / "entresol" / "client.toml"
    pointer.parent.mkdir()
    pointer.symlink_to(target)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    assert ClientConfig.find().tls.cert == tmp_path / "dev" / "tenant.pem"


def test_every_setting_is_documented() -> None:
    text = (Path(__file__).parents[2] / "client" / "README.md").read_text()
    for part in (ClientConfig, TlsFiles, BreakerSettings, ShardAddress):
        for item in dataclasses.fields(part):
            if item.name not in ("shards", "tls", "breaker"):
                assert f"`{item.name}`" in text, f"{item.name} is not in client/README.md"


@pytest.mark.parametrize(
    "extra",
    ["deadline_ns = " + "9" * 400, "deadline_ns = " + "9" * 5_000, "fabric = " + "[" * 2_000,
     "deadline_ns = '" + "9" * 400 + "s'", "verbs_devices = " + "[" * 500 + "]" * 500],
)  # fmt: skip
def test_what_had_ended_in_a_traceback(tmp_path: Path, extra: str) -> None:
    """Found by fuzzing (target client_config, seed 1960 and others)."""
    with pytest.raises(ConfigError):
        ClientConfig.load(write(tmp_path, extra + MINIMAL))


def test_a_weight_beyond_any_float_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="64 bits"):
        ClientConfig.load(write(tmp_path, MINIMAL + "weight = " + "9" * 400 + "\n"))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("fifo", "not a regular file"),
        ("endless", "not a regular file"),
        ("folder", "directory|not a regular file"),
        ("nul", "null byte|null character"),
        ("long", "larger than"),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(
    kind: str, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "client.toml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "nul":
        path = tmp_path / "client\0.toml"
    else:
        path.write_bytes(b"#" * (CONFIG_FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match=told):
        ClientConfig.load(path)
