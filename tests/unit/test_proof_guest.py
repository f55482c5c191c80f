"""Every kind of fault that a guest line is about was tried in its guest, or it says why not."""

from __future__ import annotations

import pytest

from tests.proof.lines import guest
from tests.rdma import evidence, report


def made(*outcomes: str, faults: dict[str, evidence.Count] | None = None) -> report.Report:
    cases = tuple(report.Case(f"t{n}", outcome, 0.5, "why") for n, outcome in enumerate(outcomes))
    found = evidence.Evidence(faults=faults or {})
    return report.Report(rcs=(0,), seconds=9.0, where="guests", cases=cases, evidence=found)


EVERY = dict.fromkeys(guest.ON_DEVICES, evidence.Count(1, 1))


def test_a_fault_that_was_not_tried_is_said_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(guest.REQUIRED_ENV, raising=False)
    whole = guest.tally_of(made("passed", faults=EVERY), 1, guest.ON_DEVICES)
    assert whole.clean
    assert not whole.not_run
    less = {name: count for name, count in EVERY.items() if not name.startswith("dust")}
    told = guest.tally_of(made("passed", "skipped", faults=less), 1, guest.ON_DEVICES)
    assert told.clean
    assert told.not_run == "not tried: dust: bad blocks; 1 tests in the guest: why"
    silent = guest.tally_of(made("passed", faults=less), 1, guest.ON_DEVICES)
    assert [each.text for each in silent.findings] == ["not tried: dust: bad blocks"]
    nothing = guest.tally_of(made("skipped", "skipped"), 1, guest.ON_DEVICES)
    assert nothing.clean
    assert nothing.tried == 0
    assert "log-writes: power cut; 2 tests" in nothing.not_run
    monkeypatch.setenv(guest.REQUIRED_ENV, "1")
    assert guest.tally_of(made("skipped", "skipped"), 1, guest.ON_DEVICES).findings


def test_networks_are_counted_by_their_fabric() -> None:
    report = made("passed", faults={"netem: loss": evidence.Count(2, 2)})
    wanted = ("netem: loss over verbs", "netem: loss over tcp-plain")
    report.evidence.figures.append(("netem", {"fabric": "verbs", "what": "loss", "ok": 1}))
    (finding,) = guest.tally_of(report, 1, wanted).findings
    assert finding.text == "not tried: netem: loss over tcp-plain"


def test_what_a_line_is_about_is_known_to_the_suites() -> None:
    for name in (*guest.ON_DEVICES, *guest.ON_LEASES, *guest.ON_NETWORKS):
        assert name.partition(" over ")[0] in evidence.FAULTS, name
    assert set(guest.ON_NETWORKS_FIRST) < set(guest.ON_NETWORKS)
