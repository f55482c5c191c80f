"""A whole life of the package under a real systemd: `python -m tests.deploy`.

A root file system is made of Debian's packages, systemd runs in it as process 1 in namespaces of
its own, and the package is installed, started, killed, upgraded, removed and purged there. What
such a machine cannot apply is found out and printed, never assumed.
"""
