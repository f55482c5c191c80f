"""Q5 compares like with like, and a flood that does nothing is no flood."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from tests.proof import fair_daemon
from tests.proof.fair_daemon import SAMPLES_FOR_P99, Flood, ratio_of

# Processes that a flood may turn out to be, in Python; each line of input is a question.
TALE = "import sys\nfor n, _ in enumerate(sys.stdin):\n    print({0}, flush=True)"
WORKS, IDLES = TALE.format("'{\"answered\": %d}' % (5 + n)"), TALE.format("'{}'")
REFUSED = TALE.format("'{\"unanswered\": %d}' % (5 + n)")
GONE = "raise SystemExit('no such flood')"
BREAKS_OFF = "import sys\nsys.stdin.readline()\nprint('{\"answered\": 5}', flush=True)"


def a_storm(program: str, folder: Path) -> int:
    said = folder / "said"
    with said.open("wb") as file:
        process = Popen(
            [sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, stderr=file, text=True
        )
    with process:
        flood = Flood(process, "nothing", said)
        try:
            flood.begin()
            return flood.end()
        finally:
            process.kill()


def test_a_flood_that_works_tells_what_was_answered_in_the_storm(tmp_path: Path) -> None:
    assert a_storm(WORKS, tmp_path) == 1


@pytest.mark.parametrize(
    ("program", "said"),
    [(IDLES, "did nothing"), (REFUSED, "did nothing"), (GONE, "ended: {} no such flood"),
     (BREAKS_OFF, "ended")],
)  # fmt: skip
def test_a_flood_that_does_nothing_is_noticed(
    program: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_daemon, "FLOOD_START_S_MAX", 0.2)
    with pytest.raises(AssertionError, match=said):
        a_storm(program, tmp_path)


def rows(calm: list[float], storm: list[float]) -> list[dict[str, list[float]]]:
    return [{"calm_s": calm, "storm_s": storm}]


def test_both_weathers_are_judged_by_the_percentile_of_the_fewer() -> None:
    """Of 3,000 calm gets and 2,000 in the storm both have the 95th percentile judged."""
    calm = [1.0] * (SAMPLES_FOR_P99 * 97 // 100) + [9.0] * (SAMPLES_FOR_P99 * 3 // 100)
    storm = [1.0] * 1_800 + [3.0] * 200
    assert ratio_of(rows(calm, storm)) == 3.0
    assert ratio_of(rows(storm, calm)) == pytest.approx(1 / 3)
    enough = [1.0] * (SAMPLES_FOR_P99 - 60) + [18.0] * 60
    assert ratio_of(rows(calm, enough)) == 2.0


def test_weather_without_gets_is_no_good_weather() -> None:
    assert ratio_of(rows([], [1.0])) == math.inf
    assert ratio_of(rows([1.0], [])) == math.inf
