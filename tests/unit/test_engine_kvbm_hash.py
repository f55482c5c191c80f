"""KVBM's hashes as KVBM computes them, and engine keys that survive a collision in them."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("xxhash", reason="not run here: no xxhash package")

from entresol_client.engines import kvbm_hash
from entresol_client.engines.kvbm_hash import KEY_BYTES, KeyChain, kvbm_hash_of, sequence_hashes
from entresol_proto import limits

# What KVBM 1.6.1 published for these tokens in blocks of 16.
TOKENS = list(range(1000, 1064))
SEQUENCE_HASHES = [
    1845253123029646477,
    3294850137691938561,
    15035333454308340348,
    11213546252473844740,
]


def keys(tokens: list[int], block_tokens: int = 16, **salts: str) -> list[bytes]:
    chain = KeyChain(block_tokens, **salts)
    chain.extend(tokens)
    return chain.keys


def test_sequence_hashes_are_kvbms() -> None:
    assert sequence_hashes(TOKENS, 16) == SEQUENCE_HASHES


def test_a_key_begins_with_kvbms_hash() -> None:
    assert [kvbm_hash_of(key) for key in keys(TOKENS)] == SEQUENCE_HASHES
    assert {len(key) for key in keys(TOKENS)} == {KEY_BYTES}
    assert KEY_BYTES <= limits.ENGINE_KEY_BYTES_MAX


def test_a_sequence_that_grows_has_the_keys_of_the_whole() -> None:
    rng = random.Random(5)
    tokens = [rng.randrange(2**32) for _ in range(163)]
    chain = KeyChain(16)
    at = 0
    while at < len(tokens):
        at = min(len(tokens), at + rng.randrange(1, 40))
        assert chain.extend(tokens[:at]) == at // 16
    assert chain.keys == keys(tokens)


def test_extend_stops_where_it_is_told() -> None:
    chain = KeyChain(16)
    assert chain.extend(TOKENS, 1) == 1
    assert chain.extend(TOKENS, 99) == 4
    assert chain.keys == keys(TOKENS)


def test_every_token_before_a_block_changes_its_key() -> None:
    plain = keys(TOKENS)
    for at in range(0, 64, 7):
        other = list(TOKENS)
        other[at] += 1
        changed = keys(other)
        assert changed[: at // 16] == plain[: at // 16]
        assert not set(changed[at // 16 :]) & set(plain)


def test_a_collision_of_kvbms_hash_is_none_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvbm_hash, "_xxh3_64", lambda: lambda raw, seed: 42)
    mine, theirs = keys(TOKENS), keys([one + 1 for one in TOKENS])
    assert {kvbm_hash_of(key) for key in mine + theirs} == {42}
    assert not set(mine) & set(theirs)


@pytest.mark.parametrize(
    "salts",
    [{"salt": "a"}, {"lora_name": "a"}, {"salt": "a", "lora_name": "a"}, {"private_salt": "a"}],
)
def test_salts_change_every_key(salts: dict[str, str]) -> None:
    assert not set(keys(TOKENS, **salts)) & set(keys(TOKENS))
    assert not set(keys(TOKENS, **salts)) & set(keys(TOKENS, **dict.fromkeys(salts, "b")))


def test_a_private_salt_is_not_kvbms() -> None:
    assert [kvbm_hash_of(key) for key in keys(TOKENS, private_salt="a")] == SEQUENCE_HASHES


def test_salt_json_is_compact_and_keeps_its_characters() -> None:
    assert kvbm_hash.salt_json() == b"{}"
    assert kvbm_hash.salt_json("s", "l") == b'{"salt":"s","lora_name":"l"}'
    assert kvbm_hash.salt_json("ü") == '{"salt":"ü"}'.encode()


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_what_is_no_token_ends_the_keys(bad: int) -> None:
    tokens = list(TOKENS)
    tokens[20] = bad
    assert len(keys(tokens)) == 1


def test_parents_are_the_keys_before() -> None:
    chain = KeyChain(16)
    chain.extend(TOKENS)
    assert [chain.parent(index) for index in range(4)] == [None, *chain.keys[:3]]
