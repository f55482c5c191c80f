"""What `entresol put` says of what it could not see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from entresol_client.cli import storing
from entresol_client.cli.errors import EXIT_UNREACHABLE, CliError, Unreachable
from entresol_client.results import ExistsResult, Explanation
from entresol_proto.wire.data import Reason

KEYS = [bytes(16), b"k" * 16]


def putter(found: ExistsResult) -> storing.Putter:
    """One whose last look ends like this."""
    ns: Any = SimpleNamespace(
        exists=lambda keys, deadline_ns: found,
        explain=lambda keys: [Explanation(Reason.EVICTED, 1, "a")] * len(keys),
    )
    return storing.Putter(ns, "durable", 10**9)


def test_what_a_shard_did_not_answer_is_not_called_stored() -> None:
    with pytest.raises(Unreachable, match="not every shard answered") as caught:
        storing._check_complete(putter(ExistsResult(0, [False] * 2, complete=False)), KEYS, "x")
    assert caught.value.exit_code == EXIT_UNREACHABLE


def test_what_was_evicted_again_is_told_and_what_is_there_is_fine() -> None:
    with pytest.raises(CliError, match="1 block of 2 are gone again"):
        storing._check_complete(putter(ExistsResult(1, [True, False], complete=True)), KEYS, "x")
    storing._check_complete(putter(ExistsResult(2, [True, True], complete=True)), KEYS, "x")
