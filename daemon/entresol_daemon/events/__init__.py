"""What happened to which block: the sequenced event log, its consumers, a mirror built from it."""
