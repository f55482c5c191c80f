"""What people and engines write: TOML of the daemon and of the client, settings and requests in
JSON, words on a command line, the head of a stored file.

Whatever is written there, the answer is one of our errors with a text for people, never a
traceback.
"""

from __future__ import annotations

import argparse
import functools
import json
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

from entresol_client import config as client_config
from entresol_client.cli import events, objects, options
from entresol_client.cli.objects import Head
from entresol_client.config import ClientConfig
from entresol_client.engines import asker, naming, settings
from entresol_client.engines.asker import ParamsError
from entresol_client.engines.kvbm_space import KvbmSettings
from entresol_client.engines.settings import EngineSettings
from entresol_client.relay import workers
from entresol_client.tenant_key import KeyVersion, TenantKey
from entresol_daemon import config as daemon_config
from entresol_daemon.config import Config
from entresol_daemon.config_reference import to_toml
from entresol_daemon.config_values import settings_of
from entresol_proto.status import ConfigError, EntresolError, KeyringError
from tests.fuzz.mutate import mutate_tree, to_json
from tests.fuzz.target import Parser, Scratch, Target

TOML_WORDS = (
    b"[", b"]", b"[[", b"]]", b"=", b'"', b'"""', b"'", b"\n", b",", b"{", b"}", b"#", b"true",
    b"1_000", b"0x7f", b"1e400", b"nan", b"-inf", b"1979-05-27T07:32:00Z", b"9" * 400,
    b"[" * 600, b"{a=" * 100, b"64MiB", b"10s", b"\\u0000", b"\\uD800", b"\xff",
)  # fmt: skip


# TOML ---------------------------------------------------------------------------------------------


@functools.cache
def daemon_seeds() -> list[bytes]:
    """Nothing, the full reference, one setting of each kind."""
    whole = to_toml(Config(), comments=False)
    parts = [part[:400] for part in whole.split("\n\n")]
    small = (
        '[shard]\nname = "pod-7"\nstate_dir = "state"\n[tls]\ncert = "c.pem"\nkey = "k.pem"\n'
        'ca = "ca.pem"\nsession_age_max_ns = "1h"\n[flash]\nsize_bytes = "1TiB"\ndirect = "off"\n'
        '[fabric]\nenabled = ["shm", "tcp"]\ntcp_tls = true\n[admission]\n'
        "drive_writes_per_day = 0.5\n[listen]\ngrpc_port = 0\n"
    )
    return [b"", small.encode(), *(part.encode() for part in parts if "=" in part)][:40]


@functools.cache
def _settings() -> tuple[tuple[str, str], ...]:
    found = []
    for section, cls in daemon_config._SECTIONS.items():
        found += [(section, item.name) for item, _ in settings_of(cls)]
    return tuple(found)


ODD_TOML = (
    "0", "-1", "1", "true", "0.5", "1e308", "inf", "nan", "9" * 400, '""', '"x"', '"64MiB"', '"2h"',
    '"1.5s"', '"0.1ns"', '"99999999999999999999TiB"', "[]", '["tcp"]', '["tcp", "tcp"]', "[1]",
    '"a\\u0000b"', "{}", "2024-01-01", '"' + "9" * 5_000 + 's"', "[" * 200 + "]" * 200,
    '"/dev/null"', '"$CREDENTIALS_DIRECTORY/kek"', "9223372036854775808",
)  # fmt: skip


def a_daemon_config(rng: Random) -> bytes:
    """Known settings with odd values."""
    lines: dict[str, list[str]] = {}
    if rng.random() < 0.9:  # without certificates none of them can start
        lines["tls"] = ['cert = "c"', 'key = "k"', 'ca = "a"']
    for _ in range(rng.randint(1, 4)):
        section, name = rng.choice(_settings())
        lines.setdefault(section, []).append(f"{name} = {rng.choice(ODD_TOML)}")
    return "\n".join(f"[{name}]\n" + "\n".join(rows) for name, rows in lines.items()).encode()


def daemon_config_parser() -> Parser:
    """A configuration within its ranges, or a ConfigError that names the file."""
    file = Scratch("entresold.toml")

    def parse(raw: bytes) -> str:
        try:
            found = Config.load(file.holds(raw))
        except ConfigError as error:
            refusal = str(error)
        else:
            refusal = ""
        if refusal:
            assert "entresold.toml" in refusal
            return f"refused {_kind(refusal)}"
        for section in daemon_config._SECTIONS:
            part = getattr(found, section)
            for item, about in settings_of(part):
                value = getattr(part, item.name)
                if isinstance(value, (int, float)) and about.low is not None:
                    assert about.low <= value, f"{section}.{item.name} is {value}"
                if isinstance(value, (int, float)) and about.high is not None:
                    assert value <= about.high, f"{section}.{item.name} is {value}"
        return "ok"

    return parse


def _kind(text: str) -> str:
    """The few words that tell refusals apart."""
    for word in ("TOML", "unknown", "below", "above", "not a", "not one of", "UTF-8", "given"):
        if word in text:
            return word
    return "other"


