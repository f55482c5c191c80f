"""The proof suite's frame: what a slice did is counted, what died is a crash, nothing is silent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.proof.line import Finding, Line, Size, Slice, Tally, find_lines, order
from tests.proof.table import Row, Scorecard

ROOT = Path(__file__).resolve().parents[2]

LINES = """
    import os, signal, time
    from tests.proof.line import Line, NotRunError, Size, Tally
    SIZES = {Size.COMMIT: 6, Size.NIGHTLY: 12, Size.RELEASE: 24}

    def good(work):
        (work.folder / "scratch").write_text("x")
        tally = Tally(tried=10 * work.units, survived=10 * work.units)
        tally.figure("max_seed", work.seeds[-1])
        tally.figure("slices", 1)
        if work.trace:
            print("traced", work.seed)
        return tally

    def dies(work):
        if 3 in work.seeds:
            os.kill(os.getpid(), signal.SIGSEGV)
        return good(work)

    def raises(work):
        raise RuntimeError("this line cannot count")

    def wrong(work):
        tally = Tally(tried=work.units, survived=work.units - 1, wrong_bytes=1)
        tally.found(work.seed, "a byte differs")
        return tally

    def hangs(work):
        time.sleep(60)

    def half(work):
        if work.seed > 2:
            raise NotRunError("no such kernel")
        return good(work)

    def lacking(work):
        tally = good(work)
        tally.lacks(f"no such disk; no {work.seed % 2}")
        return tally

    def cannot():
        raise NotRunError("no such guest")

    def found():
        with open(os.environ["ENTRESOL_PROOF_JOURNALS"] + ".found", "a") as file:
            file.write("x")

    def missed():
        raise AssertionError("nobody saw it")

    def line(id, run, canary=found, **more):
        return Line(id, run.__name__, "units", SIZES, 2, run, canary, **more)

    LINES = (
        line("R10", good), line("R2", good, missed), line("R3", dies), line("F1", raises),
        line("S1", wrong), line("S2", hangs, slice_deadline_s=2.0), line("K1", good, alone=True),
        line("Q1", good, not_run=lambda: "no such device"),
        line("R8", half), line("R9", lacking), line("K2", good, cannot),
    )
