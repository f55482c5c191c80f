"""The fabric contract on real queue pairs: every test of the suite, over one rail and over two.

Two rails run on one kind of event loop (see conftest): what they add does not depend on it.
"""

from __future__ import annotations

import pytest
from fabrics import FABRICS, Fabric
from test_fabric_contract import *  # noqa: F403 - its tests are ours to run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["verbs", "verbs-2-rails"])
def fabric(request: pytest.FixtureRequest) -> Fabric:
    """In place of the contract's own, which has all fabrics."""
    found = FABRICS[request.param]
    if found.missing is not None:
        pytest.skip(f"not run here: {found.missing}")
    return found
