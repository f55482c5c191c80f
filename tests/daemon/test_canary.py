"""The search that the proof's line S7 rests on finds what is there.

What a tenant stores is looked for in logs, metrics, events, files, memory and a core file by that
line (`python -m tests.proof run --line S7`); markers and uses are in `canary_lab`.
"""

from __future__ import annotations

from pathlib import Path

from canary_lab import MARKERS, search

from entresol_proto.limits import MIB


def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    """A canary that cannot sing would prove nothing."""
    path = tmp_path / "file"
    for what, marker in MARKERS.items():
        path.write_bytes(bytes(8 * MIB - 5) + marker + bytes(100))
        assert search(path) == [what]
        assert search(path, what) == []
