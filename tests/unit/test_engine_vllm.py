"""The parts of the vLLM tier that need no vLLM: requests, names, hashes, tokens, registration."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import types
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from entresol_client.engines import naming, vllm_plugin
from entresol_client.engines.asker import ParamsError, Who, who_asks
from entresol_client.engines.settings import EngineSettings
from entresol_client.engines.vllm_metrics import COUNTERS, GAUGES, METRIC
from entresol_client.engines.vllm_naming import (
    EngineFacts,
    as_words,
    check_hashes,
    describe,
    roots_agree,
)
from entresol_client.engines.vllm_requests import (
    Ask,
    Found,
    Prompt,
    Request,
    Requests,
)
from entresol_client.engines.vllm_tokens import LiveRequests, Told
from entresol_client.engines.vllm_versions import COMPARED, TESTED, told_apart
from entresol_proto import limits
from entresol_proto.status import ConfigError

ABSENT, PRESENT, ASKED = Found.ABSENT, Found.PRESENT, Found.ASKED
KEYS = [bytes([n]) * 32 + b"\0\0\0\0" for n in range(6)]


# Whose blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"entresol": {}}, {"entresol": None}])
def test_a_request_that_says_nothing_is_the_engines_own_tenant(params: Any) -> None:
    assert who_asks(params) == Who("", "")


def test_a_request_names_a_tenant_and_a_salt() -> None:
    assert who_asks({"entresol": {"tenant": "a", "salt": "s"}}) == Who("a", "s")
    assert "s3cret" not in repr(who_asks({"entresol": {"salt": "s3cret"}}))


@pytest.mark.parametrize(
    "mine", ["a", 7, ["a"], {"tenant": ""}, {"tenant": 7}, {"salt": None}, {"salt": "x" * 513},
             {"tenant": "a", "slat": "x"}, {"salt": "\ud800"}],
)  # fmt: skip
def test_parameters_that_make_no_sense_are_never_guessed(mine: Any) -> None:
    with pytest.raises(ParamsError):
        who_asks({"entresol": mine})
    if mine:
        with pytest.raises(ParamsError):
            who_asks([mine])  # type: ignore[arg-type]


# Lookups ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Asked:
    """What a space was asked, and the futures to answer with."""

    until_s: float = 10.0
    questions: list[tuple[str, list[bytes], Future[list[bool]]]] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)  # of the last one

    def __call__(self, space: str, keys: list[bytes], prompts: list[Prompt]) -> Ask:
        self.prompts = prompts
        future: Future[list[bool]] = Future()
        self.questions.append((space, keys, future))
        return Ask(keys, future, self.until_s)

    def answer(self, *present: bool) -> None:
        self.questions[-1][2].set_result(list(present))


def look(book: Requests[str], request: Request[str], keys: Sequence[bytes], now_s: float = 0.0):  # type: ignore[no-untyped-def]
    return [book.look(request, key, now_s) for key in keys]


def test_a_steps_questions_go_out_as_one_per_tenant() -> None:
    book: Requests[str] = Requests()
    one, two, other = book.add("1", "dev"), book.add("2", "dev"), book.add("3", "other")
    assert look(book, one, KEYS[:3]) == look(book, two, KEYS[1:4]) == [ASKED] * 3
    assert look(book, other, KEYS[:1]) == [ASKED]
    asked = Asked()
    assert book.flush(asked, 100) == 2
    assert [(space, keys) for space, keys, _ in asked.questions] == [
        ("dev", KEYS[:4]), ("other", KEYS[:1]),
    ]  # fmt: skip
    assert asked.prompts == [Prompt((0,), 0)]
    asked.questions[0][2].set_result([True, True, False, True])
    assert look(book, one, KEYS[:3]) == [PRESENT, PRESENT, ABSENT]
    assert look(book, two, KEYS[1:4]) == [PRESENT, ABSENT, PRESENT]
    assert look(book, other, KEYS[:1]) == [ASKED], "one tenant's answer is not another's"
    assert book.flush(asked, 100) == 0, "nothing is asked twice"


def test_more_keys_than_fit_a_frame_go_out_as_several_questions() -> None:
    book: Requests[str] = Requests()
    look(book, book.add("1", "dev"), KEYS)
    asked = Asked()
    assert book.flush(asked, 4) == 2
    assert [len(keys) for _, keys, _ in asked.questions] == [4, 2]


def test_an_answer_within_a_step_counts_from_the_next_step() -> None:
    book: Requests[str] = Requests()
    request = book.add("1", "dev")
    look(book, request, KEYS[:4])
    asked = Asked()
    book.flush(asked, 100)
    assert look(book, request, KEYS[:2]) == [ASKED] * 2
    asked.answer(True, True, True, False)  # while vLLM goes through the keys
    assert look(book, request, KEYS[2:4]) == [ASKED] * 2, "all of a prompt in one load"
    book.flush(asked, 100)
    assert look(book, request, KEYS[:4]) == [PRESENT, PRESENT, PRESENT, ABSENT]


def test_a_lookup_past_its_deadline_is_absent_for_good() -> None:
    book: Requests[str] = Requests()
    request = book.add("1", "dev")
    look(book, request, KEYS[:2])
    asked = Asked(until_s=10.0)
    book.flush(asked, 100)
    assert look(book, request, KEYS[:2], 9.999) == [ASKED] * 2
    book.flush(asked, 100)
    assert look(book, request, KEYS[:2], 10.0) == [ABSENT] * 2
    asked.answer(True, True)
    assert look(book, request, KEYS[:2], 10.1) == [ABSENT] * 2, "one request, one answer"
    assert book.late_lookups == 1
    assert book.flush(asked, 100) == 0


def test_a_block_that_failed_to_load_is_absent_for_its_request_alone() -> None:
    book: Requests[str] = Requests()
    one, two = book.add("1", "dev"), book.add("2", "dev")
    look(book, one, KEYS[:2])
    look(book, two, KEYS[:2])
    asked = Asked()
    book.flush(asked, 100)
    asked.answer(True, True)
    one.absent(KEYS[1:2])
    assert look(book, one, KEYS[:2]) == [PRESENT, ABSENT]
    assert look(book, two, KEYS[:2]) == [PRESENT, PRESENT]


def test_a_block_that_failed_while_it_was_asked_for_stays_absent() -> None:
    book: Requests[str] = Requests()
    request = book.add("1", "dev")
    look(book, request, KEYS[:1])
    request.absent(KEYS[:1])
    asked = Asked()
    book.flush(asked, 100)
    asked.answer(True)
    assert look(book, request, KEYS[:1]) == [ABSENT]


def test_a_request_without_a_space_asks_nobody() -> None:
    book: Requests[str] = Requests()
    assert look(book, book.add("1", None), KEYS) == [ABSENT] * len(KEYS)
    assert book.flush(Asked(), 100) == 0


def test_salts_give_other_keys_and_none_gives_vllms_own() -> None:
    plain, salted = Request("dev"), Request("dev", "user-1")
    assert plain.block_key(KEYS[0]) == KEYS[0]
    keys = {Request("dev", salt).block_key(KEYS[0]) for salt in ("", "user-1", "user-2")}
    assert len(keys) == 3
    assert all(len(one) <= limits.ENGINE_KEY_BYTES_MAX for one in keys)
    assert salted.block_key(KEYS[0]).startswith(KEYS[0])


def test_nothing_is_kept_of_finished_requests() -> None:
    book: Requests[str] = Requests()
    for number in range(10):
        look(book, book.add(str(number), "dev"), KEYS)
    book.flush(Asked(), 100)
    for number in range(10):
        book.remove(str(number))
    book.remove("never there")
    assert len(book) == 0
    assert book.get("3") is None


# Names --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("model.layers.0", "model.layers.1")
    group_id: int = 0


@dataclass(frozen=True)
class Model:
    name: str = "meta/llama"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 4


@dataclass(frozen=True)
class Parallel:
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1


@dataclass(frozen=True)
class Offloading:
    """The fields of vLLM 0.32's OffloadingConfig that are read."""

    groups: tuple[Group, ...] = (Group(),)
    worker_kv_bytes_per_block: int = 65536
    model: Model = Model()
    cache: Cache = Cache()
    parallel: Parallel = Parallel()
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"


