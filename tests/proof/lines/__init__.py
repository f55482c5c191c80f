"""One module per line of the scorecard, or per family of lines: each has `LINES`."""
