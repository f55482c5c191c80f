"""Progress of the demo on standard error: one live line on a terminal, else a line now and then.

Invariant: standard output is never touched, and nothing is printed that was not measured.
"""

from __future__ import annotations

import shutil
import time
from typing import TextIO

LIVE_SECONDS = 0.1  # between two redraws
PLAIN_SECONDS = 2.0  # between two lines where there is no terminal


class Progress:
    """Numbered steps with the elapsed time."""

    def __init__(self, stream: TextIO, *, live: bool | None = None) -> None:
        self._stream = stream
        self._live = stream.isatty() if live is None else live
        self._began_s = time.monotonic()
        self._steps = 0
        self._step = 0
        self._title = ""
        self._shown_s = 0.0
        self._drawn = False

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._began_s

    def begin(self, steps: int, headline: str) -> None:
        """Say what follows and in how many steps."""
        self._steps = steps
        self._print(headline)

    def step(self, title: str) -> None:
        """Begin the next step."""
        self._step += 1
        self._title = title
        self._shown_s = time.monotonic()
        if self._live:
            self._draw(self._line(""))

    def update(self, text: str) -> None:
        """What the step is at. Cheap to call often."""
        now_s = time.monotonic()
        if now_s - self._shown_s < (LIVE_SECONDS if self._live else PLAIN_SECONDS):
            return
        self._shown_s = now_s
        if self._live:
            self._draw(self._line(text))
        else:
            self._print(self._line(text))

    def done(self, text: str) -> None:
        """The step's outcome; its line stays."""
        self._print(self._line(text))

    def leave(self) -> None:
        """End a live line, so that what is printed next has its own."""
        if self._drawn:
            self._drawn = False
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, text: str) -> str:
        head = f"[{self._step}/{self._steps} {self.elapsed_s:5.1f} s] {self._title}"
        return f"{head}: {text}" if text else head

    def _draw(self, text: str) -> None:
        width = max(20, shutil.get_terminal_size().columns - 1)
        self._stream.write("\r\x1b[K" + text[:width])
        self._stream.flush()
        self._drawn = True

    def _print(self, text: str) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._drawn = False
        self._stream.write(text + "\n")
        self._stream.flush()
