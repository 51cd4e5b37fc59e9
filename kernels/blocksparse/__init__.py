"""Attention that skips what no query sees: windows, chunks, prefixes, documents. `native.py` defines it."""
