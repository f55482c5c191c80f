"""What daemon and host must agree on: ids, status, wire frames, sealed blocks, codecs, fabrics.

This package depends on neither side; both sides depend on it.
"""

__version__ = "0.1.0"
