"""A prompt's blocks from hashes, keys and tokens: the very keys that the adapters store under."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import pytest

from entresol_client.cli import explaining, prompts, session
from entresol_client.cli.errors import CliError, UsageProblem
from entresol_client.cli.explaining import Prefix, prefix_of
from entresol_client.engines.kvbm_hash import KeyChain
from entresol_client.engines.sglang_pages import page_hashes, page_key
from entresol_client.engines.vllm_requests import Request
from entresol_client.results import Explanation
from entresol_proto import limits
from entresol_proto.status import Status
from entresol_proto.wire.data import Reason


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    prompts.add_options(parser)
    args = parser.parse_args(words)
    prompts.check(args)
    return args


def read(*words: str, block_tokens: int = 16) -> prompts.Asked:
    return prompts.read(parsed(*words), block_tokens)


def file(folder: Path, text: str) -> str:
    path = folder / "prompt"
    path.write_text(text)
    return str(path)


HASHES = [bytes([n]) * 32 for n in range(1, 7)]
HEX = [one.hex() for one in HASHES]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(HEX),
        " ".join(HEX),
        ",".join(f"0x{one}" for one in HEX),
        "[" + ", ".join(f'"{one}"' for one in HEX) + "]\n",
        "(b'" + "', b'".join(HEX) + "')",
    ],
)
def test_hashes_however_they_are_written(tmp_path: Path, text: str) -> None:
    text = text.replace("b'", "'")
    asked = read("--hashes", file(tmp_path, text))
    assert asked.keys == HASHES
    assert asked.labels[-1] == "block 5"
    assert asked.prefix


def test_hashes_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(" ".join(HEX).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert read("--hashes", "-").keys == HASHES


def test_vllm_keys_are_those_of_its_adapter(tmp_path: Path) -> None:
    path = file(tmp_path, " ".join(HEX))
    for group in (0, 3):
        for salt in ("", "user-17"):
            request = Request(object(), salt)
            expected = [request.block_key(one + group.to_bytes(4, "big")) for one in HASHES]
            words = ["--hashes", path, "--engine", "vllm", "--group", str(group)]
            words += ["--request-salt", salt] if salt else []
            assert read(*words).keys == expected
    thirds = read("--hashes", path, "--engine", "vllm", "--every", "3").keys
    assert [one[:32] for one in thirds] == [HASHES[2], HASHES[5]]  # a chunk has its last hash


def test_sglang_keys_are_those_of_its_adapter(tmp_path: Path) -> None:
    path = file(tmp_path, " ".join(HEX))
    for piece in (0, 5):
        expected = [page_key(one, piece) for one in HEX]
        assert read("--hashes", path, "--engine", "sglang", "--group", str(piece)).keys == expected


def test_kvbm_keys_are_computed_from_tokens(tmp_path: Path) -> None:
    tokens = list(range(1000, 1070))
    path = file(tmp_path, str(tokens))
    for cache_salt, own in ((None, ""), ("s", "user")):
        chain = KeyChain(16, cache_salt, private_salt=own)
        chain.extend(tokens)
        words = ["--tokens", path, "--engine", "kvbm"]
        words += ["--cache-salt", cache_salt, "--request-salt", own] if cache_salt else []
        asked = read(*words)
        assert (asked.keys, asked.block_tokens, len(asked.keys)) == (chain.keys, 16, 4)


def test_sglang_keys_are_computed_from_tokens(tmp_path: Path) -> None:
    tokens = list(range(1000, 1070))
    path = file(tmp_path, str(tokens))
    for salts in ({}, {"cache_salt": "s"}, {"extra_key": "e", "cache_salt": "s"}):
        words = ["--tokens", path, "--engine", "sglang", "--group", "1"]
        for name, value in salts.items():
            words += [f"--{name.replace('_', '-')}", value]
        asked = read(*words)
        assert asked.keys == [page_key(one, 1) for one in page_hashes(tokens, 16, **salts)]
        assert (asked.block_tokens, len(asked.keys), asked.prefix) == (16, 4, True)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ((), "nothing says which"),
        (("--name", "a", "--key", "b"), "in one way"),
        (("0011223344556677", "--name", "a"), "in one way"),
        (("--tokens", "x"), "needs an engine"),
        (("--tokens", "x", "--engine", "vllm"), "seed of its own"),
        (("--tokens", "x", "--engine", "kvbm", "--extra-key", "y"), "of --engine sglang"),
        (("--hashes", "x", "--engine", "sglang", "--extra-key", "y"), "of --engine sglang"),
        (("--hashes", "x", "--engine", "kvbm"), "names no block"),
        (("--hashes", "x", "--cache-salt", "y"), "belongs to --tokens"),
        (("--hashes", "x", "--request-salt", "y"), "belongs to --engine vllm or kvbm"),
        (("--hashes", "x", "--every", "0"), "less than 1"),
        (("--hashes", "x", "--engine", "sglang", "--group", "256"), r"not 0\.\.255"),
        (("--hashes", "x", "--group", "-1"), "not 0"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], match: str) -> None:
    with pytest.raises(UsageProblem, match=match):
        parsed(*words)


@pytest.mark.parametrize(
    ("text", "words", "match"),
    [
        ("", ("--hashes",), "no hash"),
        (f"{HEX[0]} zz", ("--hashes",), "hash 2: key 'zz' is not hex"),
        ("00112233", ("--hashes",), "has 4 bytes"),
        (f"{HEX[0]} {'00' * 61}", ("--engine", "vllm", "--hashes"), "are no engine key"),
        ("é", ("--hashes",), "not text in ASCII"),
        ("1 2 3", ("--engine", "kvbm", "--tokens"), "0 full blocks of 16"),
        ("1 -2", ("--engine", "kvbm", "--tokens"), "token 2"),
        (f"1 {2**32}", ("--engine", "kvbm", "--tokens"), "token 2"),
        ("1 2.5", ("--engine", "kvbm", "--tokens"), "token 2"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, words: tuple[str, ...], match: str) -> None:
    with pytest.raises(UsageProblem, match=match):
        read(*words, file(tmp_path, text))


def test_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot read"):
        read("--hashes", str(tmp_path / "absent"))


def test_the_most_blocks_and_one_more(tmp_path: Path) -> None:
    most = prompts.BLOCKS_MAX
    assert most == limits.KEYS_PER_FRAME_MAX
    path = file(tmp_path, f"{HEX[0]} " * most)
    assert len(read("--hashes", path).keys) == most
    with pytest.raises(UsageProblem, match="at most"):
        read("--hashes", file(tmp_path, f"{HEX[0]} " * (most + 1)))
    tokens = "1 " * (most + 1)
    with pytest.raises(UsageProblem, match="full blocks"):
        read("--engine", "kvbm", "--tokens", file(tmp_path, tokens), block_tokens=1)


def test_one_key_is_no_prompt_and_several_are() -> None:
    assert not read(HEX[0]).prefix
    assert read(HEX[0]).labels == [HEX[0]]
    assert read(HEX[0], HEX[1]).prefix
    assert not read("--key", HEX[0], "--key", HEX[1]).prefix


@pytest.mark.parametrize(
    ("here", "found"),
    [
        ([], Prefix(0, 0, 0, 0)),
        ([True], Prefix(1, 1, 0, 0)),
        ([False], Prefix(1, 0, 1, 0)),
        ([True, True, False, True, False, True], Prefix(6, 2, 2, 2)),
        ([False, True, True], Prefix(3, 0, 1, 2)),
    ],
)
def test_the_prefix_ends_at_the_first_that_is_missing(here: list[bool], found: Prefix) -> None:
    assert prefix_of(here) == found


def test_runs_are_told_as_one_and_the_first_missing_alone() -> None:
    here, gone = Explanation(Reason.ON_FLASH, 0, "s"), Explanation(Reason.EVICTED, 10**18, "s")
    later = Explanation(Reason.EVICTED, 2 * 10**18, "s")
    rows = [here, here, gone, later, here, Explanation(None, 0, "s", Status.DEADLINE)]
    asked = prompts.Asked([f"block {n}" for n in range(6)], HASHES, prefix=True)
    lines = explaining._explained(asked, rows, 2)
    assert lines[0] == "blocks 0 to 1 are on flash"
    assert lines[1].startswith("blocks 2 to 3 were evicted from 2001-09-0")
    assert " to 2033-05-1" in lines[1]
    assert lines[2] == "block 4 is on flash, unused"
    assert lines[3].startswith("block 5 cannot be explained: shard s answered deadline")
    assert session.sentence_of_run([gone])[0].startswith("was evicted at 2001")
