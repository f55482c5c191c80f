"""F3: a test that was skipped holds no limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.line import Tally
from tests.proof.lines import limits
from tests.proof.lines.limits import Went

NODE = "tests/unit/test_a.py::test_b"
RAN, SKIPPED = ("tests.unit.test_a.test_b[x]", None), ("tests.unit.test_a.test_b[y]", "no device")
ANOTHER = ("tests.unit.test_a.test_bc", None)


def tally_of(went: Went, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tally:
    tally = Tally()
    monkeypatch.setattr(limits, "_pytest", lambda nodes, folder: went)
    limits._run_tests({NODE: 4}, folder, tally)
    return tally


def test_a_limit_holds_where_one_test_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = tally_of(Went("", (RAN, SKIPPED)), tmp_path, monkeypatch)
    assert (tally.tried, tally.survived, tally.not_run) == (1, 1, "")


def test_a_limit_whose_tests_are_all_skipped_was_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = tally_of(Went("", (SKIPPED, ANOTHER)), tmp_path, monkeypatch)
    assert (tally.tried, tally.not_run) == (0, f"{NODE}: no device")
    assert tally.clean


@pytest.mark.parametrize(
    ("went", "said"), [(Went("", (ANOTHER,)), "no test of this name ran"), (Went("boom"), "boom")]
)
def test_a_test_that_failed_or_did_not_run_is_found(
    went: Went, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = tally_of(went, tmp_path, monkeypatch)
    assert [(finding.seed, finding.text) for finding in tally.findings] == [(4, f"{NODE}: {said}")]
    assert (tally.tried, tally.survived) == (1, 0)


def test_what_pytest_reports_is_read(tmp_path: Path) -> None:
    node = "tests/unit/test_proof_limits.py::test_a_limit_holds_where_one_test_ran"
    went = limits._pytest([node], tmp_path)
    assert not went.failed
    assert went.passed(node) == 1
    assert limits._pytest([node + "_not"], tmp_path).failed
