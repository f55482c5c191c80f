"""Peers that do the same work in the same run, each in an environment of its own."""
