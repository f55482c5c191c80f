"""How the guest harness treats its machines: a stand-in for QEMU does well and badly.

Everything else is real: processes, process groups, the share, the initial file system, exit codes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rdma import __main__ as cli
from tests.rdma import (
    cost,
    cpio,
    evidence,
    guest,
    images,
    pod,
    qemu,
    record,
    report,
    spec,
    suites_run,
    tools,
    unit_run,
    usermode,
)

STAND_IN = """\
share=; for word in "$@"; do
  case $word in local,id=share,*) share=${word#*path=}; share=${share%%,security*};; esac
done
"""
WORKS = 'touch "$share/started"; echo hello; echo data > "$share/out/x"; echo 3 > "$share/rc"'


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> guest.Job:
    """A job whose machine is the stand-in; `become` gives it a script."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "initrd").write_bytes(cpio.archive({}))
    monkeypatch.setattr(guest, "to_stdout", lambda data: None)
    nothing_is_packed(tmp_path, monkeypatch)
    return guest.Job(
        arch=replace(spec.ARCHES["x86"], qemu="stand-in"),
        images=images.Images(folder, folder, folder),
        command=("true",),
        net="pair",
        out=tmp_path / "out",
        timeout_s=30,
    )


def nothing_is_packed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are looked for in `folder` first, and its mkfs.erofs leaves an empty image.

    The real one need not be here: whoever builds guests installs it (tools.ensure_tools).
    """
    packer = folder / "mkfs.erofs"
    packer.write_text('#!/bin/bash\n: > "$2"\n')
    packer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(tools, "SEARCH_PATH", os.environ["PATH"])


def become(job: guest.Job, script: str) -> None:
    path = job.out.parent / "stand-in"
    path.write_text(f"#!/bin/bash\n{STAND_IN}\n{script}\n")
    path.chmod(0o755)


def test_the_commands_exit_code_and_files_come_back(job: guest.Job) -> None:
    become(job, WORKS + '; echo oops > "$share/dmesg.txt"')
    assert guest.run(job, job.images.root) == 3
    assert (job.out / "x").read_text() == "data\n"
    assert sorted(path.name for path in job.out.iterdir()) == ["guest-dmesg.txt", "x"]
    become(job, WORKS.replace("echo 3", "echo 0"))
    assert guest.run(job, job.images.root) == 0
    assert sorted(path.name for path in job.out.iterdir()) == ["x"], "the old logs mislead"


def test_a_guest_without_a_result_is_booted_once_more(job: guest.Job) -> None:
    count = job.out.parent / "count"
    become(job, f"echo boot >> {count}; [ $(wc -l < {count}) = 1 ] && exit 0; {WORKS}")
    assert guest.run(job, job.images.root) == 3
    assert count.read_text().count("boot") == 2


def test_but_not_for_ever(job: guest.Job) -> None:
    count = job.out.parent / "count"
    become(job, f"echo boot >> {count}; echo broken >&2; exit 1")
    assert guest.run(job, job.images.root) == spec.RC_NO_RESULT
    assert count.read_text().count("boot") == guest.ATTEMPTS_MAX
    assert "broken" in (job.out / "guest-qemu.log").read_text()


def test_a_command_past_its_time_is_killed_with_all_its_children(job: guest.Job) -> None:
    pids = job.out.parent / "pids"
    become(
        job,
        f'touch "$share/started" "$share/out/half"; sleep 60 & echo $! $$ >> {pids}; wait',
    )
    assert guest.run(replace(job, timeout_s=3), job.images.root) == spec.RC_TIMED_OUT
    assert (job.out / "half").exists()
    assert len(pids.read_text().splitlines()) == 1, "it was booted again"
    for pid in pids.read_text().split():
        assert not is_alive(int(pid))


def test_a_guest_that_never_starts_its_command_counts_as_broken(
    job: guest.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "BOOT_TIMEOUT_S", 0.3)
    become(job, "sleep 60")
    assert guest.run(job, job.images.root) == spec.RC_NO_RESULT


def is_alive(pid: int) -> bool:
    """Whether a process is there and not just waiting to be reaped by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_machine_outlives_a_killed_harness(job: guest.Job) -> None:
    pid_file = job.out.parent / "pid"
    become(job, f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 60")
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.rdma import guest, images, spec\n"
        "from dataclasses import replace\n"
        "base = Path(sys.argv[1])\n"
        "folder = base / 'images'\n"
        "job = guest.Job(arch=replace(spec.ARCHES['x86'], qemu='stand-in'),\n"
        "  images=images.Images(folder, folder, folder), command=('true',), net='pair',\n"
        "  out=base / 'out')\n"
        "guest.run(job, folder)\n"
    )
    harness = subprocess.Popen(
        [sys.executable, "-c", script, str(job.out.parent)], cwd=guest.REPOSITORY
    )
    deadline = time.monotonic() + 30
    while not pid_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    harness.kill()
    harness.wait()
    while is_alive(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_command_reaches_the_guest_word_for_word(job: guest.Job, tmp_path: Path) -> None:
    words = ("bash", "-c", "echo \"$1\" '$HOME'; exit 4", "x", "a b*\n\t'\"\\")
    target = tmp_path / "initrd"
    guest._initrd(replace(job, command=words), target)
    data = target.read_bytes()
    text = data[data.index(b"#!/bin/bash\nexec ") :].split(b"\0", 1)[0].decode()
    assert shlex.split(text.removeprefix("#!/bin/bash\nexec ")) == list(words)


@pytest.mark.parametrize("name", ["init", "net.sh", "initramfs-init"])
def test_the_guests_scripts_are_shell(name: str) -> None:
    subprocess.run(["bash", "-n", str(guest.GUEST_FILES / name)], check=True, timeout=30)


# The machine --------------------------------------------------------------------------------------


def machine(job: guest.Job) -> qemu.Machine:
    here = job.images.root
    return qemu.Machine(job.arch, here, here, (("root", here),), here, here)


def test_emulation_is_the_default_and_a_panic_ends_the_machine(
    job: guest.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(job, "")
    monkeypatch.delenv(qemu.KVM_ENV, raising=False)
    line = qemu.command_line(machine(job))
    assert line[line.index("-accel") + 1] == "tcg"
    assert line[line.index("-smp") + 1] == "1"
    assert "-no-reboot" in line
    assert "panic=-1" in line[line.index("-append") + 1]
    monkeypatch.setenv(qemu.KVM_ENV, "1")
    line = qemu.command_line(machine(job))
    assert line[line.index("-accel") + 1] == "kvm"


def test_a_comma_in_a_path_stays_in_the_path(job: guest.Job) -> None:
    become(job, "")
    line = qemu.command_line(replace(machine(job), share=Path("/a,b")))
    assert any("path=/a,,b,security_model=none" in word for word in line)


# Pods ---------------------------------------------------------------------------------------------


def two(job: guest.Job, tmp_path: Path, host: str, dpu: str) -> pod.Ended:
    """Both machines are the stand-in, told apart by their names."""
    become(job, f"if [[ $* == *mac=02* ]]; then\n{dpu}\nelse\n{host}\nfi")
    common = tmp_path / "common"
    common.mkdir()
    jobs = [
        replace(job, name=name, wire=f"x{mac}", mac=mac, common=common, out=tmp_path / name)
        for name, mac in (("dpu", "02"), ("host", "01"))
    ]
    with (
        guest.Attempt(jobs[0], job.images.root) as first,
        guest.Attempt(jobs[1], job.images.root) as second,
    ):
        return pod._both(first, second)


SERVES = 'until [ -e "$share/stop" ]; do sleep 0.05; done; echo {rc} > "$share/rc"'


@pytest.mark.parametrize(("dpu_rc", "counts_as"), [(0, 0), (143, 0), (1, 1), (137, 137)])
def test_the_dpu_is_stopped_when_the_host_is_done(
    job: guest.Job, tmp_path: Path, dpu_rc: int, counts_as: int
) -> None:
    ended = two(job, tmp_path, 'echo 0 > "$share/rc"', SERVES.format(rc=dpu_rc))
    assert ended == pod.Ended(host=0, dpu=counts_as)
    assert ended.rc == counts_as


def test_the_hosts_failure_is_the_pods(job: guest.Job, tmp_path: Path) -> None:
    assert two(job, tmp_path, 'echo 5 > "$share/rc"', SERVES.format(rc=143)).rc == 5


def test_a_dpu_that_ended_on_its_own_is_not_excused(job: guest.Job, tmp_path: Path) -> None:
    ended = two(job, tmp_path, 'sleep 1; echo 0 > "$share/rc"', 'echo 143 > "$share/rc"')
    assert ended == pod.Ended(host=0, dpu=143)


def test_a_dpu_that_broke_ends_the_pod(job: guest.Job, tmp_path: Path) -> None:
    assert two(job, tmp_path, "sleep 60", "exit 0").rc == spec.RC_NO_RESULT


def test_a_dpu_that_will_not_stop_is_noticed(
    job: guest.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod, "STOP_TIMEOUT_S", 0.3)
    assert two(job, tmp_path, 'echo 0 > "$share/rc"', "sleep 60").dpu == spec.RC_NO_RESULT


def test_lines_of_two_machines_do_not_mix(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    dpu, host = pod.prefixed("dpu"), pod.prefixed("host")
    dpu(b"one")
    host(b"two\nthree\n")
    dpu(b" more\n")
    assert capfdbinary.readouterr().out == b"host| two\nhost| three\ndpu| one more\n"


def test_the_wires_ends_name_each_other() -> None:
    dpu, host = pod.wires(Path("/x"))
    assert dpu == (
        "dgram,local.type=unix,local.path=/x/dpu.sock,remote.type=unix,remote.path=/x/host.sock"
    )
    assert "local.path=/x/host.sock" in host
    with pytest.raises(spec.HarnessError, match="too long"):
        pod.wires(Path("/x" * 60))


@pytest.mark.parametrize("text", ["", "  ", "echo 'x"])
def test_a_dpu_needs_a_command(text: str) -> None:
    with pytest.raises(spec.HarnessError):
        pod.words(text)


# The command line ---------------------------------------------------------------------------------


def test_options_are_ours_before_the_dashes_and_the_commands_after() -> None:
    options = cli.parser().parse_args(
        ["run", "--kernel", "6.1", "--net", "loopback", "--timeout", "9", "--", "x", "--net", "y"]
    )
    assert (options.kernel, options.net, options.timeout) == ("6.1", "loopback", 9.0)
    assert guest.command_of(options.command) == ("x", "--net", "y")


def test_every_verb_has_what_its_function_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions run up to the images, which nobody builds here."""
    nothing_is_packed(tmp_path, monkeypatch)

    def no_images(*_: object, **__: object) -> images.Images:
        raise spec.HarnessError("as far as the images")

    for module in (cli, suites_run, unit_run, pod):
        monkeypatch.setattr(module, "images", no_images)
    verbs = (["build"], ["run", "--", "x"], ["suites", "--", "-k", "x"], ["unit"], ["pod"])
    for verb in verbs:
        options = cli.parser().parse_args(verb)
        with pytest.raises(spec.HarnessError, match="as far as"):
            cli.VERBS[options.verb](options)


@pytest.mark.parametrize(
    ("failure", "rc"),
    [(spec.UsageError("no such thing"), 2), (spec.HarnessError("no network"), 77)],
    ids=["mistake", "machine"],
)
def test_a_mistake_is_told_from_a_machine_that_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    failure: spec.HarnessError, rc: int,
) -> None:  # fmt: skip
    def fails(options: object) -> int:
        raise failure

    monkeypatch.setattr(cli, "ensure_tools", lambda arches: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setitem(cli.VERBS, "suites", fails)
    assert cli.main(["suites"]) == rc
    assert capsys.readouterr().err == f"tests.rdma: {failure}\n"


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(spec.HarnessError, match="no command"):
        guest.command_of(["--"])


def test_the_old_kernel_has_no_pairs() -> None:
    options = cli.parser().parse_args(["run", "--kernel", "6.1", "--net", "pair", "--", "x"])
    with pytest.raises(spec.HarnessError, match="loopback"):
        cli._run(options)


@pytest.mark.parametrize(("required", "rc"), [("", 0), ("1", 77)])
def test_a_host_that_cannot_says_so_and_fails_only_where_it_must(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], required: str, rc: int
) -> None:
    def cannot(arches: object) -> None:
        raise tools.NotHere("no apt here")

    monkeypatch.setattr(cli, "ensure_tools", cannot)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv(cli.REQUIRED_ENV, required)
    assert cli.main(["suites"]) == rc
    assert capsys.readouterr().err == "not run here: no apt here\n"


# The record and the report ------------------------------------------------------------------------

TESTS = """
import os, pytest
def test_one(): pass
def test_two(): pytest.skip("not run here: no GPU")
def test_three(): assert 1 == 2
@pytest.fixture
def breaks():
    yield
    raise OSError("gone")
def test_four(breaks): pass
def test_five(): os._exit(9)
@pytest.mark.slow
def test_six(): pass
"""


def recorded(tmp_path: Path, *arguments: str, claims: Path | None = None) -> Path:
    """The record that a real pytest run with the recorder leaves behind; an old one grows."""
    (tmp_path / "test_sample.py").write_text(TESTS)
    record_file = tmp_path / "record.jsonl"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.rdma.record",
         "--rootdir", str(tmp_path), *arguments, str(tmp_path / "test_sample.py")],
        cwd=tmp_path, capture_output=True, timeout=120, check=False,
        env=os.environ | {
            "PYTHONPATH": str(guest.REPOSITORY), record.RECORD_ENV: str(record_file),
            record.CLAIMS_ENV: str(claims or ""),
        },
    )  # fmt: skip
    return record_file


def outcomes(record_file: Path) -> dict[str, str]:
    return {case.name.rpartition(":")[2]: case.outcome for case in report.read(record_file)}


def test_what_a_killed_run_had_found_is_not_lost(tmp_path: Path) -> None:
    record_file = recorded(tmp_path)
    cases = {case.name.rpartition(":")[2]: case for case in report.read(record_file)}
    assert {name: case.outcome for name, case in cases.items()} == {
        "test_one": "passed", "test_two": "skipped", "test_three": "failed",
        "test_four": "failed", "test_five": "failed",
    }  # fmt: skip
    assert cases["test_two"].reason == "not run here: no GPU"
    assert cases["test_three"].reason == "assert 1 == 2"
    assert "gone" in cases["test_four"].reason
    assert cases["test_five"].reason == "begun and never ended"


def test_each_test_is_taken_by_one_guest_the_slow_ones_first(tmp_path: Path) -> None:
    claims, other = tmp_path / "claims", tmp_path / "other"
    claims.mkdir()
    other.mkdir()
    taker = record.Taker(claims, set())
    mine = [name for name in ("one", "three") if taker.take(f"test_sample.py::test_{name}")]
    assert mine == ["one", "three"]
    record_file = recorded(other, "-k", "not five", claims=claims)
    assert outcomes(record_file) == {
        "test_six": "passed", "test_two": "skipped", "test_four": "failed",
    }  # fmt: skip
    names = [json.loads(line)["test"] for line in record_file.read_text().splitlines()]
    assert names[0].endswith("test_six"), "it is marked as slow"
    assert not outcomes(recorded(tmp_path, "-k", "not five", claims=claims))


def test_a_guest_booted_again_goes_on_with_the_test_it_died_in(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    claims.mkdir()
    record_file = recorded(tmp_path, claims=claims)
    assert outcomes(record_file)["test_five"] == "failed"
    assert record.unfinished(record_file) == {"test_sample.py::test_five"}
    before = record_file.read_text()
    recorded(tmp_path, claims=claims)
    again = [json.loads(line) for line in record_file.read_text()[len(before) :].splitlines()]
    assert [line["test"].rpartition(":")[2] for line in again] == ["test_five"]


def made_report(*outcomes: str, rcs: tuple[int, ...] = (0,)) -> report.Report:
    cases = tuple(report.Case(f"t{n}", outcome, 0.5, "why") for n, outcome in enumerate(outcomes))
    return report.Report(rcs=rcs, seconds=9.0, where="guests", cases=cases)


def test_a_report_counts_what_ran_and_what_did_not() -> None:
    came_to = made_report("passed", "skipped", "failed", rcs=(0, 1))
    assert [came_to.count(name) for name in report.OUTCOMES] == [1, 1, 1]
    assert came_to.rc == 1
    text = "\n".join(came_to.lines())
    assert "not run:    1  why" in text
    assert "FAILED: t2: why" in text


@pytest.mark.parametrize(
    ("came_to", "rc"),
    [
        (made_report("passed", "skipped"), 0),
        (made_report(), 1),
        (made_report("skipped"), 1),
        (made_report("passed", "failed"), 1),
        (made_report("passed", rcs=(0, 124)), 124),
        (made_report("passed", "failed", rcs=(125, 1)), 1),
        (made_report("passed", "failed", rcs=(125, 0)), 1),
        (made_report(rcs=(125, 125)), 125),
        (made_report("passed", rcs=(125, 124)), 124),
    ],
    ids=[
        "good",
        "no tests",
        "only skips",
        "a failure",
        "killed",
        "both",
        "died in it",
        "none came",
        "hung",
    ],
)
def test_only_tests_that_ran_and_passed_are_a_success(came_to: report.Report, rc: int) -> None:
    assert came_to.rc == rc
    assert came_to.succeeded == (rc == 0)


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


def test_guests_divide_the_tests_and_one_without_any_is_excused(
    job: guest.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites_run, "images", lambda *_: job.images)
    lines = [
        {"test": "a", "outcome": "passed", "seconds": 1, "reason": ""},
        {"fault": "peer killed", "survived": True, "wrong_bytes": 0, "past_deadline": 0},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    become(
        job,
        f"""for word in "$@"; do
          case $word in local,id=pod,*) pod=${{word#*path=}}; pod=${{pod%%,security*}};; esac
        done
        touch "$share/started"
        if mkdir "$pod/claims/x" 2>/dev/null; then
          echo '{text}' > "$pod/record-guest0.jsonl"; echo 7.9 > "$share/out/kernel"
          echo 0 > "$share/rc"
        else echo 5 > "$share/rc"; fi""",
    )
    plan = suites_run.Plan(job.arch, spec.KERNELS["7.2"], 2, ("-x",), tmp_path / "out", 30, 64)
    common = tmp_path / "common"
    common.mkdir()
    made = suites_run.jobs(plan, job.images, common)
    assert len({one.env[record.RECORD_ENV] for one in made}) == 2
    assert len({one.env[record.CLAIMS_ENV] for one in made}) == 1
    everything = suites_run.jobs(replace(plan, arguments=()), job.images, emptied(common))
    left = [{word for word in one.command if "ignore" in word} for one in everything]
    proof = {f"--ignore={path}" for path in suites_run.OF_THE_PROOF}
    assert left == [proof, proof | {f"--ignore={path}" for path in suites_run.OF_THE_TIER}]
    known = suites_run.OF_THE_TIER + suites_run.OF_THE_PROOF
    assert all((guest.REPOSITORY / path).is_file() for path in known)
    came_to = suites_run.run(plan)
    assert came_to.rcs == (0, 0)
    assert came_to.rc == 0
    assert "2 of 7.9" in came_to.where
    assert came_to.evidence.faults["peer killed"].survived == 1
    assert json.loads((tmp_path / "out" / report.RESULT).read_text())["evidence"]["faults"]


# Evidence -----------------------------------------------------------------------------------------


def ends_with(error: Exception | None) -> None:
    if error is not None:
        raise error


def evidence_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> evidence.Evidence:
    """What trials of every outcome come to."""
    path = tmp_path / "record.jsonl"
    monkeypatch.setenv(record.RECORD_ENV, str(path))
    for _ in range(2):
        with evidence.trying("peer killed") as trial:
            trial.same(b"abc", b"abc")
            with trial.within(30):
                pass
    wrong = pytest.raises(AssertionError, match="2 wrong bytes")
    with wrong, evidence.trying("forged lease") as trial:
        trial.same(bytearray(b"axcy"), b"abc")
    for error in (TimeoutError(), None):
        late = pytest.raises(type(error) if error else AssertionError)
        with late, evidence.trying("device removed") as trial, trial.within(-1):
            ends_with(error)
    with path.open("a") as file:
        file.write('{"fault": "peer kil')  # the guest died here
    return evidence.sum_of([path, tmp_path / "none"])


def test_faults_are_counted_as_they_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = evidence_of(tmp_path, monkeypatch)
    assert found.faults == {
        "peer killed": evidence.Count(2, 2, 0, 0),
        "forged lease": evidence.Count(1, 0, 2, 0),
        "device removed": evidence.Count(2, 0, 0, 2),
    }
    table = found.fault_lines()
    assert len(table) == 1 + len(evidence.FAULTS)
    assert next(line for line in table if "peer killed" in line).split()[2:] == list("22000")
    assert "not tried" in next(line for line in table if "memlock" in line)
    with pytest.raises(AssertionError), evidence.trying("no such fault"):
        pass


def test_figures_are_printed_with_their_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.jsonl"
    monkeypatch.setenv(record.RECORD_ENV, str(path))
    small, large = cost.BLOCK_SIZES
    for fabric, size, cpu_s in (
        ("tcp", small, 0.1), ("tcp", large, 0.3), ("verbs", small, 0.08), ("verbs", large, 0.088),
        ("verbs", small, 0.9), ("verbs", small, 0.5),
    ):  # fmt: skip
        evidence.figure(cost.FIGURE, **cost.Cost(fabric, size, 10, 2.0, cpu_s).values())
    evidence.figure(
        "read", size=1 << 20, depth=8, ours_mb_per_s=30.0, theirs_mb_per_s=20.0, ratio=1.5,
        ratio_min=0.9, ratio_events=1.1,
    )  # fmt: skip
    came_to = replace(made_report("passed"), evidence=evidence.sum_of([path]))
    text = "\n".join(came_to.lines())
    assert "1024 KiB x 8 in flight: 30.0 of 20.0 MB/s, ratio 1.5 (at least 0.9)" in text
    assert "verbs: a block of 4 times the bytes costs the daemon 1.10 times the CPU" in text
    assert "tcp: a block of 4 times the bytes costs the daemon 3.00 times the CPU" in text
    assert "faults" not in text  # none was tried


def test_the_cpu_time_of_another_process_is_what_it_says_itself() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys, time\nwhile time.process_time() < 0.3: pass\n"
         "print(time.process_time(), flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        said = float(child.stdout.readline())
        assert said <= cost.cpu_seconds(child.pid) < said + 0.2


# Another architecture's processes -----------------------------------------------------------------


@pytest.mark.parametrize("release", ["6.6.99-x", "5.10", "6.1.0-56-amd64"])
def test_kernels_that_share_their_foreign_formats_are_left_alone(release: str) -> None:
    with pytest.raises(usermode.Impossible, match=r"6\.7"):
        usermode.check_kernel(release)
    usermode.check_kernel("6.7.1-custom")
    usermode.check_kernel("7.3.4+deb13-amd64")


def test_where_processes_cannot_be_emulated_machines_are(
    job: guest.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[suites_run.Plan] = []

    def impossible(*_: object) -> list[int]:
        raise usermode.Impossible("no namespaces")

    def in_guests(plan: suites_run.Plan) -> report.Report:
        asked.append(plan)
        return made_report("passed")

    monkeypatch.setattr(unit_run, "images", lambda *_: job.images)
    monkeypatch.setattr(usermode, "run_all", impossible)
    monkeypatch.setattr(suites_run, "run", in_guests)
    plan = unit_run.Plan(spec.ARCHES["arm64"], spec.KERNELS["7.2"], 2, (), tmp_path, 9, 64)
    came_to = unit_run.run(plan)
    assert came_to.rc == 0
    assert "aarch64" in came_to.where
    assert unit_run.SUITE in asked[0].arguments
    assert all(f"--ignore={path}" in asked[0].arguments for path in unit_run.LEFT_OUT)
    assert all((guest.REPOSITORY / path).is_file() for path in unit_run.LEFT_OUT)
    assert json.loads((tmp_path / report.RESULT).read_text())["where"] == came_to.where


def test_the_emulated_processes_find_everything_where_a_guest_has_it(tmp_path: Path) -> None:
    text = usermode.script(
        tmp_path / "root", spec.ARCHES["arm64"], tmp_path / "qemu",
        usermode.Run(("echo", "a b"), tmp_path / "shared", {"X": "y z"}),
    )  # fmt: skip
    subprocess.run(["sh", "-n"], input=text, text=True, check=True, timeout=30)
    assert f"mount --bind {tmp_path}/shared {tmp_path}/root/out" in text
    assert "'X=y z'" in text
    assert "PYTHONPATH=/repo/daemon:/repo/client:/repo/proto:/repo:/site" in text
    init = (guest.GUEST_FILES / "init").read_text()
    for name in ("PYTHONPATH", "PYTEST_ADDOPTS"):
        assert usermode.ENVIRONMENT[name] in init
    native = usermode.script(
        tmp_path, spec.ARCHES["arm64"], None, usermode.Run(("true",), tmp_path)
    )
    assert "binfmt" not in native
