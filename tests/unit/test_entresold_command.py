"""What `entresold` says when it cannot, and what the client's command runs of its package."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from entresol_client.cli.main import main as entresol
from entresol_client.demo import command as demo
from entresol_daemon import __main__ as entresold
from entresol_daemon import ports, setup_command
from entresol_daemon.config import Config, ListenConfig
from entresol_proto.status import ConfigError

ENTRESOLD = [sys.executable, "-m", "entresol_daemon"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("package", ["grpc", "xxhash", "prometheus_client"])
def test_without_the_daemons_packages_the_extra_is_named(package: str) -> None:
    """`pip install entresol` has the daemon's code, and not what it imports."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from entresol_daemon.__main__ import main\n"
        "sys.exit(main(['--dev', '--check']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert f"the package {package} is not installed" in done.stderr
    assert "fix: pip install 'entresol[daemon]'" in done.stderr


def test_a_package_that_is_nobodys_extra_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise ModuleNotFoundError("No module named 'entresol_daemon.gone'", name="entresol_daemon")

    monkeypatch.setattr(entresold, "_run", broken)
    with pytest.raises(ModuleNotFoundError):
        entresold.main(["--dev"])


@pytest.mark.parametrize(
    ("package", "run"),
    [
        ("xxhash", lambda: entresol(["inspect", "data"])),
        ("pyarrow", lambda: entresol(["inspect", "data"])),  # entresol[kvbm] has xxhash
        ("xxhash", lambda: entresol(["replay", "t.jsonl"])),
        ("xxhash", lambda: demo.main(["--quick"])),
    ],
)
def test_the_clients_command_names_the_extra_too(
    package: str,
    run: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == package else find(name)
    )
    assert run() == 1
    said = capsys.readouterr().err
    assert "not installed" in said
    assert "fix: pip install 'entresol[daemon]'" in said


@pytest.mark.parametrize("target", ["/dev/full", "|"])
def test_a_configuration_that_nobody_takes_is_no_traceback(target: str) -> None:
    words = [*ENTRESOLD, "--print-config"]
    if target == "|":  # a reader that has gone
        text = (
            f"import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.execv(*{words[0], words})"
        )
        words = [sys.executable, "-c", text]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    expected = "" if target == "|" else "entresold: standard output: No space left on device\n"
    assert done.stderr == expected


def test_ctrl_c_before_it_serves_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(entresold, "_run", interrupted)
    assert entresold.main(["--dev"]) == 130
    assert capsys.readouterr().err == "entresold: interrupted\n"


@pytest.mark.parametrize(
    ("program", "module"),
    [("entresol", "entresol_client.cli.tenants"), ("entresold", "entresol_daemon.setup_command")],
)
def test_ctrl_c_during_its_imports_is_one_line(program: str, module: str) -> None:
    """By the entry point of the package, of which everything is imported only then."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    home, _, function = scripts[program].partition(":")
    code = (
        "import signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        f"from {home} import {function}\n"
        f"sys.exit({function}())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, f"{program}: interrupted\n")


@pytest.mark.parametrize("command", ["keygen", "rewrap", "verify-receipt", *setup_command.COMMANDS])
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        entresold.main([command, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: entresold {command} "), said


def test_a_word_that_is_no_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        entresold.main(["nonsense"])
    assert "argument COMMAND: invalid choice: 'nonsense'" in capsys.readouterr().err


def test_an_address_of_another_host_is_called_that() -> None:
    config = Config(listen=ListenConfig(control_host="192.0.2.1", control_port=17440))
    with pytest.raises(ConfigError, match="cannot listen at") as caught:
        ports.check(config)
    assert caught.value.hint == (
        "[listen] control_host is no address of this host: `ip address` lists them"
    )


def limited(folder: Path, soft: int, hard: int) -> subprocess.Popen[str]:
    """A daemon for trying, whose user may open so many files; the higher number on request."""
    code = (
        f"import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
        f"os.execv(*{(ENTRESOLD[0], [*ENTRESOLD, '--dev', '--dir', str(folder)])})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_what_files_are_to_be_had_are_taken(tmp_path: Path) -> None:
    """Most systems begin with 1,024 and give more on request: nobody asked."""
    with limited(tmp_path / "d", 80, 200) as daemon:
        try:
            assert daemon.stdout is not None
            assert "entresold" in daemon.stdout.readline()
            found = Path(f"/proc/{daemon.pid}/limits").read_text(encoding="ascii")
        finally:
            daemon.terminate()
            daemon.communicate(timeout=60)
    assert re.search(r"^Max open files +200 +200 ", found, re.M), found


def test_too_few_files_are_one_line(tmp_path: Path) -> None:
    """gRPC ends the process otherwise, with a hundred lines and a signal."""
    with limited(tmp_path / "d", 20, 20) as daemon:
        _, said = daemon.communicate(timeout=60)
    assert daemon.returncode == 1, said
    assert "entresold: only 20 files may be open, a start takes 64" in said
    assert "fix: LimitNOFILE=65536" in said


def test_a_reload_says_that_settings_want_a_restart(tmp_path: Path) -> None:
    """Nothing was said, and a changed setting was believed to be in force."""
    with limited(tmp_path / "d", 200, 200) as daemon:
        assert daemon.stdout is not None
        assert "entresold" in daemon.stdout.readline()
        daemon.send_signal(signal.SIGHUP)
        daemon.terminate()
        _, said = daemon.communicate(timeout=60)
    (line,) = [line for line in said.splitlines() if "event=hangup" in line]
    assert "settings want a restart" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_while_it_prepares_it_leaves_no_folder(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Its keys stayed in /tmp."""
    code = (
        "import signal, sys\n"
        "from entresol_daemon import __main__ as entresold, dev\n"
        f"dev._fill = lambda *_: signal.raise_signal({number:d})\n"
        "sys.exit(entresold.main(['--dev']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "entresold: interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("heard", ["SIG_DFL", "SIG_IGN"])
def test_it_ends_with_its_terminal(heard: str) -> None:
    """It went on unseen, and its folder stayed. It may where somebody said so, as `nohup` does."""
    words = [*ENTRESOLD, "--dev"]
    code = (
        "import fcntl, os, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        f"signal.signal(signal.SIGHUP, signal.{heard}); os.execv(*{(words[0], words)})"
    )
    with tempfile.TemporaryDirectory(prefix="e-") as name:  # its sockets want a short path
        outside, terminal = os.openpty()
        daemon = subprocess.Popen(
            [sys.executable, "-c", code], stdin=terminal, stdout=terminal, stderr=terminal,
            start_new_session=True, env={**os.environ, "TMPDIR": name, "XDG_RUNTIME_DIR": name},
        )  # fmt: skip
        os.close(terminal)
        try:
            said = b""
            while b"stop with Ctrl-C\r\n" not in said:  # the whole of it: else its writing fails
                said += os.read(outside, 65_536)
            os.close(outside)
            if heard == "SIG_IGN":
                assert entresol(["stat", "--config", f"{name}/entresol/client.toml"]) == 0
                daemon.terminate()
            assert daemon.wait(timeout=60) == 0
        finally:
            daemon.kill()
            daemon.wait()
        assert os.listdir(name) == ["entresol"]
        assert os.listdir(f"{name}/entresol") == []
