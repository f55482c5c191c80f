"""What the steps of a life have in common: the machine, the packages, one host, patience.

Invariant: waiting is bounded, and what was waited for in vain is said by name.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.deploy.locks import Locks
from tests.deploy.machine import Machine
from tests.deploy.packages import Packages
from tests.deploy.runbook import Do

UNIT, SOCKET = "entresold.service", "entresold.socket"
TOML = "/etc/entresol/entresold.toml"
FIFTH, FIFTH_SOCKET = "entresold@5.service", "entresold@5.socket"
FIFTH_TOML, FIFTH_STATE = "/etc/entresol/5.toml", "/var/lib/entresol-5"
STATE = "/var/lib/entresol"
KEK = "/etc/entresol/kek"
PYTHON = "/usr/lib/entresol/bin/python3"
TYPED = ("/usr/bin/python3.11", "-IB", "/mnt/inside/typed.py")  # also while ours goes
EDITED = "/run/edited"  # what the stand-in for an editor leaves in its file
YES = (("[Y/n]", "y\n"),)
SECONDS_MAX = 120.0
WORK_BLOCKS = 20  # that become durable while something happens to the daemon

T = TypeVar("T")


class Broken(AssertionError):
    """A promise that did not hold."""


def expect(held: object, text: str) -> None:
    """Raises: Broken."""
    if not held:
        raise Broken(text)


@dataclass
class Load:
    """The host process, and the last thing it said."""

    process: subprocess.Popen[str]
    said: list[dict[str, Any]] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)

    def listen(self) -> None:
        """In a thread: read until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.said.append(json.loads(line))
            except ValueError:
                self.noise.append(line.rstrip())

    def durable(self) -> int:
        return int(self.said[-1]["durable"]) if self.said else 0

    def check_alive(self) -> None:
        expect(
            self.process.poll() is None, "the host process ended: " + "\n".join(self.noise[-20:])
        )


