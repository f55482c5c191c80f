"""A pytest plugin for emulated processors: hypothesis may take its time.

What a test asks of it stays as it is; only that generating examples is slow is no failure here.
What the emulator itself gets wrong in user mode is not run, and says so.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

USER_MODE_ENV = "ENTRESOL_EMULATED_USER_MODE"  # set by whoever runs under QEMU's user mode
WRONG_IN_USER_MODE = {
    "test_a_wrong_number_of_descriptors_ends_the_session_and_leaks_none[{}-{}]".format(*case): (
        "QEMU's user mode hands over more descriptors than a message's buffer has room for"
    )
    for case in (("uvloop", "two"), ("asyncio", "two"), ("uvloop", "many"), ("asyncio", "many"))
}

settings.register_profile(
    "emulated", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("emulated")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what only the emulator would fail."""
    if not os.environ.get(USER_MODE_ENV):
        return
    for item in items:
        reason = WRONG_IN_USER_MODE.get(item.name)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"not run here: {reason}"))
