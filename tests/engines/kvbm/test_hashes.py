"""The hashes that KVBM itself publishes for what it stores, and ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from entresol_client.engines.kvbm_hash import KeyChain, kvbm_hash_of
from tests.engines.kvbm.engine import build_fake_cuda, kvbm_env
from tests.engines.kvbm.publish import BLOCK_TOKENS

SECONDS_MAX = 240.0
TOKENS = list(range(1000, 1064))
PUBLISHED = [
    1845253123029646477,
    3294850137691938561,
    15035333454308340348,
    11213546252473844740,
]


def test_hashes_are_those_that_kvbm_publishes(tmp_path: Path) -> None:
    """Plain, salted and with an adapter's name: the salt's JSON is KVBM's too."""
    requests: list[dict[str, Any]] = [
        {"tokens": [*TOKENS, 7]},
        {"tokens": [*TOKENS, 7], "salt": 'a salt, "quoted" ü'},
        {"tokens": [*TOKENS, 7], "lora_name": "adapter"},
        {"tokens": [*TOKENS, 7], "salt": "s", "lora_name": "adapter"},
        {"tokens": [2**32 - 1 - one for one in range(99)]},
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.kvbm.publish", json.dumps({"requests": requests})],
        env={**os.environ, **kvbm_env(build_fake_cuda(tmp_path), 64)}, capture_output=True,
        text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    published = json.loads(done.stdout.splitlines()[-1])["hashes"]
    assert published[0] == PUBLISHED
    for request, hashes in zip(requests, published, strict=True):
        chain = KeyChain(BLOCK_TOKENS, request.get("salt"), request.get("lora_name"))
        chain.extend(request["tokens"])
        assert [kvbm_hash_of(key) for key in chain.keys] == hashes, request
