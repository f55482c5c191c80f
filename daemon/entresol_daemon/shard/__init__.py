"""One shard: the hands around the brain. Sessions come in, flash and fabrics go out."""