FACTS = EngineFacts("0.32.0", "main", "sha256", "cuda", extra={"attention": ""})
SETTINGS = EngineSettings(weights="off")


def name_of(config: Any = None, facts: EngineFacts = FACTS, **more: Any) -> bytes:
    chunk_bytes = more.pop("chunk_bytes", 1 << 20)
    settings = more.pop("settings", SETTINGS)
    environment = more.pop("environment", {})
    config = config or Offloading()
    return describe(
        config, chunk_bytes, settings, facts, environment=environment, **more
    ).canonical()


def test_the_same_engine_elsewhere_has_the_same_name() -> None:
    assert name_of() == name_of(Offloading())
    found = describe(Offloading(), 1 << 20, SETTINGS, FACTS, environment={})
    assert (found.model, found.dtype, found.block_tokens) == ("meta/llama", "bf16", 64)
    assert (found.layers, found.tp_world, found.pp_world) == (2, 2, 1)
    assert found.page_layout.startswith("vllm:")


def changed(config: Offloading, **changes: Any) -> Offloading:
    """`cache__blocks_per_chunk=2` and the like."""
    for name, value in changes.items():
        part, _, inner = name.partition("__")
        if inner:
            value = replace(getattr(config, part), **{inner: value})
        config = replace(config, **{part: value})
    return config


