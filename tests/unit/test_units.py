"""What systemd and dpkg are given agrees with the daemon, and with itself.

The faults: a port or path in one file and another in the next, a hardening line lost from a copy, a
template that drifts from the unit, a script that dpkg cannot run.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from entresol_daemon import formats
from entresol_daemon.config import Config
from entresol_daemon.server import DRAIN_NS
from tests.deploy import locks
from tests.proof.lines.sandbox import SCORE_MAX, score

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
UNIT = SYSTEMD / "entresold.service"
UNITS = sorted(path for path in SYSTEMD.iterdir() if path.suffix in (".service", ".socket"))
# What may differ between a unit and its template, as (in the unit, in the template).
TEMPLATED = (
    ("entresold-keys.service", "entresold-keys@%i.service"),
    ("entresold.service", "entresold@%i.service"),
    ("entresold.socket", "entresold@%i.socket"),
    ("/etc/entresol/entresold.toml", "/etc/entresol/%i.toml"),
    ("Directory=entresol\n", "Directory=entresol-%i\n"),
    ("inference\n", "inference, shard %i\n"),
    ("first start\n", "first start, shard %i\n"),
    ("daemon\n", "daemon, shard %i\n"),
    ("tcp:7440-7443", "tcp:7450-7499"),
    ("127.0.0.1:744", "127.0.0.1:74%i"),
    ("pki/shard.pem", "pki/%i.pem"),
)


def lines(path: Path) -> list[str]:
    """Without comments: what systemd reads."""
    return [
        f"{line}\n" for line in path.read_text().splitlines() if line and not line.startswith("#")
    ]


def values(path: Path, key: str) -> list[str]:
    found = [line.partition("=") for line in lines(path)]
    return [value.strip() for name, _, value in found if name == key]


@pytest.mark.parametrize("name", ["entresold{}.service", "entresold{}.socket",
                                  "entresold-keys{}.service"])  # fmt: skip
def test_a_template_is_its_unit_for_another_shard(name: str) -> None:
    expected = "".join(lines(SYSTEMD / name.format("")))
    for plain, templated in TEMPLATED:
        expected = expected.replace(plain, templated)
    assert "".join(lines(SYSTEMD / name.format("@"))) == expected


def test_the_sockets_are_at_the_addresses_of_the_packaged_configuration() -> None:
    config = Config.load(SYSTEMD / "entresold.toml")
    listen = config.listen
    assert values(SYSTEMD / "entresold.socket", "ListenStream") == [
        f"{listen.control_host}:{listen.control_port}",
        f"{listen.data_host}:{listen.data_port}",
        f"{listen.metrics_host}:{listen.metrics_port}",
    ]
    allowed = values(UNIT, "SocketBindAllow")
    assert allowed == [f"{kind}:tcp:{listen.control_port}-{listen.metrics_port}"
                       for kind in ("ipv4", "ipv6")]  # fmt: skip


def test_the_packaged_configuration_says_only_what_it_has_to() -> None:
    """Everything else is the daemon's default, so that a new default reaches those who agree."""
    said = tomllib.loads((SYSTEMD / "entresold.toml").read_text())
    flat = {f"{section}.{name}" for section, table in said.items() for name in table}
    assert flat == {
        "shard.name", "listen.control_host", "listen.data_host", "tls.cert", "tls.key", "tls.ca",
        "keys.kek_file", "flash.size_bytes", "fabric.shm_dir", "memory.dram_bytes",
    }  # fmt: skip
    config = Config.load(SYSTEMD / "entresold.toml")
    assert str(config.shard.state_dir) == f"/var/lib/{values(UNIT, 'StateDirectory')[0]}"
    assert str(config.listen.unix_dir) == f"/run/{values(UNIT, 'RuntimeDirectory')[0]}"
    assert values(UNIT, "ReadWritePaths") == [f"-{config.fabric.shm_dir}"]
    assert f"d {config.fabric.shm_dir} 2750 " in (SYSTEMD / "entresol.tmpfiles").read_text()
    assert str(config.keys.kek_file) == "$CREDENTIALS_DIRECTORY/kek"
    assert values(UNIT, "LoadCredential") == ["kek:/etc/entresol/kek"]


def test_stopping_takes_longer_than_draining_may() -> None:
    (stop_s,) = values(UNIT, "TimeoutStopSec")
    assert int(stop_s) * 1_000_000_000 >= 2 * DRAIN_NS


@pytest.mark.parametrize("unit", [path for path in UNITS if path.suffix == ".service"],
                         ids=lambda path: path.name)  # fmt: skip
def test_units_score_as_locked_in(unit: Path) -> None:
    found = score(unit)
    if found is None:
        pytest.skip("not run here: there is no systemd-analyze")
    assert found <= SCORE_MAX


def test_systemd_understands_every_line(tmp_path: Path) -> None:
    command = shutil.which("systemd-analyze")
    if command is None:
        pytest.skip("not run here: there is no systemd-analyze")
    for path in UNITS:
        text = path.read_text().replace("/usr/bin/entresold", "/bin/true")
        (tmp_path / path.name).write_text(text)
    names = [path.name.replace("@.", "@5.") for path in UNITS]
    done = subprocess.run(
        [command, "verify", "--man=no", "--recursive-errors=no", *names],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "entresol" in line]
    assert not ours, done.stderr


