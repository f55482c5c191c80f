"""The demo's own parts: a small real decoder, its tokenizer and a real document, numpy only.

Invariant: nothing here is imported by the client's data path; the demo depends on the client, never
the other way round.
"""
