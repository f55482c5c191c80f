"""Request traces through the daemon's own admission and eviction: what `entresol replay` runs.

Invariant: decides nothing. Who pays, which segment goes, what is kept and what is admitted are
asked of `core`, with the same calls as the running daemon's; only flash is a model: equal blocks.
"""
