"""The proof suite: every line of the scorecard, at three sizes, in one table."""
