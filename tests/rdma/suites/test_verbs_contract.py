"""The fabric contract on real queue pairs: every test of the suite, over one rail and over two.

Two rails run on one kind of event loop (see conftest): what they add does not depend on it.
"""

from __future__ import annotations

import pytest
from fabrics import FABRICS, Fabric
from test_fabric_contract import *  # noqa: F403 - its tests are ours to run

from entresol_proto import limits

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["verbs", "verbs-2-rails"])
def fabric(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """In place of the contract's own, which has all fabrics."""
    # No test here is about a peer that lets this pass; on a busy host an emulated one may.
    monkeypatch.setattr(limits, "REVOKE_DEADLINE_NS", 10_000_000_000)
    found = FABRICS[request.param]
    if found.missing is not None:
        pytest.skip(f"not run here: {found.missing}")
    return found
