"""Runs suites, each with the pytest of its environment, and keeps what they said.

Invariant: when a suite is over, no process that it started is left: it runs in a process group of
its own, which is ended whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.engines import builder
from tests.engines.environments import ENVIRONMENTS, HERE, Environment
from tests.engines.progress import say
from tests.engines.report import Report, Suite, read_figures
from tests.rdma.report import read as read_cases

ROOT = HERE.parents[1]
RECORD_ENV = "ENTRESOL_ENGINES_RECORD"  # file for the outcome of each test
FIGURES_ENV = "ENTRESOL_ENGINES_FIGURES"  # file for what tests measured
SIZE_ENV = "ENTRESOL_ENGINES_SIZE"
WORK_ENV = "ENTRESOL_ENGINES_WORK"  # folder for what all runs may share, models for example
DAEMON_PYTHON_ENV = "ENTRESOL_DAEMON_PYTHON"
SUITE_SECONDS_MAX = {"commit": 1800.0, "full": 5400.0}  # for a hang
RC_TIMED_OUT = 124
SHARED_MEMORY = Path("/dev/shm")
LEAVINGS = "vllm_offload_*.mmap"  # of vLLM's own offloading, when its engine is killed


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: environments, extra words for pytest, where results go."""

    environments: Sequence[Environment]
    size: str
    pytest_words: Sequence[str]
    out: Path
    skip: frozenset[str] = frozenset()
    jobs: int = 1  # suites at a time


