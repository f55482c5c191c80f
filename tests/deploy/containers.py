"""Build the container file with a real builder and run what it made.

    python -m tests.deploy.containers [--arch amd64|arm64]

Needs root, buildah (installed with apt when it is not there) and a mirror of Debian; a foreign
processor needs qemu-user with binfmt_misc as well (Debian: qemu-user-static, binfmt-support). 77:
this machine cannot. Images are kept nowhere: storage is a folder that goes afterwards.

The base image is a Debian made here, and wheels are fetched here and shown to the builder, so that
neither a registry nor the builder's network settings are needed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.rootfs import RELEASE
from tests.rdma import apt
from tests.rdma.cache import ensure
from tests.rdma.spec import HarnessError, Request
from tests.rdma.tools import KEYRING, SEARCH_PATH, tool

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "3.11"  # Debian 12's
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
STEP_TIMEOUT_S = 3_600  # pip under emulation takes its time
BASE, IMAGE = "localhost/base", "localhost/entresol"
RC_BROKEN, RC_CANNOT = 1, 77

# In the container, as its user: a daemon, a block out and home, its health, a clean stop.
LIFE = r"""
set -eu
cd "$(mktemp -d)"
test "$(id -u)" != 0
entresold --version
entresold --dev > log 2>&1 &
daemon=$!
for _ in $(seq 600); do grep -q 'client configuration' log && break; sleep 0.2; done
config=$(sed -n 's/.*client configuration: //p' log)
page=$(sed -n 's/ *metrics: \(.*\)metrics/\1/p' log)
head -c 3000000 /dev/urandom > out
entresol put out --name out --ack durable --config "$config"
entresol get --name out -o home --config "$config"
cmp out home
/usr/lib/entresol/bin/python3 - "${page}healthz" <<'P'
import sys
import urllib.request

import pyverbs  # the distribution's

from entresol_proto import native

urllib.request.urlopen(sys.argv[1], timeout=4)
sys.exit(native.KERNEL is None)
P
kill -TERM $daemon
wait $daemon
grep -q 'event=stopped' log
echo "the same bytes came home"
"""


@dataclass(frozen=True, slots=True)
class Builder:
    """buildah with storage of its own."""

    folder: Path

    def run(self, *words: str, stdin: str | None = None) -> str:
        """One command; what it printed. Raises: HarnessError with its last words."""
        command = [
            tool("buildah"), "--root", str(self.folder / "root"), "--runroot",
            str(self.folder / "run"), "--storage-driver", "vfs", *words,
        ]  # fmt: skip
        env = os.environ | {"TMPDIR": str(self.folder), "BUILDAH_ISOLATION": "chroot"}
        return _step(command, " ".join(words[:1]), env=env, stdin=stdin).strip()


def say(seconds: float, name: str, text: str) -> None:
    """One line of the table."""
    print(f"{seconds:7.1f} s  {name:<24} {text}", flush=True)


def why_not(arch: str) -> str:
    """Why this machine cannot; empty if it can, as far as one sees from here."""
    if os.geteuid() != 0:
        return "building a root file system needs root"
    if shutil.which("apt-get", path=SEARCH_PATH) is None:
        return "no apt-get here"
    foreign = os.uname().machine != MACHINES[arch]
    if foreign and not Path(f"/proc/sys/fs/binfmt_misc/qemu-{MACHINES[arch]}").exists():
        return (
            f"programs for {arch} do not run here; apt-get install qemu-user-static binfmt-support"
        )
    return ""


def base(arch: str) -> Path:
    """A minimal Debian as a tar file. Raises: HarnessError."""
    request = Request("container", arch, (RELEASE,), ())
    return ensure(request, lambda out: _build_base(arch, out)) / "base.tar"


def _build_base(arch: str, out: Path) -> list[str]:
    wanted = ["mmdebstrap"] + (["arch-test"] if os.uname().machine != MACHINES[arch] else [])
    install_here([name for name in wanted if shutil.which(name, path=SEARCH_PATH) is None])
    made = out / "base.tar"
    _step(
        [tool("mmdebstrap"), "--variant=minbase", "--quiet", f"--architectures={arch}",
         f"--keyring={KEYRING}", RELEASE, str(made),
         *apt.source_lines((RELEASE,), apt.host_mirrors())],
        "making a Debian",
    )  # fmt: skip
    return [hashlib.sha256(made.read_bytes()).hexdigest()]


def wheels(arch: str, into: Path) -> int:
    """Everything that pip will ask for in the container; how many files. Raises: HarnessError."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needs = [
        *project["build-system"]["requires"], *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["daemon"],
    ]  # fmt: skip
    named = [one for one in needs if not one.startswith("entresol")]
    platforms = [f"manylinux_2_{minor}_{MACHINES[arch]}" for minor in (28, 17)]
    platforms.append(f"manylinux2014_{MACHINES[arch]}")
    _step(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q",
         "--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON,
         *(word for name in platforms for word in ("--platform", name)), "-d", str(into), *named],
        "fetching wheels",
    )  # fmt: skip
    return len(list(into.iterdir()))


