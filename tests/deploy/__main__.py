"""Live the package's life and print what happened, with times. 77: this machine cannot.

The exit status is 0 when every step held, 1 when one did not (the rest is not done), 77 when this
machine has no root, no namespaces or no mirror of Debian to make a root file system of.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.deploy import packages, rootfs
from tests.deploy.life import CANARY, STEPS
from tests.deploy.locks import Locks
from tests.deploy.machine import Machine, why_not
from tests.deploy.runbook import NOT_TRIED
from tests.deploy.world import Broken, World
from tests.rdma.spec import HarnessError

ARCH = "amd64"
RC_BROKEN, RC_CANNOT = 1, 77


def say(seconds: float, name: str, text: str) -> None:
    """One line of the table."""
    print(f"{seconds:7.1f} s  {name:<24} {text}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.deploy", description=__doc__)
    options.add_argument("--journal", action="store_true", help="print the daemons' logs, too")
    options.add_argument(
        "--canary", action="store_true", help="a short life with a fault that must be found"
    )
    options.add_argument(
        "--packages", type=Path, metavar="DIR", help="take both from here; built when it is empty"
    )
    options.add_argument(
        "--lend-huge-pages", action="store_true", help="raise vm.nr_hugepages here during its step"
    )
    options.add_argument("--until", metavar="STEP", help="stop after this step")
    chosen = options.parse_args(arguments)
    reason = why_not()
    if reason:
        print(f"not run here: {reason}")
        return RC_CANNOT
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and clean up
    began_s = time.monotonic()
    try:
        rootfs.image(ARCH)
    except HarnessError as error:
        print(f"not run here: {error}")
        return RC_CANNOT
    say(time.monotonic() - began_s, "root file system", "a minimal Debian with systemd, cached")
    with tempfile.TemporaryDirectory(prefix="entresol-packages-") as name:
        began_step_s = time.monotonic()
        try:
            built = packages.build(ARCH, chosen.packages or Path(name))
        except HarnessError as error:
            say(time.monotonic() - began_step_s, "packages", f"BROKEN: {error}")
            return RC_BROKEN
        size = built.first.stat().st_size / 1e6
        say(time.monotonic() - began_step_s, "packages", f"two versions, {size:.0f} MB unpacked")
        status = _live(built, chosen)
    say(time.monotonic() - began_s, "all of it", "held" if not status else "BROKEN")
    return status


def _live(built: packages.Packages, chosen: argparse.Namespace) -> int:
    machine = Machine(Path(rootfs.image(ARCH)), Path(__file__).parent / "inside")
    world = World(machine, built)
    world.lends_huge_pages = chosen.lend_huge_pages
    try:
        for name, step in CANARY if chosen.canary else STEPS:
            began_s = time.monotonic()
            try:
                found = step(world)
            except (Broken, HarnessError) as error:
                say(time.monotonic() - began_s, name, f"BROKEN: {error}")
                print(machine.journal("entresold*")[-6000:], file=sys.stderr)
                return RC_BROKEN
            say(time.monotonic() - began_s, name, found)
            if name == chosen.until:
                break
        if chosen.journal:
            print(machine.journal("entresold*"), file=sys.stderr)
    finally:
        if world.load is not None:
            world.load.process.kill()
        machine.close()
    if world.locks is not None:
        _tell(world.locks)
    return 0


def _tell(locks: Locks) -> None:
    for title, names in (
        ("restrictions that were tried and hold", locks.applied),
        ("NOT APPLIED in this machine (tried: it could be done)", locks.not_applied),
        ("not told apart here (it cannot be done without them either)", locks.not_told_apart),
        ("not tried by any probe", locks.not_tried),
    ):
        print(f"{title}: {', '.join(names) or 'none'}")
    for command, reason in NOT_TRIED.items():
        print(f"of the runbook, not run here: {command}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