@pytest.mark.parametrize("change", [
    {"model__name": "meta/llama-2"}, {"model__dtype": "float16"}, {"model__dtype": "fp8_e4m3"},
    {"cache__blocks_per_chunk": 2}, {"cache__tokens_per_hash": 8},
    {"parallel__tp_size": 1}, {"parallel__pp_size": 2}, {"parallel__pcp_size": 2},
    {"parallel__dcp_size": 2}, {"parallel__world_size": 4},
    {"groups": (Group(tokens_per_block=32),)}, {"groups": (Group(), Group(group_id=1))},
    {"groups": (Group(layer_names=("model.layers.0",)),)}, {"groups": (Group(group_id=1),)},
    {"worker_kv_bytes_per_block": 32768}, {"replicated_layout": True}, {"canonical_layout": True},
    {"kv_cache_layout": "BLHNC"}, {"kv_cache_layout": None},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_whatever_changes_the_bytes_changes_the_name(change: dict[str, Any]) -> None:
    assert name_of(changed(Offloading(), **change)) != name_of()


@pytest.mark.parametrize("change", [
    {"version": "0.33.0"}, {"revision": "v2"}, {"hash_algorithm": "sha256_cbor"},
    {"device_type": "cpu"}, {"extra": {"attention": "FLASHINFER"}},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_what_is_known_of_the_engine_is_in_the_name(change: dict[str, Any]) -> None:
    assert name_of(facts=replace(FACTS, **change)) != name_of()


def test_a_patch_release_shares_and_other_things_do_not() -> None:
    assert name_of(facts=replace(FACTS, version="0.32.7")) == name_of()
    assert name_of(chunk_bytes=1 << 19) != name_of()
    assert name_of(environment={"PYTHONHASHSEED": "0"}) != name_of()
    assert name_of(model="other") != name_of()
    assert name_of(settings=replace(SETTINGS, model_revision="mine")) != name_of()
    assert name_of(settings=replace(SETTINGS, weights="w1")) != name_of()


def test_other_weights_under_one_name_are_another_model(tmp_path: Path) -> None:
    names = []
    for content in (b"one" * 1000, b"two" * 1000):
        (tmp_path / "model.safetensors").write_bytes(content)
        facts = replace(FACTS, weights_path=str(tmp_path))
        names.append(name_of(facts=facts, settings=EngineSettings()))
    assert names[0] != names[1]
    assert naming.weights_folder(str(tmp_path), "") == str(tmp_path)
    assert naming.weights_folder("nobody/nothing", "") == ""


def tensors(sizes: Sequence[int], changed: int | None = None) -> bytes:
    """A safetensors file; of the changed tensor every byte is another."""
    told, body = {}, bytearray()
    for number, size in enumerate(sizes):
        begin = len(body)
        body += bytes([1 + (number == changed)]) * size
        told[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [begin, len(body)]}
    head = json.dumps({"__metadata__": {"format": "pt"}, **told}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(body)


def test_another_tensor_of_many_is_another_model(tmp_path: Path) -> None:
    """A fine-tune put in place of its model may touch a small part of it."""
    sizes = [40_000] * 30 + [0, 1, 5_000] + [300_000] * 8
    path, seen = tmp_path / "model.safetensors", set()
    changes = [None, *(n for n, size in enumerate(sizes) if size)]
    for changed in changes:
        path.write_bytes(tensors(sizes, changed))
        seen.add(naming.weights_fingerprint(tmp_path))
    assert len(seen) == len(changes)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{}", (2**63).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"[17]",
        (12).to_bytes(8, "little") + b'{"a":[1, 2]}', tensors([5000])[:-100],
        tensors([5]).replace(b"[0, 5]", b"[5, 0]"), tensors([5]).replace(b"[0, 5]", b'"text"'),
    ],
)  # fmt: skip
def test_what_only_has_the_name_of_safetensors_is_sampled_like_any_file(
    tmp_path: Path, raw: bytes
) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    first = naming.weights_fingerprint(tmp_path)
    assert first
    (tmp_path / "model.safetensors").write_bytes(raw + bytes(100_000) + b"x" * 100_000)
    assert naming.weights_fingerprint(tmp_path) not in (None, first)


def test_weights_that_are_nowhere_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert naming.revision("nobody/nothing", "", "r1", "auto") == "r1"
    assert [r.message for r in caplog.records if "weights_not_found" in r.message]
    caplog.clear()
    assert naming.revision("nobody/nothing", "", "r1", "off") == "r1"
    assert naming.revision("nobody/nothing", "", "r1", "mine") == "r1+w:mine"
    assert not caplog.records


def test_ranks_of_one_engine_begin_anew_under_one_name() -> None:
    ask = "from entresol_client.engines import naming as n; print(n.common_epoch(1))"
    one, other = (
        subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert one.stdout == other.stdout
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}])"
    elsewhere = subprocess.run(
        [sys.executable, "-c", nested], capture_output=True, text=True, check=True
    )
    assert elsewhere.stdout not in ("", one.stdout)
    assert naming.common_epoch(1) != naming.common_epoch(2)


def test_another_configuration_of_the_same_weights_is_another_model(tmp_path: Path) -> None:
    """Keys are stored rotated: with other frequencies they are other bytes."""
    (tmp_path / "model.safetensors").write_bytes(b"one" * 1000)
    marks = [naming.weights_fingerprint(tmp_path)]
    scaled = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4}}
    for said in ({"rope_theta": 1e4}, scaled):
        (tmp_path / "config.json").write_text(json.dumps(said))
        marks.append(naming.weights_fingerprint(tmp_path))
        (tmp_path / "config.json").write_text(
            json.dumps(said | {"transformers_version": "9", "torch_dtype": "float16"}, indent=3)
        )
        assert naming.weights_fingerprint(tmp_path) == marks[-1], "it says the same of the model"
    (tmp_path / "config.json").write_text("[no object")
    marks.append(naming.weights_fingerprint(tmp_path))
    assert len(set(marks)) == 4


