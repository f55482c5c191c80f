"""Sealing: compress, then encrypt, one block at a time. Format: proto/FORMAT.md, "Sealed block"."""
