"""The daemon's own sandbox, seen from inside the real process: what it may not do is refused by the
kernel, and everything it has to do still works.

tests/daemon/sandbox_probe.py does the trying, in a process that is locked in as `entresold` locks
itself in, after it serves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sandbox_probe

from entresol_daemon import sandbox
from entresol_daemon.config import Config, SandboxConfig
from entresol_daemon.sandbox import SandboxError

pytestmark = pytest.mark.daemon
needs_landlock = pytest.mark.skipif(
    sandbox.abi() == 0, reason="not run here: this kernel has no Landlock"
)


@needs_landlock
def test_what_it_may_not_do_is_refused(tmp_path: Path) -> None:
    version, found = sandbox_probe.run(tmp_path, mode="on")
    wrong = sandbox_probe.judge(version, found)
    assert not wrong, wrong
    assert len(found) == 2 * len(sandbox_probe.ATTEMPTS)
    outside = tmp_path / "outside"
    assert (outside / "old").read_text() == "kept"
    assert sorted(path.name for path in outside.iterdir()) == ["old", "read"]


@needs_landlock
def test_without_the_sandbox_the_same_is_done(tmp_path: Path) -> None:
    """The attempts are real: with the sandbox off they succeed."""
    _, found = sandbox_probe.run(tmp_path, mode="off")
    assert {found[name] for name in ("write outside", "run a program", "connect")} == {"done"}
    assert sandbox_probe.judge(sandbox.abi(), found), "the judge takes anything"


def test_a_kernel_without_landlock_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox, "abi", lambda: 0)
    with caplog.at_level("WARNING", "entresol"):
        entered = sandbox.enter(Config.dev(tmp_path))
        entered.say()
    assert entered.version == 0
    assert "event=sandbox_unavailable" in caplog.text
    forced = replace(Config.dev(tmp_path), sandbox=SandboxConfig(mode="on"))
    with pytest.raises(SandboxError, match="no Landlock"):
        sandbox.enter(forced)


def test_rules_name_what_the_configuration_names(tmp_path: Path) -> None:
    config = Config.dev(tmp_path / "root")
    config = replace(
        config,
        flash=replace(config.flash, path=tmp_path / "elsewhere" / "flash"),
        sandbox=SandboxConfig(writable=(str(tmp_path / "more"),)),
    )
    (tmp_path / "elsewhere").mkdir()
    rules = {rule.path: rule.allowed for rule in sandbox.rules_of(config)}
    assert {config.shard.state_dir, config.listen.unix_dir, tmp_path / "more"} <= set(rules)
    assert all(path.is_dir() for path in (config.shard.state_dir, config.listen.unix_dir))
    assert not rules[tmp_path / "elsewhere"] & sandbox.MAKE_DIR
    assert rules[tmp_path / "elsewhere" / "flash"] == sandbox.WRITE_FILE | sandbox.TRUNCATE
    assert tmp_path not in rules
