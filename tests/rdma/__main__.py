"""The harness's command line: build images, run a command in a guest, run a pod of two guests."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.rdma import guest, pod, report, suites_run, unit_run
from tests.rdma.images import images
from tests.rdma.progress import say
from tests.rdma.qemu import MEMORY_MIB_DEFAULT
from tests.rdma.spec import ARCHES, KERNELS, HarnessError, UsageError
from tests.rdma.tools import NotHere, ensure_tools

REQUIRED_ENV = "ENTRESOL_RDMA_REQUIRED"
RC_USAGE = 2  # as argparse
RC_CANNOT = 77  # what automake calls a skipped test; guests never end so


def parser() -> argparse.ArgumentParser:
    """Every verb and option."""
    top = argparse.ArgumentParser(prog="python -m tests.rdma", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build", help="build what is missing and print where it is")
    build.add_argument(
        "--refresh", action="store_true", help="rebuild if Debian has newer versions"
    )
    run = verbs.add_parser("run", help="run a command in a guest; its exit code is ours")
    suites = verbs.add_parser("suites", help="run the RDMA suites in a guest and sum them up")
    unit = verbs.add_parser("unit", help="run the unit suite on another architecture's Python")
    pod_verb = verbs.add_parser("pod", help="run a server on one machine, its user on another")
    pod_verb.add_argument("--dpu", choices=sorted(ARCHES), default="arm64")
    pod_verb.add_argument("--host", choices=sorted(ARCHES), default="x86")
    pod_verb.add_argument(
        "--dpu-command", default="python3 -m tests.rdma.podsmoke dpu", metavar="'CMD...'",
        help="what the DPU runs; ended by SIGTERM when the host's command is over",
    )  # fmt: skip
    for verb in (build, run, suites):
        verb.add_argument("--arch", choices=sorted(ARCHES), default="x86")
    unit.add_argument("--arch", choices=sorted(ARCHES), default="arm64")
    for verb in (build, run, suites, unit, pod_verb):
        verb.add_argument("--kernel", choices=sorted(KERNELS), default="7.2")
    run.add_argument("--net", choices=("pair", "loopback", "none"), default="pair")
    for verb in (run, suites, unit, pod_verb):
        verb.add_argument("--timeout", type=float, default=guest.TIMEOUT_S_DEFAULT, metavar="S")
        verb.add_argument("--memory", type=int, default=MEMORY_MIB_DEFAULT, metavar="MIB")
        verb.add_argument("--out", type=Path, metavar="DIR", help="where a guest's /out comes to")
    suites.set_defaults(timeout=suites_run.TIMEOUT_S_DEFAULT)
    unit.set_defaults(timeout=unit_run.TIMEOUT_S_DEFAULT)
    for verb in (run, pod_verb):
        verb.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD...")
    suites.add_argument(
        "--guests", type=int, choices=range(1, suites_run.GUESTS_MAX + 1),
        default=suites_run.default_guests(), help="divide the tests over so many",
    )  # fmt: skip
    unit.add_argument(
        "--processes", type=int, choices=range(1, 65), default=os.cpu_count() or 1,
        help="divide the tests over so many",
    )  # fmt: skip
    for verb in (suites, unit):
        verb.add_argument(
            "arguments", nargs="*", metavar="-- PYTEST...", help="instead of all tests"
        )
    return top


def _build(options: argparse.Namespace) -> int:
    made = images(ARCHES[options.arch], KERNELS[options.kernel], refresh=options.refresh)
    for path in (made.kernel, made.root, made.site):
        print(path)
    return 0


def _forget_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _out(named: Path | None) -> Path:
    """The folder for results: the one asked for, or a new one, printed, that goes if empty."""
    if named is None:
        named = Path(tempfile.mkdtemp(prefix="entresol-rdma-out-"))
        atexit.register(_forget_if_empty, named)
        say(f"results in {named}")
    named.mkdir(parents=True, exist_ok=True)
    return named


def _run(options: argparse.Namespace) -> int:
    kernel = KERNELS[options.kernel]
    if options.net == "pair" and not kernel.namespaces:
        raise UsageError(f"kernel {kernel.name} has no rxe per namespace: use --net loopback")
    command = guest.command_of(options.command)
    arch = ARCHES[options.arch]
    made = images(arch, kernel)
    with guest.snapshot() as repo:
        return guest.run(
            guest.Job(
                arch=arch, images=made, command=command, net=options.net, out=_out(options.out),
                timeout_s=options.timeout, memory_mib=options.memory,
            ),
            repo,
        )  # fmt: skip


def _suites(options: argparse.Namespace) -> int:
    out = _out(options.out)
    came_to = suites_run.run(
        suites_run.Plan(
            arch=ARCHES[options.arch], kernel=KERNELS[options.kernel], guests=options.guests,
            arguments=tuple(word for word in options.arguments if word != "--"), out=out,
            timeout_s=options.timeout, memory_mib=options.memory,
        )
    )  # fmt: skip
    print("\n".join([*came_to.lines(), f"  details: {out / report.RESULT}"]))
    return came_to.rc


def _unit(options: argparse.Namespace) -> int:
    out = _out(options.out)
    came_to = unit_run.run(
        unit_run.Plan(
            arch=ARCHES[options.arch], kernel=KERNELS[options.kernel], processes=options.processes,
            arguments=tuple(word for word in options.arguments if word != "--"), out=out,
            timeout_s=options.timeout, memory_mib=options.memory,
        )
    )  # fmt: skip
    print("\n".join([*came_to.lines(), f"  details: {out / report.RESULT}"]))
    return came_to.rc


def _pod(options: argparse.Namespace) -> int:
    command = options.command or ["python3", "-m", "tests.rdma.podsmoke", "host"]
    ended = pod.run(
        pod.Pod(
            dpu=ARCHES[options.dpu], host=ARCHES[options.host], kernel=KERNELS[options.kernel],
            dpu_command=pod.words(options.dpu_command), host_command=guest.command_of(command),
            out=_out(options.out), timeout_s=options.timeout, memory_mib=options.memory,
        )
    )  # fmt: skip
    return ended.rc


VERBS = {"build": _build, "run": _run, "suites": _suites, "unit": _unit, "pod": _pod}


def main(arguments: list[str]) -> int:
    """Run one verb; returns its exit code."""
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        ensure_tools([options.dpu, options.host] if options.verb == "pod" else [options.arch])
        return VERBS[options.verb](options)
    except NotHere as cannot:
        print(f"not run here: {cannot}", file=sys.stderr)
        return RC_CANNOT if os.environ.get(REQUIRED_ENV) else 0
    except UsageError as error:
        print(f"tests.rdma: {error}", file=sys.stderr)
        return RC_USAGE
    except HarnessError as error:
        print(f"tests.rdma: {error}", file=sys.stderr)
        return RC_CANNOT
    except KeyboardInterrupt:
        print("tests.rdma: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
