"""client/ROUTERS.md says what the relay does: its metrics, its options, its limits."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from entresol_client.cli.main import parser_of
from entresol_client.relay import chain, command, metrics, publisher
from entresol_client.relay.service import Options
from entresol_client.relay.wire import MEDIA

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "client" / "ROUTERS.md").read_text(encoding="utf-8")


def options() -> dict[str, argparse.Action]:
    parser = parser_of(["relay"])
    (subparsers,) = (one for one in parser._actions if isinstance(one.choices, dict))
    relay = subparsers.choices["relay"]  # type: ignore[index]
    return {word: action for action in relay._actions for word in action.option_strings}


def test_every_metric_is_in_the_table_as_it_is_told() -> None:
    rows = re.findall(r"^\| `(entresol_relay_\w+)` \| (?:`(\w+)`)? ?\| (.*) \|$", PAGE, re.M)
    assert rows == list(metrics.METRICS)


def test_every_reason_for_skipping_is_told() -> None:
    for why in metrics.SKIPPED:
        assert f"`{why}`" in PAGE or f"`{why}_blocks`" in PAGE


def test_options_of_the_page_exist_and_every_own_option_is_told() -> None:
    known = options()
    for word in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)):
        assert word in known or word in ("--port",), word
    common = {"--help", "--config", "--tenant", "--json", "--progress", "--verbose", "--status"}
    told = {word for word in known if word.startswith("--")} - common
    assert {word for word in told if word not in PAGE} == set()


def test_defaults_of_the_page_are_the_codes() -> None:
    known, given = options(), Options(workers=())
    assert known["--withdraw-after"].default == given.withdraw_after_s == 60.0
    assert known["--round-pause"].default == given.round_pause_s == 10.0
    assert known["--buffer"].default == given.buffer_batches == publisher.BUFFER_BATCHES_DEFAULT
    assert "(60 s)" in PAGE
    assert "(10 s)" in PAGE
    assert "10,000, at most 256 MiB" in PAGE
    assert chain.WAITING_BYTES_MAX == publisher.BUFFER_BYTES_MAX == 256 * 2**20
    assert command.MEDIA == MEDIA == tuple(known["--medium"].choices or ())