class World:
    """One machine, two packages, at most one host."""

    def __init__(self, machine: Machine, packages: Packages) -> None:
        self.machine = machine
        self.packages = packages
        self.load: Load | None = None
        self.locks: Locks | None = None
        self.followed: set[Do] = set()
        self.lends_huge_pages = False  # of this machine, in the step that wants some

    # The unit ------------------------------------------------------------------------------------

    def active(self, unit: str) -> str:
        """active, inactive, failed, activating ..."""
        return self.machine.show(unit, "ActiveState")

    def pid(self, unit: str = UNIT) -> int:
        """Of the daemon; 0 while there is none."""
        return int(self.machine.show(unit, "MainPID"))

    def is_up(self, unit: str = UNIT) -> bool:
        return self.active(unit) == "active" and bool(self.pid(unit))

    def life(self, unit: str = UNIT) -> dict[str, str]:
        """What the running daemon said of itself when it served. Its log comes a little later."""
        pid = self.pid(unit)

        def look() -> dict[str, str]:
            said = self.machine.run("journalctl", "--no-pager", "-o", "cat", f"_PID={pid}")
            for line in said.stdout.splitlines():
                if "event=serving" in line:
                    words = (word.partition("=") for word in line.split())
                    return {name: value for name, _, value in words}
            return {}

        return self.until(look, f"what {unit} says when it serves")

    def says(self, text: str, unit: str = UNIT) -> None:
        """Wait until the unit's log has it. Raises: Broken."""
        self.until(lambda: text in self.machine.journal(unit), f"{text!r} in the log of {unit}")

    def systemctl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.machine.run("systemctl", *words, check=check)

    def drop_in(self, text: str, unit: str = UNIT) -> None:
        """Set what `systemctl edit` would; an empty text takes it back."""
        folder = f"/run/systemd/system/{unit}.d"
        if text:
            self.machine.run("mkdir", "-p", folder)
            self.machine.write(Path(folder, "test.conf"), text)
        else:
            self.machine.run("rm", "-rf", folder)
        self.systemctl("daemon-reload")

    def http(self, path: str, *more: str) -> str:
        """What the metrics address answers, and the number of its status behind a space."""
        words = ("--silent", "--write-out", " %{http_code}", *more, f"http://127.0.0.1:7443{path}")
        return self.machine.run("curl", *words).stdout

    def metric(self, name: str) -> float:
        """The value of one without labels. Raises: Broken."""
        for line in self.http("/metrics").splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise Broken(f"there is no metric {name}")

    # The runbook ---------------------------------------------------------------------------------

    def follow(
        self,
        *parts: Do,
        put: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
        typed: Sequence[tuple[str, str]] | None = None,
        user: str = "root",
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the runbook has it, with `put` for its words that stand for others.

        With `typed` it has a terminal: pairs of what is read there and what is then typed. Its
        output and what it says of errors are one there.
        """
        words = [word for part in parts for word in shlex.split(part)]
        words = [(put or {}).get(word, word) for word in words] + list(more)
        if typed is not None:
            turns = [word for when, text in typed for word in ("--when", when, "--type", text)]
            words = [*TYPED, *turns, "--", *words]
        if user != "root":
            words = ["runuser", "-u", user, "--", *words]
        done = self.machine.run(*words, check=check)
        self.followed.update(parts)
        return done

    def edit(self, command: Do, text: str) -> None:
        """Leave an editor with this text in the file that the command opens. Raises: Broken."""
        self.machine.write(Path(EDITED), text)
        self.follow(command, typed=())
        if command is not Do.EDIT_CONFIG:
            unit = command.split()[-1]
            found = self.machine.run("systemctl", "cat", unit).stdout
            expect(text.strip() in found, f"{unit} is as it was: {found[-800:]}")

    # Commands ------------------------------------------------------------------------------------

    def there(self, path: str) -> bool:
        return self.machine.run("test", "-e", path, check=False).returncode == 0

    def certify(self, name: str) -> None:
        """A tenant's folder, where `entresol` below looks for it."""
        folder = f"/etc/entresol/tenants/{name}"
        self.follow(Do.CERTIFY, put={"acme": name, "/etc/entresol/tenants/acme": folder})

    def entresol(
        self, *words: str, tenant: str = "load", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """The client's command, as a tenant and, being root there, as the operator."""
        command, *rest = words
        config = f"/etc/entresol/tenants/{tenant}/client.toml"
        verb = [rest.pop(0)] if command == "tenant" else []
        return self.machine.run("entresol", command, *verb, "--config", config, *rest, check=check)

    def puts(self, name: str, tenant: str = "load") -> None:
        """Store fresh content under a name."""
        self.machine.run("dd", "if=/dev/urandom", f"of=/srv/{name}", "bs=1M", "count=4")
        self.entresol("put", f"/srv/{name}", "--name", name, tenant=tenant)

    def gets(self, name: str, tenant: str = "load") -> None:
        """It is there, byte for byte. Raises: HarnessError."""
        self.entresol("get", "--name", name, "--output", f"/srv/{name}.back", tenant=tenant)
        self.machine.run("cmp", f"/srv/{name}", f"/srv/{name}.back")

    def installed(self) -> str:
        """The version that the command says."""
        return self.machine.run("entresold", "--version").stdout.split()[-1]

    # Waiting -------------------------------------------------------------------------------------

    def until(self, look: Callable[[], T], what: str) -> T:
        """Look again until there is something. Raises: Broken."""
        until_s = time.monotonic() + SECONDS_MAX
        while True:
            found = look()
            if found:
                return found
            if self.load is not None:
                self.load.check_alive()
            expect(time.monotonic() < until_s, f"waited in vain for {what}")
            time.sleep(0.1)

    @contextlib.contextmanager
    def work_goes_on(self) -> Iterator[None]:
        """The host stored more, before and after what happens in between; it is still there."""
        load = self.load
        assert load is not None, "no host has begun"
        start = load.durable()
        self.until(lambda: load.durable() > start, "a durable block before")
        yield
        start = load.durable()
        self.until(lambda: load.durable() >= start + WORK_BLOCKS, "durable blocks afterwards")
        load.check_alive()