def client_seeds() -> list[bytes]:
    """The least, and everything."""
    least = 'cert = "c"\nkey = "k"\nca = "a"\n[[shards]]\nname = "dev"\n'
    more = (
        'cert = "c"\nkey = "k"\nca = "a"\ntrust_domain = "pod"\nfabric = "tcp"\nfallback = false\n'
        'verbs_devices = ["mlx5_0"]\nverbs_mtu_bytes = 1024\ndeadline_ns = "5s"\n'
        'staging_bytes_max = "96MiB"\n[breaker]\nfailures_to_open = 3\n[[shards]]\nname = "a"\n'
        'host = "10.0.0.1"\nport = 7440\nweight = 0.5\nmetrics = "http://127.0.0.1:1"\n'
        '[[shards]]\nname = "b"\ngrpc_port = 7441\nadmin_socket = "/run/x"\n'
    )
    return [least.encode(), more.encode()]


def a_client_config(rng: Random) -> bytes:
    """Known settings with odd values."""
    names = ("deadline_ns", "staging_bytes_max", "fabric", "fallback", "verbs_devices", "breaker",
             "verbs_mtu_bytes", "open_threads", "trust_domain", "shards", "cert")  # fmt: skip
    rows = [f"{rng.choice(names)} = {rng.choice(ODD_TOML)}"]
    shard = rng.choice(("port", "weight", "name", "admin_socket", "host", "metrics"))
    tail = f"[[shards]]\nname = 'x'\n{shard} = {rng.choice(ODD_TOML)}\n"
    head = 'cert = "c"\nkey = "k"\nca = "a"\n' if rng.random() < 0.9 else ""
    return (head + "\n".join(rows) + "\n" + tail).encode()


def client_config_parser() -> Parser:
    """A usable configuration, or a ConfigError."""
    file = Scratch("client.toml")

    def parse(raw: bytes) -> str:
        try:
            found = ClientConfig.load(file.holds(raw))
        except ConfigError as error:
            return f"refused {_kind(str(error))}"
        assert 1 <= len(found.shards) <= client_config.SHARDS_MAX
        assert all(0.001 <= shard.weight <= 1000 for shard in found.shards)
        assert all(type(shard.port) is int for shard in found.shards)
        return "ok"

    return parse


def _without_ranges() -> AbstractContextManager[object]:
    from entresol_daemon import config_values

    return patch.object(config_values, "_in_range", lambda value, about: value)


def _without_checks() -> AbstractContextManager[object]:
    return patch.object(client_config, "_check", lambda config: None)


# The tenant's own key file ------------------------------------------------------------------------


def tenant_key_seeds() -> list[bytes]:
    """One version, and two."""
    keys = [bytes(range(n, n + 32)) for n in (0, 40, 80)]
    one = TenantKey(keys[0], {1: KeyVersion(5, keys[1])})
    return [
        one.encode(),
        replace(one, versions={**one.versions, 7: KeyVersion(6, keys[2])}).encode(),
    ]


def tenant_key_parser() -> Parser:
    """Keys that could be used, or a refusal that shows none of them."""

    def parse(raw: bytes) -> str:
        try:
            found = TenantKey.decode(raw)
        except KeyringError as error:
            return f"refused {_kind(str(error))}"
        assert TenantKey.decode(found.encode()) == found
        assert len(found.naming) == 32
        assert found.active in found.versions
        return f"ok {min(len(found.versions), 3)}"

    return parse


def _any_key_file() -> AbstractContextManager[object]:
    return patch.object(TenantKey, "__post_init__", lambda self: None)


# Engines ------------------------------------------------------------------------------------------


def engine_seeds() -> list[bytes]:
    """Settings of an engine, and what a request may say."""
    full = {"config": "/etc/entresol/client.toml", "tenants": {"a": "/etc/a.toml"}, "durable": True,
            "lookup_deadline_ms": 100, "open_at": "daemon", "weights": "off",
            "stores_in_flight_max": 4}  # fmt: skip
    listed: list[dict[str, Any]] = [
        {}, full, {"entresol": {"tenant": "a", "salt": "b"}}, {"entresol": {}}, {"entresol": None},
        {"entresol": {"salt": "s" * 512}}, {"other": 1},
    ]  # fmt: skip
    return [to_json(one) for one in listed]


def a_setting(rng: Random) -> bytes:
    """One of them, wrong somewhere."""
    return to_json(mutate_tree(rng, json.loads(rng.choice(engine_seeds()))))


def engines_parser() -> Parser:
    """ConfigError for settings, ParamsError for requests, or something that can be used."""

    def parse(raw: bytes) -> str:
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            return "no JSON"  # the engine's own reader says so
        outcome = []
        if isinstance(found, dict):
            for kind in (EngineSettings, KvbmSettings):
                try:
                    made = kind.from_mapping(found, where="extra_config", also=frozenset({"type"}))
                    assert 1 <= made.stores_in_flight_max <= 64
                    outcome.append("settings")
                except ConfigError:
                    outcome.append("refused")
        try:
            who = asker.who_asks(found)
            assert len(naming.salted(b"k" * 32, who.salt)) in (32, 48)
            assert len(who.tenant) <= asker.SALT_CHARS_MAX
            outcome.append("who" if who.tenant or who.salt else "nobody")
        except ParamsError:
            outcome.append("refused")
        return " ".join(outcome)

    return parse


