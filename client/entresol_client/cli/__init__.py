"""The `entresol` command: everything a person types to a running daemon."""
