"""Which versions of vLLM our tests ran against; imports nothing, so that anyone may ask.

Invariant: a version is named here only while the suite in tests/engines/vllm runs against it, or
its interface was compared with that one's field by field (`COMPARED`).
"""

from __future__ import annotations

TESTED = ("0.32.0", "0.33.0")
COMPARED = ("0.27.1", "0.29.0", "0.31.0")


def told_apart(version: str) -> str:
    """Why `version` deserves a warning; empty when it was tested."""
    plain = version.split("+")[0]
    if plain in TESTED:
        return ""
    tested = ", ".join(TESTED)
    if plain in COMPARED:
        return f"only read and compared; tested with {tested}"
    return f"tested with {tested}"
