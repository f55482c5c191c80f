"""Debian packages of any suite and architecture without touching the host's own apt.

A private configuration directory per use; apt itself verifies signatures and hashes. Needs no root.
"""

from __future__ import annotations

import os
import re
import subprocess
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.spec import HarnessError
from tests.rdma.tools import KEYRING, tool

MIRROR_DEFAULT = "http://deb.debian.org/debian"
SECURITY_DEFAULT = "http://deb.debian.org/debian-security"
MIRROR_ENV = "ENTRESOL_DEBIAN_MIRROR"
APT_TIMEOUT_S = 900
_URI = re.compile(r"\b(?:https?|file|copy|mirror\+https?|mirror\+file)://?[^\s\"']+")


@dataclass(frozen=True, slots=True)
class Mirrors:
    """Where Debian's archive and its security updates are."""

    archive: str
    security: str


@dataclass(frozen=True, slots=True)
class Deb:
    """One package file as apt resolved it."""

    name: str
    version: str
    arch: str

    @property
    def pin(self) -> str:
        """As apt-get download wants it."""
        return f"{self.name}:{self.arch}={self.version}" if self.arch != "all" else (
            f"{self.name}={self.version}"
        )  # fmt: skip


def mirrors_of(sources: str) -> Mirrors:
    """The mirrors that a host's sources name for Debian, else the public ones.

    Only addresses whose path ends in /debian or /debian-security count: a host of another
    distribution, or with third-party sources, falls back to the public mirror.
    """
    archive, security = MIRROR_DEFAULT, SECURITY_DEFAULT
    lines = [line.split("#", 1)[0] for line in sources.splitlines()]
    found = [uri.rstrip("/") for line in lines for uri in _URI.findall(line)]
    for uri in reversed(found):
        if uri.endswith("/debian"):
            archive = uri
        elif uri.endswith("/debian-security"):
            security = uri
    return Mirrors(archive, security)


def host_mirrors() -> Mirrors:
    """From the environment, else from this host's apt sources, else the public mirrors."""
    named = os.environ.get(MIRROR_ENV)
    if named:
        return Mirrors(named.rstrip("/"), named.rstrip("/") + "-security")
    base = Path("/etc/apt")
    paths = [base / "sources.list", *sorted((base / "sources.list.d").glob("*"))]
    texts = []
    for path in paths:
        if path.suffix in (".list", ".sources") and path.is_file():
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return mirrors_of("\n".join(texts))


def source_lines(suites: tuple[str, ...], mirrors: Mirrors) -> list[str]:
    """One-line sources for these suites, signed by Debian's archive keys."""
    return [
        f"deb [signed-by={KEYRING}] "
        f"{mirrors.security if suite.endswith('-security') else mirrors.archive} {suite} main"
        for suite in suites
    ]


def parse_uris(text: str) -> list[Deb]:
    """The packages in the output of apt-get --print-uris."""
    debs = []
    for line in text.splitlines():
        match = re.match(r"'[^']+' (\S+)_(\S+)_(\S+)\.deb \d+", line)
        if match:
            name, version, arch = (urllib.parse.unquote(part) for part in match.groups())
            debs.append(Deb(name, version, arch))
    return debs


class PrivateApt:
    """apt for one architecture and a few suites, all of its state in one directory."""

    def __init__(self, root: Path, arch: str, suites: tuple[str, ...], release: str) -> None:
        """`root` is created; the caller removes it."""
        self._root = root
        self._release = release
        for part in ("lists/partial", "archives/partial"):
            (root / part).mkdir(parents=True, exist_ok=True)
        (root / "status").touch()
        sources = root / "sources.list"
        sources.write_text("\n".join(source_lines(suites, host_mirrors())) + "\n")
        self._options = [
            f"Dir::Etc::sourcelist={sources}",
            "Dir::Etc::sourceparts=/dev/null",
            "Dir::Etc::preferences=/dev/null",
            "Dir::Etc::preferencesparts=/dev/null",
            f"Dir::State::lists={root / 'lists'}",
            f"Dir::State::status={root / 'status'}",
            f"Dir::Cache::archives={root / 'archives'}",
            f"Dir::Cache={root}",
            "Dir::Cache::pkgcache=",
            "Dir::Cache::srcpkgcache=",
            f"APT::Architecture={arch}",
            f"APT::Architectures={arch}",
            "APT::Sandbox::User=root",
            "APT::Install-Recommends=false",
            "APT::Default-Release=",
            "APT::Update::Post-Invoke-Success::=",
            "Acquire::Languages=none",
            "Acquire::Retries=3",
            "Debug::NoLocking=1",
        ]

    def _get(self, *arguments: str, cwd: Path | None = None) -> str:
        command = [tool("apt-get"), "-qq"]
        for option in self._options:
            command += ["-o", option]
        done = subprocess.run(
            [*command, *arguments], cwd=cwd, env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=APT_TIMEOUT_S,
            check=False,
        )  # fmt: skip
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("E:")]
            reason = errors[0] if errors else (done.stderr.strip() or done.stdout.strip())[-300:]
            raise HarnessError(f"apt-get {arguments[0]} failed: {reason}")
        return done.stdout

    def update(self) -> None:
        """Fetch the package lists.

        Raises: HarnessError, also when apt could fetch only some of them.
        """
        self._get("update", "-o", "APT::Update::Error-Mode=any")

    def resolve(self, *packages: str) -> list[Deb]:
        """The packages and everything they depend on, at their newest versions of the release."""
        return parse_uris(
            self._get("install", "-y", "--print-uris", "-t", self._release, *packages)
        )

    def download(self, debs: list[Deb], into: Path) -> list[Path]:
        """Fetch and verify package files into a folder."""
        into.mkdir(parents=True, exist_ok=True)
        self._get("download", *(deb.pin for deb in debs), cwd=into)
        files = sorted(into.glob("*.deb"))
        if len(files) < len(debs):
            raise HarnessError(f"apt fetched {len(files)} of {len(debs)} packages")
        return files