def _any_setting(self: EngineSettings) -> None:
    return None


# Words on a command line, heads of files ----------------------------------------------------------

_SIZE, _TIME, _BLOCK, _KEY, _NAME, _WORKER, _PLACE, _HEAD = range(8)
WORD_SEEDS = (
    (_SIZE, "4GiB"), (_SIZE, "1.5M"), (_TIME, "500ms"), (_TIME, "2min"), (_BLOCK, "1MiB"),
    (_KEY, "00112233445566778899aabbccddeeff"), (_KEY, "text:session-42"), (_KEY, "0x" + "ab" * 64),
    (_NAME, "notes"), (_WORKER, "pod-0=tcp://127.0.0.1:5557,replay=5558,dp=3"),
    (_WORKER, "p=ipc:///tmp/x,connect"), (_PLACE, "00000000000000ff:17"), (_PLACE, "17"),
)  # fmt: skip


def word_seeds() -> list[bytes]:
    """`u8 which`, then the word."""
    head = Head(1_000_000, 65_536, b"s" * 32, b"k" * 32).encode()
    return [*(bytes([which]) + text.encode() for which, text in WORD_SEEDS), bytes([_HEAD]) + head]


def words_parser() -> Parser:
    """One of the errors that the command line turns into a message, or a value in range."""

    def parse(raw: bytes) -> str:
        which = raw[0] % 8 if raw else 0
        text = raw[1:].decode(errors="surrogateescape")  # as the interpreter hands arguments over
        try:
            return f"{which} {_word(which, text, raw[1:])}"
        except (EntresolError, argparse.ArgumentTypeError):
            return f"{which} refused"

    return parse


def _word(which: int, text: str, raw: bytes) -> str:
    if which == _SIZE:
        assert options.parse_size(text) >= 0
    elif which == _TIME:
        assert 0 < options.parse_span_ns(text) <= 600 * 10**9
    elif which == _BLOCK:
        assert 1 <= options.parse_block_size(text) <= 64 << 20
    elif which == _KEY:
        assert 8 <= len(objects.parse_key(text)) <= 64
    elif which == _NAME:
        assert len(objects.name_key(text)) == 32
    elif which == _WORKER:
        found = workers.parse_worker(text)
        workers.check_workers([found])
        return f"worker {found.open_to_others}"
    elif which == _PLACE:
        assert events._parse_place(text, 1).seq >= 0
    else:
        head = Head.decode(raw[: objects.HEAD_BYTES].ljust(objects.HEAD_BYTES, b"\0"))
        assert head.blocks <= objects.BLOCKS_PER_FILE_MAX
        assert sum(head.list_length(n) for n in range(len(head.list_keys()))) == 32 * head.blocks
        return f"head {min(head.blocks, 2)}"
    return "ok"


def _any_key(text: str) -> bytes:
    return bytes.fromhex(text)


def _engines_fault() -> AbstractContextManager[object]:
    return patch.object(EngineSettings, "__post_init__", _any_setting)


assert settings.EngineSettings is EngineSettings

TARGETS = (
    Target(
        name="daemon_config", share=10, seeds=daemon_seeds, make=daemon_config_parser,
        generate=a_daemon_config, words=TOML_WORDS, bytes_max=700, alloc_bytes_max=2 << 20,
        canaries=(_without_ranges,),
        modules=("entresol_daemon.config", "entresol_daemon.config_values"),
    ),
    Target(
        name="client_config", share=15, seeds=client_seeds, make=client_config_parser,
        generate=a_client_config, words=TOML_WORDS, bytes_max=700, alloc_bytes_max=2 << 20,
        canaries=(_without_checks,), modules=("entresol_client.config",),
    ),
    Target(
        name="tenant_key", share=10, seeds=tenant_key_seeds, make=tenant_key_parser,
        words=(*TOML_WORDS, b"[[versions]]", b"version = 1", b"00" * 32, b"secret"), bytes_max=900,
        alloc_bytes_max=2 << 20, canaries=(_any_key_file,),
        modules=("entresol_client.tenant_key",),
    ),
    Target(
        name="engine_settings", share=40, seeds=engine_seeds, make=engines_parser,
        generate=a_setting, words=(b'"', b"{", b"}", b"\\ud800", b"null", b"1e400", b"NaN"),
        canaries=(_engines_fault,), alloc_bytes_max=1 << 20,
        modules=("entresol_client.engines.settings", "entresol_client.engines.asker"),
    ),
    Target(
        name="words", share=40, seeds=word_seeds, make=words_parser,
        words=(b"9" * 30, b"9" * 400, b".", b"KiB", b"ms", b"text:", b"0x", b"=", b",", b"tcp://",
               b"ipc://", b"replay=", b"dp=", b"connect", b":", b"\xed\xa0\x80"),
        canaries=(lambda: patch.object(objects, "parse_key", _any_key),),
        modules=("entresol_client.cli.options", "entresol_client.cli.objects",
                 "entresol_client.relay.workers"),
    ),
)  # fmt: skip
