"""The proof suite: every line of the scorecard, at three sizes, in one table."""

import sys
from pathlib import Path

# As pytest does: the labs of `tests/daemon` import `harness`, `certs` and `leaks` from here.
sys.path.append(str(Path(__file__).resolve().parents[1]))
