"""Names: the canonical descriptor, everything derived from it, and the vectors on file.

`tests/vectors/ids.json` is what another implementation checks itself against. It is made by
`independent` below, which spells the bytes out and shares no code with `entresol_proto.ids`:

    python tests/unit/test_ids.py     # writes the file anew
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entresol_proto import ids, limits, naming
from entresol_proto.ids import BadKeyError, NamespaceDescriptor
from entresol_proto.status import Status

VECTORS = Path(__file__).resolve().parent.parent / "vectors" / "ids.json"
LABEL = b"entresol/ns/v1"
FIELDS = [field.name for field in dataclasses.fields(NamespaceDescriptor)]
INTEGERS = {"layers", "kv_heads", "head_dim", "block_tokens", "tp_rank", "tp_world", "pp_rank",
            "pp_world"}  # fmt: skip
OPTIONAL = {"lora", "cache_salt"}


# The vectors ------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"name": "only a model", "descriptor": {"model": "m"}},
    {
        "name": "a served model",
        "descriptor": {
            "model": "meta-llama/Llama-3.1-405B-Instruct", "model_revision": "be673f3",
            "dtype": "fp8_e4m3", "layers": 126, "kv_heads": 8, "head_dim": 128, "kv_order": "kv",
            "page_layout": "vllm:(2,blocks,16,8,128)", "block_tokens": 16, "tp_rank": 3,
            "tp_world": 8, "pp_rank": 0, "pp_world": 1,
        },
    },
    {"name": "salted", "descriptor": {"model": "m", "cache_salt": "blue", "lora": "adapter-7"}},
    {"name": "framing, left", "descriptor": {"model": "org_1", "model_revision": "2345"}},
    {"name": "framing, right", "descriptor": {"model": "org_12345", "model_revision": "x"}},
    {"name": "text beyond ASCII", "descriptor": {"model": "größe/模型", "cache_salt": "\u0000 é"}},
    {
        "name": "limits",
        "descriptor": {
            "model": "x" * 512, "layers": 2**32 - 1, "block_tokens": 2048, "tp_rank": 2**32 - 1,
        },
    },
]  # fmt: skip
TENANT_SECRETS = [bytes(range(32)), b"\xff" * 32]
ENGINE_KEYS = [
    bytes.fromhex("0123456789abcdef"),
    bytes(range(16)),
    hashlib.sha256(b"a vLLM block hash").digest() + bytes(4),
    b"\x80" * 64,
]
SHARDS = [b"dpu-0", b"dpu-1"]
DEFAULTS: dict[str, Any] = {
    "model": None, "model_revision": "main", "lora": None, "cache_salt": None, "dtype": "bf16",
    "layers": 0, "kv_heads": 0, "head_dim": 0, "kv_order": "kv", "page_layout": "opaque",
    "block_tokens": 16, "tp_rank": 0, "tp_world": 1, "pp_rank": 0, "pp_world": 1,
}  # fmt: skip


def independent(descriptor: dict[str, Any], tenant_secret: bytes) -> dict[str, Any]:
    """Everything derived from a descriptor, written out byte by byte."""
    canonical = bytearray(b"entresol/ns/v1")
    for number, (name, default) in enumerate(DEFAULTS.items(), start=1):
        value = descriptor.get(name, default)
        if value is None:
            continue
        canonical.append(number)
        if isinstance(value, int):
            canonical += b"\x01" + b"\x04\x00\x00\x00" + value.to_bytes(4, "little")
        else:
            raw = value.encode("utf-8")
            canonical += b"\x02" + len(raw).to_bytes(4, "little") + raw

    def blake(data: bytes, size: int, person: bytes, key: bytes = b"") -> bytes:
        padded = person + bytes(16 - len(person))  # BLAKE2b pads the personalisation with zeros
        return hashlib.blake2b(data, digest_size=size, key=key, person=padded).digest()

    digest = blake(bytes(canonical), 32, b"entresol-nsdig")
    secret = blake(bytes(canonical), 32, b"entresol-nssec", tenant_secret)
    return {
        "canonical": canonical.hex(),
        "digest": digest.hex(),
        "tenant_secret": tenant_secret.hex(),
        "namespace_id": blake(bytes(canonical), 16, b"entresol-nsid", tenant_secret).hex(),
        "namespace_secret": secret.hex(),
        "blocks": [
            {
                "engine_key": key.hex(),
                "wire_key": blake(key, 16, b"entresol-block", secret).hex(),
                "placement": {
                    shard.decode(): str(
                        int.from_bytes(blake(key + shard, 8, b"entresol-place", digest), "little")
                    )
                    for shard in SHARDS
                },
            }
            for key in ENGINE_KEYS
        ],
    }


def generate() -> dict[str, Any]:
    """The content of ids.json."""
    rows = []
    for number, case in enumerate(CASES):
        secret = TENANT_SECRETS[number % len(TENANT_SECRETS)]
        rows.append({**case, **independent(case["descriptor"], secret)})
    return {
        "about": "Descriptor fields that are left out have their defaults. Bytes are hex, "
        "placement scores are decimal text of u64. Described in proto/FORMAT.md.",
        "cases": rows,
    }


def on_file() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]
    return rows


def test_file_is_what_the_independent_implementation_gives() -> None:
    assert json.loads(VECTORS.read_text(encoding="utf-8")) == generate()


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: CASES[n]["name"])
def test_vectors(number: int) -> None:
    case = on_file()[number]
    descriptor = NamespaceDescriptor(**case["descriptor"])
    canonical = descriptor.canonical()
    tenant_secret = bytes.fromhex(case["tenant_secret"])
    assert canonical.hex() == case["canonical"]
    assert NamespaceDescriptor.parse(bytes.fromhex(case["canonical"])) == descriptor
    assert descriptor.digest().hex() == case["digest"]
    assert ids.namespace_id(tenant_secret, canonical).hex() == case["namespace_id"]
    secret = ids.namespace_secret(tenant_secret, canonical)
    assert secret.hex() == case["namespace_secret"]
    assert len(case["blocks"]) == len(ENGINE_KEYS)
    for block in case["blocks"]:
        key = ids.check_engine_key(bytes.fromhex(block["engine_key"]))
        assert ids.wire_key(secret, key).hex() == block["wire_key"]
        for shard, score in block["placement"].items():
            assert ids.placement_hash(descriptor.digest(), key, shard.encode()) == int(score)


def test_vectors_cover_every_engine_key_length_in_use() -> None:
    lengths = {len(block["engine_key"]) // 2 for case in on_file() for block in case["blocks"]}
    assert lengths >= {8, 16, 36, 64}


# The canonical form -------------------------------------------------------------------------------


def texts(bytes_max: int = 40) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8"), min_size=1, max_size=bytes_max // 4)


def descriptors() -> st.SearchStrategy[NamespaceDescriptor]:
    u32 = st.integers(0, 2**32 - 1)
    return st.builds(
        NamespaceDescriptor,
        model=texts(), model_revision=texts(), lora=st.none() | texts(),
        cache_salt=st.none() | texts(), dtype=texts(), layers=u32, kv_heads=u32, head_dim=u32,
        kv_order=texts(), page_layout=texts(),
        block_tokens=st.integers(1, limits.TOKENS_PER_BLOCK_MAX),
        tp_rank=u32, tp_world=u32, pp_rank=u32, pp_world=u32,
    )  # fmt: skip


@given(descriptors())
def test_parse_undoes_canonical(descriptor: NamespaceDescriptor) -> None:
    assert NamespaceDescriptor.parse(descriptor.canonical()) == descriptor


@given(descriptors(), descriptors())
def test_canonical_is_injective(one: NamespaceDescriptor, two: NamespaceDescriptor) -> None:
    assert (one == two) == (one.canonical() == two.canonical())


@given(descriptors(), st.sampled_from(FIELDS), st.data())
def test_any_changed_field_is_another_namespace(
    descriptor: NamespaceDescriptor, name: str, data: st.DataObject
) -> None:
    was = getattr(descriptor, name)
    if name == "block_tokens":
        values: st.SearchStrategy[Any] = st.integers(1, limits.TOKENS_PER_BLOCK_MAX)
    elif name in INTEGERS:
        values = st.integers(0, 2**32 - 1)
    else:
        values = texts() | st.none() if name in OPTIONAL else texts()
    changed = dataclasses.replace(
        descriptor, **{name: data.draw(values.filter(lambda value: value != was))}
    )
    secret = TENANT_SECRETS[0]
    for derive in (ids.namespace_id, ids.namespace_secret):
        assert derive(secret, descriptor.canonical()) != derive(secret, changed.canonical())
    assert descriptor.digest() != changed.digest()


def test_every_field_is_covered_here() -> None:
    """A new field must enter the defaults of the vectors, or its place in the form is untested."""
    assert list(DEFAULTS) == FIELDS
    assert NamespaceDescriptor("m") == NamespaceDescriptor(**{**DEFAULTS, "model": "m"})


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"model": "org_1", "model_revision": "2345"}, {"model": "org_12345", "lora": "x"}),
        ({"lora": "ab", "cache_salt": "c"}, {"lora": "a", "cache_salt": "bc"}),
        ({"lora": "a"}, {"cache_salt": "a"}),
        ({"dtype": "4"}, {"layers": 4}),
        ({"layers": 1, "kv_heads": 0}, {"layers": 0, "kv_heads": 1}),
        ({"tp_rank": 1, "tp_world": 2}, {"tp_rank": 2, "tp_world": 1}),
        ({"lora": "None"}, {}),
    ],
)
def test_fields_cannot_imitate_each_other(left: dict[str, Any], right: dict[str, Any]) -> None:
    one, two = (NamespaceDescriptor(**{"model": "m", **fields}) for fields in (left, right))
    assert one.canonical() != two.canonical()


def test_a_value_that_looks_like_a_field_stays_a_value() -> None:
    """A model name that holds the bytes of the next field is longer, not another descriptor."""
    plain = NamespaceDescriptor("m", model_revision="r")
    revision = b"\x02\x02\x01\x00\x00\x00r"
    crafted = NamespaceDescriptor("m" + revision.decode("latin-1"), model_revision="r")
    assert crafted.canonical() != plain.canonical()
    assert NamespaceDescriptor.parse(crafted.canonical()) == crafted


def field(number: int, value: int | bytes, *, kind: int | None = None) -> bytes:
    """One encoded field, right or wrong."""
    raw = value.to_bytes(4, "little") if isinstance(value, int) else value
    of_kind = (1 if isinstance(value, int) else 2) if kind is None else kind
    return bytes([number, of_kind]) + len(raw).to_bytes(4, "little") + raw


GOOD = NamespaceDescriptor("m", lora="l").canonical()
TAIL = GOOD[len(LABEL) + len(field(1, b"m")) :]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        LABEL,
        LABEL[:-1],
        b"entresol/ns/v2" + GOOD[len(LABEL) :],
        GOOD + b"\x00",
        GOOD + field(16, 1),
        GOOD + field(15, 1),  # the last field twice
        LABEL + TAIL,  # no model
        LABEL + field(2, b"main") + field(1, b"m") + TAIL,  # another order
        LABEL + field(0, b"m") + TAIL,
        LABEL + field(255, b"m") + TAIL,
        LABEL + field(1, b"") + TAIL,
        LABEL + field(1, b"\xff\xfe") + TAIL,  # not UTF-8
        LABEL + field(1, b"\xed\xa0\x80") + TAIL,  # a surrogate
        LABEL + field(1, b"\xc1\xad") + TAIL,  # overlong
        LABEL + field(1, 7) + TAIL,  # a number where text belongs
        LABEL + field(1, b"m" * 513) + TAIL,
        LABEL + field(1, b"m", kind=0) + TAIL,
        LABEL + field(1, b"m", kind=3) + TAIL,
        LABEL + b"\x01\x02\xff\xff\xff\xffm" + TAIL,  # a length past the end
        GOOD.replace(field(6, 0), field(6, b"0")),  # text where a number belongs
        GOOD.replace(field(6, 0), field(6, b"\x00\x00\x00", kind=1)),
        GOOD.replace(field(6, 0), b""),  # a required field left to its default
        GOOD.replace(field(11, 16), field(11, 0)),
        GOOD.replace(field(11, 16), field(11, limits.TOKENS_PER_BLOCK_MAX + 1)),
        LABEL + field(1, b"m" * limits.DESCRIPTOR_BYTES_MAX) + TAIL,
    ],
)
def test_other_forms_are_refused(raw: bytes) -> None:
    assert raw != GOOD, "the case changes nothing"
    with pytest.raises(BadKeyError):
        NamespaceDescriptor.parse(raw)


@given(descriptors(), st.data())
def test_cut_or_changed_forms_never_give_the_same_descriptor(
    descriptor: NamespaceDescriptor, data: st.DataObject
) -> None:
    raw = descriptor.canonical()
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(BadKeyError):
        NamespaceDescriptor.parse(raw[:cut])
    at, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
    flipped = raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]
    try:
        other = NamespaceDescriptor.parse(flipped)
    except BadKeyError:
        return
    assert other != descriptor
    assert other.canonical() == flipped


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_is_refused_with_the_documented_error(body: bytes) -> None:
    for raw in (body, LABEL + body):
        with pytest.raises(BadKeyError):
            NamespaceDescriptor.parse(raw)


def test_largest_descriptor_fits_its_limit() -> None:
    text = "x" * limits.DESCRIPTOR_TEXT_BYTES_MAX
    largest = NamespaceDescriptor(
        **{
            **{name: 2**32 - 1 if name in INTEGERS else text for name in FIELDS},
            "block_tokens": limits.TOKENS_PER_BLOCK_MAX,
        }
    )
    raw = largest.canonical()
    assert len(raw) <= limits.DESCRIPTOR_BYTES_MAX
    assert NamespaceDescriptor.parse(raw) == largest


@pytest.mark.parametrize("name", FIELDS)
def test_limits_of_each_field(name: str) -> None:
    bad: list[Any]
    if name in INTEGERS:
        bad = [-1, 2**32, "1", b"1", 1.0, None]
    else:
        bad = ["", "x" * (limits.DESCRIPTOR_TEXT_BYTES_MAX + 1), "é" * 257, "\ud800", 5, b"x"]
        if name not in OPTIONAL:
            bad.append(None)
    if name == "block_tokens":
        bad += [0, limits.TOKENS_PER_BLOCK_MAX + 1]
    for value in bad:
        with pytest.raises(BadKeyError) as caught:
            NamespaceDescriptor(**{"model": "m", name: value})
        assert caught.value.status is Status.BAD_REQUEST
        assert name in str(caught.value)


# Keys and names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 9, 16, 36, 63, 64])
def test_engine_keys_of_allowed_length(size: int) -> None:
    assert ids.check_engine_key(bytearray(b"k" * size)) == b"k" * size
    assert type(ids.check_engine_key(memoryview(b"k" * size))) is bytes


@pytest.mark.parametrize("size", [0, 7, 65, 4096])
def test_engine_keys_of_other_length(size: int) -> None:
    with pytest.raises(BadKeyError):
        ids.check_engine_key(b"k" * size)


@pytest.mark.parametrize("name", ["a", "0", "team-a", "a.b_c-d", "a" * 64, "a-" * 31 + "ab"])
def test_tenant_names(name: str) -> None:
    assert ids.check_tenant_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "a" * 65, "A", "-a", "a-", ".", "a/b", "a b", "a\n", "ä", "a\x00", "../a", "a%2f"]
)
def test_other_tenant_names(name: str) -> None:
    with pytest.raises(BadKeyError):
        ids.check_tenant_name(name)


keys = st.binary(min_size=8, max_size=64).map(ids.EngineKey)


@given(keys, keys, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_wire_keys_depend_on_key_and_secret(
    one: ids.EngineKey, two: ids.EngineKey, secret: bytes, other_secret: bytes
) -> None:
    assert (ids.wire_key(secret, one) == ids.wire_key(secret, two)) == (one == two)
    assert (ids.wire_key(secret, one) == ids.wire_key(other_secret, one)) == (
        secret == other_secret
    )
    assert len(ids.wire_key(secret, one)) == limits.WIRE_KEY_BYTES


def test_the_whole_engine_key_counts() -> None:
    """Keys that differ only in their last byte, or only in length, are different blocks."""
    secret = bytes(32)
    found = {ids.wire_key(secret, ids.EngineKey(bytes(size))) for size in range(8, 65)}
    assert len(found) == 57
    assert ids.wire_key(secret, ids.EngineKey(bytes(64))) != ids.wire_key(
        secret, ids.EngineKey(bytes(63) + b"\x01")
    )


def test_id_and_secret_say_nothing_of_each_other() -> None:
    canonical = NamespaceDescriptor("m").canonical()
    secret = ids.namespace_secret(TENANT_SECRETS[0], canonical)
    assert ids.namespace_id(TENANT_SECRETS[0], canonical) != secret[:16]
    assert ids.namespace_id(TENANT_SECRETS[0], canonical) != ids.namespace_id(
        TENANT_SECRETS[1], canonical
    )


@given(keys, st.binary(min_size=32, max_size=32))
def test_placement_scores_are_u64(key: ids.EngineKey, digest: bytes) -> None:
    scores = [ids.placement_hash(digest, key, shard) for shard in SHARDS]
    assert all(0 <= score < 2**64 for score in scores)
    assert scores == [ids.placement_hash(digest, key, shard) for shard in SHARDS]


def test_placement_spreads_evenly() -> None:
    """Each of four shards owns a quarter of 4,000 keys, within five standard deviations."""
    digest = NamespaceDescriptor("m").digest()
    shards = [b"a", b"b", b"c", b"d"]
    owned = dict.fromkeys(shards, 0)
    for number in range(4000):
        key = ids.EngineKey(number.to_bytes(8, "little"))
        owned[max(shards, key=lambda shard: ids.placement_hash(digest, key, shard))] += 1
    assert all(abs(count - 1000) < 5 * 27.4 for count in owned.values()), owned


def test_salts_stay_out_of_the_repr() -> None:
    assert "blue" not in repr(NamespaceDescriptor("m", cache_salt="blue"))
    with pytest.raises(BadKeyError) as caught:
        NamespaceDescriptor("m", cache_salt="blue" * 200)
    assert "blue" not in str(caught.value)


def test_short_shows_four_bytes() -> None:
    assert ids.short(bytes(range(16))) == "00010203"


if __name__ == "__main__":
    text = json.dumps(generate(), indent=1, ensure_ascii=True)
    VECTORS.write_text(text + "\n", encoding="utf-8")


@pytest.mark.parametrize("lengths", [(32,), (8,), (64,), (8, 16, 32), ()])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_many_names_at_once_are_those_of_each(lengths: tuple[int, ...], count: int) -> None:
    rng = random.Random(count)
    keys = [ids.EngineKey(rng.randbytes(rng.choice(lengths or (40,)))) for _ in range(count)]
    secret, digest = rng.randbytes(32), rng.randbytes(32)
    assert naming.wire_keys(secret, keys) == b"".join(ids.wire_key(secret, key) for key in keys)
    assert naming.masked_engine_keys(secret, keys) == [
        ids.masked_engine_key(secret, key) for key in keys
    ]
    for shard in (b"", b"shard-1", bytes(64), bytes(65), bytes(500)):
        assert naming.placement_hashes(digest, keys, shard).tolist() == [
            ids.placement_hash(digest, key, shard) for key in keys
        ]
