"""The web page at `/`: one file with everything in it, and the policy that lets nothing else run.

Invariant: the page loads nothing from anywhere but `overview.json` beside it; its one script and
one style are named by their hashes, so that not even a mistake of the page's own could run
anything else. It writes text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, slots=True)
class Page:
    """The bytes to serve, and the headers that go with them."""

    body: bytes
    headers: tuple[str, ...]


def load() -> Page:
    """Read the page. Raises: OSError where the package is not whole."""
    body = FILE.read_bytes()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(body, b'script')}",
            f"style-src {_hash(body, b'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(
        body,
        (
            f"Content-Security-Policy: {policy}",
            "Referrer-Policy: no-referrer",
            "X-Frame-Options: DENY",
            "Cross-Origin-Resource-Policy: same-origin",
        ),
    )


def _hash(body: bytes, tag: bytes) -> str:
    """Of the only element of that kind, as CSP wants it (w3.org/TR/CSP3, hash-source)."""
    found = re.findall(rb"<" + tag + rb">(.*?)</" + tag + rb">", body, re.S)
    assert len(found) == 1, "one script, one style"
    digest = base64.b64encode(hashlib.sha256(found[0]).digest()).decode()
    return f"'sha256-{digest}'"