def test_what_is_explained_is_what_is_set() -> None:
    """README.md has a row for every line of the unit that takes something away."""
    text = (SYSTEMD / "README.md").read_text()
    about = configparser.ConfigParser(strict=False, interpolation=None)
    about.optionxform = str  # type: ignore[assignment, method-assign]
    about.read_string("".join(lines(UNIT)))
    missing = [name for name in about["Service"] if f"`{name}=" not in text]
    assert not missing


def test_what_is_claimed_of_a_line_is_judged_by_what_a_life_finds() -> None:
    """`make test-deploy` compares them (tests/deploy/locks.py): here, that it would notice."""
    said = locks.claims(locks.PAGE.read_text())
    about = configparser.ConfigParser(strict=False, interpolation=None)
    about.optionxform = str  # type: ignore[assignment, method-assign]
    about.read_string("".join(lines(UNIT)))
    explained = {name for names in said for name in names}
    assert set(about["Service"]) <= explained, "each line is of a row"
    elsewhere = (*locks.NOT_LOCKS, *locks.BY_STEPS)

    def of(state: str) -> list[str]:
        found = [name for names, text in said.items() if text.startswith(state) for name in names]
        return [name for name in found if name not in elsewhere]

    found = locks.Locks(of("held"), of("**not applied**"), of("not told apart"), of("not tried"))
    assert len(found.applied) > 20
    assert locks.contradicted(said, found) == []
    broken = replace(
        found, applied=[name for name in found.applied if name != "PrivateTmp"],
        not_applied=["PrivateTmp"],
    )  # fmt: skip
    assert locks.contradicted(said, broken) == ["PrivateTmp: held, says the page, and is not"]
    untried = replace(found, applied=[name for name in found.applied if name != "LimitCORE"])
    assert locks.contradicted(said, untried) == ["LimitCORE: held, says the page, and is not"]
    for state in ("not told apart", "not tried"):
        known = next(names for names, text in said.items() if text.startswith(state))
        nothing = replace(found, not_told_apart=[], not_tried=[])
        assert any(text.startswith(known[0]) for text in locks.contradicted(said, nothing))
    assert "whatever that is" in locks.contradicted({("UMask",): "perhaps"}, found)[0]


def test_every_script_is_a_shells() -> None:
    scripts = sorted((SYSTEMD / "debian").iterdir())
    assert [path.name for path in scripts] == ["postinst", "postrm", "preinst", "prerm"]
    for path in scripts:
        assert path.read_text().startswith("#!/bin/sh\n#"), path
        assert re.search(r"^set -e$", path.read_text(), re.MULTILINE), path
        subprocess.run(["sh", "-n", str(path)], check=True)


def preinst(tmp_path: Path, listed: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script as dpkg would, with a daemon that says `listed` of the data."""
    bin_dir, etc = tmp_path / "bin", tmp_path / "etc"
    bin_dir.mkdir()
    etc.mkdir()
    (etc / "entresold.toml").write_text("")
    daemon = bin_dir / "entresold"
    daemon.write_text(f"#!/bin/sh\nprintf '{listed}'\n[ -n '{listed}' ]\n")
    daemon.chmod(0o755)
    text = (SYSTEMD / "debian/preinst").read_text()
    text = text.replace("/usr/bin/entresold", str(daemon)).replace("/etc/entresol", str(etc))
    for kind in formats.READS:
        mark = f"@{kind.upper().replace('-', '_')}@"
        assert mark in text
        text = text.replace(mark, str(formats.READS[kind]))
    return subprocess.run(
        ["sh", "-s", *arguments], input=text, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("listed", "arguments", "refused"),
    [
        (r"keyring 1 1 /x/k\ndata-file 1 1 /x/flash.data\n", ("upgrade", "1.0"), False),
        (r"keyring 1 1 /x/k\ndata-file 2 2 /x/flash.data\n", ("upgrade", "1.0"), True),
        (r"keyring 99 99 /x/k\n", ("upgrade", "1.0"), True),
        (r"namespaces 2 2 /x/namespaces/n.json\n", ("upgrade", "1.0"), True),
        (r"data-file 2 2 /x/flash.data\n", ("install",), False),
        (r"data-file 2 2 /x/flash.data\n", ("abort-upgrade", "1.0"), False),
        (r"something-newer 7 7 /x/y\n", ("upgrade", "1.0"), False),
        ("", ("upgrade", "1.0"), False),
    ],
)
def test_going_back_across_a_format_is_refused_before_anything_is_replaced(
    tmp_path: Path, listed: str, arguments: tuple[str, ...], refused: bool
) -> None:
    done = preinst(tmp_path, listed, *arguments)
    assert (done.returncode != 0) is refused, done.stderr
    assert ("Nothing was changed" in done.stderr) is refused
