"""The settings written out for people: CONFIG.md and `entresold --print-config`.

Invariant: both come from the declarations in `config`, so neither can fall behind them.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from entresol_daemon.config import Config
from entresol_daemon.config_values import Setting, format_number, settings_of

_INTRO = """\
# Settings of the daemon

`entresold --config FILE` reads one TOML file. A setting that is not in this list refuses to start
and names the nearest one that is. Sizes are bytes or texts such as `64MiB`, `1GiB`, `100GB`
(decimal; `100G` is GiB); durations are texts such as `250ms`, `10s`, `2h` (a bare number is
nanoseconds). Relative paths are taken from the folder of the file. This page is written by
`python -m entresol_daemon.config_reference`, and a test compares it with the code.
"""


def _shown(value: Any, about: Setting) -> str:
    """A value as it would stand in the TOML file; empty for a setting that is left out."""
    if value is None:
        return ""
    if about.kind == "bool":
        return "true" if value else "false"
    if about.kind in ("int", "float", "size", "duration"):
        text = format_number(value, about.kind)
        return text if text.lstrip("-").replace(".", "").isdigit() else f'"{text}"'
    if about.kind == "list":
        return "[" + ", ".join(quoted(item) for item in value) + "]"
    return quoted(str(value))


def quoted(text: str) -> str:
    """As a text of TOML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else _escaped(c) for c in escaped) + '"'


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 1 << 16 else f"\\U{ord(char):08x}"


def _range(about: Setting) -> str:
    if about.choices:
        return ", ".join(about.choices)
    low, high = (
        "" if bound is None else format_number(bound, about.kind)
        for bound in (about.low, about.high)
    )
    if low and high:
        return f"{low} to {high}"
    return f"from {low}" if low else f"up to {high}" if high else ""


def reference_markdown() -> str:
    """The whole of CONFIG.md."""
    parts = [_INTRO]
    config = Config()
    for section in fields(config):
        values = getattr(config, section.name)
        doc = " ".join((type(values).__doc__ or "").split())
        parts.append(f"\n## [{section.name}]\n\n{doc}\n")
        parts.append("| Setting | Kind | Default | Allowed | What it is |\n|---|---|---|---|---|")
        for item, about in settings_of(values):
            default = _shown(getattr(values, item.name), about)
            default = f"`{default}`" if default else "not set"
            parts.append(
                f"| `{item.name}` | {about.kind} | {default} | {_range(about)} | {about.doc} |"
            )
    return "\n".join(parts) + "\n"


def to_toml(config: Config, *, comments: bool = True) -> str:
    """The configuration as TOML that reads back to the same tree; unset ones are comments."""
    lines: list[str] = []
    for section in fields(config):
        values = getattr(config, section.name)
        lines += [f"[{section.name}]"]
        for item, about in settings_of(values):
            if comments:
                lines.append(f"# {about.doc}")
            shown = _shown(getattr(values, item.name), about)
            lines.append(f"{item.name} = {shown}" if shown else f"# {item.name} =")
        lines.append("")
    return "\n".join(lines)


def reference_path() -> Path:
    """Where CONFIG.md lies in a source checkout."""
    return Path(__file__).resolve().parents[1] / "CONFIG.md"


if __name__ == "__main__":
    reference_path().write_text(reference_markdown())