def hf_model(length: int = 4096, **said: Any) -> Any:
    told = json.dumps({"rope_theta": 1e4, "_name_or_path": "x"} | said)
    return types.SimpleNamespace(
        quantization=None, dtype="torch.bfloat16", max_model_len=length,
        hf_config=types.SimpleNamespace(to_json_string=lambda use_diff: told),
    )  # fmt: skip


def test_what_shapes_the_kv_of_known_weights() -> None:
    def mark(model: Any) -> str:
        return naming.fingerprint(naming.model_facts(model))

    plain = mark(hf_model())
    assert plain == mark(hf_model(_name_or_path="elsewhere"))
    assert plain == mark(hf_model(8192)), "engines of other lengths share"
    quantized = hf_model()
    quantized.quantization = "fp8"
    others = [mark(quantized), mark(hf_model(rope_theta=1e6))]
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4}}
    assert mark(hf_model(**yarn)) == mark(hf_model(8192, **yarn))
    for long in (
        {"rope_scaling": {"type": "longrope"}}, {"rope_parameters": {"full": {"rope_type": "su"}}},
        {"text_config": {"rope_scaling": {"rope_type": "longrope"}}},
    ):  # fmt: skip
        others += [mark(hf_model(4096, **long)), mark(hf_model(8192, **long))]
    assert len({plain, *others}) == 9
    assert naming.model_facts(types.SimpleNamespace(dtype="x")) == {
        "dtype": "x", "quantization": "None",
    }  # fmt: skip


def test_what_adapters_hold_is_part_of_the_name() -> None:
    names = {name_of(settings=replace(SETTINGS, adapters=text)) for text in "ab"}
    assert len(names | {name_of()}) == 3


def test_an_engine_that_begins_anew_finds_nothing_of_before() -> None:
    """Its weights may be others now; the requests under way have blocks of both."""
    book: Requests[str] = Requests()
    before, asked = book.add("1", "dev", "salt"), Asked()
    look(book, before, KEYS[:2])
    book.flush(asked, 100)
    asked.answer(True, True)
    assert look(book, before, KEYS[:2]) == [PRESENT] * 2
    look(book, before, KEYS[2:3])
    book.begin_anew()
    assert look(book, before, KEYS[:3]) == [ABSENT] * 3
    assert before.space is None
    assert book.flush(asked, 100) == 0
    keys = {before.block_key(KEYS[0])}
    for salt in ("salt", ""):
        keys |= {book.add("2", "dev", salt).block_key(KEYS[0]) for _ in range(2)}
    book.begin_anew()
    keys.add(book.add("3", "dev", "salt").block_key(KEYS[0]))
    assert len(keys) == 4


