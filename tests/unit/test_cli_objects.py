"""The command's pure parts: names, keys and heads, values people type, what they are shown."""

from __future__ import annotations

import argparse
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entresol_client import config as client_config
from entresol_client.cli import errors, objects, options, output, session, sizing
from entresol_client.cli.errors import CliError, Unreachable, UsageProblem
from entresol_client.cli.objects import Head
from entresol_client.results import Explanation
from entresol_daemon import config_values
from entresol_proto import limits
from entresol_proto.ids import BadKeyError
from entresol_proto.status import ConfigError, FabricError, Status
from entresol_proto.wire.data import Reason

heads = st.builds(
    lambda block, blocks, cut, a, b: Head(max(0, blocks * block - cut % block), block, a, b),
    st.integers(1, limits.BLOCK_BYTES_MAX),
    st.integers(0, objects.BLOCKS_PER_FILE_MAX),
    st.integers(0, 2**32),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
)


@given(heads)
def test_head_round_trip_and_lengths(head: Head) -> None:
    raw = head.encode()
    assert len(raw) == objects.HEAD_BYTES
    assert Head.decode(bytearray(raw)) == head
    if head.blocks <= 1000:
        assert sum(head.block_length(n) for n in range(head.blocks)) == head.length_bytes
    lists = head.list_keys()
    total = sum(head.list_length(number) for number in range(len(lists)))
    assert total == objects.KEY_BYTES * head.blocks
    assert len(set(lists)) == len(lists)
    assert all(0 < head.list_length(n) <= 2**20 for n in range(len(lists)))


@given(heads, st.integers(0, objects.HEAD_BYTES * 8 - 1))
def test_head_with_a_flipped_bit_is_refused_or_is_another_valid_one(head: Head, bit: int) -> None:
    raw = bytearray(head.encode())
    raw[bit // 8] ^= 1 << bit % 8
    try:
        found = Head.decode(raw)
    except CliError:
        return
    assert found != head
    assert found.encode() == bytes(raw)


@given(st.binary(min_size=objects.HEAD_BYTES, max_size=objects.HEAD_BYTES))
def test_foreign_bytes_are_no_head(raw: bytes) -> None:
    with pytest.raises(CliError, match="no file head"):
        Head.decode(raw)


def test_key_lists_are_checked_against_the_head() -> None:
    keys = [hashlib.sha256(bytes([n])).digest() for n in range(3)]
    raw = b"".join(keys)
    head = Head(3 * 10, 10, bytes(32), hashlib.sha256(raw).digest())
    assert head.split_lists([bytearray(raw)]) == keys
    with pytest.raises(CliError, match="key list"):
        head.split_lists([bytearray(raw[:-1] + b"x")])


def test_chain_keys_depend_on_everything_before() -> None:
    first = objects.chain_key(b"", b"a")
    assert len(first) == objects.KEY_BYTES
    assert objects.chain_key(first, b"b") != objects.chain_key(b"", b"b")
    assert objects.chain_key(first, b"b") == objects.chain_key(first, memoryview(b"b"))
    assert objects.name_key("n") != objects.parse_key("text:n") != first


@pytest.mark.parametrize(
    ("text", "key"),
    [("00" * 8, bytes(8)), ("0x" + "ab" * 16, b"\xab" * 16), ("cd" * 64, b"\xcd" * 64)],
)
def test_keys_in_hex(text: str, key: bytes) -> None:
    assert objects.parse_key(text) == key


@pytest.mark.parametrize("text", ["", "00" * 7, "ab" * 65, "abc", "xyz", "text"])
def test_keys_that_are_none(text: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        objects.parse_key(text)
    assert "8 to 64 bytes" in caught.value.hint


@pytest.mark.parametrize("name", ["", "x" * (objects.NAME_BYTES_MAX + 1)])
def test_names_of_a_wrong_length(name: str) -> None:
    with pytest.raises(UsageProblem):
        objects.name_key(name)


def test_text_that_is_not_utf8_is_a_name_like_any_other() -> None:
    assert objects.name_key("\udcff") != objects.name_key("\udcfe")
    assert objects.parse_key("text:\udcff") != objects.parse_key("text:")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7), ("7B", 7), ("1K", 1024), ("1KiB", 1024), ("1.5 MiB", 3 << 19), ("2T", 2 << 40),
        ("1 MB", 10**6), ("30GB", 30 * 10**9), ("1kB", 1000), ("1KB", 1000),
        ("15.36TB", 15_360 * 10**9),
    ],
)  # fmt: skip
def test_sizes_are_read_alike_by_everything(text: str, value: int) -> None:
    """Options of both programs, `entresol size`, and the files of both sides."""
    assert options.parse_size(text) == value
    assert config_values.parse_size(text) == value
    assert sizing.parse_bytes(text) == value
    assert client_config._quantity("staging_bytes_max", text) == value


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1 mb", "1m", "1e3", "٣GiB", "1KIB", "0x10", "9" * 400]
)
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options.parse_size(text)


