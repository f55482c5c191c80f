"""Import path and closing words of the test run.

`import certs, leaks` works because pytest puts this folder on the path. A run ends with what it did
not do: every skip is counted under its reason, so that nothing is green by silence.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator

import pytest

NOT_RUN = "not run here:"

with contextlib.suppress(ImportError):  # an engine's own environment has none
    from hypothesis import HealthCheck, settings

    # How long an example takes says something of the machine, and nothing of the code.
    settings.register_profile(
        "entresol", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("entresol")


@pytest.fixture(autouse=True)
def _loggers_are_as_they_were() -> Iterator[None]:
    """A test that silences our loggers, because it provokes thousands of lines, does so alone."""
    known = logging.root.manager.loggerDict
    before = {name: one.level for name, one in known.items() if isinstance(one, logging.Logger)}
    yield
    for name, one in known.items():
        if name.startswith("entresol") and isinstance(one, logging.Logger):
            one.setLevel(before.get(name, logging.NOTSET))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List skipped tests by reason; a reason that does not say what was missing stands out."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    terminalreporter.section("not run here", sep="-")
    if not reasons:
        terminalreporter.line("nothing: every test ran")
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"{count:5}  {reason.removeprefix(NOT_RUN).strip()}")