def run(plan: Plan) -> Report:
    """Build one after the other, then run. What cannot be built keeps no other from running."""
    begun = time.monotonic()
    suites = [_prepared(one, plan) for one in plan.environments if _has_tests(one)]
    ready = [(suite, ENVIRONMENTS[suite.name]) for suite in suites if not suite.reason]
    with ThreadPoolExecutor(plan.jobs) as pool:
        futures = {one.name: pool.submit(_run_one, suite, one, plan) for suite, one in ready}
        try:
            ran = {name: future.result() for name, future in futures.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            _ending.set()
            raise
    came_to = tuple(ran.get(suite.name, suite) for suite in suites)
    return Report(plan.size, came_to, round(time.monotonic() - begun, 1))


def _has_tests(environment: Environment) -> bool:
    if any(environment.suite.glob("test_*.py")):
        return True
    say(f"{environment.name}: no tests")
    return False


def _prepared(environment: Environment, plan: Plan) -> Suite:
    """Of an environment that is built; with a reason when it is not."""
    if environment.name in plan.skip:
        return Suite(environment.name, None, "left out with --skip")
    begun = time.monotonic()
    try:
        built = builder.find(environment) is not None
        builder.ensure(environment)
    except builder.NotHereError as cannot:
        return Suite(environment.name, None, str(cannot))
    seconds = 0.0 if built else round(time.monotonic() - begun, 1)
    return Suite(
        environment.name, None, versions=_versions(environment), build_seconds=seconds
    )  # fmt: skip


def _run_one(prepared: Suite, environment: Environment, plan: Plan) -> Suite:
    log, record = (plan.out / f"{environment.name}.{end}" for end in ("log", "jsonl"))
    figures = plan.out / f"{environment.name}.figures"
    for path in (log, record, figures):
        path.unlink(missing_ok=True)
    env = suite_env(environment, plan.size, record, figures)
    command = [
        str(builder.python(environment)), "-m", "pytest", "-c", str(HERE / "pytest.ini"),
        f"--rootdir={ROOT}", f"--confcutdir={HERE}", *words_for(environment, plan.pytest_words),
    ]  # fmt: skip
    say(f"{environment.name}: running {environment.suite}")
    started = time.monotonic()
    there = set(SHARED_MEMORY.glob(LEAVINGS))
    mark = f"{environment.name}: " if plan.jobs > 1 else ""
    rc, cpu_seconds = in_a_group(command, env, log, SUITE_SECONDS_MAX[plan.size], mark)
    _sweep(there)
    suite = replace(
        prepared,
        rc=rc,
        reason="its time was over" if rc == RC_TIMED_OUT else "",
        seconds=round(time.monotonic() - started, 1),
        cpu_seconds=round(cpu_seconds, 1),
        cases=read_cases(record),
        figures=read_figures(figures),
        log=str(log),
    )
    if suite.outcome != "passed":
        return suite
    log.unlink(missing_ok=True)  # nobody reads that of a suite that passed
    return replace(suite, log="")


def _sweep(before: set[Path]) -> None:
    """Remove the memory that engines which were killed left, unless somebody maps it."""
    left = set(SHARED_MEMORY.glob(LEAVINGS)) - before
    if not left:
        return
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {word for word in maps.read_text().split() if "/vllm_offload_" in word}
    for path in left:
        if str(path) not in mapped:
            with contextlib.suppress(OSError):
                path.unlink()


def words_for(environment: Environment, words: Sequence[str]) -> list[str]:
    """pytest's arguments: its suite, unless files or folders of it are named."""
    name = environment.suite.name
    paths = any(not word.startswith("-") and name in word for word in words)
    return [*words] if paths else [str(environment.suite), *words]


def execute(environment: Environment, command: Sequence[str]) -> int:
    """Run any command as a suite's tests would; its exit code."""
    env = suite_env(environment, "full") | {"VIRTUAL_ENV": str(builder.folder(environment))}
    return subprocess.run(command, env=env, check=False).returncode


def installed(work: Path) -> Path:
    """A folder that tells of the tree as an editable installation does: name, entry points.

    Engines find plug-ins by entry points; a path to the code alone has none.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = dict(project.get("entry-points", {})) | {"console_scripts": project["scripts"]}
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in sorted(one.items()))
        for group, one in sorted(groups.items())
    )
    name, version = project["name"], project["version"]
    digest = hashlib.blake2b(f"{version}\n{points}".encode(), digest_size=6).hexdigest()
    info = work / f"installed-{digest}" / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    return info.parent


def suite_env(
    environment: Environment, size: str, record: Path | None = None, figures: Path | None = None
) -> dict[str, str]:
    """The variables of a suite's process."""
    work = builder.cache_root() / "work"
    work.mkdir(exist_ok=True)
    layers = [builder.folder(layer) for layer in reversed(environment.layers())]
    path = [str(layer / "bin") for layer in layers] + [os.environ.get("PATH", os.defpath)]
    # Bytecode beside the sources: compiling an engine anew costs each of its processes a minute.
    left_out = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    env = {k: v for k, v in os.environ.items() if k not in left_out}
    return {
        **env,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(
            map(str, (ROOT / "client", ROOT / "proto", ROOT, installed(work)))
        ),
        DAEMON_PYTHON_ENV: env.get(DAEMON_PYTHON_ENV) or sys.executable,
        RECORD_ENV: str(record or ""),
        FIGURES_ENV: str(figures or ""),
        SIZE_ENV: size,
        WORK_ENV: str(work),
        "OMP_NUM_THREADS": "1",  # threads that wait for each other cost seconds on two processors
        # Nothing here may depend on a network, or tell anybody about it.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **dict(environment.variables),
    }


_ending = threading.Event()  # the run was interrupted: suites under way are ended


def in_a_group(
    command: Sequence[str], env: Mapping[str, str], log: Path, seconds_max: float, mark: str = ""
) -> tuple[int, float]:
    """Run a command in a process group of its own; its output goes to `log` and to stdout.

    Returns its exit code, RC_TIMED_OUT when its time was over, and the processor time of it and of
    all it waited for. The group is ended in any case. `mark` begins its lines on stdout.
    """
    process = subprocess.Popen(
        command, env=dict(env), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    output = process.stdout

    def copy() -> None:
        with open(log, "wb") as file:
            for line in output:
                file.write(line)
                file.flush()
                sys.stdout.write(mark + line.decode(errors="replace"))
                sys.stdout.flush()

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    try:
        rc, cpu_seconds = _wait(process, seconds_max)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(5.0)  # longer only if something left the group and still holds the pipe
        if not reader.is_alive():
            output.close()
    return rc, cpu_seconds


def _wait(process: subprocess.Popen[bytes], seconds_max: float) -> tuple[int, float]:
    """As `in_a_group` returns; a process past its time is not ended here."""
    until = time.monotonic() + seconds_max
    while time.monotonic() < until and not _ending.is_set():
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, used.ru_utime + used.ru_stime
        time.sleep(0.05)
    return RC_TIMED_OUT, 0.0


def _versions(environment: Environment) -> dict[str, str]:
    """Of what the environment shows, asked of the environment itself."""
    script = (
        "import importlib.metadata as m, json, sys\n"
        "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [str(builder.python(environment)), "-c", script, *environment.shows],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {}
    return dict(json.loads(done.stdout))