"""


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Runs the command on the lines above."""
    package = tmp_path / "lines" / "example_lines"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "examples.py").write_text(textwrap.dedent(LINES))
    environment = {
        **os.environ, "ENTRESOL_PROOF_LINES": "example_lines",
        "ENTRESOL_PROOF_JOURNALS": str(tmp_path / "journals"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "lines"), *sys.path]),
    }  # fmt: skip

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        if words[0] == "run":
            words = (*words, "--json", str(tmp_path / "proof.json"))
        return subprocess.run(
            [sys.executable, "-m", "tests.proof", *words], cwd=ROOT, env=environment,
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    return run


def test_slices_add_up_to_rows_and_the_file_has_them(proof, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = proof("run", "--line", "R10", "--line", "K1", "--line", "Q1", "--markdown",
                 str(tmp_path / "table.md"), "--seed", "5")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["id"]: row for row in json.loads((tmp_path / "proof.json").read_text())}
    assert list(rows) == ["R10", "K1", "Q1", "C1"]
    assert rows["R10"]["tried"] == rows["R10"]["survived"] == 60
    assert rows["R10"]["seed"] == 5
    assert rows["Q1"]["not_run"] == "no such device"
    assert rows["Q1"]["tried"] == 0
    assert set(rows["R10"]) == {
        "id", "name", "seed", "tried", "survived", "wrong_bytes", "durable_lost", "crashes",
        "seconds", "not_run",
    }  # fmt: skip
    assert rows["C1"]["tried"] == 2  # one canary, which two lines share
    assert (tmp_path / "journals.found").read_text() == "x"
    assert "NOT RUN: no such device" in done.stdout
    assert "max_seed=10 slices=3" in done.stdout
    assert "not run: Q1" in done.stdout
    assert "WHAT RAN HELD" in done.stdout
    assert "not run: no such device" in (tmp_path / "table.md").read_text()


def test_whatever_dies_hangs_or_differs_fails_with_its_seed(proof, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = proof("run", *(f"--line={name}" for name in ("R2", "R3", "F1", "S1", "S2")))
    assert done.returncode == 1
    rows = {row["id"]: row for row in json.loads((tmp_path / "proof.json").read_text())}
    assert rows["R3"]["crashes"] == 1
    assert f"R3 FOUND seed=3: seeds from 3, 2 units: exit status {-signal.SIGSEGV}" in done.stdout
    assert rows["F1"]["crashes"] == 3
    assert "this line cannot count" in done.stdout
    assert rows["S1"]["wrong_bytes"] == 3
    assert rows["S2"]["crashes"] == 3
    assert "took longer than 2 s" in done.stdout
    assert rows["C1"]["survived"] == rows["C1"]["tried"] - 1  # R2's canary
    assert "nobody saw it" in done.stdout


def test_a_stopped_run_goes_on_where_it_was(proof, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert proof("run", "--line", "R10").returncode == 0
    journal = tmp_path / "journals" / "commit.jsonl"
    kept = journal.read_text().splitlines()
    assert len(kept) == 4  # three slices and the canary
    journal.write_text("\n".join([*kept[:2], kept[2][:40]]))
    done = proof("run", "--line", "R10", "--resume")
    assert done.returncode == 0
    assert "slices=3" in done.stdout
    assert len(journal.read_text().splitlines()) == 2 + 1 + 2
    examples = tmp_path / "lines" / "example_lines" / "examples.py"
    examples.write_text(examples.read_text() + "\n# changed\n")
    before = len(journal.read_text().splitlines())
    assert proof("run", "--line", "R10", "--resume").returncode == 0
    assert len(journal.read_text().splitlines()) == before + 4, "old code's slices were believed"


def test_whole_lines_are_recorded_with_their_commit(proof, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    into, table = tmp_path / "record.json", tmp_path / "record.md"
    words = ("record", "--size", "commit", "--into", str(into), "--markdown", str(table))
    assert proof("run", "--line", "R10", "--line", "R3").returncode == 1  # a slice of R3 dies
    done = proof(*words)
    assert "R10; no whole run yet: R2 R3 " in done.stdout
    (row,) = json.loads(into.read_text())
    assert (row["id"], row["tried"], row["canary_found"]) == ("R10", 60, True)
    assert row["day"]
    assert row["machine"]
    assert "| R3 | dies | not run: no whole run yet |" in table.read_text()
    assert "| Q1 | good | not run: no such device |" in table.read_text()

    examples = tmp_path / "lines" / "example_lines" / "examples.py"
    journal = tmp_path / "journals" / "commit.jsonl"
    of_old = journal.read_text().splitlines()
    examples.write_text(examples.read_text() + "\n# changed\n")
    assert proof("run", "--line", "R10", "--line", "K1", "--no-canaries").returncode == 0
    of_new = [text for text in journal.read_text().splitlines() if '"R10"' in text]
    others = [text for text in journal.read_text().splitlines() if '"K1"' in text]
    # A line of which each code did a part is not whole; what was recorded before stays.
    journal.write_text("\n".join([*of_old[:-1], of_new[-1], *others]))
    assert "record.json: K1; " in proof(*words).stdout
    assert [each["id"] for each in json.loads(into.read_text())] == ["R10", "K1"]
    assert [each["canary_found"] for each in json.loads(into.read_text())] == [True, False]

    into.write_text("[{}]")
    done = proof(*words)
    assert done.returncode == 1
    assert "no record of the proof" in done.stderr
    assert into.read_text() == "[{}]"


def test_replay_canary_and_list(proof) -> None:  # type: ignore[no-untyped-def]
    done = proof("replay", "R10", "--seed", "7")
    assert done.returncode == 0
    assert "traced 7" in done.stdout
    assert proof("replay", "S1", "--seed", "7").returncode == 1
    done = proof("canary", "--line", "R2", "--line", "R10")
    assert done.returncode == 1
    assert "R2   NOT FOUND" in done.stdout
    assert "R10  found" in done.stdout
    assert "cannot run here: no such device" in proof("list").stdout
    done = proof("run", "--line", "R10", "--line", "F1", "--without", "F1")
    assert done.returncode == 0
    assert "NOT RUN: left out by --without" in done.stdout
    done = proof("run", "--line", "Z9")
    assert done.returncode == 2
    assert "no line Z9" in done.stderr


def test_an_interrupted_run_leaves_no_process_behind(proof, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    environment = {
        **os.environ, "ENTRESOL_PROOF_LINES": "example_lines",
        "ENTRESOL_PROOF_JOURNALS": str(tmp_path / "journals"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "lines"), *sys.path]),
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "tests.proof", "run", "--line", "S2", "--no-canaries",
         "--json", str(tmp_path / "proof.json")],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until = time.monotonic() + 20
        while not (children := listed.read_text().split()) and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_what_a_part_of_a_line_lacks_is_said(proof, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    table, into = tmp_path / "table.md", tmp_path / "record.json"
    done = proof("run", "--line", "R8", "--line", "R9", "--markdown", str(table))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["id"]: row for row in json.loads((tmp_path / "proof.json").read_text())}
    assert (rows["R8"]["tried"], rows["R8"]["not_run"]) == (20, "no such kernel")
    assert (rows["R9"]["tried"], rows["R9"]["not_run"]) == (60, "no such disk; no 1")
    assert "R8 NOT RUN IN PART: no such kernel" in done.stdout
    assert "not run: R8 in part, R9 in part" in done.stdout
    assert "WHAT RAN HELD" in done.stdout
    assert "| R9 | lacking (not run in part: no such disk; no 1) | " in table.read_text()
    # What could not be done at all is tried again; what was done with a part left out is not.
    done = proof("run", "--line", "R8", "--line", "R9", "--resume")
    assert "slices not run (no such kernel)=2" in done.stdout
    done = proof("record", "--size", "commit", "--into", str(into), "--markdown", str(table))
    assert "R9; no whole run yet: R2 R3 R8 " in done.stdout
    assert [row["not_run"] for row in json.loads(into.read_text())] == ["no such disk; no 1"]
    assert "| R9 | lacking (not run in part: no such disk; no 1) | " in table.read_text()


def test_a_canary_that_could_not_run_is_said(proof, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = proof("run", "--line", "K1", "--line", "K2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["id"]: row for row in json.loads((tmp_path / "proof.json").read_text())}
    assert (rows["C1"]["tried"], rows["C1"]["survived"]) == (1, 1)
    assert rows["C1"]["not_run"] == "canary of K2: no such guest"
    assert "not run: C1 in part" in done.stdout
    assert "ALL HELD" not in done.stdout
    done = proof("canary", "--line", "K2")
    assert "K2   not run: no such guest" in done.stdout
    proof("run", "--line", "K2")
    rows = {row["id"]: row for row in json.loads((tmp_path / "proof.json").read_text())}
    assert (rows["C1"]["tried"], rows["C1"]["not_run"]) == (0, "canary of K2: no such guest")


def test_a_run_in_which_everything_ran_says_so() -> None:
    held = Row("R1", "x", 1, Tally(tried=1, survived=1))
    assert "not run: nothing · 1 s · ALL HELD" in Scorecard(Size.COMMIT, [held], 1.0).verdict()


def test_figures_add_up_or_keep_their_extreme() -> None:
    one, two = Tally(tried=1, survived=1), Tally(tried=2, survived=2)
    for tally, value in ((one, 3.0), (two, 5.0)):
        for name in ("images", "max_ms", "min_ms"):
            tally.figure(name, value)
    one.add(two)
    assert one.figures == {"images": 8.0, "max_ms": 5.0, "min_ms": 3.0}
    assert one.clean
    one.survived -= 1
    assert not one.clean


def test_findings_are_kept_to_a_limit_and_the_rest_is_counted() -> None:
    tally = Tally()
    for seed in range(25):
        tally.found(seed, "x")
    assert len(tally.findings) == 20
    assert tally.findings[-1] == Finding(19, "x")
    assert tally.findings_dropped == 5


def test_a_run_of_nothing_is_no_success() -> None:
    assert Scorecard(Size.COMMIT, [], 1.0).rc == 1
    assert Scorecard(Size.COMMIT, [Row("R1", "x", 1, not_run="no")], 1.0).rc == 1
    assert Scorecard(Size.COMMIT, [Row("R1", "x", 1)], 1.0).rc == 1  # nothing tried


def test_the_units_of_slices_cover_every_seed_once() -> None:
    def nothing(work: Slice) -> Tally:
        return Tally()

    line = Line("R1", "x", "u", dict.fromkeys(Size, 25), 10, nothing, None)
    cut = list(line.slices(Size.COMMIT, 100))
    assert cut == [(100, 10), (110, 10), (120, 5)]


def test_every_real_line_has_a_canary_a_sortable_id_and_growing_sizes() -> None:
    for line_id, line in find_lines().items():
        assert order(line_id)[0] >= 0, line_id
        assert line.canary is not None, f"{line_id} has no canary"
        sizes = [line.units[size] for size in (Size.COMMIT, Size.NIGHTLY, Size.RELEASE)]
        assert sizes == sorted(sizes), line_id
        assert sizes[0] > 0, line_id
