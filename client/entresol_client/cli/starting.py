"""`entresol`, as it is started: nothing of ours is imported before Ctrl-C is one line."""

import sys


def main() -> int:
    """Run the command; returns its exit status."""
    try:
        from entresol_client.cli.main import main as command

        return command()
    except KeyboardInterrupt:  # while it was imported or told its arguments
        print("entresol: interrupted", file=sys.stderr)
        return 130