def install_here(packages: list[str]) -> None:
    """Have these on this machine. Raises: HarnessError."""
    if packages:
        _step(["apt-get", "update", "-qq"], "apt-get update")
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        _step(command, f"installing {' '.join(packages)}")


def _step(
    command: list[str], what: str, *, env: dict[str, str] | None = None, stdin: str | None = None
) -> str:
    env = (env or dict(os.environ)) | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    done = subprocess.run(
        command, env=env, input=stdin or "", capture_output=True, text=True, check=False,
        timeout=STEP_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise HarnessError(f"{what} failed: {(done.stderr or done.stdout).strip()[-800:]}")
    return done.stdout


def teller() -> Callable[[str, str], None]:
    """Says a step's name and outcome, and how long it took since the one before."""
    began_s = time.monotonic()

    def tell(name: str, text: str) -> None:
        nonlocal began_s
        say(time.monotonic() - began_s, name, text)
        began_s = time.monotonic()

    return tell


def in_a_folder(prefix: str, work: Callable[[Path], None]) -> int:
    """Do it in a folder of its own, say how it ended; the exit status."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        try:
            work(Path(name))
        except (HarnessError, AssertionError) as error:
            print(f"BROKEN: {error}")
            return RC_BROKEN
    say(time.monotonic() - began_s, "all of it", "held")
    return 0


def build_and_run(arch: str, folder: Path) -> None:
    """All of it, a line each. Raises: HarnessError."""
    tell = teller()
    tar = base(arch)
    tell("base image", f"Debian {RELEASE}, {arch}, {tar.stat().st_size / 1e6:.0f} MB")
    (folder / "wheels").mkdir()
    tell("wheels", f"{wheels(arch, folder / 'wheels')} files")
    pip = folder / "pip.conf"
    pip.write_text("[global]\nno-index = true\nfind-links = /wheels\n", encoding="utf-8")
    builder = Builder(folder)
    scratch = builder.run("from", "--arch", arch, "scratch")
    builder.run("add", "-q", scratch, str(tar), "/")
    builder.run("config", "--arch", arch, scratch)
    builder.run("commit", "-q", "--rm", scratch, BASE)
    builder.run(
        "bud", "--arch", arch, "--network", "host", "--build-arg", f"BASE={BASE}",
        "--volume", f"{folder / 'wheels'}:/wheels:ro", "--volume", f"{pip}:/etc/pip.conf:ro",
        "--file", str(ROOT / "arm64/Containerfile"), "--tag", IMAGE, str(ROOT),
    )  # fmt: skip
    tell("build", "every step of the container file")
    made = builder.run("from", "--arch", arch, IMAGE)
    said = builder.run("run", "--network", "host", made, "--", "sh", "-c", LIFE)
    tell("run", said.splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.deploy.containers", description=__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--arch", choices=sorted(MACHINES), default="amd64")
    chosen = options.parse_args(arguments)
    reason = why_not(chosen.arch)
    try:
        if not reason and shutil.which("buildah", path=SEARCH_PATH) is None:
            install_here(["buildah"])
    except HarnessError as error:
        reason = str(error)
    if reason:
        print(f"not run here: {reason}")
        return RC_CANNOT
    return in_a_folder("entresol-container-", functools.partial(build_and_run, chosen.arch))


if __name__ == "__main__":
    sys.exit(main())
