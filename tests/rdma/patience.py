"""A pytest plugin for emulated processors: hypothesis may take its time.

What a test asks of it stays as it is; only that generating examples is slow is no failure here.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "emulated", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("emulated")
