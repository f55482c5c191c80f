"""How `entresol` fails: wrong use, nobody there, packages that are missing; and its help."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_lab import Cli, content, variant, written
from harness import DaemonProcess

from entresol_client.cli import main as cli_main
from entresol_client.cli.main import main
from entresol_daemon.__main__ import main as entresold

pytestmark = pytest.mark.daemon

COMMANDS = (
    "put", "get", "exists", "explain", "forget", "events", "stat", "version", "doctor", "inspect",
    "tenant", "quote",
)  # fmt: skip
VERBS = ("list", "add", "quota", "rotate", "erase")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("c") / "d", "--flash", "256MiB") as running:
        yield running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], daemon: DaemonProcess) -> Cli:
    return Cli(capsys, daemon.directory)


# -- mistakes and outages


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("put", "/nowhere/x"), "cannot read"),
        (("put", "/"), "is a directory"),
        (("put", __file__, "--key", "0011"), "has 2 bytes"),
        (("put", __file__, "--key", "ab" * 65), "has 65 bytes"),
        (("put", __file__, "--key", "hello"), "is not hex"),
        (("put", __file__, "--name", ""), "1 to 512 bytes"),
        (("put", __file__, "--name", "n" * 513), "1 to 512 bytes"),
        (("put", __file__, "--model", ""), "field model"),
        (("put", __file__, "--block-tokens", "0"), "block_tokens"),
        (("put", "/dev/null", "--key", "text:x"), "nothing to store"),
        (("get", "--key", "text:x", "-o", "x"), "needs --length"),
        (("get", "--name", "x", "--length", "5", "-o", "x"), "belongs to --key"),
        (("get", "--key", "zz", "--length", "5", "-o", "x"), "is not hex"),
        (("exists", "--key", "1234"), "has 2 bytes"),
        (("forget", "--key", "text:x", "--blocks"), "belongs to --name"),
        (("events", "--tokens"), "belongs to --json"),
        (("exists", "--name", "x", "--tenant", "nobody"), "no client-nobody.toml"),
        (("exists", "--name", "x", "--tenant", "../dev"), "is not allowed"),
        (("stat", "--shard", "zz"), "no shard is called"),
    ],
)
def test_wrong_use_is_refused_before_anything_happens(
    cli: Cli, words: Sequence[str], match: str
) -> None:
    cli.fails(*words, code=2, match=f"(?i){match}")


@pytest.mark.parametrize(
    "words",
    [
        ("frobnicate",), (), ("put",), ("get", "--name", "x"), ("get", "-o", "x"),
        ("put", "x", "--block", "65MiB"), ("put", "x", "--deadline", "0"),
        ("put", "x", "--name", "a", "--key", "b"), ("events", "--count", "0"), ("tenant",),
        ("tenant", "add", "x", "--flash", "0"), ("tenant", "add", "x", "--weight", "0"),
        ("put", "x", "--ack", "maybe"), ("events", "--since", "1", "--snapshot"),
    ],
)  # fmt: skip
def test_wrong_arguments_exit_with_2(words: Sequence[str], capsys: Any) -> None:
    assert main(words) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_get_into_nowhere(cli: Cli, tmp_path: Path) -> None:
    cli("put", written(tmp_path / "in", b"something"), "--name", "somewhere")
    target = str(tmp_path / "no" / "such" / "folder")
    cli.fails("get", "--name", "somewhere", "-o", target, code=2, match="cannot write")


def test_an_unknown_setting_is_refused_with_the_nearest(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "typo.toml"
    config.write_text('fabrik = "auto"\n' + cli.config.read_text())
    said = cli.fails("exists", "--name", "x", code=2, match="unknown setting", config=config)
    assert "did you mean 'fabric'?" in said.err
    config.write_text("not toml [")
    cli.fails("stat", code=2, match="not TOML", config=config)


@pytest.mark.parametrize("words", [("exists", "--name", "x"), ("events",), ("stat",)])
def test_a_missing_certificate(cli: Cli, tmp_path: Path, words: Sequence[str]) -> None:
    text = variant(cli, tmp_path, cert='"/nowhere/x.pem"').read_text()
    config = tmp_path / "c.toml"
    config.write_text(re.sub("admin_socket.*\n", "", text))
    cli.fails(*words, code=2, match="no file '/nowhere/x.pem'", config=config)


@pytest.mark.parametrize(
    "words",
    [
        ("put", __file__, "--name", "x"), ("get", "--name", "x", "-o", "never"),
        ("exists", "--name", "x"), ("explain", "--key", "text:x"), ("forget", "--name", "x"),
        ("quote", "--key", "text:x"),
        ("stat",), ("events",), ("events", "--follow"), ("inspect",), ("tenant", "list"),
    ],
)  # fmt: skip
def test_nobody_there_is_exit_3(cli: Cli, tmp_path: Path, words: Sequence[str]) -> None:
    config = variant(
        cli, tmp_path, port="1", grpc_port="1", admin_socket=f'"{tmp_path / "none.sock"}"'
    )
    cli.fails(*words, code=3, match="no daemon|nobody", config=config)
    assert not Path("never").exists()


def test_no_configuration_at_all(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("ENTRESOL_CONFIG", raising=False)
    if Path("/etc/entresol/client.toml").exists():
        pytest.skip("not run here: this machine has a client configuration of its own")
    assert main(["exists", "--name", "x"]) == 2
    err = capsys.readouterr().err
    assert "no client config found" in err
    assert "fix: start `entresold --dev`" in err


def test_the_configuration_is_found_where_the_environment_says(
    cli: Cli, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENTRESOL_CONFIG", str(cli.config))
    assert main(["exists", "--key", "text:not there"]) == 1
    assert main(["exists", "--key", "text:not there", "--tenant", "other"]) == 1
    assert capsys.readouterr().out.count("not stored") == 2


def test_without_grpc_the_package_is_named(daemon: DaemonProcess) -> None:
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "from entresol_client.cli.main import main\n"
        f"config = ['--config', {str(daemon.directory / 'client.toml')!r}]\n"
        "codes = [main([*words.split(), *config]) for words in\n"
        "         ('stat', 'events', 'tenant list', 'inspect', 'exists --key text:a', 'doctor')]\n"
        "print(codes, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.splitlines()[-1] == "[1, 1, 1, 1, 1, 0]", done.stderr
    assert done.stderr.count("fix: pip install 'entresol[cli]'") == 4
    assert "gRPC is not installed" in done.stdout


# -- help


def helps() -> list[tuple[str, ...]]:
    return [(), *((name,) for name in COMMANDS), *(("tenant", verb) for verb in VERBS)]


@pytest.mark.parametrize("words", helps(), ids=lambda words: " ".join(words) or "entresol")
@pytest.mark.parametrize("columns", ["80", "300"])
def test_help_fits_and_names_every_option(
    words: tuple[str, ...], columns: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) < 100
    parser: Any = cli_main.parser_of([])
    for word in words:
        parser = next(a for a in parser._actions if hasattr(a, "choices") and a.nargs == "A...")
        parser = parser.choices[word]
    body = text[text.index("\n\n") :]
    for action in parser._actions:
        for option in action.option_strings:
            assert option in body, option
        assert action.help, action
    if words and words != ("version",):
        assert "examples:" in text
        assert f"entresol {' '.join(words)}" in text[text.index("examples:") :]


def test_help_is_light() -> None:
    heavy = ("numpy", "grpc", "cryptography", "uvloop", "zstandard", "asyncio", "entresol_daemon")
    code = (
        "import sys\n"
        "from entresol_client.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['put', '--help']) == 0\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "[]"


def test_the_demo_is_reached_from_here(capsys: Any) -> None:
    assert main(["demo", "--help"]) == 0
    assert "entresol demo" in capsys.readouterr().out


def test_progress_and_log_go_to_standard_error(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "in", content("verbose", 1_000))
    said = cli("put", path, "--name", "verbose", "--verbose", "--progress", "--json")
    assert "event=connected" in said.err
    assert said.json["name"] == "verbose"
    assert "event=" not in cli("exists", "--name", "verbose").err


def test_files_that_this_user_may_not_look_at(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Had ended in tracebacks: certificates in a folder that is closed to this user."""
    closed = cli.folder / "closed.toml"
    text = cli.config.read_text()
    closed.write_text(re.sub(r"(?m)^cert = .*$", f'cert = "{tmp_path / ("n" * 300)}"', text))
    assert closed.read_text() != text
    for words in (("namespaces",), ("events",), ("exists", "--name", "x"), ("relay", "--list")):
        said = cli(*words, config=closed, code=2)
        assert "cannot read" in said.err
        assert "fix: " in said.err
    assert "cert: cannot read" in cli("doctor", config=closed, code=1).out

    def refused(*_: Any) -> int:
        raise PermissionError(13, "Permission denied", "/closed/file")

    monkeypatch.setattr("entresol_client.cli.overview.run_version", refused)
    monkeypatch.setattr("entresol_daemon.__main__._keygen", refused)
    assert "not allowed to use '/closed/file'" in cli("version", code=1).err
    assert entresold(["keygen", "x"]) == 1