def test_an_engine_without_a_group_id_is_named_too() -> None:
    @dataclass(frozen=True)
    class OldGroup:  # before 0.31
        tokens_per_block: int = 16
        layer_names: tuple[str, ...] = ("model.layers.0", "model.layers.1")

    old = changed(Offloading(), groups=(OldGroup(),))
    assert name_of(old) == name_of()


@pytest.mark.parametrize(("config", "chunk_bytes", "words"), [
    (Offloading(), limits.BLOCK_BYTES_MAX + 1, "smaller block_size"),
    (Offloading(cache=Cache(blocks_per_chunk=1000)), 1 << 20, "2048 tokens"),
    (Offloading(model=Model(name="x" * 600)), 1 << 20, "model"),
])  # fmt: skip
def test_an_engine_whose_blocks_cannot_be_stored_does_not_start(
    config: Any, chunk_bytes: int, words: str
) -> None:
    with pytest.raises(ConfigError) as found:
        name_of(config, chunk_bytes=chunk_bytes)
    assert words in f"{found.value} {found.value.hint}"


@pytest.mark.parametrize(("name", "label"), [
    ("bfloat16", "bf16"), ("float16", "fp16"), ("fp8_e5m2", "fp8_e5m2"), ("nvfp4", "opaque"),
])  # fmt: skip
def test_dtypes_have_the_labels_codecs_know(name: str, label: str) -> None:
    assert naming.dtype_of(name).label == label


def test_a_log_line_of_a_descriptor_has_no_salt() -> None:
    descriptor = describe(Offloading(), 1 << 20, SETTINGS, FACTS, environment={})
    words = as_words(dataclasses.replace(descriptor, cache_salt="s3cret"))
    assert "s3cret" not in words
    assert "model='meta/llama'" in words


# Hashes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "algorithm"), [
    ("0.32.0", "sha256"), ("0.29.0", "sha256_cbor"), ("0.33.1", ""), ("dev", ""),
])  # fmt: skip
def test_hashes_that_others_compute_too_pass(version: str, algorithm: str) -> None:
    check_hashes(EngineFacts(version, hash_algorithm=algorithm), {})


@pytest.mark.parametrize(("version", "algorithm"), [
    ("0.27.1", "sha256"), ("0.28.0", ""), ("0.32.0", "xxhash"), ("0.32.0", "xxhash_cbor"),
])  # fmt: skip
def test_hashes_of_chance_are_refused_with_what_to_set(version: str, algorithm: str) -> None:
    facts = EngineFacts(version, hash_algorithm=algorithm)
    with pytest.raises(ConfigError) as found:
        check_hashes(facts, {})
    assert "PYTHONHASHSEED" in (found.value.hint or "")
    check_hashes(facts, {"PYTHONHASHSEED": "0"})


def test_a_seed_that_only_one_process_has_is_noticed() -> None:
    assert roots_agree("vllm-none-hash", "vllm-none-hash", {})
    assert roots_agree(None, "", {})
    assert not roots_agree("5f3a", "vllm-none-hash", {})
    assert roots_agree("7", "vllm-none-hash", {"PYTHONHASHSEED": "7"})


def test_a_version_that_no_test_ran_against_is_told() -> None:
    assert all(not told_apart(one) for one in TESTED)
    assert not told_apart(f"{TESTED[0]}+cpu")
    assert TESTED[0] in told_apart("99.0.0")
    assert all("compared" in told_apart(one) for one in COMPARED)


# Tokens -------------------------------------------------------------------------------------------


class Live:
    """A request of four chunks of 8 tokens, hashed every 4 tokens."""

    def __init__(self) -> None:
        self.all_token_ids: Any = list(range(100, 132))
        self.block_hashes = [bytes([n]) * 32 for n in range(8)]


def told(live: Any, chunk: int, *, group: int = 0, end: int | None = None) -> Told:
    requests = LiveRequests()
    requests.add("r", live)
    key = live.block_hashes[2 * chunk + 1] + group.to_bytes(4, "big")
    end_token = 8 * (chunk + 1) if end is None else end
    return requests.told("r", key, end_token, group_id=0, chunk_tokens=8, hash_tokens=4)


