"""How big a tier has to be, how long its drives live, and what it is worth: arithmetic, no I/O.

Invariant: whole numbers of bytes stay whole until they are shown; every number that is neither
given by the caller nor follows from a model's configuration is a named assumption that can be
changed.
"""
