"""`python -m entresol_client.demo`: the same as `entresol demo`."""

from __future__ import annotations

import sys

from entresol_client.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
