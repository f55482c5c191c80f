"""Tests against real inference engines, each in an environment with its own pinned packages.

The plain `pytest` collects nothing here: `python -m tests.engines` builds the environments and runs
the suites in them. It needs a package index and the standard library only.
"""