@pytest.mark.parametrize("text", ["0", "65MiB", "67108865"])
def test_block_sizes_out_of_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options.parse_block_size(text)
    assert options.parse_block_size("64MiB") == limits.BLOCK_BYTES_MAX


@pytest.mark.parametrize(("text", "value"), [("500ms", 5 * 10**8), ("2", 2 * 10**9), ("10min", 0)])
def test_spans(text: str, value: int) -> None:
    assert options.parse_span_ns(text) == (value or limits.DEADLINE_NS_MAX)


@pytest.mark.parametrize("text", ["0", "601s", "1h", "ms", "-1s"])
def test_spans_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options.parse_span_ns(text)


@given(st.integers(0, 2**60))
def test_sizes_are_short_and_never_off_by_a_unit(value: int) -> None:
    number, unit = output.size(value).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert abs(float(number) * scale - value) <= 0.05 * scale
    assert len(output.size(value)) <= 10


@pytest.mark.parametrize(
    ("span_ns", "text"),
    [
        (1_500, "2 µs"), (250_000_000, "250 ms"), (2_500_000_000, "2.5 s"),
        (61 * 10**9, "1 min 1 s"), (3_660 * 10**9, "1 h 1 min"), (90_000 * 10**9, "1 d 1 h"),
    ],
)  # fmt: skip
def test_durations(span_ns: int, text: str) -> None:
    assert output.duration(span_ns) == text


def test_table_aligns_numbers_to_the_right() -> None:
    lines = output.table(("A", "N"), [("x", "1"), ("long", "22")], right=" r")
    assert lines == ["A      N", "x      1", "long  22"]


def test_every_reason_has_a_sentence_and_every_absence_a_fix() -> None:
    for reason in Reason:
        text, fix = session.sentence(Explanation(reason, 1_700_000_000_000_000_000, "s"))
        assert "{" not in text
        here = reason in (Reason.IN_MEMORY, Reason.ON_FLASH)
        assert bool(fix) is not here
        assert session.is_here(Explanation(reason, 0, "s")) is here
    text, _ = session.sentence(Explanation(None, 0, "s7", Status.DISCONNECTED))
    assert "s7" in text


def test_first_failure_prefers_a_cause_over_a_gap() -> None:
    ok, gap, busy = Status.OK, Status.GAP, Status.BUSY
    assert session.first_failure([ok, gap, busy]) == 2
    assert session.first_failure([ok, gap, gap]) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CliError("x"), 1),
        (UsageProblem("x"), 2),
        (Unreachable("x"), 3),
        (ConfigError("x"), 2),
        (BadKeyError("x"), 2),
        (FabricError("x"), 1),
    ],
)
def test_exit_codes(error: CliError, code: int) -> None:
    assert errors.exit_code_of(error) == code


def test_an_error_is_one_line_and_its_fix() -> None:
    assert errors.describe(CliError("no", hint="do this")) == ["entresol: no", "  fix: do this"]
    assert errors.describe(CliError("no")) == ["entresol: no"]


def test_progress_is_silent_unless_asked_for_or_seen(capsys: pytest.CaptureFixture[str]) -> None:
    for forced in (False, True):
        with output.Progress("put", total_bytes=100, forced=forced) as progress:
            progress._due_s = 0.0
            progress.update(50)
        assert ("put: 50 B of 100 B (50 %)" in capsys.readouterr().err) is forced