def test_a_block_is_told_with_its_tokens_its_place_and_its_parent() -> None:
    live = Live()
    assert told(live, 0) == Told(0, None, tuple(range(100, 108)))
    assert told(live, 2) == Told(2, live.block_hashes[3] + bytes(4), tuple(range(116, 124)))


def test_what_is_not_sure_is_not_told() -> None:
    live = Live()
    assert told(live, 1, group=1) == Told(1), "the same tokens again, of another group"
    assert told(live, 1, end=12) == Told(1), "cut short"
    assert told(live, 1, end=0) == Told()
    live.block_hashes[3] = b"\xff" * 32
    key = bytes([3]) * 32 + bytes(4)
    requests = LiveRequests()
    requests.add("r", live)
    parts = {"group_id": 0, "chunk_tokens": 8, "hash_tokens": 4}
    assert requests.told("r", key, 16, **parts) == Told(1), "not the hash of these tokens"
    assert requests.told("gone", key, 16, **parts) == Told(1)
    assert requests.told("r", key, None, **parts) == Told()
    short = Live()
    short.all_token_ids = short.all_token_ids[:12]
    assert told(short, 1) == Told(1)
    placeholder = Live()
    placeholder.all_token_ids[9] = -1
    assert told(placeholder, 1) == Told(1)


def test_live_requests_keeps_no_request_alive() -> None:
    requests = LiveRequests()
    live = Live()
    requests.add("r", live)
    assert len(requests) == 1
    del live
    assert len(requests) == 0
    requests.remove("r")


# The entry point ----------------------------------------------------------------------------------


def install(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


def test_without_vllm_the_entry_point_does_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    vllm_plugin.register()
    assert f"tested={','.join(TESTED)}" in caplog.text


def test_a_vllm_that_knows_no_tiers_still_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, vllm=types.ModuleType("vllm"))
    vllm_plugin.register()
    assert "event=engine_not_registered" in caplog.text


def test_importing_the_entry_point_imports_no_engine() -> None:
    assert "entresol_client.engines.vllm" not in sys.modules
    assert not any(name == "vllm" or name.startswith("vllm.") for name in sys.modules)


# The page ---------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "client" / "VLLM.md"
OWN_SETTINGS = {"model", "enable_kv_events", "drain_deadline_ms"}


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line[:1] == "|"]


def test_the_page_lists_every_setting_with_its_default() -> None:
    names = {one.name for one in dataclasses.fields(EngineSettings)} | OWN_SETTINGS
    listed = {row[0].strip("`"): row[1] for row in rows() if len(row) == 3}
    assert names <= set(listed)
    defaults = {one.name: one.default for one in dataclasses.fields(EngineSettings)}
    for name in ("lookup_deadline_ms", "load_deadline_ms", "store_deadline_ms"):
        assert listed[name] == str(defaults[name])


def test_the_page_lists_every_metric() -> None:
    listed = {row[0].strip("`"): row[1] for row in rows() if row[0].startswith(f"`{METRIC}")}
    assert listed == {METRIC + name: text for name, text in (COUNTERS | GAUGES).items()}


def test_what_the_page_says_to_paste_is_accepted() -> None:
    found = re.search(r"--kv-transfer-config '(.*?)'\n", PAGE.read_text(encoding="utf-8"), re.S)
    assert found
    extra = json.loads(found[1])["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    assert tier.pop("type") == vllm_plugin.TIER_TYPE
    settings = EngineSettings.from_mapping(tier, where="page", also=frozenset(OWN_SETTINGS))
    assert settings.config == "/etc/entresol/client.toml"
    assert extra["block_size"] <= limits.TOKENS_PER_BLOCK_MAX


def test_the_page_names_the_versions() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"**{one}**" in text for one in TESTED)
    assert all(one in text for one in COMPARED)


@pytest.mark.parametrize(
    ("name", "plain", "other"),
    [
        ("lora_request", None, object()),
        ("mm_features", [], [object()]),
        ("prompt_embeds", None, object()),
        ("cache_salt", "", "tenant-a"),
    ],
)
def test_a_request_that_hashes_more_than_its_tokens_tells_none(
    name: str, plain: Any, other: Any
) -> None:
    live: Any = Live()
    setattr(live, name, plain)
    assert told(live, 1).token_ids
    setattr(live, name, other)
    assert told(live, 1) == Told(1), "a router would credit plain prompts with these tokens"
